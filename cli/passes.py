"""`retrofit passes`: the passes installed, or one pass with its options."""

from __future__ import annotations

import argparse

from retrofit.cli.parser import Subparsers
from retrofit.cli.pass_options import known_pass
from retrofit.cli.tables import columns
from retrofit.pipeline.options import format_value, options_of
from retrofit.pipeline.registry import load_pass, pass_names


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("passes", help="list the passes, or the options of one", description="List the passes.")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a pass: show its options, their ranges and defaults")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The passes, or the options of one, are on stdout."""
    print(every_pass() if arguments.name is None else one_pass(arguments.name))
    return 0


def every_pass() -> str:
    """Name and summary of each pass installed."""
    return columns((name, load_pass(name).summary) for name in pass_names())


def one_pass(name: str) -> str:
    """What the pass does, where it comes from, and its options: values, default, meaning."""
    kind = known_pass(name)
    options = columns(
        (f"  --{option.replace('_', '-')}", values, format_value(default), doc) for option, values, default, doc in options_of(kind)
    )
    return f"{name}: {kind.summary}\nsource: {kind.paper}\n\noptions (name, values, default, meaning)\n{options}"
