"""The cache check: decoding with the cache gives the outputs of the full forward, step by step and in `generate`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from retrofit.checks.divergence import Divergence, at_positions, first_divergence, judge_comparison, record_activations
from retrofit.checks.report import Finding, Raised, attempt, failed, merge, passed, skipped
from retrofit.checks.subject import Context, Padded, Subject, pad_inputs, takes_padding
from retrofit.inputs.calibration import has_rows
from retrofit.inputs.probes import (
    Inputs,
    accepts,
    can_generate,
    filler_id,
    has_two_sides,
    ids_name,
    is_decoder_side,
    is_floating,
    is_per_token,
    is_token_ids,
    logits_of,
    output_ids_name,
    placeholders,
    resized,
    resized_like,
    run,
)
from retrofit.numerics.agreement import Arithmetic, Comparison
from retrofit.numerics.distances import TOLERANCE, distance, scale_of, tolerance_of

Result = TypeVar("Result")
STEPS = 2  # tokens decoded one at a time, or one token where a sequence is padded
PLAIN, PADDED, REORDERED = "steps", "left-padded steps", "reordered steps"
PROMPT, NEW_TOKENS = 6, 3
FEWEST_TOKENS = 2  # at least one of them is computed with the cache
BEAMS = {"greedy": 1, "beam": 2}
GENERATED = "generate with and without its cache"
PREREQUISITES = {"greedy": (PLAIN, GENERATED), "beam": (PLAIN, REORDERED, GENERATED)}  # where the dense model has to agree


@dataclasses.dataclass(frozen=True)
class Generated:
    """The tokens that `generate` decodes with its cache, and the difference from decoding without it."""

    tokens: torch.Tensor
    difference: str | None = None  # "" if there is none; None if decoding without the cache was not tried
    logits: Comparison | None = None  # greedy decoding with the cache against decoding without it


@dataclasses.dataclass(frozen=True)
class CacheMeasurement:
    """Decoding with a cache compared with decoding without it."""

    steps: dict[str, Comparison | Raised | None]  # by way; None if the model keeps no cache
    generated: dict[str, Generated | Raised]  # greedy, beam; empty if the model does not generate


def measure_cache(subject: Subject, before: CacheMeasurement | None = None, context: Context | None = None) -> CacheMeasurement:
    """Return the measurement of every way to decode that the dense model has too; of a large model without beam search."""
    model, inputs = subject.model, subject.inputs
    ways = [way for way in ways_to_step(model, inputs) if before is None or isinstance(before.steps.get(way), Comparison)]
    if before is not None:
        names = [name for name, decoded in before.generated.items() if isinstance(decoded, Generated)]
    else:
        names = list(BEAMS)[: 1 if subject.is_large else None] if can_generate(model, inputs) else []
    return CacheMeasurement(
        {way: attempt(step, subject, way) for way in ways},
        {name: attempt(generate, subject, name, before, context) for name in names},
    )


def step(subject: Subject, way: str) -> Comparison | None:
    """Return the distance of steps from one forward; None if the model keeps no cache."""
    return first_to_run(lambda batch: compare_stepping(subject.arithmetic, batch, way), step_batches(subject, way))


def step_batches(subject: Subject, way: str) -> list[StepBatch]:
    """Return the batches to decode in that way; for a large model, the batch that its checks share comes first."""
    padded = subject.shared_padding("left")
    shared = [shared_steps(padded, way)] if padded is not None else []
    return shared if shared and way == PADDED else [*shared, step_batch(subject.model, subject.inputs, way)]


def first_to_run(action: Callable[[StepBatch], Result], batches: Sequence[StepBatch]) -> Result:
    """Return the action's result for the first batch that raises nothing, or for the last one."""
    for batch in batches[:-1]:
        with contextlib.suppress(Exception):  # the model's own code may raise anything
            return action(batch)
    return action(batches[-1])


def generate(subject: Subject, name: str, before: CacheMeasurement | None, context: Context | None) -> Generated:
    """Return the tokens of `generate` with the cache, compared with decoding without it: greedily for a dense model."""
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


def judge_cache(now: CacheMeasurement, before: CacheMeasurement | None, context: Context) -> Finding:
    findings = {way: judge_steps(way, steps, before, context) for way, steps in now.steps.items()}
    findings = {way: finding for way, finding in findings.items() if finding.status != "skipped" or finding.measured}
    findings |= {name: judge_generated(name, decoded, before, context) for name, decoded in now.generated.items()}
    return merge(findings) if findings else skipped("it keeps no cache and does not generate")


def judge_steps(way: str, now: Comparison | Raised | None, before: CacheMeasurement | None, context: Context) -> Finding:
    """Judge whether decoding step by step gives the outputs of one forward."""
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
    """Judge the tokens: an exact rewrite generates the dense model's; others the same with and without the cache, except for ties.

    A failure of the dense model's own cache excuses one of the rewritten model's.
    """
    if isinstance(now, Generated) and now.difference is None:
        return passed("the dense model's")
    if isinstance(now, Generated) and not now.difference:
        return passed("the same")
    excuse = own_failing(before, name, context.reads_ahead) if before is not None else ""
    measured, why = ("", now.error) if isinstance(now, Raised) else ("differs", now.difference or "")
    return skipped(excuse, measured) if excuse else failed(measured, why)


def own_failing(dense: CacheMeasurement, name: str, reads_ahead: bool) -> str:
    """Return why the dense model's own cache changes its outputs; "" if it does not."""
    greedy = dense.generated.get("greedy")
    comparisons = {**dense.steps, GENERATED: greedy.logits if isinstance(greedy, Generated) else None}
    for way in PREREQUISITES[name]:
        comparison = comparisons.get(way)
        if isinstance(comparison, Comparison) and not comparison.agrees:
            return f"the dense model does not agree with itself: {way} ({comparison.measured})"
    return "the dense model reads later tokens too, which a cache has yet to see" if reads_ahead else ""


# ── Step by step ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ways_to_step(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Return the ways to decode step by step: plainly, with rows that change places as in a beam search, and padded on the left.

    The last way needs a decoder-only model with a mask.
    """
    pads = takes_padding(model, inputs) and not has_two_sides(inputs)
    return (PLAIN, PADDED, REORDERED) if pads else (PLAIN, REORDERED)


def keeps_cache(model: nn.Module, inputs: Inputs, name: str) -> bool:
    """Return whether the model decodes with a cache along that input."""
    if is_decoder_side(name) != has_two_sides(inputs):
        return False
    try:
        return compare_stepping(Arithmetic(model, inputs), step_batch(model, inputs, PLAIN), PLAIN) is not None
    except Exception:  # a model that cannot decode
        return False


class NoCache(Exception):
    """The model keeps no cache, or none that can be used in this way."""


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """A batch to decode step by step: its inputs in one forward, and the positions that a way compares."""

    inputs: dict[str, Any]
    real: torch.Tensor | None = None  # positions (rows, length) without padding; None for all
    rows: tuple[int, ...] = ()  # rows of `inputs` to decode, if not all
    reorders: bool = True  # whether its rows change places before the last token

    @property
    def decoded(self) -> dict[str, Any]:
        """The inputs of the rows to decode."""
        count = next((len(value) for value in self.inputs.values() if isinstance(value, torch.Tensor) and value.dim()), 0)
        return {key: self.rows_of(value) if has_rows(value, count) else value for key, value in self.inputs.items()}

    def rows_of(self, value: torch.Tensor) -> torch.Tensor:
        return value[list(self.rows)] if self.rows else value

    @property
    def key(self) -> Hashable:
        """Return the key under which batches with the same steps share them."""
        return "steps", self.rows, self.reorders


def compare_stepping(arithmetic: Arithmetic, batch: StepBatch, way: str) -> Comparison | None:
    """Compare most of a sequence at once and the rest token by token with all of it at once; None where the model keeps no cache.

    Plain and reordered steps are of one sequence: its rows change places before the last token.
    """
    model, decoded = arithmetic.model, batch.decoded
    if not accepts(model, "use_cache") and "use_cache" not in batch.inputs:
        return None

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = arithmetic.logits(batch.inputs)
        name, full = output_ids_name(batch.inputs, outputs), batch.rows_of(outputs)
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
    """The logits of a sequence without its last tokens, then of each of these tokens, with one cache."""

    logits: tuple[torch.Tensor, ...]
    reordered: bool  # whether the rows changed places before the last token, as the cache did


def places_of(way: str, stepped: Stepped, real: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Return the mask (batch, length) of positions that the way compares: no padding; the last token if rows changed places."""
    places = real.clone() if real is not None else torch.ones_like(ids, dtype=torch.bool)
    if stepped.reordered:
        last = torch.arange(ids.shape[1], device=ids.device) == ids.shape[1] - 1
        places &= last if way == REORDERED else ~last
    return places


def shared_steps(padded: Padded, way: str) -> StepBatch:
    """Return two rows of the batch that checks share, one padded on the left and one not, to decode for all ways at once."""
    real = padded.batch["attention_mask"][list(padded.stepped)].bool()
    real[1 if way == PADDED else 0] = False
    return StepBatch(padded.batch, real, padded.stepped)


def step_batch(model: nn.Module, inputs: Inputs, way: str) -> StepBatch:
    """Return a batch to decode step by step in that way."""
    if way == PADDED:
        long = pad_inputs(model, inputs, "left").batch
        return StepBatch(without_cache(model, long), long["attention_mask"].bool(), reorders=False)
    batch = resized_like(model, inputs, 2, seed=17)
    for key, value in batch.items():
        if is_token_ids(value):
            batch[key] = torch.stack([value[0], value[0].roll(1)])  # rows that differ at every position, to expose a mix-up
    name = ids_name(inputs)
    if name is not None and not has_two_sides(inputs) and accepts(model, "attention_mask"):
        batch.setdefault("attention_mask", torch.ones_like(batch[name], dtype=torch.long))
    return StepBatch(without_cache(model, batch))


def without_cache(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Return the inputs for a forward without a cache, if the model has an argument for it."""
    return {**inputs, "use_cache": False} if "use_cache" in inputs or accepts(model, "use_cache") else dict(inputs)


def step_through(model: nn.Module, batch: Inputs, name: str, reorders: bool) -> Stepped | None:
    """Return the logits of the sequence decoded step by step; None if the model returns no cache.

    If the batch `reorders`, rows and cache are reversed for the last token, provided that the cache can be reordered.
    """
    total, rows = batch[name].shape[1], len(batch[name])
    pieces: list[torch.Tensor] = []
    cache: Any = None
    reordered = False
    steps = STEPS if reorders else 1
    for start, stop in [(0, total - steps), *((last, last + 1) for last in range(total - steps, total))]:
        chunk = {**section(batch, name, start, stop), "use_cache": True}
        if reorders and stop == total and hasattr(cache, "reorder_cache"):
            cache.reorder_cache(torch.arange(rows - 1, -1, -1, device=batch[name].device))
            chunk = {key: value.flip(0) if has_rows(value, rows) else value for key, value in chunk.items()}
            reordered = True
        output = run(model, chunk, past_key_values=cache) if cache is not None else run(model, chunk)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return None
        pieces.append(logits_of(output).flip(0) if reordered else logits_of(output))
    return Stepped(tuple(pieces), reordered)


def section(inputs: Inputs, name: str, start: int, stop: int) -> dict[str, Any]:
    """Return the inputs for tokens `start` to `stop` of the argument `name`; masks reach back to the first token.

    Inputs that tokens stand for, such as images, go with the first section only: later the cache holds them.
    """
    side, length = is_decoder_side(name), inputs[name].shape[1]
    known = start > 0 and bool(placeholders(inputs, name).any())
    chunk = {key: value for key, value in inputs.items() if not (known and is_floating(value))}
    for key, value in inputs.items():
        if is_per_token(value) and is_decoder_side(key) == side and value.shape[1] == length:
            chunk[key] = value[:, :stop] if key.endswith("attention_mask") else value[:, start:stop]
    return chunk


def locate_stepping(model: nn.Module, batch: StepBatch, way: str, limit: float) -> Divergence:
    """Return the first module with another output in step-by-step decoding."""
    inputs = batch.decoded
    with record_activations(model) as full:
        outputs = logits_of(run(model, inputs))
    name = output_ids_name(inputs, outputs)
    assert name is not None
    with record_activations(model) as activations:
        stepped = step_through(model, inputs, name, batch.reorders)
    assert stepped is not None
    if stepped.reordered:
        activations = {path: [*values[:-1], values[-1].flip(0)] for path, values in activations.items()}
    places = places_of(way, stepped, batch.real, inputs[name])
    joined = {path: [torch.cat(values, 1)] for path, values in activations.items() if all(value.dim() == 3 for value in values)}
    now = at_positions(joined, places)
    before = {path: values for path, values in at_positions(full, places).items() if len(values) == 1 and path in now}
    return first_divergence(now, before, limit)


# ── Generation ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Decoded:
    """An output of `generate`: the tokens, the logits they were chosen from, and the beams' scores."""

    tokens: torch.Tensor
    logits: tuple[torch.Tensor, ...]
    scores: torch.Tensor | None


@torch.no_grad()
def decode(model: nn.Module, inputs: Inputs, beams: int, count: int, use_cache: bool) -> Decoded:
    """Return a few tokens, generated without sampling."""
    name = ids_name(inputs)
    assert name is not None
    held = placeholders(inputs, name).nonzero().flatten().tolist()
    length = max([PROMPT, *(place + 2 for place in held)])
    prompt = resized(model, {key: value for key, value in inputs.items() if not is_decoder_side(key)}, 2, length, seed=19)
    prompt["attention_mask"] = torch.ones_like(prompt[name], dtype=torch.long)
    config = getattr(model, "generation_config", None)
    for setting in ("pad_token_id", *(["decoder_start_token_id"] if has_two_sides(inputs) else [])):
        if getattr(config, setting, None) is None:
            prompt[setting] = filler_id(model)
    settings = {
        "num_beams": beams,
        "do_sample": False,
        "max_new_tokens": count,
        "min_new_tokens": count,
        "use_cache": use_cache,
    }
    output: Any = model.generate(  # type: ignore[operator]
        **{**prompt, **settings}, return_dict_in_generate=True, output_logits=True, output_scores=True
    )
    return Decoded(output.sequences, output.logits, getattr(output, "sequences_scores", None))


def compare_decoding(arithmetic: Arithmetic, inputs: Inputs, beams: int, count: int, cached: Decoded) -> tuple[str, Comparison]:
    """Return the difference of decoding without a cache from `cached`, "" if there is none, and the distance of logits or scores.

    Different tokens or distant logits are decided in float64, where both are decoded again.
    """
    last: list[Decoded] = []

    def ways() -> tuple[torch.Tensor, torch.Tensor]:
        first = decode(arithmetic.model, inputs, beams, count, True) if last else cached
        last[:] = first, decode(arithmetic.model, inputs, beams, count, False)
        return comparable(*last)

    with arithmetic.computing():
        gap = distance(*ways())
        same = torch.equal(last[0].tokens, last[1].tokens)
    if same and gap <= TOLERANCE[torch.float32]:
        return "", Comparison(gap, arithmetic.name)
    comparison = arithmetic.compare(ways, in_doubt=True)
    return difference(*last) if beams == 1 else difference_of_beams(*last), comparison


def comparable(cached: Decoded, plain: Decoded) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits that tokens were chosen from, up to the first different choice; of beams the scores."""
    if cached.scores is not None and plain.scores is not None:
        return cached.scores, plain.scores
    steps = len(plain.logits)
    same = torch.stack([(cached.tokens[:, : i - steps] == plain.tokens[:, : i - steps]).all() for i in range(steps)])
    with_cache, without = (torch.stack(decoded.logits)[same.to(decoded.logits[0].device)] for decoded in (cached, plain))
    return with_cache, without


def difference(cached: Decoded, plain: Decoded) -> str:
    """Return where two decodings differ although one choice was clearly better; "" if they agree."""
    rows = set(range(len(plain.tokens)))
    for step, logits in enumerate(plain.logits):
        place = step - len(plain.logits)
        with_cache, without = cached.tokens[:, place], plain.tokens[:, place]
        for row in rows & set((with_cache != without).nonzero().flatten().tolist()):
            margin = float((logits[row, without[row]] - logits[row, with_cache[row]]).abs()) / scale_of(logits[row])
            if margin > tolerance_of(logits):
                taken = f"takes token {int(with_cache[row])} at step {step} with the cache and {int(without[row])} without"
                return f"row {row} {taken}, {margin:.1e} apart"
            rows.discard(row)  # a tie: later tokens may differ
    return ""


def difference_of_beams(cached: Decoded, plain: Decoded) -> str:
    """Return how the best beams differ, if rounding cannot explain their scores; "" if it can."""
    if torch.equal(cached.tokens, plain.tokens):
        return ""
    assert cached.scores is not None and plain.scores is not None
    gap = distance(cached.scores, plain.scores)
    return "" if gap <= tolerance_of(cached.scores) else f"the best beams differ, their scores by {gap:.1e}"
