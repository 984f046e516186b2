"""A model as functions of named tensors: one, or an encoder, a decoder's first step and its next ones; each becomes an ONNX file.

Names are those of the ecosystem's ONNX models. A part knows its free sizes, draws inputs of any size, and is a module itself,
whose forward takes its inputs as one mapping and returns its outputs as a tuple: what a tracer needs, and what torch can run too.

    model                     input_ids, attention_mask, …                                          → logits
    model                     input_ids, attention_mask, position_ids, past_key_values.{i}.key, …   → logits, present.{i}.…
    encoder_model             input_ids, attention_mask                                             → last_hidden_state
    decoder_model             input_ids, encoder_hidden_states, encoder_attention_mask              → logits, present.{i}.…
    decoder_with_past_model   the same and past_key_values.{i}.decoder.key, …                       → the same
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from retrofit.errors import CaptureError, RetrofitError, first_line
from retrofit.onnx.exporter.states import beside, cache_of, emptied, growth, is_of, states_of, strides_of
from retrofit.program.tracing_contexts import disable_cache
from retrofit.runtime.example_inputs import device_of, forward_parameters, token_ids
from retrofit.runtime.probes import (
    accepts,
    can_generate,
    distance,
    extent_of,
    has_two_sides,
    ids_name,
    is_decoder_side,
    logits_of,
    named_outputs,
    resized,
    tolerance_of,
)

CacheMode: TypeAlias = Literal["auto", "past", "none"]
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
LENGTHS = (6, 7, 12)  # numbers of tokens behind which states are compared, to see which grow
TRACED = {BATCH: 2, LENGTH: 5, PAST: 7, SOURCE: 11}  # extents to trace with, no two alike


class ExportPart(nn.Module):
    """One function of the model. `sizes` are its free sizes as it is traced; `outputs` the names of what forward returns."""

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
        """For every input the axes that are free, and the size each is: an axis is what grows when that size grows.

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
        every = strides_of(self.template).get(name.removeprefix(PAST_KEY_VALUES), 1) if size == PAST else 1
        return f"{size}{PER}{every}" if every > 1 else size


class Whole(ExportPart):
    """The model as it is, without a cache: every tensor that it returns by name."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        self.fixed = {name: value for name, value in inputs.items() if name not in tensors}
        self.given = tensors | extras(model, {**self.fixed, **tensors}, ("attention_mask", "token_type_ids"))
        batch, length = extent_of(self.given)
        self.sizes = {BATCH: max(2, batch)} | ({LENGTH: max(4, length)} if length else {})
        self.outputs = list(self.named(self.example(self.sizes)))

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return padded(resized(self.model, self.given, sizes[BATCH], sizes.get(LENGTH, 0), seed), seed)

    def named(self, inputs: Tensors) -> Tensors:
        with disable_cache(self.model):
            return named_outputs(self.model(**inputs, **self.fixed))

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        named = self.named(inputs)
        return tuple(named[name] for name in self.outputs)


class Decoder(ExportPart):
    """A decoder by itself, on the tokens that follow `past_key_values`; it hands on `present`. Nothing need come before.

    Where a layer keeps a state of a fixed size (the window of a convolution, the sum of a recurrence), what it makes of several
    tokens hangs on how they fall into pieces: then a step is one token, and one that is padding leaves such a state as it was.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model)
        ids, cache = ids_name(inputs), cache_name(model, inputs)
        if ids is None or cache is None:
            raise CaptureError("the model keeps no cache", why="its forward takes none of those that it returns")
        self.ids, self.cache = ids, cache
        tokens = self.tokens(2, max(LENGTHS), 0)
        alone = {ids: tokens[:, :6], "use_cache": False}
        self.extras = tuple(extras(model, alone, ("attention_mask", "position_ids")))
        self.template = getattr(model(**{ids: tokens[:, :6], "use_cache": True}), cache)
        self.states = list(states_of(self.template))
        if not self.states:
            raise CaptureError("the model keeps no cache", why="what it returned as its cache is empty")
        self.growing = growth({length: self.behind(tokens[:, :length]) for length in LENGTHS})
        self.fixed = [name for name in beside(self.template) if name not in self.growing]
        free = (BATCH, PAST) if self.fixed else (BATCH, LENGTH, PAST)
        self.sizes = {size: TRACED[size] for size in free}
        self.recent = False  # whether the model wants a mask of the step's tokens and not of all
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
        """The inputs for the tokens behind the first `past` ones, but for the states."""
        batch, total = tokens.shape
        numbers = torch.arange(past, total, device=tokens.device).expand(batch, -1).contiguous()
        every = {"attention_mask": torch.ones_like(tokens), "position_ids": numbers}
        return {"input_ids": tokens[:, past:].contiguous(), **{name: every[name] for name in self.extras}}

    def past(self, tokens: Tensor) -> Tensors:
        """The states behind these tokens, which may be none."""
        states = self.behind(tokens if tokens.shape[1] else self.tokens(len(tokens), 1, 0))
        if not tokens.shape[1]:
            states = {name: emptied(name, value, self.growing) for name, value in states.items()}
        return {PAST_KEY_VALUES + name: value.contiguous() for name, value in states.items()}

    def behind(self, tokens: Tensor) -> Tensors:
        """What the model itself keeps behind these tokens, all of it."""
        with torch.no_grad():
            begun = self.model(**{self.ids: tokens, self.cache: cache_of(self.template, {}), "use_cache": True})
        return states_of(getattr(begun, self.cache))

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        states, others = parted(inputs)
        others[self.ids] = others.pop("input_ids")
        mask = others.get("attention_mask")
        if mask is not None and self.recent:
            others["attention_mask"] = mask[:, mask.shape[1] - others[self.ids].shape[1] :]
        output = self.model(**others, **{self.cache: cache_of(self.template, states), "use_cache": True})
        present = states_of(getattr(output, self.cache))
        if mask is not None:
            real = mask[:, -1] != 0
            for name in self.fixed:
                of_rows = real.reshape(-1, *(1 for _ in present[name].shape[1:]))
                present[name] = torch.where(of_rows, present[name], states[name])
        return (logits_of(output), *(present[name] for name in self.states))


def cache_name(model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """The argument of the model's forward that takes what it returns under the same name as its cache; None where there is none."""
    if accepts(model, CACHE):
        return CACHE
    output = model(**{**inputs, "use_cache": True}) if accepts(model, "use_cache") else None
    return next((name for name in forward_parameters(model) if isinstance(getattr(output, name, None), Cache)), None)


class Encoder(ExportPart):
    """The encoder of an encoder-decoder."""

    name = "encoder_model"

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model.get_encoder())  # type: ignore[operator]
        given = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and not is_decoder_side(name)}
        self.given = given | extras(self.model, given, ("attention_mask",))
        self.sizes = {BATCH: TRACED[BATCH], LENGTH: TRACED[SOURCE]}
        self.outputs = ["last_hidden_state"]
        made = self.model(**self.given)
        self.kind: Any = type(made) if dataclasses.is_dataclass(made) else BaseModelOutput  # of what the model's decoder is handed

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return padded(resized(self.model, self.given, sizes[BATCH], sizes[LENGTH], seed), seed)

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        return (self.model(**inputs)[0],)


class FirstStep(ExportPart):
    """The decoder of an encoder-decoder on tokens with none before them."""

    name = "decoder_model"
    keeps = True  # whether it hands on states

    def __init__(self, model: nn.Module, encoder: Encoder, keeps: bool) -> None:
        super().__init__(model)
        self.encoder, self.keeps = (encoder,), keeps  # no child: its weights go into another file
        self.sizes = {size: TRACED[size] for size in (BATCH, LENGTH, SOURCE)}
        self.masked = "attention_mask" in encoder.given and accepts(model, "attention_mask")
        output = self.output(self.start(self.sizes, 0))
        self.template = getattr(output, "past_key_values", None) if keeps else None
        self.states = list(states_of(self.template)) if keeps else []
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
        return self.model(**given, encoder_outputs=encoded, use_cache=self.keeps, **more)

    def begun(self, inputs: Tensors) -> Any:
        """What the model returns for the first tokens, on a cache that keeps all of them."""
        return self.output(inputs, past_key_values=cache_of(self.template, {})) if self.states else self.output(inputs)

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        output = self.begun(inputs)
        present = states_of(output.past_key_values) if self.states else {}
        return (logits_of(output), *(present[name] for name in self.states))


class NextStep(FirstStep):
    """The decoder of an encoder-decoder on the tokens that follow `past_key_values`, the encoder's side of which never changes."""

    name = "decoder_with_past_model"

    def __init__(self, model: nn.Module, encoder: Encoder) -> None:
        super().__init__(model, encoder, keeps=True)
        self.sizes = {size: TRACED[size] for size in (BATCH, LENGTH, PAST, SOURCE)}
        self.handed_on = [name for name in self.states if not is_of(name, "encoder")]
        self.outputs = ["logits", *(PRESENT + name for name in self.handed_on)]

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        before = {BATCH: sizes[BATCH], SOURCE: sizes[SOURCE], LENGTH: max(1, sizes[PAST])}
        start = self.start(before, seed)
        with torch.no_grad():
            states = states_of(self.begun(start).past_key_values)
        if not sizes[PAST]:
            states = {name: value if is_of(name, "encoder") else emptied(name, value) for name, value in states.items()}
        tokens = token_ids(self.model, sizes[BATCH], sizes[LENGTH], seed + 2).to(start["input_ids"].device)
        return {**start, "input_ids": tokens} | {PAST_KEY_VALUES + name: value.contiguous() for name, value in states.items()}

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        states, others = parted(inputs)
        output = self.output(others, past_key_values=cache_of(self.template, states))
        present = states_of(output.past_key_values)
        return (logits_of(output), *(present[name] for name in self.handed_on))


def padded(inputs: Mapping[str, Any], seed: int) -> Tensors:
    """The inputs, each as a tensor of its own; the first row is padded on the right unless the seed is 0."""
    made = {name: value.clone(memory_format=torch.contiguous_format) for name, value in inputs.items()}
    mask = made.get("attention_mask")
    if seed and mask is not None:
        mask[0, mask.shape[1] - mask.shape[1] // 3 :] = 0
    return made


def parted(inputs: Tensors) -> tuple[Tensors, Tensors]:
    """The states among a part's inputs, by their own names, and the others."""
    states = {name.removeprefix(PAST_KEY_VALUES): value for name, value in inputs.items() if name.startswith(PAST_KEY_VALUES)}
    return states, {name: value for name, value in inputs.items() if not name.startswith(PAST_KEY_VALUES)}


def extras(model: nn.Module, inputs: Mapping[str, Any], names: tuple[str, ...]) -> Tensors:
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
    with torch.no_grad(), disable_cache(model):
        expected = logits_of(model(**inputs))
        return {
            name: plain[name]
            for name in names
            if name not in inputs and accepts(model, name) and changes_nothing(model, {**inputs, name: plain[name]}, expected)
        }


def changes_nothing(model: nn.Module, inputs: Mapping[str, Any], expected: Tensor) -> bool:
    try:
        return distance(logits_of(model(**inputs)), expected) <= tolerance_of(expected)
    except Exception:  # the model names the argument and wants something else of it
        return False


# ── Which parts a model has ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """The parts that a model is exported as, and why they keep no cache where they could have."""

    parts: tuple[ExportPart, ...]
    why_no_cache: str = ""

    @property
    def cached(self) -> bool:
        return any(name.startswith(PRESENT) for part in self.parts for name in part.outputs)


@torch.no_grad()
def plan(model: nn.Module, inputs: Mapping[str, Any], cache: CacheMode) -> ExportPlan:
    """The parts of the model, with its cache as tensors where it has one, for `auto`, and else with the reason in the plan.

    Raises `CaptureError` for `past` where there is no such cache.
    """
    two_sided = has_two_sides(inputs) and accepts(model, "encoder_outputs") and callable(getattr(model, "get_encoder", None))
    why = ""
    if cache != "none" and ids_name(inputs) is not None and (two_sided or can_generate(model, inputs) or cache == "past"):
        try:
            return ExportPlan(faithful(sides(model, inputs, keeps=True) if two_sided else (Decoder(model, inputs),)))
        except Exception as error:  # whatever the model's own code raises
            why = str(error) if isinstance(error, RetrofitError) else first_line(error)
            if cache == "past":
                raise CaptureError(
                    f"{type(model).__name__} cannot be exported with its cache", why=why, remedy="export it with cache=none"
                ) from error
    return ExportPlan(faithful(sides(model, inputs, keeps=False) if two_sided else (Whole(model, inputs),)), why)


def sides(model: nn.Module, inputs: Mapping[str, Any], keeps: bool) -> tuple[ExportPart, ...]:
    encoder = Encoder(model, inputs)
    first = FirstStep(model, encoder, keeps)
    return (encoder, first, NextStep(model, encoder)) if keeps else (encoder, first)


def faithful(parts: tuple[ExportPart, ...]) -> tuple[ExportPart, ...]:
    """The parts, where each that goes on from states gives what the whole sequence gives; else `CaptureError`."""
    for part in parts:
        if isinstance(part, Decoder):
            gap = gap_of_steps(part)
        elif isinstance(part, NextStep):
            gap = gap_of_next(part)
        else:
            continue
        if gap > 10 * tolerance_of(next(part.model.parameters())):
            raise CaptureError(
                "the model's cache is more than its tensors",
                why=f"put together again from them it is {gap:.1e} from the full forward",
            )
    return parts


def gap_of_steps(part: Decoder) -> float:
    """How far steps on the states come from one forward of all; where that is far, with a mask of the step's tokens alone."""
    tokens = part.tokens(2, 12, 1)
    whole = logits_of(part.model(**{part.ids: tokens, "use_cache": False}))
    gap = distance(in_steps(part, tokens), whole)
    if gap > 10 * tolerance_of(whole) and "attention_mask" in part.extras:
        part.recent = True
        gap = distance(in_steps(part, tokens), whole)
    return gap


def in_steps(part: Decoder, tokens: Tensor) -> Tensor:
    """The logits of the tokens, 12 of them, taken step by step on the states."""
    states, made = part.past(tokens[:, :0]), []
    ends = (7, 12) if LENGTH in part.sizes else range(1, 13)
    for start, end in itertools.pairwise((0, *ends)):
        logits, *after = part({**part.step(tokens[:, :end], start), **states})
        states = {PAST_KEY_VALUES + name: value for name, value in zip(part.states, after, strict=True)}
        made.append(logits)
    return torch.cat(made, 1)


def gap_of_next(part: NextStep) -> float:
    """How far a step on the states comes from one forward of everything."""
    start, cut = part.start(part.sizes, 1), 2
    whole = logits_of(part.output(start))
    shorter = {**start, "input_ids": start["input_ids"][:, :cut]}
    states = states_of(part.begun(shorter).past_key_values)
    rest = {**start, "input_ids": start["input_ids"][:, cut:]} | {PAST_KEY_VALUES + name: value for name, value in states.items()}
    return distance(part(rest)[0], whole[:, cut:])
