"""The cache check: decoding on the cache gives what the full forward gives, step by step and in `generate`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retrofit.checks.departure import Departure, at, first_departure, recorded
from retrofit.checks.padding import padded, takes_padding
from retrofit.checks.trial import Trial, judged
from retrofit.runtime.outcomes import Finding, attempted, failed, merged, passed, skipped
from retrofit.runtime.probes import (
    Inputs,
    accepts,
    distance,
    filler_id,
    generates,
    has_two_sides,
    ids_name,
    is_decoder_side,
    is_per_token,
    logits_of,
    output_ids_name,
    resized,
    resized_like,
    run,
    scale_of,
    tolerance_of,
)

if TYPE_CHECKING:
    from retrofit.checks.reference import Reference
    from retrofit.checks.subject import Subject

STEPS = 2  # tokens decoded one at a time
PROMPT, NEW_TOKENS = 6, 4
BEAMS = {"greedy": 1, "beam": 2}
PLAIN, PADDED, REORDERED = "steps", "left-padded steps", "reordered steps"
GENERATED = "generate with and without its cache"
OWN = {"greedy": (PLAIN, GENERATED), "beam": (PLAIN, REORDERED, GENERATED)}  # where the dense model has to agree with itself


def check(subject: Subject) -> Finding:
    findings = {way: attempted(judge_steps, subject, way) for way in ways(subject.model, subject.inputs)}
    findings = {way: finding for way, finding in findings.items() if finding.status != "skipped" or finding.measured}
    possible = generates(subject.model, subject.inputs)
    tried = subject.reference.decoded if subject.reference is not None else BEAMS if possible else ()
    findings |= {name: attempted(judge_decoding, subject, name) for name in tried}
    return merged(findings) if findings else skipped("it keeps no cache and does not generate")


def judge_steps(subject: Subject, way: str) -> Finding:
    dense = subject.reference.stepping.get(way) if subject.reference is not None else None
    if subject.reference is not None and dense is None:
        return skipped("the dense model does not decode on a cache")
    trial = stepping(subject.model, subject.inputs, way)
    if trial is None:
        return failed("no cache", "the dense model returned one") if dense is not None else skipped("it keeps no cache")
    return judged(
        trial, dense, subject.exact, lambda: departure_by_stepping(subject.model, subject.inputs, way).said(subject.placed)
    )


# ── Step by step ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ways(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """The ways a sequence is decoded step by step: plainly, with rows that change places as in a beam search, and where one side
    takes a mask also padded on the left."""
    pads = takes_padding(model, inputs) and not has_two_sides(inputs)
    return (PLAIN, PADDED, REORDERED) if pads else (PLAIN, REORDERED)


def keeps_cache(model: nn.Module, inputs: Inputs, name: str) -> bool:
    """Whether the model decodes on a cache along that input."""
    if is_decoder_side(name) != has_two_sides(inputs):
        return False
    try:
        return stepping(model, inputs, PLAIN) is not None
    except Exception:  # a model that cannot decode
        return False


def stepping(model: nn.Module, inputs: Inputs, way: str) -> Trial | None:
    """Most of a sequence at once and the rest token by token, against all of it at once; None where the model keeps no cache."""
    if not accepts(model, "use_cache") and "use_cache" not in inputs:
        return None
    whole, positions = step_inputs(model, inputs, way)
    full = logits_of(run(model, whole))
    name = output_ids_name(whole, full)
    if name is None or full.shape[1] <= STEPS:
        return None
    pieces = step_through(model, whole, name, way == REORDERED)
    if pieces is None:
        return None
    real = positions if positions is not None else torch.ones_like(whole[name], dtype=torch.bool)
    return Trial.of(torch.cat(pieces, 1)[real], full[real])


def step_inputs(model: nn.Module, inputs: Inputs, way: str) -> tuple[dict[str, Any], torch.Tensor | None]:
    """A batch to decode step by step, and which of its positions are no padding, None where none is."""
    if way == PADDED:
        _, long, _ = padded(model, inputs, "left")
        return {**long, "use_cache": False}, long["attention_mask"].bool()
    whole = resized_like(model, inputs, 2, seed=17)
    name = ids_name(inputs)
    if name is not None and not has_two_sides(inputs) and accepts(model, "attention_mask"):
        whole.setdefault("attention_mask", torch.ones_like(whole[name], dtype=torch.long))
    return {**whole, "use_cache": False}, None


def step_through(model: nn.Module, whole: Inputs, name: str, swapped: bool = False) -> list[torch.Tensor] | None:
    """The logits of the sequence without its last tokens, then of each of these, all on one cache; None where there is none.

    Where they are `swapped` the rows stand in the reverse order in the first of these calls, and the cache is told before the next.
    """
    total, rows = whole[name].shape[1], len(whole[name])
    pieces, cache = [], None
    for start, stop in [(0, total - STEPS), *((last, last + 1) for last in range(total - STEPS, total))]:
        chunk = {**section(whole, name, start, stop), "use_cache": True}
        if swapped and not start:
            chunk = {key: value.flip(0) if is_of_rows(value, rows) else value for key, value in chunk.items()}
        output = run(model, chunk, past_key_values=cache) if cache is not None else run(model, chunk)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return None
        logits = logits_of(output)
        if swapped and not start:
            if not hasattr(cache, "reorder_cache"):
                return None
            cache.reorder_cache(torch.arange(rows - 1, -1, -1, device=logits.device))
            logits = logits.flip(0)
        pieces.append(logits)
    return pieces


def is_of_rows(value: Any, rows: int) -> bool:
    """Whether an input has an entry for each row of the batch."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def section(inputs: Inputs, name: str, start: int, stop: int) -> dict[str, Any]:
    """The inputs for tokens `start` to `stop` of the argument `name`; masks reach back to the first token."""
    side, length = is_decoder_side(name), inputs[name].shape[1]
    made = dict(inputs)
    for key, value in inputs.items():
        if is_per_token(value) and is_decoder_side(key) == side and value.shape[1] == length:
            made[key] = value[:, :stop] if key.endswith("attention_mask") else value[:, start:stop]
    return made


def departure_by_stepping(model: nn.Module, inputs: Inputs, way: str) -> Departure:
    """The first module that hands on something else when decoding goes step by step."""
    whole, positions = step_inputs(model, inputs, way)
    with recorded(model) as full:
        outputs = logits_of(run(model, whole))
    name = output_ids_name(whole, outputs)
    assert name is not None
    real = positions if positions is not None else torch.ones_like(whole[name], dtype=torch.bool)
    with recorded(model) as stepped:
        step_through(model, whole, name, way == REORDERED)
    if way == REORDERED:
        stepped = {path: [values[0].flip(0), *values[1:]] for path, values in stepped.items()}
    joined = {path: [torch.cat(values, 1)] for path, values in stepped.items() if all(value.dim() == 3 for value in values)}
    ours = at(joined, real)
    theirs = {path: values for path, values in at(full, real).items() if len(values) == 1 and path in ours}
    return first_departure(ours, theirs, tolerance_of(outputs))


# ── generate ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What `generate` made: the tokens, the logits they were chosen from, the beams' scores."""

    tokens: torch.Tensor
    logits: tuple[torch.Tensor, ...]
    scores: torch.Tensor | None


def judge_decoding(subject: Subject, name: str) -> Finding:
    """Whether `generate` makes of the cache what it should, the dense model's own failings allowed for."""
    found = attempted(compare_decodings, subject, name)
    excuse = own_failing(subject.reference, name) if found.status == "failed" and subject.reference is not None else ""
    return Finding("skipped", found.measured, excuse) if excuse else found


def compare_decodings(subject: Subject, name: str) -> Finding:
    """An exact rewrite generates the dense model's tokens; else the same with and without the cache, ties within rounding apart."""
    cached, dense = decode(subject.model, subject.inputs, BEAMS[name], use_cache=True), subject.reference
    if dense is not None and subject.exact and torch.equal(dense.decoded[name], cached.tokens.cpu()):
        return passed("the dense model's")
    plain = decode(subject.model, subject.inputs, BEAMS[name], use_cache=False)
    found = difference(cached, plain) if BEAMS[name] == 1 else difference_of_beams(cached, plain)
    return failed("differs", found) if found else passed("the same")


def own_failing(dense: Reference, name: str) -> str:
    """Why a cache of the dense model itself does not give what there is without it; "" where it does."""
    own = {**dense.stepping, GENERATED: dense.generated}
    for way in OWN[name]:
        trial = own.get(way)
        if trial is not None and not trial.agrees:
            return f"the dense model does not agree with itself: {way} ({trial.gap:.1e})"
    if dense.leaks and not dense.causal:
        return "the dense model reads later tokens too, which a cache has yet to see"
    return ""


def generating(model: nn.Module, inputs: Inputs) -> Trial:
    """The logits that tokens are generated from on a cache, against those without it, as far as the same tokens were chosen."""
    cached, plain = (decode(model, inputs, 1, use_cache=way) for way in (True, False))
    steps = len(plain.logits)
    same = torch.stack([(cached.tokens[:, : i - steps] == plain.tokens[:, : i - steps]).all() for i in range(steps)])
    ours, theirs = (torch.stack(made.logits)[same.to(made.logits[0].device)] for made in (cached, plain))
    return Trial.of(ours, theirs)


@torch.no_grad()
def decode(model: nn.Module, inputs: Inputs, beams: int, use_cache: bool) -> Decoded:
    """A few tokens generated without sampling."""
    prompt = resized(model, {key: value for key, value in inputs.items() if not is_decoder_side(key)}, 2, PROMPT, seed=19)
    name = ids_name(inputs)
    assert name is not None
    prompt["attention_mask"] = torch.ones_like(prompt[name], dtype=torch.long)
    config = getattr(model, "generation_config", None)
    for setting in ("pad_token_id", *(["decoder_start_token_id"] if has_two_sides(inputs) else [])):
        if getattr(config, setting, None) is None:
            prompt[setting] = filler_id(model)
    how = {
        "num_beams": beams,
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "use_cache": use_cache,
    }
    made: Any = model.generate(**{**prompt, **how}, return_dict_in_generate=True, output_logits=True, output_scores=True)  # type: ignore[operator]
    return Decoded(made.sequences, made.logits, getattr(made, "sequences_scores", None))


def difference(cached: Decoded, plain: Decoded) -> str:
    """Where two decodings chose differently although one choice was clearly better; "" where they agree."""
    rows = set(range(len(plain.tokens)))
    for step, logits in enumerate(plain.logits):
        place = step - len(plain.logits)
        ours, theirs = cached.tokens[:, place], plain.tokens[:, place]
        for row in rows & set((ours != theirs).nonzero().flatten().tolist()):
            margin = float((logits[row, theirs[row]] - logits[row, ours[row]]).abs()) / scale_of(logits[row])
            if margin > tolerance_of(logits):
                return f"row {row} takes token {int(ours[row])} at step {step} with the cache and {int(theirs[row])} without"
            rows.discard(row)  # a tie: what follows it may differ
    return ""


def difference_of_beams(cached: Decoded, plain: Decoded) -> str:
    """Whether the best beams differ, and by more than rounding would let their scores differ."""
    if torch.equal(cached.tokens, plain.tokens):
        return ""
    assert cached.scores is not None and plain.scores is not None
    gap = distance(cached.scores, plain.scores)
    return "" if gap <= tolerance_of(plain.logits[0]) else f"the best beams differ, their scores by {gap:.1e}"
