"""The project's source files as a collector of code sees them: what each defines at its top, and what it imports."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from retrofit.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Import:
    """`import module as name`, or `from module import attribute as name`."""

    module: str
    attribute: str | None
    name: str

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    def statement(self) -> str:
        if self.attribute is None:
            return f"import {self.module}" + (f" as {self.name}" if self.name != self.module.split(".")[0] else "")
        return f"from {self.module} import {self.attribute}" + (f" as {self.name}" if self.name != self.attribute else "")


@dataclasses.dataclass(frozen=True, order=True)
class Definition:
    """A class, function or constant at the top of a file."""

    module: str
    name: str


class SourceFile:
    """One file of a package: its text, its statements by the names they define, and what it imports by name."""

    def __init__(self, module: str) -> None:
        self.module = module
        found = sys.modules.get(module) or importlib.util.find_spec(module)  # which does not run it: what it imports may be missing
        path = getattr(found, "__file__", None) or getattr(found, "origin", None)
        if path is None or not path.endswith(".py"):
            raise CheckpointError(
                f"{module} has no source file",
                why="a bundle holds the source of its layers",
                remedy="install it as plain Python files",
            )
        self.text = Path(path).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.statements: dict[str, ast.stmt] = {}
        self.imports: dict[str, Import] = {}
        for statement in self.tree.body:
            self.read(statement)

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.If):  # what is imported for types alone
            for inner in statement.body:
                self.read(inner)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.imports.update((one.name, one) for one in imports_of(statement))
        else:
            self.statements.update((name, statement) for name in names_defined(statement))

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""


@functools.cache
def source_file(module: str) -> SourceFile:
    """Return the file of a module that can be imported."""
    return SourceFile(module)


def imports_of(statement: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    """Yield the names that a statement imports, `from __future__` apart."""
    if isinstance(statement, ast.Import):
        yield from (Import(name.name, None, name.asname or name.name.split(".")[0]) for name in statement.names)
    elif statement.module and statement.module != "__future__":
        yield from (Import(statement.module, name.name, name.asname or name.name) for name in statement.names)


def names_defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def resolve(module: str, name: str, ours: frozenset[str]) -> Definition | Import | None:
    """Return where a global of a module comes from: a definition in one of `ours`, or an import; None if it is built in."""
    file = source_file(module)
    if name in file.statements:
        return Definition(module, name)
    found = file.imports.get(name)
    return None if found is None else follow(found, ours)


def follow(found: Import, ours: frozenset[str]) -> Definition | Import | None:
    """Return what is imported: a definition, where it comes from a package of `ours`."""
    if found.package not in ours:
        return found
    if found.attribute is None or is_module(found.module, found.attribute):
        raise CheckpointError(
            f"the code that imports {found.module} cannot be bundled",
            why="it imports a whole module, and a bundle is one file",
            remedy="import the names that it uses",
        )
    return resolve(found.module, found.attribute, ours)


def is_module(package: str, name: str) -> bool:
    """Return whether a name imported from a package is one of its modules."""
    parent = importlib.util.find_spec(package)
    is_package = parent is not None and parent.submodule_search_locations is not None
    return is_package and importlib.util.find_spec(f"{package}.{name}") is not None
