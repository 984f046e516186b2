"""A decoder with its cache as inputs and outputs: one ONNX file that serves the prompt and every step after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from retrofit.errors import CaptureError
from retrofit.onnx.exporter.cache_states import (
    WITHOUT_CACHE,
    build_cache,
    extra_states,
    growth_axes,
    state_before_tokens,
    states_of,
)
from retrofit.onnx.exporter.export_part import (
    BATCH,
    CACHE,
    LENGTH,
    PAST,
    PAST_KEY_VALUES,
    PRESENT,
    STATE_LENGTHS,
    TRACED_SIZES,
    ExportPart,
    Sizes,
    Tensors,
    optional_inputs,
    split_states,
)
from retrofit.runtime.example_inputs import device_of, forward_parameters, token_ids
from retrofit.runtime.probes import (
    accepts,
    ids_name,
    logits_of,
)


class Decoder(ExportPart):
    """A decoder by itself, on the tokens that follow `past_key_values`, which may be none; it returns `present`.

    Where a layer keeps a state of a fixed size (the window of a convolution, the sum of a recurrence), what it computes from
    several tokens depends on how they are split into steps: then a step is one token, and padding leaves such a state as it was.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model)
        ids, cache = ids_name(inputs), cache_name(model, inputs)
        if ids is None or cache is None:
            raise CaptureError(
                "the model keeps no cache", why="its forward takes none of those that it returns", remedy=WITHOUT_CACHE
            )
        self.ids, self.cache = ids, cache
        tokens = self.tokens(2, max(STATE_LENGTHS), 0)
        alone = {ids: tokens[:, :6], "use_cache": False}
        self.extras = tuple(optional_inputs(model, alone, ("attention_mask", "position_ids")))
        self.template = getattr(model(**{ids: tokens[:, :6], "use_cache": True}), cache)
        self.states = list(states_of(self.template))
        if not self.states:
            raise CaptureError("the model keeps no cache", why="what it returned as its cache is empty", remedy=WITHOUT_CACHE)
        self.growing = growth_axes({length: self.states_after(tokens[:, :length]) for length in STATE_LENGTHS})
        self.fixed = [name for name in extra_states(self.template) if name not in self.growing]
        dynamic = (BATCH, PAST) if self.fixed else (BATCH, LENGTH, PAST)
        self.sizes = {size: TRACED_SIZES[size] for size in dynamic}
        self.masks_new_tokens_only = False  # whether the model takes a mask of the step's tokens, not of all
        self.outputs = ["logits", *(PRESENT + name for name in self.states)]

    def tokens(self, batch: int, length: int, seed: int) -> Tensor:
        return token_ids(self.model, batch, length, seed).to(device_of(self.model))

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        batch, length, past = sizes[BATCH], sizes.get(LENGTH, 1), sizes[PAST]
        tokens = self.tokens(batch, past + length, seed)
        step = self.step(tokens, past)
        if seed and "attention_mask" in step:
            step["attention_mask"][0, : past // 2] = 0
        return {**step, **self.past(tokens[:, :past])}

    def step(self, tokens: Tensor, past: int) -> Tensors:
        """The inputs for the tokens after the first `past` ones, without the states."""
        batch, total = tokens.shape
        numbers = torch.arange(past, total, device=tokens.device).expand(batch, -1).contiguous()
        every = {"attention_mask": torch.ones_like(tokens), "position_ids": numbers}
        return {"input_ids": tokens[:, past:].contiguous(), **{name: every[name] for name in self.extras}}

    def past(self, tokens: Tensor) -> Tensors:
        """The states after these tokens, which may be none, as inputs."""
        states = self.states_after(tokens if tokens.shape[1] else self.tokens(len(tokens), 1, 0))
        if not tokens.shape[1]:
            states = {name: state_before_tokens(name, value, self.growing) for name, value in states.items()}
        return {PAST_KEY_VALUES + name: value.contiguous() for name, value in states.items()}

    def states_after(self, tokens: Tensor) -> Tensors:
        """All that the model itself keeps in its cache after these tokens."""
        with torch.no_grad():
            begun = self.model(**{self.ids: tokens, self.cache: build_cache(self.template, {}), "use_cache": True})
        return states_of(getattr(begun, self.cache))

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        states, others = split_states(inputs)
        mask = others.get("attention_mask")
        output = self.output(others, build_cache(self.template, states))
        present = states_of(getattr(output, self.cache))
        if mask is not None:
            real = mask[:, -1] != 0
            for name in self.fixed:
                of_rows = real.reshape(-1, *(1 for _ in present[name].shape[1:]))
                present[name] = torch.where(of_rows, present[name], states[name])
        return (logits_of(output), *(present[name] for name in self.states))

    def output(self, others: Tensors, cache: Any) -> Any:
        """What the model returns for a step on its cache."""
        given = {self.ids if name == "input_ids" else name: value for name, value in others.items()}
        if "attention_mask" in given and self.masks_new_tokens_only:
            mask = given["attention_mask"]
            given["attention_mask"] = mask[:, mask.shape[1] - given[self.ids].shape[1] :]
        return self.model(**given, **{self.cache: cache, "use_cache": True})

    def logits_on_own_cache(self, tokens: Tensor, ends: Iterable[int]) -> Tensor:
        """The logits of the tokens in steps on the model's own cache, which is never taken apart."""
        cache, logits = build_cache(self.template, {}), []
        for start, end in itertools.pairwise((0, *ends)):
            output = self.output(self.step(tokens[:, :end], start), cache)
            cache = getattr(output, self.cache)
            logits.append(logits_of(output))
        return torch.cat(logits, 1)


def cache_name(model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """The argument of the model's forward that takes what it returns under the same name as its cache; None where there is none."""
    if accepts(model, CACHE):
        return CACHE
    output = model(**{**inputs, "use_cache": True}) if accepts(model, "use_cache") else None
    return next((name for name in forward_parameters(model) if isinstance(getattr(output, name, None), Cache)), None)
