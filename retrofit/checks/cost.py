"""The cost check: parameters and FLOPs counted on the graph are what the rewrites claim, and an exact one leaves out no work."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from retrofit.checks.departure import still_whole
from retrofit.program.cost import Cost
from retrofit.runtime.outcomes import Finding, failed, listed, passed

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject


def check(subject: Subject) -> Finding:
    after = subject.cost
    before = subject.reference.cost if subject.reference is not None else None
    if before is None:
        measured = f"{after.parameters:,} parameters, {after.flops_per_token:,} FLOPs a token"
        return passed(measured, "no dense model") if after.flops else failed(measured, "no product was found in the graph")
    parameters = f"parameters {before.parameters:,} → {after.parameters:,}"
    measured = f"{parameters}, FLOPs a token {before.flops_per_token:,} → {after.flops_per_token:,}"
    whole = all(fate.kind != "dropped" for fate in subject.fates.values())
    if subject.rewrites is not None and whole and after.parameters - before.parameters != subject.claimed:
        return failed(measured, f"claimed are {subject.claimed:,} new parameters; never read: {unread(subject)}")
    if subject.exact and (missing := work_left_out(subject, before, after)):
        return failed(measured, f"an exact rewrite leaves out no work: {listed(missing)}")
    return passed(measured)


def unread(subject: Subject) -> str:
    """The parameters that the graph never reads."""
    read = {id(subject.parameters[name]) for node, name in subject.program.parameters.items() if node in subject.reached}
    return listed(subject.placed(name) for name, value in subject.model.named_parameters() if id(value) not in read) or "none"


def work_left_out(subject: Subject, before: Cost, after: Cost) -> list[str]:
    """The dense modules that do less than they did."""
    names = still_whole(subject.fates, before.by_module)
    modules = dict(subject.model.named_modules(remove_duplicate=False))
    did, does = Counter[object](), Counter[object]()
    for path, count in before.by_module.items():
        if path in names:
            did[held(modules.get(names[path]))] += count
    for path, count in after.by_module.items():
        does[held(modules.get(path))] += count
    keys = {path: held(modules.get(names[path])) for path in before.by_module if path in names}
    less = [
        f"{subject.placed(names[path])} does {does[key]:,} FLOPs, did {did[key]:,}"
        for path, key in keys.items()
        if does[key] < did[key]
    ]
    return less or (["the whole does less than before"] if after.flops < before.flops else [])


def held(module: nn.Module | None) -> object:
    """What is counted as one: modules on the same weights, under whichever of their names the work was found."""
    weights = tuple(id(parameter) for parameter in module.parameters()) if module is not None else ()
    return weights or id(module)
