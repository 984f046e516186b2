"""A model to be checked, and what is known of how it came to be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import fx, nn

from retrofit.checks.reference import Probe, Reference
from retrofit.pipeline.protocol import Rewrite
from retrofit.program.capture import Program, capture
from retrofit.program.cost import Cost, cost_of
from retrofit.program.dataflow import backward_slice
from retrofit.surgery.edit import Fate


@dataclasses.dataclass
class Subject:
    """What every check is handed."""

    model: nn.Module
    inputs: dict[str, Any]
    reference: Reference | None  # the dense model
    rewrites: tuple[Rewrite, ...] | None  # None where nobody witnessed them
    fates: dict[str, Fate]  # of the dense parameters; empty without a reference
    exact: bool
    captured: Program | None = None  # where the rewritten model has been captured already
    answers: dict[int, Probe] = dataclasses.field(default_factory=dict)  # to the dense model's probes, once they were asked for
    dense: nn.Module | None = None  # the dense model itself, where it is at hand

    @functools.cached_property
    def program(self) -> Program:
        return self.captured or capture(self.model, self.inputs)

    @functools.cached_property
    def cost(self) -> Cost:
        return cost_of(self.program)

    @functools.cached_property
    def reached(self) -> set[fx.Node]:
        """The nodes of the program that its outputs depend on."""
        return backward_slice(self.program.outputs.values())

    @functools.cached_property
    def first(self) -> Probe:
        """What the model makes of its inputs."""
        return Probe.of(self.model, self.inputs)

    def answer_to(self, probe: Probe) -> Probe:
        """What the model makes of the inputs of one of the dense model's probes; raises what the model's own code raises."""
        if id(probe) not in self.answers:
            self.answers[id(probe)] = Probe.of(self.model, probe.inputs)
        return self.answers[id(probe)]

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by each of their names."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    @functools.cached_property
    def new_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that no dense parameter became; shared ones once."""
        old = {id(self.parameters[fate.name]) for fate in self.fates.values() if fate.name in self.parameters}
        return {name: parameter for name, parameter in self.model.named_parameters() if id(parameter) not in old}

    @property
    def claimed(self) -> int:
        """How many new elements the rewrites say there are."""
        return sum(rewrite.new_parameters - rewrite.superseded for rewrite in self.rewrites or ())

    def site_of(self, name: str) -> str:
        """The innermost rewritten site that a module or parameter lies in, for a message; "" where it lies in none."""
        sites = [site for rewrite in self.rewrites or () for site in rewrite.sites if f"{name}.".startswith(f"{site.name}.")]
        site = max(sites, key=lambda one: len(one.name), default=None)
        return f" (in {site.name}: {site.what})" if site is not None else ""

    def placed(self, name: str) -> str:
        """A name with the site it lies in."""
        return name + self.site_of(name)
