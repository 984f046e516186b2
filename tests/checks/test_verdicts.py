"""Verdicts on whole models: much rounding passes, half precision is measured in float32, moved tensors are no change of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import llama, t5
from torch import Tensor, fx, nn

import retrofit
from retrofit.checks.graph_hashes import hash_modules, hash_nodes
from retrofit.checks.reference import Reference
from retrofit.passes.recurrence.recurrent_feed_forward import RecurrentFeedForward
from retrofit.program.capture import capture

SETTLED = "in float64 (limit 1e-09)"
EQUAL = "left 0.0e+00 in float32, right 0.0e+00 in float32"


def loud_t5(seed: int) -> Any:
    """A T5 whose matrices are three times their usual size: it rounds as trained ones with massive activations do."""
    model = t5(num_layers=3, num_decoder_layers=3, d_model=48, d_kv=12, d_ff=64, num_heads=4, feed_forward_proj="gated-gelu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_rounds_much_is_not_blamed(seed: int) -> None:
    model = loud_t5(seed)
    reference = Reference.of(model)
    retrofit.apply(model, "sparse-ffn(sparsity=8)", verify=False)
    report = retrofit.verify(model, reference, checks=["causality", "padding", "cache"])
    assert report.ok, str(report)
    assert SETTLED in report["cache"].measured
    # Products of some processors are the same bits whatever stands beside a row.
    assert SETTLED in report["padding"].measured or report["padding"].measured == EQUAL


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_is_measured_in_float32(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    reference = Reference.of(model)
    retrofit.apply(model, "altup(k=2, init=lockstep)", verify=False)
    checks = ["graph", "function", "causality", "padding", "cache"]
    report = retrofit.verify(model, reference, checks=checks)
    assert report.ok, str(report)
    assert f"computed in float32: its weights are {str(dtype).removeprefix('torch.')}" in report["function"].why
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    model.model.layers[1].layer.mlp.register_forward_hook(lambda module, args, output: output * (1 + 1e-4))
    assert [check.name for check in retrofit.verify(model, reference, checks=checks).failed] == ["graph", "function"]


@pytest.mark.parametrize(("dim", "shift", "where"), [(0, 1, "in other rows moved"), (1, -1, "on moved the output at position")])
def test_a_leak_through_what_begins_at_zero_is_found(dim: int, shift: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    reference = Reference.of(model)
    retrofit.apply(model, "recurrence(rank=2)", verify=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert retrofit.verify(model, reference, checks=["causality"]).ok
    added = RecurrentFeedForward.added
    monkeypatch.setattr(RecurrentFeedForward, "added", lambda *given: added(*given).roll(shift, dim))
    report = retrofit.verify(model, reference, checks=["function", "causality"])
    assert [check.name for check in report.failed] == ["causality"], "the function is still the dense one"
    assert "once what begins at zero has moved" in report["causality"].why and where in report["causality"].why
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the noise is gone"


@pytest.mark.long
def test_a_layout_in_memory_is_no_change_of_the_graph() -> None:
    """T5 makes its bias contiguous for attention only where its strides ask for it, which a rewrite changes."""
    model = t5(num_layers=3)
    reference = Reference.of(model)
    retrofit.apply(model, "sequence-altup(k=1)", verify=False)
    assert retrofit.verify(model, reference, checks=["graph"]).ok


@pytest.mark.parametrize(("other", "same"), [("reshape", True), ("view", True), ("flip", False)])
def test_which_reshape_the_strides_ask_for_is_no_change_of_the_graph(other: str, same: bool) -> None:
    def hashed(operation: Any) -> str:
        graph = fx.Graph()
        node = graph.placeholder("x")
        for target in (torch.ops.aten.relu.default, operation, torch.ops.aten.sin.default):
            node = graph.call_function(target, (node, [0]) if target is operation else (node,))
        return hash_nodes([one for one in graph.nodes if one.op == "call_function"], set())

    assert (hashed(torch.ops.aten.view.default) == hashed(getattr(torch.ops.aten, other).default)) == same


class Cast(nn.Module):
    """A sine of what comes in, cast to another type first where one is given."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.scale, self.dtype = nn.Parameter(torch.ones(3)), dtype

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.dtype is None else x.to(self.dtype)).sin() * self.scale


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, True), (torch.float64, True), (torch.int64, False)])
def test_a_cast_between_floating_point_types_is_no_change_of_the_graph(dtype: torch.dtype, same: bool) -> None:
    plain, cast = (hash_modules(capture(nn.Sequential(Cast(one)), {"input": torch.ones(2, 3)}))["0"] for one in (None, dtype))
    assert (plain == cast) == same


class Block(nn.Module):
    """Attention on angles that come from outside, and a feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )  # (batch, heads, length, width of a head)
        q, k = (one * angles.cos() + torch.cat([-one.chunk(2, -1)[1], one.chunk(2, -1)[0]], -1) * angles.sin() for one in (q, k))
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.finfo(q.dtype).max)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A decoder that computes one table of angles, from no input, and hands it to every layer."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, width)
        self.register_buffer("frequencies", 100 ** -torch.linspace(0, 1, width // heads // 2))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 31)

    def forward(self, ids: Tensor) -> Tensor:
        angles = (torch.arange(ids.shape[1])[:, None] * self.frequencies).repeat(1, 2)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_a_table_that_comes_from_elsewhere_is_no_change_of_the_graph() -> None:
    """Of a table made of no input the layers that run on some tokens get those tokens' rows, which depend on the inputs."""
    torch.manual_seed(0)
    model = Decoder().eval()
    reference = Reference.of(model)
    retrofit.apply(model, "sequence-altup(k=1)", verify=False)
    report = retrofit.verify(model, reference, checks=["graph", "function"])
    assert report.ok, str(report)
