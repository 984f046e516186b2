"""Which module call a node was traced in, by `nn_module_stack`: the stack of modules that the tracer writes to each node."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import fx

from retrofit.program.program import Call

SLICED = re.compile(r"slice\((None|\d+), (?:None|-?\d+), (None|\d+)\)\.(\d+)")


def calls_from_metadata(exported: torch.export.ExportedProgram) -> list[Call]:
    """The module calls in the metadata of an exported program, without inputs and outputs, which it does not hold."""
    calls = {("", 0): Call("", 0, 0, None)}
    for node in exported.graph.nodes:
        parent = calls["", 0]
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            place = (path, int(key.partition("@")[2] or 0))
            parent = calls.setdefault(place, Call(*place, len(calls), parent))
    return list(calls.values())


def innermost_call(node: fx.Node, by_path: Mapping[tuple[str, int], Call], root: Call) -> Call:
    """The call a node was traced in, by its module stack."""
    call = base = root
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        path, index = without_slices(path), int(key.partition("@")[2] or 0)
        found = by_path.get((path, index))
        if found is not None:
            call = base = found
        else:
            call = call_below(path, index, base, by_path) or call
    return call


def call_below(path: str, index: int, base: Call, by_path: Mapping[tuple[str, int], Call]) -> Call | None:
    """The call of the module at `path` below the module of `base`, perhaps inside a wrapper; None where there is none.

    Where some module has two names, the tracer restarts its paths at a module that the code did not reach by its name. Its call
    counter, `index`, then belongs either to the module or to the one where the path restarted.
    """
    for around in ("", "layer.", "layer.layer."):
        for count in (index, base.index):
            found = by_path.get((f"{base.path}.{around}{path}", count))
            if base.path and found is not None and base.encloses(found):
                return found
    return None


def without_slices(path: str) -> str:
    """The module's own path, `layers.1`, for one that goes through a slice of a module list, `layers.slice(None, 4, None).1`.

    Where some module has two names, the tracer records the expression by which each was reached.
    """
    return SLICED.sub(lambda found: str(slice_bound(found[1], 0) + slice_bound(found[2], 1) * int(found[3])), path)


def slice_bound(text: str, otherwise: int) -> int:
    """A start or step as it is written in a slice, with its default."""
    return otherwise if text == "None" else int(text)
