"""An argument parser whose errors suggest the nearest known word; the arguments that commands share, and the objects they name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from retrofit.cli.failures import UsageError
from retrofit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from retrofit.progress import Progress

MODEL = "a .pt checkpoint, a Hugging Face or sentence-transformers directory, a .gguf, .pt2 or .onnx file"

STREAMS = "--stream reads a safetensors directory with its own config"

Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"

Gather: TypeAlias = Callable[[list[str], Sequence[str]], tuple[list[str], dict[str, Any]]]


class Parser(argparse.ArgumentParser):
    """A parser with `--debug` and without abbreviations. Raises `UsageError`.

    `gather`, if set, receives the arguments first, with the parser's option strings. It returns the arguments left to parse and
    the values that it read from the others.
    """

    gather: Gather | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        gathered: dict[str, Any] = {}
        if self.gather is not None and args is not None:
            args, gathered = self.gather(list(args), tuple(self._option_string_actions))
        namespace, extra = super().parse_known_args(args, namespace)
        if extra:
            self.refuse(extra[0], namespace)
        for name, value in gathered.items():
            setattr(namespace, name, value)
        return namespace, extra

    def refuse(self, argument: str, parsed: argparse.Namespace) -> NoReturn:
        """Raise `UsageError` for an unknown argument, with the nearest option or the values of the positional arguments."""
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            raise UsageError(f"unknown option {name}", remedy=suggest(name, self._option_string_actions, self.see()))
        taken = ", ".join(
            f"{action.metavar} is {getattr(parsed, action.dest)}"
            for action in self._actions
            if not action.option_strings and action.nargs is None and action.metavar and hasattr(parsed, action.dest)
        )
        raise UsageError(f"unexpected argument {argument!r}", why=taken, remedy=self.see())

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = action.option_strings[0] if action.option_strings else action.metavar or action.dest
            choices = list(map(str, action.choices))
            remedy = suggest(str(value), choices, f"choose one of {', '.join(choices)}")
            raise UsageError(f"{name}: unknown value {value!r}", remedy=remedy)

    def error(self, message: str) -> NoReturn:
        if "MODEL" not in message:
            raise UsageError(message, remedy=self.see())
        greedy = " and ".join(option for option, action in self._option_string_actions.items() if action.nargs in ("+", "?"))
        order = f"; put it before options that accept several values ({greedy})" if greedy else ""
        raise UsageError(message, remedy=f"MODEL is {MODEL}{order}; {self.see()}")

    def see(self) -> str:
        return f"see {self.prog} --help"

    # Arguments that commands share.

    def add_model(self) -> None:
        """Add MODEL and the options for loading it."""
        self.add_argument("model", metavar="MODEL", type=Path, help=MODEL)
        self.add_argument("--config", metavar="DIR", type=config_place, help="directory of the config, for a bare state dict")
        self.add_argument(
            "--allow-pickle", action="store_true", help="unpickle MODEL, which can run any code: only for files you trust"
        )

    def add_output(
        self,
        text: str = "output path (default: next to MODEL)",
        *,
        metavar: str = "OUT",
        force: str = "overwrite an existing output",
    ) -> None:
        """Add -o and --force, with these help texts."""
        self.add_argument("-o", "--output", metavar=metavar, type=Path, help=text)
        self.add_argument("--force", action="store_true", help=force)

    def add_tokenizer(self) -> None:
        self.add_argument("--tokenizer", metavar="DIR", type=Path, help="tokenizer directory (default: MODEL)")

    def add_texts(self, option: str, text: str = "text files") -> None:
        """Add a required option that names text files."""
        self.add_argument(option, metavar="TEXT", type=Path, nargs="+", action="extend", required=True, help=text)

    def add_seed(self) -> None:
        """Add --seed, for torch's generators."""
        self.add_argument("--seed", metavar="N", type=seed, default=0, help="random seed (default: 0)")

    def add_checks(self) -> None:
        self.add_argument(
            "--checks",
            choices=("all", "quick"),
            default="all",
            help="checks to run; quick: graph, function and round trip, in half the time (default: all)",
        )


def suggest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the known word nearest to `word` as a question, followed by the fix `otherwise`; only the fix if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? otherwise {otherwise}" if near else otherwise


def config_place(text: str) -> Path:
    """Return the directory of a config.json, or the path of another file. Raises `UsageError` if it does not exist."""
    path = Path(text)
    if not path.exists():
        raise UsageError(f"--config {text}: no such file or directory", remedy="name the directory of a config.json")
    return path.parent if path.name == "config.json" else path


def config_for(path: Path, arguments: argparse.Namespace) -> Path | None:
    """Return --config for a model that may be bare weights, of a command that reads several; other models contain their config."""
    from retrofit.files.model_folders import DESCRIBED

    return arguments.config if path.is_file() and path.suffix not in DESCRIBED else None


def load_model(arguments: argparse.Namespace, path: Path | None = None, progress: Progress | None = None) -> nn.Module:
    """Return MODEL; of a command that reads several models, the one at `path`."""
    from retrofit.storage.checkpoint import load

    if progress is not None:
        progress(f"reading {path or arguments.model}")
    config = arguments.config if path is None else config_for(path, arguments)
    return load(path or arguments.model, config=config, allow_pickle=arguments.allow_pickle)


def load_tokenizer(arguments: argparse.Namespace) -> Any:
    """Return the tokenizer in --tokenizer or in the model's directory; None if the model has none."""
    from retrofit.passbase.tokenization import read_tokenizer
    from retrofit.storage.companions import tokenizer_place

    place = arguments.tokenizer or tokenizer_place(arguments.config or arguments.model)
    return read_tokenizer(place, required=arguments.tokenizer is not None)


def seed(text: str) -> int:
    """Return the text as a seed of torch's generators. Raises `ArgumentTypeError` if it is none."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from error
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"{text} is not between -2^63 and 2^64 - 1")
    return number


def require_tokens(tokens: int | None) -> None:
    """Raise `UsageError` if --tokens is less than 1."""
    if tokens is not None and tokens < 1:
        raise UsageError(f"--tokens {tokens}", why="must be at least 1", remedy="use an integer ≥ 1")


def require_texts(option: str, files: Iterable[Path]) -> None:
    """Raise `UsageError` if a text that `option` names does not exist."""
    for file in files:
        if not file.exists():
            raise UsageError(f"{option} {file}: no such file or directory", remedy="check the path")


def require_path(path: Path) -> Path:
    """Return `path` if it exists. Raises `CheckpointError` if it does not."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or directory",
            why="models are read from disk only, never downloaded",
            remedy=f"check the path: MODEL is {MODEL}",
            code="missing",
        )
    return path
