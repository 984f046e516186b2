"""Places of a model that a pass would rewrite, and places that it looked at and leaves alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from retrofit.errors import DoesNotFitError


@dataclasses.dataclass(frozen=True)
class Site:
    """One place that a pass rewrites: the path of the module there and what happens to it."""

    name: str
    what: str


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """One place that a pass leaves alone, and why."""

    name: str  # module path; "" where it is the model as a whole
    why: str
    remedy: str = ""
    in_any_form: bool = False  # whether it would be left alone in the model's graph too: for what is computed there, or an option


@contextlib.contextmanager
def collect_near_miss(name: str, near_misses: list[NearMiss]) -> Iterator[None]:
    """A `DoesNotFitError` raised within this context becomes a near miss called `name`, appended to `near_misses`."""
    try:
        yield
    except DoesNotFitError as error:
        near_misses.append(NearMiss(name, error.why or error.what, error.remedy, error.in_any_form))
