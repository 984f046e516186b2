"""transformers' `Trainer` for each stage of a run: aligning the sites, then training the whole model with its own loss and a
teacher's.

A sharded model is trained without wrappers; its checkpoints are in parts that any number of processes reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.utils import WEIGHTS_NAME

from retrofit.errors import TrainingError
from retrofit.inputs.model_state import evaluation_mode
from retrofit.surgery.row_tables import tables_of
from retrofit.training import processes
from retrofit.training.checkpoints import (
    SCHEDULER,
    Pace,
    StepMonitor,
    not_whole,
    read_entry,
    require_numbers,
    require_state,
    require_whole_checkpoint,
    whole_checkpoint,
    write_dial,
)
from retrofit.training.layerwise import DenseSites, HiddenStates
from retrofit.training.objectives import Collator, Example, without_labels
from retrofit.training.optimizer import NewRates, TableAdamW
from retrofit.training.settings import Settings
from retrofit.training.sharding import fill_from_parts, read_parts, write_parts
from retrofit.training.teacher import ChunkedLoss, Teacher
from retrofit.training.teacher_cache import KeptTeacher
from retrofit.training.windows import WINDOW, WindowDataset, numbered_windows, ordered_windows, shuffled_windows

NO_NEW_RATES = NewRates()
ON_SAMPLE = "eval_sample_loss"  # logged by the last evaluation next to the loss of all windows
Entered = TypeVar("Entered")


class PretrainingTrainer(Trainer):
    """Trainer whose checkpoints contain the module's own state under its own names, whatever its class and wrappers.

    The parameters in `new` have peak learning rates of their own. Tables have row-wise Adagrad.
    """

    def __init__(self, pace: Pace, new: NewRates = NO_NEW_RATES, **rest: Any) -> None:
        super().__init__(**rest)
        self.pace = pace
        data: Any = self.eval_dataset
        batch_size = self.args.per_device_eval_batch_size
        self.sample = None if data is None else pace.sample(len(data), self.args.max_steps, batch_size)
        self.new = new
        self.step: contextlib.ExitStack | None = None  # contexts that last until a step's gradients are computed

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        with contextlib.ExitStack() as self.step:
            try:
                return super().training_step(*args, **named)
            finally:
                self.step = None

    @contextlib.contextmanager
    def lasting(self, context: contextlib.AbstractContextManager[Entered]) -> Iterator[Entered]:
        """Keep what is entered until the gradients of a training step are computed, for which layers may be computed again."""
        with contextlib.ExitStack() as here:
            yield (self.step or here).enter_context(context)

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        learner: Any = self.model
        if tables := tables_of(learner):
            _, options = self.get_optimizer_cls_and_kwargs(self.args, learner)
            self.optimizer_cls_and_kwargs = TableAdamW, {**options, "tables_in": learner}
            if all(parameter in tables for parameter in learner.parameters() if parameter.requires_grad):
                learner._is_accelerate_prepared = True  # makes accelerate skip DistributedDataParallel
        optimizer = super().create_optimizer(*args)
        for group, new in itertools.product(list(optimizer.param_groups), self.new.groups):
            new_parameters = set(new.parameters)
            parameters = [parameter for parameter in group["params"] if parameter in new_parameters]
            if parameters:
                group["params"] = [parameter for parameter in group["params"] if parameter not in new_parameters]
                optimizer.add_param_group({**group, "params": parameters, "lr": new.rate})
        return optimizer

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """Return the mean loss of the held-out windows; before the last step of a sample, if the pace has one.

        Each process computes its own batches.
        """
        with self.pace.timed_evaluation():
            if processes.count() == 1 and self.sample is None:
                return super().evaluate(*args, **named)
            data: Any = self.eval_dataset
            sample = range(len(data)) if self.sample is None else self.sample
            loss = self.held_out_loss(sample)
            metrics = {"eval_loss": loss}
            if self.sample is not None and self.state.global_step >= self.state.max_steps:
                others = sorted(set(range(len(data))).difference(sample))
                metrics[ON_SAMPLE] = loss
                metrics["eval_loss"] = (len(sample) * loss + len(others) * self.held_out_loss(others)) / len(data)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def held_out_loss(self, chosen: Sequence[int]) -> float:
        """Return the mean loss of these windows held out."""
        assert self.model is not None and self.data_collator is not None
        data: Any = self.eval_dataset
        size = self.args.per_device_eval_batch_size
        losses: list[tuple[Any, int]] = []
        with evaluation_mode(self.model), torch.no_grad(), self.compute_loss_context_manager():
            for batch, counts in self.shared_batches(len(chosen), size):
                rows = [data[chosen[place]] for place in batch]
                loss = self.compute_loss(self.model, self._prepare_inputs(self.data_collator(rows)))
                losses.append((loss, len(rows) if counts else 0))
        return processes.weighted_mean(losses, self.args.device)

    def shared_batches(self, rows: int, size: int) -> Iterator[tuple[range, bool]]:
        """Yield this process's rows of each batch, and whether they count."""
        for start in range(size * processes.number(), rows, size * processes.count()):
            yield range(start, min(start + size, rows)), True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert output_dir is not None and self.model is not None
        if not self.args.should_save:  # only one process writes
            return
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), Path(output_dir) / WEIGHTS_NAME)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"
        with self.pace.timed_checkpoint(), whole_checkpoint(folder):
            super()._save_checkpoint(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **named: Any) -> Any:
        if isinstance(resume_from_checkpoint, str):
            self.require_checkpoint(Path(resume_from_checkpoint))
        saved = self.pace.checkpoints and self.args.save_strategy != SaveStrategy.NO and processes.count() == 1
        try:
            with self.pace.ending_after_a_step() if saved else contextlib.nullcontext():
                return super().train(resume_from_checkpoint, *rest, **named)
        finally:
            if isinstance(optimizer := self.plain_optimizer, TableAdamW):
                optimizer.close()

    @property
    def plain_optimizer(self) -> torch.optim.Optimizer | None:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def require_checkpoint(self, folder: Path) -> None:
        """Raise `TrainingError` unless the checkpoint is whole."""
        assert self.model is not None
        require_whole_checkpoint(folder, self.model)


class AligningTrainer(PretrainingTrainer):
    """Trainer of the sites on the outputs of the dense modules; the loss is the mean of their squared errors."""

    def __init__(self, sites: DenseSites, **rest: Any) -> None:
        super().__init__(**rest)
        self.sites = sites

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert self.model is not None
        learner = self.model

        def compute() -> Tensor:
            with self.lasting(self.sites.aligning(training=model.training)) as errors:
                learner(**without_labels(learner, inputs))
            return torch.stack(errors).mean()

        loss = processes.in_forward(model, learner, compute)
        return (loss, {"loss": loss}) if return_outputs else loss


class DistillingTrainer(PretrainingTrainer):
    """Trainer of the model on its own loss and a teacher's predictions, while its sites turn from dense to rewritten.

        (1 − w) · loss + w · T² KL(teacher ‖ model) + v · Σ_l E_l / layers        w: `distil`, T: `temperature`, v: `distil_hidden`

    E_l is the squared error of the stream after layer l, relative to the dense one.

    In the first `anneal` steps the sites are mixtures, dense at the first step. Evaluation measures the model's own loss, with the
    mixtures as they are.
    """

    def __init__(
        self,
        teacher: Teacher | KeptTeacher,
        distillation: Settings,
        anneal: int,
        chunked: ChunkedLoss | None,
        hidden: HiddenStates | None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.hidden = hidden
        self.teacher, self.distillation, self.anneal, self.chunked = teacher, distillation, anneal, chunked

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert self.model is not None
        learner = self.model
        loss, outputs = processes.in_forward(model, learner, lambda: self.loss_and_outputs(learner, inputs, num_items_in_batch))
        return (loss, outputs) if return_outputs else loss

    def loss_and_outputs(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any) -> tuple[Tensor, Any]:
        """Return the loss, including that of the layers, and the model's outputs."""
        with self.lasting(self.teacher.sites.mixed(self.share)):
            if self.hidden is None or not model.training:
                return self.loss_of(model, inputs, num_items_in_batch)
            with self.hidden.recorded() as streams:
                loss, outputs = self.loss_of(model, inputs, num_items_in_batch)
                if not streams.forwards:  # the layers need nothing else from the teacher
                    self.teacher.forward(inputs)
            return loss + self.distillation.distil_hidden * streams.error(), outputs

    def loss_of(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any) -> tuple[Tensor, Any]:
        """Return the loss without that of the layers, and the model's outputs."""
        weight = self.distillation.distil
        chunked = self.chunked
        if chunked is not None and not (self.share < 1 and self.teacher.sites.replace(chunked.head.module)):
            loss = chunked.loss(model, inputs, self.teacher, weight if model.training else 0.0, self.distillation.temperature)
            return loss, {"loss": loss}
        given = {**without_labels(model, inputs), "labels": inputs["labels"]}
        loss, outputs = super().compute_loss(model, given, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training and weight:
            divergence = self.teacher.divergence(outputs, inputs, self.distillation.temperature)
            loss = (1 - weight) * loss + weight * divergence
        return loss, outputs

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        assert output_dir is not None
        if self.args.should_save:
            write_dial(Path(output_dir), self.share, self.anneal)

    @property
    def share(self) -> float:
        """λ: how far the sites have turned from the dense modules."""
        return min(1.0, self.state.global_step / self.anneal) if self.anneal else 1.0


WEIGHTS, OPTIMIZER = "weights", "optimizer"  # kinds of files
GROUPS = "param_groups"


class ShardedTrainer(PretrainingTrainer):
    """Trainer of a model that `sharding` divided, or of a whole one in a single process."""

    def __init__(self, **rest: Any) -> None:
        if processes.count() > 1:
            rest["model"]._is_accelerate_prepared = True  # makes accelerate leave the model as it is
        super().__init__(**rest)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the model's parts are on the device already."""
        if processes.count() == 1:
            model.to(device)

    def shared_batches(self, rows: int, size: int) -> Iterator[tuple[range, bool]]:
        """Return as many batches for each process, because each needs the others' parts; surplus ones do not count."""
        step = size * processes.count()
        for first in range(0, rows, step):
            start = first + size * processes.number()
            counts = start < rows
            yield range(start, min(start + size, rows)) if counts else range(min(size, rows)), counts

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert output_dir is not None and self.model is not None
        write_parts(Path(output_dir), WEIGHTS, self.model.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.plain_optimizer is not None
        state = self.plain_optimizer.state_dict()
        named = {f"{index}.{key}": value for index, entry in state["state"].items() for key, value in entry.items()}
        write_parts(Path(output_dir), OPTIMIZER, {**named, GROUPS: state[GROUPS]})
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)
        processes.wait()  # the trainer's state, written next, marks the checkpoint as complete

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        assert self.model is not None
        folder = Path(resume_from_checkpoint)
        parts = read_parts(folder, WEIGHTS)
        for name, value in self.model.state_dict().items():
            fill_from_parts(value, name, parts, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, optimizer = Path(checkpoint), self.plain_optimizer
        assert optimizer is not None
        parts = read_parts(folder, OPTIMIZER)
        groups = parts[0].get(GROUPS)
        own = optimizer.state_dict()[GROUPS]
        if not isinstance(groups, list) or [len(group["params"]) for group in groups] != [len(group["params"]) for group in own]:
            raise not_whole(folder, "the optimizer's groups are not those of the model")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.load_state_dict({"state": dict(states(parameters, parts, folder)), GROUPS: groups})
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(dict(read_entry(folder / SCHEDULER)))

    def require_checkpoint(self, folder: Path) -> None:
        require_state(folder)
        require_numbers(folder)
        for kind in (WEIGHTS, OPTIMIZER):
            read_parts(folder, kind)


class ShardedDistillingTrainer(ShardedTrainer, DistillingTrainer):
    """Distilling trainer of a sharded model, with a teacher that is sharded in the same way."""


def states(parameters: list[nn.Parameter], parts: list[Mapping[str, Any]], folder: Path) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the optimizer's state of each parameter that has one: divided as the parameter is, or a number."""
    for index, parameter in enumerate(parameters):
        keys = [name.partition(".")[2] for name in parts[0] if name.startswith(f"{index}.")]
        entry = {}
        for key in keys:
            name = f"{index}.{key}"
            like = parameter.detach() if parts[0][name]["size"] else torch.zeros(())
            entry[key] = torch.zeros_like(like)
            fill_from_parts(entry[key], name, parts, folder)
        if entry:
            yield index, entry


LEARNING_RATES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
SomeTrainer = TypeVar("SomeTrainer", bound=PretrainingTrainer)


@dataclasses.dataclass(frozen=True)
class Numbering:
    """Numbers in the text of the windows for training and of the held-out ones, and the seed of their hidden tokens."""

    train: Tensor
    held_out: Tensor
    seed: int


@dataclasses.dataclass(frozen=True)
class TrainerSetup:
    """A model that takes labels, windows for training and held-out ones, (windows, seq), and the way and place of training."""

    learner: nn.Module
    collator: Collator
    windows: Tensor
    held_out: Tensor
    settings: Settings
    folder: Path
    cpu: bool
    saving: bool
    new: NewRates = NO_NEW_RATES
    numbering: Numbering | None = None  # if a teacher's predictions are found by the number of a window

    def trainer(
        self, kind: type[SomeTrainer], watch: StepMonitor, *, folder: Path, settings: Settings, fresh: bool, **more: Any
    ) -> SomeTrainer:
        """Return a trainer of this kind for the steps of `settings`, with its checkpoints in `folder`."""
        weights = sum(parameter.nbytes for parameter in self.learner.parameters())
        moments = 2 * sum(parameter.nbytes for parameter in self.learner.parameters() if parameter.requires_grad)
        watch.pace = Pace(
            evaluations=settings.eval_every is None, checkpoints=settings.paces_checkpoints, checkpoint_bytes=weights + moments
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
            **more,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def arguments(self, folder: Path, settings: Settings, *, fresh: bool) -> TrainingArguments:
        """Return the trainer's arguments: windows in the data set's order, no reports to other services, one device a process."""
        evaluate = len(self.held_out) > 0
        result = TrainingArguments(
            output_dir=str(folder),
            max_steps=settings.steps,
            per_device_train_batch_size=processes.shared_batch(settings.batch_size),
            per_device_eval_batch_size=settings.batch_size,
            train_sampling_strategy="sequential",
            learning_rate=settings.lr,
            lr_scheduler_type=LEARNING_RATES[settings.schedule],
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
            average_tokens_across_devices=False,  # every window has as many labels: the mean over processes is the mean over labels
            log_level="error",
            disable_tqdm=True,
            report_to=[],
            label_names=["labels"],
            remove_unused_columns=False,
            dataloader_pin_memory=not self.cpu,
            bf16=settings.bf16 and not processes.sharded(settings.fsdp),  # FSDP2 computes in bfloat16 itself, group by group
            use_cpu=self.cpu,
            ddp_find_unused_parameters=True,  # a fully turned site may leave some of its parameters unread
            seed=settings.seed,
        )
        result._n_gpu = min(result.n_gpu, 1)  # a step is `batch_size` windows for any number of devices
        return result

    @functools.cached_property
    def device(self) -> torch.device:
        return self.arguments(self.folder, self.settings, fresh=False).device

    def training_data(self, settings: Settings) -> WindowDataset:
        """Return the training windows, in order."""
        data = shuffled_windows(self.windows, settings.steps * settings.batch_size, settings.seed)
        numbering = self.numbering
        return data if numbering is None else numbered_windows(self.windows, numbering.train, numbering.seed, data.order)

    def held_out_data(self) -> WindowDataset:
        """Return every held-out window once."""
        if self.numbering is None:
            return ordered_windows(self.held_out, self.settings.seed)
        return numbered_windows(self.held_out, self.numbering.held_out, self.numbering.seed)

    def one_window(self) -> Example:
        """Return the first training window, as a batch."""
        return self.batch_of(self.training_data(self.settings), range(1))

    def held_out_batches(self) -> Iterator[Example]:
        """Yield the held-out windows in the batches of the trainers' evaluations."""
        data = self.held_out_data()
        for start in range(0, len(data), self.settings.batch_size):
            yield self.batch_of(data, range(start, min(start + self.settings.batch_size, len(data))))

    def batch_of(self, data: WindowDataset, rows: range) -> Example:
        """Return these windows as a batch on the device, without their numbers."""
        batch = self.collator([data[row] for row in rows])
        return {name: value.to(self.device) for name, value in batch.items() if name != WINDOW}


def trains_on_cpu(device: str) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError(
            "--device cuda: no CUDA device", remedy="drop it, or use --device cpu", option="device", code="no-device"
        )
    return device == "cpu" or not torch.accelerator.is_available()
