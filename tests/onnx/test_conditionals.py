"""Imported ONNX files with an `If` select the branch that ONNX Runtime selects; what is rewritten has one branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support import tiny_models
from support.refusals import refused
from torch.nn import functional as F

import retrofit
from retrofit.errors import CaptureError, CheckpointError
from retrofit.inputs.probes import resized
from retrofit.numerics.distances import distance
from retrofit.onnx.exporter.export_parts import OnnxSession
from retrofit.onnx.importer import SizeConditional, from_onnx
from retrofit.passes import SparseFFN
from retrofit.program.capture import capture
from retrofit.provenance import provenance_of

PARITY = 1e-4
FEW = 2  # rows up to which the first way is taken


def graph_of(nodes: list[Any], output: str, held: dict[str, np.ndarray] | None = None) -> onnx.GraphProto:
    given = [numpy_helper.from_array(value, name) for name, value in (held or {}).items()]
    return helper.make_graph(nodes, output, [], [helper.make_empty_tensor_value_info(output)], given)


def choosing(path: Path, then: onnx.GraphProto, otherwise: onnx.GraphProto, by: list[Any] | None = None) -> Path:
    """A file that multiplies by a weight, and takes one of two ways on."""
    by = by or [
        helper.make_node("Shape", ["x"], ["sizes"], start=0, end=1),
        helper.make_node("LessOrEqual", ["sizes", "few"], ["is_few"]),
        helper.make_node("Squeeze", ["is_few"], ["chosen"]),
    ]
    held = {"few": np.array([FEW]), "weight": np.random.default_rng(0).standard_normal((4, 4)).astype("f")}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "weight"], ["product"]),
            *by,
            helper.make_node("If", ["chosen"], ["y"], name="the_choice", then_branch=then, else_branch=otherwise),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))
    return path


def times(number: float, name: str, of: str = "product") -> onnx.GraphProto:
    factor = helper.make_node("Constant", [], [f"{name}_factor"], value=numpy_helper.from_array(np.array([number], "f")))
    return graph_of([factor, helper.make_node("Mul", [of, f"{name}_factor"], [name])], name)


def twice(name: str) -> onnx.GraphProto:
    return graph_of([helper.make_node("Add", ["product", "product"], [name])], name)


def compared(path: Path, model: torch.nn.Module) -> None:
    running = OnnxSession(path)
    for batch in (1, FEW, FEW + 1, 5):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert distance(model(x=x)["y"], running({"x": x})["y"]) < 1e-6


def test_two_ways_to_compute_the_same_are_one_for_a_rewrite(tmp_path: Path) -> None:
    path = choosing(tmp_path / "m.onnx", times(2.0, "one"), twice("other"))
    model = from_onnx(path)
    compared(path, model)
    (choice,) = [one for one in model.modules() if isinstance(one, SizeConditional)]
    assert choice.general == "otherwise"
    captured = capture(model, {"x": torch.randn(3, 4)}, dynamic=True)
    assert not any("mul" in str(node.target) for node in captured.graph.nodes)  # the way that adds
    model(x=torch.randn(1, 4))["y"].sum().backward()
    assert model.weight.grad is not None


def test_ways_that_differ_run_as_they_do_and_are_not_rewritten(tmp_path: Path) -> None:
    path = choosing(tmp_path / "m.onnx", times(2.0, "one"), times(3.0, "other"))
    model = from_onnx(path)
    compared(path, model)
    with pytest.raises(CaptureError, match="the_choice"):
        capture(model, {"x": torch.randn(3, 4)}, dynamic=True)


def test_a_choice_within_a_choice(tmp_path: Path) -> None:
    least = [
        helper.make_node("Shape", ["product"], ["inner_sizes"], start=0, end=1),
        helper.make_node("Constant", [], ["inner_least"], value=numpy_helper.from_array(np.array([1]))),
        helper.make_node("Equal", ["inner_sizes", "inner_least"], ["inner_is"]),
        helper.make_node("Squeeze", ["inner_is"], ["inner_chosen"]),
        helper.make_node("If", ["inner_chosen"], ["one"], then_branch=times(0.5, "a"), else_branch=times(0.25, "b", "weighted")),
    ]
    nodes = [helper.make_node("MatMul", ["product", "weight"], ["weighted"]), *least]
    path = choosing(tmp_path / "m.onnx", graph_of(nodes, "one"), times(3.0, "other"))
    compared(path, from_onnx(path))


def test_a_condition_on_values_is_refused_with_its_node(tmp_path: Path) -> None:
    by = [helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0), helper.make_node("Cast", ["most"], ["chosen"], to=9)]
    with pytest.raises(CaptureError, match="the_choice"):
        from_onnx(choosing(tmp_path / "m.onnx", times(2.0, "one"), twice("other"), by))


def test_two_constants_of_one_name_are_refused(tmp_path: Path) -> None:
    ways = [
        graph_of([helper.make_node("Mul", ["product", "factor"], [name])], name, {"factor": np.array([number] * 4, "f")})
        for name, number in (("one", 2.0), ("other", 3.0))
    ]
    with refused(CheckpointError, site="factor"):
        from_onnx(choosing(tmp_path / "m.onnx", *ways))


# ── A model of ours ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_sparse_layers_come_back_in_and_learn_on(tmp_path: Path) -> None:
    model = tiny_models.llama(hidden_size=32, intermediate_size=64)
    retrofit.apply(model, SparseFFN(sparsity=8, multiply_by_controller=True), verify=False)
    path = tmp_path / "m.onnx"
    retrofit.export_onnx(model, path, fuse=False)
    back, running = from_onnx(path), OnnxSession(path)
    choices = [one for one in back.modules() if isinstance(one, SizeConditional)]
    assert choices and all(one.general == "otherwise" for one in choices)
    for batch, length in ((1, 1), (3, 14)):  # few tokens and many
        inputs = resized(back, provenance_of(back).examples, batch, length, seed=batch)
        expected = running({**inputs, **running.empty_states(batch)})["logits"]
        with torch.no_grad():
            assert distance(back(**inputs)["logits"], expected) < PARITY
    rewritten = retrofit.apply(back, "altup(k=2)")  # every check passes
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(12).expand(2, -1)}
    optimizer = torch.optim.Adam(rewritten.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(rewritten(**inputs)["logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
