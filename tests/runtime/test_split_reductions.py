"""Another order of sums, and how many forwards a verification takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import gpt2, llama
from torch import nn

from retrofit.runtime.agreement import Arithmetic
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.probes import distance, logits_of, run
from retrofit.runtime.split_reductions import SplitReductions


@pytest.mark.parametrize("build", [llama, gpt2])
def test_split_sums_are_the_same_function_rounded_otherwise(build: Any) -> None:
    model = build().double()
    plain = logits_of(run(model, named_inputs(model)))
    with SplitReductions():
        split = logits_of(run(model, named_inputs(model)))
    assert 0.0 < distance(split, plain) < 1e-13


def test_split_sums_move_outputs_as_float32_does() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    values = torch.randn(8, 512)
    with torch.no_grad():
        plain, exact = layers(values), layers.double()(values.double())
        layers.float()
        with SplitReductions():
            split = layers(values)
    assert 0.2 < distance(split, plain) / distance(plain, exact) < 5.0


def test_inputs_are_run_once_only_while_remembering() -> None:
    model = llama()
    calls: list[Any] = []
    model.register_forward_pre_hook(lambda *args: calls.append(args))
    arithmetic, inputs = Arithmetic(model, named_inputs(model)), named_inputs(model)
    with arithmetic.remembering():
        first = arithmetic.logits(inputs)
        assert arithmetic.logits({**inputs, "input_ids": inputs["input_ids"].clone()}) is first and len(calls) == 1
        other = arithmetic.logits({**inputs, "input_ids": inputs["input_ids"].flip(0)})
        assert len(calls) == 2 and not torch.equal(first, other)
    arithmetic.logits(inputs)
    assert len(calls) == 3
