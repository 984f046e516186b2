"""`retrofit inspect`: show the anatomy of a model, or the plans of passes for it; `retrofit passes`: list the installed passes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import GRAPHS, check_output, form_for, output_for
from retrofit.cli.parser import STREAMS, Subparsers, load_model, require_path
from retrofit.cli.pass_options import add_pass_arguments, find_pass, named_passes
from retrofit.cli.terminal import print_table, printable, working
from retrofit.files.atomic_writes import whole_file
from retrofit.files.model_folders import EXPORTED
from retrofit.passbase.options import format_value, options_of
from retrofit.passbase.protocol import load_pass, pass_names

if TYPE_CHECKING:
    from torch import nn

    from retrofit.passbase.protocol import Recipe
    from retrofit.progress import Progress


EXAMPLES = """\
An option after --pass belongs to that pass. The model is not changed. Exit code 2: a pass finds no site.

  retrofit inspect model.pt                                  stacks, layers, attentions, feed-forwards, head
  retrofit inspect model.pt --pass altup --k 2               what the pass would rewrite, skip and cost
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show a model's anatomy, or the plan of a pass",
        description="Show a model's anatomy, or with --pass what the passes would rewrite.",
        epilog=EXAMPLES,
    )
    add_pass_arguments(parser)
    parser.add_model()
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--stream", action="store_true", help="do not load weights (models larger than memory)")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the anatomy to FILE")
    parser.add_argument("--force", action="store_true", help="overwrite an existing drawing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the anatomy, or the plans of the passes. Return 2 if a pass finds no site, else 0."""
    passes = named_passes(arguments)
    if passes and arguments.svg is not None:
        raise UsageError(
            "--svg with --pass or --recipe",
            why="--svg draws the model as it is",
            remedy="drop the passes, or apply them first and draw the result",
        )
    if arguments.force and arguments.svg is None:
        raise UsageError("--force has no effect without --svg", why="nothing is written", remedy="drop it, or add --svg FILE")
    require_path(arguments.model)
    return print_plan(arguments, passes) if passes else print_anatomy(arguments)


def print_anatomy(arguments: argparse.Namespace) -> int:
    """Print the anatomy, and draw it if --svg names a file."""
    if arguments.svg is not None:
        check_output(arguments.svg, arguments.force, ".svg")

    from retrofit.anatomy.inspection import inspect

    with working(arguments.debug) as progress:
        model = read_model(arguments, progress)
        progress("capturing")
        anatomy = inspect(model)
        if arguments.svg is not None:
            from retrofit.drawing.picture import svg

            progress("drawing")
            drawing = svg(anatomy)
    if arguments.svg is not None:
        with whole_file(arguments.svg, force=arguments.force) as file:
            file.write(drawing.encode())
    print(json.dumps(anatomy.to_dict(), indent=2) if arguments.json else printable(str(anatomy), lines=True))
    return 0


def read_model(arguments: argparse.Namespace, progress: Progress) -> nn.Module:
    """Return the model, with --stream without its weights."""
    if not arguments.stream:
        return load_model(arguments, progress=progress)
    progress(f"reading {arguments.model}")
    from retrofit.streaming.source_directory import model_without_weights, require_directory

    require_directory(arguments.model)
    if arguments.config is not None or arguments.allow_pickle:
        raise UsageError("--config and --allow-pickle cannot be combined with --stream", why=STREAMS, remedy="drop them")
    model: nn.Module = model_without_weights(arguments.model)
    return model


def print_plan(arguments: argparse.Namespace, passes: Recipe, output: Path | None = None) -> int:
    """Print the plans of the passes and the `output` of `apply`. Return 0 if each pass finds a site, else 2."""
    from retrofit.preview import plan_of

    with working(arguments.debug) as progress:
        model = read_model(arguments, progress)
        if output is not None and not arguments.stream:
            output = output_for(model, output, force=True, chosen=arguments.output is not None)
        plan = plan_of(model, *passes, progress=progress)
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        rows = plan.rows()
        if output is not None:
            becomes_graph = plan.becomes_graph or form_for(model, output) == "graph"
            named = output.with_suffix(EXPORTED) if becomes_graph and output.suffix not in GRAPHS else output
            rows.append(("would write", f"{named}{', a graph module' if becomes_graph else ''}"))
        print_table(rows)
    if not plan.fits:
        refused = ", ".join(pass_.name for pass_, planned in zip(passes, plan.passes, strict=True) if not planned.fits)
        print(f"retrofit: {refused}: apply would refuse, no site in the model fits; the plan has the reasons", file=sys.stderr)
    return 0 if plan.fits else 2


# ── Passes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


PASSES_EXAMPLES = """\
  retrofit passes                               all installed passes
  retrofit passes sparse-ffn                    description, paper, options
"""


def add_passes_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "passes", help="list the passes, or one pass's options", description="List the passes.", epilog=PASSES_EXAMPLES
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show this pass's options, ranges and defaults")
    parser.set_defaults(run=list_passes)


def list_passes(arguments: argparse.Namespace) -> int:
    """Print the passes, or the options of one."""
    if arguments.name is None:
        print_table((name, load_pass(name).summary) for name in pass_names())
    else:
        print_pass(arguments.name)
    return 0


def print_pass(name: str) -> None:
    """Print a pass's summary, paper and options."""
    kind = find_pass(name)
    start = "\nstart: calibrated with apply --calibrate FILE, unless exact" if kind.calibrates else ""
    print(f"{name}: {kind.summary}\nsource: {kind.paper}{start}\n")
    options = (
        (f"--{option.replace('_', '-')}", values, format_value(default), doc) for option, values, default, doc in options_of(kind)
    )
    print_table(options, headings=("option", "values", "default", "meaning"))
