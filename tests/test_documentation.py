"""What the pages of the documentation point to exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from retrofit.passbase.options import options_of
from retrofit.passbase.protocol import load_pass, pass_names

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
FILE = re.compile(
    r"(?<![\w/.-])((?:benchmarks|tests|examples|docs|retrofit|passes|cli)/[\w/.-]*\.(?:py|md|txt|svg|ipynb))(?:::(\w+))?"
)


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert there.is_relative_to(ROOT), f"{page.name}: {target} is outside the repository"
        if anchor:
            assert anchor in slugs(there.read_text(encoding="utf-8")), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page: Path) -> None:
    """Scripts, tests and pages by their path from the repository's root; a test after `::` is in its file."""
    for name, test in FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), f"{page.name}: {name}"
        if test:
            tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
            assert test in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, f"{page.name}: {name}::{test}"


def site_module(name: str) -> ModuleType:
    """A module of docs/site that needs nothing but Python."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", pass_names())
def test_the_page_of_a_pass_names_its_options(name: str) -> None:
    """As code, not as a word of its prose. Options of commands are on the page of the commands, which is made from the parser."""
    page = (ROOT / "docs" / f"{name.replace('-', '_')}.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"`[^`\n]+`", FENCED.sub("", page)))
    assert [option for option, *_ in options_of(load_pass(name)) if not re.search(rf"(?<![\w.-]){option}(?![\w.-])", code)] == []


def test_a_tutorial_is_run_block_by_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    blocks = ("python\nx = 2\nopen('a.svg', 'w').write('<svg/>')", "sh\nls", "python\nprint(x + 1)")
    page.write_text("# A\n\n" + "\n\n".join(f"```{block}\n```" for block in blocks) + "\n\nend\n")
    site_module("tutorials").run_page(page, tmp_path)
    text = (tmp_path / "index.md").read_text()
    outputs = re.findall(r"```\{code-block\} text\n:class: output\n\n(.*?)\n```", text, re.DOTALL)
    assert outputs == ["a.svg", "3"] and text.endswith("end\n")
    assert "![a.svg](a.svg)" in text and (tmp_path / "a.svg").read_text() == "<svg/>"


@pytest.mark.parametrize("code", ["```python\n1 / 0\n```", "```sh\nfalse\n```"])
def test_a_block_that_fails_fails_the_page(code: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A\n\n{code}\n")
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        site_module("tutorials").run_page(page, tmp_path)
    assert not (tmp_path / "index.md").exists()


def test_what_a_page_would_load_from_the_network_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://x.org">x</a> <img src="a.svg"> <script src="_static/b.js"></script>')
    (tmp_path / "good.css").write_text("/* https://x.org */ a { background: url(data:image/png;base64,AAAA) }")
    (tmp_path / "good.js").write_text('const home = "https://x.org"; fetch("searchindex.js")')
    remote_loads = site_module("offline").remote_loads
    assert remote_loads(tmp_path) == []
    (tmp_path / "a.html").write_text('<script async src="https://cdn.x.org/b.js"></script>')
    (tmp_path / "b.html").write_text('<link rel="stylesheet" href="//fonts.x.org/css">')
    (tmp_path / "c.css").write_text('@import "https://x.org/c.css"; a { background: url(https://x.org/d.png) }')
    (tmp_path / "d.js").write_text('fetch("https://x.org/e.json")')
    assert sorted(found.split(":")[0] for found in remote_loads(tmp_path)) == ["a.html", "b.html", "c.css", "c.css", "d.js"]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="Sphinx is not installed: pip install '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-E",
        "-b",
        "html",
        "-c",
        "docs/site",
        ".",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert 'class="output' in (tmp_path / "docs" / "tutorials" / "first_retrofit.html").read_text()
    assert "retrofit.apply" in (tmp_path / "docs" / "site" / "api" / "retrofit.html").read_text()
    assert (tmp_path / "source" / "benchmarks" / "sparse_ffn.py.html").is_file()


PASSES = sorted(one.replace("-", "_") for one in pass_names() if (ROOT / "docs" / f"{one.replace('-', '_')}.md").exists())


@pytest.mark.parametrize("name", PASSES)
def test_the_page_of_a_pass_has_its_picture(name: str) -> None:
    assert f"(pictures/{name}.svg)" in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert "<svg" in (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_picture_is_what_the_project_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    assert spec is not None and spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    assert sorted(draw.SPECS) == PASSES
    words = [
        re.findall(r"<text.*?</text>", text, re.DOTALL) for text in (draw.draw("sum"), (ROOT / "docs/pictures/sum.svg").read_text())
    ]
    assert words[0] == words[1]
