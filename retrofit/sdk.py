"""What a pass may import: the stable seam between the library and its passes, grouped by what it is for.

A pass imports from here and from its own package, and from nothing else of `retrofit`. docs/write_a_pass.md builds one.
"""

from __future__ import annotations

# What a pass is: options, a plan of what would be rewritten, an edit that does it.
from retrofit.passbase.options import option as option
from retrofit.passbase.protocol import Pass as Pass
from retrofit.passbase.protocol import Plan as Plan
from retrofit.passbase.protocol import Recovery as Recovery
from retrofit.passbase.method_reference import Deviation as Deviation
from retrofit.passbase.method_reference import Inside as Inside
from retrofit.passbase.method_reference import MethodReference as MethodReference
from retrofit.passbase.method_reference import ModuleReference as ModuleReference
from retrofit.passbase.method_reference import Observed as Observed
from retrofit.passbase.method_reference import ObservedSite as ObservedSite
from retrofit.passbase.method_reference import OneOf as OneOf
from retrofit.passbase.method_reference import Problems as Problems
from retrofit.passbase.method_reference import SiteCall as SiteCall
from retrofit.passbase.method_reference import may_be_chance as may_be_chance
from retrofit.passbase.protocol import Rewrite as Rewrite
from retrofit.anatomy.parts import NearMiss as NearMiss
from retrofit.anatomy.parts import Site as Site
from retrofit.anatomy.parts import collect_near_miss as collect_near_miss
from retrofit.passbase.options import selected_depths as selected_depths
from retrofit.surgery.edit import Edit as Edit
from retrofit.surgery.edit import Rearranged as Rearranged
from retrofit.inputs.optional_inputs import left_out as left_out
from retrofit.errors import CaptureError as CaptureError
from retrofit.errors import DoesNotFitError as DoesNotFitError
from retrofit.errors import Remedy as Remedy
from retrofit.errors import RetrofitError as RetrofitError
from retrofit.errors import SpecError as SpecError

# The anatomy of a model: what `plan` reads.
from retrofit.anatomy.parts import WITHOUT_GRADIENT as WITHOUT_GRADIENT
from retrofit.anatomy.anatomy import Anatomy as Anatomy
from retrofit.anatomy.branches import BEFORE_THE_OUTER as BEFORE_THE_OUTER
from retrofit.anatomy.branches import BEFORE_TWO_STREAMS as BEFORE_TWO_STREAMS
from retrofit.anatomy.branches import LAYER_WITHIN as LAYER_WITHIN
from retrofit.anatomy.branches import ON_TWO_STREAMS as ON_TWO_STREAMS
from retrofit.anatomy.branches import InnerLayers as InnerLayers
from retrofit.anatomy.parts import NO_STREAM as NO_STREAM
from retrofit.anatomy.parts import Branch as Branch
from retrofit.anatomy.parts import Layer as Layer
from retrofit.anatomy.parts import Part as Part
from retrofit.anatomy.parts import Stack as Stack
from retrofit.anatomy.feed_forwards import FeedForward as FeedForward
from retrofit.anatomy.feed_forwards import Port as Port
from retrofit.anatomy.feed_forward_parsing import feed_forwards as feed_forwards
from retrofit.anatomy.feed_forwards import FeedForwardBlock as FeedForwardBlock
from retrofit.anatomy.feed_forwards import PackableRows as PackableRows
from retrofit.anatomy.feed_forwards import RowMajor as RowMajor
from retrofit.anatomy.feed_forwards import install_feed_forward as install_feed_forward
from retrofit.anatomy.feed_forwards import linear as linear
from retrofit.anatomy.module_sites import WrappedModule as WrappedModule
from retrofit.anatomy.module_sites import WrappedModules as WrappedModules
from retrofit.anatomy.weights import Matrix as Matrix
from retrofit.anatomy.weights import weight_and_bias as weight_and_bias
from retrofit.anatomy.weights import weight_out_first as weight_out_first
from retrofit.anatomy.attention_cores import Attention as Attention
from retrofit.anatomy.attention_cores import SOFTMAX as SOFTMAX
from retrofit.anatomy.attention_cores import find_attentions as find_attentions
from retrofit.anatomy.attention_parsing import find_attention_sites as find_attention_sites
from retrofit.anatomy.attention_sites import REST as REST
from retrofit.anatomy.attention_sites import AttentionSite as AttentionSite
from retrofit.anatomy.attention_sites import SiteProjection as SiteProjection
from retrofit.anatomy.attention_sites import weights_by_letter as weights_by_letter
from retrofit.anatomy.layer_calls import LayerCall as LayerCall
from retrofit.anatomy.layer_calls import LayerCalls as LayerCalls
from retrofit.anatomy.causality import chooses_keys as chooses_keys
from retrofit.anatomy.causality import is_causal as is_causal
from retrofit.anatomy.causality import mask_value as mask_value
from retrofit.anatomy.weights import nearest_products as nearest_products
from retrofit.anatomy.weights import weight_product as weight_product
from retrofit.anatomy.stacks import is_token_id as is_token_id

# The program behind it: a graph of ATen operations, the module calls they were made in, their data flow.
from retrofit.program.aten_ops import CAST as CAST
from retrofit.program.aten_ops import DROPOUT as DROPOUT
from retrofit.program.aten_ops import JOIN as JOIN
from retrofit.program.aten_ops import LAYOUT as LAYOUT
from retrofit.program.aten_ops import LIKE as LIKE
from retrofit.program.aten_ops import MASKING as MASKING
from retrofit.program.aten_ops import NORM as NORM
from retrofit.program.aten_ops import POINTWISE as POINTWISE
from retrofit.program.aten_ops import SCAN as SCAN
from retrofit.program.aten_ops import SELECTION as SELECTION
from retrofit.program.aten_ops import carried_operands as carried_operands
from retrofit.program.aten_ops import is_all_zeros as is_all_zeros
from retrofit.program.aten_ops import is_float as is_float
from retrofit.program.aten_ops import is_heavy as is_heavy
from retrofit.program.aten_ops import op as op
from retrofit.program.aten_ops import shape as shape
from retrofit.program.program import Call as Call
from retrofit.program.program import Key as Key
from retrofit.program.program import Program as Program
from retrofit.program.capture import capture as capture
from retrofit.program.dataflow import Dataflow as Dataflow
from retrofit.program.dataflow import refuse_state_inputs as refuse_state_inputs
from retrofit.program.trial_calls import Trial as Trial
from retrofit.program.trial_calls import failed_trials as failed_trials

# Modules that replace others: wrappers, keywords past a model's own code, memory in its cache, losses added to its own.
from retrofit.surgery.auxiliary_losses import ForwardWithAuxiliaryLosses as ForwardWithAuxiliaryLosses
from retrofit.surgery.auxiliary_losses import number_is_loss as number_is_loss
from retrofit.surgery.auxiliary_losses import auxiliary_losses as auxiliary_losses
from retrofit.surgery.auxiliary_losses import record_auxiliary_loss as record_auxiliary_loss
from retrofit.surgery.cache_memory import SLACK as SLACK
from retrofit.surgery.cache_memory import TokenHistory as TokenHistory
from retrofit.surgery.cache_memory import cache_among as cache_among
from retrofit.surgery.cache_memory import forget_histories as forget_histories
from retrofit.surgery.cache_memory import histories_of as histories_of
from retrofit.surgery.cache_memory import staying_tokens as staying_tokens
from retrofit.surgery.fused_attention import FUSED_ARGUMENTS as FUSED_ARGUMENTS
from retrofit.surgery.fused_attention import AnsweredFusedAttention as AnsweredFusedAttention
from retrofit.surgery.keyword_injection import InjectingForward as InjectingForward
from retrofit.surgery.keyword_injection import own_forward as own_forward
from retrofit.surgery.keyword_injection import call_with_keywords as call_with_keywords
from retrofit.surgery.keyword_injection import child_modules as child_modules
from retrofit.surgery.wrappers import ArgumentPlace as ArgumentPlace
from retrofit.surgery.wrappers import Wrapper as Wrapper
from retrofit.surgery.wrappers import argument_place as argument_place
from retrofit.surgery.wrappers import batch_first as batch_first
from retrofit.surgery.wrappers import find_argument as find_argument
from retrofit.surgery.wrappers import map_first as map_first
from retrofit.surgery.wrappers import tensor_argument as tensor_argument
from retrofit.surgery.wrappers import with_item as with_item
from retrofit.surgery.fused_attention import query_positions as query_positions
from retrofit.surgery.fused_attention import unpadded_tokens as unpadded_tokens
from retrofit.surgery.fused_attention import visible_keys as visible_keys

# Running a model: on calibration data, on inputs of other shapes, undisturbed; one of two ways by the sizes of the input.
from retrofit.passbase.calibration import calibration_from as calibration_from
from retrofit.inputs.calibration import Calibration as Calibration
from retrofit.inputs.calibration import Enough as Enough
from retrofit.inputs.calibration import sample_calibration as sample_calibration
from retrofit.inputs.calibration import split_calibration as split_calibration
from retrofit.inputs.model_memory import groups_in_room as groups_in_room
from retrofit.inputs.model_memory import set_aside as set_aside
from retrofit.files.memory import release_freed_memory as release_freed_memory
from retrofit.numerics.distances import DensePredictions as DensePredictions
from retrofit.inputs.module_calls import RecordedCall as RecordedCall
from retrofit.inputs.module_calls import float_tensors as float_tensors
from retrofit.inputs.module_calls import record_calls as record_calls
from retrofit.numerics.distances import token_weights as token_weights
from retrofit.numerics.distances import weighted_error as weighted_error
from retrofit.program.conditional import cond as cond
from retrofit.program.conditional import holds_one_way as holds_one_way
from retrofit.inputs.example_inputs import forward_parameters as forward_parameters
from retrofit.program.conditional import is_exporting as is_exporting
from retrofit.progress import counted as counted
from retrofit.progress import side_by_side as side_by_side
from retrofit.inputs.model_state import evaluation_mode as evaluation_mode
from retrofit.inputs.packed_weights import has_rows_apart as has_rows_apart
from retrofit.inputs.packed_weights import is_packed_tensor as is_packed_tensor
from retrofit.inputs.packed_weights import rows_at as rows_at
from retrofit.surgery.dequantization import is_packed as is_packed
from retrofit.inputs.probes import accepts as accepts
from retrofit.inputs.probes import is_numbering as is_numbering
from retrofit.inputs.probes import is_per_token as is_per_token
from retrofit.process import quiet as quiet
from retrofit.inputs.model_memory import without_weights as without_weights
from retrofit.inputs.model_state import preserve_state as preserve_state
