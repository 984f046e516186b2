"""Tables and drawings read back: what a test can ask of them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from retrofit.anatomy.anatomy import Anatomy
from retrofit.drawing.picture import svg

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def drawing(anatomy: Anatomy) -> ElementTree.Element:
    return ElementTree.fromstring(svg(anatomy))


def labels(root: ElementTree.Element) -> list[str]:
    """The texts of a drawing, in full where they are cut short."""
    titles = ((text.find(f"{SVG}title"), text) for text in root.iter(f"{SVG}text"))
    return [(title.text if title is not None else text.text) or "" for title, text in titles]


def number(element: ElementTree.Element, key: str) -> float:
    return float(element.get(key, "0"))


def box(rect: ElementTree.Element) -> Box:
    x, y = number(rect, "x"), number(rect, "y")
    return x, y, x + number(rect, "width"), y + number(rect, "height")


def apart(one: Box, other: Box) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def within(inner: Box, outer: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def sheet(root: ElementTree.Element) -> Box:
    left, top, width, height = map(float, root.get("viewBox", "").split())
    return left, top, left + width, top + height


def text_box(text: ElementTree.Element) -> Box:
    """Where a text stands in a common sans-serif, its letters 0.56 of their height wide on average."""
    size, x, y = number(text, "font-size"), number(text, "x"), number(text, "y")
    width = (0.6 if text.get("font-family") else 0.56) * size * len(text.text or (text[0].tail or ""))
    left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor", ""), 0)
    return left, y - 0.75 * size, left + width, y + 0.2 * size


def wires(root: ElementTree.Element, color: str) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Where the wires of one colour begin and end."""
    found = []
    for path in root.iter(f"{SVG}path"):
        if path.get("stroke") == color:
            numbers = re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))
            x1, y1, *_, x2, y2 = map(float, numbers)
            found.append(((x1, y1), (x2, y2)))
    return found


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
