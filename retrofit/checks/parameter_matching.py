"""Where the dense parameters are in a rewritten model without an account of its edits: found by their names and by their values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from retrofit.checks.fingerprint import Fingerprint, checksum, sample
from retrofit.provenance import provenance_of
from retrofit.surgery.edit import Fate

BLOCKS = 64  # a larger parameter of more blocks than this is not searched
ALIKE = 0.5  # of a sample, the share that must be unchanged for a block to be the parameter


def match_parameters(dense: Mapping[str, Fingerprint], model: nn.Module) -> dict[str, Fate]:
    """The fate of each dense parameter: kept, moved under a longer name, a block of a larger one, under any name, or dropped."""
    now = dict(model.named_parameters(remove_duplicate=False))
    by_content: dict[tuple[int | None, tuple[int, ...]], str] = {}
    for name, parameter in now.items():
        by_content[checksum(parameter), tuple(parameter.shape)] = name
    recorded = {  # by the names of the first dense model, whose modules may be wrapped in this one
        name if name in dense else next(iter(longer_names(name, dense)), name): fate
        for name, fate in provenance_of(model).rearranged.items()
    }
    fates: dict[str, Fate] = {}
    for name, one in dense.items():
        elsewhere = by_content.get((one.checksum, one.shape))
        if name in recorded and recorded[name].name in now:
            fates[name] = recorded[name]
        elif name in now and tuple(now[name].shape) == one.shape:
            fates[name] = Fate("kept", name)
        elif wrapped := next((other for other in own_longer_names(name, now, dense) if tuple(now[other].shape) == one.shape), None):
            fates[name] = Fate("moved", wrapped, "its module was wrapped")
        elif part := find_block(name, one, now):
            fates[name] = part
        elif elsewhere is not None:
            fates[name] = Fate("moved", elsewhere, "found by its content")
        else:
            fates[name] = Fate("dropped", "", "no parameter holds what it held")
    return fates


def own_longer_names(name: str, now: Mapping[str, nn.Parameter], dense: Mapping[str, Fingerprint]) -> list[str]:
    """The longer names that no other dense parameter has a better claim to: `attention.output` also reads as a longer `output`."""
    rivals = [other.split(".") for other in longer_names(name, dense) if other != name and dense[other].shape == dense[name].shape]
    return [other for other in longer_names(name, now) if not any(is_within(rival, other.split(".")) for rival in rivals)]


def longer_names(name: str, now: Iterable[str]) -> list[str]:
    """The names that are `name` with more components in between, the shortest first."""
    return sorted((other for other in now if is_within(name.split("."), other.split("."))), key=len)


def is_within(parts: list[str], others: list[str]) -> bool:
    """Whether `others` holds all of `parts` in order: `h.0.mlp` is within `h.0.layer.mlp`."""
    rest = iter(others)
    return all(part in rest for part in parts)


def find_block(name: str, one: Fingerprint, now: Mapping[str, nn.Parameter]) -> Fate | None:
    """The larger parameter that has the dense one as a block, up to a scale; one of its name need only agree in most elements."""
    namesakes = longer_names(name, now)
    for candidate in [*namesakes, *(other for other in now if other not in namesakes)]:
        scored = [(compare_sample(now[candidate][index], one), index) for index in blocks(now[candidate], one.shape)]
        (share, scale), index = max(scored, key=lambda score: score[0][0], default=((0.0, 1.0), ()))
        if share > ALIKE and (candidate in namesakes or one.matches(Fingerprint.of(now[candidate][index], scale=scale))):
            return Fate("widened", candidate, "found by its content", index, scale)
    return None


def blocks(value: torch.Tensor, shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """The blocks of that shape that a larger tensor divides into, the rest at its end left out; none where there are too many."""
    if value.dim() != len(shape) or any(part == 0 or extent < part for extent, part in zip(value.shape, shape, strict=True)):
        return
    if value.shape == shape or value.numel() // torch.Size(shape).numel() > BLOCKS:
        return
    for corner in itertools.product(*(range(0, extent - part + 1, part) for extent, part in zip(value.shape, shape, strict=True))):
        yield tuple(slice(start, start + part) for start, part in zip(corner, shape, strict=True))


def compare_sample(value: torch.Tensor, one: Fingerprint) -> tuple[float, float]:
    """The share of a sample of `value` that is the parameter's times a scale, and that scale."""
    now = sample(value)
    ratios = now[one.sample != 0] / one.sample[one.sample != 0]
    if not ratios.numel() or not bool(torch.isfinite(ratios).all()):
        return 0.0, 1.0
    scale = snap_scale(float(ratios.median()))
    precision = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    return float(torch.isclose(now, scale * one.sample, rtol=4 * precision, atol=0.0).float().mean()), scale


def snap_scale(scale: float) -> float:
    """The scale; n or 1/n where it is that within rounding."""
    for exact in (float(round(scale)), 1 / round(1 / scale) if scale and abs(scale) <= 1 else 0.0):
        if exact and abs(scale / exact - 1) < 1e-4:
            return exact
    return scale
