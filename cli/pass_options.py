"""The passes on a command line, in order: of `--pass` with the options after it, and of recipe files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrofit.cli.failures import UsageError
from retrofit.cli.parser import Parser, suggest
from retrofit.errors import SpecError
from retrofit.passbase.options import options_of
from retrofit.passbase.protocol import Pass, Recipe, load_pass, make_pass, pass_names, split_spec
from retrofit.storage.recipe_file import read_recipe

Declared = Callable[[str], Mapping[str, bool]]  # pass name → option → True if it needs no value
Requested = list[tuple[str, dict[str, str]] | Path]  # (pass name, option → text), or a recipe file

YES_OR_NO = ("true", "false", "yes", "no")


def split_passes(arguments: Sequence[str], own: Collection[str], declared: Declared) -> tuple[list[str], Requested]:
    """Return the command's arguments, and the passes with their options, including recipe files.

    After `--pass NAME`, `--option value` and `--option=value` belong to that pass if it declares the option, else to the command if
    the option is one of its `own`. A boolean option needs no value. NAME may be a spec as in recipes, `altup(k=2)`. Raises
    `UsageError`.
    """
    left: list[str] = []
    passes: Requested = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        option, equals, value = argument.partition("=")
        latest = passes[-1] if passes else None
        if argument == "--":
            return [*left, argument, *queue], passes
        if not argument.startswith("--"):
            left.append(argument)
        elif option == "--pass":
            name, options = name_and_options(value if equals else take_value(option, queue, own))
            known = declared(name)  # an unknown name is an error before its options are
            passes.append((name, options))
            for unknown in (key for key in options if key not in known):
                refuse(f"--{unknown.replace('_', '-')}", own, passes, declared)
        elif option == "--recipe":
            file = value if equals else take_value(option, queue, own)
            if not file:
                raise UsageError("--recipe needs a value", remedy="write --recipe FILE")
            passes.append(Path(file))
        elif isinstance(latest, tuple) and field_name(option) in declared(latest[0]):
            name, options = latest
            if field_name(option) in options:
                raise UsageError(f"{name}: {option} is given twice", remedy="give it once")
            if not equals:
                alone = declared(name)[field_name(option)] and not (queue and queue[0].lower() in YES_OR_NO)
                value = "true" if alone else take_value(option, queue, own)
            options[field_name(option)] = value
        elif option in own:
            left.append(argument)
        else:
            refuse(option, own, passes, declared)
    return left, passes


def name_and_options(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and options in the value of `--pass`: a name, or a spec."""
    if "(" not in text:
        return text, {}
    try:
        name, options = split_spec(text)
    except SpecError as error:
        raise UsageError(error.what, remedy=error.remedies, **error.labels) from None
    return name, {key.replace("-", "_"): value for key, value in options.items()}


def take_value(option: str, queue: list[str], own: Collection[str]) -> str:
    """Remove the next argument from the queue and return it as the value of `option`. Raises `UsageError` if it is no value."""
    if not queue or queue[0].startswith("--") or queue[0] in own:
        raise UsageError(f"{option} needs a value", remedy=f"write {option} VALUE")
    return queue.pop(0)


def refuse(option: str, own: Collection[str], passes: Requested, declared: Declared) -> None:
    """Raise `UsageError` for an option that neither the pass nor the command has; suggest the nearest one."""
    if not passes:
        near = suggest(option, own, "an option of a pass follows the --pass it belongs to")
        raise UsageError(f"unknown option {option}", remedy=near)
    if isinstance(passes[-1], Path):
        near = suggest(option, own, f"options of its passes are in the file {passes[-1]}")
        raise UsageError(f"unknown option {option} after --recipe", remedy=near)
    name = passes[-1][0]
    if others := [other for other in pass_names() if field_name(option) in declared(other)]:
        remedy = f"it belongs to {' and '.join(others)}: write it after --pass {others[0]}"
        raise UsageError(f"{name}: unknown option {option}", remedy=remedy)
    known = [f"--{field.replace('_', '-')}" for field in declared(name)]
    raise UsageError(f"{name}: unknown option {option}", remedy=suggest(option, [*known, *own], f"see retrofit passes {name}"))


def field_name(option: str) -> str:
    """Return the field that `--some-option` sets: `some_option`."""
    return option.removeprefix("--").replace("-", "_")


def find_pass(name: str) -> type[Pass]:
    """Return the class of the installed pass `name`. Raises `UsageError`, with the nearest name, if there is none."""
    names = pass_names()
    if name not in names:
        raise UsageError(f"unknown pass {name!r}", remedy=suggest(name, names, f"choose one of {', '.join(names)}"))
    return load_pass(name)


def declared_options(name: str) -> Mapping[str, bool]:
    """Return the options of the installed pass `name`: True for those that need no value."""
    return {option: isinstance(default, bool) for option, _, default, _ in options_of(find_pass(name))}


def gather_passes(arguments: list[str], own: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments left for the command, and its `passes`; with --help only the arguments."""
    ended = arguments.index("--") if "--" in arguments else len(arguments)
    if {"-h", "--help"} & set(arguments[:ended]):
        return ["--help"], {}
    left, passes = split_passes(arguments, own, declared_options)
    return left, {"passes": passes}


def add_pass_arguments(parser: Parser) -> None:
    """Add --pass, with the options that follow it, and --recipe to the parser."""
    parser.gather = gather_passes
    parser.add_argument(
        "--pass", metavar="NAME", help="pass to apply, followed by its options, or as altup(k=2) (repeatable, in order)"
    )
    parser.add_argument("--recipe", metavar="FILE", help="file of passes, one per line: altup(k=2)")


def named_passes(arguments: argparse.Namespace) -> Recipe:
    """Return the passes on the command line, in order, including those of recipe files."""
    recipes = ((make_pass(*named),) if isinstance(named, tuple) else read_recipe(named) for named in arguments.passes)
    return tuple(pass_ for recipe in recipes for pass_ in recipe)
