"""`retrofit verify`: a retrofitted model on disk, checked against what its passes promise and, where given, its dense model."""

from __future__ import annotations

import argparse
from pathlib import Path

from retrofit.cli.parser import Subparsers, add_model_arguments, existing
from retrofit.cli.progress import Progress, quiet


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("verify", help="check a retrofitted model", description="Check a retrofitted model.")
    add_model_arguments(parser)
    parser.add_argument("--against", metavar="DENSE", type=Path, help="the model it was made from: compare the two functions")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The report is on stdout; 0 where every check held, 1 where one failed."""
    existing(arguments.model)
    if arguments.against is not None:
        existing(arguments.against)

    from retrofit.checkpoint import load
    from retrofit.verification import verify

    loading = {"config": arguments.config, "allow_pickle": arguments.allow_pickle}
    with Progress() as progress, quiet(arguments.debug):
        progress(f"reading {arguments.model}")
        model = load(arguments.model, **loading)
        reference = None
        if arguments.against is not None:
            progress(f"reading {arguments.against}")
            reference = load(arguments.against, **loading)
        progress("verifying")
        report = verify(model, reference)
    print(report)
    return 0 if report.ok else 1
