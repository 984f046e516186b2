"""The mixture of experts against plain loops written from the paper's formulas, and against transformers' own modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixtures import D, make
from support.tiny_models import llama
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.integrations import moe as moe_integration
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.switch_transformers import modeling_switch_transformers as switch

import retrofit
from retrofit.passbase.method_reference import SiteCall
from retrofit.passes.activation_sparsity.masked_products import MaskedProducts
from retrofit.passes.compiled_products import products_of_matrices
from retrofit.passes.shared_moe import mixture_of_experts
from retrofit.passes.shared_moe.mixture_of_experts import MixtureOfExperts, balance_loss, grouped_product
from retrofit.passes.shared_moe.reference import moe_block
from retrofit.passes.shared_moe.shared_moe import SharedMoE
from retrofit.program.tracing import both_kept
from retrofit.surgery.auxiliary_losses import auxiliary_losses


def expert(moe: MixtureOfExperts, i: int, x: Tensor, hidden: Callable[..., Tensor]) -> Tensor:
    """e_i(x) of one token."""

    def product(name: str, v: Tensor) -> Tensor:
        matrices = getattr(moe, name)
        return matrices.weight[i] @ v + (0 if matrices.bias is None else matrices.bias[i])

    z = [product(name, x) for name in moe.into]
    return product("down", hidden(*(z[port.matrix][port.start :: port.step][: moe.units] for port in moe.ports)))


def looped(moe: MixtureOfExperts, x: Tensor, hidden: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Eq. 1 to 5 token by token, and the balance loss."""
    capacity = math.inf
    if moe.training and moe.capacity is not None:
        capacity = math.ceil(round(moe.capacity * moe.k * len(x) / moe.experts, 6))
    filled = [0] * moe.experts
    sent, mean = torch.zeros(moe.experts), torch.zeros(moe.experts)
    rows = []
    for token in x:
        p = (moe.router.weight.float() @ token.float()).softmax(0)
        selected = sorted(range(moe.experts), key=lambda i: -float(p.detach()[i]))[: moe.k]
        total = sum(p[i] for i in selected) if moe.renormalize else 1.0
        y = torch.zeros(D, dtype=x.dtype)
        for i in selected:
            sent[i] += 1 / len(x)
            filled[i] += 1
            if filled[i] <= capacity:
                y = y + (p[i] / total).to(x.dtype) * expert(moe, i, token, hidden)
        mean = mean + p / len(x)
        rows.append(y)
    return torch.stack(rows), moe.experts * (sent * mean).sum()


forms = st.fixed_dictionaries(
    {
        "experts": st.integers(1, 6),
        "units": st.sampled_from([4, 7, 16]),
        "gated": st.sampled_from(["", "two", "halves", "turns"]),
        "bias": st.booleans(),
        "renormalize": st.booleans(),
        "capacity": st.sampled_from([None, 0.5, 1.0, 1.2]),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
    }
)


@settings(max_examples=40, deadline=None)
@given(form=forms, k=st.integers(1, 6), tokens=st.integers(1, 20), training=st.booleans())
def test_the_output_and_the_balance_loss_are_the_papers(form: dict[str, Any], k: int, tokens: int, training: bool) -> None:
    moe, hidden = make(k=min(k, form["experts"]), balance=0.5, **form)
    moe.train(training)
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens), dtype=form["dtype"])
    with auxiliary_losses() as losses:
        y = moe(x, hidden)
    expected, balance = looped(moe, x, hidden)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert len(losses) == training
    for loss in losses:
        torch.testing.assert_close(loss, 0.5 * balance, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gated", ["", "two", "turns"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_are_those_of_the_plain_loop(gated: str, renormalize: bool) -> None:
    moe, hidden = make(gated=gated, renormalize=renormalize, capacity=0.8, balance=0.1)
    x = torch.randn(13, D, generator=torch.Generator().manual_seed(1))
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with auxiliary_losses() as losses:
        (moe(inputs[0], hidden).square().sum() + sum(losses)).backward()
    ours = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    moe.zero_grad()
    y, balance = looped(moe, inputs[1], hidden)
    (y.square().sum() + 0.1 * balance).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(experts=st.integers(2, 6), k=st.integers(1, 3), tokens=st.integers(1, 30))
def test_routing_outputs_and_balance_are_mixtrals(experts: int, k: int, tokens: int) -> None:
    k = min(k, experts)
    moe, hidden = make(experts, k, units=16, gated="halves", bias=False, balance=1.0)
    config = MixtralConfig(hidden_size=D, intermediate_size=16, num_local_experts=experts, num_experts_per_tok=k)
    config._experts_implementation = "eager"
    theirs = mixtral.MixtralSparseMoeBlock(config)
    theirs.gate.weight, theirs.experts.gate_up_proj = moe.router.weight, moe.gate_up.weight
    theirs.experts.down_proj = moe.down.weight
    x = torch.randn(1, tokens, D, generator=torch.Generator().manual_seed(tokens))
    logits, scores, indices = theirs.gate(x[0])
    gates, selected = moe.eval().route(x[0])
    assert torch.equal(indices, selected)
    torch.testing.assert_close(gates, scores)
    output = theirs(x)
    torch.testing.assert_close(
        moe(x[0], hidden), (output[0] if isinstance(output, tuple) else output).view(-1, D), rtol=1e-4, atol=1e-5
    )
    with auxiliary_losses() as losses:
        moe.train()(x[0], hidden)
    torch.testing.assert_close(losses[0], mixtral.load_balancing_loss_func((logits,), experts, k))


@settings(max_examples=40, deadline=None)
@given(
    experts=st.integers(1, 6),
    k=st.integers(1, 6),
    tokens=st.integers(1, 20),
    padding=st.integers(0, 20),
    capacity=st.floats(0.1, 2.0),
    renormalize=st.booleans(),
)
def test_padding_at_the_end_uses_no_capacity_and_changes_nothing(
    experts: int, k: int, tokens: int, padding: int, capacity: float, renormalize: bool
) -> None:
    """An expert keeps its first B tokens in training, so later ones displace none; in evaluation it keeps all."""
    moe, hidden = make(experts, min(k, experts), capacity=capacity, renormalize=renormalize)
    generator = torch.Generator().manual_seed(tokens)
    x, more = (torch.randn(count, D, generator=generator) for count in (tokens, padding))
    gates, selected = moe.train().route(x)
    for e in range(experts):
        kept = (gates > 0)[selected == e]
        assert int(kept.sum()) == min(len(kept), moe.expert_capacity(tokens)) and bool(kept[: moe.expert_capacity(tokens)].all())
    padded, same = moe.route(torch.cat([x, more]))
    assert torch.equal(same[:tokens], selected)
    torch.testing.assert_close(padded[:tokens][gates > 0], gates[gates > 0])
    moe.eval()
    torch.testing.assert_close(moe(torch.cat([x, more]), hidden)[:tokens], moe(x, hidden), rtol=1e-5, atol=1e-6)
    sums = moe.route(x)[0].sum(-1)
    if renormalize or k >= experts:
        torch.testing.assert_close(sums, torch.ones(tokens))
    else:
        assert bool((sums < 1).all())


@pytest.mark.parametrize("tokens", [5, 16, 33])
def test_capacity_and_balance_are_switch_transformers(tokens: int) -> None:
    """One expert a token and gates as they are; tokens above the capacity are dropped."""
    moe, _ = make(4, 1, renormalize=False, capacity=0.9, balance=1.0)
    config = SwitchTransformersConfig(
        hidden_size=D, num_experts=4, expert_capacity=moe.expert_capacity(tokens), router_jitter_noise=0.0
    )
    router = switch.SwitchTransformersTop1Router(config)
    router.classifier.weight = moe.router.weight
    x = torch.randn(1, tokens, D, generator=torch.Generator().manual_seed(tokens))
    dispatched, probability, logits = router(x)
    if dispatched.is_floating_point():
        pytest.skip("the router of this version of transformers counts every token by itself, so that no expert is full")
    with auxiliary_losses() as losses:
        gates, selected = moe.train().route(x[0])
    kept = dispatched[0].sum(-1).bool()
    assert 0 < int(kept.sum()) < tokens, "the capacity must leave some out, and not all"
    assert torch.equal(gates[:, 0] > 0, kept)
    assert torch.equal(selected[kept, 0], dispatched[0].argmax(-1)[kept])
    torch.testing.assert_close(gates[kept, 0], probability[0, kept, 0])
    expected = switch.load_balancing_loss_func(logits.softmax(-1), logits.argmax(-1))
    torch.testing.assert_close(losses[0], expected)


def test_noise_is_normal_and_only_in_training() -> None:
    moe, _ = make(3, 3, renormalize=False, noise=0.25)
    x = torch.zeros(20_000, D)  # equal logits: differences of log-probabilities are those of the noise
    torch.manual_seed(0)
    gates, selected = moe.train().route(x)
    logs = torch.empty(len(x), 3).scatter_(1, selected, gates.log())
    difference = logs[:, 0] - logs[:, 1]
    assert float(difference.detach().std()) == pytest.approx(0.25 * math.sqrt(2), rel=0.03)
    assert abs(float(difference.mean())) < 0.01
    assert float(moe.eval().route(x)[0].std()) < 1e-6


def test_the_router_works_in_float32() -> None:
    moe, hidden = make(dtype=torch.bfloat16)
    x = torch.randn(9, D).bfloat16()
    exact = F.linear(x.float(), moe.router.weight.float())
    assert torch.equal(moe.router(x), exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe.router(x), exact)
    assert moe(x, hidden).dtype == torch.bfloat16


def test_autocast_computes_the_experts_in_its_dtype() -> None:
    moe, hidden = make(capacity=1.0)
    x = torch.randn(40, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x, hidden)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), moe(x, hidden), rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in moe.parameters())


def test_experts_that_get_no_token_and_no_tokens_at_all() -> None:
    moe, hidden = make(6, 1)
    assert moe(torch.randn(1, D), hidden).shape == (1, D)
    assert moe.eval()(torch.empty(0, D), hidden).shape == (0, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(8, 16), (7, 16), (8, 5), (3, 3)])
def test_products_of_every_size(size: tuple[int, int], dtype: torch.dtype) -> None:
    """With a kernel or without one, and with groups of no row."""
    weight, rows = torch.randn(3, *size).to(dtype), torch.randn(10, size[0]).to(dtype)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    expected = torch.cat([rows[:4] @ weight[0], rows[4:] @ weight[2]])
    torch.testing.assert_close(grouped_product(rows, weight, ends), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [{"gated": "two", "bias": True}, {"gated": "turns", "k": 2, "renormalize": False}, {"k": 1}])
def test_few_tokens_use_compiled_products(form: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a mode of torch is there to see every product, as that of masked experts is, or a product is hooked."""
    moe, hidden = make(**form)
    moe.to(dtype).eval()
    calls: list[int] = []

    def counted(rows: Tensor, *others: Any) -> Tensor | None:
        calls.append(len(rows))
        return products_of_matrices(rows, *others)

    monkeypatch.setattr(mixture_of_experts, "products_of_matrices", counted)
    monkeypatch.setattr(mixture_of_experts, "SMALLEST", 1)
    for tokens in (1, 2, 7, 16 * moe.stacked + 1):
        x = torch.randn(1, tokens, D).to(dtype)
        expected = (len(moe.into) + 1) * (tokens * moe.k <= mixture_of_experts.EACH[dtype] * moe.stacked)
        with torch.no_grad():
            y = moe(x, hidden)
            assert len(calls) == expected
            with MaskedProducts([]):
                torch.testing.assert_close(y, moe(x, hidden), rtol=2e-2, atol=2e-2)
            handle = moe.down.register_forward_hook(lambda module, args, y: y)
            torch.testing.assert_close(y, moe(x, hidden), rtol=2e-2, atol=2e-2)
            handle.remove()
        torch.testing.assert_close(y, moe(x, hidden), rtol=2e-2, atol=2e-2)  # with gradients
        assert len(calls) == expected
        calls.clear()


class OtherWeight(nn.Parameter):
    """A weight of a class of its own, as quantized ones are: its memory may hold anything."""


def of_another_class(moe: MixtureOfExperts) -> None:
    moe.down.weight = OtherWeight(moe.down.weight.detach())


def with_another_forward(moe: MixtureOfExperts) -> None:
    """As accelerate does: the weights are elsewhere until the module is called."""
    weight, forward = moe.down.weight, moe.down.forward

    def loaded(*args: Any) -> Tensor:
        moe.down.weight = weight
        try:
            return forward(*args)
        finally:
            moe.down.weight = nn.Parameter(weight.detach().to("meta"))

    moe.down.weight = nn.Parameter(weight.detach().to("meta"))
    moe.down.forward = loaded  # type: ignore[method-assign]


@torch.no_grad()
@pytest.mark.parametrize("change", [of_another_class, with_another_forward])
def test_only_plain_weights_are_read_in_place(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_of_experts, "SMALLEST", 1)
    moe, hidden = make(k=2, gated="two")
    moe.eval()
    x = torch.randn(3, D)
    y = moe(x, hidden)
    monkeypatch.setattr(mixture_of_experts, "products_of_experts", None)
    change(moe)
    torch.testing.assert_close(moe(x, hidden), y)


@torch.no_grad()
@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("form", [{"gated": "two", "bias": True}, {"gated": "turns", "k": 2, "renormalize": False}])
def test_compiled_code_for_any_number_of_tokens_reads_experts_in_place(
    form: dict[str, Any], has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe, hidden = make(**form)
    moe.eval()
    gathered = copy.deepcopy(moe)
    monkeypatch.setattr(mixture_of_experts, "SMALLEST", 1)
    if not has_compiler:
        monkeypatch.setattr(mixture_of_experts, "products_of_matrices", lambda *_: None)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=backend)
    monkeypatch.setattr(gathered, "combine_in_place", None)
    for tokens in (2, 5, 16 * moe.stacked + 1):
        x = torch.randn(tokens, D)
        torch.testing.assert_close(compiled(x, hidden), gathered(x, hidden))
        torch.testing.assert_close(moe(x, hidden), gathered(x, hidden))
    assert len(graphs) == 1 and "ops.retrofit.products_of_experts" in graphs[0]


@pytest.mark.first(1)
@pytest.mark.parametrize("training", [False, True])
def test_compiles_as_one_graph(training: bool) -> None:
    moe, hidden = make(gated="two", units=16, capacity=1.0, balance=0.1)
    moe.train(training)
    twin = copy.deepcopy(moe)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for tokens in (24, 11):
        x = torch.randn(tokens, D)
        moe.zero_grad(), twin.zero_grad()
        y, z = moe(x, hidden), compiled(x, hidden)
        torch.testing.assert_close(z, y)
        y.square().sum().backward(), z.square().sum().backward()
        for one, other in zip(moe.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_products_are_grouped(training: bool, dtype: torch.dtype) -> None:
    """But those with gradients in transformers 5.17 without a kernel, which it has in compiled code for bfloat16 alone."""
    moe, hidden = make(gated="two", units=16)
    moe.to(dtype).train(training)
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    with torch.set_grad_enabled(training):
        torch.compile(moe, fullgraph=True, backend=backend)(torch.randn(24, D).to(dtype), hidden)
    left_out = training and dtype == torch.float32 and not hasattr(moe_integration, "_grouped_mm_fallback_bwd")
    assert sum("grouped_mm" in name for name in names) == (0 if left_out else 3)


def test_exports_for_any_number_of_tokens() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe, self.hidden = make(gated="halves")

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x, self.hidden)

    whole = Whole().eval()
    program = torch.export.export(
        whole, (torch.randn(9, D),), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},), strict=False
    )
    for count in (2, 31):
        x = torch.randn(count, D)
        torch.testing.assert_close(program.module()(x), whole(x))


@pytest.mark.long
def test_mixtures_whose_hidden_function_is_a_module_are_exported(tmp_path: Path) -> None:
    """Both ways of an exported program use that module."""
    model = retrofit.apply(llama(), "shared-moe(experts=4, k=2)", verify=False)
    retrofit.export_onnx(model, tmp_path / "model.onnx")  # which compares it with torch


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("form", [{"gated": "two", "bias": True}, {"gated": "turns", "k": 2, "renormalize": False}, {"k": 3}])
def test_exported_programs_compute_every_expert_of_many_tokens(form: dict[str, Any]) -> None:
    """Both ways of an exported program give what the mixture does, and for 40 tokens none copies a matrix for each."""
    moe, hidden = make(experts=3, units=16, **form)
    x = torch.randn(40, D)
    gates, selected = moe.route(x)
    expected = moe(x, hidden)
    torch.testing.assert_close(moe.combine_gathered(x, gates, selected, hidden), expected)
    torch.testing.assert_close(moe.combine_every(x, gates, selected, hidden), expected)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = moe

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x, hidden)

    with both_kept():
        program = torch.export.export(Whole().eval(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    (choice,) = program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)
    many = getattr(program.graph_module, choice.args[1].target)
    sizes = [node.meta["val"].numel() for node in many.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    largest = max(int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in sizes)
    assert largest <= 40 * 3 * 2 * 16  # two values of each unit of each expert of each token
    torch.testing.assert_close(program.module()(x), expected)


def test_the_reference_is_finite_where_logits_are_huge() -> None:
    """As on trained models, whose activations run into the thousands."""
    moe, hidden = make(experts=3, k=2, dtype=torch.float64)
    block = nn.Module()
    block.moe, block.hidden, block.place, block.tail = moe, hidden, (0, "x"), None
    x = 1e4 * torch.randn(5, D, dtype=torch.float64)
    call = SiteCall(block.eval(), SharedMoE(experts=3, k=2), (x,), {}, {}, {})
    torch.testing.assert_close(moe_block(call), moe(x, hidden))


def test_balance_is_least_when_all_experts_get_the_same() -> None:
    """E Σ m_i P_i of one dispatch a token is 1 when both are even, and E when all goes to one expert."""
    even, turns = torch.full((8, 4), 0.25), F.one_hot(torch.arange(8) % 4, 4)
    first = F.one_hot(torch.zeros(8, dtype=torch.long), 4)
    assert float(balance_loss(even, turns)) == pytest.approx(1.0)
    assert float(balance_loss(first.float(), first)) == pytest.approx(4.0)
