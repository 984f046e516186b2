"""retrofit: efficient-transformer methods for models that are already trained."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrofit import hub

if TYPE_CHECKING:
    from retrofit.anatomy import Anatomy as Anatomy
    from retrofit.checkpoint import load as load
    from retrofit.checkpoint import save as save
    from retrofit.errors import RetrofitError as RetrofitError
    from retrofit.inspection import inspect as inspect
    from retrofit.onnx.exporting import export_onnx as export_onnx
    from retrofit.onnx.importing import from_onnx as from_onnx
    from retrofit.replaying import recipe as recipe
    from retrofit.rewriting import apply as apply
    from retrofit.verification import verify as verify

__version__ = "0.1.0"

# Names are imported on first use, so that `retrofit --help` never waits for torch.
HOMES = {
    "Anatomy": "retrofit.anatomy",
    "RetrofitError": "retrofit.errors",
    "apply": "retrofit.rewriting",
    "export_onnx": "retrofit.onnx.exporting",
    "from_onnx": "retrofit.onnx.importing",
    "inspect": "retrofit.inspection",
    "load": "retrofit.checkpoint",
    "recipe": "retrofit.replaying",
    "save": "retrofit.checkpoint",
    "verify": "retrofit.verification",
}
__all__ = sorted(HOMES)

hub.install()  # stock from_pretrained loads what save_pretrained wrote, whenever transformers is imported


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'retrofit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
