"""The notebook runs as it is, and shows what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "retrofit.ipynb"


def test_it_is_kept_with_its_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5 and all(cell["outputs"] for cell in code)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "image/png" in code[-1]["outputs"][-1]["data"]
    assert NOTEBOOK.stat().st_size < 200_000


@pytest.mark.long
def test_its_cells_run(tmp_path: Path) -> None:
    copy = tmp_path / "copy.ipynb"
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    copy.write_text(json.dumps(notebook))
    program = [sys.executable, str(ROOT / "examples" / "run_notebook.py"), str(copy)]
    done = subprocess.run(
        program, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    code = [cell for cell in json.loads(copy.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code)
    said = "".join("".join(output.get("text", "")) for cell in code for output in cell["outputs"])
    losses = [float(loss) for loss in re.findall(r"(\d\.\d{3}) after", said)]
    assert len(losses) == 2 and max(losses) < 3.5  # a byte at random: 5.5
