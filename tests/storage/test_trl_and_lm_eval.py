"""TRL's trainer trains a retrofitted directory and lm-evaluation-harness scores one; neither program imports retrofit.

Both run where they are installed: pip install trl 'retrofit-transformers[eval]'
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_tasks import write_task
from support.sentence_models import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import retrofit

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]
TRAINING = f"""
import json

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

rows = Dataset.from_dict({{"input_ids": {ROWS}}})
settings = SFTConfig(
    output_dir="runs", max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, save_strategy="no",
    report_to="none", use_cpu=True, bf16=False, model_init_kwargs={{"dtype": "float32"}},
)
trainer = SFTTrainer(model="model", args=settings, train_dataset=rows)
trainer.train()
trainer.save_model("trained")
json.dump([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], open("losses.json", "w"))
"""
QUESTIONS = [("the quick", 0), ("fox", 1), ("quick fox", 1), ("the", 0)]
CHOICES = ("fox", "the quick")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def tokenizer() -> PreTrainedTokenizerFast:
    words = list(dict.fromkeys(["[UNK]", "[PAD]", "</s>", *WORDS]))
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]", eos_token="</s>")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with a widened model, in the directory `model`; its new parameters have left their start."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=32, bos_token_id=None, eos_token_id=2, pad_token_id=1, initializer_range=0.3, **sizes)
    model = retrofit.apply(LlamaForCausalLM(config).eval(), "altup(k=2)", verify=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".p", ".g")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def reloaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def run(command: list[str], folder: Path) -> None:
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@needs("trl")
def test_trl_trains_it_from_its_own_loss(written: Path) -> None:
    assert "retrofit" not in TRAINING
    model, ids = reloaded(written / "model"), torch.tensor(ROWS)
    logits = model(ids).logits[:, :-1]
    expected = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)).item()
    run(["-c", TRAINING], written)
    first, second = json.loads((written / "losses.json").read_text())
    assert first == pytest.approx(expected, rel=1e-3) and second < first
    trained = reloaded(written / "trained")
    assert [one.name for one in retrofit.recipe(trained) or ()] == ["altup"]
    before = dict(model.named_parameters())
    moved = {name for name, value in trained.named_parameters() if not torch.equal(value, before[name])}
    assert any(name.endswith(".p") for name in moved) and any(name.endswith(".g") for name in moved)


@pytest.mark.long
@needs("lm_eval")
def test_lm_eval_scores_it_as_a_loop_does(written: Path) -> None:
    write_task(written, "foxes", QUESTIONS, CHOICES)
    model = ["--model", "hf", "--model_args", "pretrained=model,dtype=float32", "--device", "cpu"]
    run(["-m", "lm_eval", *model, "--tasks", "foxes", "--include_path", ".", "--log_samples", "--output_path", "scores"], written)
    (file,) = (written / "scores").rglob("samples_foxes_*.jsonl")
    samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda one: one["doc_id"])
    scored = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]

    net, words = reloaded(written / "model"), tokenizer()
    for (question, _), found in zip(QUESTIONS, scored, strict=True):
        start = words(question)["input_ids"]
        for choice, score in zip(CHOICES, found, strict=True):
            end = words(choice)["input_ids"]
            logs = net(torch.tensor([start + end])).logits.log_softmax(-1)[0]
            expected = sum(logs[len(start) + place - 1, one].item() for place, one in enumerate(end))
            assert score == pytest.approx(expected, abs=1e-3)
