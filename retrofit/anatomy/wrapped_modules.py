"""The modules that a pass puts wrappers around: each runs one layer, or owns one branch, and is there once.

Where the modules of a branch are called one after the other by the code around them, they become one module first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from torch import fx, nn

from retrofit.anatomy.branch_owners import BranchOwners
from retrofit.anatomy.branches import BEFORE_TWO_STREAMS, ON_TWO_STREAMS, InnerLayers, is_on_two_streams, owner_of
from retrofit.anatomy.feed_forward_blocks import GatheredFeedForward, install_feed_forward
from retrofit.anatomy.feed_forward_parsing import hidden_feed_forwards, parse_feed_forward
from retrofit.anatomy.feed_forward_sites import FeedForward
from retrofit.anatomy.findings import Findings
from retrofit.anatomy.parts import Branch, Layer, Role, Stack
from retrofit.anatomy.sites import NearMiss, collect_near_miss
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.program.aten_ops import shape
from retrofit.program.program import Key
from retrofit.surgery.edit import Edit
from retrofit.surgery.wrappers import Wrapper, map_first

Refusal = Callable[[str, str, str], DoesNotFitError]  # of the name of a place, why, the fix

NO_MODULE = "the layers have to be modules that take the stream and return it"


class WithLastProduct(Wrapper):
    """An attention that leaves its last product to another module, together with that: at `key` is what `last` makes of it."""

    def __init__(self, layer: nn.Module, last: nn.Module, key: Key) -> None:
        super().__init__(layer)
        self.last, self.key = last, key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_first(self.layer(*args, **kwargs), self.last, self.key)


@dataclasses.dataclass(frozen=True)
class WrappedModule:
    """A module that gets a wrapper, where its input and output are, and what it runs."""

    path: str
    stream_in: int | str
    stream_out: Key
    gathered: FeedForward | None = dataclasses.field(default=None, compare=False)  # of several modules, made one at `path` first
    last: str = dataclasses.field(default="", compare=False)  # path of a module that `path` takes in first: it reads nothing else
    depths: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False)  # of `sites`: stack and depth of each call
    branches: tuple[Branch, ...] = dataclasses.field(default=(), compare=False)  # of `sites`: what the calls compute

    @property
    def bypassed(self) -> tuple[str, ...]:
        """The modules that the one at `path` takes in: the identity is in their place."""
        return (self.last,) if self.last else self.gathered.bypassed if self.gathered is not None else ()

    def install(self, edit: Edit, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """`wrap` of the module is in its place; what several modules compute is in one module first."""
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
    """Finds such modules in one model; `refuse` makes the error for a place where there is none.

    `no_feed_forward` is the fix where a feed-forward is no module.
    """

    def __init__(self, anatomy: Findings, refuse: Refusal, no_feed_forward: str) -> None:
        self.anatomy, self.flow, self.refuse, self.no_feed_forward = anatomy, anatomy.flow, refuse, no_feed_forward
        self.owners = BranchOwners(anatomy)
        self.calls = {(call.path, call.index): call for call in anatomy.program.calls}

    def stream_module(self, layer: Layer, stack: Stack) -> WrappedModule:
        """The outermost module that runs the layer and takes and returns its stream d wide: inside AltUp's, which are wider."""
        if not layer.name:
            why = "no module owns the layer: its residual additions are in the model's own code"
            raise self.refuse(layer.exit, why, NO_MODULE)
        outer = self.calls[layer.name, layer.call]
        if all(width_of(self.anatomy.node(end)) == stack.width for end in (layer.entry, layer.exit)):
            return WrappedModule(layer.name, *layer.stream_places())
        results = [self.anatomy.node(branch.output) for branch in layer.branches]
        base = self.anatomy.node(layer.branches[0].source)  # where the branches leave the stream, which may be wide there
        within = [call for call in owner_of(results, self.flow).chain if outer.encloses(call) and call is not outer]
        for call in reversed(within):
            enters = [key for key, node in call.inputs.items() if width_of(node) == stack.width and self.on_one_stream(node, base)]
            leaves = [key for key, node in call.outputs.items() if width_of(node) == stack.width and self.depends_on(node, results)]
            if enters and leaves and enters[0] is not None:
                return WrappedModule(call.path, enters[0], leaves[0])
        raise self.refuse(layer.name, f"no module in it takes the stream {stack.width} wide and returns it so", NO_MODULE)

    def on_one_stream(self, node: fx.Node, other: fx.Node) -> bool:
        return node in self.flow.carried_chain(other) or other in self.flow.carried_chain(node)

    def depends_on(self, node: fx.Node, parts: list[fx.Node]) -> bool:
        return all(self.flow.reaches(part, node) for part in parts)

    def feed_forward(self, branch: Branch, width: int) -> WrappedModule:
        """The module that is this FFN, or becomes it, from one d-wide tensor to another; raises `DoesNotFitError` without one."""
        try:
            owner = self.owners.owner(branch)
        except DoesNotFitError:
            return self.gathered(branch)
        if width_of(owner.x) != width or width_of(owner.y) != width:
            why = f"its module does not take and return tensors {width} wide"
            raise self.refuse(branch.name or branch.output, why, self.no_feed_forward)
        return WrappedModule(owner.call.path, owner.stream_in, owner.stream_out)

    def gathered(self, branch: Branch) -> WrappedModule:
        """The place of an FFN whose modules, called by the layer's own code, become one module."""
        try:
            site = parse_feed_forward(branch, self.anatomy.model, self.flow)
        except DoesNotFitError as error:
            raise self.refuse(branch.name or branch.output, error.why or error.what, self.no_feed_forward) from error
        stream_in = site.stream_in if site.stream_in is not None else 0
        return WrappedModule(site.path, stream_in, None, site if site.bypassed else None)

    def branch(self, branch: Branch) -> WrappedModule:
        """The module that owns a branch, or becomes it; raises `DoesNotFitError` where there is none."""
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
            raise self.refuse(branch.name or branch.output, why.why, remedy) from why
        return WrappedModule(owner.call.path, owner.stream_in, owner.stream_out, last=owner.last, branches=owner.branches)


Use = tuple[tuple[int, int], WrappedModule]  # stack and depth, the module that owns what is computed there

NO_OWNER = "emit='graph' makes modules of what is code"
MIXTURE = "it is a mixture of experts"


def find_sites(anatomy: Findings, *kinds: str, layers: Iterable[int] | None = None) -> tuple[list[WrappedModule], list[NearMiss]]:
    """What `Anatomy.sites` returns."""
    if unknown := [kind for kind in kinds if kind not in KINDS] or [""] * (not kinds):
        why = f"the kinds are {', '.join(KINDS)}"
        raise SpecError(f"there are no sites called {unknown[0]!r}", why=why, remedy="name one of these, or several")
    modules, chosen = WrappedModules(anatomy, no_site, NO_OWNER), None if layers is None else set(layers)
    uses: dict[str, list[Use]] = {}
    near_misses: list[NearMiss] = []
    within = InnerLayers(anatomy.flow)
    for number, stack in enumerate(anatomy.stacks):
        for depth, layer in enumerate(stack.layers):
            ignored: list[NearMiss] = []  # of a depth that is not chosen
            misses = near_misses if chosen is None or depth in chosen else ignored
            owned: set[Branch] = set()
            for part, name in parts_of(within.inside(layer), kinds, anatomy, misses):
                with collect_near_miss(name, misses):
                    if part not in owned:
                        place = modules.stream_module(layer, stack) if part is None else modules.branch(part)
                        if not owned.isdisjoint(place.branches):
                            raise no_site(place.path, "what it computes is in part another site", "")
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
        near_misses.append(NearMiss("", f"{holders} has a part of this kind: {', '.join(kinds)}", in_any_form=True))
    first_of_each = {miss.name: miss for miss in reversed(near_misses)}
    return sites, [miss for miss in near_misses if first_of_each[miss.name] is miss]


def parts_of(
    layer: Layer, kinds: tuple[str, ...], anatomy: Findings, near_misses: list[NearMiss]
) -> Iterator[tuple[Branch | None, str]]:
    """The branches of a layer that are of these kinds, None for the layer itself, and a name of each."""
    if "layer" in kinds:
        yield None, layer.name or layer.exit
    if "ffn" in kinds:
        near_misses.extend(hidden_feed_forwards(layer, anatomy))
    for branch in sorted(layer.branches, key=lambda branch: branch.role != "moe"):  # mixtures first: they may hold feed-forwards
        name = branch.name or layer.name or branch.output
        if branch.role in kinds or ("attention" in kinds and branch in layer.attentions):
            if is_on_two_streams(branch, anatomy.stacks, anatomy.flow):
                near_misses.append(NearMiss(name, ON_TWO_STREAMS, BEFORE_TWO_STREAMS))
            else:
                yield branch, name
        elif branch.role == "moe" and "ffn" in kinds:
            near_misses.append(NearMiss(name, MIXTURE, in_any_form=True))


def require_each_call(found: list[Use], chosen: set[int] | None, modules: WrappedModules) -> None:
    """Every call of the module is one of `found`, at a depth that is chosen, else `DoesNotFitError`."""
    _, place = found[0]
    calls = modules.owners.calls.get(place.path, [])
    if len(calls) != len(found):
        why = f"of {len(calls)} calls of the module {len(calls) - len(found)} are no part of that kind"
        raise no_site(place.path, why, NO_OWNER)
    if left := sorted({depth for (_, depth), _ in found if chosen is not None and depth not in chosen}):
        why = f"the module also runs at {', '.join(map(str, left))}, which is not among the chosen depths"
        raise no_site(place.path, why, "choose all depths that share it, or none")
    if any(other != place or other.bypassed != place.bypassed for _, other in found):
        raise no_site(place.path, "its calls take or return what it computes in different places", NO_OWNER)


def no_site(name: str, why: str, remedy: str) -> DoesNotFitError:
    return DoesNotFitError(f"{name or 'the model'} is no site", why=why, remedy=remedy)


KINDS = ("layer", "attention", *get_args(Role))


def width_of(node: fx.Node) -> int:
    return (shape(node) or (0,))[-1]
