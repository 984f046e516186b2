"""A directory that is written in steps, gets its name once it is complete, and can be resumed after its process was killed.

Until then it is in a hidden folder next to its name, with a list of the steps whose results are on disk. Writing the same again
resumes it; writing anything else starts anew.
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
    """A directory that is not complete yet."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.folder = state / "directory"  # will get the name
        self.aside = state / "aside"  # temporary files
        for folder in (self.folder, self.aside):
            folder.mkdir(exist_ok=True)
        self.steps = set(read_steps(state / STEPS))

    def record(self, steps: Iterable[str]) -> None:
        """Record that these steps need not be repeated: their results are on disk."""
        new = [step for step in dict.fromkeys(steps) if step not in self.steps]
        with (self.state / STEPS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(step) + "\n" for step in new)
            file.flush()
            os.fsync(file.fileno())
        self.steps.update(new)


def unfinished_of(path: Path) -> Path:
    """Return the place of a directory until it is complete."""
    path = path.resolve()
    return path.parent / f".retrofit-{path.name}.unfinished"


def read_steps(file: Path) -> Iterator[str]:
    """Yield the recorded steps, without a truncated line."""
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def is_same(state: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether the unfinished directory there has the same identity."""
    try:
        found = json.loads((state / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == json.loads(json.dumps(identity)))


@contextlib.contextmanager
def resumable_directory(path: Path, identity: Mapping[str, Any], *, force: bool = False) -> Iterator[Unfinished]:
    """Yield a directory to write a model into; it is at `path` once the block ends, where `force` permits replacing another.

    If the block raises, or the process is killed, nothing is at `path`. After a kill, an interruption or a system failure the
    finished steps are kept, and found again under the same `identity`; after any other failure they are removed.

    Raises `CheckpointError` if another process is writing it.
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
    """Create the folder, and lock it against other processes."""
    import fcntl  # only on Unix

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
