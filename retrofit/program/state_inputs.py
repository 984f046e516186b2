"""Inputs that are states of earlier tokens, where no cache object stores them: the model takes them and returns them longer."""

from __future__ import annotations

from torch import fx

from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import CAST, JOIN, LAYOUT, SELECTION, op
from retrofit.program.program import Program


def state_inputs(program: Program) -> list[str]:
    """The inputs that an output extends: it is such an input joined with more, and nothing else."""
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
    """Raises `DoesNotFitError` where the model takes states; `name` is the pass whose layers need more of earlier tokens."""
    if found := state_inputs(program):
        raise DoesNotFitError(
            f"{name}: the model takes the states of earlier tokens as inputs, such as {found[0]}",
            why="what the rewritten layers need of earlier tokens has no place among them",
            remedy="rewrite the model of whole sequences, which from_onnx(path, cache='none') gives, or use another pass",
        )
