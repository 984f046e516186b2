"""`retrofit plan`: chooses passes, settings and layers that reach a target, and writes them as a recipe file."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.cli.failures import UsageError, exit_code, report
from retrofit.cli.outputs import beside, check_output
from retrofit.cli.parser import Subparsers, add_model_arguments, require_path, seed
from retrofit.cli.pass_options import gather_passes
from retrofit.cli.terminal import print_table, printable, working
from retrofit.passbase.protocol import make_pass

if TYPE_CHECKING:
    from retrofit.passbase.protocol import AnyPass
    from retrofit.planning.model_plan import ModelPlan
    from retrofit.planning.targets import Target

EXAMPLES = """\
A target is "decode 1.5x" (or prefill: speed relative to the dense model), "memory 0.7x" (or train: relative to what the dense
model takes), "loss +0.05" (nats per token), or several limits in one, "decode 1.3x, memory 0.9x". Candidates are the settings that
the passes propose, or those of --pass. An interrupted command continues when it is run again.

  retrofit plan model/ --calibrate text.txt --target "decode 1.5x"                  writes model.plan.json and model.plan.png
  retrofit plan model/ --calibrate text.txt --target "loss +0.05" --pass sparse-ffn
  retrofit apply model/ --calibrate text.txt --recipe model.plan.json
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="search for passes, settings and layers that meet a target",
        description="Measure candidates on this machine and choose passes, settings and layers that meet a target.",
        epilog=EXAMPLES,
    )
    parser.gather = gather_passes
    parser.add_argument("--pass", metavar="NAME", help="candidate pass, followed by its options, or as altup(k=2) (repeatable)")
    add_model_arguments(parser)
    parser.add_argument("--calibrate", metavar="TEXT", type=Path, nargs="+", action="extend", required=True, help="text files")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="tokenizer directory (default: MODEL)")
    parser.add_argument(
        "--target", metavar="TARGET", action="append", required=True, help="target, see below (repeatable: one plan each)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="recipe file (default: next to MODEL)")
    parser.add_argument("--force", action="store_true", help="overwrite existing outputs and measurements of another model or text")
    parser.add_argument("--tokens", metavar="N", type=int, help="calibration tokens (default: 16384; 8192 from 20M parameters on)")
    parser.add_argument(
        "--minutes", metavar="M", type=float, help="time limit; the best plan found by then is written (default: none)"
    )
    parser.add_argument("--no-measure", action="store_true", help="do not apply and measure the chosen recipe")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="random seed (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the recipe files and the picture; print a table about them, and on stderr the targets out of reach."""
    began = time.monotonic()
    from retrofit.planning.targets import parse_targets

    require_path(arguments.model)
    for text in arguments.calibrate:
        if not text.exists():
            raise UsageError(f"--calibrate {text}: no such file or directory", remedy="check the path")
    if arguments.minutes is not None and not arguments.minutes > 0:
        raise UsageError(f"--minutes {arguments.minutes:g}", why="must be positive", remedy="use a number > 0")
    if arguments.tokens is not None and arguments.tokens < 1:
        raise UsageError(f"--tokens {arguments.tokens}", why="must be at least 1", remedy="use an integer ≥ 1")
    targets = parse_targets(arguments.target)
    candidates = named_candidates(arguments)
    output: Path = arguments.output or beside(arguments.model, "plan.json")
    files = output_files(output, targets)
    picture = output.with_suffix(".png")
    if output.suffix in (".png", ".measured"):
        raise UsageError(f"-o {output}", why="that name is taken by another output", remedy="name a .json file")
    for file in (*files, picture):
        check_output(file, arguments.force)
    folder = output.with_suffix(".measured")

    from retrofit.passbase.calibration import calibration_windows
    from retrofit.passbase.tokenization import read_texts, read_tokenizer, reading, text_codec
    from retrofit.planning.model_plan import draw_front
    from retrofit.planning.planner import plan
    from retrofit.storage.checkpoint import load
    from retrofit.storage.companions import tokenizer_place

    texts = read_texts(arguments.calibrate)
    try:
        with working(arguments.debug) as progress:
            progress(f"reading {arguments.model}")
            place = arguments.tokenizer or tokenizer_place(arguments.config or arguments.model)
            tokenizer = read_tokenizer(place, required=arguments.tokenizer is not None)
            model = load(arguments.model, config=arguments.config, allow_pickle=arguments.allow_pickle)
            windows = calibration_windows(model, texts, tokenizer)
            read = reading(text_codec(model, tokenizer), windows)
            spent = (time.monotonic() - began) / 60
            found = plan(
                model,
                windows,
                arguments.target,
                passes=candidates,
                tokenizer=tokenizer,
                folder=folder,
                tokens=arguments.tokens,
                minutes=None if arguments.minutes is None else arguments.minutes - spent,
                measure=not arguments.no_measure,
                seed=arguments.seed,
                force=arguments.force,
                progress=progress,
            )
    except KeyboardInterrupt as interruption:
        print(printable(f"retrofit: interrupted: run the same command again to continue from {folder}"), file=sys.stderr)
        return exit_code(interruption)
    written = dict(zip(targets, files, strict=True))
    for planned in found.planned:
        found.save(planned, written[planned.target], force=arguments.force)
    draw_front(picture, found, force=arguments.force)
    if arguments.json:
        print(json.dumps([found.to_dict(planned) for planned in found.planned], indent=2))
    else:
        print_plans(found, written, picture, read)
        first = shlex.join(["--calibrate", str(arguments.calibrate[0]), "--recipe", str(files[0])])
        if found.planned:
            print_table([("next", f"retrofit apply {shlex.quote(str(arguments.model))} {first}")])
    for error in found.unreached.values():
        report(error, sys.stderr)
    return max((exit_code(error) for error in found.unreached.values()), default=0)


def named_candidates(arguments: argparse.Namespace) -> list[AnyPass | str] | None:
    """Return the passes on the command line; a name without options means the settings that the pass proposes.

    Returns None for all passes.
    """
    found: list[AnyPass | str] = []
    for named in arguments.passes:
        if not isinstance(named, tuple):
            raise UsageError("plan takes no --recipe", why="it writes one", remedy="name candidates with --pass")
        name, options = named
        found.append(make_pass(name, options) if options else name)
    return found or None


def output_files(output: Path, targets: tuple[Target, ...]) -> list[Path]:
    """Return the recipe file of each target.

    `output`, or for several targets one file each, e.g. `model.plan.decode-1.5x.json`.
    """
    if len(targets) == 1:
        return [output]
    words = [re.sub(r"[^a-z0-9.]+", "-", str(target)) for target in targets]
    return [output.with_name(f"{output.stem}.{word}{output.suffix}") for word in words]


def print_plans(found: ModelPlan, files: Mapping[Target, Path], picture: Path, read: str) -> None:
    """Print each plan as a table, then the candidates, what was not tried, how the text was read, and the paths of the results."""
    from retrofit.planning.model_plan import candidate_rows, rows_of

    for planned in found.planned:
        print_table([*rows_of(found, planned), ("recipe file", str(files[planned.target])), ("", "")])
    candidates = [": ".join(row) for row in candidate_rows(found.uniform, found.main)]
    left_out = [f"{name}: {why}" for name, why in found.left_out.items()]
    print_table(
        [
            *(("in all layers" if not number else "", text) for number, text in enumerate(candidates)),
            *(("left out" if not number else "", text) for number, text in enumerate(left_out)),
            *(("note" if not number else "", text) for number, text in enumerate(found.notes)),
            ("text read", read),
            ("picture", str(picture)),
        ]
    )
