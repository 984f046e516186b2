"""`from_onnx`: an ONNX transformer as an FX graph module that trains, with its weights as parameters under readable names.

Each node becomes a call of a small torch function (`retrofit.onnx.importer.operators`). Structures that passes look for get one
form here: a product with a weight, and a bias added to it, become a linear layer with a weight (out, in), whatever its orientation
and number of nodes in the file; weights that are equal bit for bit are tied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CaptureError, CheckpointError, RetrofitError, first_line
from retrofit.files.model_folders import as_path
from retrofit.inputs.example_inputs import LENGTH
from retrofit.numerics.distances import distance
from retrofit.onnx.importer.model_file import (
    attribute_values,
    load_model,
    node_label,
    only_user,
    operator_label,
    read_rows_as_heads,
    release_tensors,
    to_torch,
)
from retrofit.onnx.importer.operators import (  # noqa: F401 # the modules among them register their operators
    CHOICE,
    DTYPES,
    FACTORIES,
    IGNORED,
    MICROSOFT,
    OPERATORS,
    REFUSALS,
    TYPES_OF_NUMBERS,
    Operator,
    attention,
    elementwise,
    is_number,
    neural_networks,
    numbers,
    shapes,
)
from retrofit.onnx.importer.weights import (
    DEQUANTIZE,
    PRESENT_PREFIX,
    QUANTIZED_OPERATORS,
    Weights,
    argument_name,
    dequantize,
    dequantize_blocks,
    dequantize_table,
    file_examples,
    identifier,
    is_block_product,
    is_quantized_table,
    is_state_input,
    only_numbers,
    only_selects_a_branch,
    refuse_odd_inputs,
    refuse_same_names,
    state_key,
)
from retrofit.program.program import Graph
from retrofit.program.tracing import is_exporting
from retrofit.provenance import record_provenance

if TYPE_CHECKING:
    import onnx_ir


TOLERANCE = 1e-4  # allowed difference of two branches, relative to the largest number
THEN, OTHERWISE = "then", "otherwise"


class SizeConditional(nn.Module):
    """Returns `then` if the condition holds, else `otherwise`.

    `general` names the branch valid at all sizes; "" if neither is.
    """

    def __init__(self, node: str, then: nn.Module, otherwise: nn.Module) -> None:
        super().__init__()
        self.node, self.then, self.otherwise = node, then, otherwise
        self.general = ""
        self.trials: list[BranchTrial] | None = None

    def forward(self, condition: Any, *operands: Any) -> Any:
        (condition,) = condition if isinstance(condition, tuple) else (condition,)
        if self.trials is not None:
            self.trials.append(BranchTrial.of(self, operands))
        if is_exporting() and self.general:
            return getattr(self, self.general)(*operands)
        if isinstance(condition, torch.SymBool):
            raise CaptureError(
                f"the node {self.node} selects by sizes between two branches that compute different things",
                why="a graph that is rewritten takes one branch for every size",
                remedy="export the model with these sizes fixed",
                code="branch",
            )
        return (self.then if condition else self.otherwise)(*operands)

    def select_general(self) -> None:
        """Set `general` to the branch that ran in every trial, if the branches agreed in every trial in which both ran."""
        trials, self.trials = self.trials or [], None
        general = [branch for branch in (OTHERWISE, THEN) if all(branch in trial.ran for trial in trials)]
        compared = [trial.agreed for trial in trials if len(trial.ran) == 2]
        self.general = general[0] if general and compared and all(compared) else ""


@dataclasses.dataclass(frozen=True)
class BranchTrial:
    """A trial of a conditional: the branches that ran on some operands, and whether they agreed if both ran."""

    ran: frozenset[str]
    agreed: bool

    @classmethod
    def of(cls, conditional: SizeConditional, operands: Sequence[Any]) -> BranchTrial:
        results: dict[str, Any] = {}
        for branch in (THEN, OTHERWISE):
            with contextlib.suppress(Exception):  # a branch need not run at the other's sizes
                results[branch] = getattr(conditional, branch)(*operands)
        agreed = len(results) == 2 and all(agree(a, b) for a, b in zip(results[THEN], results[OTHERWISE], strict=True))
        return cls(frozenset(results), agreed)


def agree(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and (a.numel() == 0 or distance(a, b) <= TOLERANCE)


def select_general_branches(module: fx.GraphModule, examples: Iterable[Mapping[str, Tensor]]) -> None:
    """Select the `general` branch of every conditional in the module by running both on the examples."""
    conditionals = [part for part in module.modules() if isinstance(part, SizeConditional)]
    if not conditionals:
        return
    for conditional in conditionals:
        conditional.trials = []
    with torch.no_grad():
        for example in examples:
            with contextlib.suppress(RuntimeError, IndexError):  # a model need not run at every size
                module(**example)
    for conditional in conditionals:
        conditional.select_general()


# ── The file as a graph module ────────────────────────────────────────────────────────────────────────────────────────────────────


SIZE_OPERATORS = frozenset(("Shape", "Size", "Constant"))
TRIAL_SIZES = ((1, 1), (1, 3), (2, 5), (3, LENGTH), (8, 16))  # batch and length at which the branches of an `If` are compared
TUPLE_OPERATORS = {
    OPERATORS[key]
    for key in [
        *((MICROSOFT, name) for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Attention")),
        *((MICROSOFT, name) for name in ("MultiHeadAttention", "GroupQueryAttention", "EmbedLayerNormalization")),
        *(("", name) for name in ("Attention", "Dropout", "Split", "TopK")),
    ]
}  # they return a tuple, whatever the number of named outputs


class SubgraphScope:
    """An FX graph under construction; values that it reads from the graph around it become its inputs."""

    def __init__(self) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        self.lifted: dict[fx.Node, fx.Node] = {}

    def localize(self, value: Any) -> Any:
        """Return the value as one of this graph."""
        if not isinstance(value, fx.Node) or value.graph is self.graph:
            return value
        if value not in self.lifted:
            with self.graph.inserting_before(next((node for node in self.graph.nodes if node.op != "placeholder"), None)):
                self.lifted[value] = self.graph.placeholder(f"outer_{len(self.lifted)}")
        return self.lifted[value]


class GraphBuilder:
    """Builds the module of one file; with `keep_states` the states of earlier tokens stay inputs and outputs."""

    def __init__(self, model: onnx_ir.Model, path: Path, keep_states: bool) -> None:
        read_rows_as_heads(model)
        self.model, self.path, self.keep_states = model, path, keep_states
        self.scope = SubgraphScope()
        self.values: dict[onnx_ir.Value | None, Any] = {None: None}  # FX nodes or numbers
        self.constants: dict[onnx_ir.Value, Any] = {}  # the same for constants of the file
        self.weights = Weights(model.graph, path, self.scope.root, self.scope.graph)
        self.device: fx.Node | None = None
        self.dequantize_weights()
        self.refuse_unknown_operators()

    def dequantize_weights(self) -> None:
        """Turn quantized weights into constants with the values that they represent."""
        for node in self.weights.order:
            inputs = node.inputs
            if node.op_type == DEQUANTIZE and self.are_constant(inputs):
                layout = {name: value for name, value in attribute_values(node).items() if name in ("axis", "block_size")}
                self.weights.add(node.outputs[0], str(inputs[0].name), dequantize(*self.tensors(inputs), **layout))  # type: ignore[union-attr]
            elif is_block_product(node) and self.are_constant(inputs[1:4]) and not any(inputs[4:5]):
                blocks = dequantize_blocks(attribute_values(node), *self.tensors(inputs[1:4]))
                self.weights.add(inputs[1], str(inputs[1].name), blocks)  # type: ignore[arg-type, union-attr]
            elif (
                is_quantized_table(node) and self.are_constant([inputs[0], *inputs[2:]]) and inputs[0] not in self.weights.computed
            ):
                table = dequantize_table(attribute_values(node), *self.tensors([inputs[0], *inputs[2:]]))
                self.weights.add(inputs[0], str(inputs[0].name), table)  # type: ignore[arg-type, union-attr]

    def are_constant(self, values: Iterable[onnx_ir.Value | None]) -> bool:
        """Return whether the file has these values as constants, apart from omitted ones."""
        return all(value in self.weights for value in values if value is not None)

    def tensors(self, values: Iterable[onnx_ir.Value | None]) -> list[Any]:
        return [None if value is None else self.weights.tensor(value) for value in values]

    def refuse_unknown_operators(self) -> None:
        """Raises `CaptureError` with the unknown operators."""
        unknown = [node for node in self.weights.order if not self.is_known(node)]
        if not unknown:
            return
        quantized = next((node for node in unknown if node.op_type in (*QUANTIZED_OPERATORS, DEQUANTIZE)), None)
        if quantized is None:
            why = f"the first is the node {node_label(unknown[0])}"
            remedy = "export the model without it"
        else:
            why = f"the node {node_label(quantized)} computes on values that are quantized at run time"
            remedy = "use the model before quantization, or one with quantized weights only (DequantizeLinear, MatMulNBits)"
        raise CaptureError(
            f"{self.path} has unknown operators: {', '.join(Counter(map(operator_label, unknown)))}",
            why=why,
            remedy=remedy,
            code="operator",
        )

    def is_known(self, node: onnx_ir.Node) -> bool:
        if node.op_type == DEQUANTIZE:
            return node.outputs[0] in self.weights
        if is_block_product(node):
            return self.weights.is_matrix(node.inputs[1])
        if is_quantized_table(node):
            return node.inputs[0] in self.weights.computed
        return node.op_type in ("Constant", "If") or (node.domain, node.op_type) in OPERATORS

    def graph_module(self) -> fx.GraphModule:
        graph = self.model.graph
        inputs = [value for value in graph.inputs if value not in self.weights]
        kept = [value for value in inputs if (self.keep_states or not is_state_input(value)) and not only_selects_a_branch(value)]
        refuse_odd_inputs(kept, self.path)
        for value in kept:
            self.values[value] = self.scope.graph.placeholder(argument_name(str(value.name)))
        if not kept:
            raise CaptureError(f"{self.path} takes no input", remedy="use the file of a whole model", code="no-inputs")
        self.device = self.scope.graph.call_function(getattr, (self.values[kept[0]], "device"))
        for value in inputs:
            if is_state_input(value) and value not in kept:
                self.values[value] = self.initial_state(value, self.values[kept[0]])
            elif value not in kept:
                self.values[value] = self.keep_states  # whether there are earlier tokens
        self.add_nodes(graph)
        results = [value for value in graph.outputs if self.keep_states or not str(value.name).startswith(PRESENT_PREFIX)]
        refuse_same_names("outputs", results, self.path)
        self.scope.graph.output({argument_name(str(value.name)): self.value(value) for value in results})
        self.scope.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        module = Graph(self.scope.root, self.scope.graph, "Imported")
        module.graph.lint()
        select_general_branches(module, (file_examples(kept, self.weights, *sizes) for sizes in TRIAL_SIZES))
        record_provenance(module, examples=file_examples(kept, self.weights))
        if recipe := self.model.metadata_props.get("retrofit.recipe", ""):
            record_provenance(module, recipe=tuple(recipe.splitlines()))
        return module.eval()

    def initial_state(self, value: onnx_ir.Value, like: fx.Node) -> fx.Node:
        """Return the state before any token: of length 0, or zeros if it has no length.

        Raises `CaptureError` for a state that does not grow with tokens: a cross-attention's keys or values of the encoder's
        output.
        """
        returned = {state_key(output) for output in self.model.graph.outputs if str(output.name).startswith(PRESENT_PREFIX)}
        if state_key(value) not in returned:
            raise CaptureError(
                f"{self.path} continues from {value.name}, which it does not return",
                why="so it is not a state that is empty before the first token",
                remedy="use the file of the first step (decoder_model.onnx), or keep the states: from_onnx(path, cache='past')",
                code="cache-state",
            )
        dynamic = iter((None, 0))
        extents = tuple(dim if isinstance(dim, int) else next(dynamic) for dim in value.shape or ())
        return self.scope.graph.call_function(empty_state, (like, extents, DTYPES[value.dtype]))  # type: ignore[index]

    # ── Nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_nodes(self, graph: onnx_ir.Graph) -> None:
        """Compute the values of every node of the graph."""
        for node in graph:
            if all(not value.name or value in self.values or value in self.weights for value in node.outputs):
                continue  # read together with an earlier one, or a constant
            try:
                results = self.conditional(node) if node.op_type == "If" else self.call(node)
            except RetrofitError:
                raise
            except Exception as error:  # of any type: the node's inputs may not fit its operator
                raise CaptureError(
                    f"{self.path}: the node {node_label(node)}, {operator_label(node)}, cannot be read",
                    why=first_line(error),
                    remedy="check the file with onnx.checker, or export the model again",
                    code="unreadable",
                ) from error
            for value, result in zip(node.outputs, results, strict=False):
                if value.name:
                    self.values[value] = result

    def call(self, node: onnx_ir.Node) -> Sequence[Any]:
        """Return the node's outputs."""
        if node.op_type == "Constant":
            return [self.constant(node)]
        if (layer := self.as_linear(node)) is not None:
            return [layer]
        if is_quantized_table(node):
            operands = (self.value(node.inputs[0]), self.value(node.inputs[1]))
            axis = attribute_values(node).get("gather_axis", 0)
            return [self.scope.graph.call_function(shapes.gather, operands, {"axis": axis})]
        function = OPERATORS[node.domain, node.op_type]
        attributes = attribute_values(node)
        refused = REFUSALS.get((node.domain, node.op_type), lambda _: "")(attributes)
        for name in IGNORED[node.domain, node.op_type]:
            attributes.pop(name, None)
        if "axes" in attributes and node.op_type.startswith("Reduce"):  # of a reduction: an input since operator set 18
            attributes["axes_attribute"] = attributes.pop("axes")
        if node.op_type == "Split":
            attributes["outputs"] = len(node.outputs)
        packed = (node.domain, node.op_type) == (MICROSOFT, "Attention")  # with its projections
        inputs = enumerate(node.inputs)
        arguments = [self.transposed(value) if packed and at == 1 else self.value(value) for at, value in inputs]  # type: ignore[arg-type]
        self.refuse_unsupported(node, function, arguments, attributes, refused)
        if not any(isinstance(argument, fx.Node) for argument in arguments) and function not in FACTORIES:
            result = function(*arguments, **attributes)  # of numbers only
            if is_number(result) or isinstance(result, tuple):
                return result if len(node.outputs) > 1 else [result]
        if function in FACTORIES:
            attributes["device"] = self.scope.localize(self.device)
        call = self.scope.graph.call_function(function, tuple(arguments), attributes)
        if function in TUPLE_OPERATORS:
            return self.unpacked(call, len(node.outputs))
        self.refuse_further_outputs(node)
        return [self.in_own_type(node, arguments, call)]

    def unpacked(self, call: fx.Node, count: int) -> list[fx.Node]:
        """Return the first items of the tuple that a call returns."""
        return [self.scope.graph.call_function(operator.getitem, (call, index)) for index in range(count)]

    def in_own_type(self, node: onnx_ir.Node, arguments: Sequence[Any], call: fx.Node) -> fx.Node:
        """Return the result of a node in the file's dtype, if it was computed from numbers, which have none."""
        dtype = DTYPES.get(node.outputs[0].dtype)  # type: ignore[arg-type]
        if dtype is None or dtype in TYPES_OF_NUMBERS:
            return call
        operands = zip(node.inputs, arguments, strict=True)
        dtypes = (value and DTYPES.get(value.dtype) for value, argument in operands if isinstance(argument, fx.Node))  # type: ignore[arg-type]
        if dtype in dtypes:
            return call
        return self.scope.graph.call_function(in_type, (call, dtype))

    def refuse_further_outputs(self, node: onnx_ir.Node) -> None:
        """Raises `CaptureError` if something reads an output of the node other than the first."""
        for value in node.outputs[1:]:
            if value.consumers() or value.is_graph_output():
                raise self.unsupported(node, f"its output {value.name} is used, and retrofit does not compute it")

    def refuse_unsupported(
        self, node: onnx_ir.Node, function: Operator, arguments: Sequence[Any], attributes: Mapping[str, Any], why: str
    ) -> None:
        """Raises `CaptureError` if the node has an input or attribute that its function does not have, or is refused for `why`."""
        while arguments and arguments[-1] is None:  # an omitted input
            arguments = arguments[:-1]
        try:
            signature(function).bind(*arguments, **attributes)
        except TypeError as error:
            why = why or str(error)
        if why:
            raise self.unsupported(node, why)

    def unsupported(self, node: onnx_ir.Node, why: str) -> CaptureError:
        return CaptureError(
            f"{self.path}: the node {node_label(node)}, {operator_label(node)}, is not read",
            why=why,
            remedy="export the model without it",
            code="operator",
        )

    def value(self, value: onnx_ir.Value | None) -> Any:
        """Return the value in the graph under construction: computed, or a weight or constant of the file."""
        if value in self.values:
            return self.scope.localize(self.values[value])
        assert value is not None
        if value not in self.constants:
            self.constants[value] = self.weights.value(value)
        return self.scope.localize(self.constants[value])

    def transposed(self, value: onnx_ir.Value) -> Any:
        """Return the weight matrix as (out, in) in the graph under construction."""
        return self.scope.localize(self.weights.transposed(value))

    def constant(self, node: onnx_ir.Node) -> Any:
        (held,) = attribute_values(node).values()
        if not isinstance(held, Tensor):
            return held
        if only_numbers(node.outputs[0]):
            return numbers(held)
        return self.scope.localize(self.weights.constant(held, str(node.outputs[0].name)))

    def as_linear(self, node: onnx_ir.Node) -> fx.Node | None:
        """Return a product with a weight as a linear layer, with the bias that its only reader adds, if it does; else None."""
        product = self.product(node)
        if product is None:
            return None
        x, weight, bias = product
        addition = None
        if bias is None and (user := only_user(node)) is not None and user.op_type == "Add":
            addend = next((value for value in user.inputs if value is not node.outputs[0]), None)
            if self.weights.is_bias(addend):
                addition, bias = user, addend
        arguments = (self.value(x), weight) if bias is None else (self.value(x), weight, self.value(bias))
        layer = self.scope.graph.call_function(neural_networks.linear, arguments)
        if addition is not None:
            self.values[addition.outputs[0]] = layer
        return layer

    def product(self, node: onnx_ir.Node) -> tuple[onnx_ir.Value | None, fx.Node, onnx_ir.Value | None] | None:
        """Return the operand, the weight (out, in) and the bias of a node that is a product with a weight."""
        if is_block_product(node):
            return node.inputs[0], self.value(node.inputs[1]), next(iter(node.inputs[5:6]), None)
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            return None
        attributes = attribute_values(node)
        x, weight, bias = (*node.inputs, None)[:3]
        scaled = attributes.get("alpha", 1.0) != 1.0 or (bias is not None and attributes.get("beta", 1.0) != 1.0)
        if attributes.get("transA") or scaled or not self.weights.is_matrix(weight):
            return None
        if bias is not None and not self.weights.is_bias(bias):
            return None
        assert weight is not None
        return x, self.value(weight) if attributes.get("transB") else self.transposed(weight), bias

    # ── Branches ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def conditional(self, node: onnx_ir.Node) -> Sequence[Any]:
        """Return the outputs of an `If`. Raises `CaptureError` if its branch depends on values, not only sizes."""
        condition = self.value(node.inputs[0])
        branches = {name: attribute.as_graph() for name, attribute in node.attributes.items()}
        if isinstance(condition, tuple) and len(condition) == 1:
            condition = condition[0]
        if not isinstance(condition, fx.Node):
            return self.branch_results(branches["then_branch" if condition else "else_branch"])
        if CHOICE in node.metadata_props:
            results = zip(*(self.branch_results(branches[name]) for name in ("then_branch", "else_branch")), strict=True)
            return [self.scope.graph.call_function(elementwise.where, (condition, result, other)) for result, other in results]
        if not self.depends_on_sizes_only(node.inputs[0]):
            raise CaptureError(
                f"{self.path} computes a branch of the node {node_label(node)} from the values of its inputs",
                why="a graph that is trained takes one branch",
                remedy="export the model again in one piece",
                code="branch",
            )
        then, otherwise = (self.branch(branches[name]) for name in ("then_branch", "else_branch"))
        operands = list(dict.fromkeys([*then.lifted, *otherwise.lifted]))
        modules = [branch_module(scope, operands) for scope in (then, otherwise)]
        name = f"choice_{identifier(node_label(node))}"
        self.scope.root.add_module(name, SizeConditional(node_label(node), *modules))
        call = self.scope.graph.call_module(name, (condition, *(self.scope.localize(operand) for operand in operands)))
        return self.unpacked(call, len(node.outputs))

    def branch(self, graph: onnx_ir.Graph) -> SubgraphScope:
        """Return the branch as a graph of its own that returns a tuple."""
        outer, values = self.scope, dict(self.values)
        self.scope = SubgraphScope()
        try:
            results = tuple(self.scope.localize(result) for result in self.branch_results(graph))
            self.scope.graph.output(results)
            return self.scope
        finally:
            self.scope, self.values = outer, values

    def branch_results(self, graph: onnx_ir.Graph) -> list[Any]:
        """Return the results of a branch, computed in the graph under construction."""
        for value in graph.initializers.values():
            if value.const_value is not None:
                self.weights.add(value, str(value.name), to_torch(value.const_value))
        self.add_nodes(graph)
        return [self.value(value) for value in graph.outputs]

    def depends_on_sizes_only(self, value: onnx_ir.Value | None) -> bool:
        """Return whether a value depends only on the sizes of the inputs."""
        reached = [value]
        for followed in reached:
            producer = None if followed is None else followed.producer()
            if producer is None:
                if followed is None or followed not in self.weights:
                    return False
            elif producer.op_type not in SIZE_OPERATORS:
                reached.extend(read for read in producer.inputs if read is not None and read not in reached)
        return True


signature = functools.cache(inspect.signature)


def branch_module(scope: SubgraphScope, operands: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the scope as a module that takes the operands, including those that it reads."""
    for placeholder in reversed([scope.localize(operand) for operand in operands]):
        next(iter(scope.graph.nodes)).prepend(placeholder)
    module = fx.GraphModule(scope.root, scope.graph, "Branch")
    module.graph.lint()
    return module


def in_type(x: Any, dtype: torch.dtype) -> Any:
    """Return the tensor in that dtype; numbers, which have none, unchanged."""
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype != dtype else x


def empty_state(like: Tensor, extents: Sequence[int | None], dtype: torch.dtype) -> Tensor:
    """Return a state before any token; an extent of None is the batch size of `like`."""
    return torch.zeros([like.shape[0] if extent is None else extent for extent in extents], dtype=dtype, device=like.device)


States: TypeAlias = Literal["none", "past"]


def from_onnx(path: str | Path, cache: States = "none") -> fx.GraphModule:
    """Return the transformer in the ONNX file at `path` as a graph module in evaluation mode, for all sizes that the file allows.

    Its inputs and outputs have the file's names. With `cache="none"` it is the model for whole sequences: states of earlier tokens
    are removed, as before the first token. With `cache="past"` they are inputs and outputs like the others. Floating-point weights
    are parameters, quantized ones have the values that they represent. Raises `CheckpointError` if the file cannot be read,
    `CaptureError`, with the node, if it contains an unknown operator.
    """
    if cache not in ("none", "past"):
        raise RetrofitError(f"unknown option cache={cache!r}", remedy="choose none or past", option="cache", code="choice")
    path = as_path(path)
    model = load_model(path)
    try:
        module = GraphBuilder(model, path, keep_states=cache == "past").graph_module()
    except RetrofitError:
        raise
    except Exception as error:  # of any type: the file contradicts itself
        raise CheckpointError(
            f"{path} cannot be read as a model",
            why=first_line(error),
            remedy="check the file with onnx.checker, or export the model again",
            code="unreadable",
        ) from error
    release_tensors(model.graph)
    return module
