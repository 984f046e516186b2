"""The anatomy of a model beyond its stacks, layers and branches: feed-forwards, attentions and weights as `plan` reads them."""

from __future__ import annotations

# The parts of feed-forwards; `modules` has their replacements.
from retrofit.anatomy.feed_forwards import FeedForward as FeedForward
from retrofit.anatomy.feed_forwards import Port as Port
from retrofit.anatomy.feed_forwards import dropout_notes as dropout_notes
from retrofit.anatomy.feed_forward_parsing import feed_forwards as feed_forwards

# Attentions: the products and their softmax, and the projection modules.
from retrofit.anatomy.attention_cores import Attention as Attention
from retrofit.anatomy.attention_cores import SOFTMAX as SOFTMAX
from retrofit.anatomy.attention_cores import FUSED as FUSED
from retrofit.anatomy.attention_cores import find_attentions as find_attentions
from retrofit.anatomy.attention_sites import AttentionSite as AttentionSite
from retrofit.anatomy.attention_sites import MaskArgument as MaskArgument
from retrofit.anatomy.attention_sites import SiteProjection as SiteProjection
from retrofit.anatomy.attention_sites import REST as REST
from retrofit.anatomy.attention_parsing import find_attention_sites as find_attention_sites
from retrofit.anatomy.attention_sites import ValueSite as ValueSite
from retrofit.anatomy.attention_parsing import find_value_sites as find_value_sites
from retrofit.anatomy.attention_sites import weights_by_letter as weights_by_letter

# The keys visible to a query.
from retrofit.anatomy.causality import chooses_keys as chooses_keys
from retrofit.anatomy.causality import is_causal as is_causal
from retrofit.anatomy.causality import mask_value as mask_value

# Weights and the products with them.
from retrofit.anatomy.weights import Matrix as Matrix
from retrofit.anatomy.parts import Part as Part
from retrofit.anatomy.weights import weight_and_bias as weight_and_bias
from retrofit.anatomy.weights import weight_out_first as weight_out_first
from retrofit.anatomy.weights import weight_product as weight_product
from retrofit.anatomy.weights import nearest_products as nearest_products
from retrofit.anatomy.weights import operand_chain as operand_chain
from retrofit.anatomy.weights import WeightProduct as WeightProduct
from retrofit.anatomy.stacks import is_token_id as is_token_id

# Modules that own a part, and the arguments of layers.
from retrofit.anatomy.module_sites import WrappedModules as WrappedModules
from retrofit.anatomy.layer_calls import LayerCall as LayerCall
from retrofit.anatomy.layer_calls import LayerCalls as LayerCalls
from retrofit.anatomy.layer_calls import reader_of as reader_of
from retrofit.anatomy.branches import InnerLayers as InnerLayers
from retrofit.anatomy.parts import NO_STREAM as NO_STREAM
from retrofit.surgery.wrappers import modules_around as modules_around

# Reasons and fixes that several passes give.
from retrofit.anatomy.parts import WITHOUT_GRADIENT as WITHOUT_GRADIENT
from retrofit.anatomy.attention_cores import CALLS_FUSED as CALLS_FUSED
from retrofit.anatomy.branches import LAYER_WITHIN as LAYER_WITHIN
from retrofit.anatomy.branches import BEFORE_THE_OUTER as BEFORE_THE_OUTER
from retrofit.anatomy.branches import ON_TWO_STREAMS as ON_TWO_STREAMS
from retrofit.anatomy.branches import BEFORE_TWO_STREAMS as BEFORE_TWO_STREAMS
