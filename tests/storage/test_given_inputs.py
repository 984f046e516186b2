"""A `.pt` file of a model that was captured with inputs that somebody gave: loading needs inputs like them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_models import Block
from torch import Tensor, nn

import retrofit
from retrofit.errors import CheckpointError


class Sensors(nn.Module):
    """Takes numbers and no token ids, in a mapping: nothing in it tells what to capture it with."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.config = {"channels": channels}
        self.enter, self.leave = nn.Linear(channels, 24), nn.Linear(24, 1)
        self.layers = nn.ModuleList(Block(24) for _ in range(2))

    def forward(self, batch: dict[str, Tensor], scale: Tensor) -> Tensor:
        y = self.enter(batch["values"]) * scale
        for layer in self.layers:
            y = layer(y)
        found: Tensor = self.leave(y)
        return found


def sensors(verify: bool) -> tuple[Sensors, dict[str, Any]]:
    given = {"batch": {"values": torch.randn(2, 5, 3)}, "scale": torch.tensor(2.0)}
    model = Sensors().eval()
    return retrofit.apply(model, "memory(lookup=softmax, buckets=4)", example_inputs=given, verify=verify), given


def test_a_recipe_is_replayed_on_inputs_like_those_that_were_given(tmp_path: Path) -> None:
    model, given = sensors(verify=True)  # its round trip too
    path = retrofit.save(model, tmp_path / "model.pt")
    with torch.no_grad():
        assert torch.equal(retrofit.load(path)(**given), model(**given))
        assert torch.equal(retrofit.load(path, build=Sensors)(**given), model(**given))
    assert "inputs" not in torch.load(retrofit.save(Sensors(), tmp_path / "dense.pt"), weights_only=True)


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ({"batch": ["float32", [1 << 60]]}, "does not fit in memory"),
        ({"batch": ["no_dtype", [2]]}, "malformed"),
        ({"batch": 3}, "malformed"),
        ([1], "malformed: inputs"),
    ],
)
def test_inputs_that_are_not_told_as_they_should_be_are_refused(inputs: Any, what: str, tmp_path: Path) -> None:
    path = retrofit.save(sensors(verify=False)[0], tmp_path / "model.pt")
    torch.save(torch.load(path, weights_only=True) | {"inputs": inputs}, path)
    with pytest.raises(CheckpointError) as caught:
        retrofit.load(path)
    assert what in str(caught.value)
