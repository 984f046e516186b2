"""Every operator that an imported ONNX graph can call, against ONNX Runtime on the same node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from retrofit.onnx.exporter.export_parts import OnnxSession
from retrofit.onnx.importer import from_onnx
from retrofit.onnx.importer.operators import MICROSOFT, OPERATORS, elementwise, shapes, tensor

RNG = np.random.default_rng(0)


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def above(*shape: int) -> np.ndarray:
    return np.abs(real(*shape)) + 0.5


def whole(low: int, high: int, *shape: int) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(np.int64)


def yes_no(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.5


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def single(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float32)


def half(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float16)


class Case:
    """A node, its inputs (those in `fixed` as constants of the file) and how many outputs it has."""

    def __init__(
        self, kind: str, *inputs: Any, fixed: tuple[int, ...] = (), outputs: int = 1, opset: int = 20, **attributes: Any
    ) -> None:
        self.domain, _, self.kind = kind.rpartition(":")
        self.domain = MICROSOFT if self.domain else ""
        self.inputs, self.fixed, self.outputs, self.opset = inputs, fixed, outputs, opset
        self.attributes = attributes

    def __repr__(self) -> str:
        told = ",".join(f"{name}={value}" for name, value in self.attributes.items() if not isinstance(value, onnx.TensorProto))
        return f"{self.kind}-{self.opset}({told}){len(self.inputs)}"

    def model(self) -> onnx.ModelProto:
        names = [f"x{at}" if value is not None else "" for at, value in enumerate(self.inputs)]
        node = helper.make_node(
            self.kind, names, [f"y{at}" for at in range(self.outputs)], domain=self.domain, name="the_node", **self.attributes
        )
        given = [at for at, value in enumerate(self.inputs) if value is not None and at not in self.fixed]
        graph = helper.make_graph(
            [node],
            "graph",
            [helper.make_tensor_value_info(names[at], kind_of(self.inputs[at]), self.inputs[at].shape) for at in given],
            [helper.make_empty_tensor_value_info(f"y{at}") for at in range(self.outputs)],
            [numpy_helper.from_array(self.inputs[at], names[at]) for at in self.fixed],
        )
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def feed(self) -> dict[str, torch.Tensor]:
        return {
            f"x{at}": torch.from_numpy(value) for at, value in enumerate(self.inputs) if value is not None and at not in self.fixed
        }


def kind_of(value: np.ndarray) -> int:
    return int(helper.np_dtype_to_tensor_dtype(value.dtype))


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


X, W = real(2, 5, 8), real(8, 6)
PIXELS = real(2, 3, 6, 4)
HEADS = real(2, 4, 5, 6)
ANGLES = real(7, 3)
UNARY = """Neg Abs Floor Ceil Round Exp Sin Cos Tan Atan Sinh Cosh Asinh Erf Tanh Sigmoid Relu Softplus Softsign HardSwish Mish Sign
    Identity""".split()
BINARY = "Add Sub Mul Div Max Min".split()
COMPARED = "Equal Greater GreaterOrEqual Less LessOrEqual".split()
REDUCED = "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp".split()

CASES = [
    *(Case(kind, X) for kind in UNARY),
    *(Case(kind, above(3, 4)) for kind in ("Sqrt", "Reciprocal", "Log")),
    *(Case(kind, real(3, 4).clip(-0.9, 0.9)) for kind in ("Asin", "Acos", "Atanh")),
    Case("Acosh", above(3, 4) + 0.6),
    *(Case(kind, X, real(8)) for kind in BINARY),
    *(Case(kind, X, single(0.5), fixed=(1,)) for kind in BINARY),
    *(Case(kind, single(0.5), X, fixed=(0,)) for kind in BINARY),
    *(Case(kind, X, real(5, 8)) for kind in COMPARED),
    *(Case(kind, X, opset=20, keepdims=keep) for kind in REDUCED for keep in (0, 1)),
    *(Case(kind, X, ints(-1), fixed=(1,), opset=20, keepdims=keep) for kind in REDUCED for keep in (0, 1)),
    Case("ReduceMean", X, opset=17, axes=[1, 2], keepdims=0),
    Case("ReduceSum", X, ints(), fixed=(1,), noop_with_empty_axes=1),
    Case("Sum", X, X, real(8)),
    Case("Pow", X, single(2.0), fixed=(1,)),
    Case("Pow", above(3), real(3)),
    Case("Div", whole(-9, 9, 4, 3), whole(1, 5, 3)),
    Case("Mod", whole(-9, 9, 4, 3), whole(1, 5, 3)),
    Case("Mod", X, real(8), fmod=1),
    Case("IsInf", floats(1.0, np.inf, -np.inf, np.nan)),
    Case("IsInf", floats(1.0, np.inf, -np.inf, np.nan), detect_negative=0),
    Case("IsInf", floats(1.0, np.inf, -np.inf, np.nan), detect_positive=0),
    Case("And", yes_no(4), yes_no(4)),
    Case("Or", yes_no(4), yes_no(4)),
    Case("Xor", yes_no(4), yes_no(4)),
    Case("Not", yes_no(4)),
    *(Case(kind, whole(-9, 9, 4, 3), whole(-9, 9, 3)) for kind in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    Case("BitwiseXor", whole(-9, 9, 4, 3), ints(-(2**62)), fixed=(1,)),
    Case("BitwiseNot", whole(-9, 9, 4, 3)),
    Case("IsNaN", X),
    Case("Where", yes_no(2, 5, 1), X, real(8)),
    Case("Where", yes_no(2, 5, 8), X, single(-1.0), fixed=(2,)),
    Case("Where", yes_no(2, 5, 8), half(0.0), half(-9.0), fixed=(1, 2)),
    Case("Where", yes_no(2, 5, 8), half(0.0).astype(np.float64), half(-9.0).astype(np.float64), fixed=(1, 2)),
    Case("Clip", X, single(-0.5), single(0.5), fixed=(1, 2)),
    Case("Clip", X, None, single(0.5)),
    Case("DFT", real(2, 5, 6, 1), None, np.array(1), fixed=(2,)),
    Case("DFT", real(2, 5, 6, 2), None, np.array(-2), fixed=(2,), inverse=1),
    Case("DFT", real(2, 5, 6, 1), np.array(8), np.array(2), fixed=(1, 2), onesided=1),
    Case("Gelu", X),
    Case("Gelu", X, approximate="tanh"),
    Case("LeakyRelu", X, alpha=0.2),
    Case("Elu", X, alpha=0.7),
    Case("PRelu", X, real(8)),
    Case("HardSigmoid", X, alpha=0.3, beta=0.4),
    Case("Dropout", X),
    Case("Cast", X, to=TensorProto.INT64),
    Case("Cast", whole(0, 3, 4), to=TensorProto.BOOL),
    Case("CastLike", whole(0, 3, 4), X),
    Case("Shape", X),
    Case("Shape", X, start=1, end=-1),
    Case("Size", X),
    Case("Reshape", X, ints(0, -1), fixed=(1,)),
    Case("Reshape", X, ints(4, 2, 10), fixed=(1,)),
    Case("Transpose", X),
    Case("Transpose", X, perm=[1, 2, 0]),
    Case("Unsqueeze", X, ints(0, -1), fixed=(1,)),
    Case("Squeeze", real(1, 3, 1, 2), ints(0, 2), fixed=(1,)),
    Case("Squeeze", real(1, 3, 1, 2)),
    Case("Flatten", HEADS, axis=2),
    Case("Concat", X, real(2, 3, 8), axis=1),
    Case("Split", X, ints(2, 3), fixed=(1,), axis=1, outputs=2),
    Case("Split", X, axis=2, num_outputs=3, outputs=3),
    Case("Slice", X, ints(1, -3), ints(2**31, -1), ints(1, 2), fixed=(1, 2, 3)),
    Case("Slice", X, ints(-1), ints(-(2**31)), ints(1), ints(-2), fixed=(1, 2, 3, 4)),
    Case("Expand", real(2, 1, 8), ints(3, 1, 5, 1), fixed=(1,)),
    Case("Tile", X, ints(1, 2, 3), fixed=(1,)),
    Case("Pad", X, ints(0, 1, 0, 2, 0, 3), single(7.0), fixed=(1, 2)),
    Case("Pad", X, ints(1, 2), None, ints(1), fixed=(1, 3)),
    Case("Pad", real(2, 3, 6), ints(0, 0, 2, 0, 0, 1), fixed=(1,), mode="reflect"),
    Case("Expand", half(2.0), ints(2, 3), fixed=(0,)),
    Case("ConstantOfShape", ints(2, 3), value=numpy_helper.from_array(half(4.0).reshape(1))),
    Case("ConstantOfShape", ints(2, 3), fixed=(0,), value=numpy_helper.from_array(np.array([4.0], dtype=np.float32))),
    Case("Range", ints(2)[0].reshape(()), ints(9)[0].reshape(()), ints(3)[0].reshape(()), fixed=(0, 1, 2)),
    Case("EyeLike", real(4, 5), k=1),
    Case("Trilu", X, ints(1)[0].reshape(()), fixed=(1,), upper=1),
    Case("Trilu", X, upper=0),
    Case("Gather", X, whole(-5, 5, 3, 2), axis=1),
    Case("Gather", X, ints(2)[0].reshape(()), fixed=(1,), axis=1),
    Case("Gather", W, whole(0, 8, 2, 3), fixed=(0,)),
    Case("GatherElements", X, whole(-5, 5, 2, 3, 8), axis=1),
    Case("GatherElements", X, whole(-5, 5, 2, 3, 8).astype(np.int32), axis=1),
    Case("GatherND", X, whole(0, 2, 3, 2)),
    Case("GatherND", X, whole(0, 5, 2, 3, 1), batch_dims=1),
    Case("ScatterND", X, ints(0, 1, 1, 3).reshape(2, 2), real(2, 8)),
    Case("ScatterElements", X, ints(0, 2, 1).reshape(1, 3, 1), real(1, 3, 1), axis=1),
    Case("ScatterElements", X, ints(0, -2, 1).reshape(1, 3, 1).astype(np.int32), real(1, 3, 1), axis=1),
    Case("ScatterElements", X, ints(0, 2, 2).reshape(1, 3, 1), real(1, 3, 1), axis=1, reduction="add"),
    Case("OneHot", whole(-4, 0, 3, 2), ints(4)[0].reshape(()), np.array([0.5, 2.0], dtype=np.float16), fixed=(1, 2)),
    Case("OneHot", whole(0, 4, 3, 2), ints(4)[0].reshape(()), np.array([0.5, 2.0], dtype=np.float32), fixed=(1, 2), axis=1),
    Case("TopK", X, ints(3), fixed=(1,), outputs=2),
    Case("ArgMax", X, axis=1, keepdims=0),
    Case("ArgMax", whole(0, 2, 3, 9), axis=1, select_last_index=1),
    Case("ArgMin", whole(0, 2, 3, 9), axis=1, select_last_index=1, keepdims=0),
    Case("ArgMin", X, axis=-1),
    Case("NonZero", yes_no(3, 4)),
    Case("CumSum", X, ints(1)[0].reshape(()), fixed=(1,)),
    Case("CumSum", X, ints(1)[0].reshape(()), fixed=(1,), exclusive=1, reverse=1),
    Case("MatMul", X, W),
    Case("MatMul", X, W, fixed=(1,)),
    Case("Gemm", real(5, 8), W, real(6), fixed=(1, 2)),
    Case("Gemm", real(5, 8), real(6, 8), real(6), fixed=(1, 2), transB=1),
    Case("Gemm", real(8, 5), W, real(5, 1), transA=1, alpha=0.5, beta=2.0),
    Case("Einsum", HEADS, real(2, 4, 7, 6), equation="b h i d, b h j d -> b h i j"),
    Case("Softmax", X, axis=1),
    Case("LogSoftmax", X),
    Case("LayerNormalization", X, real(8), real(8), epsilon=1e-3),
    Case("LayerNormalization", X, real(5, 8), axis=1),
    Case("SimplifiedLayerNormalization", X, real(8), epsilon=1e-3),
    Case("LayerNormalization", X, real(1), fixed=(1,)),
    Case("RMSNormalization", X, real(8), opset=23, epsilon=1e-3),
    Case("InstanceNormalization", real(2, 3, 5), real(3), real(3)),
    Case("GroupNormalization", real(2, 6, 5), real(6), real(6), num_groups=3, opset=21),
    Case("BatchNormalization", real(2, 3, 5), real(3), real(3), real(3), above(3)),
    Case("Conv", real(2, 3, 9, 8), real(4, 3, 3, 3), real(4), pads=[1, 0, 1, 0], strides=[2, 1]),
    Case("Conv", real(2, 4, 9), real(4, 1, 3), group=4, pads=[2, 0]),
    Case("ConvTranspose", real(2, 3, 5, 4), real(3, 4, 3, 2), real(4), pads=[1, 0, 0, 1], strides=[2, 3]),
    Case("ConvTranspose", real(2, 4, 5), real(4, 3, 3), group=2, strides=[3], output_padding=[1], dilations=[2]),
    Case("ConvTranspose", real(2, 3, 5), real(3, 2, 3), strides=[2], auto_pad="SAME_UPPER"),
    Case("ConvTranspose", real(2, 3, 5), real(3, 2, 3), strides=[2], auto_pad="SAME_LOWER"),
    *(
        Case("Resize", PIXELS, None, floats(1, 1, *scales), fixed=(2,), mode=mode, coordinate_transformation_mode=places)
        for mode in ("nearest", "linear", "cubic")
        for places in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
        for scales in ((2, 3), (1.3, 0.5))
    ),
    *(
        Case("Resize", PIXELS, None, floats(1, 1, 2.6, 0.4), fixed=(2,), nearest_mode=rounding)
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ),
    Case("Resize", PIXELS, None, None, ints(2, 3, 9, 5), fixed=(3,), mode="linear"),
    Case("Resize", PIXELS, None, None, ints(9, 5), fixed=(3,), mode="linear", axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    Case("Resize", PIXELS, None, floats(1, 1, 2, 2), fixed=(2,), mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1),
    Case("Conv", real(2, 3, 9, 8), real(4, 3, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    Case("Conv", real(2, 3, 9, 8), real(4, 3, 3, 2), auto_pad="SAME_LOWER", strides=[2, 1]),
    Case("MaxPool", real(2, 3, 9, 8), kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0]),
    Case("MaxPool", real(2, 3, 9), kernel_shape=[3], pads=[0, 2]),
    Case("AveragePool", real(2, 3, 9, 8), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    Case("GlobalAveragePool", real(2, 3, 9, 8)),
    Case("GlobalMaxPool", real(2, 3, 9, 8)),
    Case("Col2Im", real(2, 12, 12), ints(5, 6), ints(2, 3), fixed=(1, 2), dilations=[2, 1], pads=[0, 0, 0, 0]),
    Case("Col2Im", real(2, 12, 12), ints(3, 6), ints(2, 3), fixed=(1, 2), pads=[1, 1, 1, 1], strides=[2, 1]),
    Case("DepthToSpace", real(2, 8, 3, 4), blocksize=2),
    Case("DepthToSpace", real(2, 8, 3, 4), blocksize=2, mode="CRD"),
    Case("SpaceToDepth", real(2, 2, 6, 4), blocksize=2),
    Case("RotaryEmbedding", HEADS, ANGLES, real(7, 3), whole(0, 7, 2, 5), opset=23),
    Case("RotaryEmbedding", HEADS, ANGLES, real(7, 3), whole(0, 7, 2, 5), opset=23, interleaved=1),
    Case("RotaryEmbedding", X, real(2, 5, 2), real(2, 5, 2), opset=23, num_heads=2),
    Case("Attention", HEADS, real(2, 4, 7, 6), real(2, 4, 7, 3), opset=23, scale=0.3),
    Case("Attention", HEADS, real(2, 2, 5, 6), real(2, 2, 5, 6), opset=23, is_causal=1),
    Case("Attention", HEADS, real(2, 4, 7, 6), real(2, 4, 7, 6), yes_no(5, 7) | (np.arange(7) == 0), opset=23),
    Case("Attention", X, real(2, 7, 8), real(2, 7, 8), real(2, 1, 5, 7), opset=23, q_num_heads=4, kv_num_heads=4, softcap=5.0),
    Case("ms:SkipLayerNormalization", X, real(2, 5, 8), real(8), real(8), real(8), epsilon=1e-5),
    Case("ms:SkipSimplifiedLayerNormalization", X, real(2, 5, 8), real(8), epsilon=1e-5),
    Case("ms:Gelu", X),
    Case("ms:BiasGelu", X, real(8)),
    Case("ms:FastGelu", X, real(8)),
    Case("ms:QuickGelu", X, alpha=1.5),
    Case("ms:FusedMatMul", X, real(6, 8), transB=1, alpha=0.25),
    Case("ms:FusedMatMul", real(5, 2, 3, 4), real(2, 3, 4, 6), transBatchA=1, alpha=0.5),
    Case("ms:RotaryEmbedding", HEADS, whole(0, 7, 2, 5), ANGLES, real(7, 3)),
    Case("ms:RotaryEmbedding", X, ints(2), real(7, 2), real(7, 2)),
    Case("ms:Attention", X, real(8, 24), real(24), fixed=(1, 2), num_heads=2),
    Case("ms:Attention", X, real(8, 24), real(24), fixed=(1, 2), num_heads=2, unidirectional=1),
    Case("ms:Attention", X, real(8, 24), real(24), np.array([3, 5], dtype=np.int32), fixed=(1, 2, 3), num_heads=2),
    Case("ms:Attention", X, real(8, 24), real(24), np.array([[1, 1, 0, 0, 1]] * 2, dtype=np.int32), fixed=(1, 2, 3), num_heads=2),
    Case("ms:MultiHeadAttention", X, real(2, 7, 8), real(2, 7, 8), num_heads=2, scale=0.3),
    Case("ms:MultiHeadAttention", X, real(2, 7, 8), real(2, 7, 8), real(24), num_heads=2),
    Case("ms:MultiHeadAttention", X, real(2, 7, 8), real(2, 7, 8), None, None, real(1, 1, 5, 7), num_heads=2),
    Case("ms:MultiHeadAttention", X, X, X, num_heads=2, unidirectional=1),
    Case(
        "ms:GroupQueryAttention",
        real(2, 5, 32),
        real(2, 5, 16),
        real(2, 5, 16),
        None,
        None,
        np.array([4, 4], dtype=np.int32),
        np.array([5], dtype=np.int32),
        fixed=(5, 6),
        num_heads=4,
        kv_num_heads=2,
    ),
    Case(
        "ms:GroupQueryAttention",
        real(2, 5, 64),
        real(2, 5, 32),
        real(2, 5, 32),
        None,
        None,
        np.array([4, 4], dtype=np.int32),
        np.array([5], dtype=np.int32),
        real(8, 8),
        real(8, 8),
        fixed=(5, 6, 7, 8),
        num_heads=4,
        kv_num_heads=2,
        do_rotary=1,
        local_window_size=3,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_operators_compute_what_onnx_runtime_does(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "node.onnx"
    inputs = case.feed()
    onnx.save(case.model(), str(path))
    expected = OnnxSession(path)(inputs)
    with torch.no_grad():
        found = from_onnx(path)(**inputs) if inputs else {"y0": made_from_numbers(case)}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = torch.as_tensor(found[name])
        assert got.dtype == value.dtype and got.shape == value.shape
        torch.testing.assert_close(got, value, atol=1e-5, rtol=1e-4, equal_nan=True)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), *[st.integers(1, 5)] * 3, *[st.booleans()] * 4)
@settings(max_examples=60, deadline=None)
def test_products_of_transposed_batches_are_onnx_runtimes(
    batch: list[int], rows: int, shared: int, columns: int, turn_a: bool, turn_b: bool, rows_a: bool, rows_b: bool
) -> None:
    one, other = held_as(batch, rows, shared, turn_a, rows_a), held_as(batch, shared, columns, turn_b, rows_b)
    how = {"transA": turn_a, "transB": turn_b, "transBatchA": rows_a, "transBatchB": rows_b}
    case = Case("ms:FusedMatMul", one, other, **{name: int(value) for name, value in how.items()})
    (expected,) = OnnxSession(case.model().SerializeToString())(case.feed()).values()
    found = OPERATORS[MICROSOFT, "FusedMatMul"](*case.feed().values(), **case.attributes)
    assert found.shape == expected.shape == (*batch, rows, columns)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def held_as(batch: list[int], rows: int, columns: int, turned: bool, rows_first: bool) -> np.ndarray:
    """Matrices of this shape as a node holds them that transposes each, or whose axis of rows stands before those of the batch."""
    *batch, first, last = (*batch, columns, rows) if turned else (*batch, rows, columns)
    return real(first, *batch, last) if rows_first else real(*batch, first, last)


def made_from_numbers(case: Case) -> torch.Tensor:
    """What a node gives that reads constants only, which no graph of a model is."""
    attributes = {name: 4.0 if isinstance(value, onnx.TensorProto) else value for name, value in case.attributes.items()}
    held = [tuple(value.tolist()) if value.ndim else value.item() for value in case.inputs]
    made: torch.Tensor = OPERATORS[case.domain, case.kind](*held, **attributes)
    return made


whole_numbers = st.integers(-50, 50)


@given(st.lists(whole_numbers, min_size=1, max_size=5), whole_numbers, st.integers(1, 9))
def test_numbers_are_computed_as_arrays_are(values: list[int], one: int, divisor: int) -> None:
    array, numbers = np.array(values), tuple(values)
    assert elementwise.add(numbers, one) == tuple((array + one).tolist())
    assert elementwise.mul(numbers, numbers) == tuple((array * array).tolist())
    for other in (divisor, -divisor):
        assert elementwise.div(numbers, other) == tuple(np.trunc(array / other).astype(int).tolist())
        assert elementwise.mod(numbers, other, fmod=1) == tuple(np.fmod(array, other).tolist())
    assert elementwise.equal(numbers, (one,)) == tuple((array == one).tolist())
    assert elementwise.where(elementwise.less(numbers, one), numbers, one) == tuple(np.minimum(array, one).tolist())
    assert shapes.gather(numbers, (0, -1)) == (values[0], values[-1])
    assert shapes.concat(numbers, (one,), axis=0) == (*values, one)
    assert shapes.slice_(numbers, (1,), (2**63 - 1,)) == numbers[1:]
    assert elementwise.reduce_prod(numbers, None, 0) == np.prod(array)
    assert torch.equal(tensor(numbers), torch.tensor(values))


def test_every_operator_has_a_case() -> None:
    tried = {(case.domain, case.kind) for case in CASES}
    apart = {(MICROSOFT, "EmbedLayerNormalization"), (MICROSOFT, "Trilu"), ("", "Swish")}  # no kernel, or as another, or with BERT
    assert set(OPERATORS) - tried <= apart
