"""Residual streams of small programs: which additions form a chain, where its branches leave it, and what is no stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from retrofit.anatomy.residual_streams import Residual, residual_chains
from retrofit.inputs.example_inputs import named_inputs
from retrofit.program.aten_ops import is_heavy, op
from retrofit.program.capture import capture
from retrofit.program.dataflow import Dataflow

WIDTH = 8
Code = Callable[["Written", Tensor], Tensor]


class Branch(nn.Module):
    """A function of the stream with two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(h)))


class Refining(Branch):
    """A branch that has two residual additions of its own inside."""

    def forward(self, h: Tensor) -> Tensor:
        inner = self.up(h)
        inner = inner + torch.relu(inner @ self.up.weight @ self.down.weight)
        inner = inner + torch.tanh(inner @ self.up.weight @ self.down.weight)
        return self.down(inner)


class Written(nn.Module):
    """Branches `f0` … `f3`, norms `n0` … `n3`, an embedding, and a forward pass that the test writes."""

    def __init__(self, code: Code, branch: type[Branch] = Branch) -> None:
        super().__init__()
        self.code = code
        self.table, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.scale, self.gate = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)
        for number in range(4):
            self.add_module(f"f{number}", branch())
            self.add_module(f"n{number}", nn.LayerNorm(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.code(self, self.table(ids)))


def found(code: Code, branch: type[Branch] = Branch) -> tuple[list[list[Residual]], Dataflow]:
    model = Written(code, branch)
    flow = Dataflow(capture(model, named_inputs(model, {"ids": torch.arange(10).view(2, 5)})))
    return residual_chains(flow)[0], flow


def modules_between(one: Residual, flow: Dataflow) -> list[set[str]]:
    """For each branch of an addition the modules whose weights it is computed with since it left the stream."""
    paths = [[flow.call_of(node).path for node in flow.between(one.base, branch) if is_heavy(node)] for branch in one.branches]
    return [{path.partition(".")[0] for path in branch} for branch in paths]


def pre_norm(m: Written, h: Tensor) -> Tensor:
    for f, n in ((m.f0, m.n0), (m.f1, m.n1), (m.f2, m.n2), (m.f3, m.n3)):
        h = h + f(n(h))
    return h


def post_norm(m: Written, h: Tensor) -> Tensor:
    for f, n in ((m.f0, m.n0), (m.f1, m.n1), (m.f2, m.n2), (m.f3, m.n3)):
        h = n(h + f(h))
    return h


def scaled(m: Written, h: Tensor) -> Tensor:
    h = 0.5 * h + 2.0 * m.f0(h)
    h = h + m.scale * m.f1(h)
    h = h * m.scale + m.f2(m.n0(h))
    return torch.add(h, m.f3(h), alpha=3)


def in_another_dtype(m: Written, h: Tensor) -> Tensor:
    for f in (m.f0, m.f1, m.f2, m.f3):
        h = (h.double() + f(h).double()).float()
    return h


@pytest.mark.parametrize("code", [pre_norm, post_norm, scaled, in_another_dtype])
def test_a_chain_of_four_additions(code: Code) -> None:
    (chain,), flow = found(code)
    assert [modules_between(one, flow) for one in chain] == [[{"f0"}], [{"f1"}], [{"f2"}], [{"f3"}]]
    assert [one.previous for one in chain] == [None, *chain[:-1]]
    assert flow.call_of(chain[0].base).path == "table"


def test_the_branches_of_a_pre_norm_stream_leave_it_at_the_sum_before() -> None:
    (chain,), _ = found(pre_norm)
    assert [one.base for one in chain[1:]] == [one.add for one in chain[:-1]]


def test_the_branches_of_a_post_norm_stream_leave_it_behind_the_norm() -> None:
    (chain,), flow = found(post_norm)
    assert [flow.call_of(one.base).path for one in chain[1:]] == ["n0", "n1", "n2"]


def flat(m: Written, h: Tensor) -> Tensor:
    h = h + m.f0(m.n0(h)) + m.f1(m.n1(h))
    return h + m.f2(m.n2(h)) + m.f3(m.n3(h))


def summed_first(m: Written, h: Tensor) -> Tensor:
    y = m.n0(h)
    h = h + (m.f0(y) + m.f1(y))
    y = m.n1(h)
    return (m.f2(y) + m.f3(y)) + h


@pytest.mark.parametrize("code", [flat, summed_first])
def test_parallel_branches_are_one_addition(code: Code) -> None:
    (chain,), flow = found(code)
    assert [modules_between(one, flow) for one in chain] == [[{"f0"}, {"f1"}], [{"f2"}, {"f3"}]]


def on_blocks(m: Written, h: Tensor) -> Tensor:
    """Each layer works on one of two blocks of the stream; what it returns is added to weighted sums of both."""
    stream, weight = torch.cat([h, h], -1), m.scale[:2].unsqueeze(-1)
    for number, (f, g) in enumerate(((m.f0, m.f1), (m.f2, m.f3))):
        block = stream.narrow(-1, number * WIDTH, WIDTH)
        y = f(m.n0(block)) + g(m.n1(block)) + block
        first, second = stream.unflatten(-1, (2, 1, -1)).unbind(-3)
        mixed = torch.addcmul(first * weight, second, weight)
        stream = torch.addcmul(mixed, y.unsqueeze(-2), weight).flatten(-2)
    return stream.narrow(-1, 0, WIDTH)


def test_parallel_branches_on_a_block_of_the_stream_leave_it_at_that_block() -> None:
    (chain,), flow = found(on_blocks)
    assert [modules_between(one, flow) for one in chain] == [[{"f0"}, {"f1"}], [{"f2"}, {"f3"}]]
    assert [one.base for one in chain] == [node for node in flow.nodes if op(node) == "narrow"][:2]


def gated(m: Written, h: Tensor) -> Tensor:
    h = h + torch.sigmoid(m.gate(h)) * m.f0(h)
    return h + torch.tanh(m.f1(h)) * m.f2(h)


def test_a_gate_belongs_to_its_branch() -> None:
    (chain,), flow = found(gated)
    assert [modules_between(one, flow) for one in chain] == [[{"gate", "f0"}], [{"f1", "f2"}]]


def test_additions_inside_a_branch_are_part_of_it() -> None:
    (chain,), flow = found(pre_norm, Refining)
    assert [modules_between(one, flow) for one in chain] == [[{"f0"}], [{"f1"}], [{"f2"}], [{"f3"}]]


def from_the_start(m: Written, h: Tensor) -> Tensor:
    start = h
    h = h + m.f0(h)
    h = h + m.f1(h)
    h = h + start  # a blend of the stream with itself, at an earlier place
    return h + m.f2(h)


def test_a_blend_with_an_earlier_place_of_the_stream_adds_no_branch() -> None:
    (chain,), flow = found(from_the_start)
    assert [modules_between(one, flow) for one in chain] == [[{"f0"}], [{"f1"}], [{"f2"}]]


def blended_with_the_start(m: Written, h: Tensor) -> Tensor:
    start = h
    for f, n in ((m.f0, m.n0), (m.f1, m.n1), (m.f2, m.n2), (m.f3, m.n3)):
        h = 0.9 * h + m.scale * start  # in the first layer of one value with itself
        h = h + f(n(h))
    return h


def skipping_like_a_u_net(m: Written, h: Tensor) -> Tensor:
    start, kept = h, []
    for number, (f, n) in enumerate(((m.f0, m.n0), (m.f1, m.n1), (m.f2, m.n2), (m.f3, m.n3))):
        if number > 1:
            h = h + 0.7 * kept.pop()
        h = 0.9 * h + 0.1 * start
        h = h + f(n(h))
        kept.append(h)
    return h


@pytest.mark.parametrize("code", [blended_with_the_start, skipping_like_a_u_net])
def test_blends_before_every_layer_leave_one_chain(code: Code) -> None:
    (chain,), flow = found(code)
    assert [modules_between(one, flow) for one in chain] == [[{"f0"}], [{"f1"}], [{"f2"}], [{"f3"}]]
    assert [one.previous for one in chain] == [None, *chain[:-1]]
    assert [one.base for one in chain] == [node.args[0] for node in flow.nodes if op(node) == "layer_norm"]
    assert all(one.base in one.add.args and one.branches[0] in one.add.args for one in chain)  # and no term of a blend


def no_trunk(m: Written, h: Tensor) -> Tensor:
    return m.f0(h) + m.f1(h)


def not_heavy(m: Written, h: Tensor) -> Tensor:
    return h + torch.relu(h) + m.scale


@pytest.mark.parametrize("code", [no_trunk, not_heavy])
def test_sums_that_are_not_residual(code: Code) -> None:
    assert found(code)[0] == []


def two_streams(m: Written, h: Tensor) -> Tensor:
    memory = h
    memory = memory + m.f0(memory)
    memory = m.n0(memory + m.f1(memory))
    h = m.gate(h)
    h = h + m.f2(h * memory)
    return h + m.f3(h * memory)


def test_two_streams_of_which_one_reads_the_other() -> None:
    chains, flow = found(two_streams)
    assert [[modules_between(one, flow) for one in chain] for chain in chains] == [[[{"f0"}], [{"f1"}]], [[{"f2"}], [{"f3"}]]]


def side_by_side(m: Written, h: Tensor) -> Tensor:
    """Each of two streams is read in the branches of the other, as those of sequences and of pairs are."""
    other = m.gate(h)
    h = h + m.f0(m.n0(h) + m.n1(other))
    other = other + m.f1(other * h)
    h = h + m.f2(m.n2(h) + m.n3(other))
    return torch.cat([h, other + m.f3(other * h)], 1)


def test_of_two_streams_that_read_each_other_neither_is_within_the_other() -> None:
    chains, flow = found(side_by_side)
    branches = [[flow.call_of(branch).path for one in chain for branch in one.branches] for chain in chains]
    assert sorted(branches) == [["f0.down", "f2.down"], ["f1.down", "f3.down"]]


def cast_in_vain(m: Written, h: Tensor) -> Tensor:
    """One of two branches reads the stream behind a cast to the type that it has, which is what the layer adds to."""
    for f, g in ((m.f0, m.f1), (m.f2, m.f3)):
        h = m.n0(h)
        y = f(h)
        h = h.to(h.dtype)
        h = (y + g(h)) + h
    return h


def test_a_cast_that_changes_nothing_parts_no_branches() -> None:
    chains, flow = found(cast_in_vain)
    assert [[modules_between(one, flow) for one in chain] for chain in chains] == [[[{"f0"}, {"f1"}], [{"f2"}, {"f3"}]]]
