"""The stages of a run with a teacher: aligning the sites, turning them from dense to rewritten, training the whole."""

from __future__ import annotations

import dataclasses

from torch import nn

from retrofit.errors import TrainingError
from retrofit.pipeline.recipe_storage import is_quantized
from retrofit.pipeline.replaying import recipe
from retrofit.training.kept_teacher import KeptTeacher
from retrofit.training.settings import Settings, flag
from retrofit.training.teacher import Teacher

NEED_MODEL = ("align", "anneal", "distil_hidden")  # settings


@dataclasses.dataclass(frozen=True)
class Stages:
    """How many steps each stage has; those of `anneal` are the first of the steps that train the whole."""

    align: int = 0
    anneal: int = 0

    @staticmethod
    def of(settings: Settings, model: nn.Module, teacher: Teacher | KeptTeacher | None) -> Stages:
        """What the settings say, else what the model's passes propose; nothing without a dense model or rewritten sites."""
        if not isinstance(teacher, Teacher) or settings.fsdp:
            asked = [field for field in dataclasses.fields(settings) if field.name in NEED_MODEL and getattr(settings, field.name)]
            if asked:
                name = flag(asked[0])
                needs, remedy = "a teacher", "name the dense model with --teacher"
                if isinstance(teacher, Teacher):
                    needs, remedy = "the dense modules whole, in every process", f"leave out {name}, or --fsdp"
                elif teacher is not None:
                    needs, remedy = "the dense model, not its predictions alone", f"{remedy}, or leave out {name}"
                raise TrainingError(
                    f"{name} {getattr(settings, asked[0].name)} needs {needs}",
                    why="what is rewritten learns from the modules of the dense model",
                    remedy=remedy,
                )
            return Stages()
        if not teacher.sites.sites:
            return Stages()
        proposals = [one.recovery for one in recipe(model) or () if not one.exact]
        learns = any(parameter.requires_grad for parameter in teacher.sites.parameters())
        align = max((one.align for one in proposals if learns), default=0.0)
        anneal = max((one.anneal for one in proposals), default=0.0)
        found = Stages(
            round(align * settings.steps) if settings.align is None else settings.align,
            round(anneal * settings.steps) if settings.anneal is None else settings.anneal,
        )
        if found.align and not learns:
            raise TrainingError(
                f"--align {found.align}: no site has anything to learn",
                why="none of their parameters requires a gradient",
                remedy="leave out --align, or call requires_grad_() on what is to be trained",
            )
        if found.align or found.anneal:
            require_one_dtype(teacher)
        return found


def require_one_dtype(teacher: Teacher) -> None:
    """Raises `TrainingError` where the dense modules cannot compute next to the sites that replaced them."""
    theirs, ours = (
        next((one.dtype for one in model.parameters() if one.is_floating_point()), None)
        for model in (teacher.part, teacher.sites.model)
    )
    if theirs != ours and not is_quantized(teacher.part):
        names = [str(one).removeprefix("torch.") for one in (theirs, ours)]
        raise TrainingError(
            f"the teacher is in {names[0]}, the model in {names[1]}",
            why="sites that are aligned or annealed are computed dense and rewritten, of the same activations",
            remedy=f"load the teacher in {names[1]} (--float32: both in float32), or give --align 0 --anneal 0",
        )
