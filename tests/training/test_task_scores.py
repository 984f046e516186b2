"""Tasks of lm-evaluation-harness on local data, where it is installed: the scores are those of a plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_tasks import write_task
from support.refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import retrofit
from retrofit.cli import main
from retrofit.errors import TrainingError
from retrofit.training.model_comparison import PACKAGE, metrics_of, require_package, task_scores

WORDS = "[UNK] </s> the cat dog sat ran up down".split()
QUESTIONS = [("the cat", 0), ("the dog", 1), ("up the", 1), ("down", 0), ("cat cat", 1), ("dog ran", 0)]
CHOICES = ("sat down", "ran up")


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", eos_token="</s>")


def language_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), bos_token_id=None, eos_token_id=1, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def written_task(folder: Path) -> Path:
    write_task(folder, "cats", QUESTIONS, CHOICES)
    return folder


@torch.no_grad()
def accuracy(model: Any) -> float:
    """How often the right choice is the more probable one after its question."""
    encode, right = tokenizer(), 0
    for question, answer in QUESTIONS:
        start = encode(question)["input_ids"]
        chances = []
        for choice in CHOICES:
            ids = torch.tensor([*start, *encode(choice)["input_ids"]])
            logs = model(ids[None]).logits[0].double().log_softmax(-1)
            chances.append(float(sum(logs[place - 1, ids[place]] for place in range(len(start), len(ids)))))
        right += chances.index(max(chances)) == answer
    return right / len(QUESTIONS)


def test_scores_are_those_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PACKAGE)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    dense = language_model()
    sparse = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=8)", verify=False)
    folder = written_task(tmp_path)
    scores = task_scores({"dense": dense, "sparse": sparse}, ["cats"], tokenizer=tokenizer(), folder=folder)
    assert scores == {name: {"cats acc": pytest.approx(accuracy(model))} for name, model in (("dense", dense), ("sparse", sparse))}
    with refused(TrainingError, "'dogs'", code="missing", option="lm_eval"):
        task_scores({"dense": dense}, ["dogs"], tokenizer=tokenizer(), folder=folder)
    with refused(TrainingError, option="tokenizer"):
        task_scores({"dense": dense}, ["cats"], tokenizer=None, folder=folder)
    with refused(TrainingError, code="no-logits", option="lm_eval"):
        task_scores({"other": nn.Linear(2, 2)}, ["cats"], tokenizer=tokenizer(), folder=folder)
    (tmp_path / "cats.jsonl").unlink()
    with refused(TrainingError, "cats", code="does-not-run", option="lm_eval"):
        task_scores({"dense": dense}, ["cats"], tokenizer=tokenizer(), folder=folder)


def test_the_command_prints_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(PACKAGE)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    dense = language_model()
    dense.save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat down the dog ran up " * 60)
    words = ["compare", str(tmp_path / "dense"), str(tmp_path / "dense"), "--data", str(text), "--length", "16", "--windows", "2"]
    assert main([*words, "--lm-eval", "cats", "--lm-eval-tasks", str(written_task(tmp_path))]) == 0
    assert f"{accuracy(dense):.4f}" in next(line for line in capsys.readouterr().out.splitlines() if "cats acc" in line)


def test_a_missing_package_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrofit.training.model_comparison.PACKAGE", "no_such_package")
    with pytest.raises(TrainingError) as caught:
        require_package()
    assert caught.value.remedy == "pip install 'retrofit-transformers[eval]'"


def test_metrics_are_named_by_task_and_filter_and_errors_are_left_out() -> None:
    results = {"one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1}, "two": {"exact_match,strict": 1, "sample_len": 6}}
    assert metrics_of(results) == {"one acc": 0.5, "two exact_match (strict)": 1.0}
