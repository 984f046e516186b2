"""Which layers can run on two streams, by the form of their code, and what they compute then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import llama
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.passes import Reversible
from retrofit.passes.reversible.two_streams import two_stream_layers

IDS = torch.randint(5, 40, (3, 9), generator=torch.Generator().manual_seed(0))
PASS = Reversible(scheme="terraformer")


class Block(nn.Module):
    """An attention and a feed-forward, added to the stream in the order and the way of `form`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.qkv, self.out, self.norm, self.other_norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.form = nn.Linear(8, 16), nn.Linear(16, 8), form

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (one.unsqueeze(1) for one in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))  # type: ignore[no-any-return]

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "in place":
            y = self.attention(self.norm(x))
            y += x
            y += self.feed_forward(self.other_norm(y))
            return y
        if self.form == "side by side":
            return x + self.attention(self.norm(x)) + self.feed_forward(self.norm(x))
        if self.form == "post-norm":
            x = self.norm(x + self.attention(x))
            return self.other_norm(x + self.feed_forward(x))  # type: ignore[no-any-return]
        y = self.attention(self.norm(x))
        z = x + y
        if self.form == "reads another":
            return z + self.feed_forward(self.other_norm(z) + self.norm(y))
        if self.form == "reads before":
            return z + self.feed_forward(self.other_norm(x) * self.other_norm(z))
        return z + self.feed_forward(self.other_norm(z))


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        blocks = [Block(form) for _ in range(3)]
        self.blocks, self.form = nn.ModuleList([*blocks, blocks[0]] if form == "shared" else blocks), form

    def forward(self, ids: Tensor) -> Any:
        x, seen = self.embedding(ids), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return (self.head(x), seen[0]) if self.form == "seen" else self.head(x)


@pytest.mark.parametrize(("form", "sums"), [("in place", (1, 1)), ("side by side", (2,))])
def test_sums_in_any_order_are_found(form: str, sums: tuple[int, ...]) -> None:
    model: Any = retrofit.apply(Model(form), PASS, example_inputs={"ids": IDS}, verify=False)
    assert [layer.swaps.sums for layer in two_stream_layers(model)] == [sums] * 3
    older = newer = model.embedding(IDS)
    for layer in two_stream_layers(model):
        block: Any = layer.layer
        read = block.norm(newer)
        if form == "side by side":
            older, newer = newer, older + (block.attention(read) + block.feed_forward(read))
        else:
            older, newer = newer, older + block.attention(read)
            older, newer = newer, older + block.feed_forward(block.other_norm(newer))
    expected = model.head((older + newer) / 2)
    found = model.train()(IDS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted = list(model.parameters())
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    both = (torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        if other is None:  # the second norm of a layer that has one
            assert one is None
            continue
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("post-norm", "normalized, scaled or added to"),
        ("reads another", "which another branch computes"),
        ("reads before", "reads the stream before an earlier branch"),
        ("shared", "several depths share it"),
    ],
)
def test_layers_that_are_no_swaps_are_left_alone_with_the_reason(form: str, why: str) -> None:
    plan = PASS.plan(retrofit.inspect(Model(form), {"ids": IDS}))
    assert plan.near_misses and all(why in miss.why and miss.remedy for miss in plan.near_misses)
    assert len(plan.near_misses) == len(list(retrofit.inspect(Model(form), {"ids": IDS}).layers)) or form == "shared"


def test_streams_begin_anew_where_another_reads_them() -> None:
    plan = PASS.plan(retrofit.inspect(Model("seen"), {"ids": IDS}))
    assert [link.closes for link in plan.links] == [True, False, True]
    assert any("two streams start again" in note for note in plan.notes)


def test_layers_on_two_streams_are_reversible_already() -> None:
    anatomy = retrofit.inspect(retrofit.apply(llama(), PASS, verify=False))
    for scheme in ("exact", "terraformer"):
        plan = Reversible(scheme=scheme).plan(anatomy)
        assert not plan.sites and any("it is reversible already" in miss.why for miss in plan.near_misses)


def test_a_layer_that_does_not_add_as_it_did_is_an_error_with_the_reason() -> None:
    model: Any = retrofit.apply(Model(""), PASS, example_inputs={"ids": IDS}, verify=False)
    for layer in two_stream_layers(model):
        layer.layer.form = "post-norm"
    for mode in (True, False):
        with pytest.raises(RetrofitError) as raised:
            model.train(mode)(IDS)
        assert raised.value.code == "other-path"
