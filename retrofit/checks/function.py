"""The function check: an exact rewrite computes what the dense model did; how far an approximate one moved is measured."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from retrofit.checks.activations import Activations, record_activations
from retrofit.checks.context import Context
from retrofit.checks.divergence import first_divergence, unchanged_modules
from retrofit.checks.finding import Finding, failed, passed
from retrofit.checks.fingerprint import sample
from retrofit.checks.subject import Subject
from retrofit.runtime.probes import describe, distance, logits_of, run, tolerance_of

SAMPLE = 64  # elements of an activation
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # this model's logits, the dense model's


@dataclasses.dataclass(frozen=True)
class FunctionMeasurement:
    """What a model computes."""

    logits: tuple[torch.Tensor, ...]  # for inputs of each shape
    noise: float  # the distance between two runs on the same inputs
    activations: Activations  # a sample of what each module returned


def measure(subject: Subject, before: FunctionMeasurement | None = None, context: Context | None = None) -> FunctionMeasurement:
    """The logits for inputs of every shape, but where there is nothing to compare the others with for those of the first alone."""
    alone = context is not None and before is None
    logits = tuple(subject.run(shape).logits for shape in range(1 if alone else len(subject.shapes)))
    torch.manual_seed(1)  # a model that draws random numbers draws others than in its first run
    with record_activations(subject.model, lambda value: sample(value, SAMPLE)) as activations:
        again = logits_of(run(subject.model, subject.inputs)).cpu()
    return FunctionMeasurement(logits, distance(logits[0], again), activations)


def judge(now: FunctionMeasurement, before: FunctionMeasurement | None, context: Context) -> Finding:
    if now.noise > tolerance_of(now.logits[0]):
        return failed(
            f"{now.noise:.1e} between two runs", "the same inputs give different outputs, and the model is in evaluation mode"
        )
    if before is None:
        finite = bool(torch.isfinite(now.logits[0]).all())
        return (
            passed("finite, the same twice", "no dense model") if finite else failed("", "some outputs are infinite or not numbers")
        )
    pairs = list(zip(now.logits, before.logits, strict=True))
    return judge_exact(now, before, pairs, context) if context.exact else judge_approximate(pairs)


def judge_exact(now: FunctionMeasurement, before: FunctionMeasurement, pairs: Pairs, context: Context) -> Finding:
    """The largest difference, and the module where it begins."""
    gaps = [distance(ours, theirs) for ours, theirs in pairs]
    gap, tolerance = max(gaps), tolerance_of(pairs[0][1])
    measured = f"max |Δ| {gap:.1e} of the outputs' scale"
    if gap <= tolerance:
        return passed(measured)
    names = unchanged_modules(context.fates, before.activations)
    divergence = first_divergence(now.activations, before.activations, tolerance, names).describe(context.place)
    return failed(measured, f"over {tolerance:.0e} on {describe(context.subject.shapes[gaps.index(gap)])}\n{divergence}")


def judge_approximate(pairs: Pairs) -> Finding:
    """How far the outputs moved; an approximate rewrite fails where they are no numbers."""
    if any(ours.shape != theirs.shape or bool((~ours.isfinite() & theirs.isfinite()).any()) for ours, theirs in pairs):
        return failed("", "some outputs are infinite or not numbers, or of another shape, where the dense model's are not")
    return passed(f"KL {kl_divergence(pairs):.2e} nats, top-1 agreement {top1_agreement(pairs):.1%}")


def kl_divergence(pairs: Pairs) -> float:
    """The mean KL divergence from the dense model's distribution, in nats a prediction."""
    logs = [(ours.float().log_softmax(-1), theirs.float().log_softmax(-1)) for ours, theirs in pairs]
    terms = [nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) for ours, theirs in logs]
    return float(torch.cat([term.flatten() for term in terms]).mean())


def top1_agreement(pairs: Pairs) -> float:
    """How often both models rank the same output first."""
    return float(torch.cat([(ours.argmax(-1) == theirs.argmax(-1)).flatten() for ours, theirs in pairs]).float().mean())
