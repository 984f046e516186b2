"""AltUp's update as one operation: on a CPU by torch's operations, and its Triton kernels in the interpreter, against float64."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._library.custom_ops import OPDEF_TO_LIB
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from retrofit.passes.altup import layers, stream_kernel
from retrofit.passes.altup.layers import AltUpLayer
from retrofit.passes.altup.stream_kernel import composed_gradients, stream_gradients

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
KINDS: dict[str, dict[str, Any]] = {
    "inner": {},
    "rotated": {"rotate": True},
    "first": {"expand": True},
    "last": {"combine": (0.5, 0.0, 0.25, 0.25)},
    "rotated, last": {"combine": (0.5, 0.0, 0.25, 0.25), "rotate": True},
    "only": {"expand": True, "combine": (1.0, 0.0, 0.0, 0.0)},
}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def operands(kind: str, k: int, width: int, dtype: torch.dtype, lead: tuple[int, ...] = (2, 3)) -> tuple[list[Tensor], list[Any]]:
    """x, y, p, g, and what follows them in the call of the operation."""
    given, generator = KINDS[kind], torch.Generator().manual_seed(k)
    inputs = 1 if given.get("expand") else k
    sizes = [(*lead, inputs * width), (*lead, width), (k, k), (k,)]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    shift, weights = int(given.get("rotate", False)), given.get("combine")
    rows = None
    if weights is not None:
        weights = weights[:k]
        rows = torch.tensor([weights[-shift:] + weights[:-shift] if shift else weights])
    return tensors, [rows, [1, 0 if weights else shift, int(given.get("expand", False))]]


def layer_of(kind: str, k: int, width: int, p: Tensor, g: Tensor) -> AltUpLayer:
    given = {**KINDS[kind]}
    if "combine" in given:
        given["combine"] = given["combine"][:k]
    layer = AltUpLayer(nn.Identity(), width, k, 1, **given).to(p.dtype)
    layer.p.data, layer.g.data = p, g
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_layer(kind: str) -> None:
    (x, y, p, g), rest = operands(kind, 4, 5, torch.float64)
    layer = layer_of(kind, 4, 5, p, g)
    made = layer.update(x.requires_grad_(), x[..., :5].detach(), y.requires_grad_())
    grad = torch.randn_like(made)
    theirs = torch.autograd.grad(made, [x, y, layer.p, layer.g], grad)
    for mine, other in zip(composed_gradients(grad, x, y, p, g, *rest), theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kind", KINDS)
def test_fake_gradients_have_the_shapes_and_layouts_of_real_ones(kind: str) -> None:
    """With absent operands too."""
    (x, y, p, g), rest = operands(kind, 4, 3, torch.float32, (2,))
    grad = torch.randn_like(layer_of(kind, 4, 3, p, g).update(x, x[..., :3], y))
    for operand in ((x, y), (None, None)):
        given = (grad, *operand, p, g, *rest)
        real = stream_gradients(*given)
        with FakeTensorMode() as mode:
            fake = stream_gradients(*tree_map_only(Tensor, mode.from_tensor, given))
        layouts = [[(part.shape, part.stride(), part.dtype, part.device) for part in parts] for parts in (real, fake)]
        assert layouts[0] == layouts[1]


def test_a_second_copy_of_the_code_leaves_the_operation_where_it_is() -> None:
    """A bundle holds one. torch frees the operation that a name had when the name is registered again."""
    known = OPDEF_TO_LIB["retrofit::stream_gradients"]
    spec = importlib.util.spec_from_file_location("copy_of_the_kernel", stream_kernel.__file__)
    assert spec is not None and spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    assert OPDEF_TO_LIB["retrofit::stream_gradients"] is known
    (x, y, p, g), rest = operands("inner", 4, 3, torch.float32)
    grad = torch.randn_like(x)
    for mine, theirs in zip(
        stream_gradients(grad, x, y, p, g, *rest), copied.stream_gradients(grad, x, y, p, g, *rest), strict=True
    ):
        assert torch.equal(mine, theirs)


class Block(nn.Module):
    """A layer of a stack: x + W_2 silu(W_1 norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def kernels(depth: int, k: int) -> list[int]:
    """How many kernels Inductor makes of a training step of a stack, forward and backward; k = 1 is the dense one."""
    stack = [Block() if k == 1 else AltUpLayer(Block(), 8, k, number % k) for number in range(depth)]
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any], **given: Any) -> Any:
        modes = detect_fake_mode(inputs)
        with V.set_fake_mode(modes):
            record_original_output_strides(graph)
            post_grad_passes(graph, False)
            lowered = GraphLowering(graph, example_inputs=inputs, is_backward=given.get("is_backward", False))
            with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
                lowered.run(*inputs)
                lowered.init_wrapper_code()
                lowered._update_scheduler()
                nodes = [node for node in lowered.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
                counts.append(sum(not isinstance(node.node, MultiOutput) for node in nodes))  # an item of what an operation returns
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiled = torch.compile(nn.Sequential(*stack), backend=lambda *given: compile_fx(*given, inner_compile=count), fullgraph=True)
    compiled(torch.randn(3, 5, 8 * k, requires_grad=True)).square().sum().backward()
    return counts


@pytest.mark.long
@pytest.mark.parametrize("k", [2, 4])
def test_a_compiled_layer_takes_one_kernel_more_and_one_operation_on_the_way_back(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That operation launches two. Counted on a CPU, of what runs on CUDA."""
    monkeypatch.setattr(layers, "runs_kernel", lambda x, p: True)
    more = [[many - few for many, few in zip(kernels(4, width), kernels(2, width), strict=True)] for width in (1, k)]
    assert [ours - dense for dense, ours in zip(*more, strict=True)] == [2 * 1, 2 * 1]


@needs_triton
def test_kernels_compute_the_formula() -> None:
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


class Counting:
    """A kernel, and how often it was launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


def interpreted() -> None:
    from retrofit.passes.altup import triton_kernels as kernels

    counting = {name: Counting(getattr(kernels, name)) for name in ("stream_forward", "stream_gradient", "stream_totals")}
    for name, kernel in counting.items():
        setattr(kernels, name, kernel)
    stream_kernel.TILE, stream_kernel.PROGRAMS, stream_kernel.TILE_PARTS = (2, 8), 3, 2
    for kind, (dtype, near) in itertools.product(KINDS, DTYPES.items()):
        correct(kind, 4, 11, dtype, near)
    for k, width in ((2, 8), (3, 21), (8, 3)):
        correct("inner", k, width, torch.bfloat16, DTYPES[torch.bfloat16])
    calls = len(KINDS) * len(DTYPES) + 3
    # One launch forward and two backward, one where the coefficients are not trained.
    assert [kernel.launches for kernel in counting.values()] == [calls, 3 * calls, 2 * calls]
    exact()
    layers.runs_kernel = lambda x, p: True  # type: ignore[attr-defined]
    for kind in KINDS:
        whole(kind)


def whole(kind: str) -> None:
    """The layer with its kernels, and without."""
    (x, y, p, g), _ = operands(kind, 4, 5, torch.float64)
    layer = layer_of(kind, 4, 5, p, g)
    given = [x.requires_grad_(), y.requires_grad_(), layer.p, layer.g]
    made = layer.update(x, x[..., :5].detach(), y)
    grad = torch.randn_like(made)
    found = torch.autograd.grad(made, given, grad)
    expected = composed_gradients(grad, x, y, p, g, *operands(kind, 4, 5, torch.float64)[1])
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def correct(kind: str, k: int, width: int, dtype: torch.dtype, near: float) -> None:
    tensors, (rows, how) = operands(kind, k, width, dtype, (5,))
    x, y, p, g = (tensor.double().requires_grad_() for tensor in tensors)
    layer = layer_of(kind, k, width, p.detach(), g.detach())
    expected = layer.update(x, x[..., :width].detach(), y)
    out = stream_kernel.launch_update(*tensors, rows, how)
    assert out.dtype == dtype and relative(out, expected) < near
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    theirs = torch.autograd.grad(expected, [x, y, layer.p, layer.g], grad.double())
    ours, again = (stream_kernel.launch_gradients(grad, *tensors, rows, how) for _ in range(2))
    for mine, same, other in zip(ours, again, theirs, strict=True):
        assert mine.dtype == dtype and relative(mine, other) < near and torch.equal(mine, same)
    frozen = stream_kernel.launch_gradients(grad, None, None, *tensors[2:], rows, how)
    assert torch.equal(frozen[0], ours[0]) and torch.equal(frozen[1], ours[1]) and not frozen[2].numel()


def exact() -> None:
    """At both exact starts the stream is the dense one, bit for bit."""
    for dtype in DTYPES:
        x, y = torch.randn(3, 6).to(dtype), torch.randn(3, 6).to(dtype)
        copies = torch.cat([x, x], -1)
        lockstep = stream_kernel.launch_update(copies, y, torch.eye(2).to(dtype), torch.ones(2).to(dtype), None, [0, 0, 0])
        assert torch.equal(lockstep, torch.cat([y, y], -1))
        p = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).to(dtype)  # from block 0 to block 1
        hop = stream_kernel.launch_update(torch.cat([x, 7 * x], -1), y, p, torch.tensor([0.0, 1.0]).to(dtype), None, [0, 0, 0])
        assert torch.equal(hop, torch.cat([7 * x, y], -1))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.detach()).norm() / expected.detach().norm())


def built(capability: int) -> None:
    """Every kernel in every dtype, in the middle of a stack and at its ends."""
    from retrofit.passes.altup import triton_kernels as kernels

    height, columns = stream_kernel.TILE
    for dtype, end in itertools.product(("fp64", "fp32", "bf16", "fp16"), (False, True)):
        blocks = {"R": 1 if end else 2, "C": 1 if end else 2, "K": 2, "J": 1, "SHIFT": 0, "EXPAND": end, "COMBINED": end}
        of = {**blocks, "DOUBLE": dtype == "fp64"}
        padded = stream_kernel.power_of_two(blocks["R"] * (blocks["C"] + 1))
        tile = {"TILE_TOKENS": height, "TILE_COLUMNS": columns}
        build(kernels.stream_forward, dtype, {**of, **tile}, capability)
        for sums in (False, True):
            build(kernels.stream_gradient, dtype, {**of, **tile, "SUMS": sums, "PADDED": padded}, capability)
        sides = {"TILE_PARTS": stream_kernel.TILE_PARTS, "PADDED": padded, "SIDE": stream_kernel.power_of_two(3)}
        build(kernels.stream_totals, dtype, {**of, **sides}, capability)


def build(kernel: Any, dtype: str, constants: dict[str, Any], capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wide = "*fp64" if constants["DOUBLE"] else "*fp32"
    numbers = ("tokens", "width", "each", "count")
    kinds = {"parts": wide, "rows": "*fp32" if constants["COMBINED"] else f"*{dtype}", **dict.fromkeys(numbers, "i32")}
    signature = {name: "constexpr" if name in constants else kinds.get(name, f"*{dtype}") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    built(int(sys.argv[2])) if sys.argv[1] == "built" else interpreted()
    print("all as they should be")
