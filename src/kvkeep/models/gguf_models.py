"""The configuration of the model in a GGUF file, and how the file stores its weights.

Both follow llama.cpp's converter, family by family. transformers' reader leaves out what many files say: the scaling of
rotary frequencies, widths of heads and of experts, partial rotation, capped logits, a norm's epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ModelFileError, UnsupportedModelError
from kvkeep.models.gguf import GGUFFile, short_float, values

_EPSILON, _NORM_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = {_FREQUENCIES, _LONG, _SHORT}
"""Tensors that are read into the configuration."""
PREDICTION_LAYERS = "nextn_predict_layers"
"""Layers that predict further tokens; files count them among the others, and the model has none."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1, 3.2 and 3.3 has; their files hold only the frequencies that follow from it."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How the files of an architecture describe a model.

    Attributes:
        model_type: transformers' name.
        fields: returns the fields of the configuration that not all families have.
        epsilon: the name of the norms' epsilon in the configuration, and in the file.
        permutes: whether rows of the query's and key's weights are stored in the order of another rotation.
        offset: what is added to the weights of norms in the file.
        transposes: whether matrices are stored the other way round than in transformers.
        rotates: whether the model has rotary positions.
        partly: whether a part of each head may rotate.
        restore: returns how a tensor is restored, see `gguf_weights.WeightSource`, for a configuration and the tensor's
            name.
    """

    model_type: str
    fields: Callable[[GGUFFile], Fields] = lambda file: {}
    epsilon: tuple[str, str] = ("rms_norm_eps", _EPSILON)
    permutes: bool = False
    offset: float = 0.0
    transposes: bool = False
    rotates: bool = True
    partly: bool = False
    restore: Callable[[Any, str], Callable[[Tensor], Tensor] | None] | None = None


def _llama(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Llama and Mixtral's own, as a file has them."""
    fields = {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_down.bias" in file.tensors}
    if experts := file.integer("expert_count", 0):
        return {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": _used(file),
            "sliding_window": None,
        }
    return fields


def _granite(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Granite's own, as a file has them."""
    return {
        **_llama(file),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "attention_multiplier": file.number("attention.scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }


def _used(file: GGUFFile) -> int:
    """Return the number of experts that each token is routed to.

    Raises:
        ModelFileError: it is not 1 or more, or there are not so many experts.
    """
    used, experts = file.integer("expert_used_count"), file.integer("expert_count")
    if not 1 <= used <= experts:
        raise ModelFileError(f"{file.path} sends a token to {used} of {experts} experts. Download the file again.")
    return used


def _experts(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration about experts that all mixtures of experts of Qwen have."""
    return {
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": _used(file),
        "moe_intermediate_size": file.shape("blk.0.ffn_down_exps.weight")[-1],
        # every layer has experts
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Qwen2-MoE's own, as a file has them."""
    width = file.shape("blk.0.ffn_down_shexp.weight")[-1]
    # norm_topk_prob: files do not say it, and llama.cpp has one value for each of the two families
    return {**_experts(file), "shared_expert_intermediate_size": width, "norm_topk_prob": False}


def _qwen3_moe(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Qwen3-MoE's own, as a file has them."""
    return {**_experts(file), "norm_topk_prob": True}


def _phi3(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Phi-3's own, as a file has them."""
    trained = file.integer("rope.scaling.original_context_length", file.integer("context_length"))
    window = file.integer("attention.sliding_window", 0)
    return {"sliding_window": window or None, "original_max_position_embeddings": trained}


def _gemma2(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Gemma 2's own, as a file has them."""
    return {
        "sliding_window": file.integer("attention.sliding_window"),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, largest=46),
    }


def _gemma3(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Gemma 3's own, as a file has them."""
    cap = file.number("final_logit_softcapping", 0.0)
    window = file.integer("attention.sliding_window", 0)
    return {
        "sliding_window": window or None,
        "sliding_window_pattern": file.integer("attention.sliding_window_pattern", 6),
        **({} if window else {"layer_types": ["full_attention"] * file.integer("block_count")}),
        "final_logit_softcapping": cap or None,
        "query_pre_attn_scalar": _query_scalar(file, largest=62),
        "rope_parameters": {
            "full_attention": _rotation(file),
            "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 10000.0)},
        },
    }


def _query_scalar(file: GGUFFile, largest: int) -> int:
    """Return Gemma's ``query_pre_attn_scalar``: the width of a head, or in the family's largest model, the one with
    ``largest`` layers, the width of a token's vector by the number of heads.
    """
    if file.integer("block_count") == largest:
        return file.integer("embedding_length") // file.integer("attention.head_count")
    return _head_dim(file)


def _gpt2(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that GPT-2 has under names of its own, as a file has them."""
    return {
        "n_embd": file.integer("embedding_length"),
        "n_layer": file.integer("block_count"),
        "n_head": file.integer("attention.head_count"),
        "n_positions": file.integer("context_length"),
        "n_inner": file.integer("feed_forward_length"),
    }


def _starcoder2(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are StarCoder 2's own, as a file has them."""
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors, "sliding_window": None}


def _stablelm(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are StableLM's own, as a file has them."""
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "qk_layernorm": False,  # the norms of a file that has some are left over, and so refused
        "partial_rotary_factor": _rotated(file),
    }


def _nemotron(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Nemotron's own, as a file has them."""
    return {**_llama(file), "hidden_act": "relu2", "partial_rotary_factor": _rotated(file)}


def _lfm2(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are LFM2's own, whose layers are attention or
    convolution.
    """
    heads = file.metadata["lfm2.attention.head_count_kv"]
    kinds = ["full_attention" if number else "conv" for number in heads] if isinstance(heads, list) else None
    return {
        "block_auto_adjust_ff_dim": False,  # the file names the width that came out of the adjustment
        "layer_types": kinds,
        "conv_L_cache": file.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in file.tensors),
    }


def _qwen35(file: GGUFFile) -> Fields:
    """Return the fields of transformers' configuration that are Qwen3.5's own, whose layers are full or linear
    attention.

    Raises:
        ModelFileError: the file names no heads of linear attention, or no sections of rotary dims.
    """
    value_heads, sections = file.integer("ssm.time_step_rank"), file.metadata.get("qwen35.rope.dimension_sections")
    if value_heads < 1 or not isinstance(sections, list) or not all(isinstance(part, int) for part in sections):
        raise ModelFileError(f"{file.path} names no heads of linear attention, or no sections. Download it again.")
    # files fill the list up with zeros
    axes = {"mrope_section": [number for number in sections if number], "mrope_interleaved": True}
    return {
        "full_attention_interval": file.integer("full_attention_interval"),
        "linear_conv_kernel_dim": file.integer("ssm.conv_kernel"),
        "linear_key_head_dim": file.integer("ssm.state_size"),
        "linear_num_key_heads": file.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": file.integer("ssm.inner_size") // value_heads,
        "rope_parameters": {**_rotation(file), "partial_rotary_factor": _rotated(file), **axes},
    }


def _of_qwen35(config: Any, name: str) -> Callable[[Tensor], Tensor] | None:
    """Return the function that restores a tensor of linear attention, whose value heads are stored in another order;
    ``None`` for other tensors.

    Args:
        config: of the model.
        name: of the tensor.
    """
    groups, width = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // groups
    start = 2 * groups * config.linear_key_head_dim  # rows of queries and keys, which stay where they are

    def grouped(tensor: Tensor, size: int) -> Tensor:
        return tensor.view(each, groups, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)

    def behind_keys(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:start], grouped(tensor[start:].contiguous(), width)])

    found: dict[str, Callable[[Tensor], Tensor]] = {
        "attn_qkv.weight": behind_keys,
        "ssm_conv1d.weight": behind_keys,
        "attn_gate.weight": lambda tensor: grouped(tensor, width),
        "ssm_out.weight": lambda tensor: grouped(tensor.T.contiguous(), width).T.contiguous(),
        "ssm_alpha.weight": lambda tensor: grouped(tensor, 1),
        "ssm_beta.weight": lambda tensor: grouped(tensor, 1),
        "ssm_dt.bias": lambda tensor: grouped(tensor, 1),
        "ssm_a": lambda tensor: grouped(torch.log(-tensor), 1),  # the file has -exp(A_log)
    }
    return found.get(name.split(".", 2)[2]) if name.startswith("blk.") else None


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", _llama, permutes=True),
    "smollm3": Family("smollm3", _llama, permutes=True),
    "granite": Family("granite", _granite, permutes=True),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe", _qwen2_moe),
    "qwen3": Family("qwen3", lambda file: {"attention_bias": "blk.0.attn_q.bias" in file.tensors}),
    "qwen3moe": Family("qwen3_moe", _qwen3_moe),
    "phi3": Family("phi3", _phi3, partly=True),
    "olmo2": Family("olmo2"),
    "gemma": Family("gemma", offset=1.0),
    "gemma2": Family("gemma2", _gemma2, offset=1.0),
    "gemma3": Family("gemma3_text", _gemma3, offset=1.0),
    "gpt2": Family("gpt2", _gpt2, ("layer_norm_epsilon", _NORM_EPSILON), transposes=True, rotates=False),
    "starcoder2": Family("starcoder2", _starcoder2, ("norm_epsilon", _NORM_EPSILON)),
    "stablelm": Family("stablelm", _stablelm, ("layer_norm_eps", _NORM_EPSILON), partly=True),
    "lfm2": Family("lfm2", _lfm2, ("norm_eps", _EPSILON)),
    "qwen35": Family("qwen3_5_text", _qwen35, offset=1.0, restore=_of_qwen35, partly=True),
    "nemotron": Family("nemotron", _nemotron, ("norm_eps", _NORM_EPSILON), offset=1.0, partly=True),
}
"""llama.cpp's name of an architecture → how its files are read."""


def family_of(file: GGUFFile) -> Family:
    """Return the family of a file.

    Raises:
        UnsupportedModelError: kvkeep does not read files of this architecture.
    """
    if (family := FAMILIES.get(file.architecture)) is None:
        raise UnsupportedModelError(
            f"{file.path} is of the architecture {file.architecture!r:.60}, which kvkeep does not read from a GGUF "
            f"file. It reads {', '.join(FAMILIES)}. Give the model's folder with safetensors."
        )
    return family


def config_fields(file: GGUFFile, ends: list[int]) -> Fields:
    """Return the fields of transformers' configuration for the model in a file.

    Args:
        file: the file.
        ends: the tokens that end a text.

    Raises:
        ModelFileError: the file lacks a value, or has one that no model has.
        UnsupportedModelError: kvkeep does not read files of this kind.
    """
    family, width = family_of(file), _head_dim(file)
    if file.integer("attention.value_length", width) != width:
        raise UnsupportedModelError(f"{file.path} has values of another width than keys, which kvkeep does not read.")
    name, key = family.epsilon
    heads = file.integer("attention.head_count")
    rotation = {"rope_parameters": _rotation(file)} if family.rotates else {}
    return {
        "model_type": family.model_type,
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": file.integer("embedding_length"),
        "intermediate_size": file.integer("feed_forward_length", 0) or None,
        "num_hidden_layers": number_of_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, heads),
        "head_dim": width,
        "max_position_embeddings": file.integer("context_length"),
        name: file.number(key),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": file.dtype,
        **rotation,
        **family.fields(file),
    }


def number_of_layers(file: GGUFFile) -> int:
    """Return the number of layers of the model in a file, those that predict further tokens left out.

    Raises:
        ModelFileError: the file has no tensor of the last one.
    """
    layers = file.integer("block_count") - file.integer(PREDICTION_LAYERS, 0)
    if not any(name.startswith(f"blk.{layers - 1}.") for name in file.tensors):
        raise ModelFileError(f"{file.path} has no tensor blk.{layers - 1}, so it is no whole model. Download it again.")
    return layers


def _kv_heads(file: GGUFFile, heads: int) -> int:
    """Return the number of KV heads of the layers with attention; ``heads``, the query's, if the file does not say. A
    file may list each layer, those without attention with 0.

    Raises:
        UnsupportedModelError: it differs between layers.
    """
    key = "attention.head_count_kv"
    listed = file.metadata.get(f"{file.architecture}.{key}")
    if isinstance(listed, list) and len(numbers := set(listed) - {0}) == 1:
        [number] = numbers
        if isinstance(number, int):
            return number
    return file.integer(key, heads)


def _head_dim(file: GGUFFile) -> int:
    """Return the width of a query's and a key's head.

    Raises:
        ModelFileError: the file names no heads.
    """
    heads = file.integer("attention.head_count")
    if heads < 1:
        raise ModelFileError(f"{file.path} has {heads} heads, with which nothing can be computed. Download it again.")
    return file.integer("attention.key_length", file.integer("embedding_length") // heads)


def _rotated(file: GGUFFile) -> float:
    """Return the share of a head's dims that rotate, over 0 and up to 1.

    Raises:
        UnsupportedModelError: it is no share, or not all of it where transformers' model rotates all.
    """
    width = _head_dim(file)
    rotated = file.integer("rope.dimension_count", width)
    if rotated != width and (not family_of(file).partly or rotated % 2 or not 0 < rotated < width):
        raise UnsupportedModelError(
            f"{file.path} is of the architecture {file.architecture!r:.60} and rotates {rotated} of {width} dimensions "
            "of a head, which transformers' model does not."
        )
    return rotated / width


def _rotation(file: GGUFFile) -> Fields:
    """Return transformers' ``rope_parameters`` for the model in a file.

    Raises:
        UnsupportedModelError: the frequencies are scaled in a way that kvkeep does not read.
    """
    # files may leave out what is llama.cpp's default
    fields: Fields = {"rope_type": "default", "rope_theta": file.number("rope.freq_base", 10000.0)}
    if (share := _rotated(file)) < 1:
        fields["partial_rotary_factor"] = share
    kind = file.text("rope.scaling.type", "none")
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0))
    trained = file.integer("rope.scaling.original_context_length", file.integer("context_length"))
    if _LONG in file.tensors:
        tables = {"long_factor": _table(file, _LONG), "short_factor": _table(file, _SHORT)}
        return {**fields, "rope_type": "longrope", **tables, "original_max_position_embeddings": trained}
    if _FREQUENCIES in file.tensors:
        return {**fields, **_llama3(file, fields["rope_theta"], round(_head_dim(file) * share))}
    if kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        return {**fields, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        betas = {name: file.number(f"rope.scaling.yarn_{name}", 0.0) for name in ("beta_fast", "beta_slow")}
        fields |= {name: number for name, number in betas.items() if number}
        return {**fields, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    if kind not in ("none", "longrope"):
        raise UnsupportedModelError(
            f"{file.path} scales rotary frequencies by {kind!r:.60}, which kvkeep does not read."
        )
    return fields


def _table(file: GGUFFile, name: str) -> list[float]:
    """Return a tensor of the file as a list of numbers."""
    file.shape(name)  # raises the error if there is no such tensor
    return [short_float(number) for number in values(file.tensors[name], torch.float32).tolist()]


def _llama3(file: GGUFFile, theta: float, rotated: int) -> Fields:
    """Return the fields of the rotary scaling of Llama 3.1 and later, recognised by the divisors of frequencies that
    the file holds. The original length is 8192 or the file's context length, whichever gives these divisors.

    Args:
        file: the file, which must hold divisors.
        theta: the base of the frequencies.
        rotated: dims of a head that rotate.

    Raises:
        ModelFileError: the file holds no divisors, or no context length.
        UnsupportedModelError: the divisors are those of another rule.
    """
    stored = torch.tensor(_table(file, _FREQUENCIES))
    factor = float(stored.max())  # the lowest frequencies are divided by all of it
    # the file does not say for which length its frequencies were computed, so the likely ones are tried
    for trained in (_LLAMA3["original_max_position_embeddings"], file.integer("context_length")):
        waves = 2 * math.pi * theta ** (torch.arange(0, rotated, 2).float() / rotated)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        smooth = ((trained / waves - low) / (high - low)).clamp(0, 1)
        divisors = 1 / ((1 - smooth) / factor + smooth)
        if divisors.shape == stored.shape and torch.allclose(divisors, stored, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                **_LLAMA3,
                "original_max_position_embeddings": int(trained),
            }
    raise UnsupportedModelError(
        f"{file.path} divides rotary frequencies by numbers of its own ({_FREQUENCIES}) that are not Llama 3's. Give "
        "the model's folder with safetensors."
    )
