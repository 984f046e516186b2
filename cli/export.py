"""`retrofit export`, `convert` and `bundle`: write a model as ONNX or native, in another format, or with its own modelling code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import GRAPHS, beside, check_model_output, default_output, require_companions, write_model
from retrofit.cli.parser import Subparsers, load_model, require_path
from retrofit.cli.terminal import print_table, working
from retrofit.errors import first_few
from retrofit.files.atomic_writes import require_place
from retrofit.files.model_folders import is_file_name
from retrofit.passbase.report_text import listed

EXAMPLES = """\
  retrofit export model.pt                      writes model.onnx
  retrofit export t5_dir/ -o t5.onnx            writes encoder_t5.onnx, decoder_t5.onnx, decoder_with_past_t5.onnx
  retrofit export model.pt --weights int8       a quarter of the size; faster where memory bandwidth limits
  retrofit export model.shared-moe/ --native    writes model.shared-moe.native/, a Mixtral for example
"""
NEAREST = "the nearest"  # value of `--native` without an architecture


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "export",
        help="export to ONNX, or to a transformers architecture",
        description="Export a model to ONNX, or with --native to a transformers architecture that computes the same function.",
        epilog=EXAMPLES,
    )
    parser.add_model()
    path = "a .onnx file, or with --native a directory (default: next to MODEL)"
    parser.add_output(path, force="overwrite existing files")
    parser.add_argument(
        "--cache",
        choices=("auto", "past", "none"),
        default="auto",
        help="key-value cache as inputs and outputs of a decoder (default: auto, if the model has one)",
    )
    parser.add_argument("--no-fuse", action="store_true", help="standard ONNX operators only, no fused ones of ONNX Runtime")
    parser.add_argument("--weights", choices=("int8", "int4"), help="quantize the weight matrices (default: no)")
    parser.add_argument(
        "--native",
        metavar="ARCHITECTURE",
        nargs="?",
        const=NEAREST,
        help="write a mixture-of-experts architecture of transformers (mixtral, qwen2_moe, …; default: the best fit)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the ONNX files or the native directory, and print a report."""
    model = require_path(arguments.model)
    if arguments.native is not None:
        return run_native(arguments, model)
    output = arguments.output or beside(model, "onnx")
    require_place(output)

    from retrofit.onnx.exporter import export_onnx
    from retrofit.storage.directories import is_pipeline, other_modules

    with working(arguments.debug) as progress:
        exported = export_onnx(
            load_model(arguments, progress=progress),
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
    no_cache = f"none: {exported.why_no_cache}" if exported.why_no_cache else "none"
    rows.append(("cache", "as inputs and outputs" if exported.cached else no_cache))
    if is_pipeline(model):
        rows.append(("not in the file", f"{', '.join(other_modules(model))}: sentence-transformers runs them afterwards"))
    print_table(rows)
    return 0


def run_native(arguments: argparse.Namespace, model: Path) -> int:
    """Write the model as an architecture of transformers and print a report."""
    if arguments.cache != "auto" or arguments.no_fuse or arguments.weights is not None:
        what = "--cache, --no-fuse and --weights cannot be combined with --native"
        raise UsageError(what, why="they apply to ONNX files", remedy="drop them")
    output = check_model_output(arguments.output or beside(model, "native"), arguments.force)
    if is_file_name(output):
        what = f"{output} cannot hold a native form"
        raise UsageError(what, why="it is written as a directory", remedy="name a directory with -o")

    from retrofit.native import native_form

    with working(arguments.debug) as progress:
        read = load_model(arguments, progress=progress)
        form = native_form(read, None if arguments.native == NEAREST else arguments.native, progress)
        write_model(form.model, arguments.config or model, output, arguments.force, progress)
    rows = [
        ("architecture", f"{form.architecture}, {type(form.model).__name__}"),
        ("config", form.options),
        ("outputs", f"the model's: {form.measured}"),
    ]
    if form.idle:
        rows.append(("at random", f"{first_few(form.idle, 4)}: without effect while others are zero"))
    if form.zeros:
        rows.append(("at zero", f"{first_few(form.zeros, 4)}: the model has no such parameters"))
    if form.copied:
        rows.append(("copied", f"{form.copied:,} elements that layers of the model share"))
    print_table([*rows, ("result", str(output))])
    return 0


CONVERT_EXAMPLES = """\
  retrofit convert model.gguf -o model/         config, dequantized weights, tokenizer
  retrofit convert quantized/ -o model/         dequantizes a quantized directory
  retrofit convert model.pt -o model/
  retrofit convert model.onnx -o model.pt2      a trainable graph
"""


def add_convert_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="convert between model formats",
        description="Convert a model to a Hugging Face directory, or to the format that OUT names, with dequantized weights.",
        epilog=CONVERT_EXAMPLES,
    )
    parser.add_model()
    parser.add_output("a directory, a .pt, .pt2 or .onnx file (default: next to MODEL)")
    parser.set_defaults(run=run_convert)


def run_convert(arguments: argparse.Namespace) -> int:
    """Write the model in the new format and print a report."""
    source = require_path(arguments.model)
    graph = source.suffix in GRAPHS
    output = arguments.output or (default_output(source, ["converted"]) if graph else beside(source, "converted"))
    check_model_output(output, arguments.force, source)
    if output.exists() and output.resolve() == source.resolve():
        raise UsageError(f"{output} is MODEL itself", why="it would be overwritten while it is read", remedy="choose another -o")

    import torch

    from retrofit.passbase.replaying import recipe
    from retrofit.storage.checkpoint import require_savable
    from retrofit.surgery.dequantization import dequantize

    place = arguments.config or source
    require_companions(place, output)
    with working(arguments.debug) as progress:
        model = dequantize(load_model(arguments, progress=progress))
        require_savable(model, output)
        write_model(model, place, output, arguments.force, progress)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    rows = [
        ("model", type(model).__name__ if not isinstance(model, torch.fx.GraphModule) else "a graph"),
        ("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,} in {', '.join(dtypes)}"),
    ]
    if applied := recipe(model):
        rows.append(("passes", ", ".join(pass_.spec() for pass_ in applied)))
    if not is_file_name(output):
        tokenizer = any((output / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
        rows.append(("tokenizer", "copied" if tokenizer else f"none: {place} has none"))
    print_table([*rows, ("result", str(output))])
    return 0


BUNDLE_EXAMPLES = """\
  retrofit bundle model.altup/                  writes model.altup.bundle/
  retrofit bundle model.altup/ -o shared/       where retrofit is not installed:
                                                AutoModelForCausalLM.from_pretrained("shared", trust_remote_code=True)
"""
FIXES = {
    ".gguf": "rewrite it into a directory, and bundle that: retrofit apply … -o DIR",
    ".pt2": "rewrite the directory of the model whose graph it is, and bundle that: retrofit apply … -o DIR",
    ".onnx": "rewrite the directory of the model that it was exported from, and bundle that: retrofit apply … -o DIR",
}


def add_bundle_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bundle",
        help="write a retrofitted model with its own code, to load without retrofit",
        description="Write a retrofitted model with its own modelling code. Loading it needs torch and transformers only.",
        epilog=BUNDLE_EXAMPLES,
    )
    parser.add_argument("model", metavar="DIR", type=Path, help="directory of a retrofitted transformers model")
    parser.add_output("output path (default: next to DIR)")
    parser.set_defaults(run=run_bundle)


def run_bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle and print a report."""
    model = require_path(arguments.model)
    if not model.is_dir():
        raise UsageError(
            f"{model} is not a directory",
            why="a bundle is made from the directory of a retrofitted transformers model",
            remedy=FIXES.get(model.suffix, "from Python: retrofit.bundle(retrofit.load(path), directory)"),
        )
    output = check_model_output(arguments.output or default_output(model, ["bundle"]), arguments.force)

    from retrofit.bundling import CODE, bundle
    from retrofit.passbase.recipe_storage import BUNDLE

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
