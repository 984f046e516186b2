"""Code that asks what is in a tensor (`if mask.all()`, `mask.nonzero()`), traced: it is told what it was told when it ran.

A tracer has no values to branch on. So the code is run once, and every answer is written down with the line of code that asked;
while it is traced, each line gets the same answers in the same order. The trace is that of the branches which these inputs take.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

QUESTIONS = ("__bool__", "__int__", "__float__", "__index__", "__format__", "item", "tolist", "nonzero")
TORCH = str(Path(torch.__file__).parent)
VALUES = Tensor.tolist  # itself, whatever stands in its place

Line: TypeAlias = tuple[str, int]  # file and number
Answers: TypeAlias = dict[tuple[Line, str], deque[Any]]  # by the line and the question
Question: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def record_answers() -> Iterator[Answers]:
    """Within this context every answer that a tensor gives is written down."""
    answers: Answers = {}

    def note(name: str, original: Question, tensor: Tensor, *more: Any, **how: Any) -> Any:
        answer = original(tensor, *more, **how)
        answers.setdefault((asking_line(), name), deque()).append(plain(answer))
        return answer

    with questions_go_to(note):
        yield answers


@contextlib.contextmanager
def replay_answers(answers: Answers) -> Iterator[None]:
    """Within this context tensors without values give these answers."""
    left = {asked: given.copy() for asked, given in answers.items()}

    def tell(name: str, original: Question, tensor: Tensor, *more: Any, **how: Any) -> Any:
        given = left.get((asking_line(), name))
        if is_fake(tensor) and given:
            return as_answered(given.popleft(), name, tensor)
        if given:  # of a tensor that is no part of the trace
            given.popleft()
        return original(tensor, *more, **how)

    with questions_go_to(tell):
        yield


def asking_line() -> Line:
    """The line of code that asks, neither here nor in torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(TORCH)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def plain(answer: Any) -> Any:
    """The answer without tensors."""
    if isinstance(answer, Tensor):
        return VALUES(answer)
    return tuple(map(plain, answer)) if isinstance(answer, tuple) else answer


def as_answered(answer: Any, name: str, asked: Tensor) -> Any:
    """The answer as it was given: places are tensors."""
    if name != "nonzero":
        return answer
    if isinstance(answer, tuple):
        return tuple(torch.tensor(one, dtype=torch.int64, device=asked.device) for one in answer)
    return torch.tensor(answer, dtype=torch.int64, device=asked.device).reshape(-1, asked.dim())


@contextlib.contextmanager
def questions_go_to(answer: Callable[..., Any]) -> Iterator[None]:
    """Within this context `answer(name, original, tensor)` answers what is asked of any tensor."""
    own = {name: vars(Tensor)[name] for name in QUESTIONS if name in vars(Tensor)}
    nonzero, where = torch.nonzero, torch.where

    def asked(name: str, original: Question) -> Question:
        return lambda tensor, *more, **how: answer(name, original, tensor, *more, **how)

    def places(condition: Tensor, *branches: Any, **named: Any) -> Any:
        if branches or named:
            return where(condition, *branches, **named)
        return answer("nonzero", nonzero, condition, as_tuple=True)

    try:
        for name in QUESTIONS:
            setattr(Tensor, name, asked(name, getattr(Tensor, name)))
        torch.nonzero, torch.where = asked("nonzero", nonzero), places  # type: ignore[assignment]
        yield
    finally:
        torch.nonzero, torch.where = nonzero, where
        for name in QUESTIONS:
            if name in own:
                setattr(Tensor, name, own[name])
            else:
                delattr(Tensor, name)
