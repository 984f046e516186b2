"""The table of a bundle as Python text: entries that are the same at several depths are written once for all of them.

A graph module becomes a class: the Python code of its forward, which needs no graph.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from retrofit.bundling.closure import Import
from retrofit.bundling.placing import HOOKS, Buffer, Child, Copy, Dense, Gone, Hook, Method, New, Shared, Unregistered, Weight
from retrofit.errors import CheckpointError
from retrofit.provenance import ATTRIBUTE

FREED = re.compile(r";[ ]+(?:\w+ = )+None[^\n]*$", re.MULTILINE)  # a graph's code for releasing a value after its last use


class WrittenGraph:
    """A class to be written, `class_name` with the method `forward`, and the imports of its code, as statements."""

    def __init__(self, class_name: str, forward: str, imports: frozenset[str]) -> None:
        self.class_name, self.forward, self.imports = class_name, forward, imports

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrittenGraph) and (self.class_name, self.forward) == (other.class_name, other.forward)

    def __hash__(self) -> int:
        return hash((self.class_name, self.forward))

    @staticmethod
    def of(module: fx.GraphModule) -> WrittenGraph:
        """Return the class for a graph module; children, parameters and buffers are attributes, as in the graph module."""
        code = module.graph.python_code(root_module="self")
        source = FREED.sub("", code.src).strip()
        for name, value in code.globals.items():
            if isinstance(value, str):  # a type given as text
                source = source.replace(f" : {name}", "").replace(f" -> {name}", "")
        imports = frozenset(import_of(name, value) for name, value in code.globals.items() if uses(source, name))
        return WrittenGraph(type(module).__name__, source, imports)

    def source(self, name: str) -> str:
        """Return the text of the class, with this name."""
        body = "\n".join(f"    {line}".rstrip() for line in self.forward.splitlines())
        return f'class {name}(nn.Module):\n    """What the dense model computes there, read from its graph."""\n\n{body}'


def uses(source: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", source) is not None


def import_of(name: str, value: Any) -> str:
    """Return the statement by which a module imports or defines this global of a graph's code."""
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
    """Writes a table; `own` names what the bundle's own code defines, `imports` collects the imports that the text needs."""

    def __init__(self, own: Named) -> None:
        self.own, self.imports = own, set[Import]()
        self.prefix = self.depth = ""  # of the entry being written for several depths: its path, its number

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
        """Return the entries in order, grouped if they are equal except for one number in their paths."""
        groups: dict[tuple[str, str], list[str]] = {}
        for key, spec in table.items():
            groups.setdefault(self.form(key, spec), []).append(key)
        return [(keys, table[keys[0]]) for keys in groups.values()]

    def form(self, key: str, spec: Any) -> tuple[str, str]:
        """Return the entry as written for several depths: entries with equal forms share one text."""
        if not prefix_of(key):
            return key, ""
        self.at(prefix_of(key))
        form = self.expression(key), "\n".join(self.entry("", spec, 1))
        self.at("")
        return form

    def at(self, prefix: str) -> None:
        """Write paths that begin with `prefix` for several depths from now on; none if it is empty."""
        self.prefix, self.depth = prefix, prefix.rpartition(".")[2]

    # One entry.

    def entry(self, head: str, spec: Any, indent: int) -> list[str]:
        """Return the lines of `head` and a value, followed by a comma."""
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
        """Return the beginning of a value that needs several lines, its parts with the text before each, and its end."""
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
            return "[", [("", item) for item in spec], "]"
        if type(spec) is tuple:
            return "(", [("", item) for item in spec], ")"
        if type(spec) is dict:
            return "{", [(f"{self.expression(key)}: ", value) for key, value in spec.items()], "}"
        return "", [], ""

    def keywords(self, attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
        plain = [(f"{name}=", attribute) for name, attribute in attributes.items() if name.isidentifier()]
        others = {name: attribute for name, attribute in attributes.items() if not name.isidentifier()}
        return [*plain, ("**", others)] if others else plain

    def expression(self, spec: Any) -> str:
        """Return a value on one line."""
        if isinstance(spec, Plain):
            return spec.text
        if isinstance(spec, (New, Copy, Unregistered, Method, Hook)) or (isinstance(spec, Shared) and spec.value is not None):
            opening, parts, closing = self.opened(spec)
            return opening + ", ".join(f"{name}{self.expression(part)}" for name, part in parts) + closing
        if isinstance(spec, Shared):
            return f"Shared({self.text(spec.name)})"
        if isinstance(spec, Dense):
            return f"Dense({', '.join(self.text(text) for text in (spec.path, spec.name)[: 1 + bool(spec.name)])})"
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
        """Return a string literal; in an entry for several depths, a path contains the loop's number instead of its own."""
        if not self.prefix or not (value == self.prefix or value.startswith(f"{self.prefix}.")):
            return quoted(value)
        before, after = self.prefix[: -len(self.depth)], value[len(self.prefix) :]
        return 'f"' + in_braces(before) + "{" + INDEX + "}" + in_braces(after) + '"'

    def reference(self, value: Any) -> str:
        """Return the expression for a class or a function, importing it if needed."""
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
            why="it cannot be imported by name",
            remedy="give it one",
            code="not-bundled",
        )


class Plain:
    """Text that is already an expression."""

    def __init__(self, text: str) -> None:
        self.text = text


def quoted(value: str) -> str:
    """Return the string in double quotes."""
    return '"' + repr('"' + value)[2:-1].replace('"', '\\"').replace("\\'", "'") + '"'


def in_braces(value: str) -> str:
    """Return the string as a part of a formatted one: nothing in it is evaluated."""
    return quoted(value)[1:-1].replace("{", "{{").replace("}", "}}")


def prefix_of(key: str) -> str:
    """Return the beginning of a path up to its first number; empty if it has none."""
    match = re.search(r"(?:^|\.)\d+(?=\.|$)", key)
    return "" if match is None else key[: match.end()]


def numbers_text(numbers: Sequence[int]) -> str:
    """Return depths as text, as a range if they form one."""
    step = numbers[1] - numbers[0]
    if step > 0 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        bounds = [str(numbers[0])] * bool(numbers[0] or step > 1) + [str(numbers[-1] + step)] + [str(step)] * (step > 1)
        return f"range({', '.join(bounds)})"
    return f"({', '.join(map(str, numbers))})"


# ── What a recipe changed ─────────────────────────────────────────────────────────────────────────────────────────────────────────


PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, range, torch.dtype, torch.Size, type(Ellipsis))
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
REGISTRIES = ("_modules", "_parameters", "_buffers")
POST_HOOKS = "_load_state_dict_post_hooks"
OURS = frozenset(  # records of retrofit and transformers about a model that a bundle does not need, or has from elsewhere
    f"training {ATTRIBUTE} retrofit_hooks hf_quantizer "
    "_published_conversions _weight_conversions _is_hf_initialized config generation_config".split()
)
GRAPHS = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - TORCHS  # a graph module's records of its graph


class DenseState:
    """The state of the modules of a dense model, at the time of its creation."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.held = {path: {name: copied(value) for name, value in vars(module).items()} for path, module in self.modules.items()}
        self.weights = {path: weights_of(module) for path, module in self.modules.items()}
        self.attributes: dict[int, Dense] = {}  # objects of the model's own code → the attribute under which they are found
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in TORCHS and not isinstance(
                    value, (*PLAIN, *CALLABLE, list, tuple, dict, set, nn.Module, torch.Tensor)
                ):
                    self.attributes.setdefault(id(value), Dense(path, name))


class Structure:
    """`table`: the differences of `model` from its dense model; it is on the meta device, created in the dtype `default`."""

    def __init__(self, model: nn.Module, dense: DenseState, default: torch.dtype) -> None:
        self.model, self.dense, self.default = model, dense, default
        self.places = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.seen: dict[int, tuple[Any, New | Copy]] = {}  # an object and its description, by id
        self.named: dict[int, str] = {}  # ids of objects met again, with the names under which they are shared
        self.mentioned: list[str] = []  # paths of dense modules that an entry names
        self.table: dict[str, Any] = {}
        self.fill()

    def fill(self) -> None:
        """Add an entry for every difference, in modules that are in the model or named by an entry."""
        present = {id(module) for module in self.model.modules()}
        waiting = [path for path, module in self.dense.modules.items() if id(module) in present]
        done = set[str]()
        while waiting:
            for path in waiting:
                done.add(path)
                self.compare(path)
            waiting = [path for path in dict.fromkeys(self.mentioned) if path not in done]
        unmet = [name for key, name in self.named.items() if key not in self.seen]
        if unmet:
            raise refused(unmet[0], "something refers to it, and it is not in the model")
        names = {id(self.seen[key][1]): name for key, name in self.named.items()}
        self.table = {key: with_names(spec, names) for key, spec in self.table.items()}

    def compare(self, path: str) -> None:
        """Add the entries of one module of the dense model."""
        module, before = self.dense.modules[path], self.dense.held[path]
        within = f"{path}." if path else ""
        for name, child in module._modules.items():
            if name not in before["_modules"] or before["_modules"][name] is not child:
                self.table[f"{within}{name}"] = Child() if child is None else self.described(child, f"{within}{name}")
        weights = weights_of(module)
        for name, value in {**module._parameters, **module._buffers}.items():
            if self.dense.weights[path].get(name, ...) != weights[name]:
                self.table[f"{within}{name}"] = self.tensor(module, name, value)
        for registry in REGISTRIES:
            for name in before[registry]:
                if name not in vars(module)[registry]:
                    self.table[f"{within}{name}"] = Gone()
        for name, value in vars(module).items():
            if (
                name not in (*REGISTRIES, "_non_persistent_buffers_set")
                and name not in OURS
                and differs(value, before.get(name, ...))
            ):
                self.add(self.table, f"{within}{name}", name, module)
        for name in before:
            if name not in vars(module) and name not in OURS:
                self.table[f"{within}{name}"] = Gone()

    def add(self, entries: dict[str, Any], key: str, name: str, module: nn.Module) -> None:
        """Add the attribute `name` of a module, torch's or any other, to the entries as `key`."""
        value = vars(module)[name]
        if name in HOOKS:
            keywords = vars(module)[f"{name}_with_kwargs"]
            entries[key] = [Hook(self.described(hook, key), id_ in keywords) for id_, hook in value.items()]
        elif name == POST_HOOKS:
            entries[key] = [self.described(hook, key) for hook in value.values()]
        elif name not in TORCHS:
            entries[key] = self.attribute(value, key)
        elif not name.endswith(("_with_kwargs", "_always_called")) or not value:
            raise refused(key, f"it has hooks of a kind that a bundle cannot have ({name})")

    def described(self, value: Any, where: str) -> Any:
        """Return the description of any value. Raises `CheckpointError` if there is none."""
        if isinstance(value, enum.Enum) or type(value) in PLAIN:
            return value
        if isinstance(value, CALLABLE):
            if "<" in getattr(value, "__qualname__", ""):
                raise refused(where, f"it keeps {value.__qualname__}, a function without a name of its own")
            return value
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.described(item, where) for item in value)
        if type(value) in (dict, OrderedDict):
            return {self.described(key, where): self.described(item, where) for key, item in value.items()}
        if isinstance(value, nn.Module) and id(value) in self.dense.paths:
            path = self.dense.paths[id(value)]
            self.mentioned.append(path)
            return Dense(path)
        if id(value) in self.dense.attributes:
            return self.dense.attributes[id(value)]
        if isinstance(value, PretrainedConfig):
            return self.config(value, where)
        if isinstance(value, types.MethodType):
            return Method(self.described(value.__self__, where), value.__func__.__name__)
        if isinstance(value, torch.Tensor):
            raise refused(where, "it keeps a tensor that is neither a parameter nor a buffer")
        if isinstance(value, functools.partial) or not hasattr(value, "__dict__"):
            raise refused(where, f"it keeps an object of {type(value).__name__}, which a table cannot describe")
        return self.shared(value, where)

    def attribute(self, value: Any, where: str) -> Any:
        """Return the description of an attribute that is not a child; a module registered elsewhere is described there."""
        if not isinstance(value, nn.Module):
            return self.described(value, where)
        if id(value) in self.places and id(value) not in self.dense.paths:
            return Unregistered(Shared(self.named.setdefault(id(value), self.places[id(value)])))
        return Unregistered(self.described(value, where))

    def copied_from(self, module: nn.Module) -> str | None:
        """Return the path of the dense module that this one is a copy of, with other children; None if there is none."""
        for path, held in self.dense.held.items():
            if type(self.dense.modules[path]) is type(module) and vars(module).keys() == held.keys():
                names = vars(module).keys() - {"_modules", "training"}
                if not any(differs(value, held[name]) for name, value in vars(module).items() if name in names):
                    return path
        return None

    def config(self, value: Any, where: str) -> Any:
        """Return the dense model's attribute with an equal config. Raises `CheckpointError` if there is none."""
        for attribute in self.dense.attributes.values():
            known = self.dense.held[attribute.path][attribute.name]
            if type(known) is type(value) and known.to_dict() == value.to_dict():
                return attribute
        raise refused(where, "it holds a config that is not the model's")

    def shared(self, value: Any, where: str) -> Any:
        """Return the description of an object that is not plain; by name if it is met again."""
        if id(value) in self.seen:
            return Shared(self.named.setdefault(id(value), self.places.get(id(value), f"{type(value).__name__} of {where}")))
        original = self.copied_from(value) if isinstance(value, nn.Module) and id(value) not in self.places else None
        new: New | Copy = New(type(value)) if original is None else Copy(original)
        self.seen[id(value)] = value, new
        if original is not None:
            self.mentioned.append(original)
            before = self.dense.held[original]["_modules"]
            changed = {name: child for name, child in value._modules.items() if child is not before.get(name, ...)}
            new.attributes.update({name: self.described(child, f"{where}.{name}") for name, child in changed.items()})
        elif isinstance(value, nn.Module):
            self.describe_module(value, new, where)  # type: ignore[arg-type]
        else:
            new.attributes.update({name: self.described(var, f"{where}.{name}") for name, var in vars(value).items()})
        return new

    def describe_module(self, module: nn.Module, new: New, where: str) -> None:
        """Set the attributes of `new` to those of a module that the dense model does not have."""
        if isinstance(module, fx.GraphModule):
            new.kind = WrittenGraph.of(module)
        elif "<locals>" in type(module).__qualname__:
            raise refused(where, f"its class {type(module).__qualname__} is defined inside a function")
        fresh = vars(nn.Module())
        for name, value in vars(module).items():
            key = f"{where}.{name}"
            if name in TORCHS:
                if name not in (*REGISTRIES, "_non_persistent_buffers_set", "training") and differs(value, fresh[name]):
                    self.add(new.attributes, name, name, module)
            elif not (isinstance(module, fx.GraphModule) and name in GRAPHS) and name != "_is_hf_initialized":
                new.attributes[name] = self.attribute(value, key)
        for name, child in module._modules.items():
            new.attributes[name] = Child() if child is None else self.described(child, f"{where}.{name}")
        for name, value in {**module._parameters, **module._buffers}.items():
            new.attributes[name] = self.tensor(module, name, value)

    def tensor(self, module: nn.Module, name: str, value: torch.Tensor | None) -> Weight | Buffer:
        """Return the description of a parameter or buffer."""
        saved = name not in module._non_persistent_buffers_set
        if name in module._parameters:
            return Weight(None) if value is None else Weight(*value.shape, dtype=self.own_dtype(value), trained=value.requires_grad)
        if value is None:
            return Buffer(None)
        if not saved and not hasattr(type(module), "rebuild_buffers"):
            raise refused(name, f"{type(module).__name__} does not save this buffer, and has no method rebuild_buffers")
        return Buffer(*value.shape, dtype=self.own_dtype(value), saved=saved)

    def own_dtype(self, value: torch.Tensor) -> torch.dtype | None:
        """Return the dtype of a tensor that keeps its own, in whatever dtype the model is loaded."""
        return None if value.dtype == self.default else value.dtype


def with_names(spec: Any, names: Mapping[int, str]) -> Any:
    """Return a part of the table in which the first of repeated objects is `Shared`; `names` are by the id of their description."""
    if isinstance(spec, (New, Copy)):
        spec.attributes = {name: with_names(attribute, names) for name, attribute in spec.attributes.items()}
        return Shared(names[id(spec)], spec) if id(spec) in names else spec
    if isinstance(spec, (Unregistered, Method, Hook)):
        for name, value in vars(spec).items():
            setattr(spec, name, with_names(value, names))
    if type(spec) in (list, tuple, set, frozenset):
        return type(spec)(with_names(item, names) for item in spec)
    if type(spec) is dict:
        return {with_names(key, names): with_names(value, names) for key, value in spec.items()}
    return spec


def copied(value: Any) -> Any:
    """Return `value`, containers copied, so that later changes of it can be detected."""
    return value.copy() if isinstance(value, (list, dict, set, OrderedDict)) else value


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Return kind, size and dtype of each parameter and buffer, and whether it is trained or saved; also a buffer's identity."""
    found: dict[str, Any] = {}
    for name, weight in module._parameters.items():
        found[name] = None if weight is None else ("parameter", weight.shape, weight.dtype, weight.requires_grad)
    for name, buffer in module._buffers.items():
        saved = name not in module._non_persistent_buffers_set
        found[name] = None if buffer is None else ("buffer", buffer.shape, buffer.dtype, saved, id(buffer))
    return found


def differs(value: Any, before: Any) -> bool:
    """Return whether an attribute differs from its earlier value."""
    if value is before:
        return False
    plain = (*PLAIN, list, tuple, dict, set, frozenset, OrderedDict)
    if type(value) is type(before) and isinstance(value, plain):
        if isinstance(value, (dict, OrderedDict)):
            return list(value) != list(before) or any(differs(item, before[key]) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return len(value) != len(before) or any(map(differs, value, before))
        return bool(value != before)
    return True


def refused(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the model cannot be bundled: {where}",
        why=why,
        remedy="use plain values for its attributes, or install retrofit-transformers where the model is loaded",
        code="not-bundled",
    )
