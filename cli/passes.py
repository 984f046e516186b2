"""`retrofit passes`: the passes installed, or one pass with its options."""

from __future__ import annotations

import argparse

from retrofit.cli.parser import Subparsers
from retrofit.cli.pass_options import find_pass
from retrofit.cli.terminal import print_table
from retrofit.passbase.options import format_value, options_of
from retrofit.passbase.protocol import load_pass, pass_names

EXAMPLES = """\
  retrofit passes                               all that are installed
  retrofit passes sparse-ffn                    what it does, the paper, its options
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "passes", help="list the passes, or the options of one", description="List the passes.", epilog=EXAMPLES
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a pass: show its options, their ranges and defaults")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the passes, or the options of one."""
    if arguments.name is None:
        print_table((name, load_pass(name).summary) for name in pass_names())
    else:
        print_pass(arguments.name)
    return 0


def print_pass(name: str) -> None:
    """Print the summary of a pass, its source and its options."""
    kind = find_pass(name)
    start = "\nstart: fitted to the text of apply --calibrate FILE, where it is not exact" if kind.calibrates else ""
    print(f"{name}: {kind.summary}\nsource: {kind.paper}{start}\n")
    options = (
        (f"--{option.replace('_', '-')}", values, format_value(default), doc) for option, values, default, doc in options_of(kind)
    )
    print_table(options, headings=("option", "values", "default", "meaning"))
