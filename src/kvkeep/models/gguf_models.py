"""The model in a GGUF file: its configuration, and which of its tensors fill which parameters.

Both follow llama.cpp's converter, family by family. transformers' reader leaves out what many files say: the scaling of
rotary frequencies, widths of heads and of experts, partial rotation, capped logits, a norm's epsilon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.backends.native.quantized_tensor import ALIKE, QuantizedTensor
from kvkeep.errors import ModelFileError, UnsupportedModelError
from kvkeep.models import gguf_blocks
from kvkeep.models.gguf import GGUFFile, quantized, short_float, values
from kvkeep.models.quantized_weights import weight_bytes

_EPSILON, _NORM_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_TABLES = {_FREQUENCIES, _LONG, _SHORT}
"""Tensors that are read into the configuration."""
_PREDICTION = "nextn_predict_layers"
"""Layers that predict further tokens; files count them among the others, and the model has none."""
_STATES = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}
"""Parameters whose names end neither in ``weight`` nor in ``bias``, and the ends of their tensors' names."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1, 3.2 and 3.3 has; their files hold only the frequencies that follow from it."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class _Family:
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
        restore: returns how a tensor is restored, see `WeightSource`, for a configuration and the tensor's name.
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
    return {
        **_llama(file),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "attention_multiplier": file.number("attention.scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }


def _used(file: GGUFFile) -> int:
    """Return how many experts a token goes to.

    Raises:
        ModelFileError: there are not so many.
    """
    used, experts = file.integer("expert_used_count"), file.integer("expert_count")
    if not 1 <= used <= experts:
        raise ModelFileError(f"{file.path} sends a token to {used} of {experts} experts. Download the file again.")
    return used


def _experts(file: GGUFFile) -> Fields:
    return {
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": _used(file),
        "moe_intermediate_size": file.shape("blk.0.ffn_down_exps.weight")[-1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(file: GGUFFile) -> Fields:
    width = file.shape("blk.0.ffn_down_shexp.weight")[-1]
    return {**_experts(file), "shared_expert_intermediate_size": width, "norm_topk_prob": False}


def _qwen3_moe(file: GGUFFile) -> Fields:
    return {**_experts(file), "norm_topk_prob": True}


def _phi3(file: GGUFFile) -> Fields:
    trained = file.integer("rope.scaling.original_context_length", file.integer("context_length"))
    window = file.integer("attention.sliding_window", 0)
    return {"sliding_window": window or None, "original_max_position_embeddings": trained}


def _gemma2(file: GGUFFile) -> Fields:
    return {
        "sliding_window": file.integer("attention.sliding_window"),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, largest=46),
    }


def _gemma3(file: GGUFFile) -> Fields:
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
    """Return the number whose root divides the scores of Gemma: another one in its largest model, of so many layers."""
    if file.integer("block_count") == largest:
        return file.integer("embedding_length") // file.integer("attention.head_count")
    return _head_dim(file)


def _gpt2(file: GGUFFile) -> Fields:
    return {
        "n_embd": file.integer("embedding_length"),
        "n_layer": file.integer("block_count"),
        "n_head": file.integer("attention.head_count"),
        "n_positions": file.integer("context_length"),
        "n_inner": file.integer("feed_forward_length"),
    }


def _starcoder2(file: GGUFFile) -> Fields:
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors, "sliding_window": None}


def _stablelm(file: GGUFFile) -> Fields:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "qk_layernorm": False,
        "partial_rotary_factor": _rotated(file),
    }


def _nemotron(file: GGUFFile) -> Fields:
    return {**_llama(file), "hidden_act": "relu2", "partial_rotary_factor": _rotated(file)}


def _lfm2(file: GGUFFile) -> Fields:
    heads = file.metadata["lfm2.attention.head_count_kv"]
    kinds = ["full_attention" if number else "conv" for number in heads] if isinstance(heads, list) else None
    return {
        "block_auto_adjust_ff_dim": False,
        "layer_types": kinds,
        "conv_L_cache": file.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in file.tensors),
    }


def _qwen35(file: GGUFFile) -> Fields:
    value_heads, sections = file.integer("ssm.time_step_rank"), file.metadata.get("qwen35.rope.dimension_sections")
    if value_heads < 1 or not isinstance(sections, list) or not all(isinstance(part, int) for part in sections):
        raise ModelFileError(f"{file.path} names no heads of linear attention, or no sections. Download it again.")
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
    """Return how a tensor of linear attention is restored: its value heads are stored by their number within a group.

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
        "ssm_a": lambda tensor: grouped(torch.log(-tensor), 1),
    }
    return found.get(name.split(".", 2)[2]) if name.startswith("blk.") else None


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama", _llama, permutes=True),
    "smollm3": _Family("smollm3", _llama, permutes=True),
    "granite": _Family("granite", _granite, permutes=True),
    "qwen2": _Family("qwen2"),
    "qwen2moe": _Family("qwen2_moe", _qwen2_moe),
    "qwen3": _Family("qwen3", lambda file: {"attention_bias": "blk.0.attn_q.bias" in file.tensors}),
    "qwen3moe": _Family("qwen3_moe", _qwen3_moe),
    "phi3": _Family("phi3", _phi3, partly=True),
    "olmo2": _Family("olmo2"),
    "gemma": _Family("gemma", offset=1.0),
    "gemma2": _Family("gemma2", _gemma2, offset=1.0),
    "gemma3": _Family("gemma3_text", _gemma3, offset=1.0),
    "gpt2": _Family("gpt2", _gpt2, ("layer_norm_epsilon", _NORM_EPSILON), transposes=True, rotates=False),
    "starcoder2": _Family("starcoder2", _starcoder2, ("norm_epsilon", _NORM_EPSILON)),
    "stablelm": _Family("stablelm", _stablelm, ("layer_norm_eps", _NORM_EPSILON), partly=True),
    "lfm2": _Family("lfm2", _lfm2, ("norm_eps", _EPSILON)),
    "qwen35": _Family("qwen3_5_text", _qwen35, offset=1.0, restore=_of_qwen35, partly=True),
    "nemotron": _Family("nemotron", _nemotron, ("norm_eps", _NORM_EPSILON), offset=1.0, partly=True),
}
"""llama.cpp's name of an architecture → how its files are read."""


def family_of(file: GGUFFile) -> _Family:
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
    """Return the fields of the configuration of transformers, ``model_type`` among them.

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
        "num_hidden_layers": _layers(file),
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


def _layers(file: GGUFFile) -> int:
    """Return the number of layers.

    Raises:
        ModelFileError: the file has no tensor of the last one.
    """
    layers = file.integer("block_count") - file.integer(_PREDICTION, 0)
    if not any(name.startswith(f"blk.{layers - 1}.") for name in file.tensors):
        raise ModelFileError(f"{file.path} has no tensor blk.{layers - 1}, so it is no whole model. Download it again.")
    return layers


def _kv_heads(file: GGUFFile, heads: int) -> int:
    """Return the number of KV heads of a layer. Layers without attention are listed with 0."""
    key = "attention.head_count_kv"
    listed = file.metadata.get(f"{file.architecture}.{key}")
    if isinstance(listed, list) and len(numbers := set(listed) - {0}) == 1:
        [number] = numbers
        if isinstance(number, int):
            return number
    return file.integer(key, heads)


def _head_dim(file: GGUFFile) -> int:
    """Return the width of a head.

    Raises:
        ModelFileError: the file names no heads.
    """
    heads = file.integer("attention.head_count")
    if heads < 1:
        raise ModelFileError(f"{file.path} has {heads} heads, with which nothing can be computed. Download it again.")
    return file.integer("attention.key_length", file.integer("embedding_length") // heads)


def _rotated(file: GGUFFile) -> float:
    """Return the share of a head's width that rotates.

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
    """Return the parameters of rotary positions.

    Raises:
        UnsupportedModelError: the frequencies are scaled in a way that kvkeep does not read.
    """
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
    file.shape(name)
    return [short_float(number) for number in values(file.tensors[name], torch.float32).tolist()]


def _llama3(file: GGUFFile, theta: float, rotated: int) -> Fields:
    """Return the scaling of Llama 3.1 and later from the frequencies' divisors in a file.

    Raises:
        UnsupportedModelError: the divisors are those of another rule.
    """
    stored = torch.tensor(_table(file, _FREQUENCIES))
    factor = float(stored.max())
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


# Tensors of the file and parameters of the model.


class WeightSource(NamedTuple):
    """What fills a parameter.

    Attributes:
        names: tensors of the file; several are joined along the second dimension, as gate and up of experts are.
        heads: into how many groups the rows fall that are stored in the order of another rotation; 0 for none.
        offset: what has been added to the numbers in the file.
        transposed: whether the file has the rows as columns.
        restore: makes the parameter from the file's numbers in float32; ``None``: they are the parameter.
    """

    names: tuple[str, ...]
    heads: int = 0
    offset: float = 0.0
    transposed: bool = False
    restore: Callable[[Tensor], Tensor] | None = None


def sources(file: GGUFFile, model: PreTrainedModel) -> dict[str, WeightSource]:
    """Return what fills each parameter of a model, after a check that the shapes fit and no tensor is left over.

    Args:
        file: the file.
        model: the model, on the meta device.

    Raises:
        ModelFileError: a tensor is missing, or has another shape.
        UnsupportedModelError: the file has tensors that this model has no use for.
    """
    found = dict(_pairs(file, model))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for parameter, source in found.items():
        stored = [file.shape(name) for name in source.names]
        shape = _joined(stored)[::-1] if source.transposed else _joined(stored)
        if math.prod(shape) != math.prod(shapes[parameter]) or shape[-1:] != shapes[parameter][-1:]:
            raise ModelFileError(
                f"{file.path}: The tensor {source.names[0]} has the shape {list(shape)}, and the model's metadata ask "
                f"for {list(shapes[parameter])}. Download the file again."
            )
    used = {name for source in found.values() for name in source.names} | _TABLES
    spare = tuple(f"blk.{_layers(file) + number}." for number in range(file.integer(_PREDICTION, 0)))
    if left := sorted(name for name in file.tensors.keys() - used if not name.startswith(spare)):
        raise UnsupportedModelError(
            f"{file.path} is of the architecture {file.architecture!r:.60} with tensors that kvkeep has no place for "
            f"({left[0]:.80}{f' and {len(left) - 1} more' if len(left) > 1 else ''}). Give the model's folder with "
            "safetensors."
        )
    return found


def _joined(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of tensors that are joined along the second dimension; ``()`` if they do not fit."""
    first, *others = shapes
    if not others:
        return first
    fit = len(first) > 1 and all((shape[:1], shape[2:]) == (first[:1], first[2:]) for shape in others)
    return (first[0], sum(shape[1] for shape in shapes), *first[2:]) if fit else ()


def _pairs(file: GGUFFile, model: PreTrainedModel) -> Iterator[tuple[str, WeightSource]]:
    """Yield the parameters of a model, with what fills them. Tied ones are left out."""
    import gguf

    family, config = family_of(file), model.config
    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tied = getattr(model, "_tied_weights_keys", None) if config.tie_word_embeddings else None
    for parameter in model.state_dict():
        if tied and parameter in tied:
            continue
        stem, _, suffix = parameter.rpartition(".")
        if suffix in _STATES:
            yield parameter, _source(family, config, f"blk.{_number(parameter)}.{_STATES[suffix]}")
            continue
        if suffix == "gate_up_proj":
            parts = tuple(f"blk.{_number(parameter)}.ffn_{part}_exps.weight" for part in ("gate", "up"))
            yield parameter, WeightSource(parts)
            continue
        if suffix not in ("weight", "bias"):
            stem, suffix = parameter, "weight"
        if (known_name := known.get_name(stem)) is None:
            raise UnsupportedModelError(
                f"{file.path} is of the architecture {file.architecture!r:.60}, and the package gguf has no name for "
                f"its {parameter:.80}. Update it (pip install -U gguf), or give the model's folder with safetensors."
            )
        yield parameter, _source(family, config, f"{known_name}.{suffix}")


def _number(parameter: str) -> str:
    """Return the number of a parameter's layer."""
    return next(part for part in parameter.split(".") if part.isdecimal())


def _source(family: _Family, config: Any, name: str) -> WeightSource:
    heads = 0
    if family.permutes and ".attn_q." in name:
        heads = config.num_attention_heads
    elif family.permutes and ".attn_k." in name:
        heads = config.num_key_value_heads
    matrix = name.endswith(".weight") and any(
        f".{part}." in name for part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    )
    return WeightSource(
        (name,),
        heads=heads,
        offset=family.offset if name.endswith("norm.weight") and ".ssm_norm." not in name else 0.0,
        transposed=family.transposes and matrix,
        restore=None if family.restore is None else family.restore(config, name),
    )


def state_dict(
    file: GGUFFile, model: PreTrainedModel, dtype: torch.dtype, *, packed: bool = False
) -> dict[str, Tensor]:
    """Return the values of a model's parameters in one dtype and in transformers' layout.

    Args:
        file: the file.
        model: the model, on the meta device.
        dtype: of all values.
        packed: whether weights of linear layers and embeddings stay packed where the native kernel reads their type.

    Raises:
        KVKeepError: see `sources`.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    layers = [name for name, module in model.named_modules() if packed and isinstance(module, nn.Linear | nn.Embedding)]
    matrices = {f"{name}.weight" for name in layers}
    found: dict[str, Tensor] = {}
    for name, source in sources(file, model).items():
        if name in matrices and _stays_packed(file, source):
            found[name] = quantized(file.tensors[source.names[0]], dtype, source.heads)
        else:
            found[name] = _value(file, source, dtype).reshape(shapes[name])
    return found


def _stays_packed(file: GGUFFile, source: WeightSource) -> bool:
    """Return whether the native kernel can read a matrix as the file has it."""
    tensor = file.tensors[source.names[0]]
    is_plain = not (source.offset or source.transposed or source.restore) and len(source.names) == 1
    return is_plain and tensor.type in gguf_blocks.TYPES and len(tensor.shape) == 2 and not tensor.shape[1] % ALIKE


def _value(file: GGUFFile, source: WeightSource, dtype: torch.dtype) -> Tensor:
    if source.offset or source.restore is not None:
        tensor = values(file.tensors[source.names[0]], torch.float32) - source.offset
        tensor = (tensor if source.restore is None else source.restore(tensor)).to(dtype)
    else:
        parts = [values(file.tensors[name], dtype) for name in source.names]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if source.heads:
        tensor = tensor.view(source.heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor.T.contiguous() if source.transposed else tensor


def unpacked(file: GGUFFile, model: PreTrainedModel) -> str | None:
    """Return a sentence about tensors that have been unpacked; ``None`` if there are none.

    Args:
        file: the file.
        model: the model with the values of `state_dict`.
    """
    weights = dict(model.named_parameters())
    tensors = {
        source_name: file.tensors[source_name]
        for name, source in sources(file, model).items()
        if not isinstance(weights.get(name), QuantizedTensor)
        for source_name in source.names
    }
    unpacked = Counter(tensor.type for tensor in tensors.values() if tensor.is_packed)
    if not unpacked:
        return None
    shown = ", ".join(f"{count} {kind}" for kind, count in unpacked.most_common())
    stored, size = sum(tensor.size for tensor in file.tensors.values()), weight_bytes(model)
    return (
        f"{file.path.name}: its packed tensors ({shown}) are unpacked to {str(model.dtype).removeprefix('torch.')}, and "
        f"all weights take {size / 1e6:.0f} MB in memory ({stored / 1e6:.0f} MB in the file)."
    )
