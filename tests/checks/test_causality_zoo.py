"""No token of a strided model hears of a later one: proved by perturbation for every causal architecture of the zoo."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import zoo
from support.retrofitted import moved
from torch import Tensor

import retrofit
from retrofit.errors import RetrofitError
from retrofit.passes.sequence_altup.strided_layers import StridedLayer

LENGTH = 10  # a change at each place but the first: at every phase of a window, with k = 4 twice
CAUSAL = [entry for entry in zoo.entries() if entry.task == "causal" and zoo.skip_reason(entry) is None]
SEEDS = {"k=2": (2, 1), "k=4": (4, 2)}  # stride, seed


def perturbed(entry: zoo.Entry, model: Any, seed: int) -> tuple[dict[str, Any], Tensor]:
    """Copies of one sequence, row r with other tokens from place r on (row 0: none), and which places of each row are earlier."""
    base = zoo.inputs(entry, model, batch=1, length=LENGTH, seed=seed)["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    books, length = base.shape  # rows a sequence: more than one where codebooks are rows
    rows = base.repeat(length, 1)
    places = torch.arange(length).repeat_interleave(books)[:, None]
    pool = torch.randint(zoo.FIRST_FREE_ID, zoo.LAST_FREE_ID + 1, rows.shape, generator=generator)
    other = torch.where(pool == rows, torch.where(pool == zoo.FIRST_FREE_ID, zoo.LAST_FREE_ID, zoo.FIRST_FREE_ID), pool)
    later = (torch.arange(length) >= places) & (places > 0)
    earlier = torch.arange(length) < torch.arange(length)[:, None]
    return {"input_ids": torch.where(later, other, rows)}, earlier


def by_sequence(logits: Tensor) -> Tensor:
    """The logits of each sequence: (sequences, its rows, tokens, vocabulary)."""
    return logits.unflatten(0, (LENGTH, -1))


@torch.no_grad()
def leak(logits: Tensor, earlier: Tensor) -> float:
    """By how much earlier outputs moved, of the largest output."""
    logits = by_sequence(logits)
    moves = (logits - logits[:1]).abs().amax((1, -1))
    return float(moves[earlier].max() / logits.abs().max())


@torch.no_grad()
def at_once(model: Any, given: dict[str, Any]) -> Tensor:
    return zoo.logits(model(**given, use_cache=False))


@torch.no_grad()
def in_chunks(model: Any, given: dict[str, Any], ends: list[int]) -> Tensor:
    """The logits of a sequence that is read in chunks on one cache."""
    tokens, cache, pieces, start = given["input_ids"], None, [], 0
    for end in ends:
        more = {} if cache is None else {"past_key_values": cache}
        out = model(tokens[:, start:end], use_cache=True, attention_mask=torch.ones_like(tokens[:, :end]), **more)
        cache, start = out.past_key_values, end
        pieces.append(zoo.logits(out))
    return torch.cat(pieces, 1)


def attempted(compute: Any, *given: Any) -> Tensor | None:
    """The logits, one for each token; None where the model does not run like that."""
    try:
        logits = compute(*given)
    except Exception:
        return None
    return logits if logits.dim() == 3 and logits.shape[1] == LENGTH else None


@pytest.mark.long
@pytest.mark.parametrize("entry", CAUSAL, ids=lambda entry: entry.id.removeprefix("causal/"))
def test_later_tokens_change_nothing_earlier(entry: zoo.Entry) -> None:
    """At once and in chunks of random sizes on a cache, wherever the dense model is causal itself."""
    model = zoo.build(entry)
    example = zoo.inputs(entry, model)
    if "input_ids" not in example:
        pytest.skip("it takes no token ids")
    ends = [*sorted(random.Random(entry.id).sample(range(2, LENGTH), 3)), LENGTH]
    dense = {}
    for name, compute, more in (("at once", at_once, ()), ("in chunks", in_chunks, (ends,))):
        given, earlier = perturbed(entry, model, 0)
        logits = attempted(compute, model, given, *more)
        if logits is not None and len(logits) % LENGTH == 0 and leak(logits, earlier) <= 1e-5:
            dense[name] = (compute, more)
    if not dense:
        pytest.skip("the dense model is not causal itself, or does not say so token by token")
    try:
        retrofit.apply(model, "sequence-altup(k=2, layers=all)", example_inputs=example, verify=False)
    except RetrofitError as error:
        pytest.skip(f"refused: {error}")
    moved(model)
    for k, seed in SEEDS.values():
        for module in model.modules():
            if isinstance(module, StridedLayer):
                module.k = k
        given, earlier = perturbed(entry, model, seed)
        same, changed = by_sequence(at_once(model, given))[:2]
        assert float((same - changed)[:, 1:].abs().max()) > 0  # what comes after a change does hear of it
        for name, (compute, more) in dense.items():
            moves = leak(compute(model, given, *more), earlier)
            assert moves <= 1e-5, f"{name}, k = {k}: earlier outputs moved by {moves:.1e}"
