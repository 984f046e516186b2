"""What passes did to a model, as texts for the layers, branches and other modules of a picture.

The accounts of the passes say it (`Rewrite`, which a rewritten model carries); that a stream is of several blocks is seen from the
graph, where it is wider between the layers than these are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.folding import structure
from retrofit.anatomy.parts import Branch, Layer, Stack
from retrofit.drawing.faces import Face

REWRITTEN = Face(11.5, bold=True, color="#6d28d9")
IN_A_PATH = re.compile(r"(?<=[._])\d+")


@dataclasses.dataclass(frozen=True)
class RewrittenSites:
    """The sites of a model's passes, each with the method and what it does there."""

    methods: tuple[str, ...] = ()
    said: tuple[tuple[str, str], ...] = ()  # (module path, "altup: works on block 0 of 2")

    @staticmethod
    def of(anatomy: Anatomy) -> RewrittenSites:
        accounts: Iterable[Any] = getattr(anatomy.model, "retrofit_rewrites", None) or ()
        named = [(account.spec.partition("(")[0], account.sites) for account in accounts]
        said = [(site.name, f"{method}: {site.what}") for method, sites in named for site in sites]
        return RewrittenSites(tuple(dict.fromkeys(method for method, _ in named)), tuple(said))

    def at_branch(self, branch: Branch, layer: Layer) -> list[str]:
        """Return what was done to the branch, and to nothing else of its layer."""
        return [text for name, text in self.said if belongs_to_branch(name, branch, layer)]

    def at_layer(self, layer: Layer) -> list[str]:
        """Return what was done to the layer as a whole, or to modules in it that are no branch's."""
        return [
            text
            for name, text in self.said
            if is_within(name, layer.name) and not any(belongs_to_branch(name, branch, layer) for branch in layer.branches)
        ]

    def at_module(self, names: Sequence[str]) -> list[str]:
        """Return what was done to a module that is no layer's."""
        return [text for name, text in self.said if name in names]

    def kind(self, layer: Layer) -> Hashable:
        """Return what is equal in two layers that one panel fits: their structure, and what was done to both."""
        texts = [*self.at_layer(layer), *(text for branch in layer.branches for text in self.at_branch(branch, layer))]
        return structure(layer), tuple(IN_A_PATH.sub("*", text) for text in texts)


def belongs_to_branch(name: str, branch: Branch, layer: Layer) -> bool:
    """Whether a site is the branch's module, holds nothing else of the layer, or is inside it."""
    if not branch.name or not is_within(name, layer.name) or layer.name in (name, branch.name):
        return False
    others = [one.name for one in layer.branches if one is not branch]
    alone = is_within(branch.name, name) and not any(is_within(other, name) for other in others)
    return alone or is_within(name, branch.name)


def is_within(name: str, owner: str) -> bool:
    return bool(owner) and (name == owner or name.startswith(f"{owner}."))


def blocks_of(anatomy: Anatomy, stack: Stack) -> int:
    """Return how many blocks the stream has between the layers, each as wide as these compute in; 1 where it is no wider."""
    return max((blocks_at(anatomy, layer.entry, stack.width) for layer in stack.layers), default=1)


def blocks_at(anatomy: Anatomy, node: str, width: int) -> int:
    """Return how many times as wide as `width` the stream is at a node of the graph."""
    shape = anatomy.graph.nodes.get(node, {}).get("shape") or ()
    wide = shape[-1] if shape and isinstance(shape[-1], int) else width
    return max(1, wide // width) if width and wide % width == 0 else 1


def wrapped(texts: Iterable[str], width: float, face: Face = REWRITTEN) -> list[tuple[str, Face]]:
    """Return the texts as lines of that width at most, each text once."""
    lines: list[tuple[str, Face]] = []
    for text in dict.fromkeys(texts):
        line = ""
        for word in text.split():
            longer = f"{line} {word}".strip()
            if line and face.width(longer) > width:
                lines.append((line, face))
                longer = word
            line = longer
        lines.append((line, face))
    return lines
