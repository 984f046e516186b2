"""`retrofit export`: a model on disk as ONNX files next to it, or as an architecture of transformers."""

from __future__ import annotations

import argparse
from pathlib import Path

from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import beside, check_model_output, write_model
from retrofit.cli.parser import Subparsers, add_model_arguments, require_path
from retrofit.cli.progress import working
from retrofit.cli.tables import print_table
from retrofit.errors import first_few
from retrofit.pipeline.accounts import listed
from retrofit.storage.file_names import is_file_name

EXAMPLES = """\
  retrofit export model.pt                      writes model.onnx
  retrofit export t5_dir/ -o t5.onnx            writes encoder_t5.onnx, decoder_t5.onnx, decoder_with_past_t5.onnx
  retrofit export model.pt --weights int8       a quarter of the size, faster where reading weights takes the time
  retrofit export model.shared-moe/ --native    writes model.shared-moe.native/: a Mixtral, say, without any recipe
"""
CHOSEN = "the nearest"  # of `--native` without an architecture


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a model as ONNX, or as an architecture of transformers",
        description="Write a model as ONNX files; with --native as an architecture of transformers that computes the same.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="a .onnx file; for --native a directory (default: next to MODEL)"
    )
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
    parser.add_argument(
        "--native",
        metavar="ARCHITECTURE",
        nargs="?",
        const=CHOSEN,
        help="no ONNX: a directory of an architecture with mixtures (mixtral, qwen2_moe, …; default: the nearest that fits)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The ONNX files, or the native directory, are on disk and an account of them on stdout."""
    model = require_path(arguments.model)
    if arguments.native is not None:
        return run_native(arguments, model)
    output = arguments.output or beside(model, "onnx")

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


def run_native(arguments: argparse.Namespace, model: Path) -> int:
    """The model is on disk as an architecture of transformers, and an account of it on stdout."""
    if arguments.cache != "auto" or arguments.no_fuse or arguments.weights is not None:
        raise UsageError(
            "--cache, --no-fuse and --weights do not go with --native", why="they are about ONNX files", remedy="leave them out"
        )
    output = check_model_output(arguments.output or beside(model, "native"), arguments.force)
    if is_file_name(output):
        raise UsageError(f"{output} cannot hold a native form", why="that is a directory", remedy="name a directory with -o")

    from retrofit.native.native_form import native_form
    from retrofit.storage.checkpoint import load

    with working(arguments.debug) as progress:
        progress(f"reading {model}")
        loaded = load(model, config=arguments.config, allow_pickle=arguments.allow_pickle)
        form = native_form(loaded, None if arguments.native == CHOSEN else arguments.native, progress)
        progress(f"writing {output}")
        write_model(form.model, arguments.config or model, output, arguments.force)
    rows = [
        ("architecture", f"{form.architecture}, {type(form.model).__name__}"),
        ("config", form.options),
        ("outputs", f"the model's: {form.measured}"),
    ]
    if form.idle:
        rows.append(("at random", f"{first_few(form.idle, 4)}: without effect while others are zero"))
    if form.zeros:
        rows.append(("at zero", f"{first_few(form.zeros, 4)}: the model has nothing for them"))
    if form.copied:
        rows.append(("copied", f"{form.copied:,} elements that layers of the model share"))
    print_table([*rows, ("result", str(output))])
    return 0
