"""A directory that is written in steps, has its name once it is whole, and survives being killed on the way.

Until then it lies beside its name in a hidden folder, with a list of the steps whose results are on the disk. Who writes the same
again goes on from there; who writes anything else begins anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from retrofit.errors import CheckpointError
from retrofit.files.atomic_writes import aside_of, final_name, flush_directory, flush_file, place_directory, put_away
from retrofit.process import deferred_signals

STEPS, IDENTITY, LOCK = "steps", "identity.json", "lock"


class Unfinished:
    """A directory under way."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.folder = state / "directory"  # what will have the name
        self.aside = state / "aside"  # what is needed on the way
        for folder in (self.folder, self.aside):
            folder.mkdir(exist_ok=True)
        self.steps = set(read_steps(state / STEPS))

    def record(self, steps: Iterable[str]) -> None:
        """Record that these steps need not be done again: their results are on the disk."""
        new = [step for step in dict.fromkeys(steps) if step not in self.steps]
        with (self.state / STEPS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(step) + "\n" for step in new)
            file.flush()
            os.fsync(file.fileno())
        self.steps.update(new)


def unfinished_of(path: Path) -> Path:
    """Return where a directory lies until it is whole."""
    path = path.resolve()
    return path.parent / f".retrofit-{path.name}.unfinished"


def read_steps(file: Path) -> Iterator[str]:
    """Yield the steps that were recorded; a line that was cut short is none."""
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def is_same(state: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether the directory under way there has the same identity."""
    try:
        found = json.loads((state / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == json.loads(json.dumps(identity)))


@contextlib.contextmanager
def resumable_directory(path: Path, identity: Mapping[str, Any], *, force: bool = False) -> Iterator[Unfinished]:
    """Yield a directory to write a model into; once the block ends it is at `path`, where `force` replaces what was there.

    Where the block raises, or the process is killed, nothing is at `path`. After a kill, an interruption or a failure of the system
    what was done is kept, and found again with the same `identity`; after any other failure it is gone.

    Raises `CheckpointError` where another process writes it.
    """
    path = final_name(path, force=force, directory=True)
    state, previous = unfinished_of(path), aside_of(path)
    placed = keeps = False
    with locked(state, path) as lock:
        if not is_same(state, identity):
            clear(state, lock)
            (state / IDENTITY).write_text(json.dumps(identity), encoding="utf-8")
            flush_file(state / IDENTITY)
        unfinished = Unfinished(state)
        try:
            yield unfinished
            for file in unfinished.folder.rglob("*"):
                flush_directory(file) if file.is_dir() else flush_file(file)
            if force and path.exists():
                final_name(path, force=True, directory=True)
                path.rename(previous)
            place_directory(unfinished.folder, path)
            placed = True
            flush_directory(path.parent)
        except OSError as error:
            keeps = True
            raise CheckpointError(
                f"{path} cannot be written",
                why=error.strerror or str(error),
                remedy=f"check the free space and the permissions of {path.parent}; run the same command again to continue",
                code="unwritable",
            ) from error
        except BaseException as error:
            keeps = not isinstance(error, Exception)
            raise
        finally:
            with deferred_signals():
                if not keeps:
                    shutil.rmtree(state, ignore_errors=True)
                put_away(previous, path, replaced=placed)


def clear(state: Path, lock: IO[str]) -> None:
    """Remove everything but the lock."""
    for entry in state.iterdir():
        if entry.name != Path(lock.name).name:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextlib.contextmanager
def locked(state: Path, path: Path) -> Iterator[IO[str]]:
    """Make the folder, and lock it against other processes."""
    import fcntl  # of Unix alone

    try:
        state.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            remedy=f"check the permissions of {path.parent}",
            code="unwritable",
        ) from error
    with (state / LOCK).open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{path} is being written by another process", remedy="wait until it is done, or choose another name", code="busy"
            ) from None
        yield lock
