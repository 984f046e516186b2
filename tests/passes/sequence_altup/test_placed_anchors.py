"""Anchors as an exported decoder carries them: tensors whose sizes follow from the number of tokens; unused entries are hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from retrofit.errors import DoesNotFitError
from retrofit.passes.sequence_altup.anchor_cache import PlacedAnchorLayer
from retrofit.passes.sequence_altup.arguments import TokenDims
from retrofit.passes.sequence_altup.growing_anchors import GrowingAnchorLayer
from retrofit.passes.sequence_altup.strided_layers import SequenceAltUpLayer

D, K, PADS = 4, 3, (0, 5)
MASK = ("mask",)


class CachedAttention(nn.Module):
    """x + attention(x) over the keys of a cache; the mask is a boolean, and without one every key is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        q, k, v = (z[:, None] for z in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = cache.update(k, v, 0)
        return x + F.scaled_dot_product_attention(q, k, v, mask)[:, 0]


def strided(mask: bool = True) -> Any:
    torch.manual_seed(0)
    dims = {MASK: TokenDims(4, (2, 3), 0, shows_padding=True)} if mask else {}
    layer = SequenceAltUpLayer(
        CachedAttention(), K, name="layer", token_dims=dims, mask_argument=(MASK, torch.bool) if mask else None
    )
    with torch.no_grad():
        for parameter in layer.parameters(recurse=False):
            parameter.add_(torch.rand_like(parameter))
    return layer.eval()


def causal(real: Tensor, queries: int) -> Tensor:
    """The mask of the last `queries` of the tokens."""
    length = real.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None, -queries:] & real[:, None, None, :]


def prompt(length: int) -> tuple[Tensor, Tensor]:
    """A batch whose rows begin with different amounts of padding, and which of its tokens are real."""
    x = torch.randn(len(PADS), length, D, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(length) >= torch.tensor(PADS)[:, None]


def states_after(layer: Any, x: Tensor, real: Tensor) -> tuple[GrowingAnchorLayer, dict[str, Tensor]]:
    """What a decoder carries after the prompt, computed by a program's own cache layer."""
    cache = DynamicCache()
    with torch.no_grad():
        layer(x[:, :1], causal(real[:, :1] | True, 1), cache=cache)
        template: Any = cache.layers[0]
        states, start = {}, 0
        for end in (4, x.shape[1]):
            cache = placed_cache(template, states)
            layer(x[:, start:end], causal(real[:, :end], end - start), cache=cache)
            states, start = cache.layers[0].carried(), end  # type: ignore[attr-defined]
    return template, states


def placed_cache(template: GrowingAnchorLayer, states: dict[str, Tensor]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers.append(template.carrying(states))
    return cache


@pytest.mark.parametrize("length", [9, 10, 12, 13])
def test_a_step_without_a_mask_sees_what_the_row_stores_and_no_more(length: int) -> None:
    """Models omit the mask once the padding has left their window. Each row is what it is alone, without padding or cache."""
    layer = strided()
    x, real = prompt(length)
    template, states = states_after(layer, x[:, :-1], real[:, :-1])
    assert len({int(row.sum()) // K for row in real}) == 2, "rows store different numbers of anchors"
    with torch.no_grad():
        step = layer(x[:, -1:], cache=placed_cache(template, states))
        for row, pad in enumerate(PADS):
            alone = x[row : row + 1, pad:]
            expected = layer(alone, causal(torch.ones(1, length - pad, dtype=torch.bool), length - pad))
            torch.testing.assert_close(step[row], expected[0, -1:])


def test_tokens_of_one_step_without_a_mask_see_no_anchor_after_them() -> None:
    """Six tokens at once, with two anchors in each row: the first must not see the second."""
    layer = strided()
    x, real = prompt(15)
    template, states = states_after(layer, x[:, :9], real[:, :9])
    with torch.no_grad():
        step = layer(x[:, 9:], cache=placed_cache(template, states))
        for row, pad in enumerate(PADS):
            expected = layer(x[row : row + 1, pad:], causal(torch.ones(1, 15 - pad, dtype=torch.bool), 15 - pad))
            torch.testing.assert_close(step[row], expected[0, 9 - pad :])


class Step(nn.Module):
    """One step of a decoder as a program: states in, states out, and no mask among the inputs."""

    def __init__(self, layer: Any, template: GrowingAnchorLayer) -> None:
        super().__init__()
        self.layer, self.template = layer, template

    def forward(self, x: Tensor, states: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        cache = placed_cache(self.template, states)
        return self.layer(x, cache=cache), cache.layers[0].carried()  # type: ignore[attr-defined]


@pytest.mark.long
def test_an_exported_step_without_a_mask_sees_what_the_row_stores_and_no_more() -> None:
    """Several steps of an exported program, in which anchors of the rows fall on different steps."""
    layer = strided()
    x, real = prompt(13)
    template, states = states_after(layer, x[:, :9], real[:, :9])
    got = []
    for at in range(9, 13):
        program = torch.export.export(Step(layer, template), (x[:, at : at + 1], states), strict=False).module()
        with torch.no_grad():
            y, states = program(x[:, at : at + 1], states)
        got.append(y)
    for row, pad in enumerate(PADS):
        with torch.no_grad():
            expected = layer(x[row : row + 1, pad:], causal(torch.ones(1, 13 - pad, dtype=torch.bool), 13 - pad))
        torch.testing.assert_close(torch.cat(got, 1)[row], expected[0, 9 - pad :])


def test_a_layer_that_takes_no_mask_cannot_hide_anything() -> None:
    """It never receives padding, so there is nothing to hide; states that say otherwise are not its own."""
    layer, x = strided(mask=False), torch.randn(2, 1, D)
    cache = DynamicCache()
    cache.layers.append(PlacedAnchorLayer("layer", K, {}))
    for _ in range(K):
        with torch.no_grad():
            assert layer(x, cache=cache).shape == x.shape
    states = cache.layers[0].carried()  # type: ignore[attr-defined]
    states["real"][1] = False
    cache.layers[0] = PlacedAnchorLayer("layer", K, states)
    with pytest.raises(DoesNotFitError) as caught, torch.no_grad():
        layer(x, cache=cache)
    assert "attention_mask" in caught.value.remedy
