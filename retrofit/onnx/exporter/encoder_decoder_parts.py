"""An encoder-decoder as three ONNX files: the encoder, the first step of the decoder, and its next steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from retrofit.onnx.exporter.cache_states import (
    build_cache,
    is_on_side,
    state_before_tokens,
    states_of,
)
from retrofit.onnx.exporter.export_part import (
    BATCH,
    LENGTH,
    PAST,
    PAST_KEY_VALUES,
    PRESENT,
    SOURCE,
    TRACED_SIZES,
    ExportPart,
    Sizes,
    Tensors,
    optional_inputs,
    pad_first_row,
    split_states,
)
from retrofit.runtime.example_inputs import token_ids
from retrofit.runtime.probes import (
    accepts,
    is_decoder_side,
    logits_of,
    resized,
)


class Encoder(ExportPart):
    """The encoder of an encoder-decoder."""

    name = "encoder_model"

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model.get_encoder())  # type: ignore[operator]
        given = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and not is_decoder_side(name)}
        self.given = given | optional_inputs(self.model, given, ("attention_mask",))
        self.sizes = {BATCH: TRACED_SIZES[BATCH], LENGTH: TRACED_SIZES[SOURCE]}
        self.outputs = ["last_hidden_state"]
        output = self.model(**self.given)
        self.kind: Any = type(output) if dataclasses.is_dataclass(output) else BaseModelOutput  # of what the model's decoder takes

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return pad_first_row(resized(self.model, self.given, sizes[BATCH], sizes[LENGTH], seed), seed)

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        return (self.model(**inputs)[0],)


class FirstStep(ExportPart):
    """The decoder of an encoder-decoder on tokens with none before them."""

    name = "decoder_model"
    returns_states = True

    def __init__(self, model: nn.Module, encoder: Encoder, returns_states: bool) -> None:
        super().__init__(model)
        self.encoder, self.returns_states = (encoder,), returns_states  # no child: its weights go into another file
        self.sizes = {size: TRACED_SIZES[size] for size in (BATCH, LENGTH, SOURCE)}
        self.masked = "attention_mask" in encoder.given and accepts(model, "attention_mask")
        output = self.output(self.start(self.sizes, 0))
        self.template = getattr(output, "past_key_values", None) if returns_states else None
        self.states = list(states_of(self.template)) if returns_states else []
        self.outputs = ["logits", *(PRESENT + name for name in self.states)]

    def start(self, sizes: Sizes, seed: int) -> Tensors:
        """The tokens and what the encoder makes of others."""
        (encoder,) = self.encoder
        source = encoder.example({BATCH: sizes[BATCH], LENGTH: sizes[SOURCE]}, seed)
        with torch.no_grad():
            (hidden,) = encoder(source)
        tokens = token_ids(self.model, sizes[BATCH], sizes[LENGTH], seed + 1).to(hidden.device)
        mask = {"encoder_attention_mask": source["attention_mask"]} if self.masked else {}
        return {"input_ids": tokens, "encoder_hidden_states": hidden.contiguous(), **mask}

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return self.start(sizes, seed)

    def output(self, inputs: Tensors, **more: Any) -> Any:
        (encoder,) = self.encoder
        names = {"input_ids": "decoder_input_ids", "encoder_attention_mask": "attention_mask"}
        given = {names[name]: value for name, value in inputs.items() if name in names}
        encoded = encoder.kind(last_hidden_state=inputs["encoder_hidden_states"])
        return self.model(**given, encoder_outputs=encoded, use_cache=self.returns_states, **more)

    def first_output(self, inputs: Tensors) -> Any:
        """What the model returns for the first tokens, on a cache that keeps all of them."""
        return self.output(inputs, past_key_values=build_cache(self.template, {})) if self.states else self.output(inputs)

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        output = self.first_output(inputs)
        present = states_of(output.past_key_values) if self.states else {}
        return (logits_of(output), *(present[name] for name in self.states))


class NextStep(FirstStep):
    """The decoder of an encoder-decoder on the tokens that follow `past_key_values`, the encoder's side of which never changes."""

    name = "decoder_with_past_model"

    def __init__(self, model: nn.Module, encoder: Encoder) -> None:
        super().__init__(model, encoder, returns_states=True)
        self.sizes = {size: TRACED_SIZES[size] for size in (BATCH, LENGTH, PAST, SOURCE)}
        self.growing_states = [name for name in self.states if not is_on_side(name, "encoder")]
        self.outputs = ["logits", *(PRESENT + name for name in self.growing_states)]

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        before = {BATCH: sizes[BATCH], SOURCE: sizes[SOURCE], LENGTH: max(1, sizes[PAST])}
        start = self.start(before, seed)
        with torch.no_grad():
            states = states_of(self.first_output(start).past_key_values)
        if not sizes[PAST]:
            states = {
                name: value if is_on_side(name, "encoder") else state_before_tokens(name, value) for name, value in states.items()
            }
        tokens = token_ids(self.model, sizes[BATCH], sizes[LENGTH], seed + 2).to(start["input_ids"].device)
        return {**start, "input_ids": tokens} | {PAST_KEY_VALUES + name: value.contiguous() for name, value in states.items()}

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        states, others = split_states(inputs)
        output = self.output(others, past_key_values=build_cache(self.template, states))
        present = states_of(output.past_key_values)
        return (logits_of(output), *(present[name] for name in self.growing_states))
