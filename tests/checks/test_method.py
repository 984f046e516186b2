"""The method check: it agrees with every pass on every kind of model, and finds faults in the sources of the passes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.method_verdicts import verdict
from support.tiny_models import VOCABULARY, bert, built, gpt2, llama, t5, vit
from torch import nn
from torch.utils._pytree import tree_map_only

from retrofit.checks import replay
from retrofit.errors import DoesNotFitError
from retrofit.inputs.module_calls import RecordedCall
from retrofit.passbase.method_reference import SiteCall
from retrofit.passbase.protocol import parse_spec
from retrofit.passes import SequenceAltUp, SparseLoss
from retrofit.passes.altup.layers import AltUpLayer, Contraction, DynamicAltUpLayer
from retrofit.passes.altup.widening import WidthPropagation
from retrofit.passes.lsh_attention import seen_keys
from retrofit.passes.memory.external_memory import ExternalMemory, SoftmaxMemory
from retrofit.passes.memory.memory_layer import TokenIdReader
from retrofit.passes.merge_cross_attention.joint_attention import JointAttention
from retrofit.passes.merge_cross_attention.merged_layer import NoCrossAttention
from retrofit.passes.recurrence import recurrence as recurrence_pass
from retrofit.passes.recurrence.simple_recurrent_unit import Recurrence as RecurrentUnit
from retrofit.passes.sequence_altup.arguments import EvenAnchors
from retrofit.passes.sequence_altup.growing_anchors import GrowingAnchorLayer
from retrofit.passes.sequence_altup.reference import inside
from retrofit.passes.sequence_altup.strided_layers import SequenceAltUpLayer
from retrofit.passes.shared_moe import mixture_of_experts
from retrofit.passes.shared_moe.grouping import Group
from retrofit.passes.shared_moe.mixture_of_experts import MixtureOfExperts
from retrofit.passes.sparse_ffn import controller_fit, sparse_feed_forward, sparse_ffn
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.passes.sparse_qkv import sparse_attention, sparse_projections
from retrofit.passes.sum import SummedEmbedding
from retrofit.surgery.auxiliary_losses import ForwardWithAuxiliaryLosses

# ── What it says of a model ──────────────────────────────────────────────────────────────────────────────────────────────────────


def neox(**options: Any) -> Any:
    """Decoder whose query, key and value columns are interleaved head by head."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "initializer_range": 0.3, **sizes, **options}
    return built(transformers.GPTNeoXConfig(**given), transformers.GPTNeoXForCausalLM)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "t5": lambda: t5(num_layers=2, feed_forward_proj="gated-gelu"),
    "bert": lambda: bert(num_hidden_layers=2),
    "vit": lambda: vit(num_hidden_layers=2),
}
SPECS = (
    "altup(k=2)",
    "altup(k=3, init=lockstep)",
    "altup(k=2, coefficients=dense)",
    "altup(k=2, coefficients=dynamic)",
    "altup(k=2, embedding=recycled)",
    "altup(k=3, extra=8)",
    "altup(k=2, selection=same)",
    "sum",
    "memory",
    "memory(lookup=softmax, buckets=16, rank=3)",
    "memory(lookup=lsh, buckets=16, rank=2)",
    "memory(lookup=token-id, rank=2, beside=ffns)",
    "memory(lookup=softmax, buckets=16, beside=ffns)",
    "recurrence",
    "recurrence(rank=5, layers=0)",
    "recurrence(rank=3, bidirectional=true)",
    "lsh-attention(rounds=2, buckets=4, chunk=4)",
    "lsh-attention(rounds=1, buckets=2, chunk=3)",
    "merge-cross-attention",
    "merge-cross-attention(attentions=1, weight=0.5)",
    "merge-cross-attention(positions=first)",
    "reversible",
    "reversible(bits=1)",
    "sequence-altup(k=2, layers=all)",
    "sequence-altup(k=3, layers=all, method=stride-and-skip)",
    "sequence-altup(k=2, layers=all, method=average-pooling)",
    "sparse-ffn(sparsity=8)",
    "sparse-ffn(sparsity=4, multiply_by_controller=true, scale=true)",
    "shared-moe",
    "shared-moe(groups=0)",
    "shared-moe(experts=3, k=1, renormalize=false, capacity=0.7)",
    "shared-moe(share_attention=true, reinit=0.5)",
    "sparse-qkv",
    "sparse-qkv(variant=mult)",
    "sparse-qkv(variant=conv, output=mult-conv)",
    "sparse-qkv(kernel=1, output=mult)",
    "sparse-loss(modules=4)",
)
STRIDED = "sequence-altup(k=2, layers=all)"
MERGED = [spec for spec in SPECS if spec.startswith("merge-cross-attention")]  # of encoder-decoders
QUICK = {
    "llama": [spec for spec in SPECS if spec not in MERGED],
    "t5": list(dict.fromkeys((*SPECS[3::5], MERGED[0]))),
    "bert": SPECS[1::5],
    "gpt2": SPECS[2::5],
    "vit": SPECS[4::6],
}


def agrees(name: str, spec: str) -> None:
    try:
        found = verdict(MODELS[name](), spec)
    except DoesNotFitError:
        pytest.skip("the pass does not fit the model")
    assert found.status == "passed", f"{found.measured}\n{found.why}"
    assert "Error" not in found.why, f"the check itself failed: {found.why}"


@pytest.mark.first(8)
@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, specs in QUICK.items() for spec in specs])
def test_every_pass_computes_what_its_method_says(name: str, spec: str) -> None:
    agrees(name, spec)


@pytest.mark.long
@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name in MODELS for spec in SPECS if spec not in QUICK[name]])
def test_every_pass_computes_what_its_method_says_on_every_kind_of_model(name: str, spec: str) -> None:
    agrees(name, spec)


@pytest.mark.first(2)
@pytest.mark.parametrize("spec", ["altup(k=2)", "sparse-ffn(sparsity=8)", "memory"])
def test_a_model_that_has_trained_on_is_not_held_to_its_start(spec: str) -> None:
    assert verdict(llama(), spec, nudge=True).status == "passed"


@pytest.mark.long
def test_passes_after_each_other_are_each_held_to_their_own() -> None:
    found = verdict(llama(), "altup(k=2)", "memory(lookup=softmax, buckets=8, rank=2)", "sparse-ffn(sparsity=8)")
    assert found.status == "passed", found.why
    assert "7 modules" in found.measured


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("specs", [("memory", STRIDED), (STRIDED, "sparse-qkv")], ids=" + ".join)
def test_modules_inside_a_strided_layer_are_compared_on_its_tokens(specs: tuple[str, ...]) -> None:
    found = verdict(llama(), *specs, nudge=True)
    assert found.status == "passed", found.why
    assert "not compared" not in found.why, found.why


@dataclasses.dataclass
class Strided:
    """What the reference reads of a strided layer."""

    stream: tuple[str, ...] = ("x",)
    names: tuple[str, ...] = ("x",)
    tokens_first: bool = False
    training: bool = False


def test_what_a_strided_layer_makes_of_the_models_inputs() -> None:
    """k = 2: of three real tokens after two of padding, and of five; then of one more each, of which the first is no anchor."""

    def call(ids: list[list[int]], mask: list[list[int]], before: tuple[SiteCall, ...], cached: bool) -> SiteCall:
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.zeros(2, 7)}
        x = torch.zeros(2, len(ids[0]), 4)
        return SiteCall(Strided(), SequenceAltUp(k=2), (x,), {}, inputs, {}, before=before, cached=cached)  # type: ignore[arg-type]

    ids, mask = [[9, 9, 1, 2, 3], [4, 5, 6, 7, 8]], [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    alone = inside(call(ids, mask, (), cached=False))
    assert alone.inputs["input_ids"].tolist() == [[1, 3, 1], [4, 6, 8]] and alone.staying is None
    assert alone.inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    first = call(ids, mask, (), cached=True)
    stored = inside(first)
    assert stored.inputs["input_ids"].tolist() == [[1, 1, 3], [4, 6, 8]]
    assert stored.inputs["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    second = call([[10, 11], [12, 13]], [[*row, 1, 1] for row in mask], (first,), cached=True)
    later = inside(second)
    assert later.inputs["input_ids"].tolist() == [[11], [13]]
    assert later.inputs["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert torch.equal(later.inputs["labels"], torch.zeros(2, 7))


def test_rows_of_a_strided_layer_go_on_behind_their_own_anchors() -> None:
    """k = 2, one token of padding: the rows reach their anchors in turn, and what fills the other row does not stay."""
    mask, ids = torch.ones(2, 8, dtype=torch.long), torch.arange(16).view(2, 8)
    mask[0, 0] = 0
    before: tuple[SiteCall, ...] = ()
    expected = [
        ([[True, True, True], [True, True, True]], [[1, 1, 1], [1, 1, 1]]),
        ([[False], [True]], [[1, 1, 1, 0], [1, 1, 1, 1]]),
        ([[True], [False]], [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
    ]
    for (start, end), (staying, seen) in zip([(0, 6), (6, 7), (7, 8)], expected, strict=True):
        inputs = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        x = torch.zeros(2, end - start, 4)
        call = SiteCall(Strided(), SequenceAltUp(k=2), (x,), {}, inputs, {}, before=before, cached=True)  # type: ignore[arg-type]
        found = inside(call)
        assert found.staying is not None and found.staying.tolist() == staying
        assert found.inputs["attention_mask"].tolist() == seen
        before = (*before, call)


def test_a_pass_without_a_reference_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseLoss, "reference", None)
    found = verdict(llama(), "sparse-loss(modules=4)")
    assert found.status == "skipped" and "\n" not in found.why
    assert "formula" in found.why and "sparse-loss" in found.why and "MethodReference" in found.why


def test_a_pass_without_a_reference_is_named_beside_one_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseLoss, "reference", None)
    found = verdict(llama(), "sum", "sparse-loss(modules=4)")
    assert found.status == "passed" and found.measured
    assert "sparse-loss" in found.why and "sum" not in found.why


class UnreadMask(nn.Module):
    """A Llama that takes a padding mask and leaves it unread."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = llama()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.decoder(input_ids=input_ids, use_cache=False).logits


class TwoDecoders(nn.Module):
    """Two Llamas, the first of which is not shown the padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.unaware, self.aware = llama(), llama()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        first = self.unaware(input_ids=input_ids, use_cache=False).logits
        return first + self.aware(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class UnnamedCache(nn.Module):
    """A Llama that makes a cache in every forward, and does not say so in its signature."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = llama()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        return self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **kwargs).logits


def test_a_model_that_leaves_its_mask_unread_is_not_held_to_it() -> None:
    found = verdict(UnreadMask(), "recurrence(rank=4)", nudge=True)
    assert found.status == "passed", found.measured
    assert not found.why


@pytest.mark.long
def test_only_modules_that_are_shown_the_padding_are_held_to_it() -> None:
    found = verdict(TwoDecoders(), "sparse-qkv(modules=4)", nudge=True)
    assert found.status == "passed", found.measured
    assert not found.why


def test_a_cache_that_a_model_makes_in_training_is_not_used_up_by_the_comparison() -> None:
    found = verdict(UnnamedCache(), "recurrence(rank=4)", nudge=True)
    assert found.status == "passed", found.why


# ── Faults in the sources of the passes ──────────────────────────────────────────────────────────────────────────────────────────

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True)
class SourceFault:
    """A fault in the code of a pass, a model to apply that to, and what the check must name."""

    what: str
    patch: Patch
    spec: str
    names: str
    build: Callable[[], Any] = llama


FAULTS: list[SourceFault] = []


def fault(what: str, spec: str, names: str, build: Callable[[], Any] = llama) -> Callable[[Patch], Patch]:
    """Registers a function that puts a fault into a pass."""

    def register(patch: Patch) -> Patch:
        FAULTS.append(SourceFault(what, patch, spec, names, build))
        return patch

    return register


def around(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """The attribute `name` of `owner` becomes a function that calls `change` with the old one first."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        old = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(old, *args, **kwargs))

    return patch


fault("gate and up swapped", "sparse-ffn(sparsity=8)", "model.layers.0.mlp")(
    around(SparseFeedForward, "port_values", lambda old, self, x: old(self, x)[::-1])
)
fault("gate and up swapped in the plan", "sparse-ffn(sparsity=8)", "does not begin as the dense")(
    around(sparse_ffn, "feed_forwards", lambda old, *args: swap_ports(*old(*args)))
)
fault("the worst unit of each block", "sparse-ffn(sparsity=8)", "model.layers.0.mlp")(
    around(SparseFeedForward, "logits", lambda old, self, x, *more: -old(self, x, *more))
)
fault("the controller is never fitted", "sparse-ffn(sparsity=8)", "was not fitted")(
    around(controller_fit.Controller, "fit", lambda old, *args: unfitted(old(*args)))
)
fault("experts weighed by each other's gates", "shared-moe", "model.layers.0.mlp")(
    around(MixtureOfExperts, "combine", lambda old, self, x, gates, *more: old(self, x, gates.flip(-1), *more))
)
fault("the router's gates detached", "shared-moe", "moe.router.weight")(
    around(MixtureOfExperts, "combine", lambda old, self, x, gates, *more: old(self, x, gates.detach(), *more))
)
fault("the balance loss never added", "shared-moe", "to the model's own loss")(
    around(ForwardWithAuxiliaryLosses, "run", lambda old, self, *call: self.run_inner(*call))
)
fault("the balance loss detached", "shared-moe", "moe.router.weight")(
    around(mixture_of_experts, "balance_loss", lambda old, *args: old(*args).detach())
)
fault("the capacity rounded down", "shared-moe(capacity=0.7)", "in training mode")(
    around(MixtureOfExperts, "expert_capacity", lambda old, self, tokens: old(self, tokens) - 1)
)
fault("experts from the layers in reverse", "shared-moe", "does not begin as this layer's feed-forward")(
    around(Group, "sources", lambda old, self, experts: old(self, experts)[::-1])
)
fault("memory without its relu", "memory(lookup=softmax, buckets=16, rank=3)", "model.layers.0")(
    around(ExternalMemory, "by_gathering", lambda old, self, x, i: torch.einsum("td,tdr,ter->te", x, self.u[i], self.v[i]))
)
fault("memory's ids shifted", "memory", "ids it receives are not the model's")(
    around(TokenIdReader, "__call__", lambda old, *args: {name: ids.roll(1, -1) for name, ids in old(*args).items()})
)
fault("the jitter left out", "memory(lookup=softmax, buckets=16)", "it draws no uniform_")(
    around(SoftmaxMemory, "look_up", lambda old, self, x, ids: without_training(old, self, x, ids))
)
fault("P made from the layer's output", "altup(k=2, coefficients=dynamic)", "model.layers.0")(
    around(DynamicAltUpLayer, "coefficients", lambda old, self, block, y: old(self, y, y))
)
fault("wrong gradients of the contraction", "altup(k=2)", "the gradient of")(
    around(Contraction, "backward", lambda old, ctx, grad: halved_last(old(ctx, grad)))
)
fault("the block detached before the layer", "altup(k=2)", "the gradient of argument")(
    around(AltUpLayer, "block", lambda old, self, x, i: old(self, x, i).detach())
)
fault("every layer on the first block", "altup(k=2, init=lockstep)", "works on block 0")(
    lambda monkeypatch: monkeypatch.setattr(parse_spec("altup").__class__, "active", lambda self, depth: 0)
)
fault("a1 left out of the prediction", "sequence-altup(k=2, layers=all)", "model.layers.0")(
    around(SequenceAltUpLayer, "update", lambda old, self, x, c, anchors, earlier: x + anchors.spread(c, earlier))
)
fault("the first token after an anchor is taken", "sequence-altup(k=2, layers=all)", "what layer receives")(
    around(EvenAnchors, "pick", lambda old, self, x: old(self, x.roll(-1, 1)))
)
fault("between anchors the last correction is lost", "sequence-altup(k=3, layers=all)", "step by step on a cache")(
    lambda monkeypatch: monkeypatch.setattr(
        GrowingAnchorLayer, "earlier", property(lambda self: None if self.corrections is None else 0 * self.corrections[:, -1:])
    )
)
fault("columns in the inverse order", "sparse-qkv(output=keep)", "its columns lie otherwise", neox)(
    around(sparse_projections, "column_order", lambda old, projection: inverse(old(projection)))
)
fault("projections are never fitted", "sparse-qkv", "was not fitted")(around(sparse_projections, "fit", lambda old, *args: {}))
fault("the history is that of another sequence", "sparse-qkv", "step by step on a cache")(
    around(sparse_attention.TokenHistory, "last", lambda old, self: old(self).flip(0))
)
fault("the head is never fitted", "sparse-loss(modules=4)", "the fit to input feature")(
    around(parse_spec("sparse-loss").reference.modules and next(iter(SparseLoss.reference.modules)), "fit", lambda old, *args: None)
)
fault("the extra embedding of the next id", "sum", "model.embed_tokens")(
    around(SummedEmbedding, "look_up", lambda old, self, ids: old(self, (ids + 1) % VOCABULARY))
)

fault("the fused kernel sees one key too few", "lsh-attention(rounds=2, buckets=4, chunk=4)", "in float32 it is", gpt2)(
    around(seen_keys, "last_keys", lambda old, q, k, v, first, chunk, scale: old(q, k, v, first, chunk - 1, scale))
)
fault("the recurrence keeps no state in the cache", "recurrence(rank=3)", "decodes on a cache, and it receives none")(
    lambda monkeypatch: monkeypatch.setattr(recurrence_pass, "cache_among", lambda *_: None)
)
fault("a causal stack is read backwards too", "recurrence(rank=3, bidirectional=true)", "it reads both directions", t5)(
    around(RecurrentUnit, "__init__", lambda old, self, width, rank, _, like: old(self, width, rank, True, like))
)
fault("of many queries the other values in reverse", "merge-cross-attention", "on 13 tokens", t5)(
    around(
        JointAttention,
        "fused",
        lambda old, self, own, others, *more: old(self, own, dataclasses.replace(others, v=others.v.flip(2)), *more),
    )
)
fault("a cross-attention that is gone adds something", "merge-cross-attention(attentions=1)", "and not zeros", t5)(
    around(
        NoCrossAttention,
        "forward",
        lambda old, *args, **kwargs: tree_map_only(torch.Tensor, lambda value: value + 1, old(*args, **kwargs)),
    )
)


def swap_ports(sites: Any, near_misses: Any) -> Any:
    """The feed-forwards with the arguments of their hidden functions in reverse order."""
    return [dataclasses.replace(site, ports=site.ports[::-1]) for site in sites], near_misses


def plus_one(output: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda value: value + 1, output)


def unfitted(controller: Any) -> Any:
    return dataclasses.replace(controller, **{name: torch.zeros_like(value) for name, value in vars(controller).items()})


def without_training(look_up: Any, memory: Any, *args: Any) -> Any:
    memory.training = False
    return look_up(memory, *args)


def halved_last(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    *others, last = gradients
    return (*others, None if last is None else last / 2)


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


@pytest.mark.first(14)
@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.what)
def test_a_fault_in_a_pass_is_reported(one: SourceFault, monkeypatch: pytest.MonkeyPatch) -> None:
    one.patch(monkeypatch)
    found = verdict(one.build(), one.spec)
    assert found.status == "failed"
    assert one.names in found.why, found.why


__all__ = ["WidthPropagation", "sparse_feed_forward"]


# ── Large tables ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_of_a_large_table_is_that_of_its_rows_in_use(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else reads the table; look-ups alone give the table itself none."""
    monkeypatch.setattr(replay, "LARGE", 1)
    monkeypatch.setattr(replay, "TALL", 1)
    table, ids = nn.Embedding(50, 3, sparse=sparse), torch.tensor([7, 3, 7, 49])
    nothing_given: Any = types.SimpleNamespace(given=(), functions=())
    parameters = replay.PerturbedParameters.of(table, nothing_given, [RecordedCall((ids,), {}, None)])
    cotangent = torch.randn(4, 3, dtype=torch.float64)

    def looked_up(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (rows * cotangent).tanh().sum() + weight[7].square().sum() * weight[ids].sum()

    def value(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return looked_up(rows, weight) + weight[8].exp().sum() + (weight[3:9] ** 3).sum() + weight[torch.tensor([8, 3])].prod()

    plain = parameters.leaves["weight"].detach().clone().requires_grad_()
    expected = torch.autograd.grad(value(plain[ids], plain), plain)[0]
    with parameters.in_place():
        (found,) = parameters.gradients(value(table(ids), table.weight), [])
        (of_table,) = torch.autograd.grad(looked_up(table(ids), table.weight), [table.weight], allow_unused=True)
    assert found is not None and of_table is None
    torch.testing.assert_close(found, expected[[0, 3, 7, 49]])
