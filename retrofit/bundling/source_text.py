"""Collected code as the text of one file: definitions in the order of their dependencies, names told apart, comments kept."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator

from retrofit.bundling.closure import PRESENT, Closure, Collected, Reference
from retrofit.bundling.source_files import Definition, Import, resolve, source_file
from retrofit.errors import CheckpointError

IGNORED = re.compile(r"  # (?:type: ignore|noqa)(?:\[[^\]]*\])?(?:: \w+)?(?=\s*$|  #)")
WIDTH = 120
OWN = ["retrofit", "bundling"]  # whose code is behind the layers
ANY = Import("typing", "Any", "Any")

Change = tuple[int, int, int, str]  # line, first and last column in bytes, text


class SourceText:
    """The text of a closure; `names` are those of its definitions there, among them none of `taken`."""

    def __init__(self, closure: Closure, taken: Iterable[str] = ()) -> None:
        self.closure = closure
        self.by_file: dict[str, list[Collected]] = {}
        for one in sorted(closure.collected.values(), key=lambda one: one.node.lineno):
            self.by_file.setdefault(one.definition.module, []).append(one)
        self.files = list(self.ordered())
        self.names = self.told_apart({*taken})

    def ordered(self) -> Iterator[str]:
        """Yield the files, each after those that it needs."""
        needed = {file: {one.module for one in self.needed(file)} - {file} for file in self.by_file}
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
        for one in self.by_file[file]:
            for references in one.read:
                for reference in references.found:
                    found = self.target(file, reference, one)
                    if isinstance(found, Definition) and not reference.weak and found in self.closure.collected:
                        yield found

    def target(self, file: str, reference: Reference, one: Collected) -> Definition | Import | None:
        """Return what a name in a definition means."""
        return resolve(file, reference.name, self.closure.ours)

    def told_apart(self, taken: set[str]) -> dict[Definition, str]:
        """Return a name of its own for each definition; no two are alike, nor like an import."""
        taken |= {one.name for imports in self.closure.imports.values() for one in imports}
        names: dict[Definition, str] = {}
        for file in self.files:
            for one in self.by_file[file]:
                plain = one.definition.name
                leaf = file.rpartition(".")[2]
                other = f"{plain}_OF_{leaf.upper()}" if plain.isupper() else f"{plain}_of_{leaf}"
                name = next(candidate for candidate in (plain, other, f"{other}_2") if candidate not in taken)
                names[one.definition] = name
                taken.add(name)
        return names

    # Text.

    def imports(self) -> set[Import]:
        """Return the imports of all but optional files; raises `CheckpointError` where one name is imported from two places."""
        found = {one for file in self.files if file not in self.closure.optional for one in self.closure.imports.get(file, ())}
        return {*found, ANY}

    def write(self) -> str:
        """Return the sections of all files."""
        return "\n\n\n".join(self.section(file) for file in self.files)

    def section(self, file: str) -> str:
        """Return what is collected of one file, below what the file says about itself."""
        title = " / ".join(part.replace("_", " ") for part in file.split(".")[1:])
        head = f"# {'─' * 3} {title} {'─' * max(3, WIDTH - 8 - len(title))}\n#\n"
        said = source_file(file).docstring
        head += textwrap.indent(said, "# ", lambda line: True).replace("# \n", "#\n").rstrip()
        parts: list[tuple[bool, str]] = []  # whether it is a constant
        written = set[int]()
        for one in self.by_file[file]:
            if one.node.lineno not in written:
                written.add(one.node.lineno)
                parts.append((isinstance(one.node, (ast.Assign, ast.AnnAssign)), self.definition(one)))
        body = parts[0][1]
        for (before, _), (constant, text) in itertools.pairwise(parts):
            body += ("\n" if before and constant else "\n\n\n") + text
        if file in self.closure.optional:
            needed = "\n".join(sorted(one.statement() for one in self.closure.imports[file]))
            absent = sorted({one.package for one in self.closure.imports[file]} - PRESENT)
            body = (
                f"try:\n{textwrap.indent(needed, '    ')}\nexcept ImportError:  # without {', '.join(absent)} they are not called\n"
                f"    pass\nelse:\n\n{textwrap.indent(body, '    ')}"
            )
        first_is_constant = parts[0][0] and file not in self.closure.optional
        return head + ("\n\n" if first_is_constant else "\n\n\n") + body

    def definition(self, one: Collected) -> str:
        """Return the text of a definition: of a class, without the members that nothing needs."""
        file = source_file(one.definition.module)
        lines = dict(enumerate(file.lines, 1))
        first, last = extent(one.node, file.lines)
        kept = set(range(first, last + 1))
        if isinstance(one.node, ast.ClassDef):
            for member in one.node.body:
                if member.lineno not in one.members:
                    kept -= set(range(*extent(member, file.lines, comments=False))) | {member.end_lineno or 0}
        for statement in self.closure.dropped.get(one.definition.module, ()):
            kept -= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        same = [other for other in self.by_file[one.definition.module] if other.node is one.node]  # a, b = 1, 2
        for line, start, end, text in sorted({change for other in same for change in self.changes(other)}, reverse=True):
            encoded = lines[line].encode()
            lines[line] = (encoded[:start] + text.encode() + encoded[end:]).decode()
        text = "\n".join(IGNORED.sub("", lines[number]).rstrip() for number in sorted(kept))
        text = re.sub(r"\n{3,}", "\n\n", text).rstrip()
        text = re.sub(r":\n\n(?=    )", ":\n", text) if not isinstance(one.node, ast.ClassDef) else text
        only_head = isinstance(one.node, ast.ClassDef) and not one.members
        return f"{text}\n    pass" if only_head else text

    def changes(self, one: Collected) -> Iterator[Change]:
        """Yield the names to be changed: of definitions with the same name, and annotations that nothing here defines."""
        name = self.names[one.definition]
        if name != one.definition.name:
            yield self.renamed_here(one, name)
        for references in one.read:
            strays = set[ast.expr]()
            for reference in references.found:
                target = self.target(one.definition.module, reference, one)
                if isinstance(target, Definition) and target not in self.closure.collected:
                    strays |= {annotation for annotation in references.annotations if contains(annotation, reference.node)}
                elif isinstance(target, Definition) and self.names[target] != reference.name:
                    if reference.in_text and sys.version_info < (3, 12):
                        raise CheckpointError(
                            f"{target.name} of {target.module} has the name of something else in this bundle",
                            why="it is read in an f-string, where Python before 3.12 does not say where names stand",
                            remedy="bundle with Python 3.12 or later",
                        )
                    yield (*place(reference.node), self.names[target])
            for references_imports in references.imports.values():
                found = references_imports[0]
                if found.package in self.closure.ours and found.name != found.attribute:
                    raise CheckpointError(
                        f"{one.definition.module} imports {found.attribute} as {found.name} within a function",
                        why="a bundle has one name for it",
                        remedy="import it by its own name",
                    )
            for annotation in strays:
                if annotation.lineno == annotation.end_lineno and not any(
                    other is not annotation and contains(other, annotation) for other in strays
                ):
                    yield (*place(annotation), "Any")

    def renamed_here(self, one: Collected, name: str) -> Change:
        """Return the change of the name that a statement defines."""
        plain, node = one.definition.name, one.node
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            target = next(part for one_ in targets for part in ast.walk(one_) if isinstance(part, ast.Name) and part.id == plain)
            return (*place(target), name)
        line = source_file(one.definition.module).lines[node.lineno - 1]
        start = len(line[: re.search(rf"\b(?:def|class)\s+({plain})\b", line).start(1)].encode())  # type: ignore[union-attr]
        return (node.lineno, start, start + len(plain.encode()), name)


def extent(node: ast.stmt, lines: list[str], *, comments: bool = True) -> tuple[int, int]:
    """Return the first and last line of a statement, with its decorators and the comments right above it."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    while comments and first > 1 and lines[first - 2].startswith("# ") and not lines[first - 2].startswith("# ─"):
        first -= 1
    return first, node.end_lineno or node.lineno


def place(node: ast.expr) -> tuple[int, int, int]:
    return node.lineno, node.col_offset, node.end_col_offset or node.col_offset


def contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(part is inner for part in ast.walk(outer))
