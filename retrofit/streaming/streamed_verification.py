"""A result on disk held against the model it was made from, the weights of both mapped: some of both are in memory at a time."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from retrofit.checks.reference import Reference
from retrofit.checks.registry import CHECKS
from retrofit.checks.report import CheckResult, Report
from retrofit.checks.verify import check_rewrite, verify
from retrofit.errors import CheckpointError, VerificationError
from retrofit.files.atomic_writes import draft_folder
from retrofit.inputs.example_inputs import named_inputs
from retrofit.passbase.protocol import Rewrite
from retrofit.passbase.running import Progress
from retrofit.process import serialized
from retrofit.rewriting import Applied
from retrofit.storage.pipeline_directories import transformer_folder
from retrofit.streaming.result_files import SetAside
from retrofit.streaming.source_directory import (
    bytes_computed_on_loading,
    model_on_files,
    model_without_weights,
    require_directory,
    source_extents,
)
from retrofit.streaming.tensor_files import TensorFiles, kept_out_of_memory

STREAMED = ("graph", "parameters", "function", "cost")  # each reads all weights a few times
ELSEWHERE = "it reads the weights many times over, or needs a gradient for each: retrofit verify, where the model fits in memory"


@serialized
def verify_directory(model: Path, dense: Path | None, progress: Progress | None = None) -> Report:
    """Return the report on the model in a directory, held against the one in the directory `dense` where one is named.

    Where loading one merges weights, these are in files beside `model` meanwhile. Raises `CheckpointError` where there is no room
    for them, and where something is no directory of safetensors.
    """
    say = progress or (lambda stage: None)
    for one in filter(None, (model, dense)):
        require_directory(one)
    folders = [transformer_folder(one) for one in (model, dense) if one is not None]
    computed = sum(
        sum(bytes_computed_on_loading(model_without_weights(folder), source_extents(folder)).values()) for folder in folders
    )
    if computed > (free := shutil.disk_usage(model.resolve().parent).free):
        raise CheckpointError(
            f"{model} cannot be verified here",
            why=f"weights merged on loading take {computed / 1e9:.2f} GB on the disk, and {free / 1e9:.2f} GB are free",
            remedy=f"make room in {model.resolve().parent}",
            code="disk-space",
        )
    files = TensorFiles()
    with draft_folder(model.resolve()) as aside, kept_out_of_memory(files):
        reference = None
        keep = SetAside(aside, files)
        if dense is not None:
            say(f"measuring {dense}")
            before = model_on_files(folders[1], files, keep)
            reference = Reference.of(before, named_inputs(before), checks=STREAMED)
        say(f"verifying {model}")
        report = verify(model_on_files(folders[0], files, keep), reference, checks=STREAMED)
    return with_others(report)


def verify_streamed(
    folder: Path, result: Path, applied: Applied, rewrites: tuple[Rewrite, ...], aside: Path, say: Progress
) -> Report:
    """Return the report on the model in the directory `result`, read from its files; raise `VerificationError` if a check fails.

    What loading the model in `folder` computes is kept in the directory `aside`.
    """
    files = TensorFiles()
    with kept_out_of_memory(files):
        say("measuring the dense model")
        keep = SetAside(aside, files)
        dense = model_on_files(folder, files, keep)
        reference = Reference.of(dense, named_inputs(dense), checks=STREAMED)
        say("verifying")
        model = model_on_files(result, files, keep)
        report = with_others(check_rewrite(model, reference, rewrites, applied.fates, checks=STREAMED))
    if not report.ok:
        raise VerificationError(
            f"the rewritten model failed: {', '.join(check.name for check in report.failed)}",
            report=report,
            why=str(report),
            remedy="nothing was written; this is a defect of retrofit if the dense model passes the same checks",
        )
    return report


def with_others(report: Report) -> Report:
    """Return the report, with every check that was not made."""
    others = (CheckResult(name, "skipped", "", ELSEWHERE, 0.0) for name in CHECKS if name not in STREAMED)
    return dataclasses.replace(report, checks=(*report.checks, *others))
