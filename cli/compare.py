"""`retrofit compare`: compare models on one text; `retrofit generate`: continue a text with a model of any format."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import check_output
from retrofit.cli.parser import Subparsers, config_for, load_model, load_tokenizer, require_path, require_tokens
from retrofit.cli.terminal import print_table, printable, working

if TYPE_CHECKING:
    from retrofit.training.model_comparison import Figures
    from retrofit.training.runs import TrainingRun


EXAMPLES = """\
TEXT should be text that no model was trained on. MODEL is the dense model.

  retrofit compare model/ model.sparse-ffn/ model.sparse-ffn.trained/ --data held_out.txt
  retrofit compare model/ model.sparse-ffn/ --data held_out.txt --picture compared.png
  retrofit compare model/ model.sparse-ffn/ --data held_out.txt --lm-eval my_task --lm-eval-tasks tasks/
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare loss, size and speed with the dense model",
        description="Compare rewritten models with their dense model on held-out text.",
        epilog=EXAMPLES,
    )
    parser.add_model()
    parser.add_argument("others", metavar="OTHER", type=Path, nargs="+", help="models rewritten from MODEL")
    parser.add_texts("--data")
    parser.add_tokenizer()
    parser.add_argument("--length", metavar="N", type=int, default=256, help="tokens per window (default: 256)")
    parser.add_argument(
        "--windows", metavar="N", type=int, default=32, help="maximum windows, sampled evenly from the text (default: 32)"
    )
    parser.add_argument("--lm-eval", metavar="TASK", nargs="+", default=(), help="also run these tasks of lm-evaluation-harness")
    parser.add_argument("--lm-eval-tasks", metavar="DIR", type=Path, help="directory of task descriptions")
    parser.add_argument("--lm-eval-limit", metavar="N", type=int, help="maximum examples per task")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="also plot loss against speed (PNG)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing picture")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the figures, and draw the picture if --picture names a file."""
    paths = [arguments.model, *arguments.others]
    for path in paths:
        require_path(path)
        if paths.count(path) > 1:
            raise UsageError(f"{path} is given twice", why="each model has one column", remedy="name it once")
    if not arguments.lm_eval and (arguments.lm_eval_tasks is not None or arguments.lm_eval_limit is not None):
        raise UsageError("--lm-eval-tasks and --lm-eval-limit without --lm-eval", remedy="name the tasks with --lm-eval TASK")
    if arguments.picture is not None:
        check_output(arguments.picture, arguments.force, ".png")

    from retrofit.passbase.tokenization import read_texts
    from retrofit.training.model_comparison import compare_models, draw_comparison, require_package, task_scores

    if arguments.lm_eval:
        require_package()
    texts = read_texts(arguments.data)
    with working(arguments.debug) as progress:
        tokenizer = load_tokenizer(arguments)
        models = {str(path): load_model(arguments, path, progress) for path in paths}
        figures = compare_models(
            models, texts, tokenizer=tokenizer, length=arguments.length, most=arguments.windows, progress=progress
        )
        if arguments.lm_eval:
            folder, most = arguments.lm_eval_tasks, arguments.lm_eval_limit
            scores = task_scores(models, arguments.lm_eval, tokenizer=tokenizer, folder=folder, most=most, progress=progress)
            figures = [dataclasses.replace(figure, scores=scores[figure.name]) for figure in figures]
    if arguments.picture is not None:
        draw_comparison(arguments.picture, figures, force=arguments.force)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=2))
        return 0
    print_table(rows_of(figures, [run_of(path) for path in paths]))
    print_table([("next", f"retrofit export {shlex.quote(figures[-1].name)}")])
    return 0


def run_of(path: Path) -> TrainingRun | None:
    """Return the run that trained the model; None if its record is not next to the model."""
    from retrofit.errors import TrainingError
    from retrofit.training.runs import TrainingRun

    try:
        return TrainingRun.read(path)
    except TrainingError:
        return None


def rows_of(figures: list[Figures], runs: list[TrainingRun | None]) -> Iterator[list[str]]:
    """Yield a row for each figure, with a column for each model."""
    dense = figures[0]
    yield ["", *(figure.name for figure in figures)]
    yield ["held-out loss, nats a token", *(f"{figure.loss:.4f}" for figure in figures)]
    if dense.bits_per_byte is not None:
        yield ["bits a byte", *(f"{figure.bits_per_byte:.4f}" for figure in figures)]
    yield ["KL from the first, nats a token", "", *(f"{figure.divergence:.4f}" for figure in figures[1:])]
    yield ["same first choice", "", *(f"{figure.agreement:.1%}" for figure in figures[1:])]
    closed = ["" if run is None else run.gap_closed_words for run in runs]
    if any(closed):
        yield ["gap closed in its run", *closed]
    if any(runs):
        yield ["tokens trained on", *("" if run is None else f"{run.tokens:,}" for run in runs)]
    for score in dense.scores:
        yield [score, *(f"{figure.scores[score]:.4f}" for figure in figures)]
    yield ["text", *(figure.text for figure in figures[:1])]
    yield ["parameters", *(f"{figure.parameters:,}" for figure in figures)]
    yield [f"FLOPs per {dense.unit}", *(f"{figure.flops:,}" for figure in figures)]
    yield [
        "memory of a forward, MiB",
        *(f"{figure.memory / 2**20:,.0f} (×{figure.memory / dense.memory:.2f})" for figure in figures),
    ]
    yield ["prefill of a window, ms", *(timing(figure.prefill, dense.prefill) for figure in figures)]
    if dense.decode is not None:
        yield ["a decoded token, ms", *(timing(figure.decode or 0.0, dense.decode) for figure in figures)]


def timing(seconds: float, first: float) -> str:
    return f"{1000 * seconds:.2f} (×{seconds / first:.2f})"


# ── Generate ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


GENERATE_EXAMPLES = """\
Text is tokenized with the tokenizer of MODEL or --tokenizer, else as bytes.

  retrofit generate model.altup/ "The sea is"
  retrofit generate model.gguf "The sea is" --tokens 50 --temperature 0.8
  retrofit generate model.onnx "The sea is" --tokenizer model/       in ONNX Runtime, with its cache
  retrofit generate t5.onnx "translate English to German: the sea" --tokenizer t5/
"""


def add_generate_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate text",
        description="Generate text with a model.",
        epilog=GENERATE_EXAMPLES,
    )
    parser.add_model()
    parser.add_argument("text", metavar="TEXT", help="prompt; for an encoder-decoder, the input of the encoder")
    parser.add_argument("--tokens", metavar="N", type=int, default=32, help="maximum new tokens (default: 32)")
    parser.add_argument("--temperature", metavar="X", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    parser.add_seed()
    parser.add_tokenizer()
    parser.set_defaults(run=run_generate)


def run_generate(arguments: argparse.Namespace) -> int:
    """Print the text with its continuation, then a report of the generation."""
    require_tokens(arguments.tokens)
    if not 0 <= arguments.temperature < math.inf:
        raise UsageError(f"--temperature {arguments.temperature:g}: must be finite and ≥ 0", remedy="use a number ≥ 0")
    if not arguments.text:
        raise UsageError("TEXT is empty", remedy="give a prompt")
    path = arguments.model
    if path.suffix != ".onnx" or not path.with_name(f"decoder_{path.name}").is_file():  # the files of an encoder-decoder
        require_path(path)

    from retrofit.generation import Wanted, continue_text
    from retrofit.storage.companions import tokenizer_place

    with working(arguments.debug) as progress:
        progress(f"generating with {path}")
        generated = continue_text(
            path,
            arguments.text,
            Wanted(arguments.tokens, arguments.temperature, arguments.seed),
            tokenizer=arguments.tokenizer or tokenizer_place(arguments.config or path),
            required=arguments.tokenizer is not None,
            config=config_for(path, arguments),
            allow_pickle=arguments.allow_pickle,
        )
    separator = " → " if generated.translated else ""
    print(printable(f"{generated.prompt}{separator}{generated.text}", lines=True))
    print()
    tokens, seconds = generated.tokens, generated.seconds
    speed = f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.1f} a second"
    print_table([("generated", speed), ("by", generated.how), ("text read", generated.reads)])
    return 0
