"""The function check: an exact rewrite computes what the dense model did; how far an approximate one moved is measured."""

from __future__ import annotations

import dataclasses

import torch

from retrofit.checks.divergence import Activations, first_divergence, record_activations, unchanged_modules
from retrofit.checks.parameters import sample
from retrofit.checks.report import Finding, failed, passed
from retrofit.checks.subject import Context, Subject, without_padding
from retrofit.inputs.probes import describe, logits_of, run
from retrofit.numerics.agreement import EXPLAINED, Comparison
from retrofit.numerics.distances import TOLERANCE, distance, kl_divergence

SAMPLE = 64  # elements of an activation
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # this model's logits, the dense model's


@dataclasses.dataclass(frozen=True)
class FunctionMeasurement:
    """The outputs of a model."""

    logits: tuple[torch.Tensor, ...]  # for inputs of each shape
    wide: tuple[torch.Tensor | None, ...]  # the same in float64, where that was computed
    rounding: float  # how far apart these are
    noise: Comparison | None  # of two runs on the same inputs; of a dense model nobody asks for it
    activations: Activations  # a sample of what each module returned, in float64 where it computes in that


def measure_function(
    subject: Subject, before: FunctionMeasurement | None = None, context: Context | None = None
) -> FunctionMeasurement:
    """Return the logits for inputs of every shape; for the first alone where there is no dense model to compare the others with.

    Those of a dense model are computed in float64 too: for every shape, of a large model for the smallest. Of a rewritten model
    they are where it is exact and float32 sees a difference.
    """
    alone = context is not None and before is None
    logits = tuple(subject.run(shape).logits for shape in range(1 if alone else len(subject.shapes)))
    wide: tuple[torch.Tensor | None, ...] = (None,) * len(logits)
    activations: Activations = {}
    noise: Comparison | None = None
    if context is None or (before is not None and context.exact and any(map(differ, logits, before.logits))):
        activations = measure_wide(subject)
        wide = tuple(subject.wide(shape) if needs_wide(subject, shape, before) else None for shape in range(len(logits)))
    if context is not None or not activations:
        noise, narrow = compare_two_runs(subject)
        activations = activations or narrow
    rounding = subject.arithmetic.rounding if any(logit is not None for logit in wide) else 0.0
    return FunctionMeasurement(logits, wide, rounding, noise, activations)


def differ(ours: torch.Tensor, other: torch.Tensor) -> bool:
    return distance(ours, other) > 0.0


def needs_wide(subject: Subject, shape: int, before: FunctionMeasurement | None) -> bool:
    """Return whether the logits of that shape are needed in float64: of a rewritten model where the dense model has them."""
    if before is not None:
        return before.wide[shape] is not None
    return subject.arithmetic.dtype != torch.float64 and (not subject.is_large or shape == subject.cheapest)


def measure_wide(subject: Subject) -> Activations:
    """Return a sample of what each module returned in float64 for the cheapest inputs; nothing where its code refuses that."""
    with record_activations(subject.model, lambda value: sample(value, SAMPLE)) as activations:
        computed = subject.wide(subject.cheapest)
    return activations if computed is not None else {}


def compare_two_runs(subject: Subject) -> tuple[Comparison, Activations]:
    """Compare two runs on the same inputs with other random numbers; any gap between them is settled in float64."""
    inputs = subject.shapes[subject.cheapest]

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        runs = []
        for seed in range(2):
            torch.manual_seed(seed)
            runs.append(logits_of(run(subject.model, inputs)).cpu())
        return runs[0], runs[1]

    torch.manual_seed(1)
    with subject.arithmetic.computing(), record_activations(subject.model, lambda value: sample(value, SAMPLE)) as activations:
        again = logits_of(run(subject.model, inputs)).cpu()
    gap = distance(subject.run(subject.cheapest).logits, again)
    settled = subject.arithmetic.compare(ways, in_doubt=True) if gap else Comparison(gap, subject.arithmetic.name)
    return settled, activations


def judge_function(now: FunctionMeasurement, before: FunctionMeasurement | None, context: Context) -> Finding:
    note = context.subject.arithmetic.note
    if now.noise is not None and not now.noise.agrees:
        return failed(
            f"{now.noise.measured} between two runs",
            "the same inputs give different outputs in evaluation mode",
        )
    if before is None:
        finite = bool(torch.isfinite(now.logits[0]).all())
        nothing = "; ".join(filter(None, ("no dense model", note)))
        return passed("finite and deterministic", nothing) if finite else failed("", "some outputs are NaN or Inf")
    if not context.exact:
        return judge_approximate(list(zip(now.logits, before.logits, strict=True)), note)
    return judge_exact(now, before, context)


def judge_exact(now: FunctionMeasurement, before: FunctionMeasurement, context: Context) -> Finding:
    """Judge by the largest difference, and locate the module where it begins."""
    comparisons = [compare_shape(shape, now, before, context) for shape in range(len(now.logits))]
    worst = max(comparisons, key=lambda comparison: (not comparison.agrees, comparison.wide or 0.0, comparison.gap))
    measured = f"max |Δ| {worst.measured} of the outputs' scale"
    if worst.agrees:
        return passed(measured, context.subject.arithmetic.note)
    names = unchanged_modules(context.fates, before.activations)
    divergence = first_divergence(now.activations, before.activations, worst.limit, names).describe(context.place)
    inputs = describe(context.subject.shapes[comparisons.index(worst)])
    return failed(measured, f"over {worst.limit:.0e} on {inputs}\n{divergence}")


def compare_shape(shape: int, now: FunctionMeasurement, before: FunctionMeasurement, context: Context) -> Comparison:
    """Compare both models on inputs of that shape: in float64 where both ran so, else as far as rounding explains.

    A model that agrees in float64 and rounds far more than the dense one loses precision.
    """
    arithmetic, limit, inputs = context.subject.arithmetic, context.exact_limit, context.subject.shapes[shape]
    gap, wide = distance(without_padding(now.logits[shape], inputs), without_padding(before.logits[shape], inputs)), None
    ours, theirs = now.wide[shape], before.wide[shape]
    if arithmetic.dtype == torch.float64:
        return Comparison(gap, arithmetic.name, agrees=gap <= limit, limit=limit, in_float64=True)
    if gap == 0.0:
        return Comparison(gap, arithmetic.name)
    explained = max(TOLERANCE[torch.float32], EXPLAINED * before.rounding)
    if ours is None or theirs is None:
        return Comparison(gap, arithmetic.name, agrees=gap <= explained, limit=explained, note=f"limit {explained:.0e}")
    wide = distance(without_padding(ours, inputs), without_padding(theirs, inputs))
    if wide > limit:
        return Comparison(gap, arithmetic.name, wide, agrees=False, limit=limit, in_float64=True)
    if now.rounding <= explained:
        return Comparison(gap, arithmetic.name, wide, limit=limit)
    note = f"its own rounding is {now.rounding:.1e}, the dense model's {before.rounding:.1e}: it loses precision"
    return Comparison(gap, arithmetic.name, wide, agrees=False, limit=explained, note=note)


def judge_approximate(pairs: Pairs, note: str) -> Finding:
    """Report how far the outputs moved; an approximate rewrite fails where they contain NaN or Inf."""
    if any(ours.shape != theirs.shape or bool((~ours.isfinite() & theirs.isfinite()).any()) for ours, theirs in pairs):
        return failed("", "some outputs are NaN or Inf or have another shape, unlike the dense model's")
    divergence = float(torch.cat([kl_divergence(*pair).flatten() for pair in pairs]).mean())  # nats a prediction
    agreement = float(torch.cat([(ours.argmax(-1) == theirs.argmax(-1)).flatten() for ours, theirs in pairs]).float().mean())
    return passed(f"KL {divergence:.2e} nats, top-1 agreement {agreement:.1%}", note)
