"""A table says of a model what was changed in it, and puts the same into another dense model: written as text and read again."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
from typing import Any

import pytest
import torch
from support.refusals import refused
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.bundling import placing
from retrofit.bundling.placing import Placing
from retrofit.bundling.table import DenseState, Structure, TableText, WrittenGraph
from retrofit.errors import CheckpointError

DTYPE = torch.float32


class Kind(enum.Enum):
    WIDE = "wide"


@dataclasses.dataclass(frozen=True)
class Site:
    name: str
    sizes: tuple[int, ...]
    others: dict[str, float]


class Shift(nn.Module):
    """A module with every kind of attribute: its constructor cannot be called without what it is made of."""

    def __init__(self, layer: nn.Module, size: int) -> None:
        super().__init__()
        self.layer, self.none = layer, None
        self.site = Site("model.layers.0", (size,), {"a": math.inf, "b": -0.5})
        self.kind, self.dtype, self.function, self.words = Kind.WIDE, torch.float16, F.silu, ["it's", 'a "word"', "{i}"]
        self.shift = nn.Parameter(torch.zeros(size))
        self.exact = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
        self.register_parameter("missing", None)
        self.register_buffer("order", torch.arange(size))
        self.register_buffer("sums", torch.ones(size), persistent=False)
        self.rebuild_buffers()

    def rebuild_buffers(self) -> None:
        self.sums = self.shift.detach() * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)) + self.shift + self.sums

    def before(self, module: nn.Module, args: Any) -> Any:
        return (args[0] + self.shift,)


def doubled(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output * 2


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head, self.scale = nn.Linear(4, 5, bias=False), 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def rewritten(model: Dense) -> None:
    """The model has other modules, shared ones, hooks, weights of other sizes, and modules that know of each other."""
    shared = Shift(nn.Identity(), 4)
    model.layers[0] = Shift(model.layers[0], 4)
    model.layers[1] = shared
    model.layers[2] = nn.Sequential(model.layers[2], shared)
    model.head.weight, model.head.out_features, model.scale = nn.Parameter(torch.zeros(7, 4)), 7, 3
    model.head.add_module("shift", shared)
    model.head.register_forward_pre_hook(shared.before)
    model.head.register_forward_hook(doubled, with_kwargs=True)
    graph = fx.symbolic_trace(Halved())
    model.layers.append(graph)
    shared.__dict__["first"] = model.layers[0]  # no child: it is one elsewhere
    model.layers[0].__dict__["back"] = shared


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.drop(x)) / 2


def described(model: nn.Module, change: Any) -> dict[str, Any]:
    dense = DenseState(model)
    change(model)
    return Structure(model, dense, DTYPE).table


def read_again(table: dict[str, Any]) -> dict[str, Any]:
    """The table, from its text."""
    graphs: dict[WrittenGraph, str] = {}

    def own(value: Any) -> str:
        if isinstance(value, WrittenGraph):
            return graphs.setdefault(value, f"Graph{len(graphs)}")
        return value.__name__ if getattr(value, "__module__", "") == __name__ else ""

    written = TableText(own)
    text = written.write(table)
    names = {**vars(placing), **globals()}
    names["Dense"] = placing.Dense
    for one in written.imports:
        exec(one.statement(), names)
    for graph, name in graphs.items():
        for statement in graph.imports:
            exec(statement, names)
        exec(graph.source(name), names)
    found: dict[str, Any] = eval(text, names)
    return found


@functools.cache
def pair() -> tuple[Dense, Dense]:
    """A model that was rewritten, and a dense one that a table made the same of, with the same weights."""
    torch.manual_seed(0)
    first = Dense()
    second = copy.deepcopy(first)
    table = described(first, rewritten)
    Placing(second, "").place(read_again(table))
    with torch.no_grad():
        for weight in first.parameters():
            weight.normal_()
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        for module in model.modules():
            if isinstance(module, Shift):
                module.rebuild_buffers()
    return first, second


def test_the_same_modules_stand_in_the_same_places() -> None:
    first, second = pair()
    ours, theirs = ([(path, module) for path, module in one.named_modules(remove_duplicate=False)] for one in (second, first))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        assert type(one) is type(other) or isinstance(other, fx.GraphModule), path
    assert second.layers[1] is second.layers[2][1] is second.head.shift  # type: ignore[index]


def test_it_computes_the_same() -> None:
    x = torch.randn(2, 4)
    first, second = pair()
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), first(x + 1))


def test_attributes_weights_and_buffers_are_the_same() -> None:
    first, second = (one.layers[0] for one in pair())
    assert {**vars(first)["site"].__dict__} == {**vars(second)["site"].__dict__}
    for name in ("none", "kind", "dtype", "function", "words"):
        assert getattr(first, name) == getattr(second, name), name
    for one, other in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert (one[0], one[1].dtype, one[1].requires_grad) == (other[0], other[1].dtype, other[1].requires_grad)
    assert list(first.state_dict()) == list(second.state_dict())
    assert "missing" in second._parameters and "sums" in second._non_persistent_buffers_set


def test_modules_that_know_of_each_other_without_being_children_do_so_again() -> None:
    _, second = pair()
    assert second.layers[1].__dict__["first"] is second.layers[0]
    assert second.layers[0].__dict__["back"] is second.layers[1]


def test_only_what_differs_is_in_a_table() -> None:
    assert described(Dense(), lambda model: None) == {}
    table = described(Dense(), lambda model: setattr(model, "scale", 2))
    assert table == {"scale": 2}


def test_depths_with_the_same_entry_are_written_once() -> None:
    table = described(Dense(), lambda model: [model.layers.__setitem__(i, nn.Sequential(model.layers[i])) for i in (0, 1, 2)])
    text = TableText(lambda value: "").write(table)
    assert text.count("New(") == 1 and "for i in range(3)" in text, text
    assert read_again(table).keys() == {"layers.0", "layers.1", "layers.2"}


@pytest.mark.parametrize("path", ["layers.{}", 'a"b\\.{}', "a'{{1/0}}'.{}"])
@pytest.mark.parametrize("rest", ["{1/0}", '"+str(1/0)+"', "'\\\"\\", "{{x}}\n", "}{"])
def test_no_text_in_a_table_is_evaluated(path: str, rest: str) -> None:
    """Alone, and as a part of the formatted text that is written for several depths."""
    table = {f"{path.format(i)}.note": f"{path.format(i)}.{rest}" for i in (0, 1, 2)} | {"other": rest, rest: "other"}
    written = TableText(lambda value: "").write(table)
    assert written.count(" for i in range(3)") == 1
    assert eval(written) == table


class Keeps(nn.Module):
    def __init__(self, **kept: Any) -> None:
        super().__init__()
        self.__dict__.update(kept)


def local_class() -> nn.Module:
    class Local(nn.Module):
        pass

    return Local()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: Keeps(kept=torch.zeros(2)), "a tensor that is neither"),
        (lambda: Keeps(kept=lambda x: x), "a function without a name"),
        (lambda: Keeps(kept=functools.partial(print)), "an object of partial"),
        (local_class, "defined inside a function"),
    ],
)
def test_what_no_table_can_say_is_refused(module: Any, why: str) -> None:
    with refused(CheckpointError, "layers.0") as caught:
        described(Dense(), lambda model: model.layers.__setitem__(0, module()))
    assert why in str(caught.value) and caught.value.remedy


def test_a_buffer_that_is_neither_saved_nor_rebuilt_is_refused() -> None:
    module = nn.Identity()
    module.register_buffer("kept", torch.zeros(2), persistent=False)
    with refused(CheckpointError, "kept") as caught:
        described(Dense(), lambda model: model.layers.__setitem__(0, module))
    assert "rebuild_buffers" in str(caught.value)
