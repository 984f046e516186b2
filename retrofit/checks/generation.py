"""What `generate` decodes with its cache and without."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from retrofit.inputs.probes import Inputs, filler_id, has_two_sides, ids_name, is_decoder_side, placeholders, resized
from retrofit.numerics.agreement import Arithmetic, Comparison
from retrofit.numerics.distances import TOLERANCE, distance, scale_of, tolerance_of

PROMPT, NEW_TOKENS = 6, 3
FEWEST_TOKENS = 2  # of which one is computed on the cache
BEAMS = {"greedy": 1, "beam": 2}


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What `generate` returned: the tokens, the logits they were chosen from, the beams' scores."""

    tokens: torch.Tensor
    logits: tuple[torch.Tensor, ...]
    scores: torch.Tensor | None


@torch.no_grad()
def decode(model: nn.Module, inputs: Inputs, beams: int, count: int, use_cache: bool) -> Decoded:
    """A few tokens generated without sampling."""
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
    """Where decoding without a cache differs from `cached`, "" where it does not; and their logits, or scores, compared.

    Tokens that differ, or logits that lie apart, are settled in float64, where both are decoded again.
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
    """The logits that tokens were chosen from, as far as the same were chosen; of beams the scores."""
    if cached.scores is not None and plain.scores is not None:
        return cached.scores, plain.scores
    steps = len(plain.logits)
    same = torch.stack([(cached.tokens[:, : i - steps] == plain.tokens[:, : i - steps]).all() for i in range(steps)])
    ours, theirs = (torch.stack(one.logits)[same.to(one.logits[0].device)] for one in (cached, plain))
    return ours, theirs


def difference(cached: Decoded, plain: Decoded) -> str:
    """Where two decodings chose differently although one choice was clearly better; "" where they agree."""
    rows = set(range(len(plain.tokens)))
    for step, logits in enumerate(plain.logits):
        place = step - len(plain.logits)
        ours, theirs = cached.tokens[:, place], plain.tokens[:, place]
        for row in rows & set((ours != theirs).nonzero().flatten().tolist()):
            margin = float((logits[row, theirs[row]] - logits[row, ours[row]]).abs()) / scale_of(logits[row])
            if margin > tolerance_of(logits):
                taken = f"takes token {int(ours[row])} at step {step} with the cache and {int(theirs[row])} without"
                return f"row {row} {taken}, {margin:.1e} apart"
            rows.discard(row)  # a tie: what follows it may differ
    return ""


def difference_of_beams(cached: Decoded, plain: Decoded) -> str:
    """Whether the best beams differ, and by more than rounding would let their scores differ."""
    if torch.equal(cached.tokens, plain.tokens):
        return ""
    assert cached.scores is not None and plain.scores is not None
    gap = distance(cached.scores, plain.scores)
    return "" if gap <= tolerance_of(cached.scores) else f"the best beams differ, their scores by {gap:.1e}"
