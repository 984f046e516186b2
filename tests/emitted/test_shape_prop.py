"""After a rewrite of a graph every node still says what it gives: its shape and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor, fx, nn

import retrofit
from retrofit.emitted.graph_parts import GraphPart

RECIPES = (
    ("sequence-altup(k=2)",),
    ("altup(k=2)", "shared-moe(experts=2)", "memory(lookup=token-id)"),
)


@pytest.mark.long
@pytest.mark.parametrize("specs", RECIPES)
def test_nodes_say_what_the_rewritten_graph_gives(specs: tuple[str, ...]) -> None:
    """Hooks record what modules return; the graph has what their calls are recorded with."""
    entry = zoo.entry("causal/llama")
    dense = zoo.build(entry).eval()
    inputs = zoo.inputs(entry, dense)
    model: Any = retrofit.apply(dense, *specs, example_inputs=inputs, emit="graph", verify=False)
    seen: dict[str, Any] = {}

    def note(path: str) -> Any:
        return lambda module, args, output: seen.__setitem__(path, output)

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules()]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    graphs = [(path, one.graph) for path, one in model.named_modules() if one is model or isinstance(one, GraphPart)]
    nodes = [(path, node) for path, graph in graphs for node in graph.nodes]
    assert all("val" in node.meta for _, node in nodes)
    calls = [(f"{path}.{node.target}".lstrip("."), node.meta["val"]) for path, node in nodes if node.op == "call_module"]
    compared = [(path, described(value), described(seen[path])) for path, value in calls if path in seen]
    assert len(compared) > 10
    assert [one for one in compared if one[1] != one[2]] == []


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return tuple(described(item) for item in value) if isinstance(value, (tuple, list)) else None


@pytest.mark.long
def test_the_graph_still_runs_as_compiled() -> None:
    """Telling leaves no trace on the classes."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = zoo.build(zoo.entry("causal/gpt2"))

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits  # type: ignore[no-any-return]

    torch.manual_seed(0)
    ids = torch.randint(0, 90, (2, 7))
    model: Any = retrofit.apply(Two().eval(), "altup(k=2)", example_inputs={"input_ids": ids}, emit="graph", verify=False)
    for part in model.modules():
        if isinstance(part, (fx.GraphModule, GraphPart)):
            assert type(part).forward.__qualname__ == "forward" and "forward" not in vars(part)
    assert model(ids).shape == (2, 7, 99)


class Turned(nn.Module):
    """Rotary positions as complex numbers: views that no others can be made from."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        angles = torch.arange(ids.shape[1])[:, None] * torch.arange(1, 5)
        turns = torch.polar(torch.ones_like(angles, dtype=torch.float32), angles.float())
        x = torch.view_as_real(torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * turns).flatten(-2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.long
def test_complex_numbers_are_propagated_too() -> None:
    ids = torch.randint(11, (2, 5))
    model: Any = retrofit.apply(Turned().eval(), "sparse-ffn(sparsity=4)", example_inputs={"ids": ids}, emit="graph", verify=False)
    found = [node.meta["val"].dtype for node in model.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert torch.complex64 in found and model(ids).shape == (2, 5, 11)
