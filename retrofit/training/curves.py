"""The loss over the steps, as a picture."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from retrofit.files.atomic_writes import whole_file

Points = tuple[tuple[int, float], ...]  # (step, loss)

COLOURS = ("#1f5fa8", "#d1592a", "#3a8a4f", "#8b4fa3", "#7a6a1f")  # distinguishable with any kind of colour vision
SMOOTHED = 10  # means are over a tenth of a noisy line
SIZE, DPI = (7.2, 4.2), 160  # inches


class Losses(Protocol):
    """Anything with the losses of a run."""

    @property
    def losses(self) -> Points: ...

    @property
    def eval_losses(self) -> Points: ...


def running_means(points: Points, over: int) -> Points:
    """Return the mean of each entry and of those before it, `over` in all; fewer at the beginning."""
    values = [value for _, value in points]
    means = (statistics.fmean(values[max(0, place + 1 - over) : place + 1]) for place in range(len(values)))
    return tuple((step, mean) for (step, _), mean in zip(points, means, strict=True))


def draw_curves(
    path: Path,
    runs: Mapping[str, Losses],
    title: str,
    *,
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, int] | None = None,
) -> Path:
    """`path` is a PNG of the held-out loss of each run, its last value next to it; behind a single run, its training loss,
    as it was and smoothed. The axis ends at the last step.

    `levels` are losses to compare with, drawn as horizontal lines, `marks` are steps, drawn as vertical ones.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, run) in zip(itertools.cycle(COLOURS), runs.items(), strict=False):
        if run.losses and (len(runs) == 1 or not run.eval_losses):
            over = max(1, len(run.losses) // SMOOTHED)
            label = f"{name}, training" if over == 1 else None
            axes.plot(*zip(*run.losses, strict=True), color=colour, linewidth=1.0, alpha=0.35, label=label)
            if over > 1:
                smooth = f"{name}, training: mean of {over} entries"
                axes.plot(*zip(*running_means(run.losses, over), strict=True), color=colour, linewidth=1.2, alpha=0.7, label=smooth)
        if run.eval_losses:
            axes.plot(
                *zip(*run.eval_losses, strict=True), "o-", color=colour, markersize=4, label=f"{name}, held out", clip_on=False
            )
            last = run.eval_losses[-1]
            axes.annotate(
                f"{last[1]:.3f}", last, (6, 0), textcoords="offset points", va="center", color=colour, annotation_clip=False
            )
    for (name, loss), style in zip((levels or {}).items(), itertools.cycle(("--", ":")), strict=False):
        axes.axhline(loss, color="#555555", linewidth=1.0, linestyle=style, label=f"{name}, {loss:.3f}")
    for name, step in (marks or {}).items():
        axes.axvline(step, color="#999999", linewidth=1.0, label=name)
    steps = [step for run in runs.values() for step, _ in (*run.losses, *run.eval_losses)]
    if steps and max(steps) > min(0, *steps):
        axes.set_xlim(min(0, *steps), max(steps))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if runs:
        axes.legend(frameon=False)
    with whole_file(path, force=True) as file:
        FigureCanvasAgg(figure).print_png(file)
    return path
