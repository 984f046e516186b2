"""A teacher's predictions on disk: what is kept is right, a run that learns from it is the run with the teacher itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from support.training_runs import MODELS, SMALL, TEXTS, Unplugged, bert, changed, llama, same_weights, unplug_at
from torch import nn
from torch.nn import functional as F

import retrofit
from retrofit.cli import main
from retrofit.cli.outputs import beside
from retrofit.errors import CheckpointError, TrainingError
from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.training import teaching
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.distillation import LargestPredictions
from retrofit.training.runs import TrainingRun
from retrofit.training.teacher_cache import RECORD, KeptPredictions
from retrofit.training.teaching import teach

torch.set_num_threads(1)

ALL = 1000  # more than any vocabulary here has


def confident(seed: int = 0) -> nn.Module:
    """A model whose predictions differ from token to token."""
    model = llama(seed)
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.dim() > 1 else 1)
    return model


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(1, 9), st.floats(0.5, 4.0), st.integers(0, 999))
def test_the_divergence_from_the_largest_is_that_of_the_formula(
    tokens: int, vocabulary: int, k: int, temperature: float, seed: int
) -> None:
    """All but the k largest are one outcome: the divergence of torch between the two merged distributions, in float64."""
    k = min(k, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))
    found_of, expected_of = student.float().requires_grad_(), student.clone().requires_grad_()
    found = LargestPredictions.of(teacher.float(), k, temperature).divergence(found_of, slice(None), temperature)
    p, q = ((one / temperature).softmax(-1) for one in (teacher, expected_of))
    order = p.argsort(-1, descending=True)
    merged = [
        torch.cat([one.gather(-1, order[:, :k]), one.gather(-1, order[:, k:]).sum(-1, keepdim=True)][: 1 + (k < vocabulary)], -1)
        for one in (p, q)
    ]
    expected = temperature**2 * F.kl_div(merged[1].log(), merged[0], reduction="sum")
    whole = temperature**2 * F.kl_div(q.log(), p, reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-5)
    assert found.item() <= whole.item() * (1 + 1e-4) + 1e-5
    for one in (found, expected):
        one.backward()
    torch.testing.assert_close(found_of.grad, expected_of.grad.float(), rtol=1e-3, atol=1e-5)  # type: ignore[union-attr]


def test_predictions_are_a_directory_and_no_file(tmp_path: Path) -> None:
    with refused(TrainingError, "kept.pt", code="name") as error:
        teach(confident(), TEXTS, tmp_path / "kept.pt", length=32)
    assert error.value.remedy.endswith(" kept")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_what_is_kept_is_what_the_model_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = confident()
    monkeypatch.setattr(teaching, "SHARD_BYTES", 7 * 32 * 22)
    kept = teach(dense, TEXTS, tmp_path / "logits", length=32, top=5, temperature=2.0, batch_size=3)
    windows = windows_of(TEXTS, codec_for(dense), 32).long()
    assert kept.facts.shard == 7 and 1 < kept.facts.shards == len(list(tmp_path.glob("logits/windows-*")))
    numbers = [8, 0, len(windows) - 1]
    logits = dense(windows[numbers]).logits
    p = (logits / 2.0).softmax(-1).flatten(0, 1)
    found = KeptPredictions.in_folder(tmp_path / "logits").predictions(numbers)
    torch.testing.assert_close(found.log_p.float().exp(), p.topk(5).values, atol=2e-3, rtol=5e-3)
    torch.testing.assert_close(p.gather(-1, found.ids.long()), p.topk(5).values)
    torch.testing.assert_close(found.log_rest.float().exp(), 1 - p.topk(5).values.sum(-1), atol=2e-3, rtol=5e-3)
    losses = [float(dense(input_ids=windows[one][None], labels=windows[one][None]).loss) for one in numbers]
    assert kept.loss(numbers) == pytest.approx(sum(losses) / 3, rel=1e-5)
    share = (dense(windows).logits / 2.0).softmax(-1).topk(5).values.sum(-1).mean()
    assert kept.kept_share() == pytest.approx(float(share), rel=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_with_all_tokens_kept_a_run_learns_what_the_teacher_itself_says(tmp_path: Path, name: str) -> None:
    """Every step's loss is that of a plain loop with the dense model on the same windows, hidden tokens included."""
    dense, student = confident() if name == "next token" else MODELS[name](), MODELS[name](1)
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    teach(dense, TEXTS, tmp_path / "logits", length=32, top=ALL)
    chosen = changed(steps=4, distil=0.7, lr=0.0, eval_every=4)
    batches: list[dict[str, torch.Tensor]] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            batches.append({key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)})

    handle = student.register_forward_pre_hook(keep, with_kwargs=True)
    run = continue_pretraining(student, TEXTS, chosen, teacher=tmp_path / "logits")
    handle.remove()
    expected = []
    for batch in batches:
        batch.pop("num_items_in_batch", None)
        with torch.no_grad():
            ours, p = student(**batch), dense(**batch).logits.log_softmax(-1)
            apart = F.kl_div(ours.logits.log_softmax(-1).flatten(0, 1), p.flatten(0, 1), reduction="batchmean", log_target=True)
            expected.append(float(0.3 * ours.loss + 0.7 * apart))
    assert [loss for _, loss in run.losses] == pytest.approx(expected, rel=1e-3) and len(expected) == 4
    assert run.stages == {"align": 0, "anneal": 0}
    if name == "next token":
        assert run.dense_loss == pytest.approx(continue_pretraining(dense, TEXTS, chosen).eval_losses[0][1], rel=1e-5)


def test_in_bfloat16_the_same_is_kept_nearly_and_another_run(tmp_path: Path) -> None:
    """What is computed in bfloat16, or hides other tokens, is another teacher to a run that is resumed."""
    plain, half = (teach(bert(), TEXTS, tmp_path / str(bf16), length=32, top=5, bf16=bf16) for bf16 in (False, True))
    windows = range(plain.facts.windows)
    assert 0 < abs(plain.loss(windows) - half.loss(windows)) < 0.02
    output = tmp_path / "model.pt"
    with pytest.raises(Unplugged):
        continue_pretraining(bert(), TEXTS, SMALL, teacher=plain.folder, output=output, progress=unplug_at(6))
    teach(bert(), TEXTS, tmp_path / "seed", length=32, top=5, seed=1)
    for other, said in ((half.folder, "--bf16 now"), (tmp_path / "seed", "--seed 1 now")):
        with refused(TrainingError, code="other-run", option="teacher") as error:
            continue_pretraining(bert(), TEXTS, SMALL, teacher=other, output=output, resume=True)
        assert said in error.value.why


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teaching, "SHARD_BYTES", 20 * 32 * 22)
    whole = teach(bert(), TEXTS, tmp_path / "whole", length=32, top=5)
    seen: list[str] = []

    def unplug(stage: str) -> None:
        seen.append(stage)
        if stage.startswith("window 40/"):
            raise Unplugged

    with pytest.raises(Unplugged):
        teach(bert(), TEXTS, tmp_path / "parts", length=32, top=5, progress=unplug, batch_size=10)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [RECORD, "windows-000000.safetensors"]
    with refused(TrainingError, "1 of", "retrofit teach", code="incomplete", option="teacher"):
        continue_pretraining(bert(), TEXTS, SMALL, teacher=tmp_path / "parts")
    first = (tmp_path / "parts" / "windows-000000.safetensors").stat().st_mtime_ns
    seen.clear()
    teach(bert(), TEXTS, tmp_path / "parts", length=32, top=5, progress=seen.append, batch_size=10)
    assert seen[0].startswith("window 30/")
    assert (tmp_path / "parts" / "windows-000000.safetensors").stat().st_mtime_ns == first
    for number in range(whole.facts.shards):
        one, other = (KeptPredictions.in_folder(tmp_path / name).shard(number) for name in ("whole", "parts"))
        for name in one.keys():  # noqa: SIM118
            torch.testing.assert_close(one.get_tensor(name).float(), other.get_tensor(name).float(), atol=2e-3, rtol=2e-3)


def test_a_run_that_learns_from_predictions_resumes(tmp_path: Path) -> None:
    teach(bert(), TEXTS, tmp_path / "logits", length=32)

    def run(path: Path, **more: Any) -> TrainingRun:
        return continue_pretraining(
            bert(1), TEXTS, changed(save_every=3), teacher=tmp_path / "logits", output=tmp_path / path, **more
        )

    def unplug(text: str) -> None:
        if text.startswith("step 5/"):
            raise Unplugged

    whole = run(Path("whole.pt"))
    with pytest.raises(Unplugged):
        run(Path("parts.pt"), progress=unplug)
    parts = run(Path("parts.pt"), resume=True)
    assert parts.losses == whole.losses and parts.eval_losses == whole.eval_losses
    assert same_weights(retrofit.load(tmp_path / "whole.pt"), retrofit.load(tmp_path / "parts.pt"))


@pytest.mark.parametrize(
    ("change", "option", "named"),
    [
        ({"length": 16}, "teacher", ("--length 32",)),
        ({"temperature": 2.0}, "teacher", ("--temperature 1",)),
        ({"texts": [TEXTS[0].upper()]}, "teacher", ("text", "tokens")),
        ({"texts": [TEXTS[0][:-200]]}, "teacher", ("text", "windows")),
        ({"model": bert}, "teacher", ("vocabulary", "300")),
        ({"align": 2}, "align", ("--align 2", "--teacher")),
        ({"anneal": 2}, "anneal", ("--anneal 2", "--teacher")),
        ({"distil_hidden": 1.0}, "distil_hidden", ("--distil-hidden 1.0", "--teacher")),
        ({"tokenizer": True}, "teacher", ("tokenizer",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_predictions_of_something_else_are_refused(
    tmp_path_factory: pytest.TempPathFactory, change: dict[str, Any], option: str, named: tuple[str, ...]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "kept-logits"
    teach(llama(), TEXTS, folder, length=32, top=5)  # again and again: it is there already
    change = dict(change)
    texts, model = change.pop("texts", TEXTS), change.pop("model", llama)()
    tokenizer = Bytes() if change.pop("tokenizer", False) else None
    with refused(TrainingError, *named, option=option):
        continue_pretraining(model, texts, changed(**change), teacher=folder, tokenizer=tokenizer)


class Bytes:
    """A tokenizer of bytes, one of which has another word."""

    all_special_ids: tuple[int, ...] = ()
    mask_token_id = eos_token_id = sep_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {f"<{byte}>": byte for byte in range(256)}

    def __call__(self, text: str, **more: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def broken() -> nn.Module:
    """A model that fails on batches."""
    model = llama()

    def fail(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["input_ids"]) > 7:
            raise RuntimeError

    model.register_forward_pre_hook(fail, with_kwargs=True)
    return model


def test_other_predictions_are_not_overwritten_unasked(tmp_path: Path) -> None:
    teach(llama(), TEXTS, tmp_path / "logits", length=32, top=5)
    with refused(TrainingError, "top", "5", "6", code="exists"):
        teach(llama(), TEXTS, tmp_path / "logits", length=32, top=6)
    with refused(TrainingError, "weights", code="exists"):
        teach(llama(1), TEXTS, tmp_path / "logits", length=32, top=5)
    (tmp_path / "logits" / "notes.txt").write_text("years of work")
    assert teach(llama(), TEXTS, tmp_path / "logits", length=32, top=6, force=True).predictions([0]).ids.shape == (32, 6)
    assert (tmp_path / "logits" / "notes.txt").read_text() == "years of work"
    with pytest.raises(RuntimeError):
        teach(broken(), TEXTS, tmp_path / "broken", length=32)
    assert teach(llama(), TEXTS, tmp_path / "broken", length=32).missing() == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with refused(TrainingError, "mine", code="occupied"):
        teach(llama(), TEXTS, tmp_path / "mine", length=32, force=True)
    with refused(CheckpointError, "nowhere", code="missing"):
        teach(llama(), TEXTS, tmp_path / "nowhere" / "logits", length=32)
    assert not (tmp_path / "nowhere").exists()
    with refused(TrainingError, "mine", code="missing", option="teacher"):
        continue_pretraining(llama(), TEXTS, SMALL, teacher=tmp_path / "mine")


def test_the_commands_teach_and_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrofit.save(llama(), tmp_path / "dense.pt")
    retrofit.save(llama(1), tmp_path / "model.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    data = ["--data", str(tmp_path / "text.txt"), "--length", "32"]
    assert main(["teach", str(tmp_path / "dense.pt"), *data, "--top", "9"]) == 0
    out = capsys.readouterr().out
    assert "the 9 most probable of 259 tokens" in out and str(tmp_path / "dense.logits") in out
    assert json.loads((tmp_path / "dense.logits" / RECORD).read_text())["teacher"] == str(tmp_path / "dense.pt")
    train = [
        "train",
        str(tmp_path / "model.pt"),
        *data,
        "--steps",
        "3",
        "--batch-size",
        "2",
        "--teacher",
        str(tmp_path / "dense.logits"),
    ]
    assert main([*train, "--length", "16"]) == 2
    assert "use --length 32" in capsys.readouterr().err
    assert main(train) == 0
    assert "the dense model" in capsys.readouterr().out
    (tmp_path / "model").mkdir()
    assert beside(tmp_path / "model", "logits") == tmp_path / "model.logits"
