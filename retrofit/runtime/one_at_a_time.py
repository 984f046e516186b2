"""What changes the whole process for a while runs in one thread at a time.

Capturing a model replaces methods of tensors and modules, the streams that are printed to and filters of warnings; loading replaces
initializers and the default dtype; checks seed the generators of random numbers. Two threads that did so at once would see, and put
back, each other's. It runs outside `torch.inference_mode`, whose tensors can never be trained.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

PROCESS = threading.RLock()  # held by the thread that changes the process


def one_at_a_time(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, which waits until no other thread runs one of those that are declared so."""

    @functools.wraps(function)
    def waiting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with PROCESS, outside_inference():
            return function(*args, **kwargs)

    return waiting


def outside_inference() -> contextlib.AbstractContextManager[object]:
    """Within this context what is made can be trained; gradients are computed or not as before, unless inference mode was on."""
    import torch  # here, so that --help never waits for it

    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
