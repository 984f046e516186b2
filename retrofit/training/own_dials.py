"""Sites that are annealed by the dials of their passes: from the dense function, with the dense parameters, to the method's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from retrofit.runtime.atomic_writes import whole_file
from retrofit.training.teacher import Teacher

DIAL = "dial.json"  # in a checkpoint: where the dials stood
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-8}
HALF_ROUNDING = 2e-2


def begin(teacher: Teacher, run: Callable[[], Any]) -> list[str]:
    """Sites with a dial have the dense parameters again, and compute the dense function at 0; returns their names.

    `run` runs the model on some text. A site that differs from the dense module there keeps its parameters and its mixture.
    """
    sites = teacher.sites
    chosen = [site for site in sites.sites if site.dial is not None and site.dial.fits(site.module)]
    before = {site.name: [parameter.detach().clone() for parameter in site.module.parameters()] for site in chosen}
    with torch.no_grad():
        for site in chosen:
            teacher.parts.write_dense(sites.model, teacher.part, site.name)
    use(teacher, [site.name for site in chosen])
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
    use(teacher, exact)
    return exact


def use(teacher: Teacher, names: Iterable[str]) -> None:
    """From now on the sites of these names are annealed by their own dials."""
    wanted = set(names)
    teacher.sites.dialled = {site.name: site.dial for site in teacher.sites.sites if site.name in wanted and site.dial is not None}


def write_place(checkpoint: Path, share: float, anneal: int) -> None:
    """The checkpoint says how far the sites have turned, and in how many steps they do."""
    with whole_file(checkpoint / DIAL, force=True) as file:
        file.write(json.dumps({"share": share, "anneal": anneal}).encode())


def read_place(checkpoint: Path) -> Mapping[str, Any]:
    file = checkpoint / DIAL
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
