"""The lsh-attention pass on whole models: exact up to one chunk, causal, cached and padded beyond it, in every kind of module."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import cached_decoding, tiny_models, zoo
from torch import Tensor, nn

import retrofit
from retrofit.anatomy import causality
from retrofit.errors import DoesNotFitError, RetrofitError, SpecError
from retrofit.passes import LSHAttention
from retrofit.passes.lsh_attention.bucketed_attention import BucketedAttention, InterceptedAttention
from retrofit.rewriting import apply_reported

BUILD = {
    "llama": functools.partial(tiny_models.llama, max_position_embeddings=64),
    "gpt2": functools.partial(tiny_models.gpt2, n_positions=64),
    "bert": functools.partial(tiny_models.bert, max_position_embeddings=64, initializer_range=0.3),
    "t5": tiny_models.t5,
}
FORM = {"rounds": 2, "buckets": 4, "chunk": 4}


@functools.cache
def dense(name: str) -> Any:
    return BUILD[name]().eval()


@functools.cache
def rewritten(name: str, **options: Any) -> Any:
    return retrofit.apply(copy.deepcopy(dense(name)), LSHAttention(**{**FORM, **options}), verify=False)


def ids(batch: int = 2, length: int = 21, seed: int = 0) -> Tensor:
    return torch.randint(5, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> Tensor:
    return zoo.logits(model(**inputs)).clone()


# ── Where it is exact, and where it is not ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_up_to_one_chunk_it_is_the_dense_model_and_beyond_it_is_not(name: str) -> None:
    model = rewritten(name)
    for length in (4, 21):
        both = {"decoder_input_ids": ids(length=length, seed=1)} if name == "t5" else {}
        found, expected = (logits(one, input_ids=ids(length=length), **both) for one in (model, dense(name)))
        assert torch.equal(found, expected) == (length == 4)


def test_the_plan_says_whether_the_examples_are_within_a_chunk() -> None:
    model = dense("llama")
    for chunk, exact in ((4, False), (128, True)):
        (planned,) = retrofit.plan_of(model, LSHAttention(chunk=chunk, buckets=4)).passes
        assert planned.plan.exact is exact and planned.plan.new_parameters == 0
        assert [site.name for site in planned.plan.sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


# ── Causal, cached, padded ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_goes_on_in_steps_and_in_chunks(name: str) -> None:
    cached_decoding.check_steps(rewritten(name), ids(), (1,) * 21, (9, 1, 2, 8, 1))
    cached_decoding.check_hidden_ends(rewritten(name), ids(), (9, 8, 4), (9, 3, 1, 8))
    hidden = torch.ones_like(ids())
    hidden[:, :2] = 0
    cached_decoding.check_mask(rewritten(name), ids(), hidden, (2, 19))


@pytest.mark.parametrize("how", cached_decoding.HOW, ids=str)
def test_a_padded_sequence_is_continued_as_if_it_were_alone(how: dict[str, Any]) -> None:
    cached_decoding.check_padding(rewritten("llama"), ids(2, 12, seed=4), 3, **how)


def test_tokens_that_were_guessed_wrong_leave_no_trace() -> None:
    cached_decoding.check_wrong_guesses(rewritten("llama"), ids(1, 12))


@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_padding_on_either_side_of_an_encoder_is_in_no_bucket(left: bool) -> None:
    model, tokens, other = rewritten("bert"), ids(1, 17), ids(1, 8, seed=8)
    positions = torch.arange(17)[None]
    alone = logits(model, input_ids=tokens, position_ids=positions)
    parts, zeros = ([other, tokens], [tokens, other]), torch.zeros(1, 8, dtype=torch.long)
    padded, ones = torch.cat(parts[not left], 1), torch.ones(1, 17, dtype=torch.long)
    mask = torch.cat([zeros, ones] if left else [ones, zeros], 1)
    numbers = torch.cat([zeros, positions] if left else [positions, zeros], 1)
    found = logits(model, input_ids=padded, attention_mask=mask, position_ids=numbers)
    torch.testing.assert_close(found[:, 8:] if left else found[:, :17], alone, rtol=1e-4, atol=1e-4)


# ── Verified, trained, saved ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("options", [FORM, {}], ids=["chunks", "one-chunk"])
def test_every_check_passes_within_one_chunk_and_beyond(options: dict[str, Any]) -> None:
    model = copy.deepcopy(dense("llama"))
    report = apply_reported(model, LSHAttention(**options), example_inputs={"input_ids": ids(2, 14)}).report
    assert report is not None and report.ok
    assert all(report[name].status == "passed" for name in ("method", "causality", "padding", "cache", "gradients", "round trip"))


def gradients(model: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [one.grad.clone() for one in model.parameters()]


@pytest.mark.long
def test_checkpointed_and_compiled_steps_have_the_same_gradients() -> None:
    model, tokens = copy.deepcopy(rewritten("llama")).train(), ids()
    expected = gradients(model, tokens)
    model.gradient_checkpointing_enable()
    for one, other in zip(gradients(model, tokens), expected, strict=True):
        assert torch.equal(one, other)
    model.gradient_checkpointing_disable()
    torch.compiler.reset()
    model.zero_grad(set_to_none=True)
    torch.compile(model, fullgraph=True, backend="aot_eager")(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("share", ["none", "queries"])
@torch.no_grad()
def test_it_is_saved_and_loaded_as_a_model_of_transformers(share: str, tmp_path: Path) -> None:
    name = "bert" if share == "queries" else "llama"
    kind = transformers.AutoModelForMaskedLM if share == "queries" else transformers.AutoModelForCausalLM
    model = rewritten(name, share=share, seed=5)
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert torch.equal(logits(again, input_ids=ids()), logits(model, input_ids=ids()))
    assert retrofit.recipe(again) == (LSHAttention(**FORM, share=share, seed=5),)


def test_where_queries_are_keys_one_projection_makes_both() -> None:
    model = rewritten("bert", share="queries")
    (site,) = [one for one in model.modules() if isinstance(one, InterceptedAttention)]
    assert site.query is site.key and site.attention.shared
    assert len(list(model.parameters())) == len(list(dense("bert").parameters())) - 2


# ── Other models, and what is refused ────────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """An attention of no library, without heads that a config would name, whose core is called as `call` says."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.call = nn.Linear(16, 48), nn.Linear(16, 16), call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.out(self.call(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Own(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.block, self.mlp = Block(call), nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.block(x)
        return self.head(x + self.mlp(x))  # type: ignore[no-any-return]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


class Chooser(nn.Module):
    """Attends to the 3 keys that score highest with an indexer of its own; or adds these scores as a bias, and to all before."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.index, self.hides = nn.Linear(16, 8), hides
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        index, places = self.index(x), torch.arange(x.shape[1], device=x.device)
        scores = (index @ index.mT).unsqueeze(1).masked_fill(places[None] > places[:, None], -3e4)
        if self.hides:
            chosen = torch.zeros_like(scores).scatter(-1, scores.topk(3, -1).indices, 1.0)
            scores = scores.masked_fill(chosen == 0, -3e4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, scores)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def own(block: nn.Module) -> nn.Module:
    """An `Own` model with another block, and weights that are not small."""
    torch.manual_seed(0)
    model = Own(fused)
    model.block = block
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def test_an_attention_that_chooses_its_keys_by_what_tokens_hold_is_a_near_miss() -> None:
    with pytest.raises(DoesNotFitError, match=r"\btopk\b"):
        retrofit.apply(own(Chooser(hides=True)), LSHAttention(**FORM), example_inputs={"input_ids": ids(2, 9)}, verify=False)


@pytest.mark.first(1)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bias_that_large_weights_make_leaves_an_attention_causal(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causality, "LARGEST_MASK_INPUT", 200)  # smaller than the embedding
    model = own(Chooser(hides=False)).to(device)
    (planned,) = retrofit.plan_of(model, LSHAttention(**FORM), example_inputs={"input_ids": ids(2, 9).to(device)}).passes
    (site,) = planned.plan.attentions  # type: ignore[attr-defined]
    assert site.causal


@torch.no_grad()
def test_what_a_token_sees_by_such_a_bias_does_not_depend_on_later_ones() -> None:
    model = retrofit.apply(own(Chooser(hides=False)), LSHAttention(**FORM), example_inputs={"input_ids": ids()}, verify=False)
    torch.testing.assert_close(model(ids()[:, :11]), model(ids())[:, :11])


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("emit", ["module", "graph"])
@torch.no_grad()
def test_a_model_of_no_library_attends_in_buckets(emit: str) -> None:
    torch.manual_seed(0)
    model = Own(fused)
    for parameter in model.parameters():
        parameter.mul_(3)
    short, long = ids(length=4), ids(length=23)
    before = [model(one) for one in (short, long)]
    model = retrofit.apply(model, LSHAttention(**FORM), example_inputs={"input_ids": long}, verify=False, emit=emit)
    torch.testing.assert_close(model(short), before[0])
    found = model(long)
    assert (found - before[1]).abs().max() > 1e-3
    torch.testing.assert_close(model(long[:, :11]), found[:, :11])


class Torchs(nn.Module):
    """torch's own attention module, in an `Own` model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


@torch.no_grad()
def test_torchs_own_module_whose_call_cannot_be_intercepted_becomes_a_graph() -> None:
    torch.manual_seed(0)
    model = Own(fused)
    model.block = Torchs()
    for parameter in model.parameters():
        parameter.mul_(3)
    short, long = ids(length=4), ids(length=23)
    before = [model(one) for one in (short, long)]
    model = retrofit.apply(model, LSHAttention(**FORM), example_inputs={"input_ids": long}, verify=False)
    torch.testing.assert_close(model(short), before[0])
    assert (model(long) - before[1]).abs().max() > 1e-3


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("build", "options", "why"),
    [
        (lambda: Own(written_out), {}, "its scores are written out"),
        (lambda: BUILD["llama"](attn_implementation="eager"), {}, "its scores are written out"),
        (lambda: zoo.build(zoo.entry("causal/gemma2")), {}, "its scores are soft-capped before the softmax"),
        (BUILD["llama"], {"share": "queries"}, "its queries have 16 columns and its keys 8"),
        (BUILD["gpt2"], {"share": "queries"}, "no two modules compute its queries and its keys"),
        (lambda: copy.deepcopy(rewritten("llama")), {}, "it attends in buckets already"),
    ],
)
def test_what_cannot_attend_in_buckets_is_refused_with_the_reason(build: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(build(), LSHAttention(**options), example_inputs={"input_ids": ids(2, 8)}, verify=False)
    assert why in str(caught.value)


def test_cross_attention_stays_as_it_is() -> None:
    model = rewritten("t5")
    assert sum(isinstance(one, BucketedAttention) for one in model.modules()) == 2
    (planned,) = retrofit.plan_of(dense("t5"), LSHAttention()).passes
    assert any("it reads another stream" in miss.why for miss in planned.plan.near_misses)


def test_an_odd_number_of_buckets_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        LSHAttention(buckets=5)
    assert refused.value.option == "buckets"


def test_an_attention_that_is_not_fused_any_more_is_an_error_and_not_dense() -> None:
    model = copy.deepcopy(rewritten("llama"))
    model.set_attn_implementation("eager")
    with pytest.raises(RetrofitError, match="scaled_dot_product_attention"):
        model(ids())


@pytest.mark.long
@pytest.mark.parametrize(("name", "says"), [("bert", "1 file"), ("llama", "1 file with the cache")])
def test_onnx_files_compute_it_for_few_tokens_and_for_many(name: str, says: str) -> None:
    found = retrofit.verify(rewritten(name), example_inputs={"input_ids": ids()}, checks=["onnx"])["onnx"]
    assert found.status == "passed" and says in found.measured and not found.why, found
