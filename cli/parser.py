"""An argument parser whose errors are exceptions that suggest the nearest known word, and the arguments that commands share."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from retrofit.cli.failures import UsageError
from retrofit.errors import CheckpointError

MODEL = "a .pt checkpoint, a Hugging Face or sentence-transformers directory, a .gguf, .pt2 or .onnx file"

STREAMS = "--stream reads a safetensors directory with its own config"

Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"

Gather: TypeAlias = Callable[[list[str], Sequence[str]], tuple[list[str], dict[str, Any]]]


class Parser(argparse.ArgumentParser):
    """A parser with `--debug` and no abbreviations that raises `UsageError`.

    `gather`, if set, receives the arguments first, with the parser's option strings; it returns the arguments that are left to
    parse and the values that it read from the others.
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
        """Raise an error for an unknown argument that suggests the nearest one, or names the value that was read instead."""
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
            what = action.option_strings[0] if action.option_strings else action.metavar or action.dest
            raise UsageError(
                f"{what}: unknown value {value!r}",
                remedy=suggest(str(value), map(str, action.choices), f"choose one of {', '.join(map(str, action.choices))}"),
            )

    def error(self, message: str) -> NoReturn:
        if "MODEL" not in message:
            raise UsageError(message, remedy=self.see())
        greedy = " and ".join(option for option, action in self._option_string_actions.items() if action.nargs in ("+", "?"))
        order = f"; put it before options that accept several values ({greedy})" if greedy else ""
        raise UsageError(message, remedy=f"MODEL is {MODEL}{order}; {self.see()}")

    def see(self) -> str:
        return f"see {self.prog} --help"


def suggest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the known word nearest to `word`, as a question, and the fix if that is not the one."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? otherwise {otherwise}" if near else otherwise


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options for loading it to the parser."""
    parser.add_argument("model", metavar="MODEL", type=Path, help=MODEL)
    parser.add_argument("--config", metavar="DIR", type=config_place, help="directory of the config, for a bare state dict")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="unpickle MODEL, which can run any code: only for files you trust"
    )


def add_checks_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the checks to the parser."""
    parser.add_argument(
        "--checks",
        choices=("all", "quick"),
        default="all",
        help="checks to run; quick: graph, function and round trip, in half the time (default: all)",
    )


def config_place(text: str) -> Path:
    """Return the directory of a config, or the file if its name is not config.json."""
    path = Path(text)
    if not path.exists():
        raise UsageError(f"--config {text}: no such file or directory", remedy="name the directory of a config.json")
    return path.parent if path.name == "config.json" else path


def config_for(path: Path, arguments: argparse.Namespace) -> Path | None:
    """Return --config for models that may be bare weights, if a command reads several; other models contain their config."""
    from retrofit.files.model_folders import DESCRIBED

    return arguments.config if path.is_file() and path.suffix not in DESCRIBED else None


def seed(text: str) -> int:
    """Return a seed of torch's generators."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from error
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"{text} is not between -2^63 and 2^64 - 1")
    return number


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
