"""What an approximate rewrite costs is what a plain loop measures, and is said in words that fit it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import only_stages
from support.tiny_models import bert, llama, t5
from torch.nn import functional as F
from transformers import BertModel

import retrofit
from retrofit.cli import main
from retrofit.planning.quality import TRAIN_FROM, DenseOutputs, Verdict, hold_back
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings

TEXT = "The quick brown fox jumps over the lazy dog; the dog does not mind, and sleeps on. "
SPARSE = "sparse-ffn(sparsity=8)"


def windows(count: int, length: int = 16, vocabulary: int = 61) -> torch.Tensor:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


def perturbed(model: Any, size: float = 0.1) -> Any:
    """The same model with noise on its weights."""
    other = copy.deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in other.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return other


def test_loss_and_divergence_are_those_of_a_plain_loop() -> None:
    dense, ids = llama(vocab_size=300), windows(5)
    other = perturbed(dense)
    verdict = DenseOutputs.of(dense, ids).verdict(other)
    losses: dict[str, list[float]] = {"before": [], "after": []}
    apart = []
    with torch.no_grad():
        for row in ids:
            p, q = (model(row[None]).logits[0].log_softmax(-1) for model in (dense, other))
            losses["before"].append(float(F.nll_loss(p[:-1], row[1:])))
            losses["after"].append(float(F.nll_loss(q[:-1], row[1:])))
            apart += [float((p[at].exp() * (p[at] - q[at])).sum()) for at in range(len(row))]
    added = torch.tensor(losses["after"]) - torch.tensor(losses["before"])
    assert verdict.before == pytest.approx(sum(losses["before"]) / 5, rel=1e-4)
    assert verdict.added == pytest.approx(float(added.mean()), abs=1e-4)
    assert verdict.distance == pytest.approx(sum(apart) / len(apart), rel=1e-3)
    assert verdict.noise == pytest.approx(float(added.std()) / 5**0.5, rel=1e-3)


@pytest.mark.parametrize("build", [llama, bert, t5])
def test_a_model_that_is_the_same_has_lost_nothing(build: Any) -> None:
    dense = build(vocab_size=300)
    verdict = DenseOutputs.of(dense, windows(4)).verdict(copy.deepcopy(dense))
    assert verdict.before is not None and verdict.added == pytest.approx(0, abs=1e-5) and verdict.distance < 1e-5
    assert verdict.within_noise and not verdict.needs_training
    assert DenseOutputs.of(dense, windows(4)).verdict(perturbed(dense)).distance > 1e-3


def test_a_model_without_a_loss_is_held_to_its_outputs() -> None:
    dense = BertModel(bert().config).eval()
    other = perturbed(dense, 0.3)
    verdict = DenseOutputs.of(dense, windows(4)).verdict(other)
    assert verdict.before is None and verdict.added == verdict.distance > TRAIN_FROM and verdict.needs_training
    assert "nats" not in str(verdict)


@pytest.mark.parametrize(
    ("before", "after", "distance", "noise", "words"),
    [
        (2.5, 3.17, 0.67, 0.05, "2.50 → 3.17, +0.67 nats (KL 0.67): train it before use"),
        (2.5, 2.51, 0.02, 0.01, "within noise"),
        (2.5, 2.55, 0.06, 0.01, "usable"),
        (2.5, 2.5, 0.8, 0.01, "train it before use"),  # the loss of an untrained model says nothing
        (2.5, 2.51, 0.02, None, "usable"),  # of one window nothing is known of chance
    ],
)
def test_the_words_fit_the_figures(before: float, after: float, distance: float, noise: float | None, words: str) -> None:
    assert words in str(Verdict("held-out", before, after, distance, noise))


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 40, 143, 1000])
def test_what_is_held_back_is_not_fitted_on(count: int) -> None:
    ids = torch.arange(count)[:, None]
    fitted, held = ({int(one) for one in part} for part in hold_back(ids))
    assert fitted and held and fitted | held == set(range(count))
    assert not fitted & held if count >= 4 else fitted == set(range(count))
    assert len(held) <= max(1, min(8, count // 8)) or count < 4


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained model, the current directory its home."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT * 150)
    model = llama(vocab_size=300, max_position_embeddings=128)
    continue_pretraining(model, [TEXT * 150], Settings(steps=60, batch_size=8, length=32, lr=1e-2))
    model.save_pretrained("dense")
    return tmp_path


def account(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[dict[str, str], str]:
    capsys.readouterr()
    assert main([*command, "-o", "out", "--force"]) == 0
    said = capsys.readouterr()
    rows = [line.split(maxsplit=1) for line in said.out.splitlines() if line[:1].strip()]
    return {name: value for name, value in rows if len(name) > 1}, said.err


@pytest.mark.long
def test_an_account_ends_with_the_cost_and_the_next_command(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apply = ("apply", "--no-verify", "dense", "--pass")
    told, said = account(capsys, *apply, "sparse-qkv", "--calibrate", "text.txt")
    assert "train it before use" in told["cost"] and told["next"].startswith("retrofit train out --teacher dense")
    assert "retrofit: note: held-out loss" in said and not only_stages(said)
    told, said = account(capsys, *apply, "sparse-ffn", "--sparsity", "8", "--active", "8")
    assert "cost" not in told and told["next"] == "retrofit export out" and only_stages(said)
    told, _ = account(capsys, *apply, "sum")
    assert "cost" not in told and told["next"].startswith("retrofit train out --data")
    told, _ = account(capsys, *apply, "sparse-ffn", "--sparsity", "8")
    assert "no text" in told["cost"] and told["next"].startswith("retrofit compare dense out")
    assert "bytes from id" in account(capsys, *apply, SPARSE, "--calibrate", "text.txt")[0]["text"]
    assert retrofit.recipe(retrofit.load("out"))
