"""One token through a linear layer of whose input a share is zero: ways to read the other columns of the weight, and all of them.

y = W x̃ with W stored column by column, (in × out), so that a column is a stretch of memory. The ways:

- `dense`: the product with all columns, W as `nn.Linear` stores it;
- `bag`: the sum of an embedding bag, which reads the columns in place;
- `copy`: the columns are gathered, then multiplied;
- `kernel`: a loop over the entries in C++, whose threads share the rows; built with the compiler that torch.compile uses, left out
  where there is none.

All in one process and in turns; a figure is the median of the ratios to `dense` of the same turn, above 1 where a way is faster.
Each result is compared with the dense one. Matrices are taken in turns too, so that they come from memory and not from a cache.

    python benchmarks/activation_sparsity.py --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SOURCE = """
#include <torch/extension.h>
#include <ATen/Parallel.h>
#include <vector>

template <typename T>
void add_columns(const T* x, const T* columns, T* y, int64_t inputs, int64_t outputs) {
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < inputs; ++i)
    if (static_cast<float>(x[i]) != 0.0f) kept.push_back(i);
  at::parallel_for(0, outputs, 256, [&](int64_t first, int64_t last) {
    std::vector<float> sums(last - first, 0.0f);
    for (int64_t i : kept) {
      const float value = static_cast<float>(x[i]);
      const T* column = columns + i * outputs;
      for (int64_t o = first; o < last; ++o) sums[o - first] += value * static_cast<float>(column[o]);
    }
    for (int64_t o = first; o < last; ++o) y[o] = static_cast<T>(sums[o - first]);
  });
}

torch::Tensor sum_of_columns(torch::Tensor x, torch::Tensor columns) {
  auto y = torch::empty({columns.size(1)}, columns.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, columns.scalar_type(), "sum_of_columns", [&] {
    add_columns<scalar_t>(x.const_data_ptr<scalar_t>(), columns.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(),
                          columns.size(0), columns.size(1));
  });
  return y;
}
"""
APART = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # how far a way may lie from the dense product, of its largest entry
Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, W (out × in) and its columns (in × out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[576, 1024, 2048, 4096])
    parser.add_argument("--levels", type=float, nargs="+", default=[0.25, 0.4, 0.5, 0.7])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=256 << 20, help="of the matrices that are taken in turns")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ways = ways_at_hand()
    print(f"| d, dtype, zeros | {' | '.join(name for name in ways if name != 'dense')} |")
    print("| --- |" + " ---: |" * (len(ways) - 1))
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for width in options.widths:
            matrices = matrices_of(width, dtype, options.bytes)
            for level in options.levels:
                ratios = measure(ways, matrices, level, options.rounds)
                cells = " | ".join(f"{ratio:.2f}" for ratio in ratios.values())
                print(f"| {width}, {str(dtype).removeprefix('torch.')}, {level:.0%} | {cells} |", flush=True)


def ways_at_hand() -> dict[str, Way]:
    """The ways to compute the product, by name; `dense` first."""
    ways: dict[str, Way] = {"dense": lambda x, w, columns: F.linear(x, w), "bag": bag, "copy": copied}
    try:
        kernel = built_kernel()
    except Exception as error:  # whatever is missing: a compiler, ninja, a folder to write to
        print(f"no kernel: {str(error).splitlines()[0]}")
        return ways
    return {**ways, "kernel": lambda x, w, columns: kernel(x, columns)}


def built_kernel() -> Any:
    from torch.utils.cpp_extension import load_inline

    flags = ["-O3", "-march=native", "-fopenmp", "-ffast-math"]
    return load_inline("sum_of_columns", SOURCE, functions=["sum_of_columns"], extra_cflags=flags).sum_of_columns


def bag(x: Tensor, w: Tensor, columns: Tensor) -> Tensor:
    kept = x.nonzero().view(1, -1)
    return F.embedding_bag(kept, columns, mode="sum", per_sample_weights=x[kept[0]].unsqueeze(0))[0]


def copied(x: Tensor, w: Tensor, columns: Tensor) -> Tensor:
    kept = x.nonzero().view(-1)
    return x[kept] @ columns.index_select(0, kept)


def matrices_of(width: int, dtype: torch.dtype, size: int) -> list[tuple[Tensor, Tensor]]:
    """Square matrices that together take so many bytes, each as it is and column by column."""
    count = max(2, size // (2 * width * width * dtype.itemsize))
    weights = [torch.randn(width, width).div(width**0.5).to(dtype) for _ in range(count)]
    return [(weight, weight.t().contiguous()) for weight in weights]


def measure(ways: dict[str, Way], matrices: list[tuple[Tensor, Tensor]], level: float, rounds: int) -> dict[str, float]:
    """How many times as fast as the dense product each way is."""
    width, dtype = matrices[0][0].shape[1], matrices[0][0].dtype
    x = torch.randn(width)
    x = x.masked_fill(x.abs() < x.abs().quantile(level), 0.0).to(dtype)
    for name, way in ways.items():
        found, expected = way(x, *matrices[0]).float(), (matrices[0][0].double() @ x.double()).float()
        apart = float((found - expected).abs().max() / expected.abs().max())
        assert apart < APART[dtype], f"{name} is {apart:.1e} from the dense product"
    ratios: dict[str, list[float]] = {name: [] for name in ways if name != "dense"}
    for _ in range(rounds):
        times = {name: seconds(way, x, matrices) for name, way in ways.items()}
        for name, found in ratios.items():
            found.append(times["dense"] / times[name])
    return {name: statistics.median(found) for name, found in ratios.items()}


def seconds(way: Way, x: Tensor, matrices: list[tuple[Tensor, Tensor]]) -> float:
    """The time of one product with each matrix."""
    began = time.perf_counter()
    for weight, columns in matrices:
        way(x, weight, columns)
    return time.perf_counter() - began


if __name__ == "__main__":
    with torch.inference_mode():
        main()
