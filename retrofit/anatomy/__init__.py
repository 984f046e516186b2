"""The anatomy of a transformer as a table, as plain data, and in the short texts that the drawing uses too."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from retrofit.anatomy.outline import Piece, Surroundings, common_name, fold_layers, leaves, relative, structure, surroundings
from retrofit.anatomy.parts import Branch, Findings, Layer, NearMiss, Projection, Stack
from retrofit.progress import fold_lines
from retrofit.provenance import provenance_of

if TYPE_CHECKING:
    from retrofit.anatomy.module_sites import WrappedModule

ORDER = ("router", "q", "qk", "qkv", "k", "kv", "v", "gate", "up", "gate_up", "projection", "experts", "down", "out")
MOST_RANGES = 4


@dataclasses.dataclass(frozen=True)
class Anatomy(Findings):
    """The structure of a model: the parts found, their places, and the parts not found; as a string, a table."""

    def __str__(self) -> str:
        return table(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the anatomy as plain data, for `json`."""
        return plain(self)

    def sites(self, *kinds: str, layers: Iterable[int] | None = None) -> tuple[list[WrappedModule], list[NearMiss]]:
        """Return the modules that own the parts of these kinds, each module once, and a near miss for each part without an owner.

        Kinds are `layer`, `attention`, `self-attention`, `cross-attention`, `ffn`, `moe` and `other mixer`. A module owns a part if
        it computes all its products and no other part's, without the sum with the stream; norms at either end may be outside too. A
        module that runs at several depths is one site with all of them. `layers` restricts the parts to those depths of each stack.
        """
        from retrofit.anatomy.module_sites import find_sites  # imported late: an anatomy is printed and drawn without torch

        return find_sites(self, *kinds, layers=layers)


def shapes(branch: Branch) -> list[str]:
    """Return the projections of a branch, grouped by shape: `q, out 64→64`, `k, v 64→16`."""
    groups: dict[tuple[int, int], list[Projection]] = {}
    for projection in sorted(
        branch.projections, key=lambda projection: ORDER.index(projection.role) if projection.role in ORDER else len(ORDER)
    ):
        groups.setdefault((projection.in_features, projection.out_features), []).append(projection)
    return [f"{count_words([branch.role for branch in group])} {before}→{after}" for (before, after), group in groups.items()]


def count_words(words: Sequence[str]) -> str:
    """Return the words in order, each once, with its count if it occurs more than once."""
    return ", ".join(f"{word} ×{words.count(word)}" if words.count(word) > 1 else word for word in dict.fromkeys(words))


def heads(branch: Branch) -> str:
    """Return `32 heads`, `32 heads, 8 for k and v` if fewer heads share them, "" if there are none."""
    if branch.heads is None:
        return ""
    text = "1 head" if branch.heads == 1 else f"{branch.heads} heads"
    size = {projection.role: projection.out_features for projection in branch.projections}
    query, key = size.get("q", 0), size.get("k", 0)
    if branch.heads > 0 and 0 < key < query and query % branch.heads == 0 and key % (query // branch.heads) == 0:
        text += f", {key * branch.heads // query} for k and v"
    return text


def layer_range(positions: Sequence[int]) -> str:
    """Return `layer 3`, `layers 0–31`, `layers 0, 2, 4, …, 22`."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1][1:] = [position]
        else:
            runs.append([position])
    texts = ["–".join(map(str, run)) for run in runs]
    if len(texts) > MOST_RANGES:
        texts[3:-1] = ["…"]
    return ("layer " if len(positions) == 1 else "layers ") + ", ".join(texts)


def owner(branch: Branch, layer: Layer) -> str:
    """Return the path of a branch's module within its layer; if that is the layer itself, the modules of its matrices."""
    if branch.name != layer.name:
        return relative(branch.name, layer.name)
    owners = dict.fromkeys(
        relative(projection.name.rpartition(".")[0], layer.name) for projection in branch.projections if projection.name
    )
    return ", ".join(filter(None, owners))


def sharing(layers: Sequence[Layer]) -> str:
    """Return the number of weight sets of the layers if one module is called as several of them."""
    modules = len({layer.name for layer in layers})
    if modules == len(layers) or not all(layer.name for layer in layers):
        return ""
    return f"one set of weights, {len(layers)} calls" if modules == 1 else f"{modules} sets of weights, {len(layers)} calls"


def compact(number: int) -> str:
    """Return a count in three digits: `6.74 B`, `131 M`, `4.1 k`."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {letter}" if number < 999.5 * size else f"{number / size:.0f} {letter}"
    return str(number)


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_change(before: int, after: int) -> str:
    """Return a count before and after, and the growth."""
    return f"{before:,} → {after:,}" + (f" ({(after - before) / before:+.1%})" if before else "")


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
    """Return the anatomy as text of at most 100 columns, repeated layers written once."""
    around = surroundings(anatomy)
    lines = [*wrap_lines(headline(anatomy, around), WIDTH), "", *align(list(rows(anatomy, around)))]
    if done := rewritten_sites(anatomy):
        lines += [
            "",
            "rewritten",
            *indented_lines(fold_lines(f"{site or 'the model'}: {method}, {what}" for method, site, what in done)),
        ]
    if anatomy.tied:
        lines += ["", "tied", *indented_lines(" = ".join(group) for group in anatomy.tied)]
    if anatomy.notes:
        lines += ["", "notes", *indented_lines(anatomy.notes)]
    return "\n".join(line.rstrip() for line in lines)


def rewritten_sites(anatomy: Findings) -> list[tuple[str, str, str]]:
    """Return the passes' changes of the model: method, module path and change, in order."""
    accounts: Iterable[Any] = provenance_of(anatomy.model).rewrites or ()
    return [(account.spec.partition("(")[0], site.name, site.what) for account in accounts for site in account.sites]


def headline(anatomy: Findings, around: Surroundings) -> str:
    """Return class, parameters, width and tying of the model in one line."""
    facts = [type(anatomy.model).__name__, plural(anatomy.parameters, "parameter")]
    if anatomy.stacks:
        facts.append(f"width {anatomy.width}")
    if anatomy.head is not None and anatomy.embedding is not None:
        facts.append("head tied to the embedding" if around.tied else "head not tied to the embedding")
    return " · ".join(facts)


def rows(anatomy: Findings, around: Surroundings) -> Iterator[Row]:
    """Yield every row of the table, from the inputs to the outputs."""
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
    written: dict[Hashable, str] = {}  # structure → where it is written out in this stack
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
    """Yield the rows of one layer for all of `layers`, without its branches if equal layers are written out above."""
    first, times = layers[0], len(layers)
    name = common_name([layer.name for layer in layers]) if all(layer.name for layer in layers) else "(no module)"
    facts = [sharing(layers) or ("each" if times > 1 else ""), f"as {same}" if same else ""]
    yield Row(depth, layer_range(positions) + (f" ×{times}" if times > 1 else ""), name, join_facts(facts), first.parameters)
    if same:
        return
    for branch in first.branches:
        facts = [heads(branch), "gated" if branch.gated else "", *shapes(branch)]
        yield Row(depth + 1, branch.role, owner(branch, first), join_facts(facts), branch.parameters)
    if first.norms:
        yield Row(depth + 1, "norms", ", ".join(relative(norm, first.name) for norm in first.norms), "")


def align(entries: Sequence[Row]) -> list[str]:
    """Return the rows under their headings, in columns, long cells wrapped; a module without facts spans both columns."""
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
    """Return the texts in columns, the last one to the right."""
    columns = [text.ljust(width) for text, width in zip(texts[:-1], widths[:-1], strict=True) if width]
    return GAP.join([*columns, texts[-1].rjust(widths[-1])])


def indented_lines(texts: Iterator[str] | Sequence[str]) -> list[str]:
    return [GAP + line for text in texts for line in wrap_lines(text, WIDTH - len(GAP))]


def wrap_lines(text: str, width: int, indent: int = 0) -> list[str]:
    """Return `text` in lines of at most `width`, broken at spaces first, later lines indented by `indent`."""
    lines, line = [], ""
    for piece in pieces(printable(text), width - indent):
        if len((line + piece).rstrip()) > width:
            lines += [line] if line.strip() else []
            line = " " * (indent if lines else 0) + piece.lstrip(" ")
        else:
            line += piece
    return [text.replace(TOGETHER, " ").rstrip() for text in [*lines, line]]


def pieces(text: str, width: int, breaks: Sequence[str] = BREAKS) -> Iterator[str]:
    """Yield `text` cut at the first kind of break, wider pieces at the next kinds, and finally anywhere."""
    if not breaks:
        yield from (text[start : start + width] for start in range(0, len(text), width))
        return
    for piece in re.split(breaks[0], text):
        yield from [piece] if len(piece.rstrip()) <= width else pieces(piece, width, breaks[1:])


def join_facts(facts: Iterable[str]) -> str:
    """Return the facts joined, lines to be broken between them."""
    return f"{TOGETHER}· ".join(fact.replace(" ", TOGETHER) for fact in facts if fact)


def printable(text: str) -> str:
    """Return the text without characters that would break a line."""
    return "".join(letter if letter.isprintable() or letter == TOGETHER else "\N{REPLACEMENT CHARACTER}" for letter in text)


def plain(anatomy: Findings) -> dict[str, Any]:
    """Return the anatomy as lists, dictionaries, numbers and strings, without the graph and the model."""
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
        "rewritten": [{"pass": method, "name": name, "what": what} for method, name, what in rewritten_sites(anatomy)],
        "notes": as_data(anatomy.notes),
    }


def as_data(value: Any) -> Any:
    """Return dataclasses as dictionaries, tuples as lists, members of an enumeration by their values."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [as_data(item) for item in value] if isinstance(value, (tuple, list)) else value
