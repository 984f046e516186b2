"""Strided layers under torch.compile: whole graphs that give what plain calls give, in training, for a prompt, for each token."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from support import tiny_models
from support.retrofitted import moved
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import retrofit
from retrofit.passes import SequenceAltUp
from retrofit.passes.sequence_altup import anchor_cache
from retrofit.passes.sequence_altup.arguments import CountedAnchors
from retrofit.passes.sequence_altup.strided_layers import StridedLayer

OLD = torch.__version__ < "2.12"
K, ROOM, PROMPT, LENGTH = 3, 16, 5, 12
BUILDERS = {
    "llama": lambda: tiny_models.llama(num_hidden_layers=2),
    "gpt2": lambda: tiny_models.gpt2(n_layer=2),
    "bert": lambda: tiny_models.bert(num_hidden_layers=2),
    "t5": lambda: tiny_models.t5(num_layers=2),
}
TRAINED = [
    ("llama", "ones"),
    ("llama", "left"),
    ("llama", "right"),
    *((form, mask) for form in ("gpt2", "bert", "t5") for mask in ("none", "left")),
]


@functools.cache
def original(form: str) -> Any:
    return moved(retrofit.apply(BUILDERS[form](), SequenceAltUp(k=K, layers="1"), verify=False)).eval()


def strided(form: str = "llama") -> Any:
    return copy.deepcopy(original(form))


def compiled(model: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The model compiled without graph breaks, and a count of its graphs."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, backend=counter), counter


@functools.cache
def makes_a_cache(form: str) -> bool:
    """Whether compiled code can make the dense model's cache: T5's copies its config, which torch 2.11 cannot trace."""
    if form != "t5" or not OLD:
        return True
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"copy\.deepcopy\(\)"):
        torch.compile(BUILDERS[form](), fullgraph=True, backend="eager")(input_ids=tokens(), labels=tokens())
    return False


def tokens(seed: int = 0, rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, tiny_models.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str, length: int = LENGTH) -> Tensor:
    """A mask whose second row is shorter."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :2] = 0
    return mask if side == "left" else mask.flip(1)


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def gradients(model: Any, call: Any, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.train().zero_grad()
    torch.manual_seed(0)
    loss = call(**given).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Training and prompts.


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "mask"),
    [("llama", "none"), *(pytest.param(*case, marks=pytest.mark.long) for case in TRAINED)],
)
def test_training_step_is_one_graph_with_the_gradients_of_a_plain_one(form: str, mask: str) -> None:
    model, ids = strided(form), tokens()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # drawn anew in the compiled graph
    if form == "gpt2":
        model.loss_type = "ForCausalLM"  # without one transformers logs that it guesses, which breaks the graph of any model
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if mask != "none":
        given["attention_mask"] = torch.ones_like(ids) if mask == "ones" else padded(mask)
    if not makes_a_cache(form):
        given["use_cache"] = False
    expected, plain = gradients(model, model, given)
    step, counter = compiled(model)
    loss, found = gradients(model, step, given)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1 and found.keys() == plain.keys() and any(".a1" in name for name in found)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("form", ["llama", "t5"])
def test_compiled_code_needs_no_loop_over_attributes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no copy of an object: torch 2.11 cannot trace either. With a cache, which the model makes, and without."""
    model, ids = strided(form), tokens()
    given = {"input_ids": ids, "labels": ids, "use_cache": makes_a_cache(form)}
    expected, plain = gradients(model, model, given)
    monkeypatch.setattr(anchor_cache, "TRACES_ATTRIBUTES", False)
    monkeypatch.setattr(anchor_cache, "copy", None)
    step, counter = compiled(model)
    loss, found = gradients(model, step, given)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1 and found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_attributes_that_a_cache_begins_with_are_those_that_its_class_assigns() -> None:
    config = BUILDERS["llama"]().config
    caches: list[Any] = [DynamicCache(config=config), StaticCache(config=config, max_cache_len=ROOM)]
    caches.append(EncoderDecoderCache(*caches))
    for cache in caches:
        assert set(anchor_cache.initialized_names(type(cache))) >= set(vars(cache))


def counting(model: Any, **given: Any) -> int:
    """The number of operations in the graph of a forward that count tokens, or index by their values."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.extend(str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=backend)(**{"use_cache": False, **given})
    return sum(name in ("cumsum", "gather", "scatter", "argmax") for name in found)


@pytest.mark.long
@pytest.mark.parametrize("form", ["llama", "gpt2", "bert", "t5"])
def test_anchors_of_unpadded_sequences_follow_from_the_shape(form: str) -> None:
    """Nothing more is counted or gathered than in the dense model, even where it makes a mask; it is where padding is shown."""
    dense, given = BUILDERS[form](), {"input_ids": tokens()}
    if form == "t5":
        given["labels"] = tokens()
    padded_too = {**given, "attention_mask": padded("left")}
    assert counting(strided(form), **given) == counting(dense, **given)
    assert counting(strided(form), **padded_too) > counting(dense, **padded_too)
    if makes_a_cache(form):
        assert counting(strided(form), **given, use_cache=True) == counting(dense, **given, use_cache=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("order", "checkpointing"), [("none left right none", False), ("left none right", False), ("left none", True)]
)
def test_unpadded_and_padded_batches_have_a_graph_each(order: str, checkpointing: bool) -> None:
    model, ids = strided(), tokens()
    if checkpointing:
        model.gradient_checkpointing_enable()
    step, counter = compiled(model)
    for mask in order.split():
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        given |= {} if mask == "none" else {"attention_mask": padded(mask)}
        expected, plain = gradients(model, model, given)
        loss, found = gradients(model, step, given)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for name, gradient in plain.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert counter.frame_count == 2


@pytest.mark.long
@torch.no_grad()
def test_other_arguments_may_show_padding() -> None:
    """Compiled calls with them, after one without, count anchors, and give what plain calls give."""
    model, ids = strided(), tokens()
    real, packed = padded("left").bool(), torch.cat([torch.arange(7), torch.arange(LENGTH - 7)])
    by_queries = torch.ones(LENGTH, LENGTH).tril().bool() & real[:, None, None]
    step, counter = compiled(model)
    step(ids, use_cache=False)
    for given in (
        {"input_ids": ids, "position_ids": packed.expand(2, -1)},
        {"input_ids": ids, "attention_mask": by_queries},
        {"inputs_embeds": model.get_input_embeddings()(ids)},
    ):
        expected, found = (call(**given, use_cache=False).logits for call in (model, step))
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=2e-5)
    counted = [any("cumsum" in str(node.target) for node in graph.graph.nodes) for graph in counter.graphs]
    assert counted[1:] == [True] * 3


@pytest.mark.long
@torch.no_grad()
def test_inner_modules_called_alone_read_their_masks() -> None:
    model, ids = strided("bert"), tokens()
    step, _ = compiled(model)
    step(ids)
    encoder, x, real = model.bert.encoder, torch.randn(2, LENGTH, model.config.hidden_size), padded("left").bool()
    shown = {"attention_mask": torch.where(real[:, None, None], 0.0, torch.finfo(x.dtype).min).expand(2, 1, LENGTH, LENGTH)}
    expected = encoder(x, **shown)[0]
    found = torch.compile(encoder, fullgraph=True, backend="aot_eager")(x, **shown)[0]
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_a_plain_call_reads_its_mask_after_a_compiled_one_that_failed() -> None:
    model, given = strided(), {"input_ids": tokens(), "attention_mask": padded("left"), "use_cache": False}
    expected = model(**given).logits
    (calls,) = {layer.unpadded_calls for layer in model.modules() if isinstance(layer, StridedLayer)}
    calls.active = True  # it was not left
    assert torch.equal(model(**given).logits, expected)


class PadsByIds(torch.nn.Module):
    """A model whose ids show padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BUILDERS["llama"]()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids, attention_mask=(input_ids != 0).long(), use_cache=False).logits
        return logits


@pytest.mark.long
@torch.no_grad()
def test_ids_that_show_padding_are_read() -> None:
    model = retrofit.apply(PadsByIds(), SequenceAltUp(k=K, layers="1"), example_inputs={"input_ids": tokens()}, verify=False).eval()
    step, counter = compiled(model)
    real = padded("left").bool()
    for ids in (tokens(), tokens() * real):
        torch.testing.assert_close(step(ids)[ids != 0], model(ids)[ids != 0], rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 1 and model.inner.model.layers[1].unpadded_calls is None


def test_gradients_of_padded_rows_are_those_of_indexing() -> None:
    """Against plain indexing, for padding on either side, between tokens, and a row of nothing else."""
    real = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1, 1], [0] * 7]
    ).bool()
    anchors = CountedAnchors(real, 2)
    x = torch.randn(5, 7, 3, dtype=torch.double, requires_grad=True)
    values = torch.randn(5, 4, 3, dtype=torch.double, requires_grad=True)
    weight, spread_weight = (
        torch.randn(5, 4, 3).double(),
        torch.randn(5, 7, 3).double() * real[..., None],
    )
    made = (anchors.pick(x) * weight).sum() + (anchors.spread(values) * spread_weight).sum()
    found = torch.autograd.grad(made, (x, values))
    picked, spread = x.gather(1, anchors.index[..., None].expand(-1, -1, 3)), anchors.slot.clamp(min=0)[..., None].expand(-1, -1, 3)
    expected = torch.autograd.grad((picked * weight).sum() + (values.gather(1, spread) * spread_weight).sum(), (x, values))
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("static", [False, True], ids=["grows", "static"])
@pytest.mark.parametrize("mask", ["none", "left"])
@torch.no_grad()
def test_prompt_is_one_graph_and_plain_steps_go_on_from_its_cache(mask: str, static: bool) -> None:
    model, ids = strided(), tokens()
    real = torch.ones_like(ids) if mask == "none" else padded(mask)

    def given(start: int, end: int) -> dict[str, Any]:
        shown = {} if mask == "none" else {"attention_mask": real[:, :end]}
        return {"input_ids": ids[:, start:end], "position_ids": positions(real)[:, start:end], **shown}

    whole = model(**given(0, LENGTH), use_cache=False).logits
    call, counter = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=ROOM) if static else None
    output = call(**given(0, PROMPT), past_key_values=cache)
    made, cache = [output.logits], output.past_key_values
    made += [model(**given(at, at + 1), past_key_values=cache).logits for at in range(PROMPT, LENGTH)]
    assert counter.frame_count == 1
    torch.testing.assert_close(torch.cat(made, 1)[real.bool()], whole[real.bool()], rtol=1e-4, atol=2e-5)


# Tokens.


def started(model: Any, ids: Tensor, **given: Any) -> Any:
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(ids[:, :PROMPT], past_key_values=cache, **given)
    return cache


@pytest.mark.parametrize("form", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
@torch.no_grad()
def test_two_graphs_decode_unpadded_sequences(form: str) -> None:
    """One for steps at anchors and one for those between, in which no strided layer runs; the tensors of the cache do not move."""
    model, ids = strided(form), tokens()
    whole = model(ids, use_cache=False).logits
    cache = started(model, ids)
    step, counter = compiled(model)
    layer = cache.layers[1]
    addresses = [tensor.data_ptr() for tensor in (layer.keys, layer.values, layer.correction, layer.passed)]
    for at in range(PROMPT, LENGTH):
        logits = step(ids[:, at : at + 1], past_key_values=cache).logits
        torch.testing.assert_close(logits, whole[:, at : at + 1], rtol=1e-4, atol=2e-5)
    between, anchor = (sum(node.op == "call_function" for node in graph.graph.nodes) for graph in counter.graphs)
    assert counter.frame_count == 2 and anchor > between + 20  # the layers' own operations
    assert addresses == [tensor.data_ptr() for tensor in (layer.keys, layer.values, layer.correction, layer.passed)]
    assert layer.keys.shape[2] == -(-ROOM // K) + 1
    cache.reset()
    other = tokens(1)
    made = [model(other[:, :PROMPT], past_key_values=cache).logits]
    made += [step(other[:, at : at + 1], past_key_values=cache).logits for at in range(PROMPT, LENGTH)]
    torch.testing.assert_close(torch.cat(made, 1), model(other, use_cache=False).logits, rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 2


@pytest.mark.long
@torch.no_grad()
def test_prompt_and_tokens_are_three_graphs_from_an_empty_cache() -> None:
    model, ids = strided(), tokens()
    step, counter = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    made = [step(ids[:, :PROMPT], past_key_values=cache).logits]
    made += [step(ids[:, at : at + 1], past_key_values=cache).logits for at in range(PROMPT, LENGTH)]
    torch.testing.assert_close(torch.cat(made, 1), model(ids, use_cache=False).logits, rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 3


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_decode_in_whole_graphs(side: str) -> None:
    """Rows that end in padding go on behind it."""
    model, ids = strided(), tokens()
    real = torch.ones_like(ids)
    real[:, :PROMPT] = padded(side, PROMPT)
    at = positions(real)
    whole = model(ids, attention_mask=real, position_ids=at, use_cache=False).logits
    cache = started(model, ids, attention_mask=real[:, :PROMPT], position_ids=at[:, :PROMPT])
    step, _ = compiled(model)
    for i in range(PROMPT, LENGTH):
        given = {"attention_mask": real[:, : i + 1], "position_ids": at[:, i : i + 1], "past_key_values": cache}
        logits = step(ids[:, i : i + 1], **given).logits
        torch.testing.assert_close(logits, whole[:, i : i + 1], rtol=1e-4, atol=2e-5)


@pytest.mark.long
@torch.no_grad()
def test_beams_take_their_anchors_with_them_in_compiled_code() -> None:
    model, ids = strided(), tokens(rows=3)
    chosen = torch.tensor([2, 0, 0])
    cache = started(model, ids)
    step, _ = compiled(model)
    step(ids[:, PROMPT : PROMPT + 1], past_key_values=cache)
    cache.reorder_cache(chosen)
    mixed = torch.cat([ids[chosen, : PROMPT + 1], ids[:, PROMPT + 1 :]], 1)
    made = [step(mixed[:, at : at + 1], past_key_values=cache).logits for at in range(PROMPT + 1, LENGTH)]
    torch.testing.assert_close(torch.cat(made, 1), model(mixed, use_cache=False).logits[:, PROMPT + 1 :], rtol=1e-4, atol=2e-5)


@pytest.mark.long
@torch.no_grad()
def test_an_encoder_decoder_decodes_in_whole_graphs() -> None:
    model, source, target = strided("t5"), tokens(length=7), tokens(1)
    encoded = (model.encoder(source).last_hidden_state,)
    whole = model(encoder_outputs=encoded, decoder_input_ids=target, use_cache=False).logits
    cache = EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=size) for size in (ROOM, 7)))
    model(encoder_outputs=encoded, decoder_input_ids=target[:, :PROMPT], past_key_values=cache)
    step, counter = compiled(model)
    for at in range(PROMPT, LENGTH):
        given = {"encoder_outputs": encoded, "decoder_input_ids": target[:, at : at + 1], "past_key_values": cache}
        torch.testing.assert_close(step(**given).logits, whole[:, at : at + 1], rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 2


@torch.no_grad()
def test_generate_with_a_static_cache_finds_what_it_finds_without_one() -> None:
    model, ids = strided(), tokens(length=PROMPT)
    given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, **given)
    assert torch.equal(model.generate(ids, cache_implementation="static", **given), expected)
