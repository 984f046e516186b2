"""Decoding with activation-sparsity on a CPU: ways to read columns of a weight, a block of a wide model, and a trained model.

`products`: y = W x̃ for a token of whose input a share is zero, W column by column (in × out), a column being a stretch of memory:

- `dense`: the product with all columns, W as `nn.Linear` stores it, x masked already;
- `compiled`: the sum in C++ that the pass uses where there is a compiler, of the columns that some token needs, in place;
- `bag`: the sum of an embedding bag, which it uses elsewhere, for one token after the other;
- `copy`: the columns that some token needs are gathered, then multiplied;
- `blocks`: the same for a block of columns after the other, whose copy stays in a core's cache;
- `layer`: the layer of the pass as it is called, its mask included, with `--tokens` of them.

`block`: a token through a layer of a Llama, before and after the pass. `smollm2`: the loss of SmolLM2-135M on held-out text, and a
token decoded by the model, eager or compiled (`--compile`), before and after the pass.

All in one process and in turns; a figure is the ratio of the least times of the thread, above 1 where a way is faster than the
dense one. Matrices are taken in turns too, so that they come from memory and not from a cache.

    python benchmarks/activation_sparsity.py products
    python benchmarks/activation_sparsity.py products --tokens 4 --ways compiled bag blocks
    python benchmarks/activation_sparsity.py block --dtypes float32 bfloat16
    python benchmarks/activation_sparsity.py smollm2 --compile --specs "activation-sparsity(loss=+0.02)"
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.passes.activation_sparsity.activation_sparsity import MaskedProjection
from retrofit.passes.activation_sparsity.masked_products import ActivationMask
from retrofit.passes.compiled_products import sum_of_columns, sums_of_columns

APART = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # how far a way may lie from the dense product, of its largest entry
PROMPT, STEPS, LONGEST = 32, 12, 512  # tokens: before those that are timed, in a turn, in the cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("products", "block", "smollm2"))
    parser.add_argument("--widths", type=int, nargs="+", default=[576, 2048, 4096], help="of square matrices, or of the block")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.25, 0.4, 0.5, 0.7])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", default=["compiled", "bag", "copy", "layer"])
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--specs", nargs="+", default=["activation-sparsity(loss=+0.02)"])
    parser.add_argument("--compile", action="store_true", help="both models")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=128 << 20, help="of the matrices that are taken in turns")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"products": products, "block": block, "smollm2": smollm2}[options.part](options)


def least_times(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least seconds of the thread that each of the ways takes, in turns; the first round is for warmth."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            began = clock()
            way()
            if turn:
                times[name].append(clock() - began)
    return {name: min(found) for name, found in times.items()}


# ── Products ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

Way = Callable[[Tensor, Any], Tensor]  # of x, masked, and one of `Matrices`


class Matrix:
    """A weight as it is (out × in), column by column (in × out), and in a layer of the pass whose threshold is given."""

    def __init__(self, width: int, dtype: torch.dtype, threshold: float) -> None:
        self.rows = torch.randn(width, width).div(width**0.5).to(dtype)
        linear = nn.Linear(1, 1, bias=False)
        linear.weight = nn.Parameter(self.rows.clone())
        self.layer = MaskedProjection(linear, (0, "input"), ActivationMask(self.rows)).eval()
        self.layer.mask.threshold.fill_(threshold)
        self.layer(torch.zeros(1, width, dtype=dtype))
        self.columns = linear.weight.t().contiguous()  # the layer's own where the pass reads columns of so large a weight


def products(options: argparse.Namespace) -> None:
    ways: dict[str, Way] = {"dense": lambda x, matrix: F.linear(x, matrix.rows), "bag": bag, "copy": copied, "blocks": blocks}
    ways["layer"] = lambda x, matrix: matrix.layer(x)
    ways["compiled"] = lambda x, matrix: sums_of_columns(x, matrix.columns, torch.zeros((), dtype=x.dtype))
    ways = {name: ways[name] for name in ("dense", *options.ways) if name in ways}
    print(f"| d, dtype, zeros | dense, µs | {' | '.join(name for name in ways if name != 'dense')} |")
    print("| --- |" + " ---: |" * len(ways), flush=True)
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for width in options.widths:
            for level in options.levels:
                x = torch.randn(options.tokens, width)
                threshold = float(x.abs().flatten()[: 1 << 20].quantile(level))
                count = max(2, options.bytes // (2 * width * width * dtype.itemsize))
                matrices = [Matrix(width, dtype, threshold) for _ in range(count)]
                x = x.to(dtype)
                x = x.masked_fill(x.abs() < matrices[0].layer.mask.threshold, 0.0)
                ratios, seconds = measured(ways, x, matrices, options.rounds)
                cells = " | ".join(f"{ratio:.2f}" for ratio in ratios.values())
                label = f"{width}, {str(dtype).removeprefix('torch.')}, {level:.0%}"
                print(f"| {label} | {1e6 * seconds:.0f} | {cells} |", flush=True)


def measured(ways: dict[str, Way], x: Tensor, matrices: list[Matrix], rounds: int) -> tuple[dict[str, float], float]:
    """How many times as fast as the dense product each way is, and the seconds of that; each result is compared with it."""
    expected = x.double() @ matrices[0].rows.double().t()
    for name, way in ways.items():
        apart = float((way(x, matrices[0]).double() - expected).abs().max() / expected.abs().max())
        assert apart < APART[x.dtype], f"{name} is {apart:.1e} from the dense product"
    times = least_times({name: lambda way=way: [way(x, matrix) for matrix in matrices] for name, way in ways.items()}, rounds)
    return {name: times["dense"] / taken for name, taken in times.items() if name != "dense"}, times["dense"] / len(matrices)


def bag(x: Tensor, matrix: Matrix) -> Tensor:
    """The columns of each token, one after the other."""
    return torch.cat([sum_of_columns(token, matrix.columns) for token in x])


def copied(x: Tensor, matrix: Matrix) -> Tensor:
    """The columns of all tokens, once."""
    kept = (x != 0).any(0).nonzero().view(-1)
    return x[:, kept] @ matrix.columns.index_select(0, kept)


BLOCK = 64  # columns, of which a copy stays in the cache of a core


def blocks(x: Tensor, matrix: Matrix) -> Tensor:
    """The columns of all tokens, a block after the other."""
    kept = (x != 0).any(0).nonzero().view(-1)
    y = x.new_zeros(len(x), matrix.columns.shape[1])
    for some in kept.split(BLOCK):
        y.addmm_(x[:, some], matrix.columns.index_select(0, some))
    return y


# ── Models ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def block(options: argparse.Namespace) -> None:
    """A token through a layer as wide as Llama's of so much."""
    for width in options.widths:
        for dtype in (getattr(torch, name) for name in options.dtypes):
            dense = layer_model(width, dtype)
            ids = torch.randint(0, 512, (16, 64))
            for level in options.levels:
                spec = f"activation-sparsity(level={level}, allocation=uniform)"
                sparse: Any = retrofit.apply(copy.deepcopy(dense), spec, calibration=ids, verify=False)
                times = least_times({"dense": token_through(dense), "sparse": token_through(sparse)}, options.rounds)
                print(
                    f"a layer of d = {width}, {str(dtype).removeprefix('torch.')}, {level:.0%} zero: "
                    f"{1e3 * times['dense']:.1f} ms dense, {times['dense'] / times['sparse']:.2f} times as fast",
                    flush=True,
                )


def layer_model(width: int, dtype: torch.dtype) -> Any:
    """A Llama of one layer."""
    sizes = {"hidden_size": width, "intermediate_size": round(width * 2.6875), "num_attention_heads": width // 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=512, num_hidden_layers=1, max_position_embeddings=256, **sizes)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def token_through(model: Any, tokens: int = 1) -> Callable[[], Any]:
    place = torch.zeros(tokens, 1, dtype=torch.long, device=model.device)
    x = model.model.embed_tokens(torch.arange(tokens, device=model.device).unsqueeze(1))
    given = {"position_embeddings": model.model.rotary_emb(x, place), "position_ids": place}
    return lambda: model.model.layers[0](x, **given)


def smollm2(options: argparse.Namespace) -> None:
    """What the pass does to the loss of SmolLM2-135M and to the time of a token."""
    from real_starts import data, loss_of, read_model

    for dtype in (getattr(torch, name) for name in options.dtypes):
        calibration, held_out = data(20_000, 16)
        dense: Any = read_model().to(dtype)
        before = loss_of(dense, held_out)
        for spec in options.specs:
            sparse: Any = retrofit.apply(copy.deepcopy(dense), spec, calibration=calibration, verify=False)
            lost = loss_of(sparse, held_out) - before
            how = f"{str(dtype).removeprefix('torch.')}, {'compiled' if options.compile else 'eager'}"
            print(f"{spec}, {how}: loss {before:.3f} {lost:+.4f}", flush=True)
            decoders = {"dense": Decoder(dense, options.compile), "sparse": Decoder(sparse, options.compile)}
            times = least_times({name: decoder.decode for name, decoder in decoders.items()}, options.rounds)
            ratio = times["dense"] / times["sparse"]
            print(f"  a token in {1e3 * times['dense'] / STEPS:.1f} ms dense, {ratio:.2f} times as fast", flush=True)


class Decoder:
    """Decodes after a prompt with a cache of fixed size, some more tokens in each turn."""

    def __init__(self, model: Any, is_compiled: bool) -> None:
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=LONGEST)
        self.at = PROMPT
        model(torch.arange(100, 100 + PROMPT).unsqueeze(0), past_key_values=self.cache)
        self.step = torch.compile(model, fullgraph=True, dynamic=False) if is_compiled else model

    def decode(self) -> None:
        for _ in range(STEPS):
            given = {"past_key_values": self.cache, "position_ids": torch.tensor([[self.at]])}
            self.step(torch.tensor([[self.at]]), **given)
            self.at += 1


if __name__ == "__main__":
    with torch.no_grad():
        main()
