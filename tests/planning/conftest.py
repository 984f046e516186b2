"""A tiny model and a plan of it, which several files read; nobody changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import TARGETS, planned
from support.tiny_models import llama

from retrofit.planning.model_plan import ModelPlan


@pytest.fixture(scope="session")
def model() -> Any:
    return llama(vocab_size=256)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan") / "measured"


@pytest.fixture(scope="session")
def found(model: Any, folder: Path) -> ModelPlan:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = planned(model, TARGETS, folder=folder)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return result
