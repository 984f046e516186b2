"""The page of the commands ends with the help of each, as the parser has it."""

from __future__ import annotations

import argparse
import os

from sphinx.application import Sphinx

PAGE = "docs/site/commands"


def helps() -> str:
    """The help of every command as Markdown."""
    os.environ["COLUMNS"] = "100"  # argparse wraps by it

    from retrofit.cli import build_parser

    commands = next(one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction))
    return "".join(f"\n## retrofit {name}\n\n```text\n{one.format_help()}```\n" for name, one in commands.choices.items())


def append_helps(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == PAGE:
        source[0] += helps()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", append_helps)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
