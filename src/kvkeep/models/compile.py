"""``torch.compile`` for norms and feed-forward layers, the modules between two attentions."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.models.packed_weights import PackedLinear
from kvkeep.models.prepare import FUSED

_log = logging.getLogger(__name__)

Backend = str | Callable[..., Any]


def compile_layers(model: PreTrainedModel, backend: Backend = "inductor") -> int:
    """Compile norms and feed-forward layers of a decoder, in place, and return how many were compiled.

    Attention and other modules that use the KV cache stay as they are. So do modules that are a single operation of
    torch, have hooks, or are packed or fused (both go first). The first layer of each kind is compiled and run now, on
    zeros. A kind stays plain if it does not turn one vector per token into another, if torch cannot compile it as a
    whole, or if there is no compiler (CUDA: Triton, CPU: C++). The log says why, once.

    Torch makes one program for a single row, one for several rows, and two more for prompts of more than one token,
    whatever the numbers are; and as many again outside of inference mode. Models of one class share the limit of eight
    (``torch._dynamo.config.recompile_limit``). Beyond it torch runs layers plainly, and its log says so.

    Results equal the plain ones up to rounding. A single row has a program of its own, so a row's numbers may differ in
    the last bits between running alone and among others, as with plain matrix products. A request's greedy tokens in
    float32 are therefore the same alone and among others, unless two logits are that close.

    Args:
        model: a decoder of transformers, in evaluation mode and on its device.
        backend: of `torch.compile`.
    """
    width: int = model.config.get_text_config(decoder=True).hidden_size
    reasons: dict[type[nn.Module], str | None] = {}
    count = 0
    for layer in list(_between_attentions(model)):
        kind = type(layer)
        if kind not in reasons:
            device = next((p.device for p in layer.parameters()), model.device)
            with torch.inference_mode():  # as in the engine
                # two rows, as torch has another program for one
                reasons[kind] = _refusal(layer, torch.zeros((2, 1, width), dtype=model.dtype, device=device), backend)
        if reasons[kind] is None:
            layer.compile(backend=backend)
            count += 1
    _say({kind.__name__: reason for kind, reason in reasons.items() if reason})
    return count


def _between_attentions(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a model's decoder layers that do not use the cache and may be compiled, see `_is_open`."""
    for layers in model.modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        for layer in filter(_reaches_cache, layers):
            yield from (child for child in layer.children() if not _reaches_cache(child) and _is_open(child))


def _reaches_cache(module: nn.Module) -> bool:
    """Return whether a module or a part of it uses the cache: it then knows the number of its layer."""
    return any("layer_idx" in vars(part) for part in module.modules())


def _is_open(module: nn.Module) -> bool:
    """Return whether a module may be compiled: it has several operations, no hooks, and is neither packed nor fused."""
    if type(module).__module__.startswith("torch.nn.") and not any(module.children()):
        return False
    if any(isinstance(part, (PackedLinear, *FUSED)) for part in module.modules()):
        return False
    return not any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in module.modules()
    )


def _refusal(layer: nn.Module, x: Tensor, backend: Backend) -> str | None:
    """Return the reason why a layer cannot be compiled, found by running it plain and compiled; ``None`` if it can."""
    trial = copy.copy(layer)  # shares the weights; its compiled program is reused for all layers of its kind
    trial.compile(backend=backend, fullgraph=True)
    # one program for any number of rows; "maybe", since a layer that needs their number may have one for each
    torch._dynamo.maybe_mark_dynamic(x, 0)
    try:
        out = layer(x)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            return "it does not turn one vector per token into another"
        trial(x)
    except Exception as error:  # of the layer, of torch, or of one of several compilers
        text = " ".join(str(error).strip().partition("\n\n")[0].split())  # below are hints for torch's developers
        return f"{type(error).__name__}: {text.rstrip('.')}"
    return None


def _say(reasons: dict[str, str]) -> None:
    """Log in one line which kinds of layers are not compiled, and why."""
    if reasons:
        kinds = {reason: [name for name, other in reasons.items() if other == reason] for reason in reasons.values()}
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in kinds.items())
        _log.warning("Some layers are not compiled, which changes nothing but the speed (%s).", why)
