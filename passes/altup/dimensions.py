"""Where one dimension of a value is after an operation, if the operation treats it element by element."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from retrofit.sdk import CAST, DROPOUT, JOIN, LAYOUT, LIKE, MASKING, POINTWISE, SELECTION, op, shape

REDUCTIONS = frozenset("sum mean amax amin max min any all prod var std norm linalg_vector_norm".split())
TESTS = frozenset("isnan isinf isfinite eq ne lt gt le ge logical_and logical_not logical_or".split())
GONE = 0  # the result does not have the dimension


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on a value with the shape `before`, and its dimension `dim`, counted from the end."""

    node: fx.Node
    before: tuple[int, ...]
    out: tuple[int, ...]
    dim: int

    @property
    def index(self) -> int:
        return len(self.before) - self.dim

    @property
    def extent(self) -> int:
        return self.before[self.index]

    def argument(self, position: int, name: str, default: Any) -> Any:
        return self.node.args[position] if len(self.node.args) > position else self.node.kwargs.get(name, default)

    def axes(self, position: int, name: str, default: Any = 0) -> list[int]:
        """The dimensions, counted from the front, that the argument names."""
        given = self.argument(position, name, default)
        return [int(axis) % len(self.before) for axis in (given if isinstance(given, (list, tuple, range)) else [given])]


def dimension_after(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """Where dimension `dim` of the operand `source` is after `node`, from the end: `GONE`, or None where `node` reads across it."""
    before, out, name = shape(source), shape(node), op(node)
    if before is None:
        return dim
    if out is None:  # several results
        step = Step(node, before, (), dim)
        return dim if name == "native_dropout" or step.index not in split_axes(step, name) else None
    step = Step(node, before, out, dim)
    if name in LIKE:
        return dim if name.endswith("_like") and out == before else GONE
    if name in POINTWISE - JOIN or name in TESTS:
        return dim
    rule = RULES.get(name)
    if rule is not None:
        return rule(step)
    if name in CAST | DROPOUT | MASKING:
        return dim
    if name in LAYOUT:
        return same_end(step)
    if name in SELECTION:
        return dim if out[-dim:] == before[-dim:] else None
    return None


def same_end(step: Step) -> int | None:
    """A change of layout that leaves the dimension and all after it as they were."""
    return step.dim if step.out[len(step.out) - step.dim :] == step.before[step.index :] else None


def same_extent(step: Step) -> int | None:
    return step.dim if step.out[-step.dim] == step.extent else None


def after_transpose(step: Step) -> int:
    size = len(step.before)
    first, second = step.axes(1, "dim0", size - 2)[0], step.axes(2, "dim1", size - 1)[0]
    return size - {first: second, second: first}.get(step.index, step.index)


def after_permute(step: Step) -> int:
    return len(step.before) - step.axes(1, "dims").index(step.index)


def after_unsqueeze(step: Step) -> int:
    axis = int(step.argument(1, "dim", 0)) % (len(step.before) + 1)
    return step.dim + (axis > step.index)


def after_squeeze(step: Step) -> int | None:
    if step.extent == 1:
        return None
    axes = step.axes(1, "dim") if len(step.node.args) > 1 else range(len(step.before))
    return step.dim - sum(step.before[axis] == 1 and axis > step.index for axis in axes)


def split_axes(step: Step, name: str) -> list[int]:
    return step.axes(1, "dim") if name == "unbind" else step.axes(2, "dim")


def after_selection_along(position: int) -> Callable[[Step], int | None]:
    """Entries left out along the dimensions that the argument at `position` names."""

    def rule(step: Step) -> int | None:
        return None if step.index in step.axes(position, "dim") and step.before != step.out else step.dim

    return rule


def after_reordering_along(position: int) -> Callable[[Step], int | None]:
    """Entries in another order along the dimensions that the argument at `position` names: all of them where it names none."""

    def rule(step: Step) -> int | None:
        return None if step.index in step.axes(position, "dims", range(len(step.before))) else step.dim

    return rule


def after_select(step: Step) -> int | None:
    (axis,) = step.axes(1, "dim")
    return None if axis == step.index else step.dim - (axis > step.index)


def after_index(step: Step) -> int | None:
    touched = [position for position, pick in enumerate(step.argument(1, "indices", ())) if pick is not None]
    return step.dim if step.index not in touched and step.out[-step.dim] == step.extent else None


def after_put(step: Step) -> int | None:
    """Other rows put in over leading dimensions."""
    return step.dim if step.dim == 1 and step.out == step.before else None


def after_join(step: Step) -> int | None:
    return None if step.index in step.axes(1, "dim") else step.dim


def after_pad(step: Step) -> int | None:
    padding = list(step.argument(1, "pad", ()))
    return None if any(padding[2 * step.dim - 2 : 2 * step.dim]) else step.dim


def after_reduction(step: Step) -> int | None:
    given = step.argument(1, "dim", None)
    if given is None or isinstance(given, fx.Node):
        return GONE if op(step.node) in ("any", "all") else None
    axes = step.axes(1, "dim")
    if step.index in axes:
        return None
    return step.dim if len(step.out) == len(step.before) else step.dim - sum(axis > step.index for axis in axes)


RULES: dict[str, Callable[[Step], int | None]] = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "mT", "numpy_T"), after_transpose),
    **dict.fromkeys(("expand", "expand_as", "detach", "alias", "clone", "contiguous", "getitem"), same_extent),
    **dict.fromkeys(("slice", "narrow"), after_selection_along(1)),
    **dict.fromkeys(("index_select", "flip"), after_reordering_along(1)),
    **dict.fromkeys(("pad", "constant_pad_nd"), after_pad),
    **dict.fromkeys(JOIN, after_join),
    **dict.fromkeys(REDUCTIONS, after_reduction),
    "roll": after_reordering_along(2),
    "permute": after_permute,
    "unsqueeze": after_unsqueeze,
    "squeeze": after_squeeze,
    "select": after_select,
    "index": after_index,
    "index_put": after_put,
    "masked_scatter": after_put,
}
