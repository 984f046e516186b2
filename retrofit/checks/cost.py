"""The cost check: parameters and FLOPs counted on the graph are what the rewrites claim, and an exact one leaves out no work."""

from __future__ import annotations

from collections import Counter

from torch import nn

from retrofit.checks.context import Context
from retrofit.checks.divergence import unchanged_modules
from retrofit.checks.finding import Finding, failed, passed
from retrofit.checks.subject import Subject
from retrofit.errors import first_few
from retrofit.program.cost import Cost, cost_of


def measure(subject: Subject, before: Cost | None = None, context: Context | None = None) -> Cost:
    return cost_of(subject.program)


def judge(now: Cost, before: Cost | None, context: Context) -> Finding:
    if before is None:
        measured = f"{now.parameters:,} parameters, {now.flops_per_token:,} FLOPs per {now.unit}"
        return passed(measured, "no dense model") if now.flops else failed(measured, "no product was found in the graph")
    parameters = f"parameters {before.parameters:,} → {now.parameters:,}"
    measured = f"{parameters}, FLOPs per {now.unit} {before.flops_per_token:,} → {now.flops_per_token:,}"
    whole = all(fate.kind != "dropped" for fate in context.fates.values())
    unclaimed = now.parameters - before.parameters - context.claimed
    if unclaimed and not context.exact:
        unclaimed -= newly_read(now, before, context)
    if context.rewrites is not None and whole and unclaimed:
        return failed(measured, f"claimed are {context.claimed:,} new parameters; never read: {unread_parameters(context)}")
    if context.exact and (missing := omitted_work(now, before, context)):
        return failed(measured, f"an exact rewrite leaves out no work: {first_few(missing)}")
    return passed(measured)


def newly_read(now: Cost, before: Cost, context: Context) -> int:
    """Elements of dense parameters that are read and were not, less those of the reverse, where the model chose other experts.

    Where the dense graph leaves no parameter of a shape unread, nothing is chosen, and each has to be read on.
    """
    parameters = context.subject.parameters
    kept = {name: parameters[fate.name] for name, fate in context.fates.items() if fate.kind in ("kept", "moved")}
    did = {id(value) for name, value in kept.items() if name in before.read}
    does = {id(parameters[name]) for name in now.read}
    single = {id(value): value for value in kept.values()}
    chosen = {value.shape for one, value in single.items() if one not in did}
    return sum(value.numel() * ((one in does) - (one in did)) for one, value in single.items() if value.shape in chosen)


def unread_parameters(context: Context) -> str:
    """The parameters that the graph never reads."""
    subject = context.subject
    read = {id(subject.parameters[name]) for node, name in subject.program.parameters.items() if node in subject.reached}
    return first_few(context.place(name) for name, value in subject.model.named_parameters() if id(value) not in read) or "none"


def omitted_work(now: Cost, before: Cost, context: Context) -> list[str]:
    """The dense modules that do less than they did."""
    names = unchanged_modules(context.fates, before.by_module)
    modules = dict(context.subject.model.named_modules(remove_duplicate=False))
    did, does = Counter[object](), Counter[object]()
    for path, count in before.by_module.items():
        if path in names:
            did[weights_key(modules.get(names[path]))] += count
    for path, count in now.by_module.items():
        does[weights_key(modules.get(path))] += count
    keys = {path: weights_key(modules.get(names[path])) for path in before.by_module if path in names}
    less = [
        f"{context.place(names[path])} does {does[key]:,} FLOPs, did {did[key]:,}"
        for path, key in keys.items()
        if does[key] < did[key]
    ]
    return less or (["the whole does less than before"] if now.flops < before.flops else [])


def weights_key(module: nn.Module | None) -> object:
    """What is counted as one: modules on the same weights, under whichever of their names the work was found."""
    weights = tuple(id(parameter) for parameter in module.parameters()) if module is not None else ()
    return weights or id(module)
