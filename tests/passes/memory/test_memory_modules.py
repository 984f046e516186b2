"""External memory's tables against plain loops over the papers' formulas, and keywords injected into submodules."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import zoo
from support.own_models import Own
from torch import Tensor, nn

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passes import Memory
from retrofit.passes.memory.external_memory import ACTIVATIONS, ExternalMemory, GatedMemory, LshMemory, SoftmaxMemory, TokenIdMemory
from retrofit.passes.memory.memory_layer import MemoryLayer
from retrofit.surgery.wrappers import InjectingCopy, InjectingForward, Wrapper, call_with_keywords

KINDS: dict[str, tuple[type[ExternalMemory], dict[str, Any]]] = {
    "token-id": (TokenIdMemory, {}),
    "softmax": (SoftmaxMemory, {"jitter": 0.01}),
    "lsh": (LshMemory, {}),
}


def made(lookup: str, buckets: int, width: int, rank: int, dtype: torch.dtype = torch.float32) -> ExternalMemory:
    """A table of which nothing is zero any more."""
    kind, options = KINDS[lookup]
    memory = kind(buckets, width, rank, torch.empty(0, dtype=dtype), **options).eval()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return memory


def looked_up(memory: ExternalMemory, x: Tensor, token: int) -> tuple[int, float]:
    """The index and the weight for one token, by the formula of its lookup."""
    if isinstance(memory, TokenIdMemory):
        return token, 1.0
    if isinstance(memory, SoftmaxMemory):
        logits = [float(row @ x) for row in memory.w]
        total = sum(math.exp(logit - max(logits)) for logit in logits)
        best = logits.index(max(logits))
        return best, math.exp(logits[best] - max(logits)) / total
    assert isinstance(memory, LshMemory)
    sheaves = max(1, math.ceil(math.log2(memory.buckets) / 2))
    slots = next(s for s in range(1, memory.buckets + 1) if s**sheaves >= memory.buckets)
    unit = x * math.sqrt(len(x)) / x.norm()
    index = 0
    for k, (normal, offset) in enumerate(zip(memory.planes, memory.offsets, strict=True)):
        index += slots**k * (math.floor(float(normal @ unit + offset)) % slots)
    return index % memory.buckets, 1.0


def by_the_formula(memory: ExternalMemory, x: Tensor, ids: Tensor) -> Tensor:
    """w_i(x) f_i(x), token by token, in double precision."""
    memory = copy.deepcopy(memory).double()
    out = torch.zeros_like(x, dtype=torch.float64)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).reshape(-1, x.dim() - 1).tolist():
        token = x[tuple(place)].double()
        i, weight = looked_up(memory, token, int(ids[tuple(place)]))
        if memory.rank:
            hidden = [max(0.0, float(memory.u[i][:, unit] @ token)) for unit in range(memory.rank)]
            value = sum(h * memory.v[i][:, unit] for unit, h in enumerate(hidden))
        else:
            value = memory.b[i]
        out[tuple(place)] = weight * value  # type: ignore[operator]
    return out


def distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1))


@settings(max_examples=60, deadline=None)
@given(
    lookup=st.sampled_from(sorted(KINDS)),
    buckets=st.integers(1, 40),
    width=st.integers(2, 12),
    rank=st.integers(0, 5),
    batch=st.integers(1, 3),
    length=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_a_table_computes_its_formula(lookup: str, buckets: int, width: int, rank: int, batch: int, length: int, seed: int) -> None:
    torch.manual_seed(seed)
    memory = made(lookup, buckets, width, rank)
    x, ids = torch.randn(batch, length, width), torch.randint(buckets, (batch, length))
    with torch.no_grad():
        assert distance(memory(x, ids), by_the_formula(memory, x, ids)) <= 1e-4


def gated(activation: str) -> GatedMemory:
    """A gated table of 6 entries of rank 3 for a width of 8, of which nothing is zero any more."""
    memory = GatedMemory(6, 8, 3, torch.empty(0), activation=activation)
    for parameter in memory.parameters():
        nn.init.normal_(parameter)
    return memory


OWN_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "gelu": lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2,
    "gelu-tanh": lambda z: z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z / (1 + math.exp(-z)),
    "relu": lambda z: max(z, 0.0),
    "relu2": lambda z: max(z, 0.0) ** 2,
    "quick-gelu": lambda z: z / (1 + math.exp(-1.702 * z)),
}


@torch.no_grad()
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_gated_table_computes_its_formula(activation: str) -> None:
    torch.manual_seed(0)
    memory = gated(activation)
    x, ids = torch.randn(2, 3, 8), torch.tensor([[0, 5, 2], [2, 6, 1]])
    y = memory(x, ids)
    for row in range(2):
        for token in range(3):
            i = int(ids[row, token])
            units = [
                OWN_ACTIVATIONS[activation](float(memory.w_gate[unit] @ x[row, token])) * float(memory.p[i, unit]) if i < 6 else 0.0
                for unit in range(3)
            ]
            expected = torch.tensor([sum(float(memory.w_up[out, unit]) * units[unit] for unit in range(3)) for out in range(8)])
            torch.testing.assert_close(y[row, token], expected, atol=1e-5, rtol=1e-5)


def test_a_gated_table_begins_at_zero_and_shares_its_matrices() -> None:
    memory = GatedMemory(10, 16, 3, torch.empty(0), activation="silu", sparse=True)
    x, ids = torch.randn(2, 7, 16), torch.randint(10, (2, 7))
    assert not memory(x, ids).any()
    assert sum(parameter.numel() for parameter in memory.parameters()) == memory.count(10, 16, 3) == 10 * 3 + 2 * 16 * 3
    memory(x, ids).sum().backward()
    still = {name for name, parameter in memory.named_parameters() if not parameter.grad.to_dense().any()}
    assert still == set(memory.late_parameters()) and memory.p.grad.is_sparse


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("causal/llama", "silu"),
        ("causal/gpt2", "gelu-tanh"),
        ("seq2seq/t5", "relu"),
        ("masked/bert", "gelu"),
        ("causal/nemotron", "relu2"),
    ],
)
def test_the_activation_is_that_of_the_models_feed_forwards(identity: str, name: str) -> None:
    model = zoo.build(zoo.entry(identity))
    retrofit.apply(model, "memory(form=gated, rank=2, layers=0)", verify=False)
    (applied,) = retrofit.recipe(model) or ()
    assert applied.activation == name and {part.activation for part in model.modules() if isinstance(part, GatedMemory)} == {name}


def test_where_no_feed_forward_is_found_the_activation_is_gelu() -> None:
    model = zoo.build(zoo.entry("causal/mixtral"))
    retrofit.apply(model, "memory(form=gated, rank=2, layers=0)", verify=False)
    assert [applied.activation for applied in retrofit.recipe(model) or ()] == ["gelu"]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"lookup": "softmax", "rank": 2}, "form"), ({"lookup": "lsh", "rank": 2}, "form"), ({}, "rank"), ({"rank": 0}, "rank")],
)
def test_gated_tables_need_token_ids_and_a_rank(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError) as refused:
        Memory(form="gated", **options)
    assert refused.value.option == named and refused.value.remedy


@pytest.mark.parametrize("lookup", ["token-id", "softmax"])
def test_bfloat16_is_the_formula_too(lookup: str) -> None:
    torch.manual_seed(0)
    memory = made(lookup, 9, 16, 4, torch.bfloat16)
    x, ids = torch.randn(2, 5, 16, dtype=torch.bfloat16), torch.randint(9, (2, 5))
    with torch.no_grad():
        y = memory(x, ids)
        assert y.dtype == torch.bfloat16 and distance(y, by_the_formula(memory, x, ids)) <= 3e-2


@settings(max_examples=25, deadline=None)
@given(buckets=st.integers(1, 20), width=st.sampled_from([4, 8, 24]), rank=st.integers(1, 9), tokens=st.integers(1, 90))
def test_sorting_tokens_by_expert_and_gathering_experts_agree(buckets: int, width: int, rank: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    memory = made("softmax", buckets, width, rank)
    x, i, seen = torch.randn(tokens, width, requires_grad=True), torch.randint(buckets, (tokens,)), torch.randn(tokens, width)
    results = []
    for way in (memory.by_gathering, memory.by_grouping):
        y = way(x, i)
        results.append((y, *torch.autograd.grad(y, (x, memory.u, memory.v), seen)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_many_tokens_are_sorted_and_few_are_gathered() -> None:
    memory = made("softmax", 8, 16, 4)
    assert memory.gathers(1) and not memory.gathers(4096)
    assert made("token-id", 8, 16, 4).gathers(4096)


@pytest.mark.parametrize("lookup", sorted(KINDS))
@pytest.mark.parametrize("rank", [0, 3])
def test_a_new_table_is_zero_and_has_as_many_parameters_as_its_formula(lookup: str, rank: int) -> None:
    kind, options = KINDS[lookup]
    memory = kind(10, 16, rank, torch.empty(0), **options)
    assert not memory(torch.randn(2, 7, 16), torch.randint(10, (2, 7))).any()
    count = 2 * max(rank, 1) * 10 * 16 if rank else 10 * 16
    count += 10 * 16 if lookup == "softmax" else 0  # W
    assert sum(parameter.numel() for parameter in memory.parameters()) == memory.count(10, 16, rank) == count


def test_the_draws_are_the_papers() -> None:
    torch.manual_seed(0)
    memory = SoftmaxMemory(500, 400, 8, torch.empty(0), jitter=0.01)
    assert abs(float(memory.w.detach().std()) - 0.02) < 1e-3
    assert abs(float(memory.u.detach().std()) - 400**-0.5) < 1e-3


@torch.no_grad()
def test_jitter_stirs_only_the_router_and_only_in_training() -> None:
    torch.manual_seed(0)
    memory = made("softmax", 12, 16, 0)
    x = torch.randn(3, 50, 16)
    (index, weight), (again, same) = memory.look_up(x, None), memory.look_up(x, None)
    assert torch.equal(index, again) and torch.equal(weight, same)
    memory.train()
    noisy = memory.look_up(x, None)[1]
    assert noisy is not None and not torch.equal(noisy, weight)
    logits = (x.unsqueeze(-2) * memory.w).abs().sum(-1).max() * 0.01  # the most a logit can move
    assert float((noisy.log() - weight.log()).abs().max()) <= 2 * float(logits)
    memory.jitter = 0.0
    assert torch.equal(memory.look_up(x, None)[1], weight)


def test_hyperplanes_are_parallel_and_one_apart_and_buckets_are_used() -> None:
    torch.manual_seed(0)
    memory = made("lsh", 128, 64, 0)
    x = torch.randn(4000, 64)
    index = memory.look_up(x, None)[0]
    assert torch.equal(index, memory.look_up(7 * x, None)[0])  # only the direction counts
    share = torch.bincount(index, minlength=128) / len(x)
    assert float(share.max()) < 0.05 and int((share > 0).sum()) > 100
    near = (x + 0.01 * torch.randn_like(x), x + torch.randn_like(x))
    kept = [float((memory.look_up(other, None)[0] == index).float().mean()) for other in near]
    assert kept[0] > 0.9 and kept[0] > kept[1] > 1 / 128  # near ones share a bucket more often than far ones


def test_ids_beyond_the_table_get_nothing() -> None:
    memory = made("token-id", 5, 8, 0)
    y = memory(torch.zeros(1, 3, 8), torch.tensor([[4, 5, 900]]))
    assert torch.equal(y[0, 0], memory.b[4]) and not y[0, 1:].any()


@pytest.mark.parametrize("ids", [None, torch.zeros(2, 3, dtype=torch.long)])
def test_a_table_by_token_id_needs_one_id_a_token(ids: Tensor | None) -> None:
    with pytest.raises(DoesNotFitError, match="ids"):
        made("token-id", 5, 8, 0)(torch.zeros(2, 4, 8), ids)


def test_sparse_gradients_hold_the_rows_that_were_looked_up() -> None:
    memory = TokenIdMemory(100, 8, 0, torch.empty(0), sparse=True)
    memory(torch.zeros(1, 3, 8), torch.tensor([[4, 9, 4]])).sum().backward()
    assert memory.b.grad is not None and memory.b.grad.is_sparse
    assert memory.b.grad.coalesce().indices().tolist() == [[4, 9]]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_experts_with_sparse_gradients_learn_what_those_with_dense_ones_learn(optimizer: Any) -> None:
    tables = [TokenIdMemory(100, 8, 3, torch.empty(0), sparse=sparse) for sparse in (True, False)]
    x, ids = torch.rand(2, 3, 8) + 0.1, torch.tensor([[4, 9, 4], [0, 99, 9]])
    values = [torch.rand_like(one) + 0.1 for one in tables[1].parameters()]  # no hidden unit is cut off by the relu
    gradients = []
    for memory in tables:
        for parameter, value in zip(memory.parameters(), values, strict=True):
            parameter.data.copy_(value)
        memory(x, ids).square().sum().backward()
        gradients.append([one.grad for one in memory.parameters()])
    assert all(one.is_sparse and one.coalesce().indices().tolist() == [[0, 4, 9, 99]] for one in gradients[0])
    torch.testing.assert_close([one.to_dense() for one in gradients[0]], gradients[1])
    step = optimizer(tables[0].parameters(), lr=0.1)
    step.step()
    moved = (tables[0].u != values[0]).flatten(1).any(1).nonzero().flatten()
    assert moved.tolist() == [0, 4, 9, 99]


@pytest.mark.parametrize(
    "options",
    [
        {"lookup": "hash"},
        {"buckets": 0},
        {"rank": -1},
        {"beside": "heads"},
        {"jitter": -0.1},
        {"sparse": "some"},
        {"form": "own"},
        {"activation": "sine"},
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        Memory(**options)
    assert refused.value.option in options


# ── Keywords injected into a module's submodules ─────────────────────────────────────────────────────────────────────────────────


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.kind = "leaf"

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return self.weight * x if extra is None else self.weight * x + extra


class Tree(nn.Module):
    """Its code passes its leaves nothing but x."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Leaf(), Leaf()])
        self.deep = nn.Sequential(nn.Sequential(Leaf()))

    def forward(self, x: Tensor, ids: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        for branch in self.branches:
            assert branch.kind == "leaf"
            x = branch(x)
        return scale * self.deep(x)


class ReadIds:
    def __call__(self, args: Any, kwargs: Any) -> dict[str, Any]:
        return {"extra": kwargs["ids"]}


def test_keywords_reach_the_named_submodules_and_the_module_stays_as_it_was() -> None:
    tree, one = Tree(), torch.tensor(1.0)
    before = {name: id(module) for name, module in tree.named_modules()}
    with torch.no_grad():
        assert float(call_with_keywords(tree, ["branches.1", "deep.0.0"], {"extra": one}, (one,), {})) == 3.0
        assert float(tree(one)) == 1.0
    assert {name: id(module) for name, module in tree.named_modules()} == before
    assert InjectingCopy(tree, [], {}).copy is tree


@pytest.mark.first(1)
@pytest.mark.parametrize("fails", [False, True])
def test_compiled_code_that_breaks_or_fails_leaves_the_module_as_it_was(fails: bool) -> None:
    class Broken(Tree):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(x, *args, **kwargs)
            torch._dynamo.graph_break()
            if fails:
                raise ValueError
            return output

    tree, one = Broken(), torch.tensor(1.0)
    before = dict(tree.named_modules())
    call = torch.compile(lambda x: call_with_keywords(tree, ["branches.1", "deep.0.0"], {"extra": one}, (x,), {}), backend="eager")
    with torch.no_grad(), pytest.raises(ValueError) if fails else contextlib.nullcontext():
        assert float(call(one)) == 3.0
    assert dict(tree.named_modules()) == before


class Passthrough(Wrapper):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


@torch.no_grad()
def test_a_path_leads_through_a_wrapper() -> None:
    class Named(nn.Module):  # its name for a child is a wrapper's name for its module
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList([Leaf()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer[0](x)

    tree, one = Tree(), torch.tensor(1.0)
    tree.deep[0] = Passthrough(Passthrough(nn.Sequential(Passthrough(Named()))))
    assert float(call_with_keywords(tree, ["deep.0.0.layer.0"], {"extra": one}, (one,), {})) == 2.0
    assert float(call_with_keywords(tree.deep[0], ["layer.0.layer.0"], {"extra": one}, (one,), {})) == 2.0
    assert float(tree(one)) == 1.0


def test_attributes_set_by_the_code_are_written_back() -> None:
    class Counting(Tree):
        calls = 0

        def forward(self, x: Tensor, ids: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            self.calls += 1
            return super().forward(x, ids, scale=scale)

    tree = Counting()
    tree.forward = InjectingForward(tree, ["branches.0"], ReadIds())  # type: ignore[method-assign, assignment]
    for number in range(3):
        tree(torch.tensor(1.0), ids=torch.tensor(1.0))
        assert tree.calls == number + 1
    assert type(tree.branches[0]) is Leaf and isinstance(vars(tree)["forward"], InjectingForward)


def test_an_injecting_forward_keeps_the_signature_and_follows_copies() -> None:
    tree = Tree()
    signature = inspect.signature(tree.forward)
    tree.forward = InjectingForward(tree, ["branches.0"], ReadIds())  # type: ignore[method-assign, assignment]
    assert inspect.signature(tree.forward) == signature
    one, five = torch.tensor(1.0), torch.tensor(5.0)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(tree)))
    with torch.no_grad():
        twin.branches[0].weight.fill_(3.0)
    assert float(tree(one, ids=five)) == 6.0 and float(twin(one, ids=five, scale=2.0)) == 16.0


def test_calls_in_several_threads_do_not_meet() -> None:
    tree = Tree()
    tree.forward = InjectingForward(tree, ["branches.0", "deep.0.0"], ReadIds())  # type: ignore[method-assign, assignment]
    wrong: list[float] = []

    def work(value: float) -> None:
        for _ in range(200):
            y = float(tree(torch.tensor(1.0), ids=torch.tensor(value)))
            if y != 1.0 + 2 * value:
                wrong.append(y)

    threads = [threading.Thread(target=work, args=(float(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_wrapped_layer_never_sees_the_ids() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return 2 * x, "kept"

    layer = MemoryLayer(Plain(), made("token-id", 5, 8, 0), stream_out=0)
    x, ids = torch.randn(1, 2, 8), torch.tensor([[1, 3]])
    y, rest = layer(x, token_ids=ids)
    assert torch.equal(y, 2 * x + layer.memory.b[ids]) and rest == "kept"


# A model whose config is its own.


@dataclasses.dataclass(frozen=True)
class Frozen:
    width: int = 24


@pytest.mark.first(1)
@pytest.mark.parametrize("config", [{"width": 24}, Frozen()], ids=["a mapping", "a frozen dataclass"])
def test_a_config_that_takes_no_attributes_stays_as_it_is(config: Any) -> None:
    model = Own()
    model.config = config
    before = copy.deepcopy(config)
    retrofit.apply(model, Memory())
    assert model.config == before and sum(isinstance(module, MemoryLayer) for module in model.modules()) == 3
