"""Links to CSV files on lines of their own are shown as tables: what benchmarks found is data in benchmarks/results."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "coverage"))

from sweeping import with_tables


def show_tables(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = with_tables(source[0], Path(app.env.doc2path(docname)).parent)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", show_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
