"""Hidden names beside an output: drafts, which nobody wants once their process is gone, and what was moved aside, which is kept.

A draft is locked for as long as it is written. Whoever writes next in the same folder removes those whose process was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from retrofit.runtime.deferred_signals import deferred_signals

NAME = re.compile(r"\.retrofit-[0-9a-f]{16}\.partial")
YOUNGEST = 60  # seconds since the last change of a draft that is removed: one that was just made may not be locked yet
LONGEST = 100  # characters of a name that are kept


def draft_of(path: Path) -> Path:
    """A new hidden name in the directory of `path` for what is being written; drafts of processes that were killed are gone."""
    remove_abandoned(path.parent)
    return path.parent / f".retrofit-{secrets.token_hex(8)}.partial"


def aside_of(path: Path) -> Path:
    """A new hidden name in the directory of `path` for what stood there, which nobody removes unasked."""
    return path.parent / f".retrofit-{secrets.token_hex(8)}.{path.name[:LONGEST]}.replaced"


@contextlib.contextmanager
def held(draft: Path) -> Iterator[None]:
    """Within this context the draft, or folder, which exists, is known to be written: `is_held`."""
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def draft_folder(beside: Path) -> Iterator[Path]:
    """A new folder in the directory of `beside`, gone after the block."""
    draft = draft_of(beside)
    try:
        draft.mkdir()
        with held(draft):
            yield draft
    finally:
        with deferred_signals():
            shutil.rmtree(draft, ignore_errors=True)


def is_held(path: Path) -> bool:
    """Whether another process, or another part of this one, holds the file or folder."""
    try:
        import fcntl  # of Unix alone

        descriptor = os.open(path, os.O_RDONLY)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def lock(descriptor: int) -> bool:
    """Whether the open file is this process's now, until it is closed; False where another has it or the system has no locks."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl  # of Unix alone

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def remove_abandoned(folder: Path) -> None:
    """No draft is in the folder whose process is gone; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if NAME.fullmatch(entry.name) and not entry.is_symlink():
                remove_if_abandoned(Path(entry.path))


def remove_if_abandoned(draft: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - draft.stat().st_mtime < YOUNGEST:
            return
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            if lock(descriptor):
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
        finally:
            os.close(descriptor)
