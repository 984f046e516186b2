"""One of two ways to compute the same, chosen by the sizes of what comes in; an ONNX program keeps both and chooses as it runs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def is_exporting() -> bool:
    """Whether an exporter records this call: while torch 2.11 compiles it says so too, and its own flag says what is true."""
    return torch.compiler.is_exporting() and bool(getattr(torch.compiler, "_is_exporting_flag", True))


Originals = Sequence[tuple[Any, str, Any]]  # owner, attribute, value

KEPT: contextvars.ContextVar[Originals | None] = contextvars.ContextVar("kept", default=None)


def cond(
    condition: bool | torch.SymBool,
    yes: Callable[..., Tensor],
    no: Callable[..., Tensor],
    *operands: Tensor,
    size: Sequence[int | torch.SymInt],
) -> Tensor:
    """`yes(*operands)` where the condition holds, else `no(*operands)`, which must be right for every size of operands.

    Both return a tensor of that `size`. Where a program is exported its sizes may be any: it gets `no` alone, or, within
    `both_kept`, both and the condition.
    """
    if torch.compiler.is_dynamo_compiling() or not is_exporting():
        return yes(*operands) if condition else no(*operands)
    originals = KEPT.get()
    if originals is None or condition is False:
        return no(*operands)
    with as_it_was(originals):
        flat = torch.cond(condition, flattened(yes), flattened(no), operands)  # type: ignore[arg-type]
    return flat.view(size)  # type: ignore[no-any-return]


def holds_one_way() -> bool:
    """Whether a program is exported that holds one way for every size: code that chose by its sizes would bind them."""
    return is_exporting() and KEPT.get() is None


def flattened(branch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The branch, which returns its numbers in a row: the tracer cannot compare strides that several dynamic sizes make."""
    return lambda *operands: branch(*operands).flatten()


@contextlib.contextmanager
def both_kept(originals: Originals = ()) -> Iterator[None]:
    """Within this context exported programs keep both ways; each is traced with these attributes as they originally were."""
    token = KEPT.set(tuple(originals))
    try:
        yield
    finally:
        KEPT.reset(token)


@contextlib.contextmanager
def as_it_was(originals: Originals) -> Iterator[None]:
    """Within this context the attributes have their original values: the tracer of a branch handles torch's own only."""
    now = [(owner, name, getattr(owner, name)) for owner, name, _ in originals]
    try:
        for owner, name, value in originals:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in now:
            setattr(owner, name, value)
