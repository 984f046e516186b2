"""An attention whose projections can be computed otherwise while its own code (positions, norms, masks, cache) stays.

    q, k, v = the columns of x W + b that become queries, keys and values         self-attention
    q of x; k, v of the other stream                                              cross-attention
    y = core(q, k, v) W_out + b_out

What lies between a projection and the core is the module's own business; which columns go where is read from the graph, be they the
results of three modules or of one that lays them out by chunks, by heads or by groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.branch_roles import Attention, WeightProduct, attentions, mask_value, nearest_products, weight_product
from retrofit.anatomy.feed_forwards import Matrix, final, light, matrix_of, sources_of
from retrofit.anatomy.inspection import owner_of
from retrofit.anatomy.parts import Branch, Stack
from retrofit.anatomy.sites import NearMiss
from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, SELECTION, op, shape
from retrofit.program.capture import Call, Key, Program, capture, missing_masks
from retrofit.program.constants import with_constant_values
from retrofit.program.dataflow import Dataflow

LETTERS = ("q", "k", "v")
REST = "g"  # columns of a projection that are read for something else: a gate on what the attention gives
MOVING = LAYOUT | CAST | SELECTION | {"getitem"}  # operations that only say where an element goes


@dataclasses.dataclass(frozen=True)
class SiteProjection:
    """One module that multiplies by a weight, and which of its columns are queries, keys, values.

    A letter stands for one set of columns, "kv" for columns that are both keys and values, "g" for those that are neither.
    """

    matrix: Matrix
    columns: tuple[tuple[str, tuple[int, ...]], ...]  # by letter, ascending; together they are all the columns
    stream: str  # the node that it multiplies, the same for projections of one stream
    stream_width: int

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(letter for letter, _ in self.columns)

    @property
    def width(self) -> int:
        return sum(len(places) for _, places in self.columns)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A module inside an attention that reads the stream beside its projections: a gate, a router."""

    path: str
    key: Key  # the argument that is the stream


@dataclasses.dataclass(frozen=True)
class Mask:
    """The argument of an attention module that says which keys a query may see."""

    key: Key
    hides: bool  # whether True, in a mask of booleans, means hidden


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One attention of a model whose projections can be replaced."""

    name: str  # path of the module in whose call its projections are applied
    stack: str  # encoder or decoder
    cross: bool
    causal: bool  # whether its stack is: then it may decode with a cache
    calls: int  # how often the module is called in one forward: more than once where depths share it
    heads: int
    width: int  # of x
    source_width: int  # of what keys and values are computed from: of x but in cross-attention
    stream_in: Key  # the argument that is x; None where the projections do not all read one
    source_in: Key  # the argument that keys and values are computed from; None likewise
    projections: tuple[SiteProjection, ...]
    out: Matrix | None  # what multiplies the core's result
    out_shape: tuple[int, int]  # its columns in and out
    no_out: str  # why there is none
    returned: Key  # where the module returns the product with `out`, dropout apart; only read where `returns`
    returns: bool
    readers: tuple[Reader, ...] = ()
    entwined: str = ""  # why nothing can be handed in in place of x: its own code reads it, or the projections read several streams
    mask: Mask | None = None
    tokens_first: bool = False  # whether x is (length, batch, width) and not (batch, length, width)

    @property
    def widths(self) -> dict[str, int]:
        """The number of columns by letter."""
        return {letter: len(places) for one in self.projections for letter, places in one.columns}

    def reading(self, source: bool) -> tuple[SiteProjection, ...]:
        """The projections of x, or of the other stream of a cross-attention."""
        return tuple(one for one in self.projections if source == (self.cross and "q" not in one.letters))


# ── Finding ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention_sites(anatomy: Anatomy, chosen: Iterable[tuple[Stack, int]]) -> tuple[list[AttentionSite], list[NearMiss]]:
    """The attentions at the `chosen` depths that come apart, one a module, in order, and the others with the reason."""
    flow = Dataflow(with_constant_values(anatomy.program, anatomy.model))
    nodes = flow.named
    cores = attentions(flow)
    found: dict[str, AttentionSite] = {}
    missed: dict[str, NearMiss] = {}
    for stack, depth in chosen:
        layer = stack.layers[depth]
        for branch in layer.attentions:
            name = branch.name or layer.name or branch.output
            try:
                site = Reading(branch, stack, flow, nodes, cores).site()
                found.setdefault(site.name, site)
            except DoesNotFitError as error:
                missed.setdefault(name, NearMiss(name, error.why or error.what))
    return with_masks(list(found.values()), anatomy), list(missed.values())


class Reading:
    """One attention branch being taken apart; `site` raises `DoesNotFitError` with the reason where it does not."""

    def __init__(self, branch: Branch, stack: Stack, flow: Dataflow, nodes: dict[str, fx.Node], cores: list[Attention]) -> None:
        self.branch, self.stack, self.flow = branch, stack, flow
        self.region = flow.between(nodes[branch.source], nodes[branch.output])
        inside = set(self.region)
        self.cores = [core for core in cores if core.result in inside]

    def unfit(self, why: str) -> DoesNotFitError:
        return DoesNotFitError(
            f"the attention {self.branch.name or self.branch.output} does not come apart",
            why=why,
            remedy="leave its layer out with layers=",
        )

    def site(self) -> AttentionSite:
        if len(self.cores) != 1:
            raise self.unfit(f"the branch holds {len(self.cores)} attentions, not one")
        (core,) = self.cores
        products = self.products(core)
        owner = owner_of([product.node for product in products], self.flow)
        while owner.path and any(self.flow.call_of(product.node) is owner for product in products):
            if owner.parent is None or len(products) > 1:
                break
            owner = owner.parent  # one module makes them all: the owner is the module around it
        if not owner.path:
            raise self.unfit("its projections are applied in the model's own code, and no module owns them")
        again = next(filter(None, [self.called_again(product, owner) for product in products]), "")
        projections = tuple(self.projection(product, core, owner) for product in products)
        if sum(REST in one.letters for one in projections) > 1:
            raise self.unfit("more than one of its projections has columns that are no query, key or value")
        cross = self.branch.role == "cross-attention"
        readers: dict[bool, list[WeightProduct]] = {True: [], False: []}
        for product, projection in zip(products, projections, strict=True):
            readers[cross and "q" not in projection.letters].append(product)
        if cross and (len(readers[False]) != 1 or set(projections[products.index(readers[False][0])].letters) - {"q", REST}):
            raise self.unfit("queries are projected together with keys or values of another stream")
        x, stream_in, several = self.stream_of(readers[False], owner)
        source, source_in, _ = self.stream_of(readers[True], owner) if cross else (x, stream_in, several)
        size, source_size, query = shape(x) or (), shape(source) or (), shape(core.query) or ()
        tokens_first = len(size) == 3 and not is_laid_out(size, query)
        if len(size) != 3 or len(source_size) != 3 or (tokens_first and not is_laid_out((size[1], size[0], size[2]), query)):
            raise self.unfit(f"what it projects is {size}, and not laid out (batch, length, width)")
        if source_size[0 if tokens_first else 1] == 1:
            raise self.unfit("with the example inputs it attends to one token only: give larger example_inputs=")
        beside, entwined = ((), several or again) if several or again else self.uses_beside(x, owner, readers[False])
        out, out_shape, no_out = self.out(core)
        returned = self.returned(out, owner)
        paths = [call.path for call in self.flow.program.calls]
        return AttentionSite(
            name=owner.path,
            stack=self.stack.kind,
            cross=cross,
            causal=self.stack.causal,
            calls=paths.count(owner.path),
            heads=heads_of(projections, query),
            width=size[-1],
            source_width=source_size[-1],
            stream_in=stream_in,
            source_in=source_in,
            projections=projections,
            out=self.matrix(out) if out is not None else None,
            out_shape=out_shape,
            no_out=no_out,
            returned=returned[0] if returned else None,
            returns=bool(returned),
            readers=beside,
            entwined=entwined,
            tokens_first=tokens_first,
        )

    def products(self, core: Attention) -> list[WeightProduct]:
        """The products that make q, k and v, each once, in order, without keys and values that another layer has made."""
        found: dict[fx.Node, WeightProduct] = {}
        for letter, operand in zip(LETTERS, (core.query, core.key, core.value), strict=True):
            nearest = nearest_products([operand], self.flow)
            if any(
                product.node not in found and self.flow.reaches(product.node, core.query) for product in nearest if letter != "q"
            ):
                continue  # an earlier layer's
            if len(nearest) != 1:
                names = ", ".join(sorted({product.parameter for product in nearest})) or "none"
                raise self.unfit(
                    f"{letter} is made by {len(nearest)} matrices ({names}), and only one can be replaced for each letter"
                )
            if nearest[0].batched:
                raise self.unfit(f"the weight {nearest[0].parameter} has more than two dimensions")
            found.setdefault(nearest[0].node, nearest[0])
        return sorted(found.values(), key=lambda product: self.flow.position[product.node])

    def called_again(self, product: WeightProduct, owner: Call) -> str:
        """What else the module that makes the product projects, "" where nothing; a module that does more does not fit."""
        call, flow = self.flow.call_of(product.node), self.flow
        if call is owner or not self.is_alone(product):
            raise self.unfit(f"the weight {product.parameter} is applied by the code of {call.path or 'the model'} itself")
        again = [
            node
            for node in flow.nodes
            if node is not product.node
            and owner.encloses(flow.call_of(node))
            and (other := weight_product(node, flow)) is not None
            and other.parameter == product.parameter
        ]
        why = f"the weight {product.parameter} also projects something else ({again[0].name})" if again else ""
        if any(flow.call_of(node).path != call.path for node in again):
            raise self.unfit(why)
        return why

    def is_alone(self, product: WeightProduct) -> bool:
        """Whether the module that makes the product does nothing else."""
        call, flow = self.flow.call_of(product.node), self.flow
        own = [node for node in flow.nodes if node in flow.depends and call.encloses(flow.call_of(node))]
        return bool(call.path) and all(op(node) in LAYOUT | CAST | {"add"} or node is product.node for node in own)

    def result(self, product: WeightProduct) -> fx.Node:
        """What the projection's module returns."""
        call = self.flow.call_of(product.node)
        if list(call.outputs) != [None]:
            raise self.unfit(f"the module {call.path} does not return one tensor")
        return call.outputs[None]

    def matrix(self, product: WeightProduct) -> Matrix:
        return matrix_of(product, self.flow, set(self.flow.nodes), self.branch)

    def projection(self, product: WeightProduct, core: Attention, owner: Call) -> SiteProjection:
        result = self.result(product)
        size = shape(result) or ()
        if len(size) != 3 or size[-1] != product.out_features:
            raise self.unfit(f"the module {self.flow.call_of(product.node).path} returns {size}")
        letters = self.letters_of(result, core, owner)
        if unread := [column for column, letter in enumerate(letters) if not letter]:
            raise self.unfit(f"{len(unread)} of {len(letters)} columns of {product.parameter} are read for nothing")
        kinds = sorted(dict.fromkeys(letters), key=lambda letter: (*LETTERS, REST).index(letter[0]))
        places = ((kind, tuple(column for column, letter in enumerate(letters) if letter == kind)) for kind in kinds)
        source = sources_of(product, self.flow)[-1]
        return SiteProjection(self.matrix(product), tuple(places), source.name, product.in_features)

    def letters_of(self, result: fx.Node, core: Attention, owner: Call) -> list[str]:
        """For each column of a projection what it becomes: its columns are followed through everything that only moves them."""
        size = shape(result) or (0,)
        operands = dict(zip(LETTERS, (core.query, core.key, core.value), strict=True))
        with torch.device("cpu"):
            moved: dict[fx.Node, Any] = {result: torch.arange(size[-1]).expand(size)}
        reached: list[set[str]] = [set() for _ in range(size[-1])]
        for node in [result, *self.flow.nodes[self.flow.position[result] + 1 :]]:
            if node is not result:
                if op(node) not in MOVING or not node.args or node.args[0] not in moved:
                    continue
                moved[node] = follow(node, moved | self.indices(node))
            if not isinstance(moved[node], Tensor):
                continue
            ends = [user for user in self.flow.uses[node] if op(user) not in MOVING or user.args[0] is not node]
            inner = [letter for letter, operand in operands.items() if operand is node]
            goes = {letter for end in ends for letter, operand in operands.items() if self.flow.reaches(end, operand)}
            strays = [end for end in ends if not any(self.flow.reaches(end, operand) for operand in operands.values())]
            if any(end is not core.result and not self.is_core(end, core) for end in strays):
                goes.add(REST)
            for column in moved[node].unique().tolist():
                reached[column] |= goes | set(inner)
        return ["".join(letter for letter in LETTERS if letter in one) or "".join(one) for one in reached]

    def indices(self, node: fx.Node) -> dict[fx.Node, Tensor]:
        """The tensors of indices by which a node moves elements about; they depend on no input."""
        found = {}
        for part in node.all_input_nodes:
            if part is node.args[0]:
                continue
            value = None if part in self.flow.depends else mask_value(part, self.flow)
            if value is None or not self.are_known(part):
                raise self.unfit(f"which columns are queries depends on a tensor of indices that is not known ({node.name})")
            found[part] = value
        return found

    def are_known(self, node: fx.Node) -> bool:
        """Whether the constants that a node is computed from have values."""
        flow = self.flow
        names = [
            name for constant, name in flow.program.constants.items() if constant in flow.position and flow.reaches(constant, node)
        ]
        return not any(flow.program.values[name].is_meta for name in names if name in flow.program.values)

    def is_core(self, node: fx.Node, core: Attention) -> bool:
        """Whether the node is part of the attention proper: between its operands and its result."""
        return any(self.flow.reaches(operand, node) for operand in (core.query, core.key, core.value)) and self.flow.reaches(
            node, core.result
        )

    def argument(self, products: list[WeightProduct], owner: Call) -> tuple[fx.Node, Key]:
        """The argument of `owner` that all the products read, and its name."""
        chains = [sources_of(product, self.flow) for product in products]
        for key, node in owner.inputs.items():
            if key is not None and all(node in chain for chain in chains):
                return node, key
        inner = [product for product, chain in zip(products, chains, strict=True) if not set(owner.inputs.values()) & set(chain)]
        if inner:
            raise self.unfit(
                f"{inner[0].parameter} reads what {owner.path} makes of its arguments (operation {op(inner[0].source)})"
            )
        raise self.unfit(f"its projections do not all read one argument of {owner.path}")

    def stream_of(self, products: list[WeightProduct], owner: Call) -> tuple[fx.Node, Key, str]:
        """The argument of `owner` that all the products read, and its name; where there is none what the first reads, and why."""
        try:
            return *self.argument(products, owner), ""
        except DoesNotFitError as error:
            return sources_of(products[0], self.flow)[-1], None, error.why or error.what

    def uses_beside(self, x: fx.Node, owner: Call, products: list[WeightProduct]) -> tuple[tuple[Reader, ...], str]:
        """The modules inside `owner` that read x beside its projections, and what its own code does with x, "" where nothing."""
        flow = self.flow
        own = {product.node for product in products}
        readers: dict[Reader, None] = {}
        entwined = ""
        pending, seen = [x], {x}
        while pending:
            node = pending.pop()
            for user in flow.uses[node]:
                if user in seen or user in own or not owner.encloses(flow.call_of(user)):
                    continue
                if light(user, flow) is node:
                    seen.add(user)
                    pending.append(user)
                elif (reader := self.reader(user, node, owner, products)) is not None:
                    readers[reader] = None
                else:
                    entwined = entwined or f"beside its projections, {user.name} (operation {op(user)}) reads the stream"
        if any(node in seen for node in owner.outputs.values()):
            entwined = entwined or f"{owner.path} returns the stream that it was handed"
        return tuple(readers), entwined

    def reader(self, user: fx.Node, stream: fx.Node, owner: Call, products: list[WeightProduct]) -> Reader | None:
        """The outermost module inside `owner` that is handed the stream, in which `user` reads it and nothing is projected."""
        found = None
        for call in self.flow.call_of(user).chain:
            if call is owner or any(call.encloses(self.flow.call_of(product.node)) for product in products):
                break
            keys = [key for key, node in call.inputs.items() if key is not None and node is stream]
            found = Reader(call.path, keys[0]) if keys else found
        calls = [call for call in self.flow.program.calls if found is not None and call.path == found.path]
        return found if all(any(outer.path == owner.path for outer in call.chain) for call in calls) else None

    def out(self, core: Attention) -> tuple[WeightProduct | None, tuple[int, int], str]:
        """The first product behind the core, or why there is none that could be replaced."""
        flow = self.flow
        after = [
            product
            for node in self.region
            if flow.reaches(core.result, node) and (product := weight_product(node, flow)) is not None
        ]
        first = [one for one in after if not any(flow.reaches(other.node, one.node) for other in after if other is not one)]
        if len(first) != 1 or first[0].batched:
            return None, (0, 0), f"{len(first)} products with weights follow it at once, not one"
        (product,) = first
        if not self.is_alone(product):
            where = flow.call_of(product.node).path or "the model"
            return None, (0, 0), f"the weight {product.parameter} is applied by the code of {where} itself"
        return product, (product.in_features, product.out_features), ""

    def returned(self, out: WeightProduct | None, owner: Call) -> tuple[Key] | None:
        """Where `owner` returns the product with the output matrix, as it is or with dropout; None where it does not."""
        if out is None or not owner.encloses(self.flow.call_of(out.node)):
            return None
        result = final(out, self.flow, set(self.flow.nodes))
        for key, node in owner.outputs.items():
            before = node
            while before is not result and op(before) in DROPOUT | LAYOUT | {"getitem"} and shape(before) == shape(result):
                before = before.all_input_nodes[0]
            if before is result:
                return (key,)
        return None


def is_laid_out(x: tuple[int, ...], query: tuple[int, ...]) -> bool:
    """Whether x is (batch, length, width), judged by the queries: (…, length, features), or batch first in another order."""
    if len(query) < 3:
        return False
    return query[-2] == x[1] or (query[0] == x[0] and (len(query) > 4 or x[0] not in query[1:-1]))  # more than 4: in blocks


def heads_of(projections: Iterable[SiteProjection], query: tuple[int, ...]) -> int:
    """How many heads share the columns of the queries."""
    (columns,) = [len(places) for one in projections for letter, places in one.columns if "q" in letter]
    return columns // query[-1] if columns % query[-1] == 0 else query[-3]


def follow(node: fx.Node, moved: dict[fx.Node, Any]) -> Any:
    """The value of a node that moves elements about, on the numbers of the columns that it is handed."""
    if op(node) in CAST:
        return moved[node.args[0]]  # type: ignore[index]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: moved.get(part, part))
    change = torch.ops.aten.reshape.default if op(node) == "view" else node.target  # numbers may lie in memory otherwise
    return change(*args, **kwargs)  # type: ignore[operator]


# ── Masks ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_masks(sites: list[AttentionSite], anatomy: Anatomy) -> list[AttentionSite]:
    """Each site knows the argument by which its module is handed a mask, where there is one.

    A model that was captured without a mask may hand none on: then it is captured again with one.
    """
    known = masks_in(sites, anatomy.program)
    model = anatomy.model
    if len(known) < len(sites) and (masks := missing_masks(model, anatomy.program.examples)):
        with contextlib.suppress(CaptureError):
            known = masks_in(sites, capture(model, anatomy.program.examples | masks)) | known
    return [dataclasses.replace(site, mask=known.get(site.name)) for site in sites]


def masks_in(sites: list[AttentionSite], program: Program) -> dict[str, Mask]:
    """The masks of the sites in a captured model, by name."""
    flow = Dataflow(program)
    cores = attentions(flow)
    calls: dict[str, Call] = {}
    for call in program.calls:
        calls.setdefault(call.path, call)
    found: dict[str, Mask] = {}
    for site in sites:
        owner = calls.get(site.name, program.root)
        masks = [mask for core in cores if owner.encloses(flow.call_of(core.result)) for mask in core.masks]
        keys = [key for mask in masks if (key := mask_argument(owner, mask, site, flow)) is not None]
        if owner is not program.root and keys:
            found[site.name] = Mask(keys[0], hides(owner.inputs[keys[0]], flow))
    return found


def mask_argument(call: Call, mask: fx.Node, site: AttentionSite, flow: Dataflow) -> Key:
    """The argument of a call that `mask` is computed from, by no weight of the model: None where there is none."""
    weights = [node for node in flow.program.parameters if node in flow.position]
    stream = shape(call.inputs.get(site.stream_in))
    for key, node in call.inputs.items():
        size = shape(node) or ()
        if key in (None, site.stream_in, site.source_in) or len(size) not in (2, 4):
            continue
        if len(size) == 2 and stream is not None and size[0] not in (1, stream[site.tokens_first]):
            continue  # it is by queries and keys, of every row alike
        learned = any(flow.reaches(weight, node) for weight in weights)
        if flow.reaches(node, mask) and not learned:
            return key
    return None


def hides(node: fx.Node, flow: Dataflow) -> bool:
    """Whether True means hidden in the mask at `node`: where, without padding, nothing is True, or no token of itself."""
    with torch.device("cpu"):
        value = mask_value(node, flow)
    if value is None or value.dim() < 2:
        return False
    if value.shape[-1] == value.shape[-2]:
        return value.dtype == torch.bool and not bool(value.diagonal(dim1=-2, dim2=-1).any())
    return value.dim() == 2 and not bool(value.any())


# ── The weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def columns_of(site: AttentionSite, model: nn.Module) -> dict[str, Tensor]:
    """The dense weight of each letter, (in, columns)."""
    found = {}
    for one in site.projections:
        weight = model.get_parameter(one.matrix.weight).detach()
        weight = weight.t() if one.matrix.out_first else weight
        for letter, places in one.columns:
            found[letter] = weight[:, list(places)]
    return found
