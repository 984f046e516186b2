"""Data flow: every query on a random graph gives what networkx finds on the same edges."""

from __future__ import annotations

import itertools

import networkx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from retrofit.program.aten_ops import LIKE, is_heavy, op
from retrofit.program.dataflow import Dataflow, backward_slice, forward_slice
from retrofit.program.program import Call, Program

aten = torch.ops.aten
OPERATIONS = {  # target and number of operands; values are 4 × 4, so that any value fits anywhere
    "add": (aten.add.Tensor, 2),
    "relu": (aten.relu.default, 1),
    "transpose": (aten.transpose.int, 1),
    "softmax": (aten.softmax.int, 1),
    "matmul": (aten.matmul.default, 2),  # heavy
    "zeros_like": (aten.zeros_like.default, 1),  # reads a shape only
}
EXTRA = {"transpose": (0, 1), "softmax": (-1,)}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of one input, one parameter and some operations on what came before."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    nodes = [x, w]
    for _ in range(draw(st.integers(1, 14))):
        name = draw(st.sampled_from(sorted(OPERATIONS)))
        target, count = OPERATIONS[name]
        operands = tuple(draw(st.sampled_from(nodes)) for _ in range(count))
        nodes.append(graph.call_function(target, operands + EXTRA.get(name, ())))
    for node in nodes:
        node.meta["val"] = torch.empty(4, 4)
    graph.output((nodes[-1],))
    root = Call("", 0, 0, None)
    return Program(graph, {w: "w"}, {}, {}, {x: "x"}, {"output": nodes[-1]}, [root], {})


def edges(flow: Dataflow, *, of_values: bool) -> networkx.DiGraph:
    """The edges of the graph; `of_values` leaves out those into operations that read a shape only."""
    graph: networkx.DiGraph = networkx.DiGraph()
    graph.add_nodes_from(flow.nodes)
    for node in flow.nodes:
        if not (of_values and op(node) in LIKE):
            graph.add_edges_from((operand, node) for operand in node.all_input_nodes)
    return graph


@settings(max_examples=60, deadline=None)
@given(programs())
def test_reaches_is_a_path_and_between_are_the_nodes_on_the_paths(program: Program) -> None:
    flow = Dataflow(program)
    graph = edges(flow, of_values=True)
    above = {node: networkx.ancestors(graph, node) | {node} for node in flow.nodes}
    for late in flow.nodes:
        assert {early for early in flow.nodes if flow.reaches(early, late)} == above[late]
        for early in above[late]:
            expected = [node for node in flow.nodes if node is not early and early in above[node] and node in above[late]]
            assert flow.between(early, late) == expected


@settings(max_examples=60, deadline=None)
@given(programs())
def test_a_heavy_path_is_one_with_a_heavy_operation_behind_its_start(program: Program) -> None:
    flow = Dataflow(program)
    graph = edges(flow, of_values=True)
    for late in flow.nodes:
        heavy = [node for node in networkx.ancestors(graph, late) | {late} if is_heavy(node)]
        expected = set().union(*(networkx.ancestors(graph, node) for node in heavy))
        assert {early for early in flow.nodes if flow.reaches_through_heavy_op(early, late)} == expected


@settings(max_examples=60, deadline=None)
@given(programs())
def test_dependence_on_the_inputs_is_a_path_from_one(program: Program) -> None:
    flow = Dataflow(program)
    graph = edges(flow, of_values=True)
    (x,) = program.inputs
    assert flow.queries.isdisjoint(networkx.descendants(graph, x) | {x, *program.parameters})
    assert flow.depends == {x, *flow.queries}.union(*(networkx.descendants(graph, one) for one in {x, *flow.queries}))
    assert flow.computations == [node for node in flow.nodes if node in flow.depends and node.op == "call_function"]


@settings(max_examples=60, deadline=None)
@given(programs(), st.data())
def test_slices_are_ancestors_and_descendants(program: Program, data: st.DataObject) -> None:
    flow = Dataflow(program)
    graph = edges(flow, of_values=False)
    chosen = data.draw(st.sets(st.sampled_from(flow.nodes), min_size=1, max_size=3))
    assert backward_slice(chosen) == chosen.union(*(networkx.ancestors(graph, node) for node in chosen))
    assert forward_slice(chosen, flow.nodes) == chosen.union(*(networkx.descendants(graph, node) for node in chosen))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_a_carried_chain_goes_up_as_far_as_one_operand_is_carried(program: Program) -> None:
    flow = Dataflow(program)
    for node in flow.nodes:
        chain = flow.carried_chain(node)
        assert chain[0] is node and len(flow.carried_operands[chain[-1]]) != 1
        for lower, upper in itertools.pairwise(chain):
            assert flow.carried_operands[lower] == [upper] and upper in lower.all_input_nodes


def test_carrying_and_parameters_of_a_small_layer() -> None:
    graph = fx.Graph()
    x, w, b = (graph.placeholder(name) for name in "xwb")
    product = graph.call_function(aten.matmul.default, (x, turned := graph.call_function(aten.t.default, (w,))))
    shifted = graph.call_function(aten.add.Tensor, (product, b))
    result = graph.call_function(aten.add.Tensor, (x, shifted))
    for node, size in (
        (x, (2, 4)),
        (w, (4, 4)),
        (b, (4,)),
        (turned, (4, 4)),
        (product, (2, 4)),
        (shifted, (2, 4)),
        (result, (2, 4)),
    ):
        node.meta["val"] = torch.empty(size)
    graph.output((result,))
    flow = Dataflow(Program(graph, {w: "w", b: "b"}, {}, {}, {x: "x"}, {"output": result}, [Call("", 0, 0, None)], {}))
    assert flow.carried_chain(shifted) == [shifted, product], "a bias shifts, a product starts anew"
    assert flow.carried_operands[result] == [], "of two representations that are added neither is carried alone"
    assert flow.parameters_of([product]) == {"w": 16} and flow.parameters_of([shifted]) == {"b": 4}
