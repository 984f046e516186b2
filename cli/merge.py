"""`retrofit merge`: an adapter that was trained on a retrofitted model, merged into it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from retrofit.cli.failures import UsageError
from retrofit.cli.outputs import check_model_output, default_output, write_model
from retrofit.cli.parser import MODEL, Subparsers, require_path
from retrofit.cli.terminal import print_table, working

EXAMPLES = """\
ADAPTER is a directory that PEFT's save_pretrained wrote.

  retrofit merge adapter/                       into the model that adapter_config.json names; writes adapter.merged/
  retrofit merge adapter/ --base model.altup/ -o model.altup.tuned/
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "merge",
        help="merge a LoRA adapter into the model that it was trained on",
        description="Merge an adapter of PEFT into the model that it was trained on.",
        epilog=EXAMPLES,
    )
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="the directory of the adapter")
    parser.add_argument("--base", metavar="MODEL", type=Path, help=f"where the model that it was trained on is now: {MODEL}")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="where the result goes (default: next to ADAPTER)")
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the merged model with its recipe, and print a report of it."""
    adapter = require_path(arguments.adapter)
    output = check_model_output(arguments.output or default_output(adapter, ["merged"]), arguments.force)

    from retrofit.adapters import BASE, load_adapted, merge_adapters, read_adapter_config
    from retrofit.differences import require_base_of
    from retrofit.passbase.replaying import recipe
    from retrofit.storage.checkpoint import load

    config = read_adapter_config(adapter)
    base = require_base(arguments.base or config.get(BASE))
    with working(arguments.debug) as progress:
        progress(f"reading {base}")
        model = load(base)
        require_base_of(adapter, model, base)
        progress("merging, and comparing")
        merged = merge_adapters(load_adapted(adapter, model))
        progress(f"writing {output}")
        write_model(merged, base, output, arguments.force)
    print_table(
        [
            ("model", str(base)),
            ("recipe", ", ".join(one.spec() for one in recipe(merged) or ()) or "none: it is a dense model"),
            ("merged", f"{config.get('peft_type', 'adapter')} of {adapter}"),
            ("compared", "the same outputs as with the adapter"),
            ("result", str(output)),
        ]
    )
    return 0


def require_base(named: Any) -> Path:
    """Return the path of the adapter's model; raise `UsageError` where it is not on disk, as an adapter may name anything."""
    if named and isinstance(named, (str, Path)) and Path(named).exists():
        return Path(named)
    raise UsageError(
        f"the model that the adapter was trained on is not at {named}" if named else "the adapter names no model",
        why="models are read from disk only, never downloaded",
        remedy="name the directory where it is now with --base",
    )
