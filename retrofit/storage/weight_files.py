"""The safetensors files of a model in a directory: which they are, and whether what their headers say can be true."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from retrofit.errors import CheckpointError, first_line
from retrofit.runtime.memory_limit import require_memory
from retrofit.runtime.safetensors_header import Extent, extents_in

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "fetch it again"
LARGER = "rewrite it on disk, with --stream, or use a machine with more memory"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in a directory, none where it has none; a single file comes before shards.

    Raises `CheckpointError` where the index cannot be read, or names a file that is missing or outside the directory.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(set(weight_map(folder).values()))]


def weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor as the index says it, nothing where there is none."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ValueError("its weight_map is no table of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read", why=first_line(error), remedy=AGAIN) from error
    for name in sorted(set(named.values())):
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name or "\\" in name:
            raise CheckpointError(
                f"{index} names a file outside its directory: {name}",
                why="what is there would become part of the result",
                remedy="put the file beside the index if it belongs to the model",
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not whole: {name} is missing", why=f"{INDEX} names it", remedy=AGAIN)
    return dict(named)


def extents_of(folder: Path) -> dict[str, Extent]:
    """Where each tensor of the model in a directory lies, by its name in the files.

    Raises `CheckpointError` where a file is damaged, or a name is in two files.
    """
    found: dict[str, Extent] = {}
    for file in weight_files(folder):
        for name, extent in extents_in(file).items():
            if name in found:
                raise CheckpointError(
                    f"{folder} holds {name} twice", why=f"in {found[name].file.name} and in {file.name}", remedy=AGAIN
                )
            found[name] = extent
    return found


def require_whole_weights(folder: Path, *, in_memory: bool) -> int:
    """The number of tensors in the safetensors files of a directory, each whole; they fit in memory where they go there.

    Raises `CheckpointError`, and has read nothing but headers.
    """
    extents = extents_of(folder)
    if in_memory:
        require_memory(sum(one.size for one in extents.values()), f"the model in {folder}", remedy=LARGER)
    return len(extents)
