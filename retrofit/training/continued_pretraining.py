"""Continued pretraining on transformers' `Trainer`: the model's own objective, evaluation, checkpoints that resume."""

from __future__ import annotations

import contextlib
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import WEIGHTS_NAME, logging

from retrofit.errors import CheckpointError, TrainingError
from retrofit.pipeline.tokenization import codec_for, windows_of
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.wrapped_models import transformer_inside
from retrofit.storage import architecture
from retrofit.storage.checkpoint import NOT_WRITTEN, ONNX, is_file_name, save
from retrofit.storage.exported_program import SUFFIX
from retrofit.training.label_loss import add_loss
from retrofit.training.objectives import Collator, Objective, objective_for
from retrofit.training.runs import TrainingRun, finish_folder, refuse_to_overwrite, run_folder
from retrofit.training.sentence_embeddings import WithContrastiveLoss, embeds_sentences, same_text
from retrofit.training.settings import Settings
from retrofit.training.windows import hold_out, ordered_windows, shuffled_windows

POINTS = 100  # entries a training curve has at most
MISSING = object()
SET_BY_ACCELERATE = ("forward", "_original_forward", "_is_accelerate_prepared")  # attributes
SCHEDULER = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def continue_pretraining(
    model: nn.Module,
    texts: Sequence[str],
    settings: Settings,
    *,
    tokenizer: Any = None,
    output: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TrainingRun:
    """`model`, in place, has been trained on `texts` with its own objective, and is saved at `output` where that is given.

    A sentence-transformers model is trained as a whole, by telling texts apart.

    The numbers, their curve and the checkpoints are in a folder next to `output`. The same settings, texts and model give the same
    windows in the same order whatever the model is, and a resumed run ends where an uninterrupted one does. `progress` is called
    after each step. Raises `TrainingError` where the model computes no loss, the text is too short, or the loss is not finite.
    """
    target = None if output is None else Path(output)
    if target is not None:
        refuse_to_overwrite(target, resume=resume, force=force)
        refuse_unsavable(model, target)
    cpu = trains_on_cpu(settings.device)
    pipeline = embeds_sentences(model)
    tokenizer = model.tokenizer if pipeline and tokenizer is None else tokenizer
    codec = codec_for(transformer_inside(model) if pipeline else model, tokenizer)
    windows = windows_of(texts, codec, settings.length)
    train, held_out = hold_out(windows, settings.eval_fraction)
    learner: nn.Module = WithContrastiveLoss(model) if pipeline else add_loss(model)
    objective: Objective = same_text(tokenizer, settings) if pipeline else objective_for(learner, codec, train[0].long())
    facts = {"model": hash_architecture(model), "text": hash_windows(windows)}
    watch = StepMonitor(settings.steps, progress)
    with (
        preserve_model(learner),
        activation_checkpointing(model, settings.gradient_checkpointing),
        run_folder(target, facts, settings, resume=resume) as (folder, checkpoint),
    ):
        trainer = PretrainingTrainer(
            model=learner,
            args=trainer_arguments(
                settings, folder, cpu=cpu, evaluate=len(held_out) > 0, saving=target is not None, fresh=not checkpoint
            ),
            data_collator=Collator(objective),
            train_dataset=shuffled_windows(train, settings.steps * settings.batch_size, settings.seed),
            eval_dataset=ordered_windows(held_out, settings.seed) if len(held_out) else None,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    history = trainer.state.log_history
    run = TrainingRun(
        settings=settings,
        objective=objective.name,
        reads=codec.name,
        windows=len(train),
        held_out=len(held_out),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        losses=logged_values(history, "loss"),
        eval_losses=logged_values(history, "eval_loss"),
        rates=logged_values(history, "learning_rate"),
        seconds_per_step=watch.seconds_per_step,
        output=target,
        folder=None if target is None else folder,
    )
    if target is not None:
        save(model, target, force=force)
        if tokenizer is not None and target.is_dir() and not pipeline:
            tokenizer.save_pretrained(target)
        finish_folder(run)
    return run


def refuse_unsavable(model: nn.Module, target: Path) -> None:
    """Raises `CheckpointError`, before any step, where the trained model could not be saved at `target`."""
    if target.suffix in NOT_WRITTEN:
        raise CheckpointError(f"{target}: models are not saved as {target.suffix}", remedy="name a .pt file or a directory")
    if embeds_sentences(model):
        if is_file_name(target):
            raise CheckpointError(
                f"{target}: a sentence-transformers model is several modules in a directory", remedy="name a directory"
            )
        return
    if target.suffix not in (SUFFIX, ONNX):
        architecture.describe_architecture(model)


class PretrainingTrainer(Trainer):
    """A trainer whose checkpoints hold the module's own state, under its own names, whatever its class and wrappers are."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert output_dir is not None and self.model is not None
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), Path(output_dir) / WEIGHTS_NAME)


class StepMonitor(TrainerCallback):
    """Times the steps, reports them, and stops a run whose loss is no longer finite."""

    def __init__(self, steps: int, progress: Callable[[str], None] | None) -> None:
        self.steps, self.progress = steps, progress
        self.seconds: list[float] = []
        self.began = 0.0
        self.loss = self.held_out = ""

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        if self.progress is not None:
            left = round(self.seconds_per_step * (self.steps - state.global_step))
            self.progress(f"step {state.global_step}/{self.steps}{self.loss}{self.held_out}  {left // 60}:{left % 60:02d} left")

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float] | None = None, **rest: Any) -> None:
        for key, text in (("loss", "loss"), ("eval_loss", "held out")):
            value = (logs or {}).get(key)
            if value is None:
                continue
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss is {value} after step {state.global_step}",
                    why="training has diverged",
                    remedy="lower --lr, or give a longer --warmup",
                )
            setattr(self, "loss" if key == "loss" else "held_out", f"  {text} {value:.4f}")

    @property
    def seconds_per_step(self) -> float:
        return statistics.median(self.seconds)


def trainer_arguments(
    settings: Settings, folder: Path, *, cpu: bool, evaluate: bool, saving: bool, fresh: bool
) -> TrainingArguments:
    """The trainer's arguments: windows in the order of the data set, no reports to other services, one device."""
    result = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        train_sampling_strategy="sequential",
        learning_rate=settings.lr,
        lr_scheduler_type=SCHEDULER[settings.schedule],
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=settings.eval_steps,
        eval_on_start=evaluate and fresh,
        save_strategy="steps" if saving else "no",
        save_steps=settings.save_steps,
        save_total_limit=1,
        logging_steps=max(1, settings.steps // POINTS),
        logging_nan_inf_filter=False,
        log_level="error",
        disable_tqdm=True,
        report_to=[],
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_pin_memory=not cpu,
        bf16=settings.bf16,
        use_cpu=cpu,
        seed=settings.seed,
    )
    result._n_gpu = min(result.n_gpu, 1)  # a step is `batch_size` windows however many devices there are
    return result


def trains_on_cpu(device: str) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("--device cuda: there is no CUDA device", remedy="leave --device out, or give cpu")
    return device == "cpu" or not torch.accelerator.is_available()


@contextlib.contextmanager
def activation_checkpointing(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Within this context the layers of `model` recompute their activations in the backward pass, where `enabled`."""
    if not enabled:
        yield
        return
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # the older name
    enable = getattr(model, f"{name}_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("it cannot checkpoint activations")
        enable({"use_reentrant": False})
    except ValueError as error:
        raise TrainingError(
            f"{type(model).__name__} cannot be trained with --gradient-checkpointing", why=str(error), remedy="leave it out"
        ) from error
    try:
        yield
    finally:
        getattr(model, f"{name}_checkpointing_disable")()
        model.disable_input_require_grads()  # type: ignore[operator]


@contextlib.contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Afterwards the device, modes, forward and config of `model`, and the library's verbosity, are as they were."""
    device, verbosity = next(model.parameters()).device, logging.get_verbosity()
    attributes = dict(vars(model))
    settings = vars(model.config) if isinstance(getattr(model, "config", None), PreTrainedConfig) else {}
    use_cache = settings.get("use_cache", MISSING)
    try:
        with evaluation_mode(model):  # the trainer switches to training mode, step by step
            yield
    finally:
        for name in SET_BY_ACCELERATE:
            restore_entry(vars(model), name, attributes.get(name, MISSING))
        restore_entry(settings, "use_cache", use_cache)
        model.zero_grad(set_to_none=True)
        model.to(device)
        logging.set_verbosity(verbosity)


def restore_entry(table: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def logged_values(history: Sequence[dict[str, Any]], key: str) -> tuple[tuple[int, float], ...]:
    return tuple((entry["step"], entry[key]) for entry in history if key in entry)


def hash_windows(windows: torch.Tensor) -> str:
    return hashlib.sha256(windows.contiguous().numpy().tobytes()).hexdigest()[:16]


def hash_architecture(model: nn.Module) -> str:
    """The class of a model and a hash of its parameters' names and shapes."""
    shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
    return f"{type(model).__name__} {hashlib.sha256(chr(10).join(shapes).encode()).hexdigest()[:16]}"
