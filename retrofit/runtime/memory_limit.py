"""How much memory a process can have at most: what a file says it needs beyond that is refused before any of it is read."""

from __future__ import annotations

import contextlib
from pathlib import Path

from retrofit.errors import CheckpointError

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
            why=f"{in_gigabytes(needed)} are needed, and there are {in_gigabytes(limit)} at most",
            remedy=remedy or "use a machine with more memory; if the file is small, it is damaged or made to harm",
            code="memory",
        )


def in_gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e18 else f"{size / 1e9:.2g} GB"
