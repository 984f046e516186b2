"""sentence-transformers: the transformer inside is rewritten, the rest kept byte for byte, and the whole loads and encodes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sentence_models import TEXTS, saved_directory, sentence_model
from torch import nn

import retrofit
from retrofit.cli import main
from retrofit.errors import CheckpointError
from retrofit.provenance import provenance_of
from retrofit.training.objectives import WithContrastiveLoss

sentence_transformers = pytest.importorskip("sentence_transformers")

SUM, FFN = "sum", "sparse-ffn(sparsity=8)"


def encoded(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.encode(TEXTS, convert_to_tensor=True)
    return out


def opened(path: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(path), device="cpu")


# ── As objects ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_transformer_in_a_live_model_is_rewritten(tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "bert")
    before = encoded(model)
    assert retrofit.apply(model, SUM) is model
    assert [one.name for one in retrofit.recipe(model) or ()] == ["sum"]
    torch.testing.assert_close(encoded(model), before, atol=1e-5, rtol=1e-5)
    assert retrofit.verify(model).ok
    model.save(str(tmp_path / "by itself"))
    retrofit.save(model, tmp_path / "by retrofit")
    for name in ("by itself", "by retrofit"):
        again = opened(tmp_path / name)
        assert retrofit.recipe(again) == retrofit.recipe(model)
        assert torch.equal(encoded(again), encoded(model))


def test_a_live_model_is_inspected_and_planned_as_its_transformer(tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "bert")
    assert len(list(retrofit.inspect(model).layers)) == 2
    plan = retrofit.plan_of(model, FFN)
    assert plan.fits and len(plan.passes[0].plan.sites) == 2
    features = model.tokenize(TEXTS)
    retrofit.apply(model, FFN, example_inputs=dict(features), verify=False)
    assert retrofit.recipe(model) is not None and encoded(model).shape == (2, 16)


@pytest.mark.long
def test_a_graph_of_a_live_model_is_that_of_its_transformer(tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "bert")
    graph = retrofit.apply(model, SUM, emit="graph", verify=False)
    assert isinstance(graph, torch.fx.GraphModule) and retrofit.recipe(model) is None


class Classifier(nn.Module):
    """A model of its own that takes token ids, with a transformers model in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(input_ids).last_hidden_state[:, 0])
        return out


def test_a_module_that_takes_the_inputs_is_rewritten_itself(tmp_path: Path) -> None:
    inner = sentence_model(tmp_path / "bert")[0].model
    model = Classifier(inner)
    retrofit.apply(model, SUM, verify=False)
    assert provenance_of(model).recipe and provenance_of(inner).is_empty


# ── As directories ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.first(1)
@pytest.mark.parametrize("nested", [False, True])
def test_the_command_line_rewrites_the_transformer_and_keeps_the_rest(tmp_path: Path, nested: bool) -> None:
    source = saved_directory(tmp_path, nested=nested)
    inside = "0_Transformer/" if nested else ""
    before, kept = encoded(opened(source)), files_of(source)
    assert main(["apply", "--pass", "sum", "--no-verify", str(source)]) == 0
    made = files_of(tmp_path / "sentences.sum")
    changed = {f"{inside}config.json", f"{inside}model.safetensors"}
    assert {name for name in made if made[name] != kept.get(name)} == changed | {"README.md"}  # the card says what it is now
    assert kept.keys() - made.keys() == {"onnx/model.onnx"}, "weights of the dense transformer in another format"
    assert "2_Dense/model.safetensors" in made
    again = opened(tmp_path / "sentences.sum")
    assert retrofit.recipe(again) is not None
    torch.testing.assert_close(encoded(again), before, atol=1e-5, rtol=1e-5)


def test_a_directory_is_verified_against_its_dense_one_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved_directory(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the lazy dog runs over the quick fox " * 200)
    arguments = ["--pass", "sparse-ffn", "--sparsity", "8", "--calibrate", str(text), "--no-verify", str(source)]
    assert main(["apply", *arguments, "-o", str(tmp_path / "sparse")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("embeddings")]
    dense, sparse = (
        opened(one).encode([text.read_text().strip()], convert_to_tensor=True) for one in (source, tmp_path / "sparse")
    )
    cosine = float(torch.cosine_similarity(dense, sparse, dim=-1))
    assert len(lines) == 1 and "over 1 lines" in lines[0] and f"lowest {cosine:.4f}" in lines[0]
    assert main(["verify", str(tmp_path / "sparse"), "--against", str(source)]) == 0
    assert main(["inspect", str(tmp_path / "sparse")]) == 0
    assert "2 layers" in capsys.readouterr().out


@pytest.mark.first(1)
@pytest.mark.parametrize("nested", [False, True])
def test_a_directory_is_trained_as_a_whole(tmp_path: Path, nested: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the dense layer after the pooling learns; what is written loads in sentence-transformers."""
    source = saved_directory(tmp_path, nested=nested)
    before = opened(source)
    if not nested:
        retrofit.apply(before, SUM, verify=False)
        before.save(str(source))
    text = tmp_path / "text.txt"
    text.write_text("the lazy dog runs over the quick fox under a house " * 60)
    how = ["--steps", "6", "--length", "12", "--batch-size", "8", "--lr", "0.01"]
    assert main(["train", str(source), "--data", str(text), *how, "-o", str(tmp_path / "trained")]) == 0
    assert "SimCSE" in capsys.readouterr().out
    again = opened(tmp_path / "trained")
    assert retrofit.recipe(again) == retrofit.recipe(before) and encoded(again).shape == (2, 16)
    learned, first = (dict(one.named_parameters()) for one in (again, before))
    assert learned.keys() == first.keys() and not torch.equal(learned["2.linear.weight"], first["2.linear.weight"])
    word = next(name for name in first if name.endswith("attention.self.value.weight"))
    assert not torch.equal(learned[word], first[word])


def test_what_cannot_be_trained_as_a_whole_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = saved_directory(tmp_path), tmp_path / "text.txt"
    text.write_text("the lazy dog runs over the quick fox " * 60)
    given = ["train", str(source), "--data", str(text), "--steps", "2", "--length", "12"]
    assert main([*given, "--batch-size", "1"]) == 2 and "--batch-size 1 " in capsys.readouterr().err
    assert main([*given, "-o", str(tmp_path / "one.pt")]) == 2 and "one.pt" in capsys.readouterr().err
    assert not (tmp_path / "one.pt").exists()


def test_embeddings_of_a_batch_are_told_apart() -> None:
    """The loss is the mean of -log softmax of the cosines over the temperature, at the text itself."""
    ways = iter([torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 5.0]])])

    class Given(nn.Module):
        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"sentence_embedding": next(ways)}

    ids = torch.zeros(2, 3, dtype=torch.long)
    loss = WithContrastiveLoss(Given())(ids, ids)[0]
    half = 0.5**0.5
    rows = [[half / 0.05, 0.0], [half / 0.05, 1 / 0.05]]
    expected = sum(math.log(sum(math.exp(value) for value in row)) - row[at] for at, row in enumerate(rows)) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_calibration_that_is_not_there_or_not_used_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    missing = str(tmp_path / "nothere.txt")
    assert main(["apply", "--pass", "sparse-ffn", "--calibrate", missing, str(tmp_path / "empty")]) == 2
    assert f"--calibrate {missing}" in capsys.readouterr().err
    assert main(["apply", "--pass", "altup", "--calibrate", missing, str(tmp_path / "empty")]) == 2
    assert "calibration" in capsys.readouterr().err


@pytest.mark.long
def test_an_export_says_what_is_not_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved_directory(tmp_path)
    assert main(["export", str(source), "--no-fuse"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("not in the file"))
    assert "Pooling, Dense, Normalize" in line


def test_a_directory_without_a_transformer_or_with_two_is_refused(tmp_path: Path) -> None:
    source = saved_directory(tmp_path)
    listed = json.loads((source / "modules.json").read_text())

    def refusal(modules: Any) -> str:
        (source / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(CheckpointError) as error:
            retrofit.load(source)
        assert str(source) in error.value.what
        return f"{error.value.code}: {error.value}"

    assert "no-model: " in refusal(listed[1:])
    assert "unreadable: " in refusal({"modules": 1})
    (source / "4_Transformer").mkdir()
    (source / "4_Transformer" / "config.json").write_text((source / "config.json").read_text())
    assert "4_Transformer" in refusal([*listed, {"idx": 4, "name": "4", "path": "4_Transformer", "type": "x"}])
