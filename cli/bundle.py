"""`retrofit bundle`: a retrofitted directory with its own modelling code, for where retrofit is not installed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import check_model_output, default_output
from retrofit.cli.parser import Subparsers, require_path
from retrofit.cli.progress import working
from retrofit.cli.tables import print_table

EXAMPLES = """\
  retrofit bundle model.altup/                  writes model.altup.bundle/
  retrofit bundle model.altup/ -o shared/       where retrofit is not installed:
                                                AutoModelForCausalLM.from_pretrained("shared", trust_remote_code=True)
"""
WAYS = {
    ".gguf": "rewrite it into a directory, and bundle that: retrofit apply … -o DIR",
    ".pt2": "rewrite the directory of the model that it holds the graph of, and bundle that: retrofit apply … -o DIR",
    ".onnx": "rewrite the directory of the model that it was exported from, and bundle that: retrofit apply … -o DIR",
}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bundle",
        help="write a retrofitted model with its own code, for where retrofit is not installed",
        description="Write a retrofitted model with its own modelling code, which needs torch and transformers alone.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="DIR", type=Path, help="the directory of a retrofitted transformers model")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="where the bundle goes (default: next to DIR)")
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The bundle is on disk and an account of it on stdout."""
    model = require_path(arguments.model)
    if not model.is_dir():
        raise UsageError(
            f"{model} is no directory",
            why="a bundle is made of the Hugging Face directory of a retrofitted transformers model",
            remedy=WAYS.get(model.suffix, "from Python: retrofit.bundle(retrofit.load(path), directory)"),
        )
    output = check_model_output(arguments.output or default_output(model, ["bundle"]), arguments.force)

    from retrofit.bundling.bundle import CODE, bundle
    from retrofit.pipeline.recipe_storage import BUNDLE

    with working(arguments.debug) as progress:
        progress(f"bundling {model}")
        bundle(model, output, force=arguments.force)
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    autos = [name for name in config["auto_map"] if name != "AutoConfig"]
    lines = (output / CODE).read_text(encoding="utf-8").count("\n")
    print_table(
        [
            ("passes", ", ".join(config[BUNDLE]["recipe"])),
            ("code", f"{CODE}, {lines:,} lines: read it before you share it"),
            ("loads with", f"{', '.join(autos)}: from_pretrained(…, trust_remote_code=True)"),
            ("result", str(output)),
        ]
    )
    return 0
