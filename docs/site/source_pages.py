"""Links to files and folders of the repository lead to pages of the site that show them, and a path in `code` becomes such a link.

A page names `benchmarks/sparse_ffn.py`, or a module of the library as `checks/replay.py`. What does not exist stays plain code; a
link in Markdown to what does not exist is a warning of MyST's, and fails the build.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json", ".ipynb": "json"}


def find(text: str, root: Path) -> str | None:
    """The path from the repository's root that `text` means, where it has a slash or names a file of the root."""
    if not PATH.fullmatch(text) or not ("/" in text or "." in text) or text.startswith("."):
        return None
    for place in (root, root / "retrofit"):
        if (place / text).is_file() or (text.endswith("/") and "/" in text[:-1] and (place / text).is_dir()):
            return str((place / text).relative_to(root))
    return None


def target(env: BuildEnvironment, path: str) -> str:
    """The document of the site that shows `path`; a page of benchmarks/results is one that `tables` made."""
    stem = str(Path(path).with_suffix(""))
    if path.startswith("benchmarks/results/") and (made := stem.replace("benchmarks", "build", 1)) in env.found_docs:
        return made
    return stem if path.endswith(".md") and stem in env.found_docs else f"source/{path}"


def link(env: BuildEnvironment, docname: str, path: str, *children: nodes.Node) -> nodes.reference:
    """A reference to the page of `path`, resolved once all pages are read."""
    node = nodes.reference("", "", *children, internal=True, source_path=path)
    shown(env).setdefault(docname, set()).add(path)
    return node


def shown(env: BuildEnvironment) -> dict[str, set[str]]:
    """The paths that each document links to."""
    if not hasattr(env, "source_paths"):
        env.source_paths = {}  # type: ignore[attr-defined]
    return env.source_paths  # type: ignore[attr-defined, no-any-return]


def link_paths(app: Sphinx, document: nodes.document) -> None:
    """Downloads, which MyST makes of links to files, links to folders and paths in code become links to pages."""
    env, root = app.env, Path(app.srcdir)
    docname = env.docname
    for download in list(document.findall(addnodes.download_reference)):
        path = (root / docname).parent.joinpath(download["reftarget"]).resolve().relative_to(root.resolve())
        download.replace_self(link(env, docname, str(path), *download.children))
    for asked in list(document.findall(addnodes.pending_xref)):
        folder = (root / docname).parent.joinpath(asked["reftarget"] or ".").resolve()
        if asked["reftype"] == "myst" and not asked.get("refdomain") and folder.is_dir() and folder.is_relative_to(root.resolve()):
            asked.replace_self(link(env, docname, str(folder.relative_to(root.resolve())), *asked.children))
    for literal in list(document.findall(nodes.literal)):
        inside = literal.parent
        while inside is not None and not isinstance(inside, nodes.reference | addnodes.pending_xref | nodes.title):
            inside = inside.parent
        path = None if inside is not None else find(literal.astext().partition("::")[0], root)
        if path is not None:
            literal.replace_self(link(env, docname, path, literal.deepcopy()))


def resolve(app: Sphinx, document: nodes.document, docname: str) -> None:
    for node in document.findall(nodes.reference):
        if "source_path" in node:
            node["refuri"] = app.builder.get_relative_uri(docname, target(app.env, node["source_path"]))


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page for each path that is linked to, and for what the folders among them hold."""
    root = Path(app.srcdir)
    queue = sorted({path for paths in shown(app.env).values() for path in paths})
    done = set(queue)
    while queue:
        path = queue.pop(0)
        name = target(app.env, path)
        if not name.startswith("source/"):
            continue
        text = "" if (root / path).is_dir() else (root / path).read_text(encoding="utf-8")
        if (root / path).is_dir():
            inside = [one for one in sorted((root / path).iterdir()) if not one.name.startswith(("__pycache__", "."))]
            members = [str(one.relative_to(root)) for one in inside]
            queue += [one for one in members if one not in done]
            done.update(members)
            uri = app.builder.get_relative_uri
            items = (f'<li><a href="{uri(name, target(app.env, one))}">{html.escape(Path(one).name)}</a></li>' for one in members)
            body = f"<ul>{''.join(items)}</ul>"
        elif path.endswith(".csv"):
            body = table(text)
        else:
            body = app.builder.highlighter.highlight_block(text, LANGUAGES.get(Path(path).suffix, "text"))  # type: ignore[attr-defined]
        yield name, {"title": path, "body": f"<h1>{html.escape(path)}</h1>{body}", "parents": []}, "page.html"


def table(text: str) -> str:
    """Return the rows of a CSV file as HTML."""
    head, *rows = csv.reader(io.StringIO(text))
    lines = [("th", head), *(("td", row) for row in rows)]
    made = ("".join(f"<{tag}>{marked(cell)}</{tag}>" for cell in cells) for tag, cells in lines)
    return f"<table>{''.join(f'<tr>{cells}</tr>' for cells in made)}</table>"


def marked(cell: str) -> str:
    """Return a cell as HTML, its code as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(cell))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link_paths, priority=400)  # before Sphinx collects what is to be downloaded
    app.connect("doctree-resolved", resolve)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
