"""What the check `gradients` asks for: that whatever is to learn learns, as soon as it can, and nothing else changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import zoo
from support.own_models import Own
from support.tiny_models import Plain, gpt2, llama
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import retrofit
from retrofit.anatomy.parts import Site
from retrofit.checks import Reference, check_rewrite, gradients
from retrofit.checks.gradients import GradientsMeasurement, SlicedGradients, collect_gradients, new_among_idle, nudge, unfreeze
from retrofit.checks.parameters import match_parameters
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
    report = check_rewrite(model, reference, (rewrite,), match_parameters(reference.parameters.prints, model))
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


@pytest.mark.long
def test_statistics_that_training_moves_are_not_taken_for_another_loss() -> None:
    """The dense LeViT is trained on more batches than the rewritten one, and its batch norms keep statistics."""
    retrofit.apply(zoo.build(zoo.entry("image/levit")), "reversible")


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
        with nudge(model, {"head.weight"}):
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
        with nudge(model, {"scale"}):
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
    with unfreeze(model):
        assert not collect_gradients(model, inputs, torch.Size((1, 6, model.config.vocab_size))).zero
    assert not any(parameter.requires_grad for parameter in frozen)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == len(list(model.parameters())) - len(frozen)


# ── Slices ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Model(nn.Module):
    """A table that is looked up and read as a head, a plain product, and one by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 8, padding_idx=2)
        self.product = nn.Linear(8, 12)
        self.by_rows = Conv1D(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.by_rows(self.product(self.table(ids)).tanh())
        return nn.functional.linear(hidden, self.table.weight)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(gradients, "LARGE", 1)
    monkeypatch.setattr(gradients, "SLICE", 24)
    torch.manual_seed(0)
    return Model()


IDS = torch.tensor([[5, 2, 7, 5], [1, 1, 22, 2]])


class Largest(TorchDispatchMode):
    """The most elements of a matrix that an operation made within this context."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "view" not in function._schema.name and function is not torch.ops.aten.t.default:
            self.elements = max(self.elements, result.numel())
        return result


def test_the_slices_are_the_gradient_that_autograd_gives(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "is_bounded", lambda outs, ins: False)  # so none is left out
    outputs = model(IDS)
    outputs.square().sum().backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    seen: dict[str, list[torch.Tensor]] = {}
    with SlicedGradients(dict(model.named_parameters()), lambda name, part: seen.setdefault(name, []).append(part)):
        same = model(IDS)
        same.square().sum().backward()
    torch.testing.assert_close(same, outputs)
    matrices = {"table.weight", "product.weight", "by_rows.weight"}
    assert seen.keys() == matrices and all(dict(model.named_parameters())[name].grad is None for name in matrices)
    torch.testing.assert_close(torch.cat(seen["product.weight"]), wanted["product.weight"])
    torch.testing.assert_close(torch.cat(seen["by_rows.weight"]).t(), wanted["by_rows.weight"])
    head, (rows,) = torch.cat(seen["table.weight"][:-1]), seen["table.weight"][-1:]
    torch.testing.assert_close(head.index_add(0, torch.tensor([1, 5, 7, 22]), rows), wanted["table.weight"])
    for name in ("product.bias", "by_rows.bias"):
        torch.testing.assert_close(model.get_parameter(name).grad, wanted[name])


@pytest.mark.parametrize(("zeros", "seen"), [(0, 1), (6, 3), (12, 4)])
def test_slices_end_with_the_first_that_is_not_zero(model: Model, zeros: int, seen: int) -> None:
    cotangent = torch.ones(5, 12)
    cotangent[:, :zeros] = 0
    parts: list[torch.Tensor] = []
    x = torch.rand(5, 8) + 1
    with SlicedGradients({"weight": model.product.weight}, lambda name, part: parts.append(part)):
        model.product(x).backward(cotangent)
    assert [bool(part.any()) for part in parts] == [False] * (seen - 1) + [zeros < 12] and all(len(part) <= 3 for part in parts)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_no_slice_is_left_out_where_one_may_be_infinite(model: Model, value: float) -> None:
    cotangent = torch.ones(5, 12)
    cotangent[2, 11] = value  # in the last slice
    parts: list[torch.Tensor] = []
    with SlicedGradients({"weight": model.product.weight}, lambda name, part: parts.append(part)):
        model.product(torch.full((5, 8), 2.0)).backward(cotangent)
    assert len(torch.cat(parts)) == 12 and not bool(torch.cat(parts)[11].isfinite().any())


def test_nothing_as_large_as_a_weight_is_made() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "LARGE", 1 << 16)
        patch.setattr(gradients, "SLICE", 1 << 12)
        model = nn.Linear(512, 512, bias=False)
        x = torch.randn(3, 512)
        with SlicedGradients({"weight": model.weight}, lambda name, part: None), Largest() as largest:
            model(x).square().sum().backward()
        assert largest.elements < model.weight.numel() / 16


def test_a_gradient_that_a_hook_changes_is_looked_at_whole(model: Model) -> None:
    model.product.weight.register_hook(torch.zeros_like)
    model.by_rows.weight.register_hook(lambda gradient: gradient * float("nan"))
    found = collect_gradients(model, {"ids": IDS}, torch.Size((2, 4, 23)))
    assert found.zero == {"product.weight"} and found.broken == {"by_rows.weight"}


def test_infinities_and_zeros_are_found_in_slices(model: Model) -> None:
    with torch.no_grad():
        model.by_rows.weight.zero_()  # so nothing comes back to the product
    assert {"product.weight", "product.bias"} <= collect_gradients(model, {"ids": IDS}, torch.Size((2, 4, 23))).zero
    model.product.register_forward_hook(lambda module, args, output: output * float("inf"))
    assert {"product.weight", "table.weight"} <= collect_gradients(model, {"ids": IDS}, torch.Size((2, 4, 23))).broken
