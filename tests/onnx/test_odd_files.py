"""ONNX files that say of themselves what is not so: refused in words, or read; nothing in them runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import retrofit
from retrofit.errors import RetrofitError
from retrofit.provenance import provenance_of


def small() -> Any:
    """A lookup, a product, a bias, probabilities."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"], name="gather"),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),
        helper.make_node("Add", ["y", "bias"], ["z"], name="add"),
        helper.make_node("Softmax", ["z"], ["logits"], name="softmax", axis=-1),
    ]
    weights = {"table": (7, 4), "weight": (4, 5), "bias": (5,)}
    return helper.make_model(
        helper.make_graph(
            nodes,
            "small",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", 5])],
            [numpy_helper.from_array(numpy.ones(shape, "float32"), name) for name, shape in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )


def of_strings(weight: Any) -> None:
    weight.ClearField("raw_data")
    weight.data_type = TensorProto.STRING
    weight.string_data.extend([b"x"] * 20)


def renamed(name: str) -> Callable[[Any], Any]:
    def change(graph: Any) -> None:
        graph.input[0].name = graph.node[0].input[1] = name

    return change


def typed(kind: int, extents: list[Any]) -> Callable[[Any], Any]:
    return lambda graph: graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", kind, extents))


def valued(array: Any) -> Callable[[Any], Any]:
    return lambda graph: graph.initializer[1].CopyFrom(numpy_helper.from_array(array, "weight"))


NODE = r"\bproduct, ai\.onnx\.MatMul"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a node without inputs": (lambda graph: graph.node[1].ClearField("input"), NODE),
    "an input too few": (lambda graph: graph.node[1].input.pop(), NODE),
    "fewer bytes than numbers": (lambda graph: setattr(graph.initializer[1], "raw_data", b"abc"), NODE),
    "a size beyond the bytes": (lambda graph: graph.initializer[1].dims.__setitem__(0, 2**60), NODE),
    "a weight of no type": (lambda graph: setattr(graph.initializer[1], "data_type", 0), NODE),
    "a weight of strings": (lambda graph: of_strings(graph.initializer[1]), NODE),
    "a weight of nothing": (valued(numpy.ones((4, 0), "float32")), NODE),
    "an input of no type": (lambda graph: graph.input[0].ClearField("type"), r"\bids\b"),
    "an input of strings": (typed(TensorProto.STRING, ["batch", "length"]), r"\bids\b"),
    "an input beyond all memory": (typed(TensorProto.INT64, [2**40, 2**40]), r"odd\.onnx"),
    "one input twice": (lambda graph: graph.input.append(graph.input[0]), r"\bids and ids\b"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_contradicts_itself_is_refused(what: str, tmp_path: Path) -> None:
    change, message = REFUSED[what]
    model = small()
    change(model.graph)
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(RetrofitError, match=message) as error:
        retrofit.load(tmp_path / "odd.onnx")
    assert str(tmp_path / "odd.onnx") in error.value.what
    assert error.value.remedy


@pytest.mark.parametrize(
    "name", ["class", "ids=__import__('os').mkdir('sprung')", 'a")+__import__("os").mkdir("sprung")+("', "self"]
)
def test_a_name_is_never_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = small()
    renamed(name)(model.graph)
    for node, weight in zip(model.graph.node[1:3], copy.deepcopy(list(model.graph.initializer[1:])), strict=True):
        node.input[1] = f"{name}{weight.name}"
        model.graph.initializer.add().CopyFrom(weight)
        model.graph.initializer[-1].name = f"{name}{weight.name}"
    onnx.save(model, tmp_path / "odd.onnx")
    loaded = retrofit.load(tmp_path / "odd.onnx")
    assert loaded(*provenance_of(loaded).examples.values())["logits"].shape[-1] == 5
    assert not (tmp_path / "sprung").exists()
