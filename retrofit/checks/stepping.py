"""Decoding step by step on a cache, against the whole sequence in one forward."""

from __future__ import annotations

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
    logits_of,
    output_ids_name,
    resized_like,
    run,
)

STEPS = 2  # tokens decoded one at a time
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
    """The model keeps no cache."""


def compare_stepping(arithmetic: Arithmetic, inputs: Inputs, way: str) -> Comparison | None:
    """Most of a sequence at once and the rest token by token, against all of it at once; None where the model keeps no cache."""
    model = arithmetic.model
    if not accepts(model, "use_cache") and "use_cache" not in inputs:
        return None
    whole, positions = step_inputs(model, inputs, way)

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        full = logits_of(run(model, whole))
        name = output_ids_name(whole, full)
        pieces = step_through(model, whole, name, way == REORDERED) if name is not None and full.shape[1] > STEPS else None
        if name is None or pieces is None:
            raise NoCache
        real = positions if positions is not None else torch.ones_like(whole[name], dtype=torch.bool)
        return torch.cat(pieces, 1)[real], full[real]

    try:
        return arithmetic.compare(ways)
    except NoCache:
        return None


def step_inputs(model: nn.Module, inputs: Inputs, way: str) -> tuple[dict[str, Any], torch.Tensor | None]:
    """A batch to decode step by step, and which of its positions are no padding, None where none is."""
    if way == PADDED:
        _, long, _ = pad_inputs(model, inputs, "left")
        return {**long, "use_cache": False}, long["attention_mask"].bool()
    whole = resized_like(model, inputs, 2, seed=17)
    name = ids_name(inputs)
    if name is not None and not has_two_sides(inputs) and accepts(model, "attention_mask"):
        whole.setdefault("attention_mask", torch.ones_like(whole[name], dtype=torch.long))
    return {**whole, "use_cache": False}, None


def step_through(model: nn.Module, whole: Inputs, name: str, reorders: bool = False) -> list[torch.Tensor] | None:
    """The logits of the sequence without its last tokens, then of each of these, all on one cache; None where there is none.

    Where it `reorders`, the rows are in reverse order in the first of these calls, and the cache is reordered before the next.
    """
    total, rows = whole[name].shape[1], len(whole[name])
    pieces, cache = [], None
    for start, stop in [(0, total - STEPS), *((last, last + 1) for last in range(total - STEPS, total))]:
        chunk = {**section(whole, name, start, stop), "use_cache": True}
        if reorders and not start:
            chunk = {key: value.flip(0) if has_rows(value, rows) else value for key, value in chunk.items()}
        output = run(model, chunk, past_key_values=cache) if cache is not None else run(model, chunk)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return None
        logits = logits_of(output)
        if reorders and not start:
            if not hasattr(cache, "reorder_cache"):
                return None
            cache.reorder_cache(torch.arange(rows - 1, -1, -1, device=logits.device))
            logits = logits.flip(0)
        pieces.append(logits)
    return pieces


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
    whole, positions = step_inputs(model, inputs, way)
    with record_activations(model) as full:
        outputs = logits_of(run(model, whole))
    name = output_ids_name(whole, outputs)
    assert name is not None
    real = positions if positions is not None else torch.ones_like(whole[name], dtype=torch.bool)
    with record_activations(model) as stepped:
        step_through(model, whole, name, way == REORDERED)
    if way == REORDERED:
        stepped = {path: [values[0].flip(0), *values[1:]] for path, values in stepped.items()}
    joined = {path: [torch.cat(values, 1)] for path, values in stepped.items() if all(value.dim() == 3 for value in values)}
    now = at_positions(joined, real)
    before = {path: values for path, values in at_positions(full, real).items() if len(values) == 1 and path in now}
    return first_divergence(now, before, limit)
