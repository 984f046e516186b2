"""The function check: an exact rewrite computes what the dense model did; how far an approximate one moved is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from retrofit.checks.departure import departure_from_dense
from retrofit.checks.reference import Reference
from retrofit.runtime.outcomes import Finding, failed, passed
from retrofit.runtime.probes import describe, distance, logits_of, run, tolerance_of

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # this model's logits, the dense model's


def check(subject: Subject) -> Finding:
    once, again = (logits_of(run(subject.model, subject.inputs)).cpu() for _ in range(2))
    if (noise := distance(once, again)) > tolerance_of(again):
        return failed(
            f"{noise:.1e} between two runs", "the same inputs give different outputs, and the model is in evaluation mode"
        )
    if subject.reference is None:
        finite = bool(torch.isfinite(once).all())
        return (
            passed("finite, the same twice", "no dense model") if finite else failed("", "some outputs are infinite or not numbers")
        )
    pairs = [(subject.answer_to(probe).logits, probe.logits) for probe in subject.reference.probes]
    return held(subject, subject.reference, pairs) if subject.exact else moved(pairs)


def held(subject: Subject, dense: Reference, pairs: Pairs) -> Finding:
    """An exact rewrite: the largest difference, and the module where it begins."""
    gaps = [distance(ours, theirs) for ours, theirs in pairs]
    gap, tolerance = max(gaps), tolerance_of(pairs[0][1])
    measured = f"max |Δ| {gap:.1e} of the outputs' scale"
    if gap <= tolerance:
        return passed(measured)
    departure = departure_from_dense(subject.model, dense.inputs, dense.trail, subject.fates, tolerance)
    return failed(
        measured, f"over {tolerance:.0e} on {describe(dense.probes[gaps.index(gap)].inputs)}\n{departure.said(subject.placed)}"
    )


def moved(pairs: Pairs) -> Finding:
    """An approximate rewrite: how far it moved; it has failed where it gives no numbers."""
    if any(ours.shape != theirs.shape or bool((~ours.isfinite() & theirs.isfinite()).any()) for ours, theirs in pairs):
        return failed("", "some outputs are infinite or not numbers, or of another shape, where the dense model's are not")
    return passed(f"KL {divergence(pairs):.2e} nats, top-1 agreement {agreement(pairs):.1%}")


def divergence(pairs: Pairs) -> float:
    """The mean KL divergence from the dense model's distribution, in nats a prediction."""
    logs = [(ours.float().log_softmax(-1), theirs.float().log_softmax(-1)) for ours, theirs in pairs]
    terms = [nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) for ours, theirs in logs]
    return float(torch.cat([term.flatten() for term in terms]).mean())


def agreement(pairs: Pairs) -> float:
    """How often both models rank the same output first."""
    return float(torch.cat([(ours.argmax(-1) == theirs.argmax(-1)).flatten() for ours, theirs in pairs]).float().mean())
