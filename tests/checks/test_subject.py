"""The forwards that checks share: what they get is what a forward of their own gives, and few are made of a large model."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support.tiny_models import gpt2, llama
from torch import nn

import retrofit
from retrofit.checks import Reference, function, watches
from retrofit.checks.method import watch_method
from retrofit.checks.subject import PADS, Subject, other_shapes, share_padding
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.probes import logits_of, run
from retrofit.numerics import agreement


def subject_of(model: Any, **given: Any) -> Subject:
    inputs = named_inputs(model, given.pop("example_inputs", None))
    return Subject(model, (inputs, *other_shapes(model, inputs)), **given)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_one_batch_has_a_sequence_padded_left_one_padded_right_and_a_whole_one(build: Any) -> None:
    model = build()
    subject = subject_of(model, is_large=True)
    left, right = subject.padded("left"), subject.padded("right")
    assert agreement.identity_of(left.batch) == agreement.identity_of(right.batch)
    ids, mask, short = left.batch["input_ids"], left.batch["attention_mask"], subject.shapes[1]["input_ids"]
    assert torch.equal(ids[0, PADS:], short[0]) and torch.equal(ids[1, :-PADS], short[1])
    assert torch.equal(ids[2], subject.inputs["input_ids"][0])
    assert mask.sum(1).tolist() == [len(short[0]), len(short[0]), len(ids[2])]
    outputs, alone = logits_of(run(model, left.batch)), logits_of(run(model, left.alone))
    for padded in (left, right):
        torch.testing.assert_close(outputs[padded.row, padded.kept], alone[padded.row], atol=1e-5, rtol=1e-4)


def test_inputs_with_padding_of_their_own_are_not_shared() -> None:
    model = llama()
    inputs = named_inputs(model)
    masked = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    masked["attention_mask"][0, 0] = 0
    short = other_shapes(model, masked)[0]
    assert share_padding(model, masked, short, "left") is None
    assert share_padding(model, inputs, other_shapes(model, inputs)[1], "left") is None  # one row, and too long


def test_what_was_watched_is_what_a_forward_of_its_own_shows() -> None:
    model = llama()
    watched, alone = subject_of(model), subject_of(model)
    watched.watches = watches(watched)
    made: list[Any] = []
    model.register_forward_pre_hook(lambda *args: made.append(args))
    watched.run()
    ours = watched.seen("method", lambda: watch_method(watched))
    assert len(made) == 1  # both together
    theirs = alone.seen("method", lambda: watch_method(alone))
    assert ours.keys() == theirs.keys() and ours
    for name, rows in ours.items():
        torch.testing.assert_close(rows, theirs[name], rtol=0, atol=0)


def test_who_watches_does_not_make_a_forward_fail() -> None:
    model = llama()
    subject = subject_of(model)

    def refuse() -> Any:
        raise RuntimeError("no")

    subject.watches = {"method": refuse}
    assert torch.equal(subject.run().logits, logits_of(run(model, subject.inputs))) and not subject.watched


def test_a_large_model_is_run_on_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of it reads all its weights, and from a dozen tokens on each more costs as much again."""
    monkeypatch.setattr(agreement, "SETTLED", 0)  # every model is large
    model = llama()
    tokens: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        tokens.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel())

    model.register_forward_pre_hook(count, with_kwargs=True)
    reference = Reference.of(model)
    dense = list(tokens)
    retrofit.apply(model, "altup(k=2, init=lockstep)", verify=False)
    tokens.clear()
    report = retrofit.verify(model, reference)
    assert report.ok, str(report)
    assert len(dense) <= 15 and sum(dense) <= 230
    assert len(tokens) <= 17 and sum(tokens) <= 230


# A large dense model in float64


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x) * self.factor
        return output


@pytest.fixture
def wide_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs in float64 of models that are all large."""
    monkeypatch.setattr(agreement, "SETTLED", 0)
    made, measure = [], function.measure_wide

    def counted(subject: Subject) -> Any:
        made.append(type(subject.model.get_submodule("model.layers.0.mlp")).__name__)
        return measure(subject)

    monkeypatch.setattr(function, "measure_wide", counted)
    return made


def test_what_was_measured_on_a_small_model_goes_to_another_process() -> None:
    """As mutants are observed."""
    measured = Reference.of(gpt2())
    read = pickle.loads(pickle.dumps(measured))
    assert all(map(torch.equal, read.function.logits, measured.function.logits))
    assert retrofit.verify(gpt2(), read, checks=("function",)).ok


def test_it_is_run_so_only_where_the_rewritten_one_differs(wide_runs: list[str]) -> None:
    retrofit.apply(llama(), "memory", checks=("function",))
    assert wide_runs == []
    retrofit.apply(llama(), "shared-moe(groups=0)", checks=("function",))
    assert wide_runs == ["LlamaMLP", "MoEBlock"]  # the copy that stayed dense first


@pytest.mark.parametrize(("factor", "status"), [(1.0, "passed"), (1 + 1e-6, "failed")])
def test_what_is_measured_later_is_what_was_there_before_the_edit(wide_runs: list[str], factor: float, status: str) -> None:
    model = llama()
    at_once, later = Reference.of(model), Reference.of(model, keep_dense=True)
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp, factor)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    results = [retrofit.verify(model, reference, checks=("function",)).checks[0] for reference in (at_once, later)]
    assert [check.status for check in results] == [status] * 2
    assert results[0].measured == results[1].measured
    for reference in (at_once, later):
        assert reference.function is not None
    ours, theirs = at_once.function.wide, later.function.wide  # type: ignore[union-attr]
    assert ours.rounding == theirs.rounding and ours.activations.keys() == theirs.activations.keys()
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))  # type: ignore[arg-type]


def test_hooks_that_would_act_twice_are_measured_at_once(wide_runs: list[str]) -> None:
    model = llama()
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    Reference.of(model, checks=("function",), keep_dense=True)
    assert wide_runs == ["LlamaMLP"]
