"""A model and its graph module are two derivations of one function: outputs, gradients, and what passes make of them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support import zoo
from support.functional_models import VOCABULARY, Blocks, Encoder, Flattened, Functional, Recurrent
from support.refusals import refused
from torch import fx, nn

import retrofit
from retrofit.emitted import graph_module
from retrofit.emitted.graph_parts import GraphPart
from retrofit.errors import CaptureError, CheckpointError, SpecError
from retrofit.passbase.replaying import rewrites
from retrofit.provenance import provenance_of
from retrofit.rewriting import apply_reported

MODELS = {"functional": Functional, "blocks": Blocks, "encoder": Encoder}
PASSES = (
    "altup(k=2)",
    "altup(k=2, embedding=recycled)",
    "sum",
    "memory(lookup=softmax, rank=2)",
    "sparse-ffn(sparsity=8)",
    "recurrence(rank=4)",
    "reversible",
)
SPECS = (*PASSES, "sparse-loss(modules=4)")


def ids(batch: int = 2, length: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().eval()


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_model_on_inputs_of_any_size(kind: str) -> None:
    model = made(kind)
    graph = graph_module(model, ids())
    assert isinstance(graph, fx.GraphModule)
    for batch, length in ((3, 7), (1, 17), (5, 2)):
        torch.testing.assert_close(graph(ids(batch, length)), model(ids(batch, length)), rtol=1e-6, atol=1e-6)


def test_parts_that_were_no_modules_are_and_parameters_keep_their_names() -> None:
    model = made("functional")
    graph = graph_module(model, ids())
    names = dict(graph.named_parameters())
    assert {"layers.0.attention.qkv.w.1", "layers.2.ffn.w.22", "embedding.emb", "head.out", "addend.pos"} <= set(names)
    assert all(any(name.endswith(old) and names[name] is value for name in names) for old, value in model.named_parameters())
    assert [type(graph.get_submodule(f"layers.{depth}.ffn")).__name__ for depth in range(3)] == ["GraphPart"] * 3
    assert retrofit.inspect(graph, ids()).stacks[0].layers[1].name == "layers.1"


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["altup(k=2)", "sparse-ffn(sparsity=8)"])
def test_layers_that_share_their_weights_are_one_part_called_at_every_depth(spec: str) -> None:
    model = Recurrent().eval()
    graph = graph_module(model, ids())
    called = [node.target for node in graph.graph.nodes if node.op == "call_module" and "layers" in node.target]
    assert called == ["layers.0"] * 3
    assert torch.equal(graph(ids(3, 5)), model(ids(3, 5)))
    assert len(list(graph.parameters())) == len(graph.state_dict())
    applied = apply_reported(graph, spec, example_inputs=ids())
    assert applied.report is not None and applied.report.ok and applied.rewrites[0].sites


def test_gradients_arrive_at_the_models_own_parameters() -> None:
    model = made("functional")
    graph = graph_module(model, ids())
    model(ids()).logsumexp(-1).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    graph(ids()).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("model", [Functional(p=0.5), Encoder()], ids=["functional", "encoder"])
def test_dropout_follows_the_mode(model: nn.Module) -> None:
    graph = graph_module(model.eval(), ids())
    assert torch.equal(graph(ids()), graph(ids()))
    graph.train()
    assert not torch.equal(graph(ids()), graph(ids()))
    graph.eval()
    assert torch.equal(graph(ids()), graph(ids()))


def test_attention_weights_are_dropped_in_training_too() -> None:
    """With every other dropout gone, the outputs in training still vary."""
    graph = graph_module(Functional(p=0.5).eval(), ids()).train()
    for module in graph.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert not torch.equal(graph(ids()), graph(ids()))


@pytest.mark.long
def test_dropout_of_an_exported_program_follows_the_mode_too(tmp_path: Path) -> None:
    model = made("encoder")
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(model, (ids(),), dynamic_shapes=sizes, strict=False), tmp_path / "dense.pt2")
    graph = retrofit.load(tmp_path / "dense.pt2")
    torch.testing.assert_close(graph(ids(3, 17)), model(ids(3, 17)), rtol=1e-6, atol=1e-6)
    graph.train()
    assert not torch.equal(graph(ids()), graph(ids()))


def test_it_is_copied_saved_and_cast_like_any_module(tmp_path: Path) -> None:
    graph = graph_module(made("functional"), ids())
    twin = copy.deepcopy(graph)
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert not torch.equal(next(twin.parameters()), next(graph.parameters()))
    twin.load_state_dict(graph.state_dict())
    assert torch.equal(twin(ids()), graph(ids()))
    assert graph.double()(ids()).dtype == torch.float64
    torch.save(twin, tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt", weights_only=False)(ids()), twin(ids()))


@pytest.mark.long
def test_a_copy_keeps_config_examples_and_recipe() -> None:
    """What it was captured with, its config and its recipe: a copy is rewritten, verified and saved as the original is."""
    graph = graph_module(zoo.shallow(zoo.entry("causal/gpt2")))
    widened = copy.deepcopy(retrofit.apply(copy.deepcopy(graph), "sparse-loss(modules=4)", verify=False))
    assert widened.config.model_type == graph.config.model_type == "gpt2"
    (rewrite,) = rewrites(widened)
    assert rewrite.spec.startswith("sparse-loss") and retrofit.verify(widened, graph).ok


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", SPECS)
def test_every_pass_rewrites_a_model_that_is_one_function(spec: str) -> None:
    model = made("functional")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    applied = apply_reported(model, spec, example_inputs=ids())
    assert applied.report is not None and applied.report.ok
    assert isinstance(applied.model, fx.GraphModule) and applied.model is not model
    if applied.rewrites[0].exact:
        torch.testing.assert_close(applied.model(ids(3, 5)), model(ids(3, 5)), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "spec", [*(pytest.param(one, marks=pytest.mark.long) for one in SPECS[1:]), SPECS[0], "sparse-qkv(kernel=2)"]
)
def test_tokens_that_are_flattened_for_a_product_stay_where_they_lie(spec: str) -> None:
    model = Flattened().eval()
    graph = graph_module(model, ids())
    assert torch.equal(graph(ids(3, 5)), model(ids(3, 5)))
    graphs = [part.graph for part in graph.modules() if isinstance(part, (fx.GraphModule, GraphPart))]
    products = [node for one in graphs for node in one.nodes if node.op == "call_function" and "linear" in node.name]
    assert products and not any("reshape" in product.args[0].name for product in products)
    applied = apply_reported(model, spec, example_inputs=ids())
    assert applied.report is not None and applied.report.ok and applied.rewrites[0].sites


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", PASSES)
def test_feed_forwards_inside_a_layers_code_are_found_on_the_graph(spec: str) -> None:
    model = retrofit.apply(made("blocks"), spec, emit="graph", example_inputs=ids())
    assert isinstance(model, fx.GraphModule)
    assert retrofit.recipe(model) is not None


# Between them: tied heads, fused QKV, layers shared across depth, experts, an encoder with a decoder, relative positions, images.
ENTRIES = ("causal/gpt2", "masked/albert", "seq2seq/bart")
MORE = ("causal/llama", "masked/bert", "masked/esm", "image/vit")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [*ENTRIES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_a_library_model_and_its_graph_agree(name: str) -> None:
    entry = zoo.entry(name)
    model = zoo.shallow(entry)
    graph = graph_module(model, zoo.inputs(entry, model))
    other = zoo.inputs(entry, model, batch=3, length=7, seed=3)
    assert torch.equal(zoo.logits(graph(**other)), zoo.logits(model(**other)))
    assert {id(parameter) for parameter in graph.parameters()} == {id(parameter) for parameter in model.parameters()}
    assert set(model.state_dict()) <= set(graph.state_dict())


@pytest.mark.parametrize("name", ["causal/llama", "masked/bert", "masked/albert"])
@pytest.mark.parametrize("spec", ["altup(k=2)", "sparse-ffn(sparsity=8)"])
@pytest.mark.long
def test_a_rewrite_of_the_graph_and_of_the_modules_agree(name: str, spec: str) -> None:
    """Two derivations of one recipe: outputs and gradients."""
    entry = zoo.entry(name)
    model = zoo.shallow(entry)
    given = zoo.inputs(entry, model)
    torch.manual_seed(0)
    graph = retrofit.apply(copy.deepcopy(model), spec, emit="graph", example_inputs=given)
    torch.manual_seed(0)
    tree = retrofit.apply(model, spec, example_inputs=given)
    tensors = {key: value for key, value in given.items() if torch.is_tensor(value)}
    ours, theirs = gradients(graph, tensors), gradients(tree, given)
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)


def gradients(model: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    logits = zoo.logits(model.eval()(**given))
    logits.logsumexp(-1).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {**found, "logits": logits.detach()}


def test_exported_programs_come_in_and_go_out(tmp_path: Path) -> None:
    model = made("functional")
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(model, (ids(),), dynamic_shapes=sizes, strict=False), tmp_path / "dense.pt2")
    dense = retrofit.load(tmp_path / "dense.pt2")
    assert torch.equal(dense(ids(3, 5)), model(ids(3, 5)))
    wide = retrofit.apply(dense, "altup(k=2)")
    retrofit.save(wide, tmp_path / "wide.pt2")
    back = retrofit.load(tmp_path / "wide.pt2")
    assert torch.equal(back(ids(3, 5)), wide(ids(3, 5)))
    assert str(retrofit.recipe(back)) == str(retrofit.recipe(wide))
    assert {name for name, _ in back.named_parameters()} >= {"layers.0.p", "layers.2.g"}
    checks = {check.name: check for check in retrofit.verify(back).checks}
    assert checks["gradients"].status == "passed" and "1 from the second step on" in checks["gradients"].measured
    assert checks["method"].status == "passed"


def test_a_file_that_is_no_program_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"nothing of the kind")
    with refused(CheckpointError, "model.pt2", code="unreadable"):
        retrofit.load(tmp_path / "model.pt2")
    with refused(SpecError, "tree", option="emit"):
        retrofit.apply(made("blocks"), "sum", emit="tree", example_inputs=ids())


@pytest.mark.long
def test_a_part_is_a_module_to_whoever_captures_it_again() -> None:
    graph = graph_module(made("functional"), ids())
    parts = [name for name, module in graph.named_modules() if isinstance(module, GraphPart)]
    again = graph_module(graph, ids())
    assert [name for name, module in again.named_modules() if isinstance(module, GraphPart)] == parts
    assert torch.equal(again(ids(4, 4)), graph(ids(4, 4)))


@pytest.mark.long
def test_verified_layers_that_share_a_module_still_learn() -> None:
    """The round trip restores every weight, once where one module is used in several layers."""
    model = retrofit.apply(Functional(), "shared-moe(experts=2)", example_inputs=ids())
    assert all(isinstance(one, nn.Parameter) for _, one in model.named_parameters(remove_duplicate=False))


class Masked(nn.Module):
    """A model that cannot be traced without a mask, and that hides padding where it is given none, or nothing."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.hides, self.config = hides, SimpleNamespace(pad_token_id=0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if attention_mask is None:
            padded = input_ids == 0
            attention_mask = (~padded).long() if self.hides and bool(padded.any()) else (padded | True).long()
            assert bool(attention_mask.any()), "only padding"
        seen = attention_mask[..., None]
        return self.head((self.embedding(input_ids) * seen).cumsum(1) / seen.cumsum(1).clamp(min=1))


def test_a_mask_that_was_needed_to_capture_need_not_be_given_where_that_hides_nothing() -> None:
    model = Masked(hides=False)
    graph = graph_module(model, {"input_ids": ids()})
    padded = {"input_ids": torch.cat([ids(3, 5), torch.zeros(3, 2, dtype=torch.long)], 1)}
    torch.testing.assert_close(graph(**padded), model(**padded))


def test_a_mask_is_required_where_the_model_would_hide_padding_without_one() -> None:
    model = Masked(hides=True)
    graph = graph_module(model, {"input_ids": ids()})
    assert set(provenance_of(graph).examples) == {"input_ids", "attention_mask"}
    with pytest.raises(TypeError, match="attention_mask"):
        graph(ids(3, 5))
    padded = torch.cat([ids(3, 5), torch.zeros(3, 2, dtype=torch.long)], 1)
    torch.testing.assert_close(graph(padded, (padded != 0).long()), model(padded))


class Positions(nn.Module):
    """Positions of a first token and of four in a square, in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.mix = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, 8)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        first, square = self.positions[:1], self.positions[1:].reshape(2, 2, -1).transpose(0, 1)
        return torch.cat([features.mean(1, keepdim=True) + first, self.mix(features + square.flatten(0, 1))], 1)


def test_a_part_of_a_parameter_changes_its_layout_like_any_weight() -> None:
    model, given = Positions(), torch.randn(3, 4, 8)
    graph = graph_module(model, {"features": torch.randn(2, 4, 8)})
    assert sorted(name for name, _ in graph.named_parameters() if "positions" in name) == ["positions.0", "positions.1"]
    torch.testing.assert_close(graph(given), model(given))


class Shifted(nn.Module):
    """Takes as many tokens of a longer sequence as the model has."""

    def forward(self, longer: torch.Tensor, tokens: int) -> torch.Tensor:
        return longer.narrow(1, 2, 1 + tokens) + longer.narrow(1, 0, 1 + tokens)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shifted = Shifted()

    def forward(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        return x + self.shifted(nn.functional.pad(x, (0, 0, 2, 0)), tokens)


class Counting(nn.Module):
    """Patches and a token of their own, whose number two modules inside one another compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.own, self.around = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8)), Around()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = (image.shape[2] // 4) * (image.shape[3] // 4)
        patches = self.stem(image).flatten(2).transpose(1, 2)
        return self.around(torch.cat([self.own.expand(image.shape[0], -1, -1), patches], 1), tokens)


def test_a_size_that_only_a_part_inside_a_part_computes_with_reaches_it() -> None:
    model, given = Counting().eval(), torch.randn(3, 3, 8, 24)
    graph = graph_module(model, {"image": torch.randn(2, 3, 16, 16)})
    torch.testing.assert_close(graph(given), model(given))


class Pair(nn.Module):
    """A model that takes two features in one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.mix(features["one"]) + features["other"]


def test_an_argument_that_is_no_tensor_is_named() -> None:
    with refused(CaptureError, "features", "a dict"):
        graph_module(Pair(), {"features": {"one": torch.randn(2, 8), "other": torch.randn(2, 8)}})


def test_an_argument_that_is_a_list_of_numbers_is_what_the_graph_was_captured_with() -> None:
    class Sized(Pair):
        def forward(self, features: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            return self.mix(features) * sizes[0]

    model, given = Sized(), torch.randn(3, 8)
    graph = graph_module(model, {"features": torch.randn(2, 8), "sizes": [3, 4]})
    torch.testing.assert_close(graph(given), model(given, [3, 4]))


class Step(NamedTuple):
    logits: torch.Tensor
    states: list[torch.Tensor]


@dataclasses.dataclass
class Answer:
    step: Step
    loss: torch.Tensor | None
    scores: dict[str, tuple[torch.Tensor, int]]


class Answering(Blocks):
    """Returns a dataclass with a named tuple, a list, a dict and numbers in it."""

    def forward(self, ids: torch.Tensor) -> Answer:
        states = [self.embedding(ids)]
        for one in self.layers:
            states.append(one(states[-1]))
        logits = self.head(states[-1])
        return Answer(Step(logits, states), None, {"best": (logits.amax(-1), 3)})


@pytest.mark.first(1)
def test_what_it_returns_nests_as_what_the_model_returns() -> None:
    model = Answering().eval()
    graph = graph_module(model, ids())
    answer, expected = graph(ids(3, 7)), model(ids(3, 7))
    assert type(answer) is Answer and type(answer.step) is Step and type(answer.step.states) is list
    assert answer.loss is None and answer.scores["best"][1] == 3 and list(answer.scores) == ["best"]
    pairs = zip(
        (answer.step.logits, *answer.step.states, answer.scores["best"][0]),
        (expected.step.logits, *expected.step.states, expected.scores["best"][0]),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class Plainly(Answering):
    """Returns the same as tensors, without a class of its own."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": super().forward(ids).step.logits}


@pytest.mark.long
def test_a_class_that_a_file_cannot_hold_is_refused_with_a_fix_that_works(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        retrofit.save(graph_module(Answering().eval(), ids()), tmp_path / "model.pt2")
    assert "wrap the model" in refusal.value.remedy
    assert not list(tmp_path.iterdir())
    graph = graph_module(Plainly().eval(), ids())
    retrofit.save(graph, tmp_path / "model.pt2")
    torch.testing.assert_close(retrofit.load(tmp_path / "model.pt2")(ids())["logits"], graph(ids())["logits"])
