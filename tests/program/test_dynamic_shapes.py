"""Which sizes are dynamic in a graph module: batch and length always, those of images unless their expressions get long."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrofit.emitted.graph_module import graph_module
from retrofit.errors import DoesNotFitError
from retrofit.program import tracing_contexts
from retrofit.program.tracing_contexts import MAX_OPERATIONS, expression_length


class Padded(nn.Module):
    """A layer that pads the width of what it is given to a multiple of a number."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple, self.mix = multiple, nn.Conv2d(4, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.mix(F.pad(image, (0, (-image.shape[-1]) % self.multiple)))


class ImageModel(nn.Module):
    """A classifier of images that are padded to one multiple after another."""

    def __init__(self, *multiples: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)
        self.layers = nn.ModuleList(map(Padded, multiples))

    def forward(self, pixel_values: Tensor) -> Tensor:
        image = self.patches(pixel_values)
        for layer in self.layers:
            image = layer(image)
        return self.head(image.mean((2, 3)))


def images(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("multiples", [(), (3,)])
def test_sizes_of_images_are_dynamic(multiples: tuple[int, ...]) -> None:
    model = ImageModel(*multiples)
    graph = graph_module(model, {"pixel_values": images(2, 7, 11)})
    torch.testing.assert_close(graph(images(3, 5, 17)), model(images(3, 5, 17)))


def test_sizes_of_images_with_long_expressions_are_static_and_the_batch_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    monkeypatch.setattr(tracing_contexts, "expression_length", lambda size: lengths.append(expression_length(size)) or lengths[-1])
    model = ImageModel(3, 5, 7, 11)
    graph = graph_module(model, {"pixel_values": images(2, 7, 13)})
    assert max(lengths) > MAX_OPERATIONS, "the expressions did get long"
    torch.testing.assert_close(graph(images(3, 7, 13)), model(images(3, 7, 13)))
    with pytest.raises(DoesNotFitError, match="pixel_values has 10 as its dimension 3"):
        graph(images(3, 7, 10))
