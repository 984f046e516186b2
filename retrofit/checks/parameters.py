"""The parameters check: every dense parameter is where its fate says, as it was; the new ones number what the formulas say."""

from __future__ import annotations

import dataclasses

from torch import nn

from retrofit.checks.context import Context
from retrofit.checks.finding import Finding, failed, format_layout, passed, skipped
from retrofit.checks.fingerprint import Fingerprint, count_elements, fingerprints
from retrofit.checks.subject import Subject
from retrofit.errors import first_few
from retrofit.surgery.edit import Fate


@dataclasses.dataclass(frozen=True)
class ParametersMeasurement:
    """The dense parameters by their dense names, as the model holds them, and the size of all its parameters."""

    prints: dict[str, Fingerprint]
    elements: int
    fitted: frozenset[str] = frozenset()  # those whose values were fitted to data


def measure(subject: Subject, before: ParametersMeasurement | None = None, context: Context | None = None) -> ParametersMeasurement:
    """The fingerprint of every dense parameter: in a rewritten model of what is where its fate says."""
    elements = sum(parameter.numel() for parameter in subject.model.parameters())
    if before is None or context is None:
        return ParametersMeasurement(fingerprints(subject.model) if context is None else {}, elements)
    storages = {id(parameter): index for index, parameter in enumerate(subject.model.parameters())}
    prints = {
        name: fingerprint_at(subject, fate, storages[id(subject.parameters[fate.name])])
        for name, fate in context.fates.items()
        if name in before.prints and fate.kind != "dropped" and fate.name in subject.parameters
    }
    return ParametersMeasurement(prints, elements, frozenset(name for name in prints if is_fitted(subject, context.fates[name])))


def is_fitted(subject: Subject, fate: Fate) -> bool:
    """Whether the model says that the values of a dense parameter were fitted to data."""
    return fate.layout is not None and bool(fate.layout.fitted) and bool(subject.model.get_buffer(fate.layout.fitted))


def fingerprint_at(subject: Subject, fate: Fate, storage: int) -> Fingerprint:
    """The fingerprint of the dense parameter that lies where `fate` says."""
    value: nn.Parameter = subject.parameters[fate.name]
    if fate.kind == "widened":
        return Fingerprint.of(value[fate.index], storage, fate.scale)
    if fate.layout is not None:
        order = subject.model.get_buffer(fate.layout.order) if fate.layout.order else None
        return Fingerprint.of(fate.layout.dense(value, order), storage)
    return Fingerprint.of(value, storage)


def judge(now: ParametersMeasurement, before: ParametersMeasurement | None, context: Context) -> Finding:
    if before is None:
        return skipped("there is no dense model to compare with")
    kinds = [
        "fitted" if name in now.fitted else context.fates[name].kind if name in context.fates else "lost" for name in before.prints
    ]
    new = now.elements - count_elements(
        one for name, one in before.prints.items() if name in context.fates and context.fates[name].kind != "dropped"
    )
    measured = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) + f", {new:,} new elements"
    reasons = {
        name: what_is_wrong(name, now.prints.get(name), one, context, name in now.fitted) for name, one in before.prints.items()
    }
    problems = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    problems += [f"{' and '.join(names)} were one parameter and are several" for names in untied(now, before)]
    if problems:
        return failed(measured, first_few(problems, between="; "))
    if context.rewrites is not None and new != context.claimed:
        return failed(measured, f"claimed are {context.claimed:,}{formulas(context)}; {unannounced(context)}")
    return passed(measured)


def what_is_wrong(name: str, now: Fingerprint | None, before: Fingerprint, context: Context, fitted: bool = False) -> str:
    """What is wrong with the fate of a dense parameter, "" where nothing is."""
    fate = context.fates.get(name)
    if fate is None:
        return "no edit accounts for it"
    if fate.kind == "dropped":
        return f"an exact rewrite dropped it: {fate.why}" if context.exact else "" if fate.why else "dropped without a reason"
    if now is None:
        return f"it is said to be {fate.name or 'nameless'} now, and there is no such parameter"
    site = context.site_of(fate.name)
    if fitted and context.exact:
        return f"an exact rewrite fitted it to data{site}"
    if fate.kind == "widened":
        what = "what it was" if fate.scale == 1.0 else f"{fate.scale:g} times what it was"
        return "" if before.matches(now) else f"its part of {fate.name} is not {what}{site}"
    if fate.layout is not None:
        whole = now.dtype == before.dtype and (now.shape == before.shape if fitted else before.matches(now))
        return "" if whole else f"{fate.name} does not hold it where it should{site}"
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        return f"{fate.name} is {format_layout(now.shape, now.dtype)}, was {format_layout(before.shape, before.dtype)}"
    return "" if before.matches(now) else f"{fate.name} does not hold the values it held{site}"


def untied(now: ParametersMeasurement, before: ParametersMeasurement) -> list[list[str]]:
    """The groups of names that were one parameter and are several."""
    groups: dict[int, list[str]] = {}
    for name, one in before.prints.items():
        if name in now.prints:
            groups.setdefault(one.storage, []).append(name)
    return [names for names in groups.values() if len({now.prints[name].storage for name in names}) > 1]


def formulas(context: Context) -> str:
    said = "; ".join(rewrite.formula for rewrite in context.rewrites or () if rewrite.formula)
    return f" ({said})" if said else ""


def unannounced(context: Context) -> str:
    """The new parameters that lie in no rewritten site, else all the new ones."""
    outside = [name for name in context.new_parameters if not context.site_of(name)]
    return f"in no rewritten site: {first_few(outside)}" if outside else f"new are {first_few(context.new_parameters) or 'none'}"
