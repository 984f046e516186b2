"""The memory pass on whole models: against the dense model with hooks that add the paper's terms, and at what models do."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support import tiny_models, zoo
from support.own_models import Asking, Block, Own
from support.retrofitted import moved
from torch import Tensor, nn

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passbase.replaying import rewrites
from retrofit.passes import Memory
from retrofit.passes.memory.external_memory import ExternalMemory
from retrofit.passes.memory.memory_layer import MemoryLayer
from retrofit.rewriting import apply_reported
from retrofit.surgery.wrappers import InjectingForward

# The code of some of these forwards the ids to its layers; in the others they are injected in each call.
FORWARDED, INJECTED = (
    ("causal/llama", "masked/bert", "seq2seq/t5", "masked/albert"),
    ("causal/bloom", "causal/gptj", "causal/mamba"),
)
LAYERS = {"causal/gptj": ("n_layer",), "causal/bloom": ("n_layer",), "seq2seq/t5": ("num_layers", "num_decoder_layers")}
LAYERS["seq2seq/bart"] = ("encoder_layers", "decoder_layers")
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "experts": {"rank": 3},
    "softmax": {"lookup": "softmax", "buckets": 12},
    "softmax experts": {"lookup": "softmax", "buckets": 12, "rank": 4},
    "lsh": {"lookup": "lsh", "buckets": 12},
    "lsh experts": {"lookup": "lsh", "buckets": 7, "rank": 2},
    "ffns": {"beside": "ffns"},
    "softmax ffns": {"lookup": "softmax", "beside": "ffns", "rank": 2},
    "some layers": {"layers": "1"},
    "some ffns": {"layers": "1", "beside": "ffns"},
    "sparse": {"sparse": True},
    "sparse experts": {"sparse": True, "rank": 2},
    "gated": {"form": "gated", "rank": 3, "activation": "silu"},
}


@functools.cache
def dense(identity: str) -> Any:
    """A model of two layers, or as many as its shape takes."""
    fewer = dict.fromkeys(LAYERS.get(identity, ("num_hidden_layers",)), 2)
    model = zoo.shallow(zoo.entry(identity), **fewer)
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0
    return model


def build(identity: str) -> Any:
    return copy.deepcopy(dense(identity))


def inputs(identity: str, **how: int) -> dict[str, Any]:
    return zoo.inputs(zoo.entry(identity), dense(identity), **how)


@functools.cache
def rewritten(identity: str, variant: str) -> Any:
    model = build(identity)
    retrofit.apply(model, Memory(**VARIANTS[variant]), example_inputs=inputs(identity), verify=False)
    return model


def trained(identity: str, variant: str) -> Any:
    """A rewritten model all of whose parameters have moved, its tables too."""
    return moved(copy.deepcopy(rewritten(identity, variant)))


@torch.no_grad()
def logits(model: Any, given: dict[str, Any]) -> Tensor:
    return zoo.logits(model(**given)).clone()


def tables(model: nn.Module) -> list[ExternalMemory]:
    return [module for module in model.modules() if isinstance(module, ExternalMemory)]


def combinations() -> list[tuple[str, str]]:
    chosen = [("causal/llama", variant) for variant in VARIANTS]
    chosen += [(model, "default") for model in (*FORWARDED[1:], *INJECTED)]
    chosen += [
        ("causal/bloom", "ffns"),
        ("seq2seq/t5", "some ffns"),
        ("causal/gpt2", "softmax ffns"),
        ("image/vit", "softmax experts"),
        ("causal/opt", "softmax ffns"),
        ("seq2seq/bart", "ffns"),
        ("masked/albert", "softmax ffns"),
        ("masked/esm", "ffns"),
    ]
    return [*chosen, ("causal/mixtral", "ffns"), ("masked/albert", "lsh")]


@pytest.mark.first(1)
@pytest.mark.parametrize(("identity", "variant"), combinations())
def test_step_0_is_the_dense_function_and_the_parameters_are_the_formulas(identity: str, variant: str) -> None:
    model = build(identity)
    given, others = inputs(identity), inputs(identity, batch=3, length=9, seed=5)
    expected = logits(model, others)
    before = sum(parameter.numel() for parameter in model.parameters())
    memory = Memory(**VARIANTS[variant])
    (rewrite,) = apply_reported(model, memory, example_inputs=given, verify=False, count_flops=False).rewrites
    assert torch.equal(logits(model, others), expected)
    added = sum(parameter.numel() for parameter in model.parameters()) - before
    config = model.config
    rows = config.vocab_size if memory.lookup == "token-id" else memory.buckets
    one = (2 * max(memory.rank, 1) if memory.rank else 1) * rows * config.hidden_size
    one += rows * config.hidden_size if memory.lookup == "softmax" else 0
    one = (rows + 2 * config.hidden_size) * memory.rank if memory.form == "gated" else one
    assert added == rewrite.new_parameters == one * len(tables(model)) > 0
    assert {site.name for site in rewrite.sites} == {
        name for name, module in model.named_modules() if isinstance(module, MemoryLayer)
    }


def test_the_dense_parameters_are_the_very_same() -> None:
    model = build("causal/llama")
    before = {id(parameter) for parameter in model.parameters()}
    retrofit.apply(model, Memory(lookup="softmax"), example_inputs=inputs("causal/llama"), verify=False)
    assert before <= {id(parameter) for parameter in model.parameters()}


# Where the layers, or the FFNs, of a dense model are, and the argument that holds the ids of the module that runs them.
PLACES: dict[str, tuple[str, Callable[[Any], list[nn.Module]]]] = {
    "causal/llama": ("input_ids", lambda model: list(model.model.layers)),
    "causal/bloom": ("input_ids", lambda model: list(model.transformer.h)),
    "masked/bert": ("input_ids", lambda model: list(model.bert.encoder.layer)),
    "seq2seq/t5": ("decoder_input_ids", lambda model: list(model.decoder.block)),
    "causal/llama ffns": ("input_ids", lambda model: [layer.mlp for layer in model.model.layers]),
    "causal/gptj ffns": ("input_ids", lambda model: [layer.mlp for layer in model.transformer.h]),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("lookup", ["token-id", "softmax"])
@pytest.mark.parametrize("place", sorted(PLACES))
def test_a_trained_model_is_the_dense_one_plus_the_papers_terms(place: str, lookup: str, rank: int) -> None:
    """The dense model, to whose layers plain hooks add w_i(x) f_i(x), written out for all experts and all tokens at once."""
    identity, _, ffns = place.partition(" ")
    argument, find = PLACES[place]
    plain, model = build(identity), build(identity)
    given = inputs(identity, batch=3, length=9, seed=5)
    spec = Memory(lookup=lookup, rank=rank, buckets=6, beside=ffns or "layers")
    retrofit.apply(model, spec, example_inputs=inputs(identity), verify=False)
    if identity == "seq2seq/t5":  # the encoder's tables stay zero
        for module in model.encoder.modules():
            if isinstance(module, ExternalMemory):
                module.requires_grad_(False)
    speaking = [table for table in tables(model) if all(parameter.requires_grad for parameter in table.parameters())]
    with torch.no_grad():
        for table in speaking:
            for parameter in table.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter))
    before = logits(plain, given)
    places = find(plain)
    assert len(places) == len(speaking)
    for layer, table in zip(places, speaking, strict=True):
        layer.register_forward_hook(adding(table, given[argument]))
    expected = logits(plain, given)
    assert float((expected - before).abs().max()) > 1e-2
    torch.testing.assert_close(logits(model, given), expected, atol=2e-4, rtol=1e-4)


def adding(table: Any, ids: Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        x = args[0].view(*ids.shape, -1)
        if hasattr(table, "w"):
            p = torch.einsum("btd,nd->btn", x, table.w).softmax(-1)
            weights = p * (p == p.amax(-1, keepdim=True))
        else:
            weights = torch.nn.functional.one_hot(ids, table.buckets).float()
        if hasattr(table, "b"):
            said = table.b.expand(*x.shape[:-1], *table.b.shape)
        else:
            said = torch.einsum("btnr,ndr->btnd", torch.einsum("btd,ndr->btnr", x, table.u).relu(), table.v)
        more = torch.einsum("btn,btnd->btd", weights, said)
        return output + more.view_as(output) if isinstance(output, Tensor) else (output[0] + more, *output[1:])

    return hook


# FFNs whose matrices lie in several modules: the module that reads x, and the one whose result is y.
SPREAD: dict[str, Callable[[Any], list[tuple[nn.Module, nn.Module]]]] = {
    "masked/bert": lambda model: [(one.intermediate.dense, one.output.dense) for one in model.bert.encoder.layer],
    "masked/esm": lambda model: [(one.intermediate.dense, one.output.dense) for one in model.esm.encoder.layer],
    "causal/opt": lambda model: [(one.fc1, one.fc2) for one in model.model.decoder.layers],
}


@pytest.mark.first(1)
@pytest.mark.parametrize(("identity", "lookup", "rank"), [*((one, "token-id", 0) for one in SPREAD), ("causal/opt", "softmax", 2)])
def test_in_an_ffn_of_several_modules_x_is_the_input_of_the_first(identity: str, lookup: str, rank: int) -> None:
    """The dense model, whose second matrix's result gets w_i(x) f_i(x) of the input of the first."""
    plain, model = build(identity), build(identity)
    given = inputs(identity, batch=3, length=9, seed=5)
    spec = Memory(lookup=lookup, rank=rank, buckets=6, beside="ffns")
    retrofit.apply(model, spec, example_inputs=inputs(identity), verify=False)
    with torch.no_grad():
        for parameter in (parameter for table in tables(model) for parameter in table.parameters()):
            parameter.copy_(0.3 * torch.randn_like(parameter))
    before, places = logits(plain, given), SPREAD[identity](plain)
    assert len(places) == len(tables(model))
    for (first, last), table in zip(places, tables(model), strict=True):
        seen: list[Any] = []
        first.register_forward_hook(lambda module, args, output, seen=seen: seen.append(args))
        add = adding(table, given["input_ids"])
        last.register_forward_hook(lambda module, args, output, seen=seen, add=add: add(module, seen.pop(), output))
    expected = logits(plain, given)
    assert float((expected - before).abs().max()) > 1e-2
    torch.testing.assert_close(logits(model, given), expected, atol=2e-4, rtol=1e-4)


def test_an_ffn_with_code_between_its_modules_is_refused_with_that_code() -> None:
    model = build("causal/opt")
    for layer in model.model.decoder.layers:
        del layer.activation_fn
        layer.activation_fn = torch.nn.functional.gelu
    before = state(model)
    with pytest.raises(DoesNotFitError, match=r"\bgelu\b") as caught:
        retrofit.apply(model, "memory(beside=ffns)", example_inputs=inputs("causal/opt"), verify=False)
    assert "beside=layers" in caught.value.remedy and state(model) == before


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("identity", ["causal/llama", "causal/gpt_neox"])
def test_layers_on_two_streams_are_refused_with_the_reason(identity: str) -> None:
    """What a table adds to what such a layer returns would be lost: its streams go on by the side of that."""
    model = build(identity)
    retrofit.apply(model, "reversible(scheme=terraformer)", verify=False)
    for lookup in ("token-id", "lsh", "softmax"):
        with pytest.raises(DoesNotFitError) as refused:
            retrofit.apply(model, f"memory(lookup={lookup})")
        assert "streams last" in refused.value.remedy


def test_dropout_that_moves_is_reported() -> None:
    model = build("seq2seq/bart")
    model.config.activation_dropout = 0.25
    for part in (*model.model.encoder.layers, *model.model.decoder.layers):
        part.activation_dropout = 0.25
    (rewrite,) = apply_reported(
        model, "memory(beside=ffns, layers=0)", example_inputs=inputs("seq2seq/bart"), verify=False
    ).rewrites
    assert [note.split(":")[0] for note in rewrite.notes] == ["model.encoder.layers.0.fc2", "model.decoder.layers.0.fc2"]
    assert all("25%" in note for note in rewrite.notes)


@pytest.mark.first(1)
@pytest.mark.parametrize(("identity", "variant"), [("causal/llama", name) for name in VARIANTS] + [("causal/bloom", "default")])
def test_every_new_parameter_learns_within_two_steps(identity: str, variant: str) -> None:
    model, given = copy.deepcopy(rewritten(identity, variant)), inputs(identity)
    (rewrite,) = rewrites(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        for name, parameter in model.named_parameters():
            waits = step == 0 and any(name.endswith(one) for one in rewrite.second_step)
            gradient = parameter.grad.to_dense() if parameter.grad is not None else torch.zeros(1)
            assert gradient.isfinite().all() and bool(gradient.any()) != waits, name
        optimizer.step()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "variant"),
    [
        *(
            (one, variant)
            for one in ("causal/llama", "causal/bloom")
            for variant in ("default", "lsh experts", "ffns", "some layers")
        ),
        ("causal/opt", "ffns"),
        pytest.param("masked/bert", "softmax ffns", marks=pytest.mark.long),
        pytest.param("masked/esm", "ffns", marks=pytest.mark.long),
        pytest.param("masked/albert", "ffns", marks=pytest.mark.long),
        pytest.param("seq2seq/bart", "softmax ffns", marks=pytest.mark.long),
    ],
)
def test_verification_passes(identity: str, variant: str) -> None:
    model = build(identity)
    report = apply_reported(model, Memory(**VARIANTS[variant]), example_inputs=inputs(identity), count_flops=False).report
    assert report is not None and report.ok
    assert {check.name: check.status for check in report.checks}["gradients"] == "passed"


# ── What a model does, with tables that speak ────────────────────────────────────────────────────────────────────────────────────

SPEAKING = [("causal/llama", "default"), ("causal/bloom", "default"), ("causal/llama", "softmax experts"), ("causal/bloom", "ffns")]
SPEAKING += [("causal/llama", "gated")]
speaking = pytest.mark.parametrize(("identity", "variant"), SPEAKING)


@speaking
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_on_a_cache_is_generation_without(identity: str, variant: str, beams: int) -> None:
    model = trained(identity, variant)
    prompt = inputs(identity)["input_ids"]
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    cached, plain = (model.generate(prompt, use_cache=use, **how) for use in (True, False))
    assert torch.equal(cached, plain)


def test_an_encoder_decoder_generates_on_a_cache() -> None:
    model = trained("seq2seq/t5", "default")
    ids = inputs("seq2seq/t5")["input_ids"]
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 3}
    assert torch.equal(model.generate(ids, use_cache=True, **how), model.generate(ids, use_cache=False, **how))


@speaking
def test_left_padding_changes_nothing(identity: str, variant: str) -> None:
    model, ids = trained(identity, variant), inputs(identity)["input_ids"]
    padded = torch.cat([torch.full((len(ids), 3), 3), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 3).long().expand_as(padded)
    more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if identity == "causal/llama" else {}
    given = {"input_ids": padded, "attention_mask": mask, **more}
    torch.testing.assert_close(logits(model, given)[:, 3:], logits(model, {"input_ids": ids}), atol=1e-4, rtol=1e-4)


@pytest.mark.first(1)
@speaking
def test_a_saved_model_comes_back_bit_for_bit(identity: str, variant: str, tmp_path: Path) -> None:
    model, given = trained(identity, variant), inputs(identity)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, given), logits(model, given))
    assert retrofit.recipe(loaded) == retrofit.recipe(model) == (Memory(**VARIANTS[variant]),)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(base(**given)[0], model.base_model(**given)[0])


def test_hyperplanes_are_saved_and_follow_the_model(tmp_path: Path) -> None:
    model, given = trained("causal/llama", "lsh"), inputs("causal/llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, given), logits(model, given))
    for mine, theirs in zip(tables(model), tables(loaded), strict=True):
        assert torch.equal(mine.planes, theirs.planes) and torch.equal(mine.offsets, theirs.offsets)
    assert all(table.planes.dtype == torch.bfloat16 for table in tables(model.to(torch.bfloat16)))
    assert not any("planes" in name for name, _ in model.named_parameters())


@speaking
def test_a_copy_and_a_pickle_are_models_of_their_own(identity: str, variant: str) -> None:
    model, given = trained(identity, variant), inputs(identity)
    expected = logits(model, given)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(logits(twin, given), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin, given), expected)


@speaking
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(identity: str, variant: str, reentrant: bool) -> None:
    model, given = trained(identity, variant).train(), inputs(identity)
    for table in tables(model):
        if hasattr(table, "jitter"):
            table.jitter = 0.0
    plain = gradients(model, given)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for name, gradient in gradients(model, given).items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-5, rtol=1e-4, msg=name)


def gradients(model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model(**given, labels=given["input_ids"]).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.first(1)
@speaking
def test_torch_compile_makes_one_graph_of_the_same_function(identity: str, variant: str) -> None:
    model, given = trained(identity, variant), inputs(identity)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, given), logits(model, given), atol=1e-5, rtol=1e-5)


@pytest.mark.first(1)
@speaking
def test_torch_export_runs_at_other_shapes(identity: str, variant: str) -> None:
    model = trained(identity, variant)
    given, others = inputs(identity), inputs(identity, batch=3, length=9, seed=5)
    free = {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(
        model, (), {**given, "use_cache": False}, strict=False, dynamic_shapes={**free, "use_cache": None}
    )
    torch.testing.assert_close(
        zoo.logits(exported.module()(**others, use_cache=False)), logits(model, others), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("variant", ["default", "softmax experts", "lsh experts"])
def test_autocast_and_half_precision(variant: str) -> None:
    model, given = trained("causal/llama", variant), inputs("causal/llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**given, labels=given["input_ids"]).loss
    loss.backward()
    assert loss.isfinite() and all(parameter.grad.isfinite().all() for parameter in model.parameters())
    for dtype in (torch.bfloat16, torch.float16):
        low = copy.deepcopy(model).to(dtype)
        assert logits(low, given).dtype == dtype and logits(low, given).isfinite().all()


@pytest.mark.parametrize("identity", ["causal/llama", "causal/bloom"])
def test_embeddings_have_no_ids_and_the_error_says_so(identity: str) -> None:
    model, ids = rewritten(identity, "default"), inputs(identity)["input_ids"]
    with pytest.raises(DoesNotFitError, match="input_ids") as caught:
        model(inputs_embeds=model.get_input_embeddings()(ids))
    assert "softmax" in caught.value.remedy
    other = rewritten("causal/llama", "softmax")
    embedded = {"inputs_embeds": other.get_input_embeddings()(ids)}
    torch.testing.assert_close(logits(other, embedded), logits(other, {"input_ids": ids}))


def test_tokens_added_later_get_nothing(tmp_path: Path) -> None:
    model = trained("causal/llama", "default")
    size = model.config.vocab_size
    ids = inputs("causal/llama")["input_ids"]
    before = logits(model, {"input_ids": ids})
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    assert torch.equal(logits(model, {"input_ids": ids})[..., :size], before)
    new = torch.full_like(ids, size + 2)
    silent = copy.deepcopy(model)
    for table in tables(silent):
        nn.init.zeros_(table.b)
    assert torch.equal(logits(model, {"input_ids": new}), logits(silent, {"input_ids": new}))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, {"input_ids": ids}), logits(model, {"input_ids": ids}))
    assert [table.buckets for table in tables(loaded)] == [size] * 2


def test_lora_trains_and_merges() -> None:
    model, given = trained("causal/llama", "default"), inputs("causal/llama")
    expected = logits(model, given)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    tuned(**given, labels=given["input_ids"]).loss.backward()
    assert sum(parameter.grad is not None for parameter in tuned.parameters()) == 8
    assert torch.equal(logits(tuned.merge_and_unload(), given), expected)


def test_trainer_takes_steps(tmp_path: Path) -> None:
    model, ids = copy.deepcopy(rewritten("causal/llama", "softmax experts")), inputs("causal/llama", batch=8)["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    how = transformers.TrainingArguments(tmp_path, max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True)
    transformers.Trainer(model=model, args=how, train_dataset=rows).train()
    assert all(table.v.any() for table in tables(model))


# ── With other passes, and without ───────────────────────────────────────────────────────────────────────────────────────────────


ORDERS = (
    ("memory", "altup(k=2)"),
    ("altup(k=2)", "memory(lookup=softmax, rank=2)"),
    ("altup(k=2, embedding=recycled, init=lockstep)", "memory"),
    ("sum", "memory(beside=ffns)"),
    ("memory", "memory(lookup=lsh)", "memory(beside=ffns)"),
    ("memory(beside=ffns)", "altup(k=3)", "sum"),
)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "order"),
    [
        *(("causal/llama", order) for order in ORDERS[:4]),
        *(("causal/gptj", order) for order in ORDERS[4:]),  # whose code forwards no keywords
        *(pytest.param("causal/gptj", order, marks=pytest.mark.long) for order in ORDERS[:4]),
        *(pytest.param("causal/llama", order, marks=pytest.mark.long) for order in ORDERS[4:]),
        pytest.param("causal/opt", ("memory(beside=ffns)", "altup(k=2)"), marks=pytest.mark.long),
        pytest.param("causal/opt", ("altup(k=2)", "memory(beside=ffns)"), marks=pytest.mark.long),
    ],
)
def test_it_composes(identity: str, order: tuple[str, ...], tmp_path: Path) -> None:
    model, others = build(identity), inputs(identity, batch=3, length=9, seed=5)
    expected = logits(model, others)
    retrofit.apply(model, *order, example_inputs=inputs(identity), verify=False)
    torch.testing.assert_close(logits(model, others), expected, atol=1e-5, rtol=1e-5)
    moved(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), others), logits(model, others))


@pytest.mark.first(1)
@pytest.mark.parametrize(("identity", "lookup"), [("causal/llama", "softmax"), ("causal/gpt_neox", "ngram, buckets=64")])
def test_in_an_altup_model_the_narrow_layer_gets_the_table(identity: str, lookup: str) -> None:
    model = build(identity)
    retrofit.apply(model, "altup(k=2)", f"memory(lookup={lookup})", example_inputs=inputs(identity), verify=False)
    for layer in model.base_model.layers:
        assert layer.k == 2 and isinstance(layer.layer, MemoryLayer)
        assert layer.layer.memory.width == model.config.hidden_size


@pytest.mark.long
def test_in_an_exported_altup_model_the_ids_pass_through_the_graph_around_the_layer(tmp_path: Path) -> None:
    wide = retrofit.apply(tiny_models.llama(), "altup(k=2)", verify=False)
    retrofit.save(wide, tmp_path / "wide.pt2")
    read = retrofit.load(tmp_path / "wide.pt2")  # its layers are calls of the narrow ones inside graphs, which take no keywords
    ids = torch.arange(10).view(2, 5)
    before = read(ids).logits
    model = retrofit.apply(read, "memory", verify=False)
    assert len(tables(model)) == 2 and torch.equal(model(ids).logits, before)
    with torch.no_grad():
        for parameter in (one for table in tables(model) for one in table.parameters()):
            parameter.normal_()
    assert bool(((model(ids).logits - before).abs().amax((1, 2)) > 0.01).all())


def test_shared_layers_share_one_table() -> None:
    model = rewritten("masked/albert", "default")
    assert model.config.num_hidden_layers > 1 and len(tables(model)) == 1


def state(model: Any) -> tuple[Any, ...]:
    modules = [
        (name, id(module), len(module._forward_hooks) + len(module._forward_pre_hooks), "forward" in vars(module))
        for name, module in model.named_modules()
    ]
    return modules, [(name, id(parameter)) for name, parameter in model.named_parameters()], model.config.to_dict()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "passes", "said"),
    [
        ("image/vit", ("memory",), "not made from token ids"),
        ("causal/llama", ("memory(layers=99)",), "depth 99"),
        ("causal/llama", ("memory(layers=first)",), "layers=first"),
        ("causal/bloom", ("memory", "altup(layers=99)"), "depth 99"),
        ("causal/llama", ("memory(beside=ffns)", "altup(layers=99)"), "depth 99"),
    ],
)
def test_a_refusal_says_why_and_leaves_the_model_exactly_as_it_was(identity: str, passes: tuple[str, ...], said: str) -> None:
    model = build(identity)
    before = state(model)
    with pytest.raises((DoesNotFitError, SpecError)) as caught:
        retrofit.apply(model, *passes, example_inputs=inputs(identity))
    assert said in f"{caught.value.what} {caught.value.why}"
    assert state(model) == before and retrofit.recipe(model) is None


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "variant"), [("causal/llama", "default"), ("causal/bloom", "ffns"), ("causal/opt", "softmax ffns")]
)
def test_a_plan_changes_nothing_and_announces_what_apply_does(identity: str, variant: str) -> None:
    model, memory = build(identity), Memory(**VARIANTS[variant])
    before = state(model)
    plan = retrofit.plan_of(model, memory, example_inputs=inputs(identity))
    assert state(model) == before
    (planned,) = plan.passes
    (rewrite,) = apply_reported(model, memory, example_inputs=inputs(identity), verify=False, count_flops=False).rewrites
    assert (planned.plan.sites, planned.plan.near_misses) == (rewrite.sites, rewrite.skipped)
    assert planned.plan.new_parameters == rewrite.new_parameters
    assert plan.parameters_after == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.long
def test_ids_are_forwarded_where_the_code_does_and_injected_elsewhere() -> None:
    for identity in (*FORWARDED, *INJECTED):
        injected = any(
            isinstance(vars(module).get("forward"), InjectingForward) for module in rewritten(identity, "default").modules()
        )
        assert injected == (identity in INJECTED), identity


class Forwarding(Own):
    """Forwards keywords to its layers, and reads a value first, which there is none of on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(OpenBlock(24) for _ in range(3))

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        y = self.a(x) if x.min() >= 0 else self.a(-x)
        for block in self.b:
            y = block(y, **keywords)
        return self.c(y)


class OpenBlock(Block):
    def forward(self, y: Tensor, **keywords: Any) -> Tensor:
        return super().forward(y)


def test_ids_take_the_same_route_in_a_model_without_values() -> None:
    names = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Forwarding()
        retrofit.apply(model, "memory(layers=1)", example_inputs={"x": torch.arange(2, 14).view(2, 6)}, verify=False)
        names.append(list(model.state_dict()))
    assert names[0] == names[1] and "b.0.layer.m.weight" in names[0], "a layer without a table does not see the ids"


class TwoRoutes(Forwarding):
    """A second stack of the same ids, whose layers take no keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.ModuleList(Block(24) for _ in range(3))

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        y = self.a(x)
        for block in self.d:
            y = block(y)
        return super().forward(x, **keywords) + self.c(y)


@pytest.mark.long
def test_two_stacks_of_the_same_ids_each_have_their_route() -> None:
    model, given = TwoRoutes(), {"x": torch.arange(2, 14).view(2, 6)}
    (rewrite,) = apply_reported(model, "memory", example_inputs=given, count_flops=False).rewrites  # verified
    assert [site.name for site in rewrite.sites] == [f"{stack}.{depth}" for stack in "db" for depth in range(3)]


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("lookup", ["softmax", "lsh"])
def test_no_token_is_looked_up_in_a_stream_of_zeros(lookup: str) -> None:
    model = Asking(at_zero=True)
    (rewrite,) = apply_reported(model, Memory(lookup=lookup, buckets=6), count_flops=False).rewrites  # verified: all of it learns
    assert [site.name for site in rewrite.sites] == ["b.1"]
    assert [(one.name, "all zeros" in one.why) for one in rewrite.skipped] == [("b.0", True)]
    for at_zero, beside in ((True, "ffns"), (False, "layers")):
        (planned,) = retrofit.plan_of(Asking(at_zero), Memory(lookup=lookup, beside=beside)).passes
        assert len(planned.plan.sites) == 2
