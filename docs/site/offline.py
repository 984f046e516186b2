"""The build fails where a page, a style sheet or a script of the site would load something from the network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REMOTE = r"""["']?\s*(?:https?:)?//"""
PAGE = re.compile(
    rf"""<(?:script|img|iframe|source|audio|video|embed|object|link)\b[^>]*?\b(?:src|srcset|href|data)\s*=\s*{REMOTE}[^>]*>"""
)
STYLE = re.compile(rf"""(?:url\(|@import)\s*{REMOTE}[^)\s;]*""")
SCRIPT = re.compile(rf"""(?:fetch\(|import\(|importScripts\(|\.src\s*=|\.open\([^)]*,)\s*{REMOTE}[^"')]*""")
RULES = {
    ".html": (PAGE, STYLE, SCRIPT),
    ".svg": (STYLE, re.compile(rf"""xlink:href\s*=\s*{REMOTE}[^"']*""")),
    ".css": (STYLE,),
    ".js": (SCRIPT, STYLE),
}


def remote_loads(site: Path) -> list[str]:
    """Everything in the files of a site that a browser would load from another machine; links that a reader may follow are none."""
    found = []
    for file in sorted(path for path in site.rglob("*") if path.suffix in RULES):
        text = file.read_text(encoding="utf-8")
        found += [f"{file.relative_to(site)}: {hit.group(0)}" for rule in RULES[file.suffix] for hit in rule.finditer(text)]
    return found


def refuse_remote(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html" and (found := remote_loads(Path(app.outdir))):
        from sphinx.errors import SphinxError

        raise SphinxError("the site would load from the network:\n" + "\n".join(found))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", refuse_remote, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
