"""`retrofit train`: continue pretraining; `retrofit teach`: compute a teacher's predictions for a text and store them."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrofit.cli.failures import exit_code, interrupted
from retrofit.cli.outputs import beside, check_model_output, default_output, name_in_errors
from retrofit.cli.parser import Subparsers, load_model, load_tokenizer, require_path
from retrofit.cli.terminal import is_first, print_table, printable, working
from retrofit.errors import TrainingError
from retrofit.files.atomic_writes import require_place
from retrofit.progress import Progress
from retrofit.training.settings import Settings, flag

EXAMPLES = """\
The objective follows from the model: span corruption for an encoder-decoder, next-token prediction for a causal model, masked
tokens otherwise, a contrastive loss for a sentence-transformers directory. Text is tokenized with the tokenizer of MODEL or
--tokenizer; as bytes if there is none and the model has at most 1,024 ids.

  retrofit train model.pt --data text.txt --steps 200        writes model.trained.pt, its curve and numbers in model.trained.run/
  retrofit train hf_dir/ --data docs/ --steps 1000 --bf16    writes hf_dir.trained/
  retrofit train hf_dir.sparse-ffn/ --teacher hf_dir/ --data docs/ --steps 1000
  torchrun --nproc-per-node 2 -m retrofit.cli train hf_dir/ --data docs/ --steps 1000
  retrofit train model.gguf --data text.txt --steps 200      writes model.trained/, with the tokenizer
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="continue pretraining on text",
        description="Continue a model's pretraining.",
        epilog=EXAMPLES,
    )
    parser.add_model()
    parser.add_texts("--data", "text files, or directories with .txt, .py and .md files")
    parser.add_tokenizer()
    teacher = "dense model to distil from, or its predictions written by retrofit teach"
    parser.add_argument("--teacher", metavar="DENSE", type=Path, help=teacher)
    force = "overwrite an existing output, and its run once this one is finished"
    parser.add_output(metavar="PATH", force=force)
    parser.add_argument("--float32", action="store_true", help="train and save float32 weights")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint of this output")
    for field in dataclasses.fields(Settings):
        add_setting(parser, field)
    parser.set_defaults(run=run, several=True)


def add_setting(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    """Add the option of one field of the settings to the parser; without the option the field keeps its default."""
    text, default = field.metadata["doc"], field.default
    if default is False:
        parser.add_argument(flag(field.name), action="store_true", default=argparse.SUPPRESS, help=text)
        return
    kind = {"int": int, "float": float, "str": str}[str(field.type).removesuffix(" | None")]
    parser.add_argument(
        flag(field.name),
        type=kind,
        metavar=None if kind is str else "N" if kind is int else "X",
        choices=field.metadata.get("choices") or None,
        required=default is dataclasses.MISSING,
        default=argparse.SUPPRESS,
        help=text if default in (dataclasses.MISSING, None) else f"{text} (default: {default})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train the model. Write it, its numbers and its curve, and print a report."""
    given = vars(arguments)
    settings = Settings(**{field.name: given[field.name] for field in dataclasses.fields(Settings) if field.name in given})
    require_path(arguments.model)
    if arguments.teacher is None:
        refuse_what_needs_a_teacher(given)
    refuse_what_has_no_effect(given)
    output = arguments.output or default_output(arguments.model, ["trained"])
    if is_first():
        from retrofit.training.runs import refuse_to_overwrite

        refuse_to_overwrite(output, resume=arguments.resume, force=arguments.force)
        check_model_output(output, arguments.force, arguments.model)

    from retrofit.passbase.tokenization import read_texts
    from retrofit.storage.directories import is_pipeline
    from retrofit.training.continued_pretraining import continue_pretraining

    texts = read_texts(arguments.data)
    try:
        with working(arguments.debug) as progress, name_in_errors(output):
            model, tokenizer = read_model(arguments, progress, several=arguments.teacher is not None)
            teacher = read_teacher(arguments, tokenizer)
            if arguments.float32:
                for network in (model, teacher):
                    cast_to_float32(network)
            result = continue_pretraining(
                model,
                texts,
                settings,
                teacher=teacher,
                tokenizer=tokenizer,
                output=output,
                resume=arguments.resume,
                force=arguments.force,
                progress=progress if is_first() else None,
            )
    except KeyboardInterrupt as interruption:
        return interrupted(interruption, resumption(output)) if is_first() else exit_code(interruption)
    if is_first():
        print(printable(str(result), lines=True))
        if not is_pipeline(arguments.model):
            dense = str(arguments.model) if teacher is None else "DENSE" if isinstance(teacher, Path) else str(arguments.teacher)
            print(printable(f"{'next':<14} retrofit compare {shlex.quote(dense)} {shlex.quote(str(output))} --data TEXT"))
    return 0


def refuse_what_needs_a_teacher(given: Mapping[str, Any]) -> None:
    """Raise `TrainingError` for an option of distillation if there is no teacher."""
    for name in ("distil", "temperature", "dial", "align_lr"):
        if given.get(name):
            raise TrainingError(
                f"--{name.replace('_', '-')} {given[name]} needs a teacher",
                why="without one there is nothing to distil from",
                remedy="add --teacher DENSE, or drop the option",
                option=name,
                code="missing",
            )


def refuse_what_has_no_effect(given: Mapping[str, Any]) -> None:
    """Raise `TrainingError` for an option that has no effect because another one is zero."""
    for name, other in (("eval_every", "eval_fraction"), ("temperature", "distil"), ("align_lr", "align"), ("dial", "anneal")):
        if name in given and given.get(other) == 0:
            value = given[name] if isinstance(given[name], str) else f"{given[name]:g}"
            zero = f"--{other.replace('_', '-')} 0"
            raise TrainingError(
                f"--{name.replace('_', '-')} {value} has no effect with {zero}",
                remedy="drop one of them",
                option=name,
                code="no-effect",
            )


def read_model(arguments: argparse.Namespace, progress: Progress, several: bool = False) -> tuple[Any, Any]:
    """Return the model, which may be a sentence-transformers pipeline, and its tokenizer. `several`: a teacher is read too."""
    from retrofit.storage.directories import is_pipeline, load_pipeline

    progress(f"reading {arguments.model}")
    tokenizer = load_tokenizer(arguments)
    if is_pipeline(arguments.model):
        return load_pipeline(arguments.model), tokenizer
    return load_model(arguments, arguments.model if several else None), tokenizer


def read_teacher(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the teacher, or the folder of its predictions; None without --teacher. Raises `TrainingError` if the tokens differ."""
    if arguments.teacher is None:
        return None
    from retrofit.passbase.tokenization import read_tokenizer
    from retrofit.storage.companions import tokenizer_place
    from retrofit.storage.directories import is_pipeline, load_pipeline
    from retrofit.training.teacher_cache import RECORD

    require_path(arguments.teacher)
    if (arguments.teacher / RECORD).is_file():
        return arguments.teacher
    other = read_tokenizer(tokenizer_place(arguments.teacher), required=False)
    if other is not None and tokenizer is not None and other.get_vocab() != tokenizer.get_vocab():
        raise TrainingError(
            f"{arguments.teacher} has another tokenizer than {arguments.model}",
            why="the two tokenize the text differently",
            remedy="name the dense model that MODEL was made from",
            option="teacher",
            code="other-vocabulary",
        )
    if is_pipeline(arguments.teacher):
        return load_pipeline(arguments.teacher)
    return load_model(arguments, arguments.teacher)


def cast_to_float32(model: Any) -> None:
    """Cast a model's weights to float32. Quantized models and folders of predictions are not changed."""
    from torch import nn

    from retrofit.surgery.dequantization import is_quantized

    if isinstance(model, nn.Module) and not is_quantized(model):
        model.float()


def resumption(output: Path) -> str:
    """Return how to continue an interrupted run: from its last checkpoint, if there is one."""
    from retrofit.training.runs import ALIGNMENT, folder_of, last_checkpoint

    folder = folder_of(output)
    checkpoint = last_checkpoint(folder) or last_checkpoint(folder / ALIGNMENT)
    return "nothing was written" if checkpoint is None else f"{checkpoint} is complete; add --resume to continue from it"


TEACH_EXAMPLES = """\
For each token the K most probable ids are kept, with their probabilities and the sum of the rest. Use the TEXT and --length of the
training runs. An interrupted command continues where it stopped when it is run again.

  retrofit teach model/ --data text.txt -o logits/
  retrofit train model.sparse-ffn/ --teacher logits/ --data text.txt --steps 1000
"""


def add_teach_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "teach",
        help="cache a dense model's predictions for distillation",
        description="Compute a dense model's predictions for a text once, for any number of training runs.",
        epilog=TEACH_EXAMPLES,
    )
    parser.add_model()
    parser.add_texts("--data")
    parser.add_tokenizer()
    force = "overwrite predictions of another model or text"
    parser.add_output("output directory (default: next to MODEL)", metavar="DIR", force=force)
    parser.add_argument("--length", metavar="N", type=int, default=256, help="tokens per window (default: 256)")
    parser.add_argument("--top", metavar="K", type=int, default=64, help="ids kept per token, most probable first (default: 64)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=1.0, help="distillation temperature of the training runs (default: 1)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed of masked tokens (default: 0)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=8, help="windows per forward (default: 8)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    parser.set_defaults(run=run_teach)


def run_teach(arguments: argparse.Namespace) -> int:
    """Write the predictions and print a report."""
    require_path(arguments.model)
    output: Path = arguments.output or beside(arguments.model, "logits")
    require_place(output / "any" if output.is_dir() else output)

    from retrofit.passbase.tokenization import read_texts, text_codec
    from retrofit.training.teaching import teach

    texts = read_texts(arguments.data)
    try:
        with working(arguments.debug) as progress:
            model, tokenizer = read_model(arguments, progress)
            predictions = teach(
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
        return interrupted(interruption, f"run the same command again to continue from {output}")
    facts, read = predictions.facts, text_codec(model, tokenizer).name
    tokens, share = facts.windows * facts.length, predictions.kept_share()
    print_table(
        [
            ["teacher", str(arguments.model)],
            ["data", f"{facts.windows:,} windows of {facts.length} tokens, through {read}"],
            ["kept", f"the {facts.top} most probable of {facts.vocabulary:,} tokens, {share:.2%} of the probability"],
            ["loss", f"{predictions.loss(range(facts.windows)):.4f}"],
            ["size", f"{predictions.size() / 2**20:,.1f} MiB, {predictions.size() / tokens:,.0f} bytes a token"],
            ["predictions", str(output)],
        ]
    )
    return 0
