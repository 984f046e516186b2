"""What a strided layer stores in the model's cache, as the strided layer uses it: one interface, of which there are two kinds.

`growing_anchors` has the kind for decoding with the model's own code, which appends anchors; `placed_anchors` the kind for exported
programs, whose sizes follow from the number of tokens.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrofit.passes.sequence_altup.anchor_keys import AnchorKeys, SecondaryAnchorKeys
from retrofit.passes.sequence_altup.anchors import Anchors, CountedAnchors, Indices
from retrofit.passes.sequence_altup.argument_paths import ArgumentPath
from retrofit.sdk import DoesNotFitError, TokenHistory, forget_histories

MaskArgument = tuple[ArgumentPath, torch.dtype]  # the argument by which a layer receives its mask, and the mask's type


class AnchorLayer(AnchorKeys):
    """The cache's layer of a strided layer's first attention: it also stores the correction of the last anchor.

    A strided layer that keeps no keys (a recurrent one, a feed-forward) has its own with the token histories of the cache.
    """

    common = frozenset({"real"})  # of what a program carries: the same for every strided layer of a model

    def __init__(self, name: str, k: int) -> None:
        self.k = k
        self.secondary: list[SecondaryAnchorKeys] = []  # where the strided layer has several attentions, those of the others
        self.histories: dict[str, TokenHistory] = {}  # of anchors, by the names of the modules inside that need them
        super().__init__(name)

    def forget(self) -> None:
        super().forget()
        forget_histories(self.histories)
        self.tokens = 0  # columns so far, padding included
        self.mask: MaskArgument | None = None  # by which argument the layer received its last mask
        self.template: Any = None  # how the layer's output can be rebuilt without running the layer
        self.recurrent: tuple[tuple[str, int | str, int | str], ...] | None = None  # the cache's states that the layer advances

    def replacement_for(self, layer: Any) -> AnchorKeys:
        """What replaces `layer`, which an attention inside is about to write to: this layer, or a new secondary one."""
        own: AnchorKeys = self
        if self.counter is not None:
            own = SecondaryAnchorKeys(self.name)
        own.replace(layer)
        if isinstance(own, SecondaryAnchorKeys):
            if own.is_sliding != self.is_sliding:
                raise DoesNotFitError(
                    f"the strided layer {self.name} has attentions with different windows",
                    why="the anchors of one strided layer leave the cache together",
                    remedy="leave the layer out with layers=…",
                )
            self.secondary.append(own)
        return own

    @property
    @abc.abstractmethod
    def earlier(self) -> Tensor | None:
        """The correction of the last anchor, (batch, 1, d); None before the first."""

    @abc.abstractmethod
    def offset(self, length: int) -> int:
        """The column of the first key in a mask for `length` new tokens."""

    @abc.abstractmethod
    def anchors(self, length: int, real: Tensor | None, batch: int) -> Anchors:
        """The anchors among the next `length` tokens, of which `real` (1 or batch, length) are no padding; None: all."""

    def make_room(self, new: Anchors, key_extents: Callable[[], list[int]]) -> None:
        """The `new` anchors can be stored, under masks by so many keys."""

    @abc.abstractmethod
    def key_indices(self, new: Anchors, offset: int, extent: int, device: torch.device) -> tuple[Indices, Tensor | None]:
        """Which of a mask's `extent` keys are the stored and the `new` anchors, and which of these are visible (None: all)."""

    @abc.abstractmethod
    def sees_all(self, new: Anchors) -> bool:
        """Whether the `new` anchors need no mask: they may see every stored entry, and of one another those before them."""

    @abc.abstractmethod
    def visible(self, new: CountedAnchors) -> Tensor:
        """Which keys, stored and new, each of the `new` anchors may see: (batch, 1, anchors, keys)."""

    def settled(self, y: Tensor, between: Callable[[], Tensor]) -> Tensor:
        """The stream after the layer: `y`, or what it is `between` anchors, where only values tell if the new tokens hold one."""
        return y

    @abc.abstractmethod
    def advance(self, new: Anchors, real: Tensor | None, length: int, corrections: Tensor | None) -> None:
        """`length` tokens have passed; `corrections` (batch, anchors, d) are their anchors', None where there were no anchors."""

    @abc.abstractmethod
    def carried(self) -> dict[str, Tensor]:
        """What is stored, as tensors by name, for a program that takes and returns them."""

    @abc.abstractmethod
    def carrying(self, states: dict[str, Tensor]) -> AnchorLayer:
        """A layer like this one that holds these states; nothing where there are none."""
