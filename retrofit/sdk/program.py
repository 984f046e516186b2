"""The captured program behind an anatomy: a graph of ATen operations, their module calls and their data flow."""

from __future__ import annotations

# The program and its data flow.
from retrofit.program.program import Program as Program
from retrofit.program.program import Call as Call
from retrofit.program.program import Key as Key
from retrofit.program.capture import capture as capture
from retrofit.program.capture import call_or_capture as call_or_capture
from retrofit.program.tracing import as_if_traced as as_if_traced
from retrofit.program.dataflow import Dataflow as Dataflow
from retrofit.program.dataflow import backward_slice as backward_slice
from retrofit.program.dataflow import is_assertion as is_assertion
from retrofit.program.dataflow import refuse_state_inputs as refuse_state_inputs
from retrofit.program.capture import Trial as Trial
from retrofit.program.capture import failed_trials as failed_trials

# The properties of a node: operation, shape, dtype, constants, carried operands.
from retrofit.program.aten_ops import op as op
from retrofit.program.aten_ops import op_name as op_name
from retrofit.program.aten_ops import shape as shape
from retrofit.program.aten_ops import is_float as is_float
from retrofit.program.aten_ops import is_heavy as is_heavy
from retrofit.program.aten_ops import is_product as is_product
from retrofit.program.aten_ops import is_all_zeros as is_all_zeros
from retrofit.program.aten_ops import carried_operands as carried_operands

# Groups of operations by name.
from retrofit.program.aten_ops import ADDED_PRODUCT as ADDED_PRODUCT
from retrofit.program.aten_ops import CAST as CAST
from retrofit.program.aten_ops import CONVOLUTION as CONVOLUTION
from retrofit.program.aten_ops import DROPOUT as DROPOUT
from retrofit.program.aten_ops import JOIN as JOIN
from retrofit.program.aten_ops import LAYOUT as LAYOUT
from retrofit.program.aten_ops import LIKE as LIKE
from retrofit.program.aten_ops import MASKING as MASKING
from retrofit.program.aten_ops import NORM as NORM
from retrofit.program.aten_ops import POINTWISE as POINTWISE
from retrofit.program.aten_ops import SCAN as SCAN
from retrofit.program.aten_ops import SELECTION as SELECTION
