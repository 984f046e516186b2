"""`from_onnx`: an ONNX transformer as an FX graph module that trains, its weights parameters under readable names.

Every node of the ONNX graph is a call of a small function (`retrofit.onnx.ops`, `retrofit.onnx.layers`, `retrofit.onnx.fused`).
What a pass has to see is brought into one form on the way: a product with a weight, and what is added to it, is a linear layer with
a weight (out, in), whatever way round and under however many nodes the file has it; weights that are equal bit for bit are tied;
states of earlier tokens are none.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from retrofit import hub
from retrofit.errors import CaptureError, CheckpointError
from retrofit.finding import first_line
from retrofit.graph_module import register
from retrofit.inputs import BATCH, LENGTH, TARGET_LENGTH
from retrofit.onnx import fused, layers, ops
from retrofit.onnx.ops import MAKERS, OPERATORS, REFUSALS, Operator
from retrofit.onnx.values import DTYPES, is_number

if TYPE_CHECKING:
    import onnx

OLDEST = 13  # the operator set from which on axes are inputs and softmax is of one axis
STATE = "past"  # inputs called so hold what earlier tokens left; outputs called `present…` hand it on
HANDED_ON = "present"
SCOPES = "pkg.torch.onnx.name_scopes"  # where torch writes down the modules that a node comes from
FEW = 64  # elements up to which a constant of whole numbers is numbers and no tensor
MASKS, NUMBERINGS = "mask", "position"  # in the names of inputs that say what is padding, and where tokens stand
STANDARD = ("", "ai.onnx")
CARRYING = frozenset(
    "Cast Expand Unsqueeze Squeeze Reshape Transpose Mul MatMul Einsum Concat Identity Tile Gather Slice Shape Neg".split()
)
ANGLES = frozenset(("Sin", "Cos"))


def from_onnx(path: str | Path) -> fx.GraphModule:
    """The transformer in the ONNX file at `path` as a graph module in evaluation mode, of any batch and length the file allows.

    Its inputs are the file's by name, those for the states of earlier tokens left out, and it returns its outputs by name. Floating
    weights are parameters. Raises `CheckpointError` where the file cannot be read, `CaptureError` where it holds an operator that
    is not known, with the node.
    """
    path = Path(path)
    return Importing(read(path), path).graph_module()


def read(path: Path) -> onnx.ModelProto:
    """The file, its weights and its functions in place."""
    import onnx
    from onnx import inliner

    if not path.exists():
        raise CheckpointError(f"{path} does not exist", remedy="give an ONNX file")
    try:
        model = onnx.load(str(path))
        model = inliner.inline_local_functions(model) if model.functions else model
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an ONNX model",
            why=first_line(error),
            remedy="give a whole file, with the files of its external data beside it",
        ) from error
    if not model.graph.node:
        raise CheckpointError(f"{path} holds no graph", remedy="give the file of a model that was exported whole")
    version = next((one.version for one in model.opset_import if one.domain in STANDARD), OLDEST)
    if version < OLDEST:
        raise CheckpointError(
            f"{path} is of operator set {version}",
            why=f"{OLDEST} and later are read",
            remedy="export it again, or convert it with onnx.version_converter",
        )
    return model


class Importing:
    """The import of one file."""

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        self.model, self.path = model, path
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.values: dict[str, Any] = {"": None}  # of the graph by ONNX name: nodes or numbers
        self.initializers = {one.name: one for one in model.graph.initializer}
        self.uses = uses_of(model.graph)
        self.unknown()
        self.weights = Weights(self)
        self.device: fx.Node | None = None

    def unknown(self) -> None:
        """Raises `CaptureError` with the operators that no function is for."""
        lacking = Counter(f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in every_node(self.model.graph) if not known(node))
        if lacking:
            first = next(node for node in every_node(self.model.graph) if not known(node))
            raise CaptureError(
                f"{self.path} holds operators that are not known here: {', '.join(lacking)}",
                why=f"the first is the node {first.name or first.output[0]}",
                remedy="export the model without it (no quantisation, no fusion of this kind)",
            )

    def graph_module(self) -> fx.GraphModule:
        graph = self.model.graph
        inputs = [one for one in graph.input if one.name not in self.initializers]
        given = [one for one in inputs if not one.name.startswith(STATE) and not self.only_chooses(one.name)]
        for one in given:
            self.values[one.name] = self.graph.placeholder(argument(one.name))
        if not given:
            raise CaptureError(f"{self.path} takes no input", remedy="give the file of a whole model")
        self.device = self.graph.call_function(getattr, (self.values[given[0].name], "device"))
        for one in inputs:
            if one.name.startswith(STATE):
                self.values[one.name] = self.nothing_before(one, self.values[given[0].name])
            elif one not in given:
                self.values[one.name] = False  # whether there are earlier tokens
        self.run(graph)
        results = [one.name for one in graph.output if not one.name.startswith(HANDED_ON)]
        self.graph.output({argument(name): self.values[name] for name in results})
        self.graph.eliminate_dead_code()
        made = fx.GraphModule(self.root, self.graph, "Imported")
        made.graph.lint()
        made.__dict__["retrofit_examples"] = self.examples(given)
        recipe = next((one.value for one in self.model.metadata_props if one.key == "retrofit.recipe"), "")
        if recipe:
            hub.remember(made, recipe.splitlines())
        return made.eval()

    # ── Nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, graph: onnx.GraphProto) -> None:
        """Every node of the graph has its values."""
        for node in graph.node:
            if all(not name or name in self.values for name in node.output):
                continue  # read together with an earlier one
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
        function = OPERATORS[domain_of(node), node.op_type]
        attributes = attributes_of(node)
        if "axes" in attributes:  # of a reduction: an input since operator set 18
            attributes["axes_attribute"] = attributes.pop("axes")
        if node.op_type == "Split":
            attributes["outputs"] = len(node.output)
        packed = (node.domain, node.op_type) == (fused.MICROSOFT, "Attention")  # with its projections
        operands = [self.weights.turned(name) if packed and at == 1 else self.value(name) for at, name in enumerate(node.input)]
        self.refuse_what_is_not_computed(node, function, operands, attributes)
        if not any(isinstance(one, fx.Node) for one in operands) and function not in MAKERS:
            made = function(*operands, **attributes)  # of numbers only
            if is_number(made) or isinstance(made, tuple):
                return made if len(node.output) > 1 else [made]
        if function in MAKERS:
            attributes["device"] = self.device
        call = self.graph.call_function(function, tuple(operands), attributes)
        several = len(node.output) > 1 or function in SEVERAL
        return [self.graph.call_function(item, (call, at)) for at in range(len(node.output))] if several else [call]

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
        """The value called so: computed, or a weight or constant of the file."""
        if name not in self.values:
            self.values[name] = self.weights.value(name)
        return self.values[name]

    def constant(self, node: onnx.NodeProto) -> Any:
        (held,) = attributes_of(node).values()
        if isinstance(held, Tensor):
            return self.weights.fixed(held, node.output[0])
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
                made = self.graph.call_function(layers.linear, (self.value(x), weight, self.value(other)))
                self.values[sum_.output[0]] = made
                return made
        given = (self.value(x), weight) if bias is None else (self.value(x), weight, self.value(bias))
        return self.graph.call_function(layers.linear, given)

    def product(self, node: onnx.NodeProto) -> tuple[str, fx.Node, str | None] | None:
        """What is multiplied, the weight (out, in), and the bias, of a node that is such a product."""
        if node.domain not in STANDARD or node.op_type not in ("MatMul", "Gemm"):
            return None
        how = attributes_of(node)
        x, weight = node.input[:2]
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
        plain = not how.get("transA") and how.get("alpha", 1.0) == 1.0 and (bias is None or how.get("beta", 1.0) == 1.0)
        if not plain or not self.weights.is_matrix(weight) or (bias is not None and not self.weights.is_bias(bias)):
            return None
        return x, self.weights.value(weight) if how.get("transB") else self.weights.turned(weight), bias

    def only_user(self, name: str) -> onnx.NodeProto | None:
        users = self.uses.get(name, [])
        return users[0] if len(users) == 1 else None

    # ── Branches ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def chosen(self, node: onnx.NodeProto) -> Sequence[Any]:
        """The outputs of the branch that is taken; raises `CaptureError` where only the inputs can tell which."""
        condition = self.value(node.input[0])
        branches = {one.name: one.g for one in node.attribute}
        if isinstance(condition, tuple) and len(condition) == 1:
            condition = condition[0]
        if isinstance(condition, fx.Node):
            raise CaptureError(
                f"{self.path} computes a branch of the node {node.name or node.output[0]} from its inputs",
                why="a graph that is trained takes one branch",
                remedy="export the model again in one piece; of a file that retrofit exported, import the model before its passes",
            )
        branch = branches["then_branch" if condition else "else_branch"]
        self.initializers |= {one.name: one for one in branch.initializer}
        self.run(branch)
        return [self.value(one.name) for one in branch.output]

    def only_chooses(self, name: str) -> bool:
        """Whether an input does nothing but choose a branch."""
        users = self.uses.get(name, [])
        return bool(users) and all(node.op_type == "If" and node.input[0] == name for node in users)

    def nothing_before(self, value: onnx.ValueInfoProto, like: fx.Node) -> fx.Node:
        """The state before any token: of no length, and of zeros where it has none."""
        free = iter((None, 0))
        extents = tuple(one.dim_value if one.HasField("dim_value") else next(free) for one in value.type.tensor_type.shape.dim)
        return self.graph.call_function(empty_state, (like, extents, DTYPES[value.type.tensor_type.elem_type]))

    # ── Inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def examples(self, given: Iterable[onnx.ValueInfoProto]) -> dict[str, Tensor]:
        """An example of each input: ids that its table has, masks of ones, positions counted, noise for what is real."""
        generator = torch.Generator().manual_seed(0)
        made = {}
        for one in given:
            kind = one.type.tensor_type
            length = TARGET_LENGTH if one.name.startswith("decoder_") else LENGTH
            free = iter((BATCH, *(length for _ in kind.shape.dim)))
            extents = [part.dim_value or next(free) for part in kind.shape.dim]
            dtype = DTYPES[kind.elem_type]
            if dtype.is_floating_point and MASKS not in one.name:
                value = torch.randn(extents, generator=generator).to(dtype)
            elif MASKS in one.name:
                value = torch.ones(extents, dtype=dtype)
            elif NUMBERINGS in one.name:
                value = torch.arange(extents[-1]).expand(extents).contiguous().to(dtype)
            else:
                value = torch.randint(self.rows_read(one.name), extents, generator=generator).to(dtype)
            made[argument(one.name)] = value
        return made

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


class Weights:
    """The constants of a file as parameters, buffers and numbers."""

    def __init__(self, importing: Importing) -> None:
        self.importing = importing
        self.uses = importing.uses
        self.names = names_of(importing.model.graph, importing.uses)
        self.nodes: dict[tuple[str, bool], fx.Node] = {}
        self.held: list[tuple[str, Tensor]] = []  # matrices so far
        self.taken: set[str] = set()

    def raw(self, name: str) -> Tensor:
        from onnx import numpy_helper

        if name not in self.importing.initializers:
            where = self.importing.model.graph.name
            raise CheckpointError(f"{self.importing.path}: nothing computes {name}", why=f"the graph {where} reads it")
        proto = self.importing.initializers[name]
        array = numpy_helper.to_array(proto)
        if proto.data_type == 16:  # numpy knows no bfloat16
            return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.bfloat16).reshape(array.shape)
        return torch.from_numpy(array.copy())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.importing.initializers[name].dims)

    def is_float(self, name: str) -> bool:
        proto = self.importing.initializers.get(name)
        return proto is not None and DTYPES.get(proto.data_type, torch.int8).is_floating_point

    def is_matrix(self, name: str) -> bool:
        return self.is_float(name) and len(self.shape(name)) == 2

    def is_bias(self, name: str) -> bool:
        return self.is_float(name) and len(self.shape(name)) == 1 and self.shape(name)[0] > 1

    def value(self, name: str) -> Any:
        """The constant as the file has it."""
        if not self.is_float(name) or not self.shape(name):
            return self.fixed(self.raw(name), name)
        return self.stored(name, False)

    def turned(self, name: str) -> fx.Node:
        """The matrix the other way round, (out, in): stored so where every use is of that kind."""
        if all(reads_as_factor(node, name) for node in self.uses.get(name, [])):
            return self.stored(name, True)
        return self.importing.graph.call_function(ops.transpose, (self.importing.value(name), (1, 0)))

    def fixed(self, held: Tensor, name: str) -> Any:
        """A constant that is no weight: numbers, where it is one or a few whole ones, else a buffer."""
        if held.dim() == 0 or (held.dim() == 1 and held.numel() <= FEW and not held.is_floating_point()):
            return tuple(held.tolist()) if held.dim() else held.item()
        path = self.free(f"constants.{word(name)}")
        register(self.importing.root, path, held)
        return self.importing.graph.get_attr(path)

    def stored(self, name: str, turned: bool) -> fx.Node:
        """The weight as a parameter, one that another equals as that one."""
        key = name, turned
        if key not in self.nodes:
            held = self.raw(name)
            held = held.t().contiguous() if turned else held
            if self.only_makes_angles(name) or not bool(held.isfinite().all()):
                self.nodes[key] = self.fixed(held, name)
            else:
                path = self.equal_one(held) or self.registered(held, name)
                self.nodes[key] = self.importing.graph.get_attr(path)
        return self.nodes[key]

    def registered(self, held: Tensor, name: str) -> str:
        path = self.free(self.names[name])
        register(self.importing.root, path, nn.Parameter(held))
        if held.dim() > 1 and bool((held != held.reshape(-1)[0]).any()):
            self.held.append((path, held))
        return path

    def equal_one(self, held: Tensor) -> str | None:
        """The parameter with these values: exporters write a tied weight twice, the second the other way round."""
        return next((path for path, other in self.held if other.shape == held.shape and torch.equal(other, held)), None)

    def only_makes_angles(self, name: str) -> bool:
        """Whether everything that is computed of the weight is a sine or cosine, or it holds such: frequencies, no weights."""
        reached, ends = [name], set()
        for one in reached:
            for node in self.uses.get(one, []):
                if node.op_type in CARRYING:
                    reached.extend(made for made in node.output if made not in reached)
                elif node.op_type == "RotaryEmbedding" or (node.op_type == "GroupQueryAttention" and one in node.input[7:9]):
                    ends.add("Cos")
                else:
                    ends.add(node.op_type)
        return bool(ends) and ends <= ANGLES

    def free(self, path: str) -> str:
        """A name that no other weight has."""
        chosen, count = path, 1
        while chosen in self.taken or any(other.startswith(chosen + ".") for other in self.taken):
            count += 1
            chosen = f"{path}_{count}"
        self.taken.add(chosen)
        return chosen


# ── Reading ONNX ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def domain_of(node: onnx.NodeProto) -> str:
    return "" if node.domain in STANDARD else str(node.domain)


def known(node: onnx.NodeProto) -> bool:
    return node.op_type in ("Constant", "If") or (domain_of(node), node.op_type) in OPERATORS


def every_node(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """The nodes of the graph and of its branches."""
    for node in graph.node:
        yield node
        for one in node.attribute:
            if one.HasField("g"):
                yield from every_node(one.g)


def uses_of(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """The nodes that read each value; a result of the graph is read once more, by nobody."""
    found: dict[str, list[Any]] = {}
    for node in every_node(graph):
        for name in dict.fromkeys(node.input):
            found.setdefault(name, []).append(node)
    for one in graph.output:
        found.setdefault(one.name, []).append(NOBODY)
    return found


class Nobody:
    """Reads the results of a graph."""

    op_type, domain = "", ""
    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


NOBODY = Nobody()


def reads_as_factor(node: onnx.NodeProto, name: str) -> bool:
    """Whether the node multiplies by the matrix from the right."""
    if len(node.input) < 2 or node.input[1] != name or list(node.input).count(name) != 1:
        return False
    if (node.domain, node.op_type) == (fused.MICROSOFT, "Attention"):
        return True
    return node.op_type in ("MatMul", "Gemm") and not attributes_of(node).get("transB")


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values; graphs left out."""
    from onnx import helper, numpy_helper

    made: dict[str, Any] = {}
    for one in node.attribute:
        value = helper.get_attribute_value(one)
        if one.type == one.TENSOR:
            held = torch.from_numpy(numpy_helper.to_array(value).copy())
            value = held.reshape(()).item() if node.op_type == "ConstantOfShape" else held
        elif one.type in (one.FLOATS, one.INTS):
            value = tuple(value)
        elif one.type == one.STRING:
            value = value.decode()
        elif one.type in (one.GRAPH, one.GRAPHS):
            continue
        made[str(one.name)] = value
    return made


def names_of(graph: onnx.GraphProto, uses: Mapping[str, list[onnx.NodeProto]]) -> dict[str, str]:
    """A readable name for each constant: its own where that is a path, else that of the module which the exporter says reads it."""
    made = {}
    for one in graph.initializer:
        node = next(iter(uses.get(one.name, [])), NOBODY)
        scope = "" if looks_like_a_path(one.name) else scope_of(node)
        leaf = "weight" if len(one.dims) > 1 else "bias" if node.op_type in ("Add", "Gemm", "Conv") else "weight"
        made[one.name] = f"{scope}.{leaf}" if scope else ".".join(map(word, filter(None, one.name.split("."))))
    return made


def looks_like_a_path(name: str) -> bool:
    return "." in name and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) is not None


def scope_of(node: Any) -> str:
    """The module that a node was exported from, by what torch's exporters write into it; "" where they say nothing."""
    for one in getattr(node, "metadata_props", ()):
        if one.key == SCOPES:
            paths = [path for path in re.findall(r"'([^']*)'", one.value) if re.fullmatch(r"\w+(\.\w+)*", path)]
            modules = paths[:-1]  # the last is the operation itself
            return max(modules, key=len, default="")
    pieces = [piece for piece in getattr(node, "name", "").split("/") if piece]
    return ".".join(".".join(map(word, piece.split("."))) for piece in pieces[:-1])


def word(text: str) -> str:
    """The text as a name that Python takes, numbers kept."""
    return re.sub(r"\W+", "_", text).strip("_") or "unnamed"


def argument(name: str) -> str:
    """The name of an input or output as that of an argument."""
    made = word(name)
    return made if not made[0].isdigit() else f"input_{made}"
