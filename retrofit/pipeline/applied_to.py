"""What a recipe was applied to, kept with it: where it is replayed on something else, that is known, and refused where it matters.

The record has what each pass found (its sites by name, which parameters were one, the sizes of the stacks) and, of a transformers
model, the dense config. It is plain data:

    {"config": {…}, "passes": [{"sites": ["layers.0", …], "ties": [["a.weight", "b.weight"]], "stacks": [["decoder", 4, 64, 8]]}]}
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrofit.errors import CheckpointError, first_few
from retrofit.surgery.transformers_bookkeeping import shared_names

if TYPE_CHECKING:
    from torch import nn

    from retrofit.anatomy.anatomy import Anatomy

Names = tuple[str, ...]
Stacks = tuple[tuple[str, int, int, int | None], ...]


@dataclasses.dataclass(frozen=True)
class AppliedTo:
    """What one pass was applied to."""

    sites: Names = ()  # module paths at that time
    ties: tuple[Names, ...] = ()  # the names of every parameter that had several
    stacks: Stacks = ()  # kind, layers, width, heads

    @classmethod
    def found(cls, anatomy: Anatomy, sites: Sequence[str], ties: Sequence[Sequence[str]]) -> AppliedTo:
        """Return the record of a pass that rewrote `sites` of what `anatomy` was read from."""
        stacks = tuple((stack.kind, len(stack.layers), stack.width, heads_of(stack)) for stack in anatomy.stacks)
        return cls(tuple(sites), tuple(map(tuple, ties)), stacks)

    @classmethod
    def from_dict(cls, data: Any) -> AppliedTo:
        """Return the record from plain data; raise `CheckpointError` where it is not as `to_dict` writes it."""
        try:
            stacks = tuple((str(kind), int(layers), int(width), heads) for kind, layers, width, heads in data["stacks"])
            return cls(tuple(map(str, data["sites"])), tuple(tuple(map(str, names)) for names in data["ties"]), stacks)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                "the record of what the recipe was applied to cannot be read",
                why=f"{type(error).__name__}: {error}",
                remedy="save the model again with retrofit.save",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {"sites": list(self.sites), "ties": list(map(list, self.ties)), "stacks": list(map(list, self.stacks))}

    def require_same(self, other: AppliedTo, spec: str) -> None:
        """Raise `CheckpointError` where the sites or stacks of `other`, found on replaying `spec`, are not these."""
        if self.stacks != other.stacks:
            why = f"its stacks are {described(other.stacks)}; the recipe was applied to {described(self.stacks)}"
        elif sorted(self.sites) != sorted(other.sites):
            missing = [name for name in self.sites if name not in other.sites]
            more = [name for name in other.sites if name not in self.sites]
            why = "; ".join(
                f"{what}: {first_few(names)}"
                for what, names in (("no longer rewritten", missing), ("not rewritten before", more))
                if names
            )
        else:
            return
        raise CheckpointError(
            f"the model is not the one that {spec} was applied to",
            why=why,
            remedy="load it with the class, config and retrofit version it was saved with",
        )


def heads_of(stack: Any) -> int | None:
    """Return the number of heads of the stack's first attention, None where it has none."""
    return next((branch.heads for layer in stack.layers for branch in layer.attentions), None)


def described(stacks: Stacks) -> str:
    return ", ".join(f"{kind} of {layers} layers, {width} wide, {heads or 'no'} heads" for kind, layers, width, heads in stacks)


def passes_of(record: Mapping[str, Any] | None) -> tuple[AppliedTo, ...]:
    """Return what each pass of a stored record was applied to; empty where nothing was recorded."""
    passes = (record or {}).get("passes", [])
    return tuple(map(AppliedTo.from_dict, passes if isinstance(passes, list) else [passes]))


def tie_as(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Make the parameters of each group of names one, and all others apart; unknown names are passed over."""
    named = dict(model.named_parameters(remove_duplicate=False))
    wanted = [[name for name in group if name in named] for group in groups]
    if sorted(map(sorted, filter(lambda group: len(group) > 1, wanted))) == sorted(map(sorted, shared_names(iter(named.items())))):
        return
    for names in shared_names(iter(named.items())):
        for name in names[1:]:
            named[name] = copy.deepcopy(named[name])
            assign(model, name, named[name])
    for first, *others in filter(None, wanted):
        for name in others:
            assign(model, name, named[first])


def assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put `parameter` in the place of the model's parameter `name`; as it is, whatever hooks into registering parameters."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter
