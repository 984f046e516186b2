"""The passes that a command line names, one by one with `--pass` and together in files with `--recipe`, in the order given."""

from __future__ import annotations

import argparse

from retrofit.cli.parser import Parser
from retrofit.cli.pass_options import gather_passes
from retrofit.pipeline.protocol import Recipe
from retrofit.pipeline.registry import make_pass
from retrofit.storage.recipe_file import read_recipe


def add_pass_arguments(parser: Parser) -> None:
    """The parser reads --pass with the options that follow it, and --recipe."""
    parser.gather = gather_passes
    parser.add_argument("--pass", metavar="NAME", help="a pass, its options after it or as altup(k=2); several run in order")
    parser.add_argument("--recipe", metavar="FILE", help="passes with their options, in a file: one altup(k=2) a line")


def named_passes(arguments: argparse.Namespace) -> Recipe:
    """The passes that the command line names, in the order given, those of a recipe file where it is named."""
    passes: list[Recipe] = []
    for one in arguments.passes:
        passes.append((make_pass(*one),) if isinstance(one, tuple) else read_recipe(one))
    return tuple(pass_ for several in passes for pass_ in several)
