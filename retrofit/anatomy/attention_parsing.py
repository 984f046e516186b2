"""Parse the attentions of a model: which modules project queries, keys and values, from which streams, and what follows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from torch import fx

from retrofit.anatomy.attention_cores import Attention, find_attentions
from retrofit.anatomy.attention_sites import (
    LETTERS,
    REST,
    AttentionSite,
    SiteProjection,
    StreamReader,
    ValueSite,
    column_letters,
    with_mask_arguments,
)
from retrofit.anatomy.branches import BEFORE_TWO_STREAMS, ON_TWO_STREAMS, is_on_two_streams, owner_of, region_of
from retrofit.anatomy.parts import NO_OWNER, Branch, Findings, Layer, NearMiss, Stack, collect_near_miss, first_of_each
from retrofit.anatomy.weights import (
    Matrix,
    WeightProduct,
    layout_source,
    matrix_of,
    nearest_products,
    operand_chain,
    product_result,
    weight_product,
)
from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, op, shape
from retrofit.program.capture import with_constant_values
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Key


def find_attention_sites(anatomy: Findings, depths: Iterable[tuple[Stack, int]]) -> tuple[list[AttentionSite], list[NearMiss]]:
    """Return the attentions at `depths` whose projections can be replaced, one a module, and a near miss for each other."""
    flow = Dataflow(with_constant_values(anatomy.program, anatomy.model))
    cores = find_attentions(flow)
    sites: dict[str, AttentionSite] = {}
    near_misses: list[NearMiss] = []
    for stack, depth in depths:
        layer = stack.layers[depth]
        for branch in layer.attentions:
            name = branch.name or layer.name or branch.output
            with collect_near_miss(name, near_misses):
                site = AttentionParser(branch, stack, flow, cores).site()
                sites.setdefault(site.name, site)
    return with_mask_arguments(list(sites.values()), anatomy), first_of_each(near_misses)


def find_value_sites(anatomy: Findings, depths: Iterable[tuple[Stack, int]]) -> tuple[dict[str, list[ValueSite]], list[NearMiss]]:
    """Return the value projections of the attentions at `depths`, by layer, and a near miss for every other attention."""
    flow = Dataflow(with_constant_values(anatomy.program, anatomy.model))
    cores = find_attentions(flow)
    sites: dict[str, list[ValueSite]] = {}
    near_misses: list[NearMiss] = []
    for stack, depth in depths:
        layer = stack.layers[depth]
        if not layer.attentions:
            is_mixed = any(branch.role == "other mixer" for branch in layer.branches)
            why = "its code that mixes tokens is not recognized as an attention" if is_mixed else "it has no attention"
            near_misses.append(NearMiss(layer.name or layer.exit, why, in_any_form=True, code="missing"))
        for branch in layer.attentions:
            with collect_near_miss(branch.name or layer.name or branch.output, near_misses):
                site = AttentionParser(branch, stack, flow, cores).value_site(layer)
                if site not in sites.setdefault(layer.name, []):
                    sites[layer.name].append(site)
    return sites, first_of_each(near_misses)


GOES_LAST = "apply the pass that put them there after this one; layers= leaves depths out"


@dataclasses.dataclass(frozen=True)
class InputStream:
    """The input of an attention's projections and the argument of the attention's module that holds it."""

    node: fx.Node
    key: Key  # None unless they all read one argument
    why_no_key: str = ""


class AttentionParser:
    """Parser of one attention branch; `site` raises `DoesNotFitError` if its projections cannot be replaced."""

    def __init__(self, branch: Branch, stack: Stack, flow: Dataflow, cores: list[Attention]) -> None:
        self.branch, self.stack, self.flow = branch, stack, flow
        self.region = region_of(branch, flow)
        inside = set(self.region)
        self.cores = [core for core in cores if core.result in inside]
        self.others: list[WeightProduct] = []  # of other streams, by weights that also project this stream

    def unfit(self, why: str, remedy: str | Sequence[str] = "", *, in_any_form: bool = False) -> DoesNotFitError:
        what = f"the attention {self.branch.name or self.branch.output} cannot be parsed"
        return DoesNotFitError(what, why=why, remedy=remedy, in_any_form=in_any_form, code="not-parsed")

    def site(self) -> AttentionSite:
        if len(self.cores) != 1:
            put = "apply the pass that put several there after this one" if self.cores else ""
            raise self.unfit(f"the branch holds {len(self.cores)} attentions, not one", put)
        (core,) = self.cores
        products = self.products(core)
        owner = self.owner(products)
        reuses = [node for product in products for node in self.reuses(product, owner)]
        projections = tuple(self.projection(product, core) for product in products)
        if sum(REST in projection.letters for projection in projections) > 1:
            raise self.unfit("more than one of its projections has columns other than queries, keys and values")
        cross = self.branch.role == "cross-attention"
        of_x = [
            product for product, projection in zip(products, projections, strict=True) if not cross or "q" in projection.letters
        ]
        of_source = [product for product in products if product not in of_x]
        if cross and (len(of_x) != 1 or set(projections[products.index(of_x[0])].letters) - {"q", REST}):
            raise self.unfit("queries are projected together with keys or values of another stream")
        x = self.input_stream(of_x, owner)
        source = self.input_stream(of_source, owner) if cross else x
        why_separate = x.why_no_key or (reuses[0] if reuses else "")
        readers: tuple[StreamReader, ...] = ()
        tokens_first = self.tokens_first(x, source, core)
        if not why_separate:
            try:
                readers = self.other_readers(x.node, owner, of_x)
            except DoesNotFitError as error:
                why_separate = error.why
        out, why_no_out = None, ""
        try:
            out = self.output_product(core)
        except DoesNotFitError as error:
            why_no_out = error.why
        out_keys = self.output_keys(out, owner) if out is not None else []
        paths = [call.path for call in self.flow.program.calls]
        return AttentionSite(
            name=owner.path,
            cross=cross,
            causal=self.stack.causal,
            calls=paths.count(owner.path),
            heads=head_count(projections, shape(core.query) or ()),
            width=(shape(x.node) or ())[-1],
            stream_in=x.key,
            source_in=source.key,
            projections=projections,
            out=self.matrix(out) if out is not None else None,
            out_shape=(out.in_features, out.out_features) if out is not None else (0, 0),
            why_no_out=why_no_out,
            returns_out=bool(out_keys),
            out_key=out_keys[0] if out_keys else None,
            readers=readers,
            why_separate=why_separate,
            tokens_first=tokens_first,
        )

    def value_site(self, layer: Layer) -> ValueSite:
        """Return the projection of the branch's values; raises `DoesNotFitError` if no module computes only these."""
        product, core = self.value_product()
        module, paths = self.flow.call_of(product.node), [call.path for call in self.flow.program.calls]
        owner = module.parent
        if owner is None or not layer.name or not f"{owner.path}.".startswith(f"{layer.name}."):
            raise self.unfit(f"no module inside the layer calls {module.path}", NO_OWNER)
        if paths.count(module.path) != paths.count(owner.path):
            raise self.unfit(
                f"{module.path} is called {paths.count(module.path)} times, and {owner.path} {paths.count(owner.path)}"
            )
        letters = column_letters(self.result(product), core, self.flow)
        if shared := sum("v" in letter and letter != "v" for letter in letters):
            raise self.unfit(f"{shared} columns of its values are keys or queries too", in_any_form=True)
        places, size = [column for column, letter in enumerate(letters) if letter == "v"], (shape(core.value) or (1,))[-1]
        blocks, start, width = blocks_of(places, len(letters))
        if not width or len(places) % size:
            raise self.unfit(f"the {len(places)} columns of its values do not come as heads of {size}")
        x, tokens = shape(product.source) or (), (shape(self.flow.node(layer.entry)) or ())[:-1]
        if math.prod(x[:-1]) != math.prod(tokens) or (len(x) == 3 and x[:-1] not in (tokens, tokens[::-1])):
            raise self.unfit(f"its values are made of {x}, and the stream's tokens are {tokens}", in_any_form=True)
        projection = module.path[len(owner.path) + 1 :]
        tokens_first = len(x) == 3 and x[:-1] != tokens
        latent = any(other.node in self.region for other in nearest_products([product.source], self.flow))
        return ValueSite(owner.path, projection, len(places) // size, x[-1], blocks, start, width, tokens_first, latent)

    def value_product(self) -> tuple[WeightProduct, Attention]:
        """Return the product by which a module computes the values, and an attention that reads them."""
        if self.branch.role == "cross-attention":
            raise self.unfit("its values are those of another stream's tokens", in_any_form=True)
        if is_on_two_streams(self.branch, [self.stack], self.flow):
            raise self.unfit(ON_TWO_STREAMS, BEFORE_TWO_STREAMS)
        made = {value: self.of_own_stream(nearest_products([value], self.flow)) for value in {core.value for core in self.cores}}
        products = {product.node: product for found in made.values() for product in found}
        if len(products) != 1:
            names = ", ".join(sorted({product.parameter for product in products.values()})) or "none"
            raise self.unfit(f"its values are made by {len(products)} matrices ({names}), not one", GOES_LAST)
        (product,) = products.values()
        where = self.flow.call_of(product.node).path or "the model"
        if product.node not in self.region:
            raise self.unfit("its values are made outside of it: another layer's, or another stream's", in_any_form=True)
        if product.batched or not self.is_alone(product):
            raise self.unfit(f"the weight {product.parameter} is applied by the code of {where} itself", NO_OWNER)
        return product, self.cores[0]

    def products(self, core: Attention) -> list[WeightProduct]:
        """Return the products that compute q, k and v, each once, in order, without an earlier layer's keys and values."""
        found: dict[fx.Node, WeightProduct] = {}
        operands = [core.query], [*core.keys], [core.value]
        for letter, made in zip(LETTERS, operands, strict=True):
            nearest = nearest_products(made, self.flow)
            if any(
                product.node not in found and self.flow.reaches(product.node, core.query) for product in nearest if letter != "q"
            ):
                continue  # an earlier layer's
            nearest = self.of_own_stream(nearest)
            if len(nearest) != 1:
                names = ", ".join(sorted({product.parameter for product in nearest})) or "none"
                why = f"{letter} is made by {len(nearest)} matrices ({names}), and only one can be replaced for each letter"
                raise self.unfit(why, GOES_LAST)
            if nearest[0].batched:
                raise self.unfit(f"the weight {nearest[0].parameter} has more than two dimensions")
            found.setdefault(nearest[0].node, nearest[0])
        return sorted(found.values(), key=lambda product: self.flow.position[product.node])

    def of_own_stream(self, nearest: list[WeightProduct]) -> list[WeightProduct]:
        """Return the product, of several with one weight, that reads the branch's own stream; note the others."""
        if len(nearest) < 2 or len({product.parameter for product in nearest}) > 1:
            return nearest
        source = self.flow.node(self.branch.source)
        own = [product for product in nearest if self.flow.reaches(source, product.node)]
        if len(own) != 1:
            return nearest
        self.others += [product for product in nearest if product is not own[0]]
        return own

    def owner(self, products: list[WeightProduct]) -> Call:
        """Return the innermost module call in which modules compute all the products, and the others."""
        owner = owner_of([product.node for product in (*products, *self.others)], self.flow)
        if len(products) == 1 and owner.parent is not None and self.flow.call_of(products[0].node) is owner:
            owner = owner.parent  # one module computes them all: the owner is the module around it
        if not owner.path:
            raise self.unfit("its projections are applied in the model's own code, and no module owns them")
        return owner

    def reuses(self, product: WeightProduct, owner: Call) -> list[str]:
        """Return a reason for each other product with the same weight by the same module inside `owner`.

        Raises `DoesNotFitError` if that module computes more than the product, or another module uses the weight.
        """
        call, flow = self.flow.call_of(product.node), self.flow
        if call is owner or not self.is_alone(product):
            raise self.unfit(f"the weight {product.parameter} is applied by the code of {call.path or 'the model'} itself")
        others = [
            node
            for node in flow.nodes
            if node is not product.node
            and owner.encloses(flow.call_of(node))
            and (other := weight_product(node, flow)) is not None
            and other.parameter == product.parameter
        ]
        streams = [product.node for product in self.others]
        what = {node: "another stream" if node in streams else "something else" for node in others}
        whys = [f"the weight {product.parameter} also projects {what[node]} ({node.name})" for node in others]
        if any(flow.call_of(node).path != call.path for node in others):
            raise self.unfit(whys[0])
        return whys

    def is_alone(self, product: WeightProduct) -> bool:
        """Return whether the product's module computes nothing else."""
        call, flow = self.flow.call_of(product.node), self.flow
        inside = [node for node in flow.nodes if node in flow.depends and call.encloses(flow.call_of(node))]
        return bool(call.path) and all(op(node) in LAYOUT | CAST | {"add"} or node is product.node for node in inside)

    def result(self, product: WeightProduct) -> fx.Node:
        """Return the output of the projection's module."""
        call = self.flow.call_of(product.node)
        if list(call.outputs) != [None]:
            raise self.unfit(f"the module {call.path} does not return one tensor")
        return call.outputs[None]

    def matrix(self, product: WeightProduct) -> Matrix:
        return matrix_of(product, self.flow, set(self.flow.nodes))

    def projection(self, product: WeightProduct, core: Attention) -> SiteProjection:
        result = self.result(product)
        size = shape(result) or ()
        if len(size) != 3 or size[-1] != product.out_features:
            raise self.unfit(f"the module {self.flow.call_of(product.node).path} returns {size}")
        letters = column_letters(result, core, self.flow)
        if unread := [column for column, letter in enumerate(letters) if not letter]:
            raise self.unfit(f"nothing reads {len(unread)} of the {len(letters)} columns of {product.parameter}")
        kinds = sorted(dict.fromkeys(letters), key=lambda letter: (*LETTERS, REST).index(letter[0]))
        places = ((kind, tuple(column for column, letter in enumerate(letters) if letter == kind)) for kind in kinds)
        source = operand_chain(product, self.flow)[-1]
        return SiteProjection(self.matrix(product), tuple(places), source.name, product.in_features)

    def input_stream(self, products: list[WeightProduct], owner: Call) -> InputStream:
        """Return the operand of the products: an argument of `owner` that they all read.

        If there is none, the operand of the first product.
        """
        chains = [operand_chain(product, self.flow) for product in products]
        for key, node in owner.inputs.items():
            if key is not None and all(node in chain for chain in chains):
                return InputStream(node, key)
        why = f"its projections do not all read one argument of {owner.path}"
        for product, chain in zip(products, chains, strict=True):
            if not set(owner.inputs.values()) & set(chain):
                made = f"the result of {op(product.source)} in the code of {owner.path}"
                return InputStream(chains[0][-1], None, f"{product.parameter} multiplies {made}, and no argument of it")
        return InputStream(chains[0][-1], None, why)

    def tokens_first(self, x: InputStream, source: InputStream, core: Attention) -> bool:
        """Return whether x is (length, batch, width); raises `DoesNotFitError` if x is no sequence, or the source one token."""
        size, source_size, query = shape(x.node) or (), shape(source.node) or (), shape(core.query) or ()
        tokens_first = len(size) == 3 and not is_batch_first(size, query)
        if len(size) != 3 or len(source_size) != 3 or (tokens_first and not is_batch_first((size[1], size[0], size[2]), query)):
            raise self.unfit(f"what it projects is {size}, and not laid out (batch, length, width)")
        if source_size[0 if tokens_first else 1] == 1:
            raise self.unfit("with the example inputs it attends to one token only: use larger example_inputs=")
        return tokens_first

    def other_readers(self, x: fx.Node, owner: Call, products: list[WeightProduct]) -> tuple[StreamReader, ...]:
        """Return the modules inside `owner` that read x, besides its projections.

        Raises `DoesNotFitError` if the owner's own code reads it.
        """
        flow = self.flow
        projecting = {product.node for product in products}
        readers: dict[StreamReader, None] = {}
        pending, copies = [x], {x}  # x in any layout or dtype
        while pending:
            node = pending.pop()
            for user in flow.uses[node]:
                if user in copies or user in projecting or not owner.encloses(flow.call_of(user)):
                    continue
                if layout_source(user, flow) is node:
                    copies.add(user)
                    pending.append(user)
                elif (reader := self.reader(user, node, owner, products)) is not None:
                    readers[reader] = None
                else:
                    raise self.unfit(f"besides its projections, {user.name} (operation {op(user)}) reads the stream")
        if any(node in copies for node in owner.outputs.values()):
            raise self.unfit(f"{owner.path} returns its input stream")
        return tuple(readers)

    def reader(self, user: fx.Node, stream: fx.Node, owner: Call, products: list[WeightProduct]) -> StreamReader | None:
        """Return the outermost module inside `owner` that takes the stream as an argument and contains `user` and no projection."""
        found = None
        for call in self.flow.call_of(user).chain:
            if call is owner or any(call.encloses(self.flow.call_of(product.node)) for product in products):
                break
            keys = [key for key, node in call.inputs.items() if key is not None and node is stream]
            found = StreamReader(call.path, keys[0]) if keys else found
        calls = [call for call in self.flow.program.calls if found is not None and call.path == found.path]
        return found if all(any(outer.path == owner.path for outer in call.chain) for call in calls) else None

    def output_product(self, core: Attention) -> WeightProduct:
        """Return the first product after the core; raises `DoesNotFitError` if none can be replaced."""
        flow = self.flow
        after = [
            product
            for node in self.region
            if flow.reaches(core.result, node) and (product := weight_product(node, flow)) is not None
        ]
        first = [
            product
            for product in after
            if not any(flow.reaches(other.node, product.node) for other in after if other is not product)
        ]
        if len(first) != 1 or first[0].batched:
            raise self.unfit(f"{len(first)} products with weights follow it at once, not one")
        (product,) = first
        if not self.is_alone(product):
            where = flow.call_of(product.node).path or "the model"
            raise self.unfit(f"the weight {product.parameter} is applied by the code of {where} itself")
        return product

    def output_keys(self, out: WeightProduct, owner: Call) -> list[Key]:
        """Return the keys at which `owner` returns the product with the output matrix, as it is or after dropout."""
        if not owner.encloses(self.flow.call_of(out.node)):
            return []
        result = product_result(out, self.flow, set(self.flow.nodes))
        return [key for key, node in owner.outputs.items() if before_dropout(node, result) is result]


def blocks_of(places: list[int], columns: int) -> tuple[int, int, int]:
    """Return the layout of ascending `places` among so many columns: the number of equal blocks, the offset and the count in each.

    The number is 0 if they are not in equal blocks.
    """
    runs = sum(index == 0 or place != places[index - 1] + 1 for index, place in enumerate(places))
    if not runs or columns % runs or len(places) % runs:
        return 0, 0, 0
    start, width, size = places[0], len(places) // runs, columns // runs
    expected = [block * size + start + column for block in range(runs) for column in range(width)]
    return (runs, start, width) if places == expected else (0, 0, 0)


def before_dropout(node: fx.Node, result: fx.Node) -> fx.Node:
    """Return the tensor that `node` is a dropout or another layout of, back to `result` at the earliest."""
    while node is not result and op(node) in DROPOUT | LAYOUT | {"getitem"} and shape(node) == shape(result):
        node = node.all_input_nodes[0]
    return node


def is_batch_first(x: tuple[int, ...], query: tuple[int, ...]) -> bool:
    """Return whether x is (batch, length, width), inferred from the queries.

    They are (…, length, features), or batch first in another order.
    """
    if len(query) < 3:
        return False
    return query[-2] == x[1] or (query[0] == x[0] and (len(query) > 4 or x[0] not in query[1:-1]))  # more than 4 axes: blocks


def head_count(projections: Iterable[SiteProjection], query: tuple[int, ...]) -> int:
    """Return the number of heads that share the columns of the queries."""
    (columns,) = [len(places) for projection in projections for letter, places in projection.columns if "q" in letter]
    return columns // query[-1] if columns % query[-1] == 0 else query[-3]
