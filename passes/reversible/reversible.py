"""The reversible pass: training memory that does not grow with depth, by one of two schemes.

`exact` leaves the model unchanged in evaluation:

    x_{k+1} = F(x_k) + γ (F(x_k) − 2 x_k + x_{k−1})          γ = ±2⁻ⁿ in training, drawn for each row and layer; 0 in evaluation

F is any layer. x_{k−1} follows from x_{k+1} and x_k, so the backward pass recomputes each layer's input, and then the layer,
instead of storing its activations. In fixed point, with the n bits that γ x_{k−1} loses, this is exact bit for bit
(`reversible_layer.py`). With γ ≠ 0 training computes another function than evaluation; its mean over γ is the same to first order.

`terraformer` is approximate: two streams, of which nothing is stored (`two_streams.py`):

    x_{j+1} = x_{j−1} + f_j(x_j)          f_j the branches of all layers; the mean of both streams at the end

On Exact Bit-level Reversible Transformers Without Changing Architectures (ICML 2025); Sparse is Enough in Scaling Transformers
(NeurIPS 2021), §4.2.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import fx, nn

from retrofit.passes.reversible import reference as method_reference
from retrofit.passes.reversible.reversible_layer import Key, ReversibleLayer, written_arguments
from retrofit.passes.reversible.two_streams import SecondStream, StreamsEnd, TwoStreamLayer
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    Layer,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Recovery,
    Site,
    Stack,
    argument_place,
    collect_near_miss,
    option,
    selected_depths,
    unfit,
)
from retrofit.sdk.anatomy import WITHOUT_GRADIENT, modules_around, reader_of
from retrofit.sdk.program import CAST, LIKE, Call, Dataflow, is_assertion, is_float, op, shape

MOST_BITS = 16  # of the stream in half precision, which checkpointing stores whole
SCHEMES = ("exact", "terraformer")
OTHER_SCHEME = "scheme=exact; layers= leaves depths out"

Fitted = TypeVar("Fitted")


@dataclasses.dataclass(frozen=True)
class ReversibleSite:
    """A layer that becomes a step, and the places of its stream."""

    path: str
    stream_in: Key
    stream_out: Key | None
    written: tuple[Key, ...] = ()  # its arguments that the model writes to after its call


@dataclasses.dataclass(frozen=True)
class ReversiblePlan(Plan):
    """The layers that become steps, each module once, or the links of two streams, in order."""

    steps: tuple[ReversibleSite, ...] = ()
    links: tuple[SwapSite, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reversible(Pass[ReversiblePlan]):
    """Recompute layers in the backward pass, from a stream that is reversed bit for bit."""

    name: ClassVar[str] = "reversible"
    summary: ClassVar[str] = "recompute layers from a reversible stream: activation memory does not grow with depth"
    paper: ClassVar[str] = "On Exact Bit-level Reversible Transformers Without Changing Architectures"
    rewrites: ClassVar[str] = "layer"
    places_by: ClassVar[tuple[str, ...]] = ("layers", "scheme")
    already: ClassVar[str] = "it is reversible already"
    reference: ClassVar[MethodReference] = MethodReference(
        {
            ReversibleLayer: ModuleReference(method_reference.reversible_layer, ("layer",), key="stream_out", trainings=0),
            TwoStreamLayer: ModuleReference(method_reference.two_stream_layer, functions=("layer",), key="stream_out", trainings=0),
        },
        wiring=method_reference.wiring,
    )
    recovery: ClassVar[Recovery] = Recovery(align=0.0, anneal=0.5, dial=SecondStream())

    scheme: str = option("exact", "exact: the dense function, trained with noise; terraformer: two streams", choices=SCHEMES)
    bits: int = option(4, "n, bits stored per number and layer in scheme=exact, γ = ±2⁻ⁿ", minimum=1, maximum=MOST_BITS)
    layers: str = option("all", "depths to make reversible, e.g. 0-5+8", depths=True)

    @property
    def exact(self) -> bool:
        return self.scheme == "exact"

    def idle_options(self) -> dict[str, tuple[str, ...]]:
        return {} if self.exact else {f"scheme={self.scheme}": ("bits",)}

    # The plan.

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def plan(self, anatomy: Anatomy) -> ReversiblePlan:
        if self.scheme == "terraformer":
            return self.plan_of_two_streams(anatomy)
        finder, near_misses, notes = StepFinder(anatomy), list[NearMiss](), list[str]()
        links = 0  # layers whose input stream is the output of a reversible layer
        for stack in anatomy.stacks:
            for run in finder.runs(stack, self.depths(stack, anatomy), finder.add, near_misses):
                for (previous, _), (layer, _) in itertools.pairwise(run):
                    if previous.exit == layer.entry:
                        links += 1
                    else:
                        notes.append(f"{layer.name}: the model changes the stream before it, so it begins a new chain")
        if notes and not links:
            raise DoesNotFitError(
                "no two layers follow each other",
                by="reversible",
                why=notes[0],
                remedy="use gradient checkpointing",
                code="no-chain",
            )
        written = written_arguments(anatomy.model, anatomy.program.examples, finder.sites)
        steps = tuple(dataclasses.replace(step, written=written.get(path, ())) for path, step in finder.sites.items())
        notes += [f"{path}: the model writes to its argument {keys[0]}, and a copy is stored" for path, keys in written.items()]
        text = f"reversible, {self.bits} bit{'s' * (self.bits > 1)} stored of each number"
        return ReversiblePlan(
            sites=tuple(Site(step.path, text) for step in steps),
            near_misses=tuple(near_misses),
            formula="no parameters",
            notes=tuple(notes),
            steps=steps,
        )

    def plan_of_two_streams(self, anatomy: Anatomy) -> ReversiblePlan:
        finder, near_misses, links = StepFinder(anatomy), list[NearMiss](), list[SwapSite]()
        notes, sites = list[str](), list[Site]()
        for stack in anatomy.stacks:
            chains: list[list[SwapSite]] = []
            for run in finder.runs(stack, self.depths(stack, anatomy), functools.partial(finder.swaps, stack), near_misses):
                chains.append([run[0][1]])
                for (previous, _), (layer, link) in itertools.pairwise(run):
                    if finder.leads_to(previous, layer):
                        chains[-1].append(link)
                    else:
                        notes.append(f"{layer.name}: other code reads or changes the stream before it, so two streams start again")
                        chains.append([link])
            for chain in chains:
                links += [*chain[:-1], finder.last_of(chain, stack)]
            if chains:
                swaps = sum(len(link.sums) for chain in chains for link in chain)
                layers = sum(map(len, chains))
                sites.append(Site(stack.name, f"{layers} layer{'s' * (layers > 1)} on two streams, {swaps} swaps"))
        return ReversiblePlan(tuple(sites), tuple(near_misses), formula="no parameters", notes=tuple(notes), links=tuple(links))

    def depths(self, stack: Stack, anatomy: Anatomy) -> set[int]:
        return selected_depths(self.layers, len(stack.layers), self.name, anatomy.deepest())

    # The rewrite.

    def apply(self, plan: ReversiblePlan, edit: Edit) -> None:
        for link in plan.links:
            layer = edit.model.get_submodule(link.path)
            into, out = link.stream_in, link.stream_out
            wrapped = TwoStreamLayer(layer, link.width, link.sums, link.parts, stream_in=into, stream_out=out, closes=link.closes)
            edit.replace_module(link.path, wrapped)
            if link.reader is not None:
                end = StreamsEnd(link.path, link.width, argument_place(edit.model.get_submodule(link.reader[0]), link.reader[1]))
                edit.add_handle(edit.model.get_submodule(link.reader[0]).register_forward_pre_hook(end.require, with_kwargs=True))
        for step in plan.steps:
            layer = edit.model.get_submodule(step.path)
            into, out = step.stream_in, step.stream_out
            wrapper = ReversibleLayer(layer, self.bits, stream_in=into, stream_out=out, written=step.written)
            edit.replace_module(step.path, wrapper)


class StepFinder:
    """Collects the steps of one model."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy, self.flow = anatomy, anatomy.flow
        self.weights = 0  # the bit set of all parameters
        for node in anatomy.program.parameters:
            self.weights |= self.flow.bit(node)
        self.sites: dict[str, ReversibleSite] = {}  # by path: a module that several depths share is one site

    def runs(
        self, stack: Stack, depths: set[int], fit: Callable[[Layer], Fitted], near_misses: list[NearMiss]
    ) -> list[list[tuple[Layer, Fitted]]]:
        """Return the runs of consecutive layers at these depths that fit, with the results of `fit`; the others are near misses."""
        found: list[list[tuple[Layer, Fitted]]] = [[]]
        for depth, layer in enumerate(stack.layers):
            if depth in depths:
                with collect_near_miss(layer.name or layer.exit, near_misses):
                    found[-1].append((layer, fit(layer)))
                    continue
            found.append([])
        return [run for run in found if run]

    def add(self, layer: Layer) -> None:
        """Add the step of a layer. Raises `DoesNotFitError` if it cannot be one."""
        key_in, key_out = layer.stream_places()
        self.require_reversible(layer)
        if not self.anatomy.is_trained(layer):
            raise irreversible(WITHOUT_GRADIENT)
        self.sites.setdefault(layer.name, ReversibleSite(layer.name, key_in, key_out))

    def swaps(self, stack: Stack, layer: Layer) -> SwapSite:
        """Return the layer as a link of two streams. Raises `DoesNotFitError` if it cannot be one."""
        key_in, key_out = layer.stream_places()
        call = self.require_reversible(layer)
        if sum(called.path == layer.name for called in self.flow.program.calls) > 1:
            raise irreversible("several depths share it, and the last of them must end two streams", OTHER_SCHEME)
        branches = branches_of(layer, self.anatomy)
        parts = parts_of(call, branches, self.anatomy)
        sums = tuple(map(len, branches.sums))
        return SwapSite(layer.name, stack.name, key_in, key_out, stack.width, sums, parts)

    def last_of(self, chain: Sequence[SwapSite], stack: Stack) -> SwapSite:
        """Return the last link of a chain, with `closes` and the module that reads the stream after it."""
        layers = [layer for layer in stack.layers if any(layer.name == link.path for link in chain)]
        found = reader_of(layers, same_as(self.anatomy.node(layers[-1].exit), self.flow), self.anatomy.program)
        reader = None if found is None or found[1] is None else (found[0], found[1])
        return dataclasses.replace(chain[-1], closes=True, reader=reader)

    def leads_to(self, layer: Layer, following: Layer) -> bool:
        """Return whether only the following layer reads a layer's output."""
        same, call = same_as(self.anatomy.node(layer.exit), self.flow), self.call_of(following)
        bounds = bounds_of(same, self.flow)
        others = [
            use
            for alias in same
            for use in self.flow.uses[alias]
            if use not in same and use not in bounds and not call.encloses(self.flow.call_of(use)) and op(use) not in LIKE
        ]
        is_output = any(output in same for output in self.flow.program.outputs.values())
        return self.anatomy.node(following.entry) in same and not others and not is_output

    def call_of(self, layer: Layer) -> Call:
        return next(call for call in self.flow.program.calls if (call.path, call.index) == (layer.name, layer.call))

    def require_reversible(self, layer: Layer) -> Call:
        """Return the layer's call. Raises `DoesNotFitError` if it cannot be recomputed from its stream."""
        call = self.call_of(layer)
        around = modules_around(self.anatomy.model, layer.name)
        if any(isinstance(outer, (ReversibleLayer, TwoStreamLayer)) for outer in around):
            raise irreversible(Reversible.already, "start from the dense model to use other options")
        before, after = (shape(self.anatomy.node(end)) for end in (layer.entry, layer.exit))
        if before != after:
            raise irreversible(f"its stream enters as {before} and leaves as {after}")
        self.require_closed(call)
        self.require_stateless(call)
        return call

    def require_stateless(self, call: Call) -> None:
        """Raise `DoesNotFitError` if the layer stores values of its tokens in a module: its second run would read them."""
        for inner in self.flow.program.calls:
            names = [name for name, node in inner.kept.items() if node in self.flow.depends]
            if names and call.encloses(inner):
                kept = f"{names[0]} of {inner.path}"
                raise irreversible(f"its code stores {kept} between calls, and its second run would read it")

    def require_closed(self, call: Call) -> None:
        """Raise `DoesNotFitError` if a float enters or leaves the layer other than by its arguments and output.

        The gradient of such a value is lost when the layer is recomputed.
        """
        flow, program = self.flow, self.flow.program
        inside = {node for node in flow.nodes if call.encloses(flow.call_of(node))}
        arguments, returned = set(call.inputs.values()), set(call.outputs.values())
        own = self.parameters(call.path)
        for node in flow.nodes:
            if is_assertion(node):
                continue
            for operand in node.all_input_nodes:
                if node in inside and operand in program.parameters:
                    if self.anatomy.model.get_parameter(program.parameters[operand]) not in own:
                        raise irreversible(f"it reads the weight {program.parameters[operand]}, which is not its own")
                elif node in inside and operand not in inside and operand not in arguments:
                    if self.has_gradient(operand) and not self.is_made_of(operand, own):
                        raise irreversible(f"it reads {self.described(operand)}, which is not one of its arguments")
                elif node not in inside and operand in inside and operand not in returned and self.has_gradient(operand):
                    around = [other.path for other in flow.call_of(node).chain if not other.encloses(call)]
                    if not any(self.is_made_of(operand, self.parameters(path)) for path in around):
                        raise irreversible(f"{self.described(node)} reads a value inside it that it does not return")
        for name, node in program.outputs.items():
            if node in inside and node not in returned and self.has_gradient(node):
                raise irreversible(f"the model's output {name} is a value inside it that it does not return")

    def has_gradient(self, node: fx.Node) -> bool:
        """Return whether the value is a float that depends on a parameter."""
        return is_float(node) and bool(self.flow.ancestors[node] & self.weights)

    def is_made_of(self, node: fx.Node, weights: set[nn.Parameter]) -> bool:
        """Return whether the value depends only on these weights, e.g. as a cast that the tracer records once for all readers."""
        if node in self.flow.depends:
            return False
        above = [name for parameter, name in self.flow.program.parameters.items() if self.flow.reaches(parameter, node)]
        return all(self.anatomy.model.get_parameter(name) in weights for name in above)

    def parameters(self, path: str) -> set[nn.Parameter]:
        return set(self.anatomy.model.get_submodule(path).parameters())

    def described(self, node: fx.Node) -> str:
        path = self.flow.call_of(node).path
        return f"{node.name} of {path}" if path else node.name


def irreversible(why: str, remedy: str = "layers= leaves depths out") -> DoesNotFitError:
    return unfit(why, remedy)


# ── Layers of two streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# A layer fits if its code adds each branch to the stream that the branch reads (`x = x + f(norm(x))`) and returns the last sum. A
# layer that normalizes or scales the stream between its sums (post-norm) does not fit.

SAME = CAST | {"contiguous"}
POST_NORM = "scheme=exact fits layers of any form; layers= leaves depths out"


@dataclasses.dataclass(frozen=True)
class SwapSite:
    """A layer that becomes a link of two streams."""

    path: str
    stack: str  # path of the module whose code runs it
    stream_in: Key
    stream_out: Key | None
    width: int
    sums: tuple[int, ...]  # for each branch, the number of sums that add it to the stream
    parts: tuple[str, ...]  # paths in the layer of the modules that belong to one branch each
    closes: bool = False  # the streams end after it
    reader: tuple[str, Key] | None = None  # then the module that is called with their mean, and the argument


@dataclasses.dataclass(frozen=True)
class LayerBranches:
    """The branches of one call of a layer: the streams s_0, s_1, … between them, and the sums that add each branch."""

    streams: tuple[fx.Node, ...]
    sums: tuple[tuple[fx.Node, ...], ...]


def branches_of(layer: Layer, anatomy: Anatomy) -> LayerBranches:
    """Return the branches of a layer. Raises `DoesNotFitError` if one is not added to the stream that it reads."""
    flow = anatomy.flow
    stream = anatomy.node(layer.entry)
    streams, sums = [stream], list[tuple[fx.Node, ...]]()
    for name in dict.fromkeys(branch.add for branch in layer.branches):
        sums.append(sums_to(stream, anatomy.node(name), flow))
        stream = anatomy.node(name)
        streams.append(stream)
    if anatomy.node(layer.exit) not in same_as(stream, flow):
        raise irreversible("the stream is changed after its last branch was added", POST_NORM)
    return LayerBranches(tuple(streams), tuple(sums))


def sums_to(stream: fx.Node, end: fx.Node, flow: Dataflow) -> tuple[fx.Node, ...]:
    """Return the sums from a stream to `end`, which ends the next branch. Raises `DoesNotFitError` if a sum does not add to it."""
    found: list[fx.Node] = []
    node = stream
    while node is not end:
        same = same_as(node, flow)
        bounds = bounds_of(same, flow)
        readers = dict.fromkeys(use for alias in same for use in flow.uses[alias] if use not in same and use not in bounds)
        users = [reader for reader in readers if op(reader) == "add" and is_sum_of(same, reader)]
        if len(users) != 1 or not flow.reaches(users[0], end) or (node is not stream and len(readers) != 1):
            why = "a branch is not added to the stream that it reads: this is normalized, scaled or added to on its way"
            raise irreversible(why, POST_NORM)
        node = users[0]
        found.append(node)
    return tuple(found)


def same_as(node: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """Return the node and all nodes that are the same tensor, such as casts to its own dtype.

    Clamps in float16 count too, on the assumption that no number is out of range; a run checks this.
    """
    found = [node]
    for alias in found:
        for user in flow.uses[alias]:
            dtype = user.meta["val"].dtype if isinstance(user.meta.get("val"), torch.Tensor) else None
            is_same = op(user) in SAME or (op(user) == "clamp" and dtype == torch.float16)
            if is_same and dtype == alias.meta["val"].dtype and user.args[0] is alias and user not in found:
                found.append(user)
    return found


def bounds_of(same: Collection[fx.Node], flow: Dataflow) -> set[fx.Node]:
    """Return the nodes that compute the bounds of clamps in `same` from the nodes in `same`."""
    made: set[fx.Node] = set()
    for alias in same:
        for bound in alias.all_input_nodes[1:] if op(alias) == "clamp" else ():
            made |= {node for source in same if flow.reaches(source, bound) for node in flow.between(source, bound)}
    return made


def is_sum_of(same: Collection[fx.Node], node: fx.Node) -> bool:
    """Return whether the terms of a sum, without factor, are a node of `same` and another node of the same shape."""
    terms = [part for part in node.args if isinstance(part, fx.Node)]
    plain = len(terms) == 2 and len(node.args) == 2 and not node.kwargs and sum(part in same for part in terms) == 1
    return plain and all(is_float(part) and shape(part) == shape(node) for part in terms)


def parts_of(call: Call, branches: LayerBranches, anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths in the layer of the outermost modules in whose code no branch is added to the stream.

    Raises `DoesNotFitError` if a branch reads a value that another computes.
    """
    flow = anatomy.flow
    adding = {inner for sums in branches.sums for node in sums for inner in flow.call_of(node).chain}
    calls = [inner for inner in flow.program.calls if inner is not call and call.encloses(inner) and inner not in adding]
    outermost = [inner for inner in calls if inner.parent is call or inner.parent in adding]
    require_separate(call, set(outermost), branches, flow)
    excluded = {inner.path for inner in adding}
    prefix = f"{call.path}."
    paths = [inner.path for inner in outermost if inner.path.startswith(prefix) and inner.path not in excluded]
    return tuple(dict.fromkeys(path.removeprefix(prefix) for path in paths))


def require_separate(call: Call, parts: set[Call], branches: LayerBranches, flow: Dataflow) -> None:
    """Raise `DoesNotFitError` if a branch reads a value that another branch computes, or the stream before an earlier branch.

    The run for each branch computes the values outside all parts, unless they depend on a stream or on the output of a part.
    """
    ends = [flow.position[node] for node in branches.streams[1:]]
    streams = {part: number for number, node in enumerate(branches.streams) for part in same_as(node, flow)}
    inside = [node for node in flow.nodes if call.encloses(flow.call_of(node))]
    own, summed = set(inside), {node for sums in branches.sums for node in sums}
    skipped = 0  # the bit set of nodes that a run does not compute
    for node in inside:
        if any(part in parts for part in flow.call_of(node).chain):
            skipped |= flow.bit(node)
    for node in (*streams, *summed):
        skipped |= flow.bit(node)
    for node in inside:
        if is_assertion(node) or op(node) in LIKE:  # these read a shape
            continue
        branch = bisect.bisect_left(ends, flow.position[node])
        for part in node.all_input_nodes:
            if part in streams:
                if streams[part] != branch and node not in summed and node not in streams:
                    raise irreversible(f"{node.name} reads the stream before an earlier branch")
            elif part in own and bisect.bisect_left(ends, flow.position[part]) != branch and flow.ancestors[part] & skipped:
                raise irreversible(f"{node.name} reads {part.name}, which another branch computes")
