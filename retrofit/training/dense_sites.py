"""The rewritten sites of a model next to the dense modules that they replaced: both see the same arguments.

    align    every site returns what the dense module returns, and how far its own result is from that is recorded. So every later
             site sees the dense model's own activations, and no gradient passes from one site to another.
    anneal   every site returns (1 − λ) dense(x) + λ new(x): the dense model at λ = 0, bit for bit, the rewritten one at λ = 1.
             A site with a dial of its pass's own is turned to λ instead, once its parameters have the dense values.

Hooks do it, so no module, name or parameter of the model changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrofit.pipeline.corresponding_sites import CorrespondingSite
from retrofit.pipeline.protocol import Dial
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.recorded_calls import float_tensors
from retrofit.runtime.weighted_errors import token_weights

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@dataclasses.dataclass(frozen=True)
class DenseSite:
    """A site of the rewritten model, and the dense module, which is frozen and in evaluation mode."""

    name: str
    module: nn.Module
    dense: nn.Module
    dial: Dial | None = None

    @torch.no_grad()
    def dense_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the dense module returns for the arguments of a call of the site."""
        return self.dense(*args, **known_keywords(self.dense, kwargs))

    def with_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, and a gradient passes through it to the arguments."""
        return self.dense(*args, **known_keywords(self.dense, kwargs))


class DenseSites:
    """The sites of a rewritten model that have a dense module to learn from."""

    def __init__(self, model: nn.Module, dense: nn.Module, sites: Sequence[CorrespondingSite]) -> None:
        self.model = model
        self.sites = [
            DenseSite(one.rewritten, model.get_submodule(one.rewritten), dense.get_submodule(one.dense), one.dial) for one in sites
        ]
        self.dialled: dict[str, Dial] = {}  # by the names of the sites that are turned by a dial of their own

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the sites, each once."""
        found = {id(parameter): parameter for site in self.sites for parameter in site.module.parameters()}
        yield from found.values()

    def replace(self, module: nn.Module) -> bool:
        """Whether a site is this module, or lies in it."""
        inside = {id(one) for one in module.modules()}
        return any(id(site.module) in inside for site in self.sites)

    @contextlib.contextmanager
    def aligning(self, training: bool = True) -> Iterator[list[Tensor]]:
        """Within this context sites return what the dense modules do; the list receives the squared error of each of their calls.

        What lies between the sites, or around one of them, evaluates; the sites themselves train, where `training`. Both last
        until the gradients are computed, where layers are computed again for them.
        """
        errors: list[Tensor] = []

        def hook_of(site: DenseSite) -> Hook:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
                expected = site.dense_output(args, kwargs)
                errors.append(squared_error(output, expected, float_tensors((args, kwargs))))
                return expected

            return hook

        with evaluation_mode(self.model):
            for site in self.sites:
                if training and not any(self.replace(child) for child in site.module.children()):
                    site.module.train()
            with self.hooked(hook_of, self.sites):
                yield errors

    @contextlib.contextmanager
    def mixed(self, share: float) -> Iterator[None]:
        """Within this context sites return (1 − share) dense(x) + share new(x), or are turned to `share` by their own dials.

        It lasts until the gradients are computed, where layers are computed again for them.
        """

        def hook_of(site: DenseSite) -> Hook:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
                return mixture(site.with_gradient(args, kwargs), output, share)

            return hook

        turned = [(site.module, self.dialled[site.name]) for site in self.sites if site.name in self.dialled]
        mixed = [site for site in self.sites if site.name not in self.dialled]
        try:
            for module, dial in turned:
                dial.turn(module, share)
            with self.hooked(hook_of, mixed) if share < 1 else contextlib.nullcontext():
                yield
        finally:
            for module, dial in turned:
                dial.turn(module, 1.0)

    def errors(self, run: Callable[[], Any]) -> dict[str, float]:
        """How far each site is from the dense module, relative to its size, for the calls that are made in `run`."""
        found: dict[str, float] = {}

        def hook_of(site: DenseSite) -> Hook:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
                error = squared_error(output, site.dense_output(args, kwargs), float_tensors((args, kwargs)))
                found[site.name] = max(found.get(site.name, 0.0), float(error) ** 0.5)

            return hook

        with torch.no_grad(), evaluation_mode(self.model), self.hooked(hook_of, self.sites):
            run()
        return found

    @contextlib.contextmanager
    def hooked(self, hook_of: Callable[[DenseSite], Hook], sites: Sequence[DenseSite]) -> Iterator[None]:
        handles = [site.module.register_forward_hook(hook_of(site), with_kwargs=True) for site in sites]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def known_keywords(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a module's forward takes: a pass may have added others."""
    parameters = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def squared_error(found: Any, expected: Any, inputs: Sequence[Tensor]) -> Tensor:
    """How far the first tensor of an output is from the expected one, relative to its size, no token deciding by its length.

        Σ_t w_t ‖found_t − y_t‖² / Σ_t w_t ‖r_t‖²        w as in `weighted_errors`, of r

    r is y, or, where the module returns one of its inputs x and adds to it, what it adds: y − x.
    """
    one, y = (rows_of(float_tensors(value)[0]) for value in (found, expected))
    streams = [rows_of(value) for value in inputs if value.dim() > 1]
    added = [y] + [y - x for x in streams if x.shape == y.shape]
    r = min(added, key=lambda each: float(token_weights(each) @ each.detach().square().sum(-1)))
    weights = token_weights(r)
    missed = (one - y).square().sum(-1) @ weights
    return missed / (r.square().sum(-1) @ weights).clamp_min(torch.finfo(torch.float32).tiny)


def rows_of(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]).float()


def mixture(dense: Any, new: Any, share: float) -> Any:
    """The floating-point tensors of two outputs of one structure, mixed; everything else as in the new one."""
    theirs, spec = pytree.tree_flatten(dense)
    ours, same = pytree.tree_flatten(new)
    if spec != same:
        return pytree.tree_unflatten([torch.lerp(float_tensors(dense)[0], float_tensors(new)[0], share), *ours[1:]], same)
    mixed = [
        torch.lerp(one, other, share) if isinstance(one, Tensor) and one.is_floating_point() else other
        for one, other in zip(theirs, ours, strict=True)
    ]
    return pytree.tree_unflatten(mixed, spec)
