"""`retrofit teach`: a dense model's predictions for a text on disk, for runs that learn from them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from retrofit.cli.failures import exit_code
from retrofit.cli.outputs import beside
from retrofit.cli.parser import Subparsers, add_model_arguments, require_path
from retrofit.cli.printable import printable
from retrofit.cli.progress import working
from retrofit.cli.tables import print_table

EXAMPLES = """\
Kept of each token are the K most probable ids, their probabilities and the sum of the others. TEXT and --length are those of the
runs that learn from them. An interrupted command, given again, goes on where it stopped.

  retrofit teach model/ --data text.txt -o logits/
  retrofit train model.sparse-ffn/ --teacher logits/ --data text.txt --steps 1000
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "teach",
        help="write a dense model's predictions for a text, for others to learn from",
        description="Write a dense model's predictions for a text.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument("--data", metavar="TEXT", type=Path, nargs="+", action="extend", required=True, help="text files")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="where the tokenizer lies, if not in MODEL")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="where they go (default: next to MODEL)")
    parser.add_argument("--force", action="store_true", help="replace predictions of something else that are there")
    parser.add_argument("--length", metavar="N", type=int, default=256, help="tokens a window (default: 256)")
    parser.add_argument("--top", metavar="K", type=int, default=64, help="most probable ids kept of each token (default: 64)")
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="that of the runs (default: 1)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="what is hidden in the windows (default: 0)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=8, help="windows computed at a time (default: 8)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The predictions are on disk, and a table about them on stdout."""
    require_path(arguments.model)
    output: Path = arguments.output or beside(arguments.model, "logits")

    from retrofit.pipeline.tokenization import read_texts, read_tokenizer, text_codec
    from retrofit.storage.checkpoint import load
    from retrofit.storage.companions import tokenizer_place
    from retrofit.storage.pipeline_directories import is_pipeline, load_pipeline
    from retrofit.training.teaching import teach

    texts = read_texts(arguments.data)
    try:
        with working(arguments.debug) as progress:
            progress(f"reading {arguments.model}")
            place = arguments.tokenizer or tokenizer_place(arguments.config or arguments.model)
            tokenizer = read_tokenizer(place, required=arguments.tokenizer is not None)
            if is_pipeline(arguments.model):
                model = load_pipeline(arguments.model)
            else:
                model = load(arguments.model, config=arguments.config, allow_pickle=arguments.allow_pickle)
            kept = teach(
                model,
                texts,
                output,
                tokenizer=tokenizer,
                length=arguments.length,
                top=arguments.top,
                temperature=arguments.temperature,
                seed=arguments.seed,
                batch_size=arguments.batch_size,
                bf16=arguments.bf16,
                device=arguments.device,
                name=str(arguments.model),
                force=arguments.force,
                progress=progress,
            )
    except KeyboardInterrupt as interruption:
        print(printable(f"retrofit: interrupted: the same command goes on from what is in {output}"), file=sys.stderr)
        return exit_code(interruption)
    facts, read = kept.facts, text_codec(model, tokenizer).name
    print_table(
        [
            ["teacher", str(arguments.model)],
            ["data", f"{facts.windows:,} windows of {facts.length} tokens, through {read}"],
            ["kept", f"the {facts.top} most probable of {facts.vocabulary:,} tokens, {kept.kept_share():.2%} of the probability"],
            ["loss", f"{kept.loss(range(facts.windows)):.4f}"],
            ["size", f"{kept.size() / 2**20:,.1f} MiB, {kept.size() / (facts.windows * facts.length):,.0f} bytes a token"],
            ["predictions", str(output)],
        ]
    )
    return 0
