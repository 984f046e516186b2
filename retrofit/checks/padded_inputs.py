"""Inputs with padding, and the same inputs without."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrofit.runtime.probes import Inputs, accepts, filler_id, has_two_sides, ids_name, is_decoder_side, is_per_token, resized_like

PADS = 3  # padding tokens put before or after a sequence


def takes_padding(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model has token ids to pad and takes an attention mask that says so."""
    name = ids_name(inputs)
    return name is not None and inputs[name].shape[1] > PADS + 1 and accepts(model, "attention_mask")


def without_padding(outputs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The outputs, zero for the tokens that a mask among the inputs says are padding: what is computed there nobody reads."""
    for mask in (value for name, value in inputs.items() if name.endswith("attention_mask") and is_per_token(value)):
        if outputs.dim() == 3 and mask.shape == outputs.shape[:2]:
            outputs = outputs.masked_fill(~mask.bool().to(outputs.device).unsqueeze(-1), 0.0)
    return outputs


def pad_inputs(model: nn.Module, inputs: Inputs, side: str) -> tuple[dict[str, Any], dict[str, Any], slice]:
    """A sequence alone, the same sequence padded in a batch with a longer one, and where the outputs for it are in that.

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
    long["attention_mask"] = mask
    long[name] = long[name].masked_fill(mask == 0, filler_id(model))
    if side == "left" and not has_two_sides(inputs) and accepts(model, "position_ids"):
        long["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = {
        key: value[:1] if isinstance(value, torch.Tensor) and value.shape[:1] == (2,) else value for key, value in long.items()
    }
    for key, value in alone.items():
        if is_per_token(value) and not is_decoder_side(key) and value.shape[1] == width:
            alone[key] = value[:, kept]
    return alone, long, slice(None) if has_two_sides(inputs) else kept


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
    batch["attention_mask"] = mask
    batch[name] = batch[name].masked_fill(mask == 0, filler_id(model))
    if not has_two_sides(inputs) and accepts(model, "position_ids"):
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return batch
