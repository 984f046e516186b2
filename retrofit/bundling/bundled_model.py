"""The part of a bundle's model classes that they have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retrofit.bundling.placing import Placing
from retrofit.surgery.transformers_bookkeeping import align_weights

ENGINES = frozenset(("vllm", "sglang"))  # packages with an attention that keeps keys and values by itself


class Bundled:
    """A dense transformers model, named behind this class, with the modules of a table put in place before its weights arrive.

    `path` is where the model is in the one that the table is about: empty, or that of its base. A base has the modules that it has
    in a dense model of the class `whole`, whatever its own class makes besides.
    """

    table: Mapping[str, Any] = {}
    path = ""
    whole: Any = None

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        require_own_attention(type(self), config)
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        if self.path:
            vars(self).update(vars(self.whole(config).get_submodule(self.path)))
        Placing(self, self.path).place(self.table)  # type: ignore[arg-type]
        self._frozen = [name for name, one in self.named_parameters() if not one.requires_grad]  # type: ignore[attr-defined]
        self._weight_conversions: list[Any] = []  # the file has the model's own names
        self.init_weights()  # type: ignore[attr-defined]
        rebuild_buffers(self)  # type: ignore[arg-type]

    @classmethod
    def _load_pretrained_model(cls, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **options: Any) -> Any:
        """transformers translates no names: what it knows of this kind of model is about the dense one."""
        if load_config.hf_quantizer is None:
            load_config = dataclasses.replace(load_config, weight_mapping=[])
        return super()._load_pretrained_model(model, state_dict, checkpoint_files, load_config, **options)  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, *inputs: Any, **options: Any) -> Any:
        """The model with its weights, which begin where a cache line does: the last bits of a product may depend on it."""
        loaded = super().from_pretrained(*inputs, **options)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in model._frozen:
            model.get_parameter(name).requires_grad_(False)
        align_weights(model)
        rebuild_buffers(model)
        return loaded


def require_own_attention(kind: Any, config: Any) -> None:
    """Raises `ValueError` where an engine attends in place of a model whose layers need more than keys and values."""
    name = getattr(config, "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None
    engine = str(getattr(function, "__module__", "")).partition(".")[0]
    if engine in ENGINES and not kind.is_backend_compatible():
        raise ValueError(
            f"{kind.__name__} does not run in {engine}: it keeps the keys and values of earlier tokens and nothing else, and "
            "layers of this model need more of these tokens, so that it would decode wrongly. Use generate in transformers."
        )


@torch.no_grad()
def rebuild_buffers(model: nn.Module) -> None:
    """The buffers that are not saved hold what follows from the weights."""
    for module in model.modules():
        if hasattr(type(module), "rebuild_buffers"):
            module.rebuild_buffers()  # type: ignore[operator]
