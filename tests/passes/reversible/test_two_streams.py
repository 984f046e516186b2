"""Two streams: against loops over a model's own modules, against the same network with everything kept, and what they cannot do."""

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
from support.own_models import Own
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import retrofit
from retrofit.errors import RetrofitError
from retrofit.inputs.model_memory import peak_bytes
from retrofit.passes import Reversible
from retrofit.passes.reversible import reference, two_streams
from retrofit.passes.reversible.branch_calls import BranchCall, Following
from retrofit.passes.reversible.repeated_call import Returned
from retrofit.passes.reversible.two_streams import SecondStream, TwoStreamLayer, TwoStreamStep, two_stream_layers
from retrofit.surgery.auxiliary_losses import auxiliary_losses, record_auxiliary_loss

IDS = torch.randint(5, 40, (3, 9), generator=torch.Generator().manual_seed(0))
PASS = Reversible(scheme="terraformer")


@functools.cache
def dense(name: str, **options: Any) -> Any:
    if name == "llama":
        return tiny_models.llama(num_hidden_layers=3, attention_dropout=0.2, **options)
    return tiny_models.t5(num_layers=2, dropout_rate=0.2)


@functools.cache
def rewritten(name: str, *inside: str) -> Any:
    return retrofit.apply(copy.deepcopy(dense(name)), *inside, PASS, verify=False)


def inputs(name: str) -> dict[str, Tensor]:
    mask = torch.ones_like(IDS)
    mask[1, 6:] = 0
    return {"input_ids": IDS, "attention_mask": mask, "labels": IDS}


def step(model: Any, given: dict[str, Any], seed: int = 3, **how: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of a training step, and the gradients."""
    model.train().zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**given, **how).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# ── Loops over the modules of a model ────────────────────────────────────────────────────────────────────────────────────────────


def llama_in_loop(model: Any, ids: Tensor, share: float = 1.0) -> Tensor:
    """The logits, layer by layer: y1 = x1 + f(x2), y2 = x2 + g(y1), each on the way from the dense layer by `share`."""
    older = newer = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(newer, torch.arange(ids.shape[1])[None])
    for layer in model.model.layers:
        read = layer.input_layernorm(newer)
        added = layer.self_attn(hidden_states=read, position_embeddings=rotary, attention_mask=None)[0]
        older, newer = newer, (1 - share) * newer + share * older + added
        added = layer.mlp(layer.post_attention_layernorm(newer))
        older, newer = newer, (1 - share) * newer + share * older + added
    return model.lm_head(model.model.norm((1 - share / 2) * newer + share / 2 * older))  # type: ignore[no-any-return]


def t5_decoder_in_loop(model: Any, ids: Tensor, states: Tensor) -> Tensor:
    """What the decoder returns: three swaps a layer."""
    older = newer = model.shared(ids)
    mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), torch.finfo(newer.dtype).min).triu(1).to(newer)
    bias, crossing = None, None
    for block in model.decoder.block:
        block = getattr(block, "layer", block) if isinstance(block, TwoStreamLayer) else block
        attention, cross, feed_forward = block.layer
        out = attention.SelfAttention(attention.layer_norm(newer), mask=mask, position_bias=bias)
        bias = out[1]
        older, newer = newer, older + out[0]
        out = cross.EncDecAttention(cross.layer_norm(newer), key_value_states=states, position_bias=crossing)
        crossing = out[1]
        older, newer = newer, older + out[0]
        older, newer = newer, older + feed_forward.DenseReluDense(feed_forward.layer_norm(newer))
    return model.decoder.final_layer_norm((older + newer) / 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@torch.no_grad()
def test_a_decoder_is_the_loop_over_its_branches_anywhere_on_the_dial(share: float) -> None:
    model = copy.deepcopy(rewritten("llama")).eval()
    SecondStream().turn(model, share)
    torch.testing.assert_close(model(IDS).logits, llama_in_loop(dense("llama").eval(), IDS, share), rtol=1e-5, atol=1e-5)
    if not share:
        assert torch.equal(model(IDS).logits, dense("llama")(IDS).logits)


@torch.no_grad()
def test_a_decoder_with_two_attentions_has_three_swaps_a_layer() -> None:
    model = rewritten("t5").eval()
    assert [len(layer.swaps.sums) for layer in two_stream_layers(model)] == [2, 2, 3, 3]
    assert [layer.swaps.closes for layer in two_stream_layers(model)] == [False, True] * 2
    states = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(4))
    found = model.decoder(input_ids=IDS, encoder_hidden_states=states).last_hidden_state
    torch.testing.assert_close(found, t5_decoder_in_loop(dense("t5").eval(), IDS, states), rtol=1e-5, atol=1e-5)


def test_the_gradient_is_that_of_the_loop() -> None:
    model, loop = copy.deepcopy(rewritten("llama")).double().train(), copy.deepcopy(dense("llama")).double()
    for layer in (*(one.layer for one in two_stream_layers(model)), *loop.model.layers):
        layer.self_attn.attention_dropout = 0.0
    weights = torch.randn(3, 9, tiny_models.VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad((model(IDS).logits * weights).sum(), list(model.parameters()))
    expected = torch.autograd.grad((llama_in_loop(loop, IDS) * weights).sum(), list(loop.parameters()))
    for (name, _), one, other in zip(model.named_parameters(), found, expected, strict=True):
        assert float((one - other).abs().max()) < 1e-6 * float(other.abs().max()), name  # its norms round to float32


# ── The same network with everything kept ────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def everything_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this context the backward pass uses the graph of each layer's first run, and no branch runs twice."""

    def first(self: BranchCall, x: Tensor, following: Following) -> Returned:
        self.values = [one.detach() for one in self.given]
        leaves, streams, values = [one.detach().requires_grad_() for one in self.given], [], []
        recorded: list[list[Tensor]] = []

        def ended(number: int, value: Tensor) -> Tensor:
            values.append(value)
            self.counts.append(len(recorded[0]))
            streams.append(following(number, value.detach()).requires_grad_())
            return streams[-1]

        streams.append(x.clone().requires_grad_())
        with torch.enable_grad():
            output, known, losses = self.run_branches(streams[0], leaves, ended, recorded)
        self.recorded = len(losses)
        known |= {id(one): one for one in leaves}
        self.__dict__["kept"] = streams, values, (output, known, losses), leaves
        known = known | {id(one): original for one, original in zip(leaves, self.given, strict=True)}
        returned = Returned(output, self.stream_out, known, losses)
        returned.tensors = [one.detach() for one in returned.tensors]
        self.given = []
        return returned

    def branch(self: BranchCall, number: int, x: Tensor, with_graph: bool = True) -> Any:
        streams, values, (output, known, losses), leaves = self.__dict__["kept"]
        assert torch.equal(x, streams[number]), "the stream that was reversed is the one it had"
        first = self.counts[number - 1] if number else 0
        returned = Returned(output, self.stream_out, known, losses[first : self.counts[number]])
        if number:  # what else is returned is of the first branch: a bias of positions
            returned.tensors[1:] = [one.detach() for one in returned.tensors[1 : len(returned.tensors) - returned.losses]] + (
                returned.tensors[len(returned.tensors) - returned.losses :]
            )
        x.__dict__["leaf"] = streams[number]
        return values[number], returned, leaves

    def gradients_of(results: Any, wanted: list[Tensor], parameters: Any) -> list[Any]:
        if not results:
            return [None] * len(wanted)
        values, gradients = [one for one, _ in results], [of for _, of in results]
        leaves = [one.__dict__.get("leaf", one) for one in wanted]
        return list(torch.autograd.grad(values, leaves, gradients, allow_unused=True, retain_graph=True))

    with monkeypatch.context() as patch:
        patch.setattr(BranchCall, "first_of_branches", first)
        patch.setattr(BranchCall, "branch", branch)
        patch.setattr("retrofit.passes.reversible.two_streams.gradients_of", gradients_of)
        yield


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ("llama", "t5") for dtype in (torch.float32, torch.bfloat16)]
    + [("t5", torch.float16)],  # its code clamps the stream
)
def test_gradients_are_those_with_everything_kept_bit_for_bit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(rewritten(name)).to(dtype)
    loss, found = step(model, inputs(name))
    with everything_kept(monkeypatch):
        expected_loss, expected = step(model, inputs(name))
    assert torch.equal(loss, expected_loss)
    for parameter, gradient in expected.items():
        assert gradient is not None and gradient.any() and torch.equal(found[parameter], gradient), parameter  # type: ignore[arg-type]
    _, others = step(model, inputs(name), seed=4)
    assert not any(torch.equal(found[name], one) for name, one in others.items()), "dropout is drawn anew"  # type: ignore[arg-type]


def test_in_half_precision_a_stream_may_be_clamped_where_nothing_is_reversed() -> None:
    model = copy.deepcopy(rewritten("t5")).half()
    with torch.no_grad():
        model.decoder.block[0].layer.layer[0].SelfAttention.o.weight.fill_(6e4)
        logits = model.eval()(**inputs("t5")).logits
    assert logits.isfinite().all()
    with pytest.raises(RetrofitError) as raised:
        step(model, inputs("t5"))
    assert raised.value.code == "clamped"


@pytest.mark.long
def test_a_model_in_half_precision_whose_code_clamps_the_stream_is_rewritten() -> None:
    (planned,) = retrofit.plan_of(copy.deepcopy(dense("t5")).half(), PASS).passes
    assert len(planned.plan.sites) == 2 and not planned.plan.near_misses


def test_under_autocast_the_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = copy.deepcopy(rewritten("llama")), inputs("llama")
    with torch.autocast("cpu", torch.bfloat16):
        _, found = step(model, given)
        with everything_kept(monkeypatch):
            _, expected = step(model, given)
    assert all(one.any() and torch.equal(one, found[name]) for name, one in expected.items())  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    "inside", ["shared-moe(experts=3, groups=0)", pytest.param("sparse-ffn(sparsity=4)", marks=pytest.mark.long)]
)
def test_other_methods_inside_have_the_gradients_of_the_formula(inside: str) -> None:
    """With noise on the decisions, and losses of their own that are recorded in the layers."""
    model = copy.deepcopy(rewritten("llama", inside)).double()
    observed: Any = type("Observed", (), {"sites": [type("Site", (), {"module": one}) for one in two_stream_layers(model)]})
    loss, found = step(model, inputs("llama"))
    with reference.swaps_kept(observed):
        expected_loss, expected = step(model, inputs("llama"))
    torch.testing.assert_close(loss, expected_loss)
    assert set(found) == set(expected)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-7, msg=lambda said, name=name: f"{name}: {said}")


class RecordsItself(LlamaDecoderLayer):
    """A layer whose own code, not a part of it, records a loss for each branch."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + record_auxiliary_loss(attended, attended.square().mean(), self)
        made = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + record_auxiliary_loss(made, made.pow(4).mean().sqrt(), self)


def test_a_branch_has_the_losses_that_the_layers_own_code_records_for_it_alone() -> None:
    model = copy.deepcopy(dense("llama"))
    for layer in model.model.layers:
        layer.__class__ = RecordsItself
    model = retrofit.apply(model, PASS, verify=False).double()
    observed: Any = type("Observed", (), {"sites": [type("Site", (), {"module": one}) for one in two_stream_layers(model)]})

    def gradients() -> tuple[list[float], dict[str, Tensor | None]]:
        model.train().zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with auxiliary_losses() as losses:
            loss = model(**inputs("llama")).loss
        (loss + sum(losses)).backward()
        return [float(one.detach()) for one in losses], {name: one.grad for name, one in model.named_parameters()}

    found_losses, found = gradients()
    with reference.swaps_kept(observed):
        expected_losses, expected = gradients()
    assert len(found_losses) == 6 and found_losses == pytest.approx(expected_losses)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-7, msg=lambda said, name=name: f"{name}: {said}")


def test_a_branch_runs_twice_in_a_step_and_only_on_its_own_stream() -> None:
    """Parts of other branches are not called for it: each part of a layer is called twice in all."""
    model, calls = copy.deepcopy(rewritten("t5")).train(), dict[str, int]()

    def counting(path: str) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            calls[path] = calls.get(path, 0) + 1

        return hook

    for path, module in model.named_modules():
        if "block" in path and not list(module.children()) and "dropout" not in path:
            module.register_forward_hook(counting(path))
    classes = {path: type(module) for path, module in model.named_modules()}
    model(**inputs("t5")).loss.backward()
    assert calls and set(calls.values()) == {2}
    assert {path: type(module) for path, module in model.named_modules()} == classes


def by_hand(layers: int, width: int, **sizes: Any) -> Any:
    """A decoder whose layers were put on two streams without any analysis."""
    model = tiny_models.llama(num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, **sizes).train()
    parts = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
    for index, layer in enumerate(model.model.layers):
        closes = index == layers - 1
        model.model.layers[index] = TwoStreamLayer(layer, width, (1, 1), parts, stream_in=0, stream_out=None, closes=closes).train()
    return model


def test_48_layers_in_bfloat16_have_the_gradients_with_everything_kept_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_hand(48, 16, attention_dropout=0.2).to(torch.bfloat16)
    _, found = step(model, inputs("llama"))
    with everything_kept(monkeypatch):
        _, expected = step(model, inputs("llama"))
    for name, gradient in expected.items():
        assert gradient is not None and gradient.any() and torch.equal(found[name], gradient), name  # type: ignore[arg-type]


def peak(layers: int) -> int:
    """Bytes that a training step takes at most, without the gradients of the parameters."""
    model = by_hand(layers, 32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = IDS.repeat(4, 4)
    return peak_bytes(lambda: model(input_ids=ids, labels=ids).loss.backward())


def test_memory_does_not_grow_with_depth() -> None:
    assert peak(24) < 1.03 * peak(4)


def test_nothing_is_kept_once_the_graph_is_gone() -> None:
    model = rewritten("t5").train()
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            loss = model(**inputs("t5")).loss
            pending, seen, found = [loss.grad_fn], set(), []
            while pending:
                one = pending.pop()
                if one is None or one in seen:
                    continue
                seen.add(one)
                found += [weakref.ref(one.chain)] if hasattr(one, "chain") else []
                pending += [other for other, _ in one.next_functions]
            assert len({id(one()) for one in found}) == 2 and len(found) == 4
            if backward:
                loss.backward()
            del loss, pending, seen, one
            assert all(one() is None for one in found)
    finally:
        gc.enable()


# ── How models are trained ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_stays_empty_and_a_prefix_in_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(rewritten("llama"))
    _, expected = step(model, inputs("llama"), use_cache=False)
    cache = transformers.DynamicCache(config=model.config)
    _, found = step(model, inputs("llama"), use_cache=True, past_key_values=cache)
    assert all(torch.equal(found[name], one) for name, one in expected.items())  # type: ignore[arg-type]
    assert cache.get_seq_length() == 0

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        filled = transformers.DynamicCache(prefix, config=model.config)
        logits = model(input_ids=IDS[:, 5:], past_key_values=filled, attention_mask=torch.ones_like(IDS)).logits
        return torch.autograd.grad(logits.square().sum(), [part for pair in prefix for part in pair])

    prefix = [tuple(torch.randn(3, 2, 5, 4, requires_grad=True) for _ in range(2)) for _ in range(3)]
    found_gradients = gradients()
    with everything_kept(monkeypatch):
        expected_gradients = gradients()
    assert all(one.any() and torch.equal(one, other) for one, other in zip(found_gradients, expected_gradients, strict=True))


def test_only_what_is_trained_gets_a_gradient() -> None:
    model = copy.deepcopy(rewritten("llama"))
    _, expected = step(model, inputs("llama"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.layer.mlp" in name)
    _, found = step(model, inputs("llama"))
    for name, gradient in found.items():
        if "layers.1.layer.mlp" in name:
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)  # the first layer runs as evaluated
        else:
            assert gradient is None, name


def test_what_cannot_be_computed_again_is_an_error_with_the_reason() -> None:
    model = copy.deepcopy(rewritten("llama")).train()
    loss = model(**inputs("llama")).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RetrofitError) as raised:
        loss.backward()
    assert raised.value.code == "second-backward"
    loss = model(**inputs("llama")).loss
    with torch.no_grad():
        model.model.layers[1].layer.mlp.down_proj.weight.mul_(1.5)
    with pytest.raises(RetrofitError) as raised:
        loss.backward()
    assert raised.value.code == "not-reproduced"


# ── The check, the dial ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def method(model: Any) -> Any:
    return next(check for check in retrofit.verify(model.eval()).checks if check.name == "method")


@pytest.mark.long
def test_the_check_method_finds_a_wrong_swap_and_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(rewritten("llama"))
    SecondStream().turn(model, 0.5)
    assert "its output is" in str(method(model))
    SecondStream().turn(model, 1.0)

    def without_the_older(ctx: Any, gradient: Tensor, *others: Any) -> Any:
        found = list(backward(ctx, gradient, *others))
        if found[4].shape[-1] == 32:
            found[4] = torch.cat([found[4][..., :16], torch.zeros_like(found[4][..., 16:])], -1)
        return tuple(found)

    backward = TwoStreamStep.backward
    with monkeypatch.context() as patch:
        patch.setattr(TwoStreamStep, "backward", staticmethod(without_the_older))
        assert "the gradient of" in str(method(model))
    with monkeypatch.context() as patch:
        patch.setattr(two_streams, "two_stream_call", lambda layer, swaps, args, kwargs: dense_call(layer, swaps, args, kwargs))
        assert "in training" in str(method(model))


def dense_call(layer: nn.Module, swaps: Any, args: Any, kwargs: Any) -> Any:
    """The dense layer, on the newer stream."""
    x = args[0][..., :16]
    y = layer(x, *args[1:], **kwargs)
    return y if swaps.closes else torch.cat([y, x], -1)


def test_its_dial_leads_from_the_dense_stacks() -> None:
    from retrofit.training.recovery import start_dials
    from retrofit.training.teacher import Teacher

    model, teacher = copy.deepcopy(rewritten("llama")).eval(), copy.deepcopy(dense("llama")).eval()
    found = Teacher.of(teacher, model)
    assert start_dials(found, lambda: model(IDS)) == ["model"]
    with torch.no_grad():
        for share, same in ((0.0, True), (0.5, False)):
            with found.sites.mixed(share):
                assert torch.equal(model(IDS).logits, teacher(IDS).logits) == same
        assert all(layer.share == 1 for layer in two_stream_layers(model))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_layers_that_are_checkpointed_too_have_the_same_gradients(share: float, reentrant: bool) -> None:
    model, given = copy.deepcopy(rewritten("llama")), inputs("llama")
    for layer in two_stream_layers(model):
        layer.share = share
    _, expected = step(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, found = step(model, given)
    for name, gradient in expected.items():
        assert gradient is not None and gradient.any() and torch.equal(found[name], gradient), name  # type: ignore[arg-type]


class AnotherKernel(nn.Module):
    """Rounds otherwise where a gradient is wanted, as some of torch's operations do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * (1 + 1e-5) if y.requires_grad else y


@pytest.mark.parametrize("scheme", ["terraformer", "exact"])
@pytest.mark.parametrize("depth", [3, 1], ids=["all layers have a gradient", "the last two have none"])
def test_every_run_of_a_layer_is_by_the_kernels_that_a_gradient_asks_for(scheme: str, depth: int) -> None:
    model = copy.deepcopy(dense("llama"))
    for layer in model.model.layers:
        layer.mlp = AnotherKernel(layer.mlp)
    retrofit.apply(model, Reversible(scheme=scheme), verify=False)
    model.train()
    kept: list[Tensor] = []
    model.model.layers[depth - 1].register_forward_hook(lambda module, args, output: kept.append(output))
    model(input_ids=IDS)
    kept[0].sum().backward()  # raises where a stream is not the one that it was
    assert model.model.embed_tokens.weight.grad is not None


def test_layers_that_run_in_the_code_of_the_model_itself() -> None:
    model = retrofit.apply(Own(), PASS)  # verified: the site is the whole model
    assert len(two_stream_layers(model)) == 3
