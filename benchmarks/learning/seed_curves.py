"""Held-out losses over the steps, a line for each way of training: the mean over the seeds, a band of one standard deviation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from retrofit.training.runs import COLOURS

Curve = Sequence[tuple[int, float]]  # (step, loss)


def draw_seed_curves(path: Path, ways: Mapping[str, Sequence[Curve]], title: str, levels: Mapping[str, float]) -> None:
    """`path` is an SVG of the curves of each way, one a seed, all at the same steps; `levels` are horizontal lines."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, curves) in zip(COLOURS * len(ways), ways.items(), strict=False):
        steps = [step for step, _ in curves[0]]
        losses = list(zip(*([loss for _, loss in curve] for curve in curves), strict=True))
        middle = [statistics.mean(one) for one in losses]
        around = [statistics.stdev(one) if len(one) > 1 else 0.0 for one in losses]
        low, high = ([mean + sign * apart for mean, apart in zip(middle, around, strict=True)] for sign in (-1, 1))
        axes.plot(steps, middle, "o-", color=colour, markersize=3, label=f"{name}, {middle[-1]:.3f}")
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    for (name, loss), style in zip(levels.items(), ("--", ":", "-.") * len(levels), strict=False):
        axes.axhline(loss, color="#555555", linewidth=1.0, linestyle=style, label=f"{name}, {loss:.3f}")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss (nats a token)")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
