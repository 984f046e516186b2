"""A layer or feed-forward plus a memory, and the route of token ids to memories that are looked up by them.

Layers receive the ids as the keyword `token_ids`. A hook adds it to the calls of the innermost module that takes a stack's ids and
runs its layers. If the model's code forwards keywords to the layers (determined by tracing it), nothing else is needed; otherwise
the keyword is injected into the layers for each call.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from retrofit.passes.memory.external_memory import ExternalMemory
from retrofit.sdk import (
    Anatomy,
    ArgumentPlace,
    CaptureError,
    DoesNotFitError,
    Edit,
    Stack,
    Wrapper,
    argument_at,
    argument_place,
    map_first,
    unfit,
)
from retrofit.sdk.anatomy import Part, is_token_id
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
