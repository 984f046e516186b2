"""A result on disk held against the model it was made from, the weights of both mapped: some of both are in memory at a time."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from retrofit.checks.reference import Reference
from retrofit.checks.registry import CHECKS
from retrofit.checks.report import CheckResult, Report
from retrofit.checks.verify import check_rewrite
from retrofit.errors import VerificationError
from retrofit.pipeline.protocol import Rewrite
from retrofit.pipeline.running import Progress
from retrofit.rewriting import Applied
from retrofit.runtime.example_inputs import named_inputs
from retrofit.streaming.result_files import SetAside
from retrofit.streaming.source_directory import model_on_files
from retrofit.streaming.tensor_files import TensorFiles, kept_out_of_memory

STREAMED = ("graph", "parameters", "function", "cost")  # each reads all weights a few times
ELSEWHERE = "it reads the weights many times over, or needs a gradient for each: retrofit verify, where the model fits in memory"


def verify_streamed(
    folder: Path, result: Path, applied: Applied, rewrites: tuple[Rewrite, ...], aside: Path, say: Progress
) -> Report:
    """The report on the model in the directory `result`, read from its files; raises `VerificationError` where a check fails.

    What loading the model in `folder` computes is kept in the directory `aside`.
    """
    files = TensorFiles()
    with kept_out_of_memory(files):
        say("measuring the dense model")
        dense = model_on_files(folder, files, SetAside(aside, files))
        reference = Reference.of(dense, named_inputs(dense), checks=STREAMED)
        say("verifying")
        model = model_on_files(result, files, stays_in_memory)
        report = check_rewrite(model, reference, rewrites, applied.fates, checks=STREAMED)
    others = tuple(CheckResult(name, "skipped", "", ELSEWHERE, 0.0) for name in CHECKS if name not in STREAMED)
    report = Report((*report.checks, *others))
    if not report.ok:
        raise VerificationError(
            f"the rewritten model failed: {', '.join(check.name for check in report.failed)}",
            report=report,
            why=str(report),
            remedy="nothing was written; this is a defect of retrofit if the dense model passes the same checks",
        )
    return report


def stays_in_memory(name: str, parameter: nn.Parameter) -> None:
    """Loading a result computes nothing: its files have the model's own tensors."""
