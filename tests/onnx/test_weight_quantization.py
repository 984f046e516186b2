"""Exported weights in 8 and 4 bits: ONNX Runtime computes with the numbers that the file says, read here from its bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.refusals import refused
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.cli import main
from retrofit.errors import RetrofitError
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from retrofit.onnx.exporter.weight_quantization import quantize_weights

WIDE, NARROW, BLOCK = 64, 48, 32
RNG = np.random.default_rng(0)
W = RNG.standard_normal((WIDE, NARROW)).astype("f") * np.exp(RNG.standard_normal((1, NARROW))).astype("f")


def unpacked_blocks(node: Any, held: dict[str, np.ndarray]) -> np.ndarray:
    """The (out, in) matrix of a MatMulNBits node, number by number as ONNX Runtime's documentation has it."""
    given = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    packed, scales = held[node.input[1]], held[node.input[2]].reshape(given["N"], -1)
    matrix = np.zeros((given["N"], given["K"]), "f")
    for row in range(given["N"]):
        for column in range(given["K"]):
            block, place = divmod(column, given["block_size"])
            if given["bits"] == 8:
                number = int(packed[row, block, place]) - 128
            else:
                byte = int(packed[row, block, place // 2])
                number = (byte >> 4 if place % 2 else byte & 15) - 8
            matrix[row, column] = number * scales[row, block]
    return matrix


def unpacked_rows(name: str, held: dict[str, np.ndarray]) -> np.ndarray:
    """A matrix whose rows are gathered: r Q, or r Q c where its columns have scales too."""
    scales = held[f"{name}_scales"][:, None] if f"{name}_scales" in held else held[f"{name}_row_scales"]
    return held[f"{name}_rows"] * scales * held.get(f"{name}_column_scales", 1.0)


def nodes_of(graph: Any) -> list[Any]:
    inner = [one.g for node in graph.node for one in node.attribute if one.type == onnx.AttributeProto.GRAPH]
    return [*graph.node, *(node for one in inner for node in nodes_of(one))]


def held_by(model: Any) -> dict[str, np.ndarray]:
    return {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}


def in_float(model: Any) -> Any:
    """The model where no product rounds what it multiplies."""
    model = copy.deepcopy(model)
    for node in nodes_of(model.graph):
        kept = [one for one in node.attribute if one.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    return model


def one_matrix(nodes: list[Any], matrix: np.ndarray, **more: np.ndarray) -> Any:
    kinds = {"x": (TensorProto.FLOAT, ["batch", None]), "i": (TensorProto.INT64, ["batch", "few"])}
    read = {name for node in nodes for name in node.input}
    inputs = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items() if name in read]
    held = [numpy_helper.from_array(value, name) for name, value in {"w": matrix, **more}.items() if name in read]
    written = [name for node in nodes for name in node.output]
    outputs = [helper.make_empty_tensor_value_info(name) for name in written if name not in read]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, held)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def quantized(model: Any, bits: int) -> tuple[Any, list[Any]]:
    graph = onnx_ir.from_proto(model)
    done = quantize_weights(graph, bits, lambda matrix: True)
    return onnx_ir.to_proto(graph), done


def run(model: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return OnnxSession(model.SerializeToString())(inputs)


X, INDICES = torch.from_numpy(RNG.standard_normal((5, WIDE)).astype("f")), torch.tensor([[3, 0], [7, 7], [47, 1]])
PRODUCTS = {
    "a product": ([helper.make_node("MatMul", ["x", "w"], ["y"])], W),
    "with the transpose": ([helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transB=1)], W.T.copy()),
    "a transpose before": (
        [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])],
        W.T.copy(),
    ),
    "and a bias": ([helper.make_node("Gemm", ["x", "w", "b"], ["y"])], W),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", PRODUCTS)
def test_a_product_is_with_the_numbers_in_the_file(form: str, bits: int) -> None:
    nodes, matrix = PRODUCTS[form]
    bias = RNG.standard_normal(NARROW).astype("f")
    made, done = quantized(one_matrix(nodes, matrix, b=bias), bits)
    (node,) = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    assert "w" not in held_by(made), "the matrix itself is gone"
    numbers = unpacked_blocks(node, held_by(made))
    step = np.abs(W.T).reshape(NARROW, -1, BLOCK).max(-1, keepdims=True) / (127 if bits == 8 else 7)
    assert (np.abs(numbers - W.T).reshape(NARROW, -1, BLOCK) <= step).all(), "within a step of the float matrix"
    (one,) = done
    assert np.allclose(one.after, numbers if one.after.shape == numbers.shape else numbers.T), "what the check will compare with"
    expected = X @ torch.from_numpy(numbers).t() + (torch.from_numpy(bias) if form == "and a bias" else 0)
    torch.testing.assert_close(run(in_float(made), x=X)["y"], expected, atol=1e-4, rtol=1e-4)
    rounded = run(made, x=X)["y"]
    size = X.abs().amax(1, keepdim=True) / 127 * torch.from_numpy(np.abs(numbers).sum(1))  # half of it at most, column by column
    assert ((rounded - expected).abs() <= size).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_are_gathered_are_unpacked_after_that(bits: int) -> None:
    nodes = [helper.make_node("Gather", ["w", "i"], ["y"], axis=0)]
    made, _ = quantized(one_matrix(nodes, W.T.copy()), bits)
    held = held_by(made)
    assert held["w_rows"].dtype == np.int8 and "w" not in held
    numbers = held["w_rows"].astype("f") * held["w_row_scales"]
    torch.testing.assert_close(run(made, i=INDICES)["y"], torch.from_numpy(numbers)[INDICES], atol=1e-7, rtol=1e-6)
    assert np.abs(numbers - W.T).max() <= np.abs(W.T).max() / 127
    read = {node.output[0]: node for node in made.graph.node}
    unpacking = [node for node in made.graph.node if node.op_type in ("Cast", "DequantizeLinear")]
    assert unpacking and all(read[node.input[0]].op_type == "Gather" for node in unpacking)


ROW_PRODUCTS = {  # of x and the rows (…, K, d) that are gathered
    "with the transpose": ("FusedMatMul", {"transB": 1}),
    "with the rows": ("MatMul", {}),
    "with the transpose, of two dimensions": ("Gemm", {"transB": 1}),
    "with the transpose, and a bias": ("Gemm", {"transB": 1}),
}


@pytest.mark.parametrize("form", ROW_PRODUCTS)
def test_a_product_with_gathered_rows_scales_its_columns_and_not_the_rows(form: str) -> None:
    operation, how = ROW_PRODUCTS[form]
    flat, biased = operation == "Gemm", form.endswith("bias")
    indices = torch.randint(len(W.T), (5,) if flat else (2, 3, 5), generator=torch.Generator().manual_seed(2))
    width = len(W) if how else 5
    x = torch.randn(*indices.shape[:-1], 1, width, generator=torch.Generator().manual_seed(3))
    bias = RNG.standard_normal(5).astype("f")
    product = helper.make_node(
        operation, ["x", "rows", *["b"] * biased], ["y"], domain="com.microsoft" if operation == "FusedMatMul" else "", **how
    )
    nodes = [helper.make_node("Gather", ["w", "i"], ["rows"], axis=0), product]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape)),
        helper.make_tensor_value_info("i", TensorProto.INT64, list(indices.shape)),
    ]
    held = [numpy_helper.from_array(one, name) for name, one in {"w": W.T.copy(), "b": bias}.items() if name == "w" or biased]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, held)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    made, _ = quantized(helper.make_model(graph, opset_imports=imports, ir_version=10), 8)
    stored = held_by(made)
    scales = {"w_scales": stored["w_row_scales"][:, 0]} if biased else {}
    rows = torch.from_numpy(unpacked_rows("w", stored | scales).astype("f"))[indices]
    expected = x @ (rows.transpose(-1, -2) if how else rows)
    found = run(made, x=x, i=indices)["y"]
    torch.testing.assert_close(found, expected + torch.from_numpy(bias) if biased else expected, atol=1e-5, rtol=1e-5)
    cast = next(node.output[0] for node in made.graph.node if node.op_type == "Cast")
    (reader,) = [node for node in made.graph.node if cast in node.input]
    assert reader.op_type == ("Mul" if biased else operation), "without a bias no row is scaled"


def test_a_large_column_of_rows_that_are_summed_takes_no_bits_of_the_others() -> None:
    matrix = W.T.copy()  # (rows, d)
    matrix[:, 7] *= 100
    nodes = [helper.make_node("Gather", ["w", "i"], ["rows"], axis=0), helper.make_node("MatMul", ["x", "rows"], ["y"])]
    made, (done,) = quantized(one_matrix(nodes, matrix), 8)
    assert np.allclose(done.after, unpacked_rows("w", held_by(made)), rtol=1e-6)
    moved = np.linalg.norm(done.after.numpy() - matrix, axis=0) / np.linalg.norm(matrix, axis=0)
    assert moved.max() < 0.02, "of every column"
    rounded = np.abs(matrix).max(1, keepdims=True) / 127  # of a scale a row alone
    alone = np.linalg.norm(np.round(matrix / rounded) * rounded - matrix, axis=0) / np.linalg.norm(matrix, axis=0)
    assert alone.max() > 0.3


def test_what_only_chooses_is_not_packed() -> None:
    small = RNG.standard_normal((NARROW, NARROW)).astype("f")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["low"]),
        helper.make_node("MatMul", ["low", "c"], ["logits"]),
        helper.make_node("ArgMax", ["logits"], ["y"], axis=-1),
        helper.make_node("MatMul", ["x", "v"], ["z"]),
    ]
    made, done = quantized(one_matrix(nodes, W, c=small, v=W.copy()[:, ::-1].copy()), 4)
    assert [one.name for one in done] == ["v"] and {"w", "c"} <= held_by(made).keys()
    assert torch.equal(run(made, x=X)["y"], (X @ torch.from_numpy(W @ small)).argmax(-1, keepdim=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_tied_head_is_packed_once(bits: int) -> None:
    nodes = [
        helper.make_node("Gather", ["w", "i"], ["rows"], axis=0),
        helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transB=1),
    ]
    made, _ = quantized(one_matrix(nodes, W.T.copy()), bits)
    (node,) = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    numbers = torch.from_numpy(unpacked_blocks(node, held_by(made)))
    outputs = run(in_float(made), x=X, i=INDICES)
    torch.testing.assert_close(outputs["rows"], numbers[INDICES], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(outputs["y"], X @ numbers.t(), atol=1e-4, rtol=1e-4)
    assert sum(one.nbytes for one in held_by(made).values()) < W.nbytes * bits / 32 * 1.6


def test_what_anything_else_reads_stays() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ReduceSum", ["w"], ["s"]),
        helper.make_node("Add", ["h", "s"], ["y"]),
    ]
    with refused(RetrofitError, "8 bits", option="weights"):
        quantized(one_matrix(nodes, W), 8)


# ── A model ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A sparse model with a tied head, and its file in int8, made by the command."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 97, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    retrofit.apply(model, "sparse-ffn(sparsity=8)", verify=False)
    folder = tmp_path_factory.mktemp("exported")
    model.save_pretrained(folder / "model")
    assert main(["export", "--weights", "int8", str(folder / "model"), "-o", str(folder / "model.onnx")]) == 0
    return model, folder / "model.onnx"


def with_numbers_of(model: Any, file: Any) -> Any:
    """The torch model with the numbers in the file, each matrix found by the numbers it was rounded from."""
    held, model = held_by(file), copy.deepcopy(model)
    matrices = [unpacked_blocks(node, held) for node in nodes_of(file.graph) if node.op_type == "MatMulNBits"]
    packed = [name for name, one in held.items() if name.endswith("_rows") and one.dtype == np.int8]
    matrices += [unpacked_rows(name.removesuffix("_rows"), held) for name in packed]
    left = {name: one for name, one in model.named_parameters() if one.dim() == 2}
    for matrix in map(torch.from_numpy, matrices):
        for turned in (matrix, matrix.t()):
            for name, one in list(left.items()):
                if one.shape == turned.shape and (one - turned).abs().max() <= one.abs().max() / 100:
                    left.pop(name).data = turned.contiguous()
    assert not [name for name, one in left.items() if min(one.shape) >= 32], "every large matrix is packed"
    return model


@pytest.mark.long
def test_the_model_computes_with_the_numbers_in_its_file(exported: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = exported
    file = onnx.load(path)
    oracle = with_numbers_of(model, file)
    onnx.save(in_float(file), tmp_path / "float.onnx")
    running = OnnxSession(tmp_path / "float.onnx", optimize=False)  # which would round what is multiplied as well
    ids = torch.randint(97, (1, 9), generator=torch.Generator().manual_seed(1))
    mask, numbers = torch.ones_like(ids), torch.arange(9)[None]
    with torch.no_grad():
        expected = oracle(ids).logits
    whole = running({"input_ids": ids, "attention_mask": mask, "position_ids": numbers, **running.empty_states(1)})["logits"]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    states, steps = running.empty_states(1), []
    for place in range(9):  # one token at a time: the rows of its active units alone
        now = slice(place, place + 1)
        outputs = running(
            {"input_ids": ids[:, now], "attention_mask": mask[:, : place + 1], "position_ids": numbers[:, now], **states}
        )
        states = next_step_states(outputs)
        steps.append(outputs["logits"])
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_step_unpacks_rows_that_were_gathered(exported: tuple[Any, Path]) -> None:
    file = onnx.load(exported[1])
    (choice,) = [node for node in file.graph.node if node.op_type == "If"]
    branches = {one.name: one.g for one in choice.attribute}
    few = branches["then_branch"].node
    made = {name: node for node in few for name in node.output}
    held = held_by(file)
    wholes = {name for name in held if held[name].dtype == np.int8}
    assert len(wholes) == 3, "gate, up and down"
    assert {node.op_type for node in few if wholes & set(node.input)} == {"Gather"}
    unpacking = [node for node in few if node.op_type in ("DequantizeLinear", "Cast") and node.input[0] in made]
    assert sum(made[node.input[0]].op_type == "Gather" for node in unpacking) == 3
    floats = {name: one for name, one in held.items() if one.dtype == np.float32 and one.ndim == 2 and min(one.shape) >= 32}
    assert not floats
    assert file.metadata_props, "what it is"


def test_the_file_is_small_and_says_what_was_done(exported: tuple[Any, Path], tmp_path: Path, capsys: Any) -> None:
    model, path = exported
    stored = sum(one.nbytes for one in held_by(onnx.load(path)).values())
    assert stored < 0.45 * sum(one.nbytes for one in model.parameters())


@pytest.mark.long
def test_tables_that_ids_look_up_have_rows_of_8_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97, "num_attention_heads": 2}
    model = retrofit.apply(
        LlamaForCausalLM(LlamaConfig(**sizes)).eval(), "memory(lookup=ngram, buckets=40)", "memory", verify=False
    )
    tables = [one for name, one in model.named_parameters() if name.endswith("memory.b")]
    assert len(tables) == 4
    for table in tables:
        torch.nn.init.normal_(table)
    file = onnx.load(retrofit.export_onnx(model, tmp_path / "model.onnx", weights="int8").files[0].path)
    rows = [one.shape for one in held_by(file).values() if one.dtype == np.int8]
    assert {tuple(table.shape) for table in tables} <= set(rows)
    oracle = with_numbers_of(model, file)
    onnx.save(in_float(file), tmp_path / "float.onnx")
    running, ids = OnnxSession(tmp_path / "float.onnx", optimize=False), torch.randint(97, (2, 7))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(7).expand(2, -1)}
    with torch.no_grad():
        expected = oracle(ids).logits
    torch.testing.assert_close(running({**given, **running.empty_states(2)})["logits"], expected, atol=1e-4, rtol=1e-4)


def test_a_wrong_packing_is_found(exported: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrofit.errors import CaptureError
    from retrofit.onnx.exporter import weight_quantization

    own = weight_quantization.block_packed

    def off_by_one_step(weight: Tensor, bits: int) -> Any:
        packed, scales = own(weight, bits)
        return packed, scales * 1.02

    monkeypatch.setattr(
        weight_quantization, "dequantize_blocks", lambda sizes, packed, scales: own_numbers(sizes, packed, scales / 1.02)
    )
    own_numbers = __import__("retrofit.onnx.importer.weights", fromlist=["dequantize_blocks"]).dequantize_blocks
    monkeypatch.setattr(weight_quantization, "block_packed", off_by_one_step)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).eval()
    with refused(CaptureError, "model.onnx", code="differs"):
        retrofit.export_onnx(model, tmp_path / "model.onnx", example_inputs={"input": torch.randn(2, 64)}, weights="int8")
    assert not (tmp_path / "model.onnx").exists()
