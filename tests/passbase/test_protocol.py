"""The seam for passes: options and specs, plan and apply, the refusal of a pass that fits nowhere, the account of one that does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused
from torch import nn

from retrofit.anatomy.parts import NearMiss, Site, collect_near_miss
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passbase import protocol
from retrofit.passbase.method_reference import may_be_chance
from retrofit.passbase.options import option, options_of
from retrofit.passbase.protocol import Pass, Plan, load_pass, make_pass, parse_spec
from retrofit.surgery import Edit


@dataclasses.dataclass(frozen=True)
class GatedPlan(Plan):
    width: int = 0


class Gated(nn.Module):
    """out = layer(x)·(1 + scale·gate), with gate zero at the start."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.gate, self.scale = layer, nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 + self.scale * self.gate)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Gate(Pass[GatedPlan]):
    """A toy pass: every square linear layer has a gate."""

    name: ClassVar[str] = "gate"
    summary: ClassVar[str] = "gate square layers"
    paper: ClassVar[str] = "none"
    rewrites: ClassVar[str] = "square layer"
    remedy: ClassVar[str] = "use square layers"
    limit: int = option(8, "widest layer", minimum=1)
    rate: float = option(0.5, "a number")
    kind: str = option("plain", "how", choices=("plain", "fancy"))
    layers: tuple[str, ...] = option(("a", "b"), "names")
    seed: int | None = option(None, "a seed")
    quick: bool = option(False, "a switch")

    @property
    def exact(self) -> bool:
        return self.kind == "plain"

    def plan(self, anatomy: nn.Module) -> GatedPlan:  # type: ignore[override]
        sites: list[Site] = []
        near_misses: list[NearMiss] = []
        for path, module in anatomy.named_modules():
            if isinstance(module, nn.Linear):
                with collect_near_miss(path, near_misses):
                    if module.in_features != module.out_features:
                        raise DoesNotFitError("a layer does not fit", why="it is not square", remedy=f"change {path}")
                    sites.append(Site(path, "plus a gate"))
        return GatedPlan(
            tuple(sites), tuple(near_misses), new_parameters=8 * len(sites), formula="2·d", notes=("planned",), width=4
        )

    def apply(self, plan: GatedPlan, edit: Edit) -> None:
        assert not torch.is_grad_enabled()
        for site in plan.sites:
            gated = Gated(edit.model.get_submodule(site.name), plan.width)
            edit.replace_module(site.name, gated)
            edit.expect_late_gradient(gated.scale)
        edit.note("applied")


def model(*widths: tuple[int, int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*one) for one in widths))


@pytest.fixture
def gate_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "load_pass", {"gate": Gate}.__getitem__)


WORDS = st.text("abcxyz_", min_size=1, max_size=5)
GATES = st.builds(
    Gate,
    limit=st.integers(1, 10**9),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    kind=st.sampled_from(["plain", "fancy"]),
    layers=st.lists(WORDS, min_size=1, max_size=3).map(tuple),
    seed=st.none() | st.integers(-9, 9),
    quick=st.booleans(),
)


@given(GATES)
def test_a_spec_is_read_back_as_the_pass_it_was_written_from(gate: Gate) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "load_pass", {"gate": Gate}.__getitem__)
        assert parse_spec(gate.spec()) == gate


@pytest.mark.usefixtures("gate_is_installed")
def test_a_spec_writes_every_option_out() -> None:
    assert Gate(seed=3).spec() == "gate(limit=8, rate=0.5, kind=plain, layers=a+b, seed=3, quick=false)"
    assert parse_spec(" gate ( quick = yes , layers=c ) ") == Gate(quick=True, layers=("c",))


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("limit", "many", ("limit='many'", "integer")),
        ("limit", 0, ("limit=0", "1")),
        ("kind", "odd", ("kind=odd", "plain, fancy")),
        ("quick", "perhaps", ("quick='perhaps'", "true")),
        ("limit", True, ("limit=True", "integer")),
    ],
)
def test_a_wrong_option_is_refused_by_name(option: str, value: Any, named: tuple[str, ...]) -> None:
    with refused(SpecError, *named, option=option):
        Gate(**{option: value})


@pytest.mark.parametrize(
    ("given", "named", "option", "said"),
    [
        ((), {"Limit": 3}, "Limit", "gate"),
        ((3, 0.5, "plain", ("a",), 1, True, "one more"), {}, "", "'one more'"),
        ((3,), {"limit": 4}, "limit", "twice"),
    ],
)
def test_an_option_that_there_is_not_is_refused_by_name(
    given: tuple[Any, ...], named: dict[str, Any], option: str, said: str
) -> None:
    with refused(SpecError, said, option=option) as error:
        Gate(*given, **named)
    assert "limit, rate, kind, layers, seed, quick" in error.value.remedy or "once" in error.value.remedy


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("memory(buckets=8)", ("buckets=8 has no effect with lookup=token-id",)),
        ("memory(lookup=lsh, jitter=0.5, buckets=8)", ("jitter=0.5 has no effect with lookup=lsh",)),
        ("memory(lookup=softmax, jitter=0.5, buckets=8)", ()),
        ("memory(lookup=softmax, sparse=true)", ("sparse=true has no effect with lookup=softmax",)),
        ("reversible(scheme=terraformer, bits=7)", ("bits=7 has no effect with scheme=terraformer",)),
        ("reversible(bits=7)", ()),
        ("sparse-qkv(variant=mult, kernel=2)", ("kernel=2 has no effect with variant=mult, output=none",)),
        ("sparse-qkv(variant=mult, output=conv, kernel=2)", ()),
        ("sparse-ffn(controller=gate, rank=3)", ("rank=3 has no effect with controller=gate",)),
        ("sparse-ffn(rank=3, hard=0.5)", ()),
        ("sparse-ffn(sparsity=4, active=4, scale=true)", ("scale=true has no effect with active=4, all units of a block",)),
    ],
)
def test_an_option_without_effect_is_named(spec: str, said: tuple[str, ...]) -> None:
    assert parse_spec(spec).idle_notes() == said


@pytest.mark.parametrize(
    ("name", "name_of_option", "range_of_it", "beyond"),
    [
        ("reversible", "bits", "an integer from 1 to 16", "17"),
        ("merge-cross-attention", "weight", "a number from 0 to 1", "1.5"),
        ("merge-cross-attention", "attentions", "an integer from 1 to 2", "3"),
        ("sparse-ffn", "hard", "a number from 0 to 1", "1.5"),
        ("shared-moe", "reinit", "a number from 0 to 1", "1.5"),
    ],
)
def test_a_range_says_what_the_pass_accepts(name: str, name_of_option: str, range_of_it: str, beyond: str) -> None:
    assert {option: values for option, values, _, _ in options_of(load_pass(name))}[name_of_option] == range_of_it
    greatest = range_of_it.rpartition(" ")[2]
    make_pass(name, {name_of_option: greatest})
    with refused(SpecError, f"{name_of_option}={beyond}", greatest, option=name_of_option):
        make_pass(name, {name_of_option: beyond})


def test_a_pass_of_a_running_program_is_found_by_its_name() -> None:
    assert load_pass("gate") is Gate
    with refused(SpecError, "'gates'", code="unknown-pass"):
        load_pass("gates")


def test_a_plan_changes_nothing_and_holds_a_near_miss_for_each_place_left_alone() -> None:
    dense = model((4, 4), (4, 3))
    before = dict(dense.named_modules())
    plan = Gate().plan(dense)
    assert [site.name for site in plan.sites] == ["0"]
    assert plan.near_misses == (NearMiss("1", "it is not square", "change 1"),)
    assert dict(dense.named_modules()) == before


def test_the_account_of_a_rewrite_is_made_of_plan_and_edit() -> None:
    dense = model((4, 4), (4, 3), (4, 4))
    edit = Edit(dense)
    account = Gate().rewrite(dense, edit)  # type: ignore[arg-type]
    assert [site.name for site in account.sites] == ["0", "2"] and [miss.name for miss in account.skipped] == ["1"]
    assert account.new_parameters == 16 and account.formula == "2·d" and account.exact
    assert account.notes == ("planned", "applied") and account.spec == Gate().spec()
    assert account.second_step == ("0.scale", "2.scale"), "their gradient is zero until the gates have moved"
    edit.undo()
    assert [type(layer) for layer in dense] == [nn.Linear] * 3


def test_late_parameters_are_those_without_gradient_at_the_start() -> None:
    dense = model((4, 4))
    account = Gate().rewrite(dense, Edit(dense))  # type: ignore[arg-type]
    dense(torch.randn(5, 4)).square().sum().backward()
    zero = tuple(name for name, one in dense.named_parameters() if not one.grad.count_nonzero())
    assert zero == account.second_step == ("0.scale",)


def test_notes_of_one_pass_are_not_in_the_account_of_the_next() -> None:
    dense = model((4, 4))
    edit = Edit(dense)
    Gate().rewrite(dense, edit)  # type: ignore[arg-type]
    again = Gate().rewrite(dense, edit)  # type: ignore[arg-type]
    assert again.notes == ("planned", "applied") and again.second_step == ("0.layer.scale",)


def test_a_pass_that_fits_nowhere_is_refused_with_its_near_misses_before_any_edit() -> None:
    dense = model((4, 3), (3, 4))
    edit = Edit(dense)
    with pytest.raises(DoesNotFitError) as caught:
        Gate().rewrite(dense, edit)  # type: ignore[arg-type]
    assert "gate" in caught.value.what and "square layer" in caught.value.what
    assert caught.value.why == "0: it is not square; 1: it is not square" and caught.value.remedy == "change 0"
    assert edit.journal == []


def test_a_model_without_any_place_is_refused_with_the_pass_s_own_remedy() -> None:
    dense = nn.ReLU()
    with pytest.raises(DoesNotFitError) as caught:
        Gate().rewrite(dense, Edit(dense))  # type: ignore[arg-type]
    assert caught.value.why and caught.value.remedy == "use square layers"


def test_a_plan_may_say_more_exactly_what_the_options_do_not() -> None:
    @dataclasses.dataclass(frozen=True)
    class Fitted(Gate):
        def plan(self, anatomy: nn.Module) -> GatedPlan:  # type: ignore[override]
            return dataclasses.replace(super().plan(anatomy), exact=False, spec="gate(limit=3)")

    dense = model((4, 4))
    account = Fitted().rewrite(dense, Edit(dense))  # type: ignore[arg-type]
    assert not account.exact and account.spec == "gate(limit=3)"


@pytest.mark.parametrize("count", [24, 48, 1000, 100_000])
def test_the_spread_of_normal_numbers_is_within_what_chance_does(count: int) -> None:
    draws = max(200, min(100_000, 20_000_000 // count))
    spreads = torch.randn(draws, count, generator=torch.Generator().manual_seed(count)).std(1)
    assert all(may_be_chance(one, count) for one in (float(spreads.min()), float(spreads.max())))
    assert not may_be_chance(2.0, count) and not may_be_chance(0.1, count)


def test_many_numbers_show_a_spread_that_is_a_tenth_too_large() -> None:
    assert may_be_chance(1.1, 1000) and not may_be_chance(1.1, 2000) and not may_be_chance(1.06, 10**6)


# What a pass need not say


@dataclasses.dataclass(frozen=True)
class TwoLSHLayers(Pass[Plan]):
    """Do nothing.

    Only what is required is declared.
    """

    def plan(self, anatomy: nn.Module) -> Plan:  # type: ignore[override]
        return Plan(())

    def apply(self, plan: Plan, edit: Edit) -> None: ...


def test_a_pass_is_named_and_summarized_by_its_class() -> None:
    one = TwoLSHLayers()
    assert (one.name, one.summary, one.paper, one.exact) == ("two-lsh-layers", "Do nothing", "none", False)
    assert load_pass("two-lsh-layers") is TwoLSHLayers and one.spec() == "two-lsh-layers()"


def test_plan_and_apply_are_required_and_nothing_else() -> None:
    assert Pass.__abstractmethods__ == {"plan", "apply"}


def test_one_page_describes_all_that_has_a_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "write_a_pass.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `(\w+)` \|", page[page.index("## 2.") : page.index("## 3.")], re.MULTILINE))
    internal = {"idle_notes", "fitting_plan", "require_room", "carry_out", "nothing_fits", "spec", "uses_tokenizer"}
    declared = {name for name in {*vars(Pass), *Pass.__annotations__} if not name.startswith("_")}
    assert declared - Pass.__abstractmethods__ - internal == described
