"""The demonstration, in miniature: it runs from nothing and leaves what it says it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest
from support.command_server import CommandServer

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
MINIATURE = ["--steps", "12", "--more", "6", "--width", "48", "--layers", "2", "--characters", "20"]


@pytest.mark.slow
def test_the_demo_runs_and_overwrites_what_an_earlier_one_left(server: CommandServer, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    for name in ("model.pt", "model.altup.pt", "model.altup.svg", "model.altup.trained.pt", "curves.png", "text.txt"):
        (folder / name).write_text("left by an earlier run")
    finished = server.program(DEMO, "--output", folder, *MINIATURE)
    assert finished.code == 0, finished.out + finished.err
    assert all(line.startswith("retrofit: ") for line in finished.err.splitlines()), finished.err
    out = finished.out
    for part in ("$ retrofit apply --pass altup", "$ retrofit verify", "$ retrofit train", "held-out loss at the start", "Done in"):
        assert part in out
    for name in ("model.pt", "model.altup.pt", "model.altup.svg", "model.altup.trained.pt", "model.trained.pt", "text.txt"):
        assert (folder / name).stat().st_size > 1000
    assert matplotlib.image.imread(folder / "curves.png").shape[1] > 700
    runs = [json.loads((folder / f"{name}.run" / "run.json").read_text()) for name in ("model.trained", "model.altup.trained")]
    assert runs[0]["facts"]["text"] == runs[1]["facts"]["text"]
    dense, wide = (run["eval_losses"][0][1] for run in runs)
    assert dense == pytest.approx(wide, rel=1e-4)  # both start as the same function
