"""The parameters check: every dense parameter is where its fate says, as it was; the new ones number what the formulas say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.checks.fingerprint import Fingerprint, elements
from retrofit.runtime.outcomes import Finding, failed, layout, listed, passed, skipped

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject


def check(subject: Subject) -> Finding:
    if subject.reference is None:
        return skipped("there is no dense model to compare with")
    dense = subject.reference.parameters
    kinds = [subject.fates[name].kind if name in subject.fates else "lost" for name in dense]
    new = added(subject)
    measured = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) + f", {new:,} new elements"
    problems = [f"{name}: {reason}" for name, one in dense.items() if (reason := problem(subject, name, one))]
    problems += [f"{' and '.join(names)} were one parameter and are several" for names in torn(subject)]
    if problems:
        return failed(measured, listed(problems))
    if subject.rewrites is not None and new != subject.claimed:
        return failed(measured, f"claimed are {subject.claimed:,}{formulas(subject)}; {strangers(subject)}")
    return passed(measured)


def problem(subject: Subject, name: str, one: Fingerprint) -> str:
    """What is wrong with a dense parameter's fate, "" where nothing is."""
    fate = subject.fates.get(name)
    if fate is None:
        return "nobody accounts for it"
    if fate.kind == "dropped":
        return f"an exact rewrite dropped it: {fate.why}" if subject.exact else "" if fate.why else "dropped without a reason"
    value = subject.parameters.get(fate.name)
    if value is None:
        return f"it is said to be {fate.name or 'nameless'} now, and there is no such parameter"
    if fate.kind == "widened":
        what = "what it was" if fate.scale == 1.0 else f"{fate.scale:g} times what it was"
        return (
            ""
            if one.is_of_scaled(value[fate.index], fate.scale)
            else f"its part of {fate.name} is not {what}{subject.site_of(fate.name)}"
        )
    if fate.layout is not None:
        order = subject.model.get_buffer(fate.layout.order) if fate.layout.order else None
        whole = one.is_of(fate.layout.dense(value, order))
        return "" if whole else f"{fate.name} does not hold it where it should{subject.site_of(fate.name)}"
    if (tuple(value.shape), value.dtype) != (one.shape, one.dtype):
        return f"{fate.name} is {layout(value.shape, value.dtype)}, was {layout(one.shape, one.dtype)}"
    return "" if one.is_of(value) else f"{fate.name} does not hold the values it held{subject.site_of(fate.name)}"


def torn(subject: Subject) -> list[list[str]]:
    """The groups of names that were one parameter and are several."""
    assert subject.reference is not None
    groups: dict[int, list[str]] = {}
    for name, one in subject.reference.parameters.items():
        if name in subject.fates and subject.fates[name].name in subject.parameters:
            groups.setdefault(one.storage, []).append(name)
    return [names for names in groups.values() if len({id(subject.parameters[subject.fates[name].name]) for name in names}) > 1]


def added(subject: Subject) -> int:
    """How many elements there are beyond those of the dense parameters that were not dropped."""
    assert subject.reference is not None
    left = [
        one for name, one in subject.reference.parameters.items() if name in subject.fates and subject.fates[name].kind != "dropped"
    ]
    return sum(parameter.numel() for parameter in subject.model.parameters()) - elements(left)


def formulas(subject: Subject) -> str:
    said = "; ".join(rewrite.formula for rewrite in subject.rewrites or () if rewrite.formula)
    return f" ({said})" if said else ""


def strangers(subject: Subject) -> str:
    """The new parameters that lie in no rewritten site, else all the new ones."""
    outside = [name for name in subject.new_parameters if not subject.site_of(name)]
    return f"in no rewritten site: {listed(outside)}" if outside else f"new are {listed(subject.new_parameters) or 'none'}"
