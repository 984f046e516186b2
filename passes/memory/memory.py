"""Memory: a table for each layer or feed-forward; every token looks up one entry, a small expert whose output is added.

    y = layer(x) + w_i(x) f_i(x),   i = lookup(x, id)             x: (…, d)

`external_memory` has the lookups and the experts f_i, `ngram_memory` the lookups by the last ids. All f_i are zero at the start, so
the rewritten model computes the dense function.

The Power of External Memory in Increasing Predictive Model Capacity (2023), §3, Alg. 1 and its supplement; Alternating Updates for
Efficient Transformers (NeurIPS 2023), supplement C.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, ClassVar

import torch

from retrofit.passes.memory import reference as method_reference
from retrofit.passes.memory.external_memory import (
    ACTIVATIONS,
    FEW,
    ExternalMemory,
    GatedMemory,
    LshMemory,
    SoftmaxMemory,
    TokenIdMemory,
    activation_name,
)
from retrofit.passes.memory.memory_layer import (
    TOKEN_IDS,
    MemoryLayer,
    StackTables,
    TablePlaces,
    find_token_id_source,
    route_token_ids,
    takes_keyword,
    with_routes,
)
from retrofit.passes.memory.ngram_memory import (
    GatedNgramMemory,
    NgramLayer,
    NgramMemory,
    canonical_ids,
    parse_orders,
    primes_from,
    require_of_model,
)
from retrofit.passes.memory.value_embeddings import ValueAttention, ValueEmbedding, ValuePlace, value_formula, value_places
from retrofit.sdk import (
    Anatomy,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Recovery,
    Site,
    SpecError,
    Stack,
    WrappedModule,
    collect_near_miss,
    option,
    selected_depths,
)
from retrofit.sdk.anatomy import LayerCall, dropout_notes, feed_forwards
from retrofit.sdk.data import SAVED, came_with, tokenizer_of
from retrofit.sdk.modules import float_like, release_zeros
from retrofit.sdk.program import is_all_zeros

FEWEST, MOST = 2**14, 2**18  # rows of a hash, if derived from the vocabulary
BYTES = 512  # largest vocabulary that is treated as one of bytes


NO_TOKENIZER = "canonical=none: the model comes without a tokenizer, and none was given"
SAME_ENTRY = "the stream is all zeros there, so every token would look up the same entry"
ROWS = "memory_rows"  # in a config of transformers: the number of ids at the first rewriting, by token table


@dataclasses.dataclass(frozen=True)
class Ngrams:
    """The hashes of an n-gram table: `heads` for each order; `moduli` are the numbers of rows of the hashes, order by order."""

    orders: tuple[int, ...]
    moduli: tuple[int, ...]

    @staticmethod
    def of(text: str, heads: int, buckets: int, owner: str) -> Ngrams:
        """Return the hashes for these options. Raises `SpecError` for invalid orders, or if there are too few primes."""
        orders = parse_orders(text, owner)
        count = len(orders) * heads
        moduli = primes_from(buckets, count)
        if len(moduli) < count:
            raise SpecError(
                f"{owner}: buckets={buckets} is too small for {count} hashes",
                why=f"each hash needs a different prime number of rows, and there are {len(moduli)} primes up to {buckets}",
                remedy="use more buckets or fewer heads",
                option="buckets",
                code="range",
            )
        return Ngrams(orders, moduli)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan(Plan):
    """The tables of each stack."""

    stacks: tuple[StackTables, ...]
    resolved: Memory  # the pass with all options set
    recorded_rows: dict[str, int]  # written to a config of transformers, if tables are looked up by token id
    ngrams: Ngrams | None = None
    tokenizer: Any = dataclasses.field(default=None, compare=False, repr=False)  # for n-grams of canonical ids


@dataclasses.dataclass(frozen=True)
class Memory(Pass[MemoryPlan]):
    """Adds tables of partial experts to layers or feed-forwards; each token looks up one of them."""

    name: ClassVar[str] = "memory"
    summary: ClassVar[str] = "add external memory: a table per layer, in which each token looks up a small expert"
    paper: ClassVar[str] = "The Power of External Memory in Increasing Predictive Model Capacity, §3"
    rewrites: ClassVar[str] = "layer or feed-forward"
    exact = True
    reads_tokenizer: ClassVar[str] = "memory(lookup=ngram)"
    reference: ClassVar[MethodReference] = MethodReference(
        {
            MemoryLayer: ModuleReference(method_reference.memory_layer, ("layer",), key="stream_out", tokens=FEW),
            NgramLayer: ModuleReference(method_reference.ngram_layer, ("layer",), key="stream_out", cached=True),
            ValueEmbedding: ModuleReference(method_reference.value_embedding),
        },
        wiring=method_reference.wiring,
        start=method_reference.start,
    )

    lookup: str = option("token-id", "how a token's entry is looked up", choices=("token-id", "softmax", "lsh", "ngram"))
    buckets: int | None = option(
        None,
        "n, entries per table (ngram: per hash); none: 128 (ngram: by the vocabulary); token-id has one per token",
        minimum=1,
        maximum=2**40,
    )
    rank: int = option(0, "r, hidden units of an entry; 0: an entry is a constant", minimum=0)
    beside: str = option(
        "layers", "one table per layer, per FFN, or for each attention's values", choices=("layers", "ffns", "values")
    )
    layers: str = option(
        "auto", "depths that get a table, e.g. 0-5+8; auto: all (ngram: the first and the middle one)", depths=True
    )
    jitter: float = option(0.01, "ε, relative noise on the input of the softmax lookup in training", minimum=0)
    tables: str = option(
        "device", "where tables looked up by ids are stored: on the weights' device, or in CPU memory", choices=("device", "host")
    )
    sparse: bool = option(False, "token-id, ngram: sparse gradients, for optimizers that support them (SGD, SparseAdam)")
    form: str = option(
        "expert", "an entry of rank r: matrices of its own, or r numbers in a gated product", choices=("expert", "gated")
    )
    activation: str = option(
        "auto", "of form=gated; auto: that of the model's feed-forwards, gelu if none is found", choices=("auto", *ACTIVATIONS)
    )
    ngrams: str | None = option(None, "orders of the n-grams, e.g. 2-3 or 2+4; none: 2-3, or 2-4 for a small vocabulary")
    heads: int = option(1, "H, hashes per order", minimum=1, maximum=1024)
    canonical: str = option(
        "auto",
        "fold: texts that differ only in case and space share an id; auto: fold if the model's tokenizer is available",
        choices=("auto", "fold", "none"),
    )
    gate: str = option("none", "how rows combine: summed, or concatenated and gated by the stream", choices=("none", "context"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beside == "values" and self.lookup != "token-id":
            raise SpecError(
                f"{self.name}: beside=values needs lookup=token-id, not {self.lookup}",
                why="value embeddings are looked up by token id",
                remedy="use lookup=token-id, or beside=layers",
                option="beside",
                code="combination",
            )
        if self.gated and self.lookup != "token-id":
            raise SpecError(
                f"{self.name}: form=gated needs lookup=token-id, not {self.lookup}",
                why="its entries are per-layer embeddings of tokens",
                remedy="use lookup=token-id, or form=expert",
                option="form",
                code="combination",
            )
        if self.gated and not self.rank:
            raise SpecError(
                f"{self.name}: form=gated needs a rank",
                why="an entry is a row of r numbers, and r is 0",
                remedy="use rank=64, or form=expert",
                option="rank",
                code="combination",
            )
        if self.lookup == "ngram":
            self.check_ngrams()
            return
        if self.gate != "none":
            raise SpecError(
                f"memory: gate={self.gate} does not go with lookup={self.lookup}",
                why="it combines the rows of several hashes",
                remedy="use lookup=ngram, or gate=none",
                option="gate",
                code="combination",
            )
        for name, value in {"buckets": 128 if self.buckets is None else self.buckets, "layers": self.layers}.items():
            object.__setattr__(self, name, "all" if value == "auto" else value)

    def check_ngrams(self) -> None:
        """Raise `SpecError` for options that cannot be combined with n-grams, or with each other."""
        for name, value, why in (
            ("rank", 0, "an n-gram looks up constants"),
            ("beside", "layers", "a feed-forward is called without the mask and the cache that show earlier tokens"),
        ):
            if (given := getattr(self, name)) != value:
                raise SpecError(
                    f"memory: {name}={given} does not go with lookup=ngram",
                    why=why,
                    remedy=f"use {name}={value}",
                    option=name,
                    code="combination",
                )
        if self.ngrams is not None:
            Ngrams.of(self.ngrams, self.heads, self.buckets or FEWEST, self.name)

    @property
    def recovery(self) -> Recovery:  # type: ignore[override]
        return Recovery(table_rate=30.0 if self.rank == 0 and self.gate == "none" else 1.0)  # rows start at zero

    @property
    def uses_tokenizer(self) -> bool:
        return self.lookup == "ngram" and self.canonical != "none"

    def idle_options(self) -> dict[str, tuple[str, ...]]:
        ids = ("jitter", "ngrams", "heads", "canonical")
        idle: dict[str, tuple[str, ...]] = {
            "token-id": ids if self.buckets == 128 else ("buckets", *ids),
            "softmax": ("sparse", "tables", *ids[1:]),
            "lsh": ("sparse", "tables", *ids),
            "ngram": ("jitter",),
        }
        found = {f"lookup={self.lookup}": idle[self.lookup]}
        if self.beside == "values":
            return found | {"beside=values": ("rank", "form", "activation")}
        return found if self.gated else found | {"form=expert": ("activation",)}

    @property
    def gated(self) -> bool:
        """Return whether its tables are gated."""
        return self.form == "gated" and self.beside != "values"

    @property
    def keeps_ids(self) -> bool:
        """Return whether the number of added parameters depends on the size of the model's vocabulary."""
        return self.lookup == "token-id" or (self.lookup == "ngram" and self.canonical == "fold")

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int] | None:
        if self.buckets is None or self.lookup == "ngram":
            return None
        return frozenset({self.buckets, self.rank, *range(1, self.buckets.bit_length() + 1)})  # lsh: about half as many planes

    def resolved(self, anatomy: Anatomy, tokenizer: Any) -> Memory:
        """Return the pass with all open options set from the model."""
        if self.lookup != "ngram":
            return self.with_activation(anatomy)
        vocabulary, deepest = max((part.shape[0] for part in anatomy.embeddings), default=0), anatomy.deepest()
        return dataclasses.replace(
            self,
            ngrams=self.ngrams or ("2-4" if vocabulary <= BYTES else "2-3"),
            buckets=self.buckets or min(max(2 ** (2 * vocabulary - 1).bit_length(), FEWEST), MOST),
            layers=("0" if deepest < 2 else f"0+{deepest // 2}") if self.layers == "auto" else self.layers,
            canonical="none" if tokenizer is None or (tokenizer is SAVED and self.canonical != "fold") else "fold",
        )

    def plan(self, anatomy: Anatomy) -> MemoryPlan:
        tokenizer = tokenizer_of(anatomy.model) if self.uses_tokenizer else None
        plan = self.resolved(anatomy, tokenizer).resolved_plan(anatomy)
        if not self.uses_tokenizer:
            return plan
        if tokenizer is None:
            return dataclasses.replace(plan, notes=(*plan.notes, NO_TOKENIZER))
        if tokenizer is not SAVED:
            vocabularies = [tables.source.vocabulary for tables in plan.stacks if tables.source is not None]
            try:
                require_of_model(tokenizer, vocabularies, came_with(anatomy.model, tokenizer))
            except SpecError as refused:
                if self.canonical == "fold" or refused.code != "other-model":
                    raise
                plan = self.resolved(anatomy, None).resolved_plan(anatomy)
                return dataclasses.replace(plan, notes=(*plan.notes, f"canonical=none: {refused.what}, {refused.why}"))
        return dataclasses.replace(plan, tokenizer=tokenizer)

    def resolved_plan(self, anatomy: Anatomy) -> MemoryPlan:
        """Return the plan of a pass with all options set, whose spec is saved."""
        ngrams = Ngrams.of(str(self.ngrams), self.heads, int(self.buckets or 0), self.name) if self.lookup == "ngram" else None
        finder = TablePlaces(anatomy)
        near_misses: list[NearMiss] = []
        recorded = dict(getattr(getattr(anatomy.model, "config", None), ROWS, None) or {})
        found: list[StackTables] = []
        for stack in anatomy.stacks:
            if any(layer.name in tables.places for tables in found for layer in stack.layers):
                why = "a second stream through layers that already have tables"
                near_misses.append(NearMiss(stack.name, why, code="shared-layers"))
                continue
            calls: dict[str, LayerCall] = {}
            places = self.places(finder, stack, near_misses, calls)
            if not any(places.values()):
                continue
            if self.lookup in ("softmax", "lsh"):
                found.append(StackTables(stack.width, int(self.buckets or 0), places, None))
                continue
            with collect_near_miss(stack.name, near_misses):
                source = find_token_id_source(anatomy, stack)
                closed = frozenset(name for name in places if not takes_keyword(anatomy.model.get_submodule(name), TOKEN_IDS))
                ids = int(recorded.setdefault(source.table, source.vocabulary))  # a model that was resized keeps its tables
                rows = ids if ngrams is None else sum(ngrams.moduli)
                found.append(StackTables(stack.width, rows, places, source, closed=closed, calls=calls, ids=ids))
        stacks = with_routes(found, anatomy)
        gated = f", gated by {self.activation}" if self.gated else ""
        how = f"rank {self.rank}{gated}"
        if ngrams is not None:
            how = f"{len(ngrams.moduli)} hashes of orders {self.ngrams}, gate {self.gate}"
        kind = "value embeddings" if self.beside == "values" else "a table"
        what = f"plus {kind}, looked up by {self.lookup}, {how}"
        sites = tuple(Site(name, what) for tables in stacks for name in tables.wrapped_names(self.beside))
        gathered = [place.gathered for tables in stacks for places in tables.places.values() for place in places if place.gathered]
        parameters, formula = self.formula(stacks) if ngrams is None else self.ngram_formula(stacks, ngrams)
        return MemoryPlan(
            sites=sites,
            near_misses=tuple(near_misses),
            new_parameters=parameters,
            formula=formula,
            spec=self.spec(),
            on_host=self.tables == "host",
            notes=dropout_notes(gathered),
            stacks=stacks,
            resolved=self,
            recorded_rows=recorded if self.keeps_ids and any(tables.source for tables in stacks) else {},
            ngrams=ngrams,
        )

    def with_activation(self, anatomy: Anatomy) -> Memory:
        """Return the pass, with the activation of the model's feed-forwards if it is gated and leaves `activation` open."""
        if not self.gated or self.activation != "auto":
            return self
        hidden = (copy.deepcopy(site.hidden).eval() for site in feed_forwards(anatomy)[0])
        return dataclasses.replace(self, activation=activation_name(hidden) or "gelu")

    def places(
        self, finder: TablePlaces, stack: Stack, near_misses: list[NearMiss], calls: dict[str, LayerCall]
    ) -> dict[str, tuple[WrappedModule, ...]]:
        """Return the places for tables in a stack, by layer; layers without any are included.

        For n-grams the call of each place's layer is added to `calls`.
        """
        anatomy = finder.anatomy
        depths = sorted(selected_depths(self.layers, len(stack.layers), self.name, anatomy.deepest()))
        if self.beside == "values":
            return value_places(anatomy, stack, depths, near_misses)
        places: dict[str, tuple[WrappedModule, ...]] = {layer.name: () for layer in stack.layers if layer.name}
        for depth in depths:
            layer = stack.layers[depth]
            if self.beside == "layers" and self.lookup in ("softmax", "lsh") and is_all_zeros(anatomy.node(layer.entry)):
                name, remedy = layer.name or layer.exit, "beside=ffns: an FFN reads more"
                near_misses.append(NearMiss(name, SAME_ENTRY, remedy, in_any_form=True, code="no-context"))
                continue
            for place in finder.of_layer(layer, stack, self.beside, near_misses):
                if place in places[layer.name]:  # once if several depths share the layer
                    continue
                with collect_near_miss(layer.name, near_misses):
                    if self.lookup == "ngram":
                        calls[place.path] = finder.call_of(layer, place)
                    places[layer.name] += (place,)
        return places

    def formula(self, stacks: tuple[StackTables, ...]) -> tuple[int, str]:
        """Return the number of parameters of all tables and its formula."""
        if self.beside == "values":
            return value_formula((tables.rows, place) for tables in stacks for places in tables.places.values() for place in places)
        sizes: collections.Counter[tuple[int, int]] = collections.Counter()
        for tables in stacks:
            sizes[tables.rows, tables.width] += sum(map(len, tables.places.values()))
        kinds: dict[str, type[ExternalMemory]] = {"token-id": TokenIdMemory, "softmax": SoftmaxMemory, "lsh": LshMemory}
        kind = GatedMemory if self.gated else kinds[self.lookup]
        total = sum(times * kind.count(rows, width, self.rank) for (rows, width), times in sizes.items())
        if self.gated:
            terms = [f"{times}·({rows:,}·{self.rank} + 2·{width:,}·{self.rank})" for (rows, width), times in sizes.items()]
            return total, f"V·r + 2·d·r a table: {' + '.join(terms)} = {total:,}"
        has_router = self.lookup == "softmax"
        letter = "V" if self.lookup == "token-id" else "n"
        symbols = (f"2·r·{letter}·d" if self.rank else f"{letter}·d") + (" + n·d" if has_router else "")
        terms = []
        for (rows, width), times in sizes.items():
            numbers = (f"2·{self.rank}·" if self.rank else "") + f"{rows:,}·{width:,}"
            terms.append(f"{times}·({numbers}{f' + {rows:,}·{width:,}' if has_router else ''})")
        return total, f"{symbols} a table: {' + '.join(terms)} = {total:,}"

    def ngram_formula(self, stacks: tuple[StackTables, ...], ngrams: Ngrams) -> tuple[int, str]:
        """Return the number of parameters of all tables looked up by n-grams and its formula."""
        kind, terms, total = NgramMemory if self.gate == "none" else GatedNgramMemory, [], 0
        widths = collections.Counter({tables.width: 0 for tables in stacks})
        for tables in stacks:
            widths[tables.width] += sum(map(len, tables.places.values()))
        rows, hashes = sum(ngrams.moduli), len(ngrams.moduli)
        for width, times in widths.items():
            row = GatedNgramMemory.row_width(ngrams.moduli, width)
            numbers = f"{rows:,}·{width:,}" if self.gate == "none" else f"{rows:,}·{row:,} + 2·{width:,}·{hashes * row:,}"
            terms.append(f"{times}·({numbers})")
            total += times * kind.size(ngrams.moduli, width)
        symbols = "ΣM·d" if self.gate == "none" else "ΣM·⌊d/H⌋ + 2·d·e"
        primes = f"{hashes} primes M from {ngrams.moduli[0]:,} to {ngrams.moduli[-1]:,}"
        return total, f"{symbols} a table, {primes}: {' + '.join(terms)} = {total:,}"

    def apply(self, plan: MemoryPlan, edit: Edit) -> None:
        from transformers import PreTrainedConfig  # deferred: slow to import

        config = getattr(edit.model, "config", None)
        if plan.recorded_rows and isinstance(config, PreTrainedConfig):
            edit.set_attribute(config, ROWS, dict(plan.recorded_rows))
        for tables in plan.stacks:
            for places in tables.places.values():
                for place in places:
                    plan.resolved.add_table(place, tables, plan, edit)
        for tables in plan.stacks:
            if tables.source is not None:
                route_token_ids(tables, tables.source, self.beside, edit)

    def add_table(self, place: WrappedModule, tables: StackTables, plan: MemoryPlan, edit: Edit) -> None:
        module, into, out = edit.model.get_submodule(place.path), place.stream_in, place.stream_out
        beside = like = float_like(module, edit.model)
        on_host = self.tables == "host" and not beside.is_meta
        if on_host:
            like = torch.empty(0, dtype=beside.dtype)  # the table must be created in CPU memory
        memory: ExternalMemory
        if isinstance(place, ValuePlace):
            memory = values = ValueEmbedding(tables.rows, place.site, like, sparse=self.sparse)
            site = place.site
            place.install(edit, lambda attention: ValueAttention(attention, site.projection, values, latent=site.latent))
        elif plan.ngrams is None or tables.source is None:
            memory = self.table(tables.rows, tables.width, like)
            place.install(edit, lambda layer: MemoryLayer(layer, memory, stream_in=into, stream_out=out))
        else:
            memory = rows = self.ngram_table(plan, tables, like, edit.model.get_parameter(tables.source.table))
            name, call = history_name(place.path, module), tables.calls[place.path]
            place.install(edit, lambda layer: NgramLayer(layer, rows, stream_in=into, stream_out=out, name=name, call=call))
        memory.on_host = self.tables == "host"
        if on_host:
            memory.to(beside.device)
        release_zeros(memory)
        for late in memory.late_parameters():
            edit.expect_late_gradient(memory.get_parameter(late))

    def ngram_table(self, plan: MemoryPlan, tables: StackTables, like: torch.Tensor, token_table: torch.Tensor) -> NgramMemory:
        assert plan.ngrams is not None
        orders, moduli, width = plan.ngrams.orders, plan.ngrams.moduli, tables.width
        canonical = None
        if self.canonical == "fold" and tables.source is not None:
            canonical = canonical_ids(plan.tokenizer, tables.ids, tables.source.vocabulary).to(like.device)
        if self.gate == "none":
            return NgramMemory(orders, moduli, width, like, canonical=canonical, sparse=self.sparse)
        spread = 1.0 if token_table.is_meta else float(token_table.float().std())
        return GatedNgramMemory(orders, moduli, width, like, spread=spread, canonical=canonical, sparse=self.sparse)

    def table(self, rows: int, width: int, like: torch.Tensor) -> ExternalMemory:
        if self.gated:
            return GatedMemory(rows, width, self.rank, like, activation=self.activation, sparse=self.sparse)
        if self.lookup == "token-id":
            return TokenIdMemory(rows, width, self.rank, like, sparse=self.sparse)
        if self.lookup == "softmax":
            return SoftmaxMemory(rows, width, self.rank, like, jitter=self.jitter)
        return LshMemory(rows, width, self.rank, like)


def history_name(path: str, module: torch.nn.Module) -> str:
    """Return the name under which a memory around the module at `path` stores its ids in a cache; each of several has its own."""
    inside = sum(isinstance(part, NgramLayer) and part.name.startswith(f"{path}.memory") for part in module.modules())
    return f"{path}.memory" + (f".{inside}" if inside else "")
