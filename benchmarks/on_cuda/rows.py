"""The kernels that read some rows of a matrix: whether they are right on the device, and from how many tokens on they lose.

Four ways compute the same feed-forward: the dense products; the dense products and a mask; the rows that a controller chose; and
those rows without the controller, given their indices, which is what the kernels alone can win. A layer after activation-sparsity
is computed in three: without thresholds, by dense products of the masked inputs, and from the columns that these need.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from activation_sparsity import layer_model, token_through
from sparse_ffn import Dense, by_path, make_blocks
from torch import Tensor
from torch.nn import functional as F

import retrofit
from on_cuda.parts import Part, attempt
from on_cuda.timing import captured, in_turns
from retrofit.passes import indexed_rows
from retrofit.passes.activation_sparsity import masked_products
from retrofit.passes.indexed_rows import indexed_products, indexed_sums, thresholded_sums
from retrofit.passes.sparse_ffn import unit_choice

# ‖out − ref‖ / ‖ref‖ from which a kernel is not right
WRONG = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-3,
}
SHAPES = ((1, 7, 40), (3, 33, 300), (2, 64, 513), (1, 4096, 2048), (8, 8192, 4096), (64, 256, 1024))  # tokens, rows read, width
MANY = (600_000, 4096)  # a matrix of more than 2³¹ numbers
SIZES = ((2048, 8192), (4096, 16384), (1024, 4096))  # d, d_ff
CHOICES = ((8, 4), (2, 1), (8, 1), (64, 1))  # N, k
TOKENS = (1, 2, 4, 8, 16, 64, 256)
WIDTHS = (4096, 2048)  # of layers after activation-sparsity
LEVELS = (0.5, 0.25)
TILES = {  # of each kernel: what a program reads at a time, and its warps; the last: programs that keep the device busy
    "products": ((2, 1024, 4), (4, 1024, 4), (2, 512, 4), (2, 2048, 4), (16, 256, 4)),
    "sums": ((64, 128, 4), (32, 128, 4), (128, 128, 4), (128, 128, 8), (16, 256, 4)),
    "choice": ((32, 128, 4), (64, 128, 4), (32, 256, 4), (16, 256, 4), (64, 64, 4)),
    "programs": (512, 128, 256, 1024, 2048),
}
TILED = ((2048, 8192), (4096, 16384))


def parts(device: str, rehearsal: bool) -> list[Part]:
    found = [Part("rows: right", 10, lambda: right(device, rehearsal))]
    sizes = ((32, 64),) if rehearsal else SIZES
    for size in sizes:
        found.append(Part(f"rows: crossover d={size[0]}", 12, lambda size=size: crossover(size, device, rehearsal)))
    for width in (256,) if rehearsal else WIDTHS:
        found.insert(2, Part(f"columns: layer d={width}", 15, lambda width=width: columns(width, device)))
    return [*found, Part("rows: tiles", 5, lambda: tiles(device, rehearsal))]


# ── Whether they are right ───────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def right(device: str, rehearsal: bool) -> dict[str, Any]:
    """The relative errors of both kernels, the largest over the shapes, by dtype; and on a matrix whose indices need 64 bits."""
    found: dict[str, Any] = {}
    for dtype, most in WRONG.items():
        worst = {"products": 0.0, "sums": 0.0}
        for tokens, blocks, width in SHAPES[:3] if rehearsal else SHAPES:
            rows = torch.randn(2 * blocks, width, device=device).to(dtype)
            for name, error in errors(rows, tokens, blocks).items():
                worst[name] = max(worst[name], error)
        found[str(dtype).removeprefix("torch.")] = {**worst, "allowed": most}
    if not rehearsal:
        rows = torch.empty(MANY, dtype=torch.bfloat16, device=device).normal_()
        found["over 2^31 numbers"] = {**errors(rows, 2, 64, behind=2**31 // MANY[1]), "allowed": WRONG[torch.bfloat16]}
    return found


def errors(rows: Tensor, tokens: int, blocks: int, behind: int = 0) -> dict[str, float]:
    """‖out − ref‖ / ‖ref‖ of both products with rows from index `behind` on, each written where NaNs were."""
    (count, width), how = rows.shape, {"device": rows.device, "dtype": rows.dtype}
    x, h = torch.randn(tokens, width, **how), torch.randn(tokens, blocks, **how)
    indices = torch.randint(behind, count, (tokens, blocks), device=rows.device)
    chosen = rows[indices].double()  # (tokens, blocks, width)
    z, y = (chosen @ x.double().unsqueeze(2)).squeeze(2), (h.double().unsqueeze(1) @ chosen).squeeze(1)
    poison(z, rows.dtype)
    mine = indexed_products(x, indices, rows)
    poison(y, torch.float32)
    found = {"products": relative(mine, z), "sums": relative(indexed_sums(h, indices, rows), y)}
    if h.is_cuda and not behind:
        least = h.abs().float().median().to(h.dtype)
        kept = h.masked_fill(h.abs() < least, 0.0).double()
        found["sums"] = max(found["sums"], relative(thresholded_sums(h, rows, least), kept @ rows[:blocks].double()))
    return found


def poison(like: Tensor, dtype: torch.dtype) -> None:
    """The memory that the next tensor of this shape gets holds NaNs, where the allocator gives what was freed last."""
    torch.full(like.shape, torch.nan, dtype=dtype, device=like.device)


def relative(found: Tensor, expected: Tensor) -> float:
    error = float((found.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


# ── From how many tokens on they lose ────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def crossover(size: tuple[int, int], device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds of each way by N, k and tokens, as calls from Python and as a CUDA graph; and what the rule of today chooses."""
    found: dict[str, Any] = {}
    for n, k in CHOICES[:2] if rehearsal else CHOICES:
        blocks = blocks_of(size, n, k, device, rehearsal)
        for tokens in (1, 4) if rehearsal else TOKENS:
            x = torch.randn(tokens, size[0], device=device, dtype=blocks[0].down.weight.dtype)
            ways = {name: over_all(blocks, way, x) for name, way in ways_of(blocks[0], tokens).items()}
            timed = functools.partial(per_block, blocks=len(blocks), device=device)
            row = attempt(lambda timed=timed, ways=ways: {"called": timed(ways)})
            graphs = {name: attempt(lambda way=way: captured(way, device)) for name, way in ways.items()}
            ready = {name: graph for name, graph in graphs.items() if callable(graph)}
            row |= attempt(lambda timed=timed, ready=ready: {"graph": timed(ready)})
            row |= {f"{name} as a graph": graph for name, graph in graphs.items() if not callable(graph)}
            found[f"N={n} k={k} tokens={tokens}"] = {**row, "rule": "rows" if prefers_rows(blocks[0], x) else "mask"}
    return found


def blocks_of(size: tuple[int, int], n: int, k: int, device: str, rehearsal: bool) -> list[Any]:
    """Feed-forwards with random weights, many times the caches."""
    how = {"device": device, "dtype": "bfloat16" if device == "cuda" else "float32", "bytes": 1e5 if rehearsal else 4e8}
    return make_blocks(*size, n, argparse.Namespace(active=k, **how))


def ways_of(block: Any, tokens: int) -> dict[str, Callable[[Any, Tensor], Tensor]]:
    """The feed-forward, in four ways."""
    count = block.units // block.sparsity * block.active
    starts = torch.arange(count, device=block.down.weight.device) * block.sparsity // block.active
    indices = (starts + torch.randint(block.sparsity // block.active, (tokens, count), device=starts.device)).contiguous()

    def given(block: Any, x: Tensor) -> Tensor:
        h = F.relu(indexed_products(x, indices, block.up.weight, block.up.bias))
        return indexed_sums(h, indices, block.down.weight, block.down.bias)

    return {"dense": Dense.__call__, "mask": by_path(False), "rows": by_path(True), "rows given": given}


def over_all(blocks: list[Any], way: Callable[[Any, Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        for block in blocks:
            way(block, x)

    return run


def per_block(ways: dict[str, Callable[[], None]], blocks: int, device: str) -> dict[str, float]:
    return {name: time / blocks for name, time in in_turns(ways, device).items()}


def prefers_rows(block: Any, x: Tensor) -> bool:
    """What the pass itself chooses, on this device."""
    return bool(type(block).prefers_gather(block, x))


# ── Columns of a layer's weights ─────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def columns(width: int, device: str) -> dict[str, Any]:
    """Milliseconds of a Llama layer for some tokens by level, as calls from Python and as a CUDA graph, and how far it is off."""
    dense = layer_model(width, torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    ids = torch.randint(0, dense.config.vocab_size, (16, 64), device=device)
    found: dict[str, Any] = {}
    for level in LEVELS:
        spec = f"activation-sparsity(level={level}, allocation=uniform)"
        sparse = retrofit.apply(copy.deepcopy(dense), spec, calibration=ids, verify=False)
        for tokens in (1, 2):
            run = {"dense": token_through(dense, tokens), "columns": token_through(sparse, tokens)}
            run["mask"] = functools.partial(densely, run["columns"], device)
            row = {"called": attempt(lambda run=run: in_turns(run, device))}
            graphs = {name: attempt(lambda way=way: captured(way, device)) for name, way in run.items()}
            ready = {name: graph for name, graph in graphs.items() if callable(graph)}
            row |= {"graph": attempt(lambda ready=ready: in_turns(ready, device))}
            row |= {f"{name} as a graph": graph for name, graph in graphs.items() if not callable(graph)}
            found[f"{level:.0%} zero, tokens={tokens}"] = {**row, "differs": relative(run["columns"](), run["mask"]().double())}
    return found


def densely(way: Callable[[], Tensor], device: str) -> Tensor:
    """What a way computes, by dense products of the masked inputs."""
    few, masked_products.FEW[device] = masked_products.FEW[device], 0
    try:
        return way()
    finally:
        masked_products.FEW[device] = few


# ── How large a tile is best ─────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def tiles(device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds of each kernel for one token, by what a program of it reads at a time, half of the rows."""
    found: dict[str, Any] = {}
    for size in ((32, 64),) if rehearsal else TILED:
        blocks = blocks_of(size, 8, 4, device, rehearsal)
        x = torch.randn(1, size[0], device=device, dtype=blocks[0].down.weight.dtype)
        for kernel, task in kernels_of(blocks[0], x).items():
            place, name = SETTINGS[kernel]
            own, row = getattr(place, name), {}
            try:
                for setting in TILES[kernel][:2] if rehearsal else TILES[kernel]:
                    setattr(place, name, setting)
                    way = over_all(blocks, task, x)
                    time = attempt(lambda way=way, blocks=blocks: per_block({"": captured(way, device)}, len(blocks), device))
                    row["×".join(map(str, setting)) if isinstance(setting, tuple) else str(setting)] = time.get("", time)
            finally:
                setattr(place, name, own)
            found[f"{kernel} d={size[0]}"] = row
    return found


SETTINGS = {
    "products": (indexed_rows, "PRODUCTS"),
    "sums": (indexed_rows, "SUMS"),
    "programs": (indexed_rows, "PROGRAMS"),
    "choice": (unit_choice, "CHOICE"),
}


def kernels_of(block: Any, x: Tensor) -> dict[str, Callable[[Any, Tensor], Tensor]]:
    """What each setting is measured on."""
    count = block.units // block.sparsity * block.active
    starts = torch.arange(count, device=x.device) * block.sparsity // block.active
    indices = (starts + torch.randint(block.sparsity // block.active, (1, count), device=x.device)).contiguous()
    h = torch.randn(1, count, device=x.device, dtype=x.dtype)

    def chosen(one: Any, x: Tensor) -> Tensor:
        if x.device.type != "cuda":
            return one.logits(x)  # type: ignore[no-any-return]
        return unit_choice.chosen_units(x, one.c1, one.c2, one.bias, one.sparsity, one.active)

    return {
        "products": lambda one, x: indexed_products(x, indices, one.up.weight, one.up.bias),
        "sums": lambda one, x: indexed_sums(h, indices, one.down.weight, one.down.bias),
        "programs": lambda one, x: indexed_sums(h, indices, one.down.weight, one.down.bias),
        "choice": chosen,
    }
