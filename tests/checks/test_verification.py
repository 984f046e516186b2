"""What `verify` reports of models that nothing is wrong with, and of the pieces it is made of."""

from __future__ import annotations

import dataclasses
import json
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.own_models import Own
from support.tiny_models import Plain, bert, gpt2, llama, t5, vit
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import retrofit
from retrofit.anatomy.parts import Site
from retrofit.checks.cache import own_failing
from retrofit.checks.cost import newly_read
from retrofit.checks.divergence import first_divergence
from retrofit.checks.generation import Decoded, difference
from retrofit.checks.reference import Reference
from retrofit.checks.registry import CHECKS
from retrofit.checks.verify import check_rewrite
from retrofit.emitted.graph_module import from_exported, graph_module
from retrofit.errors import RetrofitError
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import without_weights
from retrofit.passbase.protocol import Rewrite
from retrofit.program.capture import capture
from retrofit.program.cost import Cost, cost_of, flops_of_run
from retrofit.rewriting import apply_reported
from retrofit.surgery.edit import Fate


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


def test_a_model_that_ignores_padding_is_held_to_what_it_gave_when_dense() -> None:
    model = Plain(honest=False)
    reference = Reference.of(model)
    report = retrofit.verify(model, reference, checks=("padding",))
    assert report.ok and "does not agree with itself" in report["padding"].why
    model.value.weight.data += 0.1
    assert not retrofit.verify(model, reference, checks=("padding",)).ok


class Positioned(Plain):
    """Learned positions that count from the first column, padding or not."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        positions = self.positions(torch.arange(ids.shape[1]))
        handle = self.embedding.register_forward_hook(lambda module, args, output: output + positions)
        try:
            return super().forward(ids, attention_mask)
        finally:
            handle.remove()


def test_a_model_that_takes_no_positions_is_not_blamed_for_padding_on_the_left() -> None:
    (check,) = retrofit.verify(Positioned(), checks=("padding",)).checks
    assert check.status == "passed" and "left: it takes no positions" in check.why


class WithoutPositions(nn.Module):
    """A Llama that numbers tokens from the first column, padding or not, and may leave its mask unread."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = llama()
        self.reads_mask = True

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = attention_mask if self.reads_mask else None
        return self.decoder(input_ids=input_ids, attention_mask=mask, use_cache=False).logits


class WithoutPositionsOfTwoSides(WithoutPositions):
    """The same over the tokens of an encoder: what they hold on average is added to each of a decoder. It takes positions of which
    side nobody knows."""

    def forward(  # type: ignore[override]
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, decoder_input_ids: Any = None
    ) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        found = super().forward(input_ids, mask)
        mean = (found * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.decoder.lm_head(self.decoder.model.embed_tokens(decoder_input_ids)) + mean  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [WithoutPositions, WithoutPositionsOfTwoSides])
def test_an_approximation_of_shifted_positions_is_held_to_what_padding_may_not_do(kind: type[WithoutPositions]) -> None:
    model, ids = kind(), torch.arange(5, 29).view(2, 12)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :6]} if kind is WithoutPositionsOfTwoSides else {})
    reference = Reference.of(model, inputs)
    retrofit.apply(model, "lsh-attention(rounds=2, buckets=4, chunk=4)", example_inputs=inputs, verify=False)
    (check,) = retrofit.verify(model, reference, inputs, checks=("padding",)).checks
    assert check.status == "passed" and "padding shifts them" in check.why
    model.reads_mask = False
    (check,) = retrofit.verify(model, reference, inputs, checks=("padding",)).checks
    assert check.status == "failed" and "self_attn" in check.why


def test_experts_that_are_chosen_anew_are_no_new_parameters() -> None:
    experts = {f"experts.{one}": torch.zeros(4, 8) for one in range(3)} | {"head": torch.zeros(2, 4), "tail": torch.zeros(3, 4)}
    fates = {name: Fate("kept", name) for name in experts}
    context: Any = SimpleNamespace(subject=SimpleNamespace(parameters=experts), fates=fates)

    def newly(did: set[str], does: set[str]) -> int:
        before, now = (Cost(0, 0, 1, {}, frozenset(one)) for one in (did, does))
        return newly_read(now, before, context)

    rest = {"head", "tail"}
    assert newly({"experts.0"} | rest, {"experts.1", "experts.2"} | rest) == 32
    assert newly({"experts.0", "experts.1"} | rest, {"experts.2"} | rest) == -32
    assert newly({"experts.0"} | rest, {"experts.0", "head"}) == 0  # the tail is not chosen, but lost


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


@pytest.mark.first(1)
@pytest.mark.parametrize(("forgets", "way"), [(False, "reordered steps"), (True, "steps")])
def test_what_a_dense_cache_gets_wrong_is_not_held_against_a_rewrite(forgets: bool, way: str) -> None:
    model: Any = llama()
    model.model.layers[0] = Lagging(model.model.layers[0], forgets)
    reference = Reference.of(model)
    assert reference["cache"].generated["greedy"].logits.agrees != forgets
    assert f"the dense model does not agree with itself: {way}" in own_failing(reference["cache"], "beam", reads_ahead=False)
    assert bool(own_failing(reference["cache"], "greedy", reads_ahead=False)) == forgets
    retrofit.apply(model, "sparse-ffn(sparsity=8)", verify=False)
    report = retrofit.verify(model, reference, checks=("cache",))
    assert report.ok and f"{way}: the dense model does not agree with itself" in report["cache"].why


class Rationed(Own):
    """A causal layer, and one with room for five of those tokens of a batch that want it; `ahead` later ones are heard."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__(depth=1)
        self.ahead, self.wants = ahead, nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, block = self.a(x), self.b[0]
        y = y + block.p(block.m(y).cumsum(1).roll(-self.ahead, 1))
        wants = (self.wants(y) > 0).flatten()
        has_room = (wants & (wants.cumsum(0) <= 5)).view(*x.shape, 1)
        return self.c(y + has_room * block.r(torch.relu(block.q(block.n(y)))))


def test_rows_that_take_room_from_each_other_are_causal_each_by_itself() -> None:
    causality = retrofit.verify(Rationed())["causality"]
    assert causality.status == "passed" and "rows of a batch depend on each other" in str(causality)
    assert retrofit.verify(Rationed(ahead=1))["causality"].status == "failed"
    rewritten = retrofit.apply(Rationed(), "sum")
    assert retrofit.verify(rewritten, reference=Rationed())["causality"].status == "passed"


class OfOneBatch(Own):
    """A model that takes batches of `rows` alone, as programs exported with a static one do; with `ahead` it is not causal."""

    def __init__(self, rows: int, ahead: int = 0) -> None:
        super().__init__(depth=1)
        self.rows, self.ahead = rows, ahead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == self.rows
        y, block = self.a(x), self.b[0]
        return self.c(y + block.p(block.m(y).cumsum(1).roll(-self.ahead, 1)))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_model_of_one_batch_size_is_held_to_causality(rows: int) -> None:
    ids = torch.arange(4, 4 + 11 * rows).remainder(30).view(rows, 11)
    model = OfOneBatch(rows)
    reference = Reference.of(model, ids, checks=["parameters", "causality"])
    causality = retrofit.verify(model, reference, ids, checks=["causality"])["causality"]
    assert causality.status == "passed" and "x: 0%" in causality.measured
    model.ahead = 1
    causality = retrofit.verify(model, reference, ids, checks=["causality"])["causality"]
    assert causality.status == "failed" and "b.0.p is the first module" in causality.why


def test_a_graph_of_one_batch_size_needs_no_dense_model_to_pass() -> None:
    ids = torch.arange(4, 26).view(2, 11)
    exported = torch.export.export(OfOneBatch(2).eval(), (ids,), dynamic_shapes={"x": {1: torch.export.Dim.AUTO}}, strict=False)
    report = retrofit.verify(from_exported(exported), example_inputs={"x": ids}, checks=["graph", "causality"])
    assert [check.status for check in report.checks] == ["passed", "passed"], str(report)


# ── The report ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Pairs(Own):
    """Compares all rows with all, and takes its ids in a dictionary where it is told so."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.nested = nested

    def forward(self, x: Any) -> torch.Tensor:
        rows = super().forward(x["ids"] if self.nested else x).mean(1)
        return rows @ rows.T


@pytest.mark.parametrize("nested", [False, True])
def test_outputs_that_compare_all_rows_with_all_grow_with_the_batch(nested: bool) -> None:
    ids = torch.arange(22).reshape(2, 11)
    report = retrofit.verify(Pairs(nested).eval(), example_inputs={"x": {"ids": ids} if nested else ids})
    found = {check.name: check for check in report.checks}
    assert found["graph"].status == "passed", found["graph"].why
    assert (found["cache"].status, found["cache"].why) == ("skipped", "it keeps no cache and does not generate")


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
    with pytest.raises(RetrofitError, match="Broken does not run on ids 2×11"):
        Reference.of(Broken())


def test_the_report_reads_and_serialises() -> None:
    report = retrofit.verify(bert())
    lines = str(report).splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")][:-1] == list(CHECKS)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_only_the_named_checks_are_made() -> None:
    assert [check.name for check in retrofit.verify(llama(), checks=("cache", "function")).checks] == ["function", "cache"]
    with pytest.raises(RetrofitError, match="no check called 'speed'"):
        retrofit.verify(llama(), checks=("speed",))


def test_quick_checks_see_another_function() -> None:
    dense = llama()
    applied = apply_reported(llama(), "sum", checks="quick")
    assert applied.report is not None and [check.name for check in applied.report.checks] == ["graph", "function", "round trip"]
    assert retrofit.verify(applied.model, dense, checks="quick").ok
    with torch.no_grad():
        applied.model.get_submodule("model.norm").weight.mul_(1.01)
    assert [check.name for check in retrofit.verify(applied.model, dense, checks="quick").failed] == ["function"]


@pytest.mark.parametrize("checks", ["fast", ("graph", "speed")])
def test_a_rewrite_with_checks_that_do_not_exist_is_refused_before_any_work(checks: str | tuple[str, ...]) -> None:
    with pytest.raises(RetrofitError) as refused:
        apply_reported(llama(), "sum", checks=checks, progress=pytest.fail)
    assert "quick" in refused.value.remedy


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(RetrofitError, match="cannot be verified"):
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
        for name in reference["parameters"].prints
    }
    report = check_rewrite(model, reference, (rewrite,), fates, checks=("function",))
    logits = [one.flatten(0, 1).double() for one in reference["function"].logits]
    terms = [(one.softmax(-1) * (one.log_softmax(-1) - (1.5 * one).log_softmax(-1))).sum(-1) for one in logits]  # KL(p ‖ q)
    assert report.ok
    assert report["function"].measured == f"KL {torch.cat(terms).mean():.2e} nats, top-1 agreement 100.0%"
    assert not check_rewrite(model, reference, (dataclasses.replace(rewrite, exact=True),), fates, checks=("function",)).ok


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


# ── Cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("build", [gpt2, llama], ids=lambda build: build.__name__)
def test_flops_are_those_that_torch_counts(build: Callable[..., Any]) -> None:
    model = build(attn_implementation="eager").eval()
    inputs = named_inputs(model)
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    cost = cost_of(capture(model, inputs))
    tokens = inputs["input_ids"].numel()
    scalings = 0 if build is gpt2 else cost.flops - counter.get_total_flops()
    assert cost.tokens == tokens and cost.flops - scalings == counter.get_total_flops()
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(cost.by_module.values()) == cost.flops


class Products(nn.Module):
    """One of every product that is written in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 7))
        self.filter = nn.Conv1d(4, 6, 3, groups=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = torch.einsum("...kp,kpd->...kd", x.unflatten(-1, (3, 5)), self.weight)  # (2, 4, 3, 7)
        heads = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])  # (2, 1, 4, 15)
        return parts, heads, self.filter(x), torch.addcmul(x, x, x)


def test_flops_of_each_kind_of_product() -> None:
    model = Products()
    cost = cost_of(capture(model, {"x": torch.randn(2, 4, 15)}))
    einsum, attention = 2 * (2 * 4) * 3 * 5 * 7, 2 * 2 * 4 * 4 * (15 + 15)
    convolution, multiply_add = 2 * (2 * 6 * 13) * (2 * 3), 2 * (2 * 4 * 15)
    assert cost.flops == einsum + attention + convolution + multiply_add
    assert cost.by_module == {"": einsum + attention + multiply_add, "filter": convolution}
    assert flops_of_run(without_weights(model), {"x": torch.randn(2, 4, 15, device="meta")}) == cost.flops


def test_a_model_with_another_attention_kernel_than_the_usual_one_comes_back_from_its_directory() -> None:
    retrofit.apply(gpt2(attn_implementation="eager"), "sum")  # raises where a check fails


def test_a_difference_between_models_without_common_modules_is_put_in_words() -> None:
    found = first_divergence({}, {"a.b": [torch.ones(2)]}, 1e-6, {})
    assert found.describe(str) == "no module of the dense model is found again, so none says where the difference arises"
