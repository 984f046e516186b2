"""Inputs with padding, and the same inputs without."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from retrofit.inputs.probes import (
    Inputs,
    accepts,
    filler_id,
    has_two_sides,
    ids_name,
    is_decoder_side,
    is_numbering,
    is_per_token,
    placeholders,
    resized_like,
)

PADS = 3  # padding tokens put before or after a sequence


@dataclasses.dataclass(frozen=True)
class Padded:
    """A sequence alone, and padded in a batch."""

    alone: dict[str, Any]
    batch: dict[str, Any]
    kept: slice  # where the outputs for it are in the batch
    row: int = 0  # in which row it is, in both
    stepped: tuple[int, ...] = ()  # of a batch that checks share: this row, and one that is not padded


def takes_padding(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model has token ids to pad and takes an attention mask that says so."""
    name = ids_name(inputs)
    return name is not None and inputs[name].shape[1] > PADS + 1 and accepts(model, "attention_mask")


def without_mask(padded: Inputs) -> dict[str, Any]:
    """Padded inputs with a mask by which no token is padding."""
    return {**padded, "attention_mask": torch.ones_like(padded["attention_mask"])}


def without_padding(outputs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The outputs, zero for the tokens that a mask among the inputs says are padding: what is computed there nobody reads."""
    for mask in (value for name, value in inputs.items() if name.endswith("attention_mask") and is_per_token(value)):
        if outputs.dim() == 3 and mask.shape == outputs.shape[:2]:
            outputs = outputs.masked_fill(~mask.bool().to(outputs.device).unsqueeze(-1), 0.0)
    return outputs


def pad_inputs(model: nn.Module, inputs: Inputs, side: str) -> Padded:
    """A sequence alone, and the same sequence padded in a batch with a longer one.

    Padding on the left comes with the positions that `generate` derives from the mask, where the model takes positions.
    """
    long = resized_like(model, inputs, 2, seed=13)
    name = ids_name(inputs)
    assert name is not None
    width = long[name].shape[1]
    kept = slice(PADS, None) if side == "left" else slice(None, width - PADS)
    mask = torch.ones_like(long[name], dtype=torch.long)
    mask[0] = 0
    mask[0, kept] = 1
    long = with_padding(model, with_room(long, name, mask), name, mask, numbered=side == "left")
    alone = {
        key: value[:1] if isinstance(value, torch.Tensor) and value.shape[:1] == (2,) else value for key, value in long.items()
    }
    for key, value in alone.items():
        if is_per_token(value) and not is_decoder_side(key) and value.shape[1] == width:
            alone[key] = value[:, kept]
    return Padded(alone, long, slice(None) if has_two_sides(inputs) else kept)


def with_room(batch: Inputs, name: str, mask: torch.Tensor) -> Inputs:
    """The batch, its tokens turned until none that stands for another input is padding by the mask, if they can be."""
    padding = (mask == 0).any(0)
    turns = (turned(batch, places) for places in (0, PADS, -PADS))
    return next((one for one in turns if not bool((placeholders(one, name) & padding).any())), batch)


def turned(inputs: Inputs, places: int) -> dict[str, Any]:
    """The inputs with their tokens that many places on, the last ones first."""
    moved = {key for key, value in inputs.items() if is_per_token(value) and not is_numbering(value)}
    return {key: value.roll(places, 1) if key in moved else value for key, value in inputs.items()}


def share_padding(model: nn.Module, inputs: Inputs, alone: Inputs, side: str) -> Padded | None:
    """Of the sequences `alone` the first padded left and the second right, in one batch with the first of the longer `inputs`.

    None where they cannot be: they are not `PADS` tokens shorter, those of an encoder and a decoder, or have padding of their own.
    """
    name = ids_name(inputs)
    if name is None or not takes_padding(model, inputs) or has_two_sides(inputs):
        return None
    (rows, length), width = alone[name].shape, inputs[name].shape[1]
    masks = [one["attention_mask"] for one in (alone, inputs) if "attention_mask" in one]
    if rows < 2 or length != width - PADS or not all(bool(mask.all()) for mask in masks):
        return None
    batch = dict(inputs)
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != len(inputs[name]):
            continue
        first, second = alone[key][0], alone[key][1]
        if is_per_token(value) and value.shape[1] == width:
            first, second = (nn.functional.pad(one, place) for one, place in ((first, (PADS, 0)), (second, (0, PADS))))
        if first.shape != value.shape[1:]:
            return None
        batch[key] = torch.stack([first, second, value[0]])
    mask = torch.ones_like(batch[name], dtype=torch.long)
    mask[0, :PADS] = mask[1, -PADS:] = 0
    kept, row = (slice(PADS, None), 0) if side == "left" else (slice(None, length), 1)
    return Padded(dict(alone), with_padding(model, batch, name, mask, numbered=True), kept, row, (0, 2))


def with_padding(model: nn.Module, batch: Inputs, name: str, mask: torch.Tensor, numbered: bool) -> dict[str, Any]:
    """The batch with that mask and padding where it is zero.

    If `numbered`, also with the positions that `generate` derives from the mask, where the model takes positions.
    """
    padded = {**batch, "attention_mask": mask, name: batch[name].masked_fill(mask == 0, filler_id(model))}
    if numbered and not has_two_sides(batch) and accepts(model, "position_ids"):
        padded["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return padded


def pad_both_sides(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """A batch of three sequences of different lengths: padded on the left, on the right, and on both sides."""
    batch = resized_like(model, inputs, 3, seed=19)
    name = ids_name(inputs)
    assert name is not None
    mask = torch.ones_like(batch[name], dtype=torch.long)
    mask[0, :PADS] = 0
    mask[1, 1 - PADS :] = 0
    mask[2, :1] = 0
    mask[2, -PADS:] = 0
    return with_padding(model, with_room(batch, name, mask), name, mask, numbered=True)
