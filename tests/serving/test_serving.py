"""Rewritten models on a paged cache, without vLLM: an engine of a few lines runs them against whole forwards; refusals.

`make vllm` runs the same models in vLLM (`benchmarks/serving/served.py`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.refusals import refused
from support.tiny_models import built, gpt2, llama
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import retrofit
from retrofit import serving
from retrofit.anatomy.feed_forwards import FeedForwardBlock
from retrofit.errors import CheckpointError, DoesNotFitError, RetrofitError
from retrofit.passbase.protocol import load_pass, pass_names
from retrofit.passes.recurrence.simple_recurrent_unit import Recurrence
from retrofit.serving.slot_tables import Places, RowLayout, SlotCache

SIZE = 4  # slots of a block


class Engine:
    """A paged cache of blocks, in which a batch is a row of pieces of sequences; its attention is a loop over tokens."""

    def __init__(self, model: Any, blocks: int = 40) -> None:
        self.model, self.free = model, list(range(blocks - 1, 0, -1))  # block 0 is nobody's
        self.keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and slot
        self.ids: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.batch: list[tuple[str, int]] | None = None  # a sequence and a position for each token
        self.cache = SlotCache(RowLayout())
        self.table = torch.empty(0)
        ALL_ATTENTION_FUNCTIONS.register("paged", self.attend)
        model.config._attn_implementation = "paged"
        for tokens in (2, 5):  # engines warm up before there is a table
            self.cache.begin(torch.arange(tokens), None)
            self.run([0] * tokens, list(range(tokens)))
        self.cache.layout.is_final = True
        self.table = torch.full((blocks, 1, SIZE, self.cache.layout.width), 255, dtype=torch.uint8)  # what others left there

    def reserve(self, name: str, tokens: int) -> None:
        """Give a sequence its blocks up to so many tokens."""
        while len(self.blocks[name]) * SIZE < tokens:
            self.blocks[name].append(self.free.pop())

    def add(self, name: str, ids: list[int], like: str | None = None, shared: int = 0) -> None:
        """Take up a sequence whose first `shared` blocks are those of another."""
        self.ids[name] = ids
        self.blocks[name] = self.blocks[like][:shared] if like is not None else []
        self.done[name] = shared * SIZE

    def forget(self, name: str) -> None:
        """Preempt a sequence: its blocks are free, and it begins anew."""
        self.free = self.blocks[name] + self.free
        self.blocks[name], self.done[name] = [], 0

    def step(self, *pieces: tuple[str, int]) -> list[Tensor]:
        """Compute the next so many tokens of each sequence in one row; return their logits."""
        self.batch, starts = [], [0]
        for name, count in pieces:
            first = self.done[name]
            self.batch += [(name, position) for position in range(first, first + count)]
            self.done[name] = first + count
            starts.append(len(self.batch))
            self.reserve(name, self.done[name])
        longest = max(len(self.blocks[name]) for name, _ in pieces)
        blocks = torch.tensor([self.blocks[name] + [0] * (longest - len(self.blocks[name])) for name, _ in pieces])
        positions = torch.tensor([position for _, position in self.batch])
        slots = torch.tensor([self.slot(name, position) for name, position in self.batch])
        self.cache.begin(positions, Places(self.table, positions, slots, torch.tensor(starts), blocks))
        logits = self.run([self.ids[name][position] for name, position in self.batch], positions.tolist())
        return [logits[first:last] for first, last in itertools.pairwise(starts)]

    def run(self, ids: list[int], positions: list[int]) -> Tensor:
        given = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]), "past_key_values": self.cache}
        with torch.no_grad():
            return self.model(**given, use_cache=False).logits[0]  # type: ignore[no-any-return]

    def slot(self, name: str, position: int) -> int:
        return self.blocks[name][position // SIZE] * SIZE + position % SIZE

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        layer: Any = module.layer_idx
        assert mask is None
        if self.batch is None:
            return torch.zeros_like(query).transpose(1, 2), None
        found = []
        for token, (name, position) in enumerate(self.batch):
            self.keys[layer, self.slot(name, position)] = key[0, :, token], value[0, :, token]
        for token, (name, position) in enumerate(self.batch):
            pairs = [self.keys[layer, self.slot(name, earlier)] for earlier in range(position + 1)]
            group = query.shape[1] // key.shape[1]
            keys, values = (torch.stack(parts, 1).repeat_interleave(group, 0) for parts in zip(*pairs, strict=True))
            weights = (torch.einsum("hd,htd->ht", query[0, :, token], keys) * options["scaling"]).softmax(-1)
            found.append(torch.einsum("ht,htd->hd", weights, values))
        return torch.stack(found).unsqueeze(0), None


STATEFUL = ("sparse-qkv", "recurrence", "memory(lookup=ngram, buckets=64, canonical=none)")


def rewritten(*specs: str, model: Any = None) -> Any:
    """A small model, a Llama if none is given, after some passes, every parameter moved."""
    torch.manual_seed(0)
    model = llama() if model is None else model
    retrofit.apply(model, *specs, verify=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def engine_and_expected(*specs: str) -> tuple[Engine, dict[str, Tensor]]:
    """An engine with three sequences, b like a in its first 8 ids, and the logits of whole forwards."""
    model = rewritten(*specs)
    draw = torch.Generator().manual_seed(3)
    a, other, c = (torch.randint(2, model.config.vocab_size, (length,), generator=draw).tolist() for length in (19, 6, 11))
    sequences = {"a": a, "b": a[:8] + other, "c": c}
    with torch.no_grad():
        expected = {name: model(torch.tensor([ids])).logits[0] for name, ids in sequences.items()}
    engine = Engine(model)
    for name, ids in sequences.items():
        engine.ids[name] = ids
    return engine, expected


@pytest.mark.parametrize("specs", [*((spec,) for spec in STATEFUL), (*STATEFUL, "altup(k=2)")], ids=str)
def test_packed_chunks_shared_blocks_and_preemption_compute_what_whole_forwards_do(specs: tuple[str, ...]) -> None:
    engine, expected = engine_and_expected(*specs)
    got: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}

    def step(*pieces: tuple[str, int]) -> None:
        for (name, _), logits in zip(pieces, engine.step(*pieces), strict=True):
            got[name].append(logits)

    engine.add("a", engine.ids["a"])
    engine.add("c", engine.ids["c"])
    step(("c", 2), ("a", 9))
    engine.add("b", engine.ids["b"], like="a", shared=2)
    got["b"].append(expected["b"][:8])  # is not computed: its keys, values and states are there
    step(("a", 1), ("b", 5), ("c", 1))
    engine.forget("c")
    got["c"] = []
    step(("b", 1), ("a", 6))
    step(("c", 7), ("a", 1))
    for _ in range(2):
        step(("a", 1), ("c", 1))
    step(("c", 2))
    for name, parts in got.items():
        torch.testing.assert_close(torch.cat(parts), expected[name], atol=2e-5, rtol=1e-4)
    assert engine.cache.layout.width > 0


@pytest.mark.parametrize("order", [("a", "b", "d"), ("d", "b", "a")], ids="".join)
@pytest.mark.parametrize("spec", STATEFUL)
def test_blocks_are_shared_while_they_are_computed(spec: str, order: tuple[str, ...]) -> None:
    """d begins after a block of b, which begins after one of a, all in one batch."""
    engine, expected = engine_and_expected(spec)
    engine.add("a", engine.ids["a"])
    engine.reserve("a", 4)
    engine.add("b", engine.ids["b"], like="a", shared=1)
    engine.reserve("b", 8)
    engine.add("d", engine.ids["b"], like="b", shared=2)
    counts, firsts = {"a": 4, "b": 5, "d": 6}, {"a": 0, "b": 4, "d": 8}
    for name, logits in zip(order, engine.step(*((name, counts[name]) for name in order)), strict=True):
        whole = expected["a" if name == "a" else "b"]
        torch.testing.assert_close(logits, whole[firsts[name] : firsts[name] + counts[name]], atol=2e-5, rtol=1e-4)
    assert engine.cache.places is not None and engine.cache.places.rounds == 3


@pytest.mark.parametrize("spec", STATEFUL)
def test_states_in_another_slot_are_seen(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above compares depends on the table."""
    own = Places.before

    def late(places: Places, *arguments: Any) -> Tensor:
        places.positions = places.positions + 1
        try:
            return own(places, *arguments)
        finally:
            places.positions = places.positions - 1

    monkeypatch.setattr(Places, "before", late)
    engine, expected = engine_and_expected(spec)
    engine.add("a", engine.ids["a"])
    logits = torch.cat([engine.step(("a", count))[0] for count in (9, 1, 9)])
    assert not torch.allclose(logits, expected["a"], atol=1e-3)  # not a number either: nothing was written there yet


def test_a_model_without_states_needs_no_table() -> None:
    engine, expected = engine_and_expected("altup(k=2)", "memory", "sparse-ffn(sparsity=2)")
    assert engine.cache.layout.width == 0
    engine.add("a", engine.ids["a"])
    torch.testing.assert_close(
        torch.cat([engine.step(("a", 9))[0], engine.step(("a", 10))[0]]), expected["a"], atol=2e-5, rtol=1e-4
    )


def test_a_state_that_comes_late_has_no_place() -> None:
    layout = RowLayout()
    assert [layout.reserve(3), layout.reserve(20), layout.reserve(8), layout.width] == [0, 16, 48, 64]
    layout.is_final = True
    with refused(RetrofitError, code="states"):
        layout.reserve(1)


def test_sequences_in_one_row_are_scanned_each_from_its_own_state() -> None:
    torch.manual_seed(0)
    unit = Recurrence(8, 4, False, torch.empty(0))
    torch.nn.init.normal_(unit.w_out)
    x, before, begins = torch.randn(1, 9, 8), torch.randn(9, 4), torch.tensor([i in (0, 3, 4) for i in range(9)])
    with torch.no_grad():
        y, c = unit(x, before, None, begins)
        parts = [unit(x[:, first:last], before[first : first + 1]) for first, last in ((0, 3), (3, 4), (4, 9))]
    torch.testing.assert_close(y, torch.cat([part for part, _ in parts], 1))
    torch.testing.assert_close(c, torch.cat([part for _, part in parts], 1))


# A part of a model for each of several processes


def phi3() -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "pad_token_id": 0}
    config = transformers.Phi3Config(vocab_size=61, max_position_embeddings=64, **sizes)
    return built(config, transformers.Phi3ForCausalLM)


DIVIDED = (  # a feed-forward with biases, one whose matrix has two columns for a unit, and gated ones
    (gpt2, "sparse-ffn(sparsity=4)"),
    (gpt2, "shared-moe(experts=3, k=2, groups=0)"),
    (gpt2, "shared-moe(experts=2, slices=2, groups=0)"),
    (phi3, "sparse-ffn(sparsity=4)"),
    (phi3, "shared-moe(experts=2, groups=1)"),
    (llama, "sparse-ffn(sparsity=4, active=2, controller=gate)"),
)


@pytest.mark.parametrize(("family", "spec"), DIVIDED, ids=lambda given: getattr(given, "__name__", given))
def test_the_outputs_of_shares_of_hidden_units_add_up(family: Any, spec: str) -> None:
    model = rewritten(spec, model=family())
    x = torch.randn(2, 40, model.config.hidden_size)
    parts = [copy.deepcopy(model) for _ in range(2)]
    paths = [path for path, module in model.named_modules() if isinstance(module, FeedForwardBlock)]
    assert paths
    for part, of_model in enumerate(parts):
        for path in paths:
            assert of_model.get_submodule(path).keep_share(part, 2) is not None
    for path in paths:
        whole, *blocks = (of_model.get_submodule(path) for of_model in (model, *parts))
        for tokens in (x, x[:1, :1]):
            with torch.no_grad():
                torch.testing.assert_close(sum(block.compute(tokens) for block in blocks), whole.compute(tokens))
        own, of_all = (sum(value.numel() for value in block.parameters()) for block in (blocks[0], whole))
        assert own < 0.8 * of_all


def test_what_shares_keep_is_loaded_from_whole_tensors() -> None:
    model = rewritten("sparse-ffn(sparsity=4)", model=gpt2())
    other = copy.deepcopy(model)
    block = next(module for module in other.modules() if isinstance(module, FeedForwardBlock))
    path = next(path for path, module in other.named_modules() if module is block)
    for share in block.keep_share(1, 2) or ():  # type: ignore[misc]
        module = model.get_submodule(
            f"{path}.{next(name for name, inner in block.named_modules() if inner is share.module)}".strip(".")
        )
        torch.testing.assert_close(share.of(getattr(module, share.name)), getattr(share.module, share.name))


def test_units_that_do_not_divide_stay_whole() -> None:
    model = rewritten("sparse-ffn(sparsity=4)")
    block: Any = next(module for module in model.modules() if isinstance(module, FeedForwardBlock))
    before = {name: value.shape for name, value in block.named_parameters()}
    assert block.keep_share(0, 5) is None
    assert {name: value.shape for name, value in block.named_parameters()} == before


# What vLLM is given


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0.dev3"])
def test_tested_versions(version: str) -> None:
    serving.require_tested(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "0.3", "dev"])
def test_other_versions_are_refused(version: str) -> None:
    with refused(RetrofitError, version, "0.32", code="version"):
        serving.require_tested(version)


class ConfigReader:
    """As vLLM's reader of config.json: the content and the config."""

    def parse(self, content: dict[str, Any], config: Any) -> tuple[dict[str, Any], Any]:
        return content, config


def engine_of_version(monkeypatch: pytest.MonkeyPatch, version: str, has_readers: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put modules into vLLM's place that hold what the plugin asks for; return the registered models and readers."""
    models: dict[str, Any] = {}
    readers: dict[str, Any] = {"hf": ConfigReader}
    reading = ModuleType("vllm.transformers_utils.config")
    if has_readers:
        vars(reading).update(
            get_config_parser=lambda name: readers[name](),
            register_config_parser=lambda name: functools.partial(readers.__setitem__, name),
        )
    registry = SimpleNamespace(models=models, register_model=models.__setitem__)
    packages = {"vllm": {"__version__": version, "ModelRegistry": registry}, "vllm.transformers_utils": {"config": reading}}
    for name, held in packages.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(held)
    return models, readers


def test_the_plugin_has_recipes_read_and_refused_by_other_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    models, readers = engine_of_version(monkeypatch, "0.33.0", has_readers=True)
    serving.register()
    serving.register()  # vLLM may call it again
    assert list(models) == [serving.ARCHITECTURE]
    parse, config = readers["hf"]().parse, llama().config
    assert parse(config.to_dict(), config) == (config.to_dict(), config)
    rewritten("sum").save_pretrained(tmp_path)
    rewritten_config = type(config).from_pretrained(tmp_path)
    with refused(RetrofitError, "0.33.0", code="version"):
        parse(rewritten_config.to_dict(), rewritten_config)


def test_a_version_that_lacks_what_the_plugin_needs_loads_other_models(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models, _ = engine_of_version(monkeypatch, "0.9.1", has_readers=False)
    serving.register()
    assert not models and "vLLM 0.9.1" in caplog.text
    engine_of_version(monkeypatch, "0.32.0", has_readers=False)
    with pytest.raises(AttributeError):
        serving.register()


REFUSED = {"sequence-altup": "(k=2)", "lsh-attention": "", "merge-cross-attention": ""}


def test_every_pass_is_served_or_refused_with_its_reason() -> None:
    assert {name for name in pass_names() if load_pass(name).not_served} == REFUSED.keys()
    serving.require_served(["altup(k=2)", *STATEFUL, "shared-moe(groups=0, slices=4)"])
    for name, options in REFUSED.items():
        with refused(DoesNotFitError, f"{name}{options}", code="not-served") as caught:
            serving.require_served(["altup(k=2)", f"{name}{options}"])
        assert caught.value.by == name and caught.value.why


def test_quantized_and_inner_models_are_refused() -> None:
    with refused(CheckpointError, code="not-served"):
        serving.require_served(["sum"], {"quant_method": "torchao"})
    with refused(CheckpointError, "model.text", code="not-served"):
        serving.require_served(["sum"], None, "model.text")


def test_a_config_is_read_without_its_recipe(tmp_path: Any) -> None:
    model = rewritten("sum")
    model.save_pretrained(tmp_path)
    config = type(model.config).from_pretrained(tmp_path)
    held, read = serving.without_recipe(config.to_dict(), config, "0.32.0")
    assert "quantization_config" not in held and getattr(read, "quantization_config", None) is None
    assert read.architectures == [serving.ARCHITECTURE]
    assert getattr(read, serving.CLASSES) == ["LlamaForCausalLM"]
    assert getattr(read, serving.RECIPE)["recipe"] == ["sum()"]
    dense = llama().config
    assert serving.without_recipe(dense.to_dict(), dense, "0.1")[1] is dense
    with refused(RetrofitError, code="version"):
        serving.without_recipe(type(config).from_pretrained(tmp_path).to_dict(), type(config).from_pretrained(tmp_path), "0.33.0")
