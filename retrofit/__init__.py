"""retrofit: efficient-transformer methods for models that are already trained."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from retrofit.storage import transformers_hook

if TYPE_CHECKING:
    from retrofit.adapters import merge_adapters as merge_adapters
    from retrofit.anatomy import Anatomy as Anatomy
    from retrofit.anatomy.inspection import inspect as inspect
    from retrofit.bundling import bundle as bundle
    from retrofit.checks import verify as verify
    from retrofit.differences import diff as diff
    from retrofit.errors import RetrofitError as RetrofitError
    from retrofit.native import to_native as to_native
    from retrofit.onnx.exporter import export_onnx as export_onnx
    from retrofit.onnx.importer import from_onnx as from_onnx
    from retrofit.passbase.replaying import recipe as recipe
    from retrofit.planning.planner import plan as plan
    from retrofit.preview import plan_of as plan_of
    from retrofit.rewriting import apply as apply
    from retrofit.storage.checkpoint import load as load
    from retrofit.storage.checkpoint import save as save
    from retrofit.storage.recipe_file import read_recipe as read_recipe
    from retrofit.streaming import apply_streamed as apply_streamed
    from retrofit.surgery.dequantization import dequantize as dequantize
    from retrofit.training.optimizer import optimizer as optimizer
    from retrofit.undoing import undo as undo

__version__ = "0.1.0"

# Names are imported on first use, so that `retrofit --help` does not import torch.
HOMES = {
    "Anatomy": "retrofit.anatomy",
    "RetrofitError": "retrofit.errors",
    "apply": "retrofit.rewriting",
    "apply_streamed": "retrofit.streaming",
    "bundle": "retrofit.bundling",
    "dequantize": "retrofit.surgery.dequantization",
    "diff": "retrofit.differences",
    "export_onnx": "retrofit.onnx.exporter",
    "from_onnx": "retrofit.onnx.importer",
    "inspect": "retrofit.anatomy.inspection",
    "load": "retrofit.storage.checkpoint",
    "merge_adapters": "retrofit.adapters",
    "optimizer": "retrofit.training.optimizer",
    "plan": "retrofit.planning.planner",
    "plan_of": "retrofit.preview",
    "read_recipe": "retrofit.storage.recipe_file",
    "recipe": "retrofit.passbase.replaying",
    "save": "retrofit.storage.checkpoint",
    "to_native": "retrofit.native",
    "undo": "retrofit.undoing",
    "verify": "retrofit.checks",
}
__all__ = sorted(HOMES)

transformers_hook.install()  # lets stock from_pretrained load what save_pretrained wrote, whenever transformers is imported


def warn_of_others() -> None:
    """Warn if a distribution called `retrofit`, another project's, is installed too: each replaces files of the other."""
    folder = os.path.dirname(__path__[0])
    try:
        names = os.listdir(folder)
    except OSError:  # an archive
        return
    if any(name.lower().startswith("retrofit-") and name.endswith("-info") for name in names):
        import retrofit_transformers

        retrofit_transformers.warn_of_others(folder)


warn_of_others()


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'retrofit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
