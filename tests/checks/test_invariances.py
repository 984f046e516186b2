"""What outputs must not depend on: padding, later tokens, other rows; and when a model itself is to blame that they do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import zoo
from support.own_models import Own
from support.retrofitted import moved
from support.tiny_models import Plain, llama
from torch import Tensor, nn

import retrofit
from retrofit.checks import Reference
from retrofit.emitted import from_exported
from retrofit.errors import RetrofitError
from retrofit.passes.recurrence.recurrence import RecurrentFeedForward
from retrofit.passes.sequence_altup.strided_layers import StridedLayer


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_model_that_ignores_padding_is_held_to_what_it_gave_when_dense() -> None:
    model = Plain(honest=False)
    reference = Reference.of(model)
    report = retrofit.verify(model, reference, checks=("padding",))
    assert report.ok and "does not agree with itself" in report["padding"].why
    model.value.weight.data += 0.1
    assert not retrofit.verify(model, reference, checks=("padding",)).ok


class Positioned(Plain):
    """Learned positions that count from the first column, padding or not."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        positions = self.positions(torch.arange(ids.shape[1]))
        handle = self.embedding.register_forward_hook(lambda module, args, output: output + positions)
        try:
            return super().forward(ids, attention_mask)
        finally:
            handle.remove()


def test_a_model_that_takes_no_positions_is_not_blamed_for_padding_on_the_left() -> None:
    (check,) = retrofit.verify(Positioned(), checks=("padding",)).checks
    assert check.status == "passed" and "left: it takes no positions" in check.why


class WithoutPositions(nn.Module):
    """A Llama that numbers tokens from the first column, padding or not, and may leave its mask unread."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = llama()
        self.reads_mask = True

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = attention_mask if self.reads_mask else None
        return self.decoder(input_ids=input_ids, attention_mask=mask, use_cache=False).logits


class WithoutPositionsOfTwoSides(WithoutPositions):
    """The same over the tokens of an encoder: what they hold on average is added to each of a decoder. It takes positions of which
    side nobody knows."""

    def forward(  # type: ignore[override]
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, decoder_input_ids: Any = None
    ) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        found = super().forward(input_ids, mask)
        mean = (found * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.decoder.lm_head(self.decoder.model.embed_tokens(decoder_input_ids)) + mean  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [WithoutPositions, WithoutPositionsOfTwoSides])
def test_an_approximation_of_shifted_positions_is_held_to_what_padding_may_not_do(kind: type[WithoutPositions]) -> None:
    model, ids = kind(), torch.arange(5, 29).view(2, 12)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :6]} if kind is WithoutPositionsOfTwoSides else {})
    reference = Reference.of(model, inputs)
    retrofit.apply(model, "lsh-attention(rounds=2, buckets=4, chunk=4)", example_inputs=inputs, verify=False)
    (check,) = retrofit.verify(model, reference, inputs, checks=("padding",)).checks
    assert check.status == "passed" and "padding shifts them" in check.why
    model.reads_mask = False
    (check,) = retrofit.verify(model, reference, inputs, checks=("padding",)).checks
    assert check.status == "failed" and "self_attn" in check.why


# ── Causality ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rationed(Own):
    """A causal layer, and one with room for five of those tokens of a batch that want it; `ahead` later ones are heard."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__(depth=1)
        self.ahead, self.wants = ahead, nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, block = self.a(x), self.b[0]
        y = y + block.p(block.m(y).cumsum(1).roll(-self.ahead, 1))
        wants = (self.wants(y) > 0).flatten()
        has_room = (wants & (wants.cumsum(0) <= 5)).view(*x.shape, 1)
        return self.c(y + has_room * block.r(torch.relu(block.q(block.n(y)))))


@pytest.mark.long
def test_rows_that_take_room_from_each_other_are_causal_each_by_itself() -> None:
    causality = retrofit.verify(Rationed())["causality"]
    assert causality.status == "passed" and "rows of a batch depend on each other" in str(causality)
    assert retrofit.verify(Rationed(ahead=1))["causality"].status == "failed"
    rewritten = retrofit.apply(Rationed(), "sum")
    assert retrofit.verify(rewritten, reference=Rationed())["causality"].status == "passed"


class OfOneBatch(Own):
    """A model that takes batches of `rows` alone, as programs exported with a static one do; with `ahead` it is not causal."""

    def __init__(self, rows: int, ahead: int = 0) -> None:
        super().__init__(depth=1)
        self.rows, self.ahead = rows, ahead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == self.rows
        y, block = self.a(x), self.b[0]
        return self.c(y + block.p(block.m(y).cumsum(1).roll(-self.ahead, 1)))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_model_of_one_batch_size_is_held_to_causality(rows: int) -> None:
    ids = torch.arange(4, 4 + 11 * rows).remainder(30).view(rows, 11)
    model = OfOneBatch(rows)
    reference = Reference.of(model, ids, checks=["parameters", "causality"])
    causality = retrofit.verify(model, reference, ids, checks=["causality"])["causality"]
    assert causality.status == "passed" and "x: 0%" in causality.measured
    model.ahead = 1
    causality = retrofit.verify(model, reference, ids, checks=["causality"])["causality"]
    assert causality.status == "failed" and "b.0.p is the first module" in causality.why


def test_a_graph_of_one_batch_size_needs_no_dense_model_to_pass() -> None:
    ids = torch.arange(4, 26).view(2, 11)
    exported = torch.export.export(OfOneBatch(2).eval(), (ids,), dynamic_shapes={"x": {1: torch.export.Dim.AUTO}}, strict=False)
    report = retrofit.verify(from_exported(exported), example_inputs={"x": ids}, checks=["graph", "causality"])
    assert [check.status for check in report.checks] == ["passed", "passed"], str(report)


@pytest.mark.parametrize(("dim", "shift", "where"), [(0, 1, "in other rows moved"), (1, -1, "on moved the output at position")])
def test_a_leak_through_what_begins_at_zero_is_found(dim: int, shift: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    reference = Reference.of(model)
    retrofit.apply(model, "recurrence(rank=2)", verify=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert retrofit.verify(model, reference, checks=["causality"]).ok
    added = RecurrentFeedForward.added
    monkeypatch.setattr(RecurrentFeedForward, "added", lambda *given: added(*given).roll(shift, dim))
    report = retrofit.verify(model, reference, checks=["function", "causality"])
    assert [check.name for check in report.failed] == ["causality"], "the function is still the dense one"
    assert "once what begins at zero has moved" in report["causality"].why and where in report["causality"].why
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the noise is gone"


# ── Strided models of the zoo ────────────────────────────────────────────────────────────────────────────────────────────────────


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
