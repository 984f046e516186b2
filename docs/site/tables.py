"""What benchmarks found is data in benchmarks/results: pages as JSON become pages of the site, links to CSV files become tables."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "coverage"))

from sweeping import read_page, with_tables

ROOT = Path(__file__).parents[2]
MADE = ROOT / "build" / "results"


def write_pages(app: Sphinx, config: Config) -> None:
    """Write the pages as Markdown to build/results, where Sphinx finds them."""
    shutil.rmtree(MADE, ignore_errors=True)
    MADE.mkdir(parents=True)
    for page in (ROOT / "benchmarks" / "results").glob("*.json"):
        (MADE / f"{page.stem}.md").write_text(read_page(page), encoding="utf-8")


def show_tables(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = with_tables(source[0], Path(app.env.doc2path(docname)).parent)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", write_pages)
    app.connect("source-read", show_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
