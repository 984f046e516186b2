"""What becomes of a model as an FX graph module, column by column, against its module tree and against every check."""

from __future__ import annotations

import copy
import dataclasses
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from assessment import one_line
from support import other_zoos, zoo
from support.inlining import inline_all
from torch import Tensor, fx, nn

import retrofit
from retrofit.emitted import graph_module
from retrofit.errors import CaptureError, RetrofitError, VerificationError
from retrofit.inputs.example_inputs import named_inputs
from retrofit.program.capture import missing_masks
from retrofit.provenance import provenance_of
from retrofit.rewriting import apply_reported

BOTH = {"altup": "altup(k=2)", "sparse-ffn": "sparse-ffn(sparsity=8)"}  # rewritten on both sides
PASSES = {  # on the models without modules, with sizes that fit them
    **BOTH,
    "sum": "sum",
    "sequence-altup": "sequence-altup(k=2, layers=all)",
    "shared-moe": "shared-moe(experts=2, k=1)",
    "memory": "memory(lookup=softmax, rank=2)",
    "recurrence": "recurrence(rank=4)",
    "lsh-attention": "lsh-attention",
    "merge-cross-attention": "merge-cross-attention",
    "reversible": "reversible",
    "sparse-qkv": "sparse-qkv(kernel=2)",
    "sparse-loss": "sparse-loss(modules=2)",
}
CALL = re.compile(r"_\d+$")  # at the end of a name: which call of the module it is
PLACE = re.compile(r"\.\d+$")  # at the end of a name: which part of a weight it is, where only parts are read
TOLERANCE = 1e-4  # of the largest value
Values = dict[str, Tensor]


@dataclasses.dataclass
class Row:
    """One architecture: a cell begins with `yes`, `no`, `refused`, `dense cannot`, or is `—`."""

    id: str
    graph: str = "—"
    cells: dict[str, str] = dataclasses.field(default_factory=dict)  # by pass


def assess(name: str) -> Row:
    """The row of the architecture `name` of the zoo."""
    row, entry = Row(name), zoo.entry(name)
    if reason := zoo.skip_reason(entry):
        row.graph = f"dense cannot: {reason}"
        return row
    model = zoo.build(entry)
    given = named_inputs(model, zoo.inputs(entry, model))  # without a cache, as everything is captured
    try:
        retrofit.inspect(model, given)
    except CaptureError as error:
        row.graph = f"dense cannot: {one_line(error)}"
        return row
    except RetrofitError:
        pass  # a graph module is made of what is no transformer too
    try:
        graph = graph_module(model, given)
    except CaptureError as error:
        row.graph = f"refused: {one_line(error)}"
        return row
    given = provenance_of(graph).examples | given  # the masks that it asks for
    row.graph = attempt(lambda: same_function(entry, model, graph))
    row.cells["inlined"] = attempt(lambda: same_inlined(graph, given))
    for one, spec in BOTH.items():
        row.cells[one] = attempt(lambda spec=spec: derived_twice(model, graph, spec, given))
        if "differs" in row.cells[one]:  # by rounding, or indeed
            exact = attempt(lambda spec=spec: derived_twice(*map(in_float64, (model, graph)), spec, in_float64(given)))
            row.cells[one] = f"{exact}, in float64" if exact.startswith("yes") else row.cells[one]
    return row


def in_float64(one: Any) -> Any:
    """A copy of a module, or of inputs, in float64."""
    if isinstance(one, nn.Module):
        return copy.deepcopy(one).double()
    return {name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value for name, value in one.items()}


def assess_pass(kind: str, spec: str) -> str:
    """How a pass fares on a model of another library as a graph module."""
    return verdict(other_zoos.built(kind), spec, example_inputs=other_zoos.examples(kind), emit="graph")


def verdict(model: nn.Module, spec: str, **how: Any) -> str:
    """What becomes of a model under a pass: `yes` where the result comes through every check."""
    try:
        applied = apply_reported(model, spec, count_flops=False, **how)
    except VerificationError as error:
        return f"no: {'; '.join(f'{check.name}: {check.why or check.measured}' for check in error.report.failed)}"
    except RetrofitError as error:
        return f"refused: {one_line(error)}; {error.remedy}"
    assert applied.report is not None
    (rewrite,) = applied.rewrites
    left = f", {len(rewrite.skipped)} left alone ({rewrite.skipped[0].why})" if rewrite.skipped else ""
    return f"yes: {len(rewrite.sites)} sites{left}"


@torch.no_grad()
def assess_graph(kind: str) -> str:
    """Whether the graph module of a model of another library is the model, on inputs of another size."""
    model = other_zoos.built(kind)
    graph = graph_module(model, other_zoos.examples(kind))
    other = other_zoos.examples(kind, batch=3, length=17, seed=1)
    return compare({"outputs": first(graph(**other))}, {"outputs": first(model(**other))}, 1e-6)


@torch.no_grad()
def assess_file(kind: str) -> str:
    """Whether the model, as `.pt2` file read, widened, saved and read again, computes what it did, on inputs of another size."""
    model, given = other_zoos.built(kind), other_zoos.examples(kind)
    other = other_zoos.examples(kind, batch=3, length=17, seed=1)
    sizes = {name: dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO) for name, value in given.items()}
    with tempfile.TemporaryDirectory() as folder:
        path, wide = Path(folder) / "model.pt2", Path(folder) / "wide.pt2"
        torch.export.save(torch.export.export(model, (), given, dynamic_shapes=sizes, strict=False), path)
        dense = retrofit.load(path)
        verdict = compare({"read": first(dense(**other))}, {"read": first(model(**other))}, 1e-6)
        if not verdict.startswith("yes"):
            return verdict
        widened = retrofit.apply(dense, BOTH["altup"], verify=False)
        expected = first(widened(**other))
        retrofit.save(widened, wide)
        return compare({"widened": first(retrofit.load(wide)(**other))}, {"widened": expected}, 1e-6)


def first(output: Any) -> Tensor:
    """The first tensor of a model's outputs."""
    found = output if torch.is_tensor(output) else next(iter(output.values() if isinstance(output, dict) else output))
    assert torch.is_tensor(found)
    return found


def attempt(check: Callable[[], str]) -> str:
    """The check's verdict, or what it raised."""
    try:
        return check()
    except Exception as error:
        return f"no: {one_line(error)}"


@torch.no_grad()
def same_function(entry: zoo.Entry, model: nn.Module, graph: nn.Module) -> str:
    """Whether the graph module computes the model's function of inputs of another batch and length than it was made with."""
    other = named_inputs(model, zoo.inputs(entry, model, batch=3, length=9, seed=5))
    taken = provenance_of(graph).examples
    other |= {name: mask for name, mask in missing_masks(model, other).items() if name in taken}
    try:
        expected = zoo.logits(model(**other))
    except Exception as error:
        return f"dense cannot: {one_line(error)}"
    tensors = {name: value for name, value in other.items() if torch.is_tensor(value)}
    try:
        found = zoo.logits(graph(**tensors))
    except RetrofitError as error:
        return f"refused: {one_line(error)}"
    return compare({"logits": found}, {"logits": expected}, 1e-5)


@torch.no_grad()
def same_inlined(graph: fx.GraphModule, given: dict[str, Any]) -> str:
    """Whether the graph module is the same to the last bit with all of its parts inlined."""
    tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
    flat = copy.deepcopy(graph)
    inline_all(flat)
    return compare({"logits": zoo.logits(flat(**tensors))}, {"logits": zoo.logits(graph(**tensors))}, 0.0)


def derived_twice(model: nn.Module, graph: fx.GraphModule, spec: str, given: dict[str, Any]) -> str:
    """Whether a recipe on the graph module and on the module tree gives one function, with one gradient for every parameter."""
    tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
    found: list[Outcome | str] = []
    for one, inputs in ((model, given), (graph, tensors)):
        torch.manual_seed(0)
        twin = copy.deepcopy(one)
        both = zip(twin.parameters(), one.parameters(), strict=True)
        origin = {id(copied): id(parameter) for copied, parameter in both}  # which is the model's own on both sides
        try:
            found.append(outcome(retrofit.apply(twin, spec, example_inputs=inputs, verify=False), inputs, origin))
        except RetrofitError as error:
            found.append(one_line(error))
    tree, ours = found
    if isinstance(tree, str):
        return f"refused on both: {tree}" if isinstance(ours, str) else f"no: refused on the tree only: {tree}"
    if isinstance(ours, str):
        return f"no: refused on the graph only: {ours}"
    return compare(with_names_of(ours, tree), tree.values, TOLERANCE)


@dataclasses.dataclass
class Outcome:
    """The logits of a rewritten model, and the gradients of a function of them, under every name of each parameter."""

    values: Values
    held: Values  # the parameters
    origins: dict[str, int]  # of the parameters that the dense model had, by name


def outcome(model: nn.Module, inputs: dict[str, Any], origin: dict[int, int]) -> Outcome:
    logits = zoo.logits(model.eval()(**inputs))
    logits.float().logsumexp(-1).sum().backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    grads = {name: one.grad for name, one in named.items() if one.grad is not None}
    origins = {name: origin[id(named[name])] for name in grads if id(named[name]) in origin}
    return Outcome({**grads, "logits": logits.detach()}, {name: named[name].detach() for name in grads}, origins)


def with_names_of(ours: Outcome, theirs: Outcome) -> Values:
    """Our values under their names: for a parameter that the dense model had, what is that parameter here.

    Of others a part of the graph that is no module may stand in a name, and the number of a call; or in theirs a module that wraps
    what is a part of the graph. What the module tree has once for all calls of a module the graph may have for each of them: there
    the gradients add up.
    """
    pieces = {name: [CALL.sub("", piece) for piece in name.split(".")] for name in ours.values if name not in ours.origins}
    found = {}
    for name, value in theirs.values.items():
        matches = [one for one, origin in ours.origins.items() if origin == theirs.origins.get(name)]
        if not matches:
            its = name.split(".")
            shaped = [one for one in pieces if one == name or is_shaped(ours, one, value)]
            matches = [one for one in shaped if one == name or is_within(its, pieces[one])]
            matches = matches or [one for one in shaped if is_within(pieces[one], its)]
            matches = [one for one in matches if len(pieces[one]) == min(len(pieces[other]) for other in matches)]
            matches = [one for one in matches if one in ours.held and torch.equal(ours.held[one], theirs.held[name])] or matches
        once = {id(ours.values[one]): ours.values[one] for one in matches}
        parts = [ours.values[one] for one in ours.values if PLACE.sub("", one) == name]
        if once:
            found[name] = torch.stack(list(once.values())).sum(0)
        elif parts and sum(map(Tensor.numel, parts)) == value.numel():
            found[name] = joined_parts(parts, value)
    return found


def is_shaped(ours: Outcome, name: str, value: Tensor) -> bool:
    return ours.values[name].shape == value.shape


def joined_parts(parts: list[Tensor], whole: Tensor) -> Tensor:
    """The values of the parts of a weight, each where the whole has the value of its rank: nobody says which part is which."""
    values = torch.cat([part.flatten() for part in parts]).sort().values
    return torch.empty_like(values).index_copy(0, whole.flatten().argsort(), values).view_as(whole)


def is_within(some: list[str], every: list[str]) -> bool:
    """Whether the pieces of a name occur in another in their order."""
    rest = iter(every)
    return all(piece in rest for piece in some)


def compare(ours: Values, theirs: Values, tolerance: float) -> str:
    """How far values are from what they should be, relative to the largest of each."""
    missing = sorted(set(theirs) - set(ours))
    if missing:
        return f"no: the graph module has no gradient for {missing[0]}" + (f" and {len(missing) - 1} others" if missing[1:] else "")
    gaps = {name: gap(ours[name], value) for name, value in theirs.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    if gaps[worst] == 0:
        return "yes, every bit"
    return f"{'yes' if gaps[worst] <= tolerance else f'no: {worst} differs'} ({gaps[worst]:.0e})"


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where shapes or what is not finite differ."""
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    fine = theirs.isfinite()
    difference = (ours[fine] - theirs[fine]).abs().max().item() if fine.any() else 0.0
    return difference / max(theirs[fine].abs().max().item(), 1e-6) if difference else 0.0
