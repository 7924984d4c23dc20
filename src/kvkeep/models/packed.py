"""Weights laid out for products with few tokens, which is what a decode step on a CPU consists of."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

FORMATS = (torch.float32, torch.bfloat16)
_TIMED_BYTES = 256 * 2**20
_REPEATS = 6


class PackedLinear(nn.Module):
    """A linear layer whose weights are in oneDNN's own blocked layout, and nowhere else.

    Torch lays weights out anew, or computes far from the processor's speed, in every product with 2 to 64 rows.
    The result equals the plain layer's up to the order of summation.

    Args:
        linear: a plain layer on the CPU in float32 or bfloat16.
        rows: rows that most products will have; any other number works.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """A copy in the plain layout, made anew each time, for code that looks at weights."""
        plain: Tensor = self._packed.to_dense()
        return plain

    def forward(self, x: Float[Tensor, "*n in"]) -> Float[Tensor, "*n out"]:
        """The product with the weights, plus the bias."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return result


def pack_weights(model: nn.Module, rows: int = 32, *, if_faster: bool = False) -> int:
    """Replace the linear layers of a model that runs on a CPU, in place, and return how many were replaced.

    The plain weights are given up, so nothing is held twice, and the model can no longer be trained or saved. Layers
    that are no plain ones (quantised, with hooks, on another device, in another number format), parts of compiled ones
    and weights that something else uses, such as tied embeddings, stay as they are.

    Args:
        model: the model.
        rows: rows that most products will have.
        if_faster: first time both layouts with so many rows, on up to 256 MiB of the weights, and replace nothing where
            the plain one is as fast; which it is depends on the processor, for one or two rows above all.
    """
    formats = {dtype for dtype in FORMATS if _works(dtype)}
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    compiled = {id(m) for top in model.modules() if top._compiled_call_impl is not None for m in top.modules()}
    found = [
        (parent, name)
        for parent in model.modules()
        if id(parent) not in compiled
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_plain(child, formats) and uses[id(child.weight)] == 1
    ]
    if if_faster and not _faster([cast(nn.Linear, parent.get_submodule(name)) for parent, name in found], rows):
        return 0
    for parent, name in found:  # names, as a list of layers would hold every plain weight to the end
        setattr(parent, name, PackedLinear(cast(nn.Linear, parent.get_submodule(name)), rows))
    return len(found)


@torch.inference_mode()
def _faster(layers: list[nn.Linear], rows: int) -> bool:
    """Whether products with packed weights take less time; all in turn, as in a step, so that caches are cold."""
    sample: list[nn.Linear] = []
    for layer in layers:
        if sample and sum(one.weight.nbytes for one in [*sample, layer]) > _TIMED_BYTES:
            break
        sample.append(layer)
    inputs = [layer.weight.new_ones(rows, 1, layer.in_features) for layer in sample]

    def seconds(those: Sequence[nn.Module]) -> float:
        start = time.perf_counter()
        for layer, x in zip(those, inputs, strict=True):
            layer(x)
        return time.perf_counter() - start

    packed = [PackedLinear(layer, rows) for layer in sample]
    pairs = [(seconds(sample), seconds(packed)) for _ in range(_REPEATS)][1:]  # the first pass warms up
    return statistics.median(fast for _, fast in pairs) < statistics.median(plain for plain, _ in pairs)


def _is_plain(layer: nn.Linear, formats: set[torch.dtype]) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype in formats and weight.layout is torch.strided and not any(hooks)


def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this processor, has the operations; they are not part of its stable interface."""
    try:
        blank = nn.utils.skip_init(nn.Linear, 16, 16, dtype=dtype)  # draws no random numbers
        PackedLinear(blank, 2)(torch.ones(2, 16, dtype=dtype))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return True
