"""`retrofit verify`: a retrofitted model on disk, checked against what its passes promise and, where given, its dense model.

An ONNX file is checked against the model it was exported from.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.cli.failures import UsageError
from retrofit.cli.parser import Subparsers, add_checks_argument, add_model_arguments, config_for, require_path
from retrofit.cli.progress import working
from retrofit.cli.tables import print_table

if TYPE_CHECKING:
    from torch import nn

    from retrofit.checks.report import CheckResult, Report


EXAMPLES = """\
Exit code 0: every check held; 1: one failed.

  retrofit verify model.altup/                               is it what its passes promise?
  retrofit verify model.altup/ --against model/              the two functions compared, too
  retrofit verify model.onnx --against model/                an export, against what it was exported from
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "verify", help="check a retrofitted model", description="Check a retrofitted model.", epilog=EXAMPLES
    )
    add_model_arguments(parser)
    parser.add_argument("--against", metavar="DENSE", type=Path, help="the model it was rewritten from: compare the two functions")
    add_checks_argument(parser)
    parser.add_argument("--onnx", action="store_true", help="also export to ONNX and compare; takes longer than all other checks")
    parser.add_argument(
        "--stream", action="store_true", help="with a part of both models in memory at a time, by the checks that can"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The report is on stdout; 0 where every check held, 1 where one failed."""
    require_path(arguments.model)
    if arguments.against is not None:
        require_path(arguments.against)

    is_onnx = arguments.model.suffix == ".onnx"
    if is_onnx and arguments.against is None:
        raise UsageError(
            "an ONNX file is verified against a model", why="it makes no promises itself", remedy="name the model with --against"
        )

    if is_onnx and arguments.onnx:
        raise UsageError("--onnx with an ONNX file", why="it is the export that is checked", remedy="leave --onnx out")

    if arguments.checks != "all" and (is_onnx or arguments.stream):
        why = "an ONNX file has one check" if is_onnx else "a stream makes the checks that it can"
        raise UsageError(
            f"--checks {arguments.checks} with {'an ONNX file' if is_onnx else '--stream'}", why=why, remedy="leave it out"
        )

    if arguments.stream:
        return report_on_stream(arguments)

    from retrofit.checks.registry import named_checks
    from retrofit.checks.verify import verify, verify_onnx
    from retrofit.storage.checkpoint import load

    def read(path: Path) -> nn.Module:
        config = arguments.config if arguments.against is None else config_for(path, arguments)
        return load(path, config=config, allow_pickle=arguments.allow_pickle)

    with working(arguments.debug) as progress:
        reference = None
        if arguments.against is not None:
            progress(f"reading {arguments.against}")
            reference = read(arguments.against)
        if reference is not None and is_onnx:
            progress("verifying")
            report = verify_onnx(arguments.model, reference)
        else:
            progress(f"reading {arguments.model}")
            model = read(arguments.model)
            progress("verifying")
            report = verify(model, reference, checks=(*named_checks(arguments.checks), *(["onnx"] if arguments.onnx else [])))
    return show(report)


def report_on_stream(arguments: argparse.Namespace) -> int:
    """The same, of directories that are larger than memory."""
    if arguments.onnx or arguments.config is not None or arguments.allow_pickle:
        raise UsageError(
            "--onnx, --config and --allow-pickle do not go with --stream",
            why="a stream reads directories of safetensors, and an export needs a whole model in memory",
            remedy="leave them out",
        )
    from retrofit.streaming.streamed_verification import verify_directory

    with working(arguments.debug) as progress:
        report = verify_directory(arguments.model, arguments.against, progress)
    return show(report)


def show(report: Report) -> int:
    """The report is on stdout; 0 where every check held, 1 where one failed."""
    print_table(row for check in report.checks for row in check_rows(check))
    outcomes = Counter(check.status for check in report.checks)
    counts = ", ".join(f"{outcomes[status]} {status}" for status in ("passed", "failed", "skipped") if outcomes[status])
    print(f"{counts} on {report.coverage}" if report.inputs else counts)
    return 0 if report.ok else 1


def check_rows(check: CheckResult) -> Iterator[tuple[str, ...]]:
    """A check with its outcome, the seconds it took and what it measured; below, the site to blame or the reason it was skipped."""
    yield check.name, check.status, f"{check.seconds:.1f} s", check.measured
    yield from (("", "", "", line) for line in check.why.splitlines() if line)
