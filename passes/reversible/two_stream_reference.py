"""Two streams once more: a layer's branches found by value, one at a time, which the check `method` holds the pass against."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from retrofit.sdk import Deviation, Observed, SiteCall, find_argument, with_item


class Sums(TorchFunctionMode):
    """Within this context `meet` is asked of every sum of two tensors; what it returns is the sum, where it returns one."""

    def __init__(self, meet: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.meet = meet

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "").strip("_") in ("add", "iadd", "radd", "add.Tensor") and len(args) == 2:
            one, other = args
            if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
                found = self.meet(one, other)
                if found is not None:
                    return found
        return function(*args, **(kwargs or {}))


def two_stream_layer(call: SiteCall) -> Tensor:
    """x_{j+1} = x_{j−1} + f_j(x_j): for each branch the layer runs once more, on the streams so far; the other one at the end."""
    module: Any = call.module
    swaps = module.swaps
    given = call.argument(swaps.stream_in)
    if given.shape[-1] not in (swaps.width, 2 * swaps.width):
        raise Deviation(f"it was given a stream {given.shape[-1]} wide")
    streams = [given[..., -swaps.width :], given[..., : swaps.width]]  # the older, the newer
    for number in range(len(swaps.sums)):
        streams.append(streams[-2] + branch(module, call, streams[1:], number))
    return (streams[-1] + streams[-2]) / 2 if swaps.closes else torch.cat([streams[-1], streams[-2]], -1)


def branch(module: Any, call: SiteCall, streams: list[Tensor], number: int) -> Tensor:
    """f of a branch: what its sums add to the stream of its number, the earlier ones having given the streams that follow them."""
    reached, terms, found = 0, list[Tensor](), list[Tensor]()
    sums = module.swaps.sums

    def meet(one: Tensor, other: Tensor) -> Tensor | None:
        nonlocal reached
        if reached > number:
            return None
        carrier = sum(terms[1:], terms[0]) if terms else streams[reached]
        for term, rest in ((one, other), (other, one)):
            if not torch.equal(term, carrier):
                continue
            terms.append(rest)
            total = sum(terms[1:], terms[0])
            if len(terms) < sums[reached]:
                return total
            terms.clear()
            reached += 1
            if reached > number:
                found.append(total)
                return streams[number] + total
            return streams[reached]
        return None

    arguments, keywords = copied(list(call.args)), copied(dict(call.kwargs))
    container, key = find_argument(module.swaps.stream_in, arguments, keywords)
    container[key] = streams[0]
    with Sums(meet):
        module.layer(*arguments, **keywords)
    if not found:
        raise Deviation(f"its layer adds {reached} branches to the stream, and not {len(sums)}")
    return found[0]


def copied(value: Any) -> Any:
    """The same arguments, with copies of the caches among them."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(one) for one in value)
    return copy.deepcopy(value) if isinstance(value, Cache) else value


@contextlib.contextmanager
def everything_kept(observed: Observed) -> Iterator[None]:
    """Within this context the layers run on two streams in ordinary operations, of which autograd keeps all."""
    last: list[tuple[Tensor, Tensor, Tensor]] = []  # what the layer before returned, and both streams in it in float64

    def stepping(module: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            swaps, arguments, keywords = module.swaps, list(args), dict(kwargs)
            container, key = find_argument(swaps.stream_in, arguments, keywords)
            x = container[key]
            if last and last[-1][0] is x:
                _, newer, older = last[-1]
            else:
                newer, older = (in_steps(one.double()) for one in (x[..., : swaps.width], x[..., -swaps.width :]))
            shown, ended, terms = [newer.to(x.dtype)], 0, 0

            def meet(one: Tensor, other: Tensor) -> Tensor | None:
                nonlocal newer, older, ended, terms
                if ended == len(swaps.sums) or not any(term is shown[-1] for term in (one, other)):
                    return None
                value = other if one is shown[-1] else one
                if terms:
                    value = shown[-1] + value
                terms += 1
                if terms == swaps.sums[ended]:
                    newer, older, terms, ended = older + in_steps(value.double()), newer, 0, ended + 1
                    value = newer.to(x.dtype)
                shown.append(value)
                return value

            container[key] = shown[0]
            with Sums(meet):
                output = module.layer(*arguments, **keywords)
            streams = (newer + older) / 2 if swaps.closes else torch.cat([newer, older], -1)
            returned = streams.to(x.dtype)
            last[:] = [] if swaps.closes else [(returned, newer, older)]
            return with_item(output, None if isinstance(output, Tensor) else swaps.stream_out, returned)

        return forward

    modules: list[Any] = [site.module for site in observed.sites if hasattr(site.module, "swaps")]
    for module in modules:
        module.__dict__["forward"] = stepping(module)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def in_steps(x: Tensor) -> Tensor:
    """A whole number of steps of 2⁻³², with the gradient of x."""
    return x + (torch.round(x.detach() * 2.0**32) / 2.0**32 - x.detach())
