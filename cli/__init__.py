"""The command line: `main` runs a command and turns every failure into a message and an exit code.

A command is a function `add_parser(subparsers)`, which sets the default `run`: it takes the arguments and returns an exit code.
Command modules import torch only inside `run`, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

from retrofit.cli.failures import (
    Interruption,
    disconnect,
    exit_code,
    hang_up,
    is_reported_here,
    quieten_wrappers,
    refuse_several,
    report,
)
from retrofit.cli.parser import Parser
from retrofit.errors import RetrofitError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`. Return its exit code: 0 done, 1 verification failed, 2 bad usage or input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before Python began
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show "→" still gets its table
    if "--debug" not in words:
        quieten_wrappers()
    interruption = Interruption()
    try:
        with interruption.unwinding():
            code = dispatch(words)
            disconnect()
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        return hang_up()
    except (Exception, KeyboardInterrupt) as error:
        failure = interruption.received or error
        if is_reported_here(failure):
            if "--debug" in words:
                traceback.print_exc()
            report(failure, sys.stderr)
        return exit_code(failure)


def dispatch(words: list[str]) -> int:
    """Run the command in `words`. Return its exit code."""
    require_package()
    parser = build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    if not arguments.several:
        refuse_several(next(word for word in words if not word.startswith("-")))
    code: int = arguments.run(arguments)
    return code


def require_package() -> None:
    """Raise `RetrofitError` if another distribution has replaced `retrofit/__init__.py`, or its removal deleted that file."""
    import retrofit

    if not hasattr(retrofit, "HOMES"):
        import retrofit_transformers

        if found := retrofit_transformers.conflict():
            raise RetrofitError(found.what, why=found.why, remedy=found.remedy, code="replaced")


def build_parser() -> Parser:
    """Return the parser of every command."""
    from retrofit import __version__
    from retrofit.cli import apply, compare, completion, export, inspect, plan, train, verify

    parser = Parser(prog="retrofit", description="Retrofit trained transformers with efficient-transformer methods.")
    parser.add_argument("--version", action="version", version=f"retrofit {__version__}")
    parser.set_defaults(debug=False, several=False)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    adders = (
        *(apply.add_parser, apply.add_undo_parser, inspect.add_parser, plan.add_parser, verify.add_parser, verify.add_diff_parser),
        *(compare.add_generate_parser, export.add_convert_parser, export.add_parser, export.add_bundle_parser),
        *(train.add_teach_parser, train.add_parser, apply.add_merge_parser, compare.add_parser, inspect.add_passes_parser),
    )
    for add_parser in adders:
        add_parser(subparsers)
    completion.add_parser(subparsers, parser)
    return parser
