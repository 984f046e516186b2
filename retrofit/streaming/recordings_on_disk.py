"""What modules receive on calibration data, in files that are mapped: it is in memory only while somebody reads it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from retrofit.streaming.tensor_files import CACHE_LINE, Extent, TensorFiles, bytes_of, reserved_file, write_at

FILE = 1 << 28  # bytes of a file, and more only where one tensor takes more
SMALL = 1 << 16  # bytes; a smaller tensor stays in memory


class RecordingsOnDisk:
    """Puts tensors into files in `folder`, one after the other."""

    def __init__(self, folder: Path, files: TensorFiles) -> None:
        self.folder, self.files = folder, files
        self.count = self.room = self.end = 0  # files, bytes of the last one, and how many of them are taken

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor, mapped from a file, where it takes much memory."""
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
