"""What layers hand one another beside the stream, in a model that no library knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.passes import SequenceAltUp
from retrofit.replaying import rewrites

D, HEADS, WORDS = 16, 2, 23


class Layer(nn.Module):
    """Pre-norm attention and feed-forward; values are mixed with those of the first layer, which it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        v = self.value(h)
        first = v if first is None else first
        q, k, mixed = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.query(h), self.key(h), (v + first) / 2))
        made = F.scaled_dot_product_attention(q, k, mixed, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.other(x)))), first


class Model(nn.Module):
    """Four layers; with `reads` the head too is handed the first layer's values."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads = reads
        self.embed, self.layers = nn.Embedding(WORDS, D), nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(D, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, first = self.embed(input_ids), None
        for layer in self.layers:
            x, first = layer(x, first)
        return self.head(x + first if self.reads else x)  # type: ignore[no-any-return]


def strided(layers: str, k: int = 3) -> Any:
    model = retrofit.apply(Model().eval(), SequenceAltUp(k=k, layers=layers), verify=False)
    for name, parameter in model.named_parameters():
        if name.endswith((".a1", ".a2", ".b")):
            parameter.data.add_(0.3)
    return model


@torch.no_grad()
def by_loops(model: Any, tokens: Tensor) -> Tensor:
    """The model written out for one row: anchors are given the values of anchors."""
    x, first, k = model.embed(tokens), None, 3
    for layer in model.layers:
        if not hasattr(layer, "a1"):
            x, first = layer(x, first)
            continue
        of_anchors = first if first is None or first.shape[1] < x.shape[1] else first[:, ::k]
        made, own = layer.layer(x[:, ::k], of_anchors)
        first = own if first is None else first
        anchor = torch.arange(x.shape[1]) // k
        at = x[:, ::k][:, anchor]
        x = layer.a1 * x + layer.a2 * at + layer.b * (made[:, anchor] - (layer.a1 + layer.a2) * at)
    return model.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", [3, 3, 3, 3]), ("0-2", [1, 3, 3, 1]), pytest.param("inner", [1, 3, 3, 1], marks=pytest.mark.long)],
)
def test_what_is_of_anchors_goes_to_layers_that_see_anchors(layers: str, expected: list[int]) -> None:
    """The first layer's values are read by all: it is strided with all of them, or not at all."""
    model, tokens = strided(layers), torch.arange(11)[None] * 5 % WORDS
    assert [getattr(layer, "k", 1) for layer in model.layers] == expected
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), by_loops(model, tokens), rtol=1e-4, atol=1e-5)


def test_what_the_outputs_are_made_of_is_needed_of_every_token() -> None:
    model = retrofit.apply(Model(reads=True).eval(), SequenceAltUp(k=3, layers="all"), verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [1, 3, 3, 3]
    (rewrite,) = rewrites(model) or ()
    assert "enters the outputs" in rewrite.skipped[0].why


def test_rows_read_only_by_their_class_token_keep_their_last_layer() -> None:
    class Classifier(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            x, first = self.embed(input_ids), None
            for layer in self.layers:
                x, first = layer(x, first)
            return self.head(x[:, 0])  # type: ignore[no-any-return]

    model = retrofit.apply(Classifier().eval(), SequenceAltUp(k=3, layers="1-3"), verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [1, 3, 3, 1]


class Masked(Model):
    """Layers are handed a mask and, beside it, which queries are padding: that says nothing of the keys."""

    class Layer(Layer):
        def forward(self, x: Tensor, mask: Tensor, blind: Tensor) -> Tensor:  # type: ignore[override]
            h = self.norm(x)
            q, k, v = (each(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
            seen = F.softmax(q @ k.mT + mask, -1).masked_fill(blind, 0.0)
            x = x + self.out((seen @ v).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.other(x))))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked.Layer() for _ in range(4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, real = self.embed(input_ids), attention_mask.bool()
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = torch.zeros(1, 1, *causal.shape).masked_fill(~(causal & real[:, None, None, :]), torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, mask, ~real[:, None, :, None])
        return self.head(x)  # type: ignore[no-any-return]


def test_a_mask_of_queries_alone_says_nothing_of_keys() -> None:
    """Padding on the left changes no row, though what the layers are handed of queries is true where that of keys hides."""
    tokens = torch.arange(22).view(2, 11) * 5 % WORDS
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    model = retrofit.apply(Masked().eval(), SequenceAltUp(k=3, layers="all"), example_inputs=given, verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [3, 3, 3, 3]
    padded = F.pad(tokens, (4, 0))
    with torch.no_grad():
        whole, more = model(**given), model(padded, F.pad(given["attention_mask"], (4, 0)))
    torch.testing.assert_close(more[:, 4:], whole, rtol=1e-4, atol=1e-5)
