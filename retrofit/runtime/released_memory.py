"""Memory that a process holds and does not need goes back to the system; nothing is lost."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

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
