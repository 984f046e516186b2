"""Verdicts: rounding passes however large it is, a fault fails however small it is, and near-ties of choices are told apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from retrofit.numerics.agreement import LIMIT, Arithmetic, Choices, OtherChoicesError
from retrofit.numerics.precision import Widened


def summed(terms: Tensor) -> Tensor:
    """The sum over the last dimension, one after the other."""
    total = torch.zeros_like(terms[..., 0])
    for column in terms.unbind(-1):
        total = total + column
    return total


class Sums(nn.Module):
    """Sums of many numbers of both signs, in which float32 loses most of its digits."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(numbers - (1 - 1e-3) * numbers.mean(-1, keepdim=True))

    def forward(self, order: Tensor) -> Tensor:
        return summed(self.weight[:, order])


FORWARD, BACKWARD = torch.arange(128), torch.arange(127, -1, -1)


def sums() -> tuple[Sums, Arithmetic]:
    model = Sums()
    return model, Arithmetic(model, {"order": FORWARD})


def test_rounding_passes_however_large_it_is() -> None:
    model, arithmetic = sums()
    found = arithmetic.compare(lambda: (model(FORWARD), model(BACKWARD)))
    assert found.gap > 3e-5 and found.agrees
    assert found.wide is not None and found.wide < LIMIT
    assert found.measured == f"{found.gap:.1e} in float32, {found.wide:.1e} in float64 (limit 1e-09)"


@pytest.mark.parametrize("leak", [1e-8, 1e-6])
def test_a_fault_fails_however_small_it_is(leak: float) -> None:
    model, arithmetic = sums()
    found = arithmetic.compare(lambda: (model(FORWARD) * (1 + leak), model(BACKWARD)))
    assert not found.agrees and found.in_float64 and found.limit == LIMIT
    assert found.wide == pytest.approx(leak, rel=1e-3)
    assert found.gap > leak  # what float32 sees is rounding


def test_lost_precision_is_no_rounding() -> None:
    model, arithmetic = Scores(), Arithmetic(Scores(), {"x": torch.ones(3, 8)})
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    found = arithmetic.compare(lambda: (model(x), model(x).bfloat16().float()))
    assert found.wide == 0.0 and not found.agrees
    assert "loses precision" in found.measured


class Scores(nn.Module):
    """A product with weights of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 32).view(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Chooses(nn.Module):
    """One of two candidates that are the same sum in another order, with values far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, generator=torch.Generator().manual_seed(0)))
        self.values = nn.Parameter(torch.tensor([[1.0], [-1.0]]))

    def forward(self, x: Tensor, flipped: bool = False) -> Tensor:
        terms = x * self.weight
        first, second = summed(terms.flip(-1) if flipped else terms), summed(terms.roll(64, -1))
        scores = torch.stack([first, second + 1e-9], -1)
        return self.values[scores.argmax(-1)]


def test_near_ties_are_told_by_the_same_choices() -> None:
    model = Chooses()
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    arithmetic = Arithmetic(model, {"x": x})
    found = arithmetic.compare(lambda: (model(x), model(x, flipped=True)))
    assert found.gap == 2.0 and found.agrees
    assert "of a tie fell otherwise, with the same 0.0e+00" in found.measured


def test_a_gap_of_nothing_is_not_asked_twice() -> None:
    model, arithmetic = sums()
    asked = []

    def ways() -> tuple[Tensor, Tensor]:
        asked.append(torch.get_default_dtype())
        return model(FORWARD), model(FORWARD)

    assert arithmetic.compare(ways).agrees and asked == [torch.float32]


def test_half_precision_is_measured_in_float32() -> None:
    model = Sums().to(torch.bfloat16)
    arithmetic = Arithmetic(model, {"order": FORWARD})
    assert arithmetic.note == "computed in float32: its weights are bfloat16"
    assert arithmetic.outputs.dtype == torch.float32
    assert arithmetic.compare(lambda: (model(FORWARD), model(BACKWARD))).agrees
    assert not arithmetic.compare(lambda: (model(FORWARD) * (1 + 1e-6), model(BACKWARD))).agrees
    assert model.weight.dtype == torch.bfloat16


def test_float64_decides_at_once() -> None:
    model = Sums().double()
    arithmetic = Arithmetic(model, {"order": FORWARD})
    assert arithmetic.compare(lambda: (model(FORWARD), model(BACKWARD))).agrees
    found = arithmetic.compare(lambda: (model(FORWARD) * (1 + 1e-8), model(BACKWARD)))
    assert not found.agrees and found.wide is None


# ── Choices ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pick(x: Tensor) -> tuple[Tensor, ...]:
    values, places = x.topk(2, -1)
    largest, where = x.max(-1)
    return values, places, largest, where, x.argmax(-1), x.sort(-1).values, (x > 0.5).long()


def test_recorded_choices_are_made_again() -> None:
    x = torch.tensor([[0.1, 0.7, 0.69999], [0.9, 0.2, 0.3]])
    other = torch.tensor([[0.1, 0.69999, 0.7], [0.9, 0.2, 0.3]])
    with Choices() as recorded:
        pick(x)
    with Choices(recorded.made) as replayed:
        values, places, largest, where, best, ordered, above = pick(other)
    assert torch.equal(places, x.topk(2, -1).indices) and torch.equal(values, other.gather(-1, places))
    assert where.tolist() == [1, 0] and best.tolist() == [1, 0]
    assert torch.equal(largest, torch.tensor([0.69999, 0.9]))
    assert torch.equal(ordered, other.gather(-1, x.argsort(-1)))
    assert torch.equal(above, (x > 0.5).long())
    assert replayed.changed == 6 and replayed.margin == pytest.approx(1e-5 / 0.9, rel=1e-2)


def test_the_same_choices_count_for_nothing() -> None:
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    with Widened(), Choices() as recorded:
        pick(x)
    with Choices(recorded.made) as replayed:
        pick(x)
    assert replayed.changed == 0 and replayed.margin == 0.0


def test_other_operations_do_not_fit_a_record() -> None:
    with Choices() as recorded:
        torch.rand(3, 4).argmax(-1)
    with pytest.raises(OtherChoicesError), Choices(recorded.made):
        torch.rand(2, 4).argmax(-1)


def test_a_large_models_rounding_is_measured_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrofit.numerics.agreement.SETTLED", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).eval()
    x = torch.randn(4, 64)
    known = Arithmetic(model, {"input": x}, lambda: model(x).detach())
    with torch.no_grad():
        assert 0 < Arithmetic(model, {"input": x}).rounding == known.rounding < 1e-5
