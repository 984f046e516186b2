"""What the layers of a model are handed, seen in captures of it: of the example inputs, and of a larger batch of longer ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.passes.sequence_altup.layer_arguments import Follows, Path, name_arguments, names_of, tensors_in, told
from retrofit.passes.sequence_altup.resizing import larger, length_of
from retrofit.sdk import (
    Call,
    CaptureError,
    Dataflow,
    DoesNotFitError,
    Layer,
    Program,
    accepts,
    capture,
    forward_parameters,
    is_per_token,
    mask_value,
)

Layout = tuple[torch.Size, torch.dtype]
NARROW = torch.int32  # of masks that are to be told from other integers, which are of 64 bits


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the layers were handed in one capture."""

    program: Program
    flow: Dataflow
    batch: int
    length: int  # of the token ids, 0 where there are none
    masks: frozenset[str]  # the inputs that say which tokens are real
    tensors: dict[tuple[str, int], dict[Path, Layout]]  # by layer and call
    objects: dict[str, dict[int | str, str]]  # by layer: arguments that are neither tensors nor plain, and their types

    def shapes(self, layer: Layer) -> dict[Path, torch.Size]:
        return {path: shape for path, (shape, _) in self.tensors.get((layer.name, layer.call), {}).items()}

    def call_of(self, layer: Layer) -> Call:
        return next(call for call in self.program.calls if (call.path, call.index) == (layer.name, layer.call))


class Watch:
    """Captures of `model` on inputs like `examples`, in which the modules at `paths` are watched."""

    def __init__(self, model: nn.Module, examples: Mapping[str, Any], paths: list[str]) -> None:
        self.model, self.examples, self.paths = model, dict(examples), paths
        self.said: dict[tuple[fx.Node, Follows], bool] = {}

    @functools.cached_property
    def first(self) -> Observation:
        """Of the example inputs."""
        return self.observe(self.examples)

    @functools.cached_property
    def larger(self) -> Observation:
        """Of another batch and length; raises `DoesNotFitError` where the model runs on no other."""
        why = ""
        for inputs in larger(self.examples):
            try:
                return self.observe(inputs)
            except CaptureError as error:
                why = error.why or error.what
        raise DoesNotFitError(
            "the model does not run on a larger batch of longer inputs",
            why=f"how what layers are handed follows the tokens is learnt from that, and it fails with {why}",
            remedy="pass example_inputs= in which every extent that follows the number of tokens is that number",
        )

    @functools.cached_property
    def narrow(self) -> Observation | None:
        """Of the example inputs with masks of a type that nothing else has; None where the model takes none such."""
        inputs = self.with_masks(self.examples)
        narrow = {name: value.to(NARROW) if is_mask_name(name) else value for name, value in inputs.items()}
        with contextlib.suppress(CaptureError):
            return self.observed(narrow, frozenset())
        return None

    def tokens_first(self, layer: Layer, stream: Path) -> bool | None:
        """Whether the layer's stream is (tokens, batch, width) and not (batch, tokens, width); None where it is neither."""
        first, second = self.first.shapes(layer)[stream], self.larger.shapes(layer)[stream]
        if len(first) != 3:
            return None
        rows = [dim for dim in (0, 1) if first[dim] * self.larger.batch == second[dim] * self.first.batch]
        if len(rows) == 2:  # tokens and batch grew alike
            rows = [dim for dim in rows if first[dim] == self.first.batch] or rows
        return bool(rows[0]) if rows else None

    def is_mask(self, layer: Layer, path: Path, how: Follows) -> bool:
        """Whether what is in a container, where the graph has no name for it, says which tokens are real."""
        if len(how.positions) == 2:
            return how.rank == 4
        if how.rank != 2 or self.narrow is None:
            return False
        handed = self.narrow.tensors.get((layer.name, layer.call), {}).get(path)
        return handed is not None and handed[1] in (torch.bool, NARROW)

    def says_real(self, node: fx.Node | None, how: Follows) -> bool:
        """Whether a value of the larger capture says of tokens without padding that they are real, in the way that masks do.

        One that is made of tables which have no values, as those of a model that is being loaded, is believed to.
        """
        if node is None or any(table is None or table.is_meta for table in self.tables(node)):
            return True
        if (node, how) not in self.said:
            with torch.device("cpu"):
                value = mask_value(node, self.larger.flow)
            if value is None or value.dim() != how.rank:
                self.said[node, how] = True
            else:
                length = value.shape[how.positions[-1]]
                self.said[node, how] = bool(told(value, how, value.shape[how.batch or 0], 0, length).any())
        return self.said[node, how]

    def tables(self, node: fx.Node | None) -> list[Tensor | None]:
        """The buffers and constants that a value of the larger capture is made of."""
        if node is None:
            return []
        program, flow = self.larger.program, self.larger.flow
        named = {**program.buffers, **program.constants}
        return [program.values.get(name) for one, name in named.items() if one in flow.position and flow.reaches(one, node)]

    def observe(self, inputs: dict[str, Any]) -> Observation:
        """With masks and positions where the model takes any."""
        masked = self.with_masks(inputs)
        masks = frozenset(filter(is_mask_name, masked))
        for given, known in ((self.with_positions(masked), masks), (masked, masks)):
            with contextlib.suppress(CaptureError):
                return self.observed(given, known)
        return self.observed(inputs, frozenset())

    def with_masks(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs, and masks beside the token ids where the model takes any and none is given."""
        known, made = forward_parameters(self.model), dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and is_per_token(value) and name.endswith("input_ids"):
                mask = name.replace("input_ids", "attention_mask")
                if mask in known:
                    made.setdefault(mask, torch.ones(value.shape, dtype=torch.long, device=value.device))
        return made

    def with_positions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs, and positions where the model takes any and none are given."""
        ids = inputs.get("input_ids")
        if ids is None or ids.dim() != 2 or not accepts(self.model, "position_ids"):
            return inputs
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape), **inputs}

    def observed(self, inputs: dict[str, Any], masks: frozenset[str]) -> Observation:
        tensors: dict[tuple[str, int], dict[Path, Layout]] = {}
        objects: dict[str, dict[int | str, str]] = {}
        counts: dict[str, int] = {}

        def note(path: str, names: tuple[str, ...]) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                call = counts.get(path, 0)
                counts[path] = call + 1
                found: dict[Path, Layout] = {}
                for name, value in name_arguments(args, kwargs, names):
                    try:
                        found.update((where, (one.shape, one.dtype)) for where, one in tensors_in(value, (name,)))
                    except DoesNotFitError:
                        objects.setdefault(path, {})[name] = type(value).__name__
                tensors[path, call] = found

            return hook

        def begin(module: nn.Module, args: Any) -> None:
            """What an attempt at the capture saw that came to nothing is forgotten."""
            for table in (tensors, objects, counts):
                table.clear()

        handles = [self.model.register_forward_pre_hook(begin)]
        for path in self.paths:
            module = self.model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(note(path, names_of(module)), with_kwargs=True))
        try:
            program = capture(self.model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        given = [value for value in inputs.values() if isinstance(value, Tensor)]
        batch = next(int(value.shape[0]) for value in given if value.dim())
        return Observation(program, Dataflow(program), batch, length_of(inputs), masks, tensors, objects)


def is_mask_name(name: str) -> bool:
    return name.endswith("attention_mask")
