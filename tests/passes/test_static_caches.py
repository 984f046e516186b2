"""What rewritten modules keep in a static cache is all in tensors that do not move: a step can be captured and replayed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from support.sparse_attentions import rough
from support.tiny_models import VOCABULARY, llama, t5
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import retrofit
from retrofit.passes.memory.ngram_memory import NgramMemory
from retrofit.passes.recurrence.simple_recurrent_unit import Recurrence
from retrofit.passes.sparse_qkv.modular_projection import ModularProjection

LENGTH, PROMPT = 16, 5
SPECS = ("recurrence(rank=4)", "sparse-qkv(output=mult-conv)", "memory(lookup=ngram, buckets=40, layers=all)")
both = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@functools.cache
def rewritten(spec: str, dense: Any = llama) -> Any:
    """The rewritten model with noise for the zeros that it starts with, so that each token depends on those before it."""
    model = retrofit.apply(dense(), spec, verify=False).eval()
    changed = [rough(module) for module in model.modules() if isinstance(module, (Recurrence, ModularProjection, NgramMemory))]
    assert changed
    return model


def tokens(seed: int = 0, rows: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def started(model: Any, ids: Tensor) -> Any:
    """A cache of fixed length that has seen the prompt."""
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    model(ids[:, :PROMPT], past_key_values=cache)
    return cache


def state(cache: Any) -> dict[str, Any]:
    """All that the histories are apart from the content of their tensors."""
    kept = {name: {**vars(one), "values": (id(one.values), one.values.data_ptr())} for name, one in cache.histories.items()}
    assert kept
    return kept


@both
def test_steps_change_the_content_of_the_tensors_and_nothing_else(spec: str) -> None:
    model, ids = rewritten(spec), tokens()
    static, dynamic = started(model, ids), DynamicCache(config=model.config)
    before, at = state(static), PROMPT
    model(ids[:, :PROMPT], past_key_values=dynamic)
    whole = model(ids, use_cache=False).logits
    for count in (1, 1, 2, 5, 1):
        logits, grown = (model(ids[:, at : at + count], past_key_values=cache).logits for cache in (static, dynamic))
        torch.testing.assert_close(logits, whole[:, at : at + count], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, grown, rtol=1e-4, atol=1e-5)
        assert state(static) == before
        at += count
    static.reorder_cache(torch.tensor([1, 0]))
    assert state(static) == before
    last = model(ids.flip(0)[:, at:], past_key_values=static).logits
    torch.testing.assert_close(last, whole.flip(0)[:, at:], rtol=1e-4, atol=1e-5)
    static.reset()
    other = tokens(1)
    parts = [model(part, past_key_values=static).logits for part in other.split((PROMPT, 1, LENGTH - PROMPT - 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(other, use_cache=False).logits, rtol=1e-4, atol=1e-5)
    assert state(static) == before


class Capture(TorchDispatchMode):
    """Records operations as a CUDA graph does: with the tensors that they read and write, and without the code that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self, result: Tensor) -> Tensor:
        """`result` when all is computed again on what the tensors contain now."""
        computed: dict[int, Tensor] = {}

        def current(one: Tensor) -> Tensor:
            return computed.get(id(one), one)

        for func, args, kwargs, out in self.operations:
            made = func(*tree_map_only(Tensor, current, args), **tree_map_only(Tensor, current, kwargs))
            pairs = zip(tree_leaves(out), tree_leaves(made), strict=True)
            computed.update({id(old): new for old, new in pairs if isinstance(old, Tensor)})
        return computed[id(result)]


@both
def test_captured_step_goes_on_when_it_is_replayed(spec: str) -> None:
    model, ids = rewritten(spec), tokens()
    whole, cache = model(ids, use_cache=False).logits, started(model, ids)
    token = ids[:, PROMPT : PROMPT + 1].clone()
    with Capture() as captured:
        logits = model(token, past_key_values=cache).logits
    for at in range(PROMPT + 1, LENGTH):
        token.copy_(ids[:, at : at + 1])
        torch.testing.assert_close(captured.replay(logits), whole[:, at : at + 1], rtol=1e-4, atol=1e-5)
    cache.reset()
    model(tokens(1)[:, :PROMPT], past_key_values=cache)
    token.copy_(tokens(1)[:, PROMPT : PROMPT + 1])
    expected = model(tokens(1), use_cache=False).logits[:, PROMPT : PROMPT + 1]
    torch.testing.assert_close(captured.replay(logits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@both
def test_compiled_steps_write_where_plain_calls_read_and_are_compiled_once(spec: str) -> None:
    model, ids = rewritten(spec), tokens()
    whole, cache = model(ids, use_cache=False).logits, started(model, ids)
    before = state(cache)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for at in range(PROMPT, LENGTH - 1):
        with torch._dynamo.config.patch(error_on_recompile=at > PROMPT):
            logits = compiled(ids[:, at : at + 1], past_key_values=cache).logits
        torch.testing.assert_close(logits, whole[:, at : at + 1], rtol=1e-4, atol=1e-5)
        assert state(cache) == before
    assert all(one.values._dynamo_static_input_type for one in cache.histories.values())
    torch.testing.assert_close(model(ids[:, -1:], past_key_values=cache).logits, whole[:, -1:], rtol=1e-4, atol=1e-5)


def test_an_encoder_decoder_starts_anew_after_a_reset() -> None:
    """The convolutions over the source read nothing that the mask of the new source hides."""
    model = rewritten(SPECS[1], t5)
    cache = EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=size) for size in (LENGTH, 8)))
    for seed, padding in ((0, 2), (1, 5)):
        source, target, mask = tokens(seed)[:, :8], tokens(seed + 2), torch.ones(2, 8, dtype=torch.long)
        mask[1, :padding] = 0
        given = {"encoder_outputs": (model.encoder(source, attention_mask=mask).last_hidden_state,), "attention_mask": mask}
        whole = model(decoder_input_ids=target, use_cache=False, **given).logits
        for part, expected in zip(target.split(4, 1), whole.split(4, 1), strict=True):
            logits = model(decoder_input_ids=part, past_key_values=cache, **given).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        cache.reset()


def test_two_captured_steps_of_strided_layers_go_on_when_they_are_replayed() -> None:
    """One captured at an anchor and one between, as the host chooses."""
    stride = 3
    model, ids = retrofit.apply(llama(), f"sequence-altup(k={stride}, layers=all)", verify=False).eval(), tokens()
    whole, cache = model(ids, use_cache=False).logits, started(model, ids)
    token, captured = ids[:, :1].clone(), {}
    for at in (PROMPT, PROMPT + 1):
        token.copy_(ids[:, at : at + 1])
        with Capture() as capture:
            logits = model(token, past_key_values=cache).logits
        captured[at % stride == 0] = capture, logits
    assert len(captured[True][0].operations) > len(captured[False][0].operations)
    for at in range(PROMPT + 2, LENGTH):
        token.copy_(ids[:, at : at + 1])
        capture, logits = captured[at % stride == 0]
        torch.testing.assert_close(capture.replay(logits), whole[:, at : at + 1], rtol=1e-4, atol=1e-5)


# A step compiles into one graph; with strided layers into two, as their own tests say.

BEFORE, STEPS = 7, 6
COMPILED = {
    "altup": ("altup(k=2)",),
    "memory": ("memory(lookup=token-id)",),
    "recurrence": ("recurrence(rank=4)",),
    "lsh-attention": ("lsh-attention(rounds=2, buckets=4, chunk=4)",),
    "reversible": ("reversible",),
    "two streams": ("reversible(scheme=terraformer)",),
    "shared-moe": ("shared-moe(experts=2, k=1)",),
    "sparse-ffn": ("sparse-ffn(sparsity=8)",),
    "sparse-loss": ("sparse-loss(modules=2)",),
    "sparse-qkv": ("sparse-qkv",),
    "three passes": ("sparse-qkv", "sparse-ffn(sparsity=8)", "altup(k=2)"),
}
# nothing of theirs is remembered between the steps
STATELESS = ("altup", "memory", "reversible", "two streams", "shared-moe", "sparse-loss")
DEAR = (*STATELESS, "three passes")
CASES = [pytest.param(specs, id=name, marks=[pytest.mark.long] * (name in DEAR)) for name, specs in COMPILED.items()]


@pytest.mark.first(1)
@pytest.mark.parametrize("specs", CASES)
@torch.no_grad()
def test_step_is_one_graph_and_gives_the_logits_of_the_whole_sequence(specs: tuple[str, ...]) -> None:
    model = retrofit.apply(llama(), *specs, verify=False).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, BEFORE + STEPS), generator=torch.Generator().manual_seed(0))
    cache = StaticCache(config=model.config, max_cache_len=BEFORE + STEPS)
    model(ids[:, :BEFORE], past_key_values=cache)
    torch.compiler.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    stepped = torch.cat([step(ids[:, at : at + 1], past_key_values=cache).logits for at in range(BEFORE, BEFORE + STEPS)], 1)
    whole: Tensor = copy.deepcopy(model)(ids, use_cache=False).logits
    torch.testing.assert_close(stepped, whole[:, BEFORE:], rtol=1e-3, atol=1e-4)
