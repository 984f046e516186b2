"""Reversible layers in models whose layers were wrapped by hand: their gradients, what they keep, and what they cannot do.

The oracle of the gradients is the same network that keeps everything: the graph of each layer's first run, instead of a second run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.inputs.model_memory import peak_bytes
from retrofit.passes.reversible import reversible_layer as chains
from retrofit.passes.reversible.repeated_call import RepeatedCall, Returned
from retrofit.passes.reversible.reversible_layer import ReversibleLayer

IDS = torch.randint(5, 40, (3, 9), generator=torch.Generator().manual_seed(0))


@functools.cache
def llama(layers: int = 4) -> Any:
    return tiny_models.llama(num_hidden_layers=layers, attention_dropout=0.2)


def reversible(name: str = "llama", bits: int = 2) -> Any:
    """A model with dropout and a mask; one without dropout, whose trained mask makes torch run another kernel of its attention."""
    if name == "llama":
        model = copy.deepcopy(llama())
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = ReversibleLayer(layer, bits, stream_in=0, stream_out=None)
    elif name == "bert":
        model = tiny_models.bert(num_hidden_layers=3)
        for index, layer in enumerate(model.bert.encoder.layer):
            model.bert.encoder.layer[index] = ReversibleLayer(layer, bits, stream_in=0, stream_out=None)
    else:
        sizes = {"d_model": 64, "d_kv": 32, "d_ff": 64, "dropout_rate": 0.0} if name == "t5-without-dropout" else {}
        model = tiny_models.t5(num_layers=3, **sizes)
        for stack in (model.encoder, model.decoder):
            for index, layer in enumerate(stack.block):
                stack.block[index] = ReversibleLayer(layer, bits, stream_in=0, stream_out=0)
    return model.train()


def inputs(name: str) -> dict[str, Tensor]:
    mask = torch.ones_like(IDS)
    mask[1, 6:] = 0
    return {"input_ids": IDS, "attention_mask": mask, "labels": IDS}


def step(model: Any, given: dict[str, Tensor], seed: int = 3) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of a training step, and the gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def everything_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this context the backward pass uses the graph of each layer's first run, and no layer runs twice."""

    def first(self: RepeatedCall, x: Tensor) -> Returned:
        self.values = [one.detach() for one in self.given]
        leaf, leaves = x.clone().requires_grad_(), [one.detach().requires_grad_() for one in self.given]
        with torch.enable_grad():
            output, known, losses = self.run(leaf, leaves)
        known |= {id(one): one for one in leaves}
        self.__dict__["kept"] = leaf, Returned(output, self.stream_out, known, losses), leaves
        known |= {id(one): original for one, original in zip(leaves, self.given, strict=True)}
        returned = Returned(output, self.stream_out, known, losses)
        returned.tensors = [one.detach() for one in returned.tensors]
        self.given = []
        return returned

    def back(self: chains.Chain, with_graph: bool = True) -> Any:
        move = self.moves.pop()
        return move, *move.call.__dict__.pop("kept")

    with monkeypatch.context() as patch:
        patch.setattr(RepeatedCall, "first", first)
        patch.setattr(chains.Chain, "back", back)
        yield


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "t5-without-dropout"])
def test_gradients_are_those_with_everything_kept_bit_for_bit(
    name: str, dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reversible(name, bits).to(dtype)
    loss, found = step(model, inputs(name))
    with everything_kept(monkeypatch):
        expected_loss, expected = step(model, inputs(name))
    assert torch.equal(loss, expected_loss)
    for parameter, gradient in expected.items():
        assert gradient is not None and torch.equal(found[parameter], gradient), parameter  # type: ignore[arg-type]
    _, others = step(model, inputs(name), seed=4)
    assert not any(torch.equal(found[name], one) for name, one in others.items()), "signs and dropout are drawn anew"  # type: ignore[arg-type]


def test_48_layers_in_bfloat16_have_the_gradients_with_everything_kept_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.llama(num_hidden_layers=48, attention_dropout=0.2).to(torch.bfloat16)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = ReversibleLayer(layer, 4, stream_in=0, stream_out=None)
    _, found = step(model.train(), inputs("llama"))
    with everything_kept(monkeypatch):
        _, expected = step(model, inputs("llama"))
    for name, gradient in expected.items():
        assert gradient is not None and gradient.any() and torch.equal(found[name], gradient), name  # type: ignore[arg-type]


# ── The formula, without fixed point ─────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def by_the_formula(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this context layers take their steps in ordinary operations: x + γ (F(x) − 2 x + before) in place of F(x)."""
    last: list[tuple[Tensor, Tensor]] = []  # what the layer before returned, and what it was given

    def forward(self: ReversibleLayer, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        gamma = None
        if last and last[0][0] is x:
            gamma = (torch.randint(2, (len(x), 1, 1)) * 2 - 1) / 2**self.bits
        output = self.layer(x, *args, **kwargs)
        y = output if isinstance(output, Tensor) else output[0]
        if gamma is not None:
            y = y + gamma * (y - 2 * x + last[0][1])
        last[:] = [(y, x)]
        return y if isinstance(output, Tensor) else (y, *output[1:])

    with monkeypatch.context() as patch:
        patch.setattr(ReversibleLayer, "forward", forward)
        yield


@pytest.mark.parametrize(("name", "bits"), [("llama", 1), ("bert", 2), ("t5", 3)])
def test_a_training_step_is_the_formulas(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = reversible(name, bits).double()
    loss, found = step(model, inputs(name))
    with by_the_formula(monkeypatch):
        expected_loss, expected = step(model, inputs(name))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-7, atol=1e-8)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-5, atol=1e-7, msg=parameter)


def test_more_bits_are_nearer_to_the_dense_step() -> None:
    dense = copy.deepcopy(llama())
    expected = dense(input_ids=IDS, labels=IDS).loss
    gaps = []
    for bits in (1, 3, 6):
        model = reversible(bits=bits)
        for layer in model.model.layers:
            layer.layer.self_attn.attention_dropout = 0.0
        gaps.append(max(abs(float(step(model, inputs("llama") | {"attention_mask": torch.ones_like(IDS)}, seed)[0] - expected))
                        for seed in range(4)))  # fmt: skip
    assert gaps[0] > 2 * gaps[1] > 8 * gaps[2]


# ── What is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def peak(layers: int, bits: int = 0) -> int:
    """Bytes that a training step takes at most, without the gradients of the parameters."""
    model = tiny_models.llama(num_hidden_layers=layers, hidden_size=32, intermediate_size=96).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for index, layer in enumerate(model.model.layers if bits else []):
        model.model.layers[index] = ReversibleLayer(layer, bits, stream_in=0, stream_out=None).train()
    ids = IDS.repeat(4, 4)
    return peak_bytes(lambda: model(input_ids=ids, labels=ids).loss.backward())


def test_memory_hardly_grows_with_depth() -> None:
    assert peak(24) > 3 * peak(4)
    assert peak(24, bits=1) < 1.1 * peak(4, bits=1) < 1.1 * peak(4)


def test_nothing_is_kept_once_the_graph_is_gone() -> None:
    model = reversible("t5")
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            loss = model(**inputs("t5")).loss
            node, seen, found = [loss.grad_fn], set(), []
            while node:
                one = node.pop()
                if one is None or one in seen:
                    continue
                seen.add(one)
                found += [weakref.ref(one.chain)] if hasattr(one, "chain") else []
                node += [other for other, _ in one.next_functions]
            assert len(found) == 6 and all(one() is not None for one in found)
            if backward:
                loss.backward()
            del loss, node, seen, one
            assert all(one() is None for one in found)
    finally:
        gc.enable()


# ── How models are trained ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_under_autocast_the_gradients_are_the_same_in_it_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = reversible(), inputs("llama")

    def gradients(inside: bool) -> dict[str, Tensor | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**given).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    for inside in (False, True):
        with everything_kept(monkeypatch):
            expected = gradients(inside)
        for name, gradient in gradients(inside).items():
            assert gradient is not None and gradient.any() and torch.equal(gradient, expected[name]), name  # type: ignore[arg-type]


def test_a_cache_stays_empty_and_changes_nothing() -> None:
    model, given = reversible(), inputs("llama")
    _, expected = step(model, given | {"use_cache": False})
    cache = transformers.DynamicCache(config=model.config)
    _, found = step(model, given | {"use_cache": True, "past_key_values": cache})
    assert all(torch.equal(found[name], one) for name, one in expected.items())  # type: ignore[arg-type]
    assert cache.get_seq_length() == 0


def test_tokens_after_a_cache_train_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a prefix that is learned: keys and values before the first token."""
    model, dense = reversible(), copy.deepcopy(llama()).train()
    for layer in (*(one.layer for one in model.model.layers), *dense.model.layers):
        layer.self_attn.attention_dropout = 0.0

    def gradients(one: Any, prefix: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(3)
        cache = transformers.DynamicCache(prefix, config=one.config)
        logits = one(input_ids=IDS[:, 5:], past_key_values=cache, attention_mask=torch.ones_like(IDS)).logits
        return logits, list(torch.autograd.grad(logits.square().sum(), [part for pair in prefix for part in pair]))

    prefix = [(torch.randn(3, 2, 5, 4, requires_grad=True), torch.randn(3, 2, 5, 4, requires_grad=True)) for _ in range(4)]
    logits, found = gradients(model, prefix)
    with everything_kept(monkeypatch):
        expected_logits, expected = gradients(model, prefix)
    assert torch.equal(logits, expected_logits)
    assert all(one.any() and torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for layer in model.model.layers:
        layer.bits = 30
    with torch.no_grad():
        dense_logits = dense(IDS[:, 5:], past_key_values=transformers.DynamicCache(prefix, config=dense.config)).logits
    torch.testing.assert_close(gradients(model, prefix)[0], dense_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_checkpointed_too_have_the_same_gradients(reentrant: bool) -> None:
    model, given = reversible(), inputs("llama")
    _, expected = step(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, found = step(model, given)
    assert all(torch.equal(found[name], one) for name, one in expected.items())  # type: ignore[arg-type]


def test_a_gradient_of_a_value_from_inside_a_layer_is_an_error_with_the_reason() -> None:
    model, given = reversible(), inputs("llama")
    inside: list[Tensor] = []
    model.model.layers[1].layer.mlp.register_forward_hook(lambda module, args, output: inside.append(output))
    model(**given)
    with pytest.raises(RetrofitError) as raised:
        inside[0].sum().backward()
    assert raised.value.code == "inner-gradient"


def test_only_what_is_trained_gets_a_gradient() -> None:
    model, given = reversible(), inputs("llama")
    _, expected = step(model, given)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2.layer.mlp" in name)
    _, found = step(model, given)  # the chain begins where gradients do, so the signs are others
    assert {name for name, one in found.items() if one is not None} == {name for name in expected if "layers.2.layer.mlp" in name}


@pytest.mark.long
def test_a_compiled_model_trains_and_evaluates() -> None:
    model, given = reversible(), inputs("llama")
    _, expected = step(model, given)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    compiled(**given).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    torch.compiler.reset()
    model.eval()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(IDS, use_cache=False).logits, model(IDS).logits)


# ── Graphs of other forms ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows(nn.Module):
    """Layers of no library, whose code may change the stream before its last layer."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)]
        self.layers = nn.ModuleList(ReversibleLayer(layer, 2, stream_in=0, stream_out=None) for layer in layers)
        self.changes = changes

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [x]
        for index, layer in enumerate(self.layers):
            found.append(layer(2 * found[-1] if self.changes and index == 4 else found[-1]))
        return found


ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def of_rows(model: Rows, choose: Any, **how: Any) -> list[Tensor | None]:
    torch.manual_seed(5)
    x = ROWS.clone().requires_grad_()
    return list(torch.autograd.grad(choose(model(x)), [x, *model.parameters()], allow_unused=True, **how))


@pytest.mark.parametrize("changes", [False, True])
def test_any_of_the_streams_may_have_a_gradient(changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Rows(changes).train()
    for choose in (
        lambda one: one[-1].sum(),
        lambda one: one[3].square().sum(),
        lambda one: (one[2] * one[4]).sum() + one[1].sum(),
    ):
        found = of_rows(model, choose)
        with everything_kept(monkeypatch):
            kept = of_rows(model, lambda one, choose=choose: choose(one) + 0 * one[-1].sum())
        for one, other in zip(found, kept, strict=True):
            assert (one is None and not other.any()) or torch.equal(one, other)  # type: ignore[union-attr,arg-type]


def test_a_stream_that_was_changed_or_read_twice_begins_another_chain() -> None:
    torch.manual_seed(0)
    layers = Rows().train().layers

    def goes_on(x: Tensor, y: Tensor) -> bool:
        return y.grad_fn.chain is x.grad_fn.chain  # type: ignore[union-attr,no-any-return]

    first = layers[0](ROWS)
    second = layers[1](first)
    assert goes_on(first, second) and goes_on(second, layers[2](second))
    assert not goes_on(first, layers[1](first)), "the chain has gone on from there"
    third = layers[1](layers[0](ROWS))
    assert layers[2](third.view_as(third)).grad_fn.chain is third.grad_fn.chain, "what a hook leaves as it is"
    fourth = layers[1](layers[0](ROWS))
    with torch.no_grad():
        fourth.mul_(2)
    assert not goes_on(fourth, layers[2](fourth))
    assert layers[2](third + 0).grad_fn.chain is not third.grad_fn.chain


def test_what_cannot_be_computed_again_is_an_error_with_the_reason() -> None:
    torch.manual_seed(0)
    model = Rows().train()
    x = ROWS.clone().requires_grad_()
    total = model(x)[-1].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RetrofitError) as raised:
        total.backward()
    assert raised.value.code == "second-backward"
    total = model(x)[-1].sum()
    with torch.no_grad():
        model.layers[2].layer[0].weight.mul_(1.5)  # type: ignore[index,union-attr]
    with pytest.raises(RetrofitError) as raised:
        total.backward()
    assert raised.value.code == "not-reproduced"


class Shifted(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return (x + by).tanh()


def test_an_argument_that_was_changed_is_an_error() -> None:
    layer = ReversibleLayer(Shifted(), 1, stream_in=0, stream_out=None).train()
    by, x = torch.ones(8), ROWS.clone().requires_grad_()
    y = layer(x, by)
    by.zero_()
    with pytest.raises(RetrofitError) as raised:
        y.sum().backward()
    assert raised.value.code == "changed-in-place"


def test_infinities_are_not_hidden() -> None:
    model = Rows().train()
    x = ROWS.clone()
    x[1, 2] = float("nan")
    assert model(x)[-1].isnan().all(-1).tolist() == [False, True, False]


class Noting(nn.Module):
    """Notes how its input is laid out in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 3), list[tuple[int, ...]]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.stride())
        return x + torch.tanh(self.linear(x))


def test_a_stream_keeps_its_layout_there_and_back() -> None:
    """How a product rounds depends on it, and so does which code of torch computes the gradient of what comes before and after."""
    layers = [Noting() for _ in range(3)]
    x = torch.randn(2, 3, 5, requires_grad=True).transpose(1, 2)
    y = x
    for layer in layers:
        y = ReversibleLayer(layer, 4, stream_in=0, stream_out=None).train()(y)
    assert y.stride() == x.stride() == (15, 1, 5)
    y.square().sum().backward()
    assert [layer.seen for layer in layers] == [[x.stride()] * 2] * 3
