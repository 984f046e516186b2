"""What `verify` reports of models that nothing is wrong with, and of the pieces it is made of."""

from __future__ import annotations

import dataclasses
import json
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.refusals import refused
from support.tiny_models import Plain, bert, gpt2, llama, t5, vit
from torch import nn

import retrofit
from retrofit.anatomy import inspection
from retrofit.anatomy.parts import Site
from retrofit.checks import CHECKS, Reference, check_rewrite
from retrofit.checks.cache import Decoded, difference, own_failing
from retrofit.checks.divergence import first_divergence
from retrofit.emitted import graph_module
from retrofit.errors import RetrofitError
from retrofit.passbase.protocol import Rewrite
from retrofit.program.capture import capture
from retrofit.rewriting import apply_reported
from retrofit.surgery import Fate


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# ── Models that nothing is wrong with ────────────────────────────────────────────────────────────────────────────────────────────


SKIPPED: dict[Callable[[], nn.Module], set[str]] = {
    gpt2: set(),
    llama: set(),
    bert: {"causality", "cache"},
    t5: set(),
    vit: {"causality", "padding", "cache"},
    Plain: {"cache"},
}


@pytest.mark.first(1)
@pytest.mark.parametrize("build", SKIPPED, ids=lambda build: build.__name__)
def test_dense_models_pass(build: Callable[[], nn.Module]) -> None:
    model = build()
    report = retrofit.verify(model, Reference.of(model))
    assert {check.name for check in report.checks if check.status == "skipped"} == SKIPPED[build] | {"method"}, str(report)
    assert report.ok, str(report)


def test_without_a_reference_or_a_pass_only_parameters_and_method_go_unchecked() -> None:
    report = retrofit.verify(llama())
    assert report.ok, str(report)
    assert [check.name for check in report.checks if check.status == "skipped"] == ["parameters", "method"]


@pytest.mark.long
def test_a_graph_alone_is_not_asked_for_a_cache() -> None:
    report = retrofit.verify(graph_module(llama()), checks=("cache",))
    assert [check.status for check in report.checks] == ["skipped"], str(report)


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dense_models_pass_in_other_dtypes(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    report = retrofit.verify(model, Reference.of(model))
    assert report.ok, str(report)


def test_a_frozen_model_has_no_gradients_to_check() -> None:
    report = retrofit.verify(llama().requires_grad_(False), checks=("gradients",))
    assert report["gradients"].status == "skipped"


class Lagging(nn.Module):
    """A layer that adds the token before, which it keeps beside the cache: beams do not move it, or (`forgets`) it is not kept."""

    def __init__(self, layer: nn.Module, forgets: bool) -> None:
        super().__init__()
        self.layer, self.forgets = layer, forgets
        self.kept: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()

    def forward(self, hidden: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        before = None if past_key_values is None or self.forgets else self.kept.get(past_key_values)
        shifted = torch.cat([torch.zeros_like(hidden[:, :1]) if before is None else before, hidden[:, :-1]], 1)
        if past_key_values is not None:
            self.kept[past_key_values] = hidden[:, -1:]
        return self.layer(hidden + shifted, *args, past_key_values=past_key_values, **kwargs)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(("forgets", "way"), [(False, "reordered steps"), (True, "steps")])
def test_what_a_dense_cache_gets_wrong_is_not_held_against_a_rewrite(forgets: bool, way: str) -> None:
    model: Any = llama()
    model.model.layers[0] = Lagging(model.model.layers[0], forgets)
    reference = Reference.of(model)
    assert reference.cache.generated["greedy"].logits.agrees != forgets
    assert f"the dense model does not agree with itself: {way}" in own_failing(reference.cache, "beam", reads_ahead=False)
    assert bool(own_failing(reference.cache, "greedy", reads_ahead=False)) == forgets
    retrofit.apply(model, "sparse-ffn(sparsity=8)", verify=False)
    report = retrofit.verify(model, reference, checks=("cache",))
    assert report.ok and f"{way}: the dense model does not agree with itself" in report["cache"].why


# ── The report ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Broken(nn.Module):
    """Runs on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the forward pass is broken")


def test_a_check_that_raises_has_failed_and_says_what_was_raised() -> None:
    report = retrofit.verify(Broken())
    failed = {check.name: check.why for check in report.failed}
    assert {"graph", "function", "causality", "gradients", "cost"} <= failed.keys()
    assert "the forward pass is broken" in failed["function"]


def test_a_dense_model_that_does_not_run_cannot_be_a_reference() -> None:
    with refused(RetrofitError, "Broken", "ids 2×11", code="does-not-run"):
        Reference.of(Broken())


def test_the_report_reads_and_serialises() -> None:
    report = retrofit.verify(bert())
    lines = str(report).splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")][:-1] == list(CHECKS)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_only_the_named_checks_are_made() -> None:
    assert [check.name for check in retrofit.verify(llama(), checks=("cache", "function")).checks] == ["function", "cache"]
    with refused(RetrofitError, "'speed'", option="checks"):
        retrofit.verify(llama(), checks=("speed",))


def test_quick_checks_see_another_function() -> None:
    dense = llama()
    applied = apply_reported(llama(), "sum", checks="quick")
    assert applied.report is not None and [check.name for check in applied.report.checks] == ["graph", "function", "round trip"]
    assert retrofit.verify(applied.model, dense, checks="quick").ok
    with torch.no_grad():
        applied.model.get_submodule("model.norm").weight.mul_(1.01)
    assert [check.name for check in retrofit.verify(applied.model, dense, checks="quick").failed] == ["function"]


def test_the_round_trip_of_a_rewrite_captures_the_dense_model_no_second_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only there: a model that is loaded by itself is captured."""
    captured: list[nn.Module] = []
    monkeypatch.setattr(inspection, "capture", lambda model, *given: captured.append(model) or capture(model, *given))
    model = retrofit.apply(llama(), "altup(k=2)", checks="quick")
    assert not captured
    retrofit.save(model, tmp_path / "model")
    loaded = retrofit.load(tmp_path / "model")
    assert len(captured) == 1
    ids = torch.arange(8).view(1, -1)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("checks", ["fast", ("graph", "speed")])
def test_a_rewrite_with_checks_that_do_not_exist_is_refused_before_any_work(checks: str | tuple[str, ...]) -> None:
    with pytest.raises(RetrofitError) as refused:
        apply_reported(llama(), "sum", checks=checks, progress=pytest.fail)
    assert "quick" in refused.value.remedy


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = llama()
    with refused(RetrofitError, code="no-values", site="model.embed_tokens.weight"):
        retrofit.verify(model)


def test_the_model_is_left_as_it_was() -> None:
    model = llama(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    model.register_buffer("count", torch.zeros(3))
    model.register_forward_pre_hook(lambda module, args: setattr(module, "calls", int(module.count.add_(1).sum())))
    model(torch.arange(3, 8)[None]).logits.sum().backward()
    model.count.zero_()
    model.calls = 0
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    config, modes = model.config.to_dict(), [module.training for module in model.modules()]
    states = (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
    assert retrofit.verify(model).checks
    assert model.calls == 0
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert str(numpy.random.get_state()) == states[2]


# ── The reference ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors held anywhere in a structure of dataclasses and containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [tensor for field in dataclasses.fields(value) for tensor in tensors_in(getattr(value, field.name))]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def test_the_reference_does_not_hold_the_model() -> None:
    model = gpt2()
    reference = Reference.of(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in tensors_in(reference)}
    before = [tensor.clone() for tensor in tensors_in(reference)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(map(torch.equal, before, tensors_in(reference)))
    assert not retrofit.verify(model, reference, checks=("function",)).ok


def test_an_approximate_rewrite_is_measured_and_not_failed() -> None:
    model = llama()
    reference = Reference.of(model)
    model.lm_head.weight.data.mul_(1.5)
    rewrite = Rewrite("scaled()", exact=False, sites=(Site("lm_head", "scaled"),))
    fates = {
        name: Fate("dropped", "", "scaled") if name == "lm_head.weight" else Fate("kept", name)
        for name in reference.parameters.prints
    }
    report = check_rewrite(model, reference, (rewrite,), fates, checks=("function",))
    logits = [one.flatten(0, 1).double() for one in reference.function.logits]
    terms = [(one.softmax(-1) * (one.log_softmax(-1) - (1.5 * one).log_softmax(-1))).sum(-1) for one in logits]  # KL(p ‖ q)
    assert report.ok
    assert report["function"].measured == f"KL {torch.cat(terms).mean():.2e} nats, top-1 agreement 100.0%"
    assert not check_rewrite(model, reference, (dataclasses.replace(rewrite, exact=True),), fates, checks=("function",)).ok


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("passes", [("sparse-ffn(sparsity=8)", "altup(k=2)"), ("altup(k=2)", "sparse-ffn(sparsity=8)")], ids=str)
def test_a_model_rewritten_again_is_held_against_what_it_was_between(passes: tuple[str, str], tmp_path: Path) -> None:
    """Neither is a pass that the reference has already claimed again, nor is the reference's own approximation excused."""
    checks = ("parameters", "function", "cost")
    model = retrofit.apply(llama(), passes[0], verify=False)
    between = Reference.of(model, checks=checks)
    assert retrofit.verify(model, between, checks=checks).ok
    retrofit.apply(model, passes[1], verify=False)
    report = retrofit.verify(model, between, checks=checks)
    assert report.ok, str(report)
    retrofit.save(model, tmp_path / "model.pt")  # loaded, it says where the first dense model's parameters are
    report = retrofit.verify(retrofit.load(tmp_path / "model.pt"), between, checks=checks)
    assert report.ok, str(report)
    exact = passes[1] == "altup(k=2)"
    assert report["function"].measured.startswith("max |Δ|" if exact else "KL")


# ── Decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("margin", "differs"), [(0.0, False), (1e-7, False), (0.3, True)])
def test_a_tie_may_be_broken_either_way(margin: float, differs: bool) -> None:
    logits = torch.tensor([[1.0, 1.0 - margin, -3.0]])
    plain = Decoded(torch.tensor([[5, 0, 2]]), (logits, torch.tensor([[0.0, 0.0, 1.0]])), None)
    cached = Decoded(torch.tensor([[5, 1, 0]]), plain.logits, None)
    assert bool(difference(cached, plain)) is differs


def test_a_model_with_another_attention_kernel_than_the_usual_one_comes_back_from_its_directory() -> None:
    retrofit.apply(gpt2(attn_implementation="eager"), "sum")  # raises where a check fails


def test_a_difference_between_models_without_common_modules_is_put_in_words() -> None:
    found = first_divergence({}, {"a.b": [torch.ones(2)]}, 1e-6, {})
    assert found.describe(str) == "no module of the dense model can be matched, so the difference cannot be located"


# ── Arithmetic ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


SETTLED = "in float64 (limit 1e-09)"


EQUAL = "left 0.0e+00 in float32, right 0.0e+00 in float32"


def loud_t5(seed: int) -> Any:
    """A T5 whose matrices are three times their usual size: it rounds as trained ones with massive activations do."""
    model = t5(num_layers=3, num_decoder_layers=3, d_model=48, d_kv=12, d_ff=64, num_heads=4, feed_forward_proj="gated-gelu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_rounds_much_is_not_blamed(seed: int) -> None:
    model = loud_t5(seed)
    reference = Reference.of(model)
    retrofit.apply(model, "sparse-ffn(sparsity=8)", verify=False)
    report = retrofit.verify(model, reference, checks=["causality", "padding", "cache"])
    assert report.ok, str(report)
    assert SETTLED in report["cache"].measured
    # Products of some processors are the same bits whatever stands beside a row.
    assert SETTLED in report["padding"].measured or report["padding"].measured == EQUAL


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_is_measured_in_float32(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    reference = Reference.of(model)
    retrofit.apply(model, "altup(k=2, init=lockstep)", verify=False)
    checks = ["graph", "function", "causality", "padding", "cache"]
    report = retrofit.verify(model, reference, checks=checks)
    assert report.ok, str(report)
    assert f"computed in float32: its weights are {str(dtype).removeprefix('torch.')}" in report["function"].why
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    model.model.layers[1].layer.mlp.register_forward_hook(lambda module, args, output: output * (1 + 1e-4))
    assert [check.name for check in retrofit.verify(model, reference, checks=checks).failed] == ["graph", "function"]
