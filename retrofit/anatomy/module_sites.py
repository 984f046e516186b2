"""The modules that passes wrap: each runs one layer, or owns one branch.

A module owns a branch if it computes all of it and no part of another, without the sum with the stream. The module in which a
branch is computed (`Branch.name`) may contain more: the layer around it, or the sum. Norms, dropout and scaling at either end may
lie outside the module that owns a branch; the products with its weights do not. Modules of a branch that code calls in sequence
become one module first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from torch import fx, nn

from retrofit.anatomy.branches import BEFORE_TWO_STREAMS, ON_TWO_STREAMS, InnerLayers, is_on_two_streams, owner_of, region_of
from retrofit.anatomy.feed_forward_parsing import hidden_feed_forwards, parse_feed_forward
from retrofit.anatomy.feed_forwards import FeedForward, GatheredFeedForward, install_feed_forward
from retrofit.anatomy.parts import (
    NO_OWNER,
    Branch,
    Findings,
    Layer,
    NearMiss,
    Role,
    Stack,
    collect_near_miss,
    first_of_each,
    unfit,
)
from retrofit.anatomy.weights import nearest_products, weight_product, width_of
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.program.aten_ops import is_float, is_heavy, shape
from retrofit.program.program import Call, Key
from retrofit.surgery import Edit
from retrofit.surgery.wrappers import Wrapper, map_first

IN_CODE = "it is computed in the model's own code, and no module owns it"


@dataclasses.dataclass(frozen=True)
class BranchOwner:
    """A call of a module that owns a branch: it takes x as `stream_in` and returns y as `stream_out`."""

    call: Call
    stream_in: int | str
    stream_out: int | str | None
    x: fx.Node
    y: fx.Node
    branches: tuple[Branch, ...]  # the branch and those in one sum with it
    last: str = ""  # path of another module with the last product, which reads only y


class BranchOwners:
    """Finder of branch owners in one model."""

    def __init__(self, anatomy: Findings) -> None:
        self.model, self.flow = anatomy.model, anatomy.flow
        self.sums: set[fx.Node] = set()
        self.work: dict[fx.Node, Branch] = {}  # heavy operation → its branch
        self.layers: dict[Branch, Layer] = {}
        for layer in map(InnerLayers(self.flow).inside, anatomy.layers):
            for branch in layer.branches:
                self.sums.add(self.flow.node(branch.add))
                self.layers[branch] = layer
                self.work.update(dict.fromkeys(filter(is_heavy, region_of(branch, self.flow)), branch))
        self.inside: dict[Call, list[fx.Node]] = {}  # call → nodes computed from the contents of the inputs
        for node in self.flow.computations:
            for call in self.flow.call_of(node).chain:
                self.inside.setdefault(call, []).append(node)
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.calls: dict[str, list[Call]] = {}  # path → calls that return something
        for call in self.flow.program.calls:
            if any(node in self.flow.position for node in call.outputs.values()):
                self.calls.setdefault(call.path, []).append(call)

    def owner(self, branch: Branch) -> BranchOwner:
        """Return the innermost call that owns `branch`, or one around it that only this layer calls or that reads a sequence.

        Of nested calls with the same tensors in and out it is the outermost: the inner ones may be parts of a method. Raises
        `DoesNotFitError` with the reason why the innermost call that computes all of it does not own it.
        """
        region, output = region_of(branch, self.flow), self.flow.node(branch.output)
        return self.innermost(branch, region, output, [node for node in region if is_heavy(node)] or region)

    def owner_but_for_last_product(self, branch: Branch) -> BranchOwner:
        """Return the call that owns all of `branch` but its last product, which another module computes from y alone."""
        flow, region, output = self.flow, region_of(branch, self.flow), self.flow.node(branch.output)
        ends = [product for product in nearest_products([output], flow) if product.node in set(region)]
        last = flow.call_of(ends[0].node) if len(ends) == 1 else flow.program.root
        work = [node for node in region if is_heavy(node) and not last.encloses(flow.call_of(node))]
        entering = list(last.inputs.items())
        if not last.path or not work or len(entering) != 1 or entering[0][0] != 0 or list(last.outputs) != [None]:
            raise self.unfit(branch, "its last product is in no module of its own")
        y = entering[0][1]
        own, inside = self.inside.get(last, []), set(region)
        if any(node not in inside or not flow.reaches(y, node) or (is_heavy(node) and node is not ends[0].node) for node in own):
            raise self.unfit(branch, f"{last.path} computes more than its last product")
        if y not in inside or any(not last.encloses(flow.call_of(user)) for user in self.readers(y, work)):
            raise self.unfit(branch, f"what {last.path} reads is read elsewhere too")
        owner = self.innermost(branch, flow.between(flow.node(branch.source), y), y, work, (last.path,))
        if owner.y is not y:
            raise self.unfit(branch, f"there is code between {owner.call.path} and {last.path}")
        if len(self.calls[last.path]) != len(self.calls[owner.call.path]):
            raise self.unfit(branch, f"{last.path} also runs elsewhere")
        return dataclasses.replace(owner, last=last.path)

    def owner_of_sum(self, branch: Branch) -> BranchOwner:
        """Return the call that owns a branch and the others of its kind in one sum: experts of all tokens, adapters.

        Raises `DoesNotFitError` if there are no others, or no call owns them together.
        """
        flow, source, add = self.flow, self.flow.node(branch.source), self.flow.node(branch.add)
        added = [other for other in self.layers[branch].branches if (other.source, other.add) == (branch.source, branch.add)]
        together = tuple(other for other in added if other.role == branch.role or (branch.role == "moe" and other.role == "ffn"))
        if len(together) < 2:
            raise self.unfit(branch, "nothing else of its kind is added to it")
        regions = {node for part in together for node in region_of(part, flow)}
        ends, other_ends = ([flow.node(other.output) for other in added if (other in together) == own] for own in (True, False))
        region = [
            node
            for node in flow.between(source, add)
            if node in regions
            or (any(flow.reaches(end, node) for end in ends) and not any(flow.reaches(end, node) for end in other_ends))
        ]
        owner = self.innermost(branch, region, add, [node for node in region if is_heavy(node)])
        return dataclasses.replace(owner, branches=together)

    def last_module(self, branch: Branch) -> str:
        """Return the path of a module that computes a branch's last product and no other, "" if there is none."""
        output = self.flow.node(branch.output)
        ends = [product for product in nearest_products([output], self.flow) if product.node in set(region_of(branch, self.flow))]
        call = self.flow.call_of(ends[0].node) if len(ends) == 1 else self.flow.program.root
        return call.path if sum(map(is_heavy, self.inside.get(call, []))) == 1 else ""

    def readers(self, node: fx.Node, work: list[fx.Node]) -> list[fx.Node]:
        """Return the users of `node` outside the innermost call that computes all of `work`."""
        around = owner_of(work, self.flow)
        return [user for user in self.flow.uses[node] if not around.encloses(self.flow.call_of(user))]

    def innermost(
        self, branch: Branch, region: list[fx.Node], output: fx.Node, work: list[fx.Node], others: tuple[str, ...] = ()
    ) -> BranchOwner:
        """Return the best of the calls that compute all of `work` and own the nodes of `region`.

        `others` have weights too.
        """
        found: list[BranchOwner] = []
        why: DoesNotFitError | None = None
        for call in owner_of(work, self.flow).chain:
            if not call.path:
                break
            try:
                found.append(self.as_owner(call, branch, set(region), output, others))
            except DoesNotFitError as error:
                why = why or error
        if not found:
            raise why or self.unfit(branch, IN_CODE)
        inner = found[0]
        alone = [candidate for candidate in found if self.is_alone(candidate.call, self.layers[branch])]
        flat = len(shape(inner.x) or ()) < len(shape(self.flow.node(branch.add)) or ())
        laid_out = [candidate for candidate in alone or found if not flat or self.lays_out(candidate, inner)]
        chosen = (laid_out or alone or found)[0]
        return [candidate for candidate in alone or found if candidate.x is chosen.x and candidate.y is chosen.y][-1]

    def as_owner(self, call: Call, branch: Branch, region: set[fx.Node], output: fx.Node, others: tuple[str, ...]) -> BranchOwner:
        """Return `call` as the owner of a branch; raises `DoesNotFitError` if it computes more or less."""
        flow = self.flow
        if any(call.encloses(flow.call_of(node)) for node in self.sums):
            raise self.unfit(branch, f"{call.path}, in which it is computed, also adds it to the stream")
        if wrapper := self.wrapper_with_part(call.path):
            raise self.unfit(branch, f"it is part of what another pass has put around {wrapper}")
        own = self.inside.get(call, [])
        for node in own:
            other = self.work.get(node)
            if node not in region and other is not None:
                raise self.unfit(branch, f"{call.path}, in which it is computed, also computes a branch that is {other.role}")
            if not flow.reaches(node, output) and (product := weight_product(node, flow)) is not None:
                raise self.unfit(branch, f"{call.path}, in which it is computed, also multiplies by {product.parameter}")
        inside, add = set(own), flow.node(branch.add)
        readers = {node: [user for user in flow.uses[node] if user in flow.depends and user not in inside] for node in own}
        ends = [node for node in own if node in region and any(flow.reaches(user, add) for user in readers[node])]
        keys = [key for key, node in call.outputs.items() if node in ends]
        if len(ends) != 1 or not keys or add in inside:
            raise self.unfit(branch, f"{call.path} does not return it as one tensor")
        source = flow.node(branch.source)
        given = [(key, node) for key, node in call.inputs.items() if key is not None and (node is source or node in region)]
        read = [(key, node) for key, node in given if is_float(node) and flow.reaches_through_heavy_op(node, output)]
        if not read:
            raise self.unfit(branch, f"{call.path} takes no argument that is what it reads of the stream")
        self.require_weights((call.path, *others), branch, [node for node in own if node in region])
        key, x = max(read, key=lambda pair: flow.position[pair[1]])  # the stream itself may be an argument too
        return BranchOwner(call, key, keys[0], x, ends[0], (branch,))

    def wrapper_with_part(self, path: str) -> str:
        """Return the path of a wrapper that added the module at `path`; "" if there is none."""
        module, steps = self.model, path.split(".")
        for count, step in enumerate(steps):
            if isinstance(module, Wrapper) and step in module._modules and step != "layer":
                return ".".join(steps[:count])
            module = module.get_submodule(step)
        return ""

    def require_weights(self, paths: tuple[str, ...], branch: Branch, nodes: list[fx.Node]) -> None:
        """Raise `DoesNotFitError` unless the modules at `paths` hold all matrices that the nodes and the branch multiply by."""
        held = {id(parameter) for path in paths for parameter in self.model.get_submodule(path).parameters()}
        products = (weight_product(node, self.flow) for node in nodes)
        names = [product.parameter for product in products if product is not None]
        for name in (*names, *(projection.name for projection in branch.projections if projection.name)):
            if name in self.parameters and id(self.parameters[name]) not in held:
                raise self.unfit(branch, f"{paths[0]} computes it with {name}, which it does not hold")

    def is_alone(self, call: Call, layer: Layer) -> bool:
        """Return whether no other layer calls the module."""
        return all(any(around.path == layer.name for around in other.chain) for other in self.calls[call.path])

    def lays_out(self, outer: BranchOwner, inner: BranchOwner) -> bool:
        """Return whether `outer` only lays tokens out in a sequence around `inner`, and back."""
        flow = self.flow
        sequence = len(shape(outer.x) or ()) > len(shape(inner.x) or ())
        return sequence and outer.x in flow.carried_chain(inner.x) and inner.y in flow.carried_chain(outer.y)

    def unfit(self, branch: Branch, why: str) -> DoesNotFitError:
        return DoesNotFitError(f"no module owns the branch {branch.name or branch.output}", why=why, code="no-owner")


NO_MODULE = "layers must be modules that take the stream and return it"


class WithLastProduct(Wrapper):
    """An attention together with the module `last` of its last product, whose result is returned at `key`."""

    def __init__(self, layer: nn.Module, last: nn.Module, key: Key) -> None:
        super().__init__(layer)
        self.last, self.key = last, key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_first(self.layer(*args, **kwargs), self.last, self.key)


@dataclasses.dataclass(frozen=True)
class WrappedModule:
    """A module to be wrapped, the places of its input and output, and what it runs."""

    path: str
    stream_in: int | str
    stream_out: Key
    gathered: FeedForward | None = dataclasses.field(default=None, compare=False)  # several modules, to be made one at `path` first
    last: str = dataclasses.field(default="", compare=False)  # path of a module that is moved into `path` first
    depths: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False)  # of each call, in results of `sites`
    branches: tuple[Branch, ...] = dataclasses.field(default=(), compare=False)  # what the calls compute, in results of `sites`

    @property
    def bypassed(self) -> tuple[str, ...]:
        """The modules that move into the one at `path` and are replaced by the identity."""
        return (self.last,) if self.last else self.gathered.bypassed if self.gathered is not None else ()

    def install(self, edit: Edit, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Replace the module by `wrap` of it, after gathering several modules into one where need be."""
        module = edit.model.get_submodule(self.path)
        if self.last:
            module = WithLastProduct(module, edit.model.get_submodule(self.last), self.stream_out)
            edit.replace_module(self.last, nn.Identity())
        if self.gathered is None:
            edit.replace_module(self.path, wrap(module))
            return
        site = self.gathered.bound_to(edit.model)
        up = edit.model.get_submodule(site.into[0].module)
        install_feed_forward(site, wrap(GatheredFeedForward(site, up, module)), edit)


class WrappedModules:
    """Finder of such modules in one model.

    `no_feed_forward` is the fix for a feed-forward that is no module, `code` that of the refusal of a place without one.
    """

    def __init__(self, anatomy: Findings, no_feed_forward: str | Sequence[str], code: str = "does-not-fit") -> None:
        self.anatomy, self.flow, self.no_feed_forward, self.code = anatomy, anatomy.flow, no_feed_forward, code
        self.owners = BranchOwners(anatomy)
        self.calls = {(call.path, call.index): call for call in anatomy.program.calls}

    def stream_module(self, layer: Layer, stack: Stack) -> WrappedModule:
        """Return the outermost module that runs the layer and takes and returns its stream d wide.

        Inside AltUp's modules, which are wider.
        """
        if not layer.name:
            why = "no module owns the layer: its residual additions are in the model's own code"
            raise unfit(why, NO_MODULE, code=self.code)
        outer = self.calls[layer.name, layer.call]
        if all(width_of(self.anatomy.node(end)) == stack.width for end in (layer.entry, layer.exit)):
            return WrappedModule(layer.name, *layer.stream_places())
        results = [self.anatomy.node(branch.output) for branch in layer.branches]
        base = self.anatomy.node(layer.branches[0].source)  # where the branches leave the stream, which may be wide there
        within = [call for call in owner_of(results, self.flow).chain if outer.encloses(call) and call is not outer]
        for call in reversed(within):
            enters = [key for key, node in call.inputs.items() if width_of(node) == stack.width and self.on_one_stream(node, base)]
            leaves = [
                key
                for key, node in call.outputs.items()
                if width_of(node) == stack.width and all(self.flow.reaches(result, node) for result in results)
            ]
            if enters and leaves and enters[0] is not None:
                return WrappedModule(call.path, enters[0], leaves[0])
        raise unfit(f"no module in it takes and returns the stream of width {stack.width}", NO_MODULE, code=self.code)

    def on_one_stream(self, node: fx.Node, other: fx.Node) -> bool:
        return node in self.flow.carried_chain(other) or other in self.flow.carried_chain(node)

    def feed_forward(self, branch: Branch, width: int) -> WrappedModule:
        """Return the module that is this FFN, or is to become it, from one d-wide tensor to another.

        Raises `DoesNotFitError` if there is none.
        """
        try:
            owner = self.owners.owner(branch)
        except DoesNotFitError:
            return self.gathered(branch)
        if width_of(owner.x) != width or width_of(owner.y) != width:
            why = f"its module does not take and return tensors of width {width}"
            raise unfit(why, self.no_feed_forward, code=self.code)
        return WrappedModule(owner.call.path, owner.stream_in, owner.stream_out)

    def gathered(self, branch: Branch) -> WrappedModule:
        """Return the place of an FFN whose modules, called by the layer's own code, become one module."""
        try:
            site = parse_feed_forward(branch, self.anatomy.model, self.flow)
        except DoesNotFitError as error:
            raise unfit(error.why or error.what, self.no_feed_forward, code=self.code) from error
        stream_in = site.stream_in if site.stream_in is not None else 0
        return WrappedModule(site.path, stream_in, None, gathered=site if site.bypassed else None)

    def branch(self, branch: Branch) -> WrappedModule:
        """Return the module that owns a branch, or is to become it; raises `DoesNotFitError` if there is none."""
        why: DoesNotFitError | None = None
        for owners in (self.owners.owner, self.owners.owner_of_sum):
            try:
                owner = owners(branch)
                return WrappedModule(owner.call.path, owner.stream_in, owner.stream_out, branches=owner.branches)
            except DoesNotFitError as error:
                why = why or error
        assert why is not None
        try:
            if branch.role == "ffn":
                return dataclasses.replace(self.gathered(branch), branches=(branch,))
            owner = self.owners.owner_but_for_last_product(branch)
        except DoesNotFitError:
            last = self.owners.last_module(branch)
            remedy = f"what changes its result alone can wrap {last}" if last else self.no_feed_forward
            raise unfit(why.why, remedy, code=self.code) from why
        return WrappedModule(owner.call.path, owner.stream_in, owner.stream_out, last=owner.last, branches=owner.branches)


Use = tuple[tuple[int, int], WrappedModule]  # stack and depth, the module that owns what is computed there

MIXTURE = "it is a mixture of experts"
NOT_PARSED = "not-parsed"  # code of the refusals


def find_sites(anatomy: Findings, *kinds: str, layers: Iterable[int] | None = None) -> tuple[list[WrappedModule], list[NearMiss]]:
    """Find the modules that own parts of these kinds; `Anatomy.sites` says how."""
    if unknown := [kind for kind in kinds if kind not in KINDS] or [""] * (not kinds):
        why = f"the kinds are {', '.join(KINDS)}"
        raise SpecError(f"unknown kind of site {unknown[0]!r}", why=why, remedy="name one of these, or several", code="choice")
    modules, chosen = WrappedModules(anatomy, NO_OWNER, NOT_PARSED), None if layers is None else set(layers)
    uses: dict[str, list[Use]] = {}
    near_misses: list[NearMiss] = []
    within = InnerLayers(anatomy.flow)
    for number, stack in enumerate(anatomy.stacks):
        for depth, layer in enumerate(stack.layers):
            ignored: list[NearMiss] = []  # of depths that are not chosen
            misses = near_misses if chosen is None or depth in chosen else ignored
            owned: set[Branch] = set()
            for part, name in parts_of(within.inside(layer), kinds, anatomy, misses):
                with collect_near_miss(name, misses):
                    if part not in owned:
                        place = modules.stream_module(layer, stack) if part is None else modules.branch(part)
                        if not owned.isdisjoint(place.branches):
                            raise unfit("what it computes is in part another site", code=NOT_PARSED)
                        owned.update(place.branches)
                        uses.setdefault(place.path, []).append(((number, depth), place))
    sites = []
    for path, found in uses.items():
        if chosen is None or any(depth in chosen for (_, depth), _ in found):
            with collect_near_miss(path, near_misses):
                require_each_call(found, chosen, modules)
                branches = tuple(branch for _, place in found for branch in place.branches)
                sites.append(dataclasses.replace(found[0][1], depths=tuple(at for at, _ in found), branches=branches))
    if not sites and not near_misses:
        holders = "none of its layers" if chosen is None else "none of the chosen layers"
        why = f"{holders} has a part of this kind: {', '.join(kinds)}"
        near_misses.append(NearMiss("", why, in_any_form=True, code="missing"))
    return sites, first_of_each(near_misses)


def parts_of(
    layer: Layer, kinds: tuple[str, ...], anatomy: Findings, near_misses: list[NearMiss]
) -> Iterator[tuple[Branch | None, str]]:
    """Yield the branches of a layer that are of these kinds, None for the layer itself, with their names."""
    if "layer" in kinds:
        yield None, layer.name or layer.exit
    if "ffn" in kinds:
        near_misses.extend(hidden_feed_forwards(layer, anatomy))
    for branch in sorted(layer.branches, key=lambda branch: branch.role != "moe"):  # mixtures first: they may contain feed-forwards
        name = branch.name or layer.name or branch.output
        if branch.role in kinds or ("attention" in kinds and branch in layer.attentions):
            if is_on_two_streams(branch, anatomy.stacks, anatomy.flow):
                near_misses.append(NearMiss(name, ON_TWO_STREAMS, BEFORE_TWO_STREAMS, code="two-streams"))
            else:
                yield branch, name
        elif branch.role == "moe" and "ffn" in kinds:
            near_misses.append(NearMiss(name, MIXTURE, in_any_form=True, code="mixture"))


def require_each_call(found: list[Use], chosen: set[int] | None, modules: WrappedModules) -> None:
    """Raise `DoesNotFitError` unless every call of the module is one of `found`, at a chosen depth."""
    _, place = found[0]
    calls = modules.owners.calls.get(place.path, [])
    if len(calls) != len(found):
        why = f"of {len(calls)} calls of the module {len(calls) - len(found)} are not parts of that kind"
        raise unfit(why, NO_OWNER, code=NOT_PARSED)
    if left := sorted({depth for (_, depth), _ in found if chosen is not None and depth not in chosen}):
        why = f"the module also runs at {', '.join(map(str, left))}, which is not among the chosen depths"
        raise unfit(why, "choose all depths that share it, or none", code=NOT_PARSED)
    if any(other != place or other.bypassed != place.bypassed for _, other in found):
        raise unfit("its calls take or return what it computes in different places", NO_OWNER, code=NOT_PARSED)


KINDS = ("layer", "attention", *get_args(Role))
