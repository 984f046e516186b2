"""The cache check: decoding on the cache gives what the full forward gives, step by step and in `generate`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from retrofit.checks.comparison import judge_comparison
from retrofit.checks.context import Context
from retrofit.checks.divergence import Divergence
from retrofit.checks.finding import Finding, Raised, attempt, failed, merge, passed, skipped
from retrofit.checks.generation import BEAMS, FEWEST_TOKENS, NEW_TOKENS, compare_decoding, decode
from retrofit.checks.stepping import (
    PADDED,
    PLAIN,
    REORDERED,
    StepBatch,
    compare_stepping,
    locate_stepping,
    shared_steps,
    step_batch,
    ways_to_step,
)
from retrofit.checks.subject import Subject
from retrofit.inputs.probes import can_generate
from retrofit.numerics.agreement import Comparison

Result = TypeVar("Result")
GENERATED = "generate with and without its cache"
PREREQUISITES = {"greedy": (PLAIN, GENERATED), "beam": (PLAIN, REORDERED, GENERATED)}  # where the dense model has to agree


@dataclasses.dataclass(frozen=True)
class Generated:
    """What `generate` decodes on its cache, and how that differs from what it decodes without."""

    tokens: torch.Tensor
    difference: str | None = None  # "" where there is none; None where it was not tried without
    logits: Comparison | None = None  # of greedy decoding with the cache, against those without


@dataclasses.dataclass(frozen=True)
class CacheMeasurement:
    """Decoding on a cache against decoding without."""

    steps: dict[str, Comparison | Raised | None]  # by way; None where the model keeps no cache
    generated: dict[str, Generated | Raised]  # greedy, beam; empty where the model does not generate


def measure(subject: Subject, before: CacheMeasurement | None = None, context: Context | None = None) -> CacheMeasurement:
    """Every way to decode, but those that the dense model does not have, and of a large one beams: its steps are reordered too."""
    model, inputs = subject.model, subject.inputs
    ways = [way for way in ways_to_step(model, inputs) if before is None or isinstance(before.steps.get(way), Comparison)]
    if before is not None:
        names = [name for name, one in before.generated.items() if isinstance(one, Generated)]
    else:
        names = list(BEAMS)[: 1 if subject.is_large else None] if can_generate(model, inputs) else []
    return CacheMeasurement(
        {way: attempt(step, subject, way) for way in ways},
        {name: attempt(generate, subject, name, before, context) for name in names},
    )


def step(subject: Subject, way: str) -> Comparison | None:
    """Steps against one forward."""
    return first_to_run(lambda batch: compare_stepping(subject.arithmetic, batch, way), step_batches(subject, way))


def step_batches(subject: Subject, way: str) -> list[StepBatch]:
    """What to decode in that way: of a large model the batch that its checks share, else, or where that raises, one of its own."""
    padded = subject.shared_padding("left")
    shared = [shared_steps(padded, way)] if padded is not None else []
    return shared if shared and way == PADDED else [*shared, step_batch(subject.model, subject.inputs, way)]


def first_to_run(action: Callable[[StepBatch], Result], batches: Sequence[StepBatch]) -> Result:
    """What the action gives for the first of the batches for which it does not raise, or for the last."""
    for batch in batches[:-1]:
        with contextlib.suppress(Exception):  # what the model's own code raises
            return action(batch)
    return action(batches[-1])


def generate(subject: Subject, name: str, before: CacheMeasurement | None, context: Context | None) -> Generated:
    """What `generate` decodes on its cache, and without: for a dense model greedily only, for others where its tokens differ."""
    count = FEWEST_TOKENS if subject.is_large else NEW_TOKENS
    with subject.arithmetic.computing():
        cached = decode(subject.model, subject.inputs, BEAMS[name], count, use_cache=True)
    tokens = cached.tokens.cpu()
    if context is None and name != "greedy":
        return Generated(tokens)
    dense = before.generated[name] if before is not None else None
    if context is not None and context.exact and isinstance(dense, Generated) and torch.equal(dense.tokens, tokens):
        return Generated(tokens)
    compared = attempt(compare_decoding, subject.arithmetic, subject.inputs, BEAMS[name], count, cached)
    return Generated(tokens, compared.error) if isinstance(compared, Raised) else Generated(tokens, *compared)


def judge(now: CacheMeasurement, before: CacheMeasurement | None, context: Context) -> Finding:
    findings = {way: judge_steps(way, one, before, context) for way, one in now.steps.items()}
    findings = {way: finding for way, finding in findings.items() if finding.status != "skipped" or finding.measured}
    findings |= {name: judge_generated(name, one, before, context) for name, one in now.generated.items()}
    return merge(findings) if findings else skipped("it keeps no cache and does not generate")


def judge_steps(way: str, now: Comparison | Raised | None, before: CacheMeasurement | None, context: Context) -> Finding:
    """Whether decoding step by step gives what one forward gives."""
    if isinstance(now, Raised):
        return failed("", now.error)
    dense = before.steps.get(way) if before is not None else None
    if now is None:
        return failed("no cache", "the dense model returned one") if dense is not None else skipped("it keeps no cache")
    subject = context.subject

    def locate(limit: float) -> Divergence:
        return first_to_run(lambda batch: locate_stepping(subject.model, batch, way, limit), step_batches(subject, way))

    return judge_comparison(now, dense if isinstance(dense, Comparison) else None, context, locate)


def judge_generated(name: str, now: Generated | Raised, before: CacheMeasurement | None, context: Context) -> Finding:
    """An exact rewrite generates the dense model's tokens; else the same with and without the cache, ties within rounding apart.

    A failing of the dense model's own cache excuses one of the rewritten model's.
    """
    if isinstance(now, Generated) and now.difference is None:
        return passed("the dense model's")
    if isinstance(now, Generated) and not now.difference:
        return passed("the same")
    excuse = own_failing(before, name, context.reads_ahead) if before is not None else ""
    if isinstance(now, Raised):
        return skipped(excuse) if excuse else failed("", now.error)
    return skipped(excuse, "differs") if excuse else failed("differs", now.difference or "")


def own_failing(dense: CacheMeasurement, name: str, reads_ahead: bool) -> str:
    """Why a cache of the dense model itself does not give what there is without it; "" where it does."""
    greedy = dense.generated.get("greedy")
    comparisons = {**dense.steps, GENERATED: greedy.logits if isinstance(greedy, Generated) else None}
    for way in PREREQUISITES[name]:
        comparison = comparisons.get(way)
        if isinstance(comparison, Comparison) and not comparison.agrees:
            return f"the dense model does not agree with itself: {way} ({comparison.measured})"
    return "the dense model reads later tokens too, which a cache has yet to see" if reads_ahead else ""
