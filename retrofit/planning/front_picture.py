"""The front as a picture: what is lost over what is saved, predicted, with uniform settings as points and the plans among them."""

from __future__ import annotations

import itertools
from pathlib import Path

from retrofit.planning.planned_recipe import DISTANCES, ModelPlan, Worth
from retrofit.planning.targets import QUANTITIES
from retrofit.runtime.atomic_writes import whole_file
from retrofit.training.curves import COLOURS, DPI, SIZE


def draw_front(path: Path, plan: ModelPlan, *, force: bool = False) -> Path:
    """`path` is a PNG: the predicted front as a line, a point for each uniform setting, and for each plan as it was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    quantity = QUANTITIES[plan.main]

    def across(worth: Worth) -> float:
        return 1 / worth.costs[plan.main] if quantity.kind == "speed" else worth.costs[plan.main]

    figure = Figure(figsize=(SIZE[0] * 1.25, SIZE[1]), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1.0, color="#555555", linewidth=1.0, linestyle="--")
    front = sorted((across(one), lost(one)) for one in plan.front)
    axes.plot([x for x, _ in front], [y for _, y in front], "-", color="#222222", linewidth=1.4, label="plans, predicted")
    for colour, setting in zip(itertools.cycle(COLOURS), plan.uniform, strict=False):
        axes.plot([across(setting.worth)], [lost(setting.shown)], "o", color=colour, markersize=6, label=setting.spec)
    for one in plan.planned:
        shown = one.predicted if one.measured is None else one.measured
        axes.plot([across(shown)], [lost(shown)], "*", color="#222222", markersize=13)
        axes.annotate(str(one.target), (across(shown), lost(shown)), xytext=(6, 6), textcoords="offset points", fontsize=8)
    axes.set_yscale("symlog", linthresh=smallest(plan))
    axes.set_xlabel(f"{quantity.what} (times the dense model's)")
    axes.set_ylabel("loss added (nats a token)" if plan.dense_loss is not None else DISTANCES[plan.are_logits])
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    with whole_file(path, force=force) as file:
        FigureCanvasAgg(figure).print_png(file)
    return path


def lost(worth: Worth) -> float:
    return worth.distance if worth.added_loss is None else worth.added_loss


def smallest(plan: ModelPlan) -> float:
    """Below this what is lost is drawn linearly: about the least that is lost anywhere."""
    values = [lost(one) for one in (*plan.front, *(setting.shown for setting in plan.uniform)) if lost(one) > 0]
    return max(1e-4, min(values, default=1e-2))
