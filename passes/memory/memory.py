"""Memory: beside each layer, or each FFN, stands a table; every token looks one entry up, a small expert whose output is added.

    y = layer(x) + w_i(x) f_i(x),   i = lookup(x, id)             x: (…, d)

    f_i(x) = b_i                          rank 0                  b: [n, d]
    f_i(x) = V_i relu(U_iᵀ x)             rank r                  U, V: [n, d, r]

    token-id   i = id, w = 1              the table has a row for every token, n = V
    softmax    p = softmax(W x'), i = argmax p, w_i = p_i         W: [n, d], x' = x ⊙ U[1−ε, 1+ε] in training
    lsh        i = Σ_k s^k (⌊a_k·x̂ + o_k⌋ mod s) mod n, w = 1    a: [m, d], o: [m], fixed; x̂ = √d x/|x|

The hyperplanes of LSH come in m sheaves of parallel, equispaced ones with random normals a_k and offsets o_k: one apart, where
tokens scaled to one length spread by one. With m = ⌈½ log₂ n⌉ sheaves there are about as many cells as buckets; s = ⌈n^(1/m)⌉.

The Power of External Memory in Increasing Predictive Model Capacity (2023), §3, Alg. 1 and its supplement; Alternating Updates for
Efficient Transformers (NeurIPS 2023), supplement C. b and V are zero at the start, which makes it the dense model's function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers.integrations.moe import _grouped_mm as grouped_mm

from retrofit.sdk import (
    NO_STREAM,
    Anatomy,
    ArgumentPlace,
    Branch,
    CaptureError,
    DoesNotFitError,
    Edit,
    FeedForward,
    ForwardWithAuxiliaryLosses,
    InjectingForward,
    Key,
    Layer,
    NearMiss,
    Part,
    Pass,
    Rewrite,
    Site,
    Stack,
    Wrapper,
    argument_place,
    call_with_keywords,
    capture,
    child_modules,
    find_argument,
    install,
    is_float,
    is_token_id,
    option,
    owner_of,
    parse_feed_forward,
    selected_depths,
    shape,
    with_item,
)

TOKEN_IDS = "token_ids"  # the keyword by which ids reach a memory
NOTED = "memory_rows"  # in a model's config: the rows of its tables, by the token table they were made for
FEW = 64  # up to so many tokens each one's expert is gathered; more are sorted by expert (measured: benchmarks/memory_overhead.py)

# ── The tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ExternalMemory(nn.Module):
    """w_i(x) f_i(x), i = lookup(x, id): zero at the start. x: (…, d), ids: x's shape without d."""

    def __init__(self, buckets: int, width: int, rank: int, like: Tensor, *, sparse: bool = False) -> None:
        super().__init__()
        self.buckets, self.width, self.rank, self.sparse = buckets, width, rank, sparse
        made: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        if rank:
            self.u = nn.Parameter(torch.randn(buckets, width, rank, **made) / math.sqrt(width))  # LeCun normal
            self.v = nn.Parameter(torch.zeros(buckets, width, rank, **made))
        else:
            self.b = nn.Parameter(torch.zeros(buckets, width, **made))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        i, weight = self.look_up(x, ids)
        y = self.experts(x.flatten(0, -2), i.flatten()).view(x.shape) if self.rank else self.rows(self.b, i)
        return y if weight is None else y * weight.unsqueeze(-1).to(y.dtype)

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The index of each token's expert, and the weight of what that says (None: 1)."""
        raise NotImplementedError

    def rows(self, table: Tensor, i: Tensor) -> Tensor:
        return F.embedding(i, table, sparse=self.sparse)

    def experts(self, x: Tensor, i: Tensor) -> Tensor:
        """V_i relu(U_iᵀ x) for each token: (tokens, d), (tokens) give (tokens, d)."""
        x = x.to(self.u.dtype)
        return self.gathered(x, i) if self.gathers(i.shape[0]) else self.grouped(x, i)

    def gathers(self, tokens: int) -> bool:
        """Whether each token gets its expert's matrices to itself: few tokens do, and programs that run without torch."""
        return torch.compiler.is_exporting() or tokens <= max(FEW, self.buckets // 2)

    def gathered(self, x: Tensor, i: Tensor) -> Tensor:
        u, v = (self.rows(table.flatten(1), i).unflatten(-1, (self.width, self.rank)) for table in (self.u, self.v))
        return torch.bmm(torch.bmm(x.unsqueeze(1), u).relu(), v.transpose(1, 2)).squeeze(1)

    def grouped(self, x: Tensor, i: Tensor) -> Tensor:
        """The tokens of one expert stand side by side, and one product serves them all."""
        i, order = torch.sort(i)
        ends = torch.searchsorted(i, torch.arange(self.buckets, device=i.device), right=True).to(torch.int32)
        odd = -self.rank % (16 // self.u.element_size())  # kernels want rows of 16 bytes
        u, v = (F.pad(table, (0, odd)) if odd else table for table in (self.u, self.v))
        hidden = grouped_mm(x.index_select(0, order), u, ends).relu()
        return grouped_mm(hidden, v.transpose(1, 2), ends).index_select(0, torch.argsort(order))

    def waiting(self) -> tuple[str, ...]:
        """The parameters whose gradient is zero while all f_i are."""
        return ("u",) if self.rank else ()

    @staticmethod
    def count(buckets: int, width: int, rank: int) -> int:
        """How many parameters the tables have."""
        return (2 * rank if rank else 1) * buckets * width

    def extra_repr(self) -> str:
        return f"buckets={self.buckets}, width={self.width}, rank={self.rank}"


class TokenIdMemory(ExternalMemory):
    """The index is the input token's id. Tokens that were added to the vocabulary later get nothing."""

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if ids is None or ids.numel() != x.numel() // x.shape[-1]:
            raise DoesNotFitError(
                "a memory that is looked up by token ids was called with "
                + ("no ids" if ids is None else f"ids {tuple(ids.shape)} and a stream {tuple(x.shape)}"),
                why="each position of the stream needs the id of its input token",
                remedy="call the model with input_ids, one for each position, or use lookup=softmax",
            )
        ids = ids.reshape(x.shape[:-1])
        return ids.clamp(max=self.buckets - 1), ids < self.buckets

    def gathers(self, tokens: int) -> bool:
        return True  # a batch holds few tokens of one kind


class SoftmaxMemory(ExternalMemory):
    """The index is the likeliest of softmax(W x), and its probability is the weight."""

    def __init__(self, buckets: int, width: int, rank: int, like: Tensor, *, jitter: float) -> None:
        super().__init__(buckets, width, rank, like)
        self.jitter = jitter
        self.w = nn.Parameter(0.02 * torch.randn(buckets, width, device=like.device, dtype=like.dtype))

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        weight, i = F.linear(x.to(self.w.dtype), self.w).float().softmax(-1).max(-1)
        return i, weight

    def waiting(self) -> tuple[str, ...]:
        return (*super().waiting(), "w")

    @staticmethod
    def count(buckets: int, width: int, rank: int) -> int:
        return ExternalMemory.count(buckets, width, rank) + buckets * width


class LshMemory(ExternalMemory):
    """The index is the cell between the hyperplanes `planes` [m, d], moved by `offsets` [m], that x lies in."""

    planes: Tensor
    offsets: Tensor

    def __init__(self, buckets: int, width: int, rank: int, like: Tensor) -> None:
        super().__init__(buckets, width, rank, like)
        sheaves = max(1, math.ceil(math.log2(buckets) / 2))
        self.slots = round_up(buckets ** (1 / sheaves))
        self.register_buffer("planes", torch.randn(sheaves, width, device=like.device, dtype=like.dtype) / math.sqrt(width))
        self.register_buffer("offsets", torch.rand(sheaves, device=like.device, dtype=like.dtype))

    def look_up(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        unit = F.normalize(x.float(), dim=-1) * math.sqrt(self.width)
        cells = torch.floor(F.linear(unit, self.planes.float()).float() + self.offsets.float()).long()  # (…, m)
        slots = cells.remainder(self.slots)
        return sum(digit * self.slots**k for k, digit in enumerate(slots.unbind(-1))).remainder(self.buckets), None  # type: ignore[union-attr]


def round_up(x: float) -> int:
    """The least integer not below x, which may have been rounded itself."""
    return math.ceil(x - 1e-9)


# ── Around a layer ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def takes_ids(module: nn.Module) -> bool:
    """Whether a memory inside `module` waits for the keyword `token_ids`."""
    return any(isinstance(part, TokenIdMemory) for part in module.modules())


class MemoryLayer(Wrapper):
    """What `layer` makes of the stream, plus what `memory` makes of it.

    The stream enters by the argument `stream_in` and leaves by `stream_out`, an index or key of what the layer returns (None: the
    value itself). The keyword `token_ids` is for the memory; the layer sees it where it has one of its own inside.
    """

    def __init__(
        self, layer: nn.Module, memory: ExternalMemory, *, stream_in: int | str = 0, stream_out: int | str | None = None
    ) -> None:
        super().__init__(layer)
        self.memory, self.hands_on = memory, takes_ids(layer)
        self.stream_in, self.stream_out = argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        ids = keywords.get(TOKEN_IDS)
        if not self.hands_on:
            keywords.pop(TOKEN_IDS, None)
        container, key = find_argument(self.stream_in, arguments, keywords)
        x = container[key]
        output = self.layer(*arguments, **keywords)
        out = None if isinstance(output, Tensor) else self.stream_out
        y = output if out is None else output[out]
        return with_item(output, out, y + self.memory(x, ids).to(y.dtype))


class Together(nn.Module):
    """A feed-forward that was spread over several modules, computed by them as before: `up`, `hidden`, `down`."""

    def __init__(self, site: FeedForward, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.hidden, self.down = up, site.hidden, down
        self.place = argument_place(down, site.stream_in if site.stream_in is not None else 0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        container, key = find_argument(self.place, list(args), kwargs)
        return self.down(self.hidden(self.up(container[key])))  # type: ignore[no-any-return]


class TokenIdsInside(Wrapper):
    """`layer`, to whose submodules at `paths` the keyword `token_ids` is handed past the layer's own code."""

    def __init__(self, layer: nn.Module, paths: tuple[str, ...]) -> None:
        super().__init__(layer)
        self.paths, self.hands_on = paths, takes_ids(layer)

    def forward(self, *args: Any, token_ids: Tensor | None = None, **kwargs: Any) -> Any:
        ids = {TOKEN_IDS: token_ids}
        return call_with_keywords(child_modules(self)["layer"], self.paths, ids, args, {**kwargs, **(ids if self.hands_on else {})})


class TokenIds:
    """Takes the token ids from a module's call, to hand them to the layers inside as the keyword `token_ids`."""

    def __init__(self, place: ArgumentPlace) -> None:
        self.place = place

    def __call__(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        position, keyword = self.place
        ids = kwargs.get(keyword) if keyword is not None else None
        if ids is None and position is not None and position < len(args):
            ids = args[position]
        if ids is None:
            raise DoesNotFitError(
                f"the model was called without {keyword or 'token ids'}",
                why="its layers look their memory up by token id, and embeddings have none",
                remedy="call it with ids instead of inputs_embeds, or rewrite with memory(lookup=softmax)",
            )
        return {TOKEN_IDS: ids}

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """As a forward pre-hook: the module is handed the keyword, which its code hands on."""
        return args, {**kwargs, **self(args, kwargs)}


# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Memory(Pass):
    """Beside layers or FFNs, a table of partial experts of which each token looks one up."""

    name: ClassVar[str] = "memory"
    summary: ClassVar[str] = "add external memory: a table beside each layer, of which every token looks up one small expert"
    paper: ClassVar[str] = "The Power of External Memory in Increasing Predictive Model Capacity, §3"

    lookup: str = option("token-id", "what a token's entry is found by", choices=("token-id", "softmax", "lsh"))
    buckets: int = option(128, "n, entries in a table; by token-id it has one for each token of the vocabulary", minimum=1)
    rank: int = option(0, "r, hidden units of an entry; 0: an entry is a constant", minimum=0)
    beside: str = option("layers", "what the tables stand beside", choices=("layers", "ffns"))
    layers: str = option("all", "depths that get a table, e.g. 0-5+8")
    jitter: float = option(0.01, "ε of the noise on what the softmax lookup reads, in training", minimum=0)
    sparse: bool = option(False, "by token-id: gradients are sparse tensors, for optimizers that take them (SGD, SparseAdam)")

    @property
    def exact(self) -> bool:
        return True

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        return Application(self, anatomy, edit).run()


@dataclasses.dataclass(frozen=True)
class Beside:
    """A module that a table goes beside, and where its input and output are."""

    path: str
    stream_in: int | str
    stream_out: Key
    spread: FeedForward | None = dataclasses.field(default=None, compare=False)  # what comes together at `path` first


@dataclasses.dataclass(frozen=True)
class Source:
    """The innermost module that takes a stack's token ids and runs its layers."""

    path: str
    place: ArgumentPlace
    rows: int  # of the token table


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tables of one stack."""

    stack: Stack
    places: dict[str, list[Beside]]  # by layer, those that get none included
    source: Source | None  # of the token ids, where they are looked up by


class Application:
    """One rewrite of one model."""

    def __init__(self, memory: Memory, anatomy: Anatomy, edit: Edit) -> None:
        self.memory, self.anatomy, self.edit = memory, anatomy, edit
        self.model = anatomy.model
        self.flow = anatomy.flow
        self.nodes = self.flow.named
        self.calls = {(call.path, call.index): call for call in anatomy.program.calls}
        self.skipped: list[NearMiss] = []
        self.notes: list[str] = []
        self.made: list[MemoryLayer] = []
        self.taken: set[str] = set()  # layers
        self.parameters = 0
        self.sizes: dict[tuple[int, int], int] = {}  # buckets and width of a table: how many there are

    def run(self) -> Rewrite:
        plans = [plan for stack in self.anatomy.stacks if (plan := self.plan(stack)) is not None]
        if not plans:
            raise DoesNotFitError(
                f"memory: no {self.memory.beside[:-1]} of the model can have a table beside it",
                why="; ".join(dict.fromkeys(f"{miss.name or 'the stack'}: {miss.why}" for miss in self.skipped[:4])),
                remedy=self.remedy(),
            )
        channels = [(plan.source, self.layers_of(plan)) for plan in plans if plan.source is not None]
        arrives = handed_down(self.model, channels, self.anatomy.program.examples)
        handed = dict(zip((source for source, _ in channels), arrives, strict=True))
        for plan in plans:
            for places in plan.places.values():
                for place in places:
                    self.wrap(place, plan)
        for plan in plans:
            if plan.source is not None:
                self.carry(plan, plan.source, handed[plan.source])
        names = {module: name for name, module in self.model.named_modules()}
        what = f"beside it a table, looked up by {self.memory.lookup}, rank {self.memory.rank}"
        late = [f"{names[one]}.memory.{name}" for one in self.made for name in one.memory.waiting()]
        return Rewrite(
            self.memory.spec(),
            True,
            tuple(Site(names[one], what) for one in self.made),
            tuple(self.skipped),
            new_parameters=self.parameters,
            formula=self.formula(),
            second_step=tuple(late),
            notes=tuple(self.notes),
        )

    def plan(self, stack: Stack) -> Plan | None:
        """What gets a table in the stack, None where nothing does; what does not is noted with the reason."""
        if any(layer.name in self.taken for layer in stack.layers):
            self.skipped.append(NearMiss(stack.name, "a second stream through layers that have their tables"))
            return None
        chosen = selected_depths(self.memory.layers, len(stack.layers), "memory")
        places: dict[str, list[Beside]] = {layer.name: [] for layer in stack.layers if layer.name}
        for depth in sorted(chosen):
            layer = stack.layers[depth]
            known = places.get(layer.name, [])
            known.extend(place for place in self.beside(layer, stack) if place not in known)
        if not any(places.values()):
            return None
        source = self.source(stack) if self.memory.lookup == "token-id" else None
        if isinstance(source, NearMiss):
            self.skipped.append(source)
            return None
        self.taken.update(places)
        return Plan(stack, places, source)

    # Where tables go.

    def beside(self, layer: Layer, stack: Stack) -> Iterator[Beside]:
        """What gets a table at this layer; what does not is noted with the reason."""
        if not layer.name:
            self.skipped.append(NearMiss(layer.exit, "no module owns the layer: its additions stand in the model's own code"))
            return
        narrow = self.narrow(layer, stack)
        if narrow is None:
            self.skipped.append(NearMiss(layer.name, f"no module in it takes the stream {stack.width} wide and returns it so"))
            return
        if self.memory.beside == "layers":
            yield narrow
            return
        if not layer.ffns:
            self.skipped.append(NearMiss(layer.name, "it has no FFN"))
        for branch in layer.ffns:
            place = self.ffn(branch, layer, narrow, stack.width)
            if isinstance(place, str):
                self.skipped.append(NearMiss(branch.name or layer.name, place))
            else:
                yield place

    def narrow(self, layer: Layer, stack: Stack) -> Beside | None:
        """The outermost module that runs the layer and takes and returns its stream d wide: inside AltUp's, where that is wider."""
        outer = self.calls[layer.name, layer.call]
        ends = [self.nodes[layer.entry], self.nodes[layer.exit]]
        if all(width_of(node) == stack.width for node in ends):
            return None if NO_STREAM in (layer.stream_in, layer.stream_out) else Beside(layer.name, *layer.stream_places())
        results = [self.nodes[branch.output] for branch in layer.branches]
        base = self.nodes[layer.branches[0].source]  # where the branches leave the stream, perhaps while it is wide
        within = [call for call in owner_of(results, self.flow).chain if outer.encloses(call) and call is not outer]
        for call in reversed(within):
            enters = [key for key, node in call.inputs.items() if width_of(node) == stack.width and self.one_stream(node, base)]
            leaves = [key for key, node in call.outputs.items() if self.made_of(node, results) and width_of(node) == stack.width]
            if enters and leaves and enters[0] is not None:
                return Beside(call.path, enters[0], leaves[0])
        return None

    def one_stream(self, node: fx.Node, other: fx.Node) -> bool:
        return node in self.flow.carried_chain(other) or other in self.flow.carried_chain(node)

    def made_of(self, node: fx.Node, parts: list[fx.Node]) -> bool:
        return all(self.flow.reaches(part, node) for part in parts)

    def ffn(self, branch: Branch, layer: Layer, narrow: Beside, width: int) -> Beside | str:
        """The module that is this FFN, or is to be, from one d-wide tensor to another; or why there is none."""
        outer = self.calls[layer.name, layer.call]
        if not branch.name or f"{narrow.path}.".startswith(f"{branch.name}."):
            return self.together(branch)
        call = next((one for one in self.calls.values() if one.path == branch.name and outer.encloses(one)), None)
        if call is None:
            return "its module is not called inside the layer"
        if any(call.encloses(self.flow.call_of(self.nodes[other.output])) for other in layer.branches if other is not branch):
            return self.together(branch)
        read = {
            key: self.flow.position[node]
            for key, node in call.inputs.items()
            if key is not None and width_of(node) == width and self.flow.reaches_through_heavy_op(node, self.nodes[branch.output])
        }
        leaves = [key for key, node in call.outputs.items() if is_float(node) and width_of(node) == width]
        if not read or not leaves:
            return f"its module does not take and return tensors {width} wide"
        return Beside(branch.name, max(read, key=lambda key: read[key]), leaves[0])  # the stream itself may be handed in as well

    def together(self, branch: Branch) -> Beside | str:
        """Where the modules of this FFN, between which the layer's own code stands, become one; or why they cannot."""
        try:
            site = parse_feed_forward(branch, self.model, self.flow)
        except DoesNotFitError as error:
            return error.why or error.what
        return Beside(site.path, site.stream_in if site.stream_in is not None else 0, None, site if site.bypassed else None)

    def wrap(self, place: Beside, plan: Plan) -> None:
        memory, module, width, site = self.memory, self.model.get_submodule(place.path), plan.stack.width, place.spread
        rows = plan.source.rows if plan.source is not None else memory.buckets
        like = next((one for one in (*module.parameters(), *self.model.parameters()) if one.is_floating_point()), torch.empty(()))
        table: ExternalMemory
        if memory.lookup == "token-id":
            table = TokenIdMemory(rows, width, memory.rank, like, sparse=memory.sparse)
        elif memory.lookup == "softmax":
            table = SoftmaxMemory(rows, width, memory.rank, like, jitter=memory.jitter)
        else:
            table = LshMemory(rows, width, memory.rank, like)
        self.parameters += table.count(rows, width, memory.rank)
        self.sizes[rows, width] = self.sizes.get((rows, width), 0) + 1
        if site is not None:
            module = Together(site, self.model.get_submodule(site.into[0].module), module)
            if site.dropout:
                self.notes.append(f"{site.path}: {site.dropout_note}")
        wrapper = MemoryLayer(module, table, stream_in=place.stream_in, stream_out=place.stream_out)
        if site is None:
            self.edit.replace_module(place.path, wrapper)
        else:
            install(site, wrapper, self.edit)
        self.made.append(wrapper)

    def formula(self) -> str:
        """The parameters of all the tables."""
        rank, router = self.memory.rank, self.memory.lookup == "softmax"
        letter = "V" if self.memory.lookup == "token-id" else "n"
        said = (f"2·r·{letter}·d" if rank else f"{letter}·d") + (" + n·d" if router else "")
        terms = []
        for (rows, width), times in self.sizes.items():
            made = (f"2·{rank}·" if rank else "") + f"{rows:,}·{width:,}" + (f" + {rows:,}·{width:,}" if router else "")
            terms.append(f"{times}·({made})")
        return f"{said} a table: {' + '.join(terms)} = {self.parameters:,}"

    def remedy(self) -> str:
        ways = ["beside=layers needs no FFN, and emit='graph' makes each a module"] if self.memory.beside == "ffns" else []
        ways += ["lookup=softmax and lookup=lsh need no ids"] if self.memory.lookup == "token-id" else []
        return "; ".join(ways) or "the layers have to be modules that take the stream and return it"

    # How ids get there.

    def source(self, stack: Stack) -> Source | NearMiss:
        """Where the stack's token ids enter, or why they do not."""
        entry = self.nodes[stack.entry]
        tables = [part for part in self.anatomy.embeddings if self.flow.reaches(self.nodes[part.node], entry)]
        table = max(tables, key=lambda part: part.shape[0], default=None)
        if table is None:
            return NearMiss(stack.name, "its stream is not made from token ids")
        index: Any = self.nodes[table.node].args[1]
        origin = {node for node in self.flow.nodes if self.flow.reaches(node, index) and is_token_id(node, self.flow)}
        layers = [self.calls[layer.name, layer.call] for layer in stack.layers if layer.name]
        around = [call for call in layers[0].chain if all(call.encloses(other) for other in layers) and call not in layers]
        for call in around:
            for key, node in call.inputs.items():
                if node in origin and key is not None and shape(node) == (shape(entry) or ())[:-1]:
                    return Source(call.path, argument_place(self.model.get_submodule(call.path), key), self.rows(table))
        return NearMiss(stack.name, f"no module around its layers takes ids of the stream's shape {(shape(entry) or ())[:-1]}")

    def rows(self, table: Part) -> int:
        """As many as the token table had when the first memory was made: a resized model keeps its tables, and loads again."""
        config = getattr(self.model, "config", None)
        noted = dict(getattr(config, NOTED, None) or {})
        rows = int(noted.setdefault(table.parameter, table.shape[0]))
        if config is not None:
            self.edit.set_attribute(config, NOTED, noted)
        return rows

    def layers_of(self, plan: Plan) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in plan.places]

    def carry(self, plan: Plan, source: Source, handed: bool) -> None:
        """The ids get to every table of the stack: handed down by the model's code, or else bound for each call."""
        module, ids = self.model.get_submodule(source.path), TokenIds(source.place)
        if handed:
            self.edit.add_handle(module.register_forward_pre_hook(ids.before, with_kwargs=True))
        else:
            start = len(source.path) + 1 if source.path else 0
            self.bind(module, tuple(name[start:] for name, places in plan.places.items() if places), ids, plan.stack)
        for name, places in plan.places.items():
            inside = tuple(place.path[len(name) + 1 :] for place in places) if self.memory.beside == "ffns" else ()
            if inside or (handed and not places):
                self.edit.replace_module(name, TokenIdsInside(self.model.get_submodule(name), inside))

    def bind(self, module: nn.Module, paths: tuple[str, ...], ids: TokenIds, stack: Stack) -> None:
        """Each call of `module` hands the ids to its submodules at `paths`, and to those that an earlier memory handed them to."""
        held = vars(module).get("forward")
        around = held if isinstance(held, ForwardWithAuxiliaryLosses) else None  # it adds to the loss whatever runs inside it
        inner = held if around is None else around.inner
        if isinstance(inner, InjectingForward) and isinstance(inner.carry, TokenIds) and inner.carry.place == ids.place:
            paths = tuple(dict.fromkeys((*inner.paths, *paths)))
        elif inner is not None:
            raise DoesNotFitError(
                f"memory: the token ids do not reach the layers of {stack.name or 'the model'}",
                why="its code does not hand them down, and its forward has been replaced already",
                remedy="apply memory before other tools change the model, or with lookup=softmax",
            )
        forward = InjectingForward(module, paths, ids)
        if around is None:
            self.edit.set_attribute(module, "forward", forward)
        else:
            self.edit.set_attribute(around, "inner", forward)


def width_of(node: fx.Node) -> int:
    return (shape(node) or (0,))[-1]


def handed_down(model: nn.Module, channels: list[tuple[Source, list[nn.Module]]], inputs: Mapping[str, Any]) -> list[bool]:
    """For each source of ids, whether the keyword that its module is handed arrives at every call of the layers: by trying."""
    if not channels:
        return []
    arrived: dict[nn.Module, bool] = {}

    def noting(layer: nn.Module) -> Callable[..., Any]:
        def note(called: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # tracers call stand-ins
            arrived[layer] = arrived.get(layer, True) and TOKEN_IDS in kwargs
            return args, {name: value for name, value in kwargs.items() if name != TOKEN_IDS or takes_ids(layer)}

        return note

    handles = []
    for source, layers in channels:
        before = TokenIds(source.place).before
        handles.append(model.get_submodule(source.path).register_forward_pre_hook(before, with_kwargs=True))
        handles += [layer.register_forward_pre_hook(noting(layer), with_kwargs=True) for layer in layers]
    try:
        capture(model, inputs)
    except CaptureError:  # a forward takes no other keyword, or hands it to one that does not
        return [False] if len(channels) == 1 else [handed_down(model, [one], inputs)[0] for one in channels]
    finally:
        for handle in handles:
            handle.remove()
    return [all(arrived.get(layer, False) for layer in layers) for _, layers in channels]
