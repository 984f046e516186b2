"""A tiny model that reads images at the places of tokens, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from support.shrinking import tiny

IMAGE, PATCHES = 90, 16  # the id that stands for a patch, and how many an image has
BEFORE, AFTER = 2, 7  # tokens beside these


def llava() -> Any:
    """A decoder that reads what an encoder of images returns before its last layer; always the same weights."""
    few = {"num_hidden_layers": 2}
    parts = {"text_config": {"model_type": "llama", **few}, "vision_config": {"model_type": "clip_vision_model", **few}}
    ids = {"pad_token_id": 0, "image_token_index": IMAGE, "image_token_id": IMAGE}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlavaForConditionalGeneration(tiny(LlavaConfig, {"vision_feature_layer": -2, **parts, **ids})).eval()


def images_among_tokens() -> dict[str, torch.Tensor]:
    """Two sequences with an image each."""
    generator = torch.Generator().manual_seed(1)
    before, after = (torch.randint(16, 79, (2, count), generator=generator) for count in (BEFORE, AFTER))
    ids = torch.cat([before, torch.full((2, PATCHES), IMAGE), after], 1)
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 64, 64, generator=generator)}
