"""The recurrence pass on whole models, away from the start: against the dense model with hooks that add a loop over its tokens."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import cached_decoding, tiny_models, zoo
from support.own_models import MASKS, Masked
from support.refusals import refused
from support.retrofitted import moved
from torch import Tensor, nn

import retrofit
from retrofit.anatomy.layer_calls import LayerCalls
from retrofit.errors import DoesNotFitError, RetrofitError
from retrofit.passes import Recurrence
from retrofit.passes.recurrence.recurrence import RecurrentFeedForward, RecurrentLayer
from retrofit.passes.recurrence.simple_recurrent_unit import SimpleRecurrentUnit
from retrofit.rewriting import apply_reported
from retrofit.surgery import Edit

RANK = 4
BUILD = {
    "llama": tiny_models.llama,
    "gpt2": tiny_models.gpt2,
    "bert": tiny_models.bert,
    "t5": tiny_models.t5,
    "vit": tiny_models.vit,
    "opt": lambda: zoo.build(zoo.entry("causal/opt"), num_hidden_layers=2),  # tokens and batch in one dimension
    "bart": lambda: zoo.build(zoo.entry("seq2seq/bart"), encoder_layers=1, decoder_layers=1),
    "xlnet": lambda: zoo.build(zoo.entry("causal/xlnet"), n_layer=1),  # tokens before the batch
    "albert": lambda: zoo.build(zoo.entry("masked/albert")),  # one layer at every depth
    "gptj": lambda: zoo.build(zoo.entry("causal/gptj"), n_layer=2),  # beside the attention
}


@functools.cache
def dense(name: str) -> Any:
    return BUILD[name]().eval()


@functools.cache
def start(name: str, bidirectional: bool = False) -> Any:
    return retrofit.apply(copy.deepcopy(dense(name)), Recurrence(rank=RANK, bidirectional=bidirectional), verify=False)


@functools.cache
def trained(name: str, bidirectional: bool = False) -> Any:
    """All parameters have moved from their start, the last projection too."""
    return moved(copy.deepcopy(start(name, bidirectional)))


def ids(batch: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(5, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def given(name: str, **how: Any) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    both = {"decoder_input_ids": ids(seed=1, length=6)} if dense(name).config.is_encoder_decoder else {}
    return {"input_ids": ids(**how), **both}


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> Tensor:
    return zoo.logits(model(**inputs)).clone()


# ── The formula, and the exact start ─────────────────────────────────────────────────────────────────────────────────────────────


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def one_row(x: Tensor, recurrence: Any, real: list[bool]) -> Tensor:
    """What the recurrence adds to one sequence, (tokens, d), token after token."""
    low = x @ recurrence.w_in
    directions = [(recurrence.forwards, range(len(x)))]
    if recurrence.backwards is not None:
        directions.append((recurrence.backwards, range(len(x) - 1, -1, -1)))
    halves = []
    for unit, order in directions:
        w, w_f, w_r = unit.w.split(RANK, 1)
        b_f, b_r = unit.b.split(RANK)
        c, h = torch.zeros(RANK), torch.zeros(len(x), RANK)
        for t in order:
            f, r = sigmoid(low[t] @ w_f + b_f), sigmoid(low[t] @ w_r + b_r)
            c = f * c + (1 - f) * (low[t] @ w) if real[t] else c
            h[t] = r * c + 3**0.5 * (1 - r) * low[t]
        halves.append(h)
    return torch.cat(halves, 1) @ recurrence.w_out


def with_hooks(name: str, model: Any, real: Tensor, flat: bool = False) -> Any:
    """The dense parameters of `model` in a dense model, whose feed-forwards get their recurrence by hooks."""
    plain = copy.deepcopy(dense(name))
    sites = {path: one for path, one in model.named_modules() if isinstance(one, RecurrentFeedForward)}
    values = model.state_dict()
    for path, parameter in plain.state_dict().items():
        inside = [key for key in values if key.replace(".layer.", ".") == path or without_wrappers(model, key) == path]
        parameter.copy_(values[inside[0]])

    def hook(site: RecurrentFeedForward) -> Any:
        def add(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            x = args[0].view(*real.shape, -1) if flat else args[0]
            rows = [one_row(row, site.recurrence, mask.tolist()) for row, mask in zip(x, real, strict=True)]
            return output + torch.stack(rows).view(output.shape)

        return add

    for path, site in sites.items():
        plain.get_submodule(without_wrappers(model, path)).register_forward_hook(hook(site))
    return plain


def without_wrappers(model: nn.Module, path: str) -> str:
    """The path in the dense model of what is at `path` in the rewritten one."""
    module, steps = model, []
    for step in path.split("."):
        if not (isinstance(module, (RecurrentFeedForward, RecurrentLayer)) and step == "layer"):
            steps.append(step)
        module = getattr(module, step)
    return ".".join(steps)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj"])
@torch.no_grad()
def test_it_is_the_dense_model_whose_feed_forwards_have_a_loop_added(name: str) -> None:
    model, mask = trained(name), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    expected = with_hooks(name, model, mask.bool())
    real = mask.bool()
    found = logits(model, input_ids=ids(), attention_mask=mask)
    torch.testing.assert_close(found[real], logits(expected, input_ids=ids(), attention_mask=mask)[real], rtol=1e-4, atol=1e-4)


@pytest.mark.first(3)
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "opt", "xlnet", "albert", "bart", "vit", "llama", "gptj"])
def test_step_0_is_the_dense_function_and_the_parameters_are_the_formulas(name: str) -> None:
    model, inputs = copy.deepcopy(dense(name)), given(name)
    examples = None if name in ("llama", "gpt2", "bert", "t5", "vit") else inputs
    applied = apply_reported(model, f"recurrence(rank={RANK})", example_inputs=examples, verify=False, count_flops=False)
    assert torch.equal(logits(model, **inputs), logits(dense(name), **inputs))
    added = sum(one.numel() for one in model.parameters()) - sum(one.numel() for one in dense(name).parameters())
    (rewrite,) = applied.rewrites
    width = next(one.recurrence.w_in.shape[0] for one in model.modules() if isinstance(one, RecurrentFeedForward))
    assert rewrite.new_parameters == added == len(rewrite.sites) * (2 * width * RANK + 3 * RANK**2 + 2 * RANK)
    assert rewrite.exact and not rewrite.skipped


# ── Decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_state_in_the_cache_goes_on_in_steps_and_in_chunks(name: str) -> None:
    cached_decoding.check_steps(trained(name), ids(2, 12), (1,) * 12, (5, 1, 3, 1, 2))
    cached_decoding.check_hidden_ends(trained(name), ids(2, 12), (5, 4, 3), (4, 1, 1, 3, 1, 2))
    hidden = torch.ones(2, 12, dtype=torch.long)
    hidden[:, 4:7] = hidden[0, 8] = hidden[1, 10] = 0
    cached_decoding.check_mask(trained(name), ids(2, 12), hidden, (4, 3, 1, 1, 3))  # a chunk that no row sees


@pytest.mark.parametrize("how", cached_decoding.HOW, ids=str)
def test_a_padded_sequence_is_continued_as_if_it_were_alone(how: dict[str, Any]) -> None:
    cached_decoding.check_padding(trained("llama"), ids(2, 6, seed=4), 3, **how)


def test_padding_between_tokens_leaves_the_state_as_it_was() -> None:
    torch.manual_seed(0)
    unit, x = SimpleRecurrentUnit(4, torch.empty(0, dtype=torch.float64)), torch.randn(3, 9, 4, dtype=torch.float64)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[0, 3:6], real[1, 1::2], real[2, 8] = False, False, False
    h, c = unit(x, None, real)
    for row, shown in enumerate(real):
        alone = unit(x[row : row + 1, shown])
        torch.testing.assert_close((h[row : row + 1, shown], c[row : row + 1, shown]), alone)
        last = shown.long().cumsum(0) - 1  # of the tokens so far that are no padding
        torch.testing.assert_close(c[row], alone[1][0, last])


def test_tokens_that_were_guessed_wrong_leave_no_trace() -> None:
    cached_decoding.check_wrong_guesses(trained("llama"), ids(1, 12))


@torch.no_grad()
def test_beams_take_their_states_with_them() -> None:
    model, tokens = trained("llama"), ids(2, 8)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, input_ids=tokens[:, :7], past_key_values=cache)
    rows = torch.tensor([1, 1])
    cache.reorder_cache(rows)
    stepped = logits(model, input_ids=tokens[:, 7:], past_key_values=cache)
    whole = logits(model, input_ids=torch.cat([tokens[rows, :7], tokens[:, 7:]], 1), use_cache=False)
    torch.testing.assert_close(stepped[:, 0], whole[:, -1], rtol=1e-4, atol=1e-4)


# ── Encoders ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["bert", "t5"])
@torch.no_grad()
def test_in_both_directions_padding_on_either_side_is_nothing(name: str) -> None:
    model, tokens, inputs = trained(name, bidirectional=True), ids(1, 6), {}
    if name == "t5":
        inputs = {"decoder_input_ids": ids(1, 5, seed=3)}
    alone = logits(model, input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    padded = torch.cat([tokens, ids(1, 3, seed=8)], 1)
    found = logits(model, input_ids=padded, attention_mask=mask, **inputs)
    torch.testing.assert_close(found[:, : alone.shape[1]], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_which_tokens_a_recurrence_reads(bidirectional: bool) -> None:
    site = next(one for one in trained("bert", bidirectional).modules() if isinstance(one, RecurrentFeedForward))
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 3] += 1
    added = [site.added(one, None, None, None, "") for one in (x, changed)]
    differs = (added[0] - added[1]).abs().amax(-1)[0] > 1e-6
    assert differs.tolist() == [bidirectional] * 3 + [True] * 4


def test_decoders_stay_causal_where_encoders_read_both_ways() -> None:
    units = [one for one in start("t5", bidirectional=True).modules() if isinstance(one, RecurrentFeedForward)]
    assert [one.recurrence.backwards is not None for one in units] == [True, False]


# ── Training, saving, refusing ───────────────────────────────────────────────────────────────────────────────────────────────────


def gradients(model: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [one.grad.clone() for one in model.parameters()]


@pytest.mark.long
def test_checkpointed_and_compiled_steps_have_the_same_gradients() -> None:
    model, tokens = copy.deepcopy(trained("llama")).train(), ids(2, 11)
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


@pytest.mark.long
def test_compiled_code_copies_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 cannot trace the copies of modules by which plain calls inject keywords."""
    model, tokens = copy.deepcopy(trained("llama")).eval(), ids(2, 11)
    given: Any = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    given["attention_mask"][1, :4] = 0
    loss = torch.nn.functional.cross_entropy
    expected = torch.autograd.grad(loss(model(**given).logits.flatten(0, 1), tokens.flatten()), list(model.parameters()))
    assert any(bool(gradient.any()) for gradient in expected)
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(tokens[:, :9], past_key_values=cache)
        whole = model(tokens, use_cache=False).logits
    modules = dict(model.named_modules())
    monkeypatch.setattr("retrofit.surgery.wrappers.InjectingCopy", None)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(loss(compiled(**given).logits.flatten(0, 1), tokens.flatten()), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        logits = [compiled(tokens[:, at : at + 1], past_key_values=cache).logits for at in (9, 10)]
    torch.testing.assert_close(torch.cat(logits, 1), whole[:, 9:], rtol=1e-4, atol=1e-5)
    assert dict(model.named_modules()) == modules


@pytest.mark.long
def test_compiled_training_step_makes_no_use_of_the_models_cache() -> None:
    """A model makes one by default; one that lacks the states is refused, not read as the beginning of a sequence."""
    model, tokens = copy.deepcopy(trained("llama")).train(), ids(2, 11)
    expected = gradients(model, tokens)
    torch.compiler.reset()
    model.zero_grad(set_to_none=True)
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(input_ids=tokens, labels=tokens, use_cache=True)
    output.loss.backward()
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(RetrofitError) as error:
        model.eval()(tokens[:, :1], past_key_values=output.past_key_values)
    assert error.value.code == "cache"


def test_units_compute_in_float32_whatever_the_model_is_in() -> None:
    """In bfloat16 a state that keeps 255 of 256 parts would not move; the cache holds it in float32 too."""
    model = copy.deepcopy(trained("gpt2")).to(torch.bfloat16)
    seen: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, RecurrentFeedForward):
            module.recurrence.forwards.register_forward_hook(lambda _, args, made: seen.extend((args[0].dtype, made[1].dtype)))
    cache = transformers.DynamicCache(config=model.config)
    assert logits(model, input_ids=ids(), past_key_values=cache).dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    assert {one.values.dtype for one in cache.histories.values()} == {torch.float32}


@torch.no_grad()
def test_it_is_saved_and_loaded_as_a_model_of_transformers(tmp_path: Path) -> None:
    model = trained("t5", bidirectional=True)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, **given("t5")), logits(model, **given("t5")))
    assert retrofit.recipe(again) == (Recurrence(rank=RANK, bidirectional=True),)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "spec", "why"),
    [
        ("llama", "recurrence(bidirectional=true)", "all selected stacks are causal"),
        ("mamba", "recurrence", "it has no feed-forward"),
        ("nemotron_h", "recurrence", "no argument of the layer carries it"),
    ],
)
def test_what_cannot_have_one_is_refused_with_the_reason(name: str, spec: str, why: str) -> None:
    model = dense("llama") if name == "llama" else zoo.build(zoo.entry(f"causal/{name}"))
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(copy.deepcopy(model), spec, verify=False)
    assert why in str(caught.value)


def test_a_mask_that_layers_get_as_the_model_got_it_shows_them_their_padding() -> None:
    model = retrofit.apply(zoo.build(zoo.entry("causal/lfm2")), "recurrence(rank=4)", verify=False)
    layers = [module for module in model.modules() if isinstance(module, RecurrentLayer)]
    assert len(layers) == model.config.num_hidden_layers and all(layer.mask is not None for layer in layers)


@pytest.mark.long
def test_a_mask_over_two_stacks_does_not_show_a_layer_its_own_padding() -> None:
    entry = zoo.entry("seq2seq/t5gemma2")
    model = zoo.build(entry)
    rewritten = retrofit.apply(model, "recurrence(rank=4)", example_inputs=zoo.inputs(entry, model), verify=False)
    sites = [name for name, module in rewritten.named_modules() if isinstance(module, RecurrentFeedForward)]
    assert sites and all(name.startswith("model.encoder.") for name in sites)


@pytest.mark.long
def test_tokens_that_a_model_fills_its_window_with_do_not_turn_its_mask_round() -> None:
    entry = zoo.entry("masked/longformer")
    model = zoo.build(entry, num_hidden_layers=2, attention_window=[8, 8])
    anatomy = retrofit.inspect(model)  # 12 tokens, filled up to 16: those are hidden, without any padding in the input
    call = LayerCalls(anatomy).of_layer(anatomy.stacks[0].layers[0])
    assert call.mask is not None and call.mask.true_hides
    retrofit.apply(model, "recurrence(rank=4)", verify=False)
    report = retrofit.verify(model, checks=["method", "padding"])
    assert [check.status for check in report.checks] == ["passed", "passed"], report


@pytest.mark.first(1)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_whatever_kind_keeps_padding_from_the_recurrence(mask: str) -> None:
    torch.manual_seed(0)
    x, hidden = torch.randint(50, (2, 11)), torch.arange(11) < torch.tensor([[0], [4]])  # the second sequence has 7 tokens
    model = retrofit.apply(Masked(mask).eval(), "recurrence(rank=4)", example_inputs={"x": x, "hidden": hidden})
    model = moved(model)
    padded, alone = model(x, hidden)[1:, 4:], model(x[1:, 4:], hidden[1:, 4:])
    torch.testing.assert_close(padded, alone)
    assert not torch.allclose(alone, model(x[1:, 3:], hidden[:1, 3:])[:, 1:], atol=1e-3)  # a token more is read


class Repeated(nn.Module):
    """A causal model of no library whose one layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(40, 8), Block(), nn.Linear(8, 40)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block(self.block(self.embedding(input_ids))))  # type: ignore[no-any-return]


class Mixed(Repeated):
    """Layers of which each may see later tokens or not, over all tokens or over those that an embedding chooses."""

    def __init__(self, causal: tuple[bool, ...], chosen: bool = False, sorts: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WrittenOut() if chosen else Block(one) for one in causal)
        self.chosen, self.sorts = chosen, sorts

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if self.sorts:
            x = torch.where(self.head(self.block(x)).amax(-1, keepdim=True) > 0.5, 2 * x, x)
        if self.chosen:
            x = x[:, (x[0].sum(-1) > 0).nonzero().flatten()]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unsqueeze(1) for one in self.qkv(x).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v).squeeze(1))
        return x + self.mlp(x)  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class WrittenOut(Block):
    """For as many tokens as there are: the fused operation asks whether there are any."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        return (q @ k.mT).masked_fill(places[None] > places[:, None], -3e4).softmax(-1) @ v


class Remembering(Block):
    """It could be given a cache."""

    def forward(self, x: Tensor, past: Any = None) -> Tensor:
        return super().forward(x)


def test_a_causal_layer_at_several_depths_is_refused_as_the_cache_has_one_state_for_it() -> None:
    model = Repeated()
    model.block = Remembering()
    with refused(DoesNotFitError, "several depths"):
        Recurrence().rewrite(retrofit.inspect(model, {"input_ids": ids()}), Edit(model))


def test_a_causal_layer_at_several_depths_that_takes_no_cache_is_rewritten() -> None:
    model = Repeated().eval()
    dense = model(ids())
    rewritten = retrofit.apply(model, "recurrence(rank=4)", example_inputs={"input_ids": ids()})
    assert torch.equal(rewritten(ids()), dense)
    moved(rewritten)
    assert not torch.allclose(rewritten(ids()), dense, atol=1e-3)
    assert retrofit.verify(rewritten, checks=["causality", "gradients"]).ok


def planned(model: nn.Module) -> Any:
    return Recurrence(rank=RANK).plan(retrofit.inspect(model, {"input_ids": ids()}))


def test_a_layer_whose_own_attentions_hide_later_tokens_keeps_its_state_in_whatever_stack() -> None:
    plan = planned(Mixed((True, False, True)))
    assert [(site.layer.path, site.causal) for site in plan.recurrent] == [
        ("blocks.0", True),
        ("blocks.1", False),
        ("blocks.2", True),
    ]


def test_a_layer_over_tokens_that_a_model_chooses_is_a_near_miss_as_a_cache_does_not_count_them() -> None:
    plan = planned(Mixed((True, True), chosen=True))
    assert not plan.sites and all("number of tokens" in miss.why for miss in plan.near_misses)


def test_a_layer_that_only_decides_something_is_a_near_miss_as_nothing_in_it_learns() -> None:
    plan = planned(Mixed((True, True), sorts=True))
    assert [site.name for site in plan.sites] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert "no gradient" in plan.near_misses[0].why and plan.near_misses[0].name == "block"


@pytest.mark.long
def test_positions_made_in_the_code_are_no_mask_while_the_model_is_loaded(tmp_path: Path) -> None:
    """Where transformers loads a model the default device has no values; its layers are found by the values of such tensors."""
    entry = zoo.entry("masked/funnel")
    model = zoo.build(entry).eval()
    inputs = zoo.inputs(entry, model)
    rewritten = retrofit.apply(model, "recurrence", example_inputs=inputs, verify=False)
    rewritten.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(zoo.logits(loaded(**inputs)), zoo.logits(rewritten(**inputs)))
