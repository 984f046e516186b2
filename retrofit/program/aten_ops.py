"""The effect of each ATen operation on a token's representation, in one place for every analysis.

An operation *carries* an operand if its result is that operand up to layout, scale, offset, mask or normalization. It is *heavy* if
it multiplies representations by weights or by one another, or mixes tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

LAYOUT = frozenset(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand expand_as permute transpose t movedim moveaxis swapaxes "
    "swapdims contiguous clone alias detach lift_fresh lift_fresh_copy view_as reshape_as numpy_T mT adjoint _reshape_alias "
    "squeeze_copy".split()
)
CAST = frozenset("to _to_copy type_as convert_element_type float half bfloat16 _autocast_to_full_precision".split())
DROPOUT = frozenset("dropout native_dropout alpha_dropout feature_dropout feature_alpha_dropout".split())
SELECTION = frozenset(
    "slice select index index_select narrow pad constant_pad_nd roll flip unbind split split_with_sizes chunk".split()
)
JOIN = frozenset(("cat", "concat", "concatenate"))
CLAMP = frozenset("clamp clamp_min clamp_max".split())
MASKING = CLAMP | frozenset("masked_fill where nan_to_num".split())
NORM = frozenset(
    "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm batch_norm instance_norm".split()
)
ACTIVATION = frozenset(
    "gelu silu relu relu6 sigmoid tanh softplus elu selu celu leaky_relu mish hardswish hardsigmoid hardtanh erf exp log_sigmoid "
    "glu prelu rrelu softsign".split()
)
POINTWISE = (
    ACTIVATION
    | CAST
    | DROPOUT
    | MASKING
    | frozenset(
        "add sub rsub mul div neg abs pow square sqrt rsqrt reciprocal exp log log1p sin cos minimum maximum true_divide".split()
    )
    | frozenset("addcmul addcdiv lerp floor round sign contiguous clone alias detach zeros_like".split())
)
ATTENTION = frozenset(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable "
    "flex_attention".split()
)
PRODUCT = frozenset("matmul mm bmm baddbmm addmm addbmm einsum bilinear tensordot mv dot linear _grouped_mm grouped_mm".split())
ADDED_PRODUCT = frozenset("addmm addbmm baddbmm".split())  # the first operand is added to the product of the others
CONVOLUTION = frozenset(
    "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc".split()
)
SCAN = frozenset("cumsum cumprod logcumsumexp cummax associative_scan scan while_loop segment_reduce".split())
POOLING = frozenset(
    "avg_pool1d avg_pool2d max_pool1d max_pool2d max_pool2d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d".split()
)
ROUTING = frozenset("topk sort argsort argmax".split())
CONJUNCTION = frozenset("bitwise_and logical_and __and__".split())
COMPARISON = frozenset("eq ne lt le gt ge".split())
NO_GRADIENT = frozenset("detach round floor ceil trunc sign sgn heaviside".split())  # the gradient does not pass through them
LIKE = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty sym_size size".split()
)  # the result depends on the operand's shape only


def op(node: fx.Node) -> str:
    """Return the operation's name without namespace, overload or in-place underscore; for other nodes, their kind."""
    return op_name(node.target) if node.op == "call_function" else node.op


def op_name(target: Any) -> str:
    """Return the name of an operation without namespace, overload or in-place underscore, or the name of another function."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.partition("::")[2]
        return name if name.startswith("__") else name.rstrip("_")
    return str(getattr(target, "__name__", target))


def is_number(node: fx.Node) -> bool:
    """Return whether the node creates a 0-dimensional tensor and reads no other node."""
    return node.op == "call_function" and not node.all_input_nodes and shape(node) == ()


def is_all_zeros(node: fx.Node) -> bool:
    """Return whether the operation creates a tensor of zeros, in whatever layout and type."""
    while op(node) in LAYOUT | CAST and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return op(node) in ("zeros", "zeros_like", "new_zeros") or (op(node) == "full" and bool(node.args[1] == 0))


def shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the node's value; None if it is not a tensor.

    A dynamic size is the one of the capture; a size that depends on the data is 0.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(extent(size) for size in value.shape)


def extent(size: int | torch.SymInt) -> int:
    """Return a size as a number."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0
    return size


def is_float(node: fx.Node) -> bool:
    """Return whether the value is a tensor of floating-point numbers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_heavy(node: fx.Node) -> bool:
    """Return whether the operation multiplies by weights or mixes tokens, or is of an unknown namespace."""
    name = op(node)
    if node.op != "call_function" or name == "getitem":
        return False
    if name in PRODUCT | CONVOLUTION | ATTENTION | SCAN | POOLING or name.startswith("fft_") or "fft" in name:
        return True
    target: Any = node.target
    namespace = target.namespace if isinstance(target, torch._ops.OpOverload) else ""
    return namespace not in ("aten", "prims", "prim", "")


def is_product(function: Any) -> bool:
    """Return whether a function called by Python code, an operator or one of torch, is a product in the sense of `is_heavy`."""
    namespace = "aten"
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet: Any = function.overloadpacket if isinstance(function, torch._ops.OpOverload) else function
        namespace = packet._qualified_op_name.partition("::")[0]
    return op_name(function).strip("_") in {name.strip("_") for name in PRODUCT} or namespace not in ("aten", "prims", "prim")


def mixes_tokens(node: fx.Node) -> bool:
    """Return whether the operation alone (attention excluded) makes one position depend on another."""
    name = op(node)
    if name in CONVOLUTION:
        return not is_pointwise_convolution(node)
    return name in SCAN | POOLING or "fft" in name or name in ("roll", "associative_scan", "scan")


def is_pointwise_convolution(node: fx.Node) -> bool:
    """Return whether a convolution is one matrix for each position: kernel size 1, without stride or padding."""
    before, kernel, after = shape(node.args[0]), shape(node.args[1]), shape(node)
    return bool(before and kernel and after) and set(kernel[2:]) == {1} and before[2:] == after[2:]  # type: ignore[index]


def carried_operands(node: fx.Node, depends: set[fx.Node]) -> list[fx.Node]:
    """Return the operands that `node` carries along the last dimension; `depends` holds the nodes that depend on the inputs."""
    name, out = op(node), shape(node)
    if out is None or not out:
        return []
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    before = shape(source)
    same_width = before is not None and bool(before) and before[-1] == out[-1]
    whole_blocks = (
        before is not None
        and bool(before)
        and min(before[-1], out[-1]) > 1
        and max(before[-1], out[-1]) % min(before[-1], out[-1]) == 0
    )
    if name == "getitem":
        inner = source
        if inner is None:
            return []
        if op(inner) in NORM:
            return same_width_operand(inner, out) if node.args[1] == 0 else []
        if op(inner) in DROPOUT | SELECTION:
            return same_width_operand(inner, out)
        return []
    if name in LAYOUT | SELECTION and whole_blocks:  # a stream of several blocks, its blocks, one of them
        return [source] if source is not None else []
    if name in LAYOUT | CAST | DROPOUT | SELECTION | NORM | (MASKING - {"where"}):
        return [source] if source is not None and same_width else []
    if name in JOIN:
        parts = node.args[0]
        along = int(node.args[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))  # type: ignore[arg-type]
        if along in (-1, len(out) - 1) or not isinstance(parts, (list, tuple)):
            return []
        return [part for part in parts if isinstance(part, fx.Node)]
    if name == "where":
        return [
            part for part in node.args[1:] if isinstance(part, fx.Node) and part in depends and (shape(part) or (0,))[-1] == out[-1]
        ]
    if name in ("add", "sub", "mul", "div"):
        return carried_by_arithmetic(node, out, depends)
    return []


def same_width_operand(node: fx.Node, out: tuple[int, ...]) -> list[fx.Node]:
    """Return the first operand, if its last dimension equals that of the result."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    before = shape(source)
    return [source] if source is not None and before and before[-1] == out[-1] else []


def carried_by_arithmetic(node: fx.Node, out: tuple[int, ...], depends: set[fx.Node]) -> list[fx.Node]:
    """Return the operand of a sum or product that the other operand only shifts, scales or masks."""
    left = node.args[0] if node.args else None
    right = node.args[1] if len(node.args) > 1 else None
    if not isinstance(right, fx.Node):
        return [left] if isinstance(left, fx.Node) and (shape(left) or (0,))[-1:] == out[-1:] else []
    if not isinstance(left, fx.Node):
        return [right] if (shape(right) or (0,))[-1:] == out[-1:] else []

    def minor(part: fx.Node) -> bool:
        """Return whether `part` is a scale, offset or mask: independent of the inputs' content, or one number per position."""
        size = shape(part)
        return part not in depends or size is None or not size or size[-1] == 1 or not is_float(part)

    def major(part: fx.Node) -> bool:
        """Return whether `part` is a representation as wide as the result."""
        size = shape(part)
        return part in depends and bool(size) and size[-1] == out[-1]  # type: ignore[index]

    if major(left) and minor(right):
        return [left]
    if major(right) and minor(left) and op(node) in ("add", "mul", "sub"):
        return [right]
    return []
