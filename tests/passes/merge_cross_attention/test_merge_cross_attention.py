"""The merge-cross-attention pass on whole models: computed by hand, its start, caches, padding, training, other models."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models, zoo
from support.retrofitted import moved
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.errors import DoesNotFitError, RetrofitError, SpecError
from retrofit.passes import MergeCrossAttention
from retrofit.passes.merge_cross_attention.joint_attention import JointAttention
from retrofit.passes.merge_cross_attention.merged_layer import OtherTokens
from retrofit.passes.sparse_qkv.sparse_attention import ColumnProjection
from retrofit.rewriting import apply_reported


def bart() -> Any:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=64,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        init_std=0.3,
        forced_eos_token_id=None,
        **sizes,
        **heads,
    )
    return tiny_models.built(config, transformers.BartForConditionalGeneration)


BUILD = {"bart": bart, "t5": functools.partial(tiny_models.t5, num_layers=2, initializer_factor=2.0)}


@functools.cache
def dense(name: str) -> Any:
    return BUILD[name]().eval()


@functools.cache
def rewritten(name: str, **options: Any) -> Any:
    return retrofit.apply(copy.deepcopy(dense(name)), MergeCrossAttention(**options), verify=False)


def ids(batch: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(5, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(length: int = 13, seed: int = 0) -> dict[str, Tensor]:
    """Two sequences for the encoder, the second padded at its end, and as many tokens for the decoder."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids(seed=seed), "attention_mask": mask, "decoder_input_ids": ids(2, length, seed + 1)}


@torch.no_grad()
def logits(model: Any, **given: Any) -> Tensor:
    return zoo.logits(model(**given)).clone()


# ── By hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor, heads: int) -> Tensor:
    """Attention written out, token by token: q (batch, T, width), k and v (batch, K, width), added (batch, heads, T, K)."""
    result = torch.zeros(*q.shape[:2], v.shape[-1])
    for b in range(len(q)):
        for h in range(heads):
            of = slice(h * q.shape[-1] // heads, (h + 1) * q.shape[-1] // heads)
            for i in range(q.shape[1]):
                scores = torch.stack([q[b, i, of] @ k[b, j, of] + added[b, h, i, j] for j in range(k.shape[1])])
                result[b, i, of] = sum(p * v[b, j, of] for j, p in enumerate(scores.softmax(0)))  # type: ignore[assignment]
    return result


def seen(mask: Tensor, tokens: int, heads: int, bias: Tensor | None = None, first: bool = False) -> Tensor:
    """What is added to the scores of [encoder; decoder]: −∞ for padding and later tokens; `bias` (heads, T, T) among the latter."""
    own = torch.zeros(heads, tokens, tokens) if bias is None else bias
    encoder = own[:, :, :1].expand(-1, -1, mask.shape[1]) if first else torch.zeros(heads, tokens, mask.shape[1])
    later = torch.full((tokens, tokens), float("-inf")).triu(1)
    hidden = torch.zeros(mask.shape).masked_fill(mask == 0, float("-inf"))[:, None, None]
    parts = encoder + hidden, (own + later).expand(len(mask), -1, -1, -1)
    return torch.cat(parts, -1)


def bart_by_hand(model: Any, attentions: int, given: dict[str, Tensor], positions: str) -> Tensor:
    """The logits, from the dense model's modules: each attention over the encoder's states and the decoder's, joined."""
    parts = model.model
    states = parts.encoder(given["input_ids"], given["attention_mask"]).last_hidden_state
    tokens = given["decoder_input_ids"]
    x = parts.decoder.embed_tokens(tokens) + parts.decoder.embed_positions(tokens)
    x = parts.decoder.layernorm_embedding(x)
    added = seen(given["attention_mask"], tokens.shape[1], 2)
    for layer in parts.decoder.layers:
        for number, (attention, norm) in enumerate(
            ((layer.self_attn, layer.self_attn_layer_norm), (layer.encoder_attn, layer.encoder_attn_layer_norm))
        ):
            both, a = torch.cat([states, x], 1), attention
            y = attend(a.q_proj(x) * a.scaling, a.k_proj(both), a.v_proj(both), added, 2)
            x = norm(x + a.out_proj(y)) if number < attentions else norm(x)
        x = layer.final_layer_norm(x + layer.fc2(F.gelu(layer.fc1(x))))
    return model.lm_head(x) + model.final_logits_bias  # type: ignore[no-any-return]


def t5_by_hand(model: Any, attentions: int, given: dict[str, Tensor], positions: str) -> Tensor:
    states = model.encoder(given["input_ids"], given["attention_mask"]).last_hidden_state
    tokens = given["decoder_input_ids"].shape[1]
    x = model.decoder.embed_tokens(given["decoder_input_ids"])
    bias = model.decoder.block[0].layer[0].SelfAttention.compute_bias(tokens, tokens)[0]
    added = seen(given["attention_mask"], tokens, 2, bias, positions == "first")
    for block in model.decoder.block:
        both_layers = (block.layer[0], block.layer[0].SelfAttention), (block.layer[1], block.layer[1].EncDecAttention)
        for layer, a in both_layers[:attentions]:
            normed = layer.layer_norm(x)
            both = torch.cat([states, normed], 1)
            x = x + a.o(attend(a.q(normed), a.k(both), a.v(both), added, 2))
        x = block.layer[2](x)
    x = model.decoder.final_layer_norm(x)
    return model.lm_head(x * model.model_dim**-0.5 if model.config.scale_decoder_outputs else x)  # type: ignore[no-any-return]


BY_HAND = {"bart": bart_by_hand, "t5": t5_by_hand}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bart", {}),
        ("bart", {"attentions": 1}),
        ("t5", {}),
        ("t5", {"attentions": 1}),
        pytest.param("t5", {"positions": "first"}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [13, 3])  # in one fused call, and written out
@torch.no_grad()
def test_every_attention_is_over_the_encoders_tokens_and_the_decoders(name: str, options: dict[str, Any], length: int) -> None:
    given = inputs(length)
    found = logits(rewritten(name, **options), **given)
    expected = BY_HAND[name](dense(name), options.get("attentions", 2), given, options.get("positions", "none"))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))


# ── The start ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def kl(one: Tensor, other: Tensor) -> float:
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_two_attentions_are_the_dense_layer_where_neither_sees_what_it_did_not_have(name: str) -> None:
    model, given = copy.deepcopy(rewritten(name)), inputs()
    before, dial = logits(dense(name), **given), OtherTokens()
    gaps = []
    for share in (1.0, 0.1, 0.01, 0.0):
        assert dial.fits(model)
        dial.turn(model, share)
        gaps.append(kl(before, logits(model, **given)))
    assert gaps[-1] < 1e-6 < gaps[-2] < gaps[0]
    assert torch.equal(logits(model, **given), before)
    dial.turn(model, 1.0)
    assert torch.equal(logits(model, **given), logits(rewritten(name), **given))


def test_two_attentions_begin_nearer_than_one() -> None:
    given = inputs()
    before = logits(dense("bart"), **given)
    assert not OtherTokens().fits(rewritten("bart", attentions=1))
    assert kl(before, logits(rewritten("bart"), **given)) < kl(before, logits(rewritten("bart", attentions=1), **given))


def test_a_weight_below_one_begins_nearer_and_is_trained() -> None:
    model, given = copy.deepcopy(rewritten("bart", weight=0.01)), inputs()
    before = logits(dense("bart"), **given)
    assert kl(before, logits(model, **given)) < 0.1 * kl(before, logits(rewritten("bart"), **given))
    new = [one for name, one in model.named_parameters() if name.endswith("log_weight")]
    assert len(new) == 4 and all(one.shape == (2,) for one in new)
    model(**given, labels=ids(2, 13)).loss.backward()
    assert all(bool((one.grad != 0).all()) for one in new)
    (planned,) = retrofit.plan_of(dense("bart"), MergeCrossAttention(weight=0.01)).passes
    assert planned.plan.new_parameters == 8


@pytest.mark.parametrize(("option", "value"), [("attentions", 3), ("weight", 1.5), ("weight", 0)])
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(SpecError) as refused:
        MergeCrossAttention(**{option: value})  # type: ignore[arg-type]
    assert refused.value.option == option


# ── Cached, padded, generated ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "options"), [("bart", {}), ("t5", {}), ("t5", {"attentions": 1})], ids=str)
@torch.no_grad()
def test_a_cache_goes_on_in_steps_and_keeps_the_encoders_keys(name: str, options: dict[str, Any]) -> None:
    model, given = rewritten(name, **options), inputs()
    whole, tokens = logits(model, **given, use_cache=False), given["decoder_input_ids"]
    encoded = model.get_encoder()(given["input_ids"], given["attention_mask"])
    lengths: list[int] = []
    matrices = [one for one in model.get_decoder().modules() if isinstance(one, nn.Linear)]
    hooks = [one.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1])) for one in matrices]
    try:
        for sizes in ((1,) * 13, (9, 1, 2, 1)):
            parts, cache = [], None
            for number, part in enumerate(tokens.split(sizes, 1)):
                lengths.clear()
                output = model(
                    encoder_outputs=encoded,
                    attention_mask=given["attention_mask"],
                    decoder_input_ids=part,
                    past_key_values=cache,
                    use_cache=True,
                )
                parts.append(output.logits)
                cache = output.past_key_values
                assert (9 in lengths) == (number == 0)  # no later step multiplies the encoder's states
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
            assert len(cache.self_attention_cache.layers) == 2 * (1 + (options.get("attentions", 2) == 2))
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"attentions": 1}], ids=str)
@torch.no_grad()
def test_a_compiled_decoding_step_goes_on_with_a_static_cache(options: dict[str, Any]) -> None:
    model, given = copy.deepcopy(rewritten("t5", **options)), inputs()
    tokens, mask = given["decoder_input_ids"], given["attention_mask"]
    whole = logits(model, **given, use_cache=False)
    encoded = model.get_encoder()(given["input_ids"], mask)
    own, cross = (transformers.StaticCache(config=model.config, max_cache_len=length) for length in (13, 9))
    cache = transformers.EncoderDecoderCache(own, cross)
    fixed = {"encoder_outputs": encoded, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
    model(decoder_input_ids=tokens[:, :8], **fixed)
    torch.compiler.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    parts = [step(decoder_input_ids=tokens[:, at : at + 1], **fixed).logits for at in range(8, 13)]
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 8:], rtol=1e-3, atol=1e-3 * float(whole.abs().max()))


HOW = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": False, "cache_implementation": "static"}], ids=str)
def test_a_padded_source_is_decoded_as_if_it_were_alone(name: str, how: dict[str, Any]) -> None:
    model, given = rewritten(name), inputs()
    both = model.generate(given["input_ids"], attention_mask=given["attention_mask"], **HOW, **how)
    alone = model.generate(given["input_ids"][1:, :6], **HOW, **{**how, "cache_implementation": None})
    assert torch.equal(both[1], alone[0])


@pytest.mark.parametrize("options", [{}, {"attentions": 1}], ids=str)
def test_tokens_that_were_guessed_wrong_leave_no_trace(options: dict[str, Any]) -> None:
    model, source = rewritten("t5", **options), ids(1, 12)
    guessed = model.generate(source, prompt_lookup_num_tokens=3, do_sample=False, **HOW)
    assert torch.equal(guessed, model.generate(source, do_sample=False, **HOW))
    assert torch.equal(guessed, model.generate(source, do_sample=False, use_cache=False, **HOW))


def test_a_source_that_is_padded_at_its_beginning_gives_the_same() -> None:
    model, source, zeros = rewritten("t5"), ids(1, 7), torch.zeros(1, 4, dtype=torch.long)
    padded, mask = torch.cat([zeros + 9, source], 1), torch.cat([zeros, torch.ones(1, 7, dtype=torch.long)], 1)
    tokens = ids(1, 12, seed=3)
    # relative positions in the encoder are the same, wherever the sequence begins
    found = logits(model, input_ids=padded, attention_mask=mask, decoder_input_ids=tokens)
    torch.testing.assert_close(found, logits(model, input_ids=source, decoder_input_ids=tokens), rtol=1e-4, atol=1e-4)


# ── Verified, trained, saved ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [{}, {"attentions": 1, "weight": 0.5}], ids=str)
def test_every_check_passes(options: dict[str, Any]) -> None:
    report = apply_reported(copy.deepcopy(dense("t5")), MergeCrossAttention(**options)).report
    assert report is not None and report.ok
    assert all(report[name].status == "passed" for name in ("method", "causality", "padding", "cache", "gradients", "round trip"))


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(**inputs(), labels=ids(2, 13, seed=5)).loss.backward()
    return [one.grad.clone() for one in model.parameters()]


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_checkpointed_step_has_the_same_gradients(name: str) -> None:
    model = copy.deepcopy(rewritten(name))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for attribute in ("dropout", "activation_dropout"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
    expected = gradients(model.train())
    model.gradient_checkpointing_enable()
    for one, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_a_compiled_step_has_the_same_gradients() -> None:
    model = copy.deepcopy(rewritten("t5"))
    expected = gradients(model)
    torch.compiler.reset()
    model.zero_grad(set_to_none=True)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    step(**inputs(), labels=ids(2, 13, seed=5), use_cache=False).loss.backward()
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [{}, {"attentions": 1, "positions": "first"}], ids=str)
@torch.no_grad()
def test_it_is_saved_and_loaded_as_a_model_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    model = rewritten("t5", **options)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, **inputs()), logits(model, **inputs()))
    assert retrofit.recipe(again) == (MergeCrossAttention(**options),)
    names = [name for name, _ in model.named_parameters()]
    assert any("EncDecAttention" in name for name in names) == (options.get("attentions", 2) == 2)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"attentions": 1}], ids=str)
def test_onnx_files_compute_it_and_the_decoder_with_past_gets_the_encoders_keys(options: dict[str, Any]) -> None:
    found = retrofit.verify(rewritten("t5", **options), checks=["onnx"])["onnx"]
    assert found.status == "passed" and "3 files" in found.measured and not found.why, found


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [{}, {"attentions": 1}], ids=str)
@torch.no_grad()
def test_merged_attentions_with_sparse_projections_are_those_with_the_matrices_that_these_multiply_by(
    options: dict[str, Any],
) -> None:
    sparse = copy.deepcopy(rewritten("t5", **options))
    retrofit.apply(sparse, "sparse-qkv(kernel=1, output=keep, stacks=decoder)", verify=False)
    plain, replaced = copy.deepcopy(rewritten("t5", **options)), 0
    for path, module in sparse.named_modules():
        if isinstance(module, ColumnProjection):
            plain.get_submodule(path).weight.copy_(module(torch.eye(16)[None])[0].T)
            replaced += 1
    assert replaced == 6 * options.get("attentions", 2)  # queries, keys and values in two layers
    expected = logits(plain, **inputs())
    torch.testing.assert_close(logits(sparse, **inputs()), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    given = {"attention_mask": inputs()["attention_mask"], "num_beams": 3, **HOW}
    found, expected = (model.generate(ids(), **given) for model in (sparse, plain))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("build", [lambda: rewritten("t5"), lambda: merged_own(written_out)], ids=["fused", "written-out"])
def test_a_merged_decoder_is_a_causal_stack_that_attends_to_itself(build: Any) -> None:
    """So what other passes put there keeps its state in the cache, and reads no later token."""
    model = build()
    *_, decoder = retrofit.inspect(model, OWN_INPUTS if isinstance(model, Own) else None).stacks
    assert decoder.causal and decoder.kind == "decoder"
    assert [branch.role for branch in decoder.layers[0].branches] == ["self-attention", "self-attention", "ffn"]


@pytest.mark.long
def test_a_recurrence_in_merged_layers_goes_on_from_the_cache() -> None:
    model = moved(retrofit.apply(copy.deepcopy(rewritten("t5")), "recurrence(rank=4)", verify=False))
    given = {"attention_mask": inputs()["attention_mask"], "do_sample": False, **HOW}
    assert torch.equal(model.generate(ids(), **given), model.generate(ids(), **given, use_cache=False))


def test_with_convolutions_over_tokens_merged_attentions_stay_and_the_reason_names_the_fix() -> None:
    (planned,) = retrofit.plan_of(rewritten("t5"), "sparse-qkv").passes
    assert [site.name.split(".")[0] for site in planned.plan.sites] == ["encoder", "encoder"]
    misses = planned.plan.near_misses
    assert len(misses) == 4 and all("also projects another stream" in miss.why and "kernel=1" in miss.remedy for miss in misses)


# ── Other models, and what is refused ────────────────────────────────────────────────────────────────────────────────────────────


def turned(x: Tensor) -> Tensor:
    """Rotary positions: (batch, heads, tokens, width)."""
    angles = torch.arange(x.shape[2])[:, None] / 10 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """In double precision, and with batch and heads as one dimension."""
    q, k, values = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q, k.mT) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    p = scores.softmax(-1, dtype=torch.float64).to(q.dtype)
    return torch.bmm(p, values).unflatten(0, v.shape[:2])


def changed_weights(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The weights of a query do not sum to one."""
    p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (p * (1 - p)) @ v


class OwnAttention(nn.Module):
    """An attention of no library; its queries and keys are turned where `rotary`."""

    def __init__(self, rotary: bool, core: Any) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.rotary, self.core = rotary, core

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        pairs = (self.to_q, x), (self.to_k, source), (self.to_v, source)
        q, k, v = (module(y).unflatten(-1, (2, 8)).transpose(1, 2) for module, y in pairs)
        if self.rotary:
            q, k = turned(q), turned(k)
        return self.out(self.core(q, k, v, self.rotary).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class OwnLayer(nn.Module):
    def __init__(self, core: Any) -> None:
        super().__init__()
        self.first, self.second = OwnAttention(True, core), OwnAttention(False, core)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        x = x + self.first(x, x)
        x = x + self.second(x, states)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Own(nn.Module):
    def __init__(self, core: Any = fused) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.layers = nn.ModuleList([OwnLayer(core), OwnLayer(core)])

    def forward(self, source_ids: Tensor, input_ids: Tensor) -> Tensor:
        states = self.embedding(source_ids)
        states = states + self.encoder(states)
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, states)
        return self.head(x)  # type: ignore[no-any-return]


def own_by_hand(model: Own, source: Tensor, tokens: Tensor, first: bool) -> Tensor:
    """A decoder's query is turned for the decoder's keys, and as it is for the encoder's, unless those are at its first token."""
    states = model.embedding(source)
    states = states + model.encoder(states)
    x = model.embedding(tokens)
    later = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
    for layer in model.layers:
        for a in (layer.first, layer.second):
            heads = [m(y).unflatten(-1, (2, 8)).transpose(1, 2) for m in (a.to_q, a.to_k, a.to_v) for y in (x, states)]
            q, _, k, k_e, v, v_e = heads
            scores = (turned(q) if first else q) @ k_e.mT, turned(q) @ turned(k).mT + later
            p = (torch.cat([scores[0] * 8**-0.5, scores[1] * 8**-0.5], -1)).softmax(-1)
            x = x + a.out((p @ torch.cat([v_e, v], 2)).transpose(1, 2).flatten(2))
        x = x + layer.mlp(x)
    return model.head(x)


@functools.cache
def merged_own(core: Any) -> Any:
    return retrofit.apply(Own(core), MergeCrossAttention(), example_inputs=OWN_INPUTS, verify=False)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("core", "emit", "positions"),
    [
        (fused, "module", "none"),
        (fused, "graph", "none"),
        (fused, "module", "first"),
        (written_out, "module", "none"),
        (written_out, "graph", "none"),
    ],
)
@torch.no_grad()
def test_in_a_model_of_no_library_positions_are_among_the_decoders_tokens_alone(core: Any, emit: str, positions: str) -> None:
    torch.manual_seed(0)
    model = Own(core).eval()
    for parameter in model.parameters():
        parameter.mul_(3)
    given = {"source_ids": ids(2, 9), "input_ids": ids(2, 11, seed=1)}
    expected = own_by_hand(model, *given.values(), positions == "first")
    model = retrofit.apply(model, MergeCrossAttention(positions=positions), example_inputs=given, verify=False, emit=emit)
    torch.testing.assert_close(model(**given), expected, rtol=1e-3, atol=1e-4)
    shorter = {"source_ids": ids(1, 5), "input_ids": ids(1, 4, seed=1)}
    assert model(**shorter).shape == (1, 4, 40)


@pytest.mark.long
@pytest.mark.parametrize("core", [fused, written_out])
@torch.no_grad()
def test_an_exported_program_is_merged_saved_and_loaded(core: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Own(core).eval()
    for parameter in model.parameters():
        parameter.mul_(3)
    expected = own_by_hand(model, *OWN_INPUTS.values(), False)
    batch, source, length = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "source", "length"))
    sizes = {"source_ids": {0: batch, 1: source}, "input_ids": {0: batch, 1: length}}
    torch.export.save(torch.export.export(model, (), OWN_INPUTS, dynamic_shapes=sizes, strict=False), tmp_path / "dense.pt2")
    merged = retrofit.apply(retrofit.load(tmp_path / "dense.pt2"), MergeCrossAttention(), example_inputs=OWN_INPUTS, verify=False)
    torch.testing.assert_close(merged(**OWN_INPUTS), expected, rtol=1e-3, atol=1e-4)
    retrofit.save(merged, tmp_path / "merged.pt2")
    again = retrofit.load(tmp_path / "merged.pt2")
    shorter = {"source_ids": ids(3, 5), "input_ids": ids(3, 4, seed=1)}
    for given in (OWN_INPUTS, shorter):
        torch.testing.assert_close(again(**given), merged(**given), rtol=1e-3, atol=1e-4)  # one call for all keys, or two products


OWN_INPUTS = {"source_ids": ids(2, 9), "input_ids": ids(2, 11, seed=1)}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("build", "options", "code", "word"),
    [
        (lambda: Own(changed_weights), {}, "does-not-fit", "weights are changed"),
        (lambda: Own(written_out), {"positions": "first"}, "does-not-fit", "bias"),
        (tiny_models.llama, {}, "no-cross-attention", "another stack"),
        (lambda: copy.deepcopy(rewritten("t5")), {}, "no-cross-attention", "already"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_reason(build: Any, options: dict[str, Any], code: str, word: str) -> None:
    model = build()
    given = OWN_INPUTS if isinstance(model, Own) else None
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(model, MergeCrossAttention(**options), example_inputs=given, verify=False, emit="module")
    assert word in str(caught.value) and caught.value.remedy
    assert caught.value.code == code


def test_an_attention_that_is_not_fused_any_more_is_an_error_and_not_dense() -> None:
    model = copy.deepcopy(rewritten("bart"))
    model.set_attn_implementation("eager")
    with pytest.raises(RetrofitError, match="scaled_dot_product_attention"):
        model(**inputs())


def test_a_decoder_without_an_encoder_is_as_it_was() -> None:
    decoder, merged = (one.get_decoder() for one in (dense("bart"), rewritten("bart")))
    with torch.no_grad():
        found, expected = (one(input_ids=ids(), use_cache=False).last_hidden_state for one in (merged, decoder))
    assert torch.equal(found, expected)
    assert sum(isinstance(one, JointAttention) for one in merged.modules()) == 4
