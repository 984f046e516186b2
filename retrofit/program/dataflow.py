"""The data flow of a captured program: the dependences of each value, and the heavy operations on the paths between values.

The ancestors of a node are a bit mask, a Python integer with one bit per node, so that a query for a dependence is one `&`; all
masks together cost one pass over the nodes. `networkx` has the same edges as a graph (`Dataflow.graph`), for users of
`Anatomy.graph` and for the layout of drawings; no query here uses it. `backward_slice` and `forward_slice` are walks over the `fx`
nodes, for programs without masks.

Also here: inputs that are states of earlier tokens. A model without a cache object takes them and returns them extended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, fx, nn

from retrofit.errors import DoesNotFitError
from retrofit.inputs.example_inputs import forward_parameters
from retrofit.program.aten_ops import (
    CAST,
    JOIN,
    LAYOUT,
    LIKE,
    NO_GRADIENT,
    SELECTION,
    carried_operands,
    is_float,
    is_heavy,
    op,
    shape,
)
from retrofit.program.program import MUTATION, Call, Program

if TYPE_CHECKING:
    import networkx

Item = TypeVar("Item")


class Dataflow:
    """Ancestors, heavy ancestors and carried operands of every node of `program`.

    An operation that reads only the shape of an operand (`zeros_like`) does not depend on it. `aten_ops` defines *heavy* and
    *carry*.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = [node for node in program.graph.nodes if node.op != "output"]
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.ancestors: dict[fx.Node, int] = {}  # bit mask, including the node itself
        self.heavy_ancestors: dict[
            fx.Node, int
        ] = {}  # bit mask of the ancestors with a heavy operation on a path to the node, which may be the node itself
        self.depends: set[fx.Node] = set()  # the nodes that depend on the contents of the inputs, not only on their shapes
        self.carried_operands: dict[fx.Node, list[fx.Node]] = {}  # the operands that each node carries
        self.queries: set[fx.Node] = set()  # starts of streams that are the same for all inputs; they count as inputs
        for node in self.nodes:
            self.visit(node)
        if found := constant_streams(self):
            self.queries = found
            self.depends.clear()
            for node in self.nodes:
                self.visit(node)
        self.uses = {node: [user for user in node.users if not is_assertion(user)] for node in self.nodes}
        # the operations on the contents of the inputs, in order
        self.computations = [
            node for node in self.nodes if node in self.depends and node.op == "call_function" and not is_assertion(node)
        ]

    def visit(self, node: fx.Node) -> None:
        """Compute the masks of `node` from those of its operands."""
        operands = [] if op(node) in LIKE else [part for part in node.all_input_nodes if part in self.position]
        mask, heavy = 1 << self.position[node], 0
        for part in operands:
            mask |= self.ancestors[part]
            heavy |= self.ancestors[part] if is_heavy(node) else self.heavy_ancestors[part]
        self.ancestors[node], self.heavy_ancestors[node] = mask, heavy
        if node in self.program.inputs or node in self.queries or any(part in self.depends for part in operands):
            self.depends.add(node)
        self.carried_operands[node] = carried_operands(node, self.depends)

    @functools.cached_property
    def named(self) -> dict[str, fx.Node]:
        """Return the nodes by name."""
        return {node.name: node for node in self.nodes}

    @functools.cached_property
    def operations_of_calls(self) -> dict[Call, set[str]]:
        """Return the operations computed in each call itself; "heavy" represents the heavy ones."""
        found: dict[Call, set[str]] = {}
        for node in self.nodes:
            found.setdefault(self.call_of(node), set()).add("heavy" if is_heavy(node) else op(node))
        return found

    @functools.cached_property
    def trained(self) -> set[fx.Node]:
        """Return the floats with a gradient: an output depends on them through floats, not only by comparison or selection."""
        found = {node for name, node in self.program.outputs.items() if is_float(node) and not name.startswith(MUTATION)}
        for node in reversed(self.nodes):
            if node in found and op(node) not in NO_GRADIENT | LIKE:
                found.update(part for part in node.all_input_nodes if is_float(part) or has_parts(part))
        return found

    def node(self, name: str) -> fx.Node:
        """Return the node called `name`."""
        return self.named[name]

    def bit(self, node: fx.Node) -> int:
        """Return the mask of this node alone."""
        return 1 << self.position[node]

    def reaches(self, early: fx.Node, late: fx.Node) -> bool:
        """Return whether `late` is `early` or depends on it."""
        return bool(self.ancestors[late] & self.bit(early))

    def reaches_through_heavy_op(self, early: fx.Node, late: fx.Node) -> bool:
        """Return whether `late` depends on `early` along a path with a heavy operation, which may be `late` itself."""
        return bool(self.heavy_ancestors[late] & self.bit(early))

    def between(self, early: fx.Node, late: fx.Node) -> list[fx.Node]:
        """Return the nodes on the paths from `early` (excluded) to `late` (included), in order."""
        above, bit = self.ancestors[late], self.bit(early)
        first, last = self.position[early], self.position[late]
        return [node for node in self.nodes[first + 1 : last + 1] if above & self.bit(node) and self.ancestors[node] & bit]

    def carried_chain(self, node: fx.Node) -> list[fx.Node]:
        """Return `node`, the single operand that it carries, the one that this carries, and so on upwards."""
        chain = [node]
        while len(self.carried_operands[chain[-1]]) == 1:
            chain.append(self.carried_operands[chain[-1]][0])
        return chain

    def call_of(self, node: fx.Node) -> Call:
        """Return the innermost module call in which the node was computed."""
        return self.program.owner.get(node, self.program.root)

    def parameters_of(self, nodes: list[fx.Node]) -> dict[str, int]:
        """Return name and element count of each parameter that `nodes` read, directly or through operations on weights alone."""
        sizes: dict[str, int] = {}
        pending, seen = list(nodes), set(nodes)
        while pending:
            for part in pending.pop().all_input_nodes:
                if part in self.program.parameters:
                    size = 1
                    for extent in shape(part) or ():
                        size *= extent
                    sizes[self.program.parameters[part]] = size
                elif part not in seen and part not in self.depends and part.op == "call_function":
                    seen.add(part)
                    pending.append(part)
        return sizes

    def graph(self) -> networkx.DiGraph:
        """Return the data flow as a `networkx` graph: nodes by name, with operation, shape and module path."""
        import networkx  # deferred, since queries do not need it

        graph = networkx.DiGraph()
        for node in self.nodes:
            graph.add_node(
                node.name,
                op=op(node),
                shape=shape(node),
                module=self.call_of(node).path,
                call=self.call_of(node).index,
                parameter=self.program.parameters.get(node),
                depends=node in self.depends,
            )
            graph.add_edges_from((part.name, node.name) for part in node.all_input_nodes if part in self.position)
        return graph


def constant_streams(flow: Dataflow) -> set[fx.Node]:
    """Return the starts of streams that are constant until a layer adds a function of the inputs: a decoder's queries."""
    found: set[fx.Node] = set()
    for node in flow.nodes:
        if op(node) != "add" or node not in flow.depends:
            continue
        parts = [part for part in node.args if isinstance(part, fx.Node) and shape(part) == shape(node)]
        same = [part for part in parts if part not in flow.depends and part.op == "call_function"]
        if len(parts) == 2 and len(same) == 1:
            (added,) = (part for part in parts if part is not same[0])
            stream = constant_chain(same[0], flow)
            if any(flow.reaches_through_heavy_op(part, added) for part in stream):
                found.add(stream[-1])
    return found


def constant_chain(node: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """Return `node`, which depends on no input, and the stream above it.

    That is its carried operand, the one that this carries, and so on; in a sum, the term that another term depends on through a
    heavy operation.
    """
    chain = [node]
    computed = {earlier for earlier in flow.nodes[: flow.position[node] + 1] if earlier.op == "call_function"}
    while True:
        last = chain[-1]
        above = [part for part in carried_operands(last, computed) if part in computed]
        if op(last) == "add":
            terms = [part for part in last.args if isinstance(part, fx.Node) and part in computed]
            above = [part for part in terms if any(flow.reaches_through_heavy_op(part, other) for other in terms)] or above
        if len(above) != 1 or shape(above[0]) != shape(node):
            return chain
        chain.append(above[0])


def has_parts(node: fx.Node) -> bool:
    """Return whether the value consists of several tensors."""
    return isinstance(node.meta.get("val"), (tuple, list))


def is_assertion(node: fx.Node) -> bool:
    """Return whether the operation only asserts a property of its operands."""
    return op(node).startswith("_assert")


def backward_slice(results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the results depend on, including the results."""
    return reachable(results, lambda node: node.all_input_nodes)


def reachable(starts: Iterable[Item], following: Callable[[Item], Iterable[Item]]) -> set[Item]:
    """Return the items, and all that follow from them, from these, and so on."""
    found: set[Item] = set()
    pending = list(starts)
    while pending:
        item = pending.pop()
        if item not in found:
            found.add(item)
            pending.extend(following(item))
    return found


def forward_slice(sources: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the sources and those of `nodes`, given in order, that depend on one of them."""
    found = set(sources)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def state_inputs(program: Program) -> list[str]:
    """Return the inputs that an output extends: the output is such an input concatenated with more, and nothing else."""
    found: list[str] = []
    for output in program.outputs.values():
        pending: list[tuple[fx.Node, bool]] = [(output, False)]
        while pending:
            node, joined = pending.pop()
            if joined and node in program.inputs:
                found.append(program.inputs[node])
            elif op(node) in LAYOUT | CAST | SELECTION | JOIN | {"getitem"}:
                pending += [(part, joined or op(node) in JOIN) for part in node.all_input_nodes]
    return list(dict.fromkeys(found))


def refuse_state_inputs(program: Program, name: str) -> None:
    """Raises `DoesNotFitError` if the model takes states as inputs; `name` is the pass whose layers need more of earlier tokens."""
    if found := state_inputs(program):
        raise DoesNotFitError(
            f"the model takes the states of earlier tokens as inputs, such as {found[0]}",
            by=name,
            why="what the rewritten layers need of earlier tokens has no place among them",
            remedy="rewrite the model of whole sequences, which from_onnx(path, cache='none') gives, or use another pass",
            code="cache-state",
        )


def number_is_loss(program: Program, model: nn.Module) -> bool:
    """Return whether a single number that `model` returns in a tuple is its loss, at any position and for any targets.

    It is the loss if a call without targets returns no number. If the program was captured with targets, the loss is the only
    output that depends on one of the inputs. A model that takes `labels` returns its loss as transformers' models do.
    """
    if "labels" in forward_parameters(model):
        return False
    returned = [node for name, node in program.outputs.items() if not name.startswith(MUTATION)]
    numbers = [node for node in returned if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dim() == 0]
    for_others = backward_slice(node for node in returned if node not in numbers)
    return all(not (backward_slice([number]) - for_others).isdisjoint(program.inputs) for number in numbers)
