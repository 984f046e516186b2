"""The graph check: captured again, the model is the dense one where no rewrite was announced; its outputs have the same layout.

The layout holds at other batch sizes and lengths too. Where a rewrite left a module whole, the graph of its operations is the dense
model's; code that branches on values may take another branch where other values come.
"""

from __future__ import annotations

import dataclasses

from retrofit.checks.context import Context
from retrofit.checks.finding import Finding, Raised, attempt, failed, format_layout, passed
from retrofit.checks.graph_hashes import GraphHashes, changed_modules, hash_modules
from retrofit.checks.subject import Layout, Subject
from retrofit.errors import first_few
from retrofit.inputs.optional_inputs import adds_arguments
from retrofit.inputs.probes import Inputs, describe, extent_of, is_per_token
from retrofit.program.program import Program

Layouts = dict[str, Layout]


@dataclasses.dataclass(frozen=True)
class GraphMeasurement:
    """A captured graph and the layouts of what the model returns."""

    capture_error: str  # why there is no graph; "" where there is one
    nodes: int
    branches: bool  # whether the code branches on the values of tensors
    hashes: GraphHashes  # of the calls of its modules
    layouts: tuple[Layouts | Raised, ...]  # for inputs of each shape


def measure(subject: Subject, before: GraphMeasurement | None = None, context: Context | None = None) -> GraphMeasurement:
    """The graph and the layouts; modules are hashed where there is another model to compare them with."""
    program = attempt(lambda: subject.program)
    runs = [attempt(subject.run, shape) for shape in range(len(subject.shapes))]
    layouts = tuple(one if isinstance(one, Raised) else one.layouts for one in runs)
    if isinstance(program, Raised):
        return GraphMeasurement(program.error, 0, True, {}, layouts)
    compared = context is None or (context.has_reference and context.rewrites is not None)
    return GraphMeasurement("", operations(program), program.branches, hash_modules(program) if compared else {}, layouts)


def operations(program: Program) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


def judge(now: GraphMeasurement, before: GraphMeasurement | None, context: Context) -> Finding:
    if now.capture_error:
        return failed("", now.capture_error)
    nodes = f"{now.nodes} nodes"
    if now.branches and before is not None and not before.branches:
        return failed(nodes, "it branches on the values of tensors, and the dense model does not")
    shapes = context.subject.shapes
    expected = before.layouts if before is not None else [layouts_for(now, shapes[0], shape, at) for at, shape in enumerate(shapes)]
    for inputs, layouts, right in zip(shapes, now.layouts, expected, strict=True):
        if isinstance(layouts, Raised):
            return failed(nodes, f"it does not run on {describe(inputs)}: {layouts.error}")
        assert not isinstance(right, Raised)  # the dense model ran on every shape
        wrong = [
            f"{name} is {format_or_missing(layouts.get(name))}, not {format_or_missing(layout)}"
            for name, layout in right.items()
            if layouts.get(name) != layout
        ]
        if wrong:
            return failed(nodes, f"on {describe(inputs)}, {'; '.join(wrong)}")
    other_branches = now.branches and not context.exact  # other values, and so perhaps other branches
    if before is not None and context.rewrites is not None and not other_branches:
        changed = changed_modules(before.hashes, now.hashes, context.fates, context.rewrites)
        if changed:
            return failed(nodes, f"not announced, and yet another graph than the dense model's: {first_few(changed)}")
    return passed(f"{nodes}, {len(shapes)} shapes of inputs")


def layouts_for(now: GraphMeasurement, first_inputs: Inputs, inputs: Inputs, at: int) -> Layouts | Raised:
    """The layouts, (batch, length or not, …), that follow for `inputs`, the shape number `at`, from those for the first inputs.

    An extent that was the batch may be it again, as in similarities of all rows with all: which it is shows what came.
    """
    first, came = now.layouts[0], now.layouts[at]
    if isinstance(first, Raised):
        return first
    if adds_arguments(inputs, first_inputs):
        return {}  # what an image adds to the tokens nobody says
    pairs = [(value, inputs[name]) for name, value in first_inputs.items() if is_per_token(value)]
    lengths = {value.shape[1]: other.shape[1] for value, other in pairs}
    before, rows = extent_of(first_inputs)[0], extent_of(inputs)[0]

    def follows(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        found, _ = ((), None) if isinstance(came, Raised) else came.get(name, ((), None))
        leading = rows if shape[0] == before else shape[0]
        expected = (leading, *(lengths.get(extent, extent) for extent in shape[1:2]), *shape[2:])
        if len(found) != len(expected):
            return expected
        is_batch = (extent == before and other == rows for extent, other in zip(shape, found, strict=True))
        return tuple(rows if batch else extent for batch, extent in zip(is_batch, expected, strict=True))

    return {name: (follows(name, shape), dtype) for name, (shape, dtype) in first.items() if shape}


def format_or_missing(layout: Layout | None) -> str:
    return "missing" if layout is None else format_layout(*layout)
