"""A captured program: the graph, the contents of its placeholders, and every module call with its inputs and outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from retrofit.inputs.module_calls import watched

MUTATION = "mutation "  # before a number: the name of an output that is the new value of a buffer

Key = int | str | None


@dataclasses.dataclass
class Call:
    """One call of one module: the node passed as each argument, and the node returned as each output."""

    path: str
    index: int  # 0 for the first call of that module, 1 for its second
    number: int  # position among all calls, in the order of their starts
    parent: Call | None
    names: tuple[str, ...] = ()  # the other paths of its module, by which it may have been called
    inputs: dict[Key, fx.Node] = dataclasses.field(default_factory=dict)
    outputs: dict[Key, fx.Node] = dataclasses.field(default_factory=dict)
    kept: dict[str, fx.Node] = dataclasses.field(default_factory=dict)  # by attribute: the tensors that its code left on the module
    copied: bool = False  # whether a copy of the module ran, as where keywords are injected

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def chain(self) -> Iterator[Call]:
        """Yield this call and the calls around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def encloses(self, other: Call) -> bool:
        """Return whether `other` is this call, or was made during it."""
        return any(call is self for call in other.chain)


@dataclasses.dataclass
class Program:
    """A captured model: its graph, the contents of each placeholder, its module calls."""

    graph: fx.Graph
    parameters: dict[fx.Node, str]  # placeholder → parameter name
    buffers: dict[fx.Node, str]  # placeholder → buffer name
    constants: dict[fx.Node, str]
    inputs: dict[fx.Node, str]  # placeholder → argument name
    outputs: dict[str, fx.Node]  # output name → node
    calls: list[Call]  # the first is the root call, of the model itself
    owner: dict[fx.Node, Call]  # the innermost call in which a node was computed
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of the constants and buffers
    examples: dict[str, Any] = dataclasses.field(default_factory=dict)  # the arguments it was captured with, by name
    returns: Any = None  # the class of the model's output
    constant_outputs: dict[str, Any] = dataclasses.field(default_factory=dict)  # by name: outputs that are not tensors
    results: tuple[str, ...] = ()  # the names of all outputs, in order
    layout: Any = None  # their nesting, as a pytree spec of torch
    branches: bool = False  # whether the code branches on values: the program then holds the branches that these inputs take
    copies: dict[fx.Node, Call] = dataclasses.field(default_factory=dict)  # the calls of copies, whose nodes have an outer owner

    @property
    def root(self) -> Call:
        """Return the call of the model itself."""
        return self.calls[0]

    def replace_node(self, gone: fx.Node, by: fx.Node) -> None:
        """Replace the node `gone` by the node `by` in all users, outputs and calls, and erase it."""
        gone.replace_all_uses_with(by)
        of_calls = (table for call in self.calls for table in (call.inputs, call.outputs, call.kept))
        tables: list[dict[Any, fx.Node]] = [self.outputs, *of_calls]
        for table in tables:
            table.update({key: by for key, value in table.items() if value is gone})
        self.graph.erase_node(gone)
        self.owner.pop(gone, None)


# ── Read from an exported program ─────────────────────────────────────────────────────────────────────────────────────────────────


SLICED = re.compile(r"slice\((None|\d+), (?:None|-?\d+), (None|\d+)\)\.(\d+)")


# ── Module stacks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def calls_from_metadata(exported: torch.export.ExportedProgram) -> list[Call]:
    """Return the module calls in the metadata of an exported program, which does not contain their inputs and outputs."""
    calls = {("", 0): Call("", 0, 0, None)}
    for node in exported.graph.nodes:
        parent = calls["", 0]
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            place = (path, int(key.partition("@")[2] or 0))
            parent = calls.setdefault(place, Call(*place, len(calls), parent))
    return list(calls.values())


def innermost_call(node: fx.Node, by_path: Mapping[tuple[str, int], Call], root: Call) -> Call:
    """Return the call in which a node was traced, by its module stack."""
    call = base = root
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        path, index = without_slices(path), int(key.partition("@")[2] or 0)
        found = by_path.get((path, index))
        if found is not None:
            call = base = found
        else:
            call = call_below(path, index, base, by_path) or call
    return call


def call_below(path: str, index: int, base: Call, by_path: Mapping[tuple[str, int], Call]) -> Call | None:
    """Return the call of the module at `path` below the module of `base`, possibly inside a wrapper; None if there is none.

    If a module has two names, the tracer restarts its paths at a module that the code did not reach by its name. Its call counter,
    `index`, then belongs either to the module or to the one at which the path restarted.
    """
    for around in ("", "layer.", "layer.layer."):
        for count in (index, base.index):
            found = by_path.get((f"{base.path}.{around}{path}", count))
            if base.path and found is not None and base.encloses(found):
                return found
    return None


def without_slices(path: str) -> str:
    """Return the module's own path, `layers.1`, for one through a slice of a module list, `layers.slice(None, 4, None).1`.

    If a module has two names, the tracer records the expression by which each was reached.
    """
    return SLICED.sub(lambda found: str(slice_bound(found[1], 0) + slice_bound(found[2], 1) * int(found[3])), path)


def slice_bound(text: str, otherwise: int) -> int:
    """Return a start or step as written in a slice, or its default."""
    return otherwise if text == "None" else int(text)


KEPT = "attribute "  # before the name, in the marker of a tensor that a call stored on its module


# ── Markers ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Marker:
    """Marks the tensors on one side of one call."""

    def __init__(self, call: int, leaves: bool) -> None:
        self.call, self.leaves = call, leaves
        self.marked: dict[int, torch.Tensor] = {}  # by the identity of the tensor

    def mark(self, item: Any, key: Key) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if add_marker(item, self.call, self.leaves, repr(key)):
            return item
        if id(item) not in self.marked:  # only once: modules compare arguments with `is`
            self.marked[id(item)] = torch.ops.retrofit.mark(item, self.call, self.leaves, repr(key))
        return self.marked[id(item)]

    def mark_all(self, value: Any) -> Any:
        """Return `value` with a marker on every tensor in it, one level of tuple, list or mapping deep."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.mark(item, position) for position, item in enumerate(value)))
        if isinstance(value, (tuple, list)):
            return type(value)(self.mark(item, position) for position, item in enumerate(value))
        if isinstance(value, MutableMapping):
            for key in list(value):
                if isinstance(value[key], torch.Tensor):
                    value[key] = self.mark(value[key], key)
            return value
        return self.mark(value, None)


def add_marker(item: torch.Tensor, *how: Any) -> bool:
    """Add a marker of `item` to the graph being traced; return whether the trace knows its node.

    Adds the node without running the operation: a dispatch under fake tensors takes longer than all other work for a call.
    """
    mode = get_proxy_mode()
    tracked = None if mode is None else get_proxy_slot(item, mode.tracer, None)
    if mode is None or tracked is None:  # a constant, or a tensor inside a functional transform
        return False
    source = tracked.proxy.node  # type: ignore[attr-defined]
    marker = mode.tracer.create_node("call_function", torch.ops.retrofit.mark.default, (source, *how), {})
    marker.meta["val"] = source.meta["val"]
    return True


class CallMarker:
    """Records every call of a submodule of a model, and marks its tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = [Call("", 0, 0, None)]
        self.stack = [self.calls[0]]
        self.held: list[dict[str, torch.Tensor]] = []  # the attributes of the modules on the stack when they were called
        self.counts: dict[str, int] = {}
        self.modules = dict(model.named_modules())
        paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(module, []).append(path)
        self.other_names = {first: tuple(others) for first, *others in paths.values()}

    @contextlib.contextmanager
    def active(self) -> Iterator[CallMarker]:
        """Within this context calls are recorded and marked."""
        names = [(module, set(vars(module))) for module in self.modules.values()]
        try:
            inner = {path: module for path, module in self.modules.items() if path}
            with watched(inner, before=self.begin, after=self.end):
                yield self
        finally:
            for module, known in names:  # `torch.export` restores existing attributes and leaves new ones: tensors of the trace
                for name in tensor_attributes(module).keys() - known:
                    delattr(module, name)

    def add(self, path: str, parent: Call) -> Call:
        call = Call(path, self.counts.get(path, 0), len(self.calls), parent, self.other_names.get(path, ()))
        self.counts[path] = call.index + 1
        self.calls.append(call)
        return call

    def begin(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.add(path, self.stack[-1])
        call.copied = vars(module) is not vars(self.modules[path])  # `module` may be a proxy
        self.stack.append(call)
        self.held.append(tensor_attributes(module))
        marker = Marker(call.number, leaves=False)
        return marker.mark_all(tuple(args)), marker.mark_all(dict(kwargs))

    def end(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call, before = self.stack.pop(), self.held.pop()
        for name, value in tensor_attributes(module).items():
            if value is not before.get(name):
                add_marker(value, call.number, True, KEPT + name)
        return Marker(call.number, leaves=True).mark_all(output)

    def repeat(self, calls: range, path: str, by: str) -> list[Call]:
        """Record calls like these, made inside a call of the module at `path`, for the current call, of the module at `by`."""
        made: dict[Call | None, Call] = {}
        for number in calls:
            call = self.calls[number]
            made[call] = self.add(by + call.path.removeprefix(path), made.get(call.parent, self.stack[-1]))
            made[call].copied = call.copied
        return list(made.values())


def tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that are attributes of the module, but neither parameters nor buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def restore_users(graph: fx.Graph) -> None:
    """Restore the users of every node: `torch.export` clears those of the result of a region under `no_grad`."""
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            operand.users.setdefault(node)


def remove_markers(graph: fx.Graph, calls: list[Call]) -> tuple[dict[fx.Node, Call], dict[fx.Node, Call]]:
    """Remove the markers and set the calls' inputs and outputs; return the innermost call of every node.

    The tracer does not see the calls of copies. Return also these, of the nodes that they computed.
    """
    owner: dict[fx.Node, Call] = {}
    copies: dict[fx.Node, Call] = {}
    under_way = calls[0]
    mark = torch.ops.retrofit.mark.default
    by_path = CallsByPath(calls)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        if node.target is mark:
            source, number, leaves, key = node.args
            call = calls[number]
            under_way = (call.parent or call) if leaves else call
            if not leaves:
                by_path.under_way[call.path] = call
            if key.startswith(KEPT):
                call.kept[key.removeprefix(KEPT)] = source
            else:
                (call.outputs if leaves else call.inputs).setdefault(parse_key(key), source)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        owner[node] = innermost_call(node, by_path, calls[0])
        if runs_copies(owner[node], under_way):
            copies[node] = under_way
    return owner, copies


def runs_copies(call: Call, inner: Call) -> bool:
    """Return whether `inner` was made during `call`, and it and every call between them is one of a copy."""
    between = list(itertools.takewhile(lambda around: around is not call, inner.chain))
    return bool(between) and all(around.copied for around in between)


class CallsByPath(dict[tuple[str, int], Call]):
    """Calls by path and index; for a module with several paths, whose calls the tracer counts by path, the current call."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__({(call.path, call.index): call for call in calls})
        self.first = {path: call.path for call in calls if call.names for path in (call.path, *call.names)}
        self.under_way: dict[str, Call] = {}  # by the first path of a module: the call that began last, in the order of the trace

    def get(self, key: tuple[str, int], default: Any = None) -> Any:
        return self.under_way.get(self.first.get(key[0], "")) or super().get(key, default)


def parse_key(text: str) -> Key:
    """Return the key from its `repr` in a marker."""
    if text == "None":
        return None
    return int(text) if text.lstrip("-").isdigit() else text[1:-1]


# ── Programs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_program(exported: torch.export.ExportedProgram, calls: list[Call]) -> Program:
    """Return the program of an exported model; its markers become the inputs and outputs of `calls`."""
    graph = exported.graph
    signature = exported.graph_signature
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    parameters = {by_name[key]: name for key, name in signature.inputs_to_parameters.items() if key in by_name}
    buffers = {by_name[key]: name for key, name in signature.inputs_to_buffers.items() if key in by_name}
    constants = {by_name[key]: name for key, name in signature.inputs_to_lifted_tensor_constants.items() if key in by_name}
    given = (spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT)
    named_values = (argument.name for argument in given if not isinstance(argument, ConstantArgument))  # a constant is not read
    inputs = {by_name[name]: name for name in named_values if name in by_name}
    owner, copies = remove_markers(graph, calls)
    (result,) = (node for node in graph.nodes if node.op == "output")
    outputs = dict(zip(output_names(exported), result.args[0], strict=False))
    named = {name: node for name, node in outputs.items() if isinstance(node, fx.Node)}
    others = {name: value for name, value in outputs.items() if name not in named}
    calls[0].inputs = {name: node for node, name in inputs.items()}
    calls[0].outputs = {name: node for name, node in named.items()}  # noqa: C416
    held = {**exported.state_dict, **exported.constants}
    values = {name: held[name] for name in (*constants.values(), *buffers.values()) if isinstance(held.get(name), torch.Tensor)}
    layout = exported.call_spec.out_spec
    return Program(
        graph,
        parameters,
        buffers,
        constants,
        inputs,
        named,
        calls,
        owner,
        values,
        returns=layout.type,
        constant_outputs=others,
        results=tuple(name for name in outputs if not name.startswith(MUTATION)),
        layout=layout,
        copies=copies,
    )


def output_names(exported: torch.export.ExportedProgram) -> list[str]:
    """Return a name for each flat output: its key in the mapping that holds it, or its position."""
    names: list[str] = []
    mutated = len(exported.graph_signature.output_specs) - len(exported.graph_signature.user_outputs)
    names.extend(f"{MUTATION}{position}" for position in range(mutated))
    spec = exported.call_spec.out_spec
    dummy = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(dummy)
    for path, _ in leaves:
        names.append(".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path) or "output")
    return names


# ── Graph modules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Graph(fx.GraphModule):
    """A graph module whose copies keep all its attributes: config, examples, the record of rewrites."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        new: Graph = super().__deepcopy__(memo)  # type: ignore[assignment]
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key not in new.__dict__})
        return new


def register_tensor(root: nn.Module, name: str, value: Tensor, saved: bool = True) -> None:
    """Register `value` as the parameter or buffer `name` of `root`; plain modules are added for the path to it."""
    path, _, leaf = name.rpartition(".")
    owner = root
    for piece in filter(None, path.split(".")):
        if not isinstance(getattr(owner, piece, None), nn.Module):
            owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    elif leaf not in owner._buffers:
        owner.register_buffer(leaf, value, persistent=saved)
