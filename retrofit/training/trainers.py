"""transformers' `Trainer` for each stage of a run: aligning the sites, and training the whole with its own loss and a teacher's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy
from transformers.utils import WEIGHTS_NAME

from retrofit.runtime.modes import evaluation_mode
from retrofit.training import processes
from retrofit.training.checkpoint_writes import whole_checkpoint
from retrofit.training.chunked_loss import ChunkedLoss
from retrofit.training.dense_sites import DenseSites
from retrofit.training.hidden_states import HiddenStates
from retrofit.training.kept_teacher import KeptTeacher
from retrofit.training.outputs import without_labels
from retrofit.training.own_dials import write_place
from retrofit.training.pace import Pace
from retrofit.training.settings import Settings
from retrofit.training.teacher import Teacher
from retrofit.training.whole_checkpoints import require_whole_checkpoint

ON_SAMPLE = "eval_sample_loss"  # what the last evaluation logs beside the loss of all windows
Entered = TypeVar("Entered")


class PretrainingTrainer(Trainer):
    """A trainer whose checkpoints hold the module's own state, under its own names, whatever its class and wrappers are.

    The parameters in `new` have `new_rate`, where it is given, for their highest learning rate.
    """

    def __init__(self, pace: Pace, new: Iterable[nn.Parameter] = (), new_rate: float | None = None, **rest: Any) -> None:
        super().__init__(**rest)
        self.pace = pace
        data: Any = self.eval_dataset
        batch = self.args.per_device_eval_batch_size
        self.sample = None if data is None else pace.sample(len(data), self.args.max_steps, batch)
        self.new, self.new_rate = {id(one) for one in new}, new_rate
        self.step: contextlib.ExitStack | None = None  # what lasts until the gradients of a step are computed

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        with contextlib.ExitStack() as self.step:
            try:
                return super().training_step(*args, **named)
            finally:
                self.step = None

    @contextlib.contextmanager
    def lasting(self, context: contextlib.AbstractContextManager[Entered]) -> Iterator[Entered]:
        """What is entered lasts until the gradients of a training step are computed, for which layers may be computed again."""
        with contextlib.ExitStack() as here:
            yield (self.step or here).enter_context(context)

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args)
        for group in list(optimizer.param_groups if self.new_rate is not None else ()):
            new = [one for one in group["params"] if id(one) in self.new]
            if new:
                group["params"] = [one for one in group["params"] if id(one) not in self.new]
                optimizer.add_param_group({**group, "params": new, "lr": self.new_rate})
        return optimizer

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """The mean loss of the windows held out, or before the last step of a sample, where the pace has one.

        Each of several processes computes its own batches.
        """
        with self.pace.timed_evaluation():
            if processes.count() == 1 and self.sample is None:
                return super().evaluate(*args, **named)
            data: Any = self.eval_dataset
            if self.sample is None:
                metrics = {"eval_loss": self.held_out_loss(range(len(data)))}
            else:
                metrics = {"eval_loss": self.held_out_loss(self.sample)}
                if self.state.global_step >= self.state.max_steps:
                    others = sorted(set(range(len(data))).difference(self.sample))
                    metrics[ON_SAMPLE] = metrics["eval_loss"]
                    ours, theirs = len(self.sample) * metrics["eval_loss"], len(others) * self.held_out_loss(others)
                    metrics["eval_loss"] = (ours + theirs) / len(data)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def held_out_loss(self, chosen: Sequence[int]) -> float:
        """The mean loss of these windows held out."""
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
        """The rows of each batch that this process computes, and whether they count."""
        for start in range(size * processes.number(), rows, size * processes.count()):
            yield range(start, min(start + size, rows)), True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert output_dir is not None and self.model is not None
        if not self.args.should_save:  # another process does
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
        with self.pace.ending_after_a_step() if saved else contextlib.nullcontext():
            return super().train(resume_from_checkpoint, *rest, **named)

    def require_checkpoint(self, folder: Path) -> None:
        """The checkpoint is whole, else `TrainingError`."""
        assert self.model is not None
        require_whole_checkpoint(folder, self.model)


class AligningTrainer(PretrainingTrainer):
    """Every rewritten site learns to return what the dense module returns: the loss is the mean of their squared errors."""

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
    """The model learns from its own loss and from a teacher's predictions, its sites turning from dense to rewritten on the way.

        (1 − w) · loss + w · T² KL(teacher ‖ model) + v · Σ_l E_l / layers        w: `distil`, T: `temperature`, v: `distil_hidden`

    E_l is the squared error of the stream after layer l, relative to the dense one.

    In the first `anneal` steps the sites are mixtures, of the dense modules alone at the first. Evaluation measures the model's own
    loss, of the mixture while it is one.
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
        """The loss, that of the layers with it, and what the model returned."""
        with self.lasting(self.teacher.sites.mixed(self.share)):
            if self.hidden is None or not model.training:
                return self.loss_of(model, inputs, num_items_in_batch)
            with self.hidden.recorded() as streams:
                loss, outputs = self.loss_of(model, inputs, num_items_in_batch)
                if not streams.forwards:  # nothing else is learned from the teacher
                    self.teacher.forward(inputs)
            return loss + self.distillation.distil_hidden * streams.error(), outputs

    def loss_of(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any) -> tuple[Tensor, Any]:
        """The loss without that of the layers, and what the model returned."""
        weight = self.distillation.distil
        chunked = self.chunked
        if chunked is not None and not (self.share < 1 and self.teacher.sites.replace(chunked.head.module)):
            loss = chunked.loss(model, inputs, self.teacher, weight if model.training else 0.0, self.distillation.temperature)
            return loss, {"loss": loss}
        given = {**without_labels(model, inputs), "labels": inputs["labels"]}
        loss, outputs = super().compute_loss(model, given, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training and weight:
            apart = self.teacher.divergence(outputs, inputs, self.distillation.temperature)
            loss = (1 - weight) * loss + weight * apart
        return loss, outputs

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        assert output_dir is not None
        if self.args.should_save:
            write_place(Path(output_dir), self.share, self.anneal)

    @property
    def share(self) -> float:
        """λ: how far the sites have turned from the dense modules."""
        return min(1.0, self.state.global_step / self.anneal) if self.anneal else 1.0
