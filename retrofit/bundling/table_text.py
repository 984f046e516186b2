"""The table of a bundle as Python text: what is the same at several depths is written once, for all of them.

A graph module becomes a class: the Python code of its forward, which needs no graph.
"""

from __future__ import annotations

import enum
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from retrofit.bundling.placing import Buffer, Child, Copy, Dense, Gone, Hook, Method, New, Shared, Unregistered, Weight
from retrofit.bundling.source_files import Import
from retrofit.errors import CheckpointError

FREED = re.compile(r";[ ]+(?:\w+ = )+None[^\n]*$", re.MULTILINE)  # what a graph's code says when a value is not read any more


class WrittenGraph:
    """A class to be written, `class_name` with the method `forward`, and what its code imports, as statements."""

    def __init__(self, class_name: str, forward: str, imports: frozenset[str]) -> None:
        self.class_name, self.forward, self.imports = class_name, forward, imports

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrittenGraph) and (self.class_name, self.forward) == (other.class_name, other.forward)

    def __hash__(self) -> int:
        return hash((self.class_name, self.forward))

    @staticmethod
    def of(module: fx.GraphModule) -> WrittenGraph:
        """Return the class of a graph module; children, parameters and buffers are attributes, as they are the graph module's."""
        code = module.graph.python_code(root_module="self")
        source = FREED.sub("", code.src).strip()
        for name, value in code.globals.items():
            if isinstance(value, str):  # a type that was given as text
                source = source.replace(f" : {name}", "").replace(f" -> {name}", "")
        imports = frozenset(import_of(name, value) for name, value in code.globals.items() if uses(source, name))
        return WrittenGraph(type(module).__name__, source, imports)

    def source(self, name: str) -> str:
        """Return the class as text, under this name."""
        body = "\n".join(f"    {line}".rstrip() for line in self.forward.splitlines())
        return f'class {name}(nn.Module):\n    """What the dense model computes there, read from its graph."""\n\n{body}'


def uses(source: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", source) is not None


def import_of(name: str, value: Any) -> str:
    """Return the statement by which a module has this global of a graph's code."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"from math import {'nan' if math.isnan(value) else 'inf'}"
    whole = value.__qualname__
    return f"from {value.__module__} import {whole}" + (f" as {name}" if whole != name else "")


WIDTH = 120
INDEX = "i"
Named = Callable[[Any], str]  # the expression for a class or function of the bundle's own code; "" for others


class TableText:
    """Writes a table; `own` names what the bundle's own code defines, `imports` is what the text needs from elsewhere."""

    def __init__(self, own: Named) -> None:
        self.own, self.imports = own, set[Import]()
        self.prefix = self.depth = ""  # of the entry that is written for several depths: its path, the number there

    def write(self, table: Mapping[str, Any]) -> str:
        """Return the dict display of the table."""
        lines = ["{"]
        for keys, spec in self.grouped(table):
            if len(keys) == 1:
                lines += self.entry(f"{self.expression(keys[0])}: ", spec, 1)
                continue
            self.at(prefix_of(keys[0]))
            entry = self.entry(f"{self.expression(keys[0])}: ", spec, 2)
            self.at("")
            depths = f"for {INDEX} in {numbers_text([int(prefix_of(key).rpartition('.')[2]) for key in keys])}"
            entry[-1] = entry[-1].removesuffix(",")
            whole = f"    **{{{entry[0].strip()} {depths}}},"
            lines += [whole] if len(entry) == 1 and len(whole) <= WIDTH else ["    **{", *entry, f"        {depths}", "    },"]
        return "\n".join([*lines, "}"])

    def grouped(self, table: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
        """Return the entries, those that are the same but for one number in their paths together, in order of the first."""
        groups: dict[tuple[str, str], list[str]] = {}
        for key, spec in table.items():
            groups.setdefault(self.form(key, spec), []).append(key)
        return [(keys, table[keys[0]]) for keys in groups.values()]

    def form(self, key: str, spec: Any) -> tuple[str, str]:
        """Return the entry as it is written for several depths: of those with the same form one text is written."""
        if not prefix_of(key):
            return key, ""
        self.at(prefix_of(key))
        form = self.expression(key), "\n".join(self.entry("", spec, 1))
        self.at("")
        return form

    def at(self, prefix: str) -> None:
        """From now on paths that begin so are written for several depths; with an empty one none are."""
        self.prefix, self.depth = prefix, prefix.rpartition(".")[2]

    # One entry.

    def entry(self, head: str, spec: Any, indent: int) -> list[str]:
        """Return the lines of `head` and a value, with a comma behind."""
        space = "    " * indent
        whole = f"{space}{head}{self.expression(spec)},"
        if len(whole) <= WIDTH:
            return [whole]
        opening, parts, closing = self.opened(spec)
        if not parts:
            return [whole]
        lines = [f"{space}{head}{opening}"]
        for name, part in parts:
            lines += self.entry(name, part, indent + 1)
        return [*lines, f"{space}{closing},"]

    def opened(self, spec: Any) -> tuple[str, list[tuple[str, Any]], str]:
        """Return how a value that does not fit into a line begins, its parts with what is before each, and how it ends."""
        if isinstance(spec, New):
            return "New(", [("", Plain(self.reference(spec.kind))), *self.keywords(spec.attributes)], ")"
        if isinstance(spec, Copy):
            return "Copy(", [("", spec.path), *self.keywords(spec.attributes)], ")"
        if isinstance(spec, Shared) and spec.value is not None:
            return "Shared(", [("", spec.name), ("", spec.value)], ")"
        if isinstance(spec, Unregistered):
            return "Unregistered(", [("", spec.module)], ")"
        if isinstance(spec, Method):
            return "Method(", [("", spec.owner), ("", spec.name)], ")"
        if isinstance(spec, Hook):
            return "Hook(", [("", spec.function), *([("keywords=", True)] if spec.keywords else [])], ")"
        if type(spec) is list:
            return "[", [("", one) for one in spec], "]"
        if type(spec) is tuple:
            return "(", [("", one) for one in spec], ")"
        if type(spec) is dict:
            return "{", [(f"{self.expression(key)}: ", one) for key, one in spec.items()], "}"
        return "", [], ""

    def keywords(self, attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
        plain = [(f"{name}=", attribute) for name, attribute in attributes.items() if name.isidentifier()]
        others = {name: attribute for name, attribute in attributes.items() if not name.isidentifier()}
        return [*plain, ("**", others)] if others else plain

    def expression(self, spec: Any) -> str:
        """Return a value in one line."""
        if isinstance(spec, Plain):
            return spec.text
        if isinstance(spec, (New, Copy, Unregistered, Method, Hook)) or (isinstance(spec, Shared) and spec.value is not None):
            opening, parts, closing = self.opened(spec)
            return opening + ", ".join(f"{name}{self.expression(part)}" for name, part in parts) + closing
        if isinstance(spec, Shared):
            return f"Shared({self.text(spec.name)})"
        if isinstance(spec, Dense):
            return f"Dense({', '.join(self.text(one) for one in (spec.path, spec.name)[: 1 + bool(spec.name)])})"
        if isinstance(spec, (Weight, Buffer)):
            return self.tensor(spec)
        if isinstance(spec, (Child, Gone)):
            return f"{type(spec).__name__}()"
        if isinstance(spec, enum.Enum):
            return f"{self.reference(type(spec))}.{spec.name}"
        if isinstance(spec, str):
            return self.text(spec)
        if type(spec) is list or (type(spec) is dict and spec) or (type(spec) is tuple and len(spec) != 1):
            opening, parts, closing = self.opened(spec)
            return opening + ", ".join(f"{name}{self.expression(part)}" for name, part in parts) + closing
        if type(spec) is tuple:
            return f"({self.expression(spec[0])},)"
        if type(spec) in (set, frozenset):
            inner = "{" + ", ".join(sorted(map(self.expression, spec))) + "}" if spec else ""
            return (inner or "set()") if type(spec) is set else f"frozenset({inner})"
        if isinstance(spec, float) and not math.isfinite(spec):
            return f'float("{spec}")'
        if isinstance(spec, torch.Size):
            return f"torch.Size({self.expression(tuple(spec))})"
        if isinstance(spec, (type, WrittenGraph)) or callable(spec):
            return self.reference(spec)
        return repr(spec)  # plain numbers, None, dtypes, slices

    def tensor(self, spec: Weight | Buffer) -> str:
        given = [str(size) for size in spec.size] + ([f"dtype={spec.dtype}"] if spec.dtype is not None else [])
        if isinstance(spec, Weight):
            return f"Weight({', '.join([*given, *([] if spec.trained else ['trained=False'])])})"
        return f"Buffer({', '.join([*given, *([] if spec.saved else ['saved=False'])])})"

    def text(self, value: str) -> str:
        """Return a string; where an entry is written for several depths, a path at its depth has their number in it."""
        if not self.prefix or not (value == self.prefix or value.startswith(f"{self.prefix}.")):
            return quoted(value)
        before, after = self.prefix[: -len(self.depth)], value[len(self.prefix) :]
        return 'f"' + in_braces(before) + "{" + INDEX + "}" + in_braces(after) + '"'

    def reference(self, value: Any) -> str:
        """Return the expression for a class or a function, imported where that is needed."""
        own = self.own(value)
        if own:
            return own
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self.imports.add(Import("torch", None, "torch"))
            return f"torch.ops.{value}"
        name = value.__name__
        for module, alias, found in ((F, "F", Import("torch.nn", "functional", "F")), (nn, "nn", Import("torch", "nn", "nn"))):
            if getattr(module, name, None) is value:
                self.imports.add(found)
                return f"{alias}.{name}"
        if getattr(torch, name, None) is value:
            self.imports.add(Import("torch", None, "torch"))
            return f"torch.{name}"
        home = inspect.getmodule(value)
        if isinstance(home, types.ModuleType) and getattr(home, name, None) is value:
            if home.__name__ != "builtins":
                self.imports.add(Import(home.__name__, name, name))
            return str(name)
        raise CheckpointError(
            f"the model cannot be bundled: one of its modules keeps {value!r}",
            why="it cannot be imported by a name",
            remedy="give it one",
        )


class Plain:
    """Text that is an expression already."""

    def __init__(self, text: str) -> None:
        self.text = text


def quoted(value: str) -> str:
    """Return the string in double quotes."""
    return '"' + repr('"' + value)[2:-1].replace('"', '\\"').replace("\\'", "'") + '"'


def in_braces(value: str) -> str:
    """Return the string as a part of a formatted one: nothing of it is evaluated."""
    return quoted(value)[1:-1].replace("{", "{{").replace("}", "}}")


def prefix_of(key: str) -> str:
    """Return the beginning of a path up to its first number; empty where it has none."""
    match = re.search(r"(?:^|\.)\d+(?=\.|$)", key)
    return "" if match is None else key[: match.end()]


def numbers_text(numbers: Sequence[int]) -> str:
    """Depths as a range, where they are one."""
    step = numbers[1] - numbers[0]
    if step > 0 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        bounds = [str(numbers[0])] * bool(numbers[0] or step > 1) + [str(numbers[-1] + step)] + [str(step)] * (step > 1)
        return f"range({', '.join(bounds)})"
    return f"({', '.join(map(str, numbers))})"
