"""The inputs of an ONNX file: which are states of earlier tokens, and examples of all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retrofit.errors import CaptureError
from retrofit.inputs.example_inputs import BATCH, LENGTH, TARGET_LENGTH
from retrofit.onnx.importer.operators.table import DTYPES
from retrofit.onnx.importer.weights import Weights, argument_name

if TYPE_CHECKING:
    import onnx_ir

PAST_PREFIX, PRESENT_PREFIX = "past", "present"  # of the inputs that hold what earlier tokens left, and of the outputs that do
MASK_WORD, POSITION_WORD = "mask", "position"  # in the names of inputs that say what is padding, and where tokens are
IMAGE_RANK, PIXELS, STRIDE = 4, 8, 32  # of images: about as many pixels a token, and what their extents are multiples of
ID_OPERATORS = frozenset("Cast Reshape Identity Squeeze Unsqueeze Clip Where Add Mul Sub".split())  # between ids and their table


def is_state_input(value: onnx_ir.Value) -> bool:
    return str(value.name).startswith(PAST_PREFIX)


def state_key(value: onnx_ir.Value) -> str:
    """Return what a state is called both as an input and as an output."""
    return re.sub(r"^(past_key_values|past|present)", "", str(value.name))


def only_selects_a_branch(value: onnx_ir.Value) -> bool:
    """Return whether all that an input does is to select the branch of an `If`."""
    users = value.consumers()
    return bool(users) and not value.is_graph_output() and all(node.op_type == "If" and node.inputs[0] is value for node in users)


def refuse_odd_inputs(inputs: Sequence[onnx_ir.Value], path: Path) -> None:
    """Raises `CaptureError` for an input that is no tensor of numbers, and for two that would be one argument."""
    for value in inputs:
        if value.dtype not in DTYPES:
            raise CaptureError(
                f"{path}: the input {value.name} is no tensor of numbers",
                why=f"its type is {getattr(value.dtype, 'name', 'not given')}",
                remedy="export the model without it",
            )
    refuse_same_names("inputs", inputs, path)


def refuse_same_names(what: str, values: Sequence[onnx_ir.Value], path: Path) -> None:
    """Raises `CaptureError` where two of the inputs, or outputs, would be one argument, or one entry of the result."""
    by_name: dict[str, str] = {}
    for value in values:
        name = argument_name(str(value.name))
        if name in by_name:
            raise CaptureError(
                f"{path} has two {what} of one name",
                why=f"{by_name[name]} and {value.name} are both called {name}",
                remedy="export it with other names",
            )
        by_name[name] = str(value.name)


def file_examples(inputs: Sequence[onnx_ir.Value], weights: Weights, batch: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    """Return an example of each input by argument: ids that its table has, masks of ones, counted positions, noise elsewhere."""
    generator = torch.Generator().manual_seed(0)
    examples = {}
    shapes = example_shapes(inputs, batch, length)
    past = TARGET_LENGTH if any(map(is_state_input, inputs)) else 0
    for value in inputs:
        name, dtype, shape = str(value.name), DTYPES[value.dtype], shapes[value]  # type: ignore[index]
        if dtype.is_floating_point and MASK_WORD not in name:
            example = torch.randn(shape, generator=generator).to(dtype)
        elif MASK_WORD in name:
            example = torch.ones(shape, dtype=dtype)
        elif POSITION_WORD in name:
            example = (past + torch.arange(shape[-1])).expand(shape).contiguous().to(dtype)
        else:
            example = torch.randint(table_rows(value, weights), shape, generator=generator).to(dtype)
        examples[argument_name(name)] = example
    return examples


def example_shapes(inputs: Sequence[onnx_ir.Value], batch: int, length: int) -> dict[onnx_ir.Value, tuple[int, ...]]:
    """Return the shape of an example of each input; where there are states, masks cover these and the tokens after them."""
    shapes: dict[onnx_ir.Value, tuple[int, ...]] = {}
    symbols: dict[str, int] = {}
    states = any(map(is_state_input, inputs))
    for value in sorted(inputs, key=lambda value: (MASK_WORD in str(value.name), is_state_input(value))):
        extent = min(TARGET_LENGTH, length) if str(value.name).startswith("decoder_") else length
        if states and (is_state_input(value) or MASK_WORD in str(value.name)):
            extent = TARGET_LENGTH if is_state_input(value) else TARGET_LENGTH + length
        shape = list(value.shape or ())
        dynamic = [axis for axis, dim in enumerate(shape) if not isinstance(dim, int) or dim < 1]
        if len(shape) == IMAGE_RANK and DTYPES[value.dtype].is_floating_point and not is_state_input(value):  # type: ignore[index]
            extent = -(-length * PIXELS // STRIDE) * STRIDE
        for at, axis in enumerate(dynamic):
            symbol = str(getattr(shape[axis], "value", None) or "")
            shape[axis] = extent if at else batch
            if at and states:
                part = re.search(r"_per_(\d+)$", symbol)  # a part of another extent, rounded up
                own = -(-extent // int(part[1])) if part else extent
                shape[axis] = symbols.setdefault(symbol, own) if symbol else own
        shapes[value] = tuple(map(int, shape))  # type: ignore[arg-type]
    return shapes


def table_rows(ids: onnx_ir.Value, weights: Weights) -> int:
    """Return how many rows the table has that the input looks up; 1 where it looks up none."""
    reached, rows = [ids], 0
    for followed in reached:
        for reader in followed.consumers():
            if reader.op_type == "Gather" and reader.inputs[1] is followed and weights.is_matrix(reader.inputs[0]):
                rows = max(rows, weights.shape(reader.inputs[0])[0])  # type: ignore[arg-type]
            elif reader.op_type == "EmbedLayerNormalization" and reader.inputs[0] is followed:
                rows = max(rows, weights.shape(reader.inputs[2])[0])  # type: ignore[arg-type]
            elif reader.op_type in ID_OPERATORS:
                reached.extend(output for output in reader.outputs if output not in reached)
    return max(rows, 1)
