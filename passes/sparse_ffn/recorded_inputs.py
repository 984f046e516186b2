"""What each feed-forward receives on calibration data: tokens at even distances over the data, as many as there is room for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from retrofit.sdk import Calibration, Enough, set_aside

TOKENS = 32_768  # that a layer is calibrated on, where there are so many and all layers' are no more than …
ROOM = 4 * 2**30  # bytes
LEAST = 8192  # tokens of a layer, however many layers there are
FEWEST = 16  # tokens that anything is fitted on


def record_inputs(model: nn.Module, calibration: Calibration, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """The inputs of the modules at the paths of `widths`, by path: (tokens, d) on the CPU; without those that receive too few."""
    size = max(parameter.element_size() for parameter in model.parameters())
    tokens = min(TOKENS, max(LEAST, ROOM // (size * max(1, sum(widths.values())))))
    recorders = {path: TokenRecorder(tokens) for path in widths}
    spread_out(calibration, tokens).observe(model, recorders)
    recorded = {path: recorder.tokens() for path, recorder in recorders.items()}
    return {path: x for path, x in recorded.items() if len(x) >= FEWEST}


class TokenRecorder:
    """Keeps the first `most` tokens that a module receives."""

    def __init__(self, most: int) -> None:
        self.most, self.parts = most, [torch.empty(0)]

    def __call__(self, x: Tensor) -> None:
        room = self.most - sum(map(len, self.parts))
        self.parts.append(set_aside(x[:room].cpu().clone()))
        if room <= len(x):
            raise Enough

    def tokens(self) -> Tensor:
        """(tokens, d); none where the module was not called."""
        return set_aside(torch.cat(self.parts[1:] or self.parts))


def spread_out(calibration: Calibration, tokens: int) -> Calibration:
    """Batches of about so many tokens, at even distances from one another: the data may go from one subject to the next."""
    given = sum(max(math.prod(one.shape[:2]) for one in batch.values() if isinstance(one, Tensor)) for batch in calibration.batches)
    return Calibration(calibration.batches[:: max(1, given // tokens)])


def spread(x: Tensor, most: int) -> Tensor:
    """At most so many rows of x, at even distances."""
    return x[torch.arange(most, device=x.device) * len(x) // most] if len(x) > most else x
