"""Data for fitting a start, and running a model on it: calibration, recorded calls, weighted errors, memory, progress."""

from __future__ import annotations

# Calibration data.
from retrofit.inputs.calibration import Calibration as Calibration
from retrofit.inputs.calibration import Enough as Enough
from retrofit.passbase.calibration import calibration_from as calibration_from
from retrofit.passbase.calibration import SAVED as SAVED
from retrofit.passbase.calibration import came_with as came_with
from retrofit.passbase.calibration import tokenizer_of as tokenizer_of
from retrofit.inputs.calibration import sample_calibration as sample_calibration
from retrofit.inputs.calibration import split_calibration as split_calibration
from retrofit.inputs.calibration import evenly_spaced as evenly_spaced

# Calls of modules, to be repeated with a replacement.
from retrofit.inputs.module_calls import RecordedCall as RecordedCall
from retrofit.inputs.module_calls import watched as watched
from retrofit.inputs.module_calls import float_tensors as float_tensors

# Errors in which no long token dominates.
from retrofit.numerics.distances import DensePredictions as DensePredictions
from retrofit.numerics.distances import outputs_of as outputs_of
from retrofit.numerics.distances import token_weights as token_weights
from retrofit.numerics.distances import weighted_error as weighted_error

# Inputs: names, arguments missing from the example, trials with others.
from retrofit.inputs.example_inputs import forward_parameters as forward_parameters
from retrofit.inputs.optional_inputs import left_out as left_out
from retrofit.inputs.probes import accepts as accepts
from retrofit.inputs.probes import is_numbering as is_numbering
from retrofit.inputs.probes import is_per_token as is_per_token
from retrofit.inputs.probes import ids_name as ids_name
from retrofit.inputs.example_inputs import vocabulary_of as vocabulary_of

# Runs that leave a model unchanged.
from retrofit.inputs.model_state import evaluation_mode as evaluation_mode
from retrofit.inputs.model_state import preserve_modes as preserve_modes
from retrofit.inputs.model_state import preserve_state as preserve_state
from retrofit.inputs.model_memory import without_weights as without_weights
from retrofit.process import preserve_attribute as preserve_attribute
from retrofit.process import quiet as quiet
from retrofit.process import replace_attributes as replace_attributes

# Memory and progress of long work.
from retrofit.inputs.model_memory import groups_in_room as groups_in_room
from retrofit.inputs.model_memory import set_aside as set_aside
from retrofit.files.memory import page_out_mapped as page_out_mapped
from retrofit.process import release_freed_memory as release_freed_memory
from retrofit.progress import counted as counted
from retrofit.progress import side_by_side as side_by_side
