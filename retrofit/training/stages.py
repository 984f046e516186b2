"""The stages of a run with a teacher: aligning the sites, turning them from dense to rewritten, training the whole."""

from __future__ import annotations

import dataclasses

from torch import nn

from retrofit.errors import TrainingError
from retrofit.pipeline.replaying import recipe
from retrofit.training.settings import Settings
from retrofit.training.teacher import Teacher


@dataclasses.dataclass(frozen=True)
class Stages:
    """How many steps each stage has; those of `anneal` are the first of the steps that train the whole."""

    align: int = 0
    anneal: int = 0

    @staticmethod
    def of(settings: Settings, model: nn.Module, teacher: Teacher | None) -> Stages:
        """What the settings say, else what the model's passes propose; nothing without a teacher, or without rewritten sites."""
        if teacher is None:
            asked = [name for name in ("align", "anneal") if getattr(settings, name)]
            if asked:
                raise TrainingError(
                    f"--{asked[0]} {getattr(settings, asked[0])} needs a teacher",
                    why="the sites learn from the modules of the dense model",
                    remedy="name the dense model with --teacher",
                )
            return Stages()
        if not teacher.sites.sites:
            return Stages()
        proposals = [one.recovery for one in recipe(model) or () if not one.exact]
        align = max((one.align for one in proposals), default=0.0)
        anneal = max((one.anneal for one in proposals), default=0.0)
        return Stages(
            round(align * settings.steps) if settings.align is None else settings.align,
            round(anneal * settings.steps) if settings.anneal is None else settings.anneal,
        )
