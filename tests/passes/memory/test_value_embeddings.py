"""Value embeddings: against dense models whose value projections get the rows by plain hooks, and at what models do."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import peft
import pytest
import torch
import transformers
from hypothesis import strategies as st
from support import tiny_models, zoo
from support.cached_decoding import HOW, check_padding, check_steps, check_wrong_guesses
from support.retrofitted import moved
from torch import Tensor, nn

import retrofit
from retrofit.errors import DoesNotFitError, RetrofitError, SpecError
from retrofit.passes import Memory
from retrofit.passes.memory.value_embeddings import CacheOfLatents, ValueAttention, ValueEmbedding, ValueTokens
from retrofit.rewriting import apply_reported

VALUES = "memory(beside=values)"


def every(count: int, each: int, start: int, width: int) -> list[int]:
    """Columns `start` and on of each of `count` parts of size `each`."""
    return [part * each + start + column for part in range(count) for column in range(width)]


# For each family the module that projects values, by its name in a layer, how many heads the values have, and their columns.
FAMILIES: dict[str, tuple[str, int, list[int]]] = {
    "causal/llama": ("self_attn.v_proj", 4, every(1, 64, 0, 64)),
    "causal/gemma2": ("self_attn.v_proj", 2, every(1, 32, 0, 32)),  # two heads of queries share one
    "causal/mixtral": ("self_attn.v_proj", 2, every(1, 32, 0, 32)),
    "causal/gpt2": ("attn.c_attn", 4, every(1, 192, 128, 64)),  # queries, keys, values: a Conv1D with a bias
    "causal/gpt_neox": ("attention.query_key_value", 4, every(4, 48, 32, 16)),  # head by head
    "causal/bloom": ("self_attention.query_key_value", 4, every(4, 48, 32, 16)),
    "causal/falcon": ("self_attention.query_key_value", 1, every(1, 96, 80, 16)),  # one head of keys and values
    "causal/phi": ("self_attn.v_proj", 4, every(1, 64, 0, 64)),
    "causal/opt": ("self_attn.v_proj", 4, every(1, 64, 0, 64)),
    "causal/deepseek_v3": ("self_attn.kv_b_proj", 4, every(4, 24, 8, 16)),  # of a latent, (batch, 1, tokens, features)
    "masked/bert": ("attention.self.value", 4, every(1, 64, 0, 64)),
    "seq2seq/t5": ("SelfAttention.v", 4, every(1, 64, 0, 64)),
    "seq2seq/bart": ("self_attn.v_proj", 4, every(1, 64, 0, 64)),
}


@functools.cache
def dense(identity: str) -> Any:
    model = zoo.shallow(zoo.entry(identity))
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0
    return model


def inputs(identity: str, **how: int) -> dict[str, Any]:
    return zoo.inputs(zoo.entry(identity), dense(identity), **how)


@functools.cache
def rewritten(identity: str, spec: str = VALUES) -> Any:
    model = copy.deepcopy(dense(identity))
    return retrofit.apply(model, spec, example_inputs=inputs(identity), verify=False)


def trained(identity: str, spec: str = VALUES) -> Any:
    """A rewritten model all of whose parameters have moved, and whose tables and gates are far from zero."""
    model = moved(copy.deepcopy(rewritten(identity, spec)))
    with torch.no_grad():
        for parameter in (parameter for table in tables(model) for parameter in table.parameters()):
            parameter.normal_(std=0.3)
    return model


def tables(model: nn.Module) -> list[ValueEmbedding]:
    return [module for module in model.modules() if isinstance(module, ValueEmbedding)]


@torch.no_grad()
def logits(model: Any, given: dict[str, Any]) -> Tensor:
    return zoo.logits(model(**given)).clone()


def adding(memory: Any, ids: Tensor, heads: int, columns: list[int]) -> Callable[..., Tensor]:
    """A hook of a value projection: the formula, token by token and head by head."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        size, result = len(columns) // heads, output.clone()
        x, y = (part.view(*ids.shape, -1) for part in (args[0], result))
        for row in range(x.shape[0]):
            for token in range(x.shape[1]):
                for head in range(heads):
                    gate = 2 * torch.sigmoid(memory.w[head] @ x[row, token, :32])
                    for column in range(head * size, (head + 1) * size):
                        y[row, token, columns[column]] += gate * memory.table[ids[row, token], column]
        return result

    return hook


@pytest.mark.first(5)
@torch.no_grad()
@pytest.mark.parametrize("identity", sorted(FAMILIES))
def test_the_start_is_exact_and_a_trained_model_is_the_formula(identity: str) -> None:
    suffix, heads, columns = FAMILIES[identity]
    given = inputs(identity, batch=2, length=5, seed=5)
    assert torch.equal(logits(rewritten(identity), given), logits(dense(identity), given))
    model, plain = copy.deepcopy(rewritten(identity)), copy.deepcopy(dense(identity))
    for table in tables(model):
        assert table.table.shape == (model.config.vocab_size, len(columns))
        for parameter in table.parameters():
            parameter.normal_()
    projections = {name: module for name, module in plain.named_modules() if name.endswith(suffix)}
    assert len(projections) == len(tables(model))
    for (name, projection), table in zip(projections.items(), tables(model), strict=True):
        assert table.w.shape == (heads, min(32, getattr(projection, "in_features", 32)))  # the latent has 24 features
        ids = given["decoder_input_ids"] if "decoder" in name and "seq2seq" in identity else given["input_ids"]
        projection.register_forward_hook(adding(table, ids, heads, columns))
    expected = logits(plain, given)
    assert float((expected - logits(dense(identity), given)).abs().max()) > 1e-2
    torch.testing.assert_close(logits(model, given), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("identity", ["causal/gpt2", "causal/gemma2", "causal/deepseek_v3", "seq2seq/bart"])
def test_every_check_passes(identity: str) -> None:
    model = copy.deepcopy(dense(identity))
    applied = apply_reported(model, Memory(beside="values", layers="0-1"), example_inputs=inputs(identity), count_flops=False)
    assert applied.report is not None and applied.report.ok
    assert {check.status for check in applied.report.checks if check.name in ("graph", "method", "gradients")} == {"passed"}
    (rewrite,) = applied.rewrites
    assert rewrite.new_parameters == sum(parameter.numel() for table in tables(model) for parameter in table.parameters())
    assert {site.name for site in rewrite.sites} == {
        name for name, module in model.named_modules() if isinstance(module, ValueAttention)
    }
    assert {name.rpartition(".")[2] for name in rewrite.second_step} == {"w"}


def test_layers_picks_depths_and_cross_attention_is_left_alone_with_the_reason() -> None:
    (planned,) = retrofit.plan_of(
        dense("seq2seq/t5"), "memory(beside=values, layers=1)", example_inputs=inputs("seq2seq/t5")
    ).passes
    assert [site.name.split(".")[:3] for site in planned.plan.sites] == [["encoder", "block", "1"], ["decoder", "block", "1"]]
    assert [miss.name for miss in planned.plan.near_misses] == ["decoder.block.1.layer.1.EncDecAttention"]
    assert all(miss.why and miss.in_any_form for miss in planned.plan.near_misses)


def test_other_mixers_are_left_alone_with_the_reason() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        retrofit.apply(copy.deepcopy(dense("causal/mamba")), VALUES, verify=False)
    assert "not recognized as an attention" in refused.value.why


@pytest.mark.long
def test_layers_that_read_the_values_of_others_are_left_alone_with_the_reason() -> None:
    """Gemma 3n's last layer computes no keys and values."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    more = {"num_key_value_heads": 1, "vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    config = transformers.Gemma3nTextConfig(
        **sizes, **more, layer_types=["full_attention"] * 2, num_kv_shared_layers=1, laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 2, altup_num_inputs=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    (planned,) = retrofit.plan_of(model, VALUES).passes
    missed = {miss.name: miss.why for miss in planned.plan.near_misses}
    assert "another layer's" in missed["model.layers.1.self_attn"]


def test_values_that_are_keys_too_are_left_alone_with_the_reason() -> None:
    class Attention(nn.Module):
        """Keys are the values."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, kv = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (self.q(x), self.kv(x)))
            y = nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(-2))

    (planned,) = retrofit.plan_of(stack_of(Attention), VALUES).passes
    assert not planned.plan.sites and all("keys or queries" in miss.why for miss in planned.plan.near_misses)


def test_clipped_queries_keys_and_values_are_told_apart() -> None:
    class Attention(nn.Module):
        """One matrix, whose results are clipped."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).clamp(-2, 2).split(16, -1)
            y = nn.functional.scaled_dot_product_attention(*(part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts))
            return self.out(y.transpose(1, 2).flatten(-2))

    model = retrofit.apply(stack_of(Attention), VALUES)
    assert [(table.start, table.width, table.heads) for table in tables(model)] == [(32, 16, 2)] * 2


def stack_of(attention: Callable[[], nn.Module]) -> nn.Module:
    """A decoder of two layers with such attentions, on token ids."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = attention(), nn.LayerNorm(16)
            self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm(x))
            return x + self.ffn(x)  # type: ignore[no-any-return]

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.head = nn.Embedding(40, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 40)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Decoder().eval()


@pytest.mark.parametrize(
    ("options", "named"), [({"lookup": "softmax"}, "beside"), ({"lookup": "lsh"}, "beside"), ({"layers": "first"}, "layers")]
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError) as refused:
        retrofit.plan_of(dense("causal/llama"), Memory(beside="values", **options))
    assert refused.value.option == named


def test_options_without_effect_are_said() -> None:
    notes = Memory(beside="values", rank=3, form="gated").idle_notes()
    assert [note.partition("=")[0] for note in notes] == ["rank", "form"]


# ── What a model does ────────────────────────────────────────────────────────────────────────────────────────────────────────────

speaking = pytest.mark.parametrize("identity", ["causal/gpt_neox", "causal/gemma2", "causal/deepseek_v3"])


@speaking
def test_decoding_with_a_cache_is_the_whole_forward(identity: str) -> None:
    model, ids = trained(identity), inputs(identity, batch=2, length=9)["input_ids"]
    check_steps(model, ids, (5, 1, 1, 2), (1,) * 9)
    for how in HOW:
        check_padding(model, ids, 3, **how)
    check_wrong_guesses(model, ids[:1])


@hypothesis.given(
    ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=9),
    chunk=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    static=st.booleans(),
)
def test_a_cache_of_latents_keeps_every_id(ids: list[int], chunk: int, dtype: torch.dtype, static: bool) -> None:
    """Ids without a row become the number of rows; 300,000 rows need three digits."""
    rows, tokens, latents = 300_000, torch.tensor([ids, ids[::-1]]), torch.randn(2, 1, len(ids), 5).to(dtype)
    cache = transformers.StaticCache(transformers.LlamaConfig(num_hidden_layers=1), 12) if static else transformers.DynamicCache()
    end = 0
    for part, latent in zip(tokens.split(chunk, 1), latents.split(chunk, 2), strict=True):
        called, end = ValueTokens(part), end + part.shape[1]
        stored, other = CacheOfLatents(cache, called, rows).update(latent, latent, 0)
        known = called.read()
        assert known is not None and torch.equal(known[:, 0, :end], tokens[:, :end].clamp(max=rows))
        assert torch.equal(stored[:, :, :end], latents[:, :, :end]) and torch.equal(other, stored)


@pytest.mark.skipif(not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache")
def test_a_quantized_cache_of_latents_is_refused() -> None:
    """It would round ids; the dense model can be used with it."""
    how = {"max_new_tokens": 2, "cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    ids = inputs("causal/deepseek_v3")["input_ids"]
    dense("causal/deepseek_v3").generate(ids, **how)
    with pytest.raises(RetrofitError, match="quantized"):
        trained("causal/deepseek_v3").generate(ids, **how)


def test_an_attention_that_keeps_keys_and_values_keeps_no_ids() -> None:
    cache, tokens = transformers.DynamicCache(), ValueTokens(torch.tensor([[1, 2]]))
    tokens.read()  # its values are computed first
    keys = torch.randn(1, 4, 2, 5)
    assert all(torch.equal(stored, keys) for stored in CacheOfLatents(cache, tokens, 9).update(keys, keys, 0))


@pytest.mark.parametrize("identity", ["seq2seq/t5", "seq2seq/bart"])
def test_an_encoder_decoder_generates_on_a_cache(identity: str) -> None:
    model, ids = trained(identity), inputs(identity)["input_ids"]
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 3}
    assert torch.equal(model.generate(ids, use_cache=True, **how), model.generate(ids, use_cache=False, **how))


@speaking
def test_a_saved_model_a_copy_and_a_pickle_are_the_model(identity: str, tmp_path: Path) -> None:
    model, given = trained(identity), inputs(identity)
    expected = logits(model, given)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for other in (loaded, pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert torch.equal(logits(other, given), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model, given = trained("causal/gemma2").train(), inputs("causal/gemma2")
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None})
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
    assert any("memory.table" in name and gradient.any() for name, gradient in found[0].items())


@pytest.mark.long
@pytest.mark.first(1)
@speaking
def test_torch_compile_makes_one_graph_of_the_same_function(identity: str) -> None:
    model, given = trained(identity), inputs(identity)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, given), logits(model, given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", [["q_proj", "v_proj"], "all-linear"])
def test_lora_trains_on_the_projection_and_merges(target: Any) -> None:
    model, given = trained("causal/gemma2"), inputs("causal/gemma2")
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=target, r=2, init_lora_weights=False))
    assert any(name.endswith("v_proj.lora_A.default") for name, _ in tuned.named_modules())
    tuned.eval()(**given, labels=given["input_ids"]).loss.backward()
    gradients = {name: parameter.grad for name, parameter in tuned.named_parameters() if "v_proj.lora" in name}
    assert gradients and all(gradient is not None and gradient.any() for gradient in gradients.values())
    expected = logits(tuned, given)
    merged = retrofit.merge_adapters(tuned, example_inputs=given)
    torch.testing.assert_close(logits(merged, given), expected, atol=1e-4, rtol=1e-4)


def test_undo_gives_the_dense_model() -> None:
    model, given = copy.deepcopy(rewritten("causal/gpt2")), inputs("causal/gpt2")
    assert torch.equal(logits(retrofit.undo(model), given), logits(dense("causal/gpt2"), given))


def test_tokens_added_later_and_calls_without_ids() -> None:
    model = trained("causal/gemma2")
    size, ids = model.config.vocab_size, inputs("causal/gemma2")["input_ids"]
    before = logits(model, {"input_ids": ids})
    with pytest.raises(DoesNotFitError):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    assert torch.equal(logits(model, {"input_ids": ids})[..., :size], before)
    silent, new = copy.deepcopy(model), {"input_ids": torch.full_like(ids, size + 2)}
    for table in tables(silent):
        nn.init.zeros_(table.table)
    assert torch.equal(logits(model, new), logits(silent, new))


def test_sparse_gradients_hold_the_rows_that_were_looked_up() -> None:
    model = copy.deepcopy(rewritten("causal/gpt_neox", "memory(beside=values, sparse=true)"))
    ids = torch.tensor([[4, 9, 4]])
    model(ids, labels=ids).loss.backward()
    for table in tables(model):
        assert table.table.grad is not None and table.table.grad.coalesce().indices().tolist() == [[4, 9]]


ORDERS = (
    ("altup(k=2)", VALUES),
    (VALUES, "altup(k=2)"),
    (VALUES, "memory(beside=layers)", "sparse-ffn(sparsity=1)"),
)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_it_composes(order: tuple[str, ...], tmp_path: Path) -> None:
    model, given = tiny_models.llama(), {"input_ids": torch.arange(3, 15).view(2, 6)}
    expected = logits(model, given)
    retrofit.apply(model, *order, verify=False)
    torch.testing.assert_close(logits(model, given), expected, atol=1e-5, rtol=1e-5)
    assert len(tables(moved(model))) == 2
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), given), logits(model, given))


def test_an_attention_gets_one_table() -> None:
    model = retrofit.apply(tiny_models.llama(), "memory(beside=values, layers=0)", verify=False)
    (planned,) = retrofit.plan_of(model, VALUES).passes
    assert len(planned.plan.sites) == 1
    assert ["layers=" in miss.remedy for miss in planned.plan.near_misses] == [True]
    retrofit.apply(model, VALUES, verify=False)
    assert len(tables(model)) == 2


# ── Models without modules ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(
    "dense_model", [lambda: tiny_models.gpt2(n_layer=1), lambda: tiny_models.llama(num_hidden_layers=1)], ids=["gpt2", "llama"]
)
def test_a_graph_an_exported_program_and_an_onnx_file(dense_model: Callable[[], Any], tmp_path: Path) -> None:
    ids = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        before = dense_model()(ids).logits
    graph = retrofit.apply(dense_model(), VALUES, emit="graph", verify=False)
    assert len(tables(graph)) == 1 and torch.equal(zoo.logits(graph(input_ids=ids)), before)
    retrofit.export_onnx(dense_model(), tmp_path / "dense.onnx", "none")
    read = retrofit.apply(retrofit.from_onnx(tmp_path / "dense.onnx"), VALUES, verify=False)
    assert len(tables(read)) == 1
    model = moved(retrofit.apply(dense_model(), VALUES, verify=False))
    retrofit.export_onnx(model, tmp_path / "model.onnx")  # which compares it with torch, with its cache
    retrofit.save(model, tmp_path / "model.pt2")
    loaded = retrofit.load(tmp_path / "model.pt2")
    torch.testing.assert_close(zoo.logits(loaded(ids)), logits(model, {"input_ids": ids}), atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_projections_in_a_models_own_code_become_modules_of_its_graph() -> None:
    class Attention(nn.Module):
        """Queries, keys and values are products in its own code."""

        def __init__(self) -> None:
            super().__init__()
            self.w, self.out = nn.Parameter(torch.randn(48, 16) / 4), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in nn.functional.linear(x, self.w).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(-2))

    model, ids = stack_of(Attention), torch.arange(12).view(2, 6)
    graph = retrofit.apply(model, VALUES)  # which takes the graph by itself
    assert len(tables(graph)) == 2 and not tables(model) and torch.equal(graph(ids), model(ids))
