"""The code that modules of certain classes need to run: definitions, and for classes only the methods that any code calls.

Code is followed by its names, from file to file: the globals that it reads, with their places in its text, and the attributes that
it names. Methods are followed by name, from any call. Constructors of classes that only the table instantiates are omitted,
and so is the passes' analysis of models.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
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
        found = sys.modules.get(module) or importlib.util.find_spec(module)  # not run: a package that it imports may be missing
        path = getattr(found, "__file__", None) or getattr(found, "origin", None)
        if path is None or not path.endswith(".py"):
            raise CheckpointError(
                f"{module} has no source file",
                why="a bundle contains the source of its layers",
                remedy="install it as plain Python files",
                code="not-bundled",
            )
        self.text = Path(path).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.statements: dict[str, ast.stmt] = {}
        self.imports: dict[str, Import] = {}
        for statement in self.tree.body:
            self.read(statement)

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.If):  # imports for types only
            for inner in statement.body:
                self.read(inner)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.imports.update((imported.name, imported) for imported in imports_of(statement))
        else:
            self.statements.update((name, statement) for name in names_defined(statement))

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""


@functools.cache
def source_file(module: str) -> SourceFile:
    """Return the file of an importable module."""
    return SourceFile(module)


def imports_of(statement: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    """Yield the names that a statement imports, except from `__future__`."""
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
    """Return the source of a module's global: a definition in one of `ours`, or an import; None if it is built in."""
    file = source_file(module)
    if name in file.statements:
        return Definition(module, name)
    found = file.imports.get(name)
    return None if found is None else follow(found, ours)


def follow(found: Import, ours: frozenset[str]) -> Definition | Import | None:
    """Return the target of an import: its definition, if it is in a package of `ours`."""
    if found.package not in ours:
        return found
    if found.attribute is None or is_module(found.module, found.attribute):
        raise CheckpointError(
            f"the code that imports {found.module} cannot be bundled",
            why="it imports a whole module, and a bundle is one file",
            remedy="import the names that it uses",
            code="not-bundled",
        )
    return resolve(found.module, found.attribute, ours)


def is_module(package: str, name: str) -> bool:
    """Return whether a name imported from a package is one of its modules."""
    parent = importlib.util.find_spec(package)
    is_package = parent is not None and parent.submodule_search_locations is not None
    return is_package and importlib.util.find_spec(f"{package}.{name}") is not None


# ── What code needs to run ────────────────────────────────────────────────────────────────────────────────────────────────────────


Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BY_NAME = frozenset(("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"))  # take an attribute's name as text
CLASSES_ONLY = frozenset(("isinstance", "issubclass", "cast"))


@dataclasses.dataclass(frozen=True)
class Reference:
    """A global name and its place. `weak`: in an annotation, never evaluated; `is_class`: only used in a test for a class."""

    name: str
    node: ast.expr
    weak: bool = False
    is_class: bool = False
    in_text: bool = False  # in an f-string, whose parts have no place of their own


class References(ast.NodeVisitor):
    """The references of a piece of code: globals, its own imports, and the attributes that it names."""

    def __init__(self, *nodes: ast.AST, outside: frozenset[str] = frozenset()) -> None:
        self.found: list[Reference] = []
        self.attributes: set[str] = set()
        self.annotations: list[ast.expr] = []
        self.imports: dict[str, tuple[Import, ast.stmt]] = {}  # within functions, by name
        self.scopes: list[frozenset[str]] = [outside]
        self.weak = self.is_class = self.in_text = False
        for node in nodes:
            self.visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and not any(node.id in scope for scope in self.scopes):
            self.found.append(Reference(node.id, node, self.weak, self.is_class, self.in_text))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called in BY_NAME:
            self.attributes.update(texts(node.args))
        self.visit(node.func)
        before, self.is_class = self.is_class, self.is_class or called in CLASSES_ONLY
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)
        self.is_class = before

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self.attributes.update(texts(node.elts))  # code may look up attributes by each of these names
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        before, self.in_text = self.in_text, True
        self.generic_visit(node)
        self.in_text = before

    def visit_Import(self, node: ast.Import) -> None:
        self.imports.update((imported.name, (imported, node)) for imported in imports_of(node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.update((imported.name, (imported, node)) for imported in imports_of(node))

    def annotation(self, node: ast.expr | None) -> None:
        """Visit an annotation, which is not evaluated in a file with `from __future__ import annotations`."""
        if node is not None:
            self.annotations.append(node)
            before, self.weak = self.weak, True
            self.visit(node)
            self.weak = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        self.annotation(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.annotation(node.returns)
        self.function(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.function(node, [node.body])

    def function(self, node: ast.FunctionDef | ast.Lambda, body: list[ast.stmt] | list[ast.expr]) -> None:
        """Visit a function: its defaults belong to the enclosing scope, its body has local names."""
        arguments = arguments_of(node.args)
        for default in (*node.args.defaults, *(kw_default for kw_default in node.args.kw_defaults if kw_default is not None)):
            self.visit(default)
        for argument in arguments:
            self.annotation(argument.annotation)
        own = {argument.arg for argument in arguments} | {name for part in body for name in assigned(part)}
        self.scopes.append(frozenset(own - {name for part in body for name in declared_global(part)}))
        for part in body:
            self.visit(part)
        self.scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outer in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(outer)
        for statement in node.body:
            self.visit(statement)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """Visit a comprehension: its targets are local names, its first iterable belongs to the enclosing scope."""
        self.visit(node.generators[0].iter)
        self.scopes.append(frozenset(name for generator in node.generators for name in stored(generator.target)))
        for number, clause in enumerate(node.generators):
            if number:
                self.visit(clause.iter)
            for condition in clause.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension


def texts(nodes: Iterable[ast.expr]) -> Iterator[str]:
    """Yield the constant strings among expressions."""
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """Return all arguments of a function."""
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]


def stored(node: ast.AST) -> Iterator[str]:
    """Yield the names that a target assigns."""
    return (child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store))


def assigned(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement makes local to its function: assigned, bound or imported, but not in inner functions."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, Comprehension):
        yield from (child.target.id for child in ast.walk(node) if isinstance(child, ast.NamedExpr))
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    for inner in ast.iter_child_nodes(node):
        yield from assigned(inner)


def declared_global(node: ast.AST) -> Iterator[str]:
    return (name for child in ast.walk(node) if isinstance(child, ast.Global) for name in child.names)


PRESENT = frozenset(("torch", "transformers", "numpy", *sys.stdlib_module_names))  # available wherever a bundle is loaded
CONSTRUCTORS = ("__init__", "__new__")


@dataclasses.dataclass
class Collected:
    """A needed definition; for a class, its needed members by line, and the references in them."""

    definition: Definition
    node: ast.stmt
    members: dict[int, ast.stmt] = dataclasses.field(default_factory=dict)
    read: list[References] = dataclasses.field(default_factory=list)


class Closure:
    """The definitions that `roots` need, `collected`, and their imports from elsewhere, `imports`.

    `constructed` are classes that other code calls; `ours` the packages whose code is collected; `called` the methods that the
    table names. `optional` files are read only by imports within functions, and import packages that may be missing.
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
        for module, name in self.weak:  # of annotations: what is collected anyway, and imports
            found = resolve(module, name, self.ours)
            if isinstance(found, Import):
                self.add_import(module, found)

    def add(self, definition: Definition) -> None:
        """Collect the definition; for a class, the statement without its members."""
        if definition in self.collected:
            return
        node = source_file(definition.module).statements[definition.name]
        self.collected[definition] = collected = Collected(definition, node)
        if isinstance(node, ast.ClassDef):
            outside = (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords))
            self.read(collected, *outside, constructs=False)
        else:
            self.read(collected, node)

    def read(self, collected: Collected, *nodes: ast.AST, constructs: bool = True, outside: frozenset[str] = frozenset()) -> None:
        """Collect what the nodes name."""
        references = References(*nodes, outside=outside)
        collected.read.append(references)
        self.attributes |= references.attributes
        module = collected.definition.module
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
        """Follow a name in an annotation: a type alias is collected, a class only if other code needs it."""
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
        """Return packages that a file imports at its top and that may be missing where a bundle is loaded."""
        return {imported.package for imported in source_file(module).imports.values()} - PRESENT - self.ours

    def require_present(self, target: Definition) -> None:
        if target.module not in self.optional and (packages := self.missing_packages(target.module)):
            raise missing(target.module, ", ".join(sorted(packages)))

    # Members of classes.

    def add_members(self) -> bool:
        """Collect the members of classes that the collected code needs; return whether there were any."""
        added = False
        for collected in list(self.collected.values()):
            if isinstance(collected.node, ast.ClassDef):
                for member in collected.node.body:
                    if member.lineno not in collected.members and self.is_needed(collected, member):
                        collected.members[member.lineno] = member
                        own = frozenset() if isinstance(member, ast.FunctionDef) else frozenset(class_names(collected.node))
                        self.read(collected, member, outside=own)
                        added = True
        return added or bool(self.waiting)

    def is_needed(self, collected: Collected, member: ast.stmt) -> bool:
        """Return whether a member of a class is needed."""
        node: ast.ClassDef = collected.node  # type: ignore[assignment]
        if isinstance(member, ast.Expr):
            return isinstance(member.value, ast.Constant)  # the docstring
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if member.name in CONSTRUCTORS:
                return self.is_constructed(collected.definition)
            special = member.name.startswith("__") and member.name.endswith("__")
            return special or member.name in self.attributes or member.name in self.inherited(collected.definition)
        if isinstance(member, (ast.Assign, ast.AnnAssign)):
            if isinstance(member, ast.AnnAssign) and member.value is None:
                return True
            names = set(class_names(member))
            return bool(node.decorator_list) or not names.isdisjoint(self.attributes | self.inherited(collected.definition))
        return True

    def is_constructed(self, definition: Definition) -> bool:
        """Return whether code calls the class, or one derived from it."""
        return definition in self.constructed or any(
            definition in self.bases(other) for other in self.collected if other in self.constructed
        )

    def bases(self, definition: Definition) -> list[Definition]:
        """Return the classes in `ours` from which a class is derived."""
        kind = live(definition)
        above = kind.__mro__[1:] if isinstance(kind, type) else ()
        return [Definition(base.__module__, base.__qualname__) for base in above if base.__module__.split(".")[0] in self.ours]

    def inherited(self, definition: Definition) -> set[str]:
        """Return the names that foreign code may look up on the class: those of its bases outside `ours`."""
        kind = live(definition)
        above = kind.__mro__[1:-1] if isinstance(kind, type) else ()
        return {name for base in above if base.__module__.split(".")[0] not in self.ours for name in vars(base)}


def live(definition: Definition) -> object:
    """Return the object that a definition created; None if its file needs a package that is missing."""
    try:
        return getattr(importlib.import_module(definition.module), definition.name)
    except ImportError:
        return None


def class_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that the statements of a class assign."""
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
        code="not-bundled",
    )
