"""The order of the pages, in three kinds, put at the end of README.md as it is read. A page that has no place stands under "More".

The passes stand below the page that chooses among them, and the data below the page of evidence.
"""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

PAGES = {
    "Using": [
        "tutorials/first_retrofit", "tutorials/from_python", "which_pass", "site/commands", "inspect", "recipes", "plan",
        "recovery", "several_processes", "onnx", "graphs", "bundle", "native", "serving", "quantization", "larger_than_memory",
        "undo", "security", "site/api/retrofit", "site/api/passes",
    ],
    "Extending": ["architecture", "write_a_pass", "glossary", "verification", "site/api/sdk"],
    "Evidence": ["evidence"],
}  # fmt: skip
PASSES = [
    "altup", "sum", "memory", "recurrence", "reversible", "lsh_attention", "merge_cross_attention", "sequence_altup", "shared_moe",
    "activation_sparsity", "sparse_ffn", "sparse_qkv", "sparse_loss", "terraformer",
]  # fmt: skip
PROJECT = ["CONTRIBUTING", "CHANGELOG"]


def toctree(names: list[str], caption: str = "") -> str:
    """Return a table of contents, as Markdown; nothing of it shows on the page itself."""
    return "\n".join(["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *names, "```"])


def toctrees(docs: Path) -> str:
    """Return the tables of contents of the whole site."""
    there = {str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md")}
    placed = {name for names in PAGES.values() for name in names} | set(PASSES)
    sections = {title: [f"docs/{name}" for name in names if name in there] for title, names in PAGES.items()}
    sections["Extending"] += PROJECT
    sections["More"] = [f"docs/{name}" for name in sorted(there - placed)]
    return "\n\n" + "\n\n".join(toctree(names, title) for title, names in sections.items() if names) + "\n"


def append_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == app.config.root_doc:
        source[0] += toctrees(Path(app.srcdir) / "docs")
    elif docname == "docs/which_pass":
        source[0] += "\n\n" + toctree([f"/docs/{name}" for name in PASSES]) + "\n"
    elif docname == "docs/evidence":
        results = sorted(name for name in app.env.found_docs if name.startswith("build/results/"))
        source[0] += "\n\n" + toctree([f"/{name}" for name in results]) + "\n"


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """The site's index.html leads to its first page."""
    if exception is None and app.builder.format == "html":
        page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={app.config.root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", append_navigation)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
