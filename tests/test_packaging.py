"""What is installed, what depends on what, and that the README tells the truth about it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import networkx
import pytest
import torch
from packaging.requirements import Requirement
from support.without_retrofit import packages_without_retrofit, run_without_retrofit

import retrofit_transformers
from retrofit import errors, sdk

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
    for name in ("pyproject.toml", "README.md", "LICENSE", "retrofit_transformers.py"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_a_wheel_holds_every_source_and_nothing_beside_retrofit(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    beside = {"retrofit_transformers.py", f"retrofit_transformers-{PROJECT['version']}.dist-info"}
    assert {name.split("/")[0] for name in names} == {"retrofit", *beside}
    expected = {f"{package}/{file.relative_to(folder)}" for package, folder in INSTALLED.items() for file in folder.rglob("*.py")}
    expected.add("retrofit_transformers.py")
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"retrofit/__init__.py", "retrofit/passes/altup/altup.py", "retrofit/cli/apply.py"} <= expected


def test_a_wheel_carries_its_license(wheel: zipfile.ZipFile) -> None:
    (license_name,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
    assert wheel.read(license_name) == (ROOT / "LICENSE").read_bytes()
    assert "Apache License" in wheel.read(license_name).decode()


def test_an_unpacked_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import retrofit, retrofit.cli, sys; print(retrofit.__file__); sys.exit(retrofit.cli.main(['passes']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert all(re.search(rf"^{name} ", done.stdout, re.MULTILINE) for name in PROJECT["entry-points"]["retrofit.passes"])


@pytest.mark.long
def test_a_wheel_installed_into_an_empty_environment_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """What it depends on comes from here; retrofit, its command and its hook from the wheel."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=300)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    python = tmp_path / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel.filename)]
    subprocess.run(pip, check=True, timeout=300, capture_output=True)
    (packages / "dependencies.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    version = f"retrofit {PROJECT['version']}\n"
    for command in ([tmp_path / "bin" / "retrofit"], [python, "-m", "retrofit"], [python, "-m", "retrofit.cli"]):
        done = subprocess.run([*command, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, version), done.stderr
    code = "import retrofit, retrofit.passes.sum; print(retrofit.__file__); print(retrofit.passes.sum.__file__)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert all(line.startswith(str(packages)) for line in done.stdout.splitlines()) and done.stdout.count("\n") == 2, done.stderr


# Beside the distribution called retrofit, another project's

OTHER = {
    "retrofit/__init__.py": "print('its code ran')\n",
    "retrofit/reporting.py": "",
    "retrofit/templates/__init__.py": "",
    "retrofit-0.3.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: retrofit\nVersion: 0.3.3\n",
}
COMMAND = """
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="retrofit")
raise SystemExit(command.load()())
"""


@pytest.fixture
def site(wheel: zipfile.ZipFile, tmp_path: Path) -> Path:
    """A folder with the wheel as installed, and everything else of this environment."""
    packages = packages_without_retrofit(tmp_path)
    wheel.extractall(packages)
    return packages


def lay(site: Path, files: dict[str, str] = OTHER) -> None:
    """Install these files, as an installer does: what is there is replaced."""
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def remove(site: Path, files: dict[str, str] = OTHER) -> None:
    """Uninstall them: every file goes, whosever it has become."""
    for name in files:
        (site / name).unlink()
    (site / "retrofit-0.3.3.dist-info").rmdir()


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_without_retrofit(site, *arguments, cwd=site.parent)


def says(text: str, *facts: str) -> bool:
    """Whether a message has a fix and names these."""
    return text.count("fix: ") == 1 and all(fact in text for fact in facts)


def test_alone_the_package_says_nothing_of_others(site: Path) -> None:
    lay(site, {"retrofit_low_rank-0.1.0.dist-info/METADATA": "", "retrofit-notes/a.txt": "", "retrofit.egg-info/PKG-INFO": ""})
    for arguments in (("-c", "import retrofit; retrofit.HOMES"), ("-m", "retrofit", "--version"), ("-c", COMMAND, "--version")):
        done = run(site, *arguments)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("filters", [(), ("-W", "error")])
def test_import_retrofit_says_what_is_installed_beside_it(filters: tuple[str, ...], wheel: zipfile.ZipFile, site: Path) -> None:
    """Installed before ours, whose files are whole; a warning even where warnings are errors, since `import torch` gives it too."""
    lay(site)
    wheel.extractall(site)
    done = run(site, *filters, "-c", "import retrofit; print(retrofit.__version__); import retrofit")
    assert (done.returncode, done.stdout) == (0, f"{PROJECT['version']}\n")
    assert says(done.stderr, "retrofit 0.3.3", str(site), "pip uninstall retrofit", PROJECT["name"])
    assert run(site, "-c", COMMAND, "--version").stdout == f"retrofit {PROJECT['version']}\n"


@pytest.mark.parametrize("uninstalled", [False, True])
def test_a_replaced_package_is_told_by_the_command(uninstalled: bool, site: Path) -> None:
    """Installed after ours, whose first file is its own then, and gone when it is uninstalled."""
    lay(site)
    if uninstalled:
        remove(site)
    facts = [str(site / "retrofit" / "__init__.py"), PROJECT["name"]] + (
        [] if uninstalled else ["retrofit 0.3.3", "pip uninstall retrofit"]
    )
    for arguments in (("-c", COMMAND, "passes"), ("-m", "retrofit", "passes"), ("-m", "retrofit.cli", "passes")):
        done = run(site, *arguments)
        assert done.returncode == 2 and done.stderr.startswith("retrofit: error: ") and says(done.stderr, *facts), done.stderr
    assert "its code ran" not in run(site, "-c", COMMAND, "passes").stdout


def test_a_package_installed_again_is_whole(wheel: zipfile.ZipFile, site: Path) -> None:
    """What the messages advise."""
    lay(site)
    remove(site)
    wheel.extractall(site)
    done = run(site, "-c", COMMAND, "--version")
    assert (done.returncode, done.stderr) == (0, "")


STRICT = ("-W", "error::UserWarning")
STATES = {"replaced": STRICT, "uninstalled": (), "elsewhere": (), "damaged": STRICT}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("state", "filters"), dict.fromkeys([*STATES.items(), *((state, filters) for state in STATES for filters in ((), STRICT))])
)
def test_import_torch_never_fails_of_another_package(
    state: str, filters: tuple[str, ...], wheel: zipfile.ZipFile, site: Path
) -> None:
    """It gives a warning, and runs nobody else's code."""
    where = site
    if state == "elsewhere":
        (where := site.parent / "earlier").mkdir()
    lay(where)
    if state == "uninstalled":
        remove(where)
    if state == "damaged":
        remove(where)
        wheel.extractall(site)
        lay(site, {"retrofit/storage/__init__.py": "1 / 0\n"})
    code = f"import sys; sys.path.insert(0, {str(where)!r}); import torch; print(torch.ones(2).sum().item())"
    done = run(site, *filters, "-c", code)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert says(done.stderr, "ZeroDivisionError" if state == "damaged" else str(where / "retrofit"), PROJECT["name"])


def test_a_program_called_retrofit_runs_once(site: Path) -> None:
    """It is what `import retrofit` gives, and is not imported by the hook in the `import torch` it does."""
    program = site.parent / "retrofit.py"
    program.write_text("import torch\n\nprint('it ran')\n")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-S", str(program)], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "it ran\n"), done.stderr
    assert says(done.stderr, str(program), PROJECT["name"])


def test_python_m_retrofit_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "retrofit", "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"retrofit {PROJECT['version']}\n")


def test_entry_points_lead_somewhere() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="retrofit")
    assert callable(script.load())
    (hook,) = importlib.metadata.entry_points(group="torch.backends", name="retrofit")
    assert hook.load() is retrofit_transformers.install
    for entry in importlib.metadata.entry_points(group="retrofit.passes"):
        assert entry.load().name == entry.name


def test_what_is_tested_is_what_is_supported() -> None:
    extras = PROJECT["optional-dependencies"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    requirements = [Requirement(text) for text in (*PROJECT["dependencies"], *extras["test"], *extras["docs"])]
    outside = [str(one) for one in requirements if pins.get(one.name) is None or not one.specifier.contains(pins[one.name])]
    assert not outside, f"constraints.txt has no pin within {outside}"


# Who may import whom

FLOORS = (  # a package imports only those on floors above it in this list
    "errors process progress provenance",
    "files inputs",
    "numerics program surgery",
    "adapters anatomy onnx",
    "drawing emitted passbase",
    "preview sdk storage",
    "bundling checks generation passes training",
    "rewriting undoing",
    "differences native planning serving streaming",
    "cli __main__",
)
ORDER = " ".join(FLOORS).split()
FILES = {  # by the name they are imported by
    ".".join((*package.split("/"), *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): file
    for package, folder in INSTALLED.items()
    for file in sorted(folder.rglob("*.py"))
}


def is_for_types(node: ast.AST) -> bool:
    """Whether the statement is `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(file: Path, types: bool) -> set[str]:
    """The modules of the project that a file imports, anywhere in it; those for types too where `types`."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if is_for_types(node) and not types:
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(full if full in FILES else str(node.module) for full in names.values())
    return {name for name in found if name in FILES}


def package(module: str) -> str:
    """The package of a module, or the module itself where it lies at the top."""
    return [*module.split("."), ""][1]


def test_every_source_has_a_place_in_the_order() -> None:
    assert {package(name) for name in FILES} - {""} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_package_imports_only_those_on_floors_above(name: str) -> None:
    inside = {module: file for module, file in FILES.items() if package(module) == name}
    (own,) = (number for number, floor in enumerate(FLOORS) if name in floor.split())
    usable = {"", name, *" ".join(FLOORS[:own]).split()}
    assert inside and len(FLOORS) <= 10
    assert not [
        (module, other) for module, file in inside.items() for other in imports(file, types=True) if package(other) not in usable
    ]


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = networkx.DiGraph()
    for module, file in FILES.items():
        graph.add_edges_from((module, other) for other in imports(file, types=False))
    assert len(graph) > 100
    assert [circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_passes_import_the_sdk_and_nothing_else_of_the_library() -> None:
    passes = {module: file for module, file in FILES.items() if package(module) == "passes"}
    others = [
        (module, other) for module, file in passes.items() for other in imports(file, types=True) if package(other) != "passes"
    ]
    assert others
    assert not [(module, other) for module, other in others if package(other) != "sdk"]


def exported(module: str) -> set[str]:
    """Return the names that a module of the SDK offers."""
    return set(re.findall(r" as (\w+)$", FILES[module].read_text(encoding="utf-8"), re.MULTILINE))


SDK = ["retrofit.sdk", *(f"retrofit.sdk.{ring}" for ring in sdk.RINGS)]


REFUSALS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RetrofitError)} - {
    "FirstProcessError"
} | {"NearMiss"}  # the first process says which failure it was


def test_every_refusal_has_a_code() -> None:
    """A near miss is made of its name, reason, remedies, `in_any_form` and code."""
    without = []
    for name, file in FILES.items():
        calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        refusals = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in REFUSALS and len(call.args) < 5]
        without += [(name, call.lineno) for call in refusals if not any(given.arg in ("code", None) for given in call.keywords)]
    assert without == []


def test_the_sdk_is_what_passes_use() -> None:
    assert {module for module in FILES if package(module) == "sdk"} == set(SDK)
    files = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), ROOT / "docs" / "write_a_pass.md"]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    assert not [name for module in SDK for name in exported(module) if name not in words]


def test_a_name_of_the_sdk_is_in_one_place_and_the_core_is_small() -> None:
    names = [name for module in SDK for name in exported(module)]
    assert len(names) == len(set(names))
    assert len(exported("retrofit.sdk")) <= 45


@pytest.mark.parametrize("module", SDK)
def test_every_name_can_be_imported_from_the_core(module: str) -> None:
    ring = importlib.import_module(module)
    assert exported(module)
    assert all(getattr(sdk, name) is getattr(ring, name) for name in exported(module))


def test_the_core_has_no_other_names() -> None:
    assert not hasattr(sdk, "nothing_of_this_name")


def test_no_module_shadows_a_name_of_the_library() -> None:
    import retrofit

    functions = {name for name in retrofit.__all__ if name.islower()}
    assert {"apply", "inspect", "load", "save", "verify", "recipe"} <= functions
    assert not functions & {file.stem for file in (ROOT / "retrofit").iterdir()}


def test_importing_the_library_imports_no_torch() -> None:
    code = "import retrofit, retrofit.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


@pytest.mark.parametrize("module", ["retrofit", "retrofit.cli"])
def test_the_command_line_is_a_module_too(module: str) -> None:
    ran = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.startswith("retrofit "), ran.stderr


# The README


def test_the_readme_names_what_is_supported() -> None:
    text = re.sub(r"\s+", " ", README)
    assert f"Python ≥ {PROJECT['requires-python'].removeprefix('>=')}" in text
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.name in ("torch", "transformers"):
            first, last = re.search(rf"\b{requirement.name} ([\d.]+) to (\d+\.\d+)", text).groups()
            after_last = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
            assert str(requirement.specifier) in (f"<{after_last},>={first}", f">={first},<{after_last}")


def test_the_readme_links_to_what_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("page", [file.name for file in sorted((ROOT / "docs").glob("*.md"))])
def test_the_pages_name_files_that_are_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    folders = ("retrofit", "passes", "cli", "tests", "examples", "benchmarks", "docs", "runtime", "program", "surgery", "anatomy")
    folders += ("passbase", "emitted", "onnx", "storage", "checks", "training", "drawing", "streaming")
    named = set(re.findall(rf"((?:{'|'.join(folders)})/[\w/]+\.(?:py|md))\b", text))
    named |= {f"docs/{link}" for link in re.findall(r"\]\(([^)#:]+\.md)", text) if "/" not in link}
    assert not [name for name in named if not (ROOT / name).exists() and not (ROOT / "retrofit" / name).exists()]


def test_the_architecture_page_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [name for name in ORDER if f"{name}/" not in text and f"{name}.py" not in text]


def test_the_readme_names_targets_that_make_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    assert {"demo", "test"} <= named <= targets


def test_the_readme_knows_every_pass() -> None:
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE))
    assert listed == set(PROJECT["entry-points"]["retrofit.passes"])
