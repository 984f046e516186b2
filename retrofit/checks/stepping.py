"""Decoding step by step on a cache, against the whole sequence in one forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from retrofit.checks.activations import at_positions, record_activations
from retrofit.checks.divergence import Divergence, first_divergence
from retrofit.checks.padded_inputs import Padded, pad_inputs, takes_padding
from retrofit.inputs.probes import (
    Inputs,
    accepts,
    has_two_sides,
    ids_name,
    is_decoder_side,
    is_floating,
    is_per_token,
    is_token_ids,
    logits_of,
    output_ids_name,
    placeholders,
    resized_like,
    run,
)
from retrofit.numerics.agreement import Arithmetic, Comparison

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
        return compare_stepping(Arithmetic(model, inputs), step_batch(model, inputs, PLAIN), PLAIN) is not None
    except Exception:  # a model that cannot decode
        return False


class NoCache(Exception):
    """The model keeps no cache, or none that can be decoded on in this way."""


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """A batch to decode step by step: its inputs in one forward, and what one of the ways is about."""

    whole: dict[str, Any]
    real: torch.Tensor | None = None  # positions (rows, length): no padding; None where all are meant
    rows: tuple[int, ...] = ()  # those of `whole` that are decoded, where not all are
    reorders: bool = True  # whether its rows change places before the last token

    @property
    def decoded(self) -> dict[str, Any]:
        """The inputs of the rows that are decoded."""
        count = next((len(value) for value in self.whole.values() if isinstance(value, torch.Tensor) and value.dim()), 0)
        return {key: self.rows_of(value) if has_rows(value, count) else value for key, value in self.whole.items()}

    def rows_of(self, value: torch.Tensor) -> torch.Tensor:
        return value[list(self.rows)] if self.rows else value

    @property
    def key(self) -> Hashable:
        """What tells its steps from those of other batches."""
        return "steps", self.rows, self.reorders


def compare_stepping(arithmetic: Arithmetic, batch: StepBatch, way: str) -> Comparison | None:
    """Most of a sequence at once and the rest token by token, against all of it at once; None where the model keeps no cache.

    Plain and reordered steps are of one sequence: its rows change places before the last token.
    """
    model, decoded = arithmetic.model, batch.decoded
    if not accepts(model, "use_cache") and "use_cache" not in batch.whole:
        return None

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = arithmetic.logits(batch.whole)
        name, full = output_ids_name(batch.whole, outputs), batch.rows_of(outputs)
        if name is None or full.shape[1] <= STEPS:
            raise NoCache
        stepped = arithmetic.once(batch.key, lambda: step_through(model, decoded, name, batch.reorders))
        if stepped is None or (way == REORDERED and not stepped.reordered):
            raise NoCache
        places = places_of(way, stepped, batch.real, decoded[name])
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


def shared_steps(padded: Padded, way: str) -> StepBatch:
    """Of a batch that checks share the row that is padded on the left and one that is not, decoded together for all the ways."""
    real = padded.batch["attention_mask"][list(padded.stepped)].bool()
    real[1 if way == PADDED else 0] = False
    return StepBatch(padded.batch, real, padded.stepped)


def step_batch(model: nn.Module, inputs: Inputs, way: str) -> StepBatch:
    """A batch of its own to decode step by step in that way."""
    if way == PADDED:
        long = pad_inputs(model, inputs, "left").batch
        return StepBatch(without_cache(model, long), long["attention_mask"].bool(), reorders=False)
    whole = resized_like(model, inputs, 2, seed=17)
    for key, value in whole.items():
        if is_token_ids(value):
            whole[key] = torch.stack([value[0], value[0].roll(1)])  # rows that differ at every position: a mix-up shows
    name = ids_name(inputs)
    if name is not None and not has_two_sides(inputs) and accepts(model, "attention_mask"):
        whole.setdefault("attention_mask", torch.ones_like(whole[name], dtype=torch.long))
    return StepBatch(without_cache(model, whole))


def without_cache(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The inputs for a forward that keeps no cache, where the model can be asked for one."""
    return {**inputs, "use_cache": False} if "use_cache" in inputs or accepts(model, "use_cache") else dict(inputs)


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
    """The inputs for tokens `start` to `stop` of the argument `name`; masks reach back to the first token.

    What tokens stand for, images say, goes with the first ones alone: later the cache has it.
    """
    side, length = is_decoder_side(name), inputs[name].shape[1]
    known = start > 0 and bool(placeholders(inputs, name).any())
    chunk = {key: value for key, value in inputs.items() if not (known and is_floating(value))}
    for key, value in inputs.items():
        if is_per_token(value) and is_decoder_side(key) == side and value.shape[1] == length:
            chunk[key] = value[:, :stop] if key.endswith("attention_mask") else value[:, start:stop]
    return chunk


def locate_stepping(model: nn.Module, batch: StepBatch, way: str, limit: float) -> Divergence:
    """The first module that returns something else when decoding goes step by step."""
    whole = batch.decoded
    with record_activations(model) as full:
        outputs = logits_of(run(model, whole))
    name = output_ids_name(whole, outputs)
    assert name is not None
    with record_activations(model) as activations:
        stepped = step_through(model, whole, name, batch.reorders)
    assert stepped is not None
    if stepped.reordered:
        activations = {path: [*values[:-1], values[-1].flip(0)] for path, values in activations.items()}
    places = places_of(way, stepped, batch.real, whole[name])
    joined = {path: [torch.cat(values, 1)] for path, values in activations.items() if all(value.dim() == 3 for value in values)}
    now = at_positions(joined, places)
    before = {path: values for path, values in at_positions(full, places).items() if len(values) == 1 and path in now}
    return first_divergence(now, before, limit)
