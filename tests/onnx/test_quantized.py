"""Weights that an ONNX file stores quantized are the numbers ONNX Runtime computes with, as parameters; activations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.refusals import refused

from retrofit.errors import CaptureError
from retrofit.onnx.exporter.export_parts import OnnxSession
from retrofit.onnx.importer import from_onnx
from retrofit.onnx.importer.operators import MICROSOFT

RNG = np.random.default_rng(0)
WIDE, NARROW = 32, 6


def written(path: Path, nodes: list[Any], held: dict[str, Any], version: int = 21) -> Path:
    protos = [value if isinstance(value, TensorProto) else numpy_helper.from_array(value, name) for name, value in held.items()]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDE])],
        [helper.make_empty_tensor_value_info("y")],
        protos,
    )
    imports = [helper.make_opsetid("", version), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), str(path))
    return path


def compared(path: Path) -> Any:
    """The file computes what it does in ONNX Runtime, whose optimizer would round the activations as well."""
    x = torch.randn(5, WIDE, generator=torch.Generator().manual_seed(0))
    model = from_onnx(path)
    with torch.no_grad():
        torch.testing.assert_close(model(x=x)["y"], OnnxSession(path, optimize=False)({"x": x})["y"], atol=1e-4, rtol=1e-4)
    return model


def scales(*shape: int) -> np.ndarray:
    return (0.01 + 0.02 * RNG.random(shape)).astype("f")


def whole(low: int, high: int, kind: str, *shape: int) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(kind)


BITS8 = whole(-128, 128, "int8", WIDE, NARROW)
UNSIGNED = whole(0, 256, "uint8", WIDE, NARROW)
BITS4 = helper.make_tensor(
    "layers.0.up.weight_quantized", TensorProto.INT4, (WIDE, NARROW), whole(-8, 8, "int8", WIDE, NARROW).flatten()
)


@pytest.mark.parametrize(
    ("q", "scale", "zero", "how"),
    [
        (BITS8, scales(1)[0].reshape(()), None, {}),
        (UNSIGNED, scales(1)[0].reshape(()), np.array(131, "uint8"), {}),
        (BITS8, scales(NARROW), whole(-9, 9, "int8", NARROW), {"axis": 1}),
        (BITS8, scales(WIDE), None, {"axis": 0}),
        (BITS8, scales(WIDE // 8, NARROW), whole(-9, 9, "int8", WIDE // 8, NARROW), {"axis": 0, "block_size": 8}),
        (BITS4, scales(NARROW), None, {"axis": 1}),
    ],
    ids=["one scale", "a zero point", "a scale a column", "a scale a row", "blocks", "four bits"],
)
def test_weights_of_dequantize_linear_are_parameters(tmp_path: Path, q: Any, scale: Any, zero: Any, how: Any) -> None:
    held = {"layers.0.up.weight_quantized": q, "scale": scale} | ({} if zero is None else {"zero": zero})
    nodes = [
        helper.make_node("DequantizeLinear", [*held], ["weight"], **how),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
    ]
    model = compared(written(tmp_path / "m.onnx", nodes, held))
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == {"layers.0.up.weight": (NARROW, WIDE)}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [16, 32])
def test_weights_of_mat_mul_n_bits_are_parameters(tmp_path: Path, bits: int, zeros: bool, block: int) -> None:
    blocks = WIDE // block
    held = {
        "layers.0.up.weight_Q4": whole(0, 256, "uint8", NARROW, blocks, block * bits // 8),
        "scale": scales(NARROW * blocks),
    }
    if zeros:
        held["zero"] = whole(0, 256, "uint8", NARROW * -(-blocks * bits // 8))
    node = helper.make_node("MatMulNBits", ["x", *held], ["y"], domain=MICROSOFT, K=WIDE, N=NARROW, bits=bits, block_size=block)
    model = compared(written(tmp_path / "m.onnx", [node], held))
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == {"layers.0.up.weight": (NARROW, WIDE)}
    model(x=torch.randn(2, WIDE))["y"].sum().backward()
    assert all(one.grad is not None for one in model.parameters())


FOUR = {"bits": 4}


@pytest.mark.parametrize(
    ("q", "zero", "how"),
    [
        (whole(0, 256, "uint8", 11, WIDE // 2), None, FOUR),
        (whole(0, 256, "uint8", 11, WIDE // 2), whole(0, 256, "uint8", 11, 1), FOUR),
        (whole(0, 256, "uint8", 11, WIDE), None, {"bits": 8}),
        (helper.make_tensor("table_Q4", TensorProto.INT4, (11, WIDE), whole(-8, 8, "int8", 11 * WIDE)), None, FOUR),
        (helper.make_tensor("table_Q4", TensorProto.UINT4, (11, WIDE), whole(0, 16, "uint8", 11 * WIDE)), None, FOUR),
    ],
    ids=["bytes of two", "with zero points", "bytes", "int4", "uint4"],
)
def test_tables_of_gather_block_quantized_are_parameters(tmp_path: Path, q: Any, zero: Any, how: Any) -> None:
    """Read twice, they are one."""
    held = {"table_Q4": q, "scale": scales(11, WIDE // 16)} | ({} if zero is None else {"zero": zero})
    how = {"domain": MICROSOFT, "gather_axis": 0, "quantize_axis": 1, "block_size": 16, **how}
    nodes = [helper.make_node("Cast", ["x"], ["ids"], to=TensorProto.INT64)]
    for name in ("first", "second"):
        nodes.append(helper.make_node("GatherBlockQuantized", ["table_Q4", "ids", *[*held][1:]], [name], **how))
    nodes.append(helper.make_node("Add", ["first", "second"], ["y"]))
    path = written(tmp_path / "m.onnx", nodes, held)
    model, x = from_onnx(path), torch.randint(11, (3, WIDE)).float()
    torch.testing.assert_close(model(x=x)["y"].detach(), OnnxSession(path, optimize=False)({"x": x})["y"], atol=1e-5, rtol=1e-5)
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == {"table": (11, WIDE)}


def test_what_is_quantized_as_the_model_runs_is_refused_with_its_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="the_quantizer"),
        helper.make_node("MatMulInteger", ["q", "weight", "z"], ["product"]),
        helper.make_node("Cast", ["product"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["real", "s"], ["y"]),
    ]
    with refused(CaptureError, "ai.onnx.DynamicQuantizeLinear") as caught:
        from_onnx(written(tmp_path / "m.onnx", nodes, {"weight": BITS8}))
    assert "the_quantizer" in caught.value.why and "weights" in caught.value.remedy


def test_activations_that_are_rounded_on_the_way_are_refused(tmp_path: Path) -> None:
    held = {"s": np.array(0.05, "f"), "z": np.array(0, "int8"), "weight": RNG.standard_normal((WIDE, NARROW)).astype("f")}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="the_rounding"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["back"]),
        helper.make_node("MatMul", ["back", "weight"], ["y"]),
    ]
    with refused(CaptureError, "ai.onnx.QuantizeLinear") as caught:
        from_onnx(written(tmp_path / "m.onnx", nodes, held))
    assert "the_rounding" in caught.value.why
