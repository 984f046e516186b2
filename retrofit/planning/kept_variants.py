"""The values of variants on disk: after an interruption a candidate is not fitted again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from retrofit.planning.variants import Variant
from retrofit.runtime.atomic_writes import whole_file


def own_tensors(variant: Variant, dense: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in the replacements that is not the dense model's, under a name of its own."""
    known = {id(tensor) for tensor in (*dense.parameters(), *dense.buffers())}
    for number, replacement in enumerate(variant):
        for path, module in replacement.modules.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    yield f"{number} {path} {name}", tensor.detach()


def save_variant(file: Path, variant: Variant, dense: nn.Module) -> None:
    """The values of the replacements are in `file`; nothing is where the variant is a whole model."""
    if all(one.model is None for one in variant):
        values = {name: tensor.cpu().clone().contiguous() for name, tensor in own_tensors(variant, dense)}
        with whole_file(file, force=True) as stream:
            stream.write(save(values))


@torch.no_grad()
def restore_variant(file: Path, variant: Variant, dense: nn.Module) -> bool:
    """Whether the replacements, of one structure with those that were saved, have the values in `file` now."""
    try:
        kept = load_file(file)
    except (OSError, SafetensorError):
        return False
    places = dict(own_tensors(variant, dense))
    same = places.keys() == kept.keys() and all(places[name].shape == kept[name].shape for name in kept)
    if same:
        for name, value in kept.items():
            places[name].copy_(value)
    return same
