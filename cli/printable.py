"""Names from files as a terminal may show them: what would move its cursor, colour it or end a line is written out."""

from __future__ import annotations

import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of characters that are not shown but do something, and of broken ones


def printable(text: str, *, lines: bool = False) -> str:
    """The text with its control characters as Python writes them, `\\x1b`; with `lines` its line breaks stay."""
    return "".join(
        one if (lines and one == "\n") or unicodedata.category(one) not in HIDDEN else one.encode("unicode_escape").decode()
        for one in text
    )
