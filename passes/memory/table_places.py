"""The places of a model's tables, and how token ids reach them.

A table is added to a module whose input and output are the stream, or those of a feed-forward. A table looked up by ids needs the
stack's ids, from where they enter the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from retrofit.passes.memory.memory_layer import (
    TokenIdInjector,
    TokenIdReader,
    TokenIdSource,
    inject_token_ids,
    present_injection,
    trace_forwarding,
)
from retrofit.sdk import (
    Anatomy,
    Edit,
    Layer,
    NearMiss,
    Remedy,
    Stack,
    WrappedModule,
    collect_near_miss,
    unfit,
)
from retrofit.sdk.anatomy import (
    BEFORE_THE_OUTER,
    BEFORE_TWO_STREAMS,
    LAYER_WITHIN,
    ON_TWO_STREAMS,
    InnerLayers,
    LayerCall,
    LayerCalls,
    WrappedModules,
    modules_around,
)

NO_FEED_FORWARD = ("beside=layers needs no FFN", Remedy("emit='graph' makes each a module", "graph"))
BY_ITSELF = "lookup=token-id reads no earlier token"


class TablePlaces:
    """Finds the places for tables in one model."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy, self.model, self.modules = anatomy, anatomy.model, WrappedModules(anatomy, NO_FEED_FORWARD)
        self.within = InnerLayers(anatomy.flow)

    def of_layer(self, layer: Layer, stack: Stack, beside: str, near_misses: list[NearMiss]) -> list[WrappedModule]:
        """Return the places at one layer: the layer itself or its FFNs, by `beside`.

        Adds a near miss for each that cannot have a table.
        """
        places: list[WrappedModule] = []
        with collect_near_miss(layer.name or layer.exit, near_misses):
            if beside == "layers" and self.is_on_two_streams(layer):
                raise unfit(ON_TWO_STREAMS, BEFORE_TWO_STREAMS, code="other-pass")
            around = self.modules.stream_module(layer, stack)
            if beside == "layers":
                return [around]
            if self.within.inside(layer) is not layer:
                raise unfit(LAYER_WITHIN, BEFORE_THE_OUTER, code="other-pass")
            if not layer.ffns:
                raise unfit("it has no FFN", NO_FEED_FORWARD, code="no-ffn")
            for branch in layer.ffns:
                with collect_near_miss(branch.name or layer.name, near_misses):
                    places.append(self.modules.feed_forward(branch, stack.width))
        return places

    def call_of(self, layer: Layer, place: WrappedModule) -> LayerCall:
        """Return the call of the layer at a place; its arguments show which tokens belong to one sequence.

        Raises `DoesNotFitError` if they do not, or if a cache cannot keep the ids of earlier calls.
        """
        outer = self.modules.calls[layer.name, layer.call]
        around = (call for call in self.anatomy.program.calls if call.path == place.path and outer.encloses(call))
        call = self.calls.of_module(next(around, outer), layer)
        if call.tokens_first:
            why = "its stream is laid out (length, batch, width), and token ids are not"
            raise unfit(why, BY_ITSELF, code="other-layout")
        if call.causal and call.times > 1 and call.takes_more:
            why = f"{call.path} is called at several depths, and the cache keeps the ids of one call for each module"
            raise unfit(why, BY_ITSELF, code="shared-layers")
        return call

    @functools.cached_property
    def calls(self) -> LayerCalls:
        return LayerCalls(self.anatomy)

    def is_on_two_streams(self, layer: Layer) -> bool:
        """Return whether a module around the layer adds the layer's branches to a stream that the layer does not return."""
        return any(getattr(outer, "adds_branches", False) for outer in modules_around(self.model, layer.name))


@dataclasses.dataclass(frozen=True)
class StackTables:
    """The tables of one stack, and the route by which token ids reach them."""

    width: int  # d
    rows: int  # n; for n-grams the sum over all hashes
    places: dict[str, tuple[WrappedModule, ...]]  # by layer, those without a table included
    source: TokenIdSource | None  # of the token ids, if tables are looked up by them
    forwards_ids: bool = False  # whether the model's own code forwards the keyword from the source to the layers
    closed: frozenset[str] = frozenset()  # the layers whose own code takes no keywords
    calls: Mapping[str, LayerCall] = dataclasses.field(default_factory=dict)  # for n-grams: the layers' calls, by path
    ids: int = 0  # rows of the token table when the model first got tables

    def injected(self, layer: str, beside: str) -> tuple[str, ...]:
        """Return the paths inside a layer into which token ids are injected: its FFNs, or the layer inside a graph module."""
        if self.source is None or (beside == "layers" and layer not in self.closed):
            return ()
        return tuple(place.path[len(layer) + 1 :] for place in self.places[layer] if place.path != layer)

    def wrapped_names(self, beside: str) -> Iterator[str]:
        """Yield the paths in the rewritten model of the modules that have a table."""
        for layer, places in self.places.items():
            inner = f"{layer}.layer" if self.injected(layer, beside) else layer
            yield from (f"{inner}{place.path[len(layer) :]}" for place in places)


def with_routes(stacks: list[StackTables], anatomy: Anatomy) -> tuple[StackTables, ...]:
    """Return the stacks with the route by which ids reach their layers. Raises `DoesNotFitError` if there is none."""
    model = anatomy.model
    routes = [
        (tables.source, [model.get_submodule(layer) for layer in tables.places]) for tables in stacks if tables.source is not None
    ]
    forwarding = iter(trace_forwarding(model, routes, anatomy.program.examples))
    found = tuple(
        tables if tables.source is None else dataclasses.replace(tables, forwards_ids=next(forwarding)) for tables in stacks
    )
    for tables in found:
        if tables.source is not None and not tables.forwards_ids:
            present_injection(model.get_submodule(tables.source.path), tables.source)
    return found


def route_token_ids(tables: StackTables, source: TokenIdSource, beside: str, edit: Edit) -> None:
    """Route the ids to every table of the stack: the model's code forwards them, or each call injects them."""
    if tables.forwards_ids:
        hook = TokenIdReader(source.place).add_keyword
        edit.add_handle(edit.model.get_submodule(source.path).register_forward_pre_hook(hook, with_kwargs=True))
    else:
        start = len(source.path) + 1 if source.path else 0
        inject_token_ids(source, tuple(name[start:] for name, places in tables.places.items() if places), edit)
    for name, places in tables.places.items():
        inside = tables.injected(name, beside)
        if inside or (tables.forwards_ids and not places):  # a layer without a table must not see the keyword
            edit.replace_module(name, TokenIdInjector(edit.model.get_submodule(name), inside))
