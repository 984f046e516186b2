"""Fits the output matrix of a sparse feed-forward to the dense outputs: W compensates for the units left out of h.

    Σ_t w_t ‖y_t − a_t W − b‖² + λ g (‖W − W⁰‖² + ‖b − b⁰‖²) = min        a = h ⊙ mask, y = h W⁰ + b⁰, g: the mean of Σ_t w_t a_tu²

The mask is the selection of the sparse feed-forward in evaluation. λ pulls towards the dense matrix W⁰, most for units that are
small or rarely active; λ = ∞ fits nothing. The weights w_t limit the influence of tokens with massive activations
(`token_weights`). Of the solutions for several λ and the dense matrix, the one with the least error on held-out tokens is kept,
provided that it is no worse than the dense matrix for tokens counted equally and for their sum. If the gate selects, the active
units depend on W, so there are two rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.sdk.data import evaluation_mode, evenly_spaced, token_weights

CHUNK = 1024  # tokens computed at a time
SAMPLE = 2048  # tokens of which the median length is computed
STRENGTHS = (0.01, 0.1, 0.3, 1.0, 3.0)  # λ
ROUNDS = 2  # if the mask depends on W
STRIPE = 384  # rows of a symmetric product that are computed together, from the diagonal on


@dataclasses.dataclass(frozen=True)
class Output:
    """W, (d_ff, d), and b, (d) or none, in float32."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(block: SparseFeedForward) -> Output:
        bias = block.down.bias
        return Output(block.down.weight.detach().float().clone(), None if bias is None else bias.detach().float().clone())

    def __call__(self, h: Tensor) -> Tensor:
        y = h @ self.weight
        return y if self.bias is None else y + self.bias

    def put(self, block: SparseFeedForward) -> None:
        block.down.weight.copy_(self.weight)
        if self.bias is not None:
            block.down.bias.copy_(self.bias)
        block.measure_lengths()


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of a sparse feed-forward's outputs relative to the dense outputs."""

    of_tokens: float  # tokens with massive activations count like the others
    of_all: float  # of all tokens together

    def is_no_worse(self, other: Errors) -> bool:
        return self.of_tokens <= other.of_tokens and self.of_all <= other.of_all


@torch.no_grad()
def fit_output(block: SparseFeedForward, x: Tensor, held_out: Tensor) -> tuple[Errors, Errors]:
    """Fit the output matrix and bias of `block`, until then the dense ones. Return the errors before and after.

    `x`, (tokens, d), are the inputs to fit on, `held_out` those on which the errors are measured.
    """
    with evaluation_mode(block):
        dense = Output.of(block)
        pairs = list(values(block, dense, held_out))
        best, before = dense, measure(dense, pairs)
        least = before
        for _ in range(ROUNDS if block.controller == "gate" else 1):
            for candidate in solutions(block, dense, x):
                candidate.put(block)
                if block.controller == "gate":
                    pairs = list(values(block, dense, held_out))
                errors = measure(Output.of(block), pairs)
                if errors.is_no_worse(before) and errors.of_tokens < least.of_tokens:
                    best, least = candidate, errors
            best.put(block)
            if best is dense:
                break
        block.fitted.fill_(best is not dense)
    return before, least


def solutions(block: SparseFeedForward, dense: Output, x: Tensor) -> list[Output]:
    """Return the minimizer of the formula above for each λ, with the units that `block` now selects."""
    sample = torch.cat([y for _, y in values(block, dense, evenly_spaced(x, SAMPLE))])
    median = sample.square().sum(1).median().clamp_min(torch.finfo(torch.float32).tiny)
    units, width = dense.weight.shape
    rows = units if dense.bias is None else units + 1  # the bias is the row of a unit that is always 1
    gram, products = dense.weight.new_zeros(rows, rows), dense.weight.new_zeros(rows, width)
    for a, y in values(block, dense, x):
        weight = (median / y.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)).clamp(max=1.0).unsqueeze(1)
        a = a if dense.bias is None else torch.cat([a, torch.ones_like(a[:, :1])], 1)
        weighted = (weight * a).t()
        add_symmetric_product(gram, weighted, a)
        products.addmm_(weighted, y)
    gram = gram.double().triu_()
    gram += gram.triu(1).t()
    matrix = dense.weight if dense.bias is None else torch.cat([dense.weight, dense.bias.unsqueeze(0)])
    right = products.double() - gram @ matrix.double()  # Σ w a (y − a W⁰ − b⁰)
    size = gram.diagonal()[:units].mean().clamp_min(1e-30)
    found = []
    for strength in STRENGTHS:
        system = gram.clone()
        system.diagonal().add_(strength * size)
        root, failed = torch.linalg.cholesky_ex(system)
        if bool(failed):  # it contains NaN or Inf
            continue
        change = torch.cholesky_solve(right, root).float()
        found.append(Output(dense.weight + change[:units], None if dense.bias is None else dense.bias + change[units]))
    return found


def add_symmetric_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, a symmetric matrix, to the upper triangle of `total`; the lower triangle is undefined afterwards."""
    for first in range(0, len(total), STRIPE):
        rows = slice(first, first + STRIPE)
        total[rows, first:].addmm_(left[rows], right[:, first:])


def values(block: SparseFeedForward, dense: Output, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs of the output matrix in evaluation, and the dense feed-forward's outputs, `CHUNK` tokens at a time."""
    for part in x.split(CHUNK):
        h, a = block.values(part.to(block.down.weight))
        yield a.float(), dense(h.float())


def measure(output: Output, pairs: Sequence[tuple[Tensor, Tensor]]) -> Errors:
    """Return the errors of `output`; `pairs` are its inputs and the dense outputs."""
    missed, y = (torch.cat(parts) for parts in zip(*((output(a) - y, y) for a, y in pairs), strict=True))
    weights = token_weights(y)

    def error(by_token: Tensor) -> float:
        whole = y.square().sum(1) @ by_token
        return float((missed.square().sum(1) @ by_token / whole.clamp_min(torch.finfo(torch.float32).tiny)).sqrt())

    return Errors(error(weights), error(torch.ones_like(weights)))
