"""Where each tensor of a model is written: the files and names that `save_pretrained` would write, sharded for a stream.

The parameters that edits put into a model come in the order in which they do. It is the same on a model without weights as on one
with them, which is how the place of a parameter in the result's files is known as soon as it is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from retrofit.errors import CheckpointError
from retrofit.files.safetensors_header import Extent
from retrofit.storage.filling import WEIGHTS
from retrofit.streaming.tensor_files import header_and_extents

SHARD = 2_000_000_000  # bytes


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: how it begins, how long it is."""

    file: Path  # in the model's directory
    header: bytes
    size: int


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """The files of a model's weights, and where each tensor lies in them."""

    shards: tuple[Shard, ...]
    extents: dict[str, Extent]  # by name; of a tied weight only the name that it is saved by
    index: str  # what model.safetensors.index.json says; "" where there is one file

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(shard.size for shard in self.shards)

    @property
    def digest(self) -> str:
        """The same for the same files, tensors and places."""
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
            header, placed = header_and_extents(Path(name), {one: tensors[one] for one in names})
            extents |= placed
            shards.append(Shard(Path(name), header, len(header) + sum(one.size for one in placed.values())))
        index = ""
        if split.is_sharded:
            content = {
                "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            index = json.dumps(content, indent=2, sort_keys=True) + "\n"
        return ModelLayout(tuple(shards), extents, index)


def saved_tensors(model: Any) -> dict[str, Tensor]:
    """Return what `save_pretrained` writes of a rewritten model, by name: of tied weights one, and nothing that it leaves out."""
    left_out = {*(model._keys_to_ignore_on_save or ()), *model.all_tied_weights_keys}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}


class ParametersInOrder:
    """Numbers the parameters that were not in the model before, each once."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {id(parameter): parameter for parameter in model.parameters()}
        self.met: dict[int, nn.Parameter] = {}

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """An edit put these into the model."""
        for _ in self.new_among(parameters):
            pass

    def new_among(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield those that are met for the first time, with their numbers."""
        for parameter in parameters:
            if id(parameter) not in self.before and id(parameter) not in self.met:
                self.met[id(parameter)] = parameter
                yield len(self.met) - 1, parameter


@dataclasses.dataclass(frozen=True)
class Expected:
    """A parameter as it was on the model without weights."""

    name: str  # in the result; "" where a later edit removed it
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def require(self, parameter: nn.Parameter) -> None:
        """`parameter` is this one, else `CheckpointError`."""
        found = tuple(parameter.shape), parameter.dtype
        if found != (self.shape, self.dtype):
            raise CheckpointError(
                "the model cannot be rewritten in a stream",
                why=f"with weights {self.name or 'a parameter'} is {found}, without them {(self.shape, self.dtype)}",
                remedy="rewrite it without --stream, where it fits in memory",
            )


def expected_parameters(order: ParametersInOrder, model: nn.Module, saved: Mapping[str, object]) -> tuple[Expected, ...]:
    """Return what the edits put into the model without weights, and what became of it; `saved` has the names that are written."""
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False) if name in saved}
    return tuple(Expected(names.get(id(one), ""), tuple(one.shape), one.dtype) for one in order.met.values())
