"""A model as functions of named tensors: one, or an encoder, a decoder's first step and its next ones; each becomes an ONNX file.

Names are those of the ecosystem's ONNX models. A part declares its dynamic sizes, draws inputs of any size, and is a module itself,
whose forward takes its inputs as one mapping and returns its outputs as a tuple: what a tracer needs, and what torch can run too.

    model                     input_ids, attention_mask, …                                          → logits
    model                     input_ids, attention_mask, position_ids, past_key_values.{i}.key, …   → logits, present.{i}.…
    encoder_model             input_ids, attention_mask                                             → last_hidden_state
    decoder_model             input_ids, encoder_hidden_states, encoder_attention_mask              → logits, present.{i}.…
    decoder_with_past_model   the same and past_key_values.{i}.decoder.key, …                       → the same
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from retrofit.onnx.exporter.cache_states import (
    token_strides,
)
from retrofit.program.tracing_contexts import disable_cache
from retrofit.runtime.agreement import Arithmetic
from retrofit.runtime.probes import (
    accepts,
    extent_of,
    ids_name,
    logits_of,
    named_outputs,
    resized,
)

Sizes: TypeAlias = Mapping[str, int]
Tensors: TypeAlias = dict[str, Tensor]

BATCH, LENGTH, PAST, TOTAL, SOURCE = (
    "batch_size",
    "sequence_length",
    "past_sequence_length",
    "total_sequence_length",
    "encoder_sequence_length",
)
PAST_KEY_VALUES, PRESENT = "past_key_values.", "present."
PER = "_per_"  # in the name of an extent that is a part of another, rounded up
CACHE = "past_key_values"  # as most models call it
STATE_LENGTHS = (6, 7, 12)  # numbers of tokens after which states are compared, to determine which grow
TRACED_SIZES = {BATCH: 2, LENGTH: 5, PAST: 7, SOURCE: 11}  # extents to trace with, all different


class ExportPart(nn.Module):
    """One function of the model. `sizes` are its dynamic sizes with the extents traced; `outputs` names what forward returns."""

    name = "model"  # of the file

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sizes: dict[str, int] = {}
        self.outputs: list[str] = []
        self.template: Any = None  # a cache like those it goes on from; None where it goes on from none

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        """Inputs of these sizes, drawn with `seed`; with another than 0 the first row is padded."""
        raise NotImplementedError

    @functools.cached_property
    def least(self) -> int:
        """The fewest tokens, of 1, 2, 4, …, that the model runs with; as many as it is traced with where no fewer do."""
        most = self.sizes.get(LENGTH, 1)
        tried = (2**step for step in range(most.bit_length()) if 2**step < most)
        return next((length for length in tried if self.runs({**dict.fromkeys(self.sizes, 1), LENGTH: length})), most)

    def runs(self, sizes: Sizes) -> bool:
        """Whether the model's code runs at these sizes."""
        try:
            with torch.no_grad():
                self(self.example(sizes, 1))
        except Exception:  # whatever it raises
            return False
        return True

    def axes(self) -> dict[str, dict[int, str]]:
        """The dynamic axes of every input, and the size each is: an axis has a size if it grows with it.

        States that grow with every k-th token only show it when what came before is doubled.
        """
        first = self.example(self.sizes)
        found: dict[str, dict[int, str]] = {name: {} for name in first}
        for size in self.sizes:
            larger = 2 * self.sizes[size] if size == PAST else self.sizes[size] + 1
            other = self.example({**self.sizes, size: larger})
            for name, value in first.items():
                for axis, (extent, grown) in enumerate(zip(value.shape, other[name].shape, strict=True)):
                    if extent != grown:
                        found[name][axis] = TOTAL if axis in found[name] else self.size_of(name, size)
        return found

    def size_of(self, name: str, size: str) -> str:
        """What the extent of the input `name` is called that grows with `size`: `{size}_per_4` where it is a fourth, rounded up."""
        if size == PAST and not name.startswith(PAST_KEY_VALUES):
            return TOTAL  # of what is there, the one token that is new with it
        every = token_strides(self.template).get(name.removeprefix(PAST_KEY_VALUES), 1) if size == PAST else 1
        return f"{size}{PER}{every}" if every > 1 else size


class WholeModel(ExportPart):
    """The model as it is, without a cache: every tensor that it returns by name."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        self.fixed = {name: value for name, value in inputs.items() if name not in tensors}
        self.given = tensors | optional_inputs(model, {**self.fixed, **tensors}, ("attention_mask", "token_type_ids"))
        batch, length = extent_of(self.given)
        self.sizes = {BATCH: max(2, batch)} | ({LENGTH: max(4, length)} if length else {})
        self.outputs = list(self.named(self.example(self.sizes)))

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return pad_first_row(resized(self.model, self.given, sizes[BATCH], sizes.get(LENGTH, 0), seed), seed)

    def named(self, inputs: Tensors) -> Tensors:
        with disable_cache(self.model):
            return named_outputs(self.model(**inputs, **self.fixed))

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        named = self.named(inputs)
        return tuple(named[name] for name in self.outputs)


def pad_first_row(inputs: Mapping[str, Any], seed: int) -> Tensors:
    """The inputs, each as a tensor of its own; the first row is padded on the right unless the seed is 0."""
    padded = {name: value.clone(memory_format=torch.contiguous_format) for name, value in inputs.items()}
    mask = padded.get("attention_mask")
    if seed and mask is not None:
        mask[0, mask.shape[1] - mask.shape[1] // 3 :] = 0
    return padded


def split_states(inputs: Tensors) -> tuple[Tensors, Tensors]:
    """The states among a part's inputs, by their own names, and the others."""
    states = {name.removeprefix(PAST_KEY_VALUES): value for name, value in inputs.items() if name.startswith(PAST_KEY_VALUES)}
    return states, {name: value for name, value in inputs.items() if not name.startswith(PAST_KEY_VALUES)}


def optional_inputs(model: nn.Module, inputs: Mapping[str, Any], names: tuple[str, ...]) -> Tensors:
    """The further inputs that an ONNX model of this kind takes: those whose plain value changes nothing."""
    ids = ids_name(inputs)
    if ids is None:
        return {}
    numbers = torch.arange(inputs[ids].shape[1], device=inputs[ids].device).expand_as(inputs[ids]).contiguous()
    plain = {
        "attention_mask": torch.ones_like(inputs[ids]),
        "position_ids": numbers,
        "token_type_ids": torch.zeros_like(inputs[ids]),
    }
    arithmetic = Arithmetic(model, inputs)
    with torch.no_grad(), disable_cache(model):
        return {
            name: plain[name]
            for name in names
            if name not in inputs and accepts(model, name) and is_neutral(arithmetic, {name: plain[name]})
        }


def is_neutral(arithmetic: Arithmetic, more: Mapping[str, Any]) -> bool:
    """Whether the model computes with the further inputs what it does without."""
    model, inputs = arithmetic.model, arithmetic.inputs
    try:
        return arithmetic.compare(lambda: (logits_of(model(**{**inputs, **more})), logits_of(model(**inputs)))).agrees
    except Exception:  # the model names the argument and wants something else of it
        return False
