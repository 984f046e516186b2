"""Values of constants in the code of a model without weights: the tracer creates them on the meta device, without values.

Captured again on fake tensors of the CPU, which take no memory, the constants have their values.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from retrofit.errors import CaptureError
from retrofit.program.aten_ops import SELECTION, op
from retrofit.program.capture import capture
from retrofit.program.program import Program


def with_constant_values(program: Program, model: nn.Module) -> Program:
    """`program` with the values of the constants it indexes by, where `model` can also be captured on the CPU."""
    names = {name for node, name in program.constants.items() if any(op(user) in SELECTION for user in node.users)}
    if not any(program.values[name].is_meta for name in names & program.values.keys()):
        return program
    given = {name: node.meta["val"] for node, name in program.inputs.items()}
    inputs = {name: torch.ones(one.shape, dtype=one.dtype) for name, one in given.items() if isinstance(one, Tensor)}
    try:
        again = capture(on_fake_cpu(model), inputs)
    except CaptureError:
        return program
    found = {name: value for name, value in again.values.items() if name in names and not value.is_meta}
    return dataclasses.replace(program, values=program.values | found)


def on_fake_cpu(model: nn.Module) -> nn.Module:
    """A copy of a model without weights whose weights are fake tensors on the CPU."""
    twin = copy.deepcopy(model)
    made: dict[int, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in twin.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        empty = torch.empty_like(tensor, device="cpu")
                        fake = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                        table[name] = made.setdefault(id(tensor), fake)  # type: ignore[assignment]
    return twin
