"""Directories of models, compared."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files, by name, read by safetensors itself; each name is in one file, the one of the index."""
    found: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in found
            found[name], where[name] = tensor, file.name
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text())
        assert content["weight_map"] == where
        assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    else:
        assert [*{*where.values()}] == ["model.safetensors"]
    return found


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same in two directories of a model: tensors bit by bit, other files byte by byte, shards apart."""
    ours, theirs = tensors_in(one), tensors_in(other)
    found = [f"only in one: {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        same = ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape
        if not same or not torch.equal(ours[name].reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)):
            found.append(name)
    files = [{str(file.relative_to(folder)): file.read_bytes() for file in others(folder)} for folder in (one, other)]
    found += [name for name in sorted(files[0].keys() | files[1].keys()) if files[0].get(name) != files[1].get(name)]
    return found


def others(folder: Path) -> list[Path]:
    """The files that hold no weights."""
    return [file for file in folder.rglob("*") if file.is_file() and ".safetensors" not in file.name]
