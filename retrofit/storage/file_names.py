"""What a name says of the kind of file that a model is in, or that it is a directory."""

from __future__ import annotations

from pathlib import Path

from retrofit.errors import CheckpointError
from retrofit.files import gguf_header

FILES = (".pt", ".pth")
EXPORTED = ".pt2"
ONNX = ".onnx"
DESCRIBED = (EXPORTED, ONNX, gguf_header.SUFFIX)  # files that say themselves how their model is built
OTHER_FORMATS = (".safetensors", ".ckpt", ".bin", ".npz", ".h5")
NOT_WRITTEN = (*OTHER_FORMATS, gguf_header.SUFFIX, ".npy", ".pkl", ".pickle", ".msgpack", ".json", ".zip")
SUFFIXES = (*FILES, EXPORTED, ONNX, *NOT_WRITTEN)


def is_file_name(path: Path) -> bool:
    """Return whether `save` writes a file there, or refuses to, and not a directory."""
    return path.suffix.lower() in SUFFIXES


def require_writable_kind(path: Path) -> None:
    """Raises `CheckpointError` where the name is that of a kind of file that models are not saved as."""
    suffix = path.suffix.lower()
    if suffix in NOT_WRITTEN:
        raise CheckpointError(f"{path}: models are not saved as {suffix}", remedy="name a .pt file or a directory", code="name")
    if suffix in SUFFIXES and path.suffix != suffix:
        raise CheckpointError(
            f"{path}: {suffix} is written in small letters", remedy=f"name {path.with_suffix(suffix)}", code="name"
        )
