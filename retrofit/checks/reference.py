"""What the checks measured on a dense model, so that its rewriting in place can be verified afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from retrofit.checks.finding import Raised, attempt
from retrofit.checks.registry import CHECKS, watches
from retrofit.checks.subject import Subject, other_shapes
from retrofit.errors import RetrofitError
from retrofit.files.memory import release_freed_memory
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.optional_inputs import adds_arguments, with_optional
from retrofit.inputs.probes import describe, distinct_lengths
from retrofit.passbase.replaying import recipe
from retrofit.program.program import Program


@dataclasses.dataclass(frozen=True)
class Reference:
    """The measurements of a dense model, a few megabytes; its weights are not kept."""

    shapes: tuple[dict[str, Any], ...]  # the inputs it was measured on, those of other shapes, those with optional arguments
    measurements: Mapping[str, Any]  # by check; None where the model cannot do what is measured
    is_large: bool | None = None
    recipe: tuple[str, ...] = ()  # the passes that had rewritten it already

    @staticmethod
    def of(
        model: nn.Module,
        example_inputs: Any = None,
        program: Program | None = None,
        *,
        checks: Collection[str] = tuple(CHECKS),
        optional: bool | None = None,
    ) -> Reference:
        """What the named checks measure on `model` now, in a dozen passes over a few dozen tokens; `program` spares the capture.

        With `optional`, if None where the example inputs are derived, also on inputs with the images, films and sound that the
        model reads beside its text. Raises `RetrofitError` where the model does not run on the example inputs.
        """
        inputs = distinct_lengths(model, named_inputs(model, example_inputs))
        more = with_optional(model, inputs) if (example_inputs is None if optional is None else optional) else ()
        subject = runnable_subject(model, inputs, program, checks, more)
        measurements = {}
        for name in (one for one in CHECKS if one in checks):
            with preserve_state(model):
                found = attempt(CHECKS[name].measure, subject)
            if subject.is_large:
                release_freed_memory()
            measurements[name] = None if isinstance(found, Raised) else found  # the rewritten model need not do it either
        return Reference(subject.shapes, measurements, subject.is_large, tuple(one.spec() for one in recipe(model) or ()))

    @property
    def inputs(self) -> dict[str, Any]:
        return self.shapes[0]

    @property
    def optional(self) -> tuple[dict[str, Any], ...]:
        """The inputs with arguments that the first leave out."""
        return tuple(one for one in self.shapes if adds_arguments(one, self.inputs))

    def __getitem__(self, check: str) -> Any:
        """What that check measured; None where it could not, and for a check that runs on request only."""
        return self.measurements.get(check)


def runnable_subject(
    model: nn.Module,
    inputs: dict[str, Any],
    program: Program | None,
    checks: Collection[str] = tuple(CHECKS),
    optional: Sequence[dict[str, Any]] = (),
) -> Subject:
    """The model with the shapes of inputs that it runs on; raises `RetrofitError` where the example inputs are not among them."""
    subject = Subject(model, (inputs, *other_shapes(model, inputs), *optional), program)
    subject.watches = watches(subject, names=checks)
    with preserve_state(model):
        runs = [attempt(subject.run, shape) for shape in range(len(subject.shapes))]
    if isinstance(runs[0], Raised):
        raise RetrofitError(
            f"{type(model).__name__} does not run on {describe(inputs)}",
            why=runs[0].error,
            remedy="pass example_inputs= that its forward accepts",
            code="does-not-run",
        )
    shapes = {shape: one for shape, one in enumerate(runs) if not isinstance(one, Raised)}
    chosen, made = tuple(subject.shapes[shape] for shape in shapes), dict(enumerate(shapes.values()))
    return Subject(model, chosen, program, made, watched=subject.watched)
