"""ONNX operators for neural networks, as torch functions: products, norms, convolutions, pooling, resizing.

Resize processes one axis after another; each output is a weighted mean of the inputs around its coordinate.

Source: the specification of Resize, operator sets 13 to 19.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrofit.onnx.importer.operators import Value, number, numbers, operator, tensor


@operator("MatMul")
def mat_mul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a product with a weight, (out, in), and its bias: MatMul, Gemm and Add with a weight."""
    return F.linear(x, weight, bias)


@operator("Gemm")
def gemm(a: Tensor, b: Tensor, c: Value = None, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0) -> Tensor:
    product = torch.matmul(a.t() if transA else a, b.t() if transB else b)
    product = product if alpha == 1.0 else alpha * product
    return product if c is None else product + (c if beta == 1.0 else beta * c)


def half_of_inverse(attributes: dict[str, Any]) -> str:
    return "the half of an inverse transform" if attributes.get("onesided") and attributes.get("inverse") else ""


@operator("DFT", refuses=half_of_inverse)
def dft(x: Tensor, dft_length: Value = None, axis: Value = -2, inverse: int = 0, onesided: int = 0) -> Tensor:
    """Transform along an axis; the last axis has the real and imaginary parts of each number, or the real part alone."""
    values = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)
    length = None if dft_length is None else number(dft_length)
    along = number(axis) % x.dim()
    if onesided:
        return torch.view_as_real(torch.fft.rfft(x[..., 0], length, along))
    return torch.view_as_real((torch.fft.ifft if inverse else torch.fft.fft)(values, length, along))


@operator("Einsum")
def einsum(*values: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *values)


@operator("Softmax")
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@operator("LogSoftmax")
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@operator("LayerNormalization", ignores="stash_type")
def layer_normalization(x: Tensor, scale: Value, bias: Value = None, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], expand_gain(scale, x, axis), expand_gain(bias, x, axis), epsilon)


@operator("RMSNormalization", "SimplifiedLayerNormalization", ignores="stash_type")
def rms_normalization(x: Tensor, scale: Value, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    return F.rms_norm(x, x.shape[axis:], expand_gain(scale, x, axis), epsilon)


def expand_gain(gain: Value, x: Tensor, axis: int) -> Tensor | None:
    """Return the gain with an element for each of the elements normalized together, torch's layout."""
    if gain is None or (isinstance(gain, Tensor) and gain.shape == x.shape[axis:]):
        return gain
    return tensor(gain, x, x.dtype).expand(x.shape[axis:])


@operator("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@operator("GroupNormalization", ignores="stash_type")
def group_normalization(x: Tensor, scale: Tensor, bias: Tensor, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    repeats = 1 if scale.shape[0] == x.shape[1] else x.shape[1] // num_groups  # a scale per group before operator set 21
    return F.group_norm(x, num_groups, scale.repeat_interleave(repeats), bias.repeat_interleave(repeats), epsilon)


def statistics_of_batch(attributes: dict[str, Any]) -> str:
    return "training_mode, which measures each batch" if attributes.get("training_mode") else ""


@operator("BatchNormalization", refuses=statistics_of_batch, ignores="momentum training_mode")
def batch_normalization(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float = 1e-5) -> Tensor:
    return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)


@operator("Conv", ignores="kernel_shape")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] = (),
    group: int = 1,
    pads: tuple[int, ...] = (),
    strides: tuple[int, ...] = (),
) -> Tensor:
    rank = x.dim() - 2
    steps, spread = strides or (1,) * rank, dilations or (1,) * rank
    x, both_sides = pad_asymmetric(x, *padding(x, weight.shape[2:], auto_pad, pads, steps, spread))
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return function(x, weight, bias, steps, both_sides, spread, group)


def pad_asymmetric(
    x: Tensor, before: tuple[int, ...], after: tuple[int, ...], value: float = 0.0
) -> tuple[Tensor, tuple[int, ...]]:
    """Return x, padded if the padding before and after its axes differs, and the padding of both sides that is left for torch."""
    if before == after:
        return x, before
    widths = [width for pair in reversed(list(zip(before, after, strict=True))) for width in pair]
    return F.pad(x, widths, value=value), (0,) * len(before)


def padding(
    x: Tensor, kernel: Any, auto_pad: str, pads: tuple[int, ...], steps: tuple[int, ...], spread: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding before and after each spatial axis."""
    rank = x.dim() - 2
    if auto_pad in ("NOTSET", "VALID"):
        given = pads if pads and auto_pad == "NOTSET" else (0,) * (2 * rank)
        return tuple(given[:rank]), tuple(given[rank:])
    reach = [(extent - 1) * width + 1 for extent, width in zip(kernel, spread, strict=True)]
    lack = [-(-length // step) * step - step + wide - length for length, step, wide in zip(x.shape[2:], steps, reach, strict=True)]
    return halves(lack, auto_pad)


def halves(widths: list[int], auto_pad: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the parts of these widths before and after each axis; of an odd width, the larger part is after for SAME_UPPER."""
    small, large = tuple(width // 2 for width in widths), tuple(width - width // 2 for width in widths)
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


def unsupported_transposed(attributes: dict[str, Any]) -> str:
    return "output_shape" if attributes.get("output_shape") else ""


@operator("ConvTranspose", refuses=unsupported_transposed, ignores="kernel_shape")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] = (),
    group: int = 1,
    output_padding: tuple[int, ...] = (),
    pads: tuple[int, ...] = (),
    strides: tuple[int, ...] = (),
) -> Tensor:
    """Compute the whole result, then cut off the padding before and after each axis."""
    rank = x.dim() - 2
    steps, spread, extra = strides or (1,) * rank, dilations or (1,) * rank, output_padding or (0,) * rank
    function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    result: Tensor = function(x, weight, None, steps, 0, extra, group, spread)
    cut = pads if auto_pad == "NOTSET" and pads else (0,) * (2 * rank)
    if auto_pad.startswith("SAME"):  # each extent is multiplied by its stride
        surplus = [length - old * step for length, old, step in zip(result.shape[2:], x.shape[2:], steps, strict=True)]
        cut = tuple(itertools.chain(*halves(surplus, auto_pad)))
    for axis in range(rank):
        result = result.narrow(2 + axis, cut[axis], result.shape[2 + axis] - cut[axis] - cut[axis + rank])
    return result if bias is None else result + bias.reshape(-1, *(1,) * rank)


@operator("MaxPool", ignores="storage_order")
def max_pool(
    x: Tensor,
    kernel_shape: tuple[int, ...],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: tuple[int, ...] = (),
    pads: tuple[int, ...] = (),
    strides: tuple[int, ...] = (),
) -> Tensor:
    rank = x.dim() - 2
    steps, spread = strides or (1,) * rank, dilations or (1,) * rank
    x, both_sides = pad_asymmetric(x, *padding(x, kernel_shape, auto_pad, pads, steps, spread), value=float("-inf"))
    function: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    return function(x, kernel_shape, steps, both_sides, spread, bool(ceil_mode))


def asymmetric_padding(attributes: dict[str, Any]) -> str:
    pads = tuple(attributes.get("pads", ()))
    return "" if pads[: len(pads) // 2] == pads[len(pads) // 2 :] else "padding that differs before and after"


@operator("Col2Im", refuses=asymmetric_padding)
def col2im(
    x: Tensor,
    image_shape: Value,
    block_shape: Value,
    dilations: tuple[int, ...] = (),
    pads: tuple[int, ...] = (),
    strides: tuple[int, ...] = (),
) -> Tensor:
    image, block = numbers(image_shape), numbers(block_shape)
    return F.fold(x, image, block, dilations or 1, pads[: len(block)] or 0, strides or 1)


def unsupported_pooling(attributes: dict[str, Any]) -> str:
    pads, rank = attributes.get("pads", ()), len(attributes["kernel_shape"])
    if attributes.get("auto_pad", "NOTSET").startswith("SAME") or tuple(pads[:rank]) != tuple(pads[rank:]):
        return "padding that may differ before and after"
    return "dilations" if any(width != 1 for width in attributes.get("dilations", ())) else ""


@operator("AveragePool", refuses=unsupported_pooling, ignores="dilations")
def average_pool(
    x: Tensor,
    kernel_shape: tuple[int, ...],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    pads: tuple[int, ...] = (),
    strides: tuple[int, ...] = (),
) -> Tensor:
    rank = x.dim() - 2
    steps = strides or (1,) * rank
    before, _ = padding(x, kernel_shape, auto_pad, pads, steps, (1,) * rank)
    function: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    return function(x, kernel_shape, steps, before, bool(ceil_mode), bool(count_include_pad))


@operator("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


@operator("DepthToSpace")
def depth_to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    batch, channels, height, width = x.shape
    blocks = x.reshape(batch, blocksize, blocksize, channels // blocksize**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(batch, channels // blocksize**2, height * blocksize, width * blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, blocksize: int) -> Tensor:
    batch, channels, height, width = x.shape
    blocks = x.reshape(batch, channels, height // blocksize, blocksize, width // blocksize, blocksize).permute(0, 3, 5, 1, 2, 4)
    return blocks.reshape(batch, channels * blocksize**2, height // blocksize, width // blocksize)


# ── Resizing ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


NEAREST = {
    "round_prefer_floor": lambda place: torch.ceil(place - 0.5),
    "round_prefer_ceil": lambda place: torch.floor(place + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def unsupported_resizing(attributes: dict[str, Any]) -> str:
    if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return "coordinate_transformation_mode=tf_crop_and_resize"
    return "antialias" if attributes.get("antialias") else ""


@operator("Resize", refuses=unsupported_resizing, ignores="antialias extrapolation_value")
def resize(
    x: Tensor,
    roi: Value = None,
    scales: Value = None,
    sizes: Value = None,
    axes: tuple[int, ...] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    along = tuple(range(x.dim())) if axes is None else tuple(axis % x.dim() for axis in axes)
    for axis, (scale, size) in zip(along, scaled(x, along, scales, sizes, keep_aspect_ratio_policy), strict=True):
        length = x.shape[axis]
        if isinstance(scale, float) and scale == 1.0:
            continue
        place = origins(
            torch.arange(size, device=x.device, dtype=torch.float32), scale, length, size, coordinate_transformation_mode
        )
        if mode == "nearest":
            x = x.index_select(axis, NEAREST[nearest_mode](place).long().clamp(0, length - 1))
        else:
            x = interpolate(x, axis, place, cubic_coeff_a if mode == "cubic" else None, bool(exclude_outside))
    return x


def scaled(x: Tensor, along: tuple[int, ...], scales: Value, sizes: Value, policy: str) -> list[tuple[Any, Any]]:
    """Return the scale and the new extent of each axis."""
    extents = [x.shape[axis] for axis in along]
    if scales is not None and len(given := numbers(scales)):
        return [(scale, extent(length, scale)) for scale, length in zip(given, extents, strict=True)]
    wanted = numbers(sizes)
    ratios = [size / length for size, length in zip(wanted, extents, strict=True)]
    if policy == "stretch":
        return [(1.0 if size is length else scale, size) for scale, size, length in zip(ratios, wanted, extents, strict=True)]
    factor = min(ratios) if policy == "not_larger" else max(ratios)
    return [(factor, int(factor * length + 0.5)) for length in extents]


def extent(length: Any, scale: float) -> Any:
    """Return the length times the scale, rounded down, in integers if the scale or its inverse is one."""
    if scale == int(scale):
        return length * int(scale)
    return length // int(1 / scale) if 1 / scale == int(1 / scale) else torch.sym_int(length * scale)


def origins(place: Tensor, scale: Any, length: Any, size: Any, mode: str) -> Tensor:
    """Return the coordinate on the old axis for each position on the new one."""
    if mode == "asymmetric":
        return place / scale
    if mode == "align_corners":
        return place * ((length - 1) / (size - 1)) if size > 1 else place * 0
    if mode == "pytorch_half_pixel" and size == 1:
        return place * 0
    if mode == "half_pixel_symmetric":
        adjusted = size / (length * scale)
        return length / 2 * (1 - adjusted) + (place + 0.5) / scale - 0.5
    return (place + 0.5) / scale - 0.5


def interpolate(x: Tensor, axis: int, place: Tensor, cubic: float | None, exclude: bool) -> Tensor:
    """Return the mean of the 2 positions around each coordinate, or of 4 by cubic polynomials with coefficient `cubic`."""
    length = x.shape[axis]
    first = place.floor()
    offsets = (-1, 0, 1, 2) if cubic is not None else (0, 1)
    shares = torch.stack([share((place - first - offset).abs(), cubic) for offset in offsets])
    at = torch.stack([first + offset for offset in offsets])
    if exclude:
        shares = shares * ((at >= 0) & (at < length))
        shares = shares / shares.sum(0)
    shape = [-1 if other == axis else 1 for other in range(x.dim())]
    rows = zip(shares.to(x.dtype), at.long().clamp(0, length - 1), strict=True)
    return functools.reduce(torch.add, (x.index_select(axis, row) * weight.reshape(shape) for weight, row in rows))


def share(distance: Tensor, cubic: float | None) -> Tensor:
    """Return the weight of a position at this distance from the coordinate."""
    if cubic is None:
        return (1 - distance).clamp(min=0)
    near = ((cubic + 2) * distance - (cubic + 3)) * distance * distance + 1
    far = ((cubic * distance - 5 * cubic) * distance + 8 * cubic) * distance - 4 * cubic
    return torch.where(distance <= 1, near, far)
