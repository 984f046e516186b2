"""A parameter that gets longer along one dimension: the dense entries first, then new ones with a start of their own."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import Tensor, nn

from retrofit.sdk import Edit

Start = Literal["copies", "noise", "zeros"]
REPEATED = "a copy for each block, (K−1) times its size"  # what a parameter gets that is added to the stream


@dataclasses.dataclass(frozen=True)
class Growth:
    """The parameter `name`, times `scale`, gets `extent` entries more along `dim`."""

    name: str
    dim: int
    extent: int
    start: Start  # of the new entries: copies of the dense ones, noise with their spread, or zeros
    what: str  # how many there are, as a formula
    scale: float = 1.0

    def new_elements(self, model: nn.Module) -> int:
        old = model.get_parameter(self.name)
        return old.numel() // old.shape[self.dim] * self.extent


def grow(growth: Growth, edit: Edit) -> None:
    """The parameter is the longer one wherever it is registered, and modules that store its width store the new one."""
    old, dim = edit.model.get_parameter(growth.name), growth.dim
    width = old.shape[dim]
    size = list(old.shape)
    size[dim] += growth.extent
    new = nn.Parameter(old.detach().new_empty(size), requires_grad=old.requires_grad)
    dense, rest = new.detach().split([width, growth.extent], dim)
    dense.copy_(old)
    if growth.scale != 1.0:
        dense.mul_(growth.scale)
    fill(rest, dense, old, growth)
    for module in list(edit.model.modules()):
        if any(parameter is old for parameter in module._parameters.values()):
            for attribute in ("embedding_dim", "in_features"):
                if getattr(module, attribute, None) == width:
                    edit.set_attribute(module, attribute, new.shape[dim])
    index = [slice(None)] * old.dim()
    index[dim] = slice(0, width)
    edit.widen_parameter(old, new, tuple(index), growth.what, growth.scale)


def fill(rest: Tensor, dense: Tensor, old: Tensor, growth: Growth) -> None:
    """`rest` holds the new entries' start."""
    if growth.start == "zeros":
        rest.zero_()
    elif growth.start == "noise":
        rest.normal_(std=1.0 if old.is_meta else float(old.detach().std()))
    else:
        for part in rest.split(old.shape[growth.dim], growth.dim):
            part.copy_(dense)
