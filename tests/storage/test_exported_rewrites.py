"""`.pt2` files of rewritten graphs: they hold the passes' own modules, which train from the file as they do in memory."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.feed_forward_models import Model, Plain
from support.functional_models import Functional
from support.own_models import Own
from support.refusals import refused
from support.tiny_models import llama
from torch import Tensor, nn

import retrofit
from retrofit.cli import main
from retrofit.emitted import dense_graph
from retrofit.errors import CheckpointError, RetrofitWarning
from retrofit.training.teacher import Teacher

IDS = torch.randint(3, 30, (3, 12), generator=torch.Generator().manual_seed(0))
SPECS = (
    "sparse-ffn(sparsity=4)",
    "shared-moe(experts=2, sources=0+1)",
    "altup(k=2), sparse-ffn(sparsity=4)",
    "lsh-attention(buckets=2, chunk=4)",
    "sequence-altup(k=2, layers=all)",
    "sparse-qkv(modules=2)",
    "sparse-loss(modules=4)",
    "recurrence",
    "reversible",
    "memory",
    "sum",
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a dense transformer that is one function, with dropout."""
    path = tmp_path_factory.mktemp("dense") / "model.pt2"
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(Functional(2, 0.1).eval(), (IDS[:, :7],), dynamic_shapes=sizes, strict=False), path)
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a dense Llama, whose embedding is its head."""
    return retrofit.save(llama(tie_word_embeddings=True), tmp_path_factory.mktemp("tied") / "model.pt2")


def rewritten(dense: Path, spec: str) -> nn.Module:
    """The graph in the file, rewritten, with parameters that are not as the passes begin them."""
    passes = [one if one.endswith(")") else f"{one})" for one in spec.split("), ")] if "(" in spec else [spec]
    model = retrofit.apply(retrofit.load(dense), *passes, verify=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def step(model: nn.Module, given: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of a step of training with its own noise, and the gradients by name."""
    model.train().zero_grad()
    torch.manual_seed(0)
    loss = nn.functional.cross_entropy(model(given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two steps gave the same bits."""
    (loss, gradients), (other, others) = ours, theirs
    pairs = [(one, others[name]) for name, one in gradients.items()]
    return torch.equal(loss, other) and gradients.keys() == others.keys() and all(equal(*pair) for pair in pairs)


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", SPECS)
def test_a_rewritten_graph_trains_from_its_file_as_in_memory(dense: Path, spec: str, tmp_path: Path) -> None:
    model = rewritten(dense, spec)
    path = retrofit.save(model, tmp_path / "model.pt2")
    loaded = retrofit.load(path)
    with torch.no_grad():
        assert torch.equal(loaded(IDS), model.eval()(IDS))
        alone = torch.export.load(path).module()  # torch needs nothing of retrofit to run it
        for ids in (IDS, IDS[:2, :5].contiguous(), IDS.repeat(2, 3)):  # of other sizes too
            torch.testing.assert_close(alone(ids=ids), model(ids), atol=1e-4, rtol=1e-4)
    assert retrofit.recipe(loaded) == retrofit.recipe(model)
    assert same(step(loaded), step(model))
    again = retrofit.load(retrofit.save(loaded.eval(), tmp_path / "again.pt2"))
    assert same(step(again), step(model))


@pytest.mark.long
def test_ties_and_frozen_parameters_are_kept(tied: Path, tmp_path: Path) -> None:
    model = rewritten(tied, "sparse-ffn(sparsity=4)")
    frozen = next(name for name, _ in model.named_parameters() if name.endswith("c1"))
    model.get_parameter(frozen).requires_grad_(False)
    loaded = retrofit.load(retrofit.save(model.bfloat16(), tmp_path / "model.pt2"))
    held = dict(loaded.named_parameters(remove_duplicate=False))
    assert held.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert held["lm_head.weight"] is held["model.embed_tokens.weight"]
    assert [name for name, one in loaded.named_parameters() if not one.requires_grad] == [frozen]
    assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}
    buffers = dict(loaded.named_buffers())
    assert {name: one.dtype for name, one in buffers.items()} == {name: one.dtype for name, one in model.named_buffers()}


@pytest.mark.long
def test_the_file_holds_the_weights_once(tied: Path, tmp_path: Path) -> None:
    model = rewritten(tied, "sparse-ffn(sparsity=4)")
    with zipfile.ZipFile(retrofit.save(model, tmp_path / "model.pt2")) as archive:
        held = [one.file_size for one in archive.infolist() if "/data/weights/weight_" in one.filename]
    weights = sum(one.numel() * one.element_size() for one in model.state_dict().values())
    once = weights - 4 * model.get_parameter("lm_head.weight").numel()
    assert once <= sum(held) <= once + 8 * len(held)


@pytest.mark.long
def test_own_models_of_functions_and_their_buffers(tmp_path: Path) -> None:
    """A model whose modules a pass does not fit becomes a graph, which keeps the values of what it computes with."""

    class Masked(Own):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.linspace(0.5, 1.5, 24), persistent=False)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x) * self.scale
            for block in self.b:
                y = block(y)
            return self.c(y)

    model = retrofit.apply(Masked().eval(), "altup(k=2)", emit="graph", example_inputs={"x": IDS % 50}, verify=False)
    with torch.no_grad():
        model.get_buffer("scale").mul_(2)
    loaded = retrofit.load(retrofit.save(model, tmp_path / "model.pt2"))
    assert torch.equal(loaded.get_buffer("scale"), model.get_buffer("scale"))
    ours, others = (
        {one.data_ptr() for one in made.buffers()} for made in (dense_graph(model).empty(), dense_graph(model).skeleton)
    )
    assert ours and ours.isdisjoint(others)  # what is made of the dense graph is its own
    assert same(step(loaded, IDS % 50), step(model, IDS % 50))


@pytest.mark.long
def test_mixtures_of_experts(tmp_path: Path) -> None:
    """Transformers multiplies by all experts with an operator of its own, which is read without running code."""
    entry = zoo.entry("causal/mixtral")
    dense = zoo.shallow(entry)
    model = retrofit.apply(dense, "altup(k=2)", emit="graph", verify=False)
    loaded = retrofit.load(retrofit.save(model.eval(), tmp_path / "model.pt2"))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS)["logits"], model(input_ids=IDS)["logits"])
        torch.testing.assert_close(loaded(input_ids=IDS)["logits"], dense.eval()(input_ids=IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_parts_of_the_dense_program_that_are_code_are_refused(dense: Path, tmp_path: Path) -> None:
    def load_file(program: Any) -> Any:
        program["graph_module"]["graph"]["nodes"][0]["target"] = "os.system"
        return program

    path = changed(retrofit.save(rewritten(dense, "sum"), tmp_path / "model.pt2"), tmp_path / "trap.pt2", load_file)
    with refused(CheckpointError, "trap.pt2", code="untrusted"):
        retrofit.load(path)


@pytest.mark.long
def test_a_recipe_that_leads_elsewhere_gives_the_evaluation_graph_and_a_warning(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = rewritten(dense, "sparse-ffn(sparsity=4)")
    path = retrofit.save(model, tmp_path / "model.pt2")
    path = changed(path, tmp_path / "other.pt2", lambda recipe: [recipe[0].replace("rank=none", "rank=3")], "extra/retrofit.json")
    with pytest.warns(RetrofitWarning, match=r"other\.pt2\b.*\brecipe"):
        loaded = retrofit.load(path)
    with torch.no_grad():
        assert torch.equal(loaded(IDS), model.eval()(IDS))
    assert [one.rank for one in retrofit.recipe(loaded) or ()] == [3]
    assert main(["inspect", str(path)]) == 0
    assert f"retrofit: note: {path}: " in capsys.readouterr().err


def changed(path: Path, other: Path, change: Callable[[Any], Any], record: str = "models/dense.json") -> Path:
    """The archive with another record."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith(record):
                content = json.dumps(change(json.loads(content))).encode()
            new.writestr(f"{other.stem}/{name.partition('/')[2]}", content)
    return other


@pytest.mark.long
def test_undoing_a_graph_and_its_file(tied: Path, tmp_path: Path) -> None:
    wanted = retrofit.load(tied)
    model = retrofit.apply(copy.deepcopy(wanted), "altup(k=2)", verify=False)
    for rewritten_graph in (model, retrofit.load(retrofit.save(model, tmp_path / "model.pt2"))):
        undone = retrofit.undo(rewritten_graph)
        assert retrofit.recipe(undone) is None
        held = dict(undone.named_parameters(remove_duplicate=False))
        assert held.keys() == dict(wanted.named_parameters(remove_duplicate=False)).keys()
        assert all(torch.equal(one, wanted.get_parameter(name)) for name, one in held.items())
        assert held["lm_head.weight"] is held["model.embed_tokens.weight"]
        assert torch.equal(undone(IDS)["logits"], wanted(IDS)["logits"])


@pytest.mark.long
def test_a_program_exported_in_training_mode_follows_the_mode(tmp_path: Path) -> None:
    model, sizes = Functional(2, 0.3), ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    program = torch.export.export(model.train(), (IDS,), dynamic_shapes=sizes, strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = retrofit.load(tmp_path / "model.pt2")
    torch.testing.assert_close(loaded(IDS), model.eval()(IDS))
    assert torch.equal(step(loaded)[0], step(model)[0])
    assert retrofit.verify(retrofit.apply(loaded.eval(), "sum", verify=False)).ok


def test_undoing_a_graph_of_fixed_sizes(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Functional(2).eval(), (IDS[:, :7],), strict=False), tmp_path / "model.pt2")
    wanted = retrofit.load(tmp_path / "model.pt2")
    undone = retrofit.undo(retrofit.apply(copy.deepcopy(wanted), "altup(k=2)", verify=False))
    assert torch.equal(undone(IDS[:, :7]), wanted(IDS[:, :7]))


def test_weights_that_are_not_loaded_yet_are_zeros(tmp_path: Path) -> None:
    """Memory that nobody initialised may hold NaN, to which no start can be fitted; here all of it does."""
    model = retrofit.apply(Configured({"width": 32}).eval(), "altup(k=2)", "sparse-ffn(sparsity=4)", verify=False)
    path = retrofit.save(model, tmp_path / "model.pt")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what is not initialised with NaN
    try:
        loaded = retrofit.load(path)
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(loaded(IDS), model(IDS))


class Configured(Model):
    """A transformer of somebody's own whose config is a dict."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__(config["width"], *(Plain(config["width"], 64, "gelu", True) for _ in range(2)))
        self.config = config


@pytest.mark.long
def test_the_dense_model_is_known_again_whatever_its_parameters_are_called(tmp_path: Path) -> None:
    """In a graph they are named after the regions that read them, and in the model after its own modules."""
    dense = Functional(2).eval()
    model = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=4)", example_inputs=IDS, verify=False)
    loaded = retrofit.load(retrofit.save(model, tmp_path / "model.pt2"))
    assert {name for name, _ in loaded.named_parameters()}.isdisjoint(name for name, _ in dense.named_parameters())
    checks = {check.name: check for check in retrofit.verify(loaded, dense, IDS).checks}
    assert checks["parameters"].status == "passed" and "dropped" not in checks["parameters"].measured
    found = retrofit.diff(dense, loaded)
    assert found.equal == len(list(dense.parameters()))
    assert {one.name.rpartition(".")[2] for one in found.tensors} == {"c1", "c2", "bias"}
    teacher = Teacher.of(dense, loaded)
    assert [site.method for site in teacher.parts.sites] == ["sparse-ffn"] * 2
    given = {id(one) for one in dense.parameters()}
    assert {id(one) for one in teacher.model.parameters()} == given
