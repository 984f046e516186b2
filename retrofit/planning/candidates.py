"""The passes and settings that a plan chooses from: those named, else those that the installed passes propose."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from retrofit.errors import PlanningError
from retrofit.passbase.options import format_value
from retrofit.passbase.protocol import AnyPass, Pass, load_pass, parse_spec, pass_names

ALL_LAYERS = "layers"  # the option by which a pass is limited to some depths


def candidates_of(given: AnyPass | str | Sequence[AnyPass | str] | None) -> tuple[AnyPass, ...]:
    """The candidates: passes and specs as they are, the family of a pass that is only named; of all passes where none is given.

    Raises `SpecError` where one cannot be read, `PlanningError` where there is none.
    """
    named = pass_names() if given is None else [given] if isinstance(given, (str, Pass)) else given
    families = [family(one, required=given is not None) for one in named]
    found: dict[str, AnyPass] = {}
    for several in itertools.zip_longest(*families):  # each pass's first setting, then each one's second: time may end between
        found |= {one.spec(): one for one in several if one is not None and one.spec() not in found}
    if not found:
        raise PlanningError(
            "no pass to choose from", why="none was named, or none proposes settings", remedy="name one with its options"
        )
    return tuple(found.values())


def family(one: AnyPass | str, *, required: bool) -> list[AnyPass]:
    """The settings that a named pass proposes, itself where it proposes none and is `required`; any other spec as it is."""
    if not isinstance(one, str) or "(" in one:
        return [parse_spec(one) if isinstance(one, str) else one]
    kind = load_pass(one.strip())
    return [parse_spec(f"{kind.name}({options})") for options in kind.candidates or (("",) if required else ())]


def short_spec(one: AnyPass) -> str:
    """A pass as text with the options that differ from their defaults: `sparse-ffn(sparsity=8)`."""
    fields = [field for field in dataclasses.fields(one) if getattr(one, field.name) != field.default]
    options = ", ".join(f"{field.name}={format_value(getattr(one, field.name))}" for field in fields)
    return f"{one.name}({options})" if options else one.name


def takes_layers(one: AnyPass) -> bool:
    """Whether the pass can be limited to some depths."""
    return any(field.name == ALL_LAYERS for field in dataclasses.fields(one))


def limited_to(one: AnyPass, depths: Iterable[int]) -> AnyPass:
    """The pass in layers of these depths only."""
    return dataclasses.replace(one, **{ALL_LAYERS: depths_text(depths)})


def depths_text(depths: Iterable[int]) -> str:
    """Depths as the option `layers` names them: `0-5+8`."""
    runs: list[list[int]] = []
    for depth in sorted(set(depths)):
        if runs and runs[-1][-1] == depth - 1:
            runs[-1].append(depth)
        else:
            runs.append([depth])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
