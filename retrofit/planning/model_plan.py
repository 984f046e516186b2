"""The plan of a model: recipes for targets, with predicted and measured costs and losses; as tables, files and a picture."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrofit.anatomy import layer_range
from retrofit.errors import PlanningError
from retrofit.files.atomic_writes import whole_file
from retrofit.passbase.protocol import Recipe, parse_recipe
from retrofit.planning.targets import QUANTITIES, Target
from retrofit.training.runs import COLOURS, DPI, SIZE, add_grid, write_png

VERSION = 1  # of recipe files
DISTANCES = {True: "KL from the dense predictions, nats a token", False: "relative error of the outputs"}


@dataclasses.dataclass(frozen=True)
class Worth:
    """A model's costs, as shares of the dense model's, and its added loss."""

    costs: Mapping[str, float]  # the measured ones of decode, prefill, train, memory
    distance: float  # KL, or the relative error if the outputs are not logits
    added_loss: float | None

    def ratio(self, quantity: str) -> float:
        """Return a cost as it is shown: a speed for decode and prefill, else a share, both in times the dense model's."""
        return 1 / self.costs[quantity] if QUANTITIES[quantity].kind == "speed" else self.costs[quantity]

    @property
    def lost(self) -> float:
        """Return the added loss, or the distance if there is no loss."""
        return self.distance if self.added_loss is None else self.added_loss


@dataclasses.dataclass(frozen=True)
class PlannedLayers:
    """The sites of one pass with one setting, each with its distance by itself."""

    spec: str  # short
    depths: tuple[int, ...]  # empty if it cannot be split by depth
    alone: tuple[float, ...]  # the distance that each causes by itself


@dataclasses.dataclass(frozen=True)
class PlannedRecipe:
    """The choice for one target."""

    target: Target
    recipe: tuple[str, ...]  # specs, in the order of application
    layers: tuple[PlannedLayers, ...]
    predicted: Worth
    measured: Worth | None  # for the rewritten model, on windows used for neither fit nor choice; None: not measured

    @property
    def passes(self) -> Recipe:
        """Return the passes, as arguments of `retrofit.apply`."""
        return parse_recipe(self.recipe)


@dataclasses.dataclass(frozen=True)
class UniformSetting:
    """One candidate in every layer that it fits."""

    spec: str  # short
    worth: Worth
    held_out: Worth | None  # the same costs, and the distance and loss on the held-out windows; None: predicted from some layers
    sampled: tuple[int, int] = (0, 0)  # of how many of its sites the loss is known if it is predicted, and their number

    @property
    def shown(self) -> Worth:
        """Return the best known values: those on the held-out windows, if measured there."""
        return self.held_out or self.worth


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """Plans for all targets, and the data of the choice."""

    planned: tuple[PlannedRecipe, ...]
    uniform: tuple[UniformSetting, ...]
    front: tuple[Worth, ...]  # predicted, of choices from slow to fast
    main: str  # the cost on the axis of the front
    are_logits: bool
    dense_loss: float | None  # on the held-out windows
    dense_seconds: Mapping[str, float]
    left_out: Mapping[str, str]  # candidates that do not fit, or were not tried, and why
    unreached: Mapping[Target, PlanningError]  # targets that no choice reaches, and what can be reached
    notes: tuple[str, ...] = ()

    @property
    def passes(self) -> Recipe:
        """Return the passes for the first target."""
        return self.planned[0].passes

    def __str__(self) -> str:
        from retrofit.passbase.report_text import aligned

        return "\n\n".join(aligned(list(rows_of(self, planned))) for planned in self.planned)

    def to_dict(self, planned: PlannedRecipe) -> dict[str, Any]:
        """Return the plan for one target as plain data: a recipe file with the figures as notes."""
        notes = {
            "target": str(planned.target),
            "layers": [dataclasses.asdict(part) for part in planned.layers],
            "predicted": plain(planned.predicted),
            "measured": None if planned.measured is None else plain(planned.measured),
            "distance": DISTANCES[self.are_logits],
            "dense": {"loss": self.dense_loss, "seconds": dict(self.dense_seconds)},
            "uniform": [
                {
                    "spec": point.spec,
                    **plain(point.worth),
                    "held_out": {"distance": point.held_out.distance, "added_loss": point.held_out.added_loss}
                    if point.held_out
                    else None,
                }
                for point in self.uniform
            ],
            "front": {"over": self.main, "predicted": [plain(point) for point in self.front]},
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }
        return {"recipe": list(planned.recipe), "version": VERSION, "notes": notes}

    def save(self, planned: PlannedRecipe, path: Path, *, force: bool = False) -> None:
        """Write the plan for one target as a recipe file for `retrofit apply --recipe`."""
        with whole_file(path, force=force) as file:
            file.write(f"{json.dumps(self.to_dict(planned), indent=2)}\n".encode())


def plain(worth: Worth) -> dict[str, Any]:
    """Return costs as shares of the dense model's, and the losses."""
    return {"costs": dict(worth.costs), "distance": worth.distance, "added_loss": worth.added_loss}


def rows_of(plan: ModelPlan, planned: PlannedRecipe) -> Iterator[tuple[str, str]]:
    """Yield the plan for one target as rows of two cells."""
    yield "target", str(planned.target)
    for number, spec in enumerate(planned.recipe):
        yield "" if number else "recipe", spec
    for number, part in enumerate(planned.layers):
        where = layer_range(part.depths) if part.depths else "the whole model"
        alone = f"{min(part.alone):.2g}" + (f"–{max(part.alone):.2g}" if len(part.alone) > 1 else "")
        yield "" if number else "chosen", f"{where}: {part.spec}; by itself each {alone}"
    for name in planned.predicted.costs:
        yield name, figures_text([f"{worth.ratio(name):.2f}×" for worth in worths(planned)])
    if planned.predicted.added_loss is not None:
        yield "loss added", figures_text([f"{worth.added_loss:+.4f}" for worth in worths(planned) if worth.added_loss is not None])
    yield ("KL" if plan.are_logits else "error"), figures_text([f"{worth.distance:.4f}" for worth in worths(planned)])


def candidate_rows(uniform: Sequence[UniformSetting], main: str) -> list[tuple[str, str]]:
    """Return each candidate in all layers, by increasing cost `main`, with its costs and loss."""
    found = []
    for candidate in sorted(uniform, key=lambda setting: setting.worth.costs[main]):
        cost = f"{main} {candidate.worth.ratio(main):.2f}×"
        loss = "" if candidate.shown.added_loss is None else f", loss {candidate.shown.added_loss:+.3f}"
        known, count = candidate.sampled
        predicted = "" if candidate.held_out else f", predicted from {known} of its {count} sites"
        found.append((candidate.spec, f"{cost}{loss}, distance {candidate.shown.distance:.3f}{predicted}"))
    return found


def worths(planned: PlannedRecipe) -> list[Worth]:
    return [planned.predicted] if planned.measured is None else [planned.predicted, planned.measured]


def figures_text(figures: list[str]) -> str:
    """Return the predicted figure, and the measured one if there is one."""
    return f"{figures[0]} predicted" + (f", {figures[1]} measured" if len(figures) > 1 else ", not measured")


def draw_front(path: Path, plan: ModelPlan, *, force: bool = False) -> Path:
    """Write a PNG: the predicted front as a line, a point for each uniform setting, and one for each plan as measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0] * 1.25, SIZE[1]), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1.0, color="#555555", linewidth=1.0, linestyle="--")
    front = sorted((worth.ratio(plan.main), worth.lost) for worth in plan.front)
    axes.plot([x for x, _ in front], [y for _, y in front], "-", color="#222222", linewidth=1.4, label="plans, predicted")
    for colour, setting in zip(itertools.cycle(COLOURS), plan.uniform, strict=False):
        axes.plot([setting.worth.ratio(plan.main)], [setting.shown.lost], "o", color=colour, markersize=6, label=setting.spec)
    for planned in plan.planned:
        worth = planned.measured or planned.predicted
        place = worth.ratio(plan.main), worth.lost
        axes.plot(*place, "*", color="#222222", markersize=13)
        axes.annotate(str(planned.target), place, xytext=(6, 6), textcoords="offset points", fontsize=8)
    axes.set_yscale("symlog", linthresh=smallest(plan))
    axes.set_xlabel(f"{QUANTITIES[plan.main].what} (times the dense model's)")
    axes.set_ylabel("loss added (nats a token)" if plan.dense_loss is not None else DISTANCES[plan.are_logits])
    add_grid(axes)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return write_png(path, figure, force=force)


def smallest(plan: ModelPlan) -> float:
    """Return about the least loss anywhere: below it the scale is linear."""
    values = [worth.lost for worth in (*plan.front, *(setting.shown for setting in plan.uniform)) if worth.lost > 0]
    return max(1e-4, min(values, default=1e-2))
