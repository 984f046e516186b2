"""The causality and padding checks: inputs that must not change an output.

Causality: changing later tokens never changes an earlier output of a causal model, nor one of another row. Parameters that a pass
adds often begin at zero, so that nothing leaks through them yet: these are checked again with noise in place of the zeros.

Padding: a sequence padded on the left or right has the outputs of the sequence alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from retrofit.checks.cache import keeps_cache
from retrofit.checks.divergence import Activations, Divergence, activations_of, at_positions, first_divergence, judge_comparison
from retrofit.checks.report import Finding, Raised, attempt, failed, merge, passed, skipped
from retrofit.checks.subject import Context, Padded, Subject, takes_padding
from retrofit.inputs.calibration import has_rows
from retrofit.inputs.packed_weights import is_packed_tensor
from retrofit.inputs.probes import (
    ids_name,
    is_floating,
    is_numbering,
    is_per_token,
    is_token_ids,
    ordinary_ids,
    output_ids_name,
    placeholders,
    resized_like,
)
from retrofit.numerics.agreement import Comparison
from retrofit.numerics.distances import scale_of

NOISE = 0.1  # replaces parameters that begin at zero
BIDIRECTIONAL = 0.9  # share of earlier outputs that moves in a bidirectional model


@dataclasses.dataclass(frozen=True)
class Leak:
    """The change of earlier outputs when later tokens change."""

    moves: Comparison  # of the earlier outputs
    share: float  # share of the earlier outputs that moved
    where: str  # one of them
    mixes: str = ""  # an output that moved in a row without changed tokens


@dataclasses.dataclass(frozen=True)
class CausalityMeasurement:
    """The leaks by input, and the inputs along which a seemingly bidirectional model decodes with a cache."""

    leaks: dict[str, Leak]
    cached: frozenset[str] = frozenset()  # tried only without a dense model, which is the better evidence
    moved: dict[str, Leak] = dataclasses.field(default_factory=dict)  # with noise in place of parameters that begin at zero

    @property
    def causal(self) -> frozenset[str]:
        """The inputs whose later tokens never changed an earlier output."""
        return frozenset(name for name, leak in self.leaks.items() if leak.share == 0.0)

    @property
    def reads_ahead(self) -> bool:
        """True if later tokens of every input change earlier outputs."""
        return bool(self.leaks) and not self.causal


def measure_causality(
    subject: Subject, before: CausalityMeasurement | None = None, context: Context | None = None
) -> CausalityMeasurement | None:
    """Return the leaks; None if the dense model does not run on other tokens."""
    if context is not None and context.has_reference and before is None:
        return None
    leaks = find_leaks(subject)
    if context is None:
        return CausalityMeasurement(leaks)
    if context.has_reference:
        return CausalityMeasurement(leaks, moved={} if subject.is_large else leaks_with_noise(subject, context))
    bidirectional = [name for name, leak in leaks.items() if leak.share >= BIDIRECTIONAL]
    return CausalityMeasurement(
        leaks, frozenset(name for name in bidirectional if keeps_cache(subject.model, subject.inputs, name))
    )


def judge_causality(now: CausalityMeasurement | None, before: CausalityMeasurement | None, context: Context) -> Finding:
    if now is None:
        return skipped("the dense model does not run on other tokens")
    if not now.leaks:
        return skipped(why_none(context.subject))
    causal = [name for name, leak in now.leaks.items() if must_be_causal(name, leak, now, before)]
    measured = ", ".join(
        f"{name}: {now.leaks[name].share:.0%} of the earlier outputs moved, by at most {now.leaks[name].moves.measured}"
        for name in causal
    )
    leaking = next((name for name in causal if now.leaks[name].share), None)
    if leaking is not None:
        moves = now.leaks[leaking].moves
        with context.subject.arithmetic.computing(moves.in_float64):
            divergence = locate_leak(context.subject, leaking, moves.limit)
        return failed(measured, f"{now.leaks[leaking].where}\n{divergence.describe(context.place)}")
    if why := hidden_leak(now, before, causal):
        return failed(measured, why)
    if not causal:
        return skipped("the dense model is not causal" if before is not None else "it is bidirectional and keeps no cache")
    mixed = next((now.leaks[name].mixes for name in causal if now.leaks[name].mixes), "")
    return passed(measured, f"each row by itself; rows of a batch depend on each other: {mixed}" if mixed else "")


def why_none(subject: Subject) -> str:
    """Return why there is no input with one output a token."""
    outputs = subject.run().logits
    if outputs.dim() == 3 and not any(map(is_floating, subject.inputs.values())):
        for name, value in subject.inputs.items():
            if is_per_token(value) and value.shape[1] == outputs.shape[1] > 1 and value.dtype != torch.bool:
                kind = "counts up" if is_numbering(value) else "holds no ids that differ"
                return f"{name} {kind} in the example inputs, so no token could be changed"
    return "it does not return one output per token"


def hidden_leak(now: CausalityMeasurement, before: CausalityMeasurement | None, causal: list[str]) -> str:
    """Return a leak between rows that the dense model has not, or one of `causal` inputs through zeros; "" if there is none."""
    for leaks, words in ((now.leaks, ""), (now.moved, "once what begins at zero has moved, ")):
        for name, leak in leaks.items():
            if leak.mixes and before is not None and name in before.leaks and not before.leaks[name].mixes:
                return f"rows of a batch depend on each other: {words}{leak.mixes}"
            if name in causal and leak.share:
                return words + leak.where
    return ""


def must_be_causal(name: str, leak: Leak, now: CausalityMeasurement, before: CausalityMeasurement | None) -> bool:
    """Return whether the dense model is causal in that input; without a dense model, whether this one is meant to be."""
    if before is not None:
        return name in before.causal
    return leak.share < BIDIRECTIONAL or name in now.cached


def find_leaks(subject: Subject) -> dict[str, Leak]:
    """Return the changes of earlier outputs when later tokens change, for each input of token ids with one output a token."""
    outputs = subject.run().logits
    if outputs.dim() != 3 or outputs.shape[1] < 2:
        return {}
    names = [name for name, value in subject.inputs.items() if is_token_ids(value) and value.shape[1] == outputs.shape[1]]
    return {name: leak_of(subject, name) for name in names}


def leaks_with_noise(subject: Subject, context: Context) -> dict[str, Leak]:
    """Return the leaks with noise in place of new parameters that are zero; empty if there are none."""
    new = context.new_parameters.values()
    zero = [value for value in new if value.is_floating_point() and not is_packed_tensor(value) and not bool(value.any())]
    if not zero:
        return {}
    with replace_by_noise(zero):
        return find_leaks(dataclasses.replace(subject, runs={}, watches={}, watched={}, wide_runs={}))


@contextlib.contextmanager
def replace_by_noise(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Replace these zero parameters by noise within this context."""
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(NOISE * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()


def leak_of(subject: Subject, name: str) -> Leak:
    """Return the leak in a batch; if it may come from other rows, as with experts of limited capacity, in each row alone."""
    futures = with_changed_futures(subject, name)
    leak = leak_between(subject, name, by_batches(subject, name, batch_size(subject, name)), *futures)
    if not leak.share or (leak.share >= BIDIRECTIONAL and not leak.mixes):
        return leak
    try:
        alone = leak_between(subject, name, by_batches(subject, name, 1), *futures)
    except Exception:  # code that accepts no single row
        return leak
    return dataclasses.replace(alone, mixes=leak.mixes or ("" if alone.share else leak.where))


def batch_size(subject: Subject, name: str) -> int:
    """Return the number of rows the model takes at once, if it runs on one batch size only; else 0."""
    sizes = {len(inputs[name]) for inputs in subject.shapes}
    return sizes.pop() if len(sizes) == 1 else 0


def by_batches(subject: Subject, name: str, size: int) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Return the logits of inputs, computed in batches of that size."""

    def logits(inputs: dict[str, Any]) -> torch.Tensor:
        rows = len(inputs[name])
        if size in (0, rows):
            return subject.arithmetic.logits(inputs)
        return torch.cat([subject.arithmetic.logits(rows_of(inputs, name, batch)) for batch in batches(rows, size)])[:rows]

    return logits


def batches(rows: int, size: int) -> list[list[int]]:
    """Return the rows in batches of that size, 0 for all; the last one is filled up with the first rows."""
    size = size or rows
    return [[row % rows for row in range(start, start + size)] for start in range(0, rows, size)]


def rows_of(inputs: dict[str, Any], name: str, rows: list[int]) -> dict[str, Any]:
    """Return some rows of a batch, as a batch."""
    batch = len(inputs[name])
    return {key: value[rows] if has_rows(value, batch) else value for key, value in inputs.items()}


def leak_between(
    subject: Subject,
    name: str,
    logits: Callable[[dict[str, Any]], torch.Tensor],
    base: dict[str, Any],
    changed: dict[str, Any],
    early: torch.Tensor,
) -> Leak:
    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        before, after = logits(base), logits(changed)
        return torch.where(early[..., None], after, before), before

    moves = subject.arithmetic.compare(ways, same_kernels=True)
    if moves.outputs is None or moves.others is None:
        return Leak(moves, 0.0, "")
    distances = (moves.outputs - moves.others).abs().amax(-1).nan_to_num(float("inf")) / scale_of(moves.others)  # (rows, length)
    leaking, early = distances > moves.limit, early.cpu()
    if not bool(leaking.any()):  # NaN or Inf moved
        return Leak(moves, 1.0, f"changing {name} changed which of the earlier outputs are NaN")
    same = early.all(1)  # rows without a change
    mixed = leaking[same].nonzero().tolist()
    mixes = f"changing {name} in other rows moved the output at position {mixed[0][1]}" if mixed else ""
    leaking, early = leaking[~same], early[~same]
    if not bool(leaking.any()):
        return Leak(moves, 0.0, "", mixes)
    row, position = leaking.nonzero()[0].tolist()
    where = f"changing {name} from position {int(early[row].sum())} on moved the output at position {position}"
    return Leak(moves, float(leaking.sum() / early.sum()), where, mixes)


def with_changed_futures(subject: Subject, name: str) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    """Return sequences, the same with later tokens changed, each from another position on, and the mask of earlier positions.

    Nothing changes in the last row. For a large model they have its second shape, on which it has been run anyway, without one.
    """
    model, inputs = subject.model, subject.inputs
    base = subject.shapes[1] if subject.is_large and len(subject.shapes) > 1 else {}
    places = places_to_change(base[name]) if base else []
    if not base or len(base[name]) != len(places):
        places = [*places_to_change(inputs[name]), inputs[name].shape[1]]
        base = resized_like(model, inputs, len(places), seed=11)
    ids, length = base[name], base[name].shape[1]
    early = torch.arange(length, device=ids.device) < torch.tensor(places, device=ids.device)[:, None]  # (rows, length)
    pool = ordinary_ids(model, inputs, name).to(ids)
    others = pool[((pool == ids[..., None]).int().argmax(-1) + 1) % len(pool)]  # the next id for each id
    return base, {**base, name: torch.where(early | placeholders(base, name), ids, others)}, early


def places_to_change(ids: torch.Tensor) -> list[int]:
    """Return the positions from which on tokens are changed, one a row."""
    length = ids.shape[1]
    return sorted({1, length // 2, length - 1} - {0})


def locate_leak(subject: Subject, name: str, limit: float) -> Divergence:
    """Return the first module whose earlier outputs move by more than the limit when later tokens change."""
    model = subject.model
    base, changed, early = with_changed_futures(subject, name)
    divergence = Divergence("", "", "")
    for rows in batches(len(early), batch_size(subject, name)):
        before, after = (activations_of(model, rows_of(inputs, name, rows)) for inputs in (base, changed))
        divergence = first_divergence(at_positions(after, early[rows]), at_positions(before, early[rows]), limit)
        if divergence.path:
            break
    return divergence


# ── Padding ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


SIDES = ("left", "right")


@dataclasses.dataclass(frozen=True)
class PaddingMeasurement:
    """For each side a padded sequence compared with the same sequence alone; empty if the model takes no padding."""

    sides: dict[str, Comparison | Raised]
    contents: Comparison | Raised | None = None  # two contents of left padding, if it shifts positions and sequences differ


def measure_padding(
    subject: Subject, before: PaddingMeasurement | None = None, context: Context | None = None
) -> PaddingMeasurement:
    """Return the effect of padding on the sides on which the dense model can be padded."""
    sides = [side for side in SIDES if before is None or isinstance(before.sides.get(side), Comparison)]
    if not takes_padding(subject.model, subject.inputs):
        return PaddingMeasurement({})
    found = {side: attempt(compare_padded, subject, side) for side in sides}
    left = found.get("left")
    shifts = isinstance(left, Comparison) and not left.agrees and not is_numbered(subject)
    return PaddingMeasurement(found, attempt(compare_contents, subject) if shifts else None)


def judge_padding(now: PaddingMeasurement, before: PaddingMeasurement | None, context: Context) -> Finding:
    if not takes_padding(context.subject.model, context.subject.inputs):
        return skipped("it takes no attention mask, or no token ids to pad")
    return merge({side: judge_side(side, now, before, context) for side in SIDES})


def judge_side(side: str, now: PaddingMeasurement, before: PaddingMeasurement | None, context: Context) -> Finding:
    own, dense = now.sides.get(side), before.sides.get(side) if before is not None else None
    if own is None:
        return skipped("the dense model does not run when padded")
    if isinstance(own, Raised):
        return failed("", own.error)
    model = context.subject.model
    if not own.agrees and before is None and side == "left" and not is_numbered(context.subject):
        return skipped("it takes no positions, so padding on the left may shift them", own.measured)
    if not context.exact and isinstance(now.contents, Comparison) and side == "left":
        reads = before.contents if before is not None and isinstance(before.contents, Comparison) else None
        found = judge_comparison(
            now.contents, reads, context, lambda limit: locate_contents(model, context.subject.padded(side), limit)
        )
        shifted = f"it takes no positions: padding shifts them, and changes the approximation ({own.measured})"
        return dataclasses.replace(found, why=found.why or shifted)
    dense = dense if isinstance(dense, Comparison) else None
    return judge_comparison(own, dense, context, lambda limit: locate_padding(model, context.subject.padded(side), limit))


def is_numbered(subject: Subject) -> bool:
    """Return whether the model receives the positions of padded tokens; an encoder-decoder never does."""
    return "position_ids" in subject.padded("left").batch


def compare_padded(subject: Subject, side: str) -> Comparison:
    """Compare a sequence padded in a batch with the same sequence alone."""
    arithmetic, padded = subject.arithmetic, subject.padded(side)

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        outputs, alone = arithmetic.logits(padded.batch), arithmetic.logits(padded.alone)
        row = row_of(outputs, padded)
        return row[:, padded.kept] if output_ids_name(padded.batch, outputs) else row, row_of(alone, padded)

    return arithmetic.compare(ways)


def compare_contents(subject: Subject) -> Comparison:
    """Compare a sequence padded on the left with the same sequence and other tokens in the padding."""
    arithmetic, padded = subject.arithmetic, subject.padded("left")

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        plain, refilled = (arithmetic.logits(batch) for batch in (padded.batch, refill_padding(padded)))
        kept = padded.kept if output_ids_name(padded.batch, plain) else slice(None)
        return row_of(plain, padded)[:, kept], row_of(refilled, padded)[:, kept]

    return arithmetic.compare(ways)


def refill_padding(padded: Padded) -> dict[str, Any]:
    """Return the batch with tokens of the sequences themselves in place of the padding."""
    name = ids_name(padded.batch)
    assert name is not None
    ids = padded.batch[name]
    return {**padded.batch, name: torch.where(padded.batch["attention_mask"] == 0, ids.flip(-1), ids)}


def locate_contents(model: nn.Module, padded: Padded, limit: float) -> Divergence:
    """Return the first module whose output for a sequence depends on the tokens in its padding."""
    mask = padded.batch["attention_mask"]
    real = row_of(mask, padded)[0].bool()

    def kept(found: Activations) -> Activations:
        sizes = {path: [value for value in values if value.shape[:2] == mask.shape] for path, values in found.items()}
        return {path: [row_of(value, padded)[:, real] for value in values] for path, values in sizes.items()}

    before, now = (kept(activations_of(model, batch)) for batch in (padded.batch, refill_padding(padded)))
    return first_divergence(now, before, limit)


def row_of(values: torch.Tensor, padded: Padded) -> torch.Tensor:
    """Return the padded sequence's row, or the only one, as a batch."""
    return values[padded.row : padded.row + 1] if len(values) > 1 else values


def locate_padding(model: nn.Module, padded: Padded, limit: float) -> Divergence:
    """Return the first module whose output for a sequence depends on its padding."""
    plain, among = activations_of(model, padded.alone), activations_of(model, padded.batch)
    rows = next(len(value) for value in padded.alone.values() if isinstance(value, torch.Tensor))
    now: Activations = {}
    before: Activations = {}
    for path, values in plain.items():
        for value, others in zip(values, among.get(path, []), strict=False):
            by_itself, other = row_of(value, padded), row_of(others, padded)
            row = other if other.shape[1:] == by_itself.shape[1:] else other[:, padded.kept]
            if len(value) in (1, rows) and row.shape == by_itself.shape:
                before.setdefault(path, []).append(by_itself)
                now.setdefault(path, []).append(row)
    return first_divergence(now, before, limit)
