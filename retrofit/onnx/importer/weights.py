"""The constants of an ONNX file as parameters, buffers and numbers, under readable names; quantized weights as their values.

Floating-point weights become parameters, named after the modules that they come from; weights that are equal bit for bit become one
parameter. Frequencies of rotary embeddings, masks and integers become buffers or plain numbers. Quantized weights are read only if
they are quantized in the file: a graph that quantizes while it runs has no gradient.

    DequantizeLinear            w = (q − z) · s, one scale for all, for a row or column, or for a block of one
    com.microsoft.MatMulNBits   the same for each row's blocks, two or more numbers packed into a byte
    com.microsoft.GatherBlockQuantized   the same for a table of which entries are looked up

Source: the operator specifications of ONNX; ONNX Runtime's documentation of its contributed operators.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CaptureError, CheckpointError
from retrofit.inputs.example_inputs import BATCH, LENGTH, TARGET_LENGTH
from retrofit.onnx.importer.model_file import reads_only_as_right_factor, to_torch
from retrofit.onnx.importer.operators import DTYPES, MICROSOFT, numbers
from retrofit.onnx.importer.operators.shapes import transpose
from retrofit.program.program import register_tensor

if TYPE_CHECKING:
    import onnx_ir


SCOPES = "pkg.torch.onnx.name_scopes"  # the key under which torch records the modules that a node comes from


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parameter_name(name: str, rank: int, reader: onnx_ir.Node | None) -> str:
    """Return the name of a weight: its own if that is a path, else one from the module of its first reader."""
    scope = "" if reader is None or is_module_path(name) else module_scope(reader)
    adds = reader is not None and reader.op_type in ("Add", "Gemm", "Conv")
    leaf = "bias" if rank <= 1 and adds else "weight"
    return f"{scope}.{leaf}" if scope else ".".join(map(identifier, filter(None, name.split("."))))


def is_module_path(name: str) -> bool:
    return "." in name and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) is not None


def module_scope(node: onnx_ir.Node) -> str:
    """Return the module that a node was exported from, as recorded by torch's exporters; "" if not recorded."""
    if (scopes := node.metadata_props.get(SCOPES)) is not None:
        paths = [path for path in re.findall(r"'([^']*)'", scopes) if re.fullmatch(r"\w+(\.\w+)*", path)]
        modules = paths[:-1]  # the last is the operation itself
        return max(modules, key=len, default="")
    pieces = [piece for piece in (node.name or "").split("/") if piece]
    return ".".join(".".join(map(identifier, piece.split("."))) for piece in pieces[:-1])


def identifier(text: str) -> str:
    """Return the text as a valid Python name, numbers kept."""
    return re.sub(r"\W+", "_", text).strip("_") or "unnamed"


def argument_name(name: str) -> str:
    """Return the name of an input or output as that of an argument."""
    name = identifier(name)
    return f"input_{name}" if name[0].isdigit() or name == "self" or keyword.iskeyword(name) else name


# ── Quantized weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


BLOCKS = (MICROSOFT, "MatMulNBits")
TABLE = (MICROSOFT, "GatherBlockQuantized")
DEQUANTIZE = "DequantizeLinear"
QUANTIZED_OPERATORS = frozenset(
    "QuantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul QLinearConv DynamicQuantizeMatMul QAttention "
    "MatMulIntegerToFloat QEmbedLayerNormalization QGemm".split()
)  # they compute on quantized activations


def is_block_product(node: onnx_ir.Node) -> bool:
    return (node.domain, node.op_type) == BLOCKS


def is_quantized_table(node: onnx_ir.Node) -> bool:
    return (node.domain, node.op_type) == TABLE


def dequantize(q: Tensor, scale: Tensor, zero: Tensor | None = None, axis: int = 1, block_size: int = 0) -> Tensor:
    """Return the result of DequantizeLinear for constants."""
    if scale.dim() == 1 and scale.numel() > 1:  # one for each position along the axis
        shape = [1] * q.dim()
        shape[axis] = -1
        scale, zero = scale.reshape(shape), None if zero is None else zero.reshape(shape)
    elif block_size:
        scale, zero = (  # type: ignore[assignment]
            None if factors is None else factors.repeat_interleave(block_size, axis).narrow(axis, 0, q.shape[axis])
            for factors in (scale, zero)
        )
    centred = q.float() if zero is None else q.float() - zero.float()
    return (centred * scale.float()).to(scale.dtype)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers of `bits` bits in each byte of the last dimension, the lowest first."""
    shifts = torch.arange(0, 8, bits)
    return ((packed.to(torch.int32).unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def dequantize_blocks(attributes: dict[str, Any], packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Return the weight of a MatMulNBits node, (out, in)."""
    rows, columns, bits, block = attributes["N"], attributes["K"], attributes.get("bits", 4), attributes["block_size"]
    blocks = -(-columns // block)
    q = unpack_bits(packed.reshape(rows, blocks, -1), bits)  # (rows, blocks, block)
    if zeros is None:
        zero_point: Tensor | int = 2 ** (bits - 1)
    elif zeros.is_floating_point():
        zero_point = zeros.reshape(rows, blocks, 1)
    else:
        zero_point = unpack_bits(zeros.reshape(rows, -1), bits)[:, :blocks, None]
    return ((q - zero_point) * scales.reshape(rows, blocks, 1)).reshape(rows, -1)[:, :columns].to(scales.dtype).contiguous()


def dequantize_table(attributes: dict[str, Any], packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Return the table of a GatherBlockQuantized node: each byte has one number, or several along the last axis, centred."""
    bits, block, axis = attributes.get("bits", 4), attributes.get("block_size", 128), attributes.get("quantize_axis", 1)
    q: Tensor = packed
    if packed.dtype == torch.uint8:
        q = unpack_bits(packed, bits)
        zeros = scales.new_full((), 2 ** (bits - 1)) if zeros is None else unpack_bits(zeros, bits).narrow(-1, 0, scales.shape[-1])
    zeros = None if zeros is None else zeros.expand(scales.shape)
    return dequantize(q, scales, zeros, axis, block or q.shape[axis])


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


FEW = 64  # elements up to which a constant of integers becomes numbers rather than a tensor
LAYOUT_OPERATORS = frozenset(
    "Cast Expand Unsqueeze Squeeze Reshape Transpose Mul MatMul Einsum Concat Identity Tile Gather Slice Shape Neg".split()
)
ANGLE_OPERATORS = frozenset(("Sin", "Cos"))
ANGLE_INPUTS = {  # the inputs that are cosines and sines
    ("", "RotaryEmbedding"): slice(1, 3),
    ("com.microsoft", "RotaryEmbedding"): slice(2, 4),
    ("com.microsoft", "GroupQueryAttention"): slice(7, 9),
}
NO_INPUTS = slice(0, 0)
NUMBER_INPUTS = {"Resize": (1, 2), "OneHot": (1, 2), "Pad": (2,), "Clip": (1, 2)}  # the inputs that are read as numbers
STATISTICS = slice(3, 5)  # the inputs of a BatchNormalization that were measured, not learned
QUANTIZER_SUFFIX = r"_(quantized|[qQ]\d|DequantizeLinear_Output)$"  # suffixes that quantizers append to the name of a weight


class Weights:
    """The constants of a file; each is read by a node of the FX graph `into`, whose module is `root`."""

    def __init__(self, graph: onnx_ir.Graph, path: Path, root: nn.Module, into: fx.Graph) -> None:
        self.path, self.root, self.graph, self.graph_name = path, root, into, graph.name
        self.initializers: dict[onnx_ir.Value, Any] = {value: value.const_value for value in graph.initializers.values()}
        self.computed: dict[onnx_ir.Value, Tensor] = {}  # the values of quantized weights, and the constants of branches
        self.names: dict[onnx_ir.Value, str] = {}  # of those
        nodes = [*graph, *(node for branch in graph.subgraphs() for node in branch)]
        self.order = {node: at for at, node in enumerate(nodes)}  # the main graph before its branches
        self.nodes: dict[tuple[onnx_ir.Value, bool], fx.Node] = {}
        self.matrices: list[tuple[str, Tensor]] = []  # the parameters so far, which others may equal
        self.paths: set[str] = set()

    def __contains__(self, value: onnx_ir.Value) -> bool:
        return value in self.computed or value in self.initializers

    def add(self, value: onnx_ir.Value, source: str, tensor: Tensor) -> None:
        """Add `tensor` as the constant `value`, as if it were in the file; it becomes a parameter named after `source`."""
        if value in self.computed or value.name in {computed.name for computed in self.computed}:
            raise CheckpointError(
                f"{self.path} has two constants called {value.name}",
                remedy="export the model again",
                site=value.name or "",
                code="twice",
            )
        self.computed[value] = tensor
        self.names[value] = parameter_name(re.sub(QUANTIZER_SUFFIX, "", source), tensor.dim(), self.first_reader(value))

    def tensor(self, value: onnx_ir.Value) -> Tensor:
        """Return the constant's values. Raises `CheckpointError` if there is none."""
        if value in self.computed:
            return self.computed[value]
        if value not in self.initializers:
            raise CheckpointError(
                f"{self.path}: nothing computes {value.name}",
                why=f"the graph {self.graph_name} reads it",
                remedy="export it again",
                site=value.name or "",
                code="missing",
            )
        return to_torch(self.initializers[value])

    def shape(self, value: onnx_ir.Value) -> tuple[int, ...]:
        return tuple(self.computed[value].shape) if value in self.computed else tuple(self.initializers[value].shape)

    def is_float(self, value: onnx_ir.Value | None) -> bool:
        if value is None or value not in self:
            return False
        if value in self.computed:
            return self.computed[value].is_floating_point()
        return DTYPES.get(self.initializers[value].dtype, torch.int8).is_floating_point

    def is_matrix(self, value: onnx_ir.Value | None) -> bool:
        return value is not None and self.is_float(value) and len(self.shape(value)) == 2

    def is_bias(self, value: onnx_ir.Value | None) -> bool:
        return value is not None and self.is_float(value) and len(self.shape(value)) == 1 and self.shape(value)[0] > 1

    def value(self, value: onnx_ir.Value) -> Any:
        """Return the constant in the file's layout: a node that reads it, or numbers."""
        if only_numbers(value):
            return numbers(self.tensor(value))
        if not self.is_float(value) or not self.shape(value):
            return self.constant(self.tensor(value), str(value.name))
        return self.parameter(value)

    def transposed(self, value: onnx_ir.Value) -> fx.Node:
        """Return the matrix as (out, in), stored in this layout if every reader multiplies by it from the right."""
        if not value.is_graph_output() and all(reads_only_as_right_factor(node, value) for node in value.consumers()):
            return self.parameter(value, transposed=True)
        return self.graph.call_function(transpose, (self.value(value), (1, 0)))

    def constant(self, tensor: Tensor, name: str) -> Any:
        """Return a constant that is no weight: numbers for one or a few integers, else a buffer."""
        if tensor.dim() == 0 or (tensor.dim() == 1 and tensor.numel() <= FEW and not tensor.is_floating_point()):
            return tuple(tensor.tolist()) if tensor.dim() else tensor.item()
        path = self.unique_path(f"constants.{identifier(name)}")
        register_tensor(self.root, path, tensor)
        return self.graph.get_attr(path)

    def parameter(self, value: onnx_ir.Value, transposed: bool = False) -> fx.Node:
        """Return the weight as a parameter; one that is equal to another is the same parameter."""
        key = value, transposed
        if key not in self.nodes:
            tensor = self.tensor(value).t().contiguous() if transposed else self.tensor(value)
            if self.only_makes_angles(value) or only_statistics(value) or not bool(tensor.isfinite().all()):
                self.nodes[key] = self.constant(tensor, str(value.name))
            else:
                self.nodes[key] = self.graph.get_attr(self.equal_parameter(tensor) or self.register_parameter(value, tensor))
        return self.nodes[key]

    def register_parameter(self, value: onnx_ir.Value, tensor: Tensor) -> str:
        """Return the path of a new parameter."""
        name = self.names.get(value) or parameter_name(str(value.name), tensor.dim(), self.first_reader(value))
        path = self.unique_path(name)
        register_tensor(self.root, path, nn.Parameter(tensor))
        if tensor.dim() > 1 and bool((tensor != tensor.reshape(-1)[0]).any()):
            self.matrices.append((path, tensor))
        return path

    def equal_parameter(self, tensor: Tensor) -> str | None:
        """Return the parameter with these values: exporters write a tied weight twice, the second time transposed."""
        same_kind = ((path, other) for path, other in self.matrices if (other.shape, other.dtype) == (tensor.shape, tensor.dtype))
        return next((path for path, other in same_kind if torch.equal(other, tensor)), None)

    def first_reader(self, value: onnx_ir.Value) -> onnx_ir.Node | None:
        """Return the first node that reads the value, those of the main graph before those of branches."""
        return min(value.consumers(), key=lambda node: self.order[node], default=None)

    def only_makes_angles(self, value: onnx_ir.Value) -> bool:
        """Return whether only sines and cosines are computed from the weight, or it contains them: frequencies, no weights."""
        reached, ends = [value], set()
        for followed in reached:
            if followed.is_graph_output():
                return False
            for reader in followed.consumers():
                if reader.op_type in LAYOUT_OPERATORS:
                    reached.extend(output for output in reader.outputs if output not in reached)
                elif followed in reader.inputs[ANGLE_INPUTS.get((reader.domain, reader.op_type), NO_INPUTS)]:
                    ends.add("Cos")
                else:
                    ends.add(reader.op_type)
        return bool(ends) and ends <= ANGLE_OPERATORS

    def unique_path(self, path: str) -> str:
        """Return a name that no other weight has."""
        unique, count = path, 1
        while unique in self.paths or any(other.startswith(unique + ".") for other in self.paths):
            count += 1
            unique = f"{path}_{count}"
        self.paths.add(unique)
        return unique


def only_statistics(value: onnx_ir.Value) -> bool:
    """Return whether the constant is only the mean or variance of a batch norm."""
    readers = value.consumers()
    return bool(readers) and all(
        node.op_type == "BatchNormalization" and value in node.inputs[STATISTICS] and value not in node.inputs[:3]
        for node in readers
    )


def only_numbers(value: onnx_ir.Value) -> bool:
    """Return whether every reader of the constant reads numbers: the scales of Resize, for example."""
    readers = value.consumers()
    return bool(readers) and all(
        not node.domain and value in [node.inputs[at] for at in NUMBER_INPUTS.get(node.op_type, ()) if at < len(node.inputs)]
        for node in readers
    )


# ── Inputs ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


PAST_PREFIX, PRESENT_PREFIX = "past", "present"  # prefixes of inputs and outputs with the states of earlier tokens
MASK_WORD, POSITION_WORD = "mask", "position"  # in the names of inputs for padding and for positions of tokens
IMAGE_RANK, PIXELS, STRIDE = 4, 8, 32  # of images: about the number of pixels per token, and a divisor of their extents
ID_OPERATORS = frozenset("Cast Reshape Identity Squeeze Unsqueeze Clip Where Add Mul Sub".split())  # between ids and their table


def is_state_input(value: onnx_ir.Value) -> bool:
    return str(value.name).startswith(PAST_PREFIX)


def state_key(value: onnx_ir.Value) -> str:
    """Return the common name of a state as an input and as an output."""
    return re.sub(r"^(past_key_values|past|present)", "", str(value.name))


def only_selects_a_branch(value: onnx_ir.Value) -> bool:
    """Return whether an input is used only to select the branch of an `If`."""
    users = value.consumers()
    return bool(users) and not value.is_graph_output() and all(node.op_type == "If" and node.inputs[0] is value for node in users)


def refuse_odd_inputs(inputs: Sequence[onnx_ir.Value], path: Path) -> None:
    """Raises `CaptureError` for an input that is not a numeric tensor, and for two that would be the same argument."""
    for value in inputs:
        if value.dtype not in DTYPES:
            raise CaptureError(
                f"{path}: the input {value.name} is not a numeric tensor",
                why=f"its type is {getattr(value.dtype, 'name', 'not given')}",
                remedy="export the model without it",
                site=value.name or "",
                code="type",
            )
    refuse_same_names("inputs", inputs, path)


def refuse_same_names(what: str, values: Sequence[onnx_ir.Value], path: Path) -> None:
    """Raises `CaptureError` if two of the inputs, or outputs, would be the same argument, or the same entry of the result."""
    by_name: dict[str, str] = {}
    for value in values:
        name = argument_name(str(value.name))
        if name in by_name:
            raise CaptureError(
                f"{path} has two {what} of one name",
                why=f"{by_name[name]} and {value.name} are both called {name}",
                remedy="export it with other names",
                code="twice",
            )
        by_name[name] = str(value.name)


def file_examples(inputs: Sequence[onnx_ir.Value], weights: Weights, batch: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    """Return an example of each input by argument: valid ids, masks of ones, counted positions, noise for others."""
    generator = torch.Generator().manual_seed(0)
    examples = {}
    shapes = example_shapes(inputs, batch, length)
    past = TARGET_LENGTH if any(map(is_state_input, inputs)) else 0
    for value in inputs:
        name, dtype, shape = str(value.name), DTYPES[value.dtype], shapes[value]  # type: ignore[index]
        if dtype.is_floating_point and MASK_WORD not in name:
            example = torch.randn(shape, generator=generator).to(dtype)
        elif MASK_WORD in name:
            example = torch.ones(shape, dtype=dtype)
        elif POSITION_WORD in name:
            example = (past + torch.arange(shape[-1])).expand(shape).contiguous().to(dtype)
        else:
            example = torch.randint(table_rows(value, weights), shape, generator=generator).to(dtype)
        examples[argument_name(name)] = example
    return examples


def example_shapes(inputs: Sequence[onnx_ir.Value], batch: int, length: int) -> dict[onnx_ir.Value, tuple[int, ...]]:
    """Return the shape of an example of each input; if there are states, masks cover these and the tokens after them."""
    shapes: dict[onnx_ir.Value, tuple[int, ...]] = {}
    symbols: dict[str, int] = {}
    has_states = any(map(is_state_input, inputs))
    for value in sorted(inputs, key=lambda value: (MASK_WORD in str(value.name), is_state_input(value))):
        is_state, shape = is_state_input(value), list(value.shape or ())
        if is_state:
            extent = TARGET_LENGTH
        elif len(shape) == IMAGE_RANK and DTYPES[value.dtype].is_floating_point:  # type: ignore[index]
            extent = -(-length * PIXELS // STRIDE) * STRIDE
        elif has_states and MASK_WORD in str(value.name):
            extent = TARGET_LENGTH + length
        else:
            extent = min(TARGET_LENGTH, length) if str(value.name).startswith("decoder_") else length
        dynamic = [axis for axis, dim in enumerate(shape) if not isinstance(dim, int) or dim < 1]
        for index, axis in enumerate(dynamic):
            symbol = str(getattr(shape[axis], "value", None) or "")
            shape[axis] = extent if index else batch
            if index and has_states:
                divisor = re.search(r"_per_(\d+)$", symbol)  # a part of another extent, rounded up
                own = -(-extent // int(divisor[1])) if divisor else extent
                shape[axis] = symbols.setdefault(symbol, own) if symbol else own
        shapes[value] = tuple(map(int, shape))  # type: ignore[arg-type]
    return shapes


def table_rows(ids: onnx_ir.Value, weights: Weights) -> int:
    """Return the number of rows of the table that the input indexes; 1 if it indexes none."""
    reached, rows = [ids], 0
    for followed in reached:
        for reader in followed.consumers():
            if reader.op_type == "Gather" and reader.inputs[1] is followed and weights.is_matrix(reader.inputs[0]):
                rows = max(rows, weights.shape(reader.inputs[0])[0])  # type: ignore[arg-type]
            elif reader.op_type == "EmbedLayerNormalization" and reader.inputs[0] is followed:
                rows = max(rows, weights.shape(reader.inputs[2])[0])  # type: ignore[arg-type]
            elif reader.op_type in ID_OPERATORS:
                reached.extend(output for output in reader.outputs if output not in reached)
    return max(rows, 1)
