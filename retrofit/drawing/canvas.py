"""A sheet to draw on: boxes, wires and text as self-contained SVG."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, MUTED, FAINT = "#1f2937", "#64748b", "#94a3b8"
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Face:
    """How a text looks."""

    size: float = 12
    bold: bool = False
    mono: bool = False
    color: str = INK

    def width(self, text: str) -> float:
        """How wide `text` is at most, in the wider of the fonts it may be shown in."""
        if self.mono:
            return self.size * sum(1.2 if is_wide(letter) else 0.605 for letter in text)
        return self.size * (1.08 if self.bold else 1.0) * sum(map(advance, text))

    def fitted(self, text: str, width: float) -> str:
        """`text`, its middle left out where it is wider than `width`."""
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
    front = keep // 2
    return f"{text[:front]}…{text[len(text) - (keep - front) :]}"


def is_wide(letter: str) -> bool:
    return unicodedata.east_asian_width(letter) in "WF"


def advance(letter: str) -> float:
    """The width of a letter in a wide sans-serif, in units of the font size."""
    if letter in "iljI.,:;'|!()[] ·":
        return 0.36
    if letter in "mwMW…—→×" or is_wide(letter):
        return 1.0
    if letter.isupper() or letter in "+=<>":
        return 0.74
    return 0.63


class Canvas:
    """Panels at the back, wires over them, boxes and text in front, each in the order they were drawn."""

    def __init__(self) -> None:
        self.back: list[str] = []
        self.wires: list[str] = []
        self.front: list[str] = []

    def panel(self, x: float, y: float, width: float, height: float, fill: str, stroke: str) -> None:
        """A large rounded area behind all wires."""
        self.back.append(rectangle(x, y, width, height, 10, fill, stroke, 1))

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: float = 7) -> None:
        self.front.append(rectangle(x, y, width, height, radius, fill, stroke, 1.4))

    def text(self, x: float, y: float, text: str, face: Face, anchor: str = "start", width: float | None = None) -> None:
        """`text` with its baseline at `y`; what does not fit into `width` is left out and shown on hover."""
        if not text:
            return
        shown = text if width is None else face.fitted(text, width)
        style = ' font-weight="600"' if face.bold else ""
        style += f' font-family="{MONO}"' if face.mono else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        hover = f"<title>{safe(text)}</title>" if shown != text else ""
        self.front.append(
            f'<text x="{n(x)}" y="{n(y)}" font-size="{n(face.size)}" fill="{face.color}"{style}{place}>{hover}{safe(shown)}</text>'
        )

    def wire(
        self,
        points: Sequence[Point],
        color: str,
        thickness: float = 1.6,
        *,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        """A line through right-angled corners, rounded; `arrow` marks its end."""
        path = rounded(points)
        dash = ' stroke-dasharray="6 5"' if dashed else ""
        self.wires.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{n(thickness)}" stroke-linejoin="round"{dash}/>'
        )
        if arrow:
            self.wires.append(f'<path d="{arrow_head(points[-2], points[-1])}" fill="{color}"/>')

    def plus(self, x: float, y: float, color: str, radius: float) -> None:
        """A residual addition."""
        arm = radius - 4
        self.front.append(f'<circle cx="{n(x)}" cy="{n(y)}" r="{n(radius)}" fill="#ffffff" stroke="{color}" stroke-width="2"/>')
        self.front.append(
            f'<path d="M{n(x - arm)} {n(y)}H{n(x + arm)}M{n(x)} {n(y - arm)}V{n(y + arm)}" stroke="{color}" stroke-width="2"/>'
        )

    def document(self, top: float, right: float, bottom: float, title: str, description: str) -> str:
        """Everything drawn from the left edge 0 to `right` and from `top` to `bottom`, as one SVG file."""
        size = f'width="{n(right)}" height="{n(bottom - top)}" viewBox="0 {n(top)} {n(right)} {n(bottom - top)}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family={quoteattr(SANS)}>',
            f"<title>{safe(title)}</title>",
            f"<desc>{safe(description)}</desc>",
            f'<rect x="0" y="{n(top)}" width="{n(right)}" height="{n(bottom - top)}" fill="#ffffff"/>',
        ]
        return "\n".join([*lines, *self.back, *self.wires, *self.front, "</svg>", ""])


def n(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{round(value, 1):g}" if abs(value) < 1e5 else str(round(value))


def safe(text: str) -> str:
    """The text escaped, characters that XML does not admit replaced."""
    return escape(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def rectangle(x: float, y: float, width: float, height: float, radius: float, fill: str, stroke: str, thickness: float) -> str:
    return (
        f'<rect x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" rx="{n(radius)}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="{n(thickness)}"/>'
    )


def rounded(points: Sequence[Point], radius: float = 8) -> str:
    """The path through `points` with each corner rounded."""
    parts = [f"M{n(points[0][0])} {n(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        reach = min(radius, distance(before, corner) / 2, distance(corner, after) / 2)
        (x1, y1), (x2, y2) = towards(corner, before, reach), towards(corner, after, reach)
        parts.append(f"L{n(x1)} {n(y1)}Q{n(corner[0])} {n(corner[1])} {n(x2)} {n(y2)}")
    return "".join([*parts, f"L{n(points[-1][0])} {n(points[-1][1])}"])


def distance(one: Point, other: Point) -> float:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def towards(start: Point, goal: Point, length: float) -> Point:
    far = distance(start, goal) or 1.0
    return start[0] + (goal[0] - start[0]) * length / far, start[1] + (goal[1] - start[1]) * length / far


def arrow_head(before: Point, tip: Point, length: float = 8, half: float = 4) -> str:
    """A triangle whose tip is at `tip`, seen from `before`."""
    x, y = towards(tip, before, length)
    across = (half, 0.0) if before[0] == tip[0] else (0.0, half)
    return f"M{n(tip[0])} {n(tip[1])}L{n(x + across[0])} {n(y + across[1])}L{n(x - across[0])} {n(y - across[1])}Z"
