"""The distribution is retrofit-transformers: nothing advises to install `retrofit`, which is another project's."""

from __future__ import annotations

import ast
import functools
import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS, OTHER = "retrofit-transformers", "retrofit"
NOT_SOURCES = {".git", ".venv", "build", "dist", "demo", "__pycache__"}

# The other project's name by itself: part of no longer name, module or path.
NAME = rf"(?<![\w./-]){OTHER}(?![\w/-]|\.\w)"
EXTRA = re.compile(rf"(?<![\w./-]){OTHER}\[[\w, -]+\]", re.IGNORECASE)
VERSION = re.compile(rf"{NAME} *(?:[=~!<>]=+|[<>]) *\d|{NAME} +@ +\S|#egg={OTHER}(?![\w-])", re.IGNORECASE)
# An installer's verb and its arguments, as a shell or a list in Python has them, up to what ends the command.
INSTALLED = re.compile(
    rf"\b(?:install|add|download|wheel|uvx|pipx\W+run|tool\W+run)\b(?:[ ,'\"=]+[^\s,'\"`;|&()#]+)*?[ ,'\"=]+{NAME}", re.I
)
LOOKED_UP = re.compile(rf"\b(?:version|distribution|metadata|requires|files)\(\s*['\"]{OTHER}['\"]\s*\)")
LINE = re.compile(rf"^\s*(?:-\s+)?{NAME}\s*(?:[#;].*)?$", re.IGNORECASE | re.MULTILINE)  # of a file of requirements


def advice(text: str, requirements: bool = False) -> list[str]:
    """Whatever in `text` installs or looks up the other distribution; `requirements`: it lists distributions, one a line."""
    text = re.sub(r"\\\n\s*", " ", text)
    patterns = (EXTRA, VERSION, INSTALLED, LOOKED_UP, *([LINE] if requirements else []))
    return [found[0] for pattern in patterns for found in pattern.finditer(text)]


@functools.cache
def sources() -> dict[Path, str]:
    """The text of every file of the project, and of Python also its strings, those in several pieces as they are joined."""
    found = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_SOURCES and not name.endswith((".egg-info", "_cache"))]
        for file in (Path(folder) / name for name in names):
            try:
                found[file] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if file.suffix == ".py":
                strings = (node.value for node in ast.walk(ast.parse(found[file])) if isinstance(node, ast.Constant))
                found[file] += "\n".join(value for value in strings if isinstance(value, str))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "pip install {}",
        "pip install '{}[onnx]'",
        'remedy="pip install {}[gguf]"',
        r"\"!pip install -q {}\n\"",
        "%pip install --upgrade {}",
        "pip install trl '{}[eval]'",
        "pip install -c constraints.txt torch==2.13.0 {}",
        "pip install \\\n    --no-deps {}",
        "python3 -m pip install {}==0.1.0",
        '["-m", "pip", "install", "--no-deps", "{}"]',
        "pip download --no-deps {}",
        "pip install {}.",
        "`pip install {}`",
        "uv pip install {}",
        "uv add --dev {}",
        "uv tool install {}",
        "uvx {} passes",
        "uvx --from {} retrofit",
        "pipx run {} passes",
        "poetry add {}",
        "conda install -c forge {}",
        "install {} and that package where the model is loaded",
        "'{}[onnx,gguf]'",
        "{}>=0.1",
        "{} ~= 0.1",
        "{} @ git+https://example.org/it.git",
        "git+https://example.org/it.git#egg={}",
        'importlib.metadata.version("{}")',
        "pip install Retrofit",
    ],
)
def test_advice_to_install_the_other_project_is_found(text: str) -> None:
    given = text.format(OTHER)
    assert advice(given), given
    if OTHER in given and "Retrofit" not in given:
        assert not advice(given.replace(OTHER, OURS)), given


@pytest.mark.parametrize("line", ["{}", "- {}", "{}  # comment", "a\n{}\nb", "{}; python_version > '3'"])
def test_a_requirement_of_the_other_project_is_found(line: str) -> None:
    assert advice(line.format(OTHER), requirements=True) and not advice(line.format(OURS), requirements=True)


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        "pip install --no-deps ./examples/external_pass\n    retrofit passes low-rank",
        "pip install peft; retrofit merge",
        "pip uninstall {}",
        "load it where {} is installed",
        "import {}",
        "{}.apply(model)",
        '{} = "{}.cli:main"',
        "{} inspect model/ > text.txt",
    ],
)
def test_what_installs_nothing_is_no_advice(text: str) -> None:
    assert not advice(text.replace("{}", OTHER))


def test_nothing_advises_to_install_the_other_project() -> None:
    texts = sources()
    assert len(texts) > 500
    known = (
        "README.md Makefile .ci/run constraints.txt examples/retrofit.ipynb retrofit/storage/gguf_file.py docs/onnx.md cli/apply.py"
    )
    assert {ROOT / name for name in known.split()} <= set(texts)
    found = {
        str(file.relative_to(ROOT)): wrong
        for file, text in texts.items()
        if file != Path(__file__) and (wrong := advice(text, file.suffix == ".txt"))
    }
    assert not found


def test_the_advice_names_extras_that_there_are() -> None:
    named = {
        (file, extra.strip())
        for file, text in sources().items()
        for extras in re.findall(rf"{OURS}\[([\w, -]+)\]", text)
        for extra in extras.split(",")
    }
    assert {extra for _, extra in named} >= {"gguf", "eval", "onnx", "quantize"} and len({file for file, _ in named}) > 10
    assert {extra for _, extra in named} <= set(PROJECT["optional-dependencies"])


def test_every_project_of_the_tree_has_the_name_or_depends_on_it() -> None:
    projects = [tomllib.loads(text)["project"] for file, text in sources().items() if file.name == "pyproject.toml"]
    assert len(projects) > 1
    assert [project["name"] for project in projects if project["name"].lower() == OTHER] == []
    assert PROJECT["name"] == OURS
    assert all(OURS in project["dependencies"] for project in projects if project["name"] != OURS)
