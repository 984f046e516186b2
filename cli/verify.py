"""`retrofit verify`: check a retrofitted model against its recipe and its dense model, or an ONNX file against its source.

`retrofit diff`: compare the sites, parameters and recipes of two models.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.cli.failures import UsageError
from retrofit.cli.parser import MODEL, Subparsers, load_model, require_path
from retrofit.cli.terminal import print_table, working
from retrofit.errors import first_few
from retrofit.progress import FEWEST, NUMBER, fold_lines

if TYPE_CHECKING:
    from retrofit.checks.report import CheckResult, Report
    from retrofit.differences import Differences, TensorDifference


EXAMPLES = """\
Exit code 0: all checks passed; 1: one failed.

  retrofit verify model.altup/                               check it against its own recipe
  retrofit verify model.altup/ --against model/              and against the dense model
  retrofit verify model.onnx --against model/                an ONNX file against the model it was exported from
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "verify", help="check a retrofitted model", description="Check a retrofitted model.", epilog=EXAMPLES
    )
    parser.add_model()
    parser.add_argument("--against", metavar="DENSE", type=Path, help="also compare with the dense model")
    parser.add_checks()
    parser.add_argument("--onnx", action="store_true", help="also export to ONNX and compare (slow)")
    parser.add_argument("--stream", action="store_true", help="process both models out of core, with the checks that allow it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Return 0 if every check passed, 1 if one failed."""
    require_path(arguments.model)
    if arguments.against is not None:
        require_path(arguments.against)
    is_onnx = arguments.model.suffix == ".onnx"
    if is_onnx and arguments.against is None:
        why = "it is compared with the model it was exported from"
        raise UsageError("an ONNX file needs --against", why=why, remedy="add --against MODEL")
    if is_onnx and arguments.onnx:
        raise UsageError("--onnx with an ONNX file", why="it is an export already", remedy="drop --onnx")
    if arguments.checks != "all" and (is_onnx or arguments.stream):
        why = "an ONNX file has one check" if is_onnx else "--stream chooses its own checks"
        raise UsageError(f"--checks {arguments.checks} with {'an ONNX file' if is_onnx else '--stream'}", why=why, remedy="drop it")
    if arguments.stream:
        return report_on_stream(arguments)

    from retrofit.checks import named_checks, verify, verify_onnx

    with working(arguments.debug) as progress:
        reference = None if arguments.against is None else load_model(arguments, arguments.against, progress)
        if reference is not None and is_onnx:
            progress("verifying")
            report = verify_onnx(arguments.model, reference)
        else:
            model = load_model(arguments, None if reference is None else arguments.model, progress)
            progress("verifying")
            report = verify(model, reference, checks=(*named_checks(arguments.checks), *(["onnx"] if arguments.onnx else [])))
    return show(report)


def report_on_stream(arguments: argparse.Namespace) -> int:
    """Print the report as `run` does, for directories larger than memory."""
    if arguments.onnx or arguments.config is not None or arguments.allow_pickle:
        raise UsageError(
            "--onnx, --config and --allow-pickle cannot be combined with --stream",
            why="--stream reads safetensors directories; an ONNX export needs the whole model in memory",
            remedy="drop them",
        )
    from retrofit.streaming import verify_directory

    with working(arguments.debug) as progress:
        report = verify_directory(arguments.model, arguments.against, progress)
    return show(report)


def show(report: Report) -> int:
    """Print the report. Return 0 if every check passed, 1 if one failed."""
    print_table(row for check in report.checks for row in check_rows(check))
    outcomes = Counter(check.status for check in report.checks)
    counts = ", ".join(f"{outcomes[status]} {status}" for status in ("passed", "failed", "skipped") if outcomes[status])
    print(f"{counts} on {report.coverage}" if report.inputs else counts)
    return 0 if report.ok else 1


def check_rows(check: CheckResult) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a check: its outcome, seconds and measurement, then the site at fault or the reason it was skipped."""
    yield check.name, check.status, f"{check.seconds:.1f} s", check.measured
    yield from (("", "", "", line) for line in check.why.splitlines() if line)


DIFF_EXAMPLES = """\
  retrofit diff model/ model.altup/                         what the pass added and moved
  retrofit diff model.altup/ model.altup.trained/           what training changed, and by how much
  retrofit diff model.altup/ other.altup/ --json
"""
MOST = 12  # rows of one kind; --json has all


def add_diff_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "diff",
        help="compare the sites, parameters and recipes of two models",
        description="Show the differences between two models.",
        epilog=DIFF_EXAMPLES,
    )
    parser.add_model()
    parser.add_argument("other", metavar="OTHER", type=Path, help=MODEL)
    parser.add_argument("--json", action="store_true", help="print all differences as JSON")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if anything differs")
    parser.set_defaults(run=run_diff)


def run_diff(arguments: argparse.Namespace) -> int:
    """Print the differences. Return 1 with --exit-code if there are any, else 0."""
    paths = [require_path(arguments.model), require_path(arguments.other)]

    from retrofit.differences import diff

    with working(arguments.debug) as progress:
        models = [load_model(arguments, path, progress) for path in paths]
        progress("comparing")
        found = diff(*models)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2, default=str))
    elif found.same:
        print(f"nothing differs: {found.equal:,} parameters and saved buffers are the same")
    else:
        print_table(rows_of(found), ("", "", str(paths[0]), str(paths[1])))
    return 1 if arguments.exit_code and not found.same else 0


def rows_of(found: Differences) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the differences: architecture, config, recipe, sites, parameters and buffers."""
    if found.architectures[0] != found.architectures[1]:
        yield "architecture", "", *found.architectures
    for key, (a, b) in list(found.config.items())[:MOST]:
        yield "config", key, short(a), short(b)
    for title, a, b in found.passes():
        yield "recipe", title, a or "no such pass", b or "no such pass"
    methods = dict.fromkeys((site.method, site.only_in) for site in found.sites)
    for method, only_in in methods:
        names = [site.name for site in found.sites if (site.method, site.only_in) == (method, only_in)]
        names_shown = first_few(fold_lines(names), 3)
        yield "sites", method, *((names_shown, "") if only_in == "first" else ("", names_shown))
    yield "parameters", f"{found.equal:,} the same", f"compared {found.compared}", ""
    for what in dict.fromkeys(tensor.what for tensor in found.tensors):
        kind = [tensor for tensor in found.tensors if tensor.what == what]
        rows = list(folded_rows(kind))
        for number, row in enumerate(rows[:MOST]):
            yield f"{what}: {len(kind):,}" if not number else "", *row
        if rows[MOST:]:
            yield "", f"and {len(rows) - MOST:,} more", "", ""


def folded_rows(tensors: Sequence[TensorDifference]) -> Iterator[tuple[str, str, str]]:
    """Yield one row for the tensors at several depths that differ in the same way, with the range of their distances."""
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
    """Return the smallest and the largest distance of several tensors."""
    spans = []
    for sign, values in (("max |Δ|", [tensor.largest for tensor in group]), ("‖Δ‖/‖·‖", [tensor.relative for tensor in group])):
        known = [value for value in values if value is not None]
        low, high = f"{min(known):.2e}", f"{max(known):.2e}"
        spans.append(f"{sign} {low}" if low == high else f"{sign} {low}–{high}")
    return ", ".join(spans)


def cells(tensor: TensorDifference) -> tuple[str, str]:
    """Return the tensor's shape and dtype in both models, or in one and the distance of its values."""
    if tensor.largest is None:
        return tensor.one, tensor.other
    return tensor.one, f"max |Δ| {tensor.largest:.2e}, ‖Δ‖/‖·‖ {tensor.relative:.2e}"


def short(value: object) -> str:
    from retrofit.differences import ABSENT

    if value is ABSENT:
        return "absent"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
