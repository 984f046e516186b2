"""The code of a bundle is what its modules need, and runs by itself."""

from __future__ import annotations

import ast
import importlib
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused

from retrofit.bundling.closure import Closure, Definition
from retrofit.bundling.modelling_file import SourceText
from retrofit.errors import CheckpointError

OURS = frozenset(("retrofit",))


def collected(*names: str, called: tuple[str, ...] = ()) -> SourceText:
    """The code of `module:name`s, whose objects a table makes."""
    roots = [Definition(*name.split(":")) for name in names]
    return SourceText(Closure(roots, [], OURS, called))


def run(source: SourceText) -> dict[str, Any]:
    """What the code defines."""
    imports = "\n".join(one.statement() for one in source.imports())
    found: dict[str, Any] = {"__name__": __name__}
    text = f"from __future__ import annotations\n{imports}\n{source.write()}"
    linecache.cache["<bundle>"] = len(text), None, text.splitlines(keepends=True), "<bundle>"  # Triton reads functions' source
    exec(compile(text, "<bundle>", "exec"), found)
    return found


def classes(source: SourceText) -> dict[str, set[str]]:
    """The classes in the text, each with its methods."""
    tree = ast.parse(source.write())
    return {
        one.name: {member.name for member in one.body if isinstance(member, ast.FunctionDef)}
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef)
    }


def test_methods_that_nothing_calls_are_left_out_and_constructors_with_them() -> None:
    found = classes(collected("retrofit.passes.altup.layers:AltUpLayer"))
    assert {"forward", "update", "block", "coefficients", "extra_repr"} <= found["AltUpLayer"]
    assert {"__init__", "start", "freeze", "count", "add_coefficients"}.isdisjoint(found["AltUpLayer"])
    assert "DenseAltUpLayer" not in found and "__getattr__" in found["Wrapper"]


def test_methods_whose_names_are_in_a_tuple_are_there() -> None:
    found = classes(collected("retrofit.surgery.cache_memory:histories_of"))
    assert {"reorder_cache", "batch_select_indices", "batch_repeat_interleave", "reset", "crop"} <= found["CacheWithHistories"]


def test_the_constructor_of_a_class_that_code_calls_is_there() -> None:
    found = classes(collected("retrofit.passes.memory.memory_layer:TokenIdInjector"))
    assert "__init__" in found["CallWithKeywords"]  # which each call of the layer makes
    assert "__init__" in found["Wrapper"] and "__init__" not in found["TokenIdInjector"]


def test_the_code_computes_what_the_module_does() -> None:
    source = collected("retrofit.passes.altup.layers:contract")
    contract = run(source)["contract"]
    original = importlib.import_module("retrofit.passes.altup.layers").contract
    x, y, a, g = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(2, 2), torch.randn(2, 1)
    assert torch.equal(contract(x, y, a, g), original(x, y, a, g))


def test_two_things_of_one_name_get_names_of_their_own() -> None:
    source = collected(
        "retrofit.surgery.wrappers:visible_keys", "retrofit.passes.merge_cross_attention.joint_attention:JointAttention"
    )
    found = run(source)
    hidden = {name: found[name] for name in source.names.values() if name.startswith("HIDDEN")}
    modules = ("retrofit.surgery.wrappers", "retrofit.passes.merge_cross_attention.joint_attention")
    assert len(hidden) == 2 and sorted(hidden.values()) == sorted(importlib.import_module(name).HIDDEN for name in modules)
    assert "HIDDEN" in found["visible_keys"].__code__.co_names or "HIDDEN" in found["Part"].with_bias_of_first.__code__.co_names
    mask = torch.zeros(1, 1, 2, 2).masked_fill(torch.ones(2, 2).triu(1).bool(), -1e9)
    assert torch.equal(found["visible_keys"](mask, 2, False), torch.tensor([[[True, False], [True, True]]]))


def test_what_an_annotation_names_is_not_needed() -> None:
    text = collected("retrofit.anatomy.feed_forwards:FeedForwardBlock").write()
    assert "class FeedForward:" not in text and "class FeedForwardBlock" in text


def test_a_part_that_needs_a_package_that_may_be_missing_is_set_apart() -> None:
    source = collected("retrofit.passes.indexed_rows:indexed_products")
    text = source.write()
    assert "    import triton\n" in text and "except ImportError" in text
    products = run(source)["indexed_products"]
    x, rows = torch.randn(2, 4), torch.randn(6, 4)
    indices = torch.tensor([[0, 3], [5, 1]])
    torch.testing.assert_close(products(x, indices, rows), torch.stack([rows[i] @ one for i, one in zip(indices, x, strict=True)]))


def test_a_layer_that_needs_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import networkx\n\n\nclass Layer:\n    def forward(self):\n        return networkx.Graph()\n\n    __call__ = forward\n"
    (tmp_path / "layer_with_graphs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with refused(CheckpointError, "layer_with_graphs", "networkx") as caught:
        Closure([Definition("layer_with_graphs", "Layer")], [], frozenset(("layer_with_graphs",)), ["forward"])
    assert caught.value.remedy


def test_the_files_stand_after_those_they_need() -> None:
    files = collected("retrofit.passes.altup.layers:AltUpLayer", "retrofit.bundling.placing:Placing").files
    assert files.index("retrofit.surgery.wrappers") < files.index("retrofit.passes.altup.layers")
    assert files[-1] == "retrofit.bundling.placing"


def test_comments_and_formulas_are_kept_and_notes_for_checkers_are_not() -> None:
    text = collected("retrofit.passes.altup.layers:AltUpLayer").write()
    assert "# P − g p_jᵀ" in text and "x̂^i = Σ_m p[i,m] x^m" in text
    assert "type: ignore" not in text
