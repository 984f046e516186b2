"""Where each tensor of a model is written: the files and names that `save_pretrained` would write, sharded for a stream."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from retrofit.runtime.safetensors_header import Extent
from retrofit.storage.weight_files import WEIGHTS
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
        return sum(one.size for one in self.shards)

    @property
    def digest(self) -> str:
        """The same for the same files, tensors and places."""
        return hashlib.sha256(b"\0".join(str(one.file).encode() + one.header for one in self.shards)).hexdigest()

    @staticmethod
    def of(model: Any, shard_size: int = SHARD) -> ModelLayout:
        """The layout of a transformers model, which may be without weights."""
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
    """What `save_pretrained` writes of a rewritten model, by name: of tied weights one, and nothing that it leaves out."""
    left_out = {*(model._keys_to_ignore_on_save or ()), *model.all_tied_weights_keys}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
