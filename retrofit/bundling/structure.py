"""What a recipe changed in a dense model, as a table for `placing`: from what its modules hold before and after."""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from transformers import PretrainedConfig

from retrofit.bundling.placing import HOOKS, Buffer, Child, Copy, Dense, Gone, Hook, Method, New, Shared, Unregistered, Weight
from retrofit.bundling.table_text import WrittenGraph
from retrofit.errors import CheckpointError
from retrofit.provenance import ATTRIBUTE

PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, range, torch.dtype, torch.Size, type(Ellipsis))
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
TORCHS = frozenset(vars(nn.Module()))  # what every module holds
REGISTRIES = ("_modules", "_parameters", "_buffers")
POST_HOOKS = "_load_state_dict_post_hooks"
OURS = frozenset(  # what retrofit and transformers keep about a model, and a bundle does not need or has from elsewhere
    f"training {ATTRIBUTE} retrofit_hooks hf_quantizer "
    "_published_conversions _weight_conversions _is_hf_initialized config generation_config".split()
)
GRAPHS = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - TORCHS  # what a graph module keeps of its graph


class DenseState:
    """What the modules of a dense model hold, as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.held = {path: {name: copied(value) for name, value in vars(module).items()} for path, module in self.modules.items()}
        self.weights = {path: weights_of(module) for path, module in self.modules.items()}
        self.attributes: dict[int, Dense] = {}  # objects that the model's own code made, by which attribute they are found
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in TORCHS and not isinstance(
                    value, (*PLAIN, *CALLABLE, list, tuple, dict, set, nn.Module, torch.Tensor)
                ):
                    self.attributes.setdefault(id(value), Dense(path, name))


class Structure:
    """`table`: what differs in `model` from the dense model that it was; it is on the meta device, made in the dtype `default`."""

    def __init__(self, model: nn.Module, dense: DenseState, default: torch.dtype) -> None:
        self.model, self.dense, self.default = model, dense, default
        self.places = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.met: dict[int, tuple[Any, New | Copy]] = {}  # an object and its description, by id
        self.named: dict[int, str] = {}  # ids of those that are met again, with the name they are shared by
        self.mentioned: list[str] = []  # paths of dense modules that an entry names
        self.table: dict[str, Any] = {}
        self.fill()

    def fill(self) -> None:
        """The table has an entry for all that differs, of modules that are in the model or named by an entry."""
        present = {id(module) for module in self.model.modules()}
        waiting = [path for path, module in self.dense.modules.items() if id(module) in present]
        done = set[str]()
        while waiting:
            for path in waiting:
                done.add(path)
                self.compare(path)
            waiting = [path for path in dict.fromkeys(self.mentioned) if path not in done]
        unmet = [name for one, name in self.named.items() if one not in self.met]
        if unmet:
            raise refused(unmet[0], "something refers to it, and it is not in the model")
        names = {id(self.met[one][1]): name for one, name in self.named.items()}
        self.table = {key: with_names(spec, names) for key, spec in self.table.items()}

    def compare(self, path: str) -> None:
        """The entries of one module of the dense model."""
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
        """The attribute `name` of a module, one of torch's or another, is among the entries as `key`."""
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
        """Return the description of any value; raises `CheckpointError` for what has none."""
        if isinstance(value, enum.Enum) or type(value) in PLAIN:
            return value
        if isinstance(value, CALLABLE):
            if "<" in getattr(value, "__qualname__", ""):
                raise refused(where, f"it keeps {value.__qualname__}, a function without a name of its own")
            return value
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.described(one, where) for one in value)
        if type(value) in (dict, OrderedDict):
            return {self.described(key, where): self.described(one, where) for key, one in value.items()}
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
        """Return the description of what is no child: a module that is one elsewhere is described there."""
        if not isinstance(value, nn.Module):
            return self.described(value, where)
        if id(value) in self.places and id(value) not in self.dense.paths:
            return Unregistered(Shared(self.named.setdefault(id(value), self.places[id(value)])))
        return Unregistered(self.described(value, where))

    def copied_from(self, module: nn.Module) -> str | None:
        """Return the path of the dense module of which this one is a copy, with other children; None where there is none."""
        for path, held in self.dense.held.items():
            if type(self.dense.modules[path]) is type(module) and vars(module).keys() == held.keys():
                names = vars(module).keys() - {"_modules", "training"}
                if not any(differs(value, held[name]) for name, value in vars(module).items() if name in names):
                    return path
        return None

    def config(self, value: Any, where: str) -> Any:
        """Return a copy of one of the model's configs, as that."""
        for attribute in self.dense.attributes.values():
            known = self.dense.held[attribute.path][attribute.name]
            if type(known) is type(value) and known.to_dict() == value.to_dict():
                return attribute
        raise refused(where, "it keeps a config that is none of the model's")

    def shared(self, value: Any, where: str) -> Any:
        """Return the description of an object that is not plain; by a name where it is met again."""
        if id(value) in self.met:
            return Shared(self.named.setdefault(id(value), self.places.get(id(value), f"{type(value).__name__} of {where}")))
        original = self.copied_from(value) if isinstance(value, nn.Module) and id(value) not in self.places else None
        new: New | Copy = New(type(value)) if original is None else Copy(original)
        self.met[id(value)] = value, new
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
        """`new` has the attributes of a module that the dense model does not have."""
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
        """Return the dtype of a tensor that has one of its own, whatever the model is loaded in."""
        return None if value.dtype == self.default else value.dtype


def with_names(spec: Any, names: Mapping[int, str]) -> Any:
    """Return a part of the table in which repeated objects are `Shared` at first; `names` by the id of their description."""
    if isinstance(spec, (New, Copy)):
        spec.attributes = {name: with_names(attribute, names) for name, attribute in spec.attributes.items()}
        return Shared(names[id(spec)], spec) if id(spec) in names else spec
    if isinstance(spec, (Unregistered, Method, Hook)):
        for name, one in vars(spec).items():
            setattr(spec, name, with_names(one, names))
    if type(spec) in (list, tuple, set, frozenset):
        return type(spec)(with_names(one, names) for one in spec)
    if type(spec) is dict:
        return {with_names(key, names): with_names(one, names) for key, one in spec.items()}
    return spec


def copied(value: Any) -> Any:
    """`value`, a container copied, so that what is changed in it later can be seen."""
    return value.copy() if isinstance(value, (list, dict, set, OrderedDict)) else value


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Of each parameter and buffer its kind, size and dtype, and whether it is trained or saved; of a buffer also which it is."""
    found: dict[str, Any] = {}
    for name, weight in module._parameters.items():
        found[name] = None if weight is None else ("parameter", weight.shape, weight.dtype, weight.requires_grad)
    for name, buffer in module._buffers.items():
        saved = name not in module._non_persistent_buffers_set
        found[name] = None if buffer is None else ("buffer", buffer.shape, buffer.dtype, saved, id(buffer))
    return found


def differs(value: Any, before: Any) -> bool:
    """Return whether an attribute is another than before."""
    if value is before:
        return False
    plain = (*PLAIN, list, tuple, dict, set, frozenset, OrderedDict)
    if type(value) is type(before) and isinstance(value, plain):
        if isinstance(value, (dict, OrderedDict)):
            return list(value) != list(before) or any(differs(one, before[key]) for key, one in value.items())
        if isinstance(value, (list, tuple)):
            return len(value) != len(before) or any(map(differs, value, before))
        return bool(value != before)
    return True


def refused(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the model cannot be bundled: {where}",
        why=why,
        remedy="give its attributes names and plain values; or install retrofit-transformers where the model is loaded",
    )
