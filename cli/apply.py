"""`retrofit apply`: a model on disk, rewritten by one pass or several, saved next to it; `retrofit undo`, `retrofit merge`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrofit.anatomy import format_change
from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import check_model_output, default_output, write_model
from retrofit.cli.parser import MODEL, STREAMS, Subparsers, add_checks_argument, add_model_arguments, require_path, seed
from retrofit.cli.pass_options import add_pass_arguments, named_passes
from retrofit.cli.terminal import print_table, working
from retrofit.errors import RetrofitError, RetrofitWarning
from retrofit.passbase.protocol import load_pass, pass_names
from retrofit.passbase.report_text import rewrite_rows, separated

if TYPE_CHECKING:
    import torch
    from torch import nn

    from retrofit.passbase.protocol import Recipe
    from retrofit.planning.quality import DenseOutputs, Verdict
    from retrofit.rewriting import Applied


TOKENS = 16_384  # on which passes are fitted: benchmarks/sparse_ffn_real.py --tokens shows the effect of more or fewer

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
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help="output path (default: next to MODEL)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing output")
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        action="append",
        help="calibration text for approximate passes (repeatable)",
    )
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="tokenizer directory (default: MODEL)")
    parser.add_argument(
        "--tokens", metavar="N", type=int, help=f"calibration tokens, sampled evenly from the text (default: {TOKENS})"
    )
    parser.add_argument(
        "--stream", action="store_true", help="process the model out of core (safetensors directories larger than memory)"
    )
    parser.add_argument("--dequantize", action="store_true", help="dequantize a quantized model first")
    add_checks_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--no-verify", action="store_true", help="skip all checks")
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="random seed (default: 0)")
    parser.set_defaults(run=run, json=False)


def run(arguments: argparse.Namespace) -> int:
    """Rewrite the model, save it, and print a summary table."""
    passes = named_passes(arguments)
    if not passes:
        raise UsageError("no pass to apply", remedy="add --pass NAME or --recipe FILE; retrofit passes lists them")
    from retrofit.passbase.running import require_consistent

    require_consistent(passes)
    require_path(arguments.model)
    if arguments.calibrate is not None:
        require_calibration(arguments.calibrate, passes)
    elif arguments.tokens is not None or (arguments.tokenizer is not None and not any(pass_.uses_tokenizer for pass_ in passes)):
        option = "--tokenizer" if arguments.tokens is None else "--tokens"
        raise UsageError(f"{option} without --calibrate", why="no text is read", remedy="drop it, or add --calibrate FILE")
    if arguments.tokens is not None and arguments.tokens < 1:
        raise UsageError(f"--tokens {arguments.tokens}", why="must be at least 1", remedy="use an integer ≥ 1")
    if arguments.checks != "all" and (arguments.no_verify or arguments.stream):
        other = "--no-verify" if arguments.no_verify else "--stream"
        why = "nothing is checked" if arguments.no_verify else "--stream chooses its own checks"
        raise UsageError(f"--checks {arguments.checks} cannot be combined with {other}", why=why, remedy="drop one of them")
    if arguments.dry_run:
        from retrofit.cli.inspect import print_plan
        from retrofit.passbase.calibration import using_tokenizer
        from retrofit.storage.companions import tokenizer_place

        with using_tokenizer(tokenizer_for(arguments, passes), tokenizer_place(arguments.config or arguments.model)):
            return print_plan(arguments, passes)
    output = arguments.output or default_output(arguments.model, [pass_.name for pass_ in passes])
    check_model_output(output, arguments.force, arguments.model)
    if arguments.stream:
        return run_streamed(arguments, passes, output)

    import torch

    from retrofit.files.model_folders import is_file_name
    from retrofit.rewriting import apply_reported
    from retrofit.storage.checkpoint import load
    from retrofit.storage.companions import companion_files
    from retrofit.storage.directories import EmbeddingComparison
    from retrofit.surgery.dequantization import dequantize

    source = arguments.config or arguments.model
    if source.is_dir() and not is_file_name(output):
        companion_files(source)  # raises before any work
    with working(arguments.debug) as progress:
        progress(f"reading {arguments.model}")
        model = load(arguments.model, config=arguments.config, allow_pickle=arguments.allow_pickle)
        if arguments.dequantize:
            model = dequantize(model)
        text, dense = None, None
        if arguments.calibrate is not None:
            text = read_calibration(arguments, model)
            if not all(pass_.exact for pass_ in passes):
                progress("measuring the dense model on text held back")
                dense = text.dense_outputs(model)
        embedded = None if arguments.calibrate is None else EmbeddingComparison.of(arguments.model, model, arguments.calibrate)
        torch.manual_seed(arguments.seed)
        applied = apply_reported(
            model,
            *passes,
            calibration=None if text is None else text.fitted,
            tokenizer=tokenizer_for(arguments, passes),
            verify=not arguments.no_verify,
            checks=arguments.checks,
            progress=progress,
        )
        model = applied.model
        verdict = None
        if dense is not None and not all(rewrite.exact for rewrite in applied.rewrites):
            progress("measuring the rewritten model on text held back")
            verdict = warned(dense.verdict(model))
        progress(f"writing {output}")
        write_model(model, source, output, arguments.force)
    rows = summary(applied, output, "" if text is None else text.read)
    if embedded is not None:
        rows.insert(-1, ("embeddings", embedded.measured(model)))
    print_table([*rows, *advice(arguments.model, output, applied, verdict)])
    return 0


def run_streamed(arguments: argparse.Namespace, passes: Recipe, output: Path) -> int:
    """Return the same, with one site of the model in memory at a time."""
    if arguments.config is not None or arguments.allow_pickle or arguments.dequantize:
        raise UsageError(
            "--config, --allow-pickle and --dequantize cannot be combined with --stream",
            why=STREAMS,
            remedy="drop them",
        )
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
                progress("measuring the dense model on text held back")
                with model_on_disk(arguments.model, output) as model:
                    dense = text.dense_outputs(model)
                progress("measuring the rewritten model on text held back")
                with model_on_disk(output, output) as model:
                    verdict = warned(dense.verdict(model))
            except (RetrofitError, OSError) as error:  # the result is written, and stays
                unmeasured = f"not measured on the text: {error}"
    rows = summary(applied, output, "" if text is None else text.read)
    print_table([*rows, *advice(arguments.model, output, applied, verdict, unmeasured)])
    return 0


def warned(verdict: Verdict) -> Verdict:
    """Return the verdict; warn if the model must be trained before use."""
    if verdict.needs_training:
        warnings.warn(str(verdict), RetrofitWarning, stacklevel=3)
    return verdict


def require_calibration(files: list[Path], passes: Recipe) -> None:
    """Raise `UsageError`, before any work, if a text does not exist or no pass reads it."""
    if not any(pass_.calibrates for pass_ in passes):
        fitted = ", ".join(name for name in pass_names() if load_pass(name).calibrates)
        raise UsageError("--calibrate: none of the passes needs calibration", why=f"passes that do: {fitted}", remedy="drop it")
    for file in files:
        if not file.exists():
            raise UsageError(f"--calibrate {file}: no such file or directory", remedy="check the path")


def tokenizer_for(arguments: argparse.Namespace, passes: Recipe) -> Any:
    """Return the tokenizer that is named or comes with the model, if a pass uses one; else None."""
    from retrofit.passbase.tokenization import read_tokenizer
    from retrofit.storage.companions import tokenizer_place

    if not any(pass_.uses_tokenizer for pass_ in passes):
        return None
    place = arguments.tokenizer or tokenizer_place(arguments.config or arguments.model)
    return read_tokenizer(place, required=arguments.tokenizer is not None)


@dataclasses.dataclass(frozen=True)
class CalibrationText:
    """A text as windows of token ids, (windows, length): to fit on, and held back."""

    fitted: torch.Tensor
    held_back: torch.Tensor
    kind: str  # of the held-out data
    tokenizer: Any
    read: str  # in words: how it was read, and how much of it is used for fitting

    def dense_outputs(self, model: nn.Module) -> DenseOutputs:
        """Return the dense model's outputs for the held-out text."""
        from retrofit.planning.quality import DenseOutputs

        return DenseOutputs.of(model, self.held_back, self.tokenizer, text=self.kind)


def read_calibration(arguments: argparse.Namespace, model: nn.Module) -> CalibrationText:
    """Return the text of the files that --calibrate names, as the model reads it."""
    from retrofit.passbase.calibration import calibration_windows
    from retrofit.passbase.tokenization import read_texts, read_tokenizer, reading, text_codec
    from retrofit.planning.quality import hold_back
    from retrofit.storage.companions import tokenizer_place

    place = arguments.tokenizer or tokenizer_place(arguments.config or arguments.model)
    tokenizer = read_tokenizer(place, required=arguments.tokenizer is not None)
    windows = calibration_windows(model, read_texts(arguments.calibrate), tokenizer)
    others, held_back = hold_back(windows)
    fitted, words = fitted_on(others, arguments.tokens)
    kind = "held-out" if len(others) < len(windows) else "calibration"
    return CalibrationText(fitted, held_back, kind, tokenizer, f"{reading(text_codec(model, tokenizer), windows)}; {words}")


def fitted_on(windows: torch.Tensor, tokens: int | None) -> tuple[torch.Tensor, str]:
    """Return windows of about `tokens` tokens, evenly spaced over the text, at least one, and their amount in words."""
    count, length = windows.shape[:2]
    most = min(count, max(1, (tokens or TOKENS) // length))
    kept = windows[[(index + 1) * count // most - 1 for index in range(most)]]
    return kept, f"fitted on {len(kept) * length:,} of {count * length:,} tokens"


def summary(applied: Applied, output: Path, read: str) -> list[tuple[str, str]]:
    """Return the rows of the summary: sites, parameters and FLOPs before and after, checks and omissions, and the result's path."""
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


NO_TEXT = "no text was given to measure a loss on"


def advice(
    model: Path, output: Path, applied: Applied, verdict: Verdict | None, unmeasured: str = NO_TEXT
) -> list[tuple[str, str]]:
    """Return the cost of an approximate rewrite, or why it was not measured, and the probable next command."""
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
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="output path (default: next to MODEL)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing output")
    parser.set_defaults(run=run_undo)


def run_undo(arguments: argparse.Namespace) -> int:
    """Write the dense model, and print a report of it."""
    source = require_path(arguments.model)
    output = check_model_output(arguments.output or default_output(source, ["dense"]), arguments.force)

    from retrofit.passbase.replaying import recipe, rewritten_part
    from retrofit.storage.checkpoint import load
    from retrofit.undoing import undo

    with working(arguments.debug) as progress:
        progress(f"reading {source}")
        model = load(source, config=arguments.config, allow_pickle=arguments.allow_pickle)
        progress("looking for its dense parameters, and comparing")
        dense = undo(model)
        progress(f"writing {output}")
        write_model(dense, source, output, arguments.force)
    before, after = (sum(parameter.numel() for parameter in part.parameters()) for part in (rewritten_part(model), dense))
    print_table(
        [
            ("undone", ", ".join(pass_.spec() for pass_ in recipe(model) or ())),
            ("parameters", format_change(before, after)),
            ("compared", "the same outputs, whatever was left out"),
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
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="output path (default: next to ADAPTER)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing output")
    parser.set_defaults(run=run_merge)


def run_merge(arguments: argparse.Namespace) -> int:
    """Write the merged model with its recipe, and print a report of it."""
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
        progress("merging, and comparing")
        merged = merge_adapters(load_adapted(adapter, model))
        progress(f"writing {output}")
        write_model(merged, base, output, arguments.force)
    print_table(
        [
            ("model", str(base)),
            ("recipe", ", ".join(pass_.spec() for pass_ in recipe(merged) or ()) or "none: it is a dense model"),
            ("merged", f"{config.get('peft_type', 'adapter')} of {adapter}"),
            ("compared", "the same outputs as with the adapter"),
            ("result", str(output)),
        ]
    )
    return 0


def require_base(named: Any) -> Path:
    """Return the path of the adapter's model.

    Raises `UsageError` if it is not on disk, because an adapter may name anything.
    """
    if named and isinstance(named, (str, Path)) and Path(named).exists():
        return Path(named)
    raise UsageError(
        f"the adapter's base model is not at {named}" if named else "the adapter names no base model",
        why="models are read from disk only, never downloaded",
        remedy="name its directory with --base",
    )
