"""The weights of the model in a GGUF file: which of its tensors fill which parameters, and their values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.backends import QuantizedTensor
from kvkeep.errors import ModelFileError, UnsupportedModelError
from kvkeep.models import gguf_blocks
from kvkeep.models.gguf import GGUFFile, quantized, values
from kvkeep.models.gguf_models import PREDICTION_LAYERS, TABLES, Family, family_of, number_of_layers
from kvkeep.models.quantized_weights import weight_bytes

_STATES = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}
"""Parameters whose names end neither in ``weight`` nor in ``bias``, and the ends of their tensors' names."""


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
    """Return where each parameter of a model comes from, by its name, tied ones left out, after checking shapes, and
    that no tensor of the file is left over, but tables of the rotation and layers that predict further tokens.

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
        # files leave out dims of 1 that parameters have, as those of a convolution
        if math.prod(shape) != math.prod(shapes[parameter]) or shape[-1:] != shapes[parameter][-1:]:
            raise ModelFileError(
                f"{file.path}: The tensor {source.names[0]} has the shape {list(shape)}, and the model's metadata ask "
                f"for {list(shapes[parameter])}. Download the file again."
            )
    used = {name for source in found.values() for name in source.names} | TABLES
    spare = tuple(f"blk.{number_of_layers(file) + number}." for number in range(file.integer(PREDICTION_LAYERS, 0)))
    if left := sorted(name for name in file.tensors.keys() - used if not name.startswith(spare)):
        raise UnsupportedModelError(
            f"{file.path} is of the architecture {file.architecture!r:.60} with tensors that kvkeep has no place for "
            f"({left[0]:.80}{f' and {len(left) - 1} more' if len(left) > 1 else ''}). Give the model's folder with "
            "safetensors."
        )
    return found


def _joined(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of tensors that are joined along the second dimension, of a single one its own; ``()`` if they
    do not fit.
    """
    first, *others = shapes
    if not others:
        return first
    fit = len(first) > 1 and all((shape[:1], shape[2:]) == (first[:1], first[2:]) for shape in others)
    return (first[0], sum(shape[1] for shape in shapes), *first[2:]) if fit else ()


def _pairs(file: GGUFFile, model: PreTrainedModel) -> Iterator[tuple[str, WeightSource]]:
    """Yield each parameter of a model with the tensors that fill it. Tied parameters are left out.

    Raises:
        UnsupportedModelError: the package gguf has no name for a parameter.
    """
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
            # transformers joins what a file has in two tensors
            parts = tuple(f"blk.{_number(parameter)}.ffn_{part}_exps.weight" for part in ("gate", "up"))
            yield parameter, WeightSource(parts)
            continue
        if suffix not in ("weight", "bias"):
            # the joined weights of experts are parameters without a suffix; llama.cpp gives every tensor one
            stem, suffix = parameter, "weight"
        if (known_name := known.get_name(stem)) is None:
            raise UnsupportedModelError(
                f"{file.path} is of the architecture {file.architecture!r:.60}, and the package gguf has no name for "
                f"its {parameter:.80}. Update it (pip install -U gguf), or give the model's folder with safetensors."
            )
        yield parameter, _source(family, config, f"{known_name}.{suffix}")


def _number(parameter: str) -> str:
    """Return the number of a parameter's layer, the first one in its name, as a text."""
    return next(part for part in parameter.split(".") if part.isdecimal())


def _source(family: Family, config: Any, name: str) -> WeightSource:
    """Return how a parameter is made from the file's tensor of this name, by the family's rules."""
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
        # the gated norm of linear attention multiplies with its weight alone, so nothing was added to it
        offset=family.offset if name.endswith("norm.weight") and ".ssm_norm." not in name else 0.0,
        transposed=family.transposes and matrix,
        restore=None if family.restore is None else family.restore(config, name),
    )


def state_dict(
    file: GGUFFile, model: PreTrainedModel, dtype: torch.dtype, *, packed: bool = False
) -> dict[str, Tensor]:
    """Read the values of a model's parameters, and return them by name, in one dtype and in transformers' layout.

    Args:
        file: the file.
        model: the model, on the meta device.
        dtype: of all values.
        packed: whether weights of linear layers and embeddings stay packed where the native kernel reads their type.

    Raises:
        KVKeepError: see `sources`.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = sources(file, model)
    kept = _packable(file, model, found) if packed else set()
    return {
        name: quantized(file.tensors[source.names[0]], dtype, source.heads)
        if name in kept
        else _value(file, source, dtype).reshape(shapes[name])
        for name, source in found.items()
    }


def packed_bytes(file: GGUFFile, model: PreTrainedModel) -> int:
    """Return how many bytes a model's weights will take in memory if all that can stay packed does, and the rest is in
    the file's dtype.

    Args:
        file: the file.
        model: the model, on the meta device.

    Raises:
        KVKeepError: see `sources`.
    """
    found = sources(file, model)
    kept, size = _packable(file, model, found), 0
    for name, source in found.items():
        tensors = [file.tensors[own] for own in source.names]
        if name in kept:
            kind = gguf_blocks.TYPES[tensors[0].type]
            size += QuantizedTensor.bytes_of(tensors[0].shape, kind.bits, kind.group)
        else:
            size += sum(math.prod(tensor.shape) for tensor in tensors) * file.dtype.itemsize
    return size


def _packable(file: GGUFFile, model: PreTrainedModel, found: Mapping[str, WeightSource]) -> set[str]:
    """Return the names of the parameters that can stay packed as the file has them: of linear layers and embeddings."""
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding))
    matrices = {f"{name}.weight" for name in layers}
    return {name for name, source in found.items() if name in matrices and _stays_packed(file, source)}


def _stays_packed(file: GGUFFile, source: WeightSource) -> bool:
    """Return whether the native kernel can read a tensor in the file's own format."""
    tensor = file.tensors[source.names[0]]
    is_plain = not (source.offset or source.transposed or source.restore) and len(source.names) == 1
    return is_plain and tensor.type in gguf_blocks.TYPES and QuantizedTensor.can_have(tensor.shape)


def _value(file: GGUFFile, source: WeightSource, dtype: torch.dtype) -> Tensor:
    """Read a parameter's values, and return them in a plain dtype, with the file's changes to them undone."""
    if source.offset or source.restore is not None:
        tensor = values(file.tensors[source.names[0]], torch.float32) - source.offset
        tensor = (tensor if source.restore is None else source.restore(tensor)).to(dtype)
    else:
        parts = [values(file.tensors[name], dtype) for name in source.names]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if source.heads:
        # llama.cpp rotates neighbouring dims, transformers those half a head apart, and rows are stored accordingly
        tensor = tensor.view(source.heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor.T.contiguous() if source.transposed else tensor


def unpacked(file: GGUFFile, model: PreTrainedModel) -> str | None:
    """Return a sentence about the tensors that had to be unpacked; ``None`` if none had to be.

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
        f"{file.path.name}: its packed tensors ({shown}) are unpacked to {str(model.dtype).removeprefix('torch.')}, "
        f"and all weights take {size / 1e6:.0f} MB in memory ({stored / 1e6:.0f} MB in the file)."
    )
