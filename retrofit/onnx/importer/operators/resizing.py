"""ONNX's Resize as torch functions: one axis after another, each place a weighted mean of the places around where it comes from.

Source: the specification of Resize, operator sets 13 to 19.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.onnx.importer.operators.table import operator
from retrofit.onnx.importer.values import Value, numbers

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


@operator("Resize", refuses=unsupported_resizing)
def resize(
    x: Tensor,
    roi: Value = None,
    scales: Value = None,
    sizes: Value = None,
    antialias: int = 0,
    axes: tuple[int, ...] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
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
    """The scale and the new extent of each axis."""
    extents = [x.shape[axis] for axis in along]
    if scales is not None and len(given := numbers(scales)):
        return [(scale, extent(length, scale)) for scale, length in zip(given, extents, strict=True)]
    wanted = numbers(sizes)
    each = [size / length for size, length in zip(wanted, extents, strict=True)]
    if policy == "stretch":
        return [(1.0 if size is length else scale, size) for scale, size, length in zip(each, wanted, extents, strict=True)]
    one = min(each) if policy == "not_larger" else max(each)
    return [(one, int(one * length + 0.5)) for length in extents]


def extent(length: Any, scale: float) -> Any:
    """The length times the scale, rounded down; in whole numbers where the scale or its inverse is one."""
    if scale == int(scale):
        return length * int(scale)
    return length // int(1 / scale) if 1 / scale == int(1 / scale) else torch.sym_int(length * scale)


def origins(place: Tensor, scale: Any, length: Any, size: Any, mode: str) -> Tensor:
    """Where in the old axis each place of the new one comes from."""
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
    """The mean of the 2 places around each origin, or of 4 by cubic polynomials whose coefficient is `cubic`."""
    length = x.shape[axis]
    first = place.floor()
    offsets = (-1, 0, 1, 2) if cubic is not None else (0, 1)
    shares = torch.stack([share((place - first - offset).abs(), cubic) for offset in offsets])
    at = torch.stack([first + offset for offset in offsets])
    if exclude:
        shares = shares * ((at >= 0) & (at < length))
        shares = shares / shares.sum(0)
    shape = [-1 if other == axis else 1 for other in range(x.dim())]
    total: Any = 0.0
    for one, row in zip(shares.to(x.dtype), at.long().clamp(0, length - 1), strict=True):
        total = total + x.index_select(axis, row) * one.reshape(shape)
    result: Tensor = total
    return result


def share(distance: Tensor, cubic: float | None) -> Tensor:
    """The weight of a place at this distance from the origin."""
    if cubic is None:
        return (1 - distance).clamp(min=0)
    near = ((cubic + 2) * distance - (cubic + 3)) * distance * distance + 1
    far = ((cubic * distance - 5 * cubic) * distance + 8 * cubic) * distance - 4 * cubic
    return torch.where(distance <= 1, near, far)
