"""A model's shapes, and the bytes of its weights, from its configuration alone.

The model is built and run on one token, without memory for weights. `kvkeep.planning.families` asks for that where it
cannot count by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvkeep.cache.hf_layers import handed, handing_cache
from kvkeep.cache.layer_layout import windows_of
from kvkeep.errors import KVKeepError, UnsupportedModelError
from kvkeep.models import gguf, gguf_weights
from kvkeep.models.checkpoint import position_limit, trained_length
from kvkeep.models.device import parse_device
from kvkeep.models.files import cached_if_unreachable, is_gguf, locate
from kvkeep.models.load import build_empty, read_config
from kvkeep.models.quantized_weights import is_packable
from kvkeep.models.support import IdleStepper
from kvkeep.planning.cost import Experts, LayerShape, ModelShape, Packed
from kvkeep.planning.outline import WHOLE, Outline, Scheme

# Bytes of quantised weights, from the ``quantization_config`` of a model's configuration.
#
# ``docs/plan.md`` says what is assumed, and compares the formula with published files.

_MOST = 10**6
"""Larger numbers of a ``quantization_config`` make no sense."""


def is_quantized(config: PreTrainedConfig) -> bool:
    """Return whether a configuration says that weights are stored in fewer bits than their dtype has."""
    return _fields(config) is not None


def scheme_of(config: PreTrainedConfig) -> Scheme | None:
    """Return how a configuration says that weights are stored; ``None`` if they are not quantized, or by a method whose
    bytes are not known here.
    """
    fields = _fields(config)
    if not isinstance(fields, Mapping):
        return None
    method = fields.get("quant_method")
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        method = "bitsandbytes"
    read = _READERS.get(method) if isinstance(method, str) else None
    return None if read is None else read(fields)


def pack(model: PreTrainedModel, scheme: Scheme) -> Packed:
    """Return the number and the bytes of the weights that are quantized under a scheme, with their scales.

    Args:
        model: the model in full precision; its weights need no memory.
        scheme: how its linear layers are stored.
    """
    parameters = expert_parameters = 0
    size = expert_size = 0.0
    for tensor, is_expert in _quantized(model, scheme):
        count = math.prod(tensor.shape[:-2])
        taken = count * scheme.size(*tensor.shape[-2:])
        parameters, size = parameters + tensor.numel(), size + taken
        if is_expert:
            expert_parameters, expert_size = expert_parameters + tensor.numel(), expert_size + taken
    return Packed(parameters, math.ceil(size), expert_parameters, math.ceil(expert_size))


def _quantized(model: PreTrainedModel, scheme: Scheme) -> Iterator[tuple[Tensor, bool]]:
    """Yield the weights of a model that a scheme quantizes, and whether each is a stack of experts, with three axes."""
    head = model.get_output_embeddings()
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if scheme.keeps(name):
            continue
        if isinstance(module, nn.Linear | Conv1D):
            inside = ".experts." in name
            # an output layer that shares its matrix with the table of embeddings stays as it is
            spared = id(module.weight) in tied or (module is head and not scheme.head)
            if not spared and (inside or not scheme.experts_only):
                yield module.weight, False
        elif name.endswith(".experts"):
            weights = module._parameters.values()
            yield from ((weight, True) for weight in weights if weight is not None and weight.ndim == 3)


def _fields(config: PreTrainedConfig) -> Any:
    """Return a configuration's ``quantization_config``, of the whole model or of its text part; ``None`` if it has
    none.
    """
    for part in (config, config.get_text_config(decoder=True)):
        if (found := getattr(part, "quantization_config", None)) is not None:
            return found
    return None


def _number(fields: Mapping[str, Any], key: str, default: int) -> int:
    """Return a field that holds a whole number; the default where it is missing or makes no sense: below -1, or above a
    million.
    """
    found = fields.get(key)
    return found if type(found) is int and -1 <= found <= _MOST else default


def _group(fields: Mapping[str, Any], default: int) -> tuple[int, int]:
    """Return rows and columns of a group that shares a scale: one row, and as many columns as the field ``group_size``
    says, or ``default``. -1 is the whole row, as `WHOLE`.
    """
    return (1, max(WHOLE, _number(fields, "group_size", default)))


def _kept(fields: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the names of layers that stay in the model's dtype, from the lists under these keys."""
    found = [fields.get(key) for key in keys]
    return tuple(name for names in found if isinstance(names, list) for name in names if isinstance(name, str))


def _awq(fields: Mapping[str, Any]) -> Scheme:
    """Return how AWQ stores a weight matrix, from the fields of a ``quantization_config``."""
    bits = _number(fields, "bits", _number(fields, "w_bit", 4))
    # AWQ's own files say `w_bit` and `q_group_size`
    group = (1, max(WHOLE, _number(fields, "group_size", _number(fields, "q_group_size", 128))))
    return Scheme(
        method="awq", bits=bits, group=group, group_bits=16 + bits, kept=_kept(fields, "modules_to_not_convert")
    )


def _gptq(fields: Mapping[str, Any]) -> Scheme:
    """Return how GPTQ stores a weight matrix, from the fields of a ``quantization_config``."""
    bits = _number(fields, "bits", 4)
    return Scheme(
        method="gptq",
        bits=bits,
        group=_group(fields, 128),
        group_bits=16 + bits,  # a scale in half precision, and a zero point
        column_bits=32,  # the group of each input
        kept=_kept(fields, "modules_to_not_convert"),
        head=fields.get("lm_head") is True,
    )


def _bitsandbytes(fields: Mapping[str, Any]) -> Scheme:
    """Return how bitsandbytes stores a weight matrix, in 8 or in 4 bits."""
    kept = _kept(fields, "llm_int8_skip_modules")
    if fields.get("load_in_8bit") is True:
        return Scheme(method="bitsandbytes", bits=8, group_bits=32, kept=kept)
    twice = fields.get("bnb_4bit_use_double_quant") is True
    scale = 8 + 32 / 256 if twice else 32  # scales are quantised, too, in blocks of 256
    return Scheme(method="bitsandbytes", bits=4, group=(1, 64), group_bits=scale, kept=kept)


def _fp8(fields: Mapping[str, Any]) -> Scheme:
    """Return how a checkpoint in fp8 stores a weight matrix: a scale per block, or one for the whole matrix."""
    block = fields.get("weight_block_size")
    whole = not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < _MOST for n in block))
    group = (WHOLE, WHOLE) if whole else (block[0], block[1])  # type: ignore[index]  # not whole: a list
    method = str(fields.get("quant_method", "fp8"))
    return Scheme(method=method, bits=8, group=group, group_bits=32, kept=_kept(fields, "modules_to_not_convert"))


def _fbgemm(fields: Mapping[str, Any]) -> Scheme:
    """Return how fbgemm's fp8 stores a weight matrix: a scale per row."""
    return Scheme(method="fbgemm_fp8", bits=8, group_bits=32, kept=_kept(fields, "modules_to_not_convert"))


def _mxfp4(fields: Mapping[str, Any]) -> Scheme:
    """Return how MXFP4 stores the experts' weights: a scale per 32 weights."""
    kept = _kept(fields, "modules_to_not_convert")
    return Scheme(method="mxfp4", bits=4, group=(1, 32), group_bits=8, kept=kept, experts_only=True)


def _compressed(fields: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of compressed-tensors, from its first group of layers; checkpoints mostly have just one.

    Return ``None`` if there is no such group.
    """
    groups = fields.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    bits = _number(weights, "num_bits", 8)
    by = {"tensor": (WHOLE, WHOLE), "channel": (1, WHOLE)}
    # "group" is the remaining strategy
    block = by.get(str(weights.get("strategy")), _group(weights, WHOLE))
    zero = 0 if weights.get("symmetric", True) else bits
    return Scheme(
        method="compressed-tensors",
        bits=bits,
        group=block,
        group_bits=16 + zero,
        kept=_kept(fields, "ignore"),
        # `ignore` names the output layer where it is kept
        head=True,
    )


def _torchao(fields: Mapping[str, Any]) -> Scheme | None:
    """Return how torchao stores a weight matrix; ``None`` for a kind that is not known."""
    kind = fields.get("quant_type")
    text = re.sub(r"[^a-z0-9]", "", str(kind).lower())
    kept = _kept(fields, "modules_to_not_convert")
    if "int4weightonly" in text:
        # torchao's default groups, each with a scale and a zero point in bfloat16
        return Scheme(method="torchao", bits=4, group=(1, 128), group_bits=32, kept=kept)
    if "int8" in text and "int4" not in text:
        return Scheme(method="torchao", bits=8, group_bits=16, kept=kept)
    if "float8" in text:
        return Scheme(method="torchao", bits=8, group_bits=32, kept=kept)
    return None


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "torchao": _torchao,
}


# Shapes.


def built(name: str) -> Outline:
    """Return a model's shapes and limits, after building it without memory for weights and running it on one token.

    Args:
        name: a hub name, a folder with a config.json, or the path of such a file or of a GGUF file.

    Raises:
        ModelFileError: there is no configuration, it cannot be used, or the hub fails.
        UnsupportedModelError: kvkeep cannot run this architecture.
    """
    name = locate(name)
    with cached_if_unreachable(name):
        config = read_config(name)
    model = build_empty(name, config)
    used, count = _run(name, config, model)
    if not used:
        raise UnsupportedModelError(f"{name} has no layer with keys and values, so there is nothing to bound.")
    scheme = scheme_of(config)
    return Outline(
        name=name,
        source=config,
        shape=_shape(model, tuple(used.values())),
        indices=tuple(used),
        other_layers=count - len(used),
        dtype=getattr(config.get_text_config(decoder=True), "dtype", None),
        trained_length=trained_length(config),
        position_limit=position_limit(model),
        is_quantized=is_quantized(config),
        scheme=scheme,
        packed=Packed() if scheme is None else pack(model, scheme),
        file_bytes=_file_bytes(name, model),
    )


def _file_bytes(name: str, model: PreTrainedModel) -> int | None:
    """Return the bytes of all weights of a GGUF file as they are in memory; ``None`` if ``name`` is no such file, or if
    its weights are unpacked on the device that is chosen by itself here.
    """
    # weights stay packed only where the native kernel multiplies with them, that is on a CPU
    if not is_gguf(name) or not is_packable(parse_device("auto")):
        return None
    file = gguf.read(name)
    return gguf_weights.packed_bytes(file, model) if file.is_packed else None


def _run(name: str, config: PreTrainedConfig, model: PreTrainedModel) -> tuple[dict[int, LayerShape], int]:
    """Run one token through a model on the meta device, whose tensors have shapes but no memory.

    The model becomes one of bfloat16, in evaluation mode.

    Returns:
        The shapes of the layers that got keys and values, by their numbers, and the number of all layers.

    Raises:
        UnsupportedModelError: the model's code cannot run without weights, or its cache cannot be bounded.
    """
    windows = windows_of(config)
    steppers = {index: IdleStepper() for index in windows}
    cache = handing_cache(config, steppers.__getitem__)
    nn.Module.to(model, torch.bfloat16).eval()  # some kernels for experts take no other dtype
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device="meta"), **handed(model, cache))
    except KVKeepError:
        raise
    except Exception as error:  # whatever a model's own code raises for tensors without numbers
        line = (str(error).splitlines() or [""])[0].rstrip(".")
        raise UnsupportedModelError(
            f"{name}: the shapes of its cache cannot be found out without weights ({type(error).__name__}: {line})."
        ) from error
    noted = {index: stepper.shapes for index, stepper in steppers.items() if stepper.shapes is not None}
    shapes = {index: LayerShape(keys[1], keys[3], values[3], windows[index]) for index, (keys, values) in noted.items()}
    return shapes, len(cache.layers)


def _shape(model: PreTrainedModel, layers: tuple[LayerShape, ...]) -> ModelShape:
    """Return the model in numbers, with only those names that transformers gives to all families."""
    config = model.config.get_text_config(decoder=True)
    used: int = getattr(config, "num_experts_per_tok", None) or 0  # without that name, all experts count as read
    # transformers stacks a layer's experts in one tensor: (experts, outputs, inputs)
    experts = [tensor for name, tensor in model.named_parameters() if ".experts." in name and tensor.ndim == 3]
    tables = list(_lookup_tables(model))
    outer = {id(tensor) for tensor in (*tables, *_output(model))}
    return ModelShape(
        layers=layers,
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        looked_up=sum(tensor.numel() for tensor in tables),
        experts=Experts(sum(map(Tensor.numel, experts)), experts[0].shape[0], used) if experts and used else Experts(),
        hidden=config.hidden_size,
        widest=max(
            # a token has an activation in each expert that works on it
            max(tensor.shape[-2:]) * (max(1, used) if tensor.ndim == 3 else 1)
            for tensor in model.parameters()
            if tensor.ndim >= 2 and id(tensor) not in outer
        ),
        query_heads=config.num_attention_heads,
        vocabulary=config.vocab_size,
    )


def _lookup_tables(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield the weights of embeddings, except one that also computes the logits."""
    shared = {id(tensor) for tensor in _output(model)}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in shared:
            yield module.weight


def _output(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield the weight of the output layer, if the model has one."""
    head = model.get_output_embeddings()
    if head is not None:
        yield head.weight
