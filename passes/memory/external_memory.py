"""External memory: tables whose entries are small experts; each token looks up one.

    w_i(x) f_i(x),   i = lookup(x, id)                            x: (…, d)

    f_i(x) = b_i                          rank 0                  b: [n, d]
    f_i(x) = V_i relu(U_iᵀ x)             rank r                  U, V: [n, d, r]
    f_i(x) = W_up (act(W_gate x) ⊙ p_i)   rank r, gated           p: [n, r], W_gate: [r, d], W_up: [d, r]

    token-id   i = id, w = 1              the table has a row for every token, n = V
    softmax    p = softmax(W x'), i = argmax p, w_i = p_i         W: [n, d], x' = x ⊙ U[1−ε, 1+ε] in training
    lsh        i = Σ_k s^k (⌊a_k·x̂ + o_k⌋ mod s) mod n, w = 1    a: [m, d], o: [m], fixed; x̂ = √d x/|x|

LSH uses m families of parallel, equispaced hyperplanes with random normals a_k and offsets o_k. For tokens scaled to one length
a_k·x̂ has a standard deviation of 1; the spacing is 1 too. With m = ⌈½ log₂ n⌉ there are about as many cells as buckets; s =
⌈n^(1/m)⌉.

The Power of External Memory in Increasing Predictive Model Capacity (2023), §3. Gated entries are the per-layer embeddings of
Gemma 3n and 4.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.sdk import DoesNotFitError
from retrofit.sdk.modules import RowTables, is_exporting

FEW = 64  # up to this many tokens each token's expert is gathered; more are sorted by it (measured: benchmarks/memory_overhead.py)


class ExternalMemory(RowTables):
    """w_i(x) f_i(x), i = lookup(x, id): zero at the start. x: (…, d), ids: (…)."""

    reads_ids: ClassVar[bool] = False  # whether the index depends on token ids

    def __init__(self, buckets: int, width: int, rank: int, like: Tensor, *, sparse: bool = False) -> None:
        super().__init__()
        self.buckets, self.width, self.rank, self.sparse = buckets, width, rank, sparse
        self.create({"device": like.device, "dtype": like.dtype})

    def create(self, kind: dict[str, Any]) -> None:
        """Register the parameters of f_i with the device and dtype in `kind`."""
        buckets, width, rank = self.buckets, self.width, self.rank
        if rank:
            self.u = nn.Parameter(torch.randn(buckets, width, rank, **kind) / math.sqrt(width))  # LeCun normal
            self.v = nn.Parameter(torch.zeros(buckets, width, rank, **kind))
        else:
            self.b = nn.Parameter(torch.zeros(buckets, width, **kind))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        i, weight = self.look_up(x, ids)
        y = self.experts(x.flatten(0, -2), i.flatten()).view(x.shape) if self.rank else self.rows(self.b, i)
        return y if weight is None else y * weight.unsqueeze(-1).to(y.dtype)

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the index of each token's expert, and the weight of the expert's output (None: 1)."""
        raise NotImplementedError

    def experts(self, x: Tensor, i: Tensor) -> Tensor:
        """Return V_i relu(U_iᵀ x) for each token: (tokens, d), (tokens) give (tokens, d)."""
        x = x.to(self.u.dtype)
        return self.by_gathering(x, i) if self.gathers(i.shape[0]) else self.by_grouping(x, i)

    def gathers(self, tokens: int) -> bool:
        """Return whether each token's expert is gathered: cheaper for few tokens, and the only way in exported programs."""
        return is_exporting() or tokens <= max(FEW, self.buckets // 2)

    def by_gathering(self, x: Tensor, i: Tensor) -> Tensor:
        """Return the experts' outputs by a batched product of each token with a copy of its expert's matrices."""
        u, v = (self.rows(table, i) for table in (self.u, self.v))
        return torch.bmm(torch.bmm(x.unsqueeze(1), u).relu(), v.transpose(1, 2)).squeeze(1)

    def by_grouping(self, x: Tensor, i: Tensor) -> Tensor:
        """Return the experts' outputs by a grouped product of the tokens, sorted by expert."""
        i, order = torch.sort(i)
        ends = torch.searchsorted(i, torch.arange(self.buckets, device=i.device), right=True).to(torch.int32)
        padding = -self.rank % (16 // self.u.element_size())  # the kernels need rows of whole 16 bytes
        u, v = (F.pad(table, (0, padding)) if padding else table for table in (self.u, self.v))
        from transformers.integrations.moe import _grouped_mm  # deferred: slow to import

        has_kernel = x.dtype != torch.float64
        product = _grouped_mm if has_kernel else torch.ops.transformers.grouped_mm_fallback
        hidden = product(x.index_select(0, order), u, ends).relu()
        return product(hidden, v.transpose(1, 2), ends).index_select(0, torch.argsort(order))

    def late_parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters whose gradient is zero while all f_i are zero."""
        return ("u",) if self.rank else ()

    @staticmethod
    def count(buckets: int, width: int, rank: int) -> int:
        """Return the number of parameters."""
        return (2 * rank if rank else 1) * buckets * width

    def extra_repr(self) -> str:
        return f"buckets={self.buckets}, width={self.width}, rank={self.rank}"


class TokenIdMemory(ExternalMemory):
    """Looks up by the id of the input token. The output is zero for tokens that were added to the vocabulary later."""

    reads_ids = True

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ids = require_ids(ids, x)
        return ids.clamp(max=self.buckets - 1), ids < self.buckets

    def tables(self) -> tuple[str, ...]:
        return ("u", "v") if self.rank else ("b",)

    def gathers(self, tokens: int) -> bool:
        return True  # few tokens of a batch share an id


def require_ids(ids: Tensor | None, x: Tensor) -> Tensor:
    """Return the ids in the shape of the stream: (…) for (…, d).

    Raises `DoesNotFitError` if there are no ids, or not one for each token.
    """
    if ids is None or ids.numel() != x.numel() // x.shape[-1]:
        raise DoesNotFitError(
            "a memory that is looked up by token ids was called with "
            + ("no ids" if ids is None else f"ids {tuple(ids.shape)} and a stream {tuple(x.shape)}"),
            why="each position of the stream needs the id of its input token",
            remedy="pass input_ids for every position, or use lookup=softmax",
            code="no-ids",
        )
    return ids.reshape(x.shape[:-1])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_name(functions: Iterable[Callable[..., Tensor]]) -> str | None:
    """Return the name of the first activation that equals one of these element-wise functions; None if none does.

    A function of two arguments is a gate: its other argument is 1.
    """
    z = torch.linspace(-4, 4, 33, device="cpu")
    for function in functions:
        for arguments in ((z,), (z, torch.ones_like(z)), (torch.ones_like(z), z)):
            with contextlib.suppress(Exception):  # it takes another number of arguments, or does not run on the CPU
                y = function(*arguments)
                for name, activation in ACTIVATIONS.items():
                    if torch.allclose(y, activation(z), atol=1e-5):
                        return name
    return None


class GatedMemory(TokenIdMemory):
    """W_up (act(W_gate x) ⊙ p_i), i = id. All entries share the matrices; each has a row p_i of r numbers."""

    def __init__(self, buckets: int, width: int, rank: int, like: Tensor, *, activation: str, sparse: bool = False) -> None:
        super().__init__(buckets, width, rank, like, sparse=sparse)
        self.activation = activation

    def create(self, kind: dict[str, Any]) -> None:
        self.p = nn.Parameter(torch.randn(self.buckets, self.rank, **kind))
        self.w_gate = nn.Parameter(torch.randn(self.rank, self.width, **kind) / math.sqrt(self.width))  # LeCun normal
        self.w_up = nn.Parameter(torch.zeros(self.width, self.rank, **kind))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        i, known = self.look_up(x, ids)
        gate = ACTIVATIONS[self.activation](F.linear(x.to(self.w_gate.dtype), self.w_gate))
        y = F.linear(gate * self.rows(self.p, i), self.w_up)
        return y if known is None else y * known.unsqueeze(-1).to(y.dtype)

    def tables(self) -> tuple[str, ...]:
        return ("p",)

    def late_parameters(self) -> tuple[str, ...]:
        return "p", "w_gate"

    @staticmethod
    def count(buckets: int, width: int, rank: int) -> int:
        return buckets * rank + 2 * width * rank

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class SoftmaxMemory(ExternalMemory):
    """Looks up i = argmax softmax(W x); the probability of i is the weight."""

    def __init__(self, buckets: int, width: int, rank: int, like: Tensor, *, jitter: float) -> None:
        super().__init__(buckets, width, rank, like)
        self.jitter = jitter
        self.w = nn.Parameter(0.02 * torch.randn(buckets, width, device=like.device, dtype=like.dtype))

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        weight, i = F.linear(x.to(self.w.dtype), self.w).float().softmax(-1).max(-1)
        return i, weight

    def late_parameters(self) -> tuple[str, ...]:
        return (*super().late_parameters(), "w")

    @staticmethod
    def count(buckets: int, width: int, rank: int) -> int:
        return ExternalMemory.count(buckets, width, rank) + buckets * width


class LshMemory(ExternalMemory):
    """Looks up the cell of x between hyperplanes with normals `planes` [m, d] and offsets `offsets` [m]."""

    planes: Tensor
    offsets: Tensor

    def __init__(self, buckets: int, width: int, rank: int, like: Tensor) -> None:
        super().__init__(buckets, width, rank, like)
        families = max(1, math.ceil(math.log2(buckets) / 2))
        self.slots = round_up(buckets ** (1 / families))
        self.register_buffer("planes", torch.randn(families, width, device=like.device, dtype=like.dtype) / math.sqrt(width))
        self.register_buffer("offsets", torch.rand(families, device=like.device, dtype=like.dtype))

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        unit = F.normalize(x.float(), dim=-1) * math.sqrt(self.width)
        cells = torch.floor(F.linear(unit, self.planes.float()).float() + self.offsets.float()).long()  # (…, m)
        slots = cells.remainder(self.slots)
        return sum(digit * self.slots**k for k, digit in enumerate(slots.unbind(-1))).remainder(self.buckets), None  # type: ignore[union-attr]


def round_up(x: float) -> int:
    """Return ⌈x⌉, where x may be off by a rounding error."""
    return math.ceil(x - 1e-9)
