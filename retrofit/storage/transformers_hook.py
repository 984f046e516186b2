"""A retrofitted transformers model is saved and loaded by the stock `save_pretrained` and `from_pretrained`.

The recipe travels in the place that transformers keeps for "this skeleton must be changed before the weights fit it":
`config.quantization_config`. `install` puts its reader, `retrofit.storage.recipe_quantizer`, into transformers' table of
quantizers as soon as that table exists, without importing transformers. It is called by `import torch` (the entry point of the
group `torch.backends` is in `retrofit_transformers`), so programs need not import retrofit, and by `import retrofit`. Nothing is
quantized, and nothing says so on the live model: `hf_quantizer`, `is_quantized` and `quantization_method` are never left behind,
so `Trainer`, PEFT, `.half()` and `generate` see an ordinary model.

What a pass's modules must do to survive the trip (the skeleton is built on the meta device and then filled from the file):

- every buffer is persistent, so that it is loaded like a weight; one that is not has its module's `rebuild_buffers()` called after
  loading, which must set the values from the module's own attributes on the buffers' present device;
- a module registered at several places holds no persistent buffers (a frozen parameter does the same and can be tied);
- parameters have the dtype and device of the weights they are used with, or name a dtype of their own.
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
    """From now on transformers replays recipes, whether it has been imported or will be."""
    for name, (defined, act) in ACTIONS.items():
        if hasattr(sys.modules.get(name), defined):
            act()
        elif not any(isinstance(finder, Watcher) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, Watcher(name))


def register() -> None:
    """transformers' tables hold the recipe's reader."""
    from retrofit.storage import recipe_quantizer

    recipe_quantizer.register()


def build_rewritten() -> None:
    """transformers builds a model from a config that holds a recipe as the recipe makes it."""
    from retrofit.storage import recipe_quantizer

    recipe_quantizer.rewrite_configured()


ACTIONS = {TABLE: ("register_quantizer", register), MODELS: ("PreTrainedModel", build_rewritten)}


class Watcher(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and has transformers' module `name` prepared once it has been imported."""

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
