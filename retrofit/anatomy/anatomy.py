"""The anatomy of a transformer: what `retrofit.inspect` finds in a captured graph, as people and programs read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from retrofit.anatomy.findings import Findings
from retrofit.anatomy.sites import NearMiss
from retrofit.anatomy.text import plain, table

if TYPE_CHECKING:
    from retrofit.anatomy.wrapped_modules import WrappedModule


@dataclasses.dataclass(frozen=True)
class Anatomy(Findings):
    """What was found in a model, where, and what was not; as a string it is a table."""

    def __str__(self) -> str:
        return table(self)

    def to_dict(self) -> dict[str, Any]:
        """The anatomy as plain data, for `json`."""
        return plain(self)

    def sites(self, *kinds: str, layers: Iterable[int] | None = None) -> tuple[list[WrappedModule], list[NearMiss]]:
        """Return the modules that own the parts of these kinds, each module once, and a near miss for each part that has none.

        Kinds are `layer`, `attention`, `self-attention`, `cross-attention`, `ffn`, `moe` and `other mixer`. A module owns a part if
        it computes all products of it and nothing of another, and the sum with the stream is outside of it; norms at either end may
        be outside too. A module that runs at several depths is one site with all of them. `layers` restricts the parts to those
        depths of each stack.
        """
        from retrofit.anatomy.wrapped_modules import find_sites  # here, so that printing an anatomy never waits for torch

        return find_sites(self, *kinds, layers=layers)
