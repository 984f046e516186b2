"""Regions: a tree of stretches of the program that holds every module call and every part of the anatomy that is code."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from support.functional_models import Blocks, Encoder, Functional, Recurrent
from torch import nn

from retrofit.anatomy.inspection import read_anatomy
from retrofit.emitted.regions import Region, program_region
from retrofit.program.aten_ops import op
from retrofit.program.capture import capture
from retrofit.program.dataflow import Dataflow

MODELS = {"functional": Functional, "blocks": Blocks, "encoder": Encoder, "recurrent": Recurrent}


@functools.cache
def regions_of(name: str) -> tuple[Region, Dataflow]:
    model: nn.Module = MODELS[name]().eval()
    program = capture(model, {"ids": torch.zeros(2, 7, dtype=torch.long)})
    anatomy = read_anatomy(model, program)
    return program_region(anatomy, anatomy.flow), anatomy.flow


def tree(region: Region, prefix: str = "") -> Iterator[tuple[str, Region]]:
    """Every region inside, with its full name."""
    for one in region.inside:
        yield prefix + one.name, one
        yield from tree(one, f"{prefix}{one.name}.")


@pytest.mark.parametrize("name", MODELS)
def test_regions_lie_in_one_another_or_apart_and_have_names_of_their_own(name: str) -> None:
    whole, flow = regions_of(name)
    assert (whole.first, whole.last) == (0, len(flow.nodes) - 1)

    def check(region: Region) -> None:
        ends = [region.first - 1]
        for one in region.inside:
            assert region.first <= one.first <= one.last <= region.last
            assert one.first > ends[-1], "siblings do not overlap, and come in order"
            ends.append(one.last)
            check(one)
        names = [one.name for one in region.inside]
        assert len(set(names)) == len(names)

    check(whole)


@pytest.mark.parametrize("name", MODELS)
def test_the_nodes_of_a_module_call_are_those_of_its_region(name: str) -> None:
    whole, flow = regions_of(name)
    for path, region in tree(whole):
        if region.in_code:
            continue
        calls = [call for call in flow.program.calls if call.path == region.path]
        own = {node for node in flow.computations if any(call.encloses(flow.call_of(node)) for call in calls)}
        inside = {node for node in flow.nodes[region.first : region.last + 1] if node in flow.depends}
        assert inside & set(flow.computations) <= own, path


def test_a_model_that_is_one_function_has_layers_and_their_parts() -> None:
    whole, flow = regions_of("functional")
    names = dict(tree(whole))
    for depth in range(3):
        layer = names[f"layers.{depth}"]
        assert {f"layers.{depth}.attention", f"layers.{depth}.ffn"} <= names.keys() and layer.in_code
        products = [op(node) for node in flow.nodes[layer.first : layer.last + 1] if op(node) in ("matmul", "linear")]
        assert len(products) == 4, "queries, keys and values in one, the output, and the two of the feed-forward"
    assert {"embedding", "head", "norm"} <= names.keys()


def test_layers_that_are_modules_keep_their_names_and_have_parts() -> None:
    names = dict(tree(regions_of("blocks")[0]))
    assert not names["layers.0"].in_code and names["layers.0.ffn"].in_code
    assert {"embedding", "head", "layers.0.attention", "layers.1.attention", "layers.1.ffn"} <= names.keys()


def test_a_region_crosses_another_where_neither_holds_the_other_and_they_overlap() -> None:
    one, inside, over, apart = (Region("", "", *ends) for ends in ((2, 6), (3, 5), (5, 8), (7, 9)))
    assert one.holds(inside) and not inside.holds(one) and one.holds(one)
    assert one.crosses(over) and over.crosses(one)
    assert not one.crosses(inside) and not inside.crosses(one) and not one.crosses(apart)
