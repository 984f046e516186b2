"""A run with a teacher, stage by stage: align the sites, turn them from dense to rewritten, train the whole model.

A site whose pass has a dial is annealed by it: from the dense function, with the dense parameters, to the method's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrofit.errors import TrainingError
from retrofit.files.atomic_writes import whole_file
from retrofit.inputs.model_state import evaluation_mode
from retrofit.passbase.replaying import recipe
from retrofit.process import preserve_attribute
from retrofit.surgery.dequantization import is_quantized
from retrofit.training import processes
from retrofit.training.checkpoints import StepMonitor, read_dial
from retrofit.training.layerwise import HiddenStates
from retrofit.training.objectives import without_labels
from retrofit.training.runs import ALIGNMENT, FINDINGS, last_checkpoint
from retrofit.training.settings import Settings, flag
from retrofit.training.teacher import ChunkedLoss, Teacher, sharing_weights
from retrofit.training.teacher_cache import KeptTeacher
from retrofit.training.trainers import NO_NEW_RATES, AligningTrainer, DistillingTrainer, ShardedDistillingTrainer, TrainerSetup

ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-8}
HALF_ROUNDING = 2e-2


def start_dials(teacher: Teacher, run: Callable[[], Any]) -> list[str]:
    """Give sites with a dial their dense parameters, so that they compute the dense function at 0; return their names.

    `run` runs the model on some text. A site that differs from the dense module there keeps its parameters and its mixture.
    """
    sites = teacher.sites
    chosen = [site for site in sites.sites if site.dial is not None and site.dial.fits(site.module)]
    before = {site.name: [parameter.detach().clone() for parameter in site.module.parameters()] for site in chosen}
    with torch.no_grad():
        for site in chosen:
            teacher.parts.write_dense(sites.model, teacher.part, site.name)
    use_dials(teacher, [site.name for site in chosen])
    with sites.mixed(0.0):
        errors = sites.errors(run)
    exact = []
    for site in chosen:
        dtype = next(site.module.parameters()).dtype
        if errors.get(site.name, 1.0) <= ROUNDING.get(dtype, HALF_ROUNDING):
            exact.append(site.name)
            continue
        for parameter, value in zip(site.module.parameters(), before[site.name], strict=True):
            parameter.data.copy_(value)
    use_dials(teacher, exact)
    return exact


def use_dials(teacher: Teacher, names: Iterable[str]) -> None:
    """Anneal the named sites by their own dials from now on."""
    wanted = set(names)
    teacher.sites.dialled = {site.name: site.dial for site in teacher.sites.sites if site.name in wanted and site.dial is not None}


NEED_MODEL = ("align", "anneal", "distil_hidden")  # settings


@dataclasses.dataclass(frozen=True)
class Stages:
    """The steps of each stage; those of `anneal` are the first steps of the whole model's training."""

    align: int = 0
    anneal: int = 0

    @staticmethod
    def of(settings: Settings, model: nn.Module, teacher: Teacher | KeptTeacher | None) -> Stages:
        """Return the stages in the settings, else those that the model's passes propose; none without a dense model and sites."""
        if not isinstance(teacher, Teacher) or settings.fsdp:
            refuse_without_model(settings, teacher)
            return Stages()
        if not teacher.sites.sites:
            return Stages()
        proposals = [pass_.recovery for pass_ in recipe(model) or () if not pass_.exact]
        learns = any(parameter.requires_grad for parameter in teacher.sites.parameters())
        align = max((proposal.align for proposal in proposals if learns), default=0.0)
        anneal = max((proposal.anneal for proposal in proposals), default=0.0)
        found = Stages(
            round(align * settings.steps) if settings.align is None else settings.align,
            round(anneal * settings.steps) if settings.anneal is None else settings.anneal,
        )
        if found.align and not learns:
            raise TrainingError(
                f"--align {found.align}: no site has trainable parameters",
                why="none of their parameters requires a gradient",
                remedy="drop --align, or call requires_grad_() on the parameters to train",
                option="align",
                code="frozen",
            )
        if found.align or found.anneal:
            require_one_dtype(teacher)
        return found


def refuse_without_model(settings: Settings, teacher: Teacher | KeptTeacher | None) -> None:
    """Raises `TrainingError` for settings that need whole dense modules in every process."""
    option = next((name for name in NEED_MODEL if getattr(settings, name)), None)
    if option is None:
        return
    needs, remedy = "a teacher", "name the dense model with --teacher"
    if isinstance(teacher, Teacher):
        needs, remedy = "the dense modules whole, in every process", f"drop {flag(option)} or --fsdp"
    elif teacher is not None:
        needs, remedy = "the dense model, not its predictions alone", f"{remedy}, or drop {flag(option)}"
    raise TrainingError(
        f"{flag(option)} {getattr(settings, option)} needs {needs}",
        why="rewritten sites learn from the dense modules",
        remedy=remedy,
        option=option,
        code="combination",
    )


def require_one_dtype(teacher: Teacher) -> None:
    """Raises `TrainingError` if dense modules and the sites that replaced them have different dtypes."""
    dense, rewritten = (
        next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
        for model in (teacher.part, teacher.sites.model)
    )
    if dense != rewritten and not is_quantized(teacher.part):
        dense_name, name = (str(dtype).removeprefix("torch.") for dtype in (dense, rewritten))
        raise TrainingError(
            f"the teacher is in {dense_name}, the model in {name}",
            why="aligned and annealed sites run dense and rewritten modules on the same activations",
            remedy=f"load the teacher in {name} (--float32: both in float32), or use --align 0 --anneal 0",
            code="dtypes",
            option="teacher",
        )


def recover(
    setup: TrainerSetup,
    teacher: Teacher | KeptTeacher,
    stages: Stages,
    checkpoint: Path | None,
    watch: StepMonitor,
    progress: Callable[[str], None] | None,
) -> tuple[DistillingTrainer, dict[str, Any]]:
    """Run all stages, from the last checkpoint of any; return the last trainer, and figures for the run's record."""
    with teacher.teaching(setup.device):
        setup.learner.to(setup.device)
        findings = processes.in_first(lambda: read_findings(setup.folder))
        if not findings and len(setup.held_out):
            findings = {"dense_loss": dense_loss(teacher, setup), "start_loss": held_out_loss(setup.learner, setup)}
            write_findings(setup.folder, findings)
        if stages.align and checkpoint is None and isinstance(teacher, Teacher):
            findings = {**findings, "alignment": align(setup, teacher, stages.align, progress)}
            write_findings(setup.folder, findings)
        if checkpoint is not None:  # a longer run may propose more steps, but this stage has begun
            stages = dataclasses.replace(stages, anneal=read_dial(checkpoint).get("anneal", stages.anneal))
        if isinstance(teacher, Teacher) and stages.anneal and setup.settings.dial == "own":
            if checkpoint is None:
                batch = setup.one_window()
                names = start_dials(teacher, lambda: setup.learner(**without_labels(setup.learner, batch)))
                findings = {**findings, "dials": names}
                write_findings(setup.folder, findings)
            use_dials(teacher, findings["dials"])
        hidden = chunked = None
        if isinstance(teacher, Teacher) and setup.settings.distil_hidden:
            hidden = HiddenStates.of(teacher.sites.model, teacher.part, teacher.parts.places)
        if not processes.sharded(setup.settings.fsdp):  # a head alone is not gathered
            shift, batch_size = setup.collator.objective.shift, setup.settings.batch_size
            chunked = ChunkedLoss.of(setup.learner, teacher, setup.one_window(), shift, batch_size)
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
            chunked=chunked,
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return trainer, {**findings, "stages": dataclasses.asdict(stages)}


def align(setup: TrainerSetup, teacher: Teacher, steps: int, progress: Callable[[str], None] | None) -> list[list[float]]:
    """Train the sites to return what the dense modules return; return the error on held-out windows by step."""
    folder = setup.folder / ALIGNMENT
    settings = dataclasses.replace(
        setup.settings,
        steps=steps,
        lr=setup.settings.align_lr,
        warmup=None,
        anneal=0,
        eval_every=None if setup.settings.eval_every is None else max(1, steps // 10),
        save_every=None if setup.settings.paces_checkpoints else max(1, steps // 10),
    )
    checkpoint = last_checkpoint(folder)
    model = teacher.sites.model
    with only_trainable(model, teacher.sites.parameters()), sharing_weights(model, teacher.part, teacher.sites.parameters()):
        trainer = dataclasses.replace(setup, new=NO_NEW_RATES).trainer(
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
    """Let only these parameters of the model require a gradient within this context."""
    chosen = {id(parameter) for parameter in parameters}
    with preserve_attribute("requires_grad", model.parameters()):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in chosen)
        yield


def dense_loss(teacher: Teacher | KeptTeacher, setup: TrainerSetup) -> float:
    """Return the teacher's own loss on the held-out windows."""
    if isinstance(teacher, Teacher):
        return held_out_loss(teacher.learner, setup)
    assert setup.numbering is not None
    return teacher.kept.loss(setup.numbering.held_out.tolist())


@torch.no_grad()
def held_out_loss(model: nn.Module, setup: TrainerSetup) -> float:
    """Return the model's own loss on the held-out windows, as the trainers' evaluations measure it."""
    with evaluation_mode(model):
        sums = [(float(model(**batch)[0]), len(batch["labels"])) for batch in setup.held_out_batches()]
    return sum(loss * rows for loss, rows in sums) / sum(rows for _, rows in sums)


def read_findings(folder: Path) -> dict[str, Any]:
    file = folder / FINDINGS
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def write_findings(folder: Path, findings: dict[str, Any]) -> None:
    if processes.number():  # only the first process writes
        return
    with whole_file(folder / FINDINGS, force=True) as file:
        file.write(json.dumps(findings).encode())
