"""Where tables go: the modules whose input and output are the stream, or the input and output of a feed-forward."""

from __future__ import annotations

import dataclasses

from torch import fx

from retrofit.sdk import (
    Anatomy,
    Branch,
    DoesNotFitError,
    FeedForward,
    Key,
    Layer,
    NearMiss,
    Stack,
    collect_near_miss,
    is_float,
    owner_of,
    parse_feed_forward,
    shape,
)

NO_MODULE = "the layers have to be modules that take the stream and return it"
NO_FEED_FORWARD = "beside=layers needs no FFN, and emit='graph' makes each a module"


@dataclasses.dataclass(frozen=True)
class TablePlace:
    """A module that gets a table, and where its input and output are."""

    path: str
    stream_in: int | str
    stream_out: Key
    gathered: FeedForward | None = dataclasses.field(default=None, compare=False)  # of several modules, made one at `path` first


class TablePlaces:
    """Finds the places for tables in one model."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy, self.flow = anatomy, anatomy.flow
        self.calls = {(call.path, call.index): call for call in anatomy.program.calls}

    def of_layer(self, layer: Layer, stack: Stack, beside: str, near_misses: list[NearMiss]) -> list[TablePlace]:
        """The places at one layer: the layer itself or its FFNs, as `beside` says; a near miss for each that has none."""
        places: list[TablePlace] = []
        with collect_near_miss(layer.name or layer.exit, near_misses):
            around = self.stream_module(layer, stack)
            if beside == "layers":
                return [around]
            if not layer.ffns:
                raise no_place(layer.name, "it has no FFN", NO_FEED_FORWARD)
            for branch in layer.ffns:
                with collect_near_miss(branch.name or layer.name, near_misses):
                    places.append(self.feed_forward(branch, layer, around, stack.width))
        return places

    def stream_module(self, layer: Layer, stack: Stack) -> TablePlace:
        """The outermost module that runs the layer and takes and returns its stream d wide: inside AltUp's, which are wider."""
        if not layer.name:
            why = "no module owns the layer: its residual additions are in the model's own code"
            raise no_place(layer.exit, why, NO_MODULE)
        outer = self.calls[layer.name, layer.call]
        if all(width_of(self.anatomy.node(end)) == stack.width for end in (layer.entry, layer.exit)):
            return TablePlace(layer.name, *layer.stream_places())
        results = [self.anatomy.node(branch.output) for branch in layer.branches]
        base = self.anatomy.node(layer.branches[0].source)  # where the branches leave the stream, which may be wide there
        within = [call for call in owner_of(results, self.flow).chain if outer.encloses(call) and call is not outer]
        for call in reversed(within):
            enters = [key for key, node in call.inputs.items() if width_of(node) == stack.width and self.on_one_stream(node, base)]
            leaves = [key for key, node in call.outputs.items() if width_of(node) == stack.width and self.depends_on(node, results)]
            if enters and leaves and enters[0] is not None:
                return TablePlace(call.path, enters[0], leaves[0])
        raise no_place(layer.name, f"no module in it takes the stream {stack.width} wide and returns it so", NO_MODULE)

    def on_one_stream(self, node: fx.Node, other: fx.Node) -> bool:
        return node in self.flow.carried_chain(other) or other in self.flow.carried_chain(node)

    def depends_on(self, node: fx.Node, parts: list[fx.Node]) -> bool:
        return all(self.flow.reaches(part, node) for part in parts)

    def feed_forward(self, branch: Branch, layer: Layer, around: TablePlace, width: int) -> TablePlace:
        """The module that is this FFN, or becomes it, from one d-wide tensor to another; raises `DoesNotFitError` without one."""
        outer = self.calls[layer.name, layer.call]
        if not branch.name or f"{around.path}.".startswith(f"{branch.name}."):
            return self.gathered(branch)
        call = next((one for one in self.calls.values() if one.path == branch.name and outer.encloses(one)), None)
        if call is None:
            raise no_place(branch.name, "its module is not called inside the layer", NO_FEED_FORWARD)
        outputs = [self.anatomy.node(other.output) for other in layer.branches if other is not branch]
        if any(call.encloses(self.flow.call_of(output)) for output in outputs):
            return self.gathered(branch)
        read = {
            key: self.flow.position[node]
            for key, node in call.inputs.items()
            if key is not None
            and width_of(node) == width
            and self.flow.reaches_through_heavy_op(node, self.anatomy.node(branch.output))
        }
        leaves = [key for key, node in call.outputs.items() if is_float(node) and width_of(node) == width]
        if not read or not leaves:
            raise no_place(branch.name, f"its module does not take and return tensors {width} wide", NO_FEED_FORWARD)
        return TablePlace(branch.name, max(read, key=lambda key: read[key]), leaves[0])  # the stream itself may be an argument too

    def gathered(self, branch: Branch) -> TablePlace:
        """The place of an FFN whose modules, called by the layer's own code, become one module."""
        try:
            site = parse_feed_forward(branch, self.anatomy.model, self.flow)
        except DoesNotFitError as error:
            raise no_place(branch.name or branch.output, error.why or error.what, NO_FEED_FORWARD) from error
        stream_in = site.stream_in if site.stream_in is not None else 0
        return TablePlace(site.path, stream_in, None, site if site.bypassed else None)


def width_of(node: fx.Node) -> int:
    return (shape(node) or (0,))[-1]


def no_place(name: str, why: str, remedy: str) -> DoesNotFitError:
    return DoesNotFitError(f"memory: {name} can have no table", why=why, remedy=remedy)
