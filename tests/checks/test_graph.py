"""The checks of the graph and its cost: what is no change, which layouts follow, how FLOPs and read parameters are counted."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.own_models import Own
from support.tiny_models import gpt2, llama, t5
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

import retrofit
from retrofit.checks import Reference
from retrofit.checks.graph import hash_modules, hash_nodes, newly_read
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import without_weights
from retrofit.program.capture import capture
from retrofit.program.cost import Cost, cost_of, flops_of_run
from retrofit.surgery import Fate
from retrofit.surgery.wrappers import Wrapper, call_with_keywords, child_modules


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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


class Pairs(Own):
    """Compares all rows with all, and takes its ids in a dictionary where it is told so."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.nested = nested

    def forward(self, x: Any) -> torch.Tensor:
        rows = super().forward(x["ids"] if self.nested else x).mean(1)
        return rows @ rows.T


@pytest.mark.parametrize("nested", [False, True])
def test_outputs_that_compare_all_rows_with_all_grow_with_the_batch(nested: bool) -> None:
    ids = torch.arange(22).reshape(2, 11)
    report = retrofit.verify(Pairs(nested).eval(), example_inputs={"x": {"ids": ids} if nested else ids})
    found = {check.name: check for check in report.checks}
    assert found["graph"].status == "passed", found["graph"].why
    assert (found["cache"].status, found["cache"].why) == ("skipped", "it keeps no cache and does not generate")


# ── Cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_experts_that_are_chosen_anew_are_no_new_parameters() -> None:
    experts = {f"experts.{one}": torch.zeros(4, 8) for one in range(3)} | {"head": torch.zeros(2, 4), "tail": torch.zeros(3, 4)}
    fates = {name: Fate("kept", name) for name in experts}
    context: Any = SimpleNamespace(subject=SimpleNamespace(parameters=experts), fates=fates)

    def newly(did: set[str], does: set[str]) -> int:
        before, now = (Cost(0, 0, 1, {}, frozenset(one)) for one in (did, does))
        return newly_read(now, before, context)

    rest = {"head", "tail"}
    assert newly({"experts.0"} | rest, {"experts.1", "experts.2"} | rest) == 32
    assert newly({"experts.0", "experts.1"} | rest, {"experts.2"} | rest) == -32
    assert newly({"experts.0"} | rest, {"experts.0", "head"}) == 0  # the tail is not chosen, but lost


@pytest.mark.parametrize("build", [gpt2, llama], ids=lambda build: build.__name__)
def test_flops_are_those_that_torch_counts(build: Callable[..., Any]) -> None:
    model = build(attn_implementation="eager").eval()
    inputs = named_inputs(model)
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    cost = cost_of(capture(model, inputs))
    tokens = inputs["input_ids"].numel()
    scalings = 0 if build is gpt2 else cost.flops - counter.get_total_flops()
    assert cost.tokens == tokens and cost.flops - scalings == counter.get_total_flops()
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(cost.by_module.values()) == cost.flops


class Products(nn.Module):
    """One of every product that is written in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 7))
        self.filter = nn.Conv1d(4, 6, 3, groups=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = torch.einsum("...kp,kpd->...kd", x.unflatten(-1, (3, 5)), self.weight)  # (2, 4, 3, 7)
        heads = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])  # (2, 1, 4, 15)
        return parts, heads, self.filter(x), torch.addcmul(x, x, x)


def test_flops_of_each_kind_of_product() -> None:
    model = Products()
    cost = cost_of(capture(model, {"x": torch.randn(2, 4, 15)}))
    einsum, attention = 2 * (2 * 4) * 3 * 5 * 7, 2 * 2 * 4 * 4 * (15 + 15)
    convolution, multiply_add = 2 * (2 * 6 * 13) * (2 * 3), 2 * (2 * 4 * 15)
    assert cost.flops == einsum + attention + convolution + multiply_add
    assert cost.by_module == {"": einsum + attention + multiply_add, "filter": convolution}
    assert flops_of_run(without_weights(model), {"x": torch.randn(2, 4, 15, device="meta")}) == cost.flops


class Injecting(Wrapper):
    """Runs a copy of its layer, in which one module gets more keywords."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return call_with_keywords(child_modules(self)["layer"], ("q",), {}, (y,), {})


def test_the_work_of_a_copy_is_that_of_its_module() -> None:
    model, inputs = Own(), {"x": torch.arange(12).view(2, 6)}
    dense = cost_of(capture(model, inputs)).by_module
    model.b[0], model.b[1] = Injecting(model.b[0]), Injecting(model.b[1])
    expected = {path.replace("b.0", "b.0.layer").replace("b.1", "b.1.layer"): count for path, count in dense.items()}
    assert dense["b.0"] and cost_of(capture(model, inputs)).by_module == expected
