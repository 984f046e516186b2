"""The parameters check: every dense parameter is where its fate says, unchanged; the number of new ones follows the formulas.

A dense parameter is recognised by its fingerprint (shape, dtype, checksum, a sample), which is kept instead of its values. Without
a journal of the edits it is found by its name and its fingerprint. Weights with NaN or Inf are refused: no other check could use
their results.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from retrofit.checks.report import Finding, failed, format_layout, passed, skipped
from retrofit.checks.subject import Context, Subject
from retrofit.errors import RetrofitError, first_few
from retrofit.provenance import provenance_of
from retrofit.surgery import Fate


@dataclasses.dataclass(frozen=True)
class ParametersMeasurement:
    """The fingerprints of the dense parameters by dense name, and the size of all parameters."""

    prints: dict[str, Fingerprint]
    elements: int
    fitted: frozenset[str] = frozenset()  # those with values fitted to data


def measure_parameters(
    subject: Subject, before: ParametersMeasurement | None = None, context: Context | None = None
) -> ParametersMeasurement:
    """Return the fingerprint of every dense parameter; in a rewritten model, of the tensor that its fate names."""
    elements = sum(parameter.numel() for parameter in subject.model.parameters())
    if before is None or context is None:
        return ParametersMeasurement(fingerprints(subject.model) if context is None else {}, elements)
    storages = {id(parameter): index for index, parameter in enumerate(subject.model.parameters())}
    prints = {
        name: fingerprint_at(subject, fate, storages[id(subject.parameters[fate.name])])
        for name, fate in context.fates.items()
        if name in before.prints and fate.kind != "dropped" and fate.name in subject.parameters
    }
    return ParametersMeasurement(prints, elements, frozenset(name for name in prints if is_fitted(subject, context.fates[name])))


def is_fitted(subject: Subject, fate: Fate) -> bool:
    """Return whether the model's journal says that a dense parameter was fitted to data."""
    return fate.layout is not None and bool(fate.layout.fitted) and bool(subject.model.get_buffer(fate.layout.fitted))


def fingerprint_at(subject: Subject, fate: Fate, storage: int) -> Fingerprint:
    """Return the fingerprint of the dense parameter at the place that `fate` says."""
    value: nn.Parameter = subject.parameters[fate.name]
    if fate.kind == "widened":
        return Fingerprint.of(value[fate.index], storage, fate.scale)
    if fate.layout is not None:
        order = subject.model.get_buffer(fate.layout.order) if fate.layout.order else None
        return Fingerprint.of(fate.layout.dense(value, order), storage)
    return Fingerprint.of(value, storage)


def judge_parameters(now: ParametersMeasurement, before: ParametersMeasurement | None, context: Context) -> Finding:
    if before is None:
        return skipped("no dense model to compare with")
    kinds = [
        "fitted" if name in now.fitted else context.fates[name].kind if name in context.fates else "lost" for name in before.prints
    ]
    held = {name for name, fate in context.fates.items() if fate.kind != "dropped"}
    new = now.elements - count_elements(value for name, value in before.prints.items() if name in held)
    measured = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) + f", {new:,} new elements"
    reasons = {
        name: what_is_wrong(name, now.prints.get(name), dense, context, name in now.fitted) for name, dense in before.prints.items()
    }
    problems = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    problems += [f"{' and '.join(names)} were one parameter and are several" for names in untied(now, before)]
    if problems:
        return failed(measured, first_few(problems, between="; "))
    if context.rewrites is not None and new != context.claimed:
        return failed(measured, f"claimed are {context.claimed:,}{formulas(context)}; {unannounced(context)}")
    return passed(measured)


def what_is_wrong(name: str, now: Fingerprint | None, before: Fingerprint, context: Context, fitted: bool = False) -> str:
    """Return the error in the fate of a dense parameter, "" if there is none."""
    fate = context.fates.get(name)
    if fate is None:
        return "no edit accounts for it"
    if fate.kind == "dropped":
        return f"an exact rewrite dropped it: {fate.why}" if context.exact else "" if fate.why else "dropped without a reason"
    if now is None:
        return f"it should be {fate.name or 'unnamed'} now, but there is no such parameter"
    site = context.site_of(fate.name)
    if fitted and context.exact:
        return f"an exact rewrite fitted it to data{site}"
    if fate.kind == "widened":
        what = "what it was" if fate.scale == 1.0 else f"{fate.scale:g} times what it was"
        return "" if before.matches(now) else f"its part of {fate.name} is not {what}{site}"
    if fate.layout is not None:
        matches = now.dtype == before.dtype and (now.shape == before.shape if fitted else before.matches(now))
        return "" if matches else f"{fate.name} does not hold it where it should{site}"
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        return f"{fate.name} is {format_layout(now.shape, now.dtype)}, was {format_layout(before.shape, before.dtype)}"
    return "" if before.matches(now) else f"{fate.name} does not hold the values it held{site}"


def untied(now: ParametersMeasurement, before: ParametersMeasurement) -> list[list[str]]:
    """Return the groups of names of formerly shared parameters that are several now."""
    groups: dict[int, list[str]] = {}
    for name, fingerprint in before.prints.items():
        if name in now.prints:
            groups.setdefault(fingerprint.storage, []).append(name)
    return [names for names in groups.values() if len({now.prints[name].storage for name in names}) > 1]


def formulas(context: Context) -> str:
    text = "; ".join(rewrite.formula for rewrite in context.rewrites or () if rewrite.formula)
    return f" ({text})" if text else ""


def unannounced(context: Context) -> str:
    """Return the new parameters outside of rewritten sites, else all new ones."""
    outside = [name for name in context.new_parameters if not context.site_of(name)]
    return f"in no rewritten site: {first_few(outside)}" if outside else f"new are {first_few(context.new_parameters) or 'none'}"


# ── Fingerprints ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


ROWS = 1 << 20  # elements summed up at a time
ROW_BYTES = 8192
SAMPLE = 4096


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A fingerprint of a tensor that holds a parameter, or a multiple of one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int | None  # of the values divided by the scale; None if that would round them
    sample: torch.Tensor  # some elements, at fixed places, in float64
    storage: int  # the same for all names of one tensor
    scale: float = 1.0
    finite: bool = True  # no element is NaN or infinite, if all were read

    @staticmethod
    def of(value: torch.Tensor, storage: int = 0, scale: float = 1.0) -> Fingerprint:
        """Return the fingerprint of `value`, which is `scale` times a parameter."""
        crc, finite = read(value, scale) if abs(math.frexp(scale)[0]) == 0.5 else (None, True)  # a power of two
        return Fingerprint(tuple(value.shape), value.dtype, crc, sample(value), storage, scale, finite)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def matches(self, now: Fingerprint) -> bool:
        """Return whether `now` holds this parameter times its scale: bit for bit for a power of two, else judged by the sample."""
        if now.shape != self.shape:
            return False
        if now.dtype == self.dtype and now.checksum is not None:
            return now.checksum == self.checksum
        precision = torch.finfo(now.dtype).eps if now.dtype.is_floating_point else 0.0
        return torch.allclose(now.sample, now.scale * self.sample, rtol=2 * precision, atol=0.0)


def chunks(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the elements in order, in chunks, on the CPU."""
    rows = value.detach().unsqueeze(0) if value.dim() == 0 else value.detach()
    step = max(1, ROWS // max(1, math.prod(rows.shape[1:])))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step].cpu().contiguous().reshape(-1)


def checksum(value: torch.Tensor) -> int:
    """Return a checksum of the bytes of `value` in their order, read in chunks.

    It is the CRC-32 of sums: the sums of each row and column, modulo 2⁶⁴, of the bytes as 8-byte words in rows of a fixed width. A
    change that preserves all of these affects at least two rows and two columns. Sums run at memory speed; a CRC does not.
    """
    return read(value)[0]


def read(value: torch.Tensor, scale: float = 1.0) -> tuple[int, bool]:
    """Return the `checksum` of `value / scale`, and whether every element is finite, in one reading."""
    total, finite = 0, True
    for chunk in chunks(value):
        finite = finite and is_finite(chunk)
        content = (chunk if scale == 1.0 else chunk / scale).view(torch.uint8)
        end = len(content) // ROW_BYTES * ROW_BYTES
        table = aligned(content[:end]).view(torch.int64).view(-1, ROW_BYTES // 8)  # (rows, words)
        for part in (table.sum(0), table.sum(1), content[end:]) if end else (content,):
            total = zlib.crc32(part.numpy().data, total)
    return total, finite


def is_finite(chunk: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, judged by their sum or, if it overflows, by the extremes."""
    if not chunk.is_floating_point() or not chunk.numel():
        return True
    if chunk.itemsize >= 2 and bool(chunk.sum(dtype=torch.promote_types(chunk.dtype, torch.float32)).isfinite()):
        return True
    least, most = (chunk.float() if chunk.itemsize < 2 else chunk).aminmax()  # eight-bit floats have no arithmetic
    return bool(least.isfinite() & most.isfinite())


def aligned(content: torch.Tensor) -> torch.Tensor:
    """Return bytes that can be viewed as words."""
    return content.clone() if content.storage_offset() % 8 else content


def sample(value: torch.Tensor, most: int = SAMPLE) -> torch.Tensor:
    """Return up to `most` elements, evenly spread, in float64."""
    count = value.numel()
    places = torch.arange(0, count, max(1, count // most))[:most]
    indices = torch.unravel_index(places.to(value.device), value.shape) if value.dim() else ()
    return value.detach()[indices].reshape(-1).to("cpu", torch.float64)


def fingerprints(model: nn.Module) -> dict[str, Fingerprint]:
    """Return a fingerprint of every parameter under each of its names; shared ones are read once."""
    prints: dict[int, Fingerprint] = {}
    by_name: dict[str, Fingerprint] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in prints:
            prints[id(parameter)] = Fingerprint.of(parameter, len(prints))
        by_name[name] = prints[id(parameter)]
    return by_name


def count_elements(prints: Iterable[Fingerprint]) -> int:
    """Return the number of elements, shared ones counted once."""
    return sum({fingerprint.storage: fingerprint.elements for fingerprint in prints}.values())


# ── Matching without an account ──────────────────────────────────────────────────────────────────────────────────────────────────


BLOCKS = 64  # blocks of the largest parameter that is searched
ALIKE = 0.5  # share of a sample that identifies a parameter in a block


def match_parameters(dense: Mapping[str, Fingerprint], model: nn.Module) -> dict[str, Fate]:
    """Return the fate of each dense parameter: kept, moved under a longer or any name, a block of a larger one, or dropped."""
    now = dict(model.named_parameters(remove_duplicate=False))
    by_content: dict[tuple[int | None, tuple[int, ...]], str] = {}
    for name, parameter in now.items():
        by_content[checksum(parameter), tuple(parameter.shape)] = name
    recorded = {  # by the names of the first dense model, whose modules may be wrapped here
        name if name in dense else next(iter(longer_names(name, dense)), name): fate
        for name, fate in provenance_of(model).rearranged.items()
    }
    fates: dict[str, Fate] = {}
    for name, wanted in dense.items():
        elsewhere = by_content.get((wanted.checksum, wanted.shape))
        same_shape = (other for other in own_longer_names(name, now, dense) if tuple(now[other].shape) == wanted.shape)
        if name in recorded and recorded[name].name in now:
            fates[name] = recorded[name]
        elif name in now and tuple(now[name].shape) == wanted.shape:
            fates[name] = Fate("kept", name)
        elif wrapped := next(same_shape, None):
            fates[name] = Fate("moved", wrapped, "its module was wrapped")
        elif part := find_block(name, wanted, now):
            fates[name] = part
        elif elsewhere is not None:
            fates[name] = Fate("moved", elsewhere, "found by its content")
        else:
            fates[name] = Fate("dropped", "", "no parameter has its values")
    return fates


def own_longer_names(name: str, now: Mapping[str, nn.Parameter], dense: Mapping[str, Fingerprint]) -> list[str]:
    """Return the longer names that fit no other dense parameter better: `attention.output` also reads as a longer `output`."""
    rivals = [other.split(".") for other in longer_names(name, dense) if other != name and dense[other].shape == dense[name].shape]
    return [other for other in longer_names(name, now) if not any(is_within(rival, other.split(".")) for rival in rivals)]


def longer_names(name: str, now: Iterable[str]) -> list[str]:
    """Return the names that are `name` with more components in between, shortest first."""
    return sorted((other for other in now if is_within(name.split("."), other.split("."))), key=len)


def is_within(parts: list[str], others: list[str]) -> bool:
    """Return whether `others` contains all of `parts` in order: `h.0.mlp` is within `h.0.layer.mlp`."""
    rest = iter(others)
    return all(part in rest for part in parts)


def find_block(name: str, dense: Fingerprint, now: Mapping[str, nn.Parameter]) -> Fate | None:
    """Return the larger parameter with the dense one as a block, up to a scale; under its own name, most elements suffice."""
    namesakes = longer_names(name, now)
    for candidate in [*namesakes, *(other for other in now if other not in namesakes)]:
        scored = [(compare_sample(now[candidate][index], dense), index) for index in blocks(now[candidate], dense.shape)]
        (share, scale), index = max(scored, key=lambda score: score[0][0], default=((0.0, 1.0), ()))
        if share > ALIKE and (candidate in namesakes or dense.matches(Fingerprint.of(now[candidate][index], scale=scale))):
            return Fate("widened", candidate, "found by its content", index, scale)
    return None


def blocks(value: torch.Tensor, shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the blocks of that shape in a larger tensor, without a remainder at its end; none if there are too many."""
    if value.dim() != len(shape) or any(part == 0 or extent < part for extent, part in zip(value.shape, shape, strict=True)):
        return
    if value.shape == shape or value.numel() // torch.Size(shape).numel() > BLOCKS:
        return
    for corner in itertools.product(*(range(0, extent - part + 1, part) for extent, part in zip(value.shape, shape, strict=True))):
        yield tuple(slice(start, start + part) for start, part in zip(corner, shape, strict=True))


def compare_sample(value: torch.Tensor, dense: Fingerprint) -> tuple[float, float]:
    """Return the share of a sample of `value` that is the parameter's times a scale, and that scale."""
    now = sample(value)
    ratios = now[dense.sample != 0] / dense.sample[dense.sample != 0]
    if not ratios.numel() or not bool(torch.isfinite(ratios).all()):
        return 0.0, 1.0
    scale = snap_scale(float(ratios.median()))
    precision = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    return float(torch.isclose(now, scale * dense.sample, rtol=4 * precision, atol=0.0).float().mean()), scale


def snap_scale(scale: float) -> float:
    """Return the scale, rounded to n or 1/n if it is that close."""
    for exact in (float(round(scale)), 1 / round(1 / scale) if scale and abs(scale) <= 1 else 0.0):
        if exact and abs(scale / exact - 1) < 1e-4:
            return exact
    return scale


# ── NaN and Inf ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def require_finite(model: nn.Module, measured: ParametersMeasurement | None = None) -> None:
    """Raise `RetrofitError` if a weight contains NaN or Inf; weights that were `measured` are not read again."""
    if measured is not None:
        wrong = [name for name, fingerprint in measured.prints.items() if not fingerprint.finite]
    else:
        wrong = [name for name, value in model.named_parameters() if not (value.is_meta or all(map(is_finite, chunks(value))))]
    if wrong:
        raise not_finite(wrong[0], model.get_parameter(wrong[0]), len(wrong) - 1)


def require_finite_weight(name: str, weight: Tensor) -> None:
    """Raise `RetrofitError` if a value of the weight is NaN or infinite."""
    if not all(map(is_finite, chunks(weight))):
        raise not_finite(name, weight)


def not_finite(name: str, weight: Tensor, others: int = 0) -> RetrofitError:
    nan, infinite = int(weight.isnan().sum()), int(weight.isinf().sum())
    more = f" and {others} more weights" if others else ""
    return RetrofitError(
        f"{name}{more} {'contain' if more else 'contains'} NaN or Inf",
        why=f"of its {weight.numel():,} values {nan:,} are NaN and {infinite:,} infinite",
        remedy="use an earlier checkpoint",
        code="not-finite",
        site=name,
    )
