"""The residual stream after every layer of the rewritten model, next to that after the same layer of the dense one.

The layers are those of the dense model's anatomy. In the rewritten model a layer is the module at its path, with all that was put
around it, where that returns a stream of the dense shape. Where it returns a wider one (AltUp's blocks), it is the dense layer
inside: its result is the part of the wide stream that it computed (of two streams, the newer one).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.anatomy.inspection import inspect
from retrofit.anatomy.parts import NoStream
from retrofit.errors import TrainingError
from retrofit.training.dense_sites import squared_error


@dataclasses.dataclass(frozen=True)
class LayerPair:
    """A layer of the dense model, and where its part is computed in the rewritten one: the outermost module first."""

    name: str
    dense: nn.Module
    rewritten: tuple[nn.Module, ...]
    stream: int | str | None  # index or key of the stream in what the layer returns, None: the returned value itself

    def stream_of(self, output: Any) -> Tensor | None:
        value = output if self.stream is None or isinstance(output, Tensor) else output[self.stream]
        return value if isinstance(value, Tensor) else None


class HiddenStates:
    """The layers of a dense model that the rewritten one still has."""

    def __init__(self, dense: nn.Module, layers: tuple[LayerPair, ...]) -> None:
        self.dense, self.layers = dense, layers

    @staticmethod
    def of(student: nn.Module, dense: nn.Module, places: Mapping[str, str]) -> HiddenStates:
        """Those of `student`; `places` says where a module of the dense model is now.

        Raises `TrainingError` where no layer is a module.
        """
        modules, found = dict(student.named_modules()), {}
        for layer in inspect(dense).layers:
            if layer.name and not isinstance(layer.stream_out, NoStream):
                paths = dict.fromkeys((layer.name, places.get(layer.name, layer.name)))
                now = tuple(modules[path] for path in paths if path in modules)
                found[layer.name] = LayerPair(layer.name, dense.get_submodule(layer.name), now, layer.stream_out)
        pairs = tuple(pair for pair in found.values() if pair.rewritten)
        if not pairs:
            raise TrainingError(
                "--distil-hidden: the model has no layer that corresponds to one of the teacher",
                why="no module of the dense model takes its residual stream and returns it, or none is left",
                remedy="leave out --distil-hidden",
            )
        return HiddenStates(dense, pairs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[RecordedStreams]:
        """Within this context the streams of both models are recorded: the dense one's where it is called as a whole."""
        record = RecordedStreams(self)
        handles = [
            self.dense.register_forward_pre_hook(lambda module, args: record.teach(True)),
            self.dense.register_forward_hook(lambda module, args, output: record.teach(False)),
        ]
        for pair in self.layers:
            handles.append(pair.dense.register_forward_hook(record.hook(pair, pair.dense, of_teacher=True)))
            handles += [one.register_forward_hook(record.hook(pair, one, of_teacher=False)) for one in pair.rewritten]
        try:
            yield record
        finally:
            for handle in handles:
                handle.remove()


class RecordedStreams:
    """The streams after each call of the layers: of the teacher, which is called once or once a window, and of the student."""

    def __init__(self, states: HiddenStates) -> None:
        self.states = states
        self.found: dict[int, list[Tensor]] = {}  # by the module
        self.teaching = False
        self.forwards = 0  # of the teacher

    def teach(self, begins: bool) -> None:
        self.teaching = begins
        self.forwards += begins

    def hook(self, pair: LayerPair, layer: nn.Module, *, of_teacher: bool) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            stream = pair.stream_of(output)
            if stream is not None and of_teacher == self.teaching:
                self.found.setdefault(id(layer), []).append(stream)

        return record

    def error(self) -> Tensor:
        """The mean over the layers of their squared error relative to the dense stream, as sites are aligned by."""
        errors = [self.error_of(pair) for pair in self.states.layers]
        comparable = [one for one in errors if one is not None]
        if not comparable:
            raise TrainingError(
                "--distil-hidden: no layer returns a stream of the shape that the teacher's has",
                why="the streams are wider or shorter, and no dense layer is left inside",
                remedy="leave out --distil-hidden",
            )
        return torch.stack(comparable).mean()

    def error_of(self, pair: LayerPair) -> Tensor | None:
        """That of one layer, all its calls; None where the student computes nothing of that shape."""
        windows = self.found.get(id(pair.dense), [])
        calls = len(windows) // max(1, self.forwards)
        expected = [torch.cat(windows[call::calls]) for call in range(calls)]  # a call of every forward
        around: list[Tensor] = []
        for layer in pair.rewritten:
            streams = self.found.get(id(layer), [])
            if streams and [one.shape for one in streams] == [one.shape for one in expected]:
                if len(around) == len(streams):
                    streams = [with_gradient(*both) for both in zip(streams, around, strict=True)]
                both = zip(streams, expected, strict=True)
                return torch.stack([squared_error(one, other.to(one.device), ()) for one, other in both]).mean()
            around = streams
        return None


def with_gradient(stream: Tensor, around: Tensor) -> Tensor:
    """The same stream; where a layer that is computed again in the backward pass left it without a graph, as a part of `around`.

    That is what the module around the layer returned. Raises `TrainingError` where no part of it is this stream.
    """
    if not (stream.requires_grad and stream.grad_fn is None):
        return stream
    parts = around.split(stream.shape[-1], -1)
    found = next((one for one in parts if one.shape == stream.shape and torch.equal(one, stream)), None)
    if found is None:
        raise TrainingError(
            "--distil-hidden: the stream after a layer has no gradient",
            why="the layer is computed again in the backward pass, and what is around it returns another stream",
            remedy="leave out --distil-hidden",
        )
    return found
