"""`retrofit inspect`: the anatomy of a model on disk, as a table, as JSON, as a drawing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from retrofit.cli.parser import Subparsers, add_model_arguments, existing
from retrofit.cli.progress import Progress, quiet
from retrofit.cli.writing import free
from retrofit.runtime.atomic_writes import whole_file


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("inspect", help="show the anatomy of a model", description="Show the anatomy of a model.")
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the anatomy as JSON")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the anatomy into FILE")
    parser.add_argument("--force", action="store_true", help="replace a drawing that exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The anatomy is on stdout and, where asked for, its drawing in a file."""
    existing(arguments.model)
    if arguments.svg is not None:
        free(arguments.svg, arguments.force)

    from retrofit.anatomy.inspection import inspect
    from retrofit.drawing.picture import svg
    from retrofit.storage.checkpoint import load

    with Progress() as progress, quiet(arguments.debug):
        progress(f"reading {arguments.model}")
        model = load(arguments.model, config=arguments.config, allow_pickle=arguments.allow_pickle)
        progress("capturing")
        anatomy = inspect(model)
        drawing = None if arguments.svg is None else svg(anatomy)
    if drawing is not None:
        with whole_file(arguments.svg, force=arguments.force) as file:
            file.write(drawing.encode())
    print(json.dumps(anatomy.to_dict(), indent=2) if arguments.json else anatomy)
    return 0
