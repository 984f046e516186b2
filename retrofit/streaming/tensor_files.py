"""The tensors of safetensors files, mapped one by one: what is read is in memory only until it is released.

What modules receive on calibration data is kept in such files too.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrofit.errors import CheckpointError
from retrofit.files.safetensors_header import DTYPES, METADATA, Extent

NAMES = {dtype: name for name, dtype in DTYPES.items()}
CACHE_LINE = 64  # bytes; tensors that torch makes begin at a multiple
PIECE = 1 << 23  # bytes that are copied at a time: few enough to stay in a processor's cache
RESIDENT = 1 << 29  # bytes of files that may stay in memory before they are released
EVERY = 0.02  # seconds


def header_and_extents(file: Path, tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, Extent]]:
    """Return the beginning of a safetensors file of such tensors, and where each is to be written.

    Those whose bytes fill whole cache lines come first, and the first begins a line, so that all of these begin one.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % CACHE_LINE != 0, -tensors[name].itemsize))
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name in order:
        one = tensors[name]
        if one.dtype not in NAMES:
            raise CheckpointError(
                f"{name} cannot be written",
                why=f"it is {one.dtype}",
                remedy="rewrite the model without --stream",
                code="unwritable",
            )
        entries[name] = {"dtype": NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [end, end + one.nbytes]}
        end += one.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    first = 8 + len(text)
    extents = {
        name: Extent(file, first + entries[name]["data_offsets"][0], tensors[name].dtype, tuple(tensors[name].shape))
        for name in order
    }
    return len(text).to_bytes(8, "little") + text, extents


class TensorFiles:
    """Files whose tensors are mapped: what of them is in memory can be read there again."""

    def __init__(self) -> None:
        self.maps: dict[Path, mmap.mmap] = {}
        self.extents: dict[int, Extent] = {}  # by the address of the storage

    def tensor(self, extent: Extent, *, writable: bool = False) -> Tensor:
        """Return the tensor that lies there; where it is writable, what is written into it is written into the file."""
        if extent.size == 0:
            return torch.empty(extent.shape, dtype=extent.dtype)
        whole = self.maps.get(extent.file)
        if whole is None:
            with extent.file.open("rb+" if writable else "rb") as opened:
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
                whole = self.maps[extent.file] = mmap.mmap(opened.fileno(), 0, access=access)
        flat = torch.frombuffer(whole, dtype=extent.dtype, count=math.prod(extent.shape), offset=extent.start)
        self.extents[flat.untyped_storage().data_ptr()] = extent
        return flat.view(extent.shape)

    def find(self, tensor: Tensor) -> Extent | None:
        """Return where the bytes of a mapped tensor lie, in order and without gaps; None of any other."""
        if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        whole = self.extents.get(tensor.untyped_storage().data_ptr())
        if whole is None:
            return None
        start = whole.start + int(tensor.storage_offset()) * tensor.itemsize
        return Extent(whole.file, start, tensor.dtype, tuple(tensor.shape))

    def is_mapped(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory is that of a file."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self.extents

    def release(self) -> None:
        """Nothing of the files is in this process's memory; what is read again comes from the file."""
        for one in self.maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                one.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def reserved_file(file: Path, header: bytes, size: int) -> Iterator[int]:
    """Yield the descriptor of a file that begins with the header and has its size on the disk already; it may have existed."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(descriptor).st_size != size:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            os.ftruncate(descriptor, size)
        write_at(descriptor, 0, memoryview(header))
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, start: int, content: memoryview) -> None:
    """The bytes are in the file from there on."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done : done + PIECE], start + done)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, in order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def copy_bytes(source: Extent, descriptor: int, start: int, seen: Callable[[Tensor], None] | None = None) -> None:
    """The bytes of a tensor in one file are in another from `start` on; `seen` gets its numbers piece by piece on the way.

    Read and written by way of a buffer they are looked at without being read once more, and no page has to be mapped.
    """
    buffer = bytearray(min(PIECE, source.size))
    whole = memoryview(buffer)
    with source.file.open("rb") as opened:
        done = 0
        while done < source.size:
            piece = whole[: min(len(buffer), source.size - done)]
            read_at(opened.fileno(), source.start + done, piece)
            if seen is not None:
                seen(torch.frombuffer(buffer, dtype=source.dtype, count=len(piece) // source.dtype.itemsize))
            write_at(descriptor, start + done, piece)
            done += len(piece)
        forget_pages(opened.fileno(), source.start, source.size)


def forget_pages(descriptor: int, start: int = 0, size: int = 0) -> None:
    """What the system keeps of the file in memory may go, all from `start` on where `size` is 0: nobody reads it again soon.

    Else a model larger than memory drives out everything else there, and to make room takes longer than to copy.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def read_at(descriptor: int, start: int, into: memoryview) -> None:
    """The bytes of the file from there on are in the buffer."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], start + done)
        if not count:
            raise EOFError("the file has become shorter while it was read")
        done += count


@contextlib.contextmanager
def kept_out_of_memory(files: TensorFiles) -> Iterator[None]:
    """Within this context the files are released whenever much of them is in memory, whoever reads them."""
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(EVERY):
            if mapped_bytes() > most:
                files.release()

    most = mapped_bytes() + RESIDENT
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stopped.set()
        watcher.join()
        files.release()


def mapped_bytes() -> int:
    """Return how much of this process's memory is that of files; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


FILE = 1 << 28  # bytes of a file, and more only where one tensor takes more
SMALL = 1 << 16  # bytes; a smaller tensor stays in memory


class RecordingsOnDisk:
    """Puts tensors into files in `folder`, one after the other."""

    def __init__(self, folder: Path, files: TensorFiles) -> None:
        self.folder, self.files = folder, files
        self.count = self.room = self.end = 0  # files, bytes of the last one, and how many of them are taken

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor, mapped from a file, where it takes much memory."""
        if tensor.nbytes < SMALL or tensor.device.type != "cpu" or tensor.requires_grad or self.files.is_mapped(tensor):
            return tensor
        self.end += -self.end % CACHE_LINE
        if self.end + tensor.nbytes > self.room:
            self.count, self.room, self.end = self.count + 1, max(FILE, tensor.nbytes), 0
            self.file.unlink(missing_ok=True)
        with reserved_file(self.file, b"", self.room) as descriptor:
            write_at(descriptor, self.end, bytes_of(tensor))
        extent = Extent(self.file, self.end, tensor.dtype, tuple(tensor.shape))
        self.end += tensor.nbytes
        self.files.release()
        return self.files.tensor(extent, writable=True)

    @property
    def file(self) -> Path:
        return self.folder / f"recordings.{self.count:04}"
