"""The demonstration, in miniature: it runs from nothing and leaves what it says it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest
from support.command_server import CommandServer

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
MINIATURE = ["--steps", "3", "--more", "1", "--width", "48", "--layers", "2", "--characters", "20"]


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
    for part in ("apply --pass altup", "apply --pass memory", "verify", "train"):
        assert f"$ retrofit {part}" in out
    assert "held-out loss at the start" in out and "Done in" in out
    made = [f"model.{name}{end}" for name in ("altup", "memory") for end in (".pt", ".svg", ".trained.pt")]
    for name in ("model.pt", "model.trained.pt", "text.txt", *made):
        assert (folder / name).stat().st_size > 1000
    assert matplotlib.image.imread(folder / "curves.png").shape[1] > 700
    trained = [json.loads((folder / f"model{name}.trained.run" / "run.json").read_text()) for name in ("", ".altup", ".memory")]
    assert len({json.dumps(run["facts"]["text"]) for run in trained}) == 1
    dense, *rewritten = (run["eval_losses"][0][1] for run in trained)
    assert rewritten == [pytest.approx(dense, rel=1e-4)] * 2  # all start as the same function
