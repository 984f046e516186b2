"""A sheet for boxes, wires and text, drawn by matplotlib as self-contained SVG in which text stays text."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import unicodedata
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.path import Path


INK, MUTED, FAINT = "#1f2937", "#64748b", "#94a3b8"
SANS = ("Segoe UI", "Roboto", "Helvetica Neue", "Arial", "DejaVu Sans")
MONO = ("SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono")


@dataclasses.dataclass(frozen=True)
class Face:
    """The size, weight, family and colour of a text."""

    size: float = 12
    bold: bool = False
    mono: bool = False
    color: str = INK

    def width(self, text: str) -> float:
        """Return the width of `text` in matplotlib's own font, the widest of those in which it may be shown."""
        return round(self.size * sum(advance(letter, self.bold, self.mono) for letter in text), 1)

    def fitted(self, text: str, width: float) -> str:
        """Return `text`, with its middle left out if it is wider than `width`."""
        if self.width(text) <= width:
            return text
        keep = len(text)
        while keep > 1 and self.width(elided(text, keep)) > width:
            keep -= 1
        return elided(text, keep)


HEADLINE, FACTS, BRACKET = Face(20, bold=True), Face(12.5, color=MUTED), Face(16, bold=True)
TITLE, BODY = Face(13, bold=True), Face(11.5, color="#334155")
NAME = Face(10.5, mono=True, color=MUTED)


def elided(text: str, keep: int) -> str:
    """Return `text` with `keep` of its letters, the middle left out."""
    front = keep // 2
    return f"{text[:front]}…{text[len(text) - (keep - front) :]}"


@functools.cache
def advance(letter: str, bold: bool, mono: bool) -> float:
    """Return the width of a letter in units of the font size.

    If the font lacks the letter, another font is used, in which it may have this width at most.
    """
    import matplotlib
    from matplotlib.font_manager import get_font
    from matplotlib.ft2font import LoadFlags

    name = "DejaVuSansMono.ttf" if mono else "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    font = get_font(f"{matplotlib.get_data_path()}/fonts/ttf/{name}")
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.2 if mono else 1.08 if bold else 1.0
    if not font.get_char_index(ord(letter)):
        return 1.0
    font.set_size(100, 72)
    return float(font.load_char(ord(letter), LoadFlags.NO_HINTING).linearHoriAdvance) / 65536 / 100


NOT_TEXT = re.compile("[^\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # control characters and characters not allowed in XML
SVG = "http://www.w3.org/2000/svg"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "retrofit",  # equal drawings are equal files
    "font.sans-serif": list(SANS),
    "font.monospace": list(MONO),
}
BACK, WIRES, FRONT = 1, 2, 3  # drawing order
UNITS_PER_INCH = 72  # of matplotlib's SVG
ALIGNMENT: dict[str, Literal["left", "center", "right"]] = {"start": "left", "middle": "center", "end": "right"}

Point = tuple[float, float]


class Sheet:
    """Panels at the back, wires over them, boxes and text in front, each in drawing order; y grows downwards.

    Used within `plainly_styled`.
    """

    def __init__(self) -> None:
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D

        self.figure = Figure(dpi=UNITS_PER_INCH)
        self.place = Affine2D()  # from the sheet's coordinates to the figure's, whose size is known at the end
        self.full_texts: dict[str, str] = {}  # element id → the complete text, if shortened

    def panel(self, x: float, y: float, width: float, height: float, fill: str, stroke: str) -> None:
        """Draw a large rounded area behind all wires."""
        self.rectangle("panel", x, y, width, height, 10, BACK, facecolor=fill, edgecolor=stroke, linewidth=1)

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: float = 7) -> None:
        """Draw a rounded box in front of all wires."""
        self.rectangle("box", x, y, width, height, radius, FRONT, facecolor=fill, edgecolor=stroke, linewidth=1.4)

    def rectangle(self, kind: str, x: float, y: float, width: float, height: float, radius: float, level: int, **look: Any) -> None:
        from matplotlib.patches import FancyBboxPatch

        corners = f"round,pad=0,rounding_size={min(radius, width / 2, height / 2)}"
        self.add(kind, FancyBboxPatch((x, y), width, height, boxstyle=corners, **look), level)

    def text(self, x: float, y: float, text: str, face: Face, anchor: str = "start", width: float | None = None) -> None:
        """Write `text` with its baseline at `y`; text that does not fit into `width` is shortened and shown completely on hover."""
        from matplotlib.text import Text

        text = NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)
        shown = text if width is None else face.fitted(text, width)
        if not text:
            return
        artist = Text(
            x,
            y,
            shown,
            color=face.color,
            fontsize=face.size,
            fontfamily="monospace" if face.mono else "sans-serif",
            fontweight="bold" if face.bold else "normal",
            horizontalalignment=ALIGNMENT[anchor],
            verticalalignment="baseline",
            parse_math=False,
        )
        name = self.add("text", artist, FRONT)
        if shown != text:
            self.full_texts[name] = text

    def wire(
        self, points: Sequence[Point], color: str, thickness: float = 1.6, *, arrow: bool = False, dashed: bool = False
    ) -> None:
        """Draw a line through right-angled corners, rounded; `arrow` marks its end."""
        from matplotlib.patches import PathPatch, Polygon

        dash = (0, (6 / thickness, 5 / thickness)) if dashed else "solid"
        line = PathPatch(
            rounded_path(points),
            fill=False,
            edgecolor=color,
            linewidth=thickness,
            linestyle=dash,
            joinstyle="round",
            capstyle="butt",
        )
        self.add("wire", line, WIRES)
        if arrow:
            self.add("arrow", Polygon(arrow_head(points[-2], points[-1]), facecolor=color, edgecolor="none"), WIRES)

    def plus(self, x: float, y: float, color: str, radius: float) -> None:
        """Draw a residual addition."""
        from matplotlib.patches import Circle, PathPatch
        from matplotlib.path import Path

        arm = radius - 4
        cross = Path([(x - arm, y), (x + arm, y), (x, y - arm), (x, y + arm)], [Path.MOVETO, Path.LINETO] * 2)
        self.add("plus", Circle((x, y), radius, facecolor="#ffffff", edgecolor=color, linewidth=2), FRONT)
        self.add("cross", PathPatch(cross, fill=False, edgecolor=color, linewidth=2), FRONT)

    def add(self, kind: str, artist: Artist, level: int) -> str:
        """Put the artist on the sheet; return its name, derived from its kind, which is its id in the SVG."""
        name = f"{kind}-{len(self.figure.artists) + 1}"
        artist.set(gid=name, zorder=level, transform=self.place)
        self.figure.add_artist(artist)
        return name

    def document(self, top: float, right: float, bottom: float, title: str, description: str) -> str:
        """Return everything drawn from the left edge 0 to `right` and from `top` to `bottom`, as one SVG file."""
        self.figure.set_size_inches(right / UNITS_PER_INCH, (bottom - top) / UNITS_PER_INCH)
        self.place.clear().translate(0, -bottom).scale(1, -1)
        drawn = io.BytesIO()
        self.figure.savefig(drawn, format="svg", facecolor="#ffffff", metadata={"Date": None})
        return self.described(ElementTree.fromstring(drawn.getvalue()), title, description)

    def described(self, root: ElementTree.Element, title: str, description: str) -> str:
        """Return the SVG with a title and a description, in pixels, with the complete text of shortened texts on hover."""
        for metadata in root.findall(f"{{{SVG}}}metadata"):
            root.remove(metadata)
        for index, (tag, text) in enumerate((("title", title), ("desc", description))):
            element = ElementTree.Element(f"{{{SVG}}}{tag}")
            element.text, element.tail = NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text), "\n"
            root.insert(index, element)
        root.set("role", "img")
        for side in ("width", "height"):
            root.set(side, root.get(side, "").removesuffix("pt"))
        for group in root.iter(f"{{{SVG}}}g"):
            if (full := self.full_texts.get(group.get("id", ""))) is not None:
                hover = ElementTree.Element(f"{{{SVG}}}title")
                hover.text = full
                group.insert(0, hover)
        ElementTree.register_namespace("", SVG)
        return ElementTree.tostring(root, encoding="unicode") + "\n"


@contextlib.contextmanager
def plainly_styled() -> Iterator[None]:
    """Within this context matplotlib draws in its default style, not the user's, and does not warn of missing letters."""
    from matplotlib import style

    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def rounded_path(points: Sequence[Point], radius: float = 8) -> Path:
    """Return the path through `points` with each corner rounded."""
    from matplotlib.path import Path

    vertices, codes = [points[0]], [Path.MOVETO]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        reach = min(radius, distance(before, corner) / 2, distance(corner, after) / 2)
        vertices += [towards(corner, before, reach), corner, towards(corner, after, reach)]
        codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
    return Path([*vertices, points[-1]], [*codes, Path.LINETO])


def distance(point: Point, other: Point) -> float:
    return abs(point[0] - other[0]) + abs(point[1] - other[1])


def towards(start: Point, goal: Point, length: float) -> Point:
    """Return the point `length` away from `start` on the way to `goal`."""
    far = distance(start, goal) or 1.0
    return start[0] + (goal[0] - start[0]) * length / far, start[1] + (goal[1] - start[1]) * length / far


def arrow_head(before: Point, tip: Point, length: float = 8, half: float = 4) -> list[Point]:
    """Return a triangle with its tip at `tip`, pointing away from `before`."""
    x, y = towards(tip, before, length)
    across = (half, 0.0) if before[0] == tip[0] else (0.0, half)
    return [tip, (x + across[0], y + across[1]), (x - across[0], y - across[1])]
