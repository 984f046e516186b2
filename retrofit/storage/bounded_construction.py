"""Models built from what a file says, no larger than its weights allow: a config can name a billion layers in a few bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.modules import module as registration

from retrofit.errors import CheckpointError
from retrofit.runtime.memory_limit import in_gigabytes, memory_limit

MORE = 50  # times as many parameters as a file holds tensors may be registered: experts apart, layers rewritten
ALWAYS = 2_000  # parameters
SLACK = 4  # times the memory: a parameter is registered again where a recipe moves it


@contextlib.contextmanager
def no_larger_than(tensors: int, *, in_memory: bool = True) -> Iterator[None]:
    """Within this context a model is built for so many tensors of a file, and filled with them.

    Raises `CheckpointError` where it gets many times as many parameters, or, if it goes to memory, larger ones than could be there.
    """
    most, limit = MORE * tensors + ALWAYS, SLACK * memory_limit() if in_memory else 0
    count = size = 0

    def on_parameter(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, size
        if parameter is None:
            return
        count += 1
        if count > most:
            raise too_large(f"it has more than {most:,} weights, the file {tensors:,}")
        if in_memory and parameter.is_meta:
            size += parameter.nbytes
            if size > limit:
                raise too_large(f"it takes more than {in_gigabytes(limit // SLACK)}, which is all the memory there can be")

    handle = registration.register_module_parameter_registration_hook(on_parameter)
    try:
        yield
    finally:
        handle.remove()


def too_large(why: str) -> CheckpointError:
    return CheckpointError(
        "the config describes a larger model than can be",
        why=why,
        remedy="correct the config (the number of layers, the size of the vocabulary), or fetch it again",
    )
