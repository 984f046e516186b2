"""Any transformers config made tiny by the names of its fields: same architecture, a few thousand weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig

LAYERS = 4
WIDTH = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = WIDTH // HEADS
FFN = 96
EXPERTS = 4
VOCAB = 99
POSITIONS = 64
WINDOW = 8
RANK = 24
IMAGE = 64
FIRST_FREE_ID, LAST_FREE_ID = 16, 79  # ids outside are special tokens

Value = Any
Rule = Callable[[Value, Mapping[str, Value]], Value]


def to(size: int) -> Rule:
    """A number becomes `size`, a list of numbers becomes lists of `size`; nothing and zero stay."""

    def rule(value: Value, defaults: Mapping[str, Value]) -> Value:
        if isinstance(value, (list, tuple)):
            return type(value)(rule(item, defaults) for item in value)
        return size if isinstance(value, int) and value > 0 else value

    return rule


def at_most(size: int) -> Rule:
    """A number, or each number of a list, is at most `size`."""

    def rule(value: Value, defaults: Mapping[str, Value]) -> Value:
        if isinstance(value, (list, tuple)):
            return type(value)(rule(item, defaults) for item in value)
        return min(value, size) if isinstance(value, int) else value

    return rule


def pyramid(base: int) -> Rule:
    """A number becomes `4 · base`; in a list the smallest value becomes `base`, the next larger one `2 · base`, and so on."""

    def rule(value: Value, _: Mapping[str, Value]) -> Value:
        if not isinstance(value, (list, tuple)):
            return 4 * base if isinstance(value, int) and value > 0 else value
        order = sorted(set(value))
        return type(value)(base * 2 ** min(order.index(item), 3) for item in value)

    return rule


def key_value_heads(value: Value, defaults: Mapping[str, Value]) -> Value:
    """Grouped-query attention stays grouped, multi-query stays multi-query, full attention stays full."""
    if not isinstance(value, int) or value <= 1:
        return value
    heads = next((defaults[name] for name in ("num_attention_heads", "n_heads", "num_heads") if name in defaults), value)
    return KV_HEADS if isinstance(heads, int) and value < heads else HEADS


def special_token(value: Value, defaults: Mapping[str, Value]) -> Value:
    """A special token's id is inside the vocabulary and outside the ids that inputs are drawn from."""
    if isinstance(value, (list, tuple)):
        return type(value)(special_token(item, defaults) for item in value)
    if not isinstance(value, int) or value < FIRST_FREE_ID:
        return value
    return LAST_FREE_ID + 1 + value % (VOCAB - LAST_FREE_ID - 1)


# The first rule whose pattern matches a field's whole name makes its value; a field without a rule keeps its default.
RULES: tuple[tuple[str, Rule], ...] = (
    (r".*_token_(id|index)|(begin_)?suppress_tokens", special_token),
    (r"(task_)?type_vocab_sizes?", at_most(8)),
    (r"(.*_)?vocab_size(_per_layer_input)?|unpadded_vocab_size|encoder_hash_byte_group_vocab", to(VOCAB)),
    (r".*codebook_size|num_centroids", to(32)),
    (r"initializer_range|init_std", lambda value, _: 0.08 if isinstance(value, float) else value),
    # depth
    (r"first_k_dense_replace|num_dense_layers|num_mtp_layers|num_nextn_predict_layers|moe_layer_start_index", at_most(1)),
    (r"num_kv_shared_layers", lambda value, defaults: LAYERS if value == defaults["num_hidden_layers"] else min(value, 2)),
    (r"num_(adapter|lstm|residual)_layers|num_hidden_groups|num_mem_blocks|max_window_layers", at_most(2)),
    (r"(.*_)?layers|n_layer|num_encoder_blocks|depth|num_self_attends_per_block", at_most(LAYERS)),
    (r"depths|block_sizes|stage_numb_of_layers|stage_num_blocks|num_block_repeats|n_attn_blocks", at_most(2)),
    (r".*_(layer_period|sparse_step|layer_interval|layer_step|every_n_layers|group_size|pattern)", at_most(2)),
    (r".*_layer_offset", at_most(1)),
    # experts
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|zero_expert_num|num_feedforward_networks", at_most(EXPERTS)),
    (r"num_experts_per_tok|moe_topk|moe_k|.*top_k_experts|expert_top_k|n_group|topk_group", at_most(2)),
    (r".*num_shared_experts|n_shared_experts", at_most(1)),
    # heads
    (r".*(key_value_heads|kv_heads)", key_value_heads),
    (r"(.*_)?(num|n|attention)_(.*_)?heads?", pyramid(1)),
    (r"qk_(nope|rope)_head_dim|rotary_dim", to(HEAD_DIM // 2)),
    (r".*(head_dim|head_size)|d_kv|d_head|dim_head|kv_channels|key_dim|.*dim_key", to(HEAD_DIM)),
    (r".*lora_rank|.*_rank|lowrank|d_rel", to(RANK)),
    # widths
    (r"(.*_)?(intermediate|ffn|mlp|feed_forward)_(hidden_)?(size(_mlp)?|dim)|dim_ff|d_ff|dff|d_inner|hidden_dim", to(FFN)),
    (r"hidden_sizes|embed_dims|neck_hidden_sizes|(stage_)?(in|out|mid)_channels|base_attn_unit_dims", pyramid(16)),
    (r"embed_dim", lambda value, defaults: to(16 if "depths" in defaults else WIDTH)(value, defaults)),
    (r"(.*_)?hidden_size(_global|_per_layer_input)?|(.*_)?(embed|emb|embedding)_(dim|size)|d_model|n_embd|dim", to(WIDTH)),
    (r"(.*_)?(projection|proj|output|out|input)_(dims?|size)|d_latents|lru_width|prediction_head_size", to(WIDTH)),
    # lengths
    (r"(.*_)?max_.*position.*|n_positions|n_ctx|max_seq_len|context_length", at_most(POSITIONS)),
    (r"(.*_)?sliding_window(_size)?|(.*_)?attention_(window|chunk)(_size)?|window_size|local_attention|local_radius", to(WINDOW)),
    (r"index_topk", to(WINDOW)),
    (r"(mamba_)?chunk_size|(lsh|local)_attn_chunk_length|block_size|global_block_size|keep_window_size", at_most(WINDOW)),
    # state spaces
    (r"(.*_)?d_state|(ssm_)?state_size", at_most(8)),
    (r"(.*_)?n_?groups", at_most(2)),
    # images
    (r"image_size", lambda value, _: (IMAGE, IMAGE) if isinstance(value, (list, tuple)) else IMAGE),
    (r"patch_size", lambda value, _: 16 if isinstance(value, int) and value > 8 else value),
)
COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)


def default_of(field: dataclasses.Field[Any]) -> Value:
    """The default of a dataclass field, None where it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def shrink(name: str, value: Value, defaults: Mapping[str, Value]) -> Value:
    """The tiny value of the field `name`."""
    if value is None or isinstance(value, bool):
        return value
    for pattern, rule in COMPILED:
        if pattern.fullmatch(name):
            return rule(value, defaults)
    return value


def variety(config: PretrainedConfig, original: PretrainedConfig) -> dict[str, list[str]]:
    """The per-layer kinds that a shallow config has lost, cycled so that every kind of the original occurs."""
    restored = {}
    for name, kinds in vars(original).items():
        few = vars(config).get(name)
        if name.startswith("_") or not (isinstance(kinds, list) and isinstance(few, list) and kinds and few):
            continue
        if not all(isinstance(kind, str) for kind in kinds) or len(few) > len(kinds):
            continue
        distinct = list(dict.fromkeys(kinds))
        if set(few) != set(distinct) and len(distinct) <= len(few):
            restored[name] = [distinct[index % len(distinct)] for index in range(len(few))]
    return restored


def tiny(
    config_class: type[PretrainedConfig], overrides: Mapping[str, Any], full: PretrainedConfig | None = None
) -> PretrainedConfig:
    """A config of `config_class`, or of `full`'s kind, with small sizes that fit together.

    `overrides` has the last word; a dictionary under the name of a nested config amends that one.
    """
    kinds: dict[str, Any] = {
        name: {key: item for key, item in value.items() if scalar(item)}
        for name, value in overrides.items()
        if isinstance(value, Mapping) and "model_type" in value
    }
    plain = config_class(**kinds)
    full = full or plain
    defaults = {field.name: default_of(field) for field in dataclasses.fields(config_class)}
    amended = {name: value for name in defaults if scalar(value := vars(full).get(name)) and value != vars(plain).get(name)}
    defaults.update(amended)
    small = {name: shrink(name, value, defaults) for name, value in defaults.items()}
    fields = {name: value for name, value in small.items() if name in amended or value != defaults[name]}
    nested = {name: part for name in config_class.sub_configs if isinstance(part := vars(full).get(name), PretrainedConfig)}
    for name, part in nested.items():
        small_part = tiny(type(part), overrides.get(name) or {}, part)
        fields[name] = small_part.to_dict() if name in kinds else small_part
    fields.update({name: value for name, value in overrides.items() if name not in nested and name != "model_type"})
    config = config_class(**fields)
    lost = {name: kinds for name, kinds in variety(config, full).items() if name not in overrides}
    return config_class(**{**fields, **lost}) if lost else config


def scalar(value: Value) -> bool:
    return isinstance(value, (bool, int, float, str))
