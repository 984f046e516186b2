"""A layer or feed-forward plus a memory, the places for memories, and the route of token ids to those that are looked up by them.

A memory is added to a module whose input and output are the stream, or those of a feed-forward. One that is looked up by ids needs
the stack's ids, from where they enter the model.

Layers receive the ids as the keyword `token_ids`. A hook adds it to the calls of the innermost module that takes a stack's ids and
runs its layers. If the model's code forwards keywords to the layers (determined by tracing it), nothing else is needed; otherwise
the keyword is injected into the layers for each call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from retrofit.passes.memory.external_memory import ExternalMemory
from retrofit.sdk import (
    Anatomy,
    ArgumentPlace,
    CaptureError,
    DoesNotFitError,
    Edit,
    Layer,
    NearMiss,
    Remedy,
    Stack,
    WrappedModule,
    Wrapper,
    argument_at,
    argument_place,
    collect_near_miss,
    map_first,
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
    Part,
    WrappedModules,
    is_token_id,
    modules_around,
)
from retrofit.sdk.data import watched
from retrofit.sdk.modules import (
    ForwardWithAuxiliaryLosses,
    InjectingForward,
    call_with_keywords,
    child_modules,
    own_forward,
    tensor_argument,
)
from retrofit.sdk.program import call_or_capture, shape

TOKEN_IDS = "token_ids"  # the keyword
NEEDS_NO_IDS = "lookup=softmax and lookup=lsh need no ids"
NO_FEED_FORWARD = ("beside=layers needs no FFN", Remedy("emit='graph' makes each a module", "graph"))
BY_ITSELF = "lookup=token-id reads no earlier token"


def reads_token_ids(module: nn.Module) -> bool:
    """Return whether a memory inside `module` reads the keyword `token_ids` and the code around the memory accepts it."""
    if isinstance(module, TokenIdInjector) or any(reads_ids(child) for child in module.children()):
        return True
    if isinstance(module, Wrapper):
        return reads_token_ids(child_modules(module)["layer"])
    return any(map(reads_ids, module.modules())) and takes_keyword(module, TOKEN_IDS)


def reads_ids(module: nn.Module) -> bool:
    """Return whether the module is a memory that is looked up by token ids."""
    return isinstance(module, ExternalMemory) and module.reads_ids


def takes_keyword(module: nn.Module, name: str) -> bool:
    """Return whether the module's forward accepts a keyword of this name, or any keyword."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


class TokenIdInjector(Wrapper):
    """Calls `layer` with the keyword `token_ids` injected into its submodules at `paths`."""

    def __init__(self, layer: nn.Module, paths: tuple[str, ...]) -> None:
        super().__init__(layer)
        self.paths, self.forwards_ids = paths, reads_token_ids(layer)

    def forward(self, *args: Any, token_ids: Tensor | None = None, **kwargs: Any) -> Any:
        ids = {TOKEN_IDS: token_ids}
        keywords = {**kwargs, **(ids if self.forwards_ids else {})}
        return call_with_keywords(child_modules(self)["layer"], self.paths, ids, args, keywords)


class TokenIdReader:
    """Reads the token ids from a module's call, as the keyword `token_ids` for the layers inside."""

    def __init__(self, place: ArgumentPlace) -> None:
        self.place = place

    def __call__(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        ids = tensor_argument(self.place, args, kwargs)
        if ids is None:
            raise DoesNotFitError(
                f"the model was called without {self.place[1] or 'token ids'}",
                why="its layers look up their memory by token id",
                remedy="pass ids instead of inputs_embeds, or rewrite with memory(lookup=softmax)",
                code="no-ids",
            )
        return {TOKEN_IDS: ids}

    def add_keyword(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments with the ids added as a keyword; a forward pre-hook for a module whose code forwards it."""
        return args, {**kwargs, **self(args, kwargs)}


@dataclasses.dataclass(frozen=True)
class TokenIdSource:
    """The innermost module that takes a stack's token ids and runs its layers."""

    path: str
    place: ArgumentPlace
    table: str  # parameter name of the token table
    vocabulary: int  # its rows


def find_token_id_source(anatomy: Anatomy, stack: Stack) -> TokenIdSource:
    """Return where the stack's token ids enter the model. Raises `DoesNotFitError` if they do not."""
    flow, entry = anatomy.flow, anatomy.node(stack.entry)
    tables = [part for part in anatomy.embeddings if flow.reaches(anatomy.node(part.node), entry)]
    table: Part | None = max(tables, key=lambda part: part.shape[0], default=None)
    if table is None:
        raise unfit("its stream is not made from token ids", NEEDS_NO_IDS, code="no-ids")
    index: Any = anatomy.node(table.node).args[1]
    origins = {node for node in flow.nodes if flow.reaches(node, index) and is_token_id(node, flow)}
    calls = {(call.path, call.index): call for call in anatomy.program.calls}
    layers = [calls[layer.name, layer.call] for layer in stack.layers if layer.name]
    ids_shape = (shape(entry) or ())[:-1]
    for call in layers[0].chain:
        if call in layers or not all(call.encloses(other) for other in layers):
            continue
        for key, node in call.inputs.items():
            if node in origins and key is not None and shape(node) == ids_shape:
                place = argument_place(anatomy.model.get_submodule(call.path), key)
                return TokenIdSource(call.path, place, table.parameter, table.shape[0])
    raise unfit(f"no module around its layers takes ids of the stream's shape {ids_shape}", NEEDS_NO_IDS, code="no-ids")


def trace_forwarding(
    model: nn.Module, routes: Sequence[tuple[TokenIdSource, list[nn.Module]]], inputs: Mapping[str, Any]
) -> list[bool]:
    """Return, for each source of ids and its layers, whether the model's code forwards the keyword to all calls of the layers.

    Temporary hooks add and observe the keyword.
    """
    if not routes:
        return []
    layers = list(dict.fromkeys(layer for _, inside in routes for layer in inside))
    arrived: dict[int, bool] = {}  # by number: a model without values may be copied for the capture, with the hooks' arguments

    def add_keyword(reader: TokenIdReader, *call: Any) -> Any:
        return reader.add_keyword(*call)

    def observe(number: int, called: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        arrived[number] = arrived.get(number, True) and TOKEN_IDS in kwargs
        reads = reads_token_ids(layers[number])  # `called` may be a proxy
        return args, {name: value for name, value in kwargs.items() if name != TOKEN_IDS or reads}

    readers = {TokenIdReader(source.place): model.get_submodule(source.path) for source, _ in routes}
    try:
        with (
            watched(readers, before=add_keyword),
            watched(dict(enumerate(layers)), before=observe),
        ):
            call_or_capture(model, inputs)
    except CaptureError:  # a forward accepts no other keyword, or calls one that does not
        return [False] if len(routes) == 1 else [trace_forwarding(model, [route], inputs)[0] for route in routes]
    return [all(arrived.get(layers.index(layer), False) for layer in inside) for _, inside in routes]


def present_injection(module: nn.Module, source: TokenIdSource) -> tuple[ForwardWithAuxiliaryLosses | None, list[InjectingForward]]:
    """Return how earlier passes replaced the module's forward: the outermost, if it adds losses, and those that inject ids.

    Raises `DoesNotFitError` if something else replaced it, because ids cannot be injected then.
    """
    held = own_forward(module)
    outer = held if isinstance(held, ForwardWithAuxiliaryLosses) else None  # adds the auxiliary losses of what runs inside it
    inner = held if outer is None else outer.inner
    injecting: list[InjectingForward] = []
    while isinstance(inner, InjectingForward) and isinstance(inner.keywords_from, TokenIdReader):
        injecting.append(inner)
        inner = inner.inner
    if inner is None:
        return outer, injecting
    raise DoesNotFitError(
        f"the token ids do not reach the layers inside {source.path or 'the model'}",
        by="memory",
        why="its code does not pass them through, and its forward is already replaced",
        remedy="apply memory before other tools change the model, or with lookup=softmax",
        site=source.path,
        code="other-path",
    )


def inject_token_ids(source: TokenIdSource, paths: tuple[str, ...], edit: Edit) -> None:
    """Inject the ids of each call of the source's module into its submodules at `paths`, next to those of earlier memories.

    Several stacks inside one module have different ids, from different arguments.
    """
    module = edit.model.get_submodule(source.path)
    outer, present = present_injection(module, source)
    routes: dict[ArgumentPlace, tuple[str, ...]] = {held.keywords_from.place: held.paths for held in reversed(present)}
    routes[source.place] = tuple(dict.fromkeys((*routes.get(source.place, ()), *paths)))
    forward: InjectingForward | None = None
    for place, injected in routes.items():
        forward = InjectingForward(module, injected, TokenIdReader(place), forward)
    if outer is None:
        edit.set_attribute(module, "forward", forward)
    else:
        edit.set_attribute(outer, "inner", forward)


class MemoryLayer(Wrapper):
    """`layer(x) + memory(x, ids)`.

    x is the argument `stream_in`. The sum replaces the item `stream_out` of the layer's output: an index or a key, None for the
    output itself. The layer receives the memory's keyword `token_ids` only if a memory inside it reads it.
    """

    def __init__(
        self, layer: nn.Module, memory: ExternalMemory, *, stream_in: int | str = 0, stream_out: int | str | None = None
    ) -> None:
        super().__init__(layer)
        self.memory, self.forwards_ids = memory, reads_token_ids(layer)
        self.stream_in, self.stream_out = argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        keywords = dict(kwargs)
        ids = keywords.get(TOKEN_IDS)
        if not self.forwards_ids:
            keywords.pop(TOKEN_IDS, None)
        x = argument_at(self.stream_in, args, keywords)
        ids = self.looked_up(ids, x, args, keywords)
        return map_first(self.layer(*args, **keywords), lambda y: y + self.memory(x, ids).to(y.dtype), self.stream_out)

    def looked_up(self, ids: Tensor | None, x: Tensor, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor | None:
        """Return the ids that the memory is looked up by, from the ids and the other arguments of the layer's call."""
        return ids


# ── Places for tables ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
