"""A training step that stores all activations: the reference for the check `method`.

Its stream is in float64, in which multiples of 2⁻³² are exact too, and autograd computes its gradient. For two streams the branches
of a layer are identified by the values of tensors, one branch at a time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retrofit.sdk import Deviation, Observed, Problems, SiteCall, find_argument, item_at, with_item
from retrofit.sdk.data import float_tensors, preserve_modes, replace_attributes
from retrofit.sdk.modules import is_cache


class Sums(TorchFunctionMode):
    """A context that calls `meet` with the terms of every sum of two tensors; a result other than None replaces the sum."""

    def __init__(self, meet: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.meet = meet

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "").strip("_") in ("add", "iadd", "radd", "add.Tensor") and len(args) == 2:
            term, other = args
            if isinstance(term, Tensor) and isinstance(other, Tensor) and term.shape == other.shape:
                found = self.meet(term, other)
                if found is not None:
                    return found
        return function(*args, **(kwargs or {}))


def two_stream_layer(call: SiteCall) -> Tensor:
    """Return both streams, or their mean, after x_{j+1} = x_{j−1} + f_j(x_j); for each branch the layer runs once."""
    module: Any = call.module
    swaps = module.swaps
    given = call.argument(swaps.stream_in)
    if given.shape[-1] not in (swaps.width, 2 * swaps.width):
        raise Deviation(f"its input stream has width {given.shape[-1]}")
    streams = [given[..., -swaps.width :], given[..., : swaps.width]]  # the older, the newer
    for number in range(len(swaps.sums)):
        streams.append(streams[-2] + branch(module, call, streams[1:], number))
    return (streams[-1] + streams[-2]) / 2 if swaps.closes else torch.cat([streams[-1], streams[-2]], -1)


def branch(module: Any, call: SiteCall, streams: list[Tensor], number: int) -> Tensor:
    """Return f of a branch: the terms that its sums add to its stream, given the streams after earlier branches."""
    reached, terms, found = 0, list[Tensor](), list[Tensor]()
    sums = module.swaps.sums

    def meet(x: Tensor, other: Tensor) -> Tensor | None:
        nonlocal reached
        if reached > number:
            return None
        carrier = sum(terms[1:], terms[0]) if terms else streams[reached]
        for term, rest in ((x, other), (other, x)):
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
    """Return the arguments with copies of the caches among them."""
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return copy.deepcopy(value) if is_cache(value) else value


@contextlib.contextmanager
def swaps_kept(observed: Observed) -> Iterator[None]:
    """Within this context run the layers on two streams in ordinary operations of autograd."""
    last: list[tuple[Tensor, Tensor, Tensor]] = []  # the previous layer's output, and its two streams in float64

    def stepping(module: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            swaps, arguments, keywords = module.swaps, list(args), dict(kwargs)
            container, key = find_argument(swaps.stream_in, arguments, keywords)
            x = container[key]
            if last and last[-1][0] is x:
                _, newer, older = last[-1]
            else:
                newer, older = (rounded(stream.double(), torch.round) for stream in (x[..., : swaps.width], x[..., -swaps.width :]))
            shown, ended, terms = [newer.to(x.dtype)], 0, 0

            def meet(stream: Tensor, other: Tensor) -> Tensor | None:
                nonlocal newer, older, ended, terms
                if ended == len(swaps.sums) or not any(term is shown[-1] for term in (stream, other)):
                    return None
                value = other if stream is shown[-1] else stream
                if terms:
                    value = shown[-1] + value
                terms += 1
                if terms == swaps.sums[ended]:
                    newer, older, terms, ended = older + rounded(value.double(), torch.round), newer, 0, ended + 1
                    value = newer.to(x.dtype)
                shown.append(value)
                return value

            container[key] = shown[0]
            with Sums(meet):
                output = module.layer(*arguments, **keywords)
            streams = (newer + older) / 2 if swaps.closes else torch.cat([newer, older], -1)
            returned = streams.to(x.dtype)
            last[:] = [] if swaps.closes else [(returned, newer, older)]
            return with_item(output, swaps.stream_out, returned)

        return forward

    with replaced_forwards([site.module for site in observed.sites if hasattr(site.module, "swaps")], stepping):
        yield


@contextlib.contextmanager
def replaced_forwards(modules: Sequence[Any], forward_of: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context the results of `forward_of` replace the modules' forwards."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(replace_attributes(module, forward=forward_of(module)))
        yield


STEP = 2.0**-32
LIMIT = 1e-3  # tolerance relative to the largest gradient of a parameter: both are in float32 and add in different orders
LEAST = 1e-2  # least scale of that tolerance, relative to the largest gradient of all (that of keys' biases is rounding)
SEED = 71


def reversible_layer(call: SiteCall) -> Tensor:
    """Return the output of the layer in evaluation."""
    module: Any = call.module
    return call.given("layer", {module.stream_in: call.argument(module.stream_in)}, module.stream_out)


def wiring(observed: Observed) -> Problems:
    """Check that a training step has the outputs and gradients of one that stores all activations."""
    called = [site for site in observed.sites if site.calls]
    halves = [parameter for parameter in observed.model.parameters() if parameter.dtype in (torch.float16, torch.bfloat16)]
    if not called or halves:
        for site in called[:1]:
            observed.not_compared(site.path, "in half precision a gradient is too coarse to compare")
        return
    with swaps_kept(observed) if observed.options.scheme == "terraformer" else everything_kept(observed):
        expected = gradients(observed)
    try:
        found = gradients(observed)
    except Exception as error:  # the reference raised none
        what = str(error).partition("\n")[0]
        yield called[0].path, f"in training it raises an error, and with all activations stored it does not: {what}"
        return
    sizes = [largest(value) for _, value in expected]
    floor = LEAST * max(sizes, default=0.0)
    for (name, value), (_, other), size in zip(found, expected, sizes, strict=True):
        if (value is None) != (other is None):
            yield called[0].path, f"in training {name} {'is missing' if value is None else 'should not be there'}"
        elif value is not None and other is not None:
            same = (value == other) | (value.isnan() & other.isnan())  # equal infinities too
            gap = float((value - other).abs().masked_fill(same, 0.0).max()) if other.numel() else 0.0
            if not gap <= LIMIT * max(size, floor):
                yield called[0].path, f"in training {name} is {gap:.1e} from the method's, whose largest is {size:.1e}"
                return


def largest(value: Tensor | None) -> float:
    """Return the largest magnitude of the finite numbers; 0 if there are none."""
    return 0.0 if value is None or not value.numel() else float(value.abs().masked_fill(~value.isfinite(), 0.0).max())


def gradients(observed: Observed) -> list[tuple[str, Tensor | None]]:
    """Return the outputs of a forward in training mode with a fixed seed, and the gradients of a weighted sum of them, by name.

    The model uses its cache, as it does in training by default.
    """
    model = observed.model
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    inputs = {**observed.inputs, "use_cache": True} if "use_cache" in observed.inputs else observed.inputs
    with torch.enable_grad(), preserve_modes(model), torch.random.fork_rng([]):
        model.train()
        torch.manual_seed(SEED)
        outputs = [tensor for tensor in float_tensors(model(**inputs)) if tensor.requires_grad]
        weights = [
            torch.linspace(-1, 1, output.numel(), device=output.device).reshape(output.shape).to(output.dtype) for output in outputs
        ]
        found = torch.autograd.grad(outputs, list(parameters.values()), weights, allow_unused=True)
    returned = [(f"the model's output {number}", output.detach()) for number, output in enumerate(outputs)]
    return [*returned, *((f"the gradient of {name}", tensor) for name, tensor in zip(parameters, found, strict=True))]


@contextlib.contextmanager
def everything_kept(observed: Observed) -> Iterator[None]:
    """Within this context run the steps of the sites' layers in ordinary operations of autograd."""
    last: list[tuple[Tensor, Tensor, Tensor]] = []  # the last step's output, and in float64 its output and input

    def stepping(module: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # an ordinary call
                return module.layer(*args, **kwargs)
            arguments, keywords = list(args), dict(kwargs)
            container, key = find_argument(module.stream_in, arguments, keywords)
            x, goes_on = container[key], bool(last) and last[-1][0] is container[key]
            current = last[-1][1] if goes_on else rounded(x.double(), torch.round)
            if goes_on:
                rows = torch.randint(2, (len(x), *[1] * (x.dim() - 1)), device=x.device)
                gamma = (2.0 * rows - 1) * 0.5**observed.options.bits
            container[key] = current.to(x.dtype)
            output = module.layer(*arguments, **keywords)
            returned = item_at(output, module.stream_out)
            y = rounded(returned.double(), torch.round)
            if goes_on:
                size, sign = gamma.abs(), gamma.sign()
                y = y + sign * (rounded(size * (y - 2 * current), torch.floor) + rounded(size * last[-1][2], torch.floor))
            last[:] = [(y.to(returned.dtype), y, current)]
            return with_item(output, module.stream_out, last[-1][0])

        return forward

    with replaced_forwards([site.module for site in observed.sites], stepping):
        yield


def rounded(x: Tensor, how: Any) -> Tensor:
    """Return x rounded to a multiple of 2⁻³², with the gradient of x."""
    return x + (how(x.detach() / STEP) * STEP - x.detach())
