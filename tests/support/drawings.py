"""Tables and drawings read back: what a test can ask of them."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree

from retrofit.anatomy import Anatomy
from retrofit.drawing.picture import svg

SVG = "{http://www.w3.org/2000/svg}"
Point = tuple[float, float]
Box = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One shape of a drawing: what it is, how it looks, the points its path goes through and the control points of its curves."""

    kind: str
    style: dict[str, str]
    points: tuple[Point, ...]

    @property
    def box(self) -> Box:
        xs, ys = zip(*self.points, strict=True)
        return min(xs), min(ys), max(xs), max(ys)

    @property
    def fill(self) -> str | None:
        return self.style.get("fill")


def drawing(anatomy: Anatomy) -> ElementTree.Element:
    return ElementTree.fromstring(svg(anatomy))


def groups(root: ElementTree.Element) -> list[tuple[str, ElementTree.Element]]:
    """The elements that were drawn, in order, each with its kind."""
    named = ((group.get("id", ""), group) for group in root.iter(f"{SVG}g"))
    return [(name.partition("-")[0], group) for name, group in named if re.fullmatch(r"[a-z]+-\d+", name)]


def shapes(root: ElementTree.Element, *kinds: str) -> list[Shape]:
    return [shape(kind, path) for kind, group in groups(root) if kind in kinds for path in group.iter(f"{SVG}path")]


def shape(kind: str, path: ElementTree.Element) -> Shape:
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))]
    return Shape(kind, style_of(path), tuple(zip(numbers[::2], numbers[1::2], strict=True)))


def boxes(root: ElementTree.Element) -> list[Box]:
    """Every box, the panels of the layers included."""
    return [one.box for one in shapes(root, "panel", "box")]


def texts(root: ElementTree.Element) -> list[ElementTree.Element]:
    return list(root.iter(f"{SVG}text"))


def labels(root: ElementTree.Element) -> list[str]:
    """The texts of a drawing, in full where they are cut short."""
    found = []
    for kind, group in groups(root):
        if kind == "text":
            title, (text,) = group.find(f"{SVG}title"), group.iter(f"{SVG}text")
            found.append((title.text if title is not None else text.text) or "")
    return found


def style_of(element: ElementTree.Element) -> dict[str, str]:
    entries = (entry.partition(":") for entry in element.get("style", "").split(";") if entry.strip())
    return {key.strip(): value.strip() for key, _, value in entries}


def number(element: ElementTree.Element, key: str) -> float:
    return float(element.get(key, "0"))


def apart(one: Box, other: Box) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def within(inner: Box, outer: Box, slack: float = 1e-3) -> bool:
    """Whether `inner` lies in `outer`, but for the digits that an SVG leaves out."""
    left, top, right, bottom = outer
    return left - slack <= inner[0] and top - slack <= inner[1] and inner[2] <= right + slack and inner[3] <= bottom + slack


def sheet(root: ElementTree.Element) -> Box:
    left, top, width, height = map(float, root.get("viewBox", "").split())
    return left, top, left + width, top + height


def text_box(text: ElementTree.Element) -> Box:
    """The box of a text in a common sans-serif, its letters 0.56 of their height wide on average."""
    style, x, y = style_of(text), number(text, "x"), number(text, "y")
    size = float(style["font-size"].removesuffix("px"))
    width = (0.6 if "monospace" in style["font-family"] else 0.56) * size * len(text.text or "")
    left = x - {"middle": width / 2, "end": width}.get(style["text-anchor"], 0)
    return left, y - 0.75 * size, left + width, y + 0.2 * size


def wires(root: ElementTree.Element, color: str) -> list[tuple[Point, Point]]:
    """Where the wires of one colour begin and end."""
    return [(one.points[0], one.points[-1]) for one in shapes(root, "wire") if one.style.get("stroke") == color]


def layers_told(text: str) -> list[int]:
    """For each stack of a table, how many layers its rows stand for."""
    told: list[int] = []
    for line in text.splitlines():
        if re.match(r"(encoder|decoder) ", line):
            told.append(0)
        row = re.match(r" +layers? .*?(?: ×(\d+))?  .*\d$", line)  # the row of a group has no count at its end
        if row:
            told[-1] += int(row.group(1) or 1)
    return told


def parameters_told(text: str) -> int:
    """The sum of what a table counts for the parts of the model, layers within their stack."""
    rows = re.findall(r"^(?:embedding|stem|encoder|decoder|tail|head|elsewhere) .* ([\d,]+)$", text, re.MULTILINE)
    return sum(int(row.replace(",", "")) for row in rows)
