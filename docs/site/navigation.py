"""The order of the pages, put at the end of README.md as it is read; a page of docs/ that nobody placed stands under "More"."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

PAGES = {
    "Start": ["tutorials/first_retrofit", "tutorials/from_python", "which_pass", "site/commands", "inspect", "recipes", "plan"],
    "Passes": [
        "altup", "sum", "memory", "recurrence", "reversible", "lsh_attention", "merge_cross_attention", "sequence_altup",
        "shared_moe", "sparse_ffn", "sparse_qkv", "sparse_loss", "terraformer",
    ],
    "Models in and out": ["bundle", "graphs", "onnx", "larger_than_memory", "compatibility"],
    "Training": ["recovery", "several_processes", "results"],
    "Evidence": [
        "verification", "real_models", "whole_models", "gpu", "coverage", "graph_coverage", "onnx_coverage", "onnx_passes",
        "faults", "mutants", "security",
    ],
    "Inside": ["architecture", "glossary", "write_a_pass", "site/api/retrofit", "site/api/passes", "site/api/sdk"],
}  # fmt: skip


def toctrees(docs: Path) -> str:
    """The tables of contents of the whole site, as Markdown; nothing of them shows on the page itself."""
    there = {str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md")}
    placed = {name for names in PAGES.values() for name in names}
    sections = {title: [name for name in names if name in there] for title, names in PAGES.items()}
    sections["More"] = sorted(there - placed)
    blocks = [(title, [f"docs/{name}" for name in names]) for title, names in sections.items()]
    blocks.append(("Project", ["CONTRIBUTING", "CHANGELOG"]))
    lines = ("\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```"]) for title, names in blocks if names)
    return "\n\n" + "\n\n".join(lines) + "\n"


def append_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == app.config.root_doc:
        source[0] += toctrees(Path(app.srcdir) / "docs")


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """The site's index.html leads to its first page."""
    if exception is None and app.builder.format == "html":
        page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={app.config.root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", append_navigation)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
