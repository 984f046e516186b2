"""Trace modules that compute the same only once: thirty equal layers are captured in the time of one.

The first call of a module is traced between two marks in the graph. A later call of a module becomes a single node if nothing that
its code may have read differs, and `expand` replaces this node by a copy of what is between the marks, on the call's own arguments,
parameters and buffers.

What code may read is described: the classes, attributes and tensors (sizes and types; which are the same) of the module and of all
below it, and the arguments. A module is traced as always if something has no description or has hooks, or if its code writes to an
attribute or an operand, draws a number, or uses a tensor that is neither an argument nor a parameter or buffer of its own. Numbers
and texts that differ between modules of a class, such as the index of a layer, matter only if they are read: reads are recorded
during a trace. State that code keeps in global variables is not seen, unless it is tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import operator
import random
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot, track_tensor_tree

from retrofit.process import replace_attributes
from retrofit.program.program import Call, CallMarker

LIBRARY = torch.library.Library("retrofit", "FRAGMENT")
LIBRARY.define("repeat(Tensor[] x, int trace, int call, str role) -> Tensor[]")
REPEAT = torch.ops.retrofit.repeat.default
fx.node.has_side_effect(REPEAT)  # kept in the graph even if no output depends on it

BEGIN, END, AGAIN = "begin", "end", "again"  # roles of its nodes

SIMPLE = (bool, int, float, complex, str, bytes, type(None))
UNCHANGING = (type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, enum.Enum, type(...))
CONTAINERS = (list, tuple, dict, OrderedDict, set, frozenset, torch.Size)
HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))
APART = HOOKS | {"_parameters", "_buffers", "_modules"}  # not described as attributes
ABSENT = object()

Place: TypeAlias = tuple[str, str]  # a path below the traced module, and the name of an attribute


class IndescribableError(Exception):
    """Something may be read that has no description."""


@dataclasses.dataclass
class Trace:
    """The first call of a module."""

    number: int
    path: str
    calls: range  # made inside it, by number
    reads: dict[Place, Any]  # the varying attributes that were read, with their values then
    result: Any  # with an `Output` for each tensor
    made: list[Tensor]
    renamed: list[int]  # the tensors given that have another node since, as the result of an operation that returned them


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor in a result: one of those that were made, or of those that were given."""

    number: int
    given: bool


class RepeatedModules:
    """The modules of a model that may repeat each other in a trace; `marker` marks their calls."""

    def __init__(self, model: nn.Module, marker: CallMarker) -> None:
        self.marker = marker
        self.paths = {module: path for path, module in model.named_modules()}
        self.unknown = {module for module in self.paths if not is_known(module)}
        self.traces: dict[Any, list[Trace]] = defaultdict(list)
        self.begun = self.repeated = 0
        self.readers: list[set[tuple[nn.Module, str]]] = []  # of the traces under way: the attributes read
        kinds: dict[type, list[nn.Module]] = defaultdict(list)
        for module in self.paths:
            kinds[type(module)].append(module)
        self.varying = {kind: varying_attributes(kind, modules) for kind, modules in kinds.items() if len(modules) > 1}
        several = (module for kind in self.varying for module in kinds[kind])
        self.candidates = {module for module in several if module._modules and "forward" not in vars(module)} - self.unknown

    @contextlib.contextmanager
    def active(self) -> Iterator[RepeatedModules]:
        """Within this context calls that repeat earlier ones are not traced, if each module has one path."""
        with contextlib.ExitStack() as stack:
            if not any(self.marker.other_names.values()) and not has_global_hooks():
                for kind, names in self.varying.items():
                    own = vars(kind)
                    recorded = {name: RecordedAttribute(name, own.get(name, ABSENT), self.readers) for name in names}
                    stack.enter_context(replace_attributes(kind, **recorded))
                for kind, forward in {type(module): type(module).forward for module in self.candidates}.items():
                    stack.enter_context(replace_attributes(kind, forward=self.replacement(forward)))
            yield self

    def replacement(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a class that traces what is new; copies of modules, which code may make, run as they are."""

        @functools.wraps(forward)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            mode = get_proxy_mode()
            if mode is None or module not in self.candidates:
                return forward(module, *args, **kwargs)
            try:
                found = Description(self, module, (forward, args, kwargs), mode.tracer)
            except IndescribableError:
                return forward(module, *args, **kwargs)
            for trace in self.traces[found.key]:
                if trace.reads.items() <= self.values_in(module).items():
                    return self.call_again(trace, module, found, mode.tracer)
            return self.call_first(forward, module, args, kwargs, found, mode.tracer)

        return call

    def values_in(self, module: nn.Module) -> dict[Place, Any]:
        """Return the values of the varying attributes of a module and of those below it, with their types."""
        below = ((path, inner, self.varying.get(type(inner), ())) for path, inner in module.named_modules())
        held = ((path, name, vars(inner).get(name, ABSENT)) for path, inner, names in below for name in names)
        return {(path, name): (type(value), value) for path, name, value in held}

    def call_first(
        self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, found: Description, tracer: Any
    ) -> Any:
        """Return the result of the forward, traced between marks; remember the trace if it may be repeated."""
        number, first = self.begun, len(self.marker.calls)
        self.begun += 1
        begin = tracer.create_node("call_function", REPEAT, (found.nodes, number, first, BEGIN), {})
        begin.meta["val"] = []
        self.readers.append(set())
        drawn, values = random.getstate(), self.values_in(module)
        try:
            result = forward(module, *args, **kwargs)
        finally:
            reads = self.readers.pop()
        with contextlib.suppress(IndescribableError):
            traced = list(nodes_after(begin))
            require_pure(traced, set(found.nodes))
            outputs = Outputs(found, traced, tracer)
            nested = outputs.read(result)
            renamed = outputs.renamed()
            now = Description(self, module, (forward, args, kwargs), tracer).key, self.values_in(module), random.getstate()
            if now != (found.key, values, drawn):
                raise IndescribableError  # the code has changed what it read
            end = tracer.create_node("call_function", REPEAT, (outputs.nodes, number, len(self.marker.calls), END), {})
            end.meta["val"] = []
            read = {place: values[place] for place in places_of(reads, module) if place in values}
            calls = range(first, len(self.marker.calls))
            self.traces[found.key].append(Trace(number, self.paths[module], calls, read, nested, outputs.tensors, renamed))
        return result

    def call_again(self, trace: Trace, module: nn.Module, found: Description, tracer: Any) -> Any:
        """Return the result of a call that repeats the trace: new fake tensors, of one node."""
        self.repeated += 1
        read = {(module.get_submodule(path), name) for path, name in trace.reads}
        for reads in self.readers:
            reads.update(read)
        node = tracer.create_node("call_function", REPEAT, (found.nodes, trace.number, len(self.marker.calls), AGAIN), {})
        calls = self.marker.repeat(trace.calls, trace.path, self.paths[module])
        tracer.num_calls.update({call.path: call.index + 1 for call in calls})
        with disable_proxy_modes_tracing():
            made = [empty_like(tensor) for tensor in trace.made]
        results = [*made, *(found.tensors[number] for number in trace.renamed)]
        track_tensor_tree(results, fx.Proxy(node, tracer), constant=None, tracer=tracer)

        def value(part: Any) -> Any:
            if isinstance(part, Output):
                return found.tensors[part.number] if part.given else made[part.number]
            if isinstance(part, dict):
                return type(part)((key, value(item)) for key, item in part.items())
            return type(part)(map(value, part)) if isinstance(part, (list, tuple)) else part

        return value(trace.result)


class Description:
    """A hashable description of all that a call may read, `key`, and the tensors among it with their nodes."""

    def __init__(self, modules: RepeatedModules, module: nn.Module, call: tuple[Any, ...], tracer: Any) -> None:
        self.modules, self.tracer = modules, tracer
        self.nodes: list[fx.Node] = []
        self.tensors: list[Tensor] = []
        self.positions: dict[fx.Node, int] = {}
        self.met: dict[int, tuple[int, Any]] = {}  # by identity: numbers, and the objects, which keep theirs while they live
        self.below = {id(inner): path for path, inner in module.named_modules()}
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        modes = torch.is_grad_enabled(), *autocast, torch.get_default_dtype()
        self.key = modes, self.of(call), tuple((path, self.of_module(inner)) for path, inner in module.named_modules())

    def of_module(self, module: nn.Module) -> Any:
        """Return the description of a module apart from those inside it, and from its varying attributes."""
        own_marks = len(module._forward_pre_hooks) == len(module._forward_hooks) == 1  # others may have been added since
        if module in self.modules.unknown or not own_marks:
            raise IndescribableError
        if isinstance(module, fx.GraphModule):
            return self.of_graph(module)
        apart = APART | set(self.modules.varying.get(type(module), ()))
        held = {name: value for name, value in vars(module).items() if name not in apart}
        return type(module), self.of(held), self.of(module._parameters), self.of(module._buffers), tuple(module._modules)

    def of_graph(self, module: fx.GraphModule) -> Any:
        """Return the description of a module whose class has the code of its graph alone."""
        named = {name for part in (module._parameters, module._buffers, module._modules) for name in part}
        others = (node for node in module.graph.nodes if node.op == "get_attr" and str(node.target).partition(".")[0] not in named)
        if type(module).__bases__ != (fx.GraphModule,) or any(others):
            raise IndescribableError
        functions = tuple(node.target for node in module.graph.nodes if node.op == "call_function")
        code = fx.GraphModule, module.code, functions, module.training
        return code, self.of(module._parameters), self.of(module._buffers), tuple(module._modules)

    def of(self, value: Any) -> Any:
        """Return the description of a value."""
        if isinstance(value, SIMPLE) and type(value) in SIMPLE:
            return type(value), repr(value)
        if isinstance(value, UNCHANGING):
            return value
        if isinstance(value, Tensor):
            return self.of_tensor(value)
        if isinstance(value, nn.Module):
            if id(value) not in self.below:
                raise IndescribableError
            return "module", self.below[id(value)]
        if isinstance(value, types.MethodType):
            return value.__func__, self.of(value.__self__)
        if id(value) in self.met:
            return "met", self.met[id(value)][0]
        self.met[id(value)] = len(self.met), value
        if isinstance(value, functools.partial) and type(value) is functools.partial:
            return functools.partial, self.of(value.func), self.of(value.args), self.of(value.keywords)
        if type(value) in CONTAINERS:
            if isinstance(value, dict):
                return type(value), tuple((self.of(key), self.of(item)) for key, item in value.items())
            items = tuple(self.of(item) for item in value)
            return type(value), tuple(sorted(items, key=repr)) if isinstance(value, (set, frozenset)) else items
        if is_plain_object(value):
            return type(value), self.of(vars(value))
        raise IndescribableError

    def of_tensor(self, tensor: Tensor) -> Any:
        tracked = get_proxy_slot(tensor, self.tracer, None)
        if tracked is None or not is_ordinary(tensor):
            raise IndescribableError
        node = tracked.proxy.node  # type: ignore[attr-defined]
        if node not in self.positions:
            self.positions[node] = len(self.nodes)
            self.nodes.append(node)
            self.tensors.append(tensor)
        layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        if not all(type(size) is int for size in (*layout[0], *layout[1], layout[2])):
            raise IndescribableError
        return "tensor", self.positions[node], layout, tensor.dtype, tensor.device, tensor.requires_grad


class Outputs:
    """The tensors in the result of a traced call."""

    def __init__(self, found: Description, traced: Sequence[fx.Node], tracer: Any) -> None:
        self.found, self.traced, self.tracer = found, set(traced), tracer
        self.nodes: list[fx.Node] = []
        self.tensors: list[Tensor] = []
        self.memory = {storage_of(tensor) for tensor in found.tensors}

    def read(self, value: Any) -> Any:
        """Return a nested value with an `Output` for each tensor; raises `IndescribableError` for one that may share memory."""
        if type(value) in SIMPLE:
            return value
        if type(value) in (list, tuple):
            return type(value)(map(self.read, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.read(item)) for key, item in value.items())
        tracked = get_proxy_slot(value, self.tracer, None) if isinstance(value, Tensor) else None
        if tracked is None:
            raise IndescribableError
        for tensors, given in ((self.found.tensors, True), (self.tensors, False)):
            for number, tensor in enumerate(tensors):
                if tensor is value:
                    return Output(number, given)
        node = tracked.proxy.node  # type: ignore[attr-defined]
        if node not in self.traced or value.requires_grad or not is_ordinary(value) or storage_of(value) in self.memory:
            raise IndescribableError
        self.memory.add(storage_of(value))
        self.nodes.append(node)
        self.tensors.append(value)
        return Output(len(self.nodes) - 1, given=False)

    def renamed(self) -> list[int]:
        """Return which of the tensors given have another node now; these nodes become results too."""
        found = []
        for number, (tensor, node) in enumerate(zip(self.found.tensors, self.found.nodes, strict=True)):
            now = get_proxy_slot(tensor, self.tracer).proxy.node  # type: ignore[attr-defined]
            if now is not node:
                if now not in self.traced:
                    raise IndescribableError
                self.nodes.append(now)
                found.append(number)
        return found


class RecordedAttribute:
    """An attribute of a class in whose place each instance has its own; every read of it is recorded."""

    def __init__(self, name: str, own: Any, readers: list[set[tuple[nn.Module, str]]]) -> None:
        self.name, self.own, self.readers = name, own, readers

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        for reads in self.readers if module is not None else ():
            reads.add((module, self.name))
        held = self.own if module is None else vars(module).get(self.name, self.own)
        if held is ABSENT:
            raise AttributeError(self.name)
        return held

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self.name]


def places_of(reads: set[tuple[nn.Module, str]], module: nn.Module) -> Iterator[Place]:
    """Yield where below the module these attributes were read; of a copy made meanwhile, wherever it may have come from.

    Raises `IndescribableError` if that is not below the module.
    """
    below = {inner: path for path, inner in module.named_modules()}
    for owner, name in reads:
        paths = [below[owner]] if owner in below else [path for inner, path in below.items() if type(inner) is type(owner)]
        if not paths:
            raise IndescribableError
        yield from ((path, name) for path in paths)


def varying_attributes(kind: type, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the attributes with simple values, not equal in all of these modules of one class."""
    names = dict.fromkeys(name for module in modules for name in vars(module) if name not in APART)
    found = []
    for name in names:
        values = [vars(module).get(name, ABSENT) for module in modules]
        simple = all(value is ABSENT or type(value) in SIMPLE for value in values)
        computed = any(hasattr(vars(base)[name], "__set__") for base in kind.__mro__ if name in vars(base))
        if simple and not computed and any(value != values[0] or type(value) is not type(values[0]) for value in values):
            found.append(name)
    return tuple(found)


def is_known(module: nn.Module) -> bool:
    """Return whether a module has no hooks, and code of its own that Python runs."""
    hooked = any(vars(module).get(name) for name in HOOKS)
    return not hooked and not isinstance(module, torch.jit.ScriptModule)


def has_global_hooks() -> bool:
    """Return whether hooks on calls are registered for all modules of the process."""
    held = ((name, value) for name, value in vars(nn.modules.module).items() if name.startswith("_global_"))
    return any(value for name, value in held if isinstance(value, dict) and not name.endswith("_registration_hooks"))


def is_plain_object(value: Any) -> bool:
    """Return whether all that an object holds is in its `__dict__`."""
    bases = type(value).__mro__
    return (
        hasattr(value, "__dict__")
        and all(base is object or (base.__flags__ & HEAP_TYPE and not vars(base).get("__slots__")) for base in bases)
        and type(value).__basicsize__ <= PLAIN_SIZE
    )


class Plain:
    """A class of which nothing but its instances' `__dict__` is known."""


HEAP_TYPE = 1 << 9  # the flag of classes that are written in Python
PLAIN_SIZE = Plain.__basicsize__  # larger instances hold more than Python shows


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor of the trace is dense and of no further class."""
    return type(tensor) in (FakeTensor, nn.Parameter, Tensor) and tensor.layout is torch.strided


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def empty_like(tensor: Tensor) -> Tensor:
    """Return a new fake tensor of the same type and layout."""
    assert isinstance(tensor, FakeTensor)
    with tensor.fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def nodes_after(begin: fx.Node) -> Iterator[fx.Node]:
    node = begin.next
    while node.op != "root":
        yield node
        node = node.next


def require_pure(nodes: Sequence[fx.Node], given: set[fx.Node]) -> None:
    """Raises `IndescribableError` unless the nodes compute with what is given and their own values only, and write to nothing."""
    own = set(nodes)
    for node in nodes:
        target = node.target
        pure = target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable)
        if (
            node.op != "call_function"
            or not pure
            or not all(operand in own or operand in given for operand in node.all_input_nodes)
        ):
            raise IndescribableError


# ── After the trace ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def expand(graph: fx.Graph, calls: Sequence[Call]) -> None:
    """Replace each repeated call in the graph by a copy of its trace, and remove the marks.

    Raises `RuntimeError` if a value inside a trace left it otherwise than as a result: the repeated calls have no such value.
    """
    traces: dict[int, dict[str, fx.Node]] = defaultdict(dict)
    marks = graph.find_nodes(op="call_function", target=REPEAT)
    for node in marks:
        _, number, _, role = node.args
        if role != AGAIN:
            traces[number][role] = node
            continue
        begin, end = traces[number][BEGIN], traces[number][END]
        require_closed(begin, end)
        copy_trace(graph, node, begin, end, calls)
    for node in reversed(marks):
        graph.erase_node(node)


def require_closed(begin: fx.Node, end: fx.Node) -> None:
    """Raises `RuntimeError` if a value computed between the marks is used elsewhere and is no result."""
    results: Any = end.args[0]
    inside = set(itertools.takewhile(lambda node: node is not end, nodes_after(begin)))
    for node in inside.difference(results):
        if not inside.issuperset(node.users):
            raise RuntimeError(f"{node.name} is used outside the call that computes it")


def copy_trace(graph: fx.Graph, again: fx.Node, begin: fx.Node, end: fx.Node, calls: Sequence[Call]) -> None:
    """Insert a copy of the nodes between `begin` and `end` before `again`, and use its results instead."""
    given: Any = zip(begin.args[0], again.args[0], strict=True)  # type: ignore[arg-type]
    copies: dict[fx.Node, fx.Node] = dict(given)
    first, last, start = (int(str(node.args[2])) for node in (begin, end, again))  # numbers of calls
    later = start - first
    moved = {(call.path, call.index): calls[call.number + later] for call in calls[first:last]}
    outer, depth = again.meta.get("nn_module_stack") or {}, len(begin.meta.get("nn_module_stack") or {})

    def stack_of(node: fx.Node) -> dict[str, Any]:
        stack = dict(outer)
        for key, (path, kind) in list((node.meta.get("nn_module_stack") or {}).items())[depth:]:
            call = moved[path, int(key.partition("@")[2] or 0)]
            stack[f"{call.path}@{call.index}" if call.index else call.path] = call.path, kind
        return stack

    with graph.inserting_before(again):
        for node in itertools.takewhile(lambda node: node is not end, nodes_after(begin)):
            if node.target is REPEAT:
                continue
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target is torch.ops.retrofit.mark.default:
                source, number, *others = copy.args
                copy.args = source, int(str(number)) + later, *others
            copy.meta = {**node.meta, "nn_module_stack": stack_of(node)}
    results: Any = end.args[0]
    for user in list(again.users):
        user.replace_all_uses_with(copies[results[user.args[1]]])
        graph.erase_node(user)
