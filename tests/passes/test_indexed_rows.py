"""Products with rows given by index or by a threshold, and the choice of units, against loops.

The Triton kernels run in its interpreter and are built for absent GPUs.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feed_forward_models import IDS, Gated, Model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import retrofit
from retrofit.passes import SparseFFN, indexed_rows
from retrofit.passes.sparse_ffn import sparse_feed_forward, unit_choice
from retrofit.passes.sparse_ffn.reference import relaxed

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def random_operands(
    tokens: int, blocks: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + 10 * blocks + 1000 * width)
    x, h = torch.randn(tokens, width, generator=generator), torch.randn(tokens, blocks, generator=generator)
    rows, indices = (
        torch.randn(2 * blocks, width, generator=generator),
        torch.randint(2 * blocks, (tokens, blocks), generator=generator),
    )
    return x.to(dtype), h.to(dtype), rows.to(dtype), indices


def products(x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    found = [[float(x[t].double() @ rows[p].double()) for p in row] for t, row in enumerate(indices.tolist())]
    return torch.tensor(found, dtype=torch.float64)


def sums(h: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    y = torch.zeros(len(h), rows.shape[1], dtype=torch.float64)
    for t, row in enumerate(indices.tolist()):
        for b, p in enumerate(row):
            y[t] += h[t, b].double() * rows[p].double()
    return y


@given(
    tokens=st.integers(1, 4), blocks=st.integers(1, 40), width=st.integers(1, 70), copied=st.sampled_from([0, indexed_rows.SMALL])
)
@settings(deadline=None)
def test_torch_operations_compute_the_formulas(tokens: int, blocks: int, width: int, copied: int) -> None:
    x, h, rows, indices = random_operands(tokens, blocks, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_rows, "SMALL", copied)
        z = indexed_rows.indexed_products(x, indices, rows)
    torch.testing.assert_close(z, products(x, indices, rows).float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(indexed_rows.indexed_sums(h, indices, rows), sums(h, indices, rows).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [2048, 2050, 3072, 5120])
def test_long_rows_are_summed_in_pieces(width: int) -> None:
    _, h, rows, indices = random_operands(1, 5, width)
    torch.testing.assert_close(indexed_rows.indexed_sums(h, indices, rows), sums(h, indices, rows).float(), atol=1e-5, rtol=1e-5)


def test_no_kernel_chooses_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose comparisons are exact: a choice by float32 logits would be another one now and then."""
    monkeypatch.setattr(unit_choice, "reads_tiles", lambda *operands: True)
    x = torch.randn(1, 4)
    assert unit_choice.chooses_in_kernel(8, 4, x) and not unit_choice.chooses_in_kernel(8, 4, x.double())
    assert unit_choice.chooses_in_kernel(100, 1, x) and not unit_choice.chooses_in_kernel(100, 2, x)  # it compares each with each


# h masked in training: the operation, by torch's operations. A GPU has the kernels for it, which are tested further below.


class Twice(nn.Module):
    """Two layers of one gated feed-forward, of which the second can be computed again for its gradient."""

    def __init__(self, again: bool | None, **options: Any) -> None:
        super().__init__()
        self.again = again
        torch.manual_seed(0)
        model = Model(16, Gated(16, 64, "silu", True))
        retrofit.apply(model, SparseFFN(**{"sparsity": 8, "hard": 0.5, **options}), example_inputs={"ids": IDS}, verify=False)
        self.block = model.layers[0].f.train()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.block(x))
        return self.block(h) if self.again is None else checkpoint(self.block, h, use_reentrant=self.again)  # type: ignore[no-any-return]


@pytest.fixture
def masking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_feed_forward, "masks_in_kernel", lambda *operands: True)


def outcome(model: nn.Module, seed: int, call: Any = None) -> list[Tensor]:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    y = (model if call is None else call)(x)
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None)]


@pytest.mark.usefixtures("masking")
@pytest.mark.parametrize("options", [{}, {"active": 3}, {"active": 3, "controller": "gate"}])
def test_noise_follows_torchs_seed_and_is_drawn_again_under_checkpointing(options: dict[str, Any]) -> None:
    model = Twice(None, **options)
    found = [outcome(model, seed) for seed in range(6)]
    for seed, expected in enumerate(found):
        torch.testing.assert_close(outcome(model, seed), expected, rtol=0, atol=0)
        for again in (False, True):
            torch.testing.assert_close(outcome(Twice(again, **options), seed), expected, rtol=0, atol=0)
    assert len({float(y.sum()) for y, *_ in found}) == (1 if "controller" in options else 6)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hard", [0.0, 1.0])
def test_masked_units_are_those_of_the_mask_with_its_gradients(k: int, dtype: torch.dtype, hard: float) -> None:
    """Without noise, which the two draw in ways of their own."""
    h, logits = torch.randn(2, 5, 24).to(dtype).requires_grad_(), torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
    y = unit_choice.mask_units(h, k, logits, 0.0, hard)
    mask = unit_choice.sampled_indicator(logits.float(), k, 0.0, hard).flatten(-2)
    expected, grad = h * mask.to(dtype), torch.randn(2, 5, 24).to(dtype)
    near = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected, **near)
    ours, theirs = (torch.autograd.grad(made, (h, logits), grad, create_graph=True) for made in (y, expected))
    torch.testing.assert_close(ours, theirs, **near)
    plain = torch.autograd.grad(unit_choice.mask_units(h, k, logits, 0.0, hard), (h, logits), grad)
    torch.testing.assert_close(plain, theirs, **near)
    squares = [sum(made.float().square().sum() for made in pair) for pair in (ours, theirs)]
    second, other = (torch.autograd.grad(made, (h, logits)) for made in squares)
    torch.testing.assert_close(second, other, rtol=0.05, atol=0.3 if dtype == torch.bfloat16 else 1e-5)


def test_masked_units_are_an_operation_as_torch_wants_it() -> None:
    h, logits = torch.randn(5, 24, requires_grad=True), torch.randn(5, 24, requires_grad=True)
    for how in ((8, 1, 0.1, 0.3), (8, 3, 0.1, 0.9)):
        torch.library.opcheck(unit_choice.masked_units, (h, logits, torch.randint(unit_choice.SEEDS, ()), *how))


@pytest.mark.usefixtures("masking")
@pytest.mark.parametrize("active", [1, 3])
def test_a_mask_is_one_launch_and_one_for_its_gradient_besides_the_draw_of_a_seed(active: int) -> None:
    """Called and compiled, beside products, activations and views; in the backward pass besides the bias of the controller."""

    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function).split(".")[1])
            return function(*args, **(kwargs or {}))

    block = Twice(None, active=active).block
    x = torch.randn(5, 16, requires_grad=True)
    with Operations() as forward:
        y = block(x)
    with Operations() as backward:
        y.sum().backward()
    calls = [name for name in forward.names if name not in VIEWS]
    assert sorted(calls) == sorted(["mm", *["addmm"] * 4, "silu", "mul", "randint", "masked_units"]), calls
    assert backward.names.count("masked_gradients") == 1
    assert not {"exp", "_softmax_backward_data", "where", "sign", "_to_copy"} & {*forward.names, *backward.names}
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            graphs.append([str(node.target).split(".")[-2:][0] for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    compiled(x).sum().backward()
    made, gradients = graphs
    assert made.count("masked_units") == made.count("randint") == gradients.count("masked_gradients") == 1
    assert not {"_softmax", "softmax", "sort", "topk", "cumsum", "rand", "log"} & {*made, *gradients}
    for seed in range(4):
        ours, theirs = (outcome(block, seed, call) for call in (compiled, None))
        torch.testing.assert_close(ours, theirs)


VIEWS = {"t", "view", "unsqueeze", "slice", "_unsafe_view", "transpose", "detach", "alias", "expand", "reshape"}


@needs_triton
def test_kernels_compute_the_formulas() -> None:
    run_apart("interpreted", {"TRITON_INTERPRET": "1"})


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_are_built_for(capability: int) -> None:
    run_apart(f"built {capability}", {})


def run_apart(what: str, environment: dict[str, str]) -> None:
    """In a process of its own: Triton reads its settings as it is imported."""
    command = [sys.executable, __file__, *what.split()]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr and "triton/runtime/interpreter.py" in done.stderr:
        pytest.skip("the interpreter of this version of Triton does not run with numpy 2.4")
    assert done.returncode == 0, done.stderr
    assert "all as they should be" in done.stdout


def interpreted() -> None:
    for (tokens, blocks, width), (dtype, near) in itertools.product(
        [(1, 7, 40), (3, 33, 300), (2, 64, 513), (1, 200, 40)], DTYPES.items()
    ):
        x, h, rows, indices = random_operands(tokens, blocks, width, dtype)
        for bias in (None, torch.randn(2 * blocks).to(dtype)):
            z = indexed_rows.tiled_products(x, indices, rows, bias)
            expected = products(x, indices, rows) + (0.0 if bias is None else bias.double()[indices])
            assert z.dtype == dtype and relative(z, expected) < near
        for places, bias in ((indices, None), (indices, torch.randn(width).to(dtype)), (None, None)):
            parts = indexed_rows.tiled_sums(h, places, rows)
            y = indexed_rows.added_parts(parts, bias, dtype)
            every = torch.arange(blocks).expand(tokens, blocks) if places is None else places
            total = sums(h, every, rows) + (0.0 if bias is None else bias.double())
            assert y.dtype == dtype and relative(y, total) < near
        by_threshold(rows, h, near)
    assert len(parts) > 1
    for tokens, n, k in ((1, 8, 4), (3, 8, 1), (2, 6, 2), (1, 64, 1), (2, 64, 3), (1, 100, 1)):
        chosen(tokens, n, k)
    assert [f"{number:x}" for number in philox(0, 0)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]  # Random123's own test
    unit_choice.TILE = 32
    for n, k in ((2, 1), (8, 1), (8, 4), (6, 2), (6, 5), (64, 5), (100, 1)):
        for (dtype, near), (noise, hard) in itertools.product(MASKED.items(), ((0.5, 1.0), (0.5, 0.0), (0.0, 1.0))):
            masked(n, k, dtype, near, noise, hard)
    drawn()


def by_threshold(rows: Tensor, h: Tensor, near: float) -> None:
    """Rows of small entries are not read, even where they are no numbers; entries that are none are not small; twice the same."""
    rows, h = rows[: h.shape[1]], h.clone()
    for share in (0.0, 0.5, 1.0):
        least = h.abs().flatten().float().quantile(share).to(h.dtype)
        kept = h.masked_fill(h.abs() < least, 0.0)
        unread = (kept == 0).all(0, keepdim=True).t()
        assert bool(unread.any()) or share < 1
        given = rows.masked_fill(unread, torch.nan)
        y = indexed_rows.thresholded_sums(h, given, least)
        assert y.dtype == h.dtype and relative(y, kept.double() @ rows.double()) < near
        assert torch.equal(y, indexed_rows.thresholded_sums(h, given, least))
    h[-1, 0] = torch.nan
    assert bool(indexed_rows.thresholded_sums(h, rows, least)[-1].isnan().all())


def chosen(tokens: int, n: int, k: int) -> None:
    """The kernel chooses as a stable sort of the logits does: of equal ones the first, and what is not a number before all."""
    units, width, rank = 3 * n, 70, 5
    x, c1, c2, bias = (torch.randn(*size) for size in ((tokens, width), (width, rank), (rank, units), (units,)))
    logits = ((x.double() @ c1.double()) @ c2.double() + bias.double()).view(tokens, 3, n)
    same(lambda mask: unit_choice.chosen_units(x, c1, c2, bias, n, k, mask), logits, k)
    coarse = logits.float().round()  # many are equal
    coarse[0, 0, n - 1] = torch.nan
    same(lambda mask: unit_choice.chosen_of(coarse.flatten(1), n, k, mask), coarse, k)


def same(choose: Callable[[torch.dtype | None], Tensor], logits: Tensor, k: int) -> None:
    n = logits.shape[-1]
    order = logits.nan_to_num(nan=torch.inf).argsort(dim=-1, descending=True, stable=True)[..., :k]
    expected = order + torch.arange(0, 3 * n, n).unsqueeze(1)
    assert torch.equal(choose(None).view(expected.shape), expected)
    for dtype in (torch.float32, torch.bfloat16):
        mask = choose(dtype)
        assert mask.dtype == dtype
        assert torch.equal(mask.view(logits.shape).double(), torch.zeros_like(logits).scatter(-1, order, 1.0).double())


MASKED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def masked(n: int, k: int, dtype: torch.dtype, near: float, noise: float, hard: float) -> None:
    """The kernels mask h and give its gradients as a loop over blocks does, with noise counted out anew; twice the same."""
    tokens, blocks = 3, 5
    h, logits, grad = (torch.randn(tokens, blocks * n).to(dtype) for _ in range(3))
    logits[0, : n // 2] = logits[0, 0]  # equal ones
    seed = torch.tensor((3 << 40) + n)
    given = h, logits, seed, n, k, noise, hard
    y, gradients = unit_choice.launch_masked(*given), unit_choice.launch_gradients(grad, *given)
    assert torch.equal(y, unit_choice.launch_masked(*given))
    padded, each = unit_choice.mask_tile(n, k)
    mask, of_logits = torch.empty(tokens * blocks, n).double(), torch.empty(tokens * blocks, n).double()
    rows = logits.double().view(-1, n).requires_grad_()
    for block, row in enumerate(rows):
        soft = relaxed(row, k)
        program, place = divmod(block, each)
        first = program * each * padded + place * padded
        uniform = [((philox(int(seed), u // 4)[DRAW[u % 4]] >> 9) + 0.5) / 2**23 for u in range(first, first + n)]
        noisy = [float(value.detach().float()) + noise * -math.log(-math.log(u)) for value, u in zip(row, uniform, strict=True)]
        best = sorted(range(n), key=lambda u: -noisy[u])[:k]
        mask[block] = torch.tensor([u in best for u in range(n)]).double() if hard else soft.detach()
        (of_logits[block],) = torch.autograd.grad(soft @ (grad * h).double().view(-1, n)[block], row)
    mask = mask.view(tokens, -1)
    assert y.dtype == dtype and relative(y, h.double() * mask) < near
    assert gradients[0].dtype == dtype and relative(gradients[0], grad.double() * mask) < near
    assert gradients[1].dtype == dtype and relative(gradients[1], of_logits.view(tokens, -1)) < 2 * near


DRAW = (0, 2, 1, 3)  # of four numbers, in the order in which the kernel joins them


def philox(seed: int, count: int) -> list[int]:
    """Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011)."""
    low = 0xFFFFFFFF
    c, key = [count & low, count >> 32, 0, 0], [seed & low, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ key[0], b & low, a >> 32 ^ c[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return c


def drawn() -> None:
    """Units are drawn in proportion to e^(l / noise), independently; a share `hard` of the seeds gives a hard batch."""
    unit_choice.TILE, count, n, noise = 1024, 20_000, 4, 0.5
    logits = torch.tensor([0.0, 0.5, -0.5, 1.0])
    ones = torch.ones(count, n)
    mask = unit_choice.launch_masked(ones, logits.expand(count, n).contiguous(), torch.tensor(7), n, 1, noise, 1.0)
    share = (logits / noise).softmax(0)
    deviation = (mask.mean(0) - share) / (share * (1 - share) / count).sqrt()
    assert deviation.abs().max() < 4
    unit = mask.argmax(1)
    together = torch.zeros(n, n).index_put_((unit[:-1], unit[1:]), torch.ones(count - 1), accumulate=True)  # of neighbours
    expected = share.outer(share) * count
    assert ((together - expected).square() / expected).sum() < 40  # χ² with 15 degrees of freedom: one in 2,000
    other = unit_choice.launch_masked(ones, logits.expand(count, n).contiguous(), torch.tensor(8), n, 1, noise, 1.0).argmax(1)
    assert abs(float((unit == other).double().mean()) - float(share.square().sum())) < 0.02
    few, torch_seeds = torch.ones(1, n), torch.randint(unit_choice.SEEDS, (400,))
    hard = sum(bool((unit_choice.launch_masked(few, few, seed, n, 1, noise, 0.3) == 1).any()) for seed in torch_seeds)
    assert abs(hard / 400 - 0.3) < 0.1


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def built(capability: int) -> None:
    """Every kernel in every dtype, with the constants of a small call of each kind."""
    from retrofit.passes import triton_kernels as kernels

    height, columns, _ = indexed_rows.PRODUCTS
    tile = {"TILE_ROWS": height, "TILE_COLUMNS": columns}
    totals = dict(zip(("TILE_PARTS", "TILE_COLUMNS"), indexed_rows.TOTALS, strict=True))
    for dtype, flag in itertools.product(("fp64", "fp32", "bf16", "fp16"), (False, True)):
        wide = {"DOUBLE": dtype == "fp64"}
        build(kernels.tile_products, dtype, {**tile, **wide, "BIASED": flag}, capability)
        build(kernels.tile_sums, dtype, {**tile, **wide, "INDEXED": flag, "MASKED": not flag}, capability)
        build(kernels.tile_totals, dtype, {**totals, **wide, "BIASED": flag}, capability)
        for n, k in ((8, 4), (64, 1)):
            of = {"K": k, "PADDED": n, "TILE_BLOCKS": 64 // n, "TILE_RANK": unit_choice.CHOICE[1], "GIVEN": flag, "MASK": flag}
            build(kernels.tile_choice, dtype, of, capability)
            if not flag and dtype != "fp64":
                padded, each = unit_choice.mask_tile(n, k)
                for kernel in (kernels.tile_masked, kernels.tile_masked_gradients):
                    build(kernel, dtype, {"K": k, "PADDED": padded, "TILE_BLOCKS": each}, capability)


def build(kernel: Any, dtype: str, constants: dict[str, Any], capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    summed = "*fp64" if constants.get("DOUBLE") else "*fp32"
    kinds = {"indices": "*i64", "parts": summed, "low": summed}
    names = ("x", "h", "rows", "least", "bias", "z", "c2", "out", "logits", "grad", "grad_h", "grad_logits")
    pointers = {**dict.fromkeys(names, f"*{dtype}"), **kinds, "y": f"*{dtype}", "seed": "*i64", "noise": "fp32", "hard": "fp32"}
    if "MASK" in constants:
        pointers |= {"out": f"*{dtype}" if constants["MASK"] else "*i64"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    built(int(sys.argv[2])) if sys.argv[1] == "built" else interpreted()
    print("all as they should be")
