"""What is matched is what was planted, what torch's own matcher finds, and a replacement computes what it replaced."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from functional_models import VOCABULARY, Functional, Recurrent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher
from torch.nn import functional as F

from retrofit.errors import DoesNotFitError
from retrofit.graph_module import graph_module
from retrofit.matching import find, replace
from retrofit.ops import op
from retrofit.outlining import inline_all
from retrofit.propagation import propagate


class Eager(nn.Module):
    """Three attentions that are written out, one behind the other, the last scaled otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        first = torch.softmax(x @ x.transpose(1, 2) * 8**-0.5, -1) @ x
        second = torch.softmax(first @ x.transpose(1, 2) * 8**-0.5, -1) @ x
        third = torch.softmax(second @ x.transpose(1, 2) * 0.25, -1) @ x
        return first + third


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.matmul(k.transpose(1, 2)) * 8**-0.5).softmax(dim=-1).matmul(v)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


QKV = dict.fromkeys("qkv", torch.zeros(2, 3, 8))


def eager() -> fx.GraphModule:
    graph = graph_module(Eager(), sample())
    inline_all(graph)
    return graph


def sample(batch: int = 2, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(seed))


def test_a_pattern_is_found_under_other_names_and_what_is_nearly_it_is_said() -> None:
    graph = eager()
    found = find(graph, written_out, QKV)
    match, _ = found.matches
    assert [op(node) for node in match.nodes] == ["transpose", "matmul", "mul", "softmax", "matmul"]
    assert match.arguments["q"] is match.arguments["k"] is match.arguments["v"] and op(match.arguments["q"]) == "mul"
    (near,) = found.near_misses
    assert (near.agree, near.of) == (5, 5)
    assert "0.25" in near.why and str(8**-0.5) in near.why and near.result.name in str(near)


def test_a_replacement_is_in_place_with_what_is_known_of_the_result() -> None:
    model, graph = Eager(), eager()
    before = find(graph, written_out, QKV).matches[0].result
    name, known = before.name, dict(before.meta)
    match, *_ = replace(graph, written_out, fused, QKV).matches
    assert not find(graph, written_out, QKV).matches
    node, _ = (node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
    assert node.meta["val"].shape == known["val"].shape and node.meta["stack_trace"] == known["stack_trace"]
    assert name not in [one.name for one in graph.graph.nodes] and match.result.name == name
    torch.testing.assert_close(graph(sample(3, 9, 1)), model(sample(3, 9, 1)))
    propagate(graph, {"x": sample()})
    assert all("val" in one.meta for one in graph.graph.nodes if one.op == "call_function")


def test_attention_of_a_model_that_is_one_function_becomes_another_in_every_layer() -> None:
    """By inlining all, the other way round: what is fused is written out, mask and all."""
    ids = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
    model = Functional().eval()
    graph = graph_module(model, ids)
    inline_all(graph)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        after = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(after, float("-inf")).softmax(-1) @ v

    example = {name: torch.randn(2, 4, 5, 8) for name in "qkv"}
    assert len(replace(graph, causal, by_hand, example).matches) == 3
    assert not any("scaled_dot_product" in str(node.target) for node in graph.graph.nodes)
    others = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(graph(others), model(others), rtol=1e-4, atol=1e-5)


def test_what_is_read_outside_as_well_is_no_match_and_says_so() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            squared = x * x
            return squared.sum(-1).sqrt() + squared.mean(-1)

    graph = graph_module(Both(), sample())
    found = find(graph, lambda x: (x * x).sum(-1).sqrt(), {"x": sample()})
    assert not found.matches
    (near,) = found.near_misses
    assert (near.agree, near.of) == (3, 3) and "outside the pattern" in near.why and "mean" in near.why


def test_constants_come_along_and_results_are_one() -> None:
    graph = eager()
    replace(graph, lambda a, b: a + b, lambda a, b: a + b * torch.tensor(0.0), {"a": sample(), "b": sample()})
    model = Eager()
    expected = torch.softmax(sample() @ sample().transpose(1, 2) * 8**-0.5, -1) @ sample()
    torch.testing.assert_close(graph(sample()), expected)
    assert set(graph.state_dict()) == set(model.state_dict())
    with pytest.raises(DoesNotFitError, match="no pattern"):
        find(graph, lambda a: (a, a + 1), {"a": sample()})  # type: ignore[arg-type, return-value]
    before = str(graph.graph)
    with pytest.raises(DoesNotFitError, match="reads b"):
        replace(graph, lambda a: a.softmax(-1), lambda a, b: a + b, {"a": sample(), "b": sample()})
    assert str(graph.graph) == before


def test_a_pattern_of_any_length_is_found_in_a_part_that_is_called_again() -> None:
    ids = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
    graph = graph_module(Recurrent().eval(), ids)
    part, before = graph.get_submodule("layers.0.ffn"), graph(ids)

    def ffn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x @ w.t() + b)

    example = {"x": torch.zeros(2, 3, 32), "w": torch.zeros(96, 32), "b": torch.zeros(96)}
    assert len(find(part, ffn, example).matches) == 1  # type: ignore[arg-type]
    replace(part, ffn, lambda x, w, b: F.gelu(F.linear(x, w, b)), example)  # type: ignore[arg-type]
    torch.testing.assert_close(graph(ids), before, rtol=1e-5, atol=1e-5)


# ── Against torch's own matcher, on expressions of any shape ─────────────────────────────────────────────────────────────────────

BINARY = (operator.sub, torch.matmul, operator.truediv)
UNARY = (torch.relu, torch.tanh, torch.neg)


class Expression(nn.Module):
    """Some steps, each of one or two values that are there already."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return evaluated(self.steps, x, y)


def evaluated(steps: list[tuple[int, int, int]], x: Tensor, y: Tensor) -> Tensor:
    values = [x, y]
    for kind, one, other in steps:
        if kind < len(UNARY):
            values.append(UNARY[kind](values[one % len(values)]))
        else:
            values.append(BINARY[kind - len(UNARY)](values[one % len(values)], values[other % len(values)]))
    return values[-1]


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 12)), min_size=3, max_size=12), STEPS)
def test_every_place_that_torchs_matcher_finds_is_found_and_replacing_it_by_itself_changes_no_bit(
    steps: list[tuple[int, int, int]], pattern: list[tuple[int, int, int]]
) -> None:
    square = {name: torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("xy")}
    graph = graph_module(Expression(steps), square)
    ours = find(graph, lambda x, y: evaluated(pattern, x, y), square)
    small = graph_module(Expression(pattern), square)
    for node in small.graph.nodes:  # torch's matcher takes unread arguments for operations that have to be there
        if node.op == "placeholder" and not node.users:
            small.graph.erase_node(node)
    theirs = SubgraphMatcher(small.graph, match_output=False, remove_overlapping_matches=True, ignore_literals=False)
    matched = theirs.match(graph.graph)
    found = {match.result.name for match in ours.matches}
    assert len(found) >= len(matched)
    twin = copy.deepcopy(graph)
    replace(twin, lambda x, y: evaluated(pattern, x, y), lambda x, y: evaluated(pattern, x, y), square)
    torch.testing.assert_close(twin(**square), graph(**square), rtol=0, atol=0, equal_nan=True)
    assert isinstance(twin, fx.GraphModule) and len(twin.graph.nodes) == len(graph.graph.nodes)
