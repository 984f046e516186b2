"""A graph module as a class: the Python code of its forward, which needs no graph."""

from __future__ import annotations

import math
import re
import types
from typing import Any

from torch import fx

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
        """The class of a graph module; its children, parameters and buffers are attributes, as they are the graph module's."""
        code = module.graph.python_code(root_module="self")
        source = FREED.sub("", code.src).strip()
        for name, value in code.globals.items():
            if isinstance(value, str):  # a type that was given as text
                source = source.replace(f" : {name}", "").replace(f" -> {name}", "")
        imports = frozenset(import_of(name, value) for name, value in code.globals.items() if uses(source, name))
        return WrittenGraph(type(module).__name__, source, imports)

    def source(self, name: str) -> str:
        """The class as text, under this name."""
        body = "\n".join(f"    {line}".rstrip() for line in self.forward.splitlines())
        return f'class {name}(nn.Module):\n    """What the dense model computes there, read from its graph."""\n\n{body}'


def uses(source: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", source) is not None


def import_of(name: str, value: Any) -> str:
    """The statement by which a module has this global of a graph's code."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"from math import {'nan' if math.isnan(value) else 'inf'}"
    whole = value.__qualname__
    return f"from {value.__module__} import {whole}" + (f" as {name}" if whole != name else "")
