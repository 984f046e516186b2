"""Continued pretraining on transformers' `Trainer`: the model's own objective, evaluation, checkpoints that resume."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from retrofit.errors import CheckpointError, RetrofitWarning, TrainingError
from retrofit.files.model_folders import is_file_name, require_writable_kind
from retrofit.inputs import usable_models
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.usable_models import require_in_memory, require_module, require_values, transformer_inside
from retrofit.passbase.recipe_storage import as_ordinary_model, stored_recipe
from retrofit.passbase.replaying import rewritten_part
from retrofit.passbase.tokenization import text_codec, windows_of
from retrofit.storage.checkpoint import require_savable, save
from retrofit.surgery.dequantization import is_quantized
from retrofit.surgery.row_tables import tables_of
from retrofit.training import processes
from retrofit.training.checkpoints import StepMonitor
from retrofit.training.objectives import (
    Collator,
    Objective,
    WithContrastiveLoss,
    add_loss,
    embeds_sentences,
    objective_for,
    same_text,
)
from retrofit.training.optimizer import NewRates
from retrofit.training.recovery import Stages, recover
from retrofit.training.runs import TrainingRun, draw_run, finish_folder, refuse_to_overwrite, run_folder
from retrofit.training.settings import Settings
from retrofit.training.sharding import collect, require_one_dtype_a_group, sharded_copy
from retrofit.training.teacher import Teacher
from retrofit.training.teacher_cache import KeptPredictions, KeptTeacher
from retrofit.training.teaching import facts_of, hash_architecture, hash_trained, hash_weights, hash_windows
from retrofit.training.trainers import ON_SAMPLE, Numbering, PretrainingTrainer, ShardedTrainer, TrainerSetup, trains_on_cpu
from retrofit.training.windows import beyond_positions, is_held_out

MISSING = object()
SET_BY_ACCELERATE = ("forward", "_original_forward", "_is_accelerate_prepared")  # attributes


def continue_pretraining(
    model: nn.Module,
    texts: Sequence[str],
    settings: Settings,
    *,
    teacher: nn.Module | str | Path | None = None,
    tokenizer: Any = None,
    output: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Train `model` in place on `texts` with its own objective, and save it at `output` if given.

    A sentence-transformers model is trained as a whole: on a contrastive loss, and on a teacher's embeddings.

    With the dense model as `teacher`, the sites first learn the outputs of the dense modules; then the model learns from its own
    loss and the teacher's predictions (`align`, `anneal` and `distil` of the settings). With a folder that `teach` wrote for the
    same texts, it learns from those predictions and its own loss, without the dense model.

    Numbers, curve and checkpoints are written to a folder next to `output`. The same settings and texts give the same windows in
    the same order for any model, and a resumed run ends where an uninterrupted one does. `progress` is called after each step.
    Raises `TrainingError` if the model computes no loss, the text is too short, the loss is not finite, or the teacher is not the
    model's dense original.
    """
    require_module(model)
    require_in_memory(model, "trained")
    require_values(model, "trained", "load its weights first")
    usable_models.require_trainable(model)
    target = None if output is None else Path(output)
    cpu = trains_on_cpu(settings.device)
    processes.connect(cpu)
    processes.shared_batch(settings.batch_size)
    if target is not None:
        processes.in_first(functools.partial(refuse_to_overwrite, target, resume=resume, force=force))
        refuse_unsavable(model, target)
    embeds = embeds_sentences(model)
    tokenizer = model.tokenizer if embeds and tokenizer is None else tokenizer
    part = transformer_inside(model) if embeds else model
    require_trainable(part)
    codec = text_codec(part, tokenizer)
    windows = windows_of(texts, codec, settings.length)
    is_apart = is_held_out(windows, settings.eval_fraction)
    if beyond := beyond_positions(part, settings.length):
        warnings.warn(beyond, RetrofitWarning, stacklevel=2)
    train, held_out = windows[~is_apart], windows[is_apart]
    learner: nn.Module = WithContrastiveLoss(model) if embeds else add_loss(model)
    objective: Objective = same_text(tokenizer, settings) if embeds else objective_for(learner, codec, train[0].long())
    if embeds:
        refuse_for_embeddings(settings, teacher)
    guide: Teacher | KeptTeacher | None = None
    numbering = None
    if isinstance(teacher, (str, Path)):
        seed = KeptPredictions.in_folder(teacher).facts.seed
        needed = facts_of(model, codec, tokenizer, objective, windows, seed=seed, temperature=settings.temperature)
        guide = KeptTeacher.of(teacher, model, needed)
        numbering = Numbering((~is_apart).nonzero().flatten(), is_apart.nonzero().flatten(), seed)
        stored = guide.kept.facts
        identity = f"{stored.weights}, the {stored.top} most probable tokens, --seed {seed}{', --bf16' if stored.bf16 else ''}"
    else:
        guide = None if teacher is None else Teacher.of(teacher, model)
        identity = hash_weights(teacher)
    stages = Stages.of(settings, model, guide)
    new = NewRates.of(model, settings.lr, settings.lr_new)
    facts = {
        "recipe": "; ".join(stored_recipe(rewritten_part(model))),  # before the model, whose hash differs with it
        "model": hash_architecture(model),
        "dtype": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})),
        "choice of trained parameters": hash_trained(model),
        "text": hash_windows(windows),
        "teacher": identity,
    }
    watch = StepMonitor(progress)
    findings: dict[str, Any] = {}
    with (
        as_ordinary_model(part),
        preserve_model(learner),
        shared_run_folder(target, facts, settings, resume=resume) as (folder, checkpoint),
        trained_copy(model, settings, cpu) as trained,
        activation_checkpointing(trained, settings.gradient_checkpointing),
    ):
        if trained is not model:
            learner, new = add_loss(trained), NewRates.of(trained, settings.lr, settings.lr_new)
            if isinstance(guide, Teacher):
                guide = guide.with_model(sharded_copy(guide.model, device_of(trained), settings.bf16))
        trainer: PretrainingTrainer
        collator, saving = Collator(objective), target is not None
        setup = TrainerSetup(learner, collator, train, held_out, settings, folder, cpu, saving=saving, new=new, numbering=numbering)
        if guide is not None:
            trainer, findings = recover(setup, guide, stages, checkpoint, watch, progress)
        else:
            kind = ShardedTrainer if settings.fsdp else PretrainingTrainer
            trainer = setup.trainer(kind, watch, folder=folder, settings=settings, fresh=not checkpoint)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    idle = set(map(id, watch.idle or ()))
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
        new_rates=new.to_dict(),
        tables={name: table.numel() for table, name in tables_of(model).items()},
        seconds_per_step=watch.seconds_per_step,
        sampled=len(trainer.sample or ()),
        sample_loss=next((loss for _, loss in reversed(logged_values(history, ON_SAMPLE))), None),
        untrained=tuple(name for name, parameter in trained.named_parameters() if id(parameter) in idle),
        output=target,
        folder=None if target is None else folder,
        **findings,
    )
    if target is not None:
        processes.in_first(functools.partial(finish, run, model, target, force=force, tokenizer=None if embeds else tokenizer))
    return run


def finish(run: TrainingRun, model: nn.Module, target: Path, *, force: bool, tokenizer: Any) -> None:
    """Draw the run, save the model, and record last that the run is finished: a recorded end means a saved model."""
    draw_run(run)
    save(model, target, force=force, tokenizer=tokenizer)
    finish_folder(run)


def refuse_for_embeddings(settings: Settings, teacher: nn.Module | str | Path | None) -> None:
    """Raises `TrainingError` for settings that a sentence-transformers model cannot be trained with."""
    if isinstance(teacher, (str, Path)):
        raise TrainingError(
            "a sentence-transformers model cannot learn from cached predictions",
            why="they are token probabilities; it returns one vector per text",
            remedy="use the dense sentence-transformers model",
            option="teacher",
            code="no-logits",
        )
    if settings.fsdp:
        raise TrainingError(
            "--fsdp does not support sentence-transformers models",
            why="only models that predict tokens are sharded",
            remedy="drop --fsdp",
            option="fsdp",
            code="combination",
        )


@contextlib.contextmanager
def shared_run_folder(
    output: Path | None, facts: Mapping[str, Any], settings: Settings, *, resume: bool
) -> Iterator[tuple[Path, Path | None]]:
    """`run_folder` for all processes; the first one creates and removes the folder."""
    with contextlib.ExitStack() as stack:
        yield processes.in_first(lambda: stack.enter_context(run_folder(output, facts, settings, resume=resume)))
        processes.wait()  # until no process reads the folder


@contextlib.contextmanager
def trained_copy(model: nn.Module, settings: Settings, cpu: bool) -> Iterator[nn.Module]:
    """Yield `model`, or a sharded copy of it whose values are copied to `model` in the first process afterwards."""
    if not processes.sharded(settings.fsdp):
        yield model
        return
    from accelerate import PartialState

    require_one_dtype_a_group(model)
    copied = sharded_copy(model, PartialState(cpu=cpu).device, settings.bf16)
    yield copied
    collect(copied, model)


def refuse_unsavable(model: nn.Module, target: Path) -> None:
    """Raises `CheckpointError`, before any step, where the trained model could not be saved at `target`."""
    if embeds_sentences(model) and is_file_name(target):
        require_writable_kind(target)
        raise CheckpointError(
            f"{target}: a sentence-transformers model is several modules in a directory", remedy="name a directory", code="name"
        )
    require_savable(model, target)


def require_trainable(model: nn.Module) -> None:
    """Raises `TrainingError` if no parameter is trainable, or trainable weights are in float16.

    Where a quantizer packed the weights, adapters or the quantizer itself may be trained.
    """
    adapted = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
    if is_quantized(model) and not adapted and not getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False):
        raise TrainingError(
            f"{type(model).__name__} is quantized and cannot be trained",
            why="packed weights have no gradient",
            remedy="load it dequantized (dequantize=True in its quantization config), or train adapters with PEFT",
            code="quantized",
        )
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise TrainingError(
            f"{type(model).__name__} has nothing to train",
            why="no parameter requires a gradient",
            remedy="call model.requires_grad_(), or parameter.requires_grad_() on the parameters to train",
            code="frozen",
        )
    half = next((name for name, parameter in trained if parameter.dtype == torch.float16), None)
    if half is not None:
        raise TrainingError(
            f"{type(model).__name__} is in float16 and cannot be trained",
            why=f"small squared gradients underflow to zero and AdamW's steps become far too large ({half})",
            remedy="cast to float32: model.float(), or --float32",
            code="float16",
        )


@contextlib.contextmanager
def activation_checkpointing(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Recompute the activations of the layers in the backward pass within this context, if `enabled`."""
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
            f"{type(model).__name__} cannot be trained with --gradient-checkpointing",
            why=str(error),
            remedy="drop it",
            option="gradient_checkpointing",
            code="combination",
        ) from error
    try:
        yield
    finally:
        getattr(model, f"{name}_checkpointing_disable")()
        model.disable_input_require_grads()  # type: ignore[operator]


@contextlib.contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore the device, modes, forward and config of `model`, and the library's verbosity, on exit."""
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
