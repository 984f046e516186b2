"""`retrofit verify`: a retrofitted model on disk, checked against what its passes promise and, where given, its dense model.

An ONNX file is checked against the model it was exported from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from retrofit.cli.failures import UsageError
from retrofit.cli.parser import Subparsers, add_model_arguments, existing
from retrofit.cli.progress import Progress, quiet


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("verify", help="check a retrofitted model", description="Check a retrofitted model.")
    add_model_arguments(parser)
    parser.add_argument("--against", metavar="DENSE", type=Path, help="the model it was made from: compare the two functions")
    parser.add_argument("--onnx", action="store_true", help="also export to ONNX and compare; takes longer than all other checks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The report is on stdout; 0 where every check held, 1 where one failed."""
    existing(arguments.model)
    if arguments.against is not None:
        existing(arguments.against)

    is_onnx = arguments.model.suffix == ".onnx"
    if is_onnx and arguments.against is None:
        raise UsageError(
            "an ONNX file is verified against a model", why="it makes no promises itself", remedy="name the model with --against"
        )

    from retrofit.checks.verification import CHECKS, verify, verify_onnx
    from retrofit.storage.checkpoint import load

    loading = {"config": arguments.config, "allow_pickle": arguments.allow_pickle}
    with Progress() as progress, quiet(arguments.debug):
        reference = None
        if arguments.against is not None:
            progress(f"reading {arguments.against}")
            reference = load(arguments.against, **loading)
        if reference is not None and is_onnx:
            progress("verifying")
            report = verify_onnx(arguments.model, reference)
        else:
            progress(f"reading {arguments.model}")
            model = load(arguments.model, **loading)
            progress("verifying")
            report = verify(model, reference, checks=(*CHECKS, *(["onnx"] if arguments.onnx else [])))
    print(report)
    return 0 if report.ok else 1
