"""Values that layers exchange next to the stream, in models of no library."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import zoo
from support.own_layers import HEADS, WORDS, D, Layer, Model
from support.refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.passbase.replaying import rewrites
from retrofit.passes import SequenceAltUp
from retrofit.passes.sequence_altup.layer_requirements import is_stride_invariant


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


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", [3, 3, 3, 3]), ("0-2", [1, 3, 3, 1]), pytest.param("inner", [1, 3, 3, 1], marks=pytest.mark.long)],
)
def test_values_of_anchors_go_to_layers_that_see_anchors(layers: str, expected: list[int]) -> None:
    """The first layer's values are read by all: it is strided with all of them, or not at all."""
    model, tokens = strided(layers), torch.arange(11)[None] * 5 % WORDS
    assert [getattr(layer, "k", 1) for layer in model.layers] == expected
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), by_loops(model, tokens), rtol=1e-4, atol=1e-5)


def test_what_enters_the_outputs_is_needed_of_every_token() -> None:
    model = retrofit.apply(Model(reads=True).eval(), SequenceAltUp(k=3, layers="all"), verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [1, 3, 3, 3]
    (rewrite,) = rewrites(model) or ()
    assert "outputs" in rewrite.skipped[0].why


def test_rows_read_only_by_their_class_token_keep_their_last_layer() -> None:
    class Classifier(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            x, first = self.embed(input_ids), None
            for layer in self.layers:
                x, first = layer(x, first)
            return self.head(x[:, 0])  # type: ignore[no-any-return]

    model = retrofit.apply(Classifier().eval(), SequenceAltUp(k=3, layers="1-3"), verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [1, 3, 3, 1]


class Placed(Model):
    """Layers receive one table by tokens, and cast it to the dtype that it has."""

    class Layer(Layer):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            h = self.norm(x) * table.to(x.dtype)
            q, k, v = (each(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.other(x))))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Placed.Layer() for _ in range(4))
        self.register_buffer("waves", (torch.arange(64)[:, None] * torch.arange(1, D + 1) / 9).cos())

    def forward(self, input_ids: Tensor) -> Tensor:
        x, table = self.embed(input_ids), self.waves[: input_ids.shape[1]][None] * 2
        for layer in self.layers:
            x = layer(x, table)
        return self.head(x)  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_table_that_a_layer_casts_to_its_own_dtype_is_not_of_that_layer() -> None:
    """The later layers get it for every token, and not as the first one computed it, for anchors."""
    model, tokens = Placed().eval(), torch.arange(11)[None] * 5 % WORDS
    x, table = model.embed(tokens), model.waves[:11][None] * 2
    for layer in model.layers:
        x = x + (layer(x[:, ::3], table[:, ::3]) - x[:, ::3])[:, torch.arange(11) // 3]  # a1 = b = 1, a2 = 0
    expected = model.head(x)
    rewritten = retrofit.apply(model, SequenceAltUp(k=3, layers="all"), verify=False)
    assert [getattr(layer, "k", 1) for layer in rewritten.layers] == [3, 3, 3, 3]
    torch.testing.assert_close(rewritten(tokens), expected, rtol=1e-4, atol=1e-5)


class Masked(Model):
    """Layers receive a mask and in addition which queries are padding, which says nothing about the keys."""

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
    """Padding on the left changes no row, though the mask of queries is true where the mask of keys hides."""
    tokens = torch.arange(22).view(2, 11) * 5 % WORDS
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    model = retrofit.apply(Masked().eval(), SequenceAltUp(k=3, layers="all"), example_inputs=given, verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [3, 3, 3, 3]
    padded = F.pad(tokens, (4, 0))
    with torch.no_grad():
        whole, more = model(**given), model(padded, F.pad(given["attention_mask"], (4, 0)))
    torch.testing.assert_close(more[:, 4:], whole, rtol=1e-4, atol=1e-5)


class OwnMask(Model):
    """Layers keep a mask for the longest text as a buffer, as small GPTs written by hand do."""

    class Layer(Layer):
        def __init__(self, window: int) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(32, 32, dtype=torch.bool).tril().triu(1 - window)[None, None])

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            h, length = self.norm(x), x.shape[1]
            q, k, v = (each(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
            scores = (q @ k.mT).masked_fill(~self.seen[:, :, :length, :length], -torch.inf)
            x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.other(x))))

    def __init__(self, *windows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnMask.Layer(window) for window in windows)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_a_causal_mask_in_a_buffer_is_stride_invariant() -> None:
    model: Any = retrofit.apply(OwnMask(32, 5, 32, 20).eval(), SequenceAltUp(k=3, layers="all"))
    assert [getattr(layer, "k", 1) for layer in model.layers] == [3, 1, 3, 1], "a window of anchors would be k times as long"
    (rewrite,) = rewrites(model) or ()
    assert "layers=0+2" in rewrite.spec
    tokens = torch.arange(11)[None] * 5 % WORDS
    with torch.no_grad():
        x = model.embed(tokens)
        for layer in model.layers:
            strided = hasattr(layer, "a1")
            x = x + (layer.layer(x[:, ::3]) - x[:, ::3])[:, torch.arange(11) // 3] if strided else layer(x)
        torch.testing.assert_close(model(tokens), model.head(x), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_plan_says_what_would_be_strided_and_changes_nothing() -> None:
    model = OwnMask(32, 5, 32, 20).eval()
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    planned = retrofit.plan_of(model, SequenceAltUp(k=3, layers="all"))
    plan: Any = planned.passes[0].plan
    assert [site.name for site in plan.sites] == ["layers.0", "layers.2"] == [one.path for one in plan.layers]
    assert {(miss.name, "numbers the tokens" in miss.why) for miss in plan.near_misses} == {("layers.1", True), ("layers.3", True)}
    assert plan.new_parameters == 6 == planned.parameters_after - planned.parameters_before
    assert "layers=0+2" in plan.spec
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.long
def test_a_loaded_model_has_the_same_layers_strided(tmp_path: Path) -> None:
    """On the meta device, where a recipe is replayed, no mask has values."""
    model: Any = retrofit.apply(zoo.build(zoo.entry("causal/gpt_neo")).eval(), SequenceAltUp(k=2, layers="all"), verify=False)
    strides = [getattr(layer, "k", 1) for layer in model.transformer.h]
    assert strides == [2, 1, 2, 1]
    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path)
    assert [getattr(layer, "k", 1) for layer in loaded.transformer.h] == strides


class Recurrent(Model):
    """The second half of the layers keep a running sum, which the model passes to them as a tensor when it decodes."""

    class Layer(Layer):
        def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            made, _ = super().forward(x)
            sums = x.cumsum(1) if state is None else x.cumsum(1) + state[:, None]
            return made + sums / 9, sums[:, -1]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*self.layers[:2], *(Recurrent.Layer() for _ in range(2))])

    def forward(self, input_ids: Tensor, use_cache: bool = False, states: Any = None) -> Any:
        x = self.embed(input_ids)
        if use_cache and states is None:
            states = [x.new_zeros(len(x), D) for _ in range(2)]
        for layer in self.layers[:2]:
            x, _ = layer(x)
        for number, layer in enumerate(self.layers[2:]):
            x, made = layer(x, states[number] if use_cache else None)
            if use_cache:
                states[number] = made
        return (self.head(x), states) if use_cache else self.head(x)


def test_layers_whose_states_come_as_tensors_are_left_alone() -> None:
    """The anchors' states have no place there. The recipe names the other layers: a model that is being loaded has no states."""
    model: Any = retrofit.apply(Recurrent().eval(), SequenceAltUp(k=3, layers="all"), verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [3, 3, 1, 1]
    (rewrite,) = rewrites(model) or ()
    assert "layers=0+1" in rewrite.spec
    assert all("state" in miss.why for miss in rewrite.skipped)


@pytest.mark.long
def test_depths_that_differ_from_stack_to_stack_cannot_be_saved_in_one_recipe() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = OwnMask(32, 5, 32), OwnMask(5, 32, 32)

        def forward(self, ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(ids), self.right(others)

    tokens = torch.arange(22).view(2, 11) % WORDS
    with pytest.raises(DoesNotFitError) as error:
        retrofit.apply(Two().eval(), SequenceAltUp(k=3, layers="all"), example_inputs={"ids": tokens, "others": tokens})
    assert error.value.code == "depths-differ"
    assert "left at 0+2, right at 1+2" in error.value.why


class Routed(Model):
    """Two layers decide where the two behind them read on, by a threshold: nothing they compute can be learnt."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x, first = self.embed(input_ids), None
        y = x
        for layer in self.layers[:2]:
            y, first = layer(y, first)
        x, first = torch.where((y.sum(-1, keepdim=True) > 0).cummax(1).values, x, -x), None
        for layer in self.layers[2:]:
            x, first = layer(x, first)
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_that_only_choose_are_left_alone() -> None:
    model: Any = retrofit.apply(Routed().eval(), SequenceAltUp(k=3, layers="all"), verify=False)
    assert [getattr(layer, "k", 1) for layer in model.layers] == [1, 1, 3, 3]
    (rewrite,) = rewrites(model) or ()
    assert rewrite.skipped and all("selection" in miss.why for miss in rewrite.skipped)


class OwnWay(Masked):
    """Layers receive a mask in which True means hidden, computed from a table and the model's mask."""

    class Layer(Masked.Layer):
        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
            blind = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
            return super().forward(x, torch.zeros(1).masked_fill(hidden, torch.finfo(x.dtype).min), blind)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnWay.Layer() for _ in range(4))
        self.register_buffer("later", torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, length = self.embed(input_ids), input_ids.shape[1]
        hidden = self.later[:, :, :length, :length] | ~attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, hidden)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_mask_in_a_way_of_its_own_leaves_the_layer_alone() -> None:
    """Taken for one in which True means seen, it would make every token padding."""
    tokens = torch.arange(22).view(2, 11) * 5 % WORDS
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with refused(DoesNotFitError, "padding"):
        retrofit.apply(OwnWay().eval(), SequenceAltUp(k=3, layers="all"), example_inputs=given, verify=False)


@given(size=st.integers(2, 40), k=st.integers(1, 7), window=st.integers(1, 40), shift=st.integers(-3, 3))
def test_stride_invariant_tables(size: int, k: int, window: int, shift: int) -> None:
    """By a plain loop over the anchors; a mask that depends only on which of two is earlier always is."""
    place = torch.arange(size)
    table = (place[:, None] - place[None] >= shift) & (place[:, None] - place[None] < window)
    kept = range(0, size, k)
    same = all(table[i, j] == table[a, b] for a, i in enumerate(kept) for b, j in enumerate(kept))
    assert is_stride_invariant(table[None], (1, 2), k) == same
    assert is_stride_invariant(torch.ones(size, size).tril(), (0, 1), k)
    assert is_stride_invariant(place, (0,), k) == (k == 1 or size <= k)
