"""AltUp's update of the stream and its gradients on CUDA, by Triton kernels.

A layer's map from x^1 … x^K and x̃ to the new blocks is its prediction and its correction: between two layers, each of the K + 1
vectors of a token is read once and K are written. The backward pass reads and writes as many, and sums the gradients of the
coefficients in the same pass.

In eager mode this is one launch per layer, and two in the backward pass. When compiled, the update consists of torch's operations,
which the compiler fuses with the addition before it; its gradients are the operation `retrofit::stream_gradients`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk.modules import is_exporting

Operands = tuple[Tensor, Tensor, Tensor, Tensor]  # of x, y, p and g
HAS_TRITON = importlib.util.find_spec("triton") is not None
TILE = (2, 512)  # tokens and columns that a program reads at a time
PROGRAMS = 1024  # at most, each with its part of the sums over tokens
TILE_PARTS = 16  # parts that are added at a time
LARGEST = 8  # limit of K: the loops over blocks are unrolled


def runs_kernel(x: Tensor, p: Tensor) -> bool:
    """Return whether the kernels run: on CUDA, with coefficients that are the same for every token, unsharded, not in an export."""
    if not x.is_cuda or not HAS_TRITON or p.dim() != 2 or len(p) > LARGEST or not x.numel():
        return False
    sharded = hasattr(x, "to_local") or hasattr(p, "to_local")
    return not (sharded or is_exporting() or torch.jit.is_tracing())


def update_stream(
    x: Tensor, y: Tensor, p: Tensor, g: Tensor, how: Sequence[int], combine: Sequence[float] | None, made: Tensor | None = None
) -> Tensor:
    """Return x_new, (…, K·d), from the stream x and the layer's output y, (…, d); with `combine`, Σ_i combine[i] x_new^i.

    `how` is (active, shift, expand). With a shift of 1, block i of the result is block i + 1 of x_new. With `expand` x is (…, d),
    and all K blocks equal it. `made` is the result if other operations have computed it.
    """
    active, shift, expand = how
    rows = None if combine is None else combination((*combine[-shift:], *combine[:-shift]) if shift else tuple(combine), x.device)
    how = [active, shift if rows is None else 0, expand]
    if made is None:
        with torch.no_grad():
            made = launch_update(x, y, p, g, rows, how)
    return StreamUpdate.apply(x, y, p, g, made, rows, how) if torch.is_grad_enabled() else made  # type: ignore[no-any-return]


class StreamUpdate(torch.autograd.Function):
    """Returns `made`, with the gradients of the update; x and y are not saved if the coefficients are not trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, p: Tensor, g: Tensor, made: Tensor, rows: Tensor | None, how: Sequence[int]
    ) -> Tensor:
        trained = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        ctx.save_for_backward(p, g, rows, *((x, y) if trained else ()))
        ctx.how = how
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, g, rows, *kept = ctx.saved_tensors
        x, y = kept or (None, None)
        if torch.compiler.is_compiling():
            made = stream_gradients(grad, x, y, p, g, rows, ctx.how)
        else:  # torch's operations for second derivatives
            compute = composed_gradients if torch.is_grad_enabled() else launch_gradients
            made = compute(grad, x, y, p, g, rows, ctx.how)
        return *(value if needed else None for value, needed in zip(made, ctx.needs_input_grad[:4], strict=True)), None, None, None


@functools.lru_cache(maxsize=64)
def combination(weights: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the weights as a matrix of one row: (1, K)."""
    return torch.tensor([weights], dtype=torch.float32, device=device)


def composed_gradients(
    grad: Tensor, x: Tensor | None, y: Tensor | None, p: Tensor, g: Tensor, rows: Tensor | None, how: Sequence[int]
) -> Operands:
    """Return the gradients of x, y, p and g, computed by torch's operations; without x and y those of p and g are empty."""
    a, b, moved = stream_map(grad, p, g, rows, how)
    of_out = grad.to(a.dtype).unflatten(-1, (len(a), -1))  # (…, R, d)
    grad_x, grad_y = torch.einsum("rc,...rd->...cd", a, of_out).flatten(-2), torch.einsum("r,...rd->...d", b, of_out)
    if x is None or y is None:
        return grad_x.to(grad.dtype), grad_y.to(grad.dtype), p.new_empty(0), g.new_empty(0)
    of_a = torch.einsum("...rd,...cd->rc", of_out, x.to(a.dtype).unflatten(-1, (a.shape[1], -1)))
    of_b = torch.einsum("...rd,...d->r", of_out, y.to(a.dtype))
    of_p = (moved.mT @ of_a).expand(-1, len(g))
    of_g = moved.mT @ of_b - of_p @ p[how[0]].to(a.dtype)
    is_active = torch.arange(len(g), device=g.device).unsqueeze(1) == how[0]
    of_p = of_p - torch.where(is_active, g.to(a.dtype) @ of_p, 0.0)  # −g_i p_j is in every row i
    return grad_x.to(grad.dtype), grad_y.to(grad.dtype), of_p.to(p.dtype), of_g.to(g.dtype)


def stream_map(x: Tensor, p: Tensor, g: Tensor, rows: Tensor | None, how: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a = W (P − g p_jᵀ) E, (R, C), b = W g, (R), and W, (R, K)."""
    active, shift, expand = how
    p, g = (value.to(torch.promote_types(x.dtype, torch.float32)) for value in (p, g))
    moved = torch.eye(len(g), dtype=p.dtype, device=p.device).roll(shift, 1) if rows is None else rows.to(p.dtype)
    a = moved @ (p - g.unsqueeze(1) * p[active])
    return a.sum(1, keepdim=True) if expand else a, moved @ g, moved


# ── The kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def launch_update(x: Tensor, y: Tensor, p: Tensor, g: Tensor, rows: Tensor | None, how: Sequence[int]) -> Tensor:
    """Return the update, computed by one kernel; `rows` (R, K) combines the K blocks to R, `how` is (active, shift, expand)."""
    from retrofit.passes.altup.triton_kernels import stream_forward

    x, y, p, g = (value.contiguous() for value in (x, y.to(x.dtype), p, g))
    shape = blocks_of(g, rows, how)
    tokens, width = y.numel() // y.shape[-1], y.shape[-1]
    out = x.new_empty(*y.shape[:-1], shape[0] * width)
    (height, columns), options = tile(width), (*how, rows is not None, x.dtype == torch.float64)
    grid = -(-tokens // height), -(-width // columns)
    with torch.cuda.device_of(x):
        stream_forward[grid](x, y, p, g, g if rows is None else rows, out, tokens, width, *shape, *options, height, columns)
    return out


def launch_gradients(
    grad: Tensor, x: Tensor | None, y: Tensor | None, p: Tensor, g: Tensor, rows: Tensor | None, how: Sequence[int]
) -> Operands:
    """Return the gradients of x, y, p and g, computed by two kernels; without x and y those of p and g are empty."""
    from retrofit.passes.altup.triton_kernels import stream_gradient, stream_totals

    grad, p, g = (value.contiguous() for value in (grad, p, g))
    shape = outputs, inputs, k = blocks_of(g, rows, how)
    made = grad_x, grad_y, grad_p, grad_g = shaped_gradients(grad, x, y, p, g, rows, how)
    tokens, width = grad_y.numel() // grad_y.shape[-1], grad_y.shape[-1]
    height, columns = tile(width)
    across, padded = -(-width // columns), power_of_two(outputs * (inputs + 1))
    programs = max(1, min(-(-tokens // height), PROGRAMS // across))
    each = -(-tokens // (programs * height)) * height  # tokens of a program: whole tiles
    programs = -(-tokens // each)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    parts = torch.empty(programs * across, padded, dtype=wide, device=grad.device)
    options, matrix = (*how, rows is not None, wide == torch.float64), g if rows is None else rows
    read = (grad, grad) if x is None or y is None else (x.contiguous(), y.contiguous())
    given = grad, *read, p, g, matrix, grad_x, grad_y, parts, tokens, width, each
    with torch.cuda.device_of(grad):
        stream_gradient[programs, across](*given, *shape, *options, x is not None, height, columns, padded)
        if x is not None:
            sides = TILE_PARTS, padded, power_of_two(k + 1)
            stream_totals[1,](parts, p, g, matrix, grad_p, grad_g, len(parts), *shape, *options, *sides)
    return made


def shaped_gradients(
    grad: Tensor, x: Tensor | None, y: Tensor | None, p: Tensor, g: Tensor, rows: Tensor | None, how: Sequence[int]
) -> Operands:
    outputs, inputs, _ = blocks_of(g, rows, how)
    width = grad.shape[-1] // outputs
    grad_x, grad_y = (grad.new_empty(*grad.shape[:-1], count * width) for count in (inputs, 1))  # contiguous
    grad_p, grad_g = (value.new_empty(0 if x is None else value.shape) for value in (p, g))
    return grad_x, grad_y, grad_p, grad_g


def registered() -> Any:
    """Return the gradients as an operation that is opaque to compilers.

    A process registers it once: a bundle loaded along with retrofit contains this code too, and registering the name again would
    free the first operation, which models may be calling.
    """
    if hasattr(torch.ops.retrofit, "stream_gradients"):
        return torch.ops.retrofit.stream_gradients
    operation = torch.library.custom_op(
        "retrofit::stream_gradients",
        composed_gradients,
        mutates_args=(),
        schema="(Tensor grad, Tensor? x, Tensor? y, Tensor p, Tensor g, Tensor? rows, int[] how) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    )
    operation.register_fake(shaped_gradients)
    operation.register_kernel("cuda", launch_gradients)
    return operation


stream_gradients = registered()


# ── Sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def blocks_of(g: Tensor, rows: Tensor | None, how: Sequence[int]) -> tuple[int, int, int]:
    """Return the numbers of blocks of the output and of the input, and K."""
    k = len(g)
    return k if rows is None else len(rows), 1 if how[2] else k, k


def tile(width: int) -> tuple[int, int]:
    """Return the tokens and columns that a program reads at a time."""
    return TILE[0], min(TILE[1], power_of_two(width))


def power_of_two(number: int) -> int:
    """Return the least power of two ≥ `number`."""
    return 1 << max(0, number - 1).bit_length()
