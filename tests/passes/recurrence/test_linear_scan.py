"""The scan over all tokens at once, in both of its ways, against a loop over them; its gradients, and finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retrofit.passes.recurrence.simple_recurrent_unit import CHUNK, all_states, in_chunks, linear_scan

Scan = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS = {"doubling": all_states, "chunks": in_chunks, "whichever": linear_scan}


def loop(f: Tensor, x: Tensor, before: Tensor) -> Tensor:
    found = []
    for t in range(x.shape[1]):
        before = f[:, t] * before + x[:, t]
        found.append(before)
    return torch.stack(found, 1)


def operands(tokens: int, batch: int = 2, rank: int = 3, seed: int = 0, zeros: float = 0.2) -> list[Tensor]:
    """Factors anywhere in [0, 1], both ends among them."""
    generator = torch.Generator().manual_seed(seed)
    f, x = (torch.rand(batch, tokens, rank, generator=generator, dtype=torch.float64) for _ in range(2))
    f = torch.where(f < zeros, 0.0, torch.where(f > 0.9, 1.0, f))
    before = torch.randn(batch, rank, generator=generator, dtype=torch.float64)
    return [one.requires_grad_() for one in (f, x - 0.5, before)]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 3 * CHUNK + 2), batch=st.integers(1, 3), rank=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_state_and_every_gradient_is_the_loops(way: str, tokens: int, batch: int, rank: int, seed: int) -> None:
    given_ = operands(tokens, batch, rank, seed)
    if way == "chunks":  # a factor of zero has the logarithm of a very small one: its own gradient is not that of the loop
        given_ = operands(tokens, batch, rank, seed, zeros=0.0)
    cotangent = torch.randn(batch, tokens, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found, expected = WAYS[way](*given_), loop(*given_)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(c, given_, cotangent) for c in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_finite_differences(way: str) -> None:
    for tokens in (1, 2, 5):
        f, x, before = operands(tokens, batch=1, rank=2)
        assert torch.autograd.gradcheck(WAYS[way], (f.detach().clamp(0.05, 0.95).requires_grad_(), x, before))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["closed", "nearly closed", "open", "nearly open", "closed now and then"])
def test_nothing_is_lost_in_float32_where_gates_are_nearly_closed_or_open(way: str, kind: str) -> None:
    tokens = 700
    f, x, before = (one.detach() for one in operands(tokens, seed=7))
    if kind == "closed now and then":
        f = torch.where(torch.arange(tokens).view(1, -1, 1) % 97 == 5, 1e-30, 0.999)
        f = f.expand_as(x).to(x.dtype)
    else:
        f = torch.full_like(x, {"closed": 0.0, "nearly closed": 1e-20, "open": 1.0, "nearly open": 1 - 2**-20}[kind])
    f = f.float().double()
    found = WAYS[way](f.float(), x.float(), before.float())
    expected = loop(f, x.float().double(), before.float().double())
    assert float((found - expected).abs().max()) < 2e-5 * max(1.0, float(expected.abs().max()))


class Scanned(nn.Module):
    def forward(self, f: Tensor, x: Tensor, before: Tensor) -> Tensor:
        return linear_scan(f, x, before)


def test_one_exported_program_is_right_for_every_number_of_tokens() -> None:
    with torch.no_grad():
        given_ = tuple(one.detach() for one in operands(5))
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
        sizes = ({0: batch, 1: length}, {0: batch, 1: length}, {0: batch})
        program = torch.export.export(Scanned(), given_, dynamic_shapes=sizes, strict=False)
        run = program.module()
        for tokens, rows in ((1, 1), (2, 3), (CHUNK - 1, 1), (CHUNK, 2), (CHUNK + 1, 2), (1000, 1)):
            others = [one.detach() for one in operands(tokens, rows)]
            torch.testing.assert_close(run(*others), loop(*others), rtol=0, atol=1e-12)


def test_the_memory_kept_for_backward_does_not_grow_with_the_rounds() -> None:
    """It is f, c and what was there before: nothing of the rounds between."""
    kept: list[int] = []
    f, x, before = operands(256, batch=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):  # type: ignore[func-returns-value]
        all_states(f, x, before)
    assert sum(kept) == 2 * x.numel() + before.numel()
