"""Weights that an ONNX file stores as few bits and scales, as the numbers that they represent.

    DequantizeLinear            w = (q − z) · s, one scale for all, for a row or column, or for a block of one
    com.microsoft.MatMulNBits   the same for each row's blocks, two or more numbers packed into a byte
    com.microsoft.GatherBlockQuantized   the same for a table of which entries are looked up

Only what is quantized in the file and nowhere else is read: a graph that quantizes as it runs has no gradient.

Source: the operator specifications of ONNX; ONNX Runtime's documentation of its contributed operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retrofit.onnx.importer.operators.table import MICROSOFT

if TYPE_CHECKING:
    import onnx_ir

BLOCKS = (MICROSOFT, "MatMulNBits")
TABLE = (MICROSOFT, "GatherBlockQuantized")
DEQUANTIZE = "DequantizeLinear"
QUANTIZED_OPERATORS = frozenset(
    "QuantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul QLinearConv DynamicQuantizeMatMul QAttention "
    "MatMulIntegerToFloat QEmbedLayerNormalization QGemm".split()
)  # they compute on quantized activations


def is_block_product(node: onnx_ir.Node) -> bool:
    return (node.domain, node.op_type) == BLOCKS


def is_quantized_table(node: onnx_ir.Node) -> bool:
    return (node.domain, node.op_type) == TABLE


def dequantize(q: Tensor, scale: Tensor, zero: Tensor | None = None, axis: int = 1, block_size: int = 0) -> Tensor:
    """What DequantizeLinear makes of constants."""
    if scale.dim() == 1 and scale.numel() > 1:  # one for each place along the axis
        shape = [1] * q.dim()
        shape[axis] = -1
        scale, zero = scale.reshape(shape), None if zero is None else zero.reshape(shape)
    elif block_size:
        scale, zero = (None if one is None else one.repeat_interleave(block_size, axis) for one in (scale, zero))  # type: ignore[assignment]
        scale, zero = (None if one is None else one.narrow(axis, 0, q.shape[axis]) for one in (scale, zero))  # type: ignore[assignment]
    centred = q.to(torch.float32) if zero is None else q.to(torch.float32) - zero.to(torch.float32)
    return (centred * scale.to(torch.float32)).to(scale.dtype)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The numbers of `bits` bits in each byte of the last dimension, the lowest first."""
    shifts = torch.arange(0, 8, bits)
    return ((packed.to(torch.int32).unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def dequantize_blocks(attributes: dict[str, Any], packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """The weight of a MatMulNBits node, (out, in)."""
    rows, columns, bits, block = attributes["N"], attributes["K"], attributes.get("bits", 4), attributes["block_size"]
    blocks = -(-columns // block)
    q = unpack_bits(packed.reshape(rows, blocks, -1), bits)  # (rows, blocks, block)
    if zeros is None:
        centre: Tensor | int = 2 ** (bits - 1)
    elif zeros.is_floating_point():
        centre = zeros.reshape(rows, blocks, 1)
    else:
        centre = unpack_bits(zeros.reshape(rows, -1), bits)[:, :blocks, None]
    return ((q - centre) * scales.reshape(rows, blocks, 1)).reshape(rows, -1)[:, :columns].to(scales.dtype).contiguous()


def dequantize_table(attributes: dict[str, Any], packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """The table of a GatherBlockQuantized node: bytes hold one number each, or several along the last axis, and are centred."""
    bits, block, axis = attributes.get("bits", 4), attributes.get("block_size", 128), attributes.get("quantize_axis", 1)
    q: Tensor = packed
    if packed.dtype == torch.uint8:
        q = unpack_bits(packed, bits)
        zeros = scales.new_full((), 2 ** (bits - 1)) if zeros is None else unpack_bits(zeros, bits).narrow(-1, 0, scales.shape[-1])
    zeros = None if zeros is None else zeros.expand(scales.shape)
    return dequantize(q, scales, zeros, axis, block or q.shape[axis])
