"""Checkpoints that transformers' trainer writes file by file: whole, or gone and explained."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from retrofit.errors import TrainingError
from retrofit.runtime.deferred_signals import deferred_signals

OF_TORCH = ("PytorchStreamWriter", "inline_container")  # in what torch says of a file that it could not write
FULL = 1 << 20  # bytes: where less is free, that was it


@contextlib.contextmanager
def whole_checkpoint(folder: Path) -> Iterator[None]:
    """Within this context `folder` is written; a signal waits until it is whole, and if that fails it is gone.

    Raises `TrainingError` where a file cannot be written.
    """
    try:
        with deferred_signals():
            yield
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and not any(word in str(error) for word in OF_TORCH):
            raise
        with deferred_signals():
            shutil.rmtree(folder, ignore_errors=True)
        raise TrainingError(
            f"the checkpoint {folder} cannot be written",
            why=reason_of(error, folder.parent),
            remedy=f"check the free space in {folder.parent}; the same command with --resume goes on from the checkpoint before, "
            "if there is one",
        ) from error


def reason_of(error: Exception, folder: Path) -> str:
    """Why a file could not be written: torch says that it was not, and seldom why."""
    known = error if isinstance(error, OSError) else next((one for one in causes(error) if isinstance(one, OSError)), None)
    if known is not None and known.errno is not None:
        return os.strerror(known.errno).lower()
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < FULL:
            return os.strerror(errno.ENOSPC).lower()
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """What an exception was raised from, or while handling."""
    one: BaseException | None = error
    while one is not None:
        one = one.__cause__ or one.__context__
        if one is not None:
            yield one
