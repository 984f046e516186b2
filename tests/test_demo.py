"""The demonstration, in miniature: it runs from nothing and leaves what it says it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
MINIATURE = ["--steps", "12", "--more", "6", "--width", "48", "--layers", "2", "--characters", "20"]


@pytest.mark.slow
def test_the_demo_runs_and_overwrites_what_an_earlier_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    for name in ("model.pt", "model.altup.pt", "model.altup.svg", "model.altup.trained.pt", "curves.png", "text.txt"):
        (folder / name).write_text("left by an earlier run")
    finished = subprocess.run(
        [sys.executable, str(DEMO), "--output", str(folder), *MINIATURE],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert all(line.startswith("retrofit: ") for line in finished.stderr.splitlines()), finished.stderr
    out = finished.stdout
    for part in ("$ retrofit apply --pass altup", "$ retrofit verify", "$ retrofit train", "held-out loss at the start", "Done in"):
        assert part in out
    for name in ("model.pt", "model.altup.pt", "model.altup.svg", "model.altup.trained.pt", "model.trained.pt", "text.txt"):
        assert (folder / name).stat().st_size > 1000
    assert matplotlib.image.imread(folder / "curves.png").shape[1] > 700
    runs = [json.loads((folder / f"{name}.run" / "run.json").read_text()) for name in ("model.trained", "model.altup.trained")]
    assert runs[0]["facts"]["text"] == runs[1]["facts"]["text"]
    dense, wide = (run["eval_losses"][0][1] for run in runs)
    assert dense == pytest.approx(wide, rel=1e-4)  # both start as the same function
