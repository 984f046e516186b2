"""Limits of memory: a file that declares more is refused before it is read; tensors outside memory."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import mmap
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofit.errors import CheckpointError
from retrofit.process import c_library, set_variable

if TYPE_CHECKING:
    from torch import Tensor

CONTROL_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MACHINE = Path("/proc/meminfo")
MOST = 1 << 62  # bytes, if the system gives no limit


def memory_limit() -> int:
    """Return the memory limit in bytes: the least of the machine's memory with swap, the control group's and the process's."""
    limits = [MOST]
    with contextlib.suppress(OSError, ValueError, IndexError):
        entries = dict(line.split(":", 1) for line in MACHINE.read_text().splitlines())
        limits.append(sum(int(entries[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal") if name in entries))
    for file in CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(file.read_text()))
    with contextlib.suppress(ImportError):
        import resource  # only on Unix

        own = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        limits += [limit for limit in own if limit != resource.RLIM_INFINITY]
    return min(limit for limit in limits if limit > 0)


def memory_of(device: Any) -> int:
    """Return the bytes that a device has for tensors, for the CPU `memory_limit`; a very large number if unknown."""
    import torch  # deferred, so that reading files does not import torch

    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_limit() if device.type == "cpu" else MOST


def require_memory(needed: int, what: str, *, remedy: str = "") -> None:
    """Raises `CheckpointError` about `what` unless `needed` bytes fit in memory at once."""
    limit = memory_limit()
    if needed > limit:
        raise CheckpointError(
            f"{what} does not fit in memory",
            why=f"{in_gigabytes(needed)} needed, {in_gigabytes(limit)} available",
            remedy=remedy or "use a machine with more memory; if the file is small, it is damaged or malicious",
            code="memory",
        )


def in_gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e18 else f"{size / 1e9:.2g} GB"


def require_unpacked_fits(path: Path) -> None:
    """Raises `CheckpointError` unless the unpacked contents of the archive at `path` fit in memory; unpacks nothing."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            require_memory(sum(entry.file_size for entry in archive.infolist()), f"the unpacked content of {path}")


MAPPINGS = Path("/proc/self/maps")  # of this process, if the system has such a file
PAGE_OUT = 21  # MADV_PAGEOUT, since Linux 5.4: pages mapped from a file are read from it again when needed


def page_out(tensors: Iterable[Tensor]) -> None:
    """Release the memory of tensors whose pages can be read again: from the file that they are mapped from, or from swap space."""
    advise = getattr(c_library(), "madvise", None)
    if advise is None:
        return
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(size), PAGE_OUT)  # if refused, it has no effect


def page_out_mapped(tensors: Iterable[Tensor]) -> None:
    """Page out the tensors that are mapped from files, because they will not be read for a long time."""
    ranges: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in MAPPINGS.read_text().splitlines():
            addresses, _, _, _, inode, *_ = line.split()
            first, _, last = addresses.partition("-")
            if inode != "0":
                ranges.append((int(first, 16), int(last, 16)))
    page_out(tensor for tensor in tensors if any(first <= tensor.data_ptr() < last for first, last in ranges))


def in_temporary_file(tensor: Tensor) -> Tensor:
    """Return the values of a CPU tensor in a temporary file that lives as long as they do; the tensor itself if none can be
    written.

    They take no memory until they are read, and none after they have been paged out.
    """
    import torch

    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=tensor.dtype).view(tensor.shape)
    return tensor


MAPPED: contextvars.ContextVar[bool] = contextvars.ContextVar("mapped", default=False)


def weights_are_mapped() -> bool:
    """Return whether the weights are mapped from files larger than memory, so that no copy of them may be made."""
    return MAPPED.get()


def mapped_weights() -> contextlib.AbstractContextManager[object]:
    """Within this context weights count as mapped from files."""
    return set_variable(MAPPED, True)
