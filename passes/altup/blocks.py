"""Modules around a stream of K blocks: those that let a d-wide module read it, and those at its ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.sdk import Wrapper, argument_place, find_argument, map_first


class Blockwise(Wrapper):
    """The d-wide `layer` reads each block of its K·d-wide argument `wide` on its own; its outputs are concatenated."""

    def __init__(self, layer: nn.Module, k: int, wide: int | str = 0) -> None:
        super().__init__(layer)
        self.k, self.place = k, argument_place(layer, wide)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.place, arguments, keywords)
        outputs = []
        for block in container[key].chunk(self.k, -1):
            container[key] = block
            outputs.append(self.layer(*arguments, **keywords))
        blocks = [output if isinstance(output, Tensor) else output[0] for output in outputs]
        return map_first(outputs[0], lambda _: torch.cat(blocks, -1))


class Replicated(Wrapper):
    """The output of `layer`, K times side by side."""

    def __init__(self, layer: nn.Module, k: int) -> None:
        super().__init__(layer)
        self.k = k

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_first(self.layer(*args, **kwargs), lambda y: torch.cat([y] * self.k, -1))


class BlockScale(nn.Module):
    """Block i is multiplied by scale[i]; `before`, a forward pre-hook of a module, does so to the module's first argument.

    A scale that is not learned is plain numbers: a buffer would round 1/3 to the dtype of the weights.
    """

    def __init__(self, scale: Sequence[float], *, learnable: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.get_default_dtype())) if learnable else tuple(scale)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.chunk(len(self.scale), -1)
        return torch.cat([block * weight for block, weight in zip(blocks, self.scale, strict=True)], -1)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self(args[0]), *args[1:])


class DivideAndProject(nn.Module):
    """An extra width e, divided into K−1 sub-blocks, each projected to d (external-memory paper, §5.4).

    `after`, a forward hook of the look-up, widens its d+e columns to K·d; `before`, a forward pre-hook of the head, narrows K·d
    columns to d+e with the same matrices transposed.
    """

    def __init__(self, extra: int, k: int, width: int) -> None:
        super().__init__()
        part = extra // (k - 1)
        self.weight = nn.Parameter(torch.randn(k - 1, width, part) / part**0.5)  # (K−1, d, e/(K−1))

    def forward(self, extra: Tensor) -> Tensor:
        """(…, e) gives (…, (K−1)·d)."""
        parts = extra.unflatten(-1, (len(self.weight), -1))  # (…, K−1, e/(K−1))
        return torch.einsum("...kp,kdp->...kd", parts, self.weight.to(extra.dtype)).flatten(-2)

    def narrow(self, blocks: Tensor) -> Tensor:
        """(…, (K−1)·d) gives (…, e)."""
        return torch.einsum("...kd,kdp->...kp", blocks.unflatten(-1, (len(self.weight), -1)), self.weight.to(blocks.dtype)).flatten(
            -2
        )

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        width = self.weight.shape[1]
        return torch.cat([output[..., :width], self(output[..., width:])], -1)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, width = args[0], self.weight.shape[1]
        return (torch.cat([x[..., :width], self.narrow(x[..., width:])], -1), *args[1:])
