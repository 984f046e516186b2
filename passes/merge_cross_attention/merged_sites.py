"""The layers whose two attentions can be merged: their modules, the weights that each uses of the other, the parts to remove."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from retrofit.passes.merge_cross_attention.attention_calls import Borrowing
from retrofit.passes.merge_cross_attention.merged_layer import AttentionCall, CrossArguments, MergedLayer
from retrofit.sdk import Anatomy, Branch, DoesNotFitError, NearMiss, Remedy, Stack, unfit
from retrofit.sdk.anatomy import (
    CALLS_FUSED,
    FUSED,
    REST,
    SOFTMAX,
    Attention,
    AttentionSite,
    LayerCalls,
    find_attention_sites,
    find_attentions,
    modules_around,
    weight_product,
)
from retrofit.sdk.modules import MULTI_HEAD, calls_multi_head
from retrofit.sdk.program import CAST, DROPOUT, LAYOUT, Call, Dataflow, Key, op, shape

AS_GRAPH = Remedy("emit='graph' makes each attention a module", "graph")
WRITES_OWN = (AS_GRAPH, f"one that has nn.Linear projections and calls {FUSED} can be merged")
LEFT_OUT = "layers= leaves depths out"
FOLLOWED = CAST | DROPOUT | {"view", "reshape", "_unsafe_view", "expand", "contiguous", "clone", "getitem"}  # after a softmax


@dataclasses.dataclass(frozen=True)
class FoundAttention:
    """One attention of a layer: its projections, its core, and the call of the module whose code computes the core."""

    site: AttentionSite
    core: Attention
    call: Call
    branch: Branch

    @property
    def path(self) -> str:
        return self.call.path


@dataclasses.dataclass(frozen=True)
class GoneBranch:
    """The branch of a cross-attention to remove."""

    emptied: tuple[str, ...]  # modules to replace by an identity
    dropped: tuple[str, ...]  # parameters
    returned: bool  # the attention's own module returns the output of its output matrix
    out: str  # the module of that matrix
    out_key: Key
    width: int


@dataclasses.dataclass(frozen=True)
class MergedSite:
    """One layer whose attentions are merged. The paths of `own` and `cross` are inside the layer."""

    path: str
    heads: int
    cache_layers: int  # of the decoder's cache
    own: AttentionCall
    cross: AttentionCall
    arguments: CrossArguments
    written_out: bool  # scores are written out, without torch's fused attention
    gone: GoneBranch | None  # with one attention


class SiteFinder:
    """Collects the sites of one model."""

    def __init__(self, anatomy: Anatomy, chosen: list[tuple[Stack, int]], attentions: int, positions: str) -> None:
        self.anatomy, self.flow, self.attentions_left, self.positions = anatomy, anatomy.flow, attentions, positions
        self.cores = find_attentions(self.flow)
        self.calls = LayerCalls(anatomy)
        self.attentions, misses = find_attention_sites(anatomy, chosen)
        self.unfit: dict[str, NearMiss] = {miss.name: miss for miss in misses}

    def site(self, stack: Stack, depth: int) -> MergedSite:
        """Return the site of one layer. Raises `DoesNotFitError` if it cannot be one."""
        layer = stack.layers[depth]
        roles = [attention.role for attention in layer.attentions]
        own_count, cross_count = roles.count("self-attention"), roles.count("cross-attention")
        if not cross_count:
            raise unmergeable("it has no cross-attention", "merge-cross-attention is for encoder-decoders")
        if (own_count, cross_count) != (1, 1):
            raise unmergeable(f"it has {own_count} self-attentions and {cross_count} cross-attentions, not one of each")
        if roles != ["self-attention", "cross-attention"]:
            raise unmergeable("its cross-attention comes before its self-attention")
        call = self.calls.innermost(layer)
        self.check_above(call.path)
        own, cross = (self.attention(branch, call) for branch in layer.attentions)
        self.check_shapes(own, cross)
        written_out = self.written_out(own, cross)
        decoders = self.positions == "first"  # the decoder's queries are used for the encoder's keys too
        numbers = query_numbers(own, self.flow)
        same = numbers is not None and numbers == query_numbers(cross, self.flow) and not written_out
        of_cross = AttentionCall(inside(cross.path, call.path), cross.site.stream_in, self.borrowing(cross, own, same or decoders))
        of_own = AttentionCall(inside(own.path, call.path), own.site.stream_in, self.borrowing(own, cross, same))
        gone = self.gone(cross) if self.attentions_left == 1 else None
        arguments = self.arguments(call, cross)
        return MergedSite(call.path, own.site.heads, self.cache_layers(stack), of_own, of_cross, arguments, written_out, gone)

    def cache_layers(self, stack: Stack) -> int:
        """Return the number of layers in the stack's cache; layers inside its layers are another stack with the same cache."""
        stacks = [other for other in self.anatomy.stacks if other.kind == stack.kind]
        return sum(
            len(other.layers) for other in stacks if is_part_of(other.name, stack.name) or is_part_of(stack.name, other.name)
        )

    # The two attentions of a layer.

    def attention(self, branch: Branch, layer: Call) -> FoundAttention:
        """Return the only attention in a branch, with its parts."""
        inner = set(self.flow.between(self.anatomy.node(branch.source), self.anatomy.node(branch.output)))
        cores = [core for core in self.cores if core.result in inner]
        if len(cores) != 1:
            raise unmergeable(f"the branch contains {len(cores)} attentions, not one")
        (core,) = cores
        if op(core.result) != FUSED and (why := why_not_followed(core, self.flow)):
            raise unmergeable(f"it calls no {FUSED}, and {why}", CALLS_FUSED)
        call = self.flow.call_of(core.result)
        if not call.path or call is layer or not layer.encloses(call):
            raise unmergeable("the code of its layer computes it, and no module owns it", AS_GRAPH)
        module = self.anatomy.model.get_submodule(call.path)
        if calls_multi_head(module):
            raise unmergeable(f"its code calls torch's {MULTI_HEAD}, whose inner calls cannot be replaced", WRITES_OWN)
        if sum(call.encloses(self.flow.call_of(other.result)) for other in self.cores) != 1:
            raise unmergeable("its module computes more than one attention")
        site = next((attention for attention in self.attentions if attention.name == call.path), None)
        if site is None:
            miss = self.unfit.get(branch.name) or self.unfit.get(call.path)
            if miss is not None:
                raise unmergeable(miss.why, miss.remedies or LEFT_OUT)
            remedy = "apply the pass that installed the module after this one; layers= leaves depths out"
            raise unmergeable("its projections are not in the module that attends", remedy)
        if site.calls > 1:
            raise unmergeable(f"it is called {site.calls} times, and the cache has a layer for each call")
        if site.why_separate and site.stream_in is None:
            raise unmergeable(site.why_separate)
        if any(not projection.matrix.module.startswith(f"{call.path}.") for projection in site.projections):
            raise unmergeable("its projections are not in its own module")
        return FoundAttention(site, core, call, branch)

    def check_above(self, path: str) -> None:
        if any(isinstance(outer, MergedLayer) for outer in modules_around(self.anatomy.model, path)):
            raise unmergeable("its attentions are merged already", "start from the dense model to use other options")

    def check_shapes(self, own: FoundAttention, cross: FoundAttention) -> None:
        """Raise `DoesNotFitError` unless each attention could compute with the other's projections."""
        if cross.site.source_in is None or cross.site.stream_in is None or own.site.stream_in is None:
            raise unmergeable("no single argument is the encoder's states, or the stream")
        for letter in "qkv":
            found = [[projection for projection in each.site.projections if letter in projection.letters] for each in (own, cross)]
            letters = [projections[0].letters if projections else () for projections in found]
            if letters[0] != letters[1] or REST in letters[0]:
                names = [" and ".join(each) or "nothing" for each in letters]
                raise unmergeable(f"one matrix computes {names[1]} in it, and {names[0]} in self-attention, whose weights it uses")
            sizes = [f"{projections[0].stream_width} → {projections[0].width}" for projections in found]
            if sizes[0] != sizes[1]:
                raise unmergeable(f"its projection of {letter} is {sizes[1]}, and that of self-attention {sizes[0]}")
        for operand, other in zip(operands(cross.core), operands(own.core), strict=True):
            first, second = shape(operand) or (), shape(other) or ()
            ranks = (4,) if own.core.softmax is None else (3, 4)  # in written-out code batch and heads may be one dimension
            if len(first) not in ranks or len(second) != len(first) or (first[-3], first[-1]) != (second[-3], second[-1]):
                raise unmergeable(f"its heads are {first}, and those of self-attention {second}")

    def written_out(self, own: FoundAttention, cross: FoundAttention) -> bool:
        """Return whether the scores are written out. Raises `DoesNotFitError` if those of one are, or if a bias is needed."""
        own_is, cross_is = (attention.core.softmax is not None for attention in (own, cross))
        if own_is != cross_is:
            why = f"either it or {own.path} calls {FUSED}, and the scores of the other are written out"
            raise unmergeable(why, CALLS_FUSED)
        if own_is and self.positions == "first":
            why = "its scores are written out and include the bias towards the decoder's first token"
            raise unmergeable(why, f"positions=none needs no bias; {CALLS_FUSED}")
        return own_is

    def borrowing(self, code: FoundAttention, lender: FoundAttention, one_query: bool) -> Borrowing:
        """Return the modules of `lender` that replace those of `code`. Raises `DoesNotFitError` if one has no replacement."""
        modules: dict[str, str] = {}
        query = "", 0
        for projection in code.site.projections:
            path = inside(projection.matrix.module, code.path)
            (other,) = [each for each in lender.site.projections if each.letters == projection.letters]
            if projection.letters == ("q",) and one_query:
                query = path, projection.width
            else:
                modules[path] = inside(other.matrix.module, lender.path)
        out = code.site.out
        out_path = inside(out.module, code.path) if out is not None and out.module.startswith(f"{code.path}.") else ""
        known = {*modules, query[0], out_path}
        module, others = (self.anatomy.model.get_submodule(attention.path) for attention in (code, lender))
        for path, part in module.named_modules():
            if path in known or not part._parameters or not any(parameter is not None for parameter in part._parameters.values()):
                continue
            if path and has_equal(others, path, part):
                modules[path] = path
            elif code.site.cross:
                raise unmergeable(f"its {path or 'own code'} has weights that the self-attention does not have")
        return Borrowing(modules, query, out_path)

    def arguments(self, layer: Call, cross: FoundAttention) -> CrossArguments:
        """Return the layer's arguments that the cross-attention receives. Raises `DoesNotFitError` if it receives other tensors."""
        masked = {(call.path, call.index): call for call in self.calls.masked.program.calls}
        outer, inner = (masked.get((called.path, called.index)) for called in (layer, cross.call))
        if outer is None or inner is None:
            raise unmergeable("it is not called when the model receives a mask")
        found: dict[Key, Key] = {}
        for key, node in inner.inputs.items():
            if key in (None, cross.site.stream_in):
                continue
            keys = [key for key, given in outer.inputs.items() if key is not None and given is node]
            if not keys:
                raise unmergeable(f"its argument {key} is not an argument of {layer.path}")
            found[key] = keys[0]
        return CrossArguments(found[cross.site.source_in], tuple(found.items()))

    # The branch to remove.

    def gone(self, cross: FoundAttention) -> GoneBranch:
        """Return the cross-attention's branch to remove. Raises `DoesNotFitError` if other code needs a part of it."""
        site, flow = cross.site, self.flow
        if site.out is None:
            raise unmergeable(f"its output matrix cannot be removed: {site.why_no_out}")
        region = flow.between(self.anatomy.node(cross.branch.source), self.anatomy.node(cross.branch.output))
        branch = {*region, *(node for node in flow.nodes if cross.call.encloses(flow.call_of(node)))}
        elsewhere = flow.parameters_of([node for node in flow.nodes if node not in branch and node not in flow.program.parameters])
        dropped = [name for name in flow.parameters_of(list(branch)) if name not in elsewhere]
        emptied = list(dict.fromkeys(name.rpartition(".")[0] for name in dropped))
        for path in emptied:
            calls = [call for call in flow.program.calls if call.path == path]
            sizes = [[shape(node) for node in group] for call in calls for group in (call.inputs.values(), call.outputs.values())]
            within = path.startswith(f"{cross.path}.") or path == site.out.module
            if not within and (len(calls) != 1 or any(len(size) != 1 for size in sizes) or sizes[0] != sizes[1]):
                raise unmergeable(f"the weights of {path or 'the model'} become unused, and its module cannot be removed")
        returned = site.returns_out and site.out.module.startswith(f"{cross.path}.")
        return GoneBranch(tuple(emptied), tuple(dropped), returned, site.out.module, site.out_key, site.out_shape[1])


def operands(core: Attention) -> list[fx.Node]:
    """Return queries, keys and values with tokens in the second last dimension: keys are transposed in written-out code."""
    return [core.query, core.value] if core.softmax is not None else [core.query, core.key, core.value]


def why_not_followed(core: Attention, flow: Dataflow) -> str:
    """Return the reason why other keys cannot be added to an attention's softmax; "" if they can."""
    softmax, call = core.softmax, flow.call_of(core.result)
    if softmax is None:
        return f"{op(core.result)} cannot be replaced"
    if sum(op(node) in SOFTMAX for node in flow.nodes if call.encloses(flow.call_of(node))) != 1:
        return "its code computes more than one softmax"
    before, after = shape(softmax) or (), core.result
    if int(softmax.args[1]) % len(before) != len(before) - 1:  # type: ignore[arg-type]
        return "its softmax is not over the last dimension"
    between = [node for node in flow.between(softmax, after) if node is not after and node is not softmax]
    if any(op(node) not in FOLLOWED or (shape(node) or ())[-2:] != before[-2:] for node in between):
        return "its weights are changed before the product with the values"
    if op(after) not in ("matmul", "bmm") or not isinstance(after.args[0], fx.Node) or not flow.reaches(softmax, after.args[0]):
        return "its weights are not the first factor of a product with the values"
    return ""


def query_numbers(attention: FoundAttention, flow: Dataflow) -> list[Any] | None:
    """Return the numbers that scale a projection's output to the queries; None if other operations change it."""
    weights = [projection.matrix.weight for projection in attention.site.projections if "q" in projection.letters]
    query = attention.core.query
    above = [node for node in flow.nodes if attention.call.encloses(flow.call_of(node)) and flow.reaches(node, query)]
    product = [node for node in above if (found := weight_product(node, flow)) is not None and found.parameter in weights]
    if len(product) != 1:
        return None
    numbers = []
    for node in flow.between(product[0], query):
        if op(node) in ("mul", "div") and not isinstance(node.args[1], fx.Node):
            numbers.append((op(node), node.args[1]))
        elif op(node) not in LAYOUT | CAST:
            return None
    return numbers


def inside(path: str, outer: str) -> str:
    """Return the path inside the module at `outer`."""
    return path[len(outer) + 1 :] if outer else path


def is_part_of(outer: str, path: str) -> bool:
    """Return whether `path` is `outer`, or inside it."""
    return path == outer or not outer or path.startswith(f"{outer}.")


def has_equal(module: nn.Module, path: str, part: nn.Module) -> bool:
    """Return whether the module has at this path a module with parameters of the same names and shapes as `part`."""
    try:
        parts = part, module.get_submodule(path)
    except AttributeError:
        return False
    first, second = ({name: p.shape for name, p in each._parameters.items() if p is not None} for each in parts)
    return first == second


def unmergeable(why: str, remedy: str | Sequence[str] = LEFT_OUT) -> DoesNotFitError:
    return unfit(why, remedy)
