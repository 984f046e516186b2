"""Products of few tokens on a CPU, in C++ that torch compiles if there is a compiler: they copy no weight.

    y[t] = Σ_i x̃[t, i] W[i]                          over the rows i of W for which some x̃[t, i] ≠ 0      `sums_of_columns`
    y[t, k] = W[e] x[t] + b[e]                       e = e[t, k] among stacked matrices                  `products_of_matrices`
    y[t] = Σ_k g[t, k] (W[e] x[t, k] + b[e])         with weights                                        `products_of_matrices`

x̃ is x without the entries below a threshold. The sums add eight rows at a time, which are read faster than one after the other (0.7
of the speed). The products read one row of a matrix after the other, twice as fast as several at a time, and use it for up to four
rows of x. `omp` splits the outputs.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
from collections.abc import Callable

import torch
from torch import Tensor

FIRST = torch.zeros(1, dtype=torch.long, device="cpu")  # start of the only bag
# A bag is summed some columns at a time. Where its rows are so long, this is faster for a few of them: their next numbers are
# fetched before they are needed.
LONG, BAG = 2048, 128

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

typedef float Numbers __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));
typedef uint32_t Bits __attribute__((vector_size(64)));

static inline float number(const float* p) { return *p; }
static inline float number(const uint16_t* p) {
  uint32_t bits = uint32_t(*p) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
static inline Numbers numbers(const float* p) { return *(const Numbers*)p; }
static inline Numbers numbers(const uint16_t* p) {
  Bits bits = __builtin_convertvector(*(const Halves*)p, Bits) << 16;
  Numbers found;
  std::memcpy(&found, &bits, 64);
  return found;
}
static inline void write(float* p, float value) { *p = value; }
static inline void write(uint16_t* p, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  *p = value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

template <int TOKENS, int COUNT, typename T>
void add(float* sums, int64_t size, const float* x, int64_t inputs, const int64_t* kept, const T* columns, int64_t outputs) {
  const T* column[COUNT];
  float factor[COUNT][TOKENS];
  for (int j = 0; j < COUNT; ++j) {
    column[j] = columns + kept[j] * outputs;
    for (int t = 0; t < TOKENS; ++t) factor[j][t] = x[t * inputs + kept[j]];
  }
  int64_t o = 0;
  for (; o + 16 <= size; o += 16) {
    for (int j = 0; j < COUNT; ++j) __builtin_prefetch(columns + kept[COUNT + j] * outputs + o);
    Numbers sum[TOKENS];
    for (int t = 0; t < TOKENS; ++t) sum[t] = numbers(sums + t * size + o);
    for (int j = 0; j < COUNT; ++j) {
      Numbers read = numbers(column[j] + o);
      for (int t = 0; t < TOKENS; ++t) sum[t] += factor[j][t] * read;
    }
    for (int t = 0; t < TOKENS; ++t) *(Numbers*)(sums + t * size + o) = sum[t];
  }
  for (; o < size; ++o)
    for (int j = 0; j < COUNT; ++j)
      for (int t = 0; t < TOKENS; ++t) sums[t * size + o] += factor[j][t] * number(column[j] + o);
}

template <int TOKENS, typename T>
void sums_of_columns(const T* x, const T* least, const T* columns, T* y, int64_t inputs, int64_t outputs, int threads) {
  constexpr int MANY = 8;
  const float threshold = number(least);
  std::vector<float> masked(TOKENS * inputs);
  std::vector<int64_t> kept(inputs + MANY);  // and columns that are fetched after the last ones
  int64_t count = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    bool is_needed = false;
    for (int t = 0; t < TOKENS; ++t) {
      const float value = number(x + t * inputs + i);
      masked[t * inputs + i] = std::fabs(value) < threshold ? 0 : value;
      is_needed |= masked[t * inputs + i] != 0;
    }
    kept[count] = i;
    count += is_needed;
  }
  #pragma omp parallel for num_threads(threads)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t first = outputs * thread / threads, size = outputs * (thread + 1) / threads - first;
    std::vector<float> sums(TOKENS * size, 0.0f);
    int64_t k = 0;
    for (; k + MANY <= count; k += MANY) add<TOKENS, MANY>(&sums[0], size, &masked[0], inputs, &kept[k], columns + first, outputs);
    for (; k < count; ++k) add<TOKENS, 1>(&sums[0], size, &masked[0], inputs, &kept[k], columns + first, outputs);
    for (int t = 0; t < TOKENS; ++t)
      for (int64_t o = 0; o < size; ++o) write(y + t * outputs + first + o, sums[t * size + o]);
  }
}

static inline float sum_of(Numbers found) {
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += found[i];
  return sum;
}

template <int ROWS, typename T>
void add_products(float* const* sums, int64_t size, const T* matrix, const T* bias, const T* const* x, int64_t inputs,
                  const float* gates) {
  for (int64_t o = 0; o < size; ++o) {
    const T* weight = matrix + o * inputs;
    Numbers found[ROWS] = {};
    int64_t i = 0;
    for (; i + 16 <= inputs; i += 16) {
      const Numbers read = numbers(weight + i);
      for (int r = 0; r < ROWS; ++r) found[r] += read * numbers(x[r] + i);
    }
    for (int r = 0; r < ROWS; ++r) {
      float product = sum_of(found[r]) + (bias ? number(bias + o) : 0);
      for (int64_t rest = i; rest < inputs; ++rest) product += number(weight + rest) * number(x[r] + rest);
      sums[r][o] += gates[r] * product;
    }
  }
}

template <typename T>
void products(const T* x, const T* weight, const T* bias, const int64_t* chosen, const float* gates, T* y, int64_t tokens,
              int64_t each, int64_t matrices, int64_t outputs, int64_t inputs, int threads) {
  const int64_t results = gates ? tokens : tokens * each;
  auto add = {add_products<1, T>, add_products<2, T>, add_products<3, T>, add_products<4, T>};
  #pragma omp parallel for num_threads(threads)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t first = outputs * thread / threads, size = outputs * (thread + 1) / threads - first;
    std::vector<float> sums(results * size, 0.0f);
    for (int64_t matrix = 0; matrix < matrices; ++matrix) {
      const int64_t start = matrix * outputs + first;
      const T* rows[4];
      float *targets[4], factors[4];
      int count = 0;
      for (int64_t k = 0; k <= tokens * each; ++k) {
        if (k < tokens * each && chosen[k] == matrix) {
          rows[count] = x + (gates ? k : k / each) * inputs;
          targets[count] = &sums[(gates ? k / each : k) * size];
          factors[count++] = gates ? gates[k] : 1;
        }
        if (count == 4 || (count && k == tokens * each)) {
          add.begin()[count - 1](targets, size, weight + start * inputs, bias ? bias + start : nullptr, rows, inputs, factors);
          count = 0;
        }
      }
    }
    for (int64_t t = 0; t < results; ++t)
      for (int64_t o = 0; o < size; ++o) write(y + t * outputs + first + o, sums[t * size + o]);
  }
}

#define FOR(TYPE, T) \
  extern "C" void sums_in_##TYPE(int tokens, const T* x, const T* least, const T* columns, T* y, int64_t inputs, \
                                 int64_t outputs, int threads) { \
    auto sums = {sums_of_columns<1, T>, sums_of_columns<2, T>, sums_of_columns<3, T>, sums_of_columns<4, T>}; \
    sums.begin()[tokens - 1](x, least, columns, y, inputs, outputs, threads); \
  } \
  extern "C" void products_in_##TYPE(const T* x, const T* weight, const T* bias, const int64_t* chosen, const float* gates, \
                                     T* y, int64_t tokens, int64_t each, int64_t matrices, int64_t outputs, int64_t inputs, \
                                     int threads) { \
    products(x, weight, bias, chosen, gates, y, tokens, each, matrices, outputs, inputs, threads); \
  }
FOR(float32, float)
FOR(bfloat16, uint16_t)
"""


@functools.cache
def compiled_functions() -> dict[tuple[str, torch.dtype], Callable[..., None]]:
    """Return the compiled functions of SOURCE, of which torch keeps the file; none if there is no C++ compiler."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "sums": [ctypes.c_int, *[pointer] * 4, *[number] * 2, ctypes.c_int],
        "products": [*[pointer] * 6, *[number] * 5, ctypes.c_int],
    }
    found: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
    try:
        from torch._inductor.codecache import CppCodeCache

        library = CppCodeCache.load(SOURCE)
        for (name, types), dtype in itertools.product(arguments.items(), (torch.float32, torch.bfloat16)):
            function = getattr(library, f"{name}_in_{str(dtype).removeprefix('torch.')}")
            function.argtypes, function.restype = types, None
            found[name, dtype] = function
    except (ImportError, AttributeError, OSError, RuntimeError, subprocess.SubprocessError):
        return {}
    return found


def sums_of_columns(x: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
    """Return x̃ W from the rows of `columns` for which x̃ is nonzero: (tokens, inputs) by (inputs, outputs)."""
    compiled = compiled_functions().get(("sums", x.dtype))
    if compiled is not None:
        x, y, count = x.contiguous(), columns.new_empty(len(x), columns.shape[1]), len(x)
        pointers = x.data_ptr(), threshold.data_ptr(), columns.data_ptr(), y.data_ptr()
        compiled(count, *pointers, *columns.shape, torch.get_num_threads())
        return y
    x = x.masked_fill(x.abs() < threshold, 0.0)
    if len(x) == 1:
        return sum_of_columns(x.view(-1), columns)
    return torch.cat([sum_of_columns(token, columns) for token in x])


def sum_of_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return the same for one token without compiled code, (inputs) to (1, outputs): a sum of bags, one for each thread or more."""
    kept = x.nonzero().view(-1)
    if not len(kept):
        return columns.new_zeros(1, columns.shape[1])
    bags = max(torch.get_num_threads(), -(-len(kept) // BAG) if columns.shape[1] >= LONG else 1)
    bags = min(bags, len(kept))
    starts = FIRST if bags == 1 else torch.tensor([bag * len(kept) // bags for bag in range(bags)], device="cpu")
    sums = torch.embedding_bag(columns, kept, starts, False, 0, False, x.index_select(0, kept))[0]
    return sums if bags == 1 else sums.sum(0, keepdim=True)


def products_of_matrices(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, gates: Tensor | None = None
) -> Tensor | None:
    """Return the products of each token with its K matrices, (tokens, K) of them: (tokens, in) to (tokens·K, out).

    With `gates`, (tokens, K), return the sums of those of a row for each token and matrix: (tokens·K, in) to (tokens, out). None if
    there is no compiled code. `weight` (matrices, out, in), `bias` (matrices, out). Each matrix is read once for four tokens.
    """
    compiled = compiled_functions().get(("products", x.dtype))
    if compiled is None or not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        return None
    x, chosen = x.contiguous(), chosen.contiguous()
    (tokens, each), (matrices, outputs, inputs) = chosen.shape, weight.shape
    gates = None if gates is None else gates.float().contiguous()
    y = weight.new_empty(tokens * each if gates is None else tokens, outputs)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (x, weight, bias, chosen, gates, y)]
    compiled(*pointers, tokens, each, matrices, outputs, inputs, torch.get_num_threads())
    return y
