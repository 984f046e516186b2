"""The reversible pass once more: a training step that keeps everything, which the check `method` holds the pass against.

Its stream is in float64, where whole numbers of steps of 2⁻³² are exact as well, and its gradient is autograd's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from retrofit.passes.reversible.two_stream_reference import everything_kept as swaps_kept
from retrofit.sdk import Observed, Problems, SiteCall, find_argument, with_item

STEP = 2.0**-32
LIMIT = 1e-3  # of the largest gradient of a parameter: both are in float32, and add in another order
LEAST = 1e-2  # of the largest gradient of all: that of a smaller one is measured by this (a bias of keys has none but rounding)
SEED = 71


def reversible_layer(call: SiteCall) -> Tensor:
    """Evaluated, it is the layer."""
    module: Any = call.module
    return call.given("layer", {module.stream_in: call.argument(module.stream_in)}, module.stream_out)


def wiring(observed: Observed) -> Problems:
    """What a training step returns and the gradients of all parameters, by the modules and with everything kept."""
    called = [site for site in observed.sites if site.calls]
    halves = [one for one in observed.model.parameters() if one.dtype in (torch.float16, torch.bfloat16)]
    if not called or halves:
        for site in called[:1]:
            observed.not_compared(site.path, "in half precision a gradient is too coarse to compare")
        return
    with swaps_kept(observed) if observed.options.scheme == "terraformer" else everything_kept(observed):
        theirs = gradients(observed)
    try:
        ours = gradients(observed)
    except Exception as error:  # where the formula has a result the step is to have one
        what = str(error).partition("\n")[0]
        yield called[0].path, f"in training it raises an error, and with everything kept it does not: {what}"
        return
    sizes = [largest(one) for _, one in theirs]
    floor = LEAST * max(sizes, default=0.0)
    for (name, one), (_, other), size in zip(ours, theirs, sizes, strict=True):
        if (one is None) != (other is None):
            yield called[0].path, f"in training {name} {'is missing' if one is None else 'should not be there'}"
        elif one is not None and other is not None:
            same = (one == other) | (one.isnan() & other.isnan())  # infinities too, where a model hides outputs
            gap = float((one - other).abs().masked_fill(same, 0.0).max()) if other.numel() else 0.0
            if not gap <= LIMIT * max(size, floor):
                yield called[0].path, f"in training {name} is {gap:.1e} from the method's, whose largest is {size:.1e}"
                return


def largest(value: Tensor | None) -> float:
    """The largest magnitude among the numbers, 0 where there is none."""
    return 0.0 if value is None or not value.numel() else float(value.abs().masked_fill(~value.isfinite(), 0.0).max())


def gradients(observed: Observed) -> list[tuple[str, Tensor | None]]:
    """The outputs of a forward in training mode, always on the same random numbers, and the gradients of a function of them.

    The model keeps its cache, as it does in training unless told otherwise.
    """
    model = observed.model
    modes = {part: part.training for part in model.modules()}
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    inputs = {**observed.inputs, "use_cache": True} if "use_cache" in observed.inputs else observed.inputs
    state = torch.get_rng_state()
    try:
        with torch.enable_grad():
            model.train()
            torch.manual_seed(SEED)
            outputs = [one for one in floats(model(**inputs)) if one.requires_grad]
            weights = [torch.linspace(-1, 1, one.numel(), device=one.device).reshape(one.shape).to(one.dtype) for one in outputs]
            found = torch.autograd.grad(outputs, list(parameters.values()), weights, allow_unused=True)
    finally:
        torch.set_rng_state(state)
        for part, mode in modes.items():
            part.training = mode
    returned = [(f"the model's output {number}", one.detach()) for number, one in enumerate(outputs)]
    return [*returned, *((f"the gradient of {name}", one) for name, one in zip(parameters, found, strict=True))]


def floats(value: Any) -> Iterator[Tensor]:
    """The float tensors in what a model returns."""
    if isinstance(value, Tensor):
        yield from [value] if value.is_floating_point() else []
    elif isinstance(value, dict):
        yield from (found for one in value.values() for found in floats(one))
    elif isinstance(value, (tuple, list)):
        yield from (found for one in value for found in floats(one))


@contextlib.contextmanager
def everything_kept(observed: Observed) -> Iterator[None]:
    """Within this context the layers of the sites take their steps in ordinary operations."""
    last: list[tuple[Tensor, Tensor, Tensor]] = []  # what the last step returned; that and its input in float64

    def stepping(module: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # nothing is recomputed
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
            out = None if isinstance(output, Tensor) else module.stream_out
            returned = output if out is None else output[out]
            y = rounded(returned.double(), torch.round)
            if goes_on:
                size, sign = gamma.abs(), gamma.sign()
                y = y + sign * (rounded(size * (y - 2 * current), torch.floor) + rounded(size * last[-1][2], torch.floor))
            last[:] = [(y.to(returned.dtype), y, current)]
            return with_item(output, out, last[-1][0])

        return forward

    modules = [site.module for site in observed.sites]
    for module in modules:
        module.__dict__["forward"] = stepping(module)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def rounded(x: Tensor, how: Any) -> Tensor:
    """A whole number of steps, with the gradient of x."""
    return x + (how(x.detach() / STEP) * STEP - x.detach())
