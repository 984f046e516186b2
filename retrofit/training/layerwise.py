"""The rewritten sites of a model next to the dense modules that they replaced, called with the same arguments.

    align    every site returns the dense module's output, and the distance of its own output is recorded: every later
             site sees the dense model's activations, and no gradient passes from one site to another.
    anneal   every site returns (1 − λ) dense(x) + λ new(x): the dense model at λ = 0, bit for bit, the rewritten one at λ = 1.
             A site whose pass has a dial is turned to λ instead, once its parameters have the dense values.

Hooks do it: no module, name or parameter of the model changes.

The residual stream after every layer of the rewritten model, next to that after the same layer of the dense one.

The layers are those of the dense model's anatomy. In the rewritten model a layer is the module at its path, wrappers included, if
it returns a stream of the dense shape. If it returns a wider stream (AltUp's blocks), it is the dense layer inside, whose output is
the part of the wide stream that it computes (of two streams, the newer one).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrofit.anatomy.inspection import inspect
from retrofit.anatomy.parts import NoStream
from retrofit.errors import TrainingError
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.module_calls import float_tensors, watched
from retrofit.numerics.distances import squared_weighted_error, token_weights
from retrofit.passbase.protocol import Dial
from retrofit.passbase.replaying import CorrespondingSite
from retrofit.surgery.wrappers import item_at


@dataclasses.dataclass(frozen=True, eq=False)
class DenseSite:
    """A site of the rewritten model and the dense module, frozen and in evaluation mode."""

    name: str
    module: nn.Module
    dense: nn.Module
    dial: Dial | None = None

    def dense_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the dense module for the arguments of a call of the site."""
        return self.dense(*args, **known_keywords(self.dense, kwargs))


class DenseSites:
    """The sites of a rewritten model that replace a dense module."""

    def __init__(self, model: nn.Module, dense: nn.Module, sites: Sequence[CorrespondingSite]) -> None:
        self.model = model
        self.sites = [
            DenseSite(site.rewritten, model.get_submodule(site.rewritten), dense.get_submodule(site.dense), site.dial)
            for site in sites
        ]
        self.dialled: dict[str, Dial] = {}  # by site, if its pass has a dial

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the sites, each once."""
        found = {id(parameter): parameter for site in self.sites for parameter in site.module.parameters()}
        yield from found.values()

    def replace(self, module: nn.Module) -> bool:
        """Return whether the module is a site or part of one."""
        inside = {id(part) for part in module.modules()}
        return any(id(site.module) in inside for site in self.sites)

    @contextlib.contextmanager
    def aligning(self, training: bool = True) -> Iterator[list[Tensor]]:
        """Return the dense outputs from all sites within this context; the squared error of each call is appended to the list.

        Modules between and around the sites are in evaluation mode; the sites are in training mode if `training`. Keep the context
        open until the gradients are computed, because layers may be recomputed for them.
        """
        errors: list[Tensor] = []

        def align(site: DenseSite, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            with torch.no_grad():
                expected = site.dense_output(args, kwargs)
            errors.append(squared_error(output, expected, float_tensors((args, kwargs))))
            return expected

        with evaluation_mode(self.model):
            for site in self.sites:
                if training and not any(self.replace(child) for child in site.module.children()):
                    site.module.train()
            with watched({site: site.module for site in self.sites}, after=align):
                yield errors

    @contextlib.contextmanager
    def mixed(self, share: float) -> Iterator[None]:
        """Return (1 − share) dense(x) + share new(x) from the sites within this context, or turn them to `share` by their own
        dials.

        Keep the context open until the gradients are computed, because layers may be recomputed for them.
        """

        def mix(site: DenseSite, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            return mixture(site.dense_output(args, kwargs), output, share)

        turned = [(site.module, self.dialled[site.name]) for site in self.sites if site.name in self.dialled]
        mixed = {site: site.module for site in self.sites if site.name not in self.dialled}
        try:
            for module, dial in turned:
                dial.turn(module, share)
            with watched(mixed, after=mix) if share < 1 else contextlib.nullcontext():
                yield
        finally:
            for module, dial in turned:
                dial.turn(module, 1.0)

    def errors(self, run: Callable[[], Any]) -> dict[str, float]:
        """Return the relative distance of each site from its dense module over the calls in `run`."""
        found: dict[str, float] = {}

        def measure(site: DenseSite, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            error = squared_error(output, site.dense_output(args, kwargs), float_tensors((args, kwargs)))
            found[site.name] = max(found.get(site.name, 0.0), float(error) ** 0.5)

        modules = {site: site.module for site in self.sites}
        with torch.no_grad(), evaluation_mode(self.model), watched(modules, after=measure):
            run()
        return found


def known_keywords(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a module's forward; a pass may have added others to a call."""
    parameters = signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def squared_error(found: Any, expected: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Return the squared error of the first tensor of an output, relative to the expected one; no long token dominates.

        Σ_t w_t ‖found_t − y_t‖² / Σ_t w_t ‖r_t‖²        w as in `numerics.distances`, of r

    r is y or, if the module adds to one of its inputs x, the addend: y − x.
    """
    output, y = (rows_of(float_tensors(value)[0]) for value in (found, expected))
    streams = [rows_of(value) for value in inputs if value.dim() > 1]
    references = [y, *(y - x for x in streams if x.shape == y.shape)]
    r = min(references, key=lambda reference: float(token_weights(reference) @ reference.detach().square().sum(-1)))
    return squared_weighted_error(output, y, r)


def rows_of(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]).float()


def mixture(dense: Any, new: Any, share: float) -> Any:
    """Return the mixture of the floating-point tensors of two outputs of one structure; everything else is the new output's."""
    dense_leaves, dense_spec = pytree.tree_flatten(dense)
    leaves, spec = pytree.tree_flatten(new)
    if dense_spec != spec:
        return pytree.tree_unflatten([torch.lerp(float_tensors(dense)[0], float_tensors(new)[0], share), *leaves[1:]], spec)
    mixed = [
        torch.lerp(dense_leaf, leaf, share) if isinstance(dense_leaf, Tensor) and dense_leaf.is_floating_point() else leaf
        for dense_leaf, leaf in zip(dense_leaves, leaves, strict=True)
    ]
    return pytree.tree_unflatten(mixed, spec)


@dataclasses.dataclass(frozen=True)
class LayerPair:
    """A layer of the dense model and the modules that contain its part in the rewritten one, the outermost first."""

    dense: nn.Module
    rewritten: tuple[nn.Module, ...]
    stream: int | str | None  # index or key of the stream in the layer's output; None: the output itself

    def stream_of(self, output: Any) -> Tensor | None:
        value = item_at(output, self.stream)
        return value if isinstance(value, Tensor) else None


class HiddenStates:
    """The layers of a dense model that the rewritten one still has."""

    def __init__(self, dense: nn.Module, layers: tuple[LayerPair, ...]) -> None:
        self.dense, self.layers = dense, layers

    @staticmethod
    def of(student: nn.Module, dense: nn.Module, places: Mapping[str, str]) -> HiddenStates:
        """Return the corresponding layers of `student`; `places` maps modules of the dense model to their present places.

        Raises `TrainingError` if no layer is a module.
        """
        modules, found = dict(student.named_modules()), {}
        for layer in inspect(dense).layers:
            if layer.name and not isinstance(layer.stream_out, NoStream):
                paths = dict.fromkeys((layer.name, places.get(layer.name, layer.name)))
                rewritten = tuple(modules[path] for path in paths if path in modules)
                found[layer.name] = LayerPair(dense.get_submodule(layer.name), rewritten, layer.stream_out)
        pairs = tuple(pair for pair in found.values() if pair.rewritten)
        if not pairs:
            why = "no module of the dense model takes its residual stream and returns it, or none is left"
            raise refusal("no layer of the model corresponds to one of the teacher", why)
        return HiddenStates(dense, pairs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[RecordedStreams]:
        """Record the streams of both models within this context: the dense one's when it is called as a whole."""
        record = RecordedStreams(self)
        with contextlib.ExitStack() as stack:
            stack.enter_context(watched({"": self.dense}, before=record.begin_teacher, after=record.end_teacher))
            for pair in self.layers:
                stack.enter_context(watched({pair: pair.dense}, after=functools.partial(record.record, True)))
                for layer in pair.rewritten:
                    stack.enter_context(watched({pair: layer}, after=functools.partial(record.record, False)))
            yield record


class RecordedStreams:
    """The streams after each layer call of the student and of the teacher, which is called once or once a window."""

    def __init__(self, states: HiddenStates) -> None:
        self.states = states
        self.found: dict[int, list[Tensor]] = {}  # by the module
        self.teaching = False  # whether the teacher is running
        self.forwards = 0  # of the teacher

    def begin_teacher(self, *call: Any) -> None:
        self.teaching = True
        self.forwards += 1

    def end_teacher(self, *call: Any) -> None:
        self.teaching = False

    def record(self, of_teacher: bool, pair: LayerPair, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stream = pair.stream_of(output)
        if stream is not None and of_teacher == self.teaching:
            self.found.setdefault(id(layer), []).append(stream)

    def error(self) -> Tensor:
        """Return the mean over the layers of their squared error relative to the dense stream, weighted as for aligning sites."""
        errors = [self.error_of(pair) for pair in self.states.layers]
        comparable = [error for error in errors if error is not None]
        if not comparable:
            why = "the streams have another width or length, and no dense layer is left inside"
            raise refusal("no layer returns a stream of the shape that the teacher's has", why)
        return torch.stack(comparable).mean()

    def error_of(self, pair: LayerPair) -> Tensor | None:
        """Return the error of one layer over all its calls; None if the student computes no stream of that shape."""
        windows = self.found.get(id(pair.dense), [])
        calls = len(windows) // max(1, self.forwards)
        expected = [torch.cat(windows[call::calls]) for call in range(calls)]  # the same call in every forward
        around: list[Tensor] = []
        for layer in pair.rewritten:
            streams = self.found.get(id(layer), [])
            if streams and [stream.shape for stream in streams] == [tensor.shape for tensor in expected]:
                if len(around) == len(streams):
                    streams = list(map(with_gradient, streams, around))
                errors = [squared_error(stream, y.to(stream.device), ()) for stream, y in zip(streams, expected, strict=True)]
                return torch.stack(errors).mean()
            around = streams
        return None


def with_gradient(stream: Tensor, around: Tensor) -> Tensor:
    """Return the stream with its graph; if a recomputed layer left it without, take it from the output of the module `around`.

    Raises `TrainingError` if no part of that output is this stream.
    """
    if not (stream.requires_grad and stream.grad_fn is None):
        return stream
    parts = around.split(stream.shape[-1], -1)
    found = next((part for part in parts if part.shape == stream.shape and torch.equal(part, stream)), None)
    if found is None:
        why = "the layer is recomputed in the backward pass, and its wrapper returns another stream"
        raise refusal("the stream after a layer has no gradient", why, code="no-gradient")
    return found


def refusal(problem: str, why: str, code: str = "no-stream") -> TrainingError:
    """Return the error for hidden states that cannot be distilled."""
    return TrainingError(f"--distil-hidden: {problem}", why=why, remedy="drop --distil-hidden", option="distil_hidden", code=code)
