"""Saving and loading a retrofitted transformers model by the stock `save_pretrained` and `from_pretrained`.

The recipe is stored in `config.quantization_config`, where transformers looks for changes of a skeleton that come before its
weights. `install` adds `retrofit.storage.recipe_quantizer`, which reads it, to transformers' table of quantizers as soon as that
table exists, without importing transformers. `import torch` calls it (the entry point of the group `torch.backends` is in
`retrofit_transformers`), so programs need not import retrofit, and so does `import retrofit`. Nothing is quantized, and the live
model has no trace of a quantizer: `hf_quantizer`, `is_quantized` and `quantization_method` are removed, so `Trainer`, PEFT,
`.half()` and `generate` see an ordinary model.

A skeleton is built on the meta device and then filled from the file. The modules of a pass therefore need to fulfil:

- every buffer is persistent, so that it is loaded like a weight; for others, `rebuild_buffers()` of their module is called after
  loading and must compute the values from the module's own attributes on the buffers' current device;
- a module registered at several places holds no persistent buffers (a frozen parameter does the same and can be tied);
- parameters have the dtype and device of the weights that they are used with, or name a dtype of their own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

TABLE = "transformers.quantizers.auto"  # the module that holds the table
MODELS = "transformers.modeling_utils"  # the module that builds models from configs


def install() -> None:
    """Make transformers replay recipes from now on, whether it is already imported or not."""
    for name, (defined, act) in ACTIONS.items():
        if hasattr(sys.modules.get(name), defined):
            act()
        elif not any(isinstance(finder, Watcher) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, Watcher(name))


def register() -> None:
    """Add the recipe's reader to transformers' tables."""
    from retrofit.storage import recipe_quantizer

    recipe_quantizer.register()


def build_rewritten() -> None:
    """Make transformers apply the recipe of a config when it builds a model from it."""
    from retrofit.storage import recipe_quantizer

    recipe_quantizer.rewrite_configured()


ACTIONS = {TABLE: ("register_quantizer", register), MODELS: ("PreTrainedModel", build_rewritten)}


class Watcher(importlib.abc.MetaPathFinder):
    """An import finder that finds what the other finders find, and prepares transformers' module `name` once it is imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                ACTIONS[self.name][1]()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
