"""The onnx check: exported to ONNX and run by ONNX Runtime, the model gives what it gives in torch, on inputs of other shapes.

It costs more than the other checks together (a trace with free sizes, a translation, a cleaning for each file), so it is made where
it is asked for: `verify(model, checks=["onnx"])`, `retrofit verify --onnx`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retrofit.errors import CaptureError, RetrofitError
from retrofit.onnx.exporter.cleaning import gap_of
from retrofit.onnx.exporter.exporting import PARITY, Exported, dtype_of, export_onnx, other_sizes
from retrofit.onnx.exporter.parts import PAST_KEY_VALUES, ExportPart, plan
from retrofit.onnx.exporter.sessions import Running, installed
from retrofit.pipeline.replaying import recipe
from retrofit.runtime.outcomes import Finding, failed, passed, skipped

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject


def check(subject: Subject) -> Finding:
    if why := why_not(subject.model):
        return skipped(why)
    try:
        made = exported(subject.model, subject.inputs)
    except CaptureError as error:
        return excused(subject, error)
    files = f"{len(made.files)} files" if len(made.files) > 1 else "1 file"
    gap = max(file.gap for file in made.files if file.gap is not None)
    cache = " with the cache" if made.cached else ""
    return passed(
        f"{gap:.1e} on other shapes, {files}{cache}", f"without its cache: {made.why_no_cache}" if made.why_no_cache else ""
    )


def why_not(model: nn.Module) -> str:
    """Why nothing can be compared here; "" where it can."""
    if missing := installed("onnxscript", "onnxruntime"):
        return f"{missing[0]} is not installed: pip install 'retrofit[onnx]'"
    dtype = next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float32)
    return "" if dtype in PARITY else f"ONNX Runtime does not compute in {str(dtype).removeprefix('torch.')} on the CPU"


def exported(model: nn.Module, inputs: Mapping[str, Any]) -> Exported:
    """The model exported and compared, its files gone again; raises `CaptureError` where that cannot be done."""
    with tempfile.TemporaryDirectory(prefix="retrofit-") as folder:
        return export_onnx(model, Path(folder) / "model.onnx", example_inputs=inputs)


def excused(subject: Subject, error: CaptureError) -> Finding:
    """A model that was rewritten must go where the dense model goes; a dense model need not go anywhere."""
    why = f"{error.what}: {error.why}" if error.why else error.what
    if subject.reference is None and not recipe(subject.model):
        return skipped(why)
    if subject.dense is not None:
        try:
            exported(subject.dense, subject.inputs)
        except CaptureError as own:
            return skipped(f"the dense model cannot be exported either: {own.what}")
    return failed("", why)


# ── A file that is there already ─────────────────────────────────────────────────────────────────────────────────────────────────


def check_file(path: Path, subject: Subject) -> Finding:
    """Whether the ONNX file, whoever wrote it, computes what the model does: the part of the model that its inputs say it is."""
    if why := why_not(subject.model):
        return skipped(why)
    running = Running(path)
    part = part_like(running, subject)
    gaps = []
    for seed, sizes in enumerate(other_sizes(part), start=7):
        inputs = part.example(sizes, seed)
        with torch.no_grad():
            expected = dict(zip(part.outputs, part(inputs), strict=True))
        gaps.append(gap_of(running(inputs), {name: expected[name] for name in running.outputs if name in expected}))
    measured = f"{max(gaps):.1e} on inputs of {len(gaps)} shapes, as {part.name}"
    limit = PARITY[dtype_of(part)]
    return (
        passed(measured)
        if max(gaps) <= limit
        else failed(measured, f"the outputs of {path.name} lie further than {limit:g} from torch's")
    )


def part_like(running: Running, subject: Subject) -> ExportPart:
    """The part of the model with the file's inputs and states; raises `RetrofitError` where it has none."""
    found = []
    for mode in ("auto", "none"):
        for part in plan(subject.model, subject.inputs, mode).parts:  # type: ignore[arg-type]
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
            f"the file is no part of {type(subject.model).__name__}",
            why=f"it takes {', '.join(list(running.inputs)[:4])}… and returns {', '.join(running.outputs[:3])}…",
            remedy="give the model that it was exported from",
        )
    return max(found, key=lambda part: len(set(part.outputs) & set(running.outputs)))
