"""Linear layers with packed weights, a layout that makes products with more than a few rows faster on a CPU."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvkeep.models.fused_modules import FusedLinear

FORMATS = (torch.float32, torch.bfloat16)
TIMED_BYTES = 256 * 2**20
"""Weights that are timed at most: more than caches hold, so that they come from memory as in a decode step."""

REPEATS = 6
"""Passes of a timing, of which the first one warms up."""


class PackedLinear(nn.Module):
    """A linear layer whose weights are stored in oneDNN's blocked layout only.

    For plain weights torch changes the layout in every product with 2 to 64 rows, or computes slowly. The result
    equals the plain layer's up to the order of summation.

    Args:
        linear: a plain layer on the CPU in float32 or bfloat16.
        rows: number of rows of most products; other numbers work too.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """Return a copy of the weights in the plain layout, made anew for each access."""
        plain: Tensor = self._packed.to_dense()
        return plain

    def forward(self, x: Float[Tensor, "*n in"]) -> Float[Tensor, "*n out"]:
        """Return the product with the weights, plus the bias."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return result


def pack_weights(model: nn.Module, rows: int = 32, *, if_faster: bool = False) -> int:
    """Replace linear layers by packed ones, in oneDNN's blocked layout, in place. Return how many were replaced.

    The plain weights are dropped, so that nothing is stored twice; the model can no longer be trained or saved. Some
    layers stay as they are: quantised ones, layers with hooks, on another device or in another dtype, parts of
    compiled modules, and weights that are shared, such as tied embeddings.

    Args:
        model: the model.
        rows: number of rows of most products.
        if_faster: time both layouts with this number of rows first, on up to 256 MiB of the weights, and replace
            nothing if the plain layout is as fast. The answer depends on the processor, above all for one or two rows.
    """
    formats = {dtype for dtype in FORMATS if _works(dtype)}
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    # a compiled module has been traced with its parts as they were
    compiled = {id(m) for top in model.modules() if top._compiled_call_impl is not None for m in top.modules()}
    found = [
        (parent, name)
        for parent in model.modules()
        if id(parent) not in compiled
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
        and type(child) in (nn.Linear, FusedLinear)
        and _is_plain(child, formats)
        and uses[id(child.weight)] == 1
    ]
    if if_faster and not faster([cast(nn.Linear, parent.get_submodule(name)) for parent, name in found], rows):
        return 0
    for parent, name in found:  # names only: a list of layers would keep every plain weight alive
        vars(parent.get_submodule(name)).pop("_qkv", None)  # they hold each other
        setattr(parent, name, PackedLinear(cast(nn.Linear, parent.get_submodule(name)), rows))
    return len(found)


@torch.inference_mode()
def faster(layers: list[nn.Linear], rows: int) -> bool:
    """Return whether products with ``rows`` rows are faster with packed weights on this processor, by timing both; the
    layers stay as they are.

    The first layers, up to `TIMED_BYTES` of weights, are run one after the other several times, as in decode steps, so
    that the processor's caches are cold; the medians are compared.
    """
    sample: list[nn.Linear] = []
    for layer in layers:
        if sample and sum(timed.weight.nbytes for timed in [*sample, layer]) > TIMED_BYTES:
            break
        sample.append(layer)
    inputs = [layer.weight.new_ones(rows, 1, layer.in_features) for layer in sample]

    def seconds(modules: Sequence[nn.Module]) -> float:
        start = time.perf_counter()
        for layer, x in zip(modules, inputs, strict=True):
            layer(x)
        return time.perf_counter() - start

    packed = [PackedLinear(layer, rows) for layer in sample]
    pairs = [(seconds(sample), seconds(packed)) for _ in range(REPEATS)][1:]  # the first pass warms up
    return statistics.median(fast for _, fast in pairs) < statistics.median(plain for plain, _ in pairs)


def _is_plain(layer: nn.Linear, formats: set[torch.dtype]) -> bool:
    """Return whether a linear layer has ordinary weights on the CPU, in one of these dtypes, and no hooks."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    weight = layer.weight
    if type(weight) is not nn.Parameter:  # e.g. quantised: it says that it has the dtype of its products
        return False
    return weight.device.type == "cpu" and weight.dtype in formats and weight.layout is torch.strided and not any(hooks)


def _works(dtype: torch.dtype) -> bool:
    """Return whether this build of torch has the operations for packed weights of a dtype, by trying them."""
    try:
        blank = nn.utils.skip_init(nn.Linear, 16, 16, dtype=dtype)  # draws no random numbers
        PackedLinear(blank, 2)(torch.ones(2, 16, dtype=dtype))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # they are missing, or differ
        return False
    return True
