"""Models compared, as a picture: the loss of each against its speed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from retrofit.runtime.atomic_writes import whole_file
from retrofit.training.curves import COLOURS, DPI, SIZE
from retrofit.training.model_comparison import Figures


def draw_comparison(path: Path, figures: Sequence[Figures], *, force: bool = False) -> Path:
    """`path` is a PNG with a point for each model: its held-out loss over its speed, in times the first model's.

    The speed is that of decoding where all models decode, and that of a window's forward too, in a panel of its own.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dense = figures[0]
    speeds = {"forward of a window": [dense.prefill / one.prefill for one in figures]}
    if dense.decode is not None:
        speeds["decoding"] = [dense.decode / one.decode if one.decode else 0.0 for one in figures]
    figure = Figure(figsize=(SIZE[0] * (1 + len(speeds)) / 2, SIZE[1]), dpi=DPI, layout="constrained")
    for panel, (what, speed) in enumerate(speeds.items(), 1):
        axes = figure.add_subplot(1, len(speeds), panel)
        axes.axhline(dense.loss, color="#555555", linewidth=1.0, linestyle="--")
        axes.axvline(1.0, color="#555555", linewidth=1.0, linestyle="--")
        for colour, one, times in zip(itertools.cycle(COLOURS), figures, speed, strict=False):
            axes.plot([times], [one.loss], "o", color=colour, markersize=8, label=f"{one.name}, {one.loss:.3f}")
        axes.margins(0.2)
        axes.set_xlabel(f"speed of {what} (times {dense.name}'s)")
        axes.set_ylabel("held-out loss (nats a token)")
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if panel == len(speeds):
            axes.legend(frameon=False)
    with whole_file(path, force=force) as file:
        FigureCanvasAgg(figure).print_png(file)
    return path
