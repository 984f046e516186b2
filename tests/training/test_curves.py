"""The picture of a run shows what it says: each run in its colour, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from retrofit.errors import CheckpointError
from retrofit.training.runs import COLOURS, Points, draw_curves


@dataclasses.dataclass(frozen=True)
class Recorded:
    losses: Points
    eval_losses: Points


FALLING: Points = tuple((step, 5.0 - step / 10) for step in range(11))
SLOWER: Points = tuple((step, 5.0 - step / 20) for step in range(11))


def ink(path: Path, colour: str, strength: float = 1.0) -> int:
    """How many pixels have the colour, mixed with white by what is missing from `strength`."""
    wanted = strength * np.array(matplotlib.colors.to_rgb(colour)) + (1 - strength)
    return int((np.abs(matplotlib.image.imread(path)[..., :3] - wanted).max(-1) < 0.02).sum())


def test_every_run_has_its_colour_and_a_single_one_its_training_loss(tmp_path: Path) -> None:
    one = draw_curves(tmp_path / "one.png", {"dense": Recorded(SLOWER, FALLING)}, "One")
    two = draw_curves(tmp_path / "two.png", {"dense": Recorded(SLOWER, FALLING), "wide": Recorded(FALLING, SLOWER)}, "Two")
    assert ink(one, COLOURS[0]) > 500 and ink(one, COLOURS[1]) == 0
    assert ink(two, COLOURS[0]) > 500 and ink(two, COLOURS[1]) > 500
    assert ink(one, COLOURS[0], 0.35) > 5 * ink(two, COLOURS[0], 0.35)  # what is left there is the edges of lines


def test_a_noisy_line_is_smoothed_and_the_axis_ends_at_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Axes] = []
    limits = Axes.set_xlim

    def noted(self: Axes, *arguments: Any, **more: Any) -> Any:
        seen.append(self)
        return limits(self, *arguments, **more)

    monkeypatch.setattr(Axes, "set_xlim", noted)
    noisy = tuple((step, 5.0 - step / 100 + (-1) ** step) for step in range(1, 101))
    draw_curves(tmp_path / "noisy.png", {"dense": Recorded(noisy, ((0, 5.0), (100, 4.0)))}, "Noisy")
    axes = seen[-1]
    assert axes.get_xlim() == (0, 100)
    raw, smooth, _ = (line.get_ydata() for line in axes.get_lines())
    assert np.abs(np.diff(raw)).min() > 1.5 > 0.5 > np.abs(np.diff(smooth[10:])).max()
    assert smooth[-1] == pytest.approx(np.mean(raw[-10:]))
    assert [line.get_label() for line in axes.get_lines()][1:] == ["dense, training: mean of 10 entries", "dense, held out"]
    draw_curves(tmp_path / "short.png", {"dense": Recorded(FALLING, FALLING)}, "Short")
    assert len(seen[-1].get_lines()) == 2


def test_more_runs_than_colours_and_runs_without_evaluation_are_drawn(tmp_path: Path) -> None:
    runs = {f"run {number}": Recorded(FALLING, ()) for number in range(len(COLOURS) + 2)}
    assert ink(draw_curves(tmp_path / "many.png", runs, "Many"), COLOURS[-1], 0.35) > 0
    assert draw_curves(tmp_path / "none.png", {}, "None").stat().st_size > 1000


def test_a_picture_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = draw_curves(tmp_path / "curve.png", {"dense": Recorded(FALLING, FALLING)}, "First")
    before = path.read_bytes()

    def break_off(self: FigureCanvasAgg, file: BinaryIO) -> None:
        file.write(b"half a picture")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FigureCanvasAgg, "print_png", break_off)
    with pytest.raises(CheckpointError, match="No space left"):
        draw_curves(path, {"dense": Recorded(SLOWER, SLOWER)}, "Second")
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["curve.png"]
