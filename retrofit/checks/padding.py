"""The padding check: a padded sequence gives what it gives alone, padded left and right."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from retrofit.checks.activations import Activations, record_activations
from retrofit.checks.comparison import judge_comparison
from retrofit.checks.context import Context
from retrofit.checks.divergence import Divergence, first_divergence
from retrofit.checks.finding import Finding, Raised, attempt, failed, merge, skipped
from retrofit.checks.padded_inputs import Padded, takes_padding
from retrofit.checks.subject import Subject
from retrofit.inputs.probes import ids_name, output_ids_name, run
from retrofit.numerics.agreement import Comparison

SIDES = ("left", "right")


@dataclasses.dataclass(frozen=True)
class PaddingMeasurement:
    """For each side a padded sequence against the same alone; no side where the model takes no padding."""

    sides: dict[str, Comparison | Raised]
    contents: Comparison | Raised | None = None  # left padding of two kinds, where it shifts positions and the sequences differ


def measure(subject: Subject, before: PaddingMeasurement | None = None, context: Context | None = None) -> PaddingMeasurement:
    """The sides on which the dense model can be padded."""
    sides = [side for side in SIDES if before is None or isinstance(before.sides.get(side), Comparison)]
    if not takes_padding(subject.model, subject.inputs):
        return PaddingMeasurement({})
    found = {side: attempt(compare_padded, subject, side) for side in sides}
    left = found.get("left")
    shifts = isinstance(left, Comparison) and not left.agrees and not is_numbered(subject)
    return PaddingMeasurement(found, attempt(compare_contents, subject) if shifts else None)


def judge(now: PaddingMeasurement, before: PaddingMeasurement | None, context: Context) -> Finding:
    if not takes_padding(context.subject.model, context.subject.inputs):
        return skipped("it takes no attention mask, or no token ids to pad")
    return merge({side: judge_side(side, now, before, context) for side in SIDES})


def judge_side(side: str, now: PaddingMeasurement, before: PaddingMeasurement | None, context: Context) -> Finding:
    ours, dense = now.sides.get(side), before.sides.get(side) if before is not None else None
    if ours is None:
        return skipped("the dense model does not run when padded")
    if isinstance(ours, Raised):
        return failed("", ours.error)
    model = context.subject.model
    if not ours.agrees and before is None and side == "left" and not is_numbered(context.subject):
        return skipped("it takes no positions, so padding on the left may shift them", ours.measured)
    if not context.exact and isinstance(now.contents, Comparison) and side == "left":
        reads = before.contents if before is not None and isinstance(before.contents, Comparison) else None
        found = judge_comparison(
            now.contents, reads, context, lambda limit: locate_contents(model, context.subject.padded(side), limit)
        )
        shifted = f"it takes no positions: padding shifts them, and changes the approximation ({ours.measured})"
        return dataclasses.replace(found, why=found.why or shifted)
    dense = dense if isinstance(dense, Comparison) else None
    return judge_comparison(ours, dense, context, lambda limit: locate_padding(model, context.subject.padded(side), limit))


def is_numbered(subject: Subject) -> bool:
    """Whether the model is told the positions of the tokens that it is given with padding; of two sides none are."""
    return "position_ids" in subject.padded("left").batch


def compare_padded(subject: Subject, side: str) -> Comparison:
    """A sequence padded in a batch, against the same sequence alone."""
    arithmetic, padded = subject.arithmetic, subject.padded(side)

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        outputs, alone = arithmetic.logits(padded.batch), arithmetic.logits(padded.alone)
        row = row_of(outputs, padded)
        return row[:, padded.kept] if output_ids_name(padded.batch, outputs) else row, row_of(alone, padded)

    return arithmetic.compare(ways)


def compare_contents(subject: Subject) -> Comparison:
    """A sequence padded on the left, against the same with other tokens in the padding."""
    arithmetic, padded = subject.arithmetic, subject.padded("left")

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        one, other = (arithmetic.logits(batch) for batch in (padded.batch, refilled(padded)))
        kept = padded.kept if output_ids_name(padded.batch, one) else slice(None)
        return row_of(one, padded)[:, kept], row_of(other, padded)[:, kept]

    return arithmetic.compare(ways)


def refilled(padded: Padded) -> dict[str, Any]:
    """The batch with tokens of the sequences themselves where there was padding."""
    name = ids_name(padded.batch)
    assert name is not None
    ids = padded.batch[name]
    return {**padded.batch, name: torch.where(padded.batch["attention_mask"] == 0, ids.flip(-1), ids)}


def locate_contents(model: nn.Module, padded: Padded, limit: float) -> Divergence:
    """The first module whose output for a sequence depends on what stands in its padding."""
    mask = padded.batch["attention_mask"]
    real = row_of(mask, padded)[0].bool()
    with record_activations(model) as one:
        run(model, padded.batch)
    with record_activations(model) as other:
        run(model, refilled(padded))

    def kept(found: Activations) -> Activations:
        sizes = {path: [value for value in values if value.shape[:2] == mask.shape] for path, values in found.items()}
        return {path: [row_of(value, padded)[:, real] for value in values] for path, values in sizes.items()}

    return first_divergence(kept(other), kept(one), limit)


def row_of(values: torch.Tensor, padded: Padded) -> torch.Tensor:
    """What there is of the sequence that is padded, or of all of them, as a batch of one."""
    return values[padded.row : padded.row + 1] if len(values) > 1 else values


def locate_padding(model: nn.Module, padded: Padded, limit: float) -> Divergence:
    """The first module whose output for a sequence depends on its padding."""
    with record_activations(model) as plain:
        run(model, padded.alone)
    with record_activations(model) as among:
        run(model, padded.batch)
    rows = next(len(value) for value in padded.alone.values() if isinstance(value, torch.Tensor))
    now: Activations = {}
    before: Activations = {}
    for path, values in plain.items():
        for value, others in zip(values, among.get(path, []), strict=False):
            one, other = row_of(value, padded), row_of(others, padded)
            row = other if other.shape[1:] == one.shape[1:] else other[:, padded.kept]
            if len(value) in (1, rows) and row.shape == one.shape:
                before.setdefault(path, []).append(one)
                now.setdefault(path, []).append(row)
    return first_divergence(now, before, limit)
