"""A transformers model inside a module that feeds it, such as a sentence-transformers model; adapters inside a model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from retrofit.provenance import provenance
from retrofit.runtime.example_inputs import handed_to, named_inputs
from retrofit.runtime.state_preservation import preserve_state


def transformer_inside(model: nn.Module, example_inputs: Any = None) -> nn.Module:
    """The one transformers model inside `model` where that is what can be run; else `model` itself.

    A module that takes the inputs (those given, else those derived from it) is a model of its own, whatever it contains. One that
    takes none of them, such as a pipeline that takes a dict of features, only feeds the transformers model it holds.
    """
    if provenance(model).examples is not None:
        return model
    inside = transformers_models(model)
    if len(inside) != 1 or inside[0] is model or (handed_to(model) is None and takes(model, example_inputs)):
        return model
    return inside[0]


def transformers_models(model: nn.Module) -> list[nn.Module]:
    """The outermost transformers models in `model`."""
    transformers = sys.modules.get("transformers.modeling_utils")
    found: list[nn.Module] = []
    if transformers is None:
        return found
    for module in model.modules():  # a module comes before those inside it
        if isinstance(module, transformers.PreTrainedModel) and not any(
            module is part for outer in found for part in outer.modules()
        ):
            found.append(module)
    return found


def holds_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into `model`, which `save_pretrained` then leaves out of the model or saves alone."""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return True
    return any(is_adapted(module) for module in model.modules())


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is one that PEFT put around another, which it adapts."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft is not None and isinstance(module, peft.BaseTunerLayer)


def takes(model: nn.Module, example_inputs: Any) -> bool:
    """Whether the model runs on the inputs."""
    try:
        inputs = named_inputs(model, example_inputs)
        with preserve_state(model), torch.no_grad():
            model(**inputs)
    except Exception:  # no inputs can be derived, or whatever the model's own code raises
        return False
    return True
