"""Which global names a piece of code reads, where they stand in its text, and which attributes it names."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from retrofit.bundling.source_files import Import, imports_of

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BY_NAME = frozenset(("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"))  # take an attribute's name as text
CLASSES_ONLY = frozenset(("isinstance", "issubclass", "cast"))


@dataclasses.dataclass(frozen=True)
class Reference:
    """A global name where it stands. `weak`: in an annotation, which nobody evaluates; `is_class`: only asked for as a class."""

    name: str
    node: ast.expr
    weak: bool = False
    is_class: bool = False
    in_text: bool = False  # in an f-string, whose parts have no place of their own


class References(ast.NodeVisitor):
    """The references of a piece of code, its own imports and the attributes that it names."""

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
            self.attributes.update(one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))
        self.visit(node.func)
        before, self.is_class = self.is_class, self.is_class or called in CLASSES_ONLY
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)
        self.is_class = before

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        before, self.in_text = self.in_text, True
        self.generic_visit(node)
        self.in_text = before

    def visit_Import(self, node: ast.Import) -> None:
        self.imports.update((one.name, (one, node)) for one in imports_of(node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.update((one.name, (one, node)) for one in imports_of(node))

    def annotation(self, node: ast.expr | None) -> None:
        """An annotation is not evaluated, as in every file with `from __future__ import annotations`."""
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
        """A function: its defaults belong to what is around it, its body has names of its own."""
        arguments = arguments_of(node.args)
        for default in (*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)):
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
        """The targets of a comprehension are names of its own; the first iterable belongs to what is around it."""
        self.visit(node.generators[0].iter)
        self.scopes.append(frozenset(name for one in node.generators for name in stored(one.target)))
        for number, one in enumerate(node.generators):
            if number:
                self.visit(one.iter)
            for condition in one.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """All the arguments of a function."""
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]


def stored(node: ast.AST) -> Iterator[str]:
    """The names that a target assigns."""
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def assigned(node: ast.AST) -> Iterator[str]:
    """The names that a statement makes local to the function around it: assigned, bound or imported, but not in inner functions."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, Comprehension):
        yield from (one.target.id for one in ast.walk(node) if isinstance(one, ast.NamedExpr))
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    for inner in ast.iter_child_nodes(node):
        yield from assigned(inner)


def declared_global(node: ast.AST) -> Iterator[str]:
    return (name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names)
