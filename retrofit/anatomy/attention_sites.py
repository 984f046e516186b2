"""What is known of one attention: its projections, its input streams, its output matrix and its mask.

    q, k, v = the columns of x W + b that become queries, keys and values         self-attention
    q of x; k, v of the other stream                                              cross-attention
    y = core(q, k, v) W_out + b_out

Positions, norms, masks and the cache lie between a projection and the core. They are the module's own code, and stay.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from retrofit.anatomy.weight_matrices import Matrix
from retrofit.program.program import Key

LETTERS = ("q", "k", "v")
REST = "g"  # columns of a projection that are read for something else: a gate on the attention's result


@dataclasses.dataclass(frozen=True)
class SiteProjection:
    """One module that multiplies by a weight, and which columns of its result are queries, keys and values.

    A letter names one set of columns: "q", "k", "v"; "kv" for columns that are both keys and values; "g" for those that are none.
    """

    matrix: Matrix
    columns: tuple[tuple[str, tuple[int, ...]], ...]  # by letter, ascending; together they are all the columns
    stream: str  # the node that is multiplied; projections of one stream name the same node
    stream_width: int

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(letter for letter, _ in self.columns)

    @property
    def width(self) -> int:
        """The number of its columns."""
        return sum(len(places) for _, places in self.columns)


@dataclasses.dataclass(frozen=True)
class StreamReader:
    """A module inside an attention, other than its projections, that reads the stream: a gate, a router."""

    path: str
    key: Key  # the argument that is the stream


@dataclasses.dataclass(frozen=True)
class MaskArgument:
    """The argument of an attention module that determines which keys a query may see."""

    key: Key
    true_hides: bool  # whether True, in a mask of booleans, means hidden


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One attention of a model whose projections can be replaced.

    In self-attention all projections read the stream x. In cross-attention queries are projections of x, and keys and values are
    projections of the source, another stream.
    """

    name: str  # path of the module in whose call the projections are applied
    cross: bool
    causal: bool  # whether its stack is: then it may decode with a cache
    calls: int  # how often the module is called in one forward: more than once where depths share it
    heads: int
    width: int  # of x
    stream_in: Key  # the argument that is x; None where no one argument is
    source_in: Key  # the argument that is the source; None likewise
    projections: tuple[SiteProjection, ...]
    out: Matrix | None  # the output matrix, which multiplies the core's result
    out_shape: tuple[int, int]  # its columns in and out
    why_no_out: str  # why there is none that could be replaced
    returns_out: bool  # whether the module returns the product with `out`, except for dropout
    out_key: Key  # where in its result; meaningful only where `returns_out`
    readers: tuple[StreamReader, ...] = ()
    why_separate: str = (
        ""  # why x cannot be replaced as an argument: the module's own code reads it, or projections read several streams
    )
    mask: MaskArgument | None = None
    tokens_first: bool = False  # whether x is (length, batch, width) and not (batch, length, width)

    @property
    def widths(self) -> dict[str, int]:
        """The number of columns by letter."""
        return {letter: len(places) for one in self.projections for letter, places in one.columns}

    @property
    def stream_projections(self) -> tuple[SiteProjection, ...]:
        """The projections of x."""
        return tuple(one for one in self.projections if not self.cross or "q" in one.letters)

    @property
    def source_projections(self) -> tuple[SiteProjection, ...]:
        """In cross-attention the projections of the source."""
        return tuple(one for one in self.projections if self.cross and "q" not in one.letters)


def weights_by_letter(site: AttentionSite, model: nn.Module) -> dict[str, Tensor]:
    """The dense weight of each letter, (in, columns)."""
    weights = {}
    for one in site.projections:
        weight = model.get_parameter(one.matrix.weight).detach()
        weight = weight.t() if one.matrix.out_first else weight
        for letter, places in one.columns:
            weights[letter] = weight[:, list(places)]
    return weights
