"""Weights in CTranslate2's binary format, and the Whisper that they make in transformers.

Source: CTranslate2's model specification, binary versions 2 to 6.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

DTYPES = ("<f4", "i1", "<i2", "<i4", "<f2", "<u2")  # by the number that the format gives them; the last is bfloat16
BFLOAT16 = 5
NEWEST = 6


class Bytes:
    """A file's bytes, read from front to back."""

    def __init__(self, path: Path) -> None:
        self.held, self.at = np.memmap(path, dtype=np.uint8, mode="r"), 0

    def take(self, count: int) -> np.ndarray:
        self.at += count
        if self.at > len(self.held):
            raise ValueError("the file of weights ends too early")
        return self.held[self.at - count : self.at]

    def number(self, kind: str) -> int:
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")).tobytes())[0])

    def text(self) -> str:
        return self.take(self.number("H")).tobytes().rstrip(b"\0").decode()


def read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """What the specification is called, and its variables by name; quantized ones as the float32 numbers they represent."""
    source = Bytes(path)
    version = source.number("I")
    if not 2 <= version <= NEWEST:
        raise ValueError(f"{path} is of binary version {version}, and 2 to {NEWEST} are read")
    name = source.text()
    source.number("I")  # the revision of the specification
    variables = {}
    for _ in range(source.number("I")):
        variable = source.text()
        shape = [source.number("I") for _ in range(source.number("B"))]
        if version >= 4:
            kind, size = source.number("B"), source.number("I")
        else:
            kind, width = {4: (0, 4), 1: (1, 1), 2: (2, 2)}[source.number("B")]
            size = width * source.number("I")
        array = np.frombuffer(source.take(size).tobytes(), dtype=DTYPES[kind]).reshape(shape)
        held = torch.from_numpy(array.astype(np.int16) if kind == BFLOAT16 else array.copy())
        variables[variable] = held.view(torch.bfloat16) if kind == BFLOAT16 else held
    found = {key: unquantized(key, value, variables) for key, value in variables.items() if not key.endswith("_scale")}
    if version >= 3:
        aliases = [(source.text(), source.text()) for _ in range(source.number("I"))]
        found |= {alias: found[of] for alias, of in aliases if of in found}
    return name, found


def unquantized(name: str, value: Tensor, variables: Mapping[str, Tensor]) -> Tensor:
    """The variable, a quantized one divided by its scales: one a row, or one of all."""
    scale = variables.get(f"{name}_scale")
    if scale is None:
        return value
    return value.float() / (scale.reshape(-1, *(1 for _ in value.shape[1:])) if scale.dim() else scale)


def whisper(path: Path) -> WhisperForConditionalGeneration:
    """The Whisper in the file, in float32 and evaluation mode."""
    name, variables = read(path)
    if name != "WhisperSpec":
        raise ValueError(f"{path} holds a {name} and no Whisper")
    state = transformers_names(variables)
    embedding, conv = state["model.decoder.embed_tokens.weight"], state["model.encoder.conv1.weight"]
    layers = {side: sum(key.startswith(side) and key.endswith("/ffn/linear_0/weight") for key in variables) for side in SIDES}
    hidden = state["model.decoder.layers.0.fc1.weight"].shape[0]
    heads = int(variables["encoder/num_heads"].item()) if "encoder/num_heads" in variables else embedding.shape[1] // 64
    config = WhisperConfig(
        vocab_size=embedding.shape[0],
        num_mel_bins=conv.shape[1],
        d_model=embedding.shape[1],
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=hidden,
        decoder_ffn_dim=hidden,
        max_source_positions=state["model.encoder.embed_positions.weight"].shape[0],
        max_target_positions=state["model.decoder.embed_positions.weight"].shape[0],
        **special_tokens(embedding.shape[0]),
    )
    model = WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict({key: value.float() for key, value in state.items()}, strict=False)
    assert not unexpected and all(key == "proj_out.weight" for key in missing), (missing, unexpected)
    model.tie_weights()
    return model.eval()


SIDES = ("encoder", "decoder")
ENGLISH_ONLY = 51864  # rows of the table of a Whisper that knows one language


def special_tokens(vocabulary: int) -> dict[str, Any]:
    end = 50256 if vocabulary == ENGLISH_ONLY else 50257
    return {"eos_token_id": end, "bos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end + 1}


def transformers_names(variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The variables under the names of transformers, packed projections apart."""
    state: dict[str, Tensor] = {}
    for name, value in variables.items():
        parts = name.split("/")
        leaf = {"gamma": "weight", "beta": "bias"}.get(parts[-1], parts[-1])
        match parts[:-1]:
            case ["encoder", ("conv1" | "conv2") as conv]:
                state[f"model.encoder.{conv}.{leaf}"] = value
            case [side, "position_encodings"]:
                state[f"model.{side}.embed_positions.weight"] = value
            case ["decoder", "embeddings"]:
                state["model.decoder.embed_tokens.weight"] = value
            case [side, "layer_norm"]:
                state[f"model.{side}.layer_norm.{leaf}"] = value
            case [side, layer, "ffn", ("linear_0" | "linear_1") as linear]:
                state[f"{layer_path(side, layer)}.fc{int(linear[-1]) + 1}.{leaf}"] = value
            case [side, layer, "ffn", "layer_norm"]:
                state[f"{layer_path(side, layer)}.final_layer_norm.{leaf}"] = value
            case [side, layer, ("self_attention" | "attention") as kind, "layer_norm"]:
                state[f"{layer_path(side, layer)}.{ATTENTIONS[kind]}_layer_norm.{leaf}"] = value
            case [side, layer, ("self_attention" | "attention") as kind, linear]:
                state |= projections(f"{layer_path(side, layer)}.{ATTENTIONS[kind]}", kind, linear, leaf, value)
    return state


ATTENTIONS = {"self_attention": "self_attn", "attention": "encoder_attn"}
PACKED = {
    ("self_attention", "linear_0"): ("q_proj", "k_proj", "v_proj"),
    ("self_attention", "linear_1"): ("out_proj",),
    ("attention", "linear_0"): ("q_proj",),
    ("attention", "linear_1"): ("k_proj", "v_proj"),
    ("attention", "linear_2"): ("out_proj",),
}  # what each of the linear layers of an attention computes, one after the other


def projections(path: str, kind: str, linear: str, leaf: str, value: Tensor) -> dict[str, Tensor]:
    """The projections of one linear layer; the bias of the keys, which is zero, is none in transformers."""
    names = PACKED[kind, linear]
    parts = zip(names, value.chunk(len(names)), strict=True)
    return {f"{path}.{name}.{leaf}": part for name, part in parts if (name, leaf) != ("k_proj", "bias")}


def layer_path(side: str, layer: str) -> str:
    return f"model.{side}.layers.{layer.removeprefix('layer_')}"
