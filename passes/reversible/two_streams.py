"""Layers on two streams: each branch reads the newer and is added to the older; reversible without stored activations.

    x_{j+1} = x_{j−1} + f_j(x_j)          f_j the branches of all layers in order, x_{−1} = x_0 the stream before the first layer

With two branches per layer this is y1 = x1 + f(x2), y2 = x2 + g(y1). In fixed point, where sums lose nothing, x_{j−1} = x_{j+1} −
f_j(x_j) exactly, so each branch is recomputed from the same input. Of all layers only the last two streams are stored. Between two
layers there is one tensor, [newer | older]; the last layer returns the mean.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.2; Reformer: The Efficient Transformer (ICLR 2020), §3.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.passes.reversible.branch_calls import BranchCall, Branches, call_intercepted
from retrofit.passes.reversible.repeated_call import Returned, without_checkpoints
from retrofit.passes.reversible.reversible_layer import (
    Key,
    gradients_of,
    not_a_number_where,
    not_reproduced,
    output_of,
    outputs_of,
    step_that_made,
    to_fixed,
    to_float,
    used_up,
)
from retrofit.sdk import ArgumentPlace, DoesNotFitError, Wrapper, argument_at, argument_place, find_argument, with_item
from retrofit.sdk.modules import child_modules, is_exporting, tensor_argument


@dataclasses.dataclass(frozen=True)
class Swaps:
    """A layer as one link of two streams: the places of its input and output, and its branches."""

    width: int
    stream_in: ArgumentPlace
    stream_out: Key | None
    sums: tuple[int, ...]  # for each branch, the number of sums that add it to the stream
    parts: tuple[str, ...]  # paths of the modules that belong to one branch each
    closes: bool  # it returns the mean of both streams


@dataclasses.dataclass
class Link:
    """The record of a layer's call."""

    call: BranchCall
    dtypes: list[torch.dtype]  # of the older and the newer stream that it received, then of the stream after each branch
    begins: bool  # the chain starts with it
    opens: bool  # it received one stream
    closes: bool


class TwoStreamChain:
    """The layers so far, and both streams after the last of them, in fixed point: the newer, the older."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.newest: tuple[Tensor, Tensor] | None = None
        self.start: tuple[Tensor, Tensor] | None = None  # both streams at the start of the chain

    def forward(self, call: BranchCall, swaps: Swaps, x: Tensor) -> Returned:
        """Add a layer from x, one stream or both. Return the layer's output with both new streams, or their mean."""
        newer, older = halves(x, swaps.width)
        begins = self.newest is None
        if self.newest is None:
            current = to_fixed(newer)
            previous = current if older is newer else to_fixed(older)
            self.start = current.sum(), previous.sum()
        else:
            current, previous = self.newest
        link = Link(call, [x.dtype, x.dtype], begins, older is newer, swaps.closes)
        newer = not_a_number_where(newer, to_float(current, x.dtype))

        def following(_: int, value: Tensor) -> Tensor:
            nonlocal newer, older, current, previous
            current, previous = previous + to_fixed(value), current
            link.dtypes.append(torch.promote_types(older.dtype, value.dtype))
            newer, older = not_a_number_where(value, to_float(current, link.dtypes[-1])), newer
            return newer

        returned = call.first_of_branches(newer, following)
        self.newest = current, previous
        self.links.append(link)
        returned.tensors[0] = mean(newer, older, current, previous) if swaps.closes else torch.cat([newer, older], -1)
        return returned

    def back(
        self, gradient: Tensor | None, of_others: Sequence[Tensor | None], parameters: Sequence[Tensor], with_graph: bool = True
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Undo the last layer. Return the gradients of its stream, and of its other arguments and its parameters.

        Raises `RetrofitError` if there is no layer left, or if the first streams are not reproduced.
        """
        if self.newest is None:
            raise used_up()
        link = self.links.pop()
        call = link.call
        of_newer, of_older = both(gradient, link)
        total: list[Tensor | None] = [None] * (len(call.values) + len(parameters))
        for number in reversed(range(len(call.sums))):
            after, current = self.newest
            x = to_float(current, link.dtypes[number + 1]).requires_grad_()
            value, returned, given = call.branch(number, x, with_graph)
            previous = after - to_fixed(value.detach())
            self.newest = current, previous
            if not with_graph:
                continue
            results = results_of(returned, of_others, call, number)
            if of_newer is not None and value.requires_grad:
                results.append((value, of_newer.to(value.dtype)))
            found = gradients_of(results, [x, *given, *parameters], parameters)
            of_newer, of_older = plus(of_older, found[0], link.dtypes[number + 1]), plus(of_newer, None, link.dtypes[number])
            total = [plus(term, other) for term, other in zip(total, found[1:], strict=True)]
        if link.begins:
            streams, self.newest = self.newest, None
            if not all(torch.equal(stream.sum(), start) for stream, start in zip(streams, self.start or (), strict=True)):
                raise not_reproduced()
        return joined(of_newer, of_older, link), total


def halves(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the newer and the older stream in x; x twice if it is one stream."""
    if x.shape[-1] == width:
        return x, x
    return x.narrow(-1, 0, width).contiguous(), x.narrow(-1, width, width).contiguous()


def mean(newer: Tensor, older: Tensor, current: Tensor, previous: Tensor) -> Tensor:
    """Return the mean of both streams, rounded once."""
    dtype = torch.promote_types(newer.dtype, older.dtype)
    return not_a_number_where(newer + older, to_float((current >> 1) + (previous >> 1) + (current & previous & 1), dtype))


def both(gradient: Tensor | None, link: Link) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both streams after a layer, from the gradient of its output."""
    if gradient is None:
        return None, None
    newer, older = link.dtypes[-1], link.dtypes[-2]
    if link.closes:
        return (0.5 * gradient).to(newer), (0.5 * gradient).to(older)
    width = gradient.shape[-1] // 2
    return gradient.narrow(-1, 0, width).to(newer).contiguous(), gradient.narrow(-1, width, width).to(older).contiguous()


def joined(of_newer: Tensor | None, of_older: Tensor | None, link: Link) -> Tensor | None:
    """Return the gradient of a layer's input, from the gradients of its streams."""
    if link.opens:
        return plus(of_newer, of_older)
    like = of_newer if of_newer is not None else of_older
    if like is None:
        return None
    return torch.cat([torch.zeros_like(like) if part is None else part.to(like.dtype) for part in (of_newer, of_older)], -1)


def plus(term: Tensor | None, other: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return the sum of the terms that are not None, in `dtype` if given; None if both are."""
    total = other if term is None else term if other is None else term + other
    return total if total is None or dtype is None else total.to(dtype)


def results_of(
    returned: Returned, of_others: Sequence[Tensor | None], call: BranchCall, number: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the layer's other outputs and losses that belong to the branch, each with its gradient."""
    plain = len(of_others) - call.recorded
    first = call.counts[number - 1] if number else 0
    losses = returned.tensors[len(returned.tensors) - returned.losses :]
    pairs = [*zip(returned.tensors[1 : 1 + plain], of_others[:plain], strict=True)]
    pairs += zip(losses, of_others[plain + first : plain + first + len(losses)], strict=True)
    return [(result, of) for result, of in pairs if of is not None and result.requires_grad]


# ── One layer in autograd ────────────────────────────────────────────────────────────────────────────────────────────────────────


class TwoStreamStep(torch.autograd.Function):
    """Both streams after a layer, and its further outputs and losses; `others` are its other tensor arguments and parameters."""

    @staticmethod
    def forward(
        ctx: Any, chain: TwoStreamChain, call: BranchCall, swaps: Swaps, made: list[Returned], x: Tensor, *others: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        returned = chain.forward(call, swaps, x)
        ctx.chain, ctx.index = chain, len(chain.links)
        ctx.parameters = others[len(call.values) :]
        return outputs_of(ctx, returned, made)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor | None, *of_others: Tensor | None) -> tuple[Tensor | None, ...]:
        chain: TwoStreamChain = ctx.chain
        if len(chain.links) < ctx.index:
            raise used_up()
        while len(chain.links) > ctx.index:  # later layers have no gradient
            chain.back(None, (), (), with_graph=False)
        of_stream, found = chain.back(gradient, of_others, ctx.parameters)
        return None, None, None, None, of_stream, *found


@torch._disable_dynamo  # torch.compiler.disable imports the compiler at once, which is slow
def two_stream_call(layer: nn.Module, swaps: Swaps, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the layer's output as one more layer of the chain of its input, or the first layer of a new chain.

    Returns `NotImplemented` without a gradient.
    """
    x = argument_at(swaps.stream_in, args, kwargs)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    call = BranchCall(layer, swaps.stream_in, swaps.stream_out, args, kwargs, swaps.sums, swaps.parts)
    if not (x.requires_grad or call.given or parameters):
        return NotImplemented
    earlier = step_that_made(x, TwoStreamChain)
    goes_on = earlier is not None and len(earlier.chain.links) == earlier.index and x.shape[-1] != swaps.width
    chain = earlier.chain if goes_on else TwoStreamChain()
    made: list[Returned] = []
    tensors: tuple[Any, ...] = TwoStreamStep.apply(chain, call, swaps, made, x, *call.given, *parameters)  # type: ignore[no-untyped-call]
    return output_of(layer, made[0], tensors)


class Streams:
    """Both streams while the branches of a layer are added; `share` is λ, 0 for the dense layer and 1 for two streams."""

    def __init__(self, newer: Tensor, older: Tensor, share: float) -> None:
        self.newer, self.older, self.share = newer, older, share

    def add(self, _: int, value: Tensor) -> Tensor:
        """Return x_{j+1} = (1 − λ) x_j + λ x_{j−1} + f_j(x_j), for λ = 0 the dense sum bit for bit."""
        base = self.older if self.share == 1 else torch.lerp(self.newer, self.older.to(self.newer.dtype), self.share)
        self.newer, self.older = base + value, self.newer
        return self.newer

    def clamped(self, newer: Tensor) -> None:
        """Replace the newer stream."""
        self.newer = newer

    def mean(self) -> Tensor:
        return torch.lerp(self.newer, self.older.to(self.newer.dtype), self.share / 2)


class TwoStreamLayer(Wrapper):
    """Runs the branches of `layer` on two streams; in training the backward pass recomputes each branch.

    Input and output are one tensor [newer | older]; the first layer receives one stream, and the last returns the mean of both.
    """

    stays_outermost = True  # nothing may come between two layers
    adds_branches = True

    def __init__(
        self,
        layer: nn.Module,
        width: int,
        sums: Sequence[int],
        parts: Sequence[str],
        *,
        stream_in: Key,
        stream_out: Key | None,
        closes: bool,
    ) -> None:
        super().__init__(layer)
        place = argument_place(layer, stream_in)
        self.swaps = Swaps(width, place, stream_out, tuple(sums), tuple(parts), closes)
        self.share = 1.0  # λ

    @property
    def stream_out(self) -> Key | None:
        return self.swaps.stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer, swaps = child_modules(self)["layer"], self.swaps
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(swaps.stream_in, arguments, keywords)
        x = container[key]
        if x.shape[-1] not in (swaps.width, 2 * swaps.width):
            raise DoesNotFitError(
                f"a layer received a stream of width {x.shape[-1]}, where each of two streams has {swaps.width}",
                why="something changes the stream between layers",
                remedy="apply reversible last",
                code="width",
            )
        if self.training and torch.is_grad_enabled() and self.share == 1 and not is_exporting():
            output = two_stream_call(layer, swaps, args, kwargs)
            if output is not NotImplemented:
                return output
        newer, older = halves(x, swaps.width)
        streams = Streams(newer, older, self.share)
        container[key] = newer
        branches = Branches(swaps.sums, streams.newer, streams.add, streams.clamped)
        with without_checkpoints(layer) if self.training else contextlib.nullcontext():
            output = call_intercepted(lambda: layer(*arguments, **keywords), branches)
        stream = streams.mean() if swaps.closes else torch.cat([streams.newer, streams.older], -1)
        return with_item(output, swaps.stream_out, stream)

    def extra_repr(self) -> str:
        return f"{len(self.swaps.sums)} swaps"


@dataclasses.dataclass(frozen=True)
class StreamsEnd:
    """The end of two streams: the layer `last` returns their mean, and the next module reads it at `place`."""

    guards: ClassVar[tuple[str, ...]] = ("require",)

    last: str
    width: int
    place: ArgumentPlace

    def require(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `DoesNotFitError` if `module` is called with both streams, because the last layer was skipped."""
        x = tensor_argument(self.place, args, kwargs)
        if x is not None and x.shape[-1] == 2 * self.width:
            raise DoesNotFitError(
                f"the last layer on two streams was skipped: {self.last}",
                by="reversible",
                why="it returns their mean",
                remedy="run all layers (no assistant_early_exit, the original num_hidden_layers), or drop them before the rewrite",
                code="layers-skipped",
                site=self.last,
            )


@dataclasses.dataclass(frozen=True)
class SecondStream:
    """At 0 a branch is added to the stream that it reads, as in the dense model; at 1 to the older stream."""

    name: str = "the share of the older stream that a branch is added to"

    def fits(self, site: nn.Module) -> bool:
        return bool(two_stream_layers(site))

    def turn(self, site: nn.Module, share: float) -> None:
        """Set λ to `share`. Below 1 a training step stores all activations."""
        for layer in two_stream_layers(site):
            layer.share = share


def two_stream_layers(site: nn.Module) -> list[TwoStreamLayer]:
    return [module for module in site.modules() if isinstance(module, TwoStreamLayer)]
