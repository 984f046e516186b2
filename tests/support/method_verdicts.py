"""What the method check says of a model, rewritten and not otherwise checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrofit.checks.method import judge_method, measure_method
from retrofit.checks.report import Finding
from retrofit.checks.subject import Context, Subject
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import preserve_state
from retrofit.passbase.calibration import calibration_from
from retrofit.passbase.protocol import parse_spec
from retrofit.passbase.replaying import rewrites
from retrofit.passbase.running import run_passes
from retrofit.provenance import record_provenance
from retrofit.surgery import Edit


def verdict(model: nn.Module, *specs: str, nudge: bool = False, calibration: Any = None) -> Finding:
    """What the check says of the model, rewritten; `nudge` moves its parameters afterwards, as training does."""
    torch.manual_seed(0)
    inputs = named_inputs(model)
    with preserve_state(model):
        before = measure_method(Subject(model, (inputs,)))
    edit = Edit(model, None if calibration is None else calibration_from(model, calibration))
    accounts, _ = run_passes(model, tuple(map(parse_spec, specs)), inputs, edit, lambda stage: None)
    record_provenance(model, rewrites=(*(rewrites(model) or ()), *accounts))
    subject, fates = Subject(model, (inputs,)), edit.account()
    known = {"calibration": edit.calibration, "dense_parameters": edit.dense}
    context = Context(subject, True, accounts, fates, fresh=not nudge, **known)
    if nudge:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    with preserve_state(model):
        return judge_method(measure_method(subject, before, context), before, context)
