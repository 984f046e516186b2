"""The option `layers`: what it names, and texts that name no layer of the stack."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from support.tiny_models import t5

import retrofit
from retrofit.errors import SpecError
from retrofit.passbase.options import selected_depths


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)).map(sorted), min_size=1, max_size=4))
def test_ranges_name_their_depths(ranges: list[list[int]]) -> None:
    text = "+".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    expected = {depth for depth in range(12) if any(first <= depth <= last for first, last in ranges)}
    assert selected_depths(text, 12, "altup") == expected


def test_all_names_all() -> None:
    assert selected_depths("all", 3, "altup") == {0, 1, 2}


def test_a_depth_that_only_a_deeper_stack_has_names_nothing_in_this_one() -> None:
    assert selected_depths("0+2-3", 2, "altup", deepest=4) == {0}
    assert selected_depths("2", 2, "altup", deepest=4) == set()
    with refused(SpecError, "4", "3", option="layers"):
        selected_depths("0-4", 2, "altup", deepest=4)


NAMES = ("sparse-qkv(", "sparse-ffn(sparsity=8, ", "altup(", "memory(lookup=token-id, ", "shared-moe(", "recurrence(")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_depth_of_one_stack_is_rewritten_there_and_nowhere_else(name: str) -> None:
    model = t5(num_layers=3, num_decoder_layers=1)
    planned = retrofit.plan_of(model, f"{name}layers=2)")
    assert planned.fits
    if name != "altup(":  # which widens the stream of all layers
        assert all(site.name.startswith("encoder.block.2") for site in planned.passes[0].plan.sites)
    with refused(SpecError, "3", "0 to 2", option="layers"):
        retrofit.plan_of(model, f"{name}layers=3)")


@pytest.mark.parametrize("text", ["0-30000000", "1+30000000", "30000000-0"])
def test_a_range_is_checked_before_it_is_listed(text: str) -> None:
    tracemalloc.start()
    try:
        with refused(SpecError, "30000000", "0 to 11", option="layers"):
            selected_depths(text, 12, "altup")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize("text", ["", "-", "1-", "-1", "a", "1,2", "²", "1--2", "1-2-3", "0-" + "9" * 5000])
def test_what_names_no_depths_is_refused(text: str) -> None:
    with refused(SpecError, f"layers={text}", option="layers"):
        selected_depths(text, 12, "altup")


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    with refused(SpecError, "5-3", "3-5", option="layers"):
        selected_depths("0+5-3", 12, "altup")
