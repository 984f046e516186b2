"""How the tokens of some text spread over the experts of each layer, as numbers and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.drawing.canvas import BODY, FACTS, HEADLINE, NAME, Canvas
from retrofit.passes.shared_moe.experts import MoEBlock
from retrofit.sdk import DoesNotFitError, calibration_from

MARGIN, TOP, CELL, ROW, LABELS = 24.0, 96.0, 64.0, 26.0, 260.0  # of the picture


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
        """A row a layer, a column an expert, the darker the more of the tokens it gets."""
        canvas = Canvas()
        most = max(map(len, self.shares.values()))
        canvas.text(MARGIN, 40, "Load of the experts", HEADLINE)
        canvas.text(MARGIN, 62, f"part of each layer's dispatches that an expert gets, on {self.tokens:,} tokens", FACTS)
        for e in range(most):
            canvas.text(MARGIN + LABELS + (e + 0.5) * CELL, TOP - 8, f"{e}", FACTS, "middle")
        for row, (path, shares) in enumerate(self.shares.items()):
            y = TOP + row * ROW
            canvas.text(MARGIN, y + ROW - 9, path, NAME, width=LABELS - 12)
            for e, share in enumerate(shares):
                x = MARGIN + LABELS + e * CELL
                canvas.box(x + 1, y + 1, CELL - 2, ROW - 2, shade(share * len(shares)), "#cbd5e1", radius=3)
                canvas.text(x + CELL / 2, y + ROW - 9, f"{share:.0%}", BODY, "middle")
        bottom = TOP + len(self.shares) * ROW + MARGIN
        return canvas.document(0, 2 * MARGIN + LABELS + most * CELL, bottom, "Load of the experts", str(self))


def shade(relative: float) -> str:
    """White for an expert without tokens, a middle blue for one with its even share, darker up to twice that and more."""
    part = min(relative / 2, 1.0)
    return "#" + "".join(f"{round(255 + part * (end - 255)):02x}" for end in (0x5B, 0x9B, 0xD5))


def expert_load(model: nn.Module, given: Any) -> Load:
    """The load of the experts of every layer of `model` in evaluation mode on `given`, padding left out.

    `given` is what `calibration=` takes: texts, token ids (windows, length), or batches of the model's inputs. Raises
    `DoesNotFitError` where the model has no mixture of experts of this package, `SpecError` where `given` holds nothing.
    """
    counters = {path: Counter(module) for path, module in model.named_modules() if isinstance(module, MoEBlock)}
    if not counters:
        raise DoesNotFitError("the model has no experts whose load could be counted", remedy="rewrite it with shared-moe first")
    calibration_from(model, given).observe(model, counters)
    return Load({path: counter.shares() for path, counter in counters.items()}, max(one.tokens for one in counters.values()))


class Counter:
    """Counts what the router of a block does with the tokens that the block is handed."""

    def __init__(self, block: MoEBlock) -> None:
        self.moe, self.tokens = block.moe, 0
        self.counts = torch.zeros(block.moe.experts, dtype=torch.long)

    def __call__(self, x: Tensor) -> None:
        _, chosen = self.moe.route(x)
        self.counts += torch.bincount(chosen.flatten().cpu(), minlength=self.moe.experts)
        self.tokens += len(x)

    def shares(self) -> tuple[float, ...]:
        return tuple((self.counts / self.counts.sum().clamp(min=1)).tolist())
