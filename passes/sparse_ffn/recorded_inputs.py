"""What each feed-forward receives on calibration data: tokens at even distances over the data."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from retrofit.sdk import Calibration, Enough, groups_in_room, set_aside

TOKENS = 32_768  # that a layer is calibrated on, where there are so many
FEWEST = 16  # tokens that anything is fitted on


def recording_groups(model: nn.Module, calibration: Calibration, widths: Mapping[str, int]) -> list[list[str]]:
    """The paths of `widths` in groups, in order, whose inputs are recorded in one run of the model and fit in memory."""
    size = max(parameter.element_size() for parameter in model.parameters())
    return groups_in_room({path: size * most_tokens(calibration) * width for path, width in widths.items()}, model)


def most_tokens(calibration: Calibration) -> int:
    """Return how many tokens of a module are recorded at most: those of images and sound are not known before they are run."""
    tensors = [value for batch in calibration.batches for value in batch.values() if isinstance(value, Tensor)]
    return TOKENS if any(value.is_floating_point() for value in tensors) else min(TOKENS, tokens_given(calibration))


def record_inputs(model: nn.Module, calibration: Calibration, paths: list[str]) -> dict[str, Tensor]:
    """The inputs of the modules at the paths, by path: (tokens, d) on the CPU; without those that receive too few."""
    recorders = {path: TokenRecorder(most_tokens(calibration)) for path in paths}
    spread_out(calibration, TOKENS).observe(model, recorders)
    recorded = {path: recorder.tokens() for path, recorder in recorders.items()}
    return {path: x for path, x in recorded.items() if len(x) >= FEWEST}


class TokenRecorder:
    """Keeps the first `most` tokens that a module receives, in memory that is taken once."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self.rows = torch.empty(0)

    def __call__(self, x: Tensor) -> None:
        if not self.count:
            self.rows = set_aside(torch.empty(self.most, x.shape[-1], dtype=x.dtype))
        part = x[: self.most - self.count]
        self.rows[self.count : self.count + len(part)] = part
        self.count += len(part)
        if self.count == self.most:
            raise Enough

    def tokens(self) -> Tensor:
        """(tokens, d); none where the module was not called."""
        return self.rows[: self.count]


def spread_out(calibration: Calibration, tokens: int) -> Calibration:
    """Batches of about so many tokens, at even distances from one another: the data may go from one subject to the next."""
    return Calibration(calibration.batches[:: max(1, tokens_given(calibration) // tokens)])


def tokens_given(calibration: Calibration) -> int:
    """The tokens of the data, with padding."""
    return sum(max(math.prod(one.shape[:2]) for one in batch.values() if isinstance(one, Tensor)) for batch in calibration.batches)


def spread(x: Tensor, most: int) -> Tensor:
    """At most so many rows of x, at even distances."""
    return x[torch.arange(most, device=x.device) * len(x) // most] if len(x) > most else x
