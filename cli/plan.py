"""`retrofit plan`: choose passes, settings and layers that meet a target, and write them as a recipe file."""

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

from retrofit.cli.failures import UsageError, exit_code, interrupted, report
from retrofit.cli.outputs import beside, check_output
from retrofit.cli.parser import Subparsers, load_model, load_tokenizer, require_path, require_texts, require_tokens
from retrofit.cli.pass_options import gather_passes
from retrofit.cli.terminal import print_table, working
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
    parser.add_model()
    parser.add_texts("--calibrate")
    parser.add_tokenizer()
    parser.add_argument(
        "--target", metavar="TARGET", action="append", required=True, help="target, see below (repeatable: one plan each)"
    )
    force = "overwrite existing outputs and measurements of another model or text"
    parser.add_output("recipe file (default: next to MODEL)", metavar="FILE", force=force)
    parser.add_argument("--tokens", metavar="N", type=int, help="calibration tokens (default: 16384; 8192 from 20M parameters on)")
    parser.add_argument(
        "--minutes", metavar="M", type=float, help="time limit; the best plan found by then is written (default: none)"
    )
    parser.add_argument("--no-measure", action="store_true", help="do not apply and measure the chosen recipe")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_seed()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the recipe files and the picture. Print a report, and on stderr the targets that were not met."""
    began = time.monotonic()
    from retrofit.planning.targets import parse_targets

    require_path(arguments.model)
    require_texts("--calibrate", arguments.calibrate)
    if arguments.minutes is not None and not arguments.minutes > 0:
        raise UsageError(f"--minutes {arguments.minutes:g}", why="must be positive", remedy="use a number > 0")
    require_tokens(arguments.tokens)
    targets = parse_targets(arguments.target)
    candidates = named_candidates(arguments)
    output: Path = arguments.output or beside(arguments.model, "plan.json")
    files = output_files(output, targets)
    picture = output.with_suffix(".png")
    if output.suffix in (".png", ".measured"):
        raise UsageError(f"-o {output}", why="another output has that name", remedy="name a .json file")
    for file in (*files, picture):
        check_output(file, arguments.force)
    folder = output.with_suffix(".measured")

    from retrofit.passbase.calibration import calibration_windows, refuse_short_text
    from retrofit.passbase.tokenization import read_texts, reading, text_codec
    from retrofit.planning.model_plan import draw_front
    from retrofit.planning.planner import plan

    texts = read_texts(arguments.calibrate)
    refuse_short_text(texts, arguments.config or arguments.model, arguments.tokenizer)
    try:
        with working(arguments.debug) as progress:
            tokenizer, model = load_tokenizer(arguments), load_model(arguments, progress=progress)
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
        return interrupted(interruption, f"run the same command again to continue from {folder}")
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
    """Return the passes on the command line, those without options by name, for the settings that they propose; None for all."""
    found: list[AnyPass | str] = []
    for named in arguments.passes:
        if not isinstance(named, tuple):
            raise UsageError("plan takes no --recipe", why="it writes one", remedy="name candidates with --pass")
        name, options = named
        found.append(make_pass(name, options) if options else name)
    return found or None


def output_files(output: Path, targets: tuple[Target, ...]) -> list[Path]:
    """Return the recipe file of each target: `output`, or of several e.g. `model.plan.decode-1.5x.json`."""
    if len(targets) == 1:
        return [output]
    words = [re.sub(r"[^a-z0-9.]+", "-", str(target)) for target in targets]
    return [output.with_name(f"{output.stem}.{word}{output.suffix}") for word in words]


def print_plans(found: ModelPlan, files: Mapping[Target, Path], picture: Path, read: str) -> None:
    """Print each plan as a table, then the candidates, those left out, the tokenizer, and the output paths."""
    from retrofit.planning.model_plan import candidate_rows, rows_of

    for planned in found.planned:
        print_table([*rows_of(found, planned), ("recipe file", str(files[planned.target])), ("", "")])
    lines = {
        "in all layers": [": ".join(row) for row in candidate_rows(found.uniform, found.main)],
        "left out": [f"{name}: {why}" for name, why in found.left_out.items()],
        "note": found.notes,
    }
    rows = [("" if number else title, text) for title, texts in lines.items() for number, text in enumerate(texts)]
    print_table([*rows, ("text read", read), ("picture", str(picture))])
