"""Tiny GGUF files, written as llama.cpp's converter writes them, beside the models of transformers that they hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import model_folders
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, NemotronForCausalLM, PreTrainedModel

Q = gguf.GGMLQuantizationType
LENGTH = 64
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_KV = {"num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 5000.0}


class Family(NamedTuple):
    """How llama.cpp's converter writes a family.

    Attributes:
        architecture: llama.cpp's name.
        config: of transformers.
        keys: what the header says besides sizes.
        permutes, offset, transposes: see `kvkeep.models.gguf_models`, which has its own table.
        extra: tensors beside those of the model.
    """

    architecture: str
    config: Mapping[str, Any]
    keys: Mapping[str, Any] = {}
    permutes: bool = False
    offset: float = 0.0
    transposes: bool = False
    extra: Callable[[], Mapping[str, np.ndarray]] = dict


def _llama3_factors(factor: float, width: int, theta: float, trained: int) -> dict[str, np.ndarray]:
    waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    smooth = (trained / waves - 1.0) / 3.0
    middle = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(waves < trained / 4, 1.0, np.where(waves > trained, factor, middle))
    return {"rope_freqs.weight": divisors.astype(np.float32)}


def _rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_ROPE, **changes}}


_LONG, _SHORT = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MOE_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_GEMMA = {"head_dim": 32, "num_hidden_layers": 7}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_PHI3 = {"model_type": "phi3", **_KV, "pad_token_id": 0, "tie_word_embeddings": False}
_LINEAR = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_LOCAL = {"rope_type": "default", "rope_theta": 10000.0}

_QWEN35 = {
    "model_type": "qwen3_5_text",
    **_KV,
    "head_dim": 32,
    "num_hidden_layers": 4,
    **_LINEAR,
    **_rope(partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True),
}
_QWEN35_KEYS = {
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 48,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", {"model_type": "llama", **_KV, **_rope()}, {"rope.dimension_count": 16}, permutes=True),
    "llama with biases": Family(
        "llama", {"model_type": "llama", **_KV, **_rope(), "attention_bias": True, "mlp_bias": True}, permutes=True
    ),
    "llama with wide heads": Family("llama", {"model_type": "llama", **_KV, **_rope(), "head_dim": 32}, permutes=True),
    "llama tied": Family(
        "llama", {"model_type": "llama", **_KV, **_rope(), "tie_word_embeddings": True}, permutes=True
    ),
    "llama 3": Family(
        "llama",
        {"model_type": "llama", **_KV, **_rope(rope_type="llama3", rope_theta=500000.0, **_LLAMA3)},
        permutes=True,
        extra=lambda: _llama3_factors(8.0, 16, 500000.0, 8192),
    ),
    "llama linear": Family(
        "llama",
        {"model_type": "llama", **_KV, **_rope(rope_type="linear", factor=4.0)},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        permutes=True,
    ),
    "mixtral": Family(
        "llama",
        {
            "model_type": "mixtral",
            **_KV,
            **_rope(),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        {"expert_count": 4, "expert_used_count": 2},
        permutes=True,
    ),
    "smollm3": Family(
        "smollm3",
        {"model_type": "smollm3", **_KV, **_rope(), "num_hidden_layers": 5, "pad_token_id": 0},
        permutes=True,
    ),
    "granite": Family(
        "granite",
        {
            "model_type": "granite",
            **_KV,
            **_rope(),
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.2, "logit_scale": 4.0},
        permutes=True,
    ),
    "qwen2": Family("qwen2", {"model_type": "qwen2", **_KV, **_rope()}),
    "qwen2 yarn": Family(
        "qwen2",
        {"model_type": "qwen2", **_KV, **_rope(**_YARN)},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ),
    "qwen2moe": Family(
        "qwen2moe",
        {"model_type": "qwen2_moe", **_KV, **_rope(), **_MOE, "shared_expert_intermediate_size": 48},
        {**_MOE_KEYS, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3": Family("qwen3", {"model_type": "qwen3", **_KV, **_rope(), "head_dim": 32}),
    "qwen3moe": Family(
        "qwen3moe",
        {"model_type": "qwen3_moe", **_KV, **_rope(), **_MOE, "head_dim": 32, "norm_topk_prob": True},
        _MOE_KEYS,
    ),
    "phi3": Family("phi3", {**_PHI3, **_rope(), "sliding_window": 9}, {"attention.sliding_window": 9}),
    "phi3 longrope": Family(
        "phi3",
        {
            **_PHI3,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": LENGTH,
            **_rope(rope_type="longrope", long_factor=_LONG, short_factor=_SHORT),
        },
        {"rope.scaling.original_context_length": 16, "attention.sliding_window": 0},
        extra=lambda: {
            "rope_factors_long.weight": np.array(_LONG, np.float32),
            "rope_factors_short.weight": np.array(_SHORT, np.float32),
        },
    ),
    "phi3 partial": Family(
        "phi3",
        {**_PHI3, **_rope(partial_rotary_factor=0.75)},
        {"rope.dimension_count": 12, "attention.sliding_window": 0},
    ),
    "olmo2": Family("olmo2", {"model_type": "olmo2", **_KV, **_rope()}),
    "gemma": Family("gemma", {"model_type": "gemma", **_KV, **_GEMMA, **_rope(rope_theta=10000.0)}, offset=1.0),
    "gemma2": Family(
        "gemma2",
        {
            "model_type": "gemma2",
            **_KV,
            **_GEMMA,
            **_rope(rope_theta=10000.0),
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
        {"attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        offset=1.0,
    ),
    "gemma3": Family(
        "gemma3",
        {
            "model_type": "gemma3_text",
            **_KV,
            **_GEMMA,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": _rope(rope_theta=1e6)["rope_parameters"],
                "sliding_attention": _LOCAL,
            },
        },
        {"attention.sliding_window": 8, "rope.freq_base": 1e6},
        offset=1.0,
    ),
    "gemma3 of other windows": Family(
        "gemma3",
        {
            "model_type": "gemma3_text",
            **_KV,
            **_GEMMA,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": _LOCAL,
            },
        },
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        offset=1.0,
    ),
    "gpt2": Family("gpt2", {"model_type": "gpt2"}, transposes=True),
    "starcoder2": Family(
        "starcoder2",
        {"model_type": "starcoder2", **_KV, **_rope(), "sliding_window": None, "tie_word_embeddings": False},
    ),
    "stablelm": Family(
        "stablelm",
        {"model_type": "stablelm", "num_key_value_heads": 4, **_rope(partial_rotary_factor=0.25), "use_qkv_bias": True},
        {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "stablelm in parallel": Family(
        "stablelm",
        {"model_type": "stablelm", **_KV, **_rope(partial_rotary_factor=1.0), "use_parallel_residual": True},
        {"rope.dimension_count": 16, "use_parallel_residual": True},
    ),
    "lfm2": Family(
        "lfm2",
        {
            "model_type": "lfm2",
            **_KV,
            **_rope(),
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
        },
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "qwen35": Family("qwen35", _QWEN35, _QWEN35_KEYS, offset=1.0),
    "qwen35 with a layer of prediction": Family(
        "qwen35",
        _QWEN35,
        {**_QWEN35_KEYS, "block_count": 5, "nextn_predict_layers": 1},
        offset=1.0,
        extra=lambda: {"blk.4.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)},
    ),
    "nemotron": Family(
        "nemotron",
        {"model_type": "nemotron", **_KV, **_rope(partial_rotary_factor=0.5)},
        {"rope.dimension_count": 8},
        offset=1.0,
    ),
}


if not NemotronForCausalLM._can_set_attn_implementation():  # with the oldest transformers
    FAMILIES = {name: family for name, family in FAMILIES.items() if name != "nemotron"}


@functools.cache
def model(name: str) -> PreTrainedModel:
    """The model of a family, with random weights and norms."""
    torch.manual_seed(0)
    kind = FAMILIES[name].config["model_type"]
    sizes = {**_SIZES, "max_position_embeddings": LENGTH}
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    common = {"vocab_size": len(model_folders.tokenizer()), "bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(**{**sizes, **common, **FAMILIES[name].config})
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.08))
    return made


def write(path: Path, name: str = "llama", quantized: Q | None = None, **changes: Any) -> Path:
    """Write a model's GGUF file.

    Args:
        path: the file.
        name: one of `FAMILIES`.
        quantized: the type of matrices; ``None``: float32.
        changes: metadata; ``None`` leaves one out. Dots are written as two underscores.
    """
    family, source = FAMILIES[name], model(name)
    keys = {**_sizes(source.config, family), **family.keys}
    metadata = {"general.name": name, **{f"{family.architecture}.{key}": value for key, value in keys.items()}}
    metadata |= vocabulary() | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensors = {**_tensors(source, family), **family.extra()}
    write_file(path, metadata.pop("general.architecture", family.architecture), metadata, tensors, quantized)
    return path


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    quantized: Q | None = None,
) -> None:
    """Write a GGUF file of metadata and tensors; matrices in another type if one is given."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        if kind == gguf.GGUFValueType.INT32:
            kind = gguf.GGUFValueType.UINT32 if value >= 0 else kind
        writer.add_key_value(
            key, value, kind, gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        )
    for name, tensor in tensors.items():
        if quantized is not None and tensor.ndim > 1:
            if quantized == Q.BF16:
                writer.add_tensor(name, gguf.quantize(tensor, quantized), raw_dtype=quantized)
            else:
                writer.add_tensor(name, gguf.quantize(tensor, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary() -> dict[str, Any]:
    """The metadata of the byte-level tokenizer of `model_folders`."""
    tokenizer = model_folders.tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    inner = tokenizer.backend_tokenizer
    import json

    merges = json.loads(inner.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": model_folders.TEMPLATE,
    }


def _by_number(value: np.ndarray, width: int) -> np.ndarray:
    """Value heads in the order of their number within a group, the groups within it."""
    return value.reshape(2, 3, width, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)


def _of_qwen35(value: np.ndarray, name: str) -> np.ndarray:
    if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
        value = np.concatenate([value[:64], _by_number(value[64:], 8)])
        return value[:, 0] if value.ndim == 3 else value
    if name == "ssm_out.weight":
        return _by_number(value.T, 8).T
    widths = {"attn_gate.weight": 8, "ssm_alpha.weight": 1, "ssm_beta.weight": 1}
    return _by_number(value, widths[name]) if name in widths else value


def _sizes(config: Any, family: Family) -> dict[str, Any]:
    heads, kind = config.num_attention_heads, family.architecture
    rotation = getattr(config, "rope_parameters", None) or {}
    epsilons = {
        name: getattr(config, name, None)
        for name in ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps")
    }
    epsilon = next((number for number in epsilons.values() if number is not None), None)
    head_dim = None if kind == "gpt2" else getattr(config, "head_dim", None)
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * 64 if kind == "gpt2" else config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": epsilon,
        "rope.freq_base": rotation.get("rope_theta"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _tensors(source: PreTrainedModel, family: Family) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names, in its order of rows."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[family.architecture], source.config.num_hidden_layers)
    found = {}
    for parameter, tensor in source.state_dict().items():
        if parameter == "lm_head.weight" and source.config.tie_word_embeddings:
            continue
        value, (stem, _, suffix) = tensor.float().numpy(), parameter.rpartition(".")
        if suffix == "gate_up_proj":
            layer, half = parameter.split(".")[2], value.shape[1] // 2
            found[f"blk.{layer}.ffn_gate_exps.weight"] = np.ascontiguousarray(value[:, :half])
            found[f"blk.{layer}.ffn_up_exps.weight"] = np.ascontiguousarray(value[:, half:])
            continue
        if suffix in ("A_log", "dt_bias"):
            end, value = ("ssm_a", -np.exp(value)) if suffix == "A_log" else ("ssm_dt.bias", value)
            found[f"blk.{parameter.split('.')[2]}.{end}"] = _by_number(value, 1)
            continue
        if suffix == "down_proj":
            stem, suffix = parameter, "weight"
        name = f"{names.get_name(stem)}.{suffix}"
        found[name] = np.ascontiguousarray(_stored(value, name, source.config, family))
    return found


def _stored(value: np.ndarray, name: str, config: Any, family: Family) -> np.ndarray:
    if family.permutes and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        split = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return split.swapaxes(1, 2).reshape(value.shape)
    if family.architecture == "qwen35" and name.startswith("blk."):
        value = _of_qwen35(value, name.split(".", 2)[2])
    if name.endswith("norm.weight") and ".ssm_norm." not in name:
        return value + np.float32(family.offset)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return value.reshape(-1)
    if name.endswith("shortconv.conv.weight"):
        return value[:, 0]
    conv = (".attn_qkv.weight", ".attn_output.weight", ".ffn_up.weight", ".ffn_down.weight")
    return value.T if family.transposes and name.endswith(conv) else value
