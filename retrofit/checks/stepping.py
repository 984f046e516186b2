"""Decoding step by step on a cache, against the whole sequence in one forward."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from retrofit.checks.activations import at_positions, record_activations
from retrofit.checks.divergence import Divergence, first_divergence
from retrofit.checks.padded_inputs import pad_inputs, takes_padding
from retrofit.runtime.agreement import Arithmetic, Comparison
from retrofit.runtime.probes import (
    Inputs,
    accepts,
    has_two_sides,
    ids_name,
    is_decoder_side,
    is_per_token,
    is_token_ids,
    logits_of,
    output_ids_name,
    resized_like,
    run,
)

STEPS = 2  # tokens decoded one at a time; one where a sequence is padded
PLAIN, PADDED, REORDERED = "steps", "left-padded steps", "reordered steps"


def ways_to_step(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """The ways a sequence is decoded step by step: plainly, with rows that change places as in a beam search, and where a model
    without a second side takes a mask also padded on the left."""
    pads = takes_padding(model, inputs) and not has_two_sides(inputs)
    return (PLAIN, PADDED, REORDERED) if pads else (PLAIN, REORDERED)


def keeps_cache(model: nn.Module, inputs: Inputs, name: str) -> bool:
    """Whether the model decodes on a cache along that input."""
    if is_decoder_side(name) != has_two_sides(inputs):
        return False
    try:
        return compare_stepping(Arithmetic(model, inputs), inputs, PLAIN) is not None
    except Exception:  # a model that cannot decode
        return False


class NoCache(Exception):
    """The model keeps no cache, or none that can be decoded on in this way."""


def compare_stepping(arithmetic: Arithmetic, inputs: Inputs, way: str) -> Comparison | None:
    """Most of a sequence at once and the rest token by token, against all of it at once; None where the model keeps no cache.

    Plain and reordered steps are of one sequence: its rows change places before the last token.
    """
    model = arithmetic.model
    if not accepts(model, "use_cache") and "use_cache" not in inputs:
        return None
    whole, real = step_inputs(model, inputs, way)

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        full = arithmetic.logits(whole)
        name = output_ids_name(whole, full)
        if name is None or full.shape[1] <= STEPS:
            raise NoCache
        stepped = arithmetic.once(("steps", way == PADDED), lambda: step_through(model, whole, name, way != PADDED))
        if stepped is None or (way == REORDERED and not stepped.reordered):
            raise NoCache
        places = places_of(way, stepped, real, whole[name])
        return torch.cat(stepped.logits, 1)[places], full[places]

    try:
        return arithmetic.compare(ways)
    except NoCache:
        return None


@dataclasses.dataclass(frozen=True)
class Stepped:
    """The logits of a sequence without its last tokens, then of each of these, all on one cache."""

    logits: tuple[torch.Tensor, ...]
    reordered: bool  # whether the rows changed places before the last token, as the cache did


def places_of(way: str, stepped: Stepped, real: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """The positions that the way is about, a mask (batch, length): no padding, and the last token where rows changed places."""
    places = real.clone() if real is not None else torch.ones_like(ids, dtype=torch.bool)
    if stepped.reordered:
        last = torch.arange(ids.shape[1], device=ids.device) == ids.shape[1] - 1
        places &= last if way == REORDERED else ~last
    return places


def step_inputs(model: nn.Module, inputs: Inputs, way: str) -> tuple[dict[str, Any], torch.Tensor | None]:
    """A batch to decode step by step, and which of its positions are no padding, None where none is."""
    if way == PADDED:
        _, long, _ = pad_inputs(model, inputs, "left")
        return {**long, "use_cache": False}, long["attention_mask"].bool()
    whole = resized_like(model, inputs, 2, seed=17)
    for key, value in whole.items():
        if is_token_ids(value):
            whole[key] = torch.stack([value[0], value[0].roll(1)])  # rows that differ at every position: a mix-up shows
    name = ids_name(inputs)
    if name is not None and not has_two_sides(inputs) and accepts(model, "attention_mask"):
        whole.setdefault("attention_mask", torch.ones_like(whole[name], dtype=torch.long))
    return {**whole, "use_cache": False}, None


def step_through(model: nn.Module, whole: Inputs, name: str, reorders: bool) -> Stepped | None:
    """The sequence decoded step by step; None where the model returns no cache.

    Where it `reorders`, the rows and the cache are in reverse order for the last token, if the cache can be reordered.
    """
    total, rows = whole[name].shape[1], len(whole[name])
    pieces: list[torch.Tensor] = []
    cache: Any = None
    reordered = False
    steps = STEPS if reorders else 1
    for start, stop in [(0, total - steps), *((last, last + 1) for last in range(total - steps, total))]:
        chunk = {**section(whole, name, start, stop), "use_cache": True}
        if reorders and stop == total and hasattr(cache, "reorder_cache"):
            cache.reorder_cache(torch.arange(rows - 1, -1, -1, device=whole[name].device))
            chunk = {key: value.flip(0) if has_rows(value, rows) else value for key, value in chunk.items()}
            reordered = True
        output = run(model, chunk, past_key_values=cache) if cache is not None else run(model, chunk)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return None
        pieces.append(logits_of(output).flip(0) if reordered else logits_of(output))
    return Stepped(tuple(pieces), reordered)


def has_rows(value: Any, rows: int) -> bool:
    """Whether an input has an entry for each row of the batch."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def section(inputs: Inputs, name: str, start: int, stop: int) -> dict[str, Any]:
    """The inputs for tokens `start` to `stop` of the argument `name`; masks reach back to the first token."""
    side, length = is_decoder_side(name), inputs[name].shape[1]
    chunk = dict(inputs)
    for key, value in inputs.items():
        if is_per_token(value) and is_decoder_side(key) == side and value.shape[1] == length:
            chunk[key] = value[:, :stop] if key.endswith("attention_mask") else value[:, start:stop]
    return chunk


def locate_stepping(model: nn.Module, inputs: Inputs, way: str, limit: float) -> Divergence:
    """The first module that returns something else when decoding goes step by step."""
    whole, real = step_inputs(model, inputs, way)
    with record_activations(model) as full:
        outputs = logits_of(run(model, whole))
    name = output_ids_name(whole, outputs)
    assert name is not None
    with record_activations(model) as activations:
        stepped = step_through(model, whole, name, way != PADDED)
    assert stepped is not None
    if stepped.reordered:
        activations = {path: [*values[:-1], values[-1].flip(0)] for path, values in activations.items()}
    places = places_of(way, stepped, real, whole[name])
    joined = {path: [torch.cat(values, 1)] for path, values in activations.items() if all(value.dim() == 3 for value in values)}
    now = at_positions(joined, places)
    before = {path: values for path, values in at_positions(full, places).items() if len(values) == 1 and path in now}
    return first_divergence(now, before, limit)
