"""Tiny configurations: the default one of a family with small numbers in it."""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB = 128
FIRST_SPECIAL = 100
"""Special tokens whose numbers lie beyond the small vocabulary get numbers from here on."""

LAYERS = 4

RULES = [
    (VOCAB, "vocab_size | .*_vocab_size | n_vocab | vocab_size_per_layer_input"),
    (
        LAYERS,
        "num_hidden_layers | n_layers? | num_layers | (en|de)coder_layers | num_(en|de)coder_layers | depth"
        "| decoder_num_hidden_layers",
    ),
    (
        4,
        "num_attention_heads | n_heads? | num_heads | (en|de)coder_attention_heads | num_(en|de)coder_attention_heads"
        "| .*_num_attention_heads | num_attn_heads | linear_num_value_heads | (num|n)(_\\w+)?_experts",
    ),
    (
        2,
        "num_key_value_heads | .*_num_key_value_heads | n_head_kv | num_kv_heads | kv_n_heads | linear_num_key_heads"
        "| num_experts_per_tok | num_experts_per_token | moe_k | moe_topk | top_k_experts | num_selected_experts",
    ),
    (
        1,
        "n_group | topk_group | num_expert_groups? | n_shared_experts | num_shared_experts | mamba_n_groups"
        "| mamba_ngroups | n_groups | num_mem_blocks | first_k_dense_replace | first_k_dense",
    ),
    (0, "num_nextn_predict_layers | num_mtp_layers"),
    (
        64,
        "hidden_size | d_model | n_embd | embed_dim | embedding_size | dim | word_embed_proj_dim | hidden_dim "
        "| model_dim | dim_model | out_hidden_size | decoder_hidden_size | projection_dim | mm_hidden_size"
        "| d_embed | text_hidden_size"
        "| embed_size | lru_width | attention_hidden_size | cross_attention_hidden_size | vision_output_dim | image_dim"
        "| hidden_size_per_layer_input | mamba_d_ssm | base_model_hidden_size | mlp_dim | emb_dim"
        "| projector_hidden_size | index_topk | index_n_heads",
    ),
    (
        96,
        ".*intermediate_size | (en|de)coder_ffn_dim | ffn_dim | n_inner | d_ff | ffn_hidden_size | dim_ff | inner_dim"
        "| .*intermediate_dim | feed_forward_size | ff_dim",
    ),
    (
        16,
        "head_dim | attention_head_dim | kv_channels | v_head_dim | qk_nope_head_dim | d_kv | global_head_dim"
        "| swa_head_dim | swa_v_head_dim | index_head_dim | key_head_dim | attn_head_dim | linear_(key|value)_head_dim"
        "| .*_lora_rank | mamba_d_head | mamba_head_dim | mamba_headdim",
    ),
    (
        8,
        "qk_rope_head_dim | rotary_dim | patch_size | vision_patch_size | mamba_n_heads | mamba_num_heads | state_size"
        "| mamba_d_state | ssm_state_size | mamba_state_dim | time_step_rank | mamba_dt_rank",
    ),
    (
        256,
        "max_position_embeddings | n_positions | max_seq_len | max_target_positions | max_source_positions "
        "| seq_length | n_ctx",
    ),
    (
        12,
        "sliding_window | sliding_window_size | attention_window_size | attention_chunk_size | local_attention_window"
        "| window_size",
    ),
    (32, "image_size"),
]
"""Small numbers, and the names of the arguments that get each where they are larger."""

UNSET = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""Arguments that some configurations leave open and their models need."""

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
HALF_MROPE = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
TWO_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
IMAGE_WORDS = {"<image>": 101, "<|extra_200|>": 102, "<|image token|>": 103}
STATE_FULL, STATE_HYBRID = (["mamba", kind] * 2 for kind in ("attention", "hybrid"))  # names that both versions know
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
OMNI = {"vision_start_token_id": 105, "vision_end_token_id": 106, "text_config": {"rope_parameters": MROPE}}

BY_HAND: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "chameleon": {"vocabulary_map": IMAGE_WORDS},
    "cohere_compass": {"text_config": {"layer_types": SLIDING_FULL, "rope_parameters": TWO_ROPES}},
    "cohere_compass_text": {"layer_types": SLIDING_FULL, "rope_parameters": TWO_ROPES},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] * LAYERS}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": IMAGE_WORDS, "vq_config": {"base_channels": 32, "codebook_size": 16}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [3, 3, 2]}}},
    "gemma3n": {"text_config": {"layer_types": SLIDING_FULL, "num_kv_shared_layers": 2}},
    "gemma3n_text": {"layer_types": SLIDING_FULL, "num_kv_shared_layers": 2},
    "glm46v": {"text_config": {"rope_parameters": HALF_MROPE}},
    "glm4v": {"text_config": {"rope_parameters": HALF_MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": HALF_MROPE}},
    "glm_ocr": {"text_config": {"rope_parameters": MROPE}},
    "glmga": {"text_config": {"rope_parameters": HALF_MROPE}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": STATE_FULL},
    "hunyuan_vl": {"text_config": {"rope_parameters": MROPE}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"expert_ffn_hidden_size": 96, "zero_expert_num": 4},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_spark": {"text_config": {"moe_hidden_size": 64}},
    "paligemma": {"text_config": {"num_key_value_heads": 4, "num_attention_heads": 4}},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_omni_thinker": OMNI,
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen3_omni_moe_thinker": OMNI,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "step3p7": {"text_config": {"sliding_window": 12}},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_mamba_kernels": False,
    },
    "zamba2": {"layers_block_type": STATE_HYBRID, "attention_hidden_size": 128, "attention_head_dim": 32},
}
"""What a family needs beside, by its model type."""


def configured(family: str) -> PreTrainedConfig:
    """The tiny configuration of a family."""
    kind = CONFIG_MAPPING[family]
    return kind(**merged(small(kind), BY_HAND.get(family, {})))


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Arguments with others put in, those of inner configurations, too."""
    found = dict(values)
    for name, value in more.items():
        inner = isinstance(value, dict) and name.endswith("_config")
        found[name] = merged(values.get(name, {}), value) if inner else value
    return found


def small(kind: type[PreTrainedConfig], default: PreTrainedConfig | None = None) -> dict[str, Any]:
    """The arguments that make a configuration of this kind tiny.

    Args:
        kind: the class.
        default: the configuration to shrink; by default one without arguments.
    """
    default = kind() if default is None else default
    parts = {name: getattr(default, name, None) for name in getattr(kind, "sub_configs", None) or ()}
    found: dict[str, Any] = {
        name: {**small(type(part), part), "model_type": part.model_type}
        for name, part in parts.items()
        if isinstance(part, PreTrainedConfig)
    }
    aliases = getattr(kind, "attribute_map", {})
    fields = {
        name: value
        for name, value in vars(default).items()
        if not (name.startswith("_") or name in parts or name in aliases)
    }
    found |= _small_values(fields) | _special_tokens(fields)
    found |= {name: number for name, number in UNSET.items() if fields.get(name, 0) is None}
    if "qk_rope_head_dim" in fields and "head_dim" in found:
        found["head_dim"] = found.get("qk_rope_head_dim", 8)
    if "is_decoder" in fields:
        found["is_decoder"] = True
    heads = fields.get("num_attention_heads")
    if heads and heads == fields.get("num_key_value_heads"):
        found["num_key_value_heads"] = 4
    return found


def _small_values(fields: dict[str, Any]) -> dict[str, Any]:
    """Smaller numbers, shorter lists of layers, and rotary sections that fit."""
    names = ("num_hidden_layers", "n_layer", "num_layers")
    depth = next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        number = ruled(name)
        if isinstance(value, int) and not isinstance(value, bool) and number is not None and value > number:
            found[name] = number
        elif isinstance(value, list) and len(value) == depth > LAYERS:
            found[name] = shortened(value)
        elif name.startswith("rope_") and isinstance(value, dict):
            found[name] = smaller_rope(value)
    if "num_hidden_layers" in found and isinstance(fields.get("layer_types"), list):
        found["layer_types"] = shortened(fields["layer_types"])
    return found


def _special_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    """Numbers of special tokens within the small vocabulary, and no token that ends a text."""
    special = [
        name
        for name, value in fields.items()
        if re.search(r"token_ids?$|token_index$", name)
        and isinstance(value, int)
        and (value >= FIRST_SPECIAL or re.match("image|video|audio", name))
    ]
    found: dict[str, Any] = {name: FIRST_SPECIAL + 1 + place for place, name in enumerate(special)}
    found |= {name: None for name in ("eos_token_id", "forced_eos_token_id") if name in fields}
    return found | {name: 0 for name in ("pad_token_id",) if name in fields}


def ruled(name: str) -> int | None:
    """The small number for an argument of this name."""
    return next((number for number, names in RULES if re.fullmatch(names, name, re.VERBOSE)), None)


def shortened(values: list[Any]) -> list[Any]:
    """As many entries as there are layers, of every kind that the whole list has, in their order."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return [kinds[i * len(kinds) // LAYERS] if len(kinds) < LAYERS else kinds[i] for i in range(LAYERS)]


def smaller_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose sections fit the small heads."""
    found = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            found[name] = smaller_rope(value)
        elif name == "mrope_section":
            found[name] = [4, 2, 2]
        elif name == "original_max_position_embeddings":
            found[name] = 128
        else:
            found[name] = value
    return found
