"""How much faster the sparse feed-forward is than the dense one for a single token, and up to how many tokens gathering rows wins.

Tokens differ from call to call and small weights come in several copies used in turn, so that rows come from memory and not from a
cache, as they do in a model. The forms take turns in one process; the ratio of their least times is printed.

    python benchmarks/sparse_ffn.py                 # one token, at the paper's sizes
    python benchmarks/sparse_ffn.py --crossover     # gathered against dense products and mask, for 1, 2, 4, … tokens
    python benchmarks/sparse_ffn.py --products      # a token's products with some rows, read in place against copied
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.anatomy.feed_forwards import FeedForward, Port, linear
from retrofit.anatomy.weights import Matrix
from retrofit.passes import indexed_rows
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.surgery.row_major import RowMajor

SIZES = ((1024, 4096, 64), (4096, 16384, 128), (9216, 36864, 256))  # d, d_ff, N
BYTES = 400e6  # of weights: many times the caches of a CPU, and of a GPU


def main() -> None:
    parser = argparse.ArgumentParser(description="The sparse feed-forward against the dense one.")
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=SIZES, metavar="d,d_ff,N")
    parser.add_argument("--active", type=int, default=1, help="k units of N")
    parser.add_argument("--crossover", action="store_true", help="the two inference paths against each other")
    parser.add_argument("--products", action="store_true", help="the two ways to multiply a token with some rows")
    parser.add_argument("--counts", type=int, nargs="+", default=(1, 4, 16, 64, 256), help="numbers of tokens for --crossover")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="other inputs in turn; 1: the same each time, its rows in the cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", type=float, default=BYTES, help="of weights, in copies that are used in turn")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: a busy machine disturbs one thread less")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.device}, {options.dtype}, {options.threads} thread(s), {options.clock} time, torch {torch.__version__}\n")
    if options.products:
        products(options)
    for size in () if options.products else options.sizes:
        (crossover if options.crossover else single)(*size, options)


def parse_size(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


@torch.inference_mode()
def single(d: int, d_ff: int, n: int, options: argparse.Namespace) -> None:
    """One token, dense and sparse."""
    blocks = make_blocks(d, d_ff, n, options)
    dense, sparse = turns(blocks, 1, Dense.__call__, options), turns(blocks, 1, SparseFeedForward.forward, options)
    slow, fast = least([dense, sparse], options)
    print(f"d={d} d_ff={d_ff} N={n}: dense {1e6 * slow:9.0f} µs, sparse {1e6 * fast:6.0f} µs, {slow / fast:6.1f}×", flush=True)


@torch.inference_mode()
def crossover(d: int, d_ff: int, n: int, options: argparse.Namespace) -> None:
    """Gathered, dense with a mask, and the dense feed-forward, for more and more tokens."""
    blocks = make_blocks(d, d_ff, n, options)
    print(f"d={d} d_ff={d_ff} N={n}\n{'tokens':>8} {'gathered':>11} {'masked':>11} {'dense':>11}  µs")
    for tokens in options.counts:
        ways = [by_path(True), by_path(False), Dense.__call__]
        times = least([turns(blocks, tokens, way, options) for way in ways], options)
        print(f"{tokens:>8} " + " ".join(f"{1e6 * seconds:>11.0f}" for seconds in times), flush=True)
    print()


@torch.inference_mode()
def products(options: argparse.Namespace) -> None:
    """x · rows[i] for one token and a row in eight: the rows read in place, and copied first."""
    print(f"{'d':>6} {'rows':>6} {'MB':>6} {'in place':>9} {'copied':>9}  µs")
    for d, count in itertools.product((256, 576, 1024, 2048, 4096), (64, 256, 1024)):
        matrices = [torch.randn(8 * count, d) for _ in range(max(2, int(options.bytes / (32 * count * d))))]
        x, chosen = torch.randn(1, d), torch.randint(8, (options.tokens, 1, count)) + torch.arange(0, 8 * count, 8)
        ways = [products_with_limit(limit, x, chosen, matrices) for limit in (0, 1 << 40)]
        times = least(ways, options)
        print(f"{d:>6} {count:>6} {4e-6 * d * count:>6.1f} " + " ".join(f"{1e6 * one:>9.0f}" for one in times), flush=True)


def products_with_limit(limit: int, x: Tensor, chosen: Tensor, matrices: list[Tensor]) -> Iterator[Tensor]:
    """Products of one token with some rows of one matrix after another; rows of up to `limit` bytes are copied."""
    for rows, indices in zip(itertools.cycle(matrices), itertools.cycle(chosen), strict=False):
        indexed_rows.SMALL = limit
        yield indexed_rows.indexed_products(x, indices, rows)


class Dense:
    """The feed-forward as it was, on the same weights."""

    def __call__(self: SparseFeedForward, x: Tensor) -> Tensor:  # type: ignore[misc]
        return F.linear(torch.relu(self.up(x)), self.dense, self.down.bias)  # type: ignore[operator, arg-type]


def by_path(gathers: bool) -> Callable[[SparseFeedForward, Tensor], Tensor]:
    def run(block: SparseFeedForward, x: Tensor) -> Tensor:
        block.prefers_gather = lambda x: gathers  # type: ignore[method-assign]
        return block(x)  # type: ignore[no-any-return]

    return run


def make_blocks(d: int, d_ff: int, n: int, options: argparse.Namespace) -> list[SparseFeedForward]:
    """Sparse feed-forwards with random weights and controllers, and their output weights as the dense one stores them."""
    how = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    matrices = Matrix("", "up", "", None, True), Matrix("", "down", "", None, True)
    hidden = fx.symbolic_trace(nn.ReLU())
    site = FeedForward("", d, d_ff, matrices[:1], (Port(0, 0, 1),), hidden, matrices[1], 0, None, "")
    controller: dict[str, Any] = {
        "sparsity": n,
        "rank": max(1, d // n),
        "temperature": 0.1,
        "hard": 0.3,
        "noise": "choice",
        "multiply": False,
        "scale": False,
        "active": options.active,
    }
    blocks = []
    for _ in range(max(1, round(options.bytes / (2 * d * d_ff * torch.finfo(how["dtype"]).bits / 8)))):
        up = linear(parameter(d_ff, d, **how), parameter(d_ff, **how))
        down = RowMajor(parameter(d_ff, d, **how), parameter(d, **how))
        order = torch.arange(d_ff, device=options.device)
        block = SparseFeedForward(site, nn.Linear(1, 1), {"up": up}, down, order, **controller).eval()
        for one in (block.c1, block.c2, block.bias):
            one.detach().normal_()
        block.register_buffer("dense", down.weight.detach().t().contiguous())
        blocks.append(block)
    return blocks


def parameter(*size: int, **how: object) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size, **how), requires_grad=False)  # type: ignore[call-overload]


def turns(
    blocks: list[SparseFeedForward], tokens: int, way: Callable[..., Tensor], options: argparse.Namespace
) -> Iterator[Tensor]:
    """Results of one way to compute, each of other tokens and, where there are several, of another block."""
    like = blocks[0].down.weight
    drawn = torch.randn(options.tokens, tokens, like.shape[1], device=like.device, dtype=like.dtype)
    return (way(block, x) for block, x in zip(itertools.cycle(blocks), itertools.cycle(drawn), strict=False))


def least(forms: list[Iterator[Tensor]], options: argparse.Namespace) -> list[float]:
    """The least seconds a result of each form, over rounds in which they take turns."""
    times: list[list[float]] = [[] for _ in forms]
    for _ in range(options.rounds):
        for form, measured in zip(forms, times, strict=True):
            next(form)
            count = max(1, min(50, int(0.2 / seconds(form, 1, options))))
            measured.append(seconds(form, count, options))
    return [min(measured) for measured in times]


def seconds(form: Iterator[Tensor], count: int, options: argparse.Namespace) -> float:
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    wait()
    began = clock()
    for _ in range(count):
        next(form)
    wait()
    return (clock() - began) / count


if __name__ == "__main__":
    main()
