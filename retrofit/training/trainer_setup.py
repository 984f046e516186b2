"""What the trainers of all stages of one run have in common: the model, the windows, the settings, the folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from retrofit.errors import TrainingError
from retrofit.training import processes
from retrofit.training.objectives import Collator, Example
from retrofit.training.pace import Pace
from retrofit.training.settings import Settings
from retrofit.training.step_monitor import StepMonitor
from retrofit.training.trainers import PretrainingTrainer
from retrofit.training.windows import WINDOW, WindowDataset, numbered_windows, ordered_windows, shuffled_windows

SCHEDULER = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
SomeTrainer = TypeVar("SomeTrainer", bound=PretrainingTrainer)


@dataclasses.dataclass(frozen=True)
class Numbering:
    """The numbers in the text of the windows to train on and of those held out, and the seed of what is hidden in each."""

    train: Tensor
    held_out: Tensor
    seed: int


@dataclasses.dataclass(frozen=True)
class TrainerSetup:
    """A model that takes labels, windows to train on and held out, (windows, seq), and how and where it is trained."""

    learner: nn.Module
    collator: Collator
    windows: Tensor
    held_out: Tensor
    settings: Settings
    folder: Path
    cpu: bool
    saving: bool
    new: Sequence[nn.Parameter] = ()  # with a highest learning rate of their own
    numbering: Numbering | None = None  # where a teacher's predictions are found by the number of a window

    def trainer(
        self, kind: type[SomeTrainer], watch: StepMonitor, *, folder: Path, settings: Settings, fresh: bool, **more: Any
    ) -> SomeTrainer:
        """A trainer of this kind for the steps of `settings`, which keeps its checkpoints in `folder`."""
        trained = sum(one.numel() * one.element_size() for one in self.learner.parameters() if one.requires_grad)
        held = sum(one.numel() * one.element_size() for one in self.learner.parameters())
        watch.pace = Pace(
            evaluations=settings.eval_every is None, checkpoints=settings.paces_checkpoints, checkpoint_bytes=held + 2 * trained
        )
        trainer = kind(
            pace=watch.pace,
            model=self.learner,
            args=self.arguments(folder, settings, fresh=fresh),
            data_collator=self.collator,
            train_dataset=self.training_data(settings),
            eval_dataset=self.held_out_data() if len(self.held_out) else None,
            callbacks=[watch],
            new=self.new,
            new_rate=settings.lr_new,
            **more,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def arguments(self, folder: Path, settings: Settings, *, fresh: bool) -> TrainingArguments:
        """The trainer's arguments: windows in the order of the data set, no reports to other services, one device a process."""
        evaluate = len(self.held_out) > 0
        result = TrainingArguments(
            output_dir=str(folder),
            max_steps=settings.steps,
            per_device_train_batch_size=processes.shared_batch(settings.batch_size),
            per_device_eval_batch_size=settings.batch_size,
            train_sampling_strategy="sequential",
            learning_rate=settings.lr,
            lr_scheduler_type=SCHEDULER[settings.schedule],
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=settings.eval_steps,
            eval_on_start=evaluate and fresh,
            save_strategy="steps" if self.saving else "no",
            save_steps=settings.save_steps,
            save_total_limit=1,
            logging_steps=settings.log_steps,
            logging_nan_inf_filter=False,
            average_tokens_across_devices=False,  # every window has as many labels: the mean of the processes' means is the mean
            log_level="error",
            disable_tqdm=True,
            report_to=[],
            label_names=["labels"],
            remove_unused_columns=False,
            dataloader_pin_memory=not self.cpu,
            bf16=settings.bf16 and not processes.sharded(settings.fsdp),  # which computes in it group by group
            use_cpu=self.cpu,
            ddp_find_unused_parameters=True,  # a site at the end of its dial's way need not read all of its parameters
            seed=settings.seed,
        )
        result._n_gpu = min(result.n_gpu, 1)  # a step is `batch_size` windows however many devices there are
        return result

    @functools.cached_property
    def device(self) -> torch.device:
        return self.arguments(self.folder, self.settings, fresh=False).device

    def training_data(self, settings: Settings) -> WindowDataset:
        """The windows to train on, in their order."""
        data = shuffled_windows(self.windows, settings.steps * settings.batch_size, settings.seed)
        one = self.numbering
        return data if one is None else numbered_windows(self.windows, one.train, one.seed, data.order)

    def held_out_data(self) -> WindowDataset:
        """Every window held out, once."""
        one = self.numbering
        return (
            ordered_windows(self.held_out, self.settings.seed)
            if one is None
            else numbered_windows(self.held_out, one.held_out, one.seed)
        )

    def one_window(self) -> Example:
        """The first window to train on, as a batch."""
        batch = self.collator([self.training_data(self.settings)[0]])
        return {name: value.to(self.device) for name, value in batch.items() if name != WINDOW}

    def held_out_batches(self) -> Iterator[Example]:
        """The held-out windows as the trainers' evaluations see them, in batches."""
        data = self.held_out_data()
        for start in range(0, len(data), self.settings.batch_size):
            rows = range(start, min(start + self.settings.batch_size, len(data)))
            batch = self.collator([data[row] for row in rows])
            yield {name: value.to(self.device) for name, value in batch.items() if name != WINDOW}


def trains_on_cpu(device: str) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("--device cuda: there is no CUDA device", remedy="leave --device out, or give cpu")
    return device == "cpu" or not torch.accelerator.is_available()
