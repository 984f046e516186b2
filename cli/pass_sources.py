"""The options of a pass as its source declares them, read without importing it: a pass imports torch, which takes seconds."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence

from retrofit.pipeline.registry import GROUP


@dataclasses.dataclass(frozen=True)
class DeclaredOption:
    """One field of a pass: its name, its line of documentation, and the values it may take where these are words."""

    name: str
    doc: str
    choices: tuple[str, ...]


def declared_in_source(name: str) -> list[DeclaredOption]:
    """The options of the installed pass `name`; none where there is no such pass, or no source.

    What is read: the fields that the class itself declares by `option(…)`, with choices that are words, or names for words.
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name and (source := source_of(entry.module)) is not None:
            return list(Source(source).options(entry.attr))
    return []


def source_of(module: str) -> str | None:
    """The source of a module that is not imported, nor are the packages it lies in."""
    places: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = None
        for finder in sys.meta_path:
            spec = finder.find_spec(".".join(parts[:depth]), places)
            if spec is not None:
                break
        if spec is None:
            return None
        places = spec.submodule_search_locations
        if places is not None:
            places = list(places)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


class Source:
    """A file of Python, of which expressions made of words are evaluated, names that it imports included."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.constants: dict[str, ast.expr] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name → module, its name there
        for one in self.tree.body:
            if isinstance(one, ast.Assign):
                self.constants |= dict(assigned(one.targets[0], one.value))
            elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
                self.constants[one.target.id] = one.value
            elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
                self.imported |= {name.asname or name.name: (one.module, name.name) for name in one.names}

    def options(self, name: str) -> Iterator[DeclaredOption]:
        """The options that the class `name` declares."""
        for field in self.fields(name):
            call = field.value
            if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "option":
                continue
            given: dict[str | None, ast.expr] = {word.arg: word.value for word in call.keywords}
            doc = call.args[1] if len(call.args) > 1 else given.get("doc")
            choices = ["true", "false"] if ast.unparse(field.annotation) == "bool" else self.words(given.get("choices"))
            yield DeclaredOption(ast.unparse(field.target), "".join(self.words(doc)), tuple(choices))

    def summary(self, name: str) -> str:
        """The summary that the class `name` has."""
        return "".join(word for one in self.fields(name) if ast.unparse(one.target) == "summary" for word in self.words(one.value))

    def fields(self, name: str) -> Iterator[ast.AnnAssign]:
        """The annotated fields of the class `name`."""
        for kind in self.tree.body:
            if isinstance(kind, ast.ClassDef) and kind.name == name:
                yield from (field for field in kind.body if isinstance(field, ast.AnnAssign))

    def words(self, node: ast.expr | None, seen: frozenset[str] = frozenset()) -> list[str]:
        """The words of an expression: text, names, tuples, keys of a dictionary, `tuple(…)`; others give none."""
        match node:
            case ast.Constant(value=str(word)):
                return [word]
            case ast.Name(id=name) if name in self.constants and name not in seen:
                return self.words(self.constants[name], seen | {name})
            case ast.Name(id=name) if name in self.imported:
                module, there = self.imported[name]
                text = source_of(module)
                return Source(text).words(ast.Name(there)) if text is not None else []
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return [word for item in items for word in self.words(item, seen)]
            case ast.Starred(value=inside) | ast.Call(func=ast.Name(id="tuple"), args=[inside]):
                return self.words(inside, seen)
            case ast.Dict(keys=keys):
                return [word for key in keys for word in self.words(key, seen)]
            case _:
                return []


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment gives values to, one by one: `a, b = 1, 2` gives two."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from assigned(one, its)


def summaries() -> Iterator[tuple[str, str]]:
    """The name of each installed pass and its line of summary, as its source has it."""
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda one: one.name):
        source = source_of(entry.module)
        yield entry.name, Source(source).summary(entry.attr) if source is not None else ""
