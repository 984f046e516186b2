"""`retrofit apply`: rewrite a model on disk and save the result next to it; `retrofit undo`, `retrofit merge`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofit.anatomy import format_change
from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import check_model_output, default_output, form_for, output_for, require_companions, write_model
from retrofit.cli.parser import MODEL, STREAMS, Subparsers, load_model, load_tokenizer, require_path, require_texts, require_tokens
from retrofit.cli.pass_options import add_pass_arguments, named_passes
from retrofit.cli.terminal import print_table, working
from retrofit.errors import DoesNotFitError, RetrofitError, RetrofitWarning
from retrofit.passbase.protocol import load_pass, pass_names
from retrofit.passbase.report_text import rewrite_rows, separated

if TYPE_CHECKING:
    import torch
    from torch import nn

    from retrofit.passbase.protocol import Recipe
    from retrofit.planning.quality import DenseOutputs, Verdict
    from retrofit.rewriting import Applied


TOKENS = 16_384  # of calibration; benchmarks/sparse_ffn_real.py --tokens measures the effect of more or fewer

EXAMPLES = """\
An option after --pass belongs to that pass. List passes and their options: retrofit passes [NAME]

  retrofit apply --pass altup --k 2 model.pt                 writes model.altup.pt
  retrofit apply --pass altup --k 2 --pass sum hf_dir/       writes hf_dir.altup.sum/
  retrofit apply --pass altup --k 2 model.gguf               writes model.altup/, with the tokenizer
  retrofit apply --recipe passes.txt hf_dir/                 the passes in passes.txt, one per line
  retrofit apply --stream --pass altup --k 2 hf_dir/         a model larger than memory
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "apply", help="rewrite a model with one or more passes", description="Rewrite a model.", epilog=EXAMPLES
    )
    add_pass_arguments(parser)
    parser.add_model()
    parser.add_output(metavar="PATH")
    parser.add_argument(
        "--calibrate", metavar="FILE", type=Path, action="append", help="calibration text for approximate passes (repeatable)"
    )
    parser.add_tokenizer()
    parser.add_argument(
        "--tokens", metavar="N", type=int, help=f"calibration tokens, sampled evenly from the text (default: {TOKENS})"
    )
    parser.add_argument(
        "--stream", action="store_true", help="process the model out of core (safetensors directories larger than memory)"
    )
    parser.add_argument("--dequantize", action="store_true", help="dequantize a quantized model first")
    parser.add_checks()
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--no-verify", action="store_true", help="skip all checks")
    parser.add_seed()
    parser.set_defaults(run=run, json=False)


def run(arguments: argparse.Namespace) -> int:
    """Rewrite the model, save it, and print a summary table."""
    passes = named_passes(arguments)
    if not passes:
        raise UsageError("no pass to apply", remedy="add --pass NAME or --recipe FILE; retrofit passes lists them")
    from retrofit.passbase.running import WeightSizes, refuse_sizes, require_consistent

    require_consistent(passes)
    require_path(arguments.model)
    if not arguments.dequantize:
        refuse_sizes(passes, WeightSizes.on_disk(arguments.model))
    if arguments.calibrate is not None:
        require_calibration(arguments, passes)
    elif arguments.tokens is not None or (arguments.tokenizer is not None and not any(pass_.uses_tokenizer for pass_ in passes)):
        option = "--tokenizer" if arguments.tokens is None else "--tokens"
        raise UsageError(f"{option} without --calibrate", why="no text is read", remedy="drop it, or add --calibrate FILE")
    require_tokens(arguments.tokens)
    if arguments.checks != "all" and (arguments.no_verify or arguments.stream):
        other = "--no-verify" if arguments.no_verify else "--stream"
        why = "nothing is checked" if arguments.no_verify else "--stream chooses its own checks"
        raise UsageError(f"--checks {arguments.checks} cannot be combined with {other}", why=why, remedy="drop one of them")
    output = arguments.output or default_output(arguments.model, [pass_.name for pass_ in passes])
    if arguments.dry_run:
        from retrofit.cli.inspect import print_plan
        from retrofit.passbase.calibration import using_tokenizer
        from retrofit.storage.companions import tokenizer_place

        with using_tokenizer(tokenizer_for(arguments, passes), tokenizer_place(arguments.config or arguments.model)):
            return print_plan(arguments, passes, output)
    check_model_output(output, arguments.force, arguments.model)
    if arguments.stream:
        return run_streamed(arguments, passes, output)

    import torch

    from retrofit.rewriting import apply_reported
    from retrofit.storage.directories import EmbeddingComparison
    from retrofit.surgery.dequantization import dequantize

    source = arguments.config or arguments.model
    require_companions(source, output)
    with working(arguments.debug) as progress:
        model = load_model(arguments, progress=progress)
        if arguments.dequantize:
            model = dequantize(model)
        output = output_for(model, output, arguments.force, chosen=arguments.output is not None)
        text = dense = embedded = verdict = None
        if arguments.calibrate is not None:
            text = read_calibration(arguments, model)
            if not all(pass_.exact for pass_ in passes):
                progress("measuring the dense model on held-out text")
                dense = text.dense_outputs(model)
            embedded = EmbeddingComparison.of(arguments.model, model, arguments.calibrate)
        torch.manual_seed(arguments.seed)
        rewrite = functools.partial(
            apply_reported,
            model,
            *passes,
            calibration=None if text is None else text.fitted,
            tokenizer=tokenizer_for(arguments, passes),
            verify=not arguments.no_verify,
            checks=arguments.checks,
            progress=progress,
        )
        try:
            applied = rewrite(emit=(form := form_for(model, output)))
        except DoesNotFitError:
            if form == "module":
                raise
            applied = rewrite()
        model = applied.model
        if dense is not None and not all(rewrite.exact for rewrite in applied.rewrites):
            progress("measuring the rewritten model on held-out text")
            verdict = warned(dense.verdict(model))
        if (fitting := output_for(model, output, arguments.force, chosen=False)) != output:  # it has become a graph
            if arguments.output is not None:
                warnings.warn(f"{output} cannot hold a graph: the result is {fitting}", RetrofitWarning, stacklevel=2)
            output = fitting
        write_model(model, source, output, arguments.force, progress)
    rows = summary(applied, output, "" if text is None else text.read)
    if embedded is not None:
        rows.insert(-1, ("embeddings", embedded.measured(model)))
    print_table([*rows, *advice(arguments.model, output, applied, verdict)])
    return 0


def run_streamed(arguments: argparse.Namespace, passes: Recipe, output: Path) -> int:
    """Rewrite the model as `run` does, with one site in memory at a time."""
    if arguments.config is not None or arguments.allow_pickle or arguments.dequantize:
        what = "--config, --allow-pickle and --dequantize cannot be combined with --stream"
        raise UsageError(what, why=STREAMS, remedy="drop them")
    from retrofit.passbase.calibration import using_tokenizer
    from retrofit.storage.directories import transformer_folder
    from retrofit.streaming import apply_streamed, model_on_disk
    from retrofit.streaming.source_directory import model_without_weights, require_directory

    with working(arguments.debug) as progress:
        text = verdict = None
        unmeasured = NO_TEXT
        if arguments.calibrate is not None:
            require_directory(arguments.model)
            text = read_calibration(arguments, model_without_weights(transformer_folder(arguments.model)))
        with using_tokenizer(tokenizer_for(arguments, passes), transformer_folder(arguments.model)):
            applied = apply_streamed(
                arguments.model,
                output,
                *passes,
                calibration=None if text is None else text.fitted,
                seed=arguments.seed,
                force=arguments.force,
                verify=not arguments.no_verify,
                progress=progress,
            )
        if text is not None and not all(rewrite.exact for rewrite in applied.rewrites):
            try:
                progress("measuring the dense model on held-out text")
                with model_on_disk(arguments.model, output) as model:
                    dense = text.dense_outputs(model)
                progress("measuring the rewritten model on held-out text")
                with model_on_disk(output, output) as model:
                    verdict = warned(dense.verdict(model))
            except (RetrofitError, OSError) as error:  # the result is already written
                unmeasured = f"not measured on the text: {error}"
    rows = summary(applied, output, "" if text is None else text.read)
    print_table([*rows, *advice(arguments.model, output, applied, verdict, unmeasured)])
    return 0


def warned(verdict: Verdict) -> Verdict:
    """Return the verdict. Warns if the model must be trained before use."""
    if verdict.needs_training:
        warnings.warn(str(verdict), RetrofitWarning, stacklevel=3)
    return verdict


def require_calibration(arguments: argparse.Namespace, passes: Recipe) -> None:
    """Raise `RetrofitError`, before the model is read, if no pass reads the text, or it is missing, empty or too short."""
    if not any(pass_.calibrates for pass_ in passes):
        fitted = ", ".join(name for name in pass_names() if load_pass(name).calibrates)
        raise UsageError("--calibrate: none of the passes needs calibration", why=f"passes that do: {fitted}", remedy="drop it")
    require_texts("--calibrate", arguments.calibrate)
    from retrofit.passbase.calibration import refuse_short_text
    from retrofit.passbase.tokenization import read_texts

    refuse_short_text(read_texts(arguments.calibrate), arguments.config or arguments.model, arguments.tokenizer)


def tokenizer_for(arguments: argparse.Namespace, passes: Recipe) -> Any:
    return load_tokenizer(arguments) if any(pass_.uses_tokenizer for pass_ in passes) else None


@dataclasses.dataclass(frozen=True)
class CalibrationText:
    """A text as windows of token ids, (windows, length): calibration windows and held-out windows."""

    fitted: torch.Tensor
    held_back: torch.Tensor
    kind: str  # "held-out", or "calibration" if the text is too short to hold any back
    tokenizer: Any
    read: str  # description: the tokenizer, and the number of calibration tokens

    def dense_outputs(self, model: nn.Module) -> DenseOutputs:
        """Return the dense model's outputs for the held-out text."""
        from retrofit.planning.quality import DenseOutputs

        return DenseOutputs.of(model, self.held_back, self.tokenizer, text=self.kind)


def read_calibration(arguments: argparse.Namespace, model: nn.Module) -> CalibrationText:
    """Return the tokenized text of the files that --calibrate names."""
    from retrofit.passbase.calibration import calibration_windows
    from retrofit.passbase.tokenization import read_texts, reading, text_codec
    from retrofit.planning.quality import hold_back

    tokenizer = load_tokenizer(arguments)
    windows = calibration_windows(model, read_texts(arguments.calibrate), tokenizer)
    others, held_back = hold_back(windows)
    fitted, words = fitted_on(others, arguments.tokens)
    kind = "held-out" if len(others) < len(windows) else "calibration"
    return CalibrationText(fitted, held_back, kind, tokenizer, f"{reading(text_codec(model, tokenizer), windows)}; {words}")


def fitted_on(windows: torch.Tensor, tokens: int | None) -> tuple[torch.Tensor, str]:
    """Return at least one window, evenly spaced over the text and with about `tokens` tokens in all, and a description."""
    count, length = windows.shape[:2]
    most = min(count, max(1, (tokens or TOKENS) // length))
    kept = windows[[(index + 1) * count // most - 1 for index in range(most)]]
    return kept, f"fitted on {len(kept) * length:,} of {count * length:,} tokens"


def summary(applied: Applied, output: Path, read: str) -> list[tuple[str, str]]:
    """Return the rows of the summary: sites, parameters and FLOPs before and after, checks, omissions, and the output path."""
    from retrofit.checks import CHECKS
    from retrofit.storage.directories import left_out

    rows = separated(rewrite_rows(rewrite) for rewrite in applied.rewrites)
    if read:
        rows.append(("text read", read))
    rows.append(("parameters", format_change(applied.parameters_before, applied.parameters_after)))
    rows.append((f"FLOPs per {applied.unit}", format_change(applied.flops_before, applied.flops_after)))
    checks = applied.report.checks if applied.report is not None else ()
    rows.append(("verified", ", ".join(check.name for check in checks if check.status == "passed") or "nothing"))
    rows.extend(("not verified", f"{check.name}: {check.why}") for check in checks if check.status != "passed")
    made = {check.name for check in checks}
    if made and (others := [name for name in CHECKS if name not in made]):
        rows.append(("not verified", f"{', '.join(others)}: not run (--checks)"))
    if applied.report is not None and applied.report.inputs:
        rows.append(("verified on", applied.report.coverage))
    if dropped := left_out(applied.model):
        rows.append(("left out", f"{', '.join(dropped)}: in the files, but no part of {type(applied.model).__name__}"))
    rows.append(("result", str(output)))
    return rows


NO_TEXT = "no text to measure the loss on"


def advice(
    model: Path, output: Path, applied: Applied, verdict: Verdict | None, unmeasured: str = NO_TEXT
) -> list[tuple[str, str]]:
    """Return rows with the cost of an approximate rewrite, or the reason it was not measured, and the probable next command."""
    dense, result = shlex.quote(str(model)), shlex.quote(str(output))
    train = f"retrofit train {result} --teacher {dense} --data TEXT --steps 1000"
    compare = f"retrofit compare {dense} {result} --data TEXT"
    if applied.unit != "token":
        return [*([("cost", str(verdict))] if verdict is not None else []), ("next", f"retrofit export {result}")]
    if all(rewrite.exact for rewrite in applied.rewrites):
        grew = applied.parameters_after > applied.parameters_before
        return [("next", f"retrofit train {result} --data TEXT --steps 1000" if grew else f"retrofit export {result}")]
    if verdict is not None:
        return [("cost", str(verdict)), ("next", train if verdict.needs_training else compare)]
    checks = applied.report.checks if applied.report is not None else ()
    found = next((f"{check.measured}, on random inputs; " for check in checks if check.name == "function" and check.measured), "")
    return [("cost", f"{found}{unmeasured}"), ("next", compare)]


# ── Undo ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


UNDO_EXAMPLES = """\
  retrofit undo model.altup/                    writes model.altup.dense/
  retrofit undo model.altup.pt -o dense.pt
"""


def add_undo_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "undo",
        help="recover the dense model, where it computes the same function",
        description="Write the dense model of a retrofitted one. Fails where the two compute different functions.",
        epilog=UNDO_EXAMPLES,
    )
    parser.add_model()
    parser.add_output()
    parser.set_defaults(run=run_undo)


def run_undo(arguments: argparse.Namespace) -> int:
    """Write the dense model and print a report."""
    source = require_path(arguments.model)
    output = check_model_output(arguments.output or default_output(source, ["dense"]), arguments.force)

    from retrofit.passbase.replaying import recipe, rewritten_part
    from retrofit.undoing import undo

    with working(arguments.debug) as progress:
        model = load_model(arguments, progress=progress)
        progress("recovering and comparing the dense parameters")
        dense = undo(model)
        write_model(dense, source, output, arguments.force, progress)
    before, after = (sum(parameter.numel() for parameter in part.parameters()) for part in (rewritten_part(model), dense))
    print_table(
        [
            ("undone", ", ".join(pass_.spec() for pass_ in recipe(model) or ())),
            ("parameters", format_change(before, after)),
            ("compared", "the same outputs; input masks, if any, are removed"),
            ("result", str(output)),
        ]
    )
    return 0


# ── Merge ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


MERGE_EXAMPLES = """\
ADAPTER is a directory written by PEFT's save_pretrained.

  retrofit merge adapter/                       into the base of adapter_config.json; writes adapter.merged/
  retrofit merge adapter/ --base model.altup/ -o model.altup.tuned/
"""


def add_merge_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "merge",
        help="merge a LoRA adapter into its base model",
        description="Merge a PEFT adapter into its base model.",
        epilog=MERGE_EXAMPLES,
    )
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="adapter directory")
    parser.add_argument("--base", metavar="MODEL", type=Path, help=f"base model, if moved: {MODEL}")
    parser.add_output("output path (default: next to ADAPTER)")
    parser.set_defaults(run=run_merge)


def run_merge(arguments: argparse.Namespace) -> int:
    """Write the merged model with its recipe and print a report."""
    adapter = require_path(arguments.adapter)
    output = check_model_output(arguments.output or default_output(adapter, ["merged"]), arguments.force)

    from retrofit.adapters import BASE, load_adapted, merge_adapters, read_adapter_config
    from retrofit.differences import require_base_of
    from retrofit.passbase.replaying import recipe
    from retrofit.storage.checkpoint import load

    config = read_adapter_config(adapter)
    base = require_base(arguments.base or config.get(BASE))
    with working(arguments.debug) as progress:
        progress(f"reading {base}")
        model = load(base)
        require_base_of(adapter, model, base)
        progress("merging and comparing")
        merged = merge_adapters(load_adapted(adapter, model))
        write_model(merged, base, output, arguments.force, progress)
    print_table(
        [
            ("model", str(base)),
            ("recipe", ", ".join(pass_.spec() for pass_ in recipe(merged) or ()) or "none: it is a dense model"),
            ("merged", f"{config.get('peft_type', 'adapter')} of {adapter}"),
            ("compared", "the outputs agree with those of the adapted model"),
            ("result", str(output)),
        ]
    )
    return 0


def require_base(named: Any) -> Path:
    """Return the path of the adapter's base model. Raises `UsageError` if it is not on disk."""
    if named and isinstance(named, (str, Path)) and Path(named).exists():
        return Path(named)
    raise UsageError(
        f"the adapter's base model is not at {named}" if named else "the adapter names no base model",
        why="models are read from disk only, never downloaded",
        remedy="name its directory with --base",
    )
