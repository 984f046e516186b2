"""Models with strided layers: against the dense layer under a mask that hides all keys but the anchors, padded, cached, saved."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import zoo
from support.own_models import Block, Own
from support.refusals import refused
from support.retrofitted import moved
from torch import Tensor

import retrofit
from retrofit.errors import DoesNotFitError, RetrofitError
from retrofit.passes import SequenceAltUp
from retrofit.passes.sequence_altup.reference import wiring
from retrofit.rewriting import apply_reported
from retrofit.sdk.modules import SLACK

K = 3
CAUSAL = ("causal/llama", "causal/gpt2", "causal/gemma2", "causal/jamba")
FILLER = 0


@functools.cache
def original(name: str, **how: Any) -> Any:
    model = zoo.build(zoo.entry(name))
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0
    retrofit.apply(model, SequenceAltUp(**{"k": K, **how}), verify=False)
    return moved(model)


def strided(name: str, **how: Any) -> Any:
    return copy.deepcopy(original(name, **how))


def ids(name: str, batch: int = 2, length: int = 13) -> Tensor:
    return zoo.inputs(zoo.entry(name), original(name), batch=batch, length=length)["input_ids"]  # type: ignore[no-any-return]


def padded(length: int, *pads: int) -> Tensor:
    """A mask whose rows have so many tokens of padding on their left."""
    return (torch.arange(length) >= torch.tensor(pads)[:, None]).long()


@torch.no_grad()
def run(model: Any, tokens: Tensor, **more: Any) -> Tensor:
    return model(input_ids=tokens, **more).logits  # type: ignore[no-any-return]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


# ── The function ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_anchors_are_what_the_dense_layer_makes_of_them_when_other_keys_are_hidden() -> None:
    """Rotary tables, positions and the causal mask of a Llama layer: kept tokens stay where they were."""
    layer = strided("causal/llama").model.layers[1]
    x, where = torch.randn(2, 11, layer.layer.hidden_size), torch.arange(11)[None]
    tables = original("causal/llama").model.rotary_emb(x, where)
    anchor = torch.arange(11) % K == 0
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
    made = layer.layer(x, attention_mask=mask & anchor, position_embeddings=tables, position_ids=where)[:, anchor]
    y = layer(x, attention_mask=mask, position_embeddings=tables, position_ids=where)
    at = x[:, anchor]
    expected = layer.a1 * at + layer.a2 * at + layer.b * (made - (layer.a1 + layer.a2) * at)
    close(y[:, anchor], expected)
    close(layer(x, attention_mask=None, position_embeddings=tables, position_ids=where), y)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["causal/llama", "masked/bert"])
def test_k_1_is_the_dense_model_and_passes_its_checks(name: str) -> None:
    dense = zoo.build(zoo.entry(name))
    model = retrofit.apply(copy.deepcopy(dense), SequenceAltUp(k=1), verify=False)
    report = retrofit.verify(model, dense, checks=("function", "parameters", "gradients"))
    assert report.ok, report
    assert sum(p.numel() for n, p in model.named_parameters() if n.endswith((".a1", ".a2", ".b"))) == 3 * 2


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [*CAUSAL[:-1], pytest.param(CAUSAL[-1], marks=pytest.mark.long)])
def test_later_tokens_change_nothing_earlier(name: str) -> None:
    model, tokens = original(name), ids(name, batch=1)
    before = run(model, tokens, use_cache=False)
    for place in range(1, tokens.shape[1]):
        other = tokens.clone()
        other[:, place:] = other[:, place:].flip(1).roll(1) + 1
        close(run(model, other, use_cache=False)[:, :place], before[:, :place])


@pytest.mark.long
def test_a_t5_returns_its_bias_whole() -> None:
    """The first layer computes the relative bias; the strided ones return it, and the last, which sees every token, reads it."""
    model = original("seq2seq/t5")
    assert {type(layer).__name__ for layer in model.encoder.block} == {"T5Block", "SequenceAltUpLayer"}
    tokens = zoo.inputs(zoo.entry("seq2seq/t5"), model)
    mask = torch.ones_like(tokens["input_ids"])
    mask[0, -4:] = 0
    alone = {"input_ids": tokens["input_ids"][:1, :-4], "decoder_input_ids": tokens["decoder_input_ids"][:1]}
    with torch.no_grad():
        close(model(**tokens, attention_mask=mask).logits[:1], model(**alone).logits)


@pytest.mark.long
def test_average_pooling_is_for_encoders() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(zoo.build(zoo.entry("causal/llama")), SequenceAltUp(method="average-pooling"), verify=False)
    assert "average-pooling" in caught.value.what and "method=sequence-altup" in caught.value.remedy
    model = original("masked/bert", method="average-pooling")
    tokens = ids("masked/bert")
    mask = padded(13, 0, 5)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    close(run(model, tokens, attention_mask=mask, position_ids=positions)[1:, 5:], run(model, tokens[1:, 5:]))


class Windowed(Block):
    """A block whose code takes whole windows of 8 tokens only."""

    def forward(self, y: Tensor) -> Tensor:
        if y.shape[1] % 8:
            raise ValueError(f"{y.shape[1]} tokens are no multiple of 8")
        return super().forward(y)


def partly_windowed() -> Own:
    torch.manual_seed(0)
    model = Own(width=16).eval()
    model.b[1] = Windowed(16).eval()
    model.config = {}
    return model


@pytest.mark.long
def test_a_layer_whose_code_does_not_run_on_the_anchors_alone_is_left_alone(tmp_path: Path) -> None:
    """That is tried on the dense model, on inputs of two lengths; the recipe names the layers that are strided."""
    model, inputs = partly_windowed(), {"x": torch.arange(32).view(2, 16)}
    (planned,) = retrofit.plan_of(model, "sequence-altup(k=2, layers=all)", example_inputs=inputs).passes
    assert [site.name for site in planned.plan.sites] == ["b.0", "b.2"]
    (miss,) = planned.plan.near_misses
    assert miss.name == "b.1" and "12 tokens" in miss.why and "8" in miss.why and "layers=" in miss.remedy
    retrofit.apply(model, "sequence-altup(k=2, layers=all)", example_inputs=inputs, verify=False)
    assert retrofit.recipe(model) == (SequenceAltUp(k=2, layers="0+2"),)
    moved(model)
    retrofit.save(model, tmp_path / "model.pt")
    torch.testing.assert_close(retrofit.load(tmp_path / "model.pt", build=partly_windowed)(**inputs), model(**inputs))


@pytest.mark.long
def test_a_refusal_says_why_a_layer_cannot_be_strided() -> None:
    with refused(DoesNotFitError, "strided already"):
        retrofit.apply(strided("causal/gpt2"), SequenceAltUp(), verify=False)
    with refused(DoesNotFitError, "numbers the tokens"):
        retrofit.apply(zoo.build(zoo.entry("seq2seq/t5")), SequenceAltUp(layers="0"), verify=False)
    with refused(DoesNotFitError, "depths"):
        retrofit.apply(zoo.build(zoo.entry("masked/albert")), SequenceAltUp(), verify=False)


@pytest.mark.long
def test_layers_that_share_keys_and_values_are_left_alone() -> None:
    """Gemma 4's last layers read those of earlier ones from a dictionary that every layer receives."""
    entry = zoo.entry("causal/gemma4_text")
    kinds = ["sliding_attention", "full_attention"] * 3
    model = zoo.build(entry, num_hidden_layers=6, num_kv_shared_layers=2, layer_types=kinds)
    example = zoo.inputs(entry, model)
    retrofit.apply(model, SequenceAltUp(k=2, layers="all"), example_inputs=example, verify=False)
    strides = [getattr(layer, "k", 1) for layer in model.model.layers]
    assert strides == [2, 2, 1, 1, 1, 1]  # 2 and 3 write what 4 and 5 read
    moved(model)
    tokens, mask = example["input_ids"], padded(12, 0, 5)
    assert torch.equal(decoded(model, tokens, mask), decoded(model, tokens, mask, use_cache=False))


@pytest.mark.long
def test_layers_that_receive_no_mask_are_left_alone() -> None:
    """Nemotron-H passes no mask to its feed-forwards: they would take padding for tokens."""
    model = original("causal/nemotron_h", layers="all")
    strides = [getattr(layer, "k", 1) for layer in model.model.layers]
    assert strides == [K if layer.block_type in ("linear_attention", "full_attention") else 1 for layer in model.model.layers]
    tokens, mask = ids("causal/nemotron_h"), padded(13, 0, 4)
    close(run(model, tokens, attention_mask=mask, use_cache=False)[1:, 4:], run(model, tokens[1:, 4:], use_cache=False))


@pytest.mark.long
def test_a_last_layer_of_which_the_class_token_alone_is_read_is_left_alone() -> None:
    entry = zoo.entry("image/vit")
    model = zoo.build(entry)
    retrofit.apply(model, SequenceAltUp(k=2, layers="all"), example_inputs=zoo.inputs(entry, model), verify=False)
    assert [getattr(layer, "k", 1) for layer in model.vit.layers] == [2, 2, 2, 1]
    with refused(DoesNotFitError, "only some of its tokens"):
        retrofit.apply(zoo.build(entry), SequenceAltUp(layers="3"), example_inputs=zoo.inputs(entry, model), verify=False)


# ── Decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def decoded(model: Any, tokens: Tensor, mask: Tensor, **how: Any) -> Tensor:
    return model.generate(  # type: ignore[no-any-return]
        tokens, attention_mask=mask, max_new_tokens=7, min_new_tokens=7, do_sample=False, pad_token_id=FILLER, **how
    )


RECURRENT = ("causal/jamba", "causal/falcon_h1", "causal/minimax")  # which go on token by token


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "name", ["causal/llama", "causal/gemma2", *(pytest.param(f"causal/{one}", marks=LONG) for one in ("falcon_h1", "jamba"))]
)
@pytest.mark.parametrize("pads", [pytest.param((0, 0), marks=LONG), (4, 1), (0, 5)])
def test_cached_decoding_is_the_full_forward(name: str, pads: tuple[int, int]) -> None:
    agrees_in_chunks(original(name), name, pads)


@pytest.mark.long
@pytest.mark.parametrize("name", ["causal/deepseek_v32", "causal/glm_moe_dsa", "causal/minimax"])
@pytest.mark.parametrize("pads", [(0, 0), (4, 1)])
def test_what_else_a_cache_keeps_follows_the_anchors(name: str, pads: tuple[int, int]) -> None:
    """Keys of an indexer, those it chose for the layers after it, states in lists of the model's own cache class."""
    agrees_in_chunks(original(name, layers="all"), name, pads)


def agrees_in_chunks(model: Any, name: str, pads: tuple[int, int]) -> None:
    """Chunks of every length, rows in different phases: each new token's logits are those of the whole sequence."""
    tokens, mask = zoo.inputs(zoo.entry(name), model, length=13)["input_ids"], padded(13, *pads)
    whole = run(model, tokens, attention_mask=mask, use_cache=False)
    cache, start = None, 0
    for stop in (6, 7, 8, 9, 11, 12, 13):
        if name in RECURRENT and stop - start > 1 and cache is not None:
            stop = start + 1
        with torch.no_grad():
            out = model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        real = mask[:, start:stop].bool()
        close(out.logits[real], whole[:, start:stop][real])
        start = stop


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"num_beams": 2, "cache_implementation": "static"}]
)
@pytest.mark.parametrize("layers", ["inner", "all"])
def test_generate_makes_the_same_tokens_with_every_cache(how: dict[str, Any], layers: str) -> None:
    model, tokens = original("causal/llama", layers=layers), ids("causal/llama")
    for mask in (padded(13, 0, 0), padded(13, 4, 0)):
        plain = {key: value for key, value in how.items() if key == "num_beams"}
        assert torch.equal(decoded(model, tokens, mask, **how), decoded(model, tokens, mask, use_cache=False, **plain))


@pytest.mark.long
def test_an_encoder_decoder_generates_the_same_tokens() -> None:
    model, tokens = original("seq2seq/t5"), ids("seq2seq/t5")
    for beams in (1, 3):
        mask = torch.ones_like(tokens)
        assert torch.equal(
            decoded(model, tokens, mask, num_beams=beams), decoded(model, tokens, mask, num_beams=beams, use_cache=False)
        )


def test_tokens_can_be_taken_back() -> None:
    """Prompt look-up guesses tokens and crops the cache when they were wrong."""
    model, tokens = original("causal/llama"), ids("causal/llama", batch=1)
    tokens = torch.cat([tokens, tokens], 1)
    mask = torch.ones_like(tokens)
    assert torch.equal(decoded(model, tokens, mask, prompt_lookup_num_tokens=3), decoded(model, tokens, mask))
    for rows in (padded(26, 0), padded(26, 5)):
        with torch.no_grad():
            cache = model(tokens[:, :20], attention_mask=rows[:, :20], use_cache=True).past_key_values
        cache.crop(-7)
        with torch.no_grad():
            out = model(tokens[:, 13:], attention_mask=rows, past_key_values=cache)
        close(out.logits, run(model, tokens, attention_mask=rows, use_cache=False)[:, 13:])
    with torch.no_grad():
        cache = model(tokens.repeat(1, 5), use_cache=True).past_key_values
    with pytest.raises(RetrofitError) as caught:
        cache.crop(-120)
    assert str(SLACK) in caught.value.remedy


def test_the_cache_holds_anchors_only() -> None:
    model, tokens = original("causal/llama"), ids("causal/llama", length=30)
    with torch.no_grad():
        even, ragged = (
            model(tokens, attention_mask=mask, use_cache=True).past_key_values for mask in (padded(30, 0, 0), padded(30, 0, 7))
        )
    for cache in (even, ragged):
        assert [layer.keys.shape[2] for layer in cache.layers] == [30, 10, 10, 30]
        assert [cache.get_seq_length(index) for index in range(4)] == [30] * 4
    calls: list[int] = []
    model = strided("causal/llama")
    model.model.layers[1].layer.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    with torch.no_grad():
        cache = None
        for place in range(7):
            cache = model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True).past_key_values
    assert calls == [1, 1, 1]  # tokens 0, 3 and 6


def test_a_sliding_window_forgets_its_anchors() -> None:
    model = original("causal/gemma2")
    window = model.config.sliding_window
    tokens = ids("causal/gemma2", batch=1, length=4 * window)
    sliding = [index for index, kind in enumerate(model.config.layer_types) if kind == "sliding_attention" and index in (1, 2)]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        out = model(tokens[:, :1], past_key_values=cache)
    assert sliding and all(cache.layers[index].keys.shape[2] <= window // K + 1 for index in sliding)
    close(out.logits[:, -1], run(model, torch.cat([tokens, tokens[:, :1]], 1), use_cache=False)[:, -1])


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.long)])
def test_rows_go_on_in_their_own_phase_when_their_padding_has_left_the_window(attention: str) -> None:
    """From then on the model passes no mask at all, and rows still store different numbers of anchors."""
    import transformers

    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(vocab_size=61, sliding_window=5, attn_implementation=attention, **sizes)
    torch.manual_seed(0)
    model = moved(retrofit.apply(transformers.MistralForCausalLM(config).eval(), SequenceAltUp(k=K, layers="all"), verify=False))
    tokens, mask = torch.randint(3, 61, (2, 6)), padded(6, 0, 4)
    assert torch.equal(decoded(model, tokens, mask), decoded(model, tokens, mask, use_cache=False))


# ── The rest of the ecosystem ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "recipe", [("altup(k=2)", "sequence-altup(k=3)"), ("sequence-altup(k=3)", "altup(k=2)"), ("memory", "sequence-altup(k=3)")]
)
def test_other_passes_come_before_and_after(recipe: tuple[str, str]) -> None:
    model = moved(retrofit.apply(zoo.build(zoo.entry("causal/llama")), *recipe, verify=False))
    tokens, mask = ids("causal/llama"), padded(13, 0, 4)
    close(run(model, tokens, attention_mask=mask, use_cache=False)[1:, 4:], run(model, tokens[1:, 4:], use_cache=False))
    assert torch.equal(decoded(model, tokens, mask), decoded(model, tokens, mask, use_cache=False))


def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    import transformers

    model, tokens = strided("causal/gpt2"), ids("causal/gpt2")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, tokens), run(model, tokens))
    assert retrofit.recipe(loaded) == (SequenceAltUp(k=K),)


def test_gradient_checkpointing_bf16_and_autocast() -> None:
    model, tokens = strided("causal/llama"), ids("causal/llama")
    given = {"input_ids": tokens, "labels": tokens, "attention_mask": padded(13, 0, 4), "use_cache": False}
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(**given).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**given).loss.isfinite()
    assert run(model.eval().to(torch.bfloat16), tokens).dtype == torch.bfloat16


def test_a_mask_among_the_example_inputs_is_a_mask() -> None:
    """It is no less one for having been there when the model was captured: padding counts for nothing."""
    entry = zoo.entry("causal/llama")
    model = zoo.build(entry, attn_implementation="eager")
    ids = zoo.inputs(entry, model)["input_ids"]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    retrofit.apply(model, SequenceAltUp(k=2), example_inputs=given, verify=False)
    moved(model)
    padded = {name: torch.nn.functional.pad(value, (3, 0), value=0) for name, value in given.items()}
    with torch.no_grad():
        torch.testing.assert_close(model(**padded).logits[:, 3:], model(**given).logits, rtol=1e-4, atol=1e-5)


class Batched(Own):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch["tokens"])


def test_tokens_in_a_container_are_refused_by_name() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(Batched(), SequenceAltUp(k=2), example_inputs={"batch": {"tokens": torch.arange(10).view(2, 5)}})
    assert "batch" in caught.value.why


@pytest.mark.long
def test_arguments_as_long_as_values_say_are_refused_by_name() -> None:
    """The decoder attends to patches, and how many there are depends on the bytes."""
    entry = zoo.entry("causal/blt")
    model = zoo.build(entry).eval()
    plan = retrofit.plan_of(model, SequenceAltUp(layers="all"), example_inputs=zoo.inputs(entry, model))
    assert "cross_attention_states" in str(plan)


class Shaped(Own):
    """The shape of a U: layers in two lists, the results of those of the first added before those of the second."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.d, self.b = self.b[2:], self.b[:2]

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.a(x), []
        for block in self.b:
            y = block(y)
            kept.append(y)
        for block in self.d:
            y = block(y + kept.pop())
        return self.c(y)


@pytest.mark.long
def test_the_inner_layers_of_a_stack_in_two_lists_are_strided() -> None:
    torch.manual_seed(0)
    applied = apply_reported(Shaped().eval(), "sequence-altup(k=2)", count_flops=False)
    assert applied.report is not None and applied.report.ok
    assert [site.name for site in applied.rewrites[0].sites] == ["b.1", "d.0"]
    observed = SimpleNamespace(model=applied.model, options=SequenceAltUp(), sites=[])
    for path in ("b.1", "d.0"):
        observed.sites.append(SimpleNamespace(path=path, module=applied.model.get_submodule(path)))
    assert not list(wiring(observed))  # type: ignore[arg-type]
    observed.sites[1] = SimpleNamespace(path="d.1", module=applied.model.get_submodule("d.1"))
    assert [path for path, _ in wiring(observed)] == ["d.1"]  # type: ignore[arg-type]
