"""A layer whose activations are recomputed in the backward pass, from the input of the next layer.

Consecutive steps recompute their inputs from their outputs, in the order of the backward pass:

    X_1     = F_0(X_0)
    X_{k+1} = Y + s ((Y − 2 X_k) >> n) + s (X_{k−1} >> n),   Y = F_k(X_k)          in fixed point; s = ±1 for each row, n = `bits`

That is x_{k+1} = F(x_k) + γ (F(x_k) − 2 x_k + x_{k−1}) with γ = ±2⁻ⁿ: bidirectional integration approximation. The shift of X_{k−1}
loses its n lowest bits, which are stored. With them X_{k−1} follows from X_{k+1} and X_k exactly:

    X_{k−1} = (s (X_{k+1} − Y) − ((Y − 2 X_k) >> n)) << n  +  its n lowest bits

So of all steps only the last two X are stored. A chain is found from the tensor that its last step returned, by the tensor's node
of autograd; nothing is stored in a module. The gradient is that of the formula without the rounding to fixed point, in which sums
lose nothing:

    X = round(2³² x)          X: int64

A step of 2⁻³² is finer than float32's from 2⁻⁸ on. Numbers up to 2²⁹ in magnitude are represented; larger ones, Inf and NaN become
NaN in the next stream.

A model may write to arguments of a layer after its call, e.g. to states in its own tensors: a layer that runs a second time needs a
copy of them. Cache objects are copied anyway (`repeated_call.py`).

On Exact Bit-level Reversible Transformers Without Changing Architectures (ICML 2025).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map_only

from retrofit.passes.reversible.repeated_call import RepeatedCall, Returned
from retrofit.sdk import ArgumentPlace, RetrofitError, Wrapper, argument_at, argument_place
from retrofit.sdk.data import accepts, quiet, watched, without_weights
from retrofit.sdk.modules import child_modules, is_exporting, record_auxiliary_loss

Key = int | str


def written_arguments(model: nn.Module, inputs: Mapping[str, Any], paths: Collection[str]) -> dict[str, tuple[Key, ...]]:
    """Return, by layer, the arguments whose tensors are written to between the layer's call and the end of a forward with a cache.

    The forward is in training mode and without values, so the result is the same for a model that is being loaded. Returns {} for a
    model that cannot be copied or run in this way.
    """
    calls: list[tuple[str, Key, Tensor, int]] = []

    def keep(path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given: list[tuple[Key, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in given:
            calls.extend((path, key, tensor, tensor._version) for tensor in tree_flatten(value)[0] if isinstance(tensor, Tensor))

    called = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in inputs.items()}
    if accepts(model, "use_cache"):
        called["use_cache"] = True
    with contextlib.suppress(Exception), quiet(), torch.no_grad(), torch.device("meta"):  # raised by the model's own code
        skeleton = without_weights(model).train()
        with watched({path: skeleton.get_submodule(path) for path in paths}, before=keep):
            skeleton(**called)
    found: dict[str, dict[Key, None]] = {}
    for path, key, tensor, version in calls:
        if tensor._version != version:
            found.setdefault(path, {})[key] = None
    return {path: tuple(keys) for path, keys in found.items()}


def with_copies(args: Any, kwargs: dict[str, Any], keys: Collection[Key]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call, with copies of the tensors in those at `keys`."""
    copied = [copy_of(value) if key in keys else value for key, value in enumerate(args)]
    return copied, {key: copy_of(value) if key in keys else value for key, value in kwargs.items()}


def copy_of(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)


class ReversibleLayer(Wrapper):
    """In evaluation `layer` unchanged; in training one reversible step, which stores `bits` bits of each number of the stream.

    The stream is the argument `stream_in` and the item `stream_out` of the output: an index or key, None for the output itself. The
    model writes to its arguments `written` after the call, so a step stores copies of them.
    """

    stays_outermost = True  # a chain ends where the stream is not the output of a step

    def __init__(
        self, layer: nn.Module, bits: int, *, stream_in: Key, stream_out: Key | None, written: tuple[Key, ...] = ()
    ) -> None:
        super().__init__(layer)
        self.written = written
        self.bits, self.stream_in, self.stream_out = bits, argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = child_modules(self)["layer"]
        if not (self.training and torch.is_grad_enabled()) or is_exporting():
            return layer(*args, **kwargs)
        args, kwargs = with_copies(args, kwargs, self.written)
        return reversible_call(layer, self.stream_in, self.stream_out, self.bits, args, kwargs)

    def extra_repr(self) -> str:
        return f"γ=±2^-{self.bits}"


SCALE = 2.0**32
LARGEST = 2.0**29


def to_fixed(x: Tensor) -> Tensor:
    """Return x in fixed point; a number that cannot be represented becomes the nearest that can, NaN becomes zero."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * SCALE).round_().clamp_(-LARGEST * SCALE, LARGEST * SCALE).nan_to_num_(nan=0.0).to(torch.int64)


def to_float(fixed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest numbers of `dtype`; contiguous."""
    wide = fixed.to(torch.promote_types(dtype, torch.float32), memory_format=torch.contiguous_format)
    return wide.mul_(1 / SCALE).to(dtype)


def not_a_number_where(unrepresented: Tensor, x: Tensor) -> Tensor:
    """Return x, with NaN where `unrepresented` cannot be represented, in the memory layout of `unrepresented`."""
    return laid_out(torch.where(unrepresented.abs() <= LARGEST, x, torch.nan), strides_of(unrepresented))


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Return the strides of x; if x has gaps or overlaps, the strides of a contiguous tensor of its size."""
    return torch.empty_like(x, device="meta").stride()


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return x with these strides: the rounding of a product depends on the layout of its operands."""
    return x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def low_bits(fixed: Tensor, count: int) -> Tensor:
    """Return the `count` lowest bits of each number, packed: (count, ⌈numbers / 8⌉) bytes."""
    flat = fixed.reshape(-1)
    planes = []
    for bit in range(count):
        plane = F.pad((flat >> bit).bitwise_and_(1).to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
        planes.append((plane << places(fixed)).sum(-1, dtype=torch.uint8))
    return torch.stack(planes)


def unpacked(bits: Tensor, like: Tensor) -> Tensor:
    """Return the numbers with these lowest bits, in the shape of `like`."""
    found = torch.zeros_like(like)
    for bit, plane in enumerate(bits):
        values = (plane.unsqueeze(-1) >> places(like)).bitwise_and_(1).view(-1)[: like.numel()]
        found |= values.view(like.shape).to(torch.int64) << bit
    return found


def places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


NEARBY = 2  # nodes of autograd that hooks may insert between a step and the next

# ── The formula, forwards and backwards ──────────────────────────────────────────────────────────────────────────────────────────


def following(y: Tensor, current: Tensor, previous: Tensor, signs: Tensor, bits: int) -> Tensor:
    """Return X_{k+1}."""
    return y + signs * (((y - 2 * current) >> bits) + (previous >> bits))


def preceding(after: Tensor, y: Tensor, current: Tensor, signs: Tensor, bits: int, low: Tensor) -> Tensor:
    """Return X_{k−1}."""
    return ((signs * (after - y) - ((y - 2 * current) >> bits)) << bits) + low


@dataclasses.dataclass
class Move:
    """The record of a step: the call of its layer, s, and the bits that the shift lost; the first step has lost none."""

    call: RepeatedCall
    dtype: torch.dtype  # of the layer's input stream
    strides: tuple[int, ...]  # of the layer's input stream
    signs: Tensor | None = None  # (rows, 1, …) of int64
    low: Tensor | None = None  # packed


class Chain:
    """The steps so far, and the two newest X: the last step's output and input."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.moves: list[Move] = []
        self.newest: tuple[Tensor, Tensor] | None = None
        self.start: Tensor | None = None  # the sum of X_0

    def forward(self, call: RepeatedCall, x: Tensor) -> Returned:
        """Add a step from x, which is the stored X_k. Return the layer's output with the new stream."""
        if self.newest is None:
            current, move = to_fixed(x), Move(call, x.dtype, strides_of(x))
            self.start = current.sum()
            x = not_a_number_where(x, to_float(current, x.dtype))
        else:
            current, previous = self.newest
            signs = torch.randint(2, (x.shape[0], *[1] * (x.dim() - 1)), device=x.device) * 2 - 1
            move = Move(call, x.dtype, strides_of(x), signs, low_bits(previous, self.bits))
        returned = call.first(x)
        y = returned.tensors[0]
        after = to_fixed(y)
        if move.signs is not None:
            after = following(after, current, previous, move.signs, self.bits)
        self.newest = after, current
        self.moves.append(move)
        returned.tensors[0] = not_a_number_where(y, to_float(after, y.dtype))
        return returned

    def back(self, with_graph: bool = True) -> tuple[Move, Tensor, Returned, list[Tensor]]:
        """Undo the last step. Return its record, its input, its layer's output with a graph, and the layer's other arguments.

        Raises `RetrofitError` if there is no step left, or if the first input is not reproduced.
        """
        if self.newest is None:
            raise used_up()
        after, current = self.newest
        move = self.moves.pop()
        x = laid_out(to_float(current, move.dtype), move.strides).requires_grad_()
        returned, given = move.call.again(x, with_graph)
        if move.signs is None or move.low is None:
            self.newest = None
            if not torch.equal(current.sum(), self.start):  # type: ignore[arg-type]
                raise not_reproduced()
        else:
            y = to_fixed(returned.tensors[0].detach())
            self.newest = current, preceding(after, y, current, move.signs, self.bits, unpacked(move.low, current))
        return move, x, returned, given


def used_up() -> RetrofitError:
    return RetrofitError(
        "reversible: second backward through the same forward",
        why="the first one consumed the saved states",
        remedy="run forward again, or sum the losses and run backward once",
        code="second-backward",
    )


def not_reproduced() -> RetrofitError:
    return RetrofitError(
        "reversible: a layer computed another result in the backward pass, so the gradients are wrong",
        why="a weight or mode changed since the forward pass, or an operation is not deterministic",
        remedy="call step() and eval() after backward; torch.use_deterministic_algorithms(True); do not compile single layers",
        code="not-reproduced",
    )


# ── One step in autograd ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Step(torch.autograd.Function):
    """x_{k+1}, and further outputs and losses of the layer, from x_k and x_{k−1}.

    The layer's tensor arguments and parameters are inputs too, so that autograd adds the gradients of layers that share a parameter
    and calls its hooks once.
    """

    @staticmethod
    def forward(ctx: Any, chain: Chain, call: RepeatedCall, made: list[Returned], x: Tensor, previous: Any, *others: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        returned = chain.forward(call, x)
        ctx.chain, ctx.index = chain, len(chain.moves)
        ctx.parameters = others[len(call.values) :]
        return outputs_of(ctx, returned, made)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor | None, *of_others: Tensor | None) -> tuple[Tensor | None, ...]:
        chain: Chain = ctx.chain
        if len(chain.moves) < ctx.index:
            raise used_up()
        while len(chain.moves) > ctx.index:  # later steps have no gradient
            chain.back(with_graph=False)
        move, x, returned, given = chain.back()
        wanted = [x, *given, *ctx.parameters]
        results = [
            (tensor, of)
            for tensor, of in zip(returned.tensors[1:], of_others, strict=True)
            if of is not None and tensor.requires_grad
        ]
        through, past, before = gradient, None, None
        if gradient is not None and move.signs is not None:
            gamma = move.signs.to(gradient.dtype) * 2.0**-chain.bits
            through, past, before = gradient + gamma * gradient, -2 * gamma * gradient, gamma * gradient
        if through is not None:
            results.append((returned.tensors[0], through))
        found = gradients_of(results, wanted, ctx.parameters)
        if past is not None:
            found[0] = past if found[0] is None else found[0] + past
        return None, None, None, found[0], before, *found[1:]


def outputs_of(ctx: Any, returned: Returned, made: list[Returned]) -> tuple[Tensor, ...]:
    """Return the tensors of a call's result, as outputs of a step; append the rest of the result to `made`."""
    ctx.mark_non_differentiable(*(tensor for tensor in returned.tensors if not tensor.is_floating_point()))
    tensors, returned.tensors = tuple(returned.tensors), []
    made.append(returned)
    return tensors


def gradients_of(results: list[tuple[Tensor, Tensor]], wanted: list[Tensor], parameters: Sequence[Tensor]) -> list[Any]:
    """Return the wanted gradients from values and their gradients. Gradients of weights that FSDP gathered are added to `.grad`."""
    if not results:
        return [None] * len(wanted)
    values, gradients = [result for result, _ in results], [of for _, of in results]
    from torch.distributed.tensor import DTensor  # deferred: slow to import

    strays = stray_leaves(values, wanted) if any(isinstance(parameter, DTensor) for parameter in parameters) else []
    handles = [leaf.register_hook(functools.partial(accumulate, leaf)) for leaf in strays]
    found = torch.autograd.grad(values, [*wanted, *strays], gradients, allow_unused=True)
    for handle in handles:
        handle.remove()
    return list(found[: len(wanted)])


def stray_leaves(values: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """Return the leaves of a graph that are not wanted: weights that FSDP gathered for this run."""
    known, seen = {id(parameter) for parameter in wanted}, set()
    pending, found = [value.grad_fn for value in values], []
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [other for other, _ in node.next_functions]
        if isinstance(leaf := getattr(node, "variable", None), Tensor) and id(leaf) not in known:
            found.append(leaf)
    return found


@torch.no_grad()
def accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Add the gradient to the leaf's `.grad`, before code around the leaf's module reads it."""
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


@dataclasses.dataclass(frozen=True)
class Place:
    """The memory of a tensor, its layout and its version."""

    storage: StorageWeakRef
    layout: tuple[Any, ...]

    @staticmethod
    def of(tensor: Tensor) -> Place:
        layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor._version
        return Place(StorageWeakRef(tensor.untyped_storage()), layout)

    def holds(self, tensor: Tensor) -> bool:
        return not self.storage.expired() and self == Place.of(tensor)


def step_that_made(x: Tensor, kind: type = Chain) -> Any:
    """Return the autograd node of the step that returned x as its stream, in a chain of this kind; None if there is none."""
    nodes: list[Any] = [x.grad_fn]
    for _ in range(NEARBY + 1):
        for node in nodes:
            if isinstance(getattr(node, "chain", None), kind) and node.place.holds(x):
                return node
        nodes = [other for node in nodes if node is not None and not hasattr(node, "chain") for other, _ in node.next_functions]
    return None


@torch._disable_dynamo  # torch.compiler.disable imports the compiler at once, which is slow
def reversible_call(
    layer: nn.Module, stream_in: ArgumentPlace, stream_out: int | str | None, bits: int, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Return the layer's output as one more step of the chain of its input, or the first step of a new chain.

    Without a gradient it is an ordinary call.
    """
    x = argument_at(stream_in, args, kwargs)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    call = RepeatedCall(layer, stream_in, stream_out, args, kwargs)
    if not (x.requires_grad or call.given or parameters):
        return layer(*args, **kwargs)
    earlier = step_that_made(x)
    if earlier is None or len(earlier.chain.moves) != earlier.index:
        earlier = None
    chain = Chain(bits) if earlier is None else earlier.chain
    previous = None if earlier is None else earlier.source
    made: list[Returned] = []
    tensors: tuple[Any, ...] = Step.apply(chain, call, made, x, previous, *call.given, *parameters)  # type: ignore[no-untyped-call]
    node: Any = tensors[0].grad_fn
    node.source = x
    if earlier is not None:
        earlier.source = None  # it was needed for the edge from it to this step
    return output_of(layer, made[0], tensors)


def output_of(layer: nn.Module, returned: Returned, tensors: tuple[Any, ...]) -> Any:
    """Return the layer's output with the tensors of a step; store the place of its stream, and record its losses."""
    node: Any = tensors[0].grad_fn
    node.place = Place.of(tensors[0])
    for loss in tensors[len(tensors) - returned.losses :]:
        record_auxiliary_loss(tensors[0], loss, layer)
    return returned.rebuilt(tensors)
