"""How a model under verification came to be: what was rewritten in it, and where the dense parameters went."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import torch
from torch import nn

from retrofit.checks.subject import Subject
from retrofit.inputs.calibration import Calibration
from retrofit.numerics.agreement import LIMIT
from retrofit.passbase.protocol import Rewrite
from retrofit.surgery.edit import Fate


@dataclasses.dataclass
class Context:
    """What a check may know of the model under verification apart from its own measurements."""

    subject: Subject
    has_reference: bool  # whether there is a dense model to compare with
    rewrites: tuple[Rewrite, ...] | None = None  # None where their account is lost
    fates: dict[str, Fate] = dataclasses.field(default_factory=dict)  # of the dense parameters; empty without a reference
    exact: bool = True  # whether the model is to compute the dense function
    reads_ahead: bool = False  # whether later tokens change earlier outputs of the dense model, for every input of it
    dense: nn.Module | None = None  # the dense model itself, where it is at hand
    fresh: bool = False  # whether it has just been rewritten, so that nothing has moved from its start
    calibration: Calibration | None = None  # the data that passes were fitted on
    dense_parameters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of one just rewritten: the old values

    @property
    def calibrated(self) -> bool:
        """Whether passes were fitted on calibration data."""
        return self.calibration is not None

    @functools.cached_property
    def new_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that no dense parameter became; shared ones once."""
        parameters = self.subject.parameters
        old = {id(parameters[fate.name]) for fate in self.fates.values() if fate.name in parameters}
        return {name: parameter for name, parameter in self.subject.model.named_parameters() if id(parameter) not in old}

    @property
    def exact_limit(self) -> float:
        """How far the outputs of an exact rewrite may lie from the dense model's in float64.

        A weight that holds a multiple of a dense one is rounded in its own dtype, but for powers of two; also for the
        fractions among these where the numbers of float16 end.
        """
        precision = torch.finfo(self.subject.arithmetic.stored)
        scales = {fate.scale for fate in self.fates.values()}
        if any(abs(math.frexp(scale)[0]) != 0.5 for scale in scales):
            return 4 * precision.eps
        if precision.bits == 16 and any(abs(scale) < 1 for scale in scales):
            return max(LIMIT, 4 * precision.tiny * precision.eps)
        return LIMIT

    @property
    def claimed(self) -> int:
        """How many new elements the rewrites claim."""
        return sum(rewrite.new_parameters - rewrite.superseded for rewrite in self.rewrites or ())

    def site_of(self, name: str) -> str:
        """The innermost rewritten site that a module or parameter lies in, for a message; "" where it lies in none."""
        sites = [site for rewrite in self.rewrites or () for site in rewrite.sites if f"{name}.".startswith(f"{site.name}.")]
        site = max(sites, key=lambda one: len(one.name), default=None)
        return f" (in {site.name}: {site.what})" if site is not None else ""

    def place(self, name: str) -> str:
        """A name with the site it lies in."""
        return name + self.site_of(name)
