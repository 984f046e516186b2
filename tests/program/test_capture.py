"""Capturing models: graphs, module calls, fallbacks, dynamic shapes, and trials on a model's own calls."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.own_models import Own
from support.refusals import refused
from torch import Tensor, nn

from retrofit.emitted import graph_module
from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.inputs.model_memory import without_weights
from retrofit.program import tracing
from retrofit.program.aten_ops import op, shape
from retrofit.program.capture import capture, failed_trials, trace
from retrofit.program.dataflow import Dataflow
from retrofit.program.tracing import MAX_OPERATIONS, expression_length


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x) * scale
        return y, y + shift


class Outer(nn.Module):
    """Calls one module twice, with a positional, a second positional and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        first, second = self.inner(x, scale, shift=self.offset)
        third, _ = self.inner(first, scale, shift=second)
        return {"last": third, "sum": first + second}


def inputs() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 4), "scale": torch.randn(4)}


def test_every_call_is_recorded_in_order_and_nested() -> None:
    program = capture(Outer(), inputs())
    assert [(call.path, call.index) for call in program.calls] == [
        ("", 0),
        ("inner", 0),
        ("inner.linear", 0),
        ("inner", 1),
        ("inner.linear", 1),
    ]
    root, first, first_linear, second, second_linear = program.calls
    assert program.root is root and [call.number for call in program.calls] == list(range(5))
    assert list(second_linear.chain) == [second_linear, second, root]
    assert first.encloses(first_linear) and first.encloses(first) and not first.encloses(second_linear)


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_tensor_given_as_two_arguments_is_two_inputs(dynamic: bool) -> None:
    class Difference(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sin() - y.cos()

    given = torch.randn(5, 7)
    program = capture(Difference(), {"x": given, "y": given}, dynamic=dynamic)
    read = {op(node): program.inputs[node.all_input_nodes[0]] for node in program.graph.nodes if op(node) in ("sin", "cos")}
    assert read == {"sin": "x", "cos": "y"}


def test_inputs_and_outputs_of_calls_are_the_nodes_between_them() -> None:
    program = capture(Outer(), inputs())
    placeholders = {name: node for node, name in program.inputs.items()}
    _, first, _, second, _ = program.calls
    assert first.inputs[0] is placeholders["x"] and first.inputs[1] is placeholders["scale"]
    assert program.buffers[first.inputs["shift"]] == "offset"
    assert second.inputs[0] is first.outputs[0] and second.inputs["shift"] is first.outputs[1]
    assert program.outputs["last"] is second.outputs[0]
    assert op(program.outputs["sum"]) == "add" and program.returns is dict
    assert not any("retrofit" in str(node.target) for node in program.graph.nodes), "no marker is left"


class Stateful(Inner):
    """Leaves its last row and a table in itself."""

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        y, z = super().forward(x, scale, shift=shift)
        self.last, self.table = y[:, -1:], torch.arange(x.shape[1])
        return y, z


def test_what_a_module_keeps_between_calls_is_known_of_each_and_the_model_keeps_nothing_of_the_capture() -> None:
    model = Outer()
    model.inner = Stateful()
    flow = Dataflow(capture(model, inputs()))
    first, second = (call for call in flow.program.calls if call.path == "inner")
    for call in (first, second):
        assert {name: node in flow.depends for name, node in call.kept.items()} == {"last": True, "table": False}
        assert op(call.kept["last"]) == "slice" and call.outputs.keys() == {0, 1}
    assert not flow.reaches(second.kept["last"], first.kept["last"]) and not hasattr(model.inner, "last")


def test_the_owner_of_a_node_is_the_innermost_call_it_is_computed_in() -> None:
    program = capture(Outer(), inputs())
    owners = {op(node): [] for node in program.owner}
    for node, call in program.owner.items():
        owners[op(node)].append((call.path, call.index))
    assert owners["linear"] == [("inner.linear", 0), ("inner.linear", 1)]
    assert owners["mul"] == [("inner", 0), ("inner", 1)]
    assert owners["add"].count(("", 0)) == 1
    assert sorted(program.parameters.values()) == ["inner.linear.bias", "inner.linear.weight"]


class SharedPart(nn.Module):
    """Three blocks that hold one and the same part, the second of which calls it twice; the model calls it by another name."""

    def __init__(self) -> None:
        super().__init__()
        part = nn.Sequential(nn.Linear(4, 4))
        self.blocks = nn.ModuleList(nn.ModuleDict({"part": part}) for _ in range(3))
        for block, times in zip(self.blocks, (1, 2, 1), strict=True):
            block.forward = functools.partial(self.run, block, times)
        self.last = part

    @staticmethod
    def run(block: nn.ModuleDict, times: int, x: Tensor) -> Tensor:
        for _ in range(times):
            x = block["part"](x)
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_nodes_in_a_module_of_several_names_are_of_the_call_they_were_made_in() -> None:
    program = capture(SharedPart(), {"x": torch.randn(3, 4)})
    made = [call for node, call in program.owner.items() if op(node) == "linear"]
    assert [(call.path, call.index) for call in made] == [("blocks.0.part.0", index) for index in range(5)]
    around = [call.parent.parent.path for call in made if call.parent is not None and call.parent.parent is not None]
    assert around == ["blocks.0", "blocks.1", "blocks.1", "blocks.2", ""]


def test_the_module_is_left_as_it_was() -> None:
    model = Outer().train()
    model.inner.eval()
    capture(model, inputs())
    assert model.training and not model.inner.training and not model.inner.linear.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_dynamic_program_has_symbols_for_sizes() -> None:
    x = torch.randn(2, 5, 5)[:, :, :5]
    static, dynamic = (capture(nn.Sequential(nn.Linear(5, 5)), {"input": x}, dynamic=free) for free in (False, True))
    sizes = [next(iter(program.outputs.values())).meta["val"].shape for program in (static, dynamic)]
    assert [isinstance(size, torch.SymInt) for size in sizes[0]] == [False, False, False]
    assert [isinstance(size, torch.SymInt) for size in sizes[1]] == [True, True, False], "the width is the weight's"
    assert shape(next(iter(dynamic.outputs.values()))) == (2, 5, 5), "a size as a number is that of the capture"


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if (x > 0).all() else x.tanh()


@pytest.mark.parametrize(("value", "taken"), [(1.0, "relu"), (-1.0, "tanh")])
def test_of_a_branch_on_values_the_program_holds_the_one_taken(value: float, taken: str) -> None:
    original = Tensor.__bool__
    program = capture(Branching(), {"x": torch.full((2, 3), value)})
    assert program.branches and op(next(iter(program.outputs.values()))) == taken
    assert Tensor.__bool__ is original
    assert not capture(Outer(), inputs()).branches


class Masked(nn.Module):
    """Looks whether its mask hides all later tokens (as torch's decoder does), and whether something else holds."""

    def __init__(self, holds: Callable[[Tensor], Any] = lambda x: True) -> None:
        super().__init__()
        self.holds = holds

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        if self.holds(x) and bool((mask == torch.ones_like(mask).tril()).all()):
            return x.cumsum(1)
        return mask @ x


def test_a_branch_that_all_inputs_take_is_in_a_dynamic_program() -> None:
    """Also where the values come in a tensor of the inputs' shape."""
    for holds in (lambda x: True, lambda x: bool((torch.zeros_like(x) == 0).all())):
        given = {"x": torch.randn(2, 5, 3)}
        program = capture(Masked(holds), given, dynamic=True)
        result = next(iter(program.outputs.values()))
        assert program.branches and op(result) == "cumsum"
        assert isinstance(result.meta["val"].shape[1], torch.SymInt)
        assert not vars(given["x"]), "torch leaves marks where a trace fails"


@pytest.mark.parametrize(
    "holds",
    [
        lambda x: bool((x < 1e9).all()),  # values of the input
        lambda x: bool((torch.ones(len(x)) * x.new_zeros(1).copy_(x[0, 0, :1]) < 1e9).all()),  # written into another tensor
        lambda x: int(torch.ones(x.shape[1]).sum()) > 3,  # another answer for another size
        lambda x: bool(torch.rand(()) >= 0.0),  # chance
        lambda x: x.sum().item() > -1e9,  # what Python code reads once, it knows afterwards
    ],
)
def test_a_branch_that_other_inputs_may_not_take_is_in_none(holds: Callable[[Tensor], Any]) -> None:
    given = {"x": torch.randn(2, 5, 3)}
    with refused(CaptureError, "Masked"):
        capture(Masked(holds), given, dynamic=True)
    assert capture(Masked(holds), given).branches


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"cannot take {tuple(x.shape)}\nand a second line")


def test_what_cannot_be_traced_is_refused_with_the_first_line_of_the_reason() -> None:
    model = Failing().train()
    with refused(CaptureError, "Failing") as caught:
        capture(model, {"x": torch.ones(2)})
    assert "cannot take (2,)" in caught.value.why and "second line" not in caught.value.why
    assert "example_inputs=" in caught.value.remedy and model.training


class Interrupted(nn.Linear):
    """Ctrl-C comes while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        y = super().forward(x)
        self.went_on = True
        return y


def test_a_signal_waits_until_torch_has_traced() -> None:
    """An exception that passes through its code in C++ ends the process, or becomes another one."""
    model, before = Interrupted(2, 2), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trace(model, {"x": torch.ones(1, 2)}, None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert model.went_on


def test_the_reason_names_the_module_that_fails() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Sequential(Failing())))
    with pytest.raises(CaptureError) as caught:
        capture(model, {"input": torch.ones(3, 2)})
    assert caught.value.why == "1.1.0: ValueError: cannot take (3, 2)"
    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6)), {"input": torch.ones(2, 3)})
    assert caught.value.why.startswith("1: RuntimeError: ")


def test_in_place_operations_are_functionalized() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y[:, 0].add_(1)
            return y * 2

    program = capture(InPlace(), {"x": torch.zeros(2, 3)})
    assert not any(node.target._schema.is_mutable for node in program.owner if hasattr(node.target, "_schema"))
    assert "select_scatter" in {op(node) for node in program.owner}


@dataclasses.dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = None


@dataclasses.dataclass
class Result:
    first: Tensor
    nothing: Tensor | None
    batches: list[Batch]


class OfDataclasses(nn.Module):
    """Takes a dataclass and returns one with others in it."""

    def forward(self, batch: Batch) -> Result:
        return Result(batch.x * 2, None, [Batch(batch.x + 1)])


def test_dataclasses_are_read_as_containers_of_their_fields() -> None:
    program = capture(OfDataclasses(), {"batch": Batch(torch.ones(2, 3), torch.ones(2))})
    assert [shape(node) for node in program.inputs] == [(2, 3), (2,)]
    assert {name: op(node) for name, node in program.outputs.items()} == {"first": "mul", "batches.0.x": "add"}
    assert program.returns is Result


class Routed(nn.Module):
    """Tied tables, and a feed-forward for those tokens that a router chooses: how many depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.router, self.expert = nn.Linear(4, 1), nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        for chosen in self.router(x).squeeze(-1).gt(0).nonzero().squeeze(-1).tolist():
            x = x.index_add(0, torch.tensor([chosen]), self.expert(x[chosen : chosen + 1]))
        return self.head(x).view(*ids.shape, -1)  # type: ignore[no-any-return]


def test_tied_parameters_without_values_are_one_in_the_graph_even_where_the_code_reads_values() -> None:
    with torch.device("meta"):
        model = Routed()
        model.head.weight = model.embed.weight
    for one in (Routed(), model):
        program = capture(one, {"ids": torch.zeros(2, 3, dtype=torch.long, device=one.router.weight.device)})
        read = [name for node, name in program.parameters.items() if name in ("embed.weight", "head.weight") and node.users]
        assert len(read) == 1, read


class Padded(nn.Module):
    """A layer that pads the width of what it is given to a multiple of a number."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple, self.mix = multiple, nn.Conv2d(4, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.mix(F.pad(image, (0, (-image.shape[-1]) % self.multiple)))


class ImageModel(nn.Module):
    """A classifier of images that are padded to one multiple after another."""

    def __init__(self, *multiples: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)
        self.layers = nn.ModuleList(map(Padded, multiples))

    def forward(self, pixel_values: Tensor) -> Tensor:
        image = self.patches(pixel_values)
        for layer in self.layers:
            image = layer(image)
        return self.head(image.mean((2, 3)))


def images(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("multiples", [(), (3,)])
def test_sizes_of_images_are_dynamic(multiples: tuple[int, ...]) -> None:
    model = ImageModel(*multiples)
    graph = graph_module(model, {"pixel_values": images(2, 7, 11)})
    torch.testing.assert_close(graph(images(3, 5, 17)), model(images(3, 5, 17)))


def test_sizes_of_images_with_long_expressions_are_static_and_the_batch_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    monkeypatch.setattr(tracing, "expression_length", lambda size: lengths.append(expression_length(size)) or lengths[-1])
    model = ImageModel(3, 5, 7, 11)
    graph = graph_module(model, {"pixel_values": images(2, 7, 13)})
    assert max(lengths) > MAX_OPERATIONS, "the expressions did get long"
    torch.testing.assert_close(graph(images(3, 7, 13)), model(images(3, 7, 13)))
    with refused(DoesNotFitError, "10", "3", site="pixel_values"):
        graph(images(3, 7, 10))


IDS = {"x": torch.arange(10).view(2, 5)}


class BranchingOwn(Own):
    """A model whose code branches on the values of a tensor, which a trace does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x >= 0).all()) else super().forward(x.abs())


def on_fewer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(args[0][:, ::2], **kwargs)


def on_wider(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(torch.cat([args[0], args[0]], -1), **kwargs)


@pytest.mark.parametrize("kind", [Own, BranchingOwn])
@pytest.mark.parametrize("values", [True, False], ids=["with values", "without values"])
def test_a_trial_gets_the_arguments_of_the_dense_call_and_its_failure_is_located(kind: type[Own], values: bool) -> None:
    model = kind()
    tried = model if values else without_weights(model)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    failed = failed_trials(tried, IDS, {"b.0": on_fewer, "b.1": on_wider, "b.2": on_fewer})
    assert list(failed) == ["b.1"] and failed["b.1"].startswith("b.1.m: RuntimeError")
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items()) and model.training
    assert not any(one._forward_pre_hooks for one in tried.modules())


def test_calls_that_a_trial_makes_are_not_tried_in_turn() -> None:
    model, calls = Own(), list[str]()

    def outer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append("outer")
        module(*args, **kwargs)

    assert failed_trials(model, IDS, {"b.0": outer, "b.0.q": lambda *call: calls.append("inner")}) == {}
    assert calls == ["outer", "inner"]


def test_of_a_model_that_does_not_run_nothing_is_known() -> None:
    assert failed_trials(Own(), {"x": torch.zeros(2, 5)}, {"b.0": on_wider}) == {}
