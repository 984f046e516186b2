"""Prints how large the project is: files and lines a package, layers of imports, words of the documentation, names of the SDK.

python benchmarks/size.py
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("retrofit", "passes", "cli")
SHORT, LONG = 60, 600  # lines of a file
GENERATED = re.compile(r"do not edit|^Written by|made by `make real`", re.MULTILINE)


def package(file: Path) -> str:
    """Return the package a source file belongs to: a folder of `retrofit`, or `passes` or `cli`; a file beside them by its name."""
    first, *rest = file.relative_to(ROOT).parts
    return first if first != "retrofit" else rest[0].removesuffix(".py")


def imported(file: Path) -> set[str]:
    """Return the packages that a source file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "retrofit" else [str(node.module)]
        found |= {name.split(".")[1] for name in names if name.startswith("retrofit.")}
    return found


def floors(uses: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of packages of which each imports the next."""

    @functools.cache
    def height(name: str) -> int:
        return 1 + max((height(other) for other in uses[name] if other in uses and other != name), default=0)

    return max(map(height, uses))


def main() -> None:
    files = [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    groups: dict[str, list[Path]] = defaultdict(list)
    uses: dict[str, set[str]] = defaultdict(set)
    for file in files:
        groups[package(file)].append(file)
        if package(file) not in ("__init__", "__main__", "sdk"):
            uses[package(file)] |= imported(file)
    for name, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        print(f"{name:16} {len(members):4} files {sum(lines[file] for file in members):7,} lines")
    short, long = ([file for file in files if test(lines[file])] for test in (lambda n: n < SHORT, lambda n: n > LONG))
    print(f"\nfiles {len(files)}, lines {sum(lines.values()):,}; under {SHORT} lines {len(short)}, above {LONG} {len(long)}")
    print(f"floors {floors(uses)}")
    pages = {page: page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
    words = {page: len(text.split()) for page, text in pages.items()}
    written = sum(count for page, count in words.items() if not GENERATED.search(pages[page]))
    print(f"words: README {words[ROOT / 'README.md']:,}, all pages {sum(words.values()):,}, written by hand {written:,}")
    for file in sorted((ROOT / "retrofit" / "sdk").glob("*.py")):
        imports = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        exported = {alias.asname for node in imports for alias in node.names} - {None}
        print(f"sdk: {len(exported)} names in {'the core' if file.stem == '__init__' else file.stem}")


if __name__ == "__main__":
    main()
