"""`retrofit undo`: the dense model that computes what a retrofitted one does, where there is one."""

from __future__ import annotations

import argparse
from pathlib import Path

from retrofit.anatomy.anatomy import format_change
from retrofit.cli.outputs import check_model_output, default_output, write_model
from retrofit.cli.parser import Subparsers, add_model_arguments, require_path
from retrofit.cli.terminal import print_table, working

EXAMPLES = """\
  retrofit undo model.altup/                    writes model.altup.dense/, where that is the same function
  retrofit undo model.altup.pt -o dense.pt
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "undo",
        help="take the passes off a model, where the dense model computes the same",
        description="Write the dense model that computes what a retrofitted model does; refused where none does.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="where the result goes (default: next to MODEL)")
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the dense model, and print a report of it."""
    source = require_path(arguments.model)
    output = check_model_output(arguments.output or default_output(source, ["dense"]), arguments.force)

    from retrofit.passbase.replaying import recipe, rewritten_part
    from retrofit.storage.checkpoint import load
    from retrofit.undoing.undo import undo

    with working(arguments.debug) as progress:
        progress(f"reading {source}")
        model = load(source, config=arguments.config, allow_pickle=arguments.allow_pickle)
        progress("looking for its dense parameters, and comparing")
        dense = undo(model)
        progress(f"writing {output}")
        write_model(dense, source, output, arguments.force)
    before, after = (sum(one.numel() for one in part.parameters()) for part in (rewritten_part(model), dense))
    print_table(
        [
            ("undone", ", ".join(one.spec() for one in recipe(model) or ())),
            ("parameters", format_change(before, after)),
            ("compared", "the same outputs, whatever was left out"),
            ("result", str(output)),
        ]
    )
    return 0
