"""Parts for modules that replace or wrap others: `edit` installs them, `forward` runs in any form of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Replacements of feed-forwards.
from retrofit.anatomy.feed_forwards import FeedForwardBlock as FeedForwardBlock
from retrofit.anatomy.feed_forwards import PackableRows as PackableRows
from retrofit.anatomy.feed_forwards import install_feed_forward as install_feed_forward
from retrofit.anatomy.feed_forwards import linear as linear
from retrofit.anatomy.feed_forwards import TensorShare as TensorShare
from retrofit.anatomy.feed_forwards import shares_of_units as shares_of_units
from retrofit.anatomy.feed_forwards import is_by_unit as is_by_unit

# Arguments and results of a wrapped module.
from retrofit.surgery.wrappers import tensor_argument as tensor_argument
from retrofit.surgery.wrappers import float_like as float_like
from retrofit.surgery.wrappers import batch_first as batch_first

# Keywords passed through a model's own code.
from retrofit.surgery.wrappers import InjectingForward as InjectingForward
from retrofit.surgery.wrappers import own_forward as own_forward
from retrofit.surgery.wrappers import call_with_keywords as call_with_keywords
from retrofit.surgery.wrappers import call_with_substitutes as call_with_substitutes
from retrofit.surgery.wrappers import child_modules as child_modules

# Memory in the model's cache, which lasts from one decoding step to the next.
from retrofit.surgery.cache_memory import TokenHistory as TokenHistory
from retrofit.surgery.cache_memory import SLACK as SLACK
from retrofit.inputs.module_calls import is_cache as is_cache
from retrofit.surgery.cache_memory import cache_among as cache_among
from retrofit.surgery.cache_memory import CacheWithHistories as CacheWithHistories
from retrofit.surgery.cache_memory import histories_of as histories_of
from retrofit.surgery.cache_memory import forget_histories as forget_histories
from retrofit.surgery.cache_memory import mark_as_fixed as mark_as_fixed
from retrofit.surgery.cache_memory import is_growing as is_growing
from retrofit.surgery.cache_memory import staying_tokens as staying_tokens
from retrofit.surgery.cache_memory import packs_sequences as packs_sequences

# Calls of torch's fused attention, and the tokens visible in a mask.
from retrofit.surgery.wrappers import FUSED_ARGUMENTS as FUSED_ARGUMENTS
from retrofit.surgery.wrappers import AnsweredFusedAttention as AnsweredFusedAttention
from retrofit.surgery.wrappers import MULTI_HEAD as MULTI_HEAD
from retrofit.surgery.wrappers import calls_multi_head as calls_multi_head
from retrofit.surgery.wrappers import lookback_gates as lookback_gates
from retrofit.surgery.wrappers import query_positions as query_positions
from retrofit.surgery.wrappers import unpadded_tokens as unpadded_tokens
from retrofit.surgery.wrappers import visible_keys as visible_keys

# Whether weights are mapped from files, so that no copy may be in memory.
from retrofit.files.memory import weights_are_mapped as weights_are_mapped

# Tables whose rows are looked up by indices computed from the ids.
from retrofit.surgery.row_tables import RowTables as RowTables
from retrofit.surgery.row_tables import release_zeros as release_zeros

# Losses added to the model's own.
from retrofit.surgery.auxiliary_losses import ForwardWithAuxiliaryLosses as ForwardWithAuxiliaryLosses
from retrofit.surgery.auxiliary_losses import auxiliary_losses as auxiliary_losses
from retrofit.program.dataflow import number_is_loss as number_is_loss
from retrofit.surgery.auxiliary_losses import record_auxiliary_loss as record_auxiliary_loss

# Selection between two ways to compute the same, by the input sizes of an exported program.
from retrofit.program.tracing import cond as cond
from retrofit.program.tracing import holds_one_way as holds_one_way
from retrofit.program.tracing import is_exporting as is_exporting

# Computation in the dtype of its operands, under autocast too.
from retrofit.program.tracing import without_autocast as without_autocast

# Packed (quantized) weights, and those of transformers' layers that store them transposed.
from retrofit.surgery.dequantization import is_packed as is_packed
from retrofit.surgery.dequantization import is_transposed as is_transposed
from retrofit.inputs.packed_weights import is_packed_tensor as is_packed_tensor
from retrofit.inputs.packed_weights import has_rows_apart as has_rows_apart
from retrofit.inputs.packed_weights import rows_at as rows_at

if TYPE_CHECKING:
    from retrofit.surgery.row_major import RowMajor as RowMajor
else:

    def __getattr__(name: str) -> object:
        """Return `RowMajor`, imported on first use, because it imports transformers."""
        if name != "RowMajor":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from retrofit.surgery.row_major import RowMajor

        globals()[name] = RowMajor
        return RowMajor
