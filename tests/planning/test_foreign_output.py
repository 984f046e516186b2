"""What C libraries print does not get between what a program prints, wherever its stdout leads."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy.optimize

from retrofit.planning.choosing import Problem, linear_choice

PROGRAM = """
import ctypes
from retrofit.planning.foreign_output import without_foreign_output

libc = ctypes.CDLL(None)
print("before")
libc.printf(b"C before\\n")
with without_foreign_output():
    print("Python, meanwhile")
    libc.printf(b"C, meanwhile\\n")
print("after")
"""


def test_what_c_prints_is_lost_and_what_python_prints_goes_to_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "C before", "after"]
    assert done.stderr == "Python, meanwhile\n"


def test_an_error_leaves_stdout_as_it_was(tmp_path: Path) -> None:
    program = PROGRAM.replace('    print("Python, meanwhile")', "    raise SystemExit(3)")
    with open(tmp_path / "out", "w+") as out:
        assert subprocess.run([sys.executable, "-c", program], stdout=out, check=False).returncode == 3
        out.seek(0)
        assert out.read() == "before\nC before\n"


def test_a_closed_stdout_is_no_error() -> None:
    program = "from retrofit.planning import foreign_output\nwith foreign_output.without_foreign_output():\n    raise SystemExit(4)"
    assert subprocess.run(f"exec {sys.executable} -c '{program}' >&-", shell=True, check=False).returncode == 4


def test_what_the_solver_prints_is_lost(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    solve = scipy.optimize.milp

    def talkative(*given: Any, **options: Any) -> Any:
        ctypes.CDLL(None).puts(b"a line of HiGHS")
        return solve(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", talkative)
    problem = Problem(numpy.diag([1.0, 2.0]), {"decode": numpy.array([-1.0, -1.0])}, ())
    assert linear_choice(problem, numpy.array([1.0, 2.0]), {"decode": -1.0}) == {0}
    assert capfd.readouterr().out == ""
