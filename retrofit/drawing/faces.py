"""How texts look and how wide they are."""

from __future__ import annotations

import dataclasses
import functools
import unicodedata
from pathlib import Path

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
        """How wide `text` is in the widest of the fonts it may be shown in, which is the one matplotlib brings."""
        return round(self.size * sum(advance(letter, self.bold, self.mono) for letter in text), 1)

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
    """`text` with `keep` of its letters, the middle left out."""
    front = keep // 2
    return f"{text[:front]}…{text[len(text) - (keep - front) :]}"


@functools.cache
def advance(letter: str, bold: bool, mono: bool) -> float:
    """The width of a letter in units of the font size; a font without the letter is replaced by one where it may be this wide."""
    import matplotlib
    from matplotlib.font_manager import get_font
    from matplotlib.ft2font import LoadFlags

    name = "DejaVuSansMono.ttf" if mono else "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    font = get_font(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)))
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.2 if mono else 1.08 if bold else 1.0
    if not font.get_char_index(ord(letter)):
        return 1.0
    font.set_size(100, 72)
    return float(font.load_char(ord(letter), LoadFlags.NO_HINTING).linearHoriAdvance) / 65536 / 100
