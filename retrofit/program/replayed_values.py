"""Data-dependent control flow (`if mask.all()`, `mask.nonzero()`) in a trace: the values of an ordinary run are replayed.

A tracer has no values to branch on. So the model is run once, and every value that Python code reads out of a tensor is recorded
with the line of code that reads it. While the model is traced, each line gets the same values in the same order: the trace holds
the branches that these inputs take. Where what it reads are no values of the inputs, and the same for other sizes (is this mask a
causal one?), these are the branches that all inputs take.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrofit.program.aten_ops import LIKE

QUERIES = ("__bool__", "__int__", "__float__", "__index__", "__format__", "item", "tolist", "nonzero")
TORCH = str(Path(torch.__file__).parent)
TENSOR_TOLIST = Tensor.tolist  # the original, also while queries are intercepted
UNKNOWN = object()  # recorded of a value that is not to be replayed

Line: TypeAlias = tuple[str, int]  # file and number
Recording: TypeAlias = dict[tuple[Line, str], deque[Any]]  # results by line and query, in the order of the calls
Query: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def record_tensor_values() -> Iterator[Recording]:
    """Within this context the result of every query of a tensor's values is recorded."""
    with recording_queries(lambda tensor: False) as recording:
        yield recording


@contextlib.contextmanager
def record_constant_values(inputs: Any) -> Iterator[Recording]:
    """Record values, with `UNKNOWN` for those computed from the inputs or drawn at random, and for all read after such."""
    influence = Influence(inputs)
    with recording_queries(influence.is_read) as recording, influence:
        yield recording


@contextlib.contextmanager
def recording_queries(is_unknown: Callable[[Tensor], bool]) -> Iterator[Recording]:
    recording: Recording = {}

    def record(name: str, original: Query, tensor: Tensor, *more: Any, **how: Any) -> Any:
        result = original(tensor, *more, **how)
        known = UNKNOWN if is_unknown(tensor) else without_tensors(result)
        recording.setdefault((calling_line(), name), deque()).append(known)
        return result

    with intercept_queries(record):
        yield recording


class Influence(TorchDispatchMode):
    """Within this context it is known in which memory lies what is computed from the values of the sources, or drawn at random."""

    def __init__(self, sources: Any) -> None:
        super().__init__()
        self.was_read = False
        self.kept: dict[int, Tensor] = {}  # by memory, which is kept: another tensor may not come to lie there
        self.spread(tree_leaves(sources))

    def spread(self, values: Iterable[Any]) -> None:
        self.kept |= {memory_of(value): value for value in values if isinstance(value, Tensor)}

    def reaches(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self.kept

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether Python code, which reads this tensor, has read such values: its later results may depend on them."""
        self.was_read |= self.reaches(tensor)
        return self.was_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        reached = any(map(self.reaches, given)) and func.overloadpacket.__name__ not in LIKE
        result = func(*args, **kwargs)
        if reached or torch.Tag.nondeterministic_seeded in func.tags:
            self.spread(tree_leaves(result))
            if func._schema.is_mutable:
                self.spread(given)
        return result


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


@contextlib.contextmanager
def replay_tensor_values(recording: Recording) -> Iterator[None]:
    """Within this context queries of fake tensors return what was recorded."""
    left = {call: results.copy() for call, results in recording.items()}

    def replay(name: str, original: Query, tensor: Tensor, *more: Any, **how: Any) -> Any:
        results = left.get((calling_line(), name))
        if is_fake(tensor) and results:
            result = results.popleft()
            return original(tensor, *more, **how) if result is UNKNOWN else as_returned(result, name, tensor)
        if results:  # a tensor outside the trace: its recorded result is skipped
            results.popleft()
        return original(tensor, *more, **how)

    with intercept_queries(replay):
        yield


def calling_line() -> Line:
    """Return the line of code that queries a tensor: the innermost one outside this file and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(TORCH)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def without_tensors(result: Any) -> Any:
    """Return the result with its tensors as lists."""
    if isinstance(result, Tensor):
        return TENSOR_TOLIST(result)
    return tuple(map(without_tensors, result)) if isinstance(result, tuple) else result


def as_returned(result: Any, name: str, tensor: Tensor) -> Any:
    """Return a recorded result in the form that the query returns: indices are tensors."""
    if name != "nonzero":
        return result
    if isinstance(result, tuple):
        return tuple(torch.tensor(index, dtype=torch.int64, device=tensor.device) for index in result)
    return torch.tensor(result, dtype=torch.int64, device=tensor.device).reshape(-1, tensor.dim())


@contextlib.contextmanager
def intercept_queries(handle: Callable[..., Any]) -> Iterator[None]:
    """Within this context `handle(name, original, tensor, …)` runs instead of every query of a tensor's values."""
    replaced = {name: vars(Tensor)[name] for name in QUERIES if name in vars(Tensor)}
    nonzero, where = torch.nonzero, torch.where

    def intercepted(name: str, original: Query) -> Query:
        return lambda tensor, *more, **how: handle(name, original, tensor, *more, **how)

    def intercepted_where(condition: Tensor, *branches: Any, **named: Any) -> Any:
        if branches or named:
            return where(condition, *branches, **named)
        return handle("nonzero", nonzero, condition, as_tuple=True)

    try:
        for name in QUERIES:
            setattr(Tensor, name, intercepted(name, getattr(Tensor, name)))
        torch.nonzero, torch.where = intercepted("nonzero", nonzero), intercepted_where  # type: ignore[assignment]
        yield
    finally:
        torch.nonzero, torch.where = nonzero, where
        for name in QUERIES:
            if name in replaced:
                setattr(Tensor, name, replaced[name])
            else:
                delattr(Tensor, name)
