"""Which sizes a graph module is free in: batch and length always, those of pictures unless they get tangled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrofit.errors import DoesNotFitError
from retrofit.graphs.graph_module import graph_module
from retrofit.program import dynamic_shapes as free_sizes
from retrofit.program.dynamic_shapes import LONGEST, operations


class Padded(nn.Module):
    """A layer that pads the width of what it is given to a multiple of a number."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple, self.mix = multiple, nn.Conv2d(4, 4, 1)

    def forward(self, picture: Tensor) -> Tensor:
        return self.mix(F.pad(picture, (0, (-picture.shape[-1]) % self.multiple)))


class Pictures(nn.Module):
    """A classifier of pictures that are padded to one multiple after another."""

    def __init__(self, *multiples: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)
        self.layers = nn.ModuleList(map(Padded, multiples))

    def forward(self, pixel_values: Tensor) -> Tensor:
        picture = self.patches(pixel_values)
        for layer in self.layers:
            picture = layer(picture)
        return self.head(picture.mean((2, 3)))


def pictures(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("multiples", [(), (3,)])
def test_sizes_of_pictures_are_free(multiples: tuple[int, ...]) -> None:
    model = Pictures(*multiples)
    graph = graph_module(model, {"pixel_values": pictures(2, 7, 11)})
    torch.testing.assert_close(graph(pictures(3, 5, 17)), model(pictures(3, 5, 17)))


def test_tangled_sizes_of_pictures_are_fixed_and_the_batch_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = []
    monkeypatch.setattr(free_sizes, "operations", lambda extent: longest.append(operations(extent)) or longest[-1])
    model = Pictures(3, 5, 7, 11)
    graph = graph_module(model, {"pixel_values": pictures(2, 7, 13)})
    assert max(longest) > LONGEST, "the sizes did get tangled"
    torch.testing.assert_close(graph(pictures(3, 7, 13)), model(pictures(3, 7, 13)))
    with pytest.raises(DoesNotFitError, match="pixel_values has 10 as its dimension 3"):
        graph(pictures(3, 7, 10))
