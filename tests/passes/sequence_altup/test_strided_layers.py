"""The wrapped layer by itself, against plain loops over tokens written from Alg. 2 of the supplement."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from retrofit.errors import DoesNotFitError
from retrofit.passes.sequence_altup.arguments import LayerCall, TokenDims, infer_token_dims
from retrofit.passes.sequence_altup.strided_layers import (
    AveragePoolingLayer,
    ComputedTokens,
    SequenceAltUpLayer,
    StrideAndSkipLayer,
)

D = 4
DIMS = {
    ("mask",): TokenDims(4, (2, 3), 0, shows_padding=True),
    ("positions",): TokenDims(2, (1,), 0),
}


class Attention(nn.Module):
    """x + attention(x), with positions added to the queries and keys, and a mask that is a boolean, added, or none (causal)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> tuple[Tensor, str]:
        q, k, v = self.qkv(x).chunk(3, -1)
        if positions is not None:
            q, k = (z + torch.sin(positions.unsqueeze(-1) * torch.arange(1, D + 1) / 7) for z in (q, k))
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask, is_causal=mask is None)
        return x + y[:, 0], "the rest"


def wrapped(kind: Any, k: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layer = kind(Attention().double(), k, stream_in=0, stream_out=0, token_dims=DIMS)
    with torch.no_grad():
        for parameter in layer.parameters(recurse=False):
            parameter.add_(torch.rand_like(parameter))
    return layer


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def alone(layer: Any, x: Tensor, positions: Tensor, causally: bool, share: float = 0.0) -> Tensor:
    """Alg. 2, one token after the other, for one sequence without padding, a share of the others computed as well: (T, d)."""
    length = len(x)
    kept = [i for i in range(length) if i % layer.k == 0 or i * (5**0.5 - 1) / 2 % 1 < share]
    own = [max(anchor for anchor in kept if anchor <= i) for i in range(length)]
    windows = [[i for i in range(length) if own[i] == anchor] for anchor in kept]
    seen = torch.stack([x[one].mean(0) if isinstance(layer, AveragePoolingLayer) else x[one[0]] for one in windows])
    a1, a2, b = ((1 - share) * value + share * dense for value, dense in zip(scalars(layer), (1, 0, 1), strict=True))
    mask = causal(len(kept)) if causally else None
    full = torch.ones(1, 1, len(kept), len(kept), dtype=torch.bool) if mask is None else mask
    made = layer.layer(seen[None], full, positions[kept][None])[0][0]
    rows = []
    for i in range(length):
        computed = made[kept.index(own[i])]
        if isinstance(layer, AveragePoolingLayer):
            rows.append(computed)
        elif isinstance(layer, StrideAndSkipLayer):
            rows.append(computed if i in kept else x[i])
        else:
            predicted = a1 * x[i] + a2 * x[own[i]]
            at_anchor = a1 * x[own[i]] + a2 * x[own[i]]
            rows.append(predicted + b * (computed - at_anchor))
    return torch.stack(rows)


def scalars(layer: Any) -> tuple[Any, Any, Any]:
    return (layer.a1, layer.a2, layer.b) if isinstance(layer, SequenceAltUpLayer) else (1, 0, 1)


KINDS = [SequenceAltUpLayer, StrideAndSkipLayer, AveragePoolingLayer]


@given(length=st.integers(1, 13), k=st.integers(1, 15), kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_without_padding_it_is_algorithm_2(length: int, k: int, kind: Any, seed: int) -> None:
    layer = wrapped(kind, k, seed)
    x, positions = torch.randn(2, length, D, dtype=torch.double), torch.arange(3, 3 + length).expand(2, -1)
    causally = kind is not AveragePoolingLayer
    mask = None if causally else torch.ones(2, 1, length, length, dtype=torch.bool)
    y, rest = layer(x, mask, positions=positions)
    expected = torch.stack([alone(layer, row, positions[0], causally) for row in x])
    torch.testing.assert_close(y, expected)
    assert rest == "the rest"


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=4),
    k=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
    added=st.booleans(),
    share=st.just(0.0) | st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=80)
def test_padding_on_either_side_changes_nothing(lengths: Any, k: int, kind: Any, added: bool, share: float, seed: int) -> None:
    layer, causally = wrapped(kind, k, seed), kind is not AveragePoolingLayer
    layer.dense_share = share
    width = max(sum(one) for one in lengths)
    x = torch.randn(len(lengths), width, D, dtype=torch.double)
    real = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (left, length, _) in enumerate(lengths):
        real[row, left : left + length] = True
    positions = (real.cumsum(1) - 1).clamp(min=0)
    mask: Tensor = real[:, None, None, :] & (causal(width) if causally else torch.ones(width, width, dtype=torch.bool))
    if added:
        mask = torch.zeros_like(mask, dtype=torch.double).masked_fill(~mask, torch.finfo(torch.double).min)
    y, _ = layer(x, mask, positions=positions)
    assert bool(y[real].isfinite().all())
    for row in range(len(lengths)):
        expected = alone(layer, x[row, real[row]], positions[row, real[row]], causally, share)
        torch.testing.assert_close(y[row, real[row]], expected)


@given(length=st.integers(1, 13), k=st.integers(1, 6), kind=st.sampled_from(KINDS), share=st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=40)
def test_its_dial_goes_from_the_dense_layer_to_algorithm_2(length: int, k: int, kind: Any, share: float) -> None:
    layer, dial = wrapped(kind, k), ComputedTokens()
    x, positions = torch.randn(2, length, D, dtype=torch.double), torch.arange(length).expand(2, -1)
    causally = kind is not AveragePoolingLayer
    mask = None if causally else torch.ones(2, 1, length, length, dtype=torch.bool)
    installed = layer(x, mask, positions=positions)[0]
    assert dial.fits(layer) and not dial.fits(layer.layer)
    dial.turn(layer, 0.0)
    torch.testing.assert_close(layer(x, mask, positions=positions)[0], layer.layer(x, mask, positions=positions)[0])
    dial.turn(layer, share)
    expected = torch.stack([alone(layer, row, positions[0], causally, 1.0 - share) for row in x])
    torch.testing.assert_close(layer(x, mask, positions=positions)[0], expected)
    dial.turn(layer, 1.0)
    assert torch.equal(layer(x, mask, positions=positions)[0], installed)


def test_while_it_is_annealed_it_takes_no_cache() -> None:
    layer = wrapped(SequenceAltUpLayer, 2)
    ComputedTokens().turn(layer, 0.5)
    with pytest.raises(DoesNotFitError) as error:
        layer(torch.randn(1, 4, D, dtype=torch.double), cache=DynamicCache())
    assert "use_cache=False" in error.value.remedy


def test_gradients_reach_everything_through_padding() -> None:
    layer = wrapped(SequenceAltUpLayer, 3)
    x = torch.randn(2, 8, D, dtype=torch.double, requires_grad=True)
    real = torch.tensor([[False] * 5 + [True] * 3, [True] * 8])
    y, _ = layer(x, real[:, None, None, :] & causal(8), positions=real.long().cumsum(1))
    y[real].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any()), name
    assert x.grad is not None and not bool(x.grad[~real].any())


def test_at_the_start_k_1_is_the_layer_and_a2_waits_for_b() -> None:
    torch.manual_seed(0)
    layer = SequenceAltUpLayer(Attention().double(), 1, stream_in=0, stream_out=0, token_dims=DIMS)
    x = torch.randn(2, 5, D, dtype=torch.double)
    torch.testing.assert_close(layer(x)[0], layer.layer(x)[0])
    assert [(p.item(), tuple(p.shape)) for p in (layer.a1, layer.a2, layer.b)] == [(1, (1,)), (0, (1,)), (1, (1,))]
    strided = SequenceAltUpLayer(Attention().double(), 3, stream_in=0, stream_out=0, token_dims=DIMS)
    strided(x)[0].square().sum().backward()
    assert float(strided.a2.grad.abs()) < 1e-12 < float(strided.a1.grad.abs()) and float(strided.b.grad.abs()) > 1e-6  # type: ignore[union-attr]


def test_the_layer_gets_anchors_only() -> None:
    layer, calls = wrapped(SequenceAltUpLayer, 4), []
    layer.layer.register_forward_pre_hook(lambda module, args: calls.append([tuple(value.shape) for value in args]))
    layer(torch.randn(2, 10, D, dtype=torch.double), torch.ones(1, 1, 10, 10, dtype=torch.bool), torch.arange(10)[None])
    assert calls == [[(2, 3, D), (1, 1, 3, 3), (1, 3)]]


def test_an_argument_nobody_knows_is_refused() -> None:
    layer = wrapped(StrideAndSkipLayer, 2)
    with refused(DoesNotFitError, "states", "(1, 4, 4)"):
        layer(torch.randn(1, 4, D, dtype=torch.double), states=torch.zeros(1, 4, 4))
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool) & torch.tensor([0, 1, 1, 1]).bool()
    layer.token_dims[("table",)] = TokenDims(2, (0,), None)
    with refused(DoesNotFitError, f"(4, {D})"):
        layer(torch.randn(2, 4, D, dtype=torch.double), mask, table=torch.zeros(4, D))


def test_integers_that_are_passed_on_follow_the_tokens() -> None:
    """Some models hand their labels to every layer, which has no name for them."""
    x, labels = torch.randn(2, 5, D, dtype=torch.double), torch.arange(10).view(2, 5)
    call = LayerCall.read((x,), {"labels": labels}, ("x", "mask"), ("x",), {})
    assert torch.equal(call.tensors[("labels",)][0], labels)
    assert call.tensors[("labels",)][1].positions == (1,)
    for name, value in {"mask": labels, "others": labels[:, :4], "values": x}.items():
        with refused(DoesNotFitError, name):
            LayerCall.read((x,), {name: value}, ("x", "mask"), ("x",), {})


def test_what_follows_the_tokens_is_learnt_from_two_calls() -> None:
    one = {("x",): (2, 11, 8), ("mask",): (2, 1, 11, 11), ("alibi",): (6, 1, 11), ("cos", 0): (1, 11, 8), ("bias",): (11, 8)}
    two = {("x",): (4, 19, 8), ("mask",): (4, 1, 19, 19), ("alibi",): (12, 1, 19), ("cos", 0): (1, 19, 8), ("bias",): (11, 8)}
    sizes = [{path: torch.Size(size) for path, size in shapes.items()} for shapes in (one, two)]
    found = infer_token_dims(sizes[0], sizes[1], ("x",))
    assert {path[0]: (how.positions, how.batch) for path, how in found.items()} == {
        "x": ((1,), 0),
        "mask": ((2, 3), 0),
        "alibi": ((2,), 0),
        "cos": ((1,), None),
        "bias": ((), None),
    }


def test_heads_may_be_folded_into_the_rows() -> None:
    """A bias (batch · heads, 1, keys), as ALiBi's, keeps each row's own anchors."""
    from retrofit.passes.sequence_altup.arguments import take

    bias = torch.arange(2 * 3 * 5).view(6, 1, 5)
    taken = take(bias, 2, torch.tensor([[0, 2], [1, 3]]), 0)
    assert torch.equal(taken, torch.cat([bias[:3, :, [0, 2]], bias[3:, :, [1, 3]]]))


def test_it_can_be_copied_and_pickled() -> None:
    layer = wrapped(SequenceAltUpLayer, 3)
    x = torch.randn(1, 7, D, dtype=torch.double)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x)[0], layer(x)[0])
