"""`retrofit generate`: a text continued by a model on disk, whatever its form."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from retrofit.cli.failures import UsageError
from retrofit.cli.parser import Subparsers, add_model_arguments, config_for, require_path, seed
from retrofit.cli.terminal import print_table, printable, working

EXAMPLES = """\
Text is read through the tokenizer in MODEL or --tokenizer, else as bytes. The likeliest token is taken, or one is drawn.

  retrofit generate model.altup/ "The sea is"
  retrofit generate model.gguf "The sea is" --tokens 50 --temperature 0.8
  retrofit generate model.onnx "The sea is" --tokenizer model/       in ONNX Runtime, with its cache
  retrofit generate t5.onnx "translate English to German: the sea" --tokenizer t5/
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="let a model go on from a text",
        description="Print how a model goes on from a text.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument("text", metavar="TEXT", help="what it goes on from; what an encoder reads")
    parser.add_argument("--tokens", metavar="N", type=int, default=32, help="tokens at most (default: 32)")
    parser.add_argument(
        "--temperature", metavar="X", type=float, default=0.0, help="draw tokens at this temperature (default: 0, the likeliest)"
    )
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="seed of the draws (default: 0)")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="where the tokenizer lies, if not in MODEL")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the text with its continuation, and below it how it was generated."""
    if arguments.tokens < 1:
        raise UsageError(f"--tokens {arguments.tokens} is below 1", remedy="give at least 1")
    if not 0 <= arguments.temperature < math.inf:
        raise UsageError(f"--temperature {arguments.temperature:g} is no temperature", remedy="give 0 or more")
    if not arguments.text:
        raise UsageError("TEXT is empty", remedy="give a text to go on from")
    path = arguments.model
    if path.suffix != ".onnx" or not path.with_name(f"decoder_{path.name}").is_file():  # the files of an encoder-decoder
        require_path(path)

    from retrofit.generation import Wanted, continue_text
    from retrofit.storage.companions import tokenizer_place

    with working(arguments.debug) as progress:
        progress(f"generating with {path}")
        made = continue_text(
            path,
            arguments.text,
            Wanted(arguments.tokens, arguments.temperature, arguments.seed),
            tokenizer=arguments.tokenizer or tokenizer_place(arguments.config or path),
            required=arguments.tokenizer is not None,
            config=config_for(path, arguments),
            allow_pickle=arguments.allow_pickle,
        )
    print(printable(f"{made.prompt} → {made.text}" if made.translated else f"{made.prompt}{made.text}", lines=True))
    print()
    rows = [
        ("generated", f"{made.tokens:,} tokens in {made.seconds:.2f} s, {made.tokens / made.seconds:,.1f} a second"),
        ("by", made.how),
        ("text read", made.reads),
    ]
    print_table(rows)
    return 0
