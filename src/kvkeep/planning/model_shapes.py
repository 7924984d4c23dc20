"""A model's shapes from its configuration alone: it is built and run on one token, without memory for weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import handed
from kvkeep.cache.layer import Layer
from kvkeep.errors import KVKeepError, UnsupportedModelError
from kvkeep.models.checkpoint import trained_length
from kvkeep.models.files import cached_if_unreachable, locate
from kvkeep.models.load import build_empty, position_limit, read_config
from kvkeep.planning.cost import Experts, LayerShape, ModelShape, Packed
from kvkeep.planning.weight_bytes import Scheme, is_quantized, pack, scheme_of


@dataclass(frozen=True)
class Outline:
    """The shapes and limits of a model that kvkeep can run.

    Attributes:
        name: hub name, folder or configuration file.
        config: the configuration.
        shape: the model as numbers, with its layers that have keys and values, in order.
        indices: the numbers of these layers in the model.
        other_layers: number of layers without keys and values.
        dtype: of the checkpoint; ``None`` if the configuration does not say.
        trained_length: positions that the model was trained for; ``None`` if the configuration does not say.
        position_limit: positions in a table of learned ones; ``None`` if there is no such table.
        scheme: how quantised weights are stored; ``None`` if there are none, or if their bytes are not known.
        packed: the quantised weights.
    """

    name: str
    config: PreTrainedConfig
    shape: ModelShape
    indices: tuple[int, ...]
    other_layers: int
    dtype: torch.dtype | None
    trained_length: int | None
    position_limit: int | None
    scheme: Scheme | None
    packed: Packed

    @property
    def quantised(self) -> bool:
        """Return whether the checkpoint's weights are stored in fewer bits than their dtype has."""
        return is_quantized(self.config)


def outline(name_or_path: str | os.PathLike[str]) -> Outline:
    """Read a model's shapes, without its weights and its tokenizer.

    Args:
        name_or_path: a hub name, a folder with a config.json, or the path of such a file.

    Raises:
        ModelFileError: there is no configuration, it cannot be used, or the hub fails.
        UnsupportedModelError: kvkeep cannot run this architecture.
    """
    name = locate(name_or_path)
    with cached_if_unreachable(name):
        config = read_config(name)
    model = build_empty(name, config)
    cache = _run(name, config, model)
    used = {index: layer for index, layer in cache.bounded_layers().items() if layer.allocated}
    if not used:
        raise UnsupportedModelError(f"{name} has no layer with keys and values, so there is nothing to bound.")
    layers = tuple(map(_layer_shape, used.values()))
    scheme = scheme_of(config)
    return Outline(
        name=name,
        config=config,
        shape=_shape(model, layers),
        indices=tuple(used),
        other_layers=len(cache.layers) - len(used),
        dtype=getattr(config.get_text_config(decoder=True), "dtype", None),
        trained_length=trained_length(config),
        position_limit=position_limit(model),
        scheme=scheme,
        packed=Packed() if scheme is None else pack(model, scheme),
    )


def _run(name: str, config: PreTrainedConfig, model: PreTrainedModel) -> BoundedCache:
    """Return a cache after one token, made of tensors with shapes but no memory."""
    cache = BoundedCache(config, "local", budget=1)
    cache.shapes_alone = True
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
    return cache


def _layer_shape(layer: Layer) -> LayerShape:
    slots = layer.store.slots()
    return LayerShape(slots.keys.shape[1], slots.keys.shape[3], slots.values.shape[3], layer.window)


def _shape(model: PreTrainedModel, layers: tuple[LayerShape, ...]) -> ModelShape:
    """Describe the model in numbers, with only those names that transformers gives to all families."""
    config = model.config.get_text_config(decoder=True)
    used: int = getattr(config, "num_experts_per_tok", None) or 0
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
    head = model.get_output_embeddings()
    if head is not None:
        yield head.weight
