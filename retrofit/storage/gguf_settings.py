"""What a GGUF file says of its model and transformers' reader leaves out: written into the config, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrofit.errors import CheckpointError
from retrofit.runtime.gguf_header import Header

# ggml's key, after the architecture, and the entries of configs that mean the same.
SIZES = {  # a wrong one shows, because the weights do not fit
    "context_length": ("max_position_embeddings",),
    "attention.key_length": ("head_dim", "global_head_dim"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
FUNCTION = {  # a wrong one shows nowhere: the model computes something else
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")


def take_settings(config: Any, path: Path, header: Header) -> None:
    """The config has the numbers of the file, else `CheckpointError`."""
    said = settings_of(header)
    for key, names in SIZES.items():
        if said.get(key):
            take(config, names, said[key])
    norms = tuple(name for name in config.to_dict() if name.endswith(("eps", "epsilon")))
    for key, names in {**FUNCTION, **dict.fromkeys(EPSILONS, norms)}.items():
        value = said.get(key)
        unlimited = key == "attention.sliding_window" and value and value >= said.get("context_length", math.inf)
        if value and not unlimited and not take(config, names, value):
            name = f"{header.architecture}.{key}"
            raise another_function(path, f"its metadata say {name} = {value}, and {type(config).__name__} has no place for it")
    width, scores = said.get("attention.key_length"), getattr(config, "query_pre_attn_scalar", None)
    if width and scores and width != scores:  # 27B Gemmas, of which llama.cpp knows it by their depth
        kind = type(config).__name__
        why = f"it does not say what attention scores are divided by: √{scores} in {kind}, its heads are {width} wide"
        raise another_function(path, why)


def settings_of(header: Header) -> Mapping[str, Any]:
    """The metadata of the file's architecture, by their keys without its name."""
    prefix = f"{header.architecture}."
    return {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}


def take(config: Any, names: tuple[str, ...], value: float) -> bool:
    """Whether one of these entries of the config has the value now; it is written where there is but one of them."""
    there = [name for name in names if hasattr(config, name)]
    held = [getattr(config, name) for name in there]
    if any(isinstance(one, (int, float)) and math.isclose(one, value, rel_tol=1e-6) for one in held):
        return True
    if len(there) == 1:
        setattr(config, there[0], value)
    return len(there) == 1


def another_function(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"transformers would make another model of {path} than it holds",
        why=why,
        remedy="give the Hugging Face directory that the file was made from",
    )
