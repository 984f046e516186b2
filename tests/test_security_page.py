"""The cases of docs/security.md, in benchmarks/results/security.csv, name tests that exist."""

from __future__ import annotations

import ast
import csv
import re
from pathlib import Path

TESTS = Path(__file__).parent
CASES = TESTS.parent / "benchmarks" / "results" / "security.csv"


def test_every_case_names_a_test() -> None:
    """`file.py::test`, `…::test` in the file named before, or a whole file: each row has one, or says "same"."""
    file = ""
    for kind, tried, _, tests in list(csv.reader(CASES.read_text(encoding="utf-8").splitlines()))[1:]:
        named = re.findall(r"`([\w/…]+(?:\.py)?)(?:::(\w+))?`", tests)
        assert named or "same" in tests, (kind, tried)
        for place, test in named:
            file = file if place == "…" else place
            tree = ast.parse((TESTS.parent / file).read_text(encoding="utf-8"))
            assert not test or test in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, (file, test)
