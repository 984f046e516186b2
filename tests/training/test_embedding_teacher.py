"""Teachers of encoders: the embeddings of sentence-transformers models, the class logits of image models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from support.sentence_models import WORDS, saved_directory, sentence_model
from support.training_runs import changed, llama
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

import retrofit
from retrofit.cli import main
from retrofit.errors import TrainingError
from retrofit.passbase.replaying import correspondence
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.distillation import divergence_from_teacher
from retrofit.training.layerwise import DenseSites
from retrofit.training.objectives import embedding_distance
from retrofit.training.teaching import teach

torch.set_num_threads(1)

FFN = "sparse-ffn(sparsity=8)"
TEXT = [" ".join(WORDS[(3 * place + place // 7) % len(WORDS)] for place in range(900))]
SHORT = changed(length=12, batch_size=4, eval_every=2, steps=4)


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_a_pipeline_learns_the_embeddings_of_the_dense_one(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    dense = without_dropout(sentence_model(tmp_path / "bert"))
    start = retrofit.apply(copy.deepcopy(dense), FFN, verify=False)

    # Annealed: the first loss is the dense model's, and the distance of the embeddings is nothing.
    model = copy.deepcopy(start)
    settings = changed(SHORT, align=2, anneal=2, distil=1.0)
    run = continue_pretraining(model, TEXT, settings, teacher=dense)
    assert run.eval_losses[0][1] == pytest.approx(run.dense_loss, rel=1e-5)
    assert run.losses[0][1] == pytest.approx(0.0, abs=1e-6) and run.losses[-1][1] > 1e-4
    assert len(run.alignment) > 1 and run.alignment[-1][1] < run.alignment[0][1]

    # Plainly: one step is that of the formula, and many bring the embeddings nearer.
    model = copy.deepcopy(start)
    seen: list[torch.Tensor] = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[0]["input_ids"]) if module.training else None)
    settings = changed(SHORT, align=0, anneal=0, distil=1.0, steps=30, lr=3e-3, eval_every=30)
    torch.manual_seed(0)
    run = continue_pretraining(model, TEXT, settings, teacher=dense)
    handle.remove()
    assert run.losses[-1][1] < 0.5 * run.losses[0][1]
    features = {"input_ids": seen[-1], "attention_mask": torch.ones_like(seen[-1])}
    with torch.no_grad():
        ours, theirs, before = (one(dict(features))["sentence_embedding"] for one in (model, dense, start))
    nearer, apart = (1 - F.cosine_similarity(one, theirs, dim=-1).mean() for one in (ours, before))
    assert nearer < 0.5 * apart
    assert embedding_distance(before, theirs).item() == pytest.approx(2 * apart.item(), rel=1e-4)  # they have unit length
    assert dense(dict(features))["sentence_embedding"].requires_grad  # as it was


def test_what_makes_no_embeddings_teaches_none(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    dense = sentence_model(tmp_path / "bert")
    with refused(TrainingError, code="other-output", option="teacher"):
        continue_pretraining(dense, TEXT, SHORT, teacher=llama())
    with refused(TrainingError, code="no-logits"):
        teach(dense, TEXT, tmp_path / "logits")
    with refused(TrainingError, code="no-logits", option="teacher"):
        continue_pretraining(dense, TEXT, SHORT, teacher=tmp_path)
    with refused(TrainingError, "3", "4", code="other-model"):
        embedding_distance(torch.zeros(2, 4), torch.zeros(2, 3))


@pytest.mark.long
def test_a_directory_learns_from_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentence_transformers")
    source, text = saved_directory(tmp_path), tmp_path / "text.txt"
    text.write_text(TEXT[0])
    model = retrofit.apply(sentence_model(tmp_path / "again"), FFN, verify=False)
    retrofit.save(model, tmp_path / "sparse")
    how = ["--data", str(text), "--length", "12", "--batch-size", "4", "--steps", "2", "--align", "1"]
    assert main(["train", str(tmp_path / "sparse"), *how, "--teacher", str(source), "-o", str(tmp_path / "trained")]) == 0
    assert "the dense model" in capsys.readouterr().out


def test_class_logits_are_distilled_without_labels() -> None:
    """A loop of one's own over images: the sites align, the divergence from the dense model's logits goes down."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    dense = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, **sizes)).eval()
    for parameter in dense.parameters():
        parameter.data.mul_(6 if parameter.dim() > 1 else 1)
    model = retrofit.apply(copy.deepcopy(dense), FFN, verify=False)
    sites = DenseSites(model, dense, correspondence(model, dense).sites)
    pixels = torch.randn(8, 3, 8, 8)
    with sites.mixed(0.0):
        assert torch.equal(model(pixels).logits, dense(pixels).logits)
    with sites.aligning() as errors:
        assert torch.equal(model(pixels).logits, dense(pixels).logits)
    assert len(errors) == 2 and all(error.item() > 0 for error in errors)

    def teacher(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = dense(**batch).logits
        return logits

    batch = {"pixel_values": pixels}
    p = dense(pixels).logits.log_softmax(-1)
    expected = F.kl_div(model(pixels).logits.log_softmax(-1), p, reduction="batchmean", log_target=True)
    losses = []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        loss = divergence_from_teacher(model(**batch).logits, batch, teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(expected.item(), rel=1e-4)
    assert losses[-1] < 0.5 * losses[0]
