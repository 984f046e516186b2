"""The role of a branch, what its matrices project and whether it is causal, on branches written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.anatomy.attention_cores import find_attentions
from retrofit.anatomy.branches import cores_in, describe_projections, role_of
from retrofit.anatomy.causality import is_causal
from retrofit.anatomy.parts import Projection
from retrofit.anatomy.residual_streams import residual_chains
from retrofit.inputs.example_inputs import named_inputs
from retrofit.program.capture import capture
from retrofit.program.dataflow import Dataflow

WIDTH, HEADS, LENGTH, EXPERTS = 12, 3, 7, 4
Code = Callable[["OneBranch", Tensor, Tensor], Tensor]


class OneBranch(nn.Module):
    """h + code(h, memory) on an embedded sequence h, with another sequence `memory`."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code
        self.table, self.other_table, self.head = nn.Embedding(11, WIDTH), nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.gate, self.both, self.down = (
            nn.Linear(WIDTH, 20),
            nn.Linear(WIDTH, 20),
            nn.Linear(WIDTH, 40),
            nn.Linear(20, WIDTH),
        )
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.pointwise_up, self.pointwise_down = nn.Conv1d(WIDTH, 20, 1), nn.Conv1d(20, WIDTH, 1)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 20))
        self.experts_down = nn.Parameter(torch.randn(EXPERTS, 20, WIDTH))

    def forward(self, ids: Tensor, memory_ids: Tensor) -> Tensor:
        h, memory = self.table(ids), self.other_table(memory_ids)
        self.ids = ids
        result = self.head(h + self.code(self, h, memory))
        del self.ids
        return result


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (batch, heads, length, features)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def fused(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.out(joined(F.scaled_dot_product_attention(heads(m.q(h)), heads(m.k(h)), heads(m.v(h)))))


def fused_causal(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.out(joined(F.scaled_dot_product_attention(heads(m.q(h)), heads(m.k(h)), heads(m.v(h)), is_causal=True)))


def fused_projections(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.out(joined(F.scaled_dot_product_attention(*map(heads, m.qkv(h).chunk(3, -1)))))


def scores(m: OneBranch, h: Tensor) -> Tensor:
    return heads(m.q(h)) @ heads(m.k(h)).mT / math.sqrt(WIDTH // HEADS)


def written_out(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.out(joined(scores(m, h).softmax(-1) @ heads(m.v(h))))


def in_indices(m: OneBranch, h: Tensor, memory: Tensor, product: str = "bihd,bjhd->bhij", first: bool = False) -> Tensor:
    """The products named by their indices, heads behind the tokens."""
    q, k, v = (one(h).unflatten(-1, (HEADS, -1)) for one in (m.q, m.k, m.v))
    q, k = (one.transpose(0, 1) if first else one for one in (q, k))
    attended = torch.einsum("bhij,bjhd->bihd", torch.einsum(product, q, k).softmax(-1), v)
    return m.out(attended.flatten(2))


def in_indices_length_first(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return in_indices(m, h, memory, "ibhd,jbhd->bhij", first=True)


def in_indices_one_key_head(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    """All heads have the keys and values of one."""
    q, k, v = m.q(h).unflatten(-1, (HEADS, -1)), *(one(h)[..., : WIDTH // HEADS] for one in (m.k, m.v))
    weights = torch.einsum("bihd,bjd->bhij", q, k).softmax(-1)
    return m.out(torch.einsum("bhij,bjd->bihd", weights, v).flatten(2))


def added_mask(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    mask = torch.full((h.shape[1], h.shape[1]), -math.inf).triu(1)
    return m.out(joined((scores(m, h) + mask).softmax(-1) @ heads(m.v(h))))


def masks_of_unlike_shapes(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    """One for each head, one for each sequence and head at once, and a divisor."""
    late = torch.full((h.shape[1], h.shape[1]), -math.inf).triu(1)
    of_heads, of_all = late.expand(HEADS, -1, -1), late.expand(len(h) * HEADS, -1, -1)
    weighed = (scores(m, h) + of_heads).flatten(0, 1) + of_all
    return m.out(joined((weighed / torch.full((1, 1, 1), 2.0)).softmax(-1).unflatten(0, (-1, HEADS)) @ heads(m.v(h))))


def divided_scores(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.out(joined((scores(m, h) / torch.full((1, 1, 1), 2.0)).softmax(-1) @ heads(m.v(h))))


def mask_of_the_hidden(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    hidden = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
    return m.out(joined(scores(m, h).masked_fill(hidden, -math.inf).softmax(-1) @ heads(m.v(h))))


def mask_of_padding(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    """Of rows and columns: an input that is not zero is padding, and hidden by numbers that are added."""
    padding = m.ids != 0
    mask = torch.zeros(scores(m, h).shape).masked_fill(padding[:, None, None] | padding[:, None, :, None], -math.inf)
    return m.out(joined((scores(m, h) + mask).softmax(-1) @ heads(m.v(h))))


def mask_of_the_visible(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    visible = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
    return m.out(joined(F.scaled_dot_product_attention(heads(m.q(h)), heads(m.k(h)), heads(m.v(h)), attn_mask=visible)))


def banded_mask(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    near = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril(1).triu(-1)  # each token sees the one after it as well
    return m.out(joined(F.scaled_dot_product_attention(heads(m.q(h)), heads(m.k(h)), heads(m.v(h)), attn_mask=near)))


def among_others(m: OneBranch, h: Tensor, memory: Tensor, own: str = "tril") -> Tensor:
    """The memory's tokens stand before the branch's own, and all are seen."""
    k, v = (torch.cat([heads(one(memory)), heads(one(h))], 2) for one in (m.k, m.v))
    shown = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool)
    mask = torch.cat([torch.ones(h.shape[1], memory.shape[1], dtype=torch.bool), shown.tril() if own == "tril" else shown], 1)
    return m.out(joined(F.scaled_dot_product_attention(heads(m.q(h)), k, v, attn_mask=mask)))


def among_others_not_causal(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return among_others(m, h, memory, "all")


def crossing(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.out(joined(F.scaled_dot_product_attention(heads(m.q(h)), heads(m.k(memory)), heads(m.v(memory)))))


def mlp(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.down(torch.relu(m.up(h)))


def one_matrix(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return torch.tanh(m.q(h))


def gated(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.down(F.silu(m.gate(h)) * m.up(h))


def gate_and_up_in_one(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    gate, up = m.both(h).chunk(2, -1)
    return m.down(F.gelu(gate) * up)


def mixture(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    weights, chosen = m.router(h).softmax(-1).topk(2, -1)
    hidden = torch.relu(torch.einsum("bld,edf->blef", h, m.experts_up))
    made = torch.einsum("blef,efd->bled", hidden, m.experts_down)
    return (made.gather(2, chosen.unsqueeze(-1).expand(-1, -1, -1, WIDTH)) * weights.unsqueeze(-1)).sum(2)


def convolving(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.convolution(h.mT).mT


def at_each_position(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.pointwise_down(torch.relu(m.pointwise_up(h.mT))).mT


def shifting(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.q(F.pad(h, (0, 0, 1, 0))[:, :-1])


def shifting_within(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.q(F.pad(h, (0, 0, 1, -1)))


def summing(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return m.q(h).cumsum(1)


def comparing(m: OneBranch, h: Tensor, memory: Tensor) -> Tensor:
    return (m.q(h) @ m.k(h).mT) @ m.v(h)


ATTENTIONS = {
    fused: False,
    fused_causal: True,
    fused_projections: False,
    written_out: False,
    in_indices: False,
    in_indices_length_first: False,
    in_indices_one_key_head: False,
    added_mask: True,
    masks_of_unlike_shapes: True,
    divided_scores: False,
    mask_of_the_hidden: True,
    mask_of_padding: False,
    mask_of_the_visible: True,
    banded_mask: False,
    among_others: True,
    among_others_not_causal: False,
}
ROLES = {
    **dict.fromkeys(ATTENTIONS, "self-attention"),
    crossing: "cross-attention",
    **dict.fromkeys((mlp, one_matrix, gated, gate_and_up_in_one, at_each_position), "ffn"),
    mixture: "moe",
    **dict.fromkeys((convolving, shifting, shifting_within, summing, comparing), "other mixer"),
}


def branch_of(code: Code) -> tuple[str, dict[str, str], Dataflow, fx.Node]:
    """The role of the branch, what each of its matrices projects by the name of its module, and where its stream begins."""
    torch.manual_seed(0)
    model = OneBranch(code)
    inputs = {"ids": torch.arange(2 * LENGTH).view(2, LENGTH) % 11, "memory_ids": torch.arange(2 * 9).view(2, 9) % 11}
    flow = Dataflow(capture(model, named_inputs(model, inputs)))
    (chain,) = residual_chains(flow)[0]
    (residual,) = chain
    region = flow.between(residual.base, residual.branches[0])
    cores = cores_in(region, find_attentions(flow))
    role = role_of(region, cores, residual.base, flow)
    found: tuple[Projection, ...] = describe_projections(region, role, cores, flow)
    return role, {one.name.removesuffix(".weight"): one.role for one in found}, flow, residual.base


@pytest.mark.parametrize("code", ROLES, ids=lambda code: code.__name__)
def test_the_role(code: Code) -> None:
    assert branch_of(code)[0] == ROLES[code]


@pytest.mark.parametrize("code", ATTENTIONS, ids=lambda code: code.__name__)
def test_whether_an_attention_is_causal(code: Code) -> None:
    _, _, flow, stream = branch_of(code)
    (core,) = find_attentions(flow)
    assert is_causal(core, stream, flow) is ATTENTIONS[code] and core.heads == HEADS


@pytest.mark.parametrize(
    ("code", "projections"),
    [
        (fused, {"q": "q", "k": "k", "v": "v", "out": "out"}),
        (written_out, {"q": "q", "k": "k", "v": "v", "out": "out"}),
        (crossing, {"q": "q", "k": "k", "v": "v", "out": "out"}),  # k and v read another sequence, outside the branch
        (fused_projections, {"qkv": "qkv", "out": "out"}),
        (mlp, {"up": "up", "down": "down"}),
        (gated, {"gate": "gate", "up": "up", "down": "down"}),
        (gate_and_up_in_one, {"both": "gate_up", "down": "down"}),
        (mixture, {"router": "router", "experts_up": "up", "experts_down": "down"}),
        (convolving, {"convolution": "projection"}),
        (at_each_position, {"pointwise_up": "up", "pointwise_down": "down"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_each_matrix_projects(code: Code, projections: dict[str, str]) -> None:
    assert branch_of(code)[1] == projections


@pytest.mark.parametrize("code", [mlp, mixture, convolving, comparing], ids=lambda code: code.__name__)
def test_what_has_no_softmax_over_keys_is_no_attention(code: Code) -> None:
    assert find_attentions(branch_of(code)[2]) == []
