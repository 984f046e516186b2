"""Sparse QKV: queries, keys and values from one multiplicative layer and a convolution each, and no output layer.

    m = mult(x)                 y[s,n] = Σ_i x_i D[i,s] E[i,n]                            S modules of size M
    Q, K, V = conv_Q(m), conv_K(m), conv_V(m)                                             F × F over (length, modules), M filters

The modules are laid out as the model's heads are: module s of Q is head s where S is the number of heads. A model in which r query
heads share a key head has K and V from every r-th module on (a stride of r over the modules), so the cache stays as it is. Dense
biases stay. In cross-attention Q looks at one stream, K and V at the other, with a multiplicative layer for each.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.2. The layers are in `retrofit.passes.modular`; where they start is in
`retrofit.passes.alternating`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.passes.multiplicative import Multiplicative
from retrofit.passes.sparse_qkv.alternating_least_squares import Moments, start, together
from retrofit.passes.sparse_qkv.modular import ModularProjection
from retrofit.sdk import (
    REST,
    Anatomy,
    ArgumentPlace,
    AttentionSite,
    DoesNotFitError,
    Edit,
    Key,
    Matrix,
    NearMiss,
    Pass,
    Rewrite,
    Site,
    SiteProjection,
    Stack,
    TokenHistory,
    Wrapper,
    argument_place,
    attention_sites,
    batch_first,
    cache_among,
    columns_of,
    find_argument,
    histories_of,
    option,
    out_first,
    parameters_of,
    refuse_state_inputs,
    selected_depths,
    with_item,
)

VARIANTS = ("mult-conv", "mult", "conv")
HIDDEN = -1e4  # an additive mask below this hides

# ── The modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Emptied(nn.Module):
    """Stands where a dense projection stood, without its weight.

    The code by which a model's author sets up fresh weights reads those of every projection by name: it finds an empty one.
    """

    @property
    def weight(self) -> Tensor:
        like = next(self.parameters(), torch.empty(()))
        return like.detach().new_empty(0, 1)  # of no output features and one input feature: rules for fresh weights divide by these


class Vacated(Emptied):
    """In place of a dense projection that is gone: hands on what it is handed. The bias, where there was one, is empty too."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.biased = biased

    @property
    def bias(self) -> Tensor | None:
        return self.weight.flatten() if self.biased else None

    def forward(self, y: Tensor) -> Tensor:
        return y


class Biased(Emptied):
    """In place of a dense projection: adds the dense bias to what it is handed."""

    bias: nn.Parameter | None

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)

    def forward(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Columns(Biased):
    """In place of a dense projection: its columns of what the module around it computed, plus the dense bias.

    They are `width` columns from `start` on; column c of the result is the `order[c]`-th of them, where the model's code wants them
    in another order. Where `sparse` is given they are computed here, from the stream this module is handed, (T, batch, d) where
    `tokens_first`.
    """

    order: Tensor | None

    def __init__(
        self,
        start: int,
        width: int,
        order: list[int],
        bias: nn.Parameter | None,
        sparse: ModularProjection | None,
        device: torch.device,
        tokens_first: bool = False,
    ) -> None:
        super().__init__(bias)
        self.start, self.width, self.sparse, self.tokens_first = start, width, sparse, tokens_first
        moved = order != list(range(width))
        self.register_buffer("order", torch.tensor(order, device="cpu").to(device) if moved else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.sparse is None:
            y = x.narrow(-1, self.start, self.width)
        else:
            y = batch_first(self.sparse(batch_first(x, self.tokens_first)), self.tokens_first)
        return super().forward(y if self.order is None else y.index_select(-1, self.order))

    def extra_repr(self) -> str:
        return f"{self.width} columns from {self.start}" if self.sparse is None else f"{self.width} columns"


class SparseOutput(Biased):
    """In place of a dense output layer: a multiplicative one, and the dense bias."""

    def __init__(self, sparse: ModularProjection, bias: nn.Parameter | None) -> None:
        super().__init__(bias)
        self.sparse = sparse

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.sparse(x))


class OfStream(nn.Module):
    """A module inside an attention that reads x beside the projections: x are the columns from `start` on of what it is handed.

    The module's code may read the reader's weight and bias. PEFT finds modules by their last name and by their attributes: none is
    that of another module.
    """

    def __init__(self, reader: nn.Module, key: Key, start: int) -> None:
        super().__init__()
        self.reader = reader
        self.start, self.stream_in = start, argument_place(reader, argument(key))

    @property
    def weight(self) -> Any:
        return self.reader.weight

    @property
    def bias(self) -> Any:
        return self.reader.bias

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.stream_in, arguments, keywords)
        container[key] = container[key][..., self.start :]
        return self.reader(*arguments, **keywords)


class SparseAttention(Wrapper):
    """An attention that is handed [Q|K|V] in place of x; in cross-attention Q. What it returns passes `output`, if there is one.

    It is handed [Q|K|V|x] where modules inside it read x beside. Without `sparse` it is handed x: then its projections compute for
    themselves.

    Where `sparse` or `output` looks back, it also sees the earlier calls with the same cache, which keeps their last F−1 tokens by
    the name of this module, and nothing that the mask hides from the attention itself.
    """

    def __init__(self, layer: nn.Module, site: AttentionSite, sparse: ModularProjection | None) -> None:
        super().__init__(layer)
        self.name, self.cross, self.beside, self.tokens_first = site.name, site.cross, bool(site.readers), site.tokens_first
        self.sparse = sparse
        self.output: SparseOutput | None = None
        self.returned = site.returned
        self.stream_in = argument_place(layer, argument(site.stream_in))
        self.source_in = None if site.source_in is None else argument_place(layer, site.source_in)
        self.mask = None if site.mask is None else argument_place(layer, argument(site.mask.key))
        self.hides = site.mask is not None and site.mask.hides

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.stream_in, arguments, keywords)
        x, mask = container[key], given(self.mask, arguments, keywords)
        stream = batch_first(x, self.tokens_first)  # (batch, T, d)
        cache = cache_among(arguments, keywords)
        memories = None if cache is None else histories_of(cache)
        seen = None if self.cross or mask is None else visible(mask, stream.shape[1], self.hides)
        if self.cross and mask is not None and (memories is None or self.name not in memories):
            self.hide(mask, stream.shape[1], arguments, keywords)
        if self.sparse is not None:
            packed = look_back(self.sparse, stream, seen, memories, self.name)
            packed = batch_first(torch.cat([packed, stream.to(packed.dtype)], -1) if self.beside else packed, self.tokens_first)
            arguments = [packed if value is x else value for value in arguments]
            keywords = {name: packed if value is x else value for name, value in keywords.items()}
        result = self.layer(*arguments, **keywords)
        if self.output is None:
            return result
        y = result if self.returned is None else result[self.returned]
        z = look_back(self.output.sparse, batch_first(y, self.tokens_first), seen, memories, f"{self.name}.output")
        return with_item(result, self.returned, batch_first(Biased.forward(self.output, z), self.tokens_first))

    def hide(self, mask: Tensor, tokens: int, arguments: list[Any], keywords: dict[str, Any]) -> None:
        """What no query sees of the other stream is zero there, and so it is in what the convolutions read of it."""
        if self.source_in is None:
            return
        container, key = find_argument(self.source_in, arguments, keywords)
        source = container[key]
        seen = visible(mask, tokens, self.hides)
        if source is not None and seen is not None and seen.shape[-1] == source.shape[0 if self.tokens_first else 1]:
            kept = seen.any(1).unsqueeze(-1).to(source.dtype)  # (batch or 1, keys, 1)
            container[key] = source * (kept.transpose(0, 1) if self.tokens_first else kept)


def argument(key: Key) -> int | str:
    assert key is not None
    return key


def given(place: ArgumentPlace | None, args: list[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor at a place of a call, None where there is none."""
    if place is None:
        return None
    position, keyword = place
    value = kwargs.get(keyword) if keyword is not None else None
    if value is None and position is not None and position < len(args):
        value = args[position]
    return value if isinstance(value, Tensor) else None


def look_back(
    projection: ModularProjection, x: Tensor, seen: Tensor | None, memories: dict[str, TokenHistory] | None, name: str
) -> Tensor:
    """`projection` of x with its past: what came before in this cache, zeros before the beginning, nothing that is not `seen`."""
    m = projection.in_modules(x)
    past = projection.kernel - 1
    if not past:
        return projection.joined(x, m, None)
    before = m.new_zeros(m.shape[0], past, *m.shape[2:]) if memories is None or name not in memories else memories[name].last()
    if memories is not None:
        if name not in memories:
            memories[name] = TokenHistory(past, m)
        memories[name].push(m)
    return projection.joined(x, torch.cat([before.to(m.dtype), m], 1), gates(seen, m.shape[1], past))


def visible(mask: Tensor, tokens: int, hides: bool) -> Tensor | None:
    """Which keys each query may see, (batch or 1, tokens, keys): None for a mask that is not about single keys and queries.

    `mask` is (batch, keys), 0 or False for padding, for all else where it `hides`; or (batch, heads, queries, keys), a bias or
    booleans.
    """
    if mask.dim() == 2:
        return (mask.bool() ^ hides).unsqueeze(1).expand(-1, tokens, -1)
    if mask.dim() != 4:
        return None
    one = mask[:, 0]
    shown = one > HIDDEN if one.is_floating_point() else one.bool() ^ hides
    return shown.expand(-1, tokens, -1)


def gates(seen: Tensor | None, tokens: int, past: int) -> Tensor | None:
    """Whether each query may see the keys 1 … `past` tokens before it: (batch or 1, tokens, past)."""
    if seen is None or not past:
        return None
    keys = seen.shape[-1]
    positions = torch.arange(tokens, device=seen.device)
    if keys > tokens:  # the queries are the last tokens so far; a cache of fixed length goes on behind them
        used = seen.any(1).any(0) * torch.arange(keys, device=seen.device)
        positions = positions + used.amax() - (tokens - 1)
    earlier = positions.unsqueeze(-1) - torch.arange(1, past + 1, device=seen.device)  # (tokens, past)
    return seen.gather(-1, earlier.clamp(min=0).unsqueeze(0).expand(seen.shape[0], -1, -1))


# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class SparseQKV(Pass):
    """Queries, keys and values from a multiplicative layer of S modules and an F × F convolution each; no output layer."""

    name: ClassVar[str] = "sparse-qkv"
    summary: ClassVar[str] = "replace the attention's four dense layers with a multiplicative one and three convolutions over heads"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §3.2"
    calibrates: ClassVar[bool] = True

    modules: int | None = option(None, "S, modules that a projection is divided into; none: as many as query heads", minimum=1)
    kernel: int = option(3, "F, modules and tokens that a filter sees", minimum=1)
    variant: str = option("mult-conv", "what queries, keys and values come from", choices=VARIANTS)
    output: str = option("none", "what becomes of the output layer", choices=("none", "keep", *VARIANTS))
    layers: str = option("all", "depths that are rewritten, e.g. 0-5+8")
    stacks: str = option("all", "which stacks are rewritten", choices=("all", "encoder", "decoder"))

    @property
    def exact(self) -> bool:
        return False

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        return Application(self, anatomy, edit).run()


@dataclasses.dataclass
class Plan:
    """The projections that are to stand in one attention."""

    site: AttentionSite
    own: ModularProjection | None  # of x, for all that read it; none where each computes for itself
    other: dict[str, ModularProjection]  # of those that compute for themselves, by module; a stream's share their `mult`
    output: ModularProjection | None

    @property
    def parameters(self) -> int:
        """How many there are by the formula."""
        firsts = {id(getattr(one, "mult", None)): one for one in self.other.values()}
        shared = sum(one.count() - one.count(mult=False) for one in firsts.values())
        own = [one for one in (self.own, self.output) if one is not None]
        return shared + sum(one.count(mult=False) for one in self.other.values()) + sum(one.count() for one in own)


class Application:
    """One rewrite of one model."""

    def __init__(self, options: SparseQKV, anatomy: Anatomy, edit: Edit) -> None:
        self.options, self.anatomy, self.edit = options, anatomy, edit
        self.model = anatomy.model
        self.parameters = 0
        self.notes: list[str] = []

    def run(self) -> Rewrite:
        sites, skipped = attention_sites(self.anatomy, self.chosen())
        plans = []
        for site in sites:
            try:
                plans.append(self.plan(site))
            except DoesNotFitError as error:
                skipped.append(NearMiss(site.name, error.why or error.what))
        if not plans:
            raise DoesNotFitError(
                "sparse-qkv: no attention of the model can be rewritten",
                why="; ".join(dict.fromkeys(f"{miss.name}: {miss.why}" for miss in skipped[:4])) or "the chosen layers hold none",
                remedy="see retrofit inspect; modules=, output=keep and layers= choose what is asked of it",
            )
        if self.options.kernel > 1:
            refuse_state_inputs(self.anatomy.program, self.options.name)
        moments = self.observed(plans)
        for plan in plans:
            self.begin(plan, moments)
        for plan in plans:
            self.put(plan)
        return Rewrite(
            self.options.spec(),
            False,
            tuple(Site(plan.site.name, self.what(plan)) for plan in plans),
            tuple(skipped),
            new_parameters=self.parameters,
            formula=self.formula(plans),
            notes=tuple(self.notes),
        )

    def chosen(self) -> Iterator[tuple[Stack, int]]:
        """The layers that are to be rewritten."""
        for stack in self.anatomy.stacks:
            if self.options.stacks in ("all", stack.kind):
                for depth in sorted(selected_depths(self.options.layers, len(stack.layers), "sparse-qkv")):
                    yield stack, depth

    # What is to stand where.

    def plan(self, site: AttentionSite) -> Plan:
        """The new projections of a site, not yet started; raises `DoesNotFitError` where they do not fit."""
        options, widths = self.options, site.widths
        modules = options.modules or site.heads
        whole = max(count for letter, count in widths.items() if letter != REST)
        strides = {letter: self.stride(site, letter, count, whole, modules) for letter, count in widths.items()}
        self.check_past(site)

        def made(
            width: int, projections: Iterable[SiteProjection], stride: int = 1, mult: Multiplicative | None = None
        ) -> ModularProjection:
            mine = {letter: strides[letter] // stride for one in projections for letter in one.letters}
            return self.projection(site, options.variant, width, modules // stride, whole // modules, mine, mult)

        own = None if site.entwined else made(site.width, site.reading(False))
        other: dict[str, ModularProjection] = {}
        for reading in apart(site):
            mult = None
            stride = math.gcd(*(strides[letter] for one in reading for letter in one.letters))  # others would not be read
            for one in reading:
                other[one.matrix.module] = made(one.stream_width, [one], stride, mult)
                mult = other[one.matrix.module].mult if options.variant == "mult-conv" else None
        return Plan(site, own, other, self.output(site, modules))

    def check_past(self, site: AttentionSite) -> None:
        """Where an earlier token counts, one that a cache remembers can be handed on; raises `DoesNotFitError` where not."""
        options = self.options
        if options.kernel == 1 or not site.causal:
            return
        if site.calls > 1 and "conv" in options.variant + options.output:
            why = "its module is called at several depths, and the cache keeps one past for each module"
            raise self.unfit(site, why, "kernel=1 looks at no earlier token")
        if site.entwined and "conv" in options.variant:
            why = f"{site.entwined}, so its projections compute each for itself, where no cache is handed to them"
            raise self.unfit(site, why, "kernel=1 or variant=mult look at no earlier token")

    def stride(self, site: AttentionSite, letter: str, count: int, whole: int, modules: int) -> int:
        """How many modules of the queries there are for each of a letter's."""
        if whole % modules:
            raise self.unfit(site, f"its {whole} columns are no multiple of modules={modules}")
        if whole % count or modules % (whole // count):
            raise self.unfit(site, f"{count} columns of {letter} are not every n-th of {modules} modules of {whole // modules}")
        return whole // count

    def projection(
        self,
        site: AttentionSite,
        variant: str,
        width: int,
        modules: int,
        size: int,
        strides: dict[str, int],
        mult: Multiplicative | None = None,
    ) -> ModularProjection:
        if variant == "conv" and width % modules:
            raise self.unfit(site, f"the width {width} is no multiple of modules={modules}")
        like = self.model.get_parameter(site.projections[0].matrix.weight)
        return ModularProjection(variant, width, modules, size, strides, self.options.kernel, like, mult)

    def output(self, site: AttentionSite, modules: int) -> ModularProjection | None:
        """What is to stand for the output layer, None where nothing is or it is kept."""
        kind = self.options.output
        if kind == "keep":
            return None
        if site.out is None:
            raise self.unfit(site, f"its output layer cannot be replaced: {site.no_out}; output=keep leaves it")
        into, out = site.out_shape
        if kind == "none":
            if into != out:
                raise self.unfit(site, f"without the output layer, {into} columns would join a stream of {out}; use output=keep")
            return None
        if "conv" in kind and self.options.kernel > 1 and (not site.returns or site.stream_in is None):
            lacking = "is handed no one stream" if site.returns else "does not return what its output layer makes"
            raise self.unfit(site, f"{site.name} {lacking}, so no past can be kept for it")
        if into % modules or out % modules:
            raise self.unfit(site, f"its output layer, {into} to {out}, does not divide into modules={modules}")
        return self.projection(site, kind, into, modules, out // modules, {"out": 1})

    def unfit(self, site: AttentionSite, why: str, remedy: str = "") -> DoesNotFitError:
        why = f"{why}; {remedy}" if remedy else why
        return DoesNotFitError(f"sparse-qkv: {site.name} cannot be rewritten", why=why, remedy="leave its layer out with layers=")

    # Where it starts.

    def observed(self, plans: list[Plan]) -> dict[str, Tensor | None]:
        """The second moments of what each dense matrix is handed, by module; none without calibration data."""
        if self.edit.calibration is None:
            return {}
        paths = [one.matrix.module for plan in plans for one in plan.site.projections]
        paths += [plan.site.out.module for plan in plans if plan.output is not None and plan.site.out is not None]
        watchers = {path: Moments() for path in paths}
        self.edit.calibration.observe(self.model, watchers)
        return {path: watcher.mean() for path, watcher in watchers.items()}

    def begin(self, plan: Plan, moments: dict[str, Tensor | None]) -> None:
        """The new projections are near to the dense ones, and it is noted how near."""
        site, weights = plan.site, columns_of(plan.site, self.model)
        found: dict[str, float] = {}
        if plan.own is not None:
            found |= self.started(plan.own, weights, moments.get(site.reading(False)[0].matrix.module))
        for reading in apart(site):
            paths = [one.matrix.module for one in reading]
            found |= self.started(together([plan.other[path] for path in paths]), weights, moments.get(paths[0]))
        if plan.output is not None and site.out is not None:
            found |= self.started(plan.output, {"out": out_first(site.out, self.model).t()}, moments.get(site.out.module))
        if found:
            said = ", ".join(f"{letter} {value:.3f}" for letter, value in found.items())
            self.notes.append(f"{site.name}: relative error {said}")

    @staticmethod
    def started(projection: ModularProjection, weights: dict[str, Tensor], moments: Tensor | None) -> dict[str, float]:
        return start(projection, {letter: weights[letter] for letter in projection.strides}, moments)

    # How it gets there.

    def put(self, plan: Plan) -> None:
        site, edit = plan.site, self.edit
        device = self.model.get_parameter(site.projections[0].matrix.weight).device
        begin = 0
        for one in site.projections:
            weight, bias = parameters_of(one.matrix, self.model)
            other = plan.other.get(one.matrix.module)
            start = 0 if other is not None else begin
            columns = Columns(start, one.width, order_of(one), bias, other, device, site.tokens_first)
            begin += one.width if other is None else 0
            edit.replace_module(one.matrix.module, columns)
            edit.drop_parameter(weight, "sparse layers fitted to it stand in its place")
        kept = self.put_output(plan, site.out) if self.options.output != "keep" and site.out is not None else None
        for reader in site.readers if plan.own is not None else ():  # which may hold the output layer
            edit.replace_module(reader.path, OfStream(self.model.get_submodule(reader.path), reader.key, begin))
        if plan.own is not None or kept is not None:
            wrapper = SparseAttention(self.model.get_submodule(site.name), site, plan.own)
            wrapper.output = kept if kept is None else kept.train(wrapper.layer.training)
            edit.replace_module(site.name, wrapper)
        self.parameters += plan.parameters

    def put_output(self, plan: Plan, out: Matrix) -> SparseOutput | None:
        """The output layer is gone or replaced; returns what stands for it where that looks back: its place is behind it all."""
        behind: SparseOutput | None = None
        weight, bias = parameters_of(out, self.model)
        if plan.output is None:
            self.edit.replace_module(out.module, Vacated(bias is not None))
            why = "the method has no output layer"
            if bias is not None:
                self.edit.drop_parameter(bias, why)
        else:
            why = "a sparse layer fitted to it stands in its place"
            made = SparseOutput(plan.output, bias)
            if plan.output.kernel > 1:
                behind = made
                self.edit.replace_module(out.module, Vacated(bias is not None))
            else:
                self.edit.replace_module(out.module, made)
        self.edit.drop_parameter(weight, why)
        return behind

    # What is said about it.

    def what(self, plan: Plan) -> str:
        made = [*([plan.own] if plan.own is not None else []), *plan.other.values()]
        text = f"{self.options.variant} of {made[0].module_count} modules of {made[0].size}"
        shared = {stride for one in made for stride in one.strides.values()} - {1}
        text += f", keys and values from every {max(shared)}th" if shared else ""
        return text + {"none": ", no output layer", "keep": ""}.get(self.options.output, f", output {self.options.output}")

    def formula(self, plans: list[Plan]) -> str:
        kinds = {self.options.variant, self.options.output} & set(VARIANTS)
        terms = {"mult": "mult d·(S + M)", "conv": "conv F²·M² + M"}
        parts = [term for word, term in terms.items() if any(word in kind for kind in kinds)]
        return f"{', '.join(parts)} each, in {len(plans)} attentions = {self.parameters:,}"


def apart(site: AttentionSite) -> list[list[SiteProjection]]:
    """The projections that compute for themselves, those of one stream together."""
    streams: dict[str, list[SiteProjection]] = {}
    for one in site.projections if site.entwined else site.reading(True) if site.cross else ():
        streams.setdefault(one.stream, []).append(one)
    return list(streams.values())


def order_of(projection: SiteProjection) -> list[int]:
    """For each column of a dense projection which of the new columns, letter by letter, it is."""
    places = [column for _, columns in projection.columns for column in columns]
    order = [0] * len(places)
    for new, column in enumerate(places):
        order[column] = new
    return order


__all__ = ["Columns", "OfStream", "SparseAttention", "SparseOutput", "SparseQKV", "Vacated"]
