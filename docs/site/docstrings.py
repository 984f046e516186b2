"""Docstrings are plain text with `code`, lists and indented formulas; Sphinx reads them as that. A pass's ends with its options."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

from retrofit.passbase.options import format_value, options_of
from retrofit.sdk import Pass

CODE = re.compile(r"(`[^`\n]+(?:\n[^`\n]+)?`)")
SPECIAL = re.compile(r"([\\*_|])")


def as_rst(text: str) -> str:
    """The docstring as reStructuredText: code stays code, formulas stay as they are laid out, nothing else is markup."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        formula = next((place for place, line in enumerate(lines) if line.startswith("    ")), len(lines))
        if lines[0].lstrip().startswith("- "):
            formula = len(lines)
        if formula:
            blocks.append(prose("\n".join(lines[:formula])))
        if formula < len(lines):
            blocks.append("::\n\n" + "\n".join("    " + line for line in lines[formula:]))
    return "\n\n".join(blocks)


def prose(text: str) -> str:
    """Running text, its `code` as literals."""
    parts = CODE.split(text)
    return "".join(literal(part) if place % 2 else SPECIAL.sub(r"\\\1", part) for place, part in enumerate(parts))


def literal(code: str) -> str:
    return f"``{' '.join(code.strip('`').split())}``\\ "


def rewrite(app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    lines[:] = [*as_rst("\n".join(lines)).split("\n"), ""]
    if isinstance(thing, type) and issubclass(thing, Pass) and thing is not Pass:
        for option, values, default, doc in options_of(thing):
            lines.append(f"- ``{option}``, {prose(values)}, default ``{format_value(default)}``: {prose(doc)}")
        lines.append("")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
