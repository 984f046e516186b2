"""The record in a rewritten model, apart from weights: the rewrites, and the inputs of its capture.

It is one attribute of the model, so copies and pickles contain it, and the state dict does not. It is never changed in place;
undoing an edit restores the earlier object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTRIBUTE = "retrofit_provenance"
BEFORE = "retrofit_"  # prefix of the attributes on models pickled by earlier versions, one per field


@dataclasses.dataclass(frozen=True, eq=False)
class Provenance:
    """The history of a model; `Provenance()` for a dense model of modules."""

    recipe: tuple[str, ...] = ()  # the specs of the applied passes
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what they were applied to (`applied_to`)
    inputs: Mapping[str, Any] | None = None  # descriptions of the given example inputs; None if they are inferred
    rewrites: tuple[Any, ...] | None = None  # the account of each pass (`Rewrite`); None if unknown
    rearranged: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # dense parameter → its `Fate`, if in another layout
    added: frozenset[str] | None = None  # the names of the parameters that passes added; None if unknown
    dense: Any = None  # the `DenseGraph` that a rewritten graph module was made from
    examples: Mapping[str, Tensor] | None = None  # the inputs that a graph module was captured with, by argument name

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is recorded."""
        return not self.recipe and not self.record and not self.rearranged and self.known == ()

    @property
    def known(self) -> tuple[str, ...]:
        """Return the fields that may be unknown and are known."""
        return tuple(name for name in ("inputs", "rewrites", "added", "dense", "examples") if getattr(self, name) is not None)


def provenance_of(model: nn.Module) -> Provenance:
    """Return the record on `model`, or the one that a wrapper forwards from the model inside."""
    found = getattr(model, ATTRIBUTE, None)
    if isinstance(found, Provenance):
        return found
    names = (field.name for field in dataclasses.fields(Provenance))
    return Provenance(**{name: vars(model)[BEFORE + name] for name in names if BEFORE + name in vars(model)})


def record_provenance(model: nn.Module, **changes: Any) -> None:
    """Set these fields of the record on `model`."""
    now = dataclasses.replace(provenance_of(model), **changes)
    vars(model).pop(ATTRIBUTE, None) if now.is_empty else vars(model).update({ATTRIBUTE: now})


def describe_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names, types and shapes of the tensors of a capture, in the form of `Provenance.inputs`.

    A tensor is described as `[dtype, [extent, …]]`, a container of tensors as `{"entries": {key: …}}` or `{"items": […, …]}`.
    """
    described = {name: describe_input(value) for name, value in inputs.items()}
    return {name: description for name, description in described.items() if description is not None}


def describe_input(value: Any) -> Any:
    """Return the description of one input; None for a value that contains anything but tensors."""
    if hasattr(value, "shape"):
        return [str(value.dtype).removeprefix("torch."), [int(size) for size in value.shape]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        entries = {key: describe_input(item) for key, item in value.items()}
        return {"entries": entries} if entries and None not in entries.values() else None
    if type(value) in (tuple, list):
        items = [describe_input(item) for item in value]
        return {"items": items} if items and None not in items else None
    return None
