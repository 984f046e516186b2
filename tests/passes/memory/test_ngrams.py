"""Memory looked up by n-grams: its hashes against whole numbers, the model against hooks, caches and masks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import types
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support import cached_decoding, tiny_models, zoo
from support.onnx_files import decode_greedily
from support.refusals import refused
from support.retrofitted import moved
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.onnx.exporter.export_parts import OnnxSession
from retrofit.passbase import protocol
from retrofit.passes import Memory
from retrofit.passes.memory.ngram_memory import NgramLayer, NgramMemory, is_prime, primes_from
from retrofit.rewriting import apply_reported
from retrofit.surgery.row_tables import RowTables

SMALL = "memory(lookup=ngram, buckets=40, ngrams=1-3, heads=2, layers=all)"
GATED = "memory(lookup=ngram, buckets=40, ngrams=2+4, gate=context, layers=all)"
TWICE = (SMALL, GATED)
LAYER = {"num_hidden_layers": 1}  # with two memories, where a model is traced several times
IDS = torch.randint(3, tiny_models.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(4))


@functools.cache
def rewritten(name: str, *specs: str, **sizes: int) -> Any:
    model = getattr(tiny_models, name)(**sizes)
    torch.manual_seed(5)
    retrofit.apply(model, *specs, verify=False)
    return model


def trained(name: str, *specs: str, **sizes: int) -> Any:
    """A rewritten model whose tables have moved far from their start."""
    model = moved(copy.deepcopy(rewritten(name, *specs, **sizes)))
    with torch.no_grad():
        for memory in memories(model):
            for parameter in memory.parameters():
                parameter.copy_(torch.randn_like(parameter))
    return model


def memories(model: nn.Module) -> list[NgramMemory]:
    return [module for module in model.modules() if isinstance(module, NgramMemory)]


@torch.no_grad()
def logits(model: Any, **given: Any) -> Tensor:
    return zoo.logits(model(**given)).clone()


def rows(memory: NgramMemory, orders: list[int], ids: list[int]) -> list[int]:
    """The row of each hash for the last of these ids, of a whole sequence, by integers of any size."""
    found, first, each = [], 0, len(memory.moduli) // len(orders)
    for number, order in enumerate(order for order in orders for _ in range(each)):
        before = [ids[-1 - back] if back < len(ids) else -1 for back in range(order)]
        code = 0
        for back, id in enumerate(before):
            code ^= int(memory.multipliers[number, back]) * id % 2**64
        found.append(first + (code - 2**64 if code >> 63 else code) % int(memory.moduli[number]))
        first += int(memory.moduli[number])
    return found


def adding(memory: NgramMemory, orders: list[int], sequences: list[list[int]], gated: bool) -> Any:
    """A hook that adds what the memory is to add to a layer, computed token by token."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        x = args[0]
        more = torch.zeros_like(x)
        for number, ids in enumerate(sequences):
            for t in range(len(ids)):
                found = memory.b[rows(memory, orders, ids[: t + 1])]
                if gated:
                    k, v = memory.w_k @ found.flatten(), memory.w_v @ found.flatten()
                    width = x.shape[-1]
                    alike = torch.nn.functional.cosine_similarity(x[number, t], k, dim=0) * width / width**0.5
                    more[number, t] = torch.sigmoid(alike) * v
                else:
                    more[number, t] = found.sum(0)
        return output + more if isinstance(output, Tensor) else (output[0] + more, *output[1:])

    return hook


@pytest.mark.first(1)
@pytest.mark.parametrize(("spec", "orders", "gated"), [(SMALL, [1, 2, 3], False), (GATED, [2, 4], True)])
@pytest.mark.parametrize(("name", "layers"), [("llama", "model.layers"), ("gpt2", "transformer.h"), ("bert", "bert.encoder.layer")])
def test_a_trained_model_is_the_dense_one_plus_the_rows_of_its_ngrams(
    name: str, layers: str, spec: str, orders: list[int], gated: bool
) -> None:
    plain, model = getattr(tiny_models, name)(), copy.deepcopy(rewritten(name, spec))
    assert torch.equal(logits(model, input_ids=IDS), before := logits(plain, input_ids=IDS))
    with torch.no_grad():
        for memory in memories(model):
            for parameter in memory.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter))
    for layer, memory in zip(plain.get_submodule(layers), memories(model), strict=True):
        layer.register_forward_hook(adding(memory, orders, IDS.tolist(), gated))
    expected = logits(plain, input_ids=IDS)
    assert float((expected - before).abs().max()) > 1e-2
    torch.testing.assert_close(logits(model, input_ids=IDS), expected, atol=2e-4, rtol=1e-4)


def test_the_rows_of_hashes_are_different_primes_and_multipliers_are_odd() -> None:
    memory = memories(rewritten("llama", SMALL))[0]
    assert memory.moduli.tolist() == [37, 31, 29, 23, 19, 17] and memory.b.shape == (156, 16)
    used = memory.multipliers[memory.multipliers != 0]
    assert bool((used % 2 != 0).all()) and len(used) == 2 * (1 + 2 + 3) == len(set(used.tolist()))
    first, second = memories(rewritten("llama", SMALL))
    assert not torch.equal(first.multipliers, second.multipliers)


def test_primes_are_those_of_division() -> None:
    divided = [number for number in range(2, 500) if all(number % divisor for divisor in range(2, number))]
    assert [number for number in range(500) if is_prime(number)] == divided
    assert primes_from(500, 3) == (499, 491, 487) and primes_from(5, 9) == (5, 3, 2)
    assert not is_prime(3215031751) and is_prime(2**61 - 1)  # the first number passes the test for 2, 3, 5 and 7


# ── Options ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
def test_without_further_options_they_are_chosen_by_the_model_and_saved() -> None:
    model = tiny_models.llama(num_hidden_layers=5, vocab_size=700)
    (rewrite,) = apply_reported(model, "memory(lookup=ngram)", verify=False, count_flops=False).rewrites
    (spec,) = retrofit.recipe(model)
    assert (spec.ngrams, spec.buckets, spec.layers) == ("2-3", 2**14, "0+2")
    assert [site.name for site in rewrite.sites] == ["model.layers.0", "model.layers.2"]
    assert rewrite.new_parameters == 2 * 16 * (16381 + 16369)
    assert Memory(lookup="ngram") != spec and retrofit.plan_of(tiny_models.llama(), "memory(lookup=ngram)").passes


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ("ngrams=0", "ngrams"),
        ("ngrams=9", "ngrams"),
        ("ngrams=2-9", "ngrams"),
        ("ngrams=3-2", "ngrams"),
        ("ngrams=two", "ngrams"),
        ("ngrams=2+", "ngrams"),
        ("ngrams=-1", "ngrams"),
        ("ngrams=1-99999999999999999", "ngrams"),
        ("heads=0", "heads"),
        ("heads=2000", "heads"),
        ("buckets=9999999999999999999999", "buckets"),
        ("buckets=3, ngrams=2-4", "buckets"),
        ("buckets=40, heads=5, ngrams=2-4", "buckets"),
        ("rank=2", "rank"),
        ("beside=ffns", "beside"),
        ("gate=both", "gate"),
    ],
)
def test_options_that_are_none_are_refused(spec: str, option: str) -> None:
    with refused(SpecError, option=option):
        retrofit.apply(tiny_models.llama(), f"memory(lookup=ngram, {spec})", verify=False)


def test_a_gate_needs_ngrams() -> None:
    for lookup in ("token-id", "softmax", "lsh"):
        with refused(SpecError, option="gate", code="combination"):
            Memory(lookup=lookup, gate="context")


@pytest.mark.parametrize(
    "spec",
    ["lookup=ngram, buckets=1000000000000", "rank=10000000000", "form=gated, rank=10000000000", "rank=10000000000, tables=host"],
)
def test_tables_that_fit_nowhere_are_refused_before_any_is_made(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    monkeypatch.setattr(RowTables, "__init__", lambda module: made.append(module))
    model = tiny_models.llama()
    with refused(DoesNotFitError, code="memory"):
        retrofit.apply(model, f"memory({spec})", verify=False)
    assert not made and retrofit.recipe(model) is None


def test_the_room_for_tables_is_that_of_the_device_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"cuda": 1000, "cpu": 100}
    monkeypatch.setattr(protocol, "memory_of", lambda device: room[torch.device(device).type])
    with FakeTensorMode():
        edit: Any = types.SimpleNamespace(model=nn.ParameterList([torch.empty(1, device="cuda")]), keep=None)
    plan = protocol.Plan((), new_parameters=200)  # of four bytes each
    Memory().require_room(plan, edit)
    for one in (dataclasses.replace(plan, on_host=True), dataclasses.replace(plan, new_parameters=300)):
        with refused(DoesNotFitError, code="memory"):
            Memory().require_room(one, edit)


def test_embeddings_without_ids_are_an_error_before_a_layer_runs() -> None:
    model, ran = copy.deepcopy(rewritten("llama", SMALL)), []
    model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    embeddings = model.get_input_embeddings()(IDS)
    for call in (model, model.generate):
        with refused(DoesNotFitError, "input_ids", code="no-ids"):
            call(inputs_embeds=embeddings)
    assert not ran


# ── Caches, padding, packed rows ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_chunks_padding_and_wrong_guesses_on_a_cache(name: str) -> None:
    model = trained(name, *TWICE)
    cached_decoding.check_steps(model, IDS, (1,) * 11, (4, 3, 4), (9, 1, 1))
    cached_decoding.check_hidden_ends(model, IDS, (4, 3, 4), (4, 2, 1, 4))
    for how in cached_decoding.HOW:
        cached_decoding.check_padding(model, IDS[:, :8], 3, **how)
    cached_decoding.check_wrong_guesses(model, IDS[:1, :8])


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beams_are_those_without_a_cache(name: str) -> None:
    model = trained(name, SMALL)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 3, "pad_token_id": 0}
    assert torch.equal(*(model.generate(IDS, use_cache=use, **how) for use in (True, False)))


def test_assisted_decoding_gives_the_same_tokens() -> None:
    """The draft's guesses are cropped from both caches, on either side."""
    model, dense = trained("llama", *TWICE), tiny_models.llama()
    how = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    for one, draft in ((model, dense), (dense, model)):
        assert torch.equal(one.generate(IDS[:1], assistant_model=draft, **how), one.generate(IDS[:1], **how))


def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_come() -> None:
    model, cache = trained("llama", *TWICE), transformers.DynamicCache()
    whole = logits(model, input_ids=IDS, use_cache=False)
    logits(model, input_ids=torch.cat([IDS[:, :6], IDS[:, :3]], 1), past_key_values=cache)
    cache.crop(-3)
    torch.testing.assert_close(logits(model, input_ids=IDS[:, 6:], past_key_values=cache), whole[:, 6:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_on_either_side_is_no_part_of_an_ngram(name: str, side: str) -> None:
    model = trained(name, *TWICE)
    padding, mask = torch.full((2, 3), 7), torch.ones_like(IDS)
    ids = torch.cat([padding, IDS] if side == "left" else [IDS, padding], 1)
    mask = torch.cat([padding * 0, mask] if side == "left" else [mask, padding * 0], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    found = found[:, 3:] if side == "left" else found[:, :-3]
    torch.testing.assert_close(found, logits(model, input_ids=IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_sequences_are_each_its_own(name: str) -> None:
    model, lengths = trained(name, *TWICE), (5, 1, 2, 3)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    packed = logits(model, input_ids=IDS, position_ids=positions, use_cache=False)
    apart = [logits(model, input_ids=part, use_cache=False) for part in IDS.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-4, rtol=1e-4)


def test_positions_that_start_again_are_a_beginning_without_a_mask_too() -> None:
    """With a cache the model makes no mask of them: its attention, of which nothing is left here, would mix the sequences."""
    model, lengths = trained("llama", *TWICE), (5, 1, 2, 3)
    with torch.no_grad():
        for layer in model.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    packed = logits(model, input_ids=IDS, position_ids=positions, use_cache=True)
    apart = [logits(model, input_ids=part) for part in IDS.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-4, rtol=1e-4)


def test_a_hidden_token_within_a_row_is_a_beginning() -> None:
    """Of a prompt padded on the right and gone on with, say; on a cache too. Nothing of the attention is left here."""
    model, mask = trained("llama", *TWICE), torch.ones_like(IDS)
    mask[:, 4] = 0
    with torch.no_grad():
        for layer in model.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
    found = logits(model, input_ids=IDS, attention_mask=mask)
    torch.testing.assert_close(found[:, :4], logits(model, input_ids=IDS[:, :4]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[:, 5:], logits(model, input_ids=IDS[:, 5:]), atol=1e-4, rtol=1e-4)
    cache, parts, at = transformers.DynamicCache(config=model.config), [], 0
    for length in (3, 2, 1, 1, 4):
        at += length
        given = {"input_ids": IDS[:, at - length : at], "attention_mask": mask[:, :at]}
        parts.append(logits(model, past_key_values=cache, **given))
    torch.testing.assert_close(torch.cat(parts, 1), found, atol=1e-4, rtol=1e-4)


# ── What else a model does ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
def test_it_is_saved_resized_merged_and_undone(tmp_path: Path) -> None:
    model = trained("llama", SMALL)
    expected = logits(model, input_ids=IDS)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, input_ids=IDS), expected)
    for mine, theirs in itertools.zip_longest(memories(model), memories(loaded)):
        assert torch.equal(mine.multipliers, theirs.multipliers) and torch.equal(mine.moduli, theirs.moduli)
    tuned = peft.get_peft_model(loaded, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    tuned(input_ids=IDS, labels=IDS).loss.backward()
    assert torch.equal(logits(tuned.merge_and_unload(), input_ids=IDS), expected)
    model.resize_token_embeddings(70, mean_resizing=False)
    assert torch.equal(logits(model, input_ids=IDS)[..., :61], expected)
    logits(model, input_ids=torch.full_like(IDS, 69))
    undone = retrofit.undo(copy.deepcopy(rewritten("llama", SMALL)))
    assert torch.equal(logits(undone, input_ids=IDS), logits(tiny_models.llama(), input_ids=IDS))


def test_half_precision_and_sparse_gradients() -> None:
    model = trained("llama", SMALL.replace(")", ", sparse=true)"))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(memory.b.grad is not None and memory.b.grad.is_sparse for memory in memories(model))
    for spec in TWICE:
        low = trained("llama", spec).to(torch.bfloat16)
        assert logits(low, input_ids=IDS).dtype == torch.bfloat16
        assert all(memory.multipliers.dtype == torch.int64 for memory in memories(low))


@pytest.mark.long
@pytest.mark.first(1)
def test_compiled_it_is_one_graph_of_the_same_function() -> None:
    model = trained("llama", *TWICE, **LAYER)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    given = {"input_ids": IDS, "use_cache": False}
    expected = logits(model, **given)
    torch.testing.assert_close(logits(compiled, **given), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():  # the cache that compiled code made goes on as any other
        cache = compiled(input_ids=IDS[:, :7], use_cache=True).past_key_values
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    rest = logits(model, input_ids=IDS.flip(0)[:, 5:], past_key_values=cache)
    torch.testing.assert_close(rest, expected.flip(0)[:, 5:], atol=1e-4, rtol=1e-4)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    parts = IDS.split((7, 1, 1, 1, 1), 1)
    found = torch.cat([logits(compiled, input_ids=part, past_key_values=cache) for part in parts], 1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("sparse", ["false", "true"])
def test_a_compiled_training_step_is_one_graph_with_the_same_gradients(sparse: str) -> None:
    """With a cache, as models have by default, and labels."""
    plain = trained("llama", SMALL.replace(")", f", sparse={sparse})"), GATED, **LAYER).train()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in (compiled, plain):
        step(input_ids=IDS, labels=IDS, attention_mask=torch.ones_like(IDS)).loss.backward()
    for mine, theirs in zip(memories(model), memories(plain), strict=True):
        assert mine.b.grad is not None and mine.b.grad.is_sparse == mine.sparse
        torch.testing.assert_close(mine.b.grad.to_dense(), theirs.b.grad.to_dense(), atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.first(1)
def test_as_a_graph_and_as_a_program_it_is_the_same_function_at_other_sizes(tmp_path: Path) -> None:
    model, others = trained("llama", *TWICE, **LAYER), IDS[:1, :7]
    expected = logits(model, input_ids=others)
    graph = retrofit.apply(tiny_models.llama(**LAYER), *TWICE, emit="graph", verify=False)
    graph.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(logits(graph, input_ids=others), expected, atol=1e-5, rtol=1e-5)
    retrofit.save(graph, tmp_path / "model.pt2")
    read = retrofit.load(tmp_path / "model.pt2")
    torch.testing.assert_close(zoo.logits(read(others)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_in_a_program_the_layers_get_tables_too(tmp_path: Path) -> None:
    program = retrofit.apply(tiny_models.llama(**LAYER), "sum", emit="graph", verify=False)
    retrofit.save(program, tmp_path / "sum.pt2")
    read = retrofit.apply(retrofit.load(tmp_path / "sum.pt2"), SMALL)  # with every check
    assert len(memories(read)) == 1 == sum(isinstance(module, NgramLayer) for module in read.modules())


def test_an_onnx_decoder_carries_the_last_ids(tmp_path: Path) -> None:
    model, prompt, mask = trained("llama", *TWICE, **LAYER), IDS[:, :6], torch.ones_like(IDS[:, :6])
    mask[0, :2] = 0
    retrofit.export_onnx(model, tmp_path / "model.onnx")
    model.generation_config.eos_token_id = None  # `generate` would not write it, the loop over the file does
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=mask, **how)
    assert torch.equal(decode_greedily(OnnxSession(tmp_path / "model.onnx"), prompt, 5, mask), expected)


@pytest.mark.long
def test_out_to_onnx_and_back_it_is_the_same_function(tmp_path: Path) -> None:
    model = trained("bert", GATED)
    made = retrofit.export_onnx(model, tmp_path / "model.onnx")
    read = retrofit.from_onnx(made.files[0].path)
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "token_type_ids": torch.zeros_like(IDS)}
    found = zoo.logits(read(**given))
    torch.testing.assert_close(found, logits(model, input_ids=IDS), atol=1e-4, rtol=1e-4)
