"""What `pays.py` starts from: dense models, the texts that they were trained on and go on with, and files held out of both.

The text is the Python sources of an environment, each file once, copies left out: nothing is seen twice. The first files are held
out, the next are for the dense model, those after them for what starts from it. The dense model is trained at a constant rate until
its curve is flat; whatever starts from it, the dense model itself too, then lowers the rate to zero. So "trained on" means the same
for all of them, no rate is raised again, and the dense model can be trained for longer later on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from experiment import DenseModel, SmolLM2
from texts import documentation_topics, read_sources
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import retrofit
from retrofit.inputs.model_state import evaluation_mode
from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.optimizer import NewRates
from retrofit.training.runs import folder_of, has_checkpoint
from retrofit.training.settings import Settings

HELD_OUT, MEASURED, GLANCED = 2_000_000, 512, 4  # bytes of files, windows of these, every which of these is for the curve
CALIBRATED = 64  # windows
END_OF_FILE = "<|end of file|>"


@dataclasses.dataclass(frozen=True)
class Start:
    """A dense model, how it is trained, and how it is trained on."""

    model: DenseModel | SmolLM2
    steps: int  # that it is trained on for, and so is what starts from it
    first: int  # steps that it is trained for before; none for a model that comes trained
    lr: float
    batch: int = 8
    length: int = 256
    bytes_a_token: float = 1.0  # at most: how much text the tokens are cut from
    reserve: float = 1.5  # times the first steps for which there is text
    longest: float = 1.75  # times the steps for which the dense model is trained on
    points: int = 8  # of a curve
    held_out: int = HELD_OUT  # bytes
    sources: Callable[[Path], list[str]] = read_sources
    fresh: bool = True  # nothing is seen twice; otherwise the texts are the same in both trainings, again and again
    first_lr: float | None = None  # where it is another
    first_schedule: str = "constant"
    equal_seconds: bool = False  # runs take as long as the dense one, not as many steps, and are not kept on the way
    bf16: bool = False
    device: str = "cpu"
    words: str = ""

    def settings(self, steps: int, seed: int, **more: Any) -> Settings:
        """Those of a run that is trained on: the rate rises, and falls to zero, as with `retrofit train`."""
        shape = {"batch_size": self.batch, "length": self.length, "eval_fraction": 0.0, "bf16": self.bf16, "device": self.device}
        return Settings(steps, **{"lr": self.lr, "seed": seed, **shape, **more})

    def tiny(self) -> Start:
        """The same, tiny: for a rehearsal of all that is done with it."""
        sizes = {"steps": 16, "first": min(16, self.first), "batch": 2, "length": 32, "points": 4, "held_out": 20_000}
        if not isinstance(self.model, DenseModel):
            return dataclasses.replace(self, **sizes, bytes_a_token=5.0)
        model = dataclasses.replace(self.model, width=32, units=64, layers=4, vocabulary=min(512, self.model.vocabulary))
        return dataclasses.replace(self, **sizes, model=model)


def again(model: DenseModel, words: str) -> Start:
    """The start of a model that goes on with the text it was trained on."""
    words += ", bytes, trained for 500 steps on the documentation of Python, then for 250 on the same."
    sizes = {"steps": 250, "first": 500, "batch": 4, "held_out": 15_000, "sources": documentation_topics, "longest": 1.5}
    return Start(model, lr=1e-3, first_lr=2e-3, first_schedule="cosine", fresh=False, words=words, **sizes)


STARTS = {
    "demo": Start(
        DenseModel(),
        steps=2000,
        first=10_000,
        lr=1e-3,
        words="The demo's Llama (2.8 million parameters, bytes), trained for 10,000 steps of 2,048 bytes, then for 2,000.",
    ),
    "early": Start(
        DenseModel(),
        steps=400,
        first=1200,
        lr=1e-3,
        words="The same model, whose curve is still steep: trained for 1,200 steps of 2,048 bytes, then for 400.",
    ),
    "middle": Start(
        DenseModel(),
        steps=2000,
        first=4000,
        lr=1e-3,
        words="The same model between the two: trained for 4,000 steps of 2,048 bytes, then for 2,000.",
    ),
    "tokens": Start(
        DenseModel(320, 896, 8, vocabulary=8192),
        steps=1000,
        first=2400,
        lr=1e-3,
        bytes_a_token=4.5,
        reserve=2.5,
        longest=3.5,
        bf16=True,
        words="A Llama of 12.8 million parameters with 8,192 byte pairs made from the text it was trained on, 2,400 steps of 2,048 "
        "tokens in bfloat16, then 1,000.",
    ),
    "documentation": again(DenseModel(), "The demo's Llama (2.8 million parameters)"),
    "documentation-small": again(DenseModel(128, 384, 4), "A Llama of 0.9 million parameters (d = 128)"),
    "SmolLM2": Start(
        SmolLM2(),
        steps=1250,
        first=0,
        lr=3e-4,
        batch=16,
        length=1024,
        bytes_a_token=4.0,
        longest=1.0,
        bf16=True,
        device="auto",
        equal_seconds=True,
        words="SmolLM2-135M, dense for 1,250 steps of 16,384 tokens in bfloat16, the others for as many seconds.",
    ),
}


class Texts:
    """The texts of one start, and what reads them."""

    def __init__(self, start: Start, folder: Path) -> None:
        self.start, self.folder = start, folder
        folder.mkdir(parents=True, exist_ok=True)
        sources = iter(start.sources(folder.parent))
        a_step = start.batch * start.length * start.bytes_a_token
        self.held_out = list(up_to(start.held_out, sources))
        self.first = list(up_to(start.reserve * start.first * a_step, sources) if start.fresh else sources)
        self.then = list(up_to(start.longest * start.steps * a_step, sources)) if start.fresh else self.first
        self.tokenizer = self.made_tokenizer()
        everything = hashlib.sha256("\0".join([*self.held_out, *self.first, *self.then]).encode())
        self.fingerprint = everything.hexdigest()[:12]

    def made_tokenizer(self) -> Any:
        """None for bytes, the model's own, or one that the first texts make, kept in the folder."""
        if not isinstance(self.start.model, DenseModel):
            return KnownTokens(self.start.model.tokenizer)
        if self.start.model.vocabulary == 256:
            return None
        path = self.folder / "tokenizer.json"
        if not path.exists():
            part = path.with_suffix(".part")
            byte_pairs(self.first, self.start.model.vocabulary).save(str(part))
            part.replace(path)
        return KnownTokens(PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END_OF_FILE))

    def measured(self, model: nn.Module) -> Tensor:
        """Windows spread over the files held out: (windows, tokens)."""
        windows = windows_of(self.held_out, codec_for(model, self.tokenizer), self.start.length)
        return windows[:: max(1, len(windows) // MEASURED)][:MEASURED].long()

    def calibration(self, model: nn.Module) -> Tensor:
        """Some of the windows that are trained on: (windows, tokens)."""
        return windows_of(self.then[:CALIBRATED], codec_for(model, self.tokenizer), self.start.length)[:CALIBRATED].long()

    def enough(self, texts: list[str], steps: int) -> list[str]:
        """The texts, where none of them is seen twice in so many steps; raises `ValueError` where one is."""
        if not self.start.fresh:
            return texts
        tokens = sum(map(len, texts)) if self.tokenizer is None else self.tokenizer.read(texts)
        if tokens < steps * self.start.batch * self.start.length:
            raise ValueError(f"{tokens:,} tokens are too few for {steps} steps in which nothing is seen twice")
        return texts


class KnownTokens:
    """A tokenizer that keeps the ids of each text that it has read."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        self.read([text])
        return {"input_ids": self.known[text]}

    def read(self, texts: Sequence[str]) -> int:
        """Read all these texts, many at once, and return their number of tokens."""
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        for begin in range(0, len(new), 512):
            some = new[begin : begin + 512]
            for text, ids in zip(some, self.tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"], strict=True):
                self.known[text] = torch.tensor(ids, dtype=torch.int32).numpy()
        return sum(len(self.known[text]) for text in texts)


def up_to(size: float, texts: Iterator[str]) -> Iterator[str]:
    """Yield texts from the iterator until they have `size` bytes."""
    while size > 0:
        text = next(texts)
        yield text
        size -= len(text.encode())


def byte_pairs(texts: list[str], size: int) -> Any:
    """Return a byte-level tokenizer of so many ids, of these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END_OF_FILE], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Watch:
    """Follows a run step by step: its losses on the files held out, what a step takes, and when there is no more time.

    The losses are kept beside the run, so that one that was killed has them still.
    """

    def __init__(self, model: nn.Module, windows: Tensor, start: Start, every: int, path: Path, end: float) -> None:
        self.model, self.windows, self.start, self.every, self.path, self.end = model, windows, start, every, path, end
        self.losses: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self.seconds: list[float] = []  # of the processor, on a machine that may be busy
        if not self.losses:
            self.glance(0)
        self.clock = time.process_time()

    def __call__(self, message: str) -> None:
        step = re.match(r"step (\d+)/\d+", message)
        if step is None:
            return
        self.seconds.append(time.process_time() - self.clock)
        if int(step[1]) % self.every == 0:
            self.glance(int(step[1]))
        if time.monotonic() > self.end:
            raise KeyboardInterrupt  # the run keeps a checkpoint and ends
        self.clock = time.process_time()

    def glance(self, step: int) -> None:
        """Keep the loss after this step, of some windows."""
        self.losses[str(step)] = round(loss_of(self.model, self.windows[::GLANCED], self.start), 5)
        write_json(self.path, self.losses)

    @property
    def curve(self) -> list[tuple[int, float]]:
        return sorted((int(step), loss) for step, loss in self.losses.items())

    @property
    def seconds_per_step(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0


def write_json(path: Path, value: Any) -> None:
    """Write the file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


@torch.no_grad()
def loss_of(model: nn.Module, windows: Tensor, start: Start) -> float:
    """The mean loss of these windows, in nats a token."""
    device = next(model.parameters()).device
    total = 0.0
    with evaluation_mode(model), torch.autocast(device.type, torch.bfloat16, enabled=start.bf16):
        for batch in windows.to(device).split(start.batch):
            total += model(input_ids=batch, labels=batch, use_cache=False).loss.item() * len(batch)
    return total / len(windows)


def trained(
    model: nn.Module, texts: list[str], settings: Settings, output: Path, given: Texts, end: float, keep: bool = True
) -> dict[str, Any]:
    """Train the model, in place and into `output`, from the last checkpoint where there is one; return what was found.

    Without `keep` there are no checkpoints, and no model. Raises `KeyboardInterrupt` when the time is over: the next call goes on.
    """
    start, losses = given.start, losses_of(output)
    windows = given.measured(model)
    resume = has_checkpoint(folder_of(output))
    if not (output.exists() or resume):
        losses.unlink(missing_ok=True)
    device = "cuda" if start.device == "auto" and torch.cuda.is_available() else "cpu"
    model = (retrofit.load(output) if output.exists() else model).to(device)  # killed before the figures were kept
    rates = {what: rate / settings.lr for what, rate in NewRates.of(model, settings.lr, settings.lr_new).to_dict().items()}
    began = time.monotonic()
    watch = Watch(model, windows, start, max(1, settings.steps // start.points), losses, end)
    if not output.exists():
        place = output if keep else None
        continue_pretraining(model, texts, settings, tokenizer=given.tokenizer, output=place, resume=resume, progress=watch)
    found = {"parameters": sum(parameter.numel() for parameter in model.parameters()), "new at": rates, "curve": watch.curve}
    times = {"seconds": round(time.monotonic() - began, 1), "processor seconds a step": round(watch.seconds_per_step, 4)}
    return {**found, **times, "loss": loss_of(model, windows, start)}


def losses_of(output: Path) -> Path:
    """Where the curve of a run is kept until its figures are."""
    return output.with_suffix(".losses.json")


def forget(output: Path) -> None:
    """Remove the model of a run whose figures are kept, with its checkpoints and its curve."""
    output.unlink(missing_ok=True)
    losses_of(output).unlink(missing_ok=True)
    shutil.rmtree(folder_of(output), ignore_errors=True)


def base(given: Texts, end: float) -> nn.Module:
    """Return the dense model of a start, trained where it comes untrained, from its file where it was trained before."""
    start, path = given.start, given.folder / "dense.pt"
    if not start.first:
        return start.model.trained(given.folder)
    if not (kept := path.with_suffix(".json")).exists():
        torch.manual_seed(0)
        assert isinstance(start.model, DenseModel)
        rate = {"lr": start.first_lr or start.lr, "schedule": start.first_schedule, "warmup": min(200, start.first // 10)}
        settings = start.settings(start.first, 0, **rate)
        found = trained(start.model.untrained(), given.enough(given.first, start.first), settings, path, given, end)
        write_json(kept, found)
        print(f"{given.folder.name}, dense: {found}", flush=True)
    return retrofit.load(path)
