"""An anatomy for people and programs: a table and plain data."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from retrofit.anatomy.findings import Findings
from retrofit.anatomy.folding import common_name, fold_layers, leaves, relative, structure
from retrofit.anatomy.parts import Branch, Layer, Stack
from retrofit.anatomy.surroundings import Piece, Surroundings, surroundings
from retrofit.anatomy.wording import heads, layer_range, owner, plural, shapes, sharing

WIDTH = 100
GAP = "  "
WIDEST_PART, WIDEST_MODULE = 28, 34
TOGETHER = "\N{NO-BREAK SPACE}"
BREAKS = (r"(?<= )", rf"(?<={TOGETHER})", r"(?=\.)", r"(?<=_)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One entry of the table before it is aligned and wrapped."""

    depth: int
    part: str
    module: str
    what: str
    parameters: int | None = None


def table(anatomy: Findings) -> str:
    """The anatomy as text of at most 100 columns, layers that repeat written once."""
    around = surroundings(anatomy)
    lines = [*wrap_lines(headline(anatomy, around), WIDTH), "", *align(list(rows(anatomy, around)))]
    if anatomy.tied:
        lines += ["", "tied", *indented_lines(" = ".join(group) for group in anatomy.tied)]
    if anatomy.notes:
        lines += ["", "notes", *indented_lines(anatomy.notes)]
    return "\n".join(line.rstrip() for line in lines)


def headline(anatomy: Findings, around: Surroundings) -> str:
    """Class, parameters, width and tying of the model in one line."""
    facts = [type(anatomy.model).__name__, plural(anatomy.parameters, "parameter")]
    if anatomy.stacks:
        facts.append(f"width {anatomy.width}")
    if anatomy.head is not None and anatomy.embedding is not None:
        facts.append("head tied to the embedding" if around.tied else "head not tied to the embedding")
    return " · ".join(facts)


def rows(anatomy: Findings, around: Surroundings) -> Iterator[Row]:
    """Every row of the table, from the inputs to the outputs."""
    for piece in around.embeddings:
        yield part_row("embedding", piece)
    for piece in around.stem:
        yield Row(0, "stem", piece.name, piece.kind, piece.parameters or None)
    for stack, size in zip(anatomy.stacks, around.stacks, strict=True):
        yield from stack_rows(stack, size)
    for piece in around.tail:
        yield Row(0, "tail", piece.name, piece.kind, piece.parameters or None)
    if around.head is not None:
        yield part_row("head", around.head, "tied" if around.tied else "")
    if around.elsewhere:
        yield Row(0, "elsewhere", "parameters of no part above", "", around.elsewhere)


def part_row(name: str, piece: Piece, remark: str = "") -> Row:
    shape = " × ".join(map(str, piece.part.shape)) if piece.part is not None else ""
    return Row(0, name, piece.name, join_facts([shape, remark]), piece.parameters or None)


def stack_rows(stack: Stack, size: int) -> Iterator[Row]:
    facts = [f"width {stack.width}", "causal" if stack.causal else "not causal", plural(len(stack.layers), "layer")]
    yield Row(0, stack.kind, stack.name or "(the model itself)", join_facts(facts), size)
    written: dict[Hashable, str] = {}  # structure → where in this stack it is written out
    for fold in fold_layers(stack.layers):
        depth = 1
        if fold.body:
            span = range(fold.start, fold.start + fold.span)
            yield Row(1, f"{layer_range(span)} ×{fold.times}", f"{plural(fold.period, 'layer')}, {fold.times} times in a row", "")
            depth = 2
        for _, positions in leaves([fold]):
            kind = structure(stack.layers[positions[0]])
            yield from layer_rows([stack.layers[position] for position in positions], positions, depth, written.get(kind, ""))
            written.setdefault(kind, layer_range(positions))


def layer_rows(layers: Sequence[Layer], positions: Sequence[int], depth: int, same: str) -> Iterator[Row]:
    """One layer, written once for all of `layers`, without its branches where equal layers are written out above."""
    first, times = layers[0], len(layers)
    name = common_name([layer.name for layer in layers]) if all(layer.name for layer in layers) else "(no module)"
    facts = [sharing(layers) or ("each" if times > 1 else ""), f"as {same}" if same else ""]
    yield Row(depth, layer_range(positions) + (f" ×{times}" if times > 1 else ""), name, join_facts(facts), first.parameters)
    if same:
        return
    for branch in first.branches:
        yield branch_row(branch, first, depth + 1)
    if first.norms:
        yield Row(depth + 1, "norms", ", ".join(relative(norm, first.name) for norm in first.norms), "")


def branch_row(branch: Branch, layer: Layer, depth: int) -> Row:
    facts = [heads(branch), "gated" if branch.gated else "", *shapes(branch)]
    return Row(depth, branch.role, owner(branch, layer), join_facts(facts), branch.parameters)


def align(entries: Sequence[Row]) -> list[str]:
    """The rows under their headings, in columns, long cells wrapped; a module without facts takes both columns."""
    numbers = [f"{row.parameters:,}" if row.parameters is not None else "" for row in entries]
    parts = ["  " * row.depth + row.part for row in entries]
    last = max(map(len, [*numbers, "parameters"]))
    first = min(max(map(len, [*parts, "part"])), WIDEST_PART)
    second = min(max([len(row.module) for row in entries if row.what] + [len("module")]), WIDEST_MODULE)
    third = WIDTH - first - second - last - 3 * len(GAP)
    lines = [line_of(["part", "module", "what", "parameters"], (first, second, third, last)), "─" * WIDTH]
    for row, part, number in zip(entries, parts, numbers, strict=True):
        widths = (first, second, third, last) if row.what else (first, second + len(GAP) + third, 0, last)
        cells = [wrap_lines(part, first, 2 * row.depth), wrap_lines(row.module, widths[1]), wrap_lines(row.what, third), [number]]
        lines += [line_of(texts, widths) for texts in itertools.zip_longest(*cells, fillvalue="")]
    return lines


def line_of(texts: Sequence[str], widths: Sequence[int]) -> str:
    """The texts in columns, the last one to the right."""
    columns = [text.ljust(width) for text, width in zip(texts[:-1], widths[:-1], strict=True) if width]
    return GAP.join([*columns, texts[-1].rjust(widths[-1])])


def indented_lines(texts: Iterator[str] | Sequence[str]) -> list[str]:
    return [GAP + line for text in texts for line in wrap_lines(text, WIDTH - len(GAP))]


def wrap_lines(text: str, width: int, indent: int = 0) -> list[str]:
    """`text` in lines of at most `width`, broken at spaces first, later lines indented by `indent`."""
    lines, line = [], ""
    for piece in pieces(printable(text), width - indent):
        if len((line + piece).rstrip()) > width:
            lines += [line] if line.strip() else []
            line = " " * (indent if lines else 0) + piece.lstrip(" ")
        else:
            line += piece
    return [one.replace(TOGETHER, " ").rstrip() for one in [*lines, line]]


def pieces(text: str, width: int, breaks: Sequence[str] = BREAKS) -> Iterator[str]:
    """`text` cut at the first kind of break, pieces still wider than `width` at the next kinds, at last anywhere."""
    if not breaks:
        yield from (text[start : start + width] for start in range(0, len(text), width))
        return
    for piece in re.split(breaks[0], text):
        yield from [piece] if len(piece.rstrip()) <= width else pieces(piece, width, breaks[1:])


def join_facts(facts: Iterable[str]) -> str:
    """The facts side by side, lines to be broken between them."""
    return f"{TOGETHER}· ".join(fact.replace(" ", TOGETHER) for fact in facts if fact)


def printable(text: str) -> str:
    """The text without characters that would break a line."""
    return "".join(letter if letter.isprintable() or letter == TOGETHER else "\N{REPLACEMENT CHARACTER}" for letter in text)


def plain(anatomy: Findings) -> dict[str, Any]:
    """The anatomy as lists, dictionaries, numbers and strings, without the graph and the model."""
    return {
        "model": type(anatomy.model).__name__,
        "parameters": anatomy.parameters,
        "width": anatomy.width if anatomy.stacks else None,
        "embedding": as_data(anatomy.embedding),
        "embeddings": as_data(anatomy.embeddings),
        "stem": as_data(anatomy.stem),
        "stacks": as_data(anatomy.stacks),
        "tail": as_data(anatomy.tail),
        "head": as_data(anatomy.head),
        "tied": as_data(anatomy.tied),
        "notes": as_data(anatomy.notes),
    }


def as_data(value: Any) -> Any:
    """Dataclasses as dictionaries of their fields, tuples as lists, members of an enumeration by their values."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [as_data(item) for item in value] if isinstance(value, (tuple, list)) else value
