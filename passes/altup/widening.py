"""Widening a model's stream to K blocks: which modules to lift, replicate or widen, decided on the captured graph.

Width is propagated through the graph outside the layers, from the look-ups that become wide to the heads that read the wide stream.
An elementwise operation has a wide result. A contribution of the dense width is replicated at its module, buffer or parameter. An
operation that reads across the width is applied block by block, by lifting the outermost module call around it. Anything else is
refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from retrofit.sdk import Anatomy, DoesNotFitError, Layer, Stack
from retrofit.sdk.anatomy import nearest_products, weight_product
from retrofit.sdk.program import (
    CAST,
    DROPOUT,
    JOIN,
    LAYOUT,
    LIKE,
    MASKING,
    NORM,
    POINTWISE,
    SELECTION,
    Call,
    Key,
    carried_operands,
    is_assertion,
    is_heavy,
    op,
    shape,
)

REDUCTIONS = frozenset("sum mean amax amin max min any all prod var std norm linalg_vector_norm".split())
TESTS = frozenset("isnan isinf isfinite eq ne lt gt le ge logical_and logical_not logical_or".split())
GONE = 0  # the result does not have the dimension


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on a value with the shape `before`, and its dimension `dim`, counted from the end."""

    node: fx.Node
    before: tuple[int, ...]
    out: tuple[int, ...]
    dim: int

    @property
    def index(self) -> int:
        return len(self.before) - self.dim

    @property
    def extent(self) -> int:
        return self.before[self.index]

    def argument(self, position: int, name: str, default: Any) -> Any:
        return self.node.args[position] if len(self.node.args) > position else self.node.kwargs.get(name, default)

    def axes(self, position: int, name: str, default: Any = 0) -> list[int]:
        """Return the dimensions, counted from the front, that the argument names."""
        given = self.argument(position, name, default)
        return [int(axis) % len(self.before) for axis in (given if isinstance(given, (list, tuple, range)) else [given])]


def dimension_after(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """Return the index, from the end, of dimension `dim` of `source` after `node`, or `GONE`; None if it is read across."""
    before, out, name = shape(source), shape(node), op(node)
    if before is None:
        return dim
    step = Step(node, before, out or (), dim)
    if out is None:  # several results
        return dim if name == "native_dropout" or step.index not in step.axes(1 if name == "unbind" else 2, "dim") else None
    if name in LIKE:
        return dim if name.endswith("_like") and out == before else GONE
    if name in POINTWISE - JOIN or name in TESTS:
        return dim
    if name in RULES:
        return RULES[name](step)
    if name in CAST | DROPOUT | MASKING:
        return dim
    unchanged = name in LAYOUT | SELECTION and out[-dim:] == before[-dim:]  # the dimension and all after it
    return dim if unchanged else None


def same_extent(step: Step) -> int | None:
    return step.dim if step.out[-step.dim] == step.extent else None


def after_transpose(step: Step) -> int:
    size = len(step.before)
    first, second = step.axes(1, "dim0", size - 2)[0], step.axes(2, "dim1", size - 1)[0]
    return size - {first: second, second: first}.get(step.index, step.index)


def after_permute(step: Step) -> int:
    return len(step.before) - step.axes(1, "dims").index(step.index)


def after_unsqueeze(step: Step) -> int:
    axis = int(step.argument(1, "dim", 0)) % (len(step.before) + 1)
    return step.dim + (axis > step.index)


def after_squeeze(step: Step) -> int | None:
    if step.extent == 1:
        return None
    axes = step.axes(1, "dim") if len(step.node.args) > 1 else range(len(step.before))
    return step.dim - sum(step.before[axis] == 1 and axis > step.index for axis in axes)


def after_slice(step: Step) -> int | None:
    return None if step.index in step.axes(1, "dim") and step.before != step.out else step.dim


def after_reordering(step: Step) -> int | None:
    axes = step.axes(2 if op(step.node) == "roll" else 1, "dims", range(len(step.before)))  # all if none are named
    return None if step.index in axes else step.dim


def after_select(step: Step) -> int | None:
    (axis,) = step.axes(1, "dim")
    return None if axis == step.index else step.dim - (axis > step.index)


def after_index(step: Step) -> int | None:
    touched = [position for position, pick in enumerate(step.argument(1, "indices", ())) if pick is not None]
    return step.dim if step.index not in touched and step.out[-step.dim] == step.extent else None


def after_put(step: Step) -> int | None:
    return step.dim if step.dim == 1 and step.out == step.before else None  # whole rows are replaced


def after_join(step: Step) -> int | None:
    return None if step.index in step.axes(1, "dim") else step.dim


def after_pad(step: Step) -> int | None:
    padding = list(step.argument(1, "pad", ()))
    return None if any(padding[2 * step.dim - 2 : 2 * step.dim]) else step.dim


def after_reduction(step: Step) -> int | None:
    given = step.argument(1, "dim", None)
    if given is None or isinstance(given, fx.Node):
        return GONE if op(step.node) in ("any", "all") else None
    axes = step.axes(1, "dim")
    if step.index in axes:
        return None
    return step.dim if len(step.out) == len(step.before) else step.dim - sum(axis > step.index for axis in axes)


RULES: dict[str, Callable[[Step], int | None]] = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "mT", "numpy_T"), after_transpose),
    **dict.fromkeys(("expand", "expand_as", "detach", "alias", "clone", "contiguous", "getitem"), same_extent),
    **dict.fromkeys(("slice", "narrow"), after_slice),
    **dict.fromkeys(("index_select", "flip", "roll"), after_reordering),
    **dict.fromkeys(("pad", "constant_pad_nd"), after_pad),
    **dict.fromkeys(JOIN, after_join),
    **dict.fromkeys(REDUCTIONS, after_reduction),
    "permute": after_permute,
    "unsqueeze": after_unsqueeze,
    "squeeze": after_squeeze,
    "select": after_select,
    "index": after_index,
    "index_put": after_put,
    "masked_scatter": after_put,
}


@dataclasses.dataclass(frozen=True)
class WideValue:
    """A value that becomes K blocks wide: the dimension, counted from the end, and the block that holds the dense value."""

    dim: int
    home: int
    computed: bool = False  # a product with weights has been applied to it, block by block


@dataclasses.dataclass
class WideningPlan:
    """The changes outside the layers, by name and path, that let the stream be K blocks wide."""

    # By a layer's module path and call: its wide arguments other than the stream, and the block of each that holds the dense value.
    narrow: dict[tuple[str, int], dict[Key, int]] = dataclasses.field(default_factory=dict)
    tables: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # token table → paths of the modules that look it up
    blockwise: dict[str, Key] = dataclasses.field(default_factory=dict)  # module path → its wide argument
    replicated: list[str] = dataclasses.field(default_factory=list)  # module paths whose output is replicated
    buffers: list[str] = dataclasses.field(default_factory=list)  # buffers repeated along the last dimension
    parameters: list[str] = dataclasses.field(default_factory=list)  # parameters repeated along the last dimension
    heads: dict[str, WideProduct] = dataclasses.field(default_factory=dict)  # by parameter name


@dataclasses.dataclass(frozen=True)
class WideProduct:
    """A product that reads the wide stream: the dimension of its weight to widen, and the module called."""

    dim: int
    path: str  # of the module whose argument is the stream; "" if the product is in other code


class WidthPropagation:
    """The propagation of width through one program, for the stacks and token tables that are to be wide."""

    def __init__(
        self,
        anatomy: Anatomy,
        stacks: list[Stack],
        homes: dict[str, list[int]],
        look_ups: list[fx.Node],
        wide_ends: dict[str, bool],
    ) -> None:
        """Keys of `homes` and `wide_ends` are the entry nodes of the stacks.

        `homes`: the block that holds the dense stream before each layer and after the last. `wide_ends`: whether the stream leaves
        the stack wide. `look_ups`: those of the token tables that become wide.
        """
        self.anatomy, self.flow, self.stacks = anatomy, anatomy.flow, stacks
        self.plan = WideningPlan()
        self.look_ups = look_ups
        self.wide: dict[fx.Node, WideValue] = {}
        self.lifted: set[Call] = set()
        self.replicas: set[Call] = set()  # calls whose output is replicated
        self.calls: dict[Call, Layer] = {}
        self.leaves: dict[Call, WideValue | None] = {}  # the stream that each layer returns; None: no wide value
        by_site = {(call.path, call.index): call for call in anatomy.program.calls}
        for stack in stacks:
            blocks = homes[stack.entry]
            for depth, layer in enumerate(stack.layers):
                call = by_site[(layer.name, layer.call)]
                self.calls[call] = layer
                last = depth == len(stack.layers) - 1
                self.leaves[call] = WideValue(1, blocks[depth + 1]) if not last or wide_ends[stack.entry] else None
        self.heads = self.find_heads()
        self.live = 0  # ancestors of the outputs, as a bit mask
        for node in anatomy.program.outputs.values():
            self.live |= self.flow.ancestors[node]

    def find_heads(self) -> set[fx.Node]:
        """Return the products that make the model's outputs: the head, and others that neither a layer nor the head depends on."""
        if self.anatomy.head is None:
            return set()
        head = self.anatomy.node(self.anatomy.head.node)
        deeper = [head, *(self.anatomy.node(layer.entry) for layer in self.anatomy.layers)]
        last = [product.node for product in nearest_products(list(self.flow.program.outputs.values()), self.flow)]
        return {head, *(node for node in last if not any(self.flow.reaches(node, other) for other in deeper))}

    def refuse(self, node: fx.Node, why: str, remedy: str = "") -> DoesNotFitError:
        call = self.flow.call_of(node)
        if not remedy and self.look_ups:
            remedy = "use embedding=recycled, which leaves everything outside the layers as it is"
        return DoesNotFitError(
            f"the wide stream cannot pass {call.path or 'the code of the model itself'} (operation {op(node)}, node {node.name})",
            why=why,
            remedy=remedy or self.other_kind(node) or "put it into a module that takes the stream as an argument",
            code="width",
        )

    def other_kind(self, node: fx.Node) -> str:
        """Return the fix that leaves the stacks before `node` unchanged; "" if none is, or no stack of another kind remains."""
        kinds = {stack.entry: stack.kind for stack in self.stacks}
        starts = [
            start for start in self.flow.nodes if start.name in kinds and start is not node and self.flow.reaches(start, node)
        ]
        others = set(kinds.values()) - {kinds[start.name] for start in starts}
        if not starts or len(others) != 1:
            return ""
        return f"leave the {kinds[starts[0].name]} as it is: stacks={others.pop()}"

    def run(self) -> WideningPlan:
        """Return the plan; raises `DoesNotFitError` at the first operation the wide stream cannot pass."""
        for node in self.flow.nodes:
            around = self.layer_around(node)
            if around is not None:
                self.leave_layer(around, node)
                continue
            if node in self.look_ups:
                self.look_up(node)
                continue
            if any(call.encloses(self.flow.call_of(node)) for call in self.lifted):
                continue
            if any(part in self.wide for part in node.all_input_nodes):
                self.pass_through(node)
        for call, layer in self.calls.items():
            others = {key: source for key, source in call.inputs.items() if key != layer.stream_in and source in self.wide}
            self.plan.narrow[layer.name, layer.call] = {key: self.wide[source].home for key, source in others.items()}
        self.check_outputs()
        return self.plan

    def layer_around(self, node: fx.Node) -> Call | None:
        return next((call for call in self.flow.call_of(node).chain if call in self.calls), None)

    def leave_layer(self, call: Call, node: fx.Node) -> None:
        """Mark `node` as wide if it is the stream that the layer returns, unless the stack ends there."""
        leaving = self.leaves[call]
        if leaving is not None and call.outputs.get(self.calls[call].stream_places()[1]) is node:
            self.wide[node] = leaving
        inputs = set(call.inputs.values())
        for part in node.all_input_nodes:
            if part in self.wide and part not in inputs and self.layer_around(part) is not call:
                raise self.refuse(node, f"layer {call.path} reads the wide value {part.name}, which is not one of its arguments")

    def look_up(self, node: fx.Node) -> None:
        table = self.flow.program.parameters[node.args[0]]  # type: ignore[index]
        self.record(self.plan.tables.setdefault(table, []), self.flow.call_of(node).path)
        self.wide[node] = WideValue(1, 0)

    def pass_through(self, node: fx.Node) -> None:
        """Record whether the result of `node` is wide, the call around it is lifted, or `node` is a head."""
        if node in self.heads:
            self.reach_head(node)
            return
        inputs = [part for part in node.all_input_nodes if part in self.wide]
        kinds = {self.wide[part] for part in inputs}
        size, name = shape(node), op(node)
        returns_several = name in ("split", "chunk", "unbind", "split_with_sizes", "native_dropout")
        if is_assertion(node) or (size is None and not returns_several):
            return
        if len({kind.home for kind in kinds}) > 1:
            raise self.refuse(node, "it combines wide values that hold the dense one in different blocks")
        first, computed = self.wide[inputs[0]], any(kind.computed for kind in kinds)
        after = dimension_after(node, inputs[0], first.dim) if len({kind.dim for kind in kinds}) == 1 else None
        if after is None and not self.live & self.flow.bit(node) and not is_heavy(node) and name not in NORM:
            return  # computed for its shape, or never read
        if after is None:
            self.lift(node)
            return
        if after == GONE:
            return
        for part in node.all_input_nodes:
            if part in self.wide or self.broadcasts(part, node, after):
                continue
            if not self.replicate(part):
                self.lift(node)
                return
        self.wide[node] = WideValue(after, first.home, computed)

    def broadcasts(self, part: fx.Node, node: fx.Node, dim: int) -> bool:
        """Return whether a narrow operand has extent one at the wide dimension, or does not meet it."""
        size, out = shape(part), shape(node)
        if size is None or out is None or op(node) in ("index", "index_select", "gather", "type_as", "view_as"):
            return True
        if op(node) in JOIN:
            return False
        if op(node) == "index_put":
            return part is not node.args[2]
        if op(node) == "masked_scatter":
            if part is node.args[2]:
                return False
            if op(part) in ("expand", "expand_as"):  # by the model's code, to the shape of the stream
                return self.broadcasts(part.all_input_nodes[0], node, dim)
        return len(size) < dim or size[-dim] == 1

    def reach_head(self, node: fx.Node) -> None:
        product = weight_product(node, self.flow)
        source = next(part for part in node.all_input_nodes if part in self.wide)
        weight = next((part for part, name in self.flow.program.parameters.items() if product and name == product.parameter), None)
        size = shape(weight) or ()
        if product is None or len(size) != 2 or self.wide[source].dim != 1 or product.source is not source:
            raise self.refuse(node, "the product that makes the outputs does not read the stream with a plain weight matrix")
        dim = 1 if op(node) == "linear" or (size[1] == product.in_features and size[0] == product.out_features) else 0
        call = self.flow.call_of(node)
        path = call.path if source in call.inputs.values() else ""
        self.plan.heads[product.parameter] = WideProduct(dim, path)

    def replicate(self, node: fx.Node) -> bool:
        """Return whether the contribution `node` has a buffer, parameter or module of its own, and plan to replicate it there."""
        chain = [node]
        while True:
            current = chain[-1]
            if current in self.flow.program.buffers:
                return self.record(self.plan.buffers, self.flow.program.buffers[current])
            if current in self.flow.program.parameters:
                return self.record(self.plan.parameters, self.flow.program.parameters[current])
            if any(user not in self.wide_users(current, chain) for user in self.flow.uses[current]):
                return False
            outer = [
                call
                for call in self.flow.call_of(current).chain
                if call.path and current in call.outputs.values() and not self.holds_wide(call)
            ]
            if outer and next(iter(outer[-1].outputs.values())) is current and next(iter(outer[-1].outputs)) in (None, 0):
                self.replicas.add(outer[-1])
                return self.record(self.plan.replicated, outer[-1].path)
            sources = carried_operands(current, {*self.flow.depends, *current.all_input_nodes})
            below = [part for part in sources if (shape(part) or (0,))[-1] == (shape(node) or (1,))[-1]]
            if len(below) != 1 or op(current) not in LAYOUT | CAST | DROPOUT | SELECTION | {"mul", "div", "getitem"}:
                return False
            chain.append(below[0])

    def wide_users(self, node: fx.Node, chain: list[fx.Node]) -> set[fx.Node]:
        """Return the users of a narrow contribution that may read it replicated: those in `chain`, and readers of a wide value."""
        return {user for user in self.flow.uses[node] if user in chain or any(part in self.wide for part in user.all_input_nodes)}

    def holds_wide(self, call: Call) -> bool:
        return any(call.encloses(self.flow.call_of(node)) for node in self.wide)

    @staticmethod
    def record(names: list[str], name: str) -> bool:
        """Add `name` to `names`, once. Return true."""
        if name not in names:
            names.append(name)
        return True

    def lift(self, node: fx.Node) -> None:
        """Plan to apply block by block the outermost call around `node` that takes the wide value as an argument."""
        chain = [call for call in self.flow.call_of(node).chain if call.path]
        fitting = [call for call in chain if self.liftable(call)]
        taking = [call for call in chain if any(part in self.wide for part in call.inputs.values())]
        if not fitting:
            if any(call.encloses(inner) for call in taking for inner in self.calls):
                why = f"{op(node)} picks tokens of the stream for a layer inside it"
                raise self.refuse(node, why, "apply altup first, and the pass or tool that inserted the inner layer after it")
            why = f"{op(node)} reads across the stream's width, and no module around it takes the stream as an argument"
            raise self.refuse(node, why)
        call = fitting[-1]
        earlier = [other for other in self.flow.program.calls if other.path == call.path and other.number < call.number]
        if any(not any(part in self.wide for part in other.inputs.values()) for other in earlier):
            raise self.refuse(node, f"{call.path} is called on the wide stream and on another value")
        key, source = next((key, part) for key, part in call.inputs.items() if part in self.wide)
        self.lifted.add(call)
        self.plan.blockwise[call.path] = key
        nodes = [inner for inner in self.flow.nodes if call.encloses(self.flow.call_of(inner))]
        leaving = WideValue(1, self.wide[source].home, self.wide[source].computed or any(map(is_heavy, nodes)))
        for inner in nodes:
            if inner is not source:
                self.wide.pop(inner, None)
        inside = {inner.path for inner in self.flow.program.calls if call.encloses(inner)}
        self.plan.replicated = [path for path in self.plan.replicated if path not in inside]
        for path in inside - {call.path}:
            self.plan.blockwise.pop(path, None)
        self.wide |= {output: leaving for output in call.outputs.values() if self.flow.reaches(source, output)}

    def liftable(self, call: Call) -> bool:
        """Return whether the call takes one wide argument, as its last dimension, and contains no look-up, layer or head."""
        inputs = {part for part in call.inputs.values() if part in self.wide}
        if len(inputs) != 1 or self.wide[next(iter(inputs))].dim != 1 or not call.outputs:
            return False
        parts = [*self.calls, *(self.flow.call_of(node) for node in (*self.look_ups, *self.heads))]
        return not any(map(call.encloses, parts))

    def check_outputs(self) -> None:
        """Raise `DoesNotFitError` if the widened model would be wrong.

        It would be if an output of the model were wide, only some calls of a module were replicated, or a widened weight had a
        reader at its dense width.
        """
        for call in self.flow.program.calls:
            if call.path in self.plan.replicated and call not in self.replicas:
                node = next(iter(call.outputs.values()))
                raise self.refuse(node, f"{call.path} contributes to the wide stream in one call and to something else in another")
        first = next(iter(self.flow.program.outputs.values()), None)
        for name, node in self.flow.program.outputs.items():
            in_list = "." in name  # of hidden states
            if node in self.wide and (node is first or not in_list or self.wide[node].computed):
                raise self.refuse(node, f"the output {name} would be K times as wide")
        readers = {*self.look_ups, *self.heads}
        for placeholder, name in self.flow.program.parameters.items():
            for user in placeholder.users if name in {*self.plan.tables, *self.plan.heads} else ():
                if user not in readers and not leads_only_to(user, readers):
                    raise self.refuse(user, f"{name} is also read here, at its dense width")


def leads_only_to(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Return whether `node` only rearranges a weight for some of `readers`."""
    return op(node) in LAYOUT | CAST and all(user in readers or leads_only_to(user, readers) for user in node.users)
