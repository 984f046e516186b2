"""The padding check: a padded sequence gives what it gives alone, padded left and right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retrofit.checks.departure import Departure, Trail, first_departure, recorded
from retrofit.checks.trial import Trial, judged
from retrofit.runtime.outcomes import Finding, attempted, merged, skipped
from retrofit.runtime.probes import (
    Inputs,
    accepts,
    filler_id,
    has_two_sides,
    ids_name,
    is_decoder_side,
    is_per_token,
    logits_of,
    output_ids_name,
    resized_like,
    run,
    tolerance_of,
)

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject

SIDES = ("left", "right")
PADS = 3  # padding tokens put before or after a sequence


def check(subject: Subject) -> Finding:
    if not takes_padding(subject.model, subject.inputs):
        return skipped("it takes no attention mask, or no token ids to pad")
    return merged({side: attempted(judge, subject, side) for side in SIDES})


def judge(subject: Subject, side: str) -> Finding:
    dense = subject.reference.padding.get(side) if subject.reference is not None else None
    if subject.reference is not None and dense is None:
        return skipped("the dense model does not run when padded")
    trial = padding(subject.model, subject.inputs, side)
    if not trial.agrees and subject.reference is None and side == "left" and not accepts(subject.model, "position_ids"):
        return Finding("skipped", f"{trial.gap:.1e}", "it cannot be told the positions, so padding on the left may shift them")
    return judged(
        trial, dense, subject.exact, lambda: departure_by_padding(subject.model, subject.inputs, side).said(subject.placed)
    )


def takes_padding(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model has token ids to pad and an attention mask to say so with."""
    name = ids_name(inputs)
    return name is not None and inputs[name].shape[1] > PADS + 1 and accepts(model, "attention_mask")


def padding(model: nn.Module, inputs: Inputs, side: str) -> Trial:
    """A sequence padded in a batch, against the same sequence alone."""
    alone, long, kept = padded(model, inputs, side)
    plain = logits_of(run(model, alone))
    outputs = logits_of(run(model, long))
    return Trial.of(outputs[:1, kept] if output_ids_name(long, outputs) else outputs[:1], plain)


def padded(model: nn.Module, inputs: Inputs, side: str) -> tuple[dict[str, Any], dict[str, Any], slice]:
    """A sequence alone, the same sequence padded in a batch with a longer one, and where the outputs for it stand there.

    Padding on the left comes with the positions that `generate` derives from the mask, where the model takes positions.
    """
    long = resized_like(model, inputs, 2, seed=13)
    name = ids_name(inputs)
    assert name is not None
    width = long[name].shape[1]
    kept = slice(PADS, None) if side == "left" else slice(None, width - PADS)
    mask = torch.ones_like(long[name], dtype=torch.long)
    mask[0] = 0
    mask[0, kept] = 1
    long["attention_mask"] = mask
    long[name] = long[name].masked_fill(mask == 0, filler_id(model))
    if side == "left" and not has_two_sides(inputs) and accepts(model, "position_ids"):
        long["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = {
        key: value[:1] if isinstance(value, torch.Tensor) and value.shape[:1] == (2,) else value for key, value in long.items()
    }
    for key, value in alone.items():
        if is_per_token(value) and not is_decoder_side(key) and value.shape[1] == width:
            alone[key] = value[:, kept]
    return alone, long, slice(None) if has_two_sides(inputs) else kept


def departure_by_padding(model: nn.Module, inputs: Inputs, side: str) -> Departure:
    """The first module whose output for a sequence depends on its padding."""
    alone, long, kept = padded(model, inputs, side)
    with recorded(model) as plain:
        tolerance = tolerance_of(logits_of(run(model, alone)))
    with recorded(model) as filled:
        run(model, long)
    ours: Trail = {}
    theirs: Trail = {}
    for path, values in plain.items():
        for one, other in zip(values, filled.get(path, []), strict=False):
            row = other[:1] if other.shape[1:] == one.shape[1:] else other[:1, kept]
            if row.shape == one.shape:
                theirs.setdefault(path, []).append(one)
                ours.setdefault(path, []).append(row)
    return first_departure(ours, theirs, tolerance)
