"""How a GGUF file rotates and stretches positions, written into the config: transformers' reader takes their base at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from retrofit.errors import CheckpointError
from retrofit.runtime.gguf_header import Header
from retrofit.storage.gguf_settings import settings_of

DIVISORS = "rope_freqs.weight"  # the tensor with a number for each frequency, by which it is divided
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0}
WITHOUT_EFFECT = ("type", "factor", "finetuned", "original_context_length")


def stretch_positions(config: Any, path: Path, header: Header) -> None:
    """The config stretches rotary positions as the file does, else `CheckpointError`."""
    every = getattr(config, "rope_parameters", None) or {}
    rope = every.get("full_attention", every)  # where layers have a sliding window, the others are stretched
    said = settings_of(header)
    if rope and said.get("rope.freq_base"):
        rope["rope_theta"] = said["rope.freq_base"]
    if rope is every and (rotated := said.get("rope.dimension_count")):
        width = head_width(config)
        if rotated != int(width * (rope.get("partial_rotary_factor") or 1.0)):
            rope["partial_rotary_factor"] = rotated / width
    if rope and rope.get("rope_type", "default") == "default":
        rope.update(said_scaling(path, header))
    if rope and any(tensor.name == DIVISORS for tensor in header.tensors):
        divisors = read_divisors(path)
        if rope.get("rope_type", "default") == "default" and bool((divisors != 1).any()):
            rope.update(LLAMA_3, factor=float(divisors.max()))
        require_divided(config, {} if rope is every else {"layer_type": "full_attention"}, rope, divisors, path)


def head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def require_rotated(model: PreTrainedModel, path: Path, header: Header) -> None:
    """The model rotates as many numbers of a head as the file says, else `CheckpointError`."""
    rotated = settings_of(header).get("rope.dimension_count")
    frequencies = [len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if rotated and frequencies and rotated // 2 not in frequencies:
        raise unknown(path, f"its metadata say {header.architecture}.rope.dimension_count = {rotated}")


def said_scaling(path: Path, header: Header) -> dict[str, Any]:
    """What the metadata say, as entries of transformers' `rope_parameters`."""
    prefix = f"{header.architecture}.rope.scaling."
    said = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    kind = said.get("type", "linear")  # as llama.cpp takes it
    factor = said.get("factor") or header.metadata.get(f"{header.architecture}.rope.scale_linear") or 1.0
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise unknown(path, f"its metadata say {prefix}factor = {factor}")
    entries = {name: said.pop(key) for key, name in YARN.items() if key in said} if kind == "yarn" else {}
    strange = [key for key, value in said.items() if key not in WITHOUT_EFFECT and NEUTRAL.get(key) != value]
    if kind == "none" or (factor == 1.0 and kind in ("linear", "yarn") and not strange):
        return {}
    if kind not in ("linear", "yarn") or strange:
        raise unknown(
            path, f"its metadata say {prefix}{strange[0] if strange else 'type'} = {said[strange[0]] if strange else kind}"
        )
    return {"rope_type": kind, "factor": float(factor), **entries}


def read_divisors(path: Path) -> torch.Tensor:
    from gguf import GGUFReader

    return next(torch.from_numpy(tensor.data.astype("float32")) for tensor in GGUFReader(path).tensors if tensor.name == DIVISORS)


def require_divided(config: Any, layer_type: dict[str, str], rope: dict[str, Any], divisors: torch.Tensor, path: Path) -> None:
    """The frequencies that transformers computes from the config are the file's, else `CheckpointError`."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return
    computed = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **layer_type)[0]
    wanted = rope["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors)) / divisors
    if computed.shape != wanted.shape or not torch.allclose(computed, wanted, rtol=1e-4, atol=1e-12):
        raise unknown(path, f"{DIVISORS} divides its frequencies otherwise than Llama 3 does")


def unknown(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} stretches rotary positions in a way that is not known here",
        why=why,
        remedy="give the Hugging Face directory that the file was made from",
    )
