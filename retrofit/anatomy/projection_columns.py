"""Which columns of a projection become queries, keys and values: each is followed through all that only moves it.

Three modules may compute q, k and v, or one that lays them out by chunks, by heads or by groups. The numbers of the columns are run
through the graph's own reshapes, transposes and selections, up to the operands of the attention's core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from retrofit.anatomy.attention_cores import Attention
from retrofit.anatomy.attention_sites import LETTERS, REST
from retrofit.anatomy.mask_values import mask_value
from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import CAST, LAYOUT, SELECTION, op, shape
from retrofit.program.dataflow import Dataflow

MOVING = LAYOUT | CAST | SELECTION | {"getitem"}  # operations that only move elements


def column_letters(result: fx.Node, core: Attention, flow: Dataflow) -> list[str]:
    """For each column of a projection's `result` the letters of the operands that it becomes, "" where nothing reads it."""
    size = shape(result) or (0,)
    operands = dict(zip(LETTERS, (core.query, core.key, core.value), strict=True))
    with torch.device("cpu"):
        numbers: dict[fx.Node, Any] = {result: torch.arange(size[-1]).expand(size)}  # of the columns, where each node has them
    reached: list[set[str]] = [set() for _ in range(size[-1])]
    for node in [result, *flow.nodes[flow.position[result] + 1 :]]:
        if node is not result:
            if op(node) not in MOVING or not node.args or node.args[0] not in numbers:
                continue
            numbers[node] = move(node, numbers | index_tensors(node, flow))
        if not isinstance(numbers[node], Tensor):
            continue
        readers = [user for user in flow.uses[node] if op(user) not in MOVING or user.args[0] is not node]
        ends = [user for user in readers if user.op != "output"]
        letters = {letter for letter, operand in operands.items() if operand is node}
        letters |= {letter for end in ends for letter, operand in operands.items() if flow.reaches(end, operand)}
        strays = [end for end in ends if not any(flow.reaches(end, operand) for operand in operands.values())]
        if ends != readers or any(end is not core.result and not is_in_core(end, core, flow) for end in strays):
            letters.add(REST)
        for column in numbers[node].unique().tolist():
            reached[column] |= letters
    return ["".join(letter for letter in LETTERS if letter in one) or "".join(one) for one in reached]


def move(node: fx.Node, numbers: dict[fx.Node, Any]) -> Any:
    """What a node that only moves elements makes of the column numbers of its argument."""
    if op(node) in CAST:
        return numbers[node.args[0]]  # type: ignore[index]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: numbers.get(part, part))
    operation = torch.ops.aten.reshape.default if op(node) == "view" else node.target  # the numbers may have other strides
    return operation(*args, **kwargs)  # type: ignore[operator]


def index_tensors(node: fx.Node, flow: Dataflow) -> dict[fx.Node, Tensor]:
    """The tensors of indices by which a node moves elements; they depend on no input."""
    found = {}
    for part in node.all_input_nodes:
        if part is node.args[0]:
            continue
        value = None if part in flow.depends else mask_value(part, flow)
        if value is None or not has_constant_values(part, flow):
            raise DoesNotFitError(
                "the columns of a projection cannot be told apart",
                why=f"which columns are queries depends on a tensor of indices that is not known ({node.name})",
            )
        found[part] = value
    return found


def has_constant_values(node: fx.Node, flow: Dataflow) -> bool:
    """Whether the constants that a node is computed from have values."""
    names = [
        name for constant, name in flow.program.constants.items() if constant in flow.position and flow.reaches(constant, node)
    ]
    return not any(flow.program.values[name].is_meta for name in names if name in flow.program.values)


def is_in_core(node: fx.Node, core: Attention, flow: Dataflow) -> bool:
    """Whether the node lies between the operands of the core and its result."""
    follows = any(flow.reaches(operand, node) for operand in (core.query, core.key, core.value))
    return follows and flow.reaches(node, core.result)
