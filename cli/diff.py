"""`retrofit diff`: which sites, parameters and recipes differ between two models on disk."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.cli.parser import MODEL, Subparsers, add_model_arguments, config_for, require_path
from retrofit.cli.progress import working
from retrofit.cli.tables import print_table
from retrofit.errors import first_few
from retrofit.runtime.line_folding import FEWEST, NUMBER, fold_lines

if TYPE_CHECKING:
    from retrofit.differences import Differences, TensorDifference

EXAMPLES = """\
  retrofit diff model/ model.altup/                         what the pass added, and what of the dense model moved
  retrofit diff model.altup/ model.altup.trained/           which parameters training changed, and by how much
  retrofit diff model.altup/ other.altup/ --json
"""
MOST = 12  # rows of one kind; --json has all


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "diff",
        help="which sites, parameters and recipes differ between two models",
        description="Show what differs between two models.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument("other", metavar="OTHER", type=Path, help=MODEL)
    parser.add_argument("--json", action="store_true", help="print all differences as JSON")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 where anything differs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The differences are on stdout."""
    paths = [require_path(arguments.model), require_path(arguments.other)]

    from retrofit.differences import diff
    from retrofit.storage.checkpoint import load

    with working(arguments.debug) as progress:
        models = []
        for path in paths:
            progress(f"reading {path}")
            models.append(load(path, config=config_for(path, arguments), allow_pickle=arguments.allow_pickle))
        progress("comparing")
        found = diff(models[0], models[1])
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2, default=str))
    elif found.same:
        print(f"nothing differs: {found.equal:,} parameters and saved buffers are the same")
    else:
        print_table(rows_of(found), ("", "", str(paths[0]), str(paths[1])))
    return 1 if arguments.exit_code and not found.same else 0


def rows_of(found: Differences) -> Iterator[tuple[str, str, str, str]]:
    """What differs, kind by kind."""
    if found.architectures[0] != found.architectures[1]:
        yield "architecture", "", *found.architectures
    for key, (one, other) in list(found.config.items())[:MOST]:
        yield "config", key, short(one), short(other)
    for title, one, other in found.passes():
        yield "recipe", title, one or "no such pass", other or "no such pass"
    methods = dict.fromkeys((site.method, site.only_in) for site in found.sites)
    for method, only_in in methods:
        names = [site.name for site in found.sites if (site.method, site.only_in) == (method, only_in)]
        said = first_few(fold_lines(names), 3)
        yield "sites", method, *((said, "") if only_in == "first" else ("", said))
    yield "parameters", f"{found.equal:,} the same", f"compared {found.compared}", ""
    for what in dict.fromkeys(one.what for one in found.tensors):
        kind = [one for one in found.tensors if one.what == what]
        rows = list(folded_rows(kind))
        for number, row in enumerate(rows[:MOST]):
            yield f"{what}: {len(kind):,}" if not number else "", *row
        if rows[MOST:]:
            yield "", f"and {len(rows) - MOST:,} more", "", ""


def folded_rows(tensors: Sequence[TensorDifference]) -> Iterator[tuple[str, str, str]]:
    """One row for tensors at several depths that differ in the same way, with the range of how far their values are apart."""
    groups: dict[tuple[str, str, str, bool], list[TensorDifference]] = {}
    for tensor in tensors:
        key = (NUMBER.sub("*", tensor.name), tensor.one, tensor.other, tensor.largest is None)
        groups.setdefault(key, []).append(tensor)
    for group in groups.values():
        if len(group) < FEWEST:
            yield from ((tensor.name, *cells(tensor)) for tensor in group)
            continue
        (name,) = fold_lines(tensor.name for tensor in group)
        yield name, group[0].one, range_of(group) if group[0].largest is not None else group[0].other


def range_of(group: Sequence[TensorDifference]) -> str:
    """How far the values of several tensors are apart, the least and the most."""
    spans = []
    for sign, values in (("max |Δ|", [one.largest for one in group]), ("‖Δ‖/‖·‖", [one.relative for one in group])):
        known = [value for value in values if value is not None]
        low, high = f"{min(known):.2e}", f"{max(known):.2e}"
        spans.append(f"{sign} {low}" if low == high else f"{sign} {low}–{high}")
    return ", ".join(spans)


def cells(one: TensorDifference) -> tuple[str, str]:
    """The same tensor in both models, or how far apart its values are."""
    if one.largest is None:
        return one.one, one.other
    return one.one, f"max |Δ| {one.largest:.2e}, ‖Δ‖/‖·‖ {one.relative:.2e}"


def short(value: object) -> str:
    from retrofit.differences import ABSENT

    if value is ABSENT:
        return "absent"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
