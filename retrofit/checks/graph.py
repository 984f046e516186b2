"""The graph check: captured again, the model is the dense one wherever nothing was announced, and its outputs are laid out alike.

Alike at other batch sizes and lengths too. Where a rewrite left a module whole, the graph of its operations is the dense model's;
code that branches on values may take another branch where other values come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retrofit.checks.reference import Layout, Probe, other_shapes
from retrofit.checks.untouched import graphs_of, touched
from retrofit.errors import first_line
from retrofit.runtime.outcomes import Finding, failed, layout, listed, passed
from retrofit.runtime.probes import describe, is_per_token

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject


def check(subject: Subject) -> Finding:
    nodes = sum(node.op == "call_function" for node in subject.program.graph.nodes)
    if subject.program.branches and subject.reference is not None and not subject.reference.branches:
        return failed(f"{nodes} nodes", "it branches on the values of tensors, and the dense model does not")
    expected = expected_outputs(subject)
    for inputs, outputs, probe in expected:
        try:
            found = (subject.answer_to(probe) if probe is not None else Probe.of(subject.model, inputs)).outputs
        except Exception as error:
            return failed(f"{nodes} nodes", f"it does not run on {describe(inputs)}: {first_line(error)}")
        wrong = [
            f"{name} is {said(found.get(name))}, not {said(output)}"
            for name, output in outputs.items()
            if found.get(name) != output
        ]
        if wrong:
            return failed(f"{nodes} nodes", f"on {describe(inputs)}, {'; '.join(wrong)}")
    others = subject.program.branches and not subject.exact  # values, and so branches
    if subject.reference is not None and subject.rewrites is not None and not others:
        dense = subject.reference.graphs
        if changed := touched(dense, graphs_of(subject.program), subject.fates, subject.rewrites):
            return failed(f"{nodes} nodes", f"not announced, and yet another graph than the dense model's: {listed(changed)}")
    return passed(f"{nodes} nodes, {len(expected)} shapes of inputs")


def expected_outputs(subject: Subject) -> list[tuple[dict[str, Any], dict[str, Layout], Probe | None]]:
    """Inputs of several shapes, and what they must give: what they gave in the dense model, else what follows from the first."""
    if subject.reference is not None:
        return [(probe.inputs, probe.outputs, probe) for probe in subject.reference.probes]
    shapes = [subject.inputs, *other_shapes(subject.model, subject.inputs)]
    return [(inputs, scaled(subject.first, inputs), None) for inputs in shapes]


def scaled(first: Probe, inputs: dict[str, Any]) -> dict[str, Layout]:
    """The outputs of a probe, as they are to be for inputs of another shape: laid out (batch, length or not, …)."""
    pairs = [(value, inputs[name]) for name, value in first.inputs.items() if is_per_token(value)]
    lengths = {value.shape[1]: other.shape[1] for value, other in pairs}
    rows = next(value.shape[0] for value in inputs.values() if hasattr(value, "shape"))
    return {
        name: ((rows, *(lengths.get(extent, extent) for extent in shape[1:2]), *shape[2:]), dtype)
        for name, (shape, dtype) in first.outputs.items()
        if shape
    }


def said(output: Layout | None) -> str:
    return "missing" if output is None else layout(*output)
