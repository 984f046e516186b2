"""Products with weights: the parameter, its storage, its bias and the result."""

from __future__ import annotations

import dataclasses

from torch import Tensor, fx, nn

from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import ATTENTION, CAST, CONVOLUTION, LAYOUT, is_heavy, op, shape
from retrofit.program.dataflow import Dataflow


def width_of(node: fx.Node) -> int:
    """Return the extent of the last dimension; 0 if there is none."""
    return (shape(node) or (0,))[-1]


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """A product of a representation with a weight."""

    node: fx.Node
    source: fx.Node
    parameter: str
    in_features: int
    out_features: int
    batched: bool  # whether the weight has a leading dimension, one matrix an expert


def weight_product(node: fx.Node, flow: Dataflow) -> WeightProduct | None:
    """Return `node` as a product with a weight, None if it is none."""
    if not is_heavy(node) or op(node) in ATTENTION:
        return None
    sources = [part for part in node.all_input_nodes if part in flow.depends]
    weights: dict[str, fx.Node] = {}
    for part in node.all_input_nodes:
        if part in flow.depends:
            continue
        if part in flow.program.parameters:
            weights[flow.program.parameters[part]] = part
        for name in flow.parameters_of([part]):
            weights.setdefault(name, part)
    matrices = {name: part for name, part in weights.items() if len(shape(part) or ()) >= 2}
    if not sources or not matrices:
        return None
    name, weight = next(iter(matrices.items()))
    before, after, size = shape(sources[0]), shape(node), shape(weight)
    if not before or not after or not size:
        return None
    stored = next((shape(part) for part, parameter in flow.program.parameters.items() if parameter == name), size) or size
    convolves = op(node) in CONVOLUTION
    columns = (size[1], size[0]) if convolves or op(node) == "linear" else (before[-1], after[-1])
    return WeightProduct(node, sources[0], name, *columns, batched=len(stored) > 2 and not convolves)


def nearest_products(starts: list[fx.Node], flow: Dataflow) -> list[WeightProduct]:
    """Return the products with weights that the nodes are computed from without another such product in between."""
    pending, seen, found = list(dict.fromkeys(starts)), set(starts), []
    while pending:
        node = pending.pop()
        product = weight_product(node, flow)
        if product is not None:
            found.append(product)
            continue
        for part in node.all_input_nodes:
            if part in flow.depends and part not in seen:
                seen.add(part)
                pending.append(part)
    return found


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight in a product, with its bias, owner and storage."""

    module: str  # path of the module that multiplies by it
    role: str  # gate, up, gate_up, down
    weight: str  # parameter names
    bias: str | None
    out_first: bool  # stored (out, in), as in nn.Linear, instead of (in, out)


def layout_source(node: fx.Node, flow: Dataflow) -> fx.Node | None:
    """Return the tensor that `node` only casts or lays out, with the same last dimension; None if it computes more."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    before, after = shape(source), shape(node)
    same = op(node) in LAYOUT | CAST and before and after and before[-1] == after[-1]
    return source if same and source in flow.depends else None


def operand_chain(product: WeightProduct, flow: Dataflow) -> list[fx.Node]:
    """Return the product's operand, then the tensors that it is a cast or another layout of, back to the first."""
    chain = [product.source]
    while (before := layout_source(chain[-1], flow)) is not None:
        chain.append(before)
    return chain


def bias_add(node: fx.Node, flow: Dataflow) -> tuple[fx.Node, fx.Node] | None:
    """Return the node that adds a bias to a product's result, and the bias; None if there is none."""
    users = flow.uses[node]
    if len(users) != 1 or op(users[0]) != "add":
        return None
    (other,) = [part for part in users[0].all_input_nodes if part is not node] or [None]
    if other in flow.program.parameters and shape(other) == (width_of(node),):
        return users[0], other  # type: ignore[return-value]
    return None


def product_result(product: WeightProduct, flow: Dataflow, inside: set[fx.Node]) -> fx.Node:
    """Return the node of the product's result with its bias, in the layout that the nodes `inside` read."""
    node = product.node
    while True:
        if (added := bias_add(node, flow)) is not None:
            node = added[0]
            continue
        following = [user for user in flow.uses[node] if user in inside]
        if len(following) == 1 and op(following[0]) in LAYOUT and layout_source(following[0], flow) is node:
            node = following[0]
            continue
        return node


def matrix_of(product: WeightProduct, flow: Dataflow, inside: set[fx.Node], role: str = "") -> Matrix:
    """Return the weight and bias of a product; raises `DoesNotFitError` if the weight is not a stored parameter."""
    names = flow.program.parameters
    weight = next(node for node, name in names.items() if name == product.parameter)
    out_first = op(product.node) == "linear"
    node = next(
        part
        for part in product.node.all_input_nodes
        if part is weight or (part not in flow.depends and product.parameter in flow.parameters_of([part]))
    )
    while node is not weight:
        if op(node) in ("t", "transpose", "permute", "mT", "numpy_T"):
            out_first = not out_first
        elif op(node) not in LAYOUT | CAST:
            raise unreadable(product, f"is computed (operation {op(node)})")
        node = node.all_input_nodes[0]
    if shape(weight) != ((product.out_features, product.in_features) if out_first else (product.in_features, product.out_features)):
        raise unreadable(product, f"is {shape(weight)}")
    bias: fx.Node | None = None
    others = [part for part in product.node.all_input_nodes if part in names and part is not weight]
    if others:
        bias = others[0]
    elif (added := bias_add(product.node, flow)) is not None:
        bias = added[1]
    else:
        following = [user for user in flow.uses[product.node] if user in inside and layout_source(user, flow) is product.node]
        if following and (added := bias_add(following[0], flow)) is not None:
            bias = added[1]
    return Matrix(flow.call_of(product.node).path, role, product.parameter, names[bias] if bias is not None else None, out_first)


def unreadable(product: WeightProduct, how: str) -> DoesNotFitError:
    why = f"the weight {product.parameter} {how}"
    return DoesNotFitError(f"the weight {product.parameter} cannot be read", why=why, code="not-parsed")


def weight_and_bias(matrix: Matrix, model: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the stored parameters of `matrix` in `model`; the bias is None if there is none."""
    return model.get_parameter(matrix.weight), None if matrix.bias is None else model.get_parameter(matrix.bias)


def weight_out_first(matrix: Matrix, model: nn.Module) -> Tensor:
    """Return the weight laid out (out, in), however it is stored."""
    weight = model.get_parameter(matrix.weight).detach()
    return weight if matrix.out_first else weight.t()
