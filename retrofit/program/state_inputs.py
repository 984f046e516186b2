"""Inputs that a model goes on from and hands on longer: states of earlier tokens, where no cache object keeps them."""

from __future__ import annotations

from torch import fx

from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import CAST, JOIN, LAYOUT, SELECTION, op
from retrofit.program.program import Program


def state_inputs(program: Program) -> list[str]:
    """The inputs of which an output is a longer one: joined with more, and nothing else done to them."""
    found: list[str] = []
    for output in program.outputs.values():
        pending: list[tuple[fx.Node, bool]] = [(output, False)]
        while pending:
            node, joined = pending.pop()
            if joined and node in program.inputs:
                found.append(program.inputs[node])
            elif op(node) in LAYOUT | CAST | SELECTION | JOIN | {"getitem"}:
                pending += [(part, joined or op(node) in JOIN) for part in node.all_input_nodes]
    return list(dict.fromkeys(found))


def refuse_state_inputs(program: Program, name: str) -> None:
    """Raises `DoesNotFitError` where the model goes on from states; `name` is the pass whose layers have to remember more."""
    if found := state_inputs(program):
        raise DoesNotFitError(
            f"{name}: the model takes the states of earlier tokens as inputs, such as {found[0]}",
            why="what the rewritten layers have to remember of earlier tokens has no place among them",
            remedy="rewrite the model of whole sequences, which from_onnx(path, cache='none') gives, or use another pass",
        )
