"""Pages in docs/tutorials are run as the site is built: what each block printed, and drew, stands below it.

    python docs/site/tutorials.py docs/tutorials/first_retrofit.md FOLDER    # writes the page with its outputs and pictures there

All ```` ```python ```` blocks of a page share one namespace and all blocks one empty working folder. In ```` ```sh ```` blocks
`retrofit` is this project's. A block that fails, fails the build.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RETROFIT = 'retrofit() { "$PYTHON" -m retrofit "$@"; }\n'
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "MPLBACKEND": "agg"}


def run_page(page: Path, output: Path) -> None:
    """`output` holds the page as index.md, with what its blocks printed, and the pictures they made."""
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    pictures: set[Path] = set()
    parts, done = [], 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in BLOCK.finditer(text):
            language, code = block.groups()
            line = text.count("\n", 0, block.start()) + 2
            printed = run_shell(code, page, line) if language == "sh" else run_python(code, namespace, page, line)
            parts += [text[done : block.end()], fenced(printed)]
            done = block.end()
            new = {one for one in Path().rglob("*") if one.suffix in (".svg", ".png")} - pictures
            for picture in sorted(new):
                name = "-".join(picture.parts)
                shutil.copy(picture, output / name)
                parts.append(f"\n\n![{name}]({name})")
            pictures |= new
    (output / "index.md").write_text("".join([*parts, text[done:]]), encoding="utf-8")


def run_python(code: str, namespace: dict[str, Any], page: Path, line: int) -> str:
    """What the code printed; an exception in it names the line of the page."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    return printed.getvalue()


def run_shell(code: str, page: Path, line: int) -> str:
    """What the commands wrote to the terminal; raises `RuntimeError` where one of them failed."""
    command = ["bash", "-euo", "pipefail", "-c", RETROFIT + code]
    environment = {**os.environ, "PYTHON": sys.executable, "COLUMNS": "132"}
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if finished.returncode:
        raise RuntimeError(f"{page}:{line}: exit code {finished.returncode}\n{code}\n{finished.stdout}")
    return finished.stdout


def fenced(printed: str) -> str:
    return f"\n\n```{{code-block}} text\n:class: output\n\n{printed.rstrip()}\n```" if printed.strip() else ""


def with_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page of docs/tutorials is read with its outputs; its pictures stay in build/tutorials."""
    if not docname.startswith("docs/tutorials/"):
        return
    page, output = Path(app.srcdir) / f"{docname}.md", Path(app.srcdir) / "build" / "tutorials" / Path(docname).name
    output.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, __file__, str(page), str(output)], env={**os.environ, **QUIET}, check=True)
    text = (output / "index.md").read_text(encoding="utf-8")
    place: Callable[[re.Match[str]], str] = lambda hit: (  # noqa: E731
        f"](/{(output / hit[1]).relative_to(app.srcdir)})" if (output / hit[1]).is_file() else hit[0]
    )
    source[0] = re.sub(r"\]\(([\w.-]+\.(?:svg|png))\)", place, text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", with_outputs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    run_page(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
