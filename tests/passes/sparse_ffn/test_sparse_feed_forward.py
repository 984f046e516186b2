"""The sparse feed-forward as a module: both inference paths and training against loops written from the paper's formulas."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import accelerate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feed_forward_models import ACTIVATIONS, IDS, Fused, Gated, Model, Plain
from torch import Tensor, nn
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.nn import functional as F

import retrofit
from retrofit.passes import SparseFFN
from retrofit.passes.indexed_rows import ALWAYS, CACHED, FEW, PART, prefers_rows
from retrofit.passes.sparse_ffn import sparse_feed_forward, unit_choice
from retrofit.passes.sparse_ffn.reference import relaxed
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.passes.sparse_ffn.unit_choice import (
    LONGEST,
    comparisons,
    descending,
    relaxed_indicator,
    sampled_indicator,
    straight_through,
)

COMPARED = 8  # tokens of a row that are held against the formula


def sparse_block(ffn: nn.Module, d: int, **options: Any) -> SparseFeedForward:
    """The feed-forward made sparse, its controller drawn at random."""
    model = Model(d, ffn).eval()
    retrofit.apply(model, SparseFFN(**options), example_inputs={"ids": IDS}, verify=False)
    block = model.layers[0].f
    assert isinstance(block, SparseFeedForward)
    if block.c1 is not None:
        with torch.no_grad():
            for parameter in (block.c1, block.c2, block.bias):
                parameter.normal_()
    return block


def oracle(ffn: nn.Module, block: SparseFeedForward, x: Tensor) -> Tensor:
    """The formula, token by token and block by block, from the dense module's weights."""
    n, k, rows = block.sparsity, block.active, x.reshape(-1, x.shape[-1])
    out = torch.zeros_like(rows)
    weight, bias = ffn.b.weight, ffn.b.bias
    for t, token in enumerate(rows):
        if block.c1 is not None:
            logits = token @ block.c1 @ block.c2 + block.bias
        else:
            logits = torch.stack([gate_magnitude(ffn, token, int(unit)) for unit in block.order]).log()
        for first in range(0, len(logits), n):
            inside = logits[first : first + n]
            for place in sorted(range(n), key=lambda place: -float(inside[place].detach()))[:k]:
                unit = int(block.order[first + place])
                h = hidden_unit(ffn, token, unit)
                if block.multiply and k < n:
                    h = h * inside.softmax(0)[place]
                out[t] += h * (math.sqrt(n / k) if block.factor != 1 else 1.0) * weight[:, unit]
        if bias is not None:
            out[t] += bias
    return out.view(x.shape)


def gate_magnitude(ffn: nn.Module, x: Tensor, unit: int) -> Tensor:
    """|act(x W_gate)| ‖row of W_up‖ ‖row of W_out‖ of one unit; 1 where there is no gate, and all units must be active."""
    if isinstance(ffn, Fused):
        d_ff = ffn.b.in_features
        gate, up = (2 * unit, 2 * unit + 1) if ffn.turns else (unit, d_ff + unit)
        return F.silu(x @ ffn.w[:, gate] + ffn.c[gate]).abs() * ffn.w[:, up].norm() * ffn.b.weight[:, unit].norm()
    if not isinstance(ffn, Gated):
        return torch.ones(())
    z = x @ ffn.g.weight[unit] + (0.0 if ffn.g.bias is None else ffn.g.bias[unit])
    return ffn.act(z).abs().clamp_min(1e-20) * ffn.a.weight[unit].norm() * ffn.b.weight[:, unit].norm()


def hidden_unit(ffn: nn.Module, x: Tensor, unit: int) -> Tensor:
    """One hidden unit of one token."""
    if isinstance(ffn, Fused):
        d_ff = ffn.b.in_features
        gate, up = (2 * unit, 2 * unit + 1) if ffn.turns else (unit, d_ff + unit)
        return F.silu(x @ ffn.w[:, gate] + ffn.c[gate]) * (x @ ffn.w[:, up] + ffn.c[up])
    offset = 0.0 if ffn.a.bias is None else ffn.a.bias[unit]
    z = x @ ffn.a.weight[unit] + offset
    if not isinstance(ffn, Gated):
        return ffn.act(z)
    return ffn.act(x @ ffn.g.weight[unit] + (0.0 if ffn.g.bias is None else ffn.g.bias[unit])) * z


@torch.no_grad()
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["plain", "gated", "fused", "turns"]),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),
    st.integers(2, 9),
    st.sampled_from([2, 3, 8, 16, 32]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 1, 2, 3, 5, 32]),
    st.booleans(),
)
def test_both_paths_are_the_formula(
    kind: str, act: str, bias: bool, d: int, n: int, blocks: int, rank: int, multiply: bool, scale: bool, k: int, gate: bool
) -> None:
    torch.manual_seed(n * d)
    d_ff = n * blocks
    ffn = {"plain": lambda: Plain(d, d_ff, act, bias), "gated": lambda: Gated(d, d_ff, act, bias)}.get(
        kind, lambda: Fused(d, d_ff, kind == "turns")
    )()
    dense = copy.deepcopy(ffn)
    k, controller = min(k, n), "gate" if gate and kind != "plain" else "low-rank"
    how = {"active": k, "controller": controller, "multiply_by_controller": multiply, "scale": scale}
    block = sparse_block(ffn, d, sparsity=n, rank=min(rank, d), **how)
    few, many = torch.randn(1, max(1, n // (k * FEW)), d), torch.randn(3, n * n, d)
    assert block.prefers_gather(few) and block.prefers_gather(many) == (n // k >= ALWAYS[False] // 2)  # these matrices are small
    with torch.enable_grad():
        assert block.prefers_gather(few) == (n >= FEW * k) and not block.prefers_gather(many)
    for x, gradients in itertools.product((few, many), (True, False)):
        with torch.set_grad_enabled(gradients):
            rows = torch.randperm(x[0].size(0))[:COMPARED]
            torch.testing.assert_close(block(x)[:, rows].detach(), oracle(dense, block, x[:, rows]).detach(), atol=2e-5, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("share", [1, 2, 4, 8, 16, 32])
def test_rows_alone_are_used_for_as_many_tokens_as_they_are_faster_for(dtype: torch.dtype, large: bool, share: int) -> None:
    half = dtype.itemsize < 4
    weight = torch.empty(CACHED // dtype.itemsize + large, dtype=dtype)
    most = max(1, share**2 // PART[half])
    counts = [tokens for tokens in (1, most, most + 1, 10**5) if prefers_rows(torch.empty(1).expand(tokens, 1), 1, share, [weight])]
    for_any = share >= ALWAYS[half] or (share >= ALWAYS[half] // 2 and not half and not large)
    assert counts == ([1, most, most + 1, 10**5] if for_any else [1, most])


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    ("kind", "controller"),
    [("plain", "low-rank"), ("gated", "low-rank"), ("fused", "low-rank"), ("gated", "gate"), ("fused", "gate")],
)
def test_offloaded_matrices_are_used_where_their_modules_compute(kind: str, controller: str, tokens: int) -> None:
    """A matrix that accelerate offloads is there only while its own module is called."""
    ffn = {"plain": lambda: Plain(16, 64, "silu", True), "gated": lambda: Gated(16, 64, "silu", True)}.get(
        kind, lambda: Fused(16, 64, False)
    )()
    block = sparse_block(ffn, 16, sparsity=16, controller=controller)
    x = torch.randn(1, tokens, 16)
    expected = block(x)
    torch.testing.assert_close(accelerate.cpu_offload(block)(x), expected, atol=2e-5, rtol=2e-4)


@torch.no_grad()
@settings(max_examples=10, deadline=None)
@given(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), st.integers(1, 4), st.booleans())
def test_the_two_paths_agree_in_every_dtype(dtype: torch.dtype, tokens: int, multiply: bool) -> None:
    torch.manual_seed(tokens)
    block = sparse_block(Gated(16, 96, "silu", True), 16, sparsity=32, multiply_by_controller=multiply).to(dtype)
    x = torch.randn(tokens, 16).to(dtype)
    together = torch.cat([x, torch.randn(40, 16).to(dtype)])
    ours = block(x)
    with torch.enable_grad():  # where a gradient is to come back, many tokens are masked
        assert not block.prefers_gather(together)
        theirs = block(together)[:tokens].detach()
    assert ours.dtype == theirs.dtype == dtype
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 3e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("controller", ["low-rank", "gate"])
def test_exactly_k_units_of_a_block_are_active(k: int, controller: str) -> None:
    torch.manual_seed(0)
    block = sparse_block(Gated(8, 48, "gelu", True), 8, sparsity=6, active=k, controller=controller)
    seen = []
    block.down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    block(torch.randn(4, 30, 8))
    assert seen[0].view(4, 30, 8, 6).count_nonzero(-1).eq(k).all()


def test_equal_logits_choose_the_first_unit_on_both_paths() -> None:
    block = sparse_block(Plain(8, 64, "gelu", True), 8, sparsity=16)
    with torch.no_grad():
        block.c2.zero_()
        block.bias.zero_()
        x = torch.randn(2, 8)
        first = torch.arange(0, 64, 16)
        expected = F.gelu(F.linear(x, block.up.weight[first], block.up.bias[first])) @ block.down.weight[first] + block.down.bias
        torch.testing.assert_close(block(x), expected)
        torch.testing.assert_close(block(x.repeat(20, 1))[:2], expected)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("controller", ["low-rank", "gate"])
def test_with_all_units_active_it_is_the_dense_feed_forward_without_a_controller(n: int, controller: str) -> None:
    torch.manual_seed(0)
    ffn = Gated(8, 24, "silu", True)
    dense = copy.deepcopy(ffn)
    block = sparse_block(ffn, 8, sparsity=n, active=n, controller=controller, scale=True, multiply_by_controller=True)
    x = torch.randn(3, 5, 8)
    assert (block.c1, block.c2, block.bias) == (None, None, None)
    for training in (False, True):
        torch.testing.assert_close(block.train(training)(x), dense(x), atol=1e-6, rtol=1e-5)


# ── Training ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("noise", ["choice", "both"])
def test_training_is_a_straight_through_softmax_with_gumbel_noise(noise: str) -> None:
    """The mask and its gradient, from the noise that the same seed gives, one block at a time."""
    block = sparse_block(Plain(8, 24, "relu", True), 8, sparsity=4, temperature=0.5, noise=noise).train()
    for hard in (0.0, 1.0):
        block.hard = hard
        logits = torch.randn(7, 6, 4, requires_grad=True)
        torch.manual_seed(5)
        mask = block.sample_mask(logits)
        torch.manual_seed(5)
        torch.rand(())  # decides whether the batch is hard
        gumbel = -(-torch.rand(7, 6, 4).log()).log()
        (ours,) = torch.autograd.grad((mask * torch.arange(4.0)).sum(), logits)
        for t in range(7):
            for b in range(6):
                one = logits[t, b].detach().requires_grad_()
                soft = (one if noise == "choice" else (one + gumbel[t, b]) / 0.5).softmax(0)
                chosen = (one + gumbel[t, b] * (0.5 if noise == "choice" else 1.0)).argmax()
                expected = F.one_hot(chosen, 4).float() if hard else soft.detach()
                torch.testing.assert_close(mask[t, b].detach(), expected)
                (theirs,) = torch.autograd.grad((soft * torch.arange(4.0)).sum(), one)
                torch.testing.assert_close(ours[t, b], theirs)


@pytest.mark.parametrize("hard", [0.0, 1.0])
@pytest.mark.parametrize("noise", ["choice", "both"])
@pytest.mark.parametrize("k", [1, 3])
def test_where_a_draw_cannot_be_read_both_masks_are_computed_and_one_is_taken(
    k: int, noise: str, hard: float, monkeypatch: Any
) -> None:
    """In compiled code, and on a GPU, which would have to be waited for."""
    logits, masks, gradients = torch.randn(7, 6, 4, requires_grad=True), [], []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        torch.manual_seed(5)
        masks.append(sampled_indicator(logits, k, 0.1, hard, noise))
        gradients += torch.autograd.grad((masks[-1] * torch.arange(4.0)).sum(), logits)
    torch.testing.assert_close(*masks)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_training_no_product_is_in_more_precision_than_the_layers_own(autocast: bool) -> None:
    """A GPU multiplies in float32 at a small part of its speed; the gradients are those in float32 but for rounding."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        dtypes: set[torch.dtype] = set()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mm" in str(function):
                self.dtypes.add(args[-1].dtype)
            return function(*args, **(kwargs or {}))

    exact = sparse_block(Gated(16, 64, "silu", True), 16, sparsity=8, hard=0.0).train()
    block = copy.deepcopy(exact).to(torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(40, 16)
    exact(x).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Products() as products:
        logits = block.logits(x.to(block.c1.dtype))
        y = block(x.to(block.c1.dtype))
        y.float().square().sum().backward()
    assert logits.dtype == torch.bfloat16 and products.dtypes == {torch.bfloat16}
    for name in ("c1", "c2", "bias"):
        ours, theirs = getattr(block, name).grad.float(), getattr(exact, name).grad
        assert float((ours - theirs).norm()) < 0.1 * float(theirs.norm()), name


@pytest.mark.long
def test_compiled_noise_and_mask_are_few_kernels() -> None:
    """Counted without products, of what Inductor would run on a CPU.

    Forward: a seed, whether the batch is hard, the noise, the softmax and the choice, the mask.
    """

    def kernels(block: nn.Module) -> list[int]:
        counts: list[int] = []

        def count(graph: torch.fx.GraphModule, inputs: list[Any], **how: Any) -> Any:
            with V.set_fake_mode(detect_fake_mode(inputs)):
                record_original_output_strides(graph)
                post_grad_passes(graph, False)
                lowered = GraphLowering(graph, example_inputs=inputs, is_backward=how.get("is_backward", False))
                with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
                    lowered.run(*inputs)
                    lowered.init_wrapper_code()
                    lowered._update_scheduler()
                    counts.append(
                        sum("mm" not in str(node.node and node.node.get_origin_node()) for node in lowered.scheduler.nodes)
                    )
            return make_boxed_func(graph.forward)

        torch.compiler.reset()
        compiled = torch.compile(block, backend=lambda *given: compile_fx(*given, inner_compile=count), fullgraph=True)
        compiled(torch.randn(40, 16, requires_grad=True)).square().sum().backward()
        return counts

    dense = kernels(Gated(16, 64, "silu", True))
    ours = kernels(sparse_block(Gated(16, 64, "silu", True), 16, sparsity=8).train())
    assert all(many - few <= most for many, few, most in zip(ours, dense, (5, 2), strict=True))


def test_of_equal_logits_the_first_are_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 0.0, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    for k, chosen in ((1, [[1], [0]]), (3, [[0, 1, 2], [0, 1, 2]])):
        assert [row.nonzero().flatten().tolist() for row in straight_through(logits, logits, k)] == chosen


def test_a_batch_is_hard_three_times_in_ten() -> None:
    block = sparse_block(Plain(8, 24, "relu", True), 8, sparsity=4).train()
    torch.manual_seed(0)
    masks = [block.sample_mask(torch.randn(5, 6, 4)) for _ in range(400)]
    one_hot = [bool(((mask == 0) | (mask == 1)).all()) for mask in masks]
    assert 0.22 < sum(one_hot) / len(one_hot) < 0.38
    assert all(bool((mask.sum(-1) - 1).abs().max() < 1e-5) for mask in masks)


def test_noise_chooses_each_unit_as_often_as_its_softmax_says() -> None:
    block = sparse_block(Plain(8, 24, "relu", True), 8, sparsity=4, hard=1.0, temperature=1.0).train()
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    torch.manual_seed(0)
    share = block.sample_mask(logits.expand(20000, 1, 4)).mean((0, 1))
    torch.testing.assert_close(share, logits.softmax(0), atol=0.015, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multiply_by_controller": True},
        {"scale": True, "active": 3},
        {"controller": "gate"},
        {"controller": "gate", "active": 2, "multiply_by_controller": True},
    ],
)
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = sparse_block(Gated(8, 24, "silu", True), 8, sparsity=4, **options).train()
    block(torch.randn(50, 8)).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("few", [True, False])
def test_gradients_of_both_inference_paths_agree(few: bool) -> None:
    torch.manual_seed(0)
    block = sparse_block(Gated(8, 64, "silu", True), 8, sparsity=32)
    x = torch.randn(3, 8)
    other = copy.deepcopy(block)
    block(x).square().sum().backward()
    padded = torch.cat([x, torch.zeros(40, 8)])
    (other(padded)[:3].square().sum()).backward()
    for name in ("up.weight", "gate.weight", "gate.bias", "down.weight", "down.bias"):
        torch.testing.assert_close(block.get_parameter(name).grad, other.get_parameter(name).grad, atol=1e-5, rtol=1e-4)


def test_a_gate_is_trained_on_the_units_that_it_selects_with_the_gradient_of_the_relaxation() -> None:
    """No noise; the gradient for the gate is that of h, and through the mask that of the capped softmax of the log magnitudes."""
    torch.manual_seed(0)
    block = sparse_block(Gated(6, 8, "silu", True), 6, sparsity=4, active=2, controller="gate", temperature=0.7).train()
    x, direction = torch.randn(5, 6), torch.randn(6)
    torch.testing.assert_close(block(x), block.eval()(x), atol=1e-6, rtol=1e-5)
    block.train()(x).mul(direction).sum().backward()
    weight = block.gate.weight.detach().clone().requires_grad_()
    total = torch.zeros(())
    lengths = block.up.weight.detach().norm(dim=1) * block.down.weight.detach().norm(dim=1)
    for token in x:
        act = F.silu(weight @ token + block.gate.bias.detach())
        h = act * (block.up.weight.detach() @ token + block.up.bias.detach())
        for first in (0, 4):
            inside = (act.abs() * lengths)[first : first + 4].log()
            soft = capped_softmax(inside / 0.7, 2)
            chosen = torch.zeros(4)
            chosen[inside.topk(2).indices] = 1
            rows = block.down.weight.detach()[first : first + 4] @ direction
            total = total + (h[first : first + 4] * chosen * rows).sum() + (h[first : first + 4].detach() * soft * rows).sum()
    (expected,) = torch.autograd.grad(total, weight)
    torch.testing.assert_close(block.gate.weight.grad, expected, atol=1e-5, rtol=1e-4)


def capped_softmax(logits: Tensor, k: int) -> Tensor:
    """One unit after the other is capped at 1, while the largest share of what is left exceeds it."""
    capped: list[int] = []
    while True:
        rest = [u for u in range(len(logits)) if u not in capped]
        share = (k - len(capped)) * logits[rest].softmax(0)
        if float(share.max()) <= 1 + 1e-6:
            out = torch.ones(len(logits))
            return out.index_put((torch.tensor(rest),), share)
        capped.append(rest[int(share.argmax())])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.1, 1.0, 8.0]), st.integers(0, 99))
def test_the_relaxed_indicator_is_the_softmax_with_units_capped_at_one(n: int, k: int, spread: float, seed: int) -> None:
    k = min(k, n)
    logits = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * spread).requires_grad_()
    soft = relaxed_indicator(logits, k)
    torch.testing.assert_close(soft, capped_softmax(logits, k), atol=1e-5, rtol=1e-4)
    assert abs(float(soft.sum()) - k) < 1e-4 and float(soft.min()) >= 0 and float(soft.max()) <= 1 + 1e-6
    mine, theirs = (torch.autograd.grad((one * torch.arange(n)).sum(), logits)[0] for one in (soft, capped_softmax(logits, k)))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    if k == 1:
        torch.testing.assert_close(soft, logits.softmax(0))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_relaxed_indicator_and_its_reference_are_finite_where_logits_are_huge(k: int) -> None:
    """As on trained models, whose activations run into the thousands."""
    logits = 1e5 * torch.randn(50, 8, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    torch.testing.assert_close(relaxed(logits, k), relaxed_indicator(logits, k))


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("options", [{"active": 2}, {"active": 1}, {"active": 2, "controller": "gate"}], ids=str)
@torch.no_grad()
def test_units_that_a_kernel_chooses_are_used_like_any_others(
    gathers: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of a GPU's path but its kernels, which `test_indexed_rows.py` holds against the formulas."""
    torch.manual_seed(0)
    block = sparse_block(Gated(8, 64, "silu", True), 8, sparsity=8, **options).eval()
    asked = []

    def chosen_of(logits: Tensor, n: int, k: int, mask: torch.dtype | None = None) -> Tensor:
        asked.append(len(logits))
        units = logits.view(-1, 64 // n, n).topk(k).indices + torch.arange(0, 64, n).unsqueeze(1)
        units = units.flatten(1)
        return units if mask is None else torch.zeros(len(logits), 64, dtype=mask).scatter(1, units, 1.0)

    def chosen_units(x: Tensor, c1: Tensor, c2: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        return chosen_of(x @ c1 @ c2 + bias, *rest)

    inputs = [torch.randn(1, 1, 8), torch.randn(2, 3, 8), torch.randn(40, 8)]
    expected = [block(x) for x in inputs]
    for name, value in {"chosen_of": chosen_of, "chosen_units": chosen_units, "chooses_in_kernel": lambda *given: True}.items():
        monkeypatch.setattr(sparse_feed_forward, name, value)
    monkeypatch.setattr(block, "prefers_gather", lambda x: gathers)
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(block(x), y)
    assert asked == [1, 6, 40]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("noise", ["choice", "both"])
@pytest.mark.parametrize("hard", [0.0, 1.0])
def test_the_units_in_the_first_dimension_as_on_a_gpu_give_the_same(
    k: int, noise: str, hard: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(5, 3, 8).round(decimals=1).requires_grad_()  # some are equal
    laid_out: list[int] = []

    def first(logits: Tensor) -> tuple[Tensor, int]:
        laid_out.append(1)
        return logits.movedim(-1, 0).contiguous(), 0

    found = []
    for way in (unit_choice.laid_out, first):
        monkeypatch.setattr(unit_choice, "laid_out", way)
        torch.manual_seed(1)
        mask, weight = sampled_indicator(logits, k, 0.1, hard, noise), torch.arange(8.0)
        whole = straight_through(logits, logits, k)
        found.append((mask, whole, *torch.autograd.grad((mask * weight).sum() + (whole * weight).sum(), logits)))
    assert laid_out
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_noise_draws_k_units_without_replacement() -> None:
    """The frequency of each pair against the two orders in which a draw without replacement can give it."""
    block = sparse_block(Plain(8, 24, "relu", True), 8, sparsity=4, active=2, hard=1.0, temperature=1.0).train()
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    torch.manual_seed(0)
    masks = block.sample_mask(logits.expand(20000, 1, 4)).squeeze(1)
    p = logits.softmax(0)
    for a, b in itertools.combinations(range(4), 2):
        expected = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        assert abs(float((masks[:, a] * masks[:, b]).mean()) - float(expected)) < 0.015


# ── In the ecosystem ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_it_is_copied_and_pickled_whole() -> None:
    torch.manual_seed(0)
    block = sparse_block(Fused(8, 64, True), 8, sparsity=16)
    x = torch.randn(2, 8)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x), block(x)) and torch.equal(other(x.repeat(20, 1)), block(x.repeat(20, 1)))


@torch.no_grad()
def test_a_wrapped_matrix_is_called_and_not_gathered_from() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    torch.manual_seed(0)
    block = sparse_block(Plain(8, 64, "relu", False), 8, sparsity=16)
    x = torch.randn(2, 8)
    before = block(x)
    block.down = Doubled(block.down)
    assert not block.prefers_gather(x)
    torch.testing.assert_close(block(x), 2 * before)
    block.up = Doubled(block.up)
    torch.testing.assert_close(block(x), 4 * before)


@torch.no_grad()
def test_an_exported_block_takes_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    block = sparse_block(Gated(8, 64, "silu", True), 8, sparsity=32)
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(block, (torch.randn(3, 8),), dynamic_shapes={"args": ({0: tokens},)}, strict=False)
    for count in (2, 3, 40):
        x = torch.randn(count, 8)
        torch.testing.assert_close(program.module()(x), block(x), atol=1e-5, rtol=1e-4)


def test_under_autocast_the_controller_is_as_exact_as_without() -> None:
    torch.manual_seed(0)
    block = sparse_block(Gated(16, 64, "silu", True), 16, sparsity=16)
    x = torch.randn(40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = block.logits(x)
        many, few = block(x), block(x[:2])
    assert inside.dtype == torch.float32 and torch.equal(inside, block.logits(x))
    assert many.dtype == few.dtype == torch.bfloat16
    torch.testing.assert_close(many[:2], few, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(many.float(), block(x), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("n", range(1, 14))
def test_the_network_sorts_all_zeros_and_ones_and_so_everything(n: int) -> None:
    """Knuth's zero-one principle."""
    rows = torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)))
    assert torch.equal(descending(rows), rows.sort(dim=1, descending=True).values.t())


@given(st.integers(1, LONGEST["cpu"] + 3), st.integers(0, 99))
def test_it_sorts_rows_of_any_length_and_shape(n: int, seed: int) -> None:
    values = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    assert torch.equal(descending(values), values.sort(dim=-1, descending=True).values.movedim(-1, 0))
    assert torch.equal(descending(values, 0), values.sort(dim=0, descending=True).values)


def test_it_makes_as_few_comparisons_as_batcher_s_network() -> None:
    """(p² − p + 4) 2^(p−2) − 1 for n = 2^p."""
    assert [len(comparisons(2**p)) for p in range(1, 7)] == [(p * p - p + 4) * 2**p // 4 - 1 for p in range(1, 7)]
