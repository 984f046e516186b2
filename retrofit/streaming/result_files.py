"""The files of a result under way: each tensor is written once, to where it stays."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

from torch import Tensor, nn

from retrofit.checks.fingerprint import chunks, is_finite
from retrofit.checks.finite_weights import not_finite, require_finite_weight
from retrofit.files.resumable_directory import Unfinished
from retrofit.files.safetensors_header import Extent
from retrofit.storage.filling import INDEX
from retrofit.streaming.model_layout import ModelLayout
from retrofit.streaming.tensor_files import TensorFiles, bytes_of, copy_bytes, forget_pages, reserved_file, write_at

SMALL = 1 << 16  # bytes; a smaller new tensor stays in memory until the end
STEP = 1 << 28  # bytes that are written between two records of what is on the disk


class SetAside:
    """Parameters that have no place in a result, in files of their own for as long as somebody reads them."""

    def __init__(self, folder: Path, files: TensorFiles) -> None:
        self.folder, self.files, self.count = folder, files, 0
        folder.mkdir(exist_ok=True)

    def __call__(self, name: str, parameter: nn.Parameter) -> None:
        """The parameter's values are in a file and no longer in memory, where they are not few."""
        if is_worth_moving(parameter, self.files):
            parameter.data = self.files.tensor(self.write(parameter), writable=True)
            self.files.release()

    def write(self, tensor: Tensor) -> Extent:
        """Return a file of its own holds the tensor."""
        file = self.folder / f"{self.count:06}"
        self.count += 1
        file.unlink(missing_ok=True)
        with reserved_file(file, b"", tensor.nbytes) as descriptor:
            write_at(descriptor, 0, bytes_of(tensor))
        return Extent(file, 0, tensor.dtype, tuple(tensor.shape))


class ResultFiles:
    """Open files of a result, with the room for every tensor."""

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
        """The tensor is where the layout has it; one that was written before the process was stopped is not written again.

        Raises `RetrofitError` where it is to be `finite`, a weight of numbers, and is not.
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
        """Flush to the disk what was written, so that it need not be written again."""
        for descriptor in self.descriptors.values():
            os.fsync(descriptor)
            forget_pages(descriptor)
        self.unfinished.record(self.pending)
        self.pending, self.pending_bytes = [], 0

    def place_of(self, name: str) -> Extent:
        """Return where the tensor of that name lies."""
        extent = self.layout.extents[name]
        return dataclasses.replace(extent, file=self.folder / extent.file)

    def move_out_of_memory(self, name: str, parameter: nn.Parameter) -> None:
        """The parameter's values are in a file, where they are not few: in their place, or set aside if the name is ""."""
        if not name:
            self.aside(name, parameter)
        elif is_worth_moving(parameter, self.files):
            self.write(name, parameter)
            parameter.data = self.files.tensor(self.place_of(name), writable=True)
            self.files.release()


def is_worth_moving(parameter: nn.Parameter, files: TensorFiles) -> bool:
    """Return whether the parameter takes much memory, which is not that of a file; what lies there in another order is left."""
    return parameter.nbytes >= SMALL and parameter.is_contiguous() and not files.is_mapped(parameter)
