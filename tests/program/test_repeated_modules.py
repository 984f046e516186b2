"""Modules that are traced once: the program is the one of a trace of every module, whatever the modules' code does."""

import copy
import operator
import random
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor, fx, nn
from torch.nn import functional as F

import retrofit
from retrofit.program import capture as capturing
from retrofit.program.program import Program
from retrofit.program.repeated_modules import RepeatedModules

TOKENS = {"x": torch.ones(2, 3, 8)}


def structure(program: Program) -> Any:
    """All that a program says, with the nodes by number."""
    number = {node: place for place, node in enumerate(program.graph.nodes)}

    def numbered(value: Any) -> str:
        return repr(fx.node.map_arg(value, lambda node: f"%{number[node]}"))

    def places(nodes: dict[Any, fx.Node]) -> dict[Any, int]:
        return {key: number[node] for key, node in nodes.items()}

    tables = program.parameters, program.buffers, program.constants, program.inputs
    nodes = []
    for node in program.graph.nodes:
        value, owner = node.meta.get("val"), program.owner.get(node)
        kind = (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else type(value)
        target = str(node.target) if node.op == "call_function" else node.op
        held = [table.get(node) for table in tables]
        nodes.append((target, numbered(node.args), numbered(dict(node.kwargs)), kind, owner and owner.number, held))
    calls = [
        (call.path, call.index, call.parent and call.parent.number, places(call.inputs), places(call.outputs), places(call.kept))
        for call in program.calls
    ]
    return nodes, calls, places(program.outputs), program.constant_outputs, sorted(program.values)


def repeats(
    model: nn.Module,
    inputs: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    training: bool = False,
    modules: list[nn.Module] | None = None,
) -> int:
    """How many calls were not traced, after a comparison with the program of a trace of them all; `modules` gets their modules."""
    found: list[Any] = []
    again = RepeatedModules.call_again
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedModules, "call_again", lambda *given: found.append(given) or again(*given))
        program = structure(capturing.capture(copy.deepcopy(model), inputs, training=training))
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedModules, "call_again", lambda *given: pytest.fail("a call was not traced"))
        patch.setattr(RepeatedModules, "candidates", property(lambda self: set(), lambda self, value: None), raising=False)
        assert structure(capturing.capture(copy.deepcopy(model), inputs, training=training)) == program
    if modules is not None:
        modules.extend(module for _, _, module, *_ in found)
    return len(found)


LAYERS_IN_TURN = ("causal/gemma2", "causal/afmoe", "causal/hrm_text")  # of several modules, or called several times
ARCHITECTURES = ("causal/llama", "causal/mixtral", "masked/deberta", "seq2seq/t5", "image/swin", *LAYERS_IN_TURN)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_layers_are_traced_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(entry := zoo.entry(name))
    assert repeats(model, zoo.inputs(entry, model), monkeypatch) > 0


MIXTURES = ("sparse-ffn(sparsity=8)", "shared-moe(groups=0)")  # their hidden functions are graphs
SPECS = ("altup(k=2)", "memory(beside=values)", "recurrence(rank=4)", "sparse-qkv(kernel=2)", *MIXTURES)


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", SPECS)
def test_so_are_those_of_rewritten_models(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(entry := zoo.entry("causal/llama"), num_hidden_layers=3)
    inputs = zoo.inputs(entry, model)
    model = retrofit.apply(model, spec, example_inputs=inputs, verify=False)
    modules: list[nn.Module] = []
    assert repeats(model, inputs, monkeypatch, modules=modules) > 0
    assert any(name.endswith("self_attn") for module in modules for name, _ in module.named_modules() if name), "not a whole layer"
    repeats(model, inputs, monkeypatch, training=True)


class Layer(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.inner, self.index = nn.Linear(8, 8), index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stack(nn.Module):
    def __init__(self, kind: type[Layer], number: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(index) for index in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ReadsItsIndex(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.index % 2)


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.index += 1
        return super().forward(x) * self.index


class SharesAList(Layer):
    shared: Any = []

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.earlier = self.shared

    def forward(self, x: Tensor) -> Tensor:
        self.earlier.append(1)
        return super().forward(x) * len(self.earlier)


class CallsACopy(Layer):
    """A copy reads what its original holds."""

    def forward(self, x: Tensor) -> Tensor:
        other = copy.copy(self)
        return Layer.forward(other, x) * (1 + other.index)


class WritesToItsInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class DrawsANumber(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.choice([1, 2])


class ReadsATensorOfAnother(Layer):
    kept: Any = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.index:
            self.kept[:] = [x]
        return super().forward(x) + self.kept[0]


class LeavesATensor(Layer):
    """Adds to a list of the class, as code does that sums up a loss over all layers."""

    left: Any = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.left.append(y * 2)
        return x + y


class KeepsATensor(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


class ReturnsViews(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :]


class ReturnsItsInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x


class CallsAGraph(Layer):
    """Every second one has another constant."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.hidden = fx.symbolic_trace(lambda x: x * (1 + index % 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.hidden(x))


class CallsAFunctionInAGraph(CallsAGraph):
    """Every second one has another function of the same name."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.hidden.graph.find_nodes(op="call_function", target=operator.mul)[0].target = (doubled, named_alike)[index % 2]
        self.hidden.recompile()


class OtherGraph(fx.GraphModule):
    pass


class CallsAnotherKindOfGraph(CallsAGraph):
    """Its class may have code other than that of the graph."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.hidden = OtherGraph(self.hidden, self.hidden.graph)


def doubled(x: Tensor, y: int) -> Tensor:
    return x * 2


def named_alike(x: Tensor, y: int) -> Tensor:
    return x * 3


named_alike.__name__ = named_alike.__qualname__ = "doubled"
DIFFERENT = (ReadsItsIndex, 0), (Counts, 0), (SharesAList, 0), (CallsACopy, 0), (WritesToItsInput, 0), (ReadsATensorOfAnother, 0)
GRAPHS = (CallsAGraph, 2), (CallsAFunctionInAGraph, 2), (CallsAnotherKindOfGraph, 0)
ALIKE = (Layer, 3), (KeepsATensor, 0), (ReturnsViews, 3), (ReturnsItsInput, 3)


@pytest.mark.parametrize(("kind", "number"), [*DIFFERENT, *GRAPHS, *ALIKE])
def test_code_that_may_compute_something_else_is_traced(kind: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeats(Stack(kind), TOKENS, monkeypatch) == number


def test_a_drawn_number_is_drawn_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    again = RepeatedModules.call_again
    monkeypatch.setattr(RepeatedModules, "call_again", lambda *given: found.append(given) or again(*given))
    capturing.capture(Stack(DrawsANumber), TOKENS)
    assert not found


def test_hooks_inside_run_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Stack(Layer), []
    for layer in model.layers:
        layer.inner.register_forward_hook(lambda module, args, output: seen.append(module))
    assert not repeats(model, TOKENS, monkeypatch)
    assert len(seen) == 8


def test_hooks_on_registration_are_not_on_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = nn.modules.module.register_module_parameter_registration_hook(lambda module, name, parameter: None)
    try:
        assert repeats(Stack(Layer), TOKENS, monkeypatch) == 3
    finally:
        handle.remove()


def test_classes_are_left_as_they_were() -> None:
    model = Stack(ReadsItsIndex)
    before = {kind: dict(vars(kind)) for kind in {type(module) for module in model.modules()}}
    capturing.capture(model, TOKENS)
    assert before == {kind: dict(vars(kind)) for kind in before}
    assert [layer.index for layer in model.layers] == [0, 1, 2, 3]


def test_an_overridden_forward_is_told_from_that_of_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__(Layer)
            self.layers = nn.ModuleList([ReadsItsIndex(1), Layer(1), ReadsItsIndex(1), Layer(1)])

    assert repeats(Mixed(), TOKENS, monkeypatch) == 2


class Pair(nn.Module):
    def __init__(self, *indices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(ReadsItsIndex, indices))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_pair_is_repeated_only_if_both_of_its_layers_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(Layer)
    model.layers = nn.ModuleList([Pair(1, 1), Pair(1, 2), Pair(1, 1)])
    assert repeats(model, TOKENS, monkeypatch) == 3  # the second layer of the first pair, the first of the second, the third pair


def test_values_that_leave_a_module_through_a_global_variable_are_those_of_every_call() -> None:
    class Summed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            LeavesATensor.left.clear()
            return super().forward(x) + torch.stack(LeavesATensor.left).sum(0)

    program = capturing.capture(Summed(LeavesATensor), TOKENS)
    (together,) = (node for node in program.graph.nodes if str(node.target) == "aten.stack.default")
    doubled: Any = together.args[0]
    assert [call.path for call in program.calls if call.path.endswith("inner")] == [f"layers.{index}.inner" for index in range(4)]
    assert [program.owner[node.args[0]].path for node in doubled] == [f"layers.{index}.inner" for index in range(4)]


class Activated(Layer):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.inner(x))
        return result


def test_functions_that_modules_hold_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(Layer)
    model.layers = nn.ModuleList(map(Activated, (F.gelu, F.relu, F.gelu, F.silu)))
    assert repeats(model, TOKENS, monkeypatch) == 1
