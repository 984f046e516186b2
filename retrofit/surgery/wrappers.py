"""Wrappers around modules: find an argument of a call, replace a part of an output, forward attributes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from retrofit.errors import DoesNotFitError

ArgumentPlace = tuple[int | None, str | None]  # one argument of a call: its position, its keyword


def float_like(*modules: nn.Module) -> Tensor:
    """Return the first floating-point parameter of the modules, as a model for new ones; an empty tensor if there is none."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return next((parameter for parameter in parameters if parameter.is_floating_point()), torch.empty(()))


def modules_around(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the module at the path and all modules that contain it, the model first."""
    steps = path.split(".") if path else []
    return [model.get_submodule(".".join(steps[:count])) for count in range(len(steps) + 1)]


def argument_place(module: nn.Module, key: int | str | None) -> ArgumentPlace:
    """Return the position and keyword of the argument `key` of `module`, as far as the signature of its forward has both.

    `key` is a position or a keyword, not None, which a capture uses for values that are no arguments.
    """
    assert key is not None
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in single]
    if isinstance(key, int):
        return key, names[key] if key < len(names) else None
    return names.index(key) if key in names else None, key


def find_argument(place: ArgumentPlace, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the container with the argument at `place`, and its key there. Raises `DoesNotFitError` if the call lacks it."""
    position, keyword = place
    if keyword is not None and keyword in kwargs:
        return kwargs, keyword
    if position is not None and position < len(args):
        return args, position
    raise DoesNotFitError(
        f"argument {keyword or position} is missing in a call",
        why="the rewritten module reads it",
        remedy="call the module with the arguments it had when the model was rewritten",
        code="other-arguments",
    )


def argument_at(place: ArgumentPlace, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument at `place` of a call. Raises `DoesNotFitError` if the call lacks it."""
    container, key = find_argument(place, list(args), dict(kwargs))
    return container[key]


def tensor_argument(place: ArgumentPlace | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor at a place of a call; None if there is none."""
    if place is None:
        return None
    position, keyword = place
    value = kwargs.get(keyword) if keyword is not None else None
    if value is None and position is not None and position < len(args):
        value = args[position]
    return value if isinstance(value, Tensor) else None


def item_at(output: Any, key: int | str | None) -> Any:
    """Return the item `key` of a module's output; the output itself if it is a tensor or `key` is None."""
    if key is None or isinstance(output, Tensor):
        return output
    return list(output.values())[key] if isinstance(key, int) and isinstance(output, Mapping) else output[key]


def with_item(output: Any, key: int | str | None, value: Tensor) -> Any:
    """Return a copy of `output`, of the same type, with `value` at `key`; `value` itself if it is a tensor or `key` is None."""
    if key is None or isinstance(output, Tensor):
        return value
    if isinstance(output, Mapping):
        name = list(output)[key] if isinstance(key, int) else key
        return type(output)(**{**output, name: value})
    if not isinstance(output, (tuple, list)):
        changed = copy.copy(output)
        object.__setattr__(changed, str(key), value)  # works on frozen dataclasses too
        return changed
    items: Any = list(output)
    items[key] = value
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def map_first(output: Any, change: Callable[[Tensor], Tensor], key: int | str | None = None) -> Any:
    """Return `output`, a tensor or a collection, with one tensor changed: the one at `key`, else the first."""
    place = key if key is not None else 0
    return with_item(output, place, change(item_at(output, place)))


OF_ADAPTERS = "base_layer"  # PEFT mistakes a module with this attribute for an adapter of its own, and replaces it


class Wrapper(nn.Module):
    """Wraps the module `layer` and forwards its public attributes, except for those that describe the wrapper.

    `stays_outermost`: no module may wrap it. `adds_branches`: it adds the branches of its layer to a stream itself; anything that
    another pass adds to the layer's output would be lost. `opens_layer`: it calls its layer with other modules in place of some
    inside it; only those modules compute what they did before. `is_by_entry`: what it changes of the inputs of its layer's products
    it changes entry by entry, so the layer may have a part of the entries; None if it changes none. `guards` names methods that
    are hooks and change nothing: they raise or do nothing.
    """

    stores_histories = False  # whether it stores what it needs of earlier tokens in the model's cache (`histories_of`)

    stays_outermost = False
    adds_branches = False
    opens_layer = False
    is_by_entry: bool | None = None
    guards: ClassVar[tuple[str, ...]] = ()

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # Dynamo traces this form: nn.Module.__init__(self) breaks the graph
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__
        for registry in ("_parameters", "_buffers", "_modules"):
            if registry in held and name in held[registry]:
                return held[registry][name]
        if name.startswith("_") or name == OF_ADAPTERS or "layer" not in held.get("_modules", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(held["_modules"]["layer"], name)

    def arrange(self) -> None:
        """Prepare the layout of `layer` for evaluation, as a call would do; values do not change."""

    def release(self) -> None:
        """Restore the layout of `layer`; called when the wrapper is removed."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; unlike `nn.Module`, also under a name that `layer` has as an attribute."""
        self._parameters[name] = param

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer; unlike `nn.Module`, also under a name that `layer` has as an attribute."""
        self._buffers[name] = tensor
        (self._non_persistent_buffers_set.discard if persistent else self._non_persistent_buffers_set.add)(name)


def batch_first(stream: Tensor, tokens_first: bool) -> Tensor:
    """Return the stream as (batch, T, d) if the model's code has it as (T, batch, d), and the other way round."""
    return stream.transpose(0, 1).contiguous() if tokens_first else stream


# ── Injected keywords ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class CallWithKeywords(Wrapper):
    """Calls `layer` with the keyword arguments `keywords` in addition to its own."""

    def __init__(self, layer: nn.Module, keywords: Mapping[str, Any]) -> None:
        super().__init__(layer)
        self.keywords = dict(keywords)
        self.training = layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return child_modules(self)["layer"](*args, **{**kwargs, **self.keywords})


class InjectingCopy:
    """A shallow copy of a module for one call, `copy`, with each submodule at `paths` replaced by its `substitute`.

    A path may pass through a `Wrapper` as if the wrapper were not there, as attribute access does.
    """

    def __init__(self, module: nn.Module, paths: Iterable[str], substitute: Callable[[nn.Module], nn.Module]) -> None:
        self.substitute = substitute
        self.copies: list[tuple[nn.Module, nn.Module]] = []  # a module, its copy
        self.copy = self.shallow_copy(module, list(paths))

    def shallow_copy(self, module: nn.Module, paths: list[str]) -> nn.Module:
        """Return a copy of `module` and of every module on `paths` inside it; `module` itself if there are no paths."""
        if not paths:
            return module
        rests: dict[str, list[str]] = {}  # the paths inside each child
        for path in paths:
            name, rest = split_path(module, path)
            rests.setdefault(name, []).append(rest)
        children = child_modules(module)
        changed = {
            name: self.substitute(children[name]) if "" in inner else self.shallow_copy(children[name], inner)
            for name, inner in rests.items()
        }
        twin: nn.Module = object.__new__(type(module))
        twin.__dict__.update({**module.__dict__, "_modules": {**children, **changed}})
        forward: Any = module.__dict__.get("forward")
        if isinstance(forward, ForwardReplacement):  # runs the children of the copy
            twin.__dict__["forward"] = forward.on(twin)
        elif getattr(forward, "__self__", None) is module:
            twin.__dict__["forward"] = MethodType(forward.__func__, twin)
        self.copies.append((module, twin))
        return twin

    def write_back(self) -> None:
        """Copy attributes that were set on the copies to the modules."""
        for module, twin in self.copies:
            held = module.__dict__
            for name, value in twin.__dict__.items():
                if name not in ("_modules", "forward") and (name not in held or held[name] is not value):
                    held[name] = value


def child_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules registered in `module`, from the registry: while tracing, attribute access returns proxies."""
    return module.__dict__["_modules"]  # type: ignore[no-any-return]


def split_path(module: nn.Module, path: str) -> tuple[str, str]:
    """Return the name of the child of `module` that `path` leads into, and the rest of the path inside it."""
    name, _, rest = path.partition(".")
    children = child_modules(module)
    return (name, rest) if name in children and has_path(children[name], rest) else ("layer", path)


def has_path(module: nn.Module, path: str) -> bool:
    """Return whether `path` names a submodule of `module`, or of a module that it wraps; the empty path names the module itself."""
    name, _, rest = path.partition(".")
    child = child_modules(module).get(name)
    if not path or (child is not None and has_path(child, rest)):
        return True
    return isinstance(module, Wrapper) and has_path(child_modules(module)["layer"], path)


def call_with_keywords(
    module: nn.Module, paths: Iterable[str], keywords: Mapping[str, Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Return the output of `module` when its submodules at `paths` are called with the additional `keywords`."""
    return call_with_substitutes(module, paths, with_keywords(keywords), args, kwargs)


def with_keywords(keywords: Mapping[str, Any]) -> Callable[[nn.Module], nn.Module]:
    """Return a function that wraps a module so that it is called with the additional `keywords`."""
    return lambda module: CallWithKeywords(module, keywords)


def call_with_substitutes(
    module: nn.Module, paths: Iterable[str], substitute: Callable[[nn.Module], nn.Module], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Return the output of `module` with each of its submodules at `paths` replaced by its `substitute`."""
    if replaces_in_place(module):
        return run_in_place(module, paths, substitute, lambda: module(*args, **kwargs))
    injecting = InjectingCopy(module, paths, substitute)
    output = injecting.copy(*args, **kwargs)
    injecting.write_back()
    return output


def replaces_in_place(module: nn.Module) -> bool:
    """Return whether submodules are replaced in place: in compiled code, because torch 2.11 does not compile copies of modules.

    Not if a part may run again for its gradient, after they have been restored.
    """
    if not torch.compiler.is_dynamo_compiling():
        return False
    return not (module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()))


def run_in_place(
    module: nn.Module, paths: Iterable[str], substitute: Callable[[nn.Module], nn.Module], run: Callable[[], Any]
) -> Any:
    """Return what `run` returns while each submodule of `module` at `paths` is replaced by its `substitute`."""
    places = [place_of(module, path) for path in paths]
    held = [siblings[name] for siblings, name in places]
    try:  # dynamo cannot resume a graph in here: if it breaks, this runs uncompiled, on a copy
        for (siblings, name), child in zip(places, held, strict=True):
            siblings[name] = substitute(child)
        return run()
    finally:
        for (siblings, name), child in zip(places, held, strict=True):
            siblings[name] = child


def place_of(module: nn.Module, path: str) -> tuple[dict[str, nn.Module], str]:
    """Return the registry that holds the submodule at `path`, and its name there."""
    name, rest = split_path(module, path)
    return place_of(child_modules(module)[name], rest) if rest else (child_modules(module), name)


class ForwardReplacement:
    """Replaces the `forward` of one module instance: a bound method with the signature and code location of its class's forward.

    Tools that wrap the function of a method and bind it again, as accelerate does for mixed precision, find both `__func__` and
    `__self__`. Subclasses compute the forward's result in `run`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, args, kwargs)

    def run(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the forward's result on `module`, the forward's own module or a copy of it."""
        raise NotImplementedError

    def on(self, module: nn.Module) -> Any:
        """Return the forward for `module`, a copy of the replaced forward's; torch.compile cannot trace `__func__` bound to it."""
        return lambda *args, **kwargs: self.run(module, args, kwargs)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> FunctionType:
        return unbound(self)

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(type(self.module).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])

    @property
    def __code__(self) -> CodeType:  # torch.export reports the code's location
        return inspect.unwrap(type(self.module).forward).__code__


def unbound(replacement: ForwardReplacement) -> FunctionType:
    """Return the function of a replaced forward, called with the module as first argument, which torch.compile can trace."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replacement.run(module, args, kwargs)

    function: Any = forward
    function.__name__ = "forward_of_retrofit"  # under "forward", a pickled method would be loaded as the class's
    function.__signature__ = inspect.signature(type(replacement.module).forward)
    function.replacement = replacement
    return function  # type: ignore[no-any-return]


def own_forward(module: nn.Module) -> Any:
    """Return the `forward` set on `module` itself, or None; finds retrofit's replacement even if a tool has bound it again."""
    held = vars(module).get("forward")
    function = getattr(held, "__func__", None)
    replacement = None if hasattr(function, "__wrapped__") else getattr(function, "replacement", None)
    return held if replacement is None else replacement


class InjectingForward(ForwardReplacement):
    """A forward that calls the submodules at `paths` with the keywords `keywords_from(args, kwargs)`.

    `inner`, a function of these keywords, gives those for submodules at other paths.
    """

    def __init__(self, module: nn.Module, paths: Sequence[str], keywords_from: Any, inner: InjectingForward | None = None) -> None:
        super().__init__(module)
        self.paths, self.keywords_from, self.inner = tuple(paths), keywords_from, inner

    def run(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        substitute = with_keywords(self.keywords_from(args, kwargs))
        if replaces_in_place(module):
            return run_in_place(module, self.paths, substitute, lambda: self.run_inner(module, args, kwargs))
        injecting = InjectingCopy(module, self.paths, substitute)
        output = self.run_inner(injecting.copy, args, kwargs)
        injecting.write_back()
        return output

    def run_inner(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return type(self.module).forward(module, *args, **kwargs) if self.inner is None else self.inner.run(module, args, kwargs)


# ── Torch's fused attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


FUSED = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # those that may be positional


MULTI_HEAD = "multi_head_attention_forward"  # torch's function that attends without a call that can be intercepted


def calls_multi_head(module: nn.Module) -> bool:
    """Return whether a module inside has code that calls `MULTI_HEAD`."""
    codes = (getattr(inspect.unwrap(type(part).forward), "__code__", None) for part in module.modules())
    return any(code is not None and MULTI_HEAD in code.co_names for code in codes)


class AnsweredFusedAttention(TorchFunctionMode):
    """Within this context `answer` is called in place of torch's fused attention, with the same arguments; `calls` counts them."""

    def __init__(self, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.answer = answer
        self.calls: list[bool] = []  # `list[bool]()` cannot be compiled

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in FUSED:
            return function(*args, **(kwargs or {}))
        self.calls.append(True)
        return self.answer(*args, **(kwargs or {}))


HIDDEN = -1e4  # an additive mask below this hides


def visible_keys(mask: Tensor, tokens: int, true_hides: bool) -> Tensor | None:
    """Return the keys visible to each query, (batch or 1, tokens, keys); None if the mask is not about single keys and queries.

    `mask` is (batch, keys): 0 or False for padding, or with `true_hides` for all other keys, and may also hold a bias; or (batch,
    heads, queries, keys), a bias or booleans.
    """
    if mask.dim() == 2:
        if true_hides and mask.is_floating_point():
            return ((mask > HIDDEN) & (mask < 0.5)).unsqueeze(1).expand(-1, tokens, -1)
        return (mask.bool() ^ true_hides).unsqueeze(1).expand(-1, tokens, -1)
    if mask.dim() != 4:
        return None
    head = mask[:, 0]
    visible = head > HIDDEN if head.is_floating_point() else head.bool() ^ true_hides
    return visible.expand(-1, tokens, -1)


def query_positions(visible: Tensor, tokens: int, growing: bool) -> Tensor:
    """Return the index of each query among the keys of `visible`, (batch or 1, tokens, keys): (tokens).

    With a `growing` cache the last key belongs to the last query, hidden or not. A cache of fixed length has free positions after
    it, which no query sees: a query sees no key after its own, and its own unless it is hidden.
    """
    keys = visible.shape[-1]
    positions = torch.arange(tokens, device=visible.device)
    if growing:
        return positions + (keys - tokens)
    if keys > tokens:
        seen = visible.any(0)  # by a query of any row
        behind = seen.flip(-1).to(torch.uint8).argmax(-1)  # keys after the last one that it sees
        last = torch.where(seen.any(-1), keys - 1 - behind, -keys)
        if not visible.stride(1):  # one row for all queries: keys up to the last query's
            return positions + (last[-1] - (tokens - 1)).clamp(min=0)
        return positions + (last - positions).amax().clamp(min=0)
    return positions


def unpadded_tokens(visible: Tensor, tokens: int, growing: bool, passed: Tensor | None = None) -> Tensor:
    """Return which queries are not padding, (batch or 1, tokens): those that may see themselves. `growing` as above.

    `passed`, (batch, 1), is the number of tokens before the first query, if counted: where all queries are hidden, the mask of a
    cache of fixed length does not show it.
    """
    if passed is None:
        own = query_positions(visible, tokens, growing).unsqueeze(0)
    else:  # the keys may be those of a window, which ends with the last query once it is full
        own = passed.clamp(max=visible.shape[-1] - tokens).clamp(min=0) + torch.arange(tokens, device=visible.device)
        visible = visible.expand(len(own), -1, -1)
    return visible.gather(-1, own.unsqueeze(-1).expand(visible.shape[0], -1, -1)).squeeze(-1)


def lookback_gates(visible: Tensor | None, tokens: int, past: int, growing: bool) -> Tensor | None:
    """Return g[t,1] … g[t,past]: whether each query may see the keys of the `past` tokens before it, (batch or 1, tokens, past).

    A key before the beginning of the mask has left a window. `growing` is that of `query_positions`.
    """
    if visible is None or not past:
        return None
    positions = query_positions(visible, tokens, growing)
    earlier = positions.unsqueeze(-1) - torch.arange(1, past + 1, device=visible.device)  # (tokens, past)
    gates = visible.gather(-1, earlier.clamp(min=0).unsqueeze(0).expand(visible.shape[0], -1, -1))
    return gates & (earlier >= 0)


def is_guard(hook: Any) -> bool:
    """Return whether a hook is one that a wrapper names in `guards`."""
    return getattr(hook, "__name__", None) in getattr(getattr(hook, "__self__", None), "guards", ())


HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")


def holds_guards(module: nn.Module, table: str, hooks: Collection[Any]) -> bool:
    """Return whether these hooks change nothing, so that a module of another class need not keep them."""
    held = {**module._forward_pre_hooks, **module._forward_hooks}
    return table in HOOKS and all(is_guard(held.get(number)) for number in hooks)
