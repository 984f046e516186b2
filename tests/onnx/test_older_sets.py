"""Files of the operator sets 7 to 12: read as ONNX Runtime reads them, or refused with the operator, the set and the fix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.onnx_files import by_tracing
from support.refusals import refused

import retrofit
from retrofit.errors import CheckpointError
from retrofit.onnx.exporter.export_parts import OnnxSession
from retrofit.onnx.importer import from_onnx
from retrofit.provenance import provenance_of

RNG = np.random.default_rng(0)
node = helper.make_node


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int | str],
    held: dict[str, np.ndarray] | None = None,
    opset: int = 11,
    output: str = "y",
    as_nodes: bool = False,
) -> onnx.ModelProto:
    """A model of one input x and one output, its constants as initializers or as nodes."""
    constants = [numpy_helper.from_array(value, name) for name, value in (held or {}).items()]
    before = [node("Constant", [], [one.name], value=one) for one in constants] if as_nodes else []
    graph = helper.make_graph(
        [*before, *nodes],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info(output)],
        [] if as_nodes else constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6)


def assert_read_as_onnxruntime_does(model: onnx.ModelProto, x: np.ndarray, path: Path) -> None:
    onnx.save(model, str(path))
    given = {"x": torch.from_numpy(x)}
    (expected,) = OnnxSession(path)(given).values()
    with torch.no_grad():
        (found,) = from_onnx(path)(**given).values()
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [helper.make_empty_tensor_value_info(nodes[-1].output[0])])


X, PICTURE, ONES = ("b", 3, 4), ("b", 3, "h", "w"), (1, "n", 1)
MOMENTS = {"scale": real(3), "shift": real(3), "mean": real(3), "variance": np.abs(real(3)) + 0.5}
SCALES = {"scales": np.array([1, 1, 2, 1.5], np.float32)}
NOWHERE = {"region": np.array([], np.float32)}
CHOICE = {
    "then_branch": branch("then", node("Squeeze", ["x"], ["t"], axes=[2])),
    "else_branch": branch("otherwise", node("ReduceSum", ["x"], ["e"], axes=[2], keepdims=0)),
}
OLD_FORMS: dict[str, tuple[int, Sequence[onnx.NodeProto], Sequence[int | str], dict[str, np.ndarray]]] = {
    "Squeeze": (11, [node("Squeeze", ["x"], ["y"], axes=[2])], ONES, {}),
    "Unsqueeze": (11, [node("Unsqueeze", ["x"], ["y"], axes=[0, 3])], X, {}),
    "ReduceSum": (11, [node("ReduceSum", ["x"], ["y"], axes=[-1], keepdims=0)], X, {}),
    "ReduceMean": (11, [node("ReduceMean", ["x"], ["y"], axes=[1])], X, {}),
    "Clip": (10, [node("Clip", ["x"], ["y"], min=-0.5, max=0.25)], X, {}),
    "Clip above": (7, [node("Clip", ["x"], ["y"], max=0.25)], X, {}),
    "Pad": (10, [node("Pad", ["x"], ["y"], pads=[0, 1, 0, 0, 2, 1], value=3.0)], X, {}),
    "Slice": (9, [node("Slice", ["x"], ["y"], starts=[1, 0], ends=[3, -1], axes=[2, 1])], X, {}),
    "Slice of all axes": (7, [node("Slice", ["x"], ["y"], starts=[0, 1], ends=[1, 3])], X, {}),
    "Split": (11, [node("Split", ["x"], ["u", "y"], split=[1, 3], axis=2)], X, {}),
    "Dropout": (7, [node("Dropout", ["x"], ["y"], ratio=0.4)], X, {}),
    "Dropout, set 11": (11, [node("Dropout", ["x"], ["y"], ratio=0.4)], X, {}),
    "BatchNormalization": (8, [node("BatchNormalization", ["x", *MOMENTS], ["y"], spatial=1)], PICTURE, MOMENTS),
    "Upsample": (9, [node("Upsample", ["x", "scales"], ["y"], mode="linear")], PICTURE, SCALES),
    "Upsample, nearest": (9, [node("Upsample", ["x", "scales"], ["y"])], PICTURE, SCALES),
    "Upsample, set 7": (7, [node("Upsample", ["x"], ["y"], mode="linear", scales=[1.0, 1.0, 2.0, 3.0])], PICTURE, {}),
    "Resize": (10, [node("Resize", ["x", "scales"], ["y"], mode="linear")], PICTURE, SCALES),
    "Resize, set 11": (11, [node("Resize", ["x", "region", "scales"], ["y"], mode="linear")], PICTURE, SCALES | NOWHERE),
    "Softmax of a flattened tensor": (11, [node("Softmax", ["x"], ["y"], axis=1)], X, {}),
    "Softmax of the last axis": (11, [node("Softmax", ["x"], ["y"], axis=2)], X, {}),
    "LogSoftmax": (9, [node("LogSoftmax", ["x"], ["y"])], X, {}),
    "TopK": (9, [node("TopK", ["x"], ["y", "places"], axis=1, k=2)], X, {}),
    "MaxPool": (7, [node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2])], PICTURE, {}),
    "Gemm": (7, [node("Gemm", ["f", "w", "b"], ["y"], transB=1)], X, {"w": real(5, 4), "b": real(5)}),
}
OLD_FORMS["Gemm"][1].insert(0, node("Flatten", ["x"], ["f"], axis=2))  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", OLD_FORMS)
def test_what_an_operator_was_called_with(form: str, tmp_path: Path) -> None:
    opset, nodes, shape, held = OLD_FORMS[form]
    x = real(*((2, 3, 4) if shape is X else (2, 3, 6, 4) if shape is PICTURE else (1, 5, 1)))
    assert_read_as_onnxruntime_does(model_of(nodes, shape, held, opset), x, tmp_path / "m.onnx")


@pytest.mark.parametrize("rows", [1, 3])
def test_old_forms_inside_the_branches_of_an_if(rows: int, tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "last"], ["extent"]),
        node("Equal", ["extent", "one"], ["is_one"]),
        node("If", ["is_one"], ["y"], **CHOICE),
    ]
    model = model_of(nodes, ("b", "n", "rows"), {"last": np.array(2), "one": np.array(1)})
    assert_read_as_onnxruntime_does(model, real(2, 4, rows), tmp_path / "m.onnx")


@st.composite
def chains(draw: Any) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """A few old-form nodes one after another, on a tensor (b, 3, 4), each of which keeps its shape."""
    nodes, held, value = [], {}, "x"
    for at, kind in enumerate(draw(st.lists(st.sampled_from(CHAIN), min_size=1, max_size=5))):
        mid, out = f"m{at}", f"v{at}"
        axis = draw(st.integers(0, 2))
        if kind == "squeeze":
            nodes += [node("Unsqueeze", [value], [mid], axes=[axis]), node("Squeeze", [mid], [out], axes=[axis])]
        elif kind == "pad":
            pads = [1 if side == axis else 0 for side in range(3)]
            cut = {"starts": [1], "ends": [2**31 - 1], "axes": [axis]}
            nodes += [node("Pad", [value], [mid], pads=[*pads, 0, 0, 0], value=0.5), node("Slice", [mid], [out], **cut)]
        elif kind == "center":
            nodes += [node("ReduceSum", [value], [mid], axes=[axis]), node("Sub", [value, mid], [out])]
        elif kind == "product":
            held[f"w{at}"] = real(4, 4)
            nodes += [node("MatMul", [value, f"w{at}"], [mid]), node("Dropout", [mid], [out], ratio=0.5)]
        elif kind == "softmax":
            nodes += [node("Softmax", [value], [out], axis=axis)]
        elif kind == "split":
            parts = [f"p{at}", f"q{at}"]
            nodes += [node("Split", [value], parts, axis=2, split=[1, 3]), node("Concat", parts[::-1], [out], axis=2)]
        else:
            nodes += [node("Clip", [value], [out], min=-1.0, max=draw(st.sampled_from([0.0, 2.0])))]
        value = out
    return [*nodes, node("Identity", [value], ["y"])], held


CHAIN = ["squeeze", "pad", "center", "product", "softmax", "split", "clip"]


@given(chains(), st.sampled_from([7, 8, 9]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_chains_of_old_forms(
    tmp_path_factory: pytest.TempPathFactory, chain: tuple[list[onnx.NodeProto], dict[str, np.ndarray]], opset: int, as_nodes: bool
) -> None:
    nodes, held = chain
    model = model_of(nodes, ("b", 3, 4), held, opset, as_nodes=as_nodes)
    assert_read_as_onnxruntime_does(model, real(2, 3, 4), tmp_path_factory.mktemp("chain") / "m.onnx")


def test_external_data_stays_outside_and_weights_keep_their_names(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "layer.weight"], ["m"]),
        node("Add", ["m", "layer.bias"], ["s"]),
        node("Softmax", ["s"], ["y"], axis=2),
    ]
    held = {"layer.weight": real(4, 512), "layer.bias": real(512)}
    model, path, x = model_of(nodes, X, held), tmp_path / "m.onnx", real(2, 3, 4)
    onnx.save(model, str(path), save_as_external_data=True, location="m.data", size_threshold=0)
    (expected,) = OnnxSession(path)({"x": torch.from_numpy(x)}).values()
    module = from_onnx(path)
    assert {name: tuple(one.shape) for name, one in module.named_parameters()} == {"layer.weight": (512, 4), "layer.bias": (512,)}
    torch.testing.assert_close(next(iter(module(torch.from_numpy(x)).values())), expected, atol=1e-5, rtol=1e-4)
    os.remove(tmp_path / "m.data")
    with refused(CheckpointError, path.name, code="unreadable"):
        from_onnx(path)


def test_weights_that_are_nodes_are_parameters_and_statistics_are_not(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "kernel"], ["c"]),
        node("BatchNormalization", ["c", *MOMENTS], ["n"]),
        node("Identity", ["n"], ["y"]),
    ]
    path = tmp_path / "m.onnx"
    onnx.save(model_of(nodes, PICTURE, {"kernel": real(3, 3, 1, 1), **MOMENTS}, as_nodes=True), str(path))
    module = from_onnx(path)
    assert len(list(module.parameters())) == 3 and len(list(module.buffers())) == 2
    sum(next(iter(module(real_pictures()).values())).flatten()).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def real_pictures() -> torch.Tensor:
    return torch.from_numpy(real(2, 3, 5, 4))


@pytest.mark.parametrize("opset", [1, 6])
def test_sets_that_broadcast_otherwise_are_refused(opset: int, tmp_path: Path) -> None:
    onnx.save(model_of([node("Relu", ["x"], ["y"])], X, opset=opset), str(tmp_path / "m.onnx"))
    with pytest.raises(CheckpointError) as caught:
        from_onnx(tmp_path / "m.onnx")
    assert str(opset) in caught.value.what and "7 to 12" in caught.value.why and "opset_version" in caught.value.remedy


@pytest.mark.parametrize(
    ("opset", "wrong", "step"),
    [
        (8, node("BatchNormalization", ["x", *MOMENTS], ["y"], spatial=0, name="the_node"), "from set 8 to 9"),
        (9, node("Invented", ["x"], ["y"], name="the_node"), "from set 9 to 10"),
    ],
)
def test_an_operator_that_has_no_conversion_is_named(opset: int, wrong: onnx.NodeProto, step: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model_of([node("Relu", ["x"], ["r"]), wrong], PICTURE, MOMENTS, opset), str(path))
    with pytest.raises(CheckpointError) as caught:
        from_onnx(path)
    error = caught.value
    assert all(part in error.what for part in (wrong.op_type, "the_node", step))
    assert "%" not in error.why and "opset_version" in error.remedy


@pytest.mark.long
def test_a_transformer_of_set_11_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "bert.onnx"
    by_tracing(11, fused_attention=False)("masked/bert", path)
    model = from_onnx(path)
    inputs = dict(provenance_of(model).examples)
    expected = OnnxSession(path)(inputs)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)["logits"], expected["logits"], atol=1e-4, rtol=1e-4)
        rewritten = retrofit.apply(model, "altup(k=2)")
        torch.testing.assert_close(rewritten(**inputs)["logits"], expected["logits"], atol=1e-4, rtol=1e-4)
