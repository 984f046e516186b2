"""A model as an FX graph module: the same function as one graph of ATen operations, nested into modules where its parts are.

The children of a graph module are the regions of its program: the calls of the model's own modules under their own names, and
layers, attentions, feed-forwards, embeddings and head where its code is one long function. Parameters are the model's own, under
their own names within the module that reads them. Batch and length are free as far as the model's code leaves them so, dropout
follows `train()` and `eval()`, and constants follow the inputs to another device.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.inspection import read_anatomy
from retrofit.errors import CaptureError, DoesNotFitError, NoTransformerError
from retrofit.graphs.attention_dropout import AttentionWithDropout, attention_dropouts
from retrofit.graphs.default_masks import agrees_without_masks
from retrofit.graphs.regions import Region, regions
from retrofit.graphs.stop_gradient import custom_backwards, same_gradients, stop_gradient_nodes
from retrofit.graphs.structural_equality import is_structurally_equal
from retrofit.graphs.unflatten import unflatten
from retrofit.graphs.weight_slices import PICKING, Slices, as_parameters, weight_slices
from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, POINTWISE, op, shape
from retrofit.program.capture import capture, missing_masks
from retrofit.program.dataflow import Dataflow, backward_slice, forward_slice
from retrofit.program.functionalize import mutates
from retrofit.program.module_stacks import calls_from_metadata
from retrofit.program.program import Program
from retrofit.program.reading import read_program
from retrofit.runtime.example_inputs import named_inputs

QUIET = ("_assert", "sym_constrain", "_guards")
KEPT = ("val", "stack_trace")  # of what is known of a node: its value's shape and dtype, and the line of the model's code


def graph_module(model: nn.Module, example_inputs: Any = None) -> fx.GraphModule:
    """`model` as a graph module on the same parameters; raises `CaptureError` where it cannot be captured."""
    inputs = named_inputs(model, example_inputs)
    nested = next((name for name, value in inputs.items() if not isinstance(value, Tensor) and holds_a_tensor(value)), None)
    if nested is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be made a graph module",
            why=f"its argument {nested} is no tensor, but a {type(inputs[nested]).__name__}",
            remedy="rewrite its modules (emit='module'), or wrap it in a module that takes tensors",
        )
    program = captured(model, inputs)
    holder = next((user for node in program.graph.nodes if node.op == "get_attr" for user in node.users), None)
    if holder is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be made a graph module",
            why=f"{op(holder)} runs a part of its code as a graph of its own",
            remedy="rewrite its modules (emit='module')",
        )
    made = emitted(model, program)
    masks = {name: mask for name, mask in missing_masks(model, inputs).items() if name in program.inputs.values()}
    if masks and not agrees_without_masks(model, made, inputs):
        return graph_module(model, inputs | masks)  # which asks for them
    own = custom_backwards(program)
    if own and not same_gradients(model, made, inputs):
        raise CaptureError(
            f"{type(model).__name__} cannot be made a graph that learns as it does",
            why=f"{own[0]} has a backward of its own, and that is not the derivative of its operations",
            remedy="rewrite its modules (emit='module')",
        )
    made.__dict__["retrofit_examples"] = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return made


def holds_a_tensor(value: Any) -> bool:
    """Whether the value is a tensor, or a mapping or sequence with one in it."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def captured(model: nn.Module, inputs: dict[str, Any]) -> Program:
    """The program of any batch and length; of one example two are made, for a tracer takes an extent of one for a constant."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    if tensors and all(value.shape[0] == 1 for value in tensors.values()):
        with contextlib.suppress(CaptureError):
            return capture(model, inputs | {name: torch.cat([value, value]) for name, value in tensors.items()}, dynamic=True)
    return capture(model, inputs, dynamic=True)


def from_exported(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """An exported program as a graph module with its parameters, as free in its sizes as it was exported, in evaluation mode."""
    model = Holder(exported).eval()
    if any(mutates(node) for node in exported.graph.nodes):
        exported = exported.run_decompositions({})  # a program of its own: the given one stays as it is
    return emitted(model, read_program(exported, calls_from_metadata(exported)))


class Holder(nn.Module):
    """The parameters and buffers of an exported program under their names."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        super().__init__()
        signature = exported.graph_signature
        used = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
        read = {name: exported.state_dict[name] for key, name in signature.inputs_to_parameters.items() if key in used}
        for name in signature.parameters:
            register(self, name, read[name] if name in read else tied_to(exported.state_dict[name], read))
        for name in signature.buffers:
            saved = name not in signature.non_persistent_buffers
            register(self, name, exported.state_dict[name] if saved else exported.constants[name], saved)


def tied_to(held: Tensor, read: dict[str, Tensor]) -> Tensor:
    """Of the parameters that the program reads the one that `held`, which it does not, is another name of; itself where none is.

    An exported program reads a tied parameter under one of its names, and forgets on disk that the others are the same.
    """
    return next((one for one in read.values() if one.shape == held.shape and torch.equal(one, held)), held)


def register(root: nn.Module, name: str, value: Tensor, saved: bool = True) -> None:
    """`value` is the parameter or buffer called `name`, in plain modules where there are none."""
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


def emitted(model: nn.Module, program: Program) -> fx.GraphModule:
    """The graph module of a program of `model`."""
    extents = {node: extents_of(node) for node in program.graph.nodes}  # first of all: whoever compares sizes ties them together
    extents |= {product: extents[reader] for product, reader in unflatten(program, extents).items()}
    anatomy = anatomy_of(model, program)
    flow = Dataflow(program)
    slices = as_parameters(program, weight_slices(model, flow, anatomy))
    if slices:
        extents |= {part: extents_of(part) for part in slices}
        flow, anatomy = Dataflow(program), anatomy_of(model, program)
    whole = Region("", "", 0, len(flow.nodes) - 1) if anatomy is None else regions(anatomy, flow)
    emission = Emission(model, program, flow, slices, extents, 0 if anatomy is None else anatomy.width)
    made = emission.whole(whole)
    keep_names(model, made, {name for name, _ in slices.values()})
    made.train(model.training)
    for name in ("config", "generation_config"):
        if hasattr(model, name):
            setattr(made, name, getattr(model, name))
    return made


def anatomy_of(model: nn.Module, program: Program) -> Anatomy | None:
    """The model's anatomy, None where it is no transformer."""
    try:
        return read_anatomy(model, program)
    except NoTransformerError:
        return None


def keep_names(model: nn.Module, made: nn.Module, slices: set[str]) -> None:
    """Every parameter and saved buffer of the model has its name in the graph module too, the tied and the unread ones included.

    Those that are there in `slices` have not.
    """
    state = set(model.state_dict(keep_vars=True)) - {name.rpartition(".")[0] for name in slices}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    present = {name for name, _ in (*made.named_parameters(remove_duplicate=False), *made.named_buffers(remove_duplicate=False))}
    held = {id(value) for value in (*made.parameters(), *made.buffers())}
    for name, value in named:
        known = name in present or name not in state
        if not known and (id(value) not in held or had_elsewhere(model, value, present)):
            register(made, name, value)


def had_elsewhere(model: nn.Module, value: Tensor, present: set[str]) -> bool:
    """Whether another name of the value is a name in the graph module: it is tied, and this name is one of several."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return any(one is value and name in present for name, one in named)


class Emission:
    """The graph modules made from one program."""

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        flow: Dataflow,
        slices: Slices,
        extents: dict[fx.Node, tuple[Any, ...]],
        width: int,
    ) -> None:
        self.model, self.program, self.flow = model, program, flow
        self.slices, self.extents, self.width = slices, extents, width
        self.results = {node for name, node in program.outputs.items() if not name.startswith("mutation ")}
        self.live = backward_slice(self.results)
        self.learnt = forward_slice(program.parameters, flow.nodes)
        self.dropouts = attention_dropouts(model, program)
        self.stopped = stop_gradient_nodes(program)
        self.weights: dict[fx.Node, bool] = {}
        self.names: dict[int, list[str]] = {}  # of each parameter and buffer, by identity
        for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            self.names.setdefault(id(value), []).append(name)

    def whole(self, region: Region) -> fx.GraphModule:
        """The root: it takes the model's arguments by name and returns what the model returns."""
        inputs = [node for node in self.flow.nodes if node in self.program.inputs]
        inputs.sort(key=self.is_added)  # what need not be given comes last
        part = ModuleBuilder(self, region, inputs)
        ids = {name: part.env[node] for node, name in self.program.inputs.items()}
        for node in part.arguments:
            if self.is_added(node):
                part.env[node].args = (None,)  # its default
                told = ids[self.program.inputs[node].replace("attention_mask", "input_ids")]
                part.env[node] = part.graph.call_function(mask_or_ones, (part.env[node], told))
                part.env[node].meta |= known(node)
            part.env[node] = part.sized(node)
        part.run()
        part.graph.output(self.returned(part))
        return part.finished("Graph")

    def returned(self, part: ModuleBuilder) -> Any:
        """The outputs in the form that the model gives them."""
        values = {name: part.value(node) for name, node in self.program.outputs.items() if not name.startswith("mutation ")}
        kind = self.program.returns
        if kind is None or list(values) == ["output"]:
            return next(iter(values.values()))
        if issubclass(kind, (tuple, list)) and not hasattr(kind, "_fields"):
            return tuple(values.values())
        if kind is dict:
            return values
        return part.graph.call_function(kind, (), {name: value for name, value in values.items() if "." not in name})

    def is_added(self, node: fx.Node) -> bool:
        """Whether the node is a mask that the model was captured with and was not given: it is asked for, but need not be there."""
        examples, name = self.program.examples, self.program.inputs.get(node)
        return bool(examples) and name is not None and name not in examples

    def is_weight(self, node: fx.Node) -> bool:
        """Whether the node is a parameter, buffer or constant, or made of nothing else: it is had anew wherever it is read."""
        if node not in self.weights:
            sources = node.all_input_nodes
            light = op(node) in LAYOUT | CAST | POINTWISE | PICKING and bool(sources) and not is_size(node)
            made = light and all(map(self.is_weight, sources))
            self.weights[node] = node not in self.program.inputs if node.op == "placeholder" else made
        return self.weights[node]

    def common(self, own: list[fx.Node]) -> set[fx.Node]:
        """Of the nodes of a part those that others read too and no parameter has entered, masks say: they are made before it."""
        inside = set(own)
        handed_on = (node for node in own if any(user not in inside and user in self.live for user in node.users))
        found = backward_slice(node for node in handed_on if node not in self.learnt) & inside
        return found if not any(op(node) in DROPOUT for node in found) else set()

    def tensor(self, node: fx.Node, prefix: str) -> tuple[str, Tensor, bool]:
        """The name and value of a placeholder that is no input, and whether it is saved; of several names one with the prefix."""
        program, model = self.program, self.model
        if node in self.slices:
            return *self.slices[node], True
        if node in program.constants:
            name = program.constants[node]
            return f"constants.{name}", program.values[name], False
        name = program.parameters.get(node) or program.buffers[node]
        value = model.get_parameter(name) if node in program.parameters else model.get_buffer(name)
        name = next((one for one in self.names[id(value)] if one.startswith(prefix)), name)
        owner, _, leaf = name.rpartition(".")
        return name, value, leaf not in model.get_submodule(owner)._non_persistent_buffers_set


def keeps_width(node: fx.Node, width: int) -> bool:
    """Whether a change of layout writes out the width of the stream as the last extent, which its operand has too.

    What it is handed may be wider one day.
    """
    before, sizes = shape(node.args[0]) or (), node.args[1]
    written = sizes[-1] if isinstance(sizes, (list, tuple)) and sizes else None
    return len(before) > 1 and type(written) is int and written == before[-1] == width


def leading(node: fx.Node, extents: dict[fx.Node, tuple[Any, ...]]) -> int:
    """How many of the first extents a change of layout leaves as they are, the last apart: fewer tokens may be handed over."""
    pairs = zip(extents[node.args[0]][:-1], extents[node][:-1], strict=False)  # type: ignore[index]
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def known(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in KEPT if key in node.meta}


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number."""
    return not isinstance(node.meta.get("val"), (Tensor, list, tuple))


class ModuleBuilder:
    """One graph module in the making."""

    def __init__(self, emission: Emission, region: Region, arguments: list[fx.Node]) -> None:
        self.emission, self.region, self.arguments = emission, region, arguments
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.elsewhere: set[fx.Node] = set()  # the nodes among the region's that are made before it
        self.parts: dict[str, tuple[str, nn.Module]] = {}  # inside this one, with the path of the module whose call each is
        names = emission.program.inputs
        for node in arguments:
            self.env[node] = self.graph.placeholder(names.get(node, node.name))
            self.env[node].meta |= known(node)

    def sized(self, node: fx.Node) -> fx.Node:
        """The argument, of the sizes that the model's code fixed when it was captured."""
        sizes = tuple(size if isinstance(size, int) else None for size in self.emission.extents[node])
        if not any(size is not None for size in sizes):
            return self.env[node]
        made = self.graph.call_function(of_size, (self.env[node], self.emission.program.inputs[node], sizes))
        made.meta |= known(node)
        return made

    def run(self) -> None:
        """Every node of the region is in the graph, those of the regions inside it as calls."""
        flow, position = self.emission.flow, self.region.first
        starts = {one.first: one for one in self.region.inside}
        while position <= self.region.last:
            if position in starts:
                inner = starts[position]
                self.call(inner)
                position = inner.last + 1
                continue
            node = flow.nodes[position]
            computes = node.op == "call_function" and not is_size(node)  # sizes are had where they are read
            if computes and node not in self.elsewhere and not self.emission.is_weight(node) and not op(node).startswith(QUIET):
                self.env[node] = self.cut(node, self.copied(node))
            position += 1

    def cut(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """What stands for a node here: without gradients where the model's code stops them between it and who reads it here."""
        emission, region = self.emission, self.region
        if node not in emission.stopped:
            return made
        here = (user for user in node.users if region.first <= emission.flow.position.get(user, -1) <= region.last)
        if all(user in emission.stopped for user in here):
            return made
        detached = self.graph.call_function(torch.ops.aten.detach.default, (made,))
        detached.meta |= known(node)
        return detached

    def finished(self, name: str) -> fx.GraphModule:
        made = Graph(self.root, self.graph, name)
        made.graph.eliminate_dead_code()
        made.graph.lint()
        made.recompile()
        for path, module in self.root.named_modules():
            if module._non_persistent_buffers_set:
                made.get_submodule(path)._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
        return made

    def value(self, node: fx.Node) -> fx.Node:
        """The node's value here."""
        if node not in self.env:
            place = extent_of(node, self.arguments, self.emission)
            if place is not None:
                self.env[node] = self.graph.call_function(torch.ops.aten.sym_size.int, (self.env[place[0]], place[1]))
                self.env[node].meta |= known(node)
            else:
                self.env[node] = self.weight(node) if node.op == "placeholder" else self.copied(node)
        return self.env[node]

    def weight(self, node: fx.Node) -> fx.Node:
        """A parameter, buffer or constant, held by this module under its own name."""
        prefix = self.region.path + "." if self.region.path else ""
        name, value, saved = self.emission.tensor(node, prefix)
        name = name.removeprefix(prefix)
        register(self.root, name, value, saved)
        return self.graph.get_attr(name)

    def copied(self, node: fx.Node) -> fx.Node:
        """The node itself, its dropout a module and its device the inputs', with what is known of it."""
        made = self.translated(node)
        made.meta |= known(node)
        return made

    def translated(self, node: fx.Node) -> fx.Node:
        name = op(node)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.value)
        if name in DROPOUT and isinstance(node.args[0], fx.Node):
            return self.dropout(float(node.args[1]), args)  # type: ignore[arg-type]
        if node in self.emission.dropouts:
            return self.attention(self.emission.dropouts[node], args, kwargs)
        if isinstance(kwargs.get("device"), torch.device) and (like := self.tensor_here()) is not None:
            kwargs = {**kwargs, "device": self.graph.call_function(getattr, (like, "device"))}
        target: Any = node.target
        if target is torch.ops.aten.view.default:  # how attention lays its result out depends on device and gradients
            target = torch.ops.aten.reshape.default
        if name in ("view", "reshape", "_unsafe_view"):
            args = args[0], self.layout(node, args)  # type: ignore[arg-type]
        return self.graph.call_function(target, args, kwargs)

    def layout(self, node: fx.Node, args: Any) -> list[Any]:
        """The extents that a change of layout writes out, those that it leaves as they are taken from what it is handed."""
        sizes = list(args[1])
        places = [dim for dim in range(leading(node, self.emission.extents)) if type(sizes[dim]) is int]
        if keeps_width(node, self.emission.width):
            places.append(-1)
        for dim in places:
            sizes[dim] = self.graph.call_function(torch.ops.aten.sym_size.int, (args[0], dim))
        return sizes

    def tensor_here(self) -> fx.Node | None:
        """A tensor that was computed from the inputs or is one."""
        found = (mine for node, mine in self.env.items() if isinstance(node.meta.get("val"), Tensor))
        return next(found, None)

    def dropout(self, p: float, args: Any) -> fx.Node:
        return self.graph.call_module(self.new_child("dropout", nn.Dropout(p)), args[:1])

    def attention(self, p: float, args: Any, kwargs: Any) -> fx.Node:
        return self.graph.call_module(self.new_child("attend", AttentionWithDropout(p)), args, kwargs)

    def new_child(self, name: str, module: nn.Module) -> str:
        free, count = name, 0
        while hasattr(self.root, free):
            count += 1
            free = f"{name}_{count}"
        self.root.add_module(free, module)
        return free

    def call(self, region: Region) -> None:
        """The region inside, as a module that is handed what it reads and returns what others read of it."""
        emission, flow = self.emission, self.emission.flow
        own = [
            node
            for node in flow.nodes[region.first : region.last + 1]
            if not emission.is_weight(node) and node.op == "call_function"
        ]
        common = emission.common(own) if region.in_code else set()
        own = [node for node in own if node not in common]
        if len(own) == 1 and op(own[0]) in DROPOUT:  # a module that is nothing but dropout stays one
            name = self.held(region, nn.Dropout(float(own[0].args[1])))  # type: ignore[arg-type]
            self.env[own[0]] = self.graph.call_module(name, (self.value(own[0].args[0]),))  # type: ignore[arg-type]
            return
        entered, own = handed(own, emission)
        within = set(own)
        part = ModuleBuilder(emission, region, entered)
        part.elsewhere = self.elsewhere | common
        part.run()
        left = [
            node
            for node in own
            if node in emission.results or any(user not in within and user in emission.live for user in node.users)
        ]
        left = [node for node in left if node in part.env or is_size(node)]
        if not left:
            return
        values = [part.value(node) for node in left]
        part.graph.output(values[0] if len(values) == 1 else tuple(values))
        name = self.held(region, GraphPart.of(part.finished("Part")))
        given = tuple(self.value(node) for node in entered)
        leaf = region.name.rpartition(".")[2]
        result = self.graph.create_node("call_module", name, given, {}, name=f"from_{leaf}")  # never `self`
        for index, node in enumerate(left):
            made = result if len(left) == 1 else self.graph.call_function(getitem, (result, index))
            made.meta |= known(node)
            self.env[node] = self.cut(node, made)

    def held(self, region: Region, part: nn.Module) -> str:
        """The name of the part here: of one that is called again, computing the same on the same parameters, or else its own."""
        learns = any(True for _ in part.parameters())
        for name, (path, earlier) in self.parts.items():
            if (learns or path == region.path) and is_structurally_equal(part, earlier):
                return name
        attach(self.root, region.name, part)
        self.parts[region.name] = region.path, part
        return region.name


def attach(root: nn.Module, name: str, module: nn.Module) -> None:
    """`module` is the submodule `name` of `root`, and holds what lay there before."""
    owner_path, _, leaf = name.rpartition(".")
    owner = root
    for piece in filter(None, owner_path.split(".")):
        if piece not in owner._modules:
            owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    present = owner._modules.get(leaf)
    owner.add_module(leaf, module)
    if present is not None and present is not module:  # what the region around reads of the same module
        merge(present, module)


def merge(held: nn.Module, module: nn.Module) -> None:
    """What `held` holds, `module` holds too."""
    for registry in ("_parameters", "_buffers"):
        getattr(module, registry).update(getattr(held, registry))
    module._non_persistent_buffers_set |= held._non_persistent_buffers_set
    for name, child in held.named_children():
        if name in module._modules:
            merge(child, module.get_submodule(name))
        else:
            module.add_module(name, child)


class Graph(fx.GraphModule):
    """A graph module whose copies have all that it has: its config, its examples, what was rewritten."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        new: Graph = super().__deepcopy__(memo)  # type: ignore[assignment]
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key not in new.__dict__})
        return new


class GraphPart(nn.Module):
    """A part of a graph module that is itself a graph, `graph`, and to whoever captures it again a module like any other.

    `torch.export` looks through a `GraphModule` inside the model as if its code stood in the code around it.
    """

    graph: fx.Graph

    @staticmethod
    def of(made: fx.GraphModule) -> GraphPart:
        kind = type("GraphPart", (GraphPart,), {"forward": type(made).forward, "__module__": __name__})
        part: GraphPart = kind()
        for registry in ("_modules", "_parameters", "_buffers"):
            getattr(part, registry).update(getattr(made, registry))
        part._non_persistent_buffers_set = set(made._non_persistent_buffers_set)
        part.graph = made.graph
        return part

    def recompile(self) -> None:
        """The part computes what its graph says."""
        made = fx.GraphModule(self, self.graph)
        self.__class__ = type("GraphPart", (GraphPart,), {"forward": type(made).forward, "__module__": __name__})
        self.graph = made.graph

    def __reduce__(self) -> Any:
        return GraphPart.of, (fx.GraphModule(self, self.graph),)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPart:
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return new


def handed(own: list[fx.Node], emission: Emission) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a part of the nodes `own` is handed, and which of them are its own: a size that its tensors have is taken from them.

    So a part whose tensors are shorter than when they were captured still computes with sizes that are right.
    """
    inside = {node for node in own if not is_size(node)}
    tensors = dict.fromkeys(
        one for node in own if node in inside for one in read_by(node, emission) if one not in inside and not is_size(one)
    )
    known = list(tensors)
    made: set[fx.Node] = set()
    sizes: dict[fx.Node, None] = {}
    pending = [one for node in own if node in inside for one in read_by(node, emission) if is_size(one)]
    pending += [node for node in own if is_size(node) and any(user not in own for user in node.users)]
    while pending:
        size = pending.pop()
        if size in made or size in sizes or can_be_had(size, known, emission):
            continue
        if size not in own:
            sizes[size] = None
            continue
        made.add(size)
        pending += [one for one in read_by(size, emission) if is_size(one)]
        tensors |= dict.fromkeys(one for one in read_by(size, emission) if one not in inside and not is_size(one))
    return [*tensors, *sizes], [node for node in own if node in inside or node in made]


def can_be_had(size: fx.Node, tensors: list[fx.Node], emission: Emission) -> bool:
    """Whether the size is an extent of one of the tensors, or computed from such."""
    if extent_of(size, tensors, emission) is not None:
        return True
    parts = read_by(size, emission)
    return bool(parts) and all(is_size(one) and can_be_had(one, tensors, emission) for one in parts)


def extent_of(size: fx.Node, tensors: list[fx.Node], emission: Emission) -> tuple[fx.Node, int] | None:
    """The first of the tensors that has the size, and the dimension."""
    wanted = emission.extents.get(size, ())
    if not is_size(size) or len(wanted) != 1 or isinstance(wanted[0], int):
        return None
    for one in tensors:
        for dim, extent in enumerate(emission.extents.get(one, ())):
            if not isinstance(extent, int) and extent == wanted[0]:
                return one, dim
    return None


def extents_of(node: fx.Node) -> tuple[Any, ...]:
    """The extents of a tensor, or the size that the node is: a number where it is always the same, else an expression."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,) if isinstance(value, (int, torch.SymInt)) else ()
    found = [size if isinstance(size, int) else size.node.expr for size in sizes]
    return tuple(size if isinstance(size, int) or not size.is_number else int(size) for size in found)


def read_by(node: fx.Node, emission: Emission) -> list[fx.Node]:
    """What a node reads that is no weight, through the weights' own operations too."""
    return [part for part in node.all_input_nodes if not emission.is_weight(part)]


def of_size(value: Tensor, name: str, sizes: tuple[int | None, ...]) -> Tensor:
    """The argument of that name, if it has the sizes, where they are given."""
    for dim, size in enumerate(sizes):
        if size is not None and value.shape[dim] != size:
            raise DoesNotFitError(
                f"{name} has {value.shape[dim]} as its dimension {dim}",
                why=f"this graph takes {size} there: the model's code fixed it when it was captured",
                remedy="give inputs of that size, or capture the model with example_inputs= of the size that is needed",
            )
    return value


def mask_or_ones(mask: Tensor | None, ids: Tensor) -> Tensor:
    """The mask, or where there is none one that hides nothing."""
    return torch.ones_like(ids) if mask is None else mask


def getitem(values: Any, index: int) -> Any:
    """`values[index]`."""
    return values[index]
