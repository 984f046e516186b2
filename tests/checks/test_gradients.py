"""What the check `gradients` asks for: that whatever is to learn learns, as soon as it can, and nothing else changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.own_models import Own
from support.tiny_models import Plain, gpt2, llama
from torch import nn

import retrofit
from retrofit.anatomy.parts import Site
from retrofit.checks.gradients import GradientsMeasurement, collect_gradients, new_among_idle, nudged, thawed
from retrofit.checks.parameter_matching import match_parameters
from retrofit.checks.reference import Reference
from retrofit.checks.verify import check_rewrite
from retrofit.inputs.example_inputs import named_inputs
from retrofit.passbase.protocol import Rewrite


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class LowRank(nn.Module):
    """A linear layer and a low-rank one beside it, which starts at zero: `u` learns once `v` has moved."""

    def __init__(self, linear: nn.Linear, alive: bool = True) -> None:
        super().__init__()
        self.layer, self.alive = linear, alive
        self.u = nn.Parameter(torch.randn(linear.in_features, 2))
        self.v = nn.Parameter(torch.zeros(2, linear.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ (self.u if self.alive else self.u.detach()) @ self.v


@pytest.mark.parametrize(("second_step", "alive", "ok"), [(("u",), True, True), ((), True, False), (("u",), False, False)])
def test_a_parameter_may_wait_for_others_when_it_says_so_and_then_must_learn(
    second_step: tuple[str, ...], alive: bool, ok: bool
) -> None:
    model = Plain()
    reference = Reference.of(model)
    model.head = LowRank(model.head, alive)
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    rewrite = Rewrite("low-rank()", True, (Site("head", "low rank"),), new_parameters=2 * 8 + 2 * 31, second_step=second_step)
    report = check_rewrite(model, reference, (rewrite,), match_parameters(reference["parameters"].prints, model))
    assert report["gradients"].status == ("passed" if ok else "failed"), str(report)
    assert ok or "head.u (in head: low rank)" in report["gradients"].why
    assert report["parameters"].status == report["function"].status == "passed"
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


class Spelling(nn.Module):
    """A loss over all alignments of the labels with the frames, of which labels that repeat may leave none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.c(self.a(x))
        if labels is None:
            return {"logits": logits}
        counted = labels >= 0
        frames = torch.full((len(x),), x.shape[1])
        scores = logits.log_softmax(-1).transpose(0, 1)
        return {"loss": nn.functional.ctc_loss(scores, labels[counted], frames, counted.sum(-1)), "logits": logits}


def test_a_loss_over_alignments_is_of_labels_that_have_one() -> None:
    x = torch.arange(22).view(2, 11) % 9
    found = collect_gradients(Spelling(), {"x": x}, torch.Size((2, 11, 4)))
    assert found.own_loss and not found.broken and not found.zero


class Narrow(Own):
    """Returns a number for each sequence, or one for all: a loss of its own."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        rows = super().forward(x).mean((1, 2))
        return rows if self.dims else rows.square().mean()


@pytest.mark.parametrize("dims", [0, 1])
def test_a_model_that_returns_a_number_for_each_row_or_its_loss_is_seen_to_learn(dims: int) -> None:
    model = Narrow(dims).eval()
    found = {check.name: check for check in retrofit.verify(model).checks}["gradients"]
    assert found.status == "passed", found.why
    model.unused = nn.Parameter(torch.zeros(3))
    inputs = named_inputs(model)
    assert collect_gradients(model, inputs, model(**inputs).shape).zero == {"unused"}


def test_an_exact_rewrite_has_the_loss_of_the_dense_model() -> None:
    model = gpt2()
    reference = Reference.of(model)
    retrofit.apply(model, "altup(k=2, init=lockstep)", verify=False)
    assert retrofit.verify(model, reference, checks=["gradients"]).ok
    forward = model.forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss / 2
        return output

    model.forward = functools.update_wrapper(halved, forward)
    (found,) = retrofit.verify(model, reference, checks=["gradients"]).failed
    assert "the model's own loss is 2." in found.why and "the dense model's 4." in found.why


def test_what_the_dense_model_did_not_train_is_excused() -> None:
    model: Any = Plain()
    model.unused = nn.Parameter(torch.ones(3))
    report = retrofit.verify(model, Reference.of(model), checks=("gradients",))
    assert report.ok and "unused" in report["gradients"].why
    assert retrofit.verify(model, checks=("gradients",)).ok


def test_gradients_are_seen_and_not_kept() -> None:
    model = Plain()
    model.key.requires_grad_(False)
    model.value.weight.register_hook(lambda gradient: gradient * float("nan"))
    inputs = named_inputs(model)
    found = collect_gradients(model, inputs, model(**inputs).shape)
    assert (found.trainable, found.broken) == (7, {"value.weight"})
    assert found.zero == set()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nudged_parameters_come_back_bit_for_bit_even_after_an_error() -> None:
    model = Plain()
    before = model.head.weight.clone()

    def fail() -> None:
        with nudged(model, {"head.weight"}):
            assert not torch.equal(model.head.weight, before)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(model.head.weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_nudge_is_not_lost_in_rounding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor([0.0, 1e-3, 1.0, -1.0, 7.9, 300.0]).to(dtype))})
    before = model["scale"].clone()
    for noise in (0.01, -0.01, 0.3, -0.3):  # small draws, which are as likely as any

        def drawn(like: torch.Tensor, noise: float = noise) -> torch.Tensor:
            return torch.full_like(like, noise)

        monkeypatch.setattr(torch, "randn_like", drawn)
        with nudged(model, {"scale"}):
            assert bool((model["scale"] != before).all())
    assert torch.equal(model["scale"], before)


def test_new_parameters_where_no_gradient_arrived_before_need_none() -> None:
    zero = frozenset({"guide.first.w", "guide.second.w", "trunk.first.w"})
    before = GradientsMeasurement(4, zero, frozenset(), True, names=frozenset({*zero, "trunk.second.w"}))
    new = ("guide.first.c1", "guide.third.c1", "trunk.first.c1", "trunk.second.c1", "trunk.third.c1", "c1")
    assert new_among_idle(before, new) == {"guide.first.c1", "guide.third.c1", "trunk.first.c1"}


class Caching(Own):
    """Writes what it computes into a buffer, with its graph, in the place of what was there with a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, 1, 24), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = y + self.kept.index_copy_(0, torch.tensor([0]), y.mean((0, 1), keepdim=True))
        for block in self.b:
            y = block(y)
        return self.c(y)


def test_a_graph_that_a_model_leaves_in_its_buffers_is_not_followed() -> None:
    model = Caching().eval()
    model.more = nn.Parameter(torch.ones(1))  # it never gets a gradient, so all batches are tried
    collect_gradients(model, {"x": torch.arange(22).view(2, 11)}, torch.Size((2, 11, 50)))
    assert model.kept.requires_grad
    assert retrofit.verify(Caching().eval()).ok


class PartlyWithoutGradient(Own):
    """Its first layer is run without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.b[0](self.a(x))
        for block in self.b[1:]:
            y = block(y)
        return self.c(y)


def test_new_parameters_where_no_gradient_arrived_before_need_not_wait_for_one() -> None:
    retrofit.apply(PartlyWithoutGradient().eval(), "memory(lookup=softmax, buckets=4, rank=2)")


def test_frozen_parameters_are_known_to_be_reached() -> None:
    model, inputs = llama(), {"input_ids": torch.arange(3, 9)[None]}
    frozen = [parameter.requires_grad_(False) for parameter in model.model.layers[0].parameters()]
    with thawed(model):
        assert not collect_gradients(model, inputs, torch.Size((1, 6, model.config.vocab_size))).zero
    assert not any(parameter.requires_grad for parameter in frozen)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == len(list(model.parameters())) - len(frozen)
