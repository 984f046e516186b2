"""Models as other libraries write them: every pass comes through every check, or says why it does not fit and what to do."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
from graph_assessment import PASSES, first
from support import other_zoos
from support.refusals import refused
from torch import fx, nn
from torch.nn import functional as F

import retrofit
from retrofit.emitted import graph_module
from retrofit.errors import DoesNotFitError
from retrofit.rewriting import apply_reported

SEVERAL = "depths"
REFUSED = {  # by model and pass: what the reason says
    **{(kind, "merge-cross-attention"): "^merge-cross-attention: .*cross-attention" for kind in other_zoos.MODELS},
    ("nn.TransformerDecoder", "merge-cross-attention"): r"\bone matrix\b",
    ("nn.Transformer", "merge-cross-attention"): r"\bprojections\b",
    ("recurrent", "sequence-altup"): SEVERAL,
    ("recurrent", "sparse-qkv"): SEVERAL,
    ("vision transformer", "sum"): "no token",
    ("vision transformer", "lsh-attention"): r"\bscores\b",
}
QUICK = [("nn.TransformerEncoder", "sparse-ffn"), ("looped", "shared-moe"), ("functional", "sparse-qkv")]
EVERY = [(kind, one) for kind in other_zoos.MODELS for one in PASSES]


def check(kind: str, one: str) -> None:
    """The pass comes through every check, or is refused for the reason that is written down."""
    model, given = other_zoos.built(kind), other_zoos.examples(kind)
    if (kind, one) in REFUSED:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(DoesNotFitError, match=REFUSED[kind, one]):
            retrofit.apply(model, PASSES[one], example_inputs=given, emit="graph")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return
    applied = apply_reported(model, PASSES[one], example_inputs=given, emit="graph", count_flops=False)
    assert applied.report is not None and applied.report.ok and applied.rewrites[0].sites
    other = other_zoos.examples(kind, batch=3, length=17, seed=1)
    if applied.rewrites[0].exact:
        torch.testing.assert_close(first(applied.model(**other)), first(model(**other)), rtol=1e-5, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "one"), QUICK)
def test_passes_on_models_without_modules(kind: str, one: str) -> None:
    check(kind, one)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "one"), EVERY)
def test_every_pass_on_every_model(kind: str, one: str) -> None:
    check(kind, one)


@pytest.mark.long
def test_what_only_the_class_token_reaches_is_tried_on_more_of_them() -> None:
    """With this seed the hidden units that the class tokens of a small batch look up in the last block are all off."""
    kind = "vision transformer"
    torch.manual_seed(1)
    retrofit.apply(other_zoos.built(kind), "memory(lookup=softmax, buckets=8, rank=2)", example_inputs=other_zoos.examples(kind))


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["sparse-qkv(kernel=2)", "sparse-qkv(output=mult-conv)", "sequence-altup(k=3, layers=all)"])
def test_tokens_may_come_before_the_batch(spec: str) -> None:
    """torch's own default: the same weights, changed alike, give the same as where the batch comes first."""
    made = []
    for kind in ("nn.TransformerEncoder, norm first", "nn.TransformerEncoder, tokens first"):
        model, given = other_zoos.built(kind), other_zoos.examples(kind)
        graph = retrofit.apply(model, spec, example_inputs=given, emit="graph", verify=False)
        generator = torch.Generator().manual_seed(1)
        for _, parameter in sorted(graph.named_parameters()):
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        with torch.no_grad():
            made.append(first(graph(**other_zoos.examples(kind, batch=3, length=8, seed=1))))
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["looped", "nn.TransformerEncoder"])
def test_a_part_reads_its_sizes_off_its_arguments(kind: str) -> None:
    """A layer of the graph module is run on fewer tokens than the model is, as Sequence-AltUp does."""
    graph = graph_module(other_zoos.built(kind), other_zoos.examples(kind))
    layer = graph.get_submodule("layers.1" if kind == "looped" else "encoder.layers.1")
    x = torch.randn(2, 5, other_zoos.WIDTH)
    kept = torch.arange(0, 5, 2)
    assert layer(x).shape == x.shape and layer(x[:, kept]).shape == (2, 3, other_zoos.WIDTH)


def test_weights_of_one_stack_are_parameters_of_their_layers_in_the_same_memory() -> None:
    """Their gradients together are the stack's."""
    model, given = other_zoos.built("looped"), other_zoos.examples("looped")
    graph = graph_module(model, given)
    stack = model.stacked[4]
    slices = [graph.get_parameter(f"layers.{depth}.ffn.stacked.4.{depth}") for depth in range(3)]
    assert [one.data_ptr() for one in slices] == [one.data_ptr() for one in stack.unbind()]
    for one in (model, graph):
        F.cross_entropy(one(**given)[:, :-1].flatten(0, 1), given["ids"][:, 1:].flatten()).backward()
    torch.testing.assert_close(torch.stack([one.grad for one in slices]), stack.grad, rtol=1e-5, atol=1e-6)
    assert "stacked.4" not in dict(graph.named_parameters())


class Unrolled(nn.Module):
    """A recurrence written as a loop over the tokens, next to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gru = nn.Embedding(11, 8), nn.GRUCell(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(ids.shape[0], 8)
        for x in self.table(ids).unbind(1):
            state = self.gru(x, state)
        return state


def test_a_size_that_the_code_fixed_is_named_when_it_is_not_kept() -> None:
    graph = graph_module(Unrolled(), torch.zeros(2, 5, dtype=torch.long))
    assert graph(torch.ones(3, 5, dtype=torch.long)).shape == (3, 8)
    with refused(DoesNotFitError, "6", code="size", site="ids") as caught:
        graph(torch.ones(3, 6, dtype=torch.long))
    assert "5" in caught.value.why and "example_inputs" in caught.value.remedy


def test_one_example_is_enough_for_any_batch() -> None:
    model = other_zoos.built("functional")
    graph = graph_module(model, other_zoos.examples("functional", batch=1))
    other = other_zoos.examples("functional", batch=4, length=7)
    assert torch.equal(graph(**other), model(**other))


class Overlapping(nn.Module):
    """Two slices of one tensor that share rows, and one tensor read whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a[:4] + x @ self.a[2:]) @ self.b + x @ self.b[:, :4] * self.b[0]


def test_slices_that_overlap_stay_one_parameter() -> None:
    model, x = Overlapping(), torch.randn(3, 4)
    graph = graph_module(model, {"x": x})
    assert {name: value is dict(model.named_parameters())[name] for name, value in graph.named_parameters()} == {
        "a": True,
        "b": True,
    }
    torch.testing.assert_close(graph(x), model(x))


def test_nodes_know_their_values_and_the_line_they_come_from() -> None:
    graph = graph_module(other_zoos.built("functional"), other_zoos.examples("functional"))
    ffn = graph.get_submodule("layers.0.ffn")
    computed = [node for node in ffn.graph.nodes if node.op == "call_function" and node.meta.get("val") is not None]
    products = [node for node in computed if "matmul" in str(node.target)]
    assert [node.meta["val"].shape[-1] for node in products] == [other_zoos.HIDDEN, other_zoos.WIDTH]
    assert all("functional_models.py" in node.meta["stack_trace"] for node in products)


@pytest.mark.long
def test_a_widened_graph_is_a_module_like_any_other(tmp_path: Path) -> None:
    """Copied, cast, pickled, its weights read back, compiled, run on other sizes, trained."""
    kind = "nn.TransformerEncoder"
    given, other = other_zoos.examples(kind), other_zoos.examples(kind, batch=3, length=17, seed=1)
    wide = retrofit.apply(other_zoos.built(kind), "altup(k=2)", example_inputs=given, emit="graph", verify=False)
    assert isinstance(wide, fx.GraphModule)
    expected = wide(**other).detach()
    twin = copy.deepcopy(wide)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(**other).any() and torch.equal(wide(**other), expected)
    twin.load_state_dict(wide.state_dict())
    assert torch.equal(twin(**other), expected)
    assert torch.equal(pickle.loads(pickle.dumps(wide))(**other), expected)
    torch.save(wide.state_dict(), tmp_path / "weights.pt")
    twin.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    half = twin.to(torch.bfloat16)
    assert half(**other).dtype == torch.bfloat16
    torch.testing.assert_close(half(**other).float(), expected, rtol=0.1, atol=0.1)
    optimizer, losses = torch.optim.AdamW(wide.train().parameters(), lr=1e-2), []
    for _ in range(6):
        loss = F.cross_entropy(wide(**given).flatten(0, 1), given["ids"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_a_widened_graph_compiles_whole() -> None:
    given, other = other_zoos.examples("functional"), other_zoos.examples("functional", batch=3, length=17, seed=1)
    wide = retrofit.apply(other_zoos.built("functional"), "altup(k=2)", example_inputs=given, verify=False)
    compiled = torch.compile(wide, fullgraph=True, backend="aot_eager")
    for inputs in (given, other):
        torch.testing.assert_close(compiled(**inputs), wide(**inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "said"), [("functional_model", "23 of 23 tokens right"), ("exported_program", "the same bits: True")]
)
def test_the_examples_do_what_they_say(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        importlib.import_module(name).main()
    finally:
        sys.path.pop(0)
    out = capsys.readouterr().out
    assert said in out
