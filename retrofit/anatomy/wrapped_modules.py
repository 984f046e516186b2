"""Which module a pass puts a wrapper around: one that takes and returns the stream, or the input and output of a feed-forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx, nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.branches import owner_of
from retrofit.anatomy.feed_forward_blocks import GatheredFeedForward, install_feed_forward
from retrofit.anatomy.feed_forward_parsing import parse_feed_forward
from retrofit.anatomy.feed_forward_sites import FeedForward
from retrofit.anatomy.parts import Branch, Layer, Stack
from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import is_float, shape
from retrofit.program.program import Call, Key
from retrofit.surgery.edit import Edit

Refusal = Callable[[str, str, str], DoesNotFitError]  # of the name of a place, why, the way out

NO_MODULE = "the layers have to be modules that take the stream and return it"


@dataclasses.dataclass(frozen=True)
class WrappedModule:
    """A module that gets a wrapper, and where its input and output are."""

    path: str
    stream_in: int | str
    stream_out: Key
    gathered: FeedForward | None = dataclasses.field(default=None, compare=False)  # of several modules, made one at `path` first

    def install(self, edit: Edit, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """`wrap` of the module is in its place; a feed-forward of several modules is one module first."""
        module = edit.model.get_submodule(self.path)
        if self.gathered is None:
            edit.replace_module(self.path, wrap(module))
            return
        site = self.gathered.bound_to(edit.model)
        up = edit.model.get_submodule(site.into[0].module)
        install_feed_forward(site, wrap(GatheredFeedForward(site, up, module)), edit)


class WrappedModules:
    """Finds such modules in one model; `refuse` makes the error for a place where there is none.

    `no_feed_forward` is the way out where a feed-forward is no module.
    """

    def __init__(self, anatomy: Anatomy, refuse: Refusal, no_feed_forward: str) -> None:
        self.anatomy, self.flow, self.refuse, self.no_feed_forward = anatomy, anatomy.flow, refuse, no_feed_forward
        self.calls = {(call.path, call.index): call for call in anatomy.program.calls}

    def stream_module(self, layer: Layer, stack: Stack) -> WrappedModule:
        """The outermost module that runs the layer and takes and returns its stream d wide: inside AltUp's, which are wider."""
        if not layer.name:
            why = "no module owns the layer: its residual additions are in the model's own code"
            raise self.refuse(layer.exit, why, NO_MODULE)
        outer = self.calls[layer.name, layer.call]
        if all(width_of(self.anatomy.node(end)) == stack.width for end in (layer.entry, layer.exit)):
            return WrappedModule(layer.name, *layer.stream_places())
        results = [self.anatomy.node(branch.output) for branch in layer.branches]
        base = self.anatomy.node(layer.branches[0].source)  # where the branches leave the stream, which may be wide there
        within = [call for call in owner_of(results, self.flow).chain if outer.encloses(call) and call is not outer]
        for call in reversed(within):
            enters = [key for key, node in call.inputs.items() if width_of(node) == stack.width and self.on_one_stream(node, base)]
            leaves = [key for key, node in call.outputs.items() if width_of(node) == stack.width and self.depends_on(node, results)]
            if enters and leaves and enters[0] is not None:
                return WrappedModule(call.path, enters[0], leaves[0])
        raise self.refuse(layer.name, f"no module in it takes the stream {stack.width} wide and returns it so", NO_MODULE)

    def on_one_stream(self, node: fx.Node, other: fx.Node) -> bool:
        return node in self.flow.carried_chain(other) or other in self.flow.carried_chain(node)

    def depends_on(self, node: fx.Node, parts: list[fx.Node]) -> bool:
        return all(self.flow.reaches(part, node) for part in parts)

    def feed_forward(self, branch: Branch, layer: Layer, around: WrappedModule, width: int) -> WrappedModule:
        """The module that is this FFN, or becomes it, from one d-wide tensor to another; raises `DoesNotFitError` without one."""
        outer = self.calls[layer.name, layer.call]
        if not branch.name or f"{around.path}.".startswith(f"{branch.name}."):
            return self.gathered(branch)
        call = next((one for one in self.calls.values() if one.path == branch.name and outer.encloses(one)), None)
        if call is None:
            raise self.refuse(branch.name, "its module is not called inside the layer", self.no_feed_forward)
        call = self.own_call(call, outer)
        others = [self.flow.call_of(self.anatomy.node(other.output)) for other in layer.branches if other is not branch]
        if any(call.encloses(other) for other in others):
            return self.gathered(branch)
        call = self.before_flattening(call, [outer, *others])
        read = {
            key: self.flow.position[node]
            for key, node in call.inputs.items()
            if key is not None
            and width_of(node) == width
            and self.flow.reaches_through_heavy_op(node, self.anatomy.node(branch.output))
        }
        leaves = [key for key, node in call.outputs.items() if is_float(node) and width_of(node) == width]
        if not read or not leaves:
            raise self.refuse(branch.name, f"its module does not take and return tensors {width} wide", self.no_feed_forward)
        latest = max(read, key=lambda key: read[key])  # the stream itself may be an argument too
        return WrappedModule(call.path, latest, leaves[0])

    def own_call(self, call: Call, outer: Call) -> Call:
        """The call, or the innermost around it, of a module that no other layer calls: one that layers share has one wrapper."""
        for one in call.chain:
            if one is outer:
                break
            if all(outer.encloses(other) for other in self.calls.values() if other.path == one.path):
                return one
        return call

    def before_flattening(self, call: Call, others: list[Call]) -> Call:
        """The call, or where it reads (tokens, d), the innermost around it that does no more than lay a stream's tokens out so.

        It encloses none of `others`.
        """
        for one in call.chain:
            if any(one.encloses(other) for other in others):
                break
            if any(len(shape(node) or ()) == 3 and self.lays_out(one, call, node) for node in one.inputs.values()):
                return one
        return call

    def lays_out(self, around: Call, call: Call, stream: fx.Node) -> bool:
        """Whether `call` is called with a view of `stream` and what it returns becomes a view of that shape, `around` it."""
        reads = any(stream in self.flow.carried_chain(node) for node in call.inputs.values())
        results = [node for node in around.outputs.values() if shape(node) == shape(stream)]
        return reads and any(one in self.flow.carried_chain(node) for node in results for one in call.outputs.values())

    def gathered(self, branch: Branch) -> WrappedModule:
        """The place of an FFN whose modules, called by the layer's own code, become one module."""
        try:
            site = parse_feed_forward(branch, self.anatomy.model, self.flow)
        except DoesNotFitError as error:
            raise self.refuse(branch.name or branch.output, error.why or error.what, self.no_feed_forward) from error
        stream_in = site.stream_in if site.stream_in is not None else 0
        return WrappedModule(site.path, stream_in, None, site if site.bypassed else None)


def width_of(node: fx.Node) -> int:
    return (shape(node) or (0,))[-1]
