"""docs/security.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_case_names_a_test() -> None:
    """`file.py::test`, `…::test` in the file named before, or a whole file: each row has one, or says "same"."""
    file = ""
    for row in re.findall(r"^\|(?! tried | ---)(.*)\|$", PAGE, re.MULTILINE):
        named = re.findall(r"`([\w/…]+(?:\.py)?)(?:::(\w+))?`", row.split("|")[-1])
        assert named or "same" in row.split("|")[-1], row
        for place, test in named:
            file = file if place == "…" else place
            tree = ast.parse((TESTS.parent / file).read_text(encoding="utf-8"))
            assert not test or test in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, (file, test)
