"""Capture a model as one ATen graph that remembers every module call: `torch.export` under fake tensors.

While the model is traced, hooks put a marker on each tensor that enters or leaves a module call. The markers are taken out of the
graph again and become `Program.calls`: which node entered which call as which argument, and which left it as which output.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from retrofit.errors import CaptureError
from retrofit.program.autograd_notes import record_autograd_notes
from retrofit.program.dynamic_shapes import with_dynamic_shapes
from retrofit.program.functionalize import functionalize, remove_inference_only_ops
from retrofit.program.recorded_answers import record_answers, replay_answers

LIBRARY = torch.library.Library("retrofit", "DEF")
LIBRARY.define("mark(Tensor x, int call, bool leaves, str key) -> Tensor")
LIBRARY.impl("mark", lambda x, call, leaves, key: x.clone(), "CompositeExplicitAutograd")
fx.node.has_side_effect(torch.ops.retrofit.mark.default)  # what a module call reads is run, whether or not the outputs hang on it

SLICED = re.compile(r"slice\((None|\d+), (?:None|-?\d+), (None|\d+)\)\.(\d+)")
Key = int | str | None


@dataclasses.dataclass
class Call:
    """One call of one module: what entered as which argument, what left as which output."""

    path: str
    index: int  # the how-manieth call of that module
    number: int  # position among all calls, in the order they began
    parent: Call | None
    inputs: dict[Key, fx.Node] = dataclasses.field(default_factory=dict)
    outputs: dict[Key, fx.Node] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def chain(self) -> Iterator[Call]:
        """This call and the calls it was made in, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def encloses(self, other: Call) -> bool:
        return any(call is self for call in other.chain)


@dataclasses.dataclass
class Program:
    """A captured model: its graph, what each placeholder stands for, its module calls."""

    graph: fx.Graph
    parameters: dict[fx.Node, str]  # placeholder → parameter name
    buffers: dict[fx.Node, str]  # placeholder → buffer name
    constants: dict[fx.Node, str]
    inputs: dict[fx.Node, str]  # placeholder → name of the argument
    outputs: dict[str, fx.Node]  # name of the output → node
    calls: list[Call]  # the root call, of the model itself, first
    owner: dict[fx.Node, Call]  # the innermost call a node was computed in
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of the constants and buffers
    examples: dict[str, Any] = dataclasses.field(default_factory=dict)  # the arguments it was captured with, by name
    returns: Any = None  # the class that the model's outputs come in
    branches: bool = False  # whether the model's code branches on values, and the program is that of the branches these inputs take

    @property
    def root(self) -> Call:
        return self.calls[0]


class Marker:
    """Puts markers on the tensors of one side of one call, one marker a tensor: modules compare arguments with `is`."""

    def __init__(self, call: int, leaves: bool) -> None:
        self.call, self.leaves = call, leaves
        self.done: dict[int, torch.Tensor] = {}

    def mark(self, item: Any, key: Key) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in self.done:
            self.done[id(item)] = torch.ops.retrofit.mark(item, self.call, self.leaves, repr(key))
        return self.done[id(item)]

    def mark_all(self, value: Any) -> Any:
        """`value` with a marker on every tensor in it, one level of tuple, list or mapping deep."""
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


@contextlib.contextmanager
def marked_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Within this context every call of a submodule of `model` is recorded and its tensors are marked."""
    calls = [Call("", 0, 0, None)]
    stack = [calls[0]]
    counts: dict[str, int] = {}
    handles: list[Any] = []

    def before(path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call(path, counts.get(path, 0), len(calls), stack[-1])
            counts[path] = call.index + 1
            calls.append(call)
            stack.append(call)
            marker = Marker(call.number, leaves=False)
            return marker.mark_all(tuple(args)), marker.mark_all(dict(kwargs))

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return Marker(stack.pop().number, leaves=True).mark_all(output)

    try:
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Within this context no config in the model asks for a cache, which is no value of the graph."""
    found = [getattr(module, "config", None) for module in model.modules()]
    configs: dict[int, Any] = {id(config): config for config in found if hasattr(config, "use_cache")}
    before = {key: config.use_cache for key, config in configs.items()}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for key, config in configs.items():
            config.use_cache = before[key]


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Within this context the tracer does not ask which line of the code each node comes from: asking takes long."""
    settings: Any = fx.config
    before = getattr(settings, "do_not_emit_stack_traces", False)
    settings.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        settings.do_not_emit_stack_traces = before


@contextlib.contextmanager
def silence_tracer() -> Iterator[None]:
    """Within this context the tracer's warnings and the graphs it prints when it fails are not shown."""
    logs = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


def capture(model: nn.Module, example_inputs: Mapping[str, Any], *, dynamic: bool = False, training: bool = False) -> Program:
    """The program that `model` runs on inputs like `example_inputs` (arguments by name), in evaluation mode if not in `training`.

    Nothing is computed and no weight is copied, but for code that branches on the values of tensors: there the model is run,
    and the program is that of the branches these inputs take. A `dynamic` program runs on inputs of other sizes too, as far as the
    model's code does, and on any values. Raises `CaptureError` where the model cannot be traced.
    """
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        exported, calls, branches = attempted(model, dict(example_inputs), dynamic)
    except Exception as error:  # whatever the model's own code raises
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"{type(model).__name__} could not be captured as a graph",
            why=f"{type(error).__name__}: {first}",
            remedy="pass example_inputs= that its forward accepts; code that branches on the values of tensors cannot be captured",
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    return dataclasses.replace(read_program(exported, calls), branches=branches, examples=dict(example_inputs))


def attempted(model: nn.Module, inputs: dict[str, Any], dynamic: bool) -> tuple[torch.export.ExportedProgram, list[Call], bool]:
    """`export`, and where that fails with a mask of ones, or with values, and whether it was that; raises what it raised before."""
    without_values = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    try:
        return *export(model, inputs, dynamic), False
    except Exception as error:
        why = error
    masks = missing_masks(model, inputs)
    if masks:
        try:
            return *export(model, inputs | masks, dynamic), False
        except Exception as error:
            why = error
    if not dynamic and (without_values or isinstance(why, (GuardOnDataDependentSymNode, RuntimeError, TypeError))):
        with contextlib.suppress(Exception):
            able, given = with_values(model, inputs | masks)
            with torch.no_grad(), silence_tracer(), no_cache(able), record_answers() as answers:
                able(**given)
            with replay_answers(answers):
                return *export(able, given), bool(answers)
    raise why


def with_values(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """`model` and its inputs; where they have no values a copy that has some: which branches are taken hangs little on weights."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model, dict(inputs)
    drawn = copy.deepcopy(model).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in (*drawn.parameters(), *drawn.buffers()):
        tensor.data.normal_(std=0.02, generator=generator) if tensor.is_floating_point() else tensor.data.zero_()
    given = {name: torch.ones_like(one, device="cpu") if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}
    return drawn, given


@contextlib.contextmanager
def cast_modules_stay() -> Iterator[None]:
    """Within this context a module that is cast to what it is stays as it is: a tracer cannot exchange its weights."""
    cast = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        held = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
        same = all((dtype or one.dtype) == one.dtype and (device or one.device) == one.device for one in held)
        return module if same else cast(module, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = cast  # type: ignore[method-assign]


def export(model: nn.Module, inputs: dict[str, Any], dynamic: bool = False) -> tuple[torch.export.ExportedProgram, list[Call]]:
    """The model as an exported program in functional form, with markers, and the calls they belong to."""
    if not dynamic:
        with without_lines():  # what becomes a graph module keeps them
            return traced(model, inputs, None)
    # of what a forward gathers, torch.export wants the rest back that the code may have taken out: only tensors
    named = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in inputs.items() if name in named or isinstance(value, torch.Tensor)}
    return with_dynamic_shapes(model, inputs, lambda sizes: traced(model, inputs, sizes))


def traced(
    model: nn.Module, inputs: dict[str, Any], sizes: dict[str, Any] | None
) -> tuple[torch.export.ExportedProgram, list[Call]]:
    """`export`, for extents that are free as `sizes` tell."""
    notes = contextlib.nullcontext() if sizes is None else record_autograd_notes()
    with marked_calls(model) as calls, torch.no_grad(), silence_tracer(), no_cache(model), cast_modules_stay():
        with notes:
            exported = torch.export.export(as_called(model), (), inputs, dynamic_shapes=sizes, strict=False)
        if not functionalize(exported.graph):
            exported = exported.run_decompositions({})  # functional form, no operation taken apart
        remove_inference_only_ops(exported.graph)
    return exported, calls


def as_called(model: nn.Module) -> nn.Module:
    """`model` as a module that is traced by calling it.

    A graph module's graph is interpreted by `torch.export`, which passes by its hooks and by whatever stands in place of its
    forward, and takes its arguments in the order in which they were given.
    """
    if not isinstance(model, fx.GraphModule):
        return model
    called: nn.Module = object.__new__(type("Graph", (nn.Module,), {"forward": type(model).forward}))
    called.__dict__ = model.__dict__  # the same modules, parameters and hooks
    return called


def missing_masks(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All-ones attention masks, where the model takes one, was given ids and was given none: some code needs it when traced."""
    taken = inspect.signature(model.forward).parameters
    sides = [(f"{side}attention_mask", inputs.get(f"{side}input_ids")) for side in ("", "decoder_")]
    return {name: torch.ones_like(ids) for name, ids in sides if name in taken and ids is not None and inputs.get(name) is None}


def read_program(exported: torch.export.ExportedProgram, calls: list[Call]) -> Program:
    """The program of an exported model, its markers turned into the inputs and outputs of `calls`."""
    graph = exported.graph
    signature = exported.graph_signature
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    parameters = {by_name[key]: name for key, name in signature.inputs_to_parameters.items() if key in by_name}
    buffers = {by_name[key]: name for key, name in signature.inputs_to_buffers.items() if key in by_name}
    constants = {by_name[key]: name for key, name in signature.inputs_to_lifted_tensor_constants.items() if key in by_name}
    inputs = {by_name[name]: name for name in signature.user_inputs if isinstance(name, str) and name in by_name}
    owner = take_marks(graph, calls)
    (result,) = (node for node in graph.nodes if node.op == "output")
    outputs = dict(zip(output_names(exported), result.args[0], strict=False))
    named = {name: node for name, node in outputs.items() if isinstance(node, fx.Node)}
    calls[0].inputs = {name: node for node, name in inputs.items()}
    calls[0].outputs = {name: node for name, node in named.items()}  # noqa: C416
    held = {**exported.state_dict, **exported.constants}
    values = {name: held[name] for name in (*constants.values(), *buffers.values()) if isinstance(held.get(name), torch.Tensor)}
    kind = exported.call_spec.out_spec.type
    return Program(graph, parameters, buffers, constants, inputs, named, calls, owner, values, returns=kind)


def calls_of(exported: torch.export.ExportedProgram) -> list[Call]:
    """The module calls that an exported program remembers; of what entered and left them it says nothing."""
    calls = {("", 0): Call("", 0, 0, None)}
    for node in exported.graph.nodes:
        parent = calls["", 0]
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            place = (path, int(key.partition("@")[2] or 0))
            parent = calls.setdefault(place, Call(*place, len(calls), parent))
    return list(calls.values())


def output_names(exported: torch.export.ExportedProgram) -> list[str]:
    """A name for each flat output: the key of the mapping it stands in, or its position."""
    names: list[str] = []
    mutated = len(exported.graph_signature.output_specs) - len(exported.graph_signature.user_outputs)
    names.extend(f"mutation {position}" for position in range(mutated))
    spec = exported.call_spec.out_spec
    dummy = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(dummy)
    for path, _ in leaves:
        names.append(".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path) or "output")
    return names


def take_marks(graph: fx.Graph, calls: list[Call]) -> dict[fx.Node, Call]:
    """The graph without its markers; each call knows its inputs and outputs; the innermost call of every node is returned."""
    owner: dict[fx.Node, Call] = {}
    mark = torch.ops.retrofit.mark.default
    by_path: dict[tuple[str, int], Call] = {(call.path, call.index): call for call in calls}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        if node.target is mark:
            source, number, leaves, key = node.args
            call = calls[number]
            (call.outputs if leaves else call.inputs).setdefault(parse_key(key), source)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        owner[node] = innermost_call(node, by_path, calls[0])
    return owner


def parse_key(text: str) -> Key:
    if text == "None":
        return None
    return int(text) if text.lstrip("-").isdigit() else text[1:-1]


def innermost_call(node: fx.Node, by_path: Mapping[tuple[str, int], Call], root: Call) -> Call:
    """The call a node was made in, from the module stack that the tracer wrote down."""
    call = base = root
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        path, index = unsliced(path), int(key.partition("@")[2] or 0)
        found = by_path.get((path, index))
        if found is not None:
            call = base = found
        else:
            call = reached(path, index, base, by_path) or call
    return call


def reached(path: str, index: int, base: Call, by_path: Mapping[tuple[str, int], Call]) -> Call | None:
    """The call of the module that `path` leads to from that of `base`, perhaps through modules around it; None where it does not.

    Where some module has two names the tracer begins anew behind a module that its code did not reach by its name. It then counts
    calls, up to `index`, either of the module or of the one it began behind.
    """
    for around in ("", "layer.", "layer.layer."):
        for count in (index, base.index):
            found = by_path.get((f"{base.path}.{around}{path}", count))
            if base.path and found is not None and base.encloses(found):
                return found
    return None


def unsliced(path: str) -> str:
    """A path by which a slice of a module list was gone through, `layers.slice(None, 4, None).1`, as the module's own, `layers.1`.

    Where some module has two names the tracer writes down how each was reached.
    """
    return SLICED.sub(lambda found: str(number(found[1], 0) + number(found[2], 1) * int(found[3])), path)


def number(text: str, otherwise: int) -> int:
    return otherwise if text == "None" else int(text)
