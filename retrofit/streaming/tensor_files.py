"""The tensors of safetensors files, mapped one by one: data that was read stays in memory only until it is released.

Recorded inputs of modules on calibration data are stored in such files too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from retrofit.checks.parameters import chunks, is_finite, not_finite, require_finite_weight
from retrofit.errors import CheckpointError
from retrofit.files.atomic_writes import Unfinished
from retrofit.files.headers import DTYPES, INDEX, METADATA, WEIGHTS, Extent
from retrofit.files.memory import mapped_weights

NAMES = {dtype: name for name, dtype in DTYPES.items()}
CACHE_LINE = 64  # bytes; torch's own tensors begin at a multiple
PIECE = 1 << 23  # bytes copied at a time: few enough to stay in a processor's cache
RESIDENT = 1 << 29  # bytes of files that may stay in memory before they are released
EVERY = 0.02  # seconds


def header_and_extents(file: Path, tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, Extent]]:
    """Return the beginning of a safetensors file of these tensors, and the place of each.

    Tensors whose bytes fill whole cache lines come first, and the first begins at a cache line, so that all of these do.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % CACHE_LINE != 0, -tensors[name].itemsize))
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name} cannot be written",
                why=f"it is {tensor.dtype}",
                remedy="rewrite the model without --stream",
                code="unwritable",
            )
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    first = 8 + len(text)
    extents = {
        name: Extent(file, first + entries[name]["data_offsets"][0], tensors[name].dtype, tuple(tensors[name].shape))
        for name in order
    }
    return len(text).to_bytes(8, "little") + text, extents


class TensorFiles:
    """Files with mapped tensors: pages in memory can be read from them again."""

    def __init__(self) -> None:
        self.maps: dict[Path, mmap.mmap] = {}
        self.extents: dict[int, Extent] = {}  # by the address of the storage

    def tensor(self, extent: Extent, *, writable: bool = False) -> Tensor:
        """Return the tensor at this place; with `writable`, values written into it are written into the file."""
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
        """Return the place of a mapped tensor whose bytes lie there in order and without gaps; None for any other."""
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
        """Release all memory of the files; later reads come from the files."""
        for mapping in self.maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def reserved_file(file: Path, header: bytes, size: int) -> Iterator[int]:
    """Yield the descriptor of a file, new or existing, with this header and its full size allocated on disk."""
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
    """Write the bytes into the file, beginning at `start`."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done : done + PIECE], start + done)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, in order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def copy_bytes(source: Extent, descriptor: int, start: int, seen: Callable[[Tensor], None] | None = None) -> None:
    """Copy the bytes of a tensor from one file to another, beginning at `start`; `seen` gets the values piece by piece.

    With a buffer the values can be inspected without a second read, and no pages need to be mapped.
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
    """Let the system drop the file's pages, all from `start` on if `size` is 0: they will not be read again soon.

    Otherwise a model larger than memory displaces everything else in memory, and freeing memory takes longer than copying.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def read_at(descriptor: int, start: int, into: memoryview) -> None:
    """Read the bytes of the file from `start` on into the buffer."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], start + done)
        if not count:
            raise EOFError("the file shrank while it was read")
        done += count


@contextlib.contextmanager
def kept_out_of_memory(files: TensorFiles) -> Iterator[None]:
    """Release the files, in this context, whenever much of them is in memory; copy none of their weights to memory."""
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(EVERY):
            if mapped_bytes() > most:
                files.release()

    most = mapped_bytes() + RESIDENT
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with mapped_weights():
            yield
    finally:
        stopped.set()
        watcher.join()
        files.release()


def mapped_bytes() -> int:
    """Return how many bytes of this process's memory are mapped from files; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


FILE = 1 << 28  # bytes of a file; more only if a single tensor is larger
SMALL = 1 << 16  # bytes; a smaller tensor stays in memory, a new one until the end


class RecordingsOnDisk:
    """Stores tensors in files in `folder`, one after the other."""

    def __init__(self, folder: Path, files: TensorFiles) -> None:
        self.folder, self.files = folder, files
        self.count = self.room = self.end = 0  # files, bytes of the last one, and bytes used in it

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor, mapped from a file if it is large."""
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


# ── Where each tensor is written ──────────────────────────────────────────────────────────────────────────────────────────────────


SHARD = 2_000_000_000  # bytes


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: its header and its length."""

    file: Path  # in the model's directory
    header: bytes
    size: int


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """The files of a model's weights, and the place of each tensor in them."""

    shards: tuple[Shard, ...]
    extents: dict[str, Extent]  # by name; for a tied weight only the name under which it is saved
    index: str  # contents of model.safetensors.index.json; "" if there is one file

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return sum(shard.size for shard in self.shards)

    @property
    def digest(self) -> str:
        """Return a digest that is the same for the same files, tensors and places."""
        return hashlib.sha256(b"\0".join(str(shard.file).encode() + shard.header for shard in self.shards)).hexdigest()

    @staticmethod
    def of(model: Any, shard_size: int = SHARD) -> ModelLayout:
        """Return the layout of a transformers model, which may be without weights."""
        tensors = saved_tensors(model)
        split = split_torch_state_dict_into_shards(
            tensors, filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"), max_shard_size=shard_size
        )
        shards: list[Shard] = []
        extents: dict[str, Extent] = {}
        for name, names in split.filename_to_tensors.items():
            header, placed = header_and_extents(Path(name), {name: tensors[name] for name in names})
            extents |= placed
            shards.append(Shard(Path(name), header, len(header) + sum(extent.size for extent in placed.values())))
        index = ""
        if split.is_sharded:
            content = {
                "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            index = json.dumps(content, indent=2, sort_keys=True) + "\n"
        return ModelLayout(tuple(shards), extents, index)


def saved_tensors(model: Any) -> dict[str, Tensor]:
    """Return, by name, the tensors that `save_pretrained` writes for a rewritten model: one of each group of tied weights."""
    left_out = {*(model._keys_to_ignore_on_save or ()), *model.all_tied_weights_keys}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}


class ParametersInOrder:
    """Numbers the parameters that were not in the model before, each once."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {id(parameter): parameter for parameter in model.parameters()}
        self.seen: dict[int, nn.Parameter] = {}

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Number these parameters, which an edit has put into the model."""
        for _ in self.new_among(parameters):
            pass

    def new_among(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield the parameters that are new, with their numbers."""
        for parameter in parameters:
            if id(parameter) not in self.before and id(parameter) not in self.seen:
                self.seen[id(parameter)] = parameter
                yield len(self.seen) - 1, parameter


@dataclasses.dataclass(frozen=True)
class Expected:
    """A parameter as it was on the model without weights."""

    name: str  # in the result; "" if a later edit removed it
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def require(self, parameter: nn.Parameter) -> None:
        """Raises `CheckpointError` unless `parameter` has the same shape and dtype."""
        found = tuple(parameter.shape), parameter.dtype
        if found != (self.shape, self.dtype):
            raise differs(f"with weights {self.name or 'a parameter'} is {found}, without them {(self.shape, self.dtype)}")


def differs(why: str) -> CheckpointError:
    return CheckpointError(
        "the model cannot be rewritten out of core",
        why=why,
        remedy="rewrite it without --stream, if it fits in memory",
        code="not-streamed",
    )


def expected_parameters(order: ParametersInOrder, model: nn.Module, saved: Mapping[str, object]) -> tuple[Expected, ...]:
    """Return the parameters that the edits put into the model without weights, with their final names if in `saved`."""
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False) if name in saved}
    return tuple(
        Expected(names.get(id(parameter), ""), tuple(parameter.shape), parameter.dtype) for parameter in order.seen.values()
    )


# ── The files of a result ─────────────────────────────────────────────────────────────────────────────────────────────────────────


STEP = 1 << 28  # bytes written between two records of progress


class SetAside:
    """Parameters that have no place in a result, in files of their own while they are in use."""

    def __init__(self, folder: Path, files: TensorFiles) -> None:
        self.folder, self.files, self.count = folder, files, 0
        folder.mkdir(exist_ok=True)

    def __call__(self, name: str, parameter: nn.Parameter) -> None:
        """Move a large parameter's values from memory to a file."""
        if is_worth_moving(parameter, self.files):
            parameter.data = self.files.tensor(self.write(parameter), writable=True)
            self.files.release()

    def write(self, tensor: Tensor) -> Extent:
        """Write the tensor to a file of its own; return its place."""
        file = self.folder / f"{self.count:06}"
        self.count += 1
        file.unlink(missing_ok=True)
        with reserved_file(file, b"", tensor.nbytes) as descriptor:
            write_at(descriptor, 0, bytes_of(tensor))
        return Extent(file, 0, tensor.dtype, tuple(tensor.shape))


class ResultFiles:
    """Open files of a result, with space allocated for every tensor."""

    def __init__(self, folder: Path, layout: ModelLayout, files: TensorFiles, unfinished: Unfinished) -> None:
        self.folder, self.layout, self.files, self.unfinished = folder, layout, files, unfinished
        self.aside = SetAside(unfinished.aside, files)
        self.descriptors: dict[Path, int] = {}
        self.open = contextlib.ExitStack()
        self.pending: list[str] = []
        self.pending_bytes = 0

    def __enter__(self) -> ResultFiles:
        with contextlib.ExitStack() as opening:
            for shard in self.layout.shards:
                file = opening.enter_context(reserved_file(self.folder / shard.file, shard.header, shard.size))
                self.descriptors[shard.file] = file
            if self.layout.index:
                (self.folder / INDEX).write_text(self.layout.index, encoding="utf-8")
            self.open = opening.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self.open.close()

    def write(self, name: str, tensor: Tensor, *, finite: bool = False) -> None:
        """Write the tensor to its place in the layout, unless an earlier, stopped run has written it.

        Raises `RetrofitError` if it must be `finite` and contains NaN or Inf.
        """
        if name in self.unfinished.steps:
            return
        extent, source = self.layout.extents[name], self.files.find(tensor)
        place = self.place_of(name)
        if finite and (source is None or source == place):
            require_finite_weight(name, tensor)

        def seen(piece: Tensor) -> None:
            if not all(map(is_finite, chunks(piece))):
                raise not_finite(name, tensor)

        if source is None:
            write_at(self.descriptors[extent.file], extent.start, bytes_of(tensor))
        elif source != place:
            copy_bytes(source, self.descriptors[extent.file], extent.start, seen if finite else None)
        self.pending.append(name)
        self.pending_bytes += extent.size
        if self.pending_bytes >= STEP:
            self.record()

    def record(self) -> None:
        """Flush the written tensors to disk and record them, so that they need not be written again."""
        for descriptor in self.descriptors.values():
            os.fsync(descriptor)
            forget_pages(descriptor)
        self.unfinished.record(self.pending)
        self.pending, self.pending_bytes = [], 0

    def place_of(self, name: str) -> Extent:
        """Return the place of the tensor with that name."""
        extent = self.layout.extents[name]
        return dataclasses.replace(extent, file=self.folder / extent.file)

    def move_out_of_memory(self, name: str, parameter: nn.Parameter) -> None:
        """Move a large parameter's values to their place in a file; set them aside if the name is ""."""
        if not name:
            self.aside(name, parameter)
        elif is_worth_moving(parameter, self.files):
            self.write(name, parameter)
            parameter.data = self.files.tensor(self.place_of(name), writable=True)
            self.files.release()


def is_worth_moving(parameter: nn.Parameter, files: TensorFiles) -> bool:
    """Return whether the parameter takes much memory that is not mapped from a file; non-contiguous ones stay where they are."""
    return parameter.nbytes >= SMALL and parameter.is_contiguous() and not files.is_mapped(parameter)
