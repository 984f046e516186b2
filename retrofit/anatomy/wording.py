"""Short texts about layers and branches, shared by the table and the drawing."""

from __future__ import annotations

from collections.abc import Sequence

from retrofit.anatomy.folding import relative
from retrofit.anatomy.parts import Branch, Layer, Projection

ORDER = ("router", "q", "qk", "qkv", "k", "kv", "v", "gate", "up", "gate_up", "projection", "experts", "down", "out")
MOST_RANGES = 4


def shapes(branch: Branch) -> list[str]:
    """The projections of a branch, those of one shape together: `q, out 64→64`, `k, v 64→16`."""
    groups: dict[tuple[int, int], list[Projection]] = {}
    for one in sorted(branch.projections, key=lambda one: ORDER.index(one.role) if one.role in ORDER else len(ORDER)):
        groups.setdefault((one.in_features, one.out_features), []).append(one)
    return [f"{count_words([one.role for one in group])} {before}→{after}" for (before, after), group in groups.items()]


def count_words(words: Sequence[str]) -> str:
    """The words in order, each once, followed by its count where that is more than one."""
    return ", ".join(f"{word} ×{words.count(word)}" if words.count(word) > 1 else word for word in dict.fromkeys(words))


def heads(branch: Branch) -> str:
    """`32 heads`, `32 heads, 8 for k and v` where fewer heads share them, nothing where there are none."""
    if branch.heads is None:
        return ""
    text = "1 head" if branch.heads == 1 else f"{branch.heads} heads"
    size = {one.role: one.out_features for one in branch.projections}
    query, key = size.get("q", 0), size.get("k", 0)
    if branch.heads > 0 and 0 < key < query and query % branch.heads == 0 and key % (query // branch.heads) == 0:
        text += f", {key * branch.heads // query} for k and v"
    return text


def layer_range(positions: Sequence[int]) -> str:
    """`layer 3`, `layers 0–31`, `layers 0, 2, 4, …, 22`."""
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
    """The path of a branch's module within its layer; where that is the layer itself, the modules of its matrices."""
    if branch.name != layer.name:
        return relative(branch.name, layer.name)
    owners = dict.fromkeys(relative(one.name.rpartition(".")[0], layer.name) for one in branch.projections if one.name)
    return ", ".join(filter(None, owners))


def sharing(layers: Sequence[Layer]) -> str:
    """How many sets of weights the layers have, where one module is called as several of them."""
    modules = len({layer.name for layer in layers})
    if modules == len(layers) or not all(layer.name for layer in layers):
        return ""
    return f"one set of weights, {len(layers)} calls" if modules == 1 else f"{modules} sets of weights, {len(layers)} calls"


def compact(number: int) -> str:
    """A count in three digits: `6.74 B`, `131 M`, `4.1 k`."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {letter}" if number < 999.5 * size else f"{number / size:.0f} {letter}"
    return str(number)


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_change(before: int, after: int) -> str:
    """A count before and after, and by how much it grew."""
    return f"{before:,} → {after:,}" + (f" ({(after - before) / before:+.1%})" if before else "")
