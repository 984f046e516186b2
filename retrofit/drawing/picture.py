"""An anatomy as a drawing: inputs at the bottom, one column per stack, repeated layers drawn once, outputs at the top.

The drawing is self-contained SVG, without external scripts, fonts or style sheets. Everything is drawn upwards from the baseline of
the stems, so heights are negative.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from retrofit.anatomy import Anatomy, compact, plural
from retrofit.anatomy.outline import Fold, Piece, Surroundings, fold_sequence, leaves, surroundings
from retrofit.anatomy.parts import Branch, Stack
from retrofit.drawing.layer_picture import (
    BRANCH_AT,
    EDGE,
    LINE,
    LOOKS,
    NARROWEST,
    STREAM,
    STREAM_AT,
    UNTOUCHED,
    WIRE,
    Frame,
    Inlet,
    LayerPicture,
    RewrittenSites,
    blocks_of,
    panel_width,
    wrapped,
)
from retrofit.drawing.placement import Placement
from retrofit.drawing.sheet import BODY, BRACKET, FACTS, HEADLINE, MUTED, NAME, TITLE, Face, Point, Sheet, plainly_styled

MARGIN, GUTTER = 36.0, 84.0
WIDEST_PIECE = 430.0


@dataclasses.dataclass
class Column:
    """One stack, its surroundings, and the places where they were drawn."""

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
    floor: float = 0.0  # above the pieces that it shares with others
    entry: float = 0.0  # where other stacks join the stream, below the first layer
    top: float = 0.0

    @property
    def crossing(self) -> list[Branch]:
        """Return the cross-attentions of the stack."""
        return [branch for layer in self.stack.layers for branch in layer.branches if branch.role == "cross-attention"]

    @property
    def brackets(self) -> float:
        """Return the room for the brackets of repeated layers."""
        return bracket_depth(self.folds) * bracket_width(self.folds)

    @property
    def left(self) -> float:
        """Return the left edge, including brackets."""
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
    """Return the layout, in which every piece around the stacks has a place, except modules without parameters."""
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
    """Return the graph nodes computed in a piece."""
    inside = [] if piece.part else [node for name in piece.names for node in placement.nodes_of.get(name, [])]
    return [*piece.nodes, *inside]


def column_width(column: Column) -> float:
    panels = [panel_width(layer, column.sites) for layer in column.stack.layers]
    pieces = [piece_width(piece) for piece in (*column.stem, *column.tail, *filter(None, [column.head]))]
    return max([BRANCH_AT + NARROWEST + EDGE, *panels, *pieces])


def piece_width(piece: Piece) -> float:
    """Return the width of a piece's box, within limits: for name and class, or else for the name alone."""
    full = 44 + NAME.width(piece.name) + max(BODY.width(class_and_size(piece)), BODY.width(dimensions(piece)))
    return full if full <= WIDEST_PIECE else min(full - BODY.width(piece.kind), WIDEST_PIECE)


def class_and_size(piece: Piece) -> str:
    """Return the class and the size of a module."""
    return " · ".join(filter(None, [piece.kind, "" if piece.parameters is None else compact(piece.parameters)]))


def dimensions(piece: Piece) -> str:
    return " × ".join(map(str, piece.part.shape)) if piece.part is not None else ""


def bracket_depth(folds: Sequence[Fold]) -> int:
    """Return the number of brackets next to one another."""
    return max(((fold.times > 1) + bracket_depth(fold.body) for fold in folds), default=0)


def bracket_width(folds: Sequence[Fold]) -> float:
    """Return the room for one bracket with its number."""
    return 30 + BRACKET.width(f"×{most_repetitions(folds)}")


def most_repetitions(folds: Iterable[Fold]) -> int:
    """Return the largest number of repetitions."""
    return max((max(fold.times, most_repetitions(fold.body)) for fold in folds), default=1)


BETWEEN, RISE = 18.0, 16.0  # between layers; between other boxes
PART_FILL, PART_EDGE = "#eef2f6", "#8695a8"
PART_HEIGHT, BAR_HEIGHT = 48.0, 30.0
THICK, THIN, APART, MOST_LANES = 5.0, 2.2, 4.4, 6  # of the stream: one line, or one for each block
MEMORY = LOOKS["cross-attention"][2]


def stream_width(width: int, blocks: int) -> str:
    return f"width {width}" if blocks == 1 else f"{blocks} blocks of width {width}"


def lanes(stream: float, blocks: int) -> list[float]:
    """Return the positions of the lines of the stream's blocks, next to one another, as many as fit."""
    shown = min(blocks, MOST_LANES)
    return [stream + APART * (place - (shown - 1) / 2) for place in range(shown)]


def svg(anatomy: Anatomy) -> str:
    """Return the drawing of the anatomy as one SVG file."""
    with plainly_styled():
        return Picture(anatomy).draw()


class Picture:
    """Draws the columns of an anatomy and their connections."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.placement = Placement(anatomy)
        self.around = surroundings(anatomy)
        self.sites = RewrittenSites.of(anatomy)
        self.layout = lay_out(anatomy, self.around, self.placement)
        self.columns = self.layout.columns
        self.sheet = Sheet()
        self.tied: list[Point] = []  # the right edges of the embedding's and the head's box

    def draw(self) -> str:
        floor = 0.0
        for piece, columns in self.layout.shared:
            left, right = min(column.frame.left for column in columns), max(column.frame.right for column in columns)
            floor = self.draw_piece(piece, left, right, floor) - RISE
            for column in self.columns:
                column.floor = floor if left <= column.frame.left < right else column.floor
        for index, column in enumerate(self.columns):
            self.draw_column(index, column)
        for index, column in enumerate(self.columns):
            self.draw_links(index, column)
        right = max((column.right for column in self.columns), default=MARGIN)
        if self.around.tied and len(self.tied) == 2:
            right = self.draw_tie(right)
        return self.framed(right + MARGIN)

    def framed(self, right: float) -> str:
        """Return the finished drawing, with headline and notes."""
        anatomy, sheet = self.anatomy, self.sheet
        name = type(anatomy.model).__name__
        facts = [plural(anatomy.parameters, "parameter")]
        if anatomy.stacks:
            blocks = max(column.blocks for column in self.columns)
            facts += [stream_width(anatomy.width, blocks), plural(sum(len(stack.layers) for stack in anatomy.stacks), "layer")]
        if self.sites.methods:
            facts.append(f"rewritten by {', '.join(self.sites.methods)}")
        line = " · ".join(facts)
        top = min((column.top for column in self.columns), default=0.0) - 76
        right = max(right, 2 * MARGIN + HEADLINE.width(name), 2 * MARGIN + FACTS.width(line))
        sheet.text(MARGIN, top + 16, name, HEADLINE)
        sheet.text(MARGIN, top + 38, line, FACTS)
        y = 48.0
        for note in anatomy.notes:
            for text in textwrap.wrap(note, max(24, int((right - 2 * MARGIN) / 7.2))):
                y += 17
                sheet.text(MARGIN, y, text, BODY)
        return sheet.document(top - 28, right, y + 24, f"The anatomy of {name}", line)

    def draw_column(self, index: int, column: Column) -> None:
        """Draw one stack from its inputs up to its outputs."""
        sheet, frame, stack = self.sheet, column.frame, column.stack
        inputs = ", ".join(self.placement.inputs_of(index)) or ("" if self.placement.stacks_feeding(index) else "inputs")
        if inputs:
            sheet.wire([(frame.stream, 30), (frame.stream, 1)], WIRE, 2, arrow=True)
            self.label_stream(frame, 22, inputs, NAME)
        y = column.floor
        for piece in column.stem:
            lower = y
            y = self.draw_piece(piece, frame.left, frame.right, y)
            column.stem_entries.append((piece, (frame.left, (lower + y) / 2)))
            y -= RISE
        facts = [stack.kind, stream_width(stack.width, column.blocks), *["causal"] * stack.causal]
        self.label_stream(frame, y - 4, " · ".join(facts), BODY)
        column.entry = y - 8
        layers = LayerPicture(sheet, frame, self.sites)
        y = self.draw_folds(column, layers, column.folds, leaves(column.folds), y - 24) + BETWEEN - RISE
        column.inlets = layers.inlets
        for piece in (*column.tail, *filter(None, [column.head])):
            y = self.draw_piece(piece, frame.left, frame.right, y) - RISE
        y += RISE if column.head else 0
        for x in lanes(frame.stream, column.blocks):
            sheet.wire([(x, column.floor + (RISE if column.floor else 0)), (x, y)], STREAM, THICK if column.blocks == 1 else THIN)
        if column.head or not self.has_readers(index):
            sheet.wire([(frame.stream, y), (frame.stream, y - 28)], WIRE, 2, arrow=True)
            self.label_stream(frame, y - 12, "logits" if column.head else "output", BODY)
            y -= 28
        column.top = y

    def label_stream(self, frame: Frame, y: float, text: str, face: Face) -> None:
        """Write a text next to the stream."""
        anchor = "end" if frame.mirrored else "start"
        self.sheet.text(frame.at(STREAM_AT + 14), y, text, face, anchor, frame.width - STREAM_AT - 32)

    def draw_folds(
        self,
        column: Column,
        picture: LayerPicture,
        folds: Sequence[Fold],
        written: Iterator[tuple[Fold, tuple[int, ...]]],
        y: float,
    ) -> float:
        """Draw the folds upwards from `y`, each repeated one in a bracket; return the position of the next one."""
        for fold in folds:
            bottom = y
            if fold.body:
                y = self.draw_folds(column, picture, fold.body, written, y)
            else:
                _, positions = next(written)
                layers = [column.stack.layers[position] for position in positions]
                y = picture.draw(layers, positions, self.placement.norms(layers[0]), y) - BETWEEN
            if fold.times > 1:
                self.draw_bracket(column, fold, y + BETWEEN, bottom)
        return y

    def draw_bracket(self, column: Column, fold: Fold, top: float, bottom: float) -> None:
        frame, out = column.frame, bracket_depth(fold.body) * bracket_width(column.folds)
        inner, edge = frame.at(-7 - out), frame.at(-14 - out)
        self.sheet.wire([(inner, top + 1), (edge, top + 1), (edge, bottom - 1), (inner, bottom - 1)], MUTED, 2)
        self.sheet.text(
            frame.at(-21 - out), (top + bottom) / 2 + 6, f"×{fold.times}", BRACKET, "start" if frame.mirrored else "end"
        )

    def draw_piece(self, piece: Piece, left: float, right: float, y: float) -> float:
        """Draw a module outside the layers, its lower edge at `y`; return its upper edge."""
        if piece.part is None:
            return self.draw_bar(piece, left, right, y)
        sheet, width = self.sheet, right - left
        done = wrapped(self.sites.at_module(piece.names or (piece.name,)), width - 24)
        height = PART_HEIGHT + LINE * len(done)
        top = y - height
        is_head, shape = piece is self.around.head, dimensions(piece)
        size = "tied" if is_head and self.around.tied else compact(piece.parameters or 0)
        sheet.box(left, top, width, height, PART_FILL, PART_EDGE)
        sheet.text(left + 12, top + 20, "Head" if is_head else "Embedding", TITLE)
        sheet.text(right - 12, top + 20, size, BODY, "end")
        sheet.text(left + 12, top + 37, piece.name, NAME, width=width - 36 - BODY.width(shape))
        sheet.text(right - 12, top + 37, shape, BODY, "end")
        self.write_lines(left + 12, top + 37, done)
        if is_head or (self.anatomy.embedding is not None and piece.part.parameter == self.anatomy.embedding.parameter):
            self.tied.append((right, top + height / 2))
        return top

    def draw_bar(self, piece: Piece, left: float, right: float, y: float) -> float:
        """Draw a module that is neither embedding nor head, without its class if there is no room; return its upper edge."""
        width, aside = right - left, class_and_size(piece)
        done = wrapped(self.sites.at_module(piece.names or (piece.name,)), width - 24)
        top = y - BAR_HEIGHT - LINE * len(done)
        if NAME.width(piece.name) + BODY.width(aside) > width - 40:
            aside = "" if piece.parameters is None else compact(piece.parameters)
        self.sheet.box(left, top, width, y - top, PART_FILL, PART_EDGE)
        self.sheet.text(right - 12, top + 19, aside, BODY, "end", width / 2)
        self.sheet.text(left + 12, top + 19, piece.name, NAME, width=width - 40 - min(BODY.width(aside), width / 2))
        self.write_lines(left + 12, top + 19, done)
        return top

    def write_lines(self, x: float, y: float, lines: Sequence[tuple[str, Face]]) -> None:
        """Write the lines below the baseline `y`."""
        for number, (text, face) in enumerate(lines, start=1):
            self.sheet.text(x, y + LINE * number, text, face)

    def has_readers(self, index: int) -> bool:
        """Return whether another stack starts from this one's result or attends to it."""
        others = [(other, column) for other, column in enumerate(self.columns) if other != index]
        return any(
            index in self.placement.stacks_feeding(other)
            or any(index in self.placement.stacks_read_by(other, branch) for branch in column.crossing)
            for other, column in others
        )

    def draw_links(self, index: int, column: Column) -> None:
        """Draw the wires from other stacks to the stream and the cross-attentions of a stack."""
        for source in self.placement.stacks_feeding(index):
            lane = column.left - 30
            computed = self.placement.nodes_from_stack(index, source)
            entries = [point for piece, point in column.stem_entries if computed & set(nodes_in_piece(piece, self.placement))]
            goal = entries[0] if entries else (column.frame.stream, column.entry)
            self.sheet.wire([*self.route_from(source, index, lane), (lane, goal[1]), goal], STREAM, 2.4, arrow=True)
        for inlet in column.inlets:
            (x, y), lane = inlet.point, column.frame.left - 34
            sources = self.placement.stacks_read_by(index, inlet.branch)
            for source in sources:
                self.sheet.wire([*self.route_from(source, index, lane), (lane, y), (x, y)], MEMORY, 2, arrow=True)
            if not sources:
                self.sheet.wire([(x - 44, y), (x, y)], MEMORY, 2, arrow=True)

    def route_from(self, source: int, index: int, lane: float) -> list[Point]:
        """Return the route from the top of column `source`, over the columns between, to the lane next to column `index`."""
        start = self.columns[source]
        over = min(column.top for column in self.columns[min(source, index) : max(source, index)]) - 14
        return [(start.frame.stream, start.top), (start.frame.stream, over), (lane, over)]

    def draw_tie(self, right: float) -> float:
        """Draw a dashed line between the two boxes of a tied weight; return the new right edge."""
        (x1, y1), (x2, y2) = self.tied
        lane = right + 22
        self.sheet.wire([(x1, y1), (lane, y1), (lane, y2), (x2, y2)], MUTED, 1.6, dashed=True)
        self.sheet.text(lane + 8, (y1 + y2) / 2, "tied", BODY)
        return lane + 8 + BODY.width("tied")
