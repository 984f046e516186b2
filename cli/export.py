"""`retrofit export`: a model on disk as ONNX files next to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from retrofit.cli.parser import Subparsers, add_model_arguments, require_path
from retrofit.cli.progress import working
from retrofit.cli.tables import print_table
from retrofit.pipeline.accounts import listed

EXAMPLES = """\
  retrofit export model.pt                      writes model.onnx
  retrofit export t5_dir/ -o t5.onnx            writes encoder_t5.onnx, decoder_t5.onnx, decoder_with_past_t5.onnx
  retrofit export --weights int8 model.sparse-ffn/  a quarter of the size, faster where reading weights takes the time
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "export", help="write a model as ONNX", description="Write a model as ONNX files.", epilog=EXAMPLES
    )
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="a .onnx file (default: next to MODEL)")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    parser.add_argument(
        "--cache",
        choices=("auto", "past", "none"),
        default="auto",
        help="whether a decoder takes and returns its keys and values (default: auto, where the model has them)",
    )
    parser.add_argument("--no-fuse", action="store_true", help="plain ONNX operators only, none of ONNX Runtime's own")
    parser.add_argument(
        "--weights",
        choices=("int8", "int4"),
        help="pack the weight matrices in so many bits (default: as they are in the model)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The ONNX files are on disk and an account of them on stdout."""
    model = require_path(arguments.model)
    output = arguments.output or model.resolve().with_name(
        f"{model.resolve().stem if model.is_file() else model.resolve().name}.onnx"
    )

    from retrofit.onnx.exporter.export_onnx import export_onnx
    from retrofit.storage.checkpoint import load
    from retrofit.storage.pipeline_directories import is_pipeline, other_modules

    with working(arguments.debug) as progress:
        progress(f"reading {model}")
        loaded = load(model, config=arguments.config, allow_pickle=arguments.allow_pickle)
        exported = export_onnx(
            loaded,
            output,
            arguments.cache,
            fuse=not arguments.no_fuse,
            weights=arguments.weights,
            force=arguments.force,
            progress=progress,
        )
    rows = []
    for file in exported.files:
        rows.append(("result", str(file.path)))
        rows.append(("nodes", f"{file.nodes:,}"))
        rows.extend(listed("fused", (step.name for step in file.steps if step.kept)))
        if file.weights is not None:
            rows.append(("weights", f"{arguments.weights}: {file.weights}"))
        rows.append(("against torch", file.measured if file.parity is None else f"{file.measured}, on other shapes"))
    rows.append(
        (
            "cache",
            "as inputs and outputs" if exported.cached else f"none: {exported.why_no_cache}" if exported.why_no_cache else "none",
        )
    )
    if is_pipeline(model):
        rows.append(("not in the file", f"{', '.join(other_modules(model))}: sentence-transformers runs them afterwards"))
    print_table(rows)
    return 0
