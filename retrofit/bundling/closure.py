"""The code that modules of certain classes need to run: the definitions, and of the classes those methods that anything calls.

Code is followed by its names, from file to file; methods by theirs, whoever calls them. Constructors of classes that only the table
makes are left out, and with them what passes find out about a model.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator

from retrofit.bundling.references import References
from retrofit.bundling.source_files import Definition, Import, follow, resolve, source_file
from retrofit.errors import CheckpointError

PRESENT = frozenset(("torch", "transformers", "numpy", *sys.stdlib_module_names))  # are there wherever a bundle is loaded
CONSTRUCTORS = ("__init__", "__new__")


@dataclasses.dataclass
class Collected:
    """A definition of which some code is needed: of a class its members by line, and what is read in it."""

    definition: Definition
    node: ast.stmt
    members: dict[int, ast.stmt] = dataclasses.field(default_factory=dict)
    read: list[References] = dataclasses.field(default_factory=list)


class Closure:
    """The definitions that `roots` need, `collected`, and what they import from elsewhere, `imports`.

    `constructed` are classes that others call; `ours` the packages whose code is collected; `called` methods that the table names.
    `optional` are files that are read only by imports within functions, and import packages that may be missing.
    """

    def __init__(
        self, roots: Iterable[Definition], constructed: Iterable[Definition], ours: frozenset[str], called: Iterable[str] = ()
    ) -> None:
        self.ours = ours
        self.collected: dict[Definition, Collected] = {}
        self.imports: dict[str, set[Import]] = {}  # by file
        self.optional: set[str] = set()
        self.dropped: dict[str, list[ast.stmt]] = {}  # imports within functions that became definitions, by file
        self.attributes: set[str] = set(called)
        self.constructed = set(constructed)
        self.weak: list[tuple[str, str]] = []
        self.waiting = [*roots, *self.constructed]
        while self.waiting or self.add_members():
            while self.waiting:
                self.add(self.waiting.pop())
        for module, name in self.weak:  # of annotations: what is there anyway, and imports
            found = resolve(module, name, self.ours)
            if isinstance(found, Import):
                self.add_import(module, found)

    def add(self, definition: Definition) -> None:
        """The definition is collected; of a class what is around its members."""
        if definition in self.collected:
            return
        node = source_file(definition.module).statements[definition.name]
        self.collected[definition] = one = Collected(definition, node)
        if isinstance(node, ast.ClassDef):
            outside = (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords))
            self.read(one, *outside, constructs=False)
        else:
            self.read(one, node)

    def read(self, one: Collected, *nodes: ast.AST, constructs: bool = True, outside: frozenset[str] = frozenset()) -> None:
        """What the nodes name is collected too."""
        references = References(*nodes, outside=outside)
        one.read.append(references)
        self.attributes |= references.attributes
        module = one.definition.module
        inner: dict[str, Definition] = {}
        for name, (imported, statement) in references.imports.items():
            found = follow(imported, self.ours)
            if isinstance(found, Definition):
                inner[name] = found
                self.dropped.setdefault(module, []).append(statement)
                if self.missing_packages(found.module):
                    self.optional.add(found.module)
                self.waiting.append(found)
        for reference in references.found:
            target = resolve(module, reference.name, self.ours)
            if reference.weak:
                self.follow_weak(module, reference.name, target)
            elif isinstance(target, Import):
                self.add_import(module, target)
            elif target is not None:
                self.require_present(target)
                self.waiting.append(target)
                if constructs and not reference.is_class:
                    self.constructed.add(target)

    def follow_weak(self, module: str, name: str, target: Definition | Import | None) -> None:
        """A name in an annotation: a type alias is collected, a class only where something else needs it."""
        if isinstance(target, Definition) and isinstance(
            source_file(target.module).statements[target.name], (ast.Assign, ast.AnnAssign)
        ):
            self.waiting.append(target)
        self.weak.append((module, name))

    def add_import(self, module: str, found: Import) -> None:
        if found.package not in PRESENT and module not in self.optional:
            raise missing(module, found.package)
        self.imports.setdefault(module, set()).add(found)

    def missing_packages(self, module: str) -> set[str]:
        """Packages that a file imports at its top and that may be missing where a bundle is loaded."""
        return {one.package for one in source_file(module).imports.values()} - PRESENT - self.ours

    def require_present(self, target: Definition) -> None:
        if target.module not in self.optional and (packages := self.missing_packages(target.module)):
            raise missing(target.module, ", ".join(sorted(packages)))

    # Members of classes.

    def add_members(self) -> bool:
        """Members that are needed by what has been collected are collected; whether there were any."""
        added = False
        for one in list(self.collected.values()):
            if isinstance(one.node, ast.ClassDef):
                for member in one.node.body:
                    if member.lineno not in one.members and self.is_needed(one, member):
                        one.members[member.lineno] = member
                        own = frozenset() if isinstance(member, ast.FunctionDef) else frozenset(class_names(one.node))
                        self.read(one, member, outside=own)
                        added = True
        return added or bool(self.waiting)

    def is_needed(self, one: Collected, member: ast.stmt) -> bool:
        """Whether a member of a class is needed."""
        node: ast.ClassDef = one.node  # type: ignore[assignment]
        if isinstance(member, ast.Expr):
            return isinstance(member.value, ast.Constant)  # the docstring
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if member.name in CONSTRUCTORS:
                return self.is_constructed(one.definition)
            special = member.name.startswith("__") and member.name.endswith("__")
            return special or member.name in self.attributes or member.name in self.inherited(one.definition)
        if isinstance(member, (ast.Assign, ast.AnnAssign)):
            if isinstance(member, ast.AnnAssign) and member.value is None:
                return True
            names = set(class_names(member))
            return bool(node.decorator_list) or not names.isdisjoint(self.attributes | self.inherited(one.definition))
        return True

    def is_constructed(self, definition: Definition) -> bool:
        """Whether code calls the class, or one that is derived from it."""
        return definition in self.constructed or any(
            definition in self.bases(other) for other in self.collected if other in self.constructed
        )

    def bases(self, definition: Definition) -> list[Definition]:
        """The classes of ours that a class is derived from."""
        kind = live(definition)
        above = kind.__mro__[1:] if isinstance(kind, type) else ()
        return [Definition(base.__module__, base.__qualname__) for base in above if base.__module__.split(".")[0] in self.ours]

    def inherited(self, definition: Definition) -> set[str]:
        """The names that code elsewhere may look up on the class: those that its bases from elsewhere have."""
        kind = live(definition)
        above = kind.__mro__[1:-1] if isinstance(kind, type) else ()
        return {name for base in above if base.__module__.split(".")[0] not in self.ours for name in vars(base)}


def live(definition: Definition) -> object:
    """The object that a definition made; None where its file needs a package that is missing."""
    try:
        return getattr(importlib.import_module(definition.module), definition.name)
    except ImportError:
        return None


def class_names(node: ast.AST) -> Iterator[str]:
    """The names that the statements of a class assign."""
    for statement in node.body if isinstance(node, ast.ClassDef) else [node]:
        if isinstance(statement, ast.Assign):
            yield from (name.id for target in statement.targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def missing(module: str, package: str) -> CheckpointError:
    return CheckpointError(
        f"the layers of {module} cannot be bundled",
        why=f"they import {package}, and a bundle needs torch and transformers alone",
        remedy="install retrofit-transformers and that package where the model is loaded",
    )
