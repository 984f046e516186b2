"""What is installed, what depends on what, and that the README tells the truth about it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALLED = {"retrofit": ROOT / "retrofit", "retrofit/passes": ROOT / "passes", "retrofit/cli": ROOT / "cli"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for folder in INSTALLED.values():
        shutil.copytree(folder, source / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_a_wheel_holds_every_source_and_nothing_beside_retrofit(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {"retrofit", f"retrofit-{PROJECT['version']}.dist-info"}
    expected = {f"{package}/{file.relative_to(folder)}" for package, folder in INSTALLED.items() for file in folder.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"retrofit/__init__.py", "retrofit/passes/altup.py", "retrofit/cli/apply.py"} <= expected


def test_a_wheel_carries_its_license(wheel: zipfile.ZipFile) -> None:
    (license_name,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
    assert wheel.read(license_name) == (ROOT / "LICENSE").read_bytes()
    assert "Apache License" in wheel.read(license_name).decode()


def test_an_unpacked_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import retrofit, retrofit.cli, sys; print(retrofit.__file__); sys.exit(retrofit.cli.main(['passes']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert all(re.search(rf"^{name} ", done.stdout, re.MULTILINE) for name in PROJECT["entry-points"]["retrofit.passes"])


def test_entry_points_lead_somewhere() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="retrofit")
    assert callable(script.load())
    for entry in importlib.metadata.entry_points(group="retrofit.passes"):
        assert entry.load().name == entry.name


def test_what_is_tested_is_what_is_supported() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    requirements = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"])]
    outside = [str(one) for one in requirements if pins.get(one.name) is None or not one.specifier.contains(pins[one.name])]
    assert not outside, f"constraints.txt has no pin within {outside}"


# Who may import whom


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, by its absolute name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


ABOVE = {"retrofit": ("retrofit.passes", "retrofit.cli"), "passes": ("retrofit.cli",)}


@pytest.mark.parametrize("folder", ABOVE)
def test_dependencies_point_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    above = tuple(f"{name}." for name in ABOVE[folder])
    assert files
    assert not [(file.name, name) for file in files for name in imports(file) if f"{name}.".startswith(above)]


def test_no_module_shadows_a_name_of_the_library() -> None:
    import retrofit

    functions = {name for name in retrofit.__all__ if name.islower()}
    assert {"apply", "inspect", "load", "save", "verify", "recipe"} <= functions
    assert not functions & {file.stem for file in (ROOT / "retrofit").glob("*.py")}


def test_importing_the_library_imports_no_torch() -> None:
    code = "import retrofit, retrofit.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# The README


def test_the_readme_names_what_is_supported() -> None:
    matrix = {name.lower(): support for name, support in re.findall(r"^\| (\w+) \| (.+?) \|$", README, re.MULTILINE)}
    assert f"≥ {PROJECT['requires-python'].removeprefix('>=')}" in matrix["python"]
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.name in ("torch", "transformers"):
            first, last = re.fullmatch(r"([\d.]+) to ([\d.]+)", matrix[requirement.name]).groups()
            after_last = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
            assert str(requirement.specifier) in (f"<{after_last},>={first}", f">={first},<{after_last}")


def test_the_readme_links_to_what_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_architecture_page_names_modules_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = set(re.findall(r"`((?:(?:checks|drawing|onnx)/)?\w+\.py)`", page))
    assert len(modules) > 20
    assert not [name for name in modules if not (ROOT / "retrofit" / name).exists()]


def test_the_readme_names_targets_that_make_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    assert {"demo", "test"} <= named <= targets


def test_the_readme_knows_every_pass() -> None:
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE))
    assert listed == set(PROJECT["entry-points"]["retrofit.passes"])
