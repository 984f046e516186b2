"""The modelling code of a bundle: one file with the layers, the table of their places, and the classes to load."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from retrofit import __version__
from retrofit.bundling.closure import PRESENT, Closure, Collected, Definition, Import, resolve, source_file
from retrofit.bundling.placing import Buffer, Bundled, Child, Copy, Dense, Gone, Hook, Method, New, Shared, Unregistered, Weight
from retrofit.bundling.table import TableText, WrittenGraph
from retrofit.errors import CheckpointError

IGNORED = re.compile(r"  # (?:type: ignore|noqa)(?:\[[^\]]*\])?(?:: \w+)?(?=\s*$|  #)")
WIDTH = 120
OWN = ["retrofit", "bundling"]  # whose code is written after the layers'
ANY = Import("typing", "Any", "Any")

Change = tuple[int, int, int, str]  # line, first and last column in bytes, text


class SourceText:
    """The text of a closure; `names` are its definitions' names in it, all different from `taken`."""

    def __init__(self, closure: Closure, taken: Iterable[str] = ()) -> None:
        self.closure = closure
        self.by_file: dict[str, list[Collected]] = {}
        for collected in sorted(closure.collected.values(), key=lambda collected: collected.node.lineno):
            self.by_file.setdefault(collected.definition.module, []).append(collected)
        self.files = list(self.ordered())
        self.names = self.distinct_names({*taken})

    def ordered(self) -> Iterator[str]:
        """Yield the files, each after those that it needs."""
        needed = {file: {definition.module for definition in self.needed(file)} - {file} for file in self.by_file}
        done = dict[str, None]()

        def visit(file: str, above: tuple[str, ...]) -> None:
            for other in sorted(needed[file]):
                if other not in done and other not in above:
                    visit(other, (*above, file))
            done.setdefault(file)

        for file in sorted(self.by_file, key=lambda file: (file.split(".")[:2] == OWN, file)):
            visit(file, ())
        return iter(done)

    def needed(self, file: str) -> Iterator[Definition]:
        """Yield the definitions that a file's code reads when it runs."""
        for collected in self.by_file[file]:
            for references in collected.read:
                for reference in references.found:
                    found = resolve(file, reference.name, self.closure.ours)
                    if isinstance(found, Definition) and not reference.weak and found in self.closure.collected:
                        yield found

    def distinct_names(self, taken: set[str]) -> dict[Definition, str]:
        """Return a unique name for each definition, different from all others and from imports."""
        taken |= {imported.name for imports in self.closure.imports.values() for imported in imports}
        names: dict[Definition, str] = {}
        for file in self.files:
            for collected in self.by_file[file]:
                plain = collected.definition.name
                leaf = file.rpartition(".")[2]
                other = f"{plain}_OF_{leaf.upper()}" if plain.isupper() else f"{plain}_of_{leaf}"
                name = next(candidate for candidate in (plain, other, f"{other}_2") if candidate not in taken)
                names[collected.definition] = name
                taken.add(name)
        return names

    # Text.

    def imports(self) -> set[Import]:
        """Return the imports of all but optional files. Raises `CheckpointError` if one name is imported from two places."""
        found = {
            imported for file in self.files if file not in self.closure.optional for imported in self.closure.imports.get(file, ())
        }
        return {*found, ANY}

    def write(self) -> str:
        """Return the sections of all files."""
        return "\n\n\n".join(self.section(file) for file in self.files)

    def section(self, file: str) -> str:
        """Return the collected text of one file, below the file's own docstring."""
        title = " / ".join(part.replace("_", " ") for part in file.split(".")[1:])
        head = f"# {'─' * 3} {title} {'─' * max(3, WIDTH - 8 - len(title))}\n#\n"
        docstring_ = source_file(file).docstring
        head += textwrap.indent(docstring_, "# ", lambda line: True).replace("# \n", "#\n").rstrip()
        parts: list[tuple[bool, str]] = []  # whether it is a constant
        written = set[int]()
        for collected in self.by_file[file]:
            if collected.node.lineno not in written:
                written.add(collected.node.lineno)
                parts.append((isinstance(collected.node, (ast.Assign, ast.AnnAssign)), self.definition(collected)))
        body = parts[0][1]
        for (before, _), (constant, text) in itertools.pairwise(parts):
            body += ("\n" if before and constant else "\n\n\n") + text
        if file in self.closure.optional:
            needed = "\n".join(sorted(imported.statement() for imported in self.closure.imports[file]))
            absent = sorted({imported.package for imported in self.closure.imports[file]} - PRESENT)
            body = (
                f"try:\n{textwrap.indent(needed, '    ')}\nexcept ImportError:  # without {', '.join(absent)} they are not called\n"
                f"    pass\nelse:\n\n{textwrap.indent(body, '    ')}"
            )
        first_is_constant = parts[0][0] and file not in self.closure.optional
        return head + ("\n\n" if first_is_constant else "\n\n\n") + body

    def definition(self, collected: Collected) -> str:
        """Return the text of a definition; for a class, without unneeded members."""
        file = source_file(collected.definition.module)
        lines = dict(enumerate(file.lines, 1))
        first, last = extent(collected.node, file.lines)
        kept = set(range(first, last + 1))
        if isinstance(collected.node, ast.ClassDef):
            for member in collected.node.body:
                if member.lineno not in collected.members:
                    kept -= set(range(*extent(member, file.lines, comments=False))) | {member.end_lineno or 0}
        for statement in self.closure.dropped.get(collected.definition.module, ()):
            kept -= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        same = [other for other in self.by_file[collected.definition.module] if other.node is collected.node]  # a, b = 1, 2
        for line, start, end, text in sorted({change for other in same for change in self.changes(other)}, reverse=True):
            encoded = lines[line].encode()
            lines[line] = (encoded[:start] + text.encode() + encoded[end:]).decode()
        text = "\n".join(IGNORED.sub("", lines[number]).rstrip() for number in sorted(kept))
        text = re.sub(r"\n{3,}", "\n\n", text).rstrip()
        text = re.sub(r":\n\n(?=    )", ":\n", text) if not isinstance(collected.node, ast.ClassDef) else text
        only_head = isinstance(collected.node, ast.ClassDef) and not collected.members
        return f"{text}\n    pass" if only_head else text

    def changes(self, collected: Collected) -> Iterator[Change]:
        """Yield the names to be changed: of definitions with equal names, and annotations that nothing here defines."""
        name = self.names[collected.definition]
        if name != collected.definition.name:
            yield self.renamed_here(collected, name)
        for references in collected.read:
            strays = set[ast.expr]()
            for reference in references.found:
                target = resolve(collected.definition.module, reference.name, self.closure.ours)
                if isinstance(target, Definition) and target not in self.closure.collected:
                    strays |= {annotation for annotation in references.annotations if contains(annotation, reference.node)}
                elif isinstance(target, Definition) and self.names[target] != reference.name:
                    if reference.in_text and sys.version_info < (3, 12):
                        raise CheckpointError(
                            f"{target.name} of {target.module} clashes with another name in this bundle",
                            why="it is used in an f-string, whose names Python before 3.12 does not locate",
                            remedy="bundle with Python 3.12 or later",
                            code="not-bundled",
                        )
                    yield (*place(reference.node), self.names[target])
            for references_imports in references.imports.values():
                found = references_imports[0]
                if found.package in self.closure.ours and found.name != found.attribute:
                    raise CheckpointError(
                        f"{collected.definition.module} imports {found.attribute} as {found.name} within a function",
                        why="a bundle needs one name for it",
                        remedy="import it by its own name",
                        code="not-bundled",
                    )
            for annotation in strays:
                if annotation.lineno == annotation.end_lineno and not any(
                    other is not annotation and contains(other, annotation) for other in strays
                ):
                    yield (*place(annotation), "Any")

    def renamed_here(self, collected: Collected, name: str) -> Change:
        """Return the change of the name that a statement defines."""
        plain, node = collected.definition.name, collected.node
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            target = next(part for one_ in targets for part in ast.walk(one_) if isinstance(part, ast.Name) and part.id == plain)
            return (*place(target), name)
        line = source_file(collected.definition.module).lines[node.lineno - 1]
        start = len(line[: re.search(rf"\b(?:def|class)\s+({plain})\b", line).start(1)].encode())  # type: ignore[union-attr]
        return (node.lineno, start, start + len(plain.encode()), name)


def extent(node: ast.stmt, lines: list[str], *, comments: bool = True) -> tuple[int, int]:
    """Return the first and last line of a statement, with its decorators and the comments directly above it."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    while comments and first > 1 and lines[first - 2].startswith("# ") and not lines[first - 2].startswith("# ─"):
        first -= 1
    return first, node.end_lineno or node.lineno


def place(node: ast.expr) -> tuple[int, int, int]:
    return node.lineno, node.col_offset, node.end_col_offset or node.col_offset


def contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(part is inner for part in ast.walk(outer))


# ── The file ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


WORDS = (Buffer, Child, Copy, Dense, Gone, Hook, Method, New, Shared, Unregistered, Weight)  # of tables
TABLE = "TABLE"
STATES = Definition("retrofit.surgery.cache_memory", "histories_of")  # layers that use it store states in the cache
LICENSE = """\
# Generated by retrofit {version}, and under the license of the code that it consists of:
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the License.
# You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0. Unless required by applicable law or agreed
# to in writing, software distributed under the License is distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY
# KIND, either express or implied. See the License for the specific language governing permissions and limitations under it.
#
# The dense model's own code is that of transformers. The weights have a license of their own.
"""
DOCSTRING = '''\
"""{head}

It needs torch and transformers, and nothing else:

    model = {auto}.from_pretrained(directory, trust_remote_code=True)

Below are, in this order: the layers that the dense model does not have, each part after those it needs; the code that puts modules
in place by a table; the table; and the model's classes. Modules are created without constructors, from the table's attributes.
"""
'''


@dataclasses.dataclass(frozen=True)
class ModelClass:
    """A class of the bundle: its dense base class, the path in the whole model, and the auto classes that load it."""

    dense: type
    path: str
    autos: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"Retrofitted{self.dense.__name__}"


@dataclasses.dataclass(frozen=True)
class ModellingFile:
    """The text of a bundle's modelling code, and the name of its config class."""

    text: str
    config_name: str


def modelling_code(
    table: Mapping[str, Any], classes: Iterable[ModelClass], recipe: Iterable[str], model_type: str
) -> ModellingFile:
    """Return the modelling code for the model with this table. Raises `CheckpointError` if a bundle cannot contain a layer."""
    classes = list(classes)
    config = classes[0].dense.config_class  # type: ignore[attr-defined]
    objects = list(objects_in(list(table.values())))
    graphs = list(dict.fromkeys(item for item in objects if isinstance(item, WrittenGraph)))
    roots = [found for item in objects if (found := definition_of(item)) is not None]
    words = [Definition(item.__module__, item.__name__) for item in (*WORDS, Bundled)]
    ours = frozenset(item.module.split(".")[0] for item in (*roots, *words))
    called = [item.name for item in objects if isinstance(item, Method)]
    closure = Closure(roots, words, ours, [*called, *vars(Bundled)])
    config_name = f"Retrofitted{config.__name__}"
    reserved = {
        TABLE,
        config_name,
        config.__name__,
        *(kind.name for kind in classes),
        *(kind.dense.__name__ for kind in classes),
        "nn",
        "F",
    }
    source = SourceText(closure, reserved)
    taken = {*source.names.values(), *reserved}
    graph_names: dict[WrittenGraph, str] = {}
    for graph in graphs:
        numbered = (graph.class_name + ("" if number == 1 else str(number)) for number in range(1, len(graphs) + 2))
        graph_names[graph] = next(name for name in numbered if name not in taken)
        taken.add(graph_names[graph])

    def own(value: Any) -> str:
        if isinstance(value, WrittenGraph):
            return graph_names[value]
        definition = definition_of(value)
        return source.names.get(definition, "") if definition is not None else ""

    written = TableText(own)
    table_lines = written.write(table)
    imports = source.imports() | written.imports | {Import("torch", "nn", "nn")}
    imports |= {Import(kind.__module__, kind.__name__, kind.__name__) for kind in (config, *(each.dense for each in classes))}
    extra = {statement for graph in graphs for statement in graph.imports}
    config_class = (
        f"class {config_name}({config.__name__}):\n"
        f'    """The config of the dense model, of a kind of its own."""\n\n'
        f'    model_type = "{model_type}"\n\n'
        f"    def __init__(self, *args: Any, **kwargs: Any) -> None:\n        super().__init__(*args, **kwargs)"
    )
    auto = next(iter(classes[0].autos), classes[0].name)
    head = f"{classes[0].dense.__name__}, rewritten by retrofit with {', '.join(recipe)}."
    head = head.replace("\\", "\\\\").replace('"', '\\"')  # an option of a pass may be any text
    docstring = DOCSTRING.format(head="\n".join(textwrap.wrap(head, WIDTH, subsequent_indent="    ")), auto=auto)
    sections = [
        LICENSE.format(version=__version__) + docstring + f"\nfrom __future__ import annotations\n\n{import_lines(imports, extra)}",
        source.write(),
        *(graph.source(graph_names[graph]) for graph in graphs),
        f"# ─── the table of modules {'─' * 97}\n\n{TABLE} = {table_lines}",
        f"# ─── the model's classes {'─' * 98}\n\n\n{config_class}",
        *(class_text(kind, classes[0].dense, config_name, STATES in closure.collected) for kind in classes),
    ]
    return ModellingFile("\n\n\n".join(sections) + "\n", config_name)


def is_ours(module: str) -> bool:
    """Return whether a module's code is collected: all but that of torch, transformers and Python's own modules."""
    return module.split(".")[0] not in {"torch", "transformers", "builtins", *sys.stdlib_module_names}


def objects_in(spec: Any) -> Iterator[Any]:
    """Yield the classes, functions and methods that a part of a table names."""
    if isinstance(spec, New):
        yield spec.kind
        yield from objects_in(spec.attributes)
    elif isinstance(spec, Copy):
        yield from objects_in(spec.attributes)
    elif isinstance(spec, (Shared, Unregistered, Method, Hook)):
        yield from (spec,) if isinstance(spec, Method) else ()
        yield from objects_in(list(vars(spec).values()))
    elif isinstance(spec, (list, tuple, set, frozenset)):
        for item in spec:
            yield from objects_in(item)
    elif isinstance(spec, dict):
        yield from objects_in([*spec.keys(), *spec.values()])
    elif isinstance(spec, (type, types.FunctionType)):
        yield spec
    elif hasattr(type(spec), "__members__"):  # of an enumeration
        yield type(spec)


def definition_of(value: Any) -> Definition | None:
    """Return the place of a class's or function's definition; None for other objects and for built-in ones."""
    if not isinstance(value, (type, types.FunctionType)) or not is_ours(value.__module__):
        return None
    return Definition(value.__module__, value.__qualname__)


def class_text(made: ModelClass, whole: type, config_name: str, keeps_states: bool) -> str:
    where = f'    path = "{made.path}"\n    whole = {whole.__name__}\n' if made.path else ""
    if keeps_states:  # read by engines with their own attention, and by `require_own_attention`
        where += "    _supports_attention_backend = False  # layers need more of earlier tokens than their keys and values\n"
    return (
        f"class {made.name}(Bundled, {made.dense.__name__}):\n"
        f'    """{made.dense.__name__} with the modules of the table."""\n\n'
        f"    config_class = {config_name}\n    table = {TABLE}\n{where}"
    ).rstrip()


def import_lines(imports: Iterable[Import], extra: Iterable[str]) -> str:
    """Return the import statements, Python's own modules first."""
    whole = {imported.statement() for imported in imports if imported.attribute is None} | {
        text for text in extra if text.startswith("import ")
    }
    parts: dict[str, set[str]] = {}
    for imported in imports:
        if imported.attribute is not None:
            alias = f"{imported.attribute} as {imported.name}" if imported.name != imported.attribute else imported.attribute
            parts.setdefault(imported.module, set()).add(alias)
    for statement in extra:
        if statement.startswith("from "):
            module, _, name = statement.removeprefix("from ").partition(" import ")
            parts.setdefault(module, set()).add(name)
    statements = [*sorted(whole), *(from_statement(module, sorted(names)) for module, names in sorted(parts.items()))]
    standard = [statement for statement in statements if statement.split()[1].split(".")[0] in sys.stdlib_module_names]
    others = [statement for statement in statements if statement not in standard]
    return "\n".join(standard) + "\n\n" + "\n".join(others)


def from_statement(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
