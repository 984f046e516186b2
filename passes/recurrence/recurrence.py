"""The recurrence pass: in parallel to each feed-forward, a projection to r numbers, a simple recurrent unit and a projection back.

    y = FFN(x) + SRU(x W_in) W_out          x: (batch, tokens, d)

The unit carries information along the sequence within one layer, for as long as its state keeps it. W_out is zero at the start, so
the rewritten model computes the dense function. `simple_recurrent_unit.py` has the unit, which computes all tokens at once.

A layer's own code calls its feed-forward with the stream alone. `RecurrentLayer` adds the keyword `recurrence` to that call: the
padding that the layer's mask shows, the layer's cache, and the layout of the stream's tokens.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.3.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.passes.recurrence import reference as method_reference
from retrofit.passes.recurrence.simple_recurrent_unit import Recurrence as RecurrentUnit
from retrofit.sdk import (
    Anatomy,
    Branch,
    DoesNotFitError,
    Edit,
    Layer,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Remedy,
    RetrofitError,
    Site,
    Stack,
    WrappedModule,
    Wrapper,
    argument_at,
    argument_place,
    collect_near_miss,
    map_first,
    option,
    selected_layers,
    unfit,
)
from retrofit.sdk.anatomy import WITHOUT_GRADIENT, InnerLayers, LayerCall, LayerCalls, WrappedModules, dropout_notes, modules_around
from retrofit.sdk.modules import (
    CacheWithHistories,
    TokenHistory,
    batch_first,
    cache_among,
    call_with_keywords,
    child_modules,
    float_like,
    histories_of,
    is_growing,
    staying_tokens,
    tensor_argument,
    unpadded_tokens,
    visible_keys,
)
from retrofit.sdk.program import refuse_state_inputs, shape

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

KEYWORD = "recurrence"
NO_FEED_FORWARD = (Remedy("emit='graph' makes each feed-forward a module", "graph"), "layers= leaves depths out")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the tokens that a feed-forward reads."""

    tokens_first: bool = False  # (tokens, batch, d), and not (batch, tokens, d)
    flat: bool = False  # batch and tokens in one dimension


class RecurrentFeedForward(Wrapper):
    """`layer(x) + recurrence(x)`.

    x is the argument `stream_in`. The sum replaces the item `stream_out` of the feed-forward's output: an index or a key, None for
    the output itself. With a cache the recurrence of a causal stack continues after the previous call: the cache stores its state,
    under the layer's name and the feed-forward's name in it.
    """

    stores_histories = True

    def __init__(
        self,
        layer: nn.Module,
        unit: RecurrentUnit,
        name: str,
        layout: Layout,
        causal: bool,
        *,
        stream_in: int | str,
        stream_out: int | str | None,
    ) -> None:
        super().__init__(layer)
        self.recurrence, self.name_in_layer, self.layout, self.causal = unit, name, layout, causal
        self.stream_in, self.stream_out = argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, recurrence: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        x, call = argument_at(self.stream_in, args, kwargs), recurrence or {}
        output = self.layer(*args, **kwargs)
        added = self.added(x, call.get("real"), call.get("cache"), call.get("sizes"), str(call.get("layer", "")))
        return map_first(output, lambda y: y + added.to(y.dtype), self.stream_out)

    def added(self, x: Tensor, real: Tensor | None, cache: Cache | None, sizes: tuple[int, int] | None, layer: str) -> Tensor:
        """Return what the recurrence adds, of the shape of x."""
        stream = x.unflatten(0, sizes) if self.layout.flat and sizes is not None else x
        stream = batch_first(stream, self.layout.tokens_first)  # (batch, T, d)
        if cache is None or not self.causal:
            y, _ = self.recurrence(stream, None, real)
        else:
            if getattr(cache, "lacks_states", False):
                raise RetrofitError(
                    "a recurrence received a cache without its states",
                    why="it was filled by a compiled training step, which stores only keys and values",
                    remedy="call model.eval() before the prompt",
                    code="cache",
                )
            histories, name = histories_of(cache), f"{layer}.{self.name_in_layer}".strip(".")
            if name not in histories:
                y, c = self.recurrence(stream, None, real)
                histories[name] = TokenHistory.in_cache(cache, 1, c)
                histories[name].push(c)
            else:
                known = histories[name]
                for _ in range(known.rounds):
                    y, c = self.recurrence(stream, known.last()[:, 0], real, known.begins)
                    known.push(c)
        return batch_first(y, self.layout.tokens_first).reshape(x.shape)


class RecurrentLayer(Wrapper):
    """Calls `layer` so that its feed-forwards at `paths` receive the keyword `recurrence`.

    Its stream is the argument `stream_in`. A checkpointed layer passes on no cache: its second run, for the gradient, must not read
    the state that the first run stored. Neither does a compiled training step, in which a model creates a cache that nothing reads:
    compiled code cannot change the class of this cache to one that stores states.
    """

    def __init__(self, layer: nn.Module, call: LayerCall, paths: tuple[str, ...]) -> None:
        super().__init__(layer)
        self.name, self.paths, self.tokens_first = call.path, paths, call.tokens_first
        self.stream_in = argument_place(layer, call.stream_in)
        self.mask = None if call.mask is None else argument_place(layer, call.mask.key)
        self.true_hides = call.mask is not None and call.mask.true_hides

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = child_modules(self)["layer"]
        x = argument_at(self.stream_in, args, kwargs)
        checkpointed = bool(self.training and getattr(layer, "gradient_checkpointing", False))
        cache: Any = None if checkpointed else cache_among(args, kwargs)
        if self.training and torch.compiler.is_dynamo_compiling() and not isinstance(cache, (CacheWithHistories, type(None))):
            cache.lacks_states = True
            cache = None
        mask = tensor_argument(self.mask, args, kwargs)
        given = {
            "real": self.unpadded(x.transpose(0, 1) if self.tokens_first else x, mask, cache),
            "cache": cache,
            "sizes": tuple(x.shape[:2]),
            "layer": "" if cache is None else self.name,  # layers that differ only in a name that is not read are captured once
        }
        return call_with_keywords(layer, self.paths, {KEYWORD: given}, args, kwargs)

    def unpadded(self, x: Tensor, mask: Tensor | None, cache: Any) -> Tensor | None:
        """Return which tokens of x are no padding, (batch or 1, tokens); None if nothing shows padding."""
        if cache is not None and (staying := staying_tokens(cache)) is not None:
            return staying
        is_fixed = cache is not None and not is_growing(cache)
        passed = self.count(x, cache) if is_fixed and self.mask is not None else None
        visible = None if mask is None else visible_keys(mask, x.shape[1], self.true_hides)
        return None if visible is None else unpadded_tokens(visible, x.shape[1], is_growing(cache), passed)

    def count(self, x: Tensor, cache: Cache) -> Tensor:
        """Return the number of tokens before x, (batch, 1), and add those of x to the cache's count."""
        histories, name = histories_of(cache), f"{self.name}.passed"
        if name not in histories:
            histories[name] = TokenHistory.in_cache(cache, 1, torch.zeros(x.shape[:2], dtype=torch.long, device=x.device))
        passed = histories[name].last()
        histories[name].push(passed + torch.arange(1, x.shape[1] + 1, device=x.device))
        return passed


@dataclasses.dataclass(frozen=True)
class RecurrentSite:
    """One feed-forward that gets a recurrence, and the call of the layer that runs it."""

    place: WrappedModule
    layer: LayerCall
    name: str  # its path inside the layer
    width: int  # d
    flat: bool  # it reads (batch · tokens, d)
    causal: bool
    bidirectional: bool


@dataclasses.dataclass(frozen=True)
class RecurrencePlan(Plan):
    """The feed-forwards that get a recurrence, by depth; shared weights get one."""

    recurrent: tuple[RecurrentSite, ...] = ()
    paths: tuple[tuple[LayerCall, tuple[str, ...]], ...] = ()  # the feed-forwards inside each layer


@dataclasses.dataclass(frozen=True)
class Recurrence(Pass[RecurrencePlan]):
    """Adds a low-rank simple recurrent unit in parallel to each feed-forward."""

    name: ClassVar[str] = "recurrence"
    summary: ClassVar[str] = "add a low-rank recurrent unit in parallel to every feed-forward"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §4.3"
    rewrites: ClassVar[str] = "feed-forward"
    exact = True
    places_by: ClassVar[tuple[str, ...]] = ("layers", "bidirectional")
    already: ClassVar[str] = "it has a recurrence already"
    reference: ClassVar[MethodReference] = MethodReference(
        {RecurrentFeedForward: ModuleReference(method_reference.recurrent_feed_forward, ("layer",), key="stream_out", cached=True)},
        wiring=method_reference.wiring,
        start=method_reference.start,
    )

    rank: int = option(32, "r, width of the recurrent unit", minimum=1)
    bidirectional: bool = option(False, "add a second unit, from the last token to the first, in stacks that are not causal")
    layers: str = option("all", "depths that get a recurrence, e.g. 0-5+8", depths=True)

    # What would be rewritten.

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset({self.rank, 2 * self.rank, 3 * self.rank})

    def plan(self, anatomy: Anatomy) -> RecurrencePlan:
        finder = SiteFinder(anatomy)
        near_misses: list[NearMiss] = []
        for stack, depth in selected_layers(anatomy, self.layers, self.name):
            self.find(stack.layers[depth], stack, finder, near_misses)
        found = list(finder.sites.values())
        if any(site.causal for site in found):
            refuse_state_inputs(anatomy.program, self.name)
        if self.bidirectional and found and not any(site.bidirectional for site in found):
            raise DoesNotFitError(
                "no stack is bidirectional",
                by="recurrence",
                why="all selected stacks are causal",
                remedy="use bidirectional=false",
                code="no-stack",
            )
        sizes = collections.Counter((site.width, 1 + site.bidirectional) for site in found)
        total = sum(count * RecurrentUnit.count(width, self.rank, directions) for (width, directions), count in sizes.items())
        return RecurrencePlan(
            sites=tuple(Site(site.place.path, self.describe(site)) for site in found),
            near_misses=tuple(near_misses),
            new_parameters=total,
            formula=self.formula(sizes, total),
            notes=dropout_notes(site.place.gathered for site in found if site.place.gathered is not None),
            recurrent=tuple(found),
            paths=tuple((call, tuple(names)) for call, names in finder.paths.values()),
        )

    def find(self, layer: Layer, stack: Stack, finder: SiteFinder, near_misses: list[NearMiss]) -> None:
        """Find the sites of one layer; each feed-forward that cannot be one becomes a near miss."""
        inner = finder.within.inside(layer)
        with collect_near_miss(layer.name or layer.exit, near_misses):
            if not inner.ffns:
                raise unfit("it has no feed-forward", NO_FEED_FORWARD)
            if not finder.anatomy.is_trained(layer):
                raise unfit(WITHOUT_GRADIENT, "layers= leaves depths out")
            if inner is layer:
                finder.modules.stream_module(layer, stack)  # raises if no module runs the layer
            call = finder.calls.of_layer(inner)
            if inner is not layer and call.mask is None and finder.takes_mask:
                raise unfit(f"no argument of {call.path} shows which of its tokens are padding", "layers= leaves depths out")
            for branch in inner.ffns:
                with collect_near_miss(branch.name or layer.name, near_misses):
                    finder.add(branch, stack, call, self.bidirectional)

    def describe(self, site: RecurrentSite) -> str:
        both = ", in both directions" if site.bidirectional else ""
        return f"plus a recurrent unit of rank {self.rank}{both}"

    def formula(self, sizes: collections.Counter[tuple[int, int]], total: int) -> str:
        """Return the number of parameters as a formula; `sizes` counts the sites by d and the number of directions."""
        r, terms = self.rank, []
        for (d, n), count in sizes.items():
            each = f"2·{d}·{r} + 3·{r}² + 2·{r}" if n == 1 else f"3·{d}·{r} + 6·{r}² + 4·{r}"
            terms.append(f"{count}·({each})")
        symbols = ["2·d·r + 3·r² + 2·r a site"] * any(n == 1 for _, n in sizes)
        symbols += ["3·d·r + 6·r² + 4·r in both directions"] * any(n == 2 for _, n in sizes)
        return f"{', '.join(symbols)}: {' + '.join(terms)} = {total:,}"

    # The rewrite.

    def apply(self, plan: RecurrencePlan, edit: Edit) -> None:
        for site in plan.recurrent:
            self.add(site, edit)
        for call, names in plan.paths:
            if call.path:
                edit.replace_module(call.path, RecurrentLayer(edit.model.get_submodule(call.path), call, names))

    def add(self, site: RecurrentSite, edit: Edit) -> None:
        module = edit.model.get_submodule(site.place.path)
        unit = RecurrentUnit(site.width, self.rank, site.bidirectional, float_like(module, edit.model))
        layout = Layout(site.layer.tokens_first, site.flat)

        def wrap(feed_forward: nn.Module) -> nn.Module:
            into, out = site.place.stream_in, site.place.stream_out
            return RecurrentFeedForward(feed_forward, unit, site.name, layout, site.causal, stream_in=into, stream_out=out)

        site.place.install(edit, wrap)
        for parameter in unit.late_parameters():
            edit.expect_late_gradient(parameter)


class SiteFinder:
    """Collects the sites of one model."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.modules = WrappedModules(anatomy, NO_FEED_FORWARD)
        self.calls, self.within = LayerCalls(anatomy), InnerLayers(anatomy.flow)
        self.takes_mask = any(name.endswith("attention_mask") for name in self.calls.masked.program.inputs.values())
        self.sites: dict[nn.Module, RecurrentSite] = {}  # by module: if several layers share it, it has one recurrence
        self.paths: dict[str, tuple[LayerCall, list[str]]] = {}  # by the path of the layer's module

    def add(self, branch: Branch, stack: Stack, call: LayerCall, bidirectional: bool) -> None:
        """Add the site of one feed-forward. Raises `DoesNotFitError` if it cannot have a recurrence."""
        place = self.modules.feed_forward(branch, stack.width)
        module = self.anatomy.model.get_submodule(place.path)
        name = self.name_in_layer(module, call)
        if any(isinstance(outer, RecurrentFeedForward) for outer in modules_around(self.anatomy.model, place.path)):
            raise unfit(Recurrence.already, "for another rank, rewrite the dense model")
        size = self.size_read(place, call)
        if size[:-1] not in (call.size[:-1], (call.size[0] * call.size[1],)):
            raise unfit(f"it reads {size} where its layer gets {call.size}: not every token once, in order")
        causal = stack.causal or call.causal
        if causal and call.times > 1 and call.takes_more:
            raise unfit(f"{call.path} is called at several depths, and the cache keeps one state for each module")
        both = bidirectional and not causal
        site = RecurrentSite(place, call, name, size[-1], len(size) == 2, causal, both)
        if (known := self.sites.setdefault(module, site)) is not site and known.bidirectional != both:
            raise unfit("a causal stack and a bidirectional one share it")
        _, names = self.paths.setdefault(call.path, (call, []))
        if name not in names:
            names.append(name)

    def name_in_layer(self, module: nn.Module, call: LayerCall) -> str:
        """Return the path of the feed-forward's module inside the layer's."""
        layer = self.anatomy.model.get_submodule(call.path)
        names = [name for name, part in layer.named_modules(remove_duplicate=False) if part is module and name]
        if not names:
            raise unfit(f"it is not inside {call.path or 'a module'}, which runs its layer", NO_FEED_FORWARD)
        return names[0]

    def size_read(self, place: WrappedModule, call: LayerCall) -> tuple[int, ...]:
        """Return the shape of what the feed-forward reads in the layer's call.

        Raises `DoesNotFitError` if the layer calls it several times.
        """
        path = place.path if place.gathered is None else place.gathered.into[0].module
        key = place.stream_in if place.gathered is None else 0
        outer = next(other for other in self.anatomy.program.calls if other.path == call.path)
        inner = [other for other in self.anatomy.program.calls if other.path == path and outer.encloses(other)]
        if len(inner) > 1:
            raise unfit(f"{call.path} calls it {len(inner)} times, each time with other tokens")
        read = inner[0].inputs.get(key) if inner else None
        return shape(read) or ()


__all__ = ["Recurrence"]
