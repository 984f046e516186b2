"""`from_onnx`: an ONNX transformer as an FX graph module that trains, its weights parameters under readable names.

Every node of the ONNX graph is a call of a small function (`retrofit.onnx.ops`, `retrofit.onnx.layers`, `retrofit.onnx.fused`).
What a pass has to see is brought into one form on the way: a product with a weight, and what is added to it, is a linear layer with
a weight (out, in), whatever way round and under however many nodes the file has it; weights that are equal bit for bit are tied;
states of earlier tokens are none, unless they are asked for.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CaptureError, RetrofitError
from retrofit.graphs.graph_module import Graph
from retrofit.onnx.importer import fused, layers
from retrofit.onnx.importer.branches import Choice, settle
from retrofit.onnx.importer.operators import MAKERS, OPERATORS, REFUSALS, Operator, gather
from retrofit.onnx.importer.quantized import DEQUANTIZE, QUANTISING, dequantised, from_blocks, from_table, is_blocks, is_table
from retrofit.onnx.importer.reading import argument, attributes_of, domain_of, every_node, read, word
from retrofit.onnx.importer.values import DTYPES, is_number
from retrofit.onnx.importer.weights import Weights, values_of
from retrofit.pipeline import recipe_storage
from retrofit.runtime.example_inputs import BATCH, LENGTH, TARGET_LENGTH

if TYPE_CHECKING:
    import onnx

States: TypeAlias = Literal["none", "past"]

STATE = "past"  # inputs called so hold what earlier tokens left; outputs called `present…` hand it on
HANDED_ON = "present"
MASKS, NUMBERINGS = "mask", "position"  # in the names of inputs that say what is padding, and where tokens stand
SIZES = frozenset(("Shape", "Size", "Constant"))
TRIED = ((1, 1), (1, 3), (2, 5), (3, LENGTH), (8, 16))  # batch and length at which the two ways of a choice are compared


def from_onnx(path: str | Path, cache: States = "none") -> fx.GraphModule:
    """The transformer in the ONNX file at `path` as a graph module in evaluation mode, of any batch and length the file allows.

    Its inputs are the file's by name, and it returns its outputs by name. With `cache="none"` it is the model of a whole sequence:
    states of earlier tokens are left out, as what there is before the first. With `cache="past"` they are inputs and outputs like
    the others. Floating weights are parameters, quantised ones the numbers they stand for. Raises `CheckpointError` where the file
    cannot be read, `CaptureError` where it holds an operator that is not known, with the node.
    """
    if cache not in ("none", "past"):
        raise RetrofitError(f"there is no cache={cache!r}", remedy="choose none or past")
    path = Path(path)
    return Importing(read(path), path, cache == "past").graph_module()


class Scope:
    """A graph that is being made, and what it reads of the graph around it, as inputs."""

    def __init__(self, around: Scope | None = None) -> None:
        self.root, self.graph, self.around = nn.Module(), fx.Graph(), around
        self.lifted: dict[fx.Node, fx.Node] = {}

    def here(self, value: Any) -> Any:
        """The value as one of this graph."""
        if not isinstance(value, fx.Node) or value.graph is self.graph:
            return value
        if value not in self.lifted:
            with self.graph.inserting_before(next((one for one in self.graph.nodes if one.op != "placeholder"), None)):
                self.lifted[value] = self.graph.placeholder(f"outer_{len(self.lifted)}")
        return self.lifted[value]


class Importing:
    """The import of one file."""

    def __init__(self, model: onnx.ModelProto, path: Path, keeps: bool) -> None:
        self.model, self.path, self.keeps = model, path, keeps  # whether states stay inputs and outputs
        self.scope = Scope()
        self.values: dict[str, Any] = {"": None}  # by ONNX name: nodes or numbers
        self.constants: dict[str, Any] = {}  # the same of what the file holds
        self.weights = Weights(model.graph, path, self.scope.root, self.scope.graph)
        self.uses = self.weights.uses
        self.producers: dict[str, onnx.NodeProto] = {name: node for node in every_node(model.graph) for name in node.output}
        self.dequantise()
        self.unknown()
        self.device: fx.Node | None = None

    def dequantise(self) -> None:
        """Weights that lie quantised in the file are there as the numbers they stand for."""
        for node in every_node(self.model.graph):
            if node.op_type == DEQUANTIZE and self.holds(node.input):
                how = {name: value for name, value in attributes_of(node).items() if name in ("axis", "block_size")}
                self.weights.add(node.output[0], node.input[0], dequantised(*self.raw(node.input), **how))
            elif is_blocks(node) and self.holds(node.input[1:4]) and not any(node.input[4:5]):
                self.weights.add(node.input[1], node.input[1], from_blocks(attributes_of(node), *self.raw(node.input[1:4])))
            elif is_table(node) and self.holds([node.input[0], *node.input[2:]]) and node.input[0] not in self.weights.made:
                table = from_table(attributes_of(node), *self.raw([node.input[0], *node.input[2:]]))
                self.weights.add(node.input[0], node.input[0], table)

    def holds(self, names: Iterable[str]) -> bool:
        """Whether the file has these values as constants, as far as they are not left out."""
        return all(name in self.weights for name in names if name)

    def raw(self, names: Iterable[str]) -> list[Any]:
        return [self.weights.raw(name) if name else None for name in names]

    def unknown(self) -> None:
        """Raises `CaptureError` with the operators that no function is for."""
        strange = [node for node in every_node(self.model.graph) if not self.known(node)]
        if not strange:
            return
        first = strange[0]
        lacking = Counter(f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in strange)
        quantising = next((node for node in strange if node.op_type in (*QUANTISING, DEQUANTIZE)), None)
        why = f"the first is the node {first.name or first.output[0]}"
        if quantising is not None:
            why = f"the node {quantising.name or quantising.output[0]} computes on what is quantised as the model runs"
        raise CaptureError(
            f"{self.path} holds operators that are not known here: {', '.join(lacking)}",
            why=why,
            remedy="export the model without it"
            if quantising is None
            else "give the model that is not quantised, or one of which the weights only are (DequantizeLinear, MatMulNBits)",
        )

    def known(self, node: onnx.NodeProto) -> bool:
        if node.op_type == DEQUANTIZE:
            return node.output[0] in self.weights
        if is_blocks(node):
            return self.weights.is_matrix(node.input[1])
        if is_table(node):
            return node.input[0] in self.weights.made
        return node.op_type in ("Constant", "If") or (domain_of(node), node.op_type) in OPERATORS

    def graph_module(self) -> fx.GraphModule:
        graph = self.model.graph
        inputs = [one for one in graph.input if one.name not in self.weights]
        given = [one for one in inputs if self.stays(one)]
        for one in given:
            self.values[one.name] = self.scope.graph.placeholder(argument(one.name))
        if not given:
            raise CaptureError(f"{self.path} takes no input", remedy="give the file of a whole model")
        self.device = self.scope.graph.call_function(getattr, (self.values[given[0].name], "device"))
        for one in inputs:
            if one.name.startswith(STATE) and one not in given:
                self.values[one.name] = self.nothing_before(one, self.values[given[0].name])
            elif one not in given:
                self.values[one.name] = self.keeps  # whether there are earlier tokens
        self.run(graph)
        results = [one.name for one in graph.output if self.keeps or not one.name.startswith(HANDED_ON)]
        self.scope.graph.output({argument(name): self.value(name) for name in results})
        self.scope.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        made = Graph(self.scope.root, self.scope.graph, "Imported")
        made.graph.lint()
        settle(made, (self.examples(given, *sizes) for sizes in TRIED))
        made.__dict__["retrofit_examples"] = self.examples(given)
        recipe = next((one.value for one in self.model.metadata_props if one.key == "retrofit.recipe"), "")
        if recipe:
            recipe_storage.store_recipe(made, recipe.splitlines())
        return made.eval()

    def stays(self, value: onnx.ValueInfoProto) -> bool:
        """Whether an input of the file is one of the module."""
        return (self.keeps or not value.name.startswith(STATE)) and not self.only_chooses(value.name)

    # ── Nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, graph: onnx.GraphProto) -> None:
        """Every node of the graph has its values."""
        for node in graph.node:
            if all(not name or name in self.values or name in self.weights for name in node.output):
                continue  # read together with an earlier one, or a constant
            made = self.chosen(node) if node.op_type == "If" else self.called(node)
            for name, value in zip(node.output, made, strict=False):
                if name:
                    self.values[name] = value

    def called(self, node: onnx.NodeProto) -> Sequence[Any]:
        """The node's outputs."""
        if node.op_type == "Constant":
            return [self.constant(node)]
        if (merged := self.as_linear(node)) is not None:
            return [merged]
        if is_table(node):
            found = (self.value(node.input[0]), self.value(node.input[1]))
            return [self.scope.graph.call_function(gather, found, {"axis": attributes_of(node).get("gather_axis", 0)})]
        function = OPERATORS[domain_of(node), node.op_type]
        attributes = attributes_of(node)
        if "axes" in attributes:  # of a reduction: an input since operator set 18
            attributes["axes_attribute"] = attributes.pop("axes")
        if node.op_type == "Split":
            attributes["outputs"] = len(node.output)
        packed = (node.domain, node.op_type) == (fused.MICROSOFT, "Attention")  # with its projections
        operands = [self.turned(name) if packed and at == 1 else self.value(name) for at, name in enumerate(node.input)]
        self.refuse_what_is_not_computed(node, function, operands, attributes)
        if not any(isinstance(one, fx.Node) for one in operands) and function not in MAKERS:
            made = function(*operands, **attributes)  # of numbers only
            if is_number(made) or isinstance(made, tuple):
                return made if len(node.output) > 1 else [made]
        if function in MAKERS:
            attributes["device"] = self.scope.here(self.device)
        call = self.scope.graph.call_function(function, tuple(operands), attributes)
        several = len(node.output) > 1 or function in SEVERAL
        return [self.scope.graph.call_function(item, (call, at)) for at in range(len(node.output))] if several else [call]

    def refuse_what_is_not_computed(
        self, node: onnx.NodeProto, function: Operator, operands: Sequence[Any], attributes: Mapping[str, Any]
    ) -> None:
        """Raises `CaptureError` where the node has an input or attribute, or a value of one, that its function does not know."""
        why = REFUSALS.get((domain_of(node), node.op_type), lambda _: "")(dict(attributes))
        while operands and operands[-1] is None:  # an input that is left out
            operands = operands[:-1]
        try:
            inspect.signature(function).bind(*operands, **attributes)
        except TypeError as error:
            why = why or str(error)
        if why:
            raise CaptureError(
                f"{self.path}: the node {node.name or node.output[0]}, {node.domain or 'ai.onnx'}.{node.op_type}, is not read",
                why=why,
                remedy="export the model without it",
            )

    def value(self, name: str) -> Any:
        """The value called so, in the graph that is being made: computed, or a weight or constant of the file."""
        if name not in self.values and name not in self.constants:
            self.constants[name] = self.weights.value(name)
        return self.scope.here(self.values[name] if name in self.values else self.constants[name])

    def turned(self, name: str) -> fx.Node:
        made: fx.Node = self.scope.here(self.weights.turned(name))
        return made

    def constant(self, node: onnx.NodeProto) -> Any:
        (held,) = attributes_of(node).values()
        if isinstance(held, Tensor):
            return self.scope.here(self.weights.fixed(held, node.output[0]))
        return held

    def as_linear(self, node: onnx.NodeProto) -> fx.Node | None:
        """A product with a weight as a linear layer, with the bias that is all that is done to it; None where it is none."""
        found = self.product(node)
        if found is None:
            return None
        x, weight, bias = found
        if bias is None and (sum_ := self.only_user(node.output[0])) is not None and sum_.op_type == "Add":
            (other,) = [name for name in sum_.input if name != node.output[0]] or [""]
            if self.weights.is_bias(other):
                made = self.scope.graph.call_function(layers.linear, (self.value(x), weight, self.value(other)))
                self.values[sum_.output[0]] = made
                return made
        given = (self.value(x), weight) if bias is None else (self.value(x), weight, self.value(bias))
        return self.scope.graph.call_function(layers.linear, given)

    def product(self, node: onnx.NodeProto) -> tuple[str, fx.Node, str | None] | None:
        """What is multiplied, the weight (out, in), and the bias, of a node that is such a product."""
        if is_blocks(node):
            return node.input[0], self.value(node.input[1]), next(iter(node.input[5:6]), "") or None
        if domain_of(node) or node.op_type not in ("MatMul", "Gemm"):
            return None
        how = attributes_of(node)
        x, weight = node.input[:2]
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
        plain = not how.get("transA") and how.get("alpha", 1.0) == 1.0 and (bias is None or how.get("beta", 1.0) == 1.0)
        if not plain or not self.weights.is_matrix(weight) or (bias is not None and not self.weights.is_bias(bias)):
            return None
        return x, self.value(weight) if how.get("transB") else self.turned(weight), bias

    def only_user(self, name: str) -> onnx.NodeProto | None:
        users = self.uses.get(name, [])
        return users[0] if len(users) == 1 else None

    # ── Branches ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def chosen(self, node: onnx.NodeProto) -> Sequence[Any]:
        """The outputs of the branch that is taken; raises `CaptureError` where values, and not sizes, tell which."""
        condition = self.value(node.input[0])
        branches = {one.name: one.g for one in node.attribute}
        if isinstance(condition, tuple) and len(condition) == 1:
            condition = condition[0]
        if not isinstance(condition, fx.Node):
            return self.results(branches["then_branch" if condition else "else_branch"])
        if not self.is_of_sizes(node.input[0]):
            raise CaptureError(
                f"{self.path} computes a branch of the node {node.name or node.output[0]} from the values of its inputs",
                why="a graph that is trained takes one branch",
                remedy="export the model again in one piece",
            )
        then, otherwise = (self.branch(branches[name]) for name in ("then_branch", "else_branch"))
        operands = list(dict.fromkeys([*then.lifted, *otherwise.lifted]))
        modules = [self.module_of(scope, operands) for scope in (then, otherwise)]
        name = f"choice_{word(node.name or node.output[0])}"
        self.scope.root.add_module(name, Choice(node.name or node.output[0], *modules))
        call = self.scope.graph.call_module(name, (condition, *(self.scope.here(one) for one in operands)))
        return [self.scope.graph.call_function(item, (call, at)) for at in range(len(node.output))]

    def branch(self, graph: onnx.GraphProto) -> Scope:
        """The branch as a graph of its own that returns a tuple."""
        outer, values = self.scope, dict(self.values)
        self.scope = Scope(outer)
        try:
            made = tuple(self.scope.here(one) for one in self.results(graph))
            self.scope.graph.output(made)
            return self.scope
        finally:
            self.scope, self.values = outer, values

    def module_of(self, scope: Scope, operands: Sequence[fx.Node]) -> fx.GraphModule:
        """The scope as a module that takes the operands, those that it reads among them."""
        for one in operands:
            scope.here(one)
        order = [scope.lifted[one] for one in operands]
        for placeholder in reversed(order):
            next(iter(scope.graph.nodes)).prepend(placeholder)
        made = fx.GraphModule(scope.root, scope.graph, "Branch")
        made.graph.lint()
        return made

    def results(self, graph: onnx.GraphProto) -> list[Any]:
        """What a branch returns, computed here."""
        for one in graph.initializer:
            self.weights.add(one.name, one.name, values_of(one))
        self.run(graph)
        return [self.value(one.name) for one in graph.output]

    def is_of_sizes(self, name: str) -> bool:
        """Whether a value hangs on the sizes of the inputs and on nothing else of them."""
        reached = [name]
        for one in reached:
            node = self.producers.get(one)
            if node is None:
                if one not in self.weights:
                    return False
            elif node.op_type not in SIZES:
                reached.extend(read for read in node.input if read and read not in reached)
        return True

    def only_chooses(self, name: str) -> bool:
        """Whether an input does nothing but choose a branch."""
        users = self.uses.get(name, [])
        return bool(users) and all(node.op_type == "If" and node.input[0] == name for node in users)

    def nothing_before(self, value: onnx.ValueInfoProto, like: fx.Node) -> fx.Node:
        """The state before any token: of no length, and of zeros where it has none.

        Raises `CaptureError` where it is a state that tokens do not add to: what a cross-attention reads of the encoder's output.
        """
        if tail(value.name) not in {tail(one.name) for one in self.model.graph.output if one.name.startswith(HANDED_ON)}:
            raise CaptureError(
                f"{self.path} goes on from {value.name}, which it does not hand on",
                why="so it is no state that is empty before the first token",
                remedy="give the file of the first step (decoder_model.onnx), or keep the states: from_onnx(path, cache='past')",
            )
        free = iter((None, 0))
        extents = tuple(one.dim_value if one.HasField("dim_value") else next(free) for one in value.type.tensor_type.shape.dim)
        return self.scope.graph.call_function(empty_state, (like, extents, DTYPES[value.type.tensor_type.elem_type]))

    # ── Inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def examples(self, given: Sequence[onnx.ValueInfoProto], batch: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
        """An example of each input: ids that its table has, masks of ones, positions counted, noise for what is real."""
        generator = torch.Generator().manual_seed(0)
        made = {}
        extents = self.extents(given, batch, length)
        before = TARGET_LENGTH if any(map(is_state, given)) else 0
        for one in given:
            dtype, shape = DTYPES[one.type.tensor_type.elem_type], extents[one.name]
            if dtype.is_floating_point and MASKS not in one.name:
                value = torch.randn(shape, generator=generator).to(dtype)
            elif MASKS in one.name:
                value = torch.ones(shape, dtype=dtype)
            elif NUMBERINGS in one.name:
                value = (before + torch.arange(shape[-1])).expand(shape).contiguous().to(dtype)
            else:
                value = torch.randint(self.rows_read(one.name), shape, generator=generator).to(dtype)
            made[argument(one.name)] = value
        return made

    def extents(self, given: Sequence[onnx.ValueInfoProto], batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """The shape of an example of each input; where there are states, masks cover these and the tokens after them."""
        found: dict[str, tuple[int, ...]] = {}
        symbols: dict[str, int] = {}
        states = any(map(is_state, given))
        for one in sorted(given, key=lambda one: (MASKS in one.name, is_state(one))):
            each = min(TARGET_LENGTH, length) if one.name.startswith("decoder_") else length
            if states and (is_state(one) or MASKS in one.name):
                each = TARGET_LENGTH if is_state(one) else TARGET_LENGTH + length
            dims = one.type.tensor_type.shape.dim
            free = [dim for dim in dims if not dim.dim_value]
            shape = {id(dim): each if at else batch for at, dim in enumerate(free)}
            for dim in free[1:] if states else ():
                part = re.search(r"_per_(\d+)$", dim.dim_param)  # a part of another extent, rounded up
                own = -(-each // int(part[1])) if part else each
                shape[id(dim)] = symbols.setdefault(dim.dim_param, own) if dim.dim_param else own
            found[one.name] = tuple(dim.dim_value or shape[id(dim)] for dim in dims)
        return found

    def rows_read(self, name: str) -> int:
        """How many rows the table has that the input's numbers look up; 1 where it looks up none."""
        reached, found = [name], 0
        for one in reached:
            for node in self.uses.get(one, []):
                if node.op_type == "Gather" and node.input[1] == one and self.weights.is_matrix(node.input[0]):
                    found = max(found, self.weights.shape(node.input[0])[0])
                elif node.op_type == "EmbedLayerNormalization" and node.input[0] == one:
                    found = max(found, self.weights.shape(node.input[2])[0])
                elif node.op_type in ("Cast", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Clip", "Where", "Add", "Mul", "Sub"):
                    reached.extend(name for name in node.output if name not in reached)
        return max(found, 1)


SEVERAL = {
    OPERATORS[key]
    for key in [
        *((fused.MICROSOFT, name) for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Attention")),
        *((fused.MICROSOFT, name) for name in ("MultiHeadAttention", "GroupQueryAttention", "EmbedLayerNormalization")),
        *(("", name) for name in ("Attention", "Dropout", "Split", "TopK")),
    ]
}  # they return a tuple however many outputs are named


def item(values: Any, index: int) -> Any:
    """`values[index]`."""
    return values[index]


def empty_state(like: Tensor, extents: Sequence[int | None], dtype: torch.dtype) -> Tensor:
    """A state before any token; where its batch is None it is that of `like`."""
    return torch.zeros([like.shape[0] if one is None else one for one in extents], dtype=dtype, device=like.device)


def is_state(value: onnx.ValueInfoProto) -> bool:
    return str(value.name).startswith(STATE)


def tail(name: str) -> str:
    """The name of a state without what says that it comes in or goes out."""
    return re.sub(r"^(past_key_values|past|present)", "", name)
