"""A run with a teacher, stage by stage, and what it finds out on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrofit.runtime.atomic_writes import whole_file
from retrofit.runtime.modes import evaluation_mode
from retrofit.training import processes
from retrofit.training.chunked_loss import ChunkedLoss
from retrofit.training.hidden_states import HiddenStates
from retrofit.training.kept_teacher import KeptTeacher
from retrofit.training.outputs import without_labels
from retrofit.training.own_dials import begin, read_place, use
from retrofit.training.runs import ALIGNMENT, FINDINGS, last_checkpoint
from retrofit.training.sharded_trainer import ShardedDistillingTrainer
from retrofit.training.stages import Stages
from retrofit.training.step_monitor import StepMonitor
from retrofit.training.teacher import Teacher, sharing_weights
from retrofit.training.trainer_setup import TrainerSetup
from retrofit.training.trainers import AligningTrainer, DistillingTrainer


def recover(
    setup: TrainerSetup,
    teacher: Teacher | KeptTeacher,
    stages: Stages,
    checkpoint: Path | None,
    watch: StepMonitor,
    progress: Callable[[str], None] | None,
) -> tuple[DistillingTrainer, dict[str, Any]]:
    """All stages have run, from the last checkpoint of any; returns the last trainer, and figures for the run's record."""
    with teacher.teaching(setup.device):
        setup.learner.to(setup.device)
        findings = processes.in_first(lambda: read_findings(setup.folder))
        if not findings and len(setup.held_out):
            findings = {
                "dense_loss": dense_loss(teacher, setup),
                "start_loss": held_out_loss(setup.learner, setup),
            }
            write_findings(setup.folder, findings)
        if stages.align and checkpoint is None and isinstance(teacher, Teacher):
            findings = {**findings, "alignment": align(setup, teacher, stages.align, progress)}
            write_findings(setup.folder, findings)
        if checkpoint is not None:  # more steps may be proposed for a longer run, but these are under way
            stages = dataclasses.replace(stages, anneal=read_place(checkpoint).get("anneal", stages.anneal))
        if isinstance(teacher, Teacher) and stages.anneal and setup.settings.dial == "own":
            if checkpoint is None:
                batch = setup.one_window()
                names = begin(teacher, lambda: setup.learner(**without_labels(setup.learner, batch)))
                findings = {**findings, "dials": names}
                write_findings(setup.folder, findings)
            use(teacher, findings["dials"])
        hidden = None
        if isinstance(teacher, Teacher) and setup.settings.distil_hidden:
            hidden = HiddenStates.of(teacher.sites.model, teacher.part, teacher.parts.places)
        whole = not processes.sharded(setup.settings.fsdp)
        trainer = setup.trainer(
            ShardedDistillingTrainer if setup.settings.fsdp else DistillingTrainer,
            watch,
            folder=setup.folder,
            settings=setup.settings,
            fresh=checkpoint is None,
            teacher=teacher,
            distillation=setup.settings,
            anneal=stages.anneal,
            hidden=hidden,
            chunked=ChunkedLoss.of(
                setup.learner, teacher, setup.one_window(), setup.collator.objective.shift, setup.settings.batch_size
            )
            if whole
            else None,  # a head by itself is not gathered
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return trainer, {**findings, "stages": dataclasses.asdict(stages)}


def align(setup: TrainerSetup, teacher: Teacher, steps: int, progress: Callable[[str], None] | None) -> list[list[float]]:
    """The sites have learned to give what the dense modules give; returns the error on held-out windows by step."""
    folder = setup.folder / ALIGNMENT
    settings = dataclasses.replace(
        setup.settings,
        steps=steps,
        lr=setup.settings.align_lr,
        lr_new=None,
        warmup=None,
        anneal=0,
        eval_every=None if setup.settings.eval_every is None else max(1, steps // 10),
        save_every=None if setup.settings.paces_checkpoints else max(1, steps // 10),
    )
    checkpoint = last_checkpoint(folder)
    model = teacher.sites.model
    with only_trainable(model, teacher.sites.parameters()), sharing_weights(model, teacher.part, teacher.sites.parameters()):
        trainer = setup.trainer(
            AligningTrainer,
            StepMonitor(progress, "align: "),
            folder=folder,
            settings=settings,
            fresh=checkpoint is None,
            sites=teacher.sites,
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return [[entry["step"], entry["eval_loss"]] for entry in trainer.state.log_history if "eval_loss" in entry]


@contextlib.contextmanager
def only_trainable(model: nn.Module, parameters: Iterator[nn.Parameter]) -> Iterator[None]:
    """Within this context no other parameter of the model requires a gradient."""
    chosen = {id(parameter) for parameter in parameters}
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, before in required:
            parameter.requires_grad_(before and id(parameter) in chosen)
        yield
    finally:
        for parameter, before in required:
            parameter.requires_grad_(before)


def dense_loss(teacher: Teacher | KeptTeacher, setup: TrainerSetup) -> float:
    """The teacher's own loss on the held-out windows."""
    if isinstance(teacher, Teacher):
        return held_out_loss(teacher.learner, setup)
    assert setup.numbering is not None
    return teacher.kept.loss(setup.numbering.held_out.tolist())


@torch.no_grad()
def held_out_loss(model: nn.Module, setup: TrainerSetup) -> float:
    """The model's own loss on the held-out windows, as the trainers' evaluations measure it."""
    with evaluation_mode(model):
        sums = [(float(model(**batch)[0]), len(batch["labels"])) for batch in setup.held_out_batches()]
    return sum(loss * rows for loss, rows in sums) / sum(rows for _, rows in sums)


def read_findings(folder: Path) -> dict[str, Any]:
    file = folder / FINDINGS
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def write_findings(folder: Path, findings: dict[str, Any]) -> None:
    if processes.number():  # the first process does
        return
    with whole_file(folder / FINDINGS, force=True) as file:
        file.write(json.dumps(findings).encode())
