"""The onnx check: exported to ONNX and run by ONNX Runtime, the model gives torch's outputs, for inputs of other shapes too.

It costs more than all other checks together (a trace with dynamic shapes, a translation, an optimization of each file), so it runs
only if it is named: `verify(model, checks=["onnx"])`, `retrofit verify --onnx`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from torch import nn

from retrofit.checks.report import Finding, failed, passed, skipped
from retrofit.checks.subject import Context, Subject
from retrofit.errors import CaptureError, RetrofitError, first_few
from retrofit.onnx.exporter import export_onnx, plan_export
from retrofit.onnx.exporter.export_parts import PAST_KEY_VALUES, ExportPart, OnnxSession, missing_packages
from retrofit.onnx.exporter.parity import compare_with_torch, other_sizes, why_incomparable
from retrofit.passbase.replaying import recipe

UNPACKING = {  # operators of packed weights
    "DequantizeLinear",
    "DynamicQuantizeMatMul",
    "GatherBlockQuantized",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QLinearMatMul",
}


@dataclasses.dataclass(frozen=True)
class OnnxMeasurement:
    """The distance of exported files from the model; no files if it cannot be exported."""

    files: int = 0
    measured: str = ""  # of the file with the largest distance from torch
    cached: bool = False
    why_no_cache: str = ""
    what_failed: str = ""
    why: str = ""
    unsupported: str = ""  # why no comparison is possible here


def measure_onnx(subject: Subject, before: OnnxMeasurement | None = None, context: Context | None = None) -> OnnxMeasurement:
    """Export the model, compare it and remove its files."""
    if why := why_unsupported(subject.model):
        return OnnxMeasurement(unsupported=why)
    try:
        with tempfile.TemporaryDirectory(prefix="retrofit-") as folder:
            exported = export_onnx(subject.model, Path(folder) / "model.onnx", example_inputs=subject.inputs)
    except CaptureError as error:
        return OnnxMeasurement(what_failed=error.what, why=error.why)
    farthest = max(exported.files, key=lambda file: (bool(file.note), file.gap or 0.0))
    return OnnxMeasurement(len(exported.files), farthest.measured, exported.cached, exported.why_no_cache)


def judge_onnx(now: OnnxMeasurement, before: OnnxMeasurement | None, context: Context) -> Finding:
    """Judge whether a rewritten model can be exported if the dense model can, and with its cache if the dense one has it."""
    if now.unsupported:
        return skipped(now.unsupported)
    if not now.what_failed:
        files = f"{now.files} files" if now.files > 1 else "1 file"
        cache = " with the cache" if now.cached else ", without the cache that it has" if now.why_no_cache else ""
        measured, why = f"{now.measured} on other shapes, {files}{cache}", now.why_no_cache
        if why and (before.cached if before is not None else dense_keeps_cache(context)):
            return failed(measured, f"the dense model is exported with its cache, the rewritten one without: {why}")
        return passed(measured, f"without its cache: {why}" if why else "")
    why = f"{now.what_failed}: {now.why}" if now.why else now.what_failed
    if not context.has_reference and not recipe(context.subject.model):
        return skipped(why)
    if before is None and context.dense is not None:
        before = measure_onnx(Subject(context.dense, context.subject.shapes))
    if before is not None and before.what_failed:
        return skipped(f"the dense model cannot be exported either: {before.what_failed}")
    return failed("", why)


def dense_keeps_cache(context: Context) -> bool:
    """Return whether the dense model, if available, is exported with its cache."""
    return context.dense is not None and plan_export(context.dense, context.subject.inputs, "auto").cached


def why_unsupported(model: nn.Module) -> str:
    """Return why no comparison is possible here; "" if one is."""
    if missing := missing_packages("onnxscript", "onnxruntime"):
        return f"{missing[0]} is not installed: pip install 'retrofit-transformers[onnx]'"
    return why_incomparable(model)


# ── A file that exists already ─────────────────────────────────────────────────────────────────────────────────────────────────


def check_file(path: Path, subject: Subject) -> Finding:
    """Judge whether the ONNX file, from any exporter, computes the model, or the part of it with the file's inputs."""
    if why := why_unsupported(subject.model):
        return skipped(why)
    running = OnnxSession(path)
    part = part_like(running, subject)
    parity = compare_with_torch(path, part)
    measured = f"{parity.measured} on inputs of {len(other_sizes(part))} shapes, as {part.name}"
    if parity.agrees:
        return passed(measured)
    why = f"the outputs of {path.name} differ from torch's by more than rounding"
    if packed := packed_products(path):
        why += (
            f"\nit computes with packed weights ({', '.join(packed)}), and was held against the model's own: how far packing moves"
            " the outputs is in what `retrofit export --weights` prints"
        )
    return failed(measured, why)


def packed_products(path: Path) -> list[str]:
    """Return the operators in the file, its branches included, that unpack weights or multiply by packed ones."""
    import onnx

    found: set[str] = set()
    held: set[str] = set()
    pending = [onnx.load(path, load_external_data=False).graph]
    while pending:
        graph = pending.pop()
        held |= {initializer.name for initializer in graph.initializer}
        found |= {node.op_type for node in graph.node if node.op_type in UNPACKING and held & {*node.input}}
        pending += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return sorted(found)


def part_like(running: OnnxSession, subject: Subject) -> ExportPart:
    """Return the part of the model with the file's inputs and states; raises `RetrofitError` if it has none."""
    found = []
    for mode in ("auto", "none"):
        for part in plan_export(subject.model, subject.inputs, mode).parts:  # type: ignore[arg-type]
            known = part.example(part.sizes)
            states = {name for name in known if name.startswith(PAST_KEY_VALUES)}
            if (
                running.inputs.keys() <= known.keys()
                and states <= running.inputs.keys()
                and set(part.outputs) & set(running.outputs)
            ):
                found.append(part)
    if not found:
        raise RetrofitError(
            f"the file was not exported from this {type(subject.model).__name__}",
            why=f"it takes {first_few(running.inputs, 4)} and returns {first_few(running.outputs, 3)}",
            remedy="name the model that it was exported from",
            code="other-model",
        )
    return max(found, key=lambda part: len(set(part.outputs) & set(running.outputs)))
