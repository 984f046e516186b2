"""Limits of memory: what a file says it needs beyond them is refused before it is read, and unneeded memory is released."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

CONTROL_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MACHINE = Path("/proc/meminfo")
MOST = 1 << 62  # bytes, where nothing says


def memory_limit() -> int:
    """The least, in bytes, of the machine's memory with its swap, the control group's and the process's own limits."""
    limits = [MOST]
    with contextlib.suppress(OSError, ValueError, IndexError):
        entries = dict(line.split(":", 1) for line in MACHINE.read_text().splitlines())
        limits.append(sum(int(entries[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal") if name in entries))
    for file in CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(file.read_text()))
    with contextlib.suppress(ImportError):
        import resource  # of Unix alone

        own = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        limits += [one for one in own if one != resource.RLIM_INFINITY]
    return min(one for one in limits if one > 0)


def require_memory(needed: int, what: str, *, remedy: str = "") -> None:
    """`needed` bytes could be in memory at once, else `CheckpointError` about `what`."""
    limit = memory_limit()
    if needed > limit:
        raise CheckpointError(
            f"{what} does not fit in memory",
            why=f"{in_gigabytes(needed)} needed, {in_gigabytes(limit)} available",
            remedy=remedy or "use a machine with more memory; if the file is small, it is damaged or made to harm",
            code="memory",
        )


def in_gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e18 else f"{size / 1e9:.2g} GB"


def require_unpacked_fits(path: Path) -> None:
    """What the archive at `path` unpacks to fits in memory, else `CheckpointError`; nothing is unpacked. No archive is none."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            require_memory(sum(entry.file_size for entry in archive.infolist()), f"what {path} unpacks to")


PAGE_OUT = 21  # MADV_PAGEOUT, since Linux 5.4: pages mapped from a file are read from there again when they are needed


@functools.cache
def c_library() -> Any:
    """The C library of this process; None where it is not Linux."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def release_freed_memory() -> None:
    """What was freed, and kept to be given out again, is the system's, where the C library can do that."""
    trim = getattr(c_library(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def page_out(tensors: Iterable[Tensor]) -> None:
    """Whole pages of these tensors leave memory where they can be read again: from the file they are mapped from, or swap space."""
    advise = getattr(c_library(), "madvise", None)
    if advise is None:
        return
    for one in tensors:
        if one.device.type != "cpu" or not one.is_contiguous():
            continue
        first = -(-one.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (one.data_ptr() + one.numel() * one.element_size() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(size), PAGE_OUT)  # refused, it changes nothing
