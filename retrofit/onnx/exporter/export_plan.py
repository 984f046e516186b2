"""Which ONNX files a model becomes, and whether the states in them reproduce what the whole sequence gives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from retrofit.errors import CaptureError, RetrofitError, first_line
from retrofit.onnx.exporter.cache_states import (
    states_of,
)
from retrofit.onnx.exporter.decoder_part import Decoder
from retrofit.onnx.exporter.encoder_decoder_parts import Encoder, FirstStep, NextStep
from retrofit.onnx.exporter.export_part import LENGTH, PAST_KEY_VALUES, PRESENT, ExportPart, WholeModel
from retrofit.runtime.agreement import Arithmetic, Comparison
from retrofit.runtime.probes import (
    accepts,
    can_generate,
    has_two_sides,
    ids_name,
    logits_of,
)

CacheMode: TypeAlias = Literal["auto", "past", "none"]


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """The parts that a model is exported as, and why they keep no cache where they could have."""

    parts: tuple[ExportPart, ...]
    why_no_cache: str = ""

    @property
    def cached(self) -> bool:
        return any(name.startswith(PRESENT) for part in self.parts for name in part.outputs)


@torch.no_grad()
def plan_export(model: nn.Module, inputs: Mapping[str, Any], cache: CacheMode) -> ExportPlan:
    """The parts of the model, with its cache as tensors where it has one, for `auto`, and else with the reason in the plan.

    Raises `CaptureError` for `past` where there is no such cache.
    """
    two_sided = has_two_sides(inputs) and accepts(model, "encoder_outputs") and callable(getattr(model, "get_encoder", None))
    why = ""
    if cache == "past" and ids_name(inputs) is None:
        raise CaptureError(
            f"{type(model).__name__} cannot be exported with its cache",
            why="it reads no token ids, one after the other",
            remedy="export it with cache=none",
        )
    if cache != "none" and ids_name(inputs) is not None and (two_sided or can_generate(model, inputs) or cache == "past"):
        try:
            return ExportPlan(
                require_exact_states(
                    encoder_decoder_parts(model, inputs, returns_states=True) if two_sided else (Decoder(model, inputs),),
                    Arithmetic(model, {**inputs, "use_cache": False}),
                )
            )
        except Exception as error:  # whatever the model's own code raises
            why = str(error) if isinstance(error, RetrofitError) else first_line(error)
            if cache == "past":
                raise CaptureError(
                    f"{type(model).__name__} cannot be exported with its cache", why=why, remedy="export it with cache=none"
                ) from error
    return ExportPlan(
        encoder_decoder_parts(model, inputs, returns_states=False) if two_sided else (WholeModel(model, inputs),), why
    )


def encoder_decoder_parts(model: nn.Module, inputs: Mapping[str, Any], returns_states: bool) -> tuple[ExportPart, ...]:
    encoder = Encoder(model, inputs)
    first = FirstStep(model, encoder, returns_states)
    return (encoder, first, NextStep(model, encoder)) if returns_states else (encoder, first)


def require_exact_states(parts: tuple[ExportPart, ...], arithmetic: Arithmetic) -> tuple[ExportPart, ...]:
    """The parts, where each that goes on from states gives what the whole sequence gives; else `CaptureError`."""
    for part in parts:
        if isinstance(part, Decoder):
            comparison = compare_decoder(part, arithmetic)
        elif isinstance(part, NextStep):
            comparison = compare_next_step(part, arithmetic)
        else:
            continue
        if not comparison.agrees:
            raise CaptureError(
                "the model's cache is more than its tensors",
                why=f"put together again from them it is {comparison.measured} from the full forward",
            )
    return parts


def compare_decoder(part: Decoder, arithmetic: Arithmetic) -> Comparison:
    """Steps on the states against one forward of all; where they do not agree, with a mask of the step's tokens alone.

    A model whose own steps are as far from its forward as its rounding explains (some keep the decays of a sum in float32) is held
    against these steps.
    """
    tokens = part.tokens(2, 12, 1)

    def ways() -> tuple[Tensor, Tensor]:
        return logits_in_steps(part, tokens), logits_of(part.model(**{part.ids: tokens, "use_cache": False}))

    def own_ways() -> tuple[Tensor, Tensor]:
        return logits_in_steps(part, tokens), part.logits_on_own_cache(tokens, ends_of_steps(part))

    comparison = arithmetic.compare(ways)
    if not comparison.agrees and "attention_mask" in part.extras:
        part.masks_new_tokens_only = True
        other = arithmetic.compare(ways)
        part.masks_new_tokens_only = other.agrees
        comparison = other if other.agrees else comparison
    if not comparison.agrees and comparison.gap <= arithmetic.explained:
        return arithmetic.compare(own_ways, in_doubt=True)
    return comparison


def ends_of_steps(part: Decoder) -> Sequence[int]:
    return (7, 12) if LENGTH in part.sizes else range(1, 13)


def logits_in_steps(part: Decoder, tokens: Tensor) -> Tensor:
    """The logits of the tokens, 12 of them, taken step by step on the states."""
    states, logits_so_far = part.past(tokens[:, :0]), []
    for start, end in itertools.pairwise((0, *ends_of_steps(part))):
        logits, *after = part({**part.step(tokens[:, :end], start), **states})
        states = {PAST_KEY_VALUES + name: value for name, value in zip(part.states, after, strict=True)}
        logits_so_far.append(logits)
    return torch.cat(logits_so_far, 1)


def compare_next_step(part: NextStep, arithmetic: Arithmetic) -> Comparison:
    """A step on the states against one forward of everything."""
    cut = 2

    def ways() -> tuple[Tensor, Tensor]:
        start = part.start(part.sizes, 1)
        whole = logits_of(part.output(start))
        shorter = {**start, "input_ids": start["input_ids"][:, :cut]}
        states = {PAST_KEY_VALUES + name: value for name, value in states_of(part.first_output(shorter).past_key_values).items()}
        return part({**start, "input_ids": start["input_ids"][:, cut:]} | states)[0], whole[:, cut:]

    return arithmetic.compare(ways)
