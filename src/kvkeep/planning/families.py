"""Models of well-known families, counted from their ``config.json`` without transformers.

Importing transformers and building a model without weights takes seconds. The shapes of these families follow from a
few numbers. A file with a field or a value that is not known here is left to `kvkeep.planning.model_shapes`, which
knows all families and whose errors are better. ``tests/planning/test_families.py`` compares both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvkeep.models.folder import existing, is_gguf_file
from kvkeep.planning.cost import LayerShape, ModelShape
from kvkeep.planning.outline import Outline

_MOST, _MOST_LAYERS, _LONGEST = 2**30, 1000, 2**20
"""Larger numbers, more layers and longer files are left to checks that refuse them."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "su"}
"""Kinds of rotary embeddings, all without an influence on shapes."""

_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def _is_text(value: object) -> bool:
    """Return whether a value is a text, or none."""
    return value is None or isinstance(value, str)


def _is_number(value: object) -> bool:
    """Return whether a value is a number above 0 and not too large (2^30)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST


def _is_share(value: object) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_float(value: object) -> bool:
    """Return whether a value is a float, written with a point, above 0 and not too large (2^30)."""
    # transformers refuses a whole number in these fields
    return isinstance(value, float) and 0 < value < _MOST


def _is_id(value: object) -> bool:
    """Return whether a value is a token's id, or none."""
    return value is None or (type(value) is int and 0 <= value < _MOST)


_HARMLESS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("transformers_version", "_name_or_path", "_model_name_or_path", "prefix", "cache_implementation"), _is_text
    ),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "unk_token_id"), _is_id),
    "eos_token_id": lambda value: all(map(_is_id, value)) if isinstance(value, list) else _is_id(value),
    "use_cache": lambda value: type(value) is bool,
    "use_bidirectional_attention": lambda value: value is None or value is False,
    "pretraining_tp": lambda value: type(value) is int,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "activation_dropout"), _is_share),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "layerdrop", "partial_rotary_factor"), _is_share),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _ACTIVATIONS.__contains__),
    **dict.fromkeys(("initializer_range", "init_std", "rms_norm_eps"), lambda value: _is_float(value) and value < 1),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping"), lambda value: value is None or _is_float(value)
    ),
    "query_pre_attn_scalar": lambda value: type(value) is int and _is_number(value),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), _is_number),
    **dict.fromkeys(("attention_multiplier", "logits_scaling"), _is_number),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _is_number),
    "original_max_position_embeddings": lambda value: type(value) is int and _is_number(value),
}
"""Fields that change no shape and no window, and the values that they usually have."""

_COMMON = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"),
    *("tie_word_embeddings", "dtype", "torch_dtype", "rope_scaling", "rope_parameters", "model_type", "architectures"),
}
"""Fields that all families have, and which are read here."""

_GATED = {"intermediate_size", "num_key_value_heads", "head_dim"}
"""Fields of the families that `_gated` counts."""


class _Unknown(Exception):  # noqa: N818  no error: somebody else counts
    """The model cannot be counted here."""


class _Fields:
    """The fields of a ``config.json``, of which each value is checked when it is read."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found = found

    def number(self, name: str, default: int | None = None) -> int:
        """Return a field that holds a positive whole number; the default where it is missing.

        Raises:
            _Unknown: the value is no such number or too large, or it is missing and there is no default.
        """
        value = self.found.get(name, default)
        if type(value) is not int or not 0 < value < _MOST:
            raise _Unknown
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false; the default where it is missing.

        Raises:
            _Unknown: the value is neither true nor false.
        """
        value = self.found.get(name, default)
        if type(value) is not bool:
            raise _Unknown
        return value

    def window(self, default: int | None) -> int | None:
        """Return the field of the sliding window, the default where it is missing; ``None`` for full attention.

        Raises:
            _Unknown: the value is no positive whole number.
        """
        return None if self.found.get("sliding_window", default) is None else self.number("sliding_window", default)

    def types(self, default: list[str]) -> list[str]:
        """Return the kind of attention of each layer, `_FULL` or `_SLIDING`; the default where the file names none.

        Raises:
            _Unknown: the file names kinds that are not known, or not one for each layer.
        """
        value = default if self.found.get("layer_types") is None else self.found["layer_types"]
        if not isinstance(value, list) or len(value) != len(default) or not {*value} <= {_FULL, _SLIDING}:
            raise _Unknown
        return value


class _Counted(NamedTuple):
    """The numbers of a family that are not the same for all.

    Attributes:
        matrices: outputs and inputs of each matrix of a layer.
        vectors: numbers in a layer's biases and norms.
        heads, dim: KV heads, and numbers in a key and in a value.
        windows: the sliding window of each layer; ``None``: full attention.
        outside: parameters beside layers, embeddings and output: the last norm.
        table: numbers in a table of learned positions.
    """

    matrices: list[tuple[int, int]]
    vectors: int
    heads: int
    dim: int
    windows: list[int | None]
    outside: int
    table: int = 0


def _all(layers: int, kind: str) -> list[str]:
    """Return a list of one kind of attention for so many layers."""
    return [kind] * layers


def _windows(of: _Fields, types: list[str], window: int | None) -> list[int | None]:
    """Return the sliding window of each layer; ``None``: full attention.

    Args:
        of: the fields.
        types: the kind of attention of each layer where the file names none.
        window: the window of layers that slide.

    Raises:
        _Unknown: windows slide without a size.
    """
    found = of.types(types)
    if window is None and _SLIDING in found:
        raise _Unknown
    return [window if kind == _SLIDING else None for kind in found]


def _gated(  # noqa: PLR0913  what the families differ in
    of: _Fields,
    windows: list[int | None],
    *,
    dim: int | None = None,
    norms: int = 2,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    wide_norms: bool = False,
    fused: bool = False,
) -> _Counted:
    """Count the matrices and other numbers of a decoder with gated feed-forward layers and grouped heads.

    Args:
        of: the fields.
        windows: the sliding window of each layer.
        dim: head dim if the file names none; ``None``: the hidden size divided by the query heads.
        norms: norms of a layer over hidden states.
        qkv_bias, out_bias, mlp_bias: which matrices have a bias.
        head_norms: whether queries and keys have a norm over the head dim.
        wide_norms: whether they have one over all heads.
        fused: whether queries, keys and values are one matrix, and gate and up another.

    Raises:
        _Unknown: the numbers of heads and dims do not fit together.
    """
    hidden, inner, heads = of.number("hidden_size"), of.number("intermediate_size"), of.number("num_attention_heads")
    kv_heads = of.number("num_key_value_heads")
    # `null` asks for hidden size by heads, but is unusual in a family with a head dim of its own: `number` refuses it
    if "head_dim" in of.found and (dim is not None or of.found["head_dim"] is not None):
        dim = of.number("head_dim")
    dim = dim or hidden // heads
    if hidden % heads or heads % kv_heads or dim % 2:  # left to transformers, which may refuse them
        raise _Unknown
    queries, keys = heads * dim, kv_heads * dim
    split = [(queries, hidden), (keys, hidden), (keys, hidden)]
    attention = [(queries + 2 * keys, hidden)] if fused else split
    gates = [(2 * inner, hidden)] if fused else [(inner, hidden), (inner, hidden)]
    vectors = norms * hidden
    vectors += qkv_bias * (queries + 2 * keys) + out_bias * hidden + mlp_bias * (2 * inner + hidden)
    vectors += head_norms * 2 * dim + wide_norms * (queries + keys)
    matrices = [*attention, (hidden, queries), *gates, (hidden, inner)]
    return _Counted(matrices, vectors, kv_heads, dim, windows, outside=hidden)


def _llama(of: _Fields) -> _Counted:
    """Count a model of the family of Llama, or one with the same shapes."""
    bias = of.flag("attention_bias", False)
    full = _windows(of, _all(of.number("num_hidden_layers"), _FULL), None)
    return _gated(of, full, qkv_bias=bias, out_bias=bias, mlp_bias=of.flag("mlp_bias", False))


def _mistral(of: _Fields) -> _Counted:
    """Count a model of the family of Mistral, whose layers all slide, or none."""
    window = of.window(4096)
    return _gated(of, [window] * of.number("num_hidden_layers"))


def _qwen_windows(of: _Fields) -> list[int | None]:
    """Return the windows of a Qwen's layers, all ``None``: its file has a window that hardly any model uses.

    Raises:
        _Unknown: the model uses its window, or a field is unusual.
    """
    of.window(None), of.number("max_window_layers", 1)  # for their checks alone
    if of.flag("use_sliding_window", False):
        raise _Unknown
    return _windows(of, _all(of.number("num_hidden_layers"), _FULL), None)


def _qwen2(of: _Fields) -> _Counted:
    """Count a model of the family of Qwen 2."""
    return _gated(of, _qwen_windows(of), qkv_bias=True)


def _qwen3(of: _Fields) -> _Counted:
    """Count a model of the family of Qwen 3."""
    bias = of.flag("attention_bias", False)
    return _gated(of, _qwen_windows(of), dim=128, qkv_bias=bias, out_bias=bias, head_norms=True)


def _smollm3(of: _Fields) -> _Counted:
    """Count a model of the family of SmolLM 3: some layers do not rotate.

    Raises:
        _Unknown: which layers rotate is not said for each, or the padding is not named, or a field is unusual.
    """
    bias, mlp_bias = of.flag("attention_bias", False), of.flag("mlp_bias", False)
    of.number("no_rope_layer_interval", 4)
    rotating = of.found.get("no_rope_layers", [1] * of.number("num_hidden_layers"))
    if not isinstance(rotating, list) or len(rotating) != of.number("num_hidden_layers"):
        raise _Unknown
    # as in `_phi3`: the family's own padding lies beyond a small vocabulary
    if not all(type(one) is int for one in rotating) or "pad_token_id" not in of.found:
        raise _Unknown
    return _gated(of, _qwen_windows(of), qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _gemma(of: _Fields) -> _Counted:
    """Count a model of the first family of Gemma."""
    bias = of.flag("attention_bias", False)
    full = _windows(of, _all(of.number("num_hidden_layers"), _FULL), None)
    return _gated(of, full, dim=256, qkv_bias=bias, out_bias=bias)


def _gemma2(of: _Fields) -> _Counted:
    """Count a model of the family of Gemma 2: every second layer slides."""
    bias, layers = of.flag("attention_bias", False), of.number("num_hidden_layers")
    types = [_FULL if number % 2 else _SLIDING for number in range(layers)]
    windows = _windows(of, types, of.window(4096))
    return _gated(of, windows, dim=256, norms=4, qkv_bias=bias, out_bias=bias)


def _gemma3(of: _Fields) -> _Counted:
    """Count a text model of the family of Gemma 3: every sixth layer has full attention."""
    bias, layers = of.flag("attention_bias", False), of.number("num_hidden_layers")
    # files of older versions have the name without the underscore
    pattern = of.number("_sliding_window_pattern", of.found.get("sliding_window_pattern", 6))
    types = [_SLIDING if (number + 1) % pattern else _FULL for number in range(layers)]
    windows = _windows(of, types, of.window(4096))
    return _gated(of, windows, dim=256, norms=4, qkv_bias=bias, out_bias=bias, head_norms=True)


def _phi3(of: _Fields) -> _Counted:
    """Count a model of the family of Phi 3.

    Raises:
        _Unknown: the file does not name the padding, or a field is unusual.
    """
    window = of.window(None)
    if "pad_token_id" not in of.found:  # the family's own lies beyond a small vocabulary
        raise _Unknown
    return _gated(of, [window] * of.number("num_hidden_layers"), fused=True)


def _olmo2(of: _Fields) -> _Counted:
    """Count a model of the family of OLMo 2."""
    bias = of.flag("attention_bias", False)
    full = _windows(of, _all(of.number("num_hidden_layers"), _FULL), None)
    return _gated(of, full, qkv_bias=bias, out_bias=bias, wide_norms=True)


def _opt(of: _Fields) -> _Counted:
    """Count a model of the family of OPT, with learned positions.

    Raises:
        _Unknown: the model is of an unusual form.
    """
    hidden, inner, heads = of.number("hidden_size"), of.number("ffn_dim"), of.number("num_attention_heads")
    names = ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")
    usual = all(of.flag(name, True) for name in names)
    if not usual or of.flag("_remove_final_layer_norm", False) or hidden % heads:
        raise _Unknown
    if of.number("word_embed_proj_dim", hidden) != hidden:
        raise _Unknown
    matrices = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
    vectors = 4 * hidden + inner + hidden + 4 * hidden  # biases, and two norms of scale and shift
    full: list[int | None] = [None] * of.number("num_hidden_layers")
    table = (of.number("max_position_embeddings") + 2) * hidden  # 2: OPT counts positions from there
    return _Counted(matrices, vectors, heads, hidden // heads, full, outside=2 * hidden, table=table)


class _Family(NamedTuple):
    """A family of models.

    Attributes:
        counts: counts one from its fields.
        architecture: the class that has an output layer, as the file names it.
        fields: those that it has besides `_COMMON` and `_HARMLESS`.
        is_tied: whether the output layer shares the table of embeddings where the file does not say.
    """

    counts: Callable[[_Fields], _Counted]
    architecture: str
    fields: set[str]
    is_tied: bool = False


_BIASES = {"attention_bias", "mlp_bias"}
_SLIDES = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}

_FAMILIES = {
    "llama": _Family(_llama, "LlamaForCausalLM", _GATED | _BIASES),
    "granite": _Family(_llama, "GraniteForCausalLM", _GATED | _BIASES),
    "mistral": _Family(_mistral, "MistralForCausalLM", _GATED | {"sliding_window"}),
    "qwen2": _Family(_qwen2, "Qwen2ForCausalLM", _GATED | _SLIDES),
    "qwen3": _Family(_qwen3, "Qwen3ForCausalLM", _GATED | _SLIDES | {"attention_bias"}),
    "smollm3": _Family(
        _smollm3,
        "SmolLM3ForCausalLM",
        _GATED | _BIASES | _SLIDES | {"no_rope_layers", "no_rope_layer_interval"},
        is_tied=True,
    ),
    "gemma": _Family(_gemma, "GemmaForCausalLM", _GATED | {"attention_bias"}, is_tied=True),
    "gemma2": _Family(
        _gemma2,
        "Gemma2ForCausalLM",
        _GATED | {"attention_bias", "sliding_window", "layer_types"},
        is_tied=True,
    ),
    "gemma3_text": _Family(
        _gemma3,
        "Gemma3ForCausalLM",
        _GATED
        | {"attention_bias", "sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"},
        is_tied=True,
    ),
    "phi3": _Family(_phi3, "Phi3ForCausalLM", _GATED | {"sliding_window"}),
    "olmo2": _Family(_olmo2, "Olmo2ForCausalLM", _GATED | {"attention_bias"}),
    "opt": _Family(
        _opt,
        "OPTForCausalLM",
        {"ffn_dim", "word_embed_proj_dim", "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"}
        | {"_remove_final_layer_norm"},
        is_tied=True,
    ),
}
"""``model_type`` → the family."""


def outline(name_or_path: str | os.PathLike[str]) -> Outline:
    """Return a model's shapes and limits, from its configuration alone: counted for known families, else built without
    memory for weights.

    Args:
        name_or_path: a hub name, a folder with a config.json, or the path of such a file or of a GGUF file.

    Raises:
        ModelFileError: there is no configuration, it cannot be used, or the hub fails.
        UnsupportedModelError: kvkeep cannot run this architecture.
    """
    name = os.fspath(name_or_path)
    if (found := counted(name)) is not None:
        return found
    from kvkeep.models.load import quiet
    from kvkeep.planning.model_shapes import built

    with quiet():
        return built(name)


def counted(name: str) -> Outline | None:
    """Return the shapes of a model of a known family; ``None`` for all others, and for what cannot be read.

    Args:
        name: a path, or a hub name.

    Raises:
        ModelFileError: there is no such path.
    """
    path = existing(name)
    if path is None:
        return None
    try:
        return _count(path, _read(path))
    except (_Unknown, OSError, ValueError, RecursionError):
        return None


def _read(path: Path) -> Mapping[str, Any]:
    """Return the fields of a folder's ``config.json``, or of such a file.

    Raises:
        _Unknown: there is none, or it is a GGUF file, too large or no JSON object.
        ValueError: it is no JSON.
    """
    if path.is_dir() and any(path.glob("*.gguf")):
        raise _Unknown
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or is_gguf_file(file) or file.stat().st_size > _LONGEST:
        raise _Unknown
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise _Unknown
    return found


def _count(path: Path, found: Mapping[str, Any]) -> Outline:
    """Return the shapes of a model of a known family.

    Args:
        path: its folder or configuration file.
        found: the fields of the configuration.

    Raises:
        _Unknown: the family, a field or a value is not known here.
    """
    kind = found.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or found.get("architectures", [family.architecture]) != [family.architecture]:
        raise _Unknown
    if not found.keys() <= _HARMLESS.keys() | _COMMON | family.fields:
        raise _Unknown
    if not all(is_usual(found[name]) for name, is_usual in _HARMLESS.items() if name in found):
        raise _Unknown
    if not all(_is_rope(found.get(name)) for name in ("rope_scaling", "rope_parameters")):
        raise _Unknown
    of = _Fields(found)
    if of.number("num_hidden_layers") > _MOST_LAYERS:
        raise _Unknown
    each = family.counts(of)
    layers, hidden, vocabulary = len(each.windows), of.number("hidden_size"), of.number("vocab_size")
    embeddings, is_tied = hidden * vocabulary, of.flag("tie_word_embeddings", family.is_tied)
    in_layer = sum(outputs * inputs for outputs, inputs in each.matrices) + each.vectors
    length, padding = of.number("max_position_embeddings"), found.get("pad_token_id")
    if padding is not None and padding >= vocabulary:  # no model can be built so; `built` says it better
        raise _Unknown
    return Outline(
        name=str(path),
        source=str(path),
        shape=ModelShape(
            layers=tuple(LayerShape(each.heads, each.dim, each.dim, window) for window in each.windows),
            parameters=layers * in_layer + each.outside + each.table + embeddings * (1 if is_tied else 2),
            looked_up=each.table + (0 if is_tied else embeddings),
            hidden=hidden,
            widest=max(max(matrix) for matrix in each.matrices),
            query_heads=of.number("num_attention_heads"),
            vocabulary=vocabulary,
        ),
        indices=tuple(range(layers)),
        dtype=_dtype(found),
        trained_length=length,
        position_limit=length if each.table else None,
    )


def _dtype(found: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the checkpoint that a configuration names; ``None`` if it does not say.

    Raises:
        _Unknown: it is none of float32, float16 and bfloat16, or the file has both names of it.
    """
    name = found.get("dtype", found.get("torch_dtype"))
    if name not in (None, "float32", "float16", "bfloat16") or {"dtype", "torch_dtype"} <= found.keys():
        raise _Unknown
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def _is_rope(value: object) -> bool:
    """Return whether a value of a configuration describes a rotary embedding in a known way: one for all layers, or one
    for each kind of attention; ``None`` passes.
    """
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    if value.keys() <= {_FULL, _SLIDING}:
        return all(one is not None and _is_rope(one) for one in value.values())
    kind = value.get("rope_type", value.get("type", "default"))
    numbers = (number for name, number in value.items() if name not in ("rope_type", "type"))
    plain = all(_is_number(number) or (isinstance(number, list) and all(map(_is_number, number))) for number in numbers)
    return isinstance(kind, str) and kind in _ROPES and plain
