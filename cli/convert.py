"""`retrofit convert`: a model in any form as a Hugging Face directory, or in another form, its weights unpacked."""

from __future__ import annotations

import argparse
from pathlib import Path

from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import GRAPHS, beside, check_model_output, default_output, write_model
from retrofit.cli.parser import Subparsers, add_model_arguments, require_path
from retrofit.cli.progress import working
from retrofit.cli.tables import print_table
from retrofit.storage.file_names import is_file_name

EXAMPLES = """\
  retrofit convert model.gguf -o model/         config, weights as floating-point numbers, tokenizer
  retrofit convert quantized/ -o model/         the same of a directory that a quantizer packed
  retrofit convert model.pt -o model/
  retrofit convert model.onnx -o model.pt2      a graph, which trains; a directory cannot hold one
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="write a model in another form: a GGUF file as a directory",
        description="Write a model as a Hugging Face directory, or in the form that OUT names, its weights unpacked.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        help="a directory, a .pt, .pt2 or .onnx file (default: next to MODEL)",
    )
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The model is on disk in its new form and an account of it on stdout."""
    source = require_path(arguments.model)
    graph = source.suffix in GRAPHS
    output = arguments.output or (default_output(source, ["converted"]) if graph else beside(source, "converted"))
    check_model_output(output, arguments.force, source)
    if output.exists() and output.resolve() == source.resolve():
        raise UsageError(f"{output} is MODEL itself", why="it would be replaced while it is read", remedy="name another -o")

    import torch

    from retrofit.pipeline.replaying import recipe
    from retrofit.storage.checkpoint import load, require_savable
    from retrofit.storage.companions import companion_files
    from retrofit.surgery.dequantization import dequantize

    place = arguments.config or source
    if place.is_dir() and not is_file_name(output):
        companion_files(place)  # raises before any work
    with working(arguments.debug) as progress:
        progress(f"reading {source}")
        model = dequantize(load(source, config=arguments.config, allow_pickle=arguments.allow_pickle))
        require_savable(model, output)
        progress(f"writing {output}")
        write_model(model, place, output, arguments.force)
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in model.parameters()})
    rows = [
        ("model", type(model).__name__ if not isinstance(model, torch.fx.GraphModule) else "a graph"),
        ("parameters", f"{sum(one.numel() for one in model.parameters()):,} in {', '.join(dtypes)}"),
    ]
    if applied := recipe(model):
        rows.append(("passes", ", ".join(one.spec() for one in applied)))
    if not is_file_name(output):
        tokenizer = any((output / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
        rows.append(("tokenizer", "with it" if tokenizer else f"none: there is none in {place}"))
    print_table([*rows, ("result", str(output))])
    return 0
