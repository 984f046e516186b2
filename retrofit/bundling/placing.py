"""Put the modules of a rewritten model in place by a table, without analysis and before there are any weights.

    TABLE = {
        "model.embed_tokens.weight": Weight(99, 128),                 # a parameter of another size than the dense model's
        "model.layers.0": New(Layer, layer=Dense("model.layers.0"), p=Weight(2, 2), k=2),
    }

A key is the path of a module of the dense model and one of its attributes: a child, a parameter, a buffer, or any other. A new
module has the attributes that the table gives it; no constructor runs. This file's code is part of every bundle.

`Bundled` is the common part of a bundle's model classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retrofit.surgery.transformers_bookkeeping import align_weights

HOOKS = {"_forward_pre_hooks": "register_forward_pre_hook", "_forward_hooks": "register_forward_hook"}


class New:
    """An object of the class `kind` with these attributes; for a module they include its children, parameters and buffers."""

    def __init__(self, kind: Any, /, **attributes: Any) -> None:
        self.kind, self.attributes = kind, attributes


class Dense:
    """The dense model's module at `path`, or its attribute `name`."""

    def __init__(self, path: str, name: str = "") -> None:
        self.path, self.name = path, name


class Copy:
    """A copy of the dense model's module at `path` that shares everything with it except these attributes."""

    def __init__(self, path: str, /, **attributes: Any) -> None:
        self.path, self.attributes = path, attributes


class Shared:
    """An object that the table names several times: once with its `value`, elsewhere only by name."""

    def __init__(self, name: str, value: New | Copy | None = None) -> None:
        self.name, self.value = name, value


class Weight:
    """A parameter of this size, in its own dtype or the one that the model is loaded in; size `None`: the parameter is None."""

    def __init__(self, *size: int | None, dtype: torch.dtype | None = None, trained: bool = True) -> None:
        self.size, self.dtype, self.trained = size, dtype, trained


class Buffer:
    """A buffer of this size; size `None`: the buffer is None."""

    def __init__(self, *size: int | None, dtype: torch.dtype | None = None, saved: bool = True) -> None:
        self.size, self.dtype, self.saved = size, dtype, saved


class Child:
    """A registered child that is not a module of the table: `Child()` is None."""


class Unregistered:
    """A module that is an attribute but not a child: it is saved, moved and counted elsewhere."""

    def __init__(self, module: Any) -> None:
        self.module = module


class Method:
    """The method `name` of an object."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name


class Hook:
    """A hook of a module; `keywords`: whether it also gets the call's keywords."""

    def __init__(self, function: Any, keywords: bool = False) -> None:
        self.function, self.keywords = function, keywords


class Gone:
    """Marks an attribute of the dense model that this module lacks."""


class Placing:
    """Puts modules in place in `model`, which is the dense model, or its part at `path`."""

    def __init__(self, model: nn.Module, path: str) -> None:
        within = f"{path}." if path else ""
        inner = model.named_modules(remove_duplicate=False)
        self.dense = {f"{within}{name}" if name else path: module for name, module in inner}
        self.held = {place: {**vars(module), "_modules": dict(module._modules)} for place, module in self.dense.items()}
        self.named: dict[str, New | Copy] = {}  # the shared objects in the table
        self.shared: dict[str, Any] = {}  # those of them that exist already

    def place(self, table: Mapping[str, Any]) -> None:
        """Put every entry of the table that belongs to a module of the model in place."""
        for shared in shared_values(list(table.values())):
            if shared.value is not None:
                self.named[shared.name] = shared.value
        for key, spec in table.items():
            path, _, name = key.rpartition(".")
            if path in self.dense:
                self.put(self.dense[path], name, spec)

    def put(self, owner: Any, name: str, spec: Any) -> None:
        """Set `owner.name` to the value of `spec`."""
        if not isinstance(owner, nn.Module):
            vars(owner)[name] = self.value(spec)
        elif name in HOOKS:
            vars(owner)[name].clear()
            for hook in spec:
                getattr(owner, HOOKS[name])(self.value(hook.function), with_kwargs=hook.keywords)
        elif name == "_load_state_dict_post_hooks":
            for hook in spec:
                owner.register_load_state_dict_post_hook(self.value(hook))
        elif isinstance(spec, Weight):
            owner._buffers.pop(name, None)
            owner._parameters[name] = made_parameter(spec)
        elif isinstance(spec, Buffer):
            owner._parameters.pop(name, None)
            owner._buffers[name] = made_buffer(spec)
            (owner._non_persistent_buffers_set.discard if spec.saved else owner._non_persistent_buffers_set.add)(name)
        elif isinstance(spec, Child):
            owner._modules[name] = None
        elif isinstance(spec, Gone):
            for held in (owner._modules, owner._parameters, owner._buffers, vars(owner)):
                held.pop(name, None)
        else:
            value = self.value(spec)
            (owner._modules if isinstance(value, nn.Module) and not isinstance(spec, Unregistered) else vars(owner))[name] = value

    def value(self, spec: Any) -> Any:
        """Return the value of `spec`; an object of any other class is its own value."""
        if isinstance(spec, (New, Copy)):
            return self.filled(self.begun(spec), spec)
        if isinstance(spec, Shared):
            if spec.name not in self.shared:
                new = self.named[spec.name]
                self.shared[spec.name] = self.begun(new)  # before its attributes, which may refer back to it
                self.filled(self.shared[spec.name], new)
            return self.shared[spec.name]
        if isinstance(spec, Dense):
            return self.held[spec.path][spec.name] if spec.name else self.dense[spec.path]
        if isinstance(spec, Unregistered):
            return self.value(spec.module)
        if isinstance(spec, Method):
            return getattr(self.value(spec.owner), spec.name)
        if type(spec) in (list, tuple, set, frozenset):
            return type(spec)(map(self.value, spec))
        if type(spec) is dict:
            return {self.value(key): self.value(value) for key, value in spec.items()}
        return spec

    def begun(self, spec: New | Copy) -> Any:
        """Return the object without the attributes in its description."""
        if isinstance(spec, New):
            return bare(spec.kind)
        made = object.__new__(type(self.dense[spec.path]))
        vars(made).update({**self.held[spec.path], "_modules": dict(self.held[spec.path]["_modules"])})
        return made

    def filled(self, made: Any, spec: New | Copy) -> Any:
        """Return the object with the attributes in its description."""
        for name, value in spec.attributes.items():
            self.put(made, name, value)
        return made


def bare(kind: Any) -> Any:
    """Return an object of a class, without any attributes of its own."""
    made = object.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    return made


def made_parameter(spec: Weight) -> nn.Parameter | None:
    """Return the parameter, filled with zeros."""
    return None if None in spec.size else nn.Parameter(torch.zeros(spec.size, dtype=spec.dtype), requires_grad=spec.trained)  # type: ignore[arg-type]


def made_buffer(spec: Buffer) -> torch.Tensor | None:
    """Return the buffer, filled with zeros."""
    return None if None in spec.size else torch.zeros(spec.size, dtype=spec.dtype)  # type: ignore[arg-type]


def shared_values(spec: Any) -> Iterator[Shared]:
    """Yield the shared objects within a part of the table."""
    if isinstance(spec, Shared):
        yield spec
    inner: Any = ()
    if isinstance(spec, (New, Copy)):
        inner = spec.attributes.values()
    elif isinstance(spec, (Shared, Unregistered, Method, Hook)):
        inner = vars(spec).values()
    elif isinstance(spec, (list, tuple, set, frozenset)):
        inner = spec
    elif isinstance(spec, dict):
        inner = (*spec.keys(), *spec.values())
    for item in inner:
        yield from shared_values(item)


ENGINES = frozenset(("vllm", "sglang"))  # packages whose attention stores keys and values itself


class Bundled:
    """A dense transformers model, the next base class, with the modules of a table put in place before its weights are loaded.

    `path` is the place of this model in the table's model: empty, or that of its base. A base has the modules that it has in a
    dense model of the class `whole`, even if its own class creates others.
    """

    table: Mapping[str, Any] = {}
    path = ""
    whole: Any = None

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        require_own_attention(type(self), config)
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        if self.path:
            vars(self).update(vars(self.whole(config).get_submodule(self.path)))
        Placing(self, self.path).place(self.table)  # type: ignore[arg-type]
        self._frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]  # type: ignore[attr-defined]
        self._weight_conversions: list[Any] = []  # the file has the model's own names
        self.init_weights()  # type: ignore[attr-defined]
        rebuild_buffers(self)  # type: ignore[arg-type]

    @classmethod
    def _load_pretrained_model(cls, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **options: Any) -> Any:
        """Load the weights without translating names: transformers' renamings for this kind of model are for the dense one."""
        if load_config.hf_quantizer is None:
            load_config = dataclasses.replace(load_config, weight_mapping=[])
        return super()._load_pretrained_model(model, state_dict, checkpoint_files, load_config, **options)  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, *inputs: Any, **options: Any) -> Any:
        """Return the model with its weights aligned to cache lines: the last bits of a product may depend on it."""
        loaded = super().from_pretrained(*inputs, **options)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in model._frozen:
            model.get_parameter(name).requires_grad_(False)
        align_weights(model)
        rebuild_buffers(model)
        return loaded


def require_own_attention(kind: Any, config: Any) -> None:
    """Raises `ValueError` if an engine's attention replaces that of a model whose layers need more than keys and values."""
    name = getattr(config, "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None
    engine = str(getattr(function, "__module__", "")).partition(".")[0]
    if engine in ENGINES and not kind.is_backend_compatible():
        raise ValueError(
            f"{kind.__name__} does not run in {engine}: it keeps the keys and values of earlier tokens and nothing else, and "
            "layers of this model need more of these tokens, so that it would decode wrongly. Use generate in transformers."
        )


@torch.no_grad()
def rebuild_buffers(model: nn.Module) -> None:
    """Compute the buffers that are not saved from the weights."""
    for module in model.modules():
        if hasattr(type(module), "rebuild_buffers"):
            module.rebuild_buffers()  # type: ignore[operator]
