"""The passes: one file a method. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrofit.passes.activation_sparsity.activation_sparsity import ActivationSparsity as ActivationSparsity
    from retrofit.passes.altup.altup import AltUp as AltUp
    from retrofit.passes.lsh_attention.lsh_attention import LSHAttention as LSHAttention
    from retrofit.passes.memory.memory import Memory as Memory
    from retrofit.passes.merge_cross_attention.merge_cross_attention import MergeCrossAttention as MergeCrossAttention
    from retrofit.passes.recurrence.recurrence import Recurrence as Recurrence
    from retrofit.passes.reversible.reversible import Reversible as Reversible
    from retrofit.passes.sequence_altup.sequence_altup import SequenceAltUp as SequenceAltUp
    from retrofit.passes.shared_moe.shared_moe import SharedMoE as SharedMoE
    from retrofit.passes.sparse_ffn.sparse_ffn import SparseFFN as SparseFFN
    from retrofit.passes.sparse_loss import SparseLoss as SparseLoss
    from retrofit.passes.sparse_qkv.sparse_qkv import SparseQKV as SparseQKV
    from retrofit.passes.sum import SumEmbedding as SumEmbedding

HOMES = {
    "ActivationSparsity": "retrofit.passes.activation_sparsity.activation_sparsity",
    "AltUp": "retrofit.passes.altup.altup",
    "LSHAttention": "retrofit.passes.lsh_attention.lsh_attention",
    "Memory": "retrofit.passes.memory.memory",
    "MergeCrossAttention": "retrofit.passes.merge_cross_attention.merge_cross_attention",
    "Recurrence": "retrofit.passes.recurrence.recurrence",
    "Reversible": "retrofit.passes.reversible.reversible",
    "SequenceAltUp": "retrofit.passes.sequence_altup.sequence_altup",
    "SharedMoE": "retrofit.passes.shared_moe.shared_moe",
    "SparseFFN": "retrofit.passes.sparse_ffn.sparse_ffn",
    "SparseLoss": "retrofit.passes.sparse_loss",
    "SparseQKV": "retrofit.passes.sparse_qkv.sparse_qkv",
    "SumEmbedding": "retrofit.passes.sum",
}
__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'retrofit.passes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
