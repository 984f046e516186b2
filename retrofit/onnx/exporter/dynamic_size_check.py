"""How far a traced program holds beyond the sizes it was traced with.

A tracer records what it assumed about the dynamic sizes: its guards. Where one of them fails at other sizes, the model's
code took a branch, or went through a loop so many times, that is right for some sizes only. A guard may also be idle, and the model
itself may end there (a table of positions). So the program is run at the first such size, and held against the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from retrofit.errors import CaptureError
from retrofit.onnx.exporter.export_part import LENGTH, PAST, PER, TOTAL, ExportPart, Sizes
from retrofit.runtime.probes import distance, tolerance_of

LARGEST = 2**13  # sizes that are looked at
Axes = Mapping[str, Mapping[int, str]]
Shapes = dict[str, list[int]]


def check_every_size(exported: torch.export.ExportedProgram, part: ExportPart, example: Mapping[str, Tensor], axes: Axes) -> None:
    """Raises `CaptureError` where the program computes something else than the model where a guard of the tracer fails."""
    for size, extent in guard_boundaries(exported, part.sizes, example, axes):
        try:
            inputs = part.example({**part.sizes, size: extent}, 5)
            results = run_without_guards(exported, inputs)
            with torch.no_grad():
                expected = part(inputs)
        except Exception:  # the model does not run either, or a table ends there
            continue
        if results is None or any(
            distance(one, other) > 10 * tolerance_of(other) for one, other in zip(results, expected, strict=True)
        ):
            raise CaptureError(
                f"the {size} is not dynamic: at {extent} the model's code takes another path than at {part.sizes[size]}",
                why="it was traced with the latter; a loop over pieces of the sequence is such code, or a choice by its length",
                remedy="rewrite that code without the loop or the choice; a decoder may be exported with its cache (cache=past)",
            )


def run_without_guards(exported: torch.export.ExportedProgram, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...] | None:
    """What the program, its guards left out, makes of the inputs, None where it cannot; raises where a table ends before them."""
    ranges = exported._range_constraints
    exported._range_constraints = {}
    try:
        with torch.no_grad():
            found: tuple[Tensor, ...] = exported.module(check_guards=False)(dict(inputs))
    except Exception as error:
        if "out of range" in str(error):  # which a file says as well
            raise
        return None
    finally:
        exported._range_constraints = ranges
    return found


def guard_boundaries(
    exported: torch.export.ExportedProgram, traced: Sizes, example: Mapping[str, Tensor], axes: Axes
) -> list[tuple[str, int]]:
    """Where the guards stop holding: a dynamic size, and the first extent above or below the traced one at which one fails."""
    now = {name: list(value.shape) for name, value in example.items()}
    guards = [guard for guard in map(compile_guard, getattr(exported, "_guards_code", None) or []) if guard(now)]
    found = set()
    for size, extent in traced.items():
        at = functools.cache(lambda other, size=size: shapes_at(now, axes, traced, {size: other}))  # type: ignore[misc]
        above = [extent + 2**step for step in range(LARGEST.bit_length())]
        below = [max(0 if size == PAST else 1, extent - 2**step) for step in range(extent.bit_length() + 1)]
        for guard, tried in itertools.product(guards, (above, below)):
            broken = next((place for place, other in enumerate(tried) if not guard(at(other))), None)
            if broken is not None:
                kept, lost = tried[broken - 1] if broken else extent, tried[broken]
                while abs(lost - kept) > 1:
                    middle = (kept + lost) // 2
                    kept, lost = (middle, lost) if guard(at(middle)) else (kept, middle)
                found.add((size, lost))
    return sorted(found)


def shapes_at(now: Shapes, axes: Axes, traced: Sizes, other: Sizes) -> Shapes:
    """The shapes of the inputs, which are `now` with the sizes as traced, at other sizes."""
    sizes = {**traced, **other}

    def more(size: str) -> int:
        if size == TOTAL:
            return more(LENGTH) + more(PAST)
        whole, _, every = size.partition(PER)
        step = int(every or 1)
        return -(-sizes[whole] // step) + traced[whole] // -step if whole in sizes else 0

    found = {name: list(shape) for name, shape in now.items()}
    for name, dynamic in axes.items():
        for axis, size in dynamic.items():
            found[name][axis] += more(size)
    return found


def compile_guard(guard: str) -> Callable[[Shapes], bool]:
    """Whether the guard, an expression in `L['inputs'][name].size()[axis]`, holds for shapes; true where it is of another kind."""
    code = compile(guard, "<guard>", "eval")

    def holds(shapes: Shapes) -> bool:
        inputs = {name: ShapeOnly(shape) for name, shape in shapes.items()}
        try:
            return bool(eval(code, {"__builtins__": {"max": max, "min": min, "abs": abs}, "L": {"inputs": inputs}}))
        except Exception:
            return True

    return holds


class ShapeOnly:
    """Something of this shape."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = shape

    def size(self) -> list[int]:
        return self.shape
