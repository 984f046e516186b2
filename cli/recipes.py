"""The passes that a command line names: one by one with `--pass`, or together in a file with `--recipe`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrofit.cli.failures import UsageError
from retrofit.cli.parser import Parser
from retrofit.cli.pass_options import gather_passes
from retrofit.errors import RetrofitError
from retrofit.pipeline.protocol import Recipe
from retrofit.pipeline.registry import make_pass, parse_spec

READABLE = "write one pass a line, e.g. altup(k=2), or a JSON list of them; the config.json of a retrofitted model is read too"


def add_pass_arguments(parser: Parser) -> None:
    """The parser reads --pass with the options that follow it, and --recipe."""
    parser.gather = gather_passes
    parser.add_argument("--pass", metavar="NAME", help="a pass; several run in the order given; a pass's options follow it")
    parser.add_argument("--recipe", metavar="FILE", type=Path, help="passes with their options, in a file: one altup(k=2) a line")


def named_passes(arguments: argparse.Namespace) -> Recipe:
    """The passes that the command line names, none where it names none; raises `UsageError` where it names them twice."""
    if arguments.recipe is None:
        return tuple(make_pass(name, options) for name, options in arguments.passes)
    if arguments.passes:
        raise UsageError(
            "--pass and --recipe together",
            why="nothing says whether the recipe comes before the pass or after it",
            remedy=f"write {arguments.passes[0][0]} into the recipe",
        )
    return read_recipe(arguments.recipe)


def read_recipe(file: Path) -> Recipe:
    """The passes in a recipe file; raises `UsageError` that names the file, and the line where one cannot be read."""
    file = file / "config.json" if file.is_dir() else file
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not a recipe", why="it is not text", remedy=READABLE) from error
    passes = []
    for place, spec in specs_in(file, text):
        try:
            passes.append(parse_spec(spec))
        except RetrofitError as error:
            raise UsageError(f"{place}: {error.what}", why=error.why, remedy=error.remedy) from error
    if not passes:
        raise UsageError(f"{file} names no pass", remedy=READABLE)
    return tuple(passes)


def specs_in(file: Path, text: str) -> Iterator[tuple[str, str]]:
    """Each spec in the text of a recipe file, and where it is."""
    if not text.lstrip().startswith(("[", "{")):
        for number, line in enumerate(text.splitlines(), start=1):
            spec = line.partition("#")[0].strip()
            if spec:
                yield f"{file}, line {number}", spec
        return
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} is not a recipe", why=f"it is not JSON: {error}", remedy=READABLE) from error
    if isinstance(data, dict):
        data = data.get("quantization_config") if isinstance(data.get("quantization_config"), dict) else data
        data = data.get("recipe")
    if not isinstance(data, list) or not all(isinstance(spec, str) for spec in data):
        raise UsageError(f"{file} is not a recipe", why="it holds no list of passes as texts", remedy=READABLE)
    for number, spec in enumerate(data, start=1):
        yield f"{file}, pass {number}", spec
