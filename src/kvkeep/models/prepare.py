"""Prepare a model that runs on a CPU: few rows go through fused modules, more rows through packed weights."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
from typing import Any

import torch
from torch import nn

from kvkeep.backends import choose, layer_ops, why
from kvkeep.models.fused_decoder import FusedDecoder, fuse_decoder
from kvkeep.models.fused_layers import FusedLayer, fuse_layer
from kvkeep.models.fused_modules import (
    FusedGate,
    FusedHead,
    FusedLinear,
    FusedNorm,
    FusedQKV,
    Trials,
    agrees,
    alike,
    described,
    epsilon_of,
    fusable,
    fuse_head,
    fuse_linear,
    gate_parts,
    is_kernels,
    is_still,
    mixed,
    open_modules,
)
from kvkeep.models.packed_weights import PackedLinear, pack_weights

SWITCH = "KVKEEP_FUSED"
"""Environment variable: 0 leaves every model's modules as transformers has them."""

FEW_ROWS = 2
"""Up to so many rows, products with plain weights in the native kernel are as fast as with packed ones."""

_MIXINS = (FusedGate, FusedNorm, FusedLayer, FusedDecoder)
FUSED = (FusedLinear, FusedHead, *_MIXINS)
"""Classes of fused modules."""

_LEFT = "_kvkeep_left_plain"
"""Attribute of models that stay as they are."""


def is_wanted(fused: bool | None) -> bool:
    """Return whether modules are to be fused: as the caller says, else as the environment says, else yes."""
    return os.environ.get(SWITCH, "1") != "0" if fused is None else fused


def prepare(model: nn.Module, fused: bool | None = None) -> None:
    """Fuse the modules of a model if that is wanted, see `fuse_modules`.

    kvkeep calls it for every model that it loads or runs. What is fused already stays as it is.

    Args:
        model: the model.
        fused: whether modules are fused; ``None``: unless the environment says ``KVKEEP_FUSED=0``. A model that once
            was to be left as it is stays so.
    """
    if vars(model).get(_LEFT):
        return
    if is_wanted(fused):
        fuse_modules(model)
    else:
        vars(model)[_LEFT] = True


def fuse_modules(model: nn.Module) -> int:
    """Replace modules by ones that call the native kernel, in place. Return how many were replaced.

    Changed are RMS norms and layer norms, feed-forward layers ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))``,
    linear layers, decoder layers and decoders made of these. Each is a single call then, for steps of a few rows
    outside of autograd; everything else runs as before. The logits of a model in half precision become float32.
    Weights, names and `state_dict` stay as they are, so the model can still be saved and trained, and hooks that come
    later are called.

    Some modules stay as they are: those with hooks or another ``forward`` of their own, in training, on another device
    or in another dtype, packed ones and those that another package has quantised, parts of compiled modules, and each
    whose outputs on random numbers are not those of the kernel.
    """
    modules = [module for module in open_modules(model) if is_still(module) and not isinstance(module, _MIXINS)]
    trials: Trials = {}
    norms = [module for module in modules if _fuse_norm(module, trials)]
    linear = fusable(modules)
    fuse_linear(linear)
    fuse_head(model)  # also where it has been fused before: the model's dtype may be another one by now
    if not norms and not linear:  # all that can be fused has been
        return 0
    # a gate is fused from fused products, a layer from all fused parts, and a decoder from fused layers
    gates = [module for module in modules if _fuse_gate(module, trials)]
    for module in modules:
        _fuse_qkv(module)
    layers = [module for module in modules if fuse_layer(module, trials)]
    decoders = [module for module in modules if fuse_decoder(module)]
    return len(norms) + len(linear) + len(gates) + len(layers) + len(decoders)


def describe(model: nn.Module) -> str:
    """Return a phrase for how a model's decode steps run: in how much of the native kernel, and why in no more of
    it.
    """
    modules = list(model.modules())
    layers = sum(isinstance(module, FusedLayer) for module in modules)
    products = sum(type(module) is FusedLinear for module in modules)
    if any(isinstance(module, FusedDecoder) for module in modules):
        return f"all {layers} layers as one call of the native kernel, from the second new token on"
    if layers:
        return f"{layers} layers as calls of the native kernel, one by one: the decoder has parts beside its layers"
    if products:
        return f"{products} products in the native kernel, the rest in torch: its layers are of no kind that is fused"
    weight = next(model.parameters(), None)
    place = torch.device("cpu") if weight is None else weight.device
    if place.type != "cpu":
        return f"as transformers has them, with the backend for {place.type}"
    if vars(model).get(_LEFT):
        return f"as transformers has them, in torch: `fused=False` or {SWITCH}=0 was given"
    dtype = torch.float32 if weight is None else weight.dtype
    if not choose(place, dtype).has_layer_ops:
        return f"as transformers has them, in torch: {why(place, dtype)}"
    return "as transformers has them, in torch: its weights are quantised, or of a dtype that the kernel cannot read"


def restore_modules(model: nn.Module) -> None:
    """Give a model's fused modules their original classes back, in place. `prepare` does not fuse the model again."""
    vars(model)[_LEFT] = True
    modules: list[nn.Module] = [*model.modules()]
    for module in modules:
        if isinstance(module, _MIXINS):
            kind: Any = type(module)
            module.__class__ = kind.plain
        elif type(module) in (FusedLinear, FusedHead):
            vars(module).pop("_qkv", None)
            module.__class__ = nn.Linear


def weight_layout(model: nn.Module) -> tuple[bool, bool]:
    """Return whether some linear layers of a model are fused, and whether some are packed."""
    kinds = {type(module) for module in model.modules()}
    return FusedLinear in kinds, PackedLinear in kinds


def prepare_for_rows(model: nn.Module, rows: int, like: tuple[bool, bool] | None = None) -> int:
    """Pack a model's weights, in place, for a job whose steps have ``rows`` rows, if these are more than `FEW_ROWS` and
    timing shows that it is faster. Return how many layers were packed.

    Args:
        model: the model.
        rows: number of rows of most steps.
        like: the `weight_layout` of the same model in another process, which is copied: modules are packed or get their
            plain classes back. Nothing is timed then, and both processes compute the same numbers to the last digit.
    """
    if like is None:
        return pack_weights(model, rows, if_faster=True) if rows > FEW_ROWS else 0
    if not like[0]:
        restore_modules(model)
    return pack_weights(model, rows) if like[1] else 0


def _fuse_norm(module: nn.Module, trials: Trials) -> bool:
    """Fuse a module, in place, if it is an RMS norm or a layer norm that the kernel computes. Return whether it was
    fused.

    Args:
        module: a module.
        trials: what trials of other modules have found, to which this one's is added.
    """
    own, epsilon = module._parameters, epsilon_of(module)
    weight, bias = own.get("weight"), own.get("bias")
    if not isinstance(epsilon, float) or own.keys() - {"weight", "bias"} or any(module.children()):
        return False
    if weight is None or weight.ndim != 1 or not all(is_kernels(part) for part in own.values() if part is not None):
        return False

    def agrees_with(rule: tuple[float, bool]) -> bool:
        kernel = functools.partial(layer_ops.norm, by=layer_ops.Norm(weight, epsilon, rule[0], bias, rule[1]))
        # numbers around 0 hardly tell an RMS norm from a layer norm
        return agrees(module, weight, len(weight), kernel, mean=1.0)

    key = alike(module)
    if key not in trials:
        # gemma's and nemotron's norms multiply with 1 + weight, the others with weight
        trials[key] = next(filter(agrees_with, itertools.product((0.0, 1.0), (False, True))), None)
    if (rule := trials[key]) is None:
        return False
    vars(module).update(_plus=rule[0], _is_centred=rule[1])  # first, since another thread may be in the module
    module.__class__ = mixed(FusedNorm, type(module))
    return True


def _fuse_gate(module: nn.Module, trials: Trials) -> bool:
    """Fuse a module, in place, if it is a feed-forward layer of fused products with an activation of the kernel. Return
    whether it was fused.

    Args:
        module: a module.
        trials: what trials of other modules have found, to which this one's is added.
    """
    if (parts := gate_parts(module)) is None:
        return False
    linear, gate, up, down = parts
    if any(part not in linear and [*part.parameters()] for part in module.children()):  # e.g. a whole decoder layer
        return False

    def agrees_with(activation: int) -> bool:
        kernel = functools.partial(layer_ops.gated, gate=gate, up=up, down=down, activation=activation)
        return agrees(module, gate.weight, gate.in_features, kernel, (gate, up))

    key = alike(module)
    if key not in trials:
        trials[key] = next(filter(agrees_with, layer_ops.ACTIVATIONS), None)
    if (activation := trials[key]) is None:
        return False
    vars(module).update(_activation=activation, as_tried=described(module))  # first, since another thread may be in it
    module.__class__ = mixed(FusedGate, type(module))
    return True


def _fuse_qkv(module: nn.Module) -> None:
    """Let the projections of query, key and value in a module be computed in one call, if all three are fused layers
    and the code of the module's ``forward`` applies them to one tensor. Otherwise do nothing.
    """
    kind: Any = type(module)
    calls = _calls_of_projections(kind)
    layers = [getattr(module, name, None) for name, _ in calls]
    fused = [layer for layer in layers if isinstance(layer, FusedLinear)]
    if len({name for name, _ in calls}) == len(fused) == 3 and len({argument for _, argument in calls}) == 1:
        qkv = FusedQKV(fused)
        for layer in fused:
            layer._qkv = qkv


@functools.cache
def _calls_of_projections(kind: type[nn.Module]) -> list[tuple[str, str]]:
    """Return the names of the query's, key's and value's projections that the code of an attention class's ``forward``
    calls, in its order, each with the name of its argument; ``[]`` without source code.
    """
    try:
        return re.findall(r"self\.([qkv]_proj)\((\w+)\)", inspect.getsource(kind.forward))
    except (OSError, TypeError):
        return []
