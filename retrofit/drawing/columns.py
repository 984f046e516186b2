"""How a drawing is divided: a column for each stack, with what is below and above its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.folding import Fold, fold_sequence
from retrofit.anatomy.parts import Branch, Stack
from retrofit.anatomy.surroundings import Piece, Surroundings
from retrofit.anatomy.wording import compact
from retrofit.drawing.faces import BODY, BRACKET, NAME
from retrofit.drawing.layer_picture import BRANCH_AT, EDGE, NARROWEST, UNTOUCHED, Frame, Inlet, panel_width
from retrofit.drawing.placement import Placement
from retrofit.drawing.rewrites import RewrittenSites, blocks_of
from retrofit.drawing.sheet import Point

MARGIN, GUTTER = 36.0, 84.0
WIDEST_PIECE = 430.0


@dataclasses.dataclass
class Column:
    """One stack, its surroundings, and where they were drawn."""

    stack: Stack
    folds: tuple[Fold, ...]
    stem: list[Piece] = dataclasses.field(default_factory=list)
    tail: list[Piece] = dataclasses.field(default_factory=list)
    head: Piece | None = None
    frame: Frame = dataclasses.field(default_factory=lambda: Frame(0, 0))
    inlets: list[Inlet] = dataclasses.field(default_factory=list)
    stem_entries: list[tuple[Piece, Point]] = dataclasses.field(default_factory=list)  # left edges of the stem's boxes
    sites: RewrittenSites = UNTOUCHED
    blocks: int = 1  # of the stream, each as wide as the layers
    floor: float = 0.0  # above what it shares with others
    entry: float = 0.0  # where other stacks join the stream, below the first layer
    top: float = 0.0

    @property
    def crossing(self) -> list[Branch]:
        """The cross-attentions of the stack."""
        return [branch for layer in self.stack.layers for branch in layer.branches if branch.role == "cross-attention"]

    @property
    def brackets(self) -> float:
        """The room that the brackets of repeated layers take."""
        return bracket_depth(self.folds) * bracket_width(self.folds)

    @property
    def left(self) -> float:
        """The left edge, brackets included."""
        return self.frame.left - (0 if self.frame.mirrored else self.brackets)

    @property
    def right(self) -> float:
        return self.frame.right + (self.brackets if self.frame.mirrored else 0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns from left to right, and the pieces shared by several of them."""

    columns: tuple[Column, ...]
    shared: tuple[tuple[Piece, tuple[Column, ...]], ...]


def lay_out(anatomy: Anatomy, around: Surroundings, placement: Placement) -> Layout:
    """Every piece around the stacks has its place; modules without parameters have none."""
    sites = RewrittenSites.of(anatomy)
    columns = tuple(
        Column(stack, fold_sequence([sites.kind(layer) for layer in stack.layers]), sites=sites, blocks=blocks_of(anatomy, stack))
        for stack in anatomy.stacks
    )
    shared = []
    for piece in (*around.embeddings, *around.stem) if columns else ():
        if piece.part is None and piece.parameters == 0:
            continue
        stacks = placement.stacks_computed_from(nodes_in_piece(piece, placement)) or (0,)
        if len(stacks) > 1:
            shared.append((piece, tuple(columns[index] for index in stacks)))
        else:
            columns[stacks[0]].stem.append(piece)
    for piece in (*around.tail, *filter(None, [around.head])) if columns else ():
        found = placement.last_stack_before(nodes_in_piece(piece, placement))
        column = columns[-1 if found is None else found]
        if piece is around.head:
            column.head = piece
        elif piece.parameters != 0:
            column.tail.append(piece)
    x = MARGIN
    for column in columns:
        mirrored = bool(column.crossing)  # its branches are turned towards what they read
        column.frame = Frame(x if mirrored else x + column.brackets, column_width(column), mirrored)
        x += column.brackets + column.frame.width + GUTTER
    return Layout(columns, tuple(shared))


def nodes_in_piece(piece: Piece, placement: Placement) -> list[str]:
    """The graph nodes computed in a piece."""
    inside = [] if piece.part else [node for name in piece.names for node in placement.nodes_of.get(name, [])]
    return [*piece.nodes, *inside]


def column_width(column: Column) -> float:
    panels = [panel_width(layer, column.sites) for layer in column.stack.layers]
    pieces = [piece_width(piece) for piece in (*column.stem, *column.tail, *filter(None, [column.head]))]
    return max([BRANCH_AT + NARROWEST + EDGE, *panels, *pieces])


def piece_width(piece: Piece) -> float:
    """How wide a piece's box has to be, within limits: for name and class, or else for the name alone."""
    full = 44 + NAME.width(piece.name) + max(BODY.width(class_and_size(piece)), BODY.width(dimensions(piece)))
    return full if full <= WIDEST_PIECE else min(full - BODY.width(piece.kind), WIDEST_PIECE)


def class_and_size(piece: Piece) -> str:
    """The class and the size of a module."""
    return " · ".join(filter(None, [piece.kind, "" if piece.parameters is None else compact(piece.parameters)]))


def dimensions(piece: Piece) -> str:
    return " × ".join(map(str, piece.part.shape)) if piece.part is not None else ""


def bracket_depth(folds: Sequence[Fold]) -> int:
    """How many brackets are next to one another."""
    return max(((fold.times > 1) + bracket_depth(fold.body) for fold in folds), default=0)


def bracket_width(folds: Sequence[Fold]) -> float:
    """The room that one bracket with its number takes."""
    return 30 + BRACKET.width(f"×{most_repetitions(folds)}")


def most_repetitions(folds: Iterable[Fold]) -> int:
    """The largest number of repetitions."""
    return max((max(fold.times, most_repetitions(fold.body)) for fold in folds), default=1)
