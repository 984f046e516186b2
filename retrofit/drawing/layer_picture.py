"""One layer as a panel: the stream as a thick line; each branch leaves it through its norm and joins it again at ⊕.

The panel also shows the changes made by passes, from the reports that a rewritten model carries (`Rewrite`). A stream of several
blocks is recognized in the graph: it is wider between the layers than in them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Sequence

from retrofit.anatomy import Anatomy, compact, heads, layer_range, owner, rewritten_sites, shapes, sharing
from retrofit.anatomy.outline import common_name, relative, structure
from retrofit.anatomy.parts import Branch, Layer, Stack
from retrofit.drawing.placement import Norms
from retrofit.drawing.sheet import BODY, FAINT, NAME, TITLE, Face, Point, Sheet

REWRITTEN = Face(11.5, bold=True, color="#6d28d9")
IN_A_PATH = re.compile(r"(?<=[._])\d+")


@dataclasses.dataclass(frozen=True)
class RewrittenSites:
    """The sites of a model's passes, each with the method and the change."""

    methods: tuple[str, ...] = ()
    said: tuple[tuple[str, str], ...] = ()  # (module path, "altup: works on block 0 of 2")

    @staticmethod
    def of(anatomy: Anatomy) -> RewrittenSites:
        done = rewritten_sites(anatomy)
        return RewrittenSites(
            tuple(dict.fromkeys(method for method, _, _ in done)), tuple((name, f"{method}: {what}") for method, name, what in done)
        )

    def at_branch(self, branch: Branch, layer: Layer) -> list[str]:
        """Return the changes to the branch alone."""
        return [text for name, text in self.said if belongs_to_branch(name, branch, layer)]

    def at_layer(self, layer: Layer) -> list[str]:
        """Return the changes to the layer as a whole, or to modules in it that belong to no branch."""
        return [
            text
            for name, text in self.said
            if is_within(name, layer.name) and not any(belongs_to_branch(name, branch, layer) for branch in layer.branches)
        ]

    def at_module(self, names: Sequence[str]) -> list[str]:
        """Return the changes to a module outside the layers."""
        return [text for name, text in self.said if name in names]

    def kind(self, layer: Layer) -> Hashable:
        """Return a key that is equal for two layers with the same panel: their structure, and the changes made to both."""
        texts = [*self.at_layer(layer), *(text for branch in layer.branches for text in self.at_branch(branch, layer))]
        return structure(layer), tuple(IN_A_PATH.sub("*", text) for text in texts)


def belongs_to_branch(name: str, branch: Branch, layer: Layer) -> bool:
    """Return whether a site is the branch's module, contains only it of the layer, or is inside it."""
    if not branch.name or not is_within(name, layer.name) or layer.name in (name, branch.name):
        return False
    others = [other.name for other in layer.branches if other is not branch]
    alone = is_within(branch.name, name) and not any(is_within(other, name) for other in others)
    return alone or is_within(name, branch.name)


def is_within(name: str, owner: str) -> bool:
    return bool(owner) and (name == owner or name.startswith(f"{owner}."))


def blocks_of(anatomy: Anatomy, stack: Stack) -> int:
    """Return the number of blocks of the stream between the layers, each as wide as the layers' own stream; 1 if it is no wider."""
    return max((blocks_at(anatomy, layer.entry, stack.width) for layer in stack.layers), default=1)


def blocks_at(anatomy: Anatomy, node: str, width: int) -> int:
    """Return the width of the stream at a node of the graph as a multiple of `width`."""
    shape = anatomy.graph.nodes.get(node, {}).get("shape") or ()
    wide = shape[-1] if shape and isinstance(shape[-1], int) else width
    return max(1, wide // width) if width and wide % width == 0 else 1


def wrapped(texts: Iterable[str], width: float, face: Face = REWRITTEN) -> list[tuple[str, Face]]:
    """Return the texts as lines of at most that width, each text once."""
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


STREAM, WIRE = "#475569", "#64748b"
PANEL, PANEL_EDGE = "#f8fafc", "#d8dee6"
STREAM_AT, BRANCH_AT, EDGE = 40.0, 92.0, 18.0  # from the panel's edge on the stream's side; to its other edge
NARROWEST, WIDEST = 236.0, 340.0  # one branch
LINE, PAD, BESIDE = 16.0, 11.0, 16.0
RISER = 34.0  # where a branch's wire enters its box
TAP, STEP, JOIN, HEADER = 24.0, 14.0, 20.0, 50.0
PLUS = 9.0
PILL_WIDTH, PILL_HEIGHT = 46.0, 20.0
MOST_SHAPES = 5
LABEL = Face(10.5)

NONE = Norms({}, {}, {}, ())
UNTOUCHED = RewrittenSites()

# role: title, fill, edge
LOOKS = {
    "self-attention": ("Self-attention", "#e8effc", "#6b8fd8"),
    "cross-attention": ("Cross-attention", "#dff3ef", "#3f9c8d"),
    "ffn": ("Feed-forward", "#fdf2dc", "#d9a441"),
    "moe": ("Mixture of experts", "#fbe7df", "#d57f5a"),
    "other mixer": ("Mixer", "#efe9f9", "#957bc9"),
}


@dataclasses.dataclass(frozen=True)
class Frame:
    """The horizontal extent of a column; a mirrored one has its stream at the right."""

    left: float
    width: float
    mirrored: bool = False

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def stream(self) -> float:
        return self.at(STREAM_AT)

    @property
    def side(self) -> int:
        """Return the direction from the stream to the branches."""
        return -1 if self.mirrored else 1

    def at(self, offset: float) -> float:
        """Return the x coordinate at this offset from the edge on the stream's side."""
        return self.right - offset if self.mirrored else self.left + offset

    def box(self, offset: float, width: float) -> float:
        """Return the left edge of a box at this offset from the edge on the stream's side."""
        return self.at(offset + width) if self.mirrored else self.at(offset)

    @property
    def clear(self) -> tuple[float, float]:
        """Return the left and right edge of text that leaves room for the stream."""
        near, far = self.at(STREAM_AT + 24), self.at(self.width - EDGE)
        return min(near, far), max(near, far)


@dataclasses.dataclass(frozen=True)
class Inlet:
    """The point at which a cross-attention's input enters the picture."""

    branch: Branch
    point: Point


def branch_lines(branch: Branch, layer: Layer, sites: RewrittenSites) -> list[tuple[str, Face]]:
    """Return the lines of a branch's box below its title."""
    lines = [(text, BODY) for text in [heads(branch)] if text]
    matrices = shapes(branch)
    if len(matrices) > MOST_SHAPES:
        matrices[MOST_SHAPES - 1 :] = [f"{len(matrices) - MOST_SHAPES + 1} more"]
    lines += [(text, BODY) for text in matrices] + [(text, NAME) for text in [owner(branch, layer)] if text]
    return lines + rewritten_lines(branch, layer, sites)


def rewritten_lines(branch: Branch, layer: Layer, sites: RewrittenSites) -> list[tuple[str, Face]]:
    """Return the lines on the changes that passes made to a branch."""
    return wrapped(sites.at_branch(branch, layer), WIDEST - 2 * PAD)


def branch_title(branch: Branch) -> str:
    return ("Gated " + LOOKS[branch.role][0].lower()) if branch.gated else LOOKS[branch.role][0]


def box_width(branch: Branch, layer: Layer, sites: RewrittenSites) -> float:
    """Return the width of a branch's box, within limits."""
    first = TITLE.width(branch_title(branch)) + 20 + BODY.width(compact(branch.parameters))
    widest = max([first, *(face.width(text) for text, face in branch_lines(branch, layer, sites))])
    return min(max(widest + 2 * PAD, NARROWEST), WIDEST)


def box_height(branch: Branch, layer: Layer, brief: bool, sites: RewrittenSites) -> float:
    return 2 * PAD - 3 + LINE * (1 + len((rewritten_lines if brief else branch_lines)(branch, layer, sites)))


def parallel_branches(layer: Layer) -> list[list[int]]:
    """Return the branches by position, neighbours that leave the stream at the same node together."""
    groups: list[list[int]] = []
    for index, branch in enumerate(layer.branches):
        if groups and layer.branches[groups[-1][-1]].source == branch.source:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def panel_width(layer: Layer, sites: RewrittenSites = UNTOUCHED) -> float:
    """Return the width of a panel for all branches of `layer`."""
    needed = NARROWEST
    for group in parallel_branches(layer):
        widest = max(box_width(layer.branches[index], layer, sites) for index in group)
        needed = max(needed, len(group) * widest + (len(group) - 1) * BESIDE)
    return BRANCH_AT + needed + EDGE


def panel_lines(layers: Sequence[Layer], same: str, norms: Sequence[str]) -> list[str]:
    """Return the lines below the title of a panel: where the layers are, and notes."""
    name = common_name([layer.name for layer in layers]) if all(layer.name for layer in layers) else "no module of their own"
    unplaced = ", ".join(relative(norm, layers[0].name) for norm in norms)
    return [name, *filter(None, [sharing(layers), same, unplaced and f"norms: {unplaced}"])]


class LayerPicture:
    """Draws layers into one column of a sheet, upwards."""

    def __init__(self, sheet: Sheet, frame: Frame, sites: RewrittenSites = UNTOUCHED) -> None:
        self.sheet, self.frame, self.sites = sheet, frame, sites
        self.inlets: list[Inlet] = []
        self.drawn: dict[Hashable, str] = {}  # structure → the layers for which it was drawn in full
        self.brief = False  # whether the current layer was drawn before

    def draw(self, layers: Sequence[Layer], positions: Sequence[int], norms: Norms, y: float) -> float:
        """Draw one panel for all of `layers`, its lower edge at `y`, in brief if drawn before; return its upper edge."""
        layer, frame, bottom = layers[0], self.frame, y
        same = self.drawn.setdefault(structure(layer), layer_range(positions))
        self.brief = same != layer_range(positions)
        norms = NONE if self.brief else norms
        y -= 12
        y = self.stream_norms(norms.stream.get(-1, ()), layer, y)
        for group in parallel_branches(layer):
            y = self.branches(layer, group, norms, y)
            y = self.stream_norms([norm for index in group for norm in norms.stream.get(index, ())], layer, y)
        lines = panel_lines(layers, f"as {same}" if self.brief else "", norms.unplaced)
        left, right = frame.clear
        done = wrapped(self.sites.at_layer(layer), right - left)
        top = y - HEADER - LINE * (len(lines) + len(done) - 1)
        self.header(layers, positions, [*((text, BODY if place else NAME) for place, text in enumerate(lines)), *done], top)
        self.sheet.panel(frame.left, top, frame.width, bottom - top, PANEL, PANEL_EDGE)
        return top

    def header(self, layers: Sequence[Layer], positions: Sequence[int], lines: Sequence[tuple[str, Face]], top: float) -> None:
        left, right = self.frame.clear
        size = f"{compact(layers[0].parameters)}{' each' if len(layers) > 1 and not sharing(layers) else ''}"
        self.sheet.text(left, top + 23, layer_range(positions).capitalize(), TITLE, width=right - left - BODY.width(size) - 12)
        self.sheet.text(right, top + 23, size, BODY, "end")
        for number, (line, face) in enumerate(lines):
            self.sheet.text(left, top + 39 + LINE * number, line, face, width=right - left)

    def branches(self, layer: Layer, group: Sequence[int], norms: Norms, y: float) -> float:
        """Draw the branches of `group` side by side between one tap and one ⊕; return the upper edge of the ⊕."""
        frame, sheet = self.frame, self.sheet
        room = frame.width - BRANCH_AT - EDGE
        width = (room - (len(group) - 1) * BESIDE) / len(group)
        own = {index: norms.before.get(index, ()) for index in group}
        shared = [norm for norm in own[group[0]] if len(group) > 1 and all(norm in names for names in own.values())]
        before = {index: [norm for norm in names if norm not in shared] for index, names in own.items()}
        after = {index: norms.after.get(index, ()) for index in group}

        tap, first = y - 8, frame.at(BRANCH_AT + RISER)
        level = self.pills(shared, layer, first, tap - TAP, room - RISER)
        fork = level + STEP / 2 if shared else tap
        level -= STEP / 2 if shared else 0
        floor = level - max(map(len, before.values())) * (PILL_HEIGHT + STEP)
        roof = floor - max(box_height(layer.branches[index], layer, self.brief, self.sites) for index in group)
        join = roof - max(map(len, after.values())) * (PILL_HEIGHT + STEP) - JOIN
        for place, index in enumerate(group):
            offset = BRANCH_AT + place * (width + BESIDE)
            riser = frame.at(offset + RISER)
            sheet.wire(
                drop_straight_points([(frame.stream, tap), (first, tap), (first, fork), (riser, fork), (riser, floor)]),
                WIRE,
                arrow=True,
            )
            sheet.wire([(riser, roof), (riser, join), (frame.stream + frame.side * PLUS, join)], WIRE, arrow=True)
            self.pills(before[index], layer, riser, level, width - RISER)
            self.pills(after[index], layer, riser, roof - STEP, width - RISER)
            self.branch_box(layer.branches[index], layer, frame.box(offset, width), roof, width, floor - roof)
            if layer.branches[index].role == "cross-attention":
                self.inlets.append(Inlet(layer.branches[index], (frame.at(offset + width), (roof + floor) / 2)))
        sheet.plus(frame.stream, join, STREAM, PLUS)
        return join - PLUS

    def branch_box(self, branch: Branch, layer: Layer, x: float, y: float, width: float, height: float) -> None:
        _, fill, edge = LOOKS[branch.role]
        sheet, size = self.sheet, compact(branch.parameters)
        sheet.box(x, y, width, height, fill, edge)
        baseline = y + PAD + 10
        sheet.text(x + PAD, baseline, branch_title(branch), TITLE, width=width - 2 * PAD - BODY.width(size) - 8)
        sheet.text(x + width - PAD, baseline, size, BODY, "end")
        for text, face in (rewritten_lines if self.brief else branch_lines)(branch, layer, self.sites):
            baseline += LINE
            sheet.text(x + PAD, baseline, text, face, width=width - 2 * PAD)

    def stream_norms(self, names: Sequence[str], layer: Layer, y: float) -> float:
        """Draw norms that act on the stream itself, upwards from `y`; return the position above them."""
        left, right = self.frame.clear
        return self.pills(names, layer, self.frame.stream, y - 10, right - left) + (10 if not names else STEP - 6)

    def pills(self, names: Sequence[str], layer: Layer, x: float, y: float, room: float) -> float:
        """Draw norms one above the other, the first with its lower edge at `y`; return the position of the next one."""
        for name in names:
            y = self.pill(x, y, relative(name, layer.name), room) - STEP
        return y

    def pill(self, x: float, y: float, name: str, room: float) -> float:
        """Draw a norm with its lower edge at `y` and its name next to it; return its upper edge."""
        sheet, top = self.sheet, y - PILL_HEIGHT
        sheet.box(x - PILL_WIDTH / 2, top, PILL_WIDTH, PILL_HEIGHT, "#ffffff", FAINT, PILL_HEIGHT / 2)
        sheet.text(x, top + 14, "norm", LABEL, "middle")
        away = self.frame.side * (PILL_WIDTH / 2 + 7)
        sheet.text(x + away, top + 14, name, NAME, "end" if self.frame.mirrored else "start", room - PILL_WIDTH / 2 - 7)
        return top


def drop_straight_points(points: Sequence[Point]) -> list[Point]:
    """Return the points without those that repeat the previous one or lie on the way to the next."""
    kept: list[Point] = []
    for point in points:
        if kept and kept[-1] == point:
            continue
        if len(kept) > 1 and (kept[-2][0] == kept[-1][0] == point[0] or kept[-2][1] == kept[-1][1] == point[1]):
            kept.pop()
        kept.append(point)
    return kept
