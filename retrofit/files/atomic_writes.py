"""Outputs that are complete or absent: written under a hidden name, renamed when complete, removed on any failure.

An existing output is replaced only with `force`, even if it appeared while the new one was being written. A draft is locked while
it is written; the next process that writes in the same folder removes the drafts of killed processes. Files that were moved aside
are kept.

A directory may be written in steps, and resumed after its process was killed. Until it is complete it is in a hidden folder next to
its name, with a list of the steps whose results are on disk. Writing the same again resumes it; writing anything else starts anew.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from retrofit.errors import CheckpointError, RetrofitError
from retrofit.files.model_folders import carry_over, require_replaceable
from retrofit.process import deferred_signals

OF_SYSTEM = re.compile(r"\(os error \d+\)")  # the form in which libraries written in Rust report a system error
NAME = re.compile(r"\.retrofit-[0-9a-f]{16}\.partial")
YOUNGEST = 60  # seconds since the last change before a draft is removed: a new one may not be locked yet
LONGEST = 100  # characters of a name that are kept
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)
NUMBERS, TEXTS = "|".join(map(str, FULL)), "|".join(re.escape(os.strerror(number)) for number in FULL)
OF_TORCH = r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+"  # does not give the reason
IN_WORDS = re.compile(rf"os error ({NUMBERS})\b|{TEXTS}|{OF_TORCH}")  # safetensors, in Rust, gives the number


@contextlib.contextmanager
def whole_file(path: Path, *, force: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write to; it is at `path`, flushed to disk, once the block ends, and is removed if the block raises."""
    path = final_name(path, force=force, directory=False)
    draft = draft_of(path)
    with explained(path):
        try:
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
            with os.fdopen(descriptor, "w+b") as file, held(draft):
                yield file
                file.flush()
                os.fsync(file.fileno())
                place_file(draft, path, force=force)
            flush_directory(path.parent)
        finally:
            with deferred_signals():
                draft.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_directory(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a directory to write a model into; it is at `path` once the block ends, and is removed if the block raises.

    With `force` it replaces another model; other files in that model's directory are kept. Nothing else is replaced.
    """
    path = final_name(path, force=force, directory=True)
    previous, placed = aside_of(path), False
    with explained(path):
        try:
            with draft_folder(path) as draft:
                yield draft
                place_directory(draft, path, previous, force=force)
                placed = True
                flush_directory(path.parent)
        finally:
            with deferred_signals():
                put_away(previous, path, replaced=placed)


@contextlib.contextmanager
def whole_files(folder: Path, names: Sequence[str], *, force: bool = False) -> Iterator[Path]:
    """Yield a directory to write into; its files get their names in `folder` once the block ends, and are removed if it raises.

    Raises at once if one of `names` exists, and, before any file gets its name, if the name of another written file exists.
    """
    for name in names:
        final_name(folder / name, force=force, directory=False)
    with explained(folder), draft_folder(folder.resolve() / "any") as draft:
        yield draft
        for file in draft.iterdir():
            flush_file(file)
        with deferred_signals():
            place_files(sorted(draft.iterdir(), key=lambda file: (file.name in names, file.name)), folder, force=force)
        flush_directory(folder)


def place_files(drafts: Sequence[Path], folder: Path, *, force: bool) -> None:
    """Give each file its name in `folder`; without `force`, either all files get one or none."""
    for draft in drafts:
        final_name(folder / draft.name, force=force, directory=False)
    placed: list[Path] = []
    try:
        for draft in drafts:
            place_file(draft, folder / draft.name, force=force)
            placed.append(folder / draft.name)
    except Exception:
        for file in () if force else placed:
            file.unlink(missing_ok=True)
        raise


def place_file(draft: Path, path: Path, *, force: bool) -> None:
    """Give the file its name. Raises `CheckpointError` if another file has it and may not be replaced."""
    if not force:
        try:
            os.link(draft, path)  # unlike a rename, it never replaces
        except FileExistsError:
            raise exists_already(path) from None
        except OSError:  # a file system without links
            if os.path.lexists(path):
                raise exists_already(path) from None
        else:
            draft.unlink()
            return
    os.replace(draft, path)


def place_directory(draft: Path, path: Path, previous: Path, *, force: bool) -> None:
    """Flush the directory to the disk and give it its name; with `force`, a directory that has it is renamed to `previous` first.

    Raises `CheckpointError` if anything but an empty directory has the name.
    """
    for file in draft.rglob("*"):
        flush_directory(file) if file.is_dir() else flush_file(file)
    if force and path.exists():
        final_name(path, force=True, directory=True)
        path.rename(previous)
    try:
        draft.rename(path)
    except OSError:
        if os.path.lexists(path):
            raise exists_already(path) from None
        raise


def put_away(previous: Path, path: Path, *, replaced: bool) -> None:
    """Restore a directory that was renamed to make room; if it was replaced, keep only the files that are not a model's."""
    if not previous.exists():
        return
    try:
        carry_over(previous, path) if replaced else previous.rename(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} was not fully restored",
            why=str(error),
            remedy=f"its previous content is in {previous}: move it back by hand",
            code="incomplete",
        ) from error


def final_name(path: Path, *, force: bool, directory: bool) -> Path:
    """Return `path` with links resolved. Raises `CheckpointError` if it may not be replaced, or nothing can be written."""
    with explained(path):
        if path.exists():
            if path.is_dir() != directory:
                kinds = ("a directory", "a file") if path.is_dir() else ("a file", "a directory")
                raise CheckpointError(f"{path} is {kinds[0]}, not {kinds[1]}", remedy="choose another name", code="name")
            if directory:
                require_replaceable(path)
            if not force:
                raise exists_already(path)
            if path.is_mount():
                raise CheckpointError(
                    f"{path} cannot be replaced",
                    why="a file system is mounted there",
                    remedy="name a directory inside it",
                    code="unwritable",
                )
    require_place(path)
    return path.resolve()


def require_place(path: Path) -> None:
    """Raises `CheckpointError` if no file can be created in the directory of `path`.

    Tries it, without looking at permissions: root has all of them, even on a file system that accepts no files.
    """
    with explained(path):
        final = path.resolve()
        if not final.parent.is_dir():
            is_file = final.parent.exists()
            raise CheckpointError(
                f"{path} cannot be written",
                why=f"{path.parent} is a file" if is_file else f"no directory {path.parent}",
                remedy="name another place" if is_file else "create it first",
                code="missing",
            )
        draft = draft_of(final)
        with deferred_signals():
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            draft.unlink()


def exists_already(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} exists already", remedy="choose another name, or use force=True (--force)", code="exists")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise a failure to write as a `CheckpointError` that names `path` and the reason."""
    try:
        yield
    except RetrofitError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        of_system = isinstance(error, OSError) or OF_SYSTEM.search(reason) is not None
        raise CheckpointError(
            f"{path} cannot be written",
            why=reason,
            remedy=(f"check the free space and the permissions of {path.parent}", "name another place") if of_system else "",
            code="unwritable",
        ) from error


def flush_file(path: Path) -> None:
    """Flush the file's contents to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Flush the directory's entries to the disk, if the system supports it."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ── Drafts ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def draft_of(path: Path) -> Path:
    """Return a new hidden name for a draft in the directory of `path`; remove the drafts of killed processes."""
    remove_abandoned(path.parent)
    return path.parent / f".retrofit-{secrets.token_hex(8)}.partial"


def aside_of(path: Path) -> Path:
    """Return a new hidden name in the directory of `path` for a previous output, which is never removed automatically."""
    return path.parent / f".retrofit-{secrets.token_hex(8)}.{path.name[:LONGEST]}.replaced"


@contextlib.contextmanager
def held(draft: Path) -> Iterator[None]:
    """Lock the existing draft, or its folder, in this context: `is_held` returns True."""
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def draft_folder(beside: Path) -> Iterator[Path]:
    """Yield a new folder in the directory of `beside`, removed after the block."""
    draft = draft_of(beside)
    try:
        draft.mkdir()
        with held(draft):
            yield draft
    finally:
        with deferred_signals():
            shutil.rmtree(draft, ignore_errors=True)


def is_held(path: Path) -> bool:
    """Return whether another process, or another part of this one, holds the file or folder."""
    try:
        import fcntl  # only on Unix

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
    """Lock the open file until it is closed; return False if another process has locked it or the system has no locks."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl  # only on Unix

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def remove_abandoned(folder: Path) -> None:
    """Remove the drafts in the folder whose process is gone, except those that cannot be removed."""
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


# ── Full disks ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def why_full(error: BaseException) -> str:
    """Return the system's message about the disk, if that is why `error` was raised, else ""."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return os.strerror(cause.errno).lower()
        if found := IN_WORDS.search(str(cause)):
            return os.strerror(int(found[1])).lower() if found[1] else found[0].lower()
        cause = cause.__cause__ or cause.__context__
    return ""


# ── Directories written in steps ──────────────────────────────────────────────────────────────────────────────────────────────────


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
            place_directory(unfinished.folder, path, previous, force=force)
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
