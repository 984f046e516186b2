"""The function check: an exact rewrite computes the dense model's function; the deviation of an approximate one is measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from retrofit.checks.divergence import Activations, first_divergence, record_activations, unchanged_modules
from retrofit.checks.parameters import sample
from retrofit.checks.report import Finding, failed, passed
from retrofit.checks.subject import Context, Subject, without_padding
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import describe, logits_of, run
from retrofit.numerics.agreement import EXPLAINED, Comparison
from retrofit.numerics.distances import TOLERANCE, distance, kl_divergence

SAMPLE = 64  # elements of an activation


@dataclasses.dataclass(frozen=True)
class WideMeasurement:
    """The outputs of a model in float64."""

    logits: tuple[torch.Tensor | None, ...]  # for inputs of each shape; None if they were not computed
    rounding: float = 0.0  # distance of the logits in the model's own dtype from these
    activations: Activations = dataclasses.field(default_factory=dict)  # a sample of each module's outputs


@dataclasses.dataclass(frozen=True)
class FunctionMeasurement:
    """The outputs of a model."""

    logits: tuple[torch.Tensor, ...]  # for inputs of each shape
    in_float64: WideMeasurement | Callable[[], WideMeasurement]  # computed on demand for a large dense model
    noise: Comparison | None = None  # between two runs on the same inputs, of rewritten models only

    @property
    def wide(self) -> WideMeasurement:
        return self.in_float64() if callable(self.in_float64) else self.in_float64


def measure_function(
    subject: Subject, before: FunctionMeasurement | None = None, context: Context | None = None
) -> FunctionMeasurement:
    """Return the logits for inputs of every shape; only for the first without a dense model to compare with.

    A dense model's logits are computed in float64 too: for every shape, or for the smallest of a large model. A rewritten model's
    are computed in float64 if it is exact and float32 shows a difference; so are those of a large dense model that is still
    available.
    """
    alone = context is not None and before is None
    logits = tuple(subject.run(shape).logits for shape in range(1 if alone else len(subject.shapes)))
    if context is None:
        later = subject.later
        if later is not None:
            return FunctionMeasurement(logits, functools.cache(lambda: measure_later(later, len(logits))))
        return FunctionMeasurement(logits, measure_in_float64(subject, len(logits)))
    wide = WideMeasurement((None,) * len(logits))
    if before is not None and context.exact and any(gap > 0.0 for gap in map(distance, logits, before.logits)):
        wide = measure_in_float64(subject, len(logits), before.wide)
    noise, narrow = compare_two_runs(subject)
    wide = wide if wide.activations else dataclasses.replace(wide, activations=narrow)
    return FunctionMeasurement(logits, wide, noise)


def measure_later(subject: Subject, shapes: int) -> WideMeasurement:
    """Return a dense model's outputs in float64, computed on demand."""
    with preserve_state(subject.model):
        return measure_in_float64(subject, shapes)


def measure_in_float64(subject: Subject, shapes: int, before: WideMeasurement | None = None) -> WideMeasurement:
    """Return the outputs in float64, where `before`, of the dense model, has them; its activations in its own arithmetic else."""
    activations = measure_wide(subject)
    logits = tuple(subject.wide(shape) if needs_wide(subject, shape, before) else None for shape in range(shapes))
    if not activations and before is None:
        _, activations = compare_two_runs(subject)
    rounding = subject.arithmetic.rounding if any(logit is not None for logit in logits) else 0.0
    return WideMeasurement(logits, rounding, activations)


def needs_wide(subject: Subject, shape: int, before: WideMeasurement | None) -> bool:
    """Return whether the logits of that shape are needed in float64: for a rewritten model, if the dense model has them."""
    if before is not None:
        return before.logits[shape] is not None
    return subject.arithmetic.dtype != torch.float64 and (not subject.is_large or shape == subject.cheapest)


def measure_wide(subject: Subject) -> Activations:
    """Return a sample of each module's output in float64 for the cheapest inputs; empty if its code does not run in float64."""
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
        return failed(f"{now.noise.measured} between two runs", "the same inputs give different outputs in evaluation mode")
    if before is None:
        finite = bool(torch.isfinite(now.logits[0]).all())
        nothing = "; ".join(filter(None, ("no dense model", note)))
        return passed("finite and deterministic", nothing) if finite else failed("", "some outputs are NaN or Inf")
    if not context.exact:
        return judge_approximate(now, before, note)
    return judge_exact(now, before, context)


def judge_exact(now: FunctionMeasurement, before: FunctionMeasurement, context: Context) -> Finding:
    """Judge by the largest difference, and locate the module where it begins."""
    comparisons = [compare_shape(shape, now, before, context) for shape in range(len(now.logits))]
    worst = max(comparisons, key=lambda comparison: (not comparison.agrees, comparison.wide or 0.0, comparison.gap))
    measured = f"max |Δ| {worst.measured} of the outputs' scale"
    if worst.agrees:
        return passed(measured, context.subject.arithmetic.note)
    names = unchanged_modules(context.fates, before.wide.activations)
    divergence = first_divergence(now.wide.activations, before.wide.activations, worst.limit, names).describe(context.place)
    inputs = describe(context.subject.shapes[comparisons.index(worst)])
    return failed(measured, f"over {worst.limit:.0e} on {inputs}\n{divergence}")


def compare_shape(shape: int, now: FunctionMeasurement, before: FunctionMeasurement, context: Context) -> Comparison:
    """Compare both models on inputs of that shape: in float64 where both ran so, else as far as rounding explains.

    A model that agrees in float64 and rounds far more than the dense one loses precision.
    """
    arithmetic, limit, inputs = context.subject.arithmetic, context.exact_limit, context.subject.shapes[shape]
    gap = distance(without_padding(now.logits[shape], inputs), without_padding(before.logits[shape], inputs))
    if arithmetic.dtype == torch.float64:
        return Comparison(gap, arithmetic.name, agrees=gap <= limit, limit=limit, in_float64=True)
    if gap == 0.0:
        return Comparison(gap, arithmetic.name)
    logits, dense = now.wide.logits[shape], before.wide.logits[shape]
    explained = max(TOLERANCE[torch.float32], EXPLAINED * before.wide.rounding)
    if logits is None or dense is None:
        return Comparison(gap, arithmetic.name, agrees=gap <= explained, limit=explained, note=f"limit {explained:.0e}")
    wide = distance(without_padding(logits, inputs), without_padding(dense, inputs))
    if wide > limit:
        return Comparison(gap, arithmetic.name, wide, agrees=False, limit=limit, in_float64=True)
    if now.wide.rounding <= explained:
        return Comparison(gap, arithmetic.name, wide, limit=limit)
    note = f"its own rounding is {now.wide.rounding:.1e}, the dense model's {before.wide.rounding:.1e}: it loses precision"
    return Comparison(gap, arithmetic.name, wide, agrees=False, limit=explained, note=note)


def judge_approximate(now: FunctionMeasurement, before: FunctionMeasurement, note: str) -> Finding:
    """Report how far the outputs moved; an approximate rewrite fails where they contain NaN or Inf."""
    pairs = list(zip(now.logits, before.logits, strict=True))
    if any(new.shape != dense.shape or bool((~new.isfinite() & dense.isfinite()).any()) for new, dense in pairs):
        return failed("", "some outputs are NaN or Inf or have another shape, unlike the dense model's")
    divergence = float(torch.cat([kl_divergence(*pair).flatten() for pair in pairs]).mean())  # nats per prediction
    agreement = float(torch.cat([(new.argmax(-1) == dense.argmax(-1)).flatten() for new, dense in pairs]).float().mean())
    return passed(f"KL {divergence:.2e} nats, top-1 agreement {agreement:.1%}", note)
