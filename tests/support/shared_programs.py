"""Programs of models that are equal to the last attribute are captured once in a process: a capture takes most of a test's time.

Models of transformers' and torch's own modules alone are shared, never one that was rewritten, and only where everything that the
model holds can be described. The description is the key: classes, attributes, configs, hooks, which tensors are one, the shapes of
parameters and the values of all other tensors.
"""

from __future__ import annotations

import hashlib
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from retrofit.program import capture
from retrofit.program.program import Program

LIBRARIES = ("torch.nn.", "transformers.")
IMPLEMENTATIONS = (None, "eager", "sdpa", "grouped_mm", "batched_mm")  # of attention and experts; a test may give others any code
UNREAD = {  # by any forward
    *("quantization_config", "_name_or_path", "name_or_path", "_is_hf_initialized", "generation_config"),
    *("architectures", "transformers_version", "retrofit_provenance"),
}
NUMBER = 80  # programs are kept, those used last
PLAIN = (str, bytes, int, float, complex, type(None), type(...), torch.dtype, torch.device, torch.Size, slice, range)

programs: OrderedDict[str, tuple[Program, str]] = OrderedDict()  # by key, each with its text
original, torch_export = capture.captured, torch.export.export


def exporter(*given: Any, dynamic_shapes: Any = None, **how: Any) -> Any:
    """`torch.export.export`, which keeps no results of operations on dynamic sizes: in two layers hardly any comes again."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=dynamic_shapes is None):
        return torch_export(*given, dynamic_shapes=dynamic_shapes, **how)


def share(on: bool, quick: bool) -> None:
    """From now on programs are shared, or no longer; where it is `quick`, those with dynamic sizes are exported by `exporter`."""
    capture.captured, torch.export.export = captured if on else original, exporter if quick else torch_export


class UnknownError(Exception):
    """A model holds what has no description."""


def captured(model: nn.Module, inputs: dict[str, Any], dynamic: bool) -> Program:
    """`capture.captured`, or the program that it returned for an equal model; the test fails where that has changed."""
    try:
        key = "" if dynamic or torch.export.export is not exporter else key_of(model, inputs)
    except UnknownError:
        key = ""
    if not key:
        return original(model, inputs, dynamic)
    if key not in programs:
        program = original(model, inputs, dynamic)
        programs[key] = program, str(program.graph)
        if len(programs) > NUMBER:
            programs.popitem(last=False)
    programs.move_to_end(key)
    program, text = programs[key]
    if str(program.graph) != text:
        pytest.fail("a captured program was changed")  # no exception that code under test might take for a refusal
    return program


def key_of(model: nn.Module, inputs: dict[str, Any]) -> str:
    """A digest of all that a trace of the model on the inputs may depend on; raises `UnknownError` where that is not known."""
    if not all(type(module).__module__.startswith(LIBRARIES) for module in model.modules()):
        raise UnknownError
    modes = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    return hashlib.sha256(repr(described((model, inputs, modes), {})).encode()).hexdigest()


def described(value: Any, met: dict[int, int]) -> Any:
    """Return what has another `repr` wherever a trace might differ; an object that was met is its number."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = f"{value.__module__}.{value.__qualname__}"
        if "<" in name:
            raise UnknownError
        return name
    if id(value) in met:
        return f"#{met[id(value)]}"
    met[id(value)] = len(met)
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise UnknownError
        about = type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        return about, () if isinstance(value, nn.Parameter) or value.is_meta else value.tolist(), described(vars(value), met)
    if isinstance(value, dict):
        return type(value), [(described(key, met), described(held, met)) for key, held in value.items() if key not in UNREAD]
    if isinstance(value, (list, tuple)):
        return type(value), [described(held, met) for held in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(described(held, met)) for held in value)
    if hasattr(value, "__dict__") and not hasattr(type(value), "__slots__") and not isinstance(value, types.ModuleType):
        held = vars(value)
        if any(held.get(f"_{what}_implementation") not in IMPLEMENTATIONS for what in ("attn", "experts")):
            raise UnknownError
        kind = type(value)
        return described(kind, met), described(getattr(kind, "forward", None), met), described(held, met)  # a test may patch it
    raise UnknownError
