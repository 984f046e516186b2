"""How the tokens of some text are distributed over the experts of each layer, as numbers and as a picture."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.passes.shared_moe.mixture_of_experts import MoEBlock
from retrofit.sdk import DoesNotFitError, calibration_from

FULL, GRID = "#5b9bd5", "#cbd5e1"  # colours: of twice an even share and more, of the lines between cells
CELL, ROW, HEADER, TITLE, LETTER = 0.8, 0.34, 1.3, 5.0, 0.08  # sizes in the picture, in inches


@dataclasses.dataclass(frozen=True)
class Load:
    """The part of a layer's dispatches that each of its experts gets, layer by layer; 1/E each where they are balanced."""

    shares: dict[str, tuple[float, ...]]  # by the path of the layer's block; each sums to one
    tokens: int

    def lines(self) -> Iterator[str]:
        """One line a layer."""
        for path, shares in self.shares.items():
            yield f"{path}: {' '.join(f'{share:.0%}' for share in shares)} of the dispatches to its experts"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def svg(self) -> str:
        """A picture: a row for each layer, a column for each expert, darker the more of the tokens it gets."""
        import matplotlib
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        rows, columns = len(self.shares), max(map(len, self.shares.values()))
        labels = LETTER * max(map(len, self.shares)) + 0.4
        width, height = max(labels + columns * CELL + 0.3, TITLE), HEADER + rows * ROW + 0.2
        settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "retrofit", "font.family": "sans-serif", "text.parse_math": False}
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=(width, height))
            figure.text(0.25 / width, 1 - 0.4 / height, "Load of the experts", fontsize=14, fontweight="bold")
            facts = f"part of each layer's dispatches that an expert gets, on {self.tokens:,} tokens"
            figure.text(0.25 / width, 1 - 0.7 / height, facts, fontsize=9, color="#475569")
            axes = figure.add_axes((labels / width, 0.2 / height, columns * CELL / width, rows * ROW / height))
            relative = [
                [*(share * len(shares) for share in shares), *[float("nan")] * (columns - len(shares))]
                for shares in self.shares.values()
            ]
            colours = LinearSegmentedColormap.from_list("load", ["white", FULL])
            axes.pcolormesh(relative, cmap=colours, vmin=0, vmax=2, edgecolors=GRID, linewidth=1)
            for row, shares in enumerate(self.shares.values()):
                for e, share in enumerate(shares):
                    axes.text(e + 0.5, row + 0.5, f"{share:.0%}", ha="center", va="center", fontsize=9)
            axes.set_xticks([e + 0.5 for e in range(columns)], [str(e) for e in range(columns)], fontsize=9)
            axes.set_yticks([row + 0.5 for row in range(rows)], list(self.shares), fontsize=9)
            axes.invert_yaxis()
            axes.xaxis.tick_top()
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", metadata={"Title": "Load of the experts", "Description": str(self), "Date": None})
        return drawn.getvalue()


def expert_load(model: nn.Module, data: Any) -> Load:
    """The load of the experts of every layer of `model` in evaluation mode on `data`, padding left out.

    `data` is what `calibration=` takes: texts, token ids (windows, length), or batches of the model's inputs. Raises
    `DoesNotFitError` where the model has no mixture of experts of this package, `SpecError` where `data` is empty.
    """
    counters = {path: RoutingCounter(module) for path, module in model.named_modules() if isinstance(module, MoEBlock)}
    if not counters:
        raise DoesNotFitError("the model has no experts whose load could be counted", remedy="rewrite it with shared-moe first")
    calibration_from(model, data).observe(model, counters)
    return Load({path: counter.shares() for path, counter in counters.items()}, max(one.tokens for one in counters.values()))


class RoutingCounter:
    """Counts how often the router of a block dispatches the tokens that the block receives to each expert."""

    def __init__(self, block: MoEBlock) -> None:
        self.moe, self.tokens = block.moe, 0
        self.counts = torch.zeros(block.moe.experts, dtype=torch.long)

    def __call__(self, x: Tensor) -> None:
        _, experts = self.moe.route(x)
        self.counts += torch.bincount(experts.flatten().cpu(), minlength=self.moe.experts)
        self.tokens += len(x)

    def shares(self) -> tuple[float, ...]:
        return tuple((self.counts / self.counts.sum().clamp(min=1)).tolist())
