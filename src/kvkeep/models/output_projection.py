"""The projection of attention's heads into a layer's output, found in the module that attends."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvkeep.models.fused_modules import PackedLinear

NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj_out", "proj")
"""Names of the projection in models of transformers. Its shape is checked as well."""

_BYTES = 2**24
"""Size of the largest intermediate result."""

_factors: weakref.WeakKeyDictionary[nn.Module, tuple[object, Tensor]] = weakref.WeakKeyDictionary()


class OutputOf:
    """The projection of a module that attends, looked for when it is needed.

    Where there is none that kvkeep can read, norms are those of what the heads put out: a fused or quantised
    projection, one in another module, or weights that are not in memory.

    Args:
        module: the module that attends.
        heads: number of query heads.
    """

    __slots__ = ("_heads", "_module")

    def __init__(self, module: nn.Module, heads: int) -> None:
        self._module, self._heads = module, heads

    def lengths(self, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
        """See `kvkeep.types.OutputProjection`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        linear = self._linear(x.shape[-1])
        if linear is not None:
            x = x @ _factor(linear, self._heads, x.shape[1]).to(x)
        norms: Tensor = x.norm(dim=-1)
        return norms

    def sizes(self, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
        """See `kvkeep.types.OutputProjection`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        linear = self._linear(x.shape[-1])
        if linear is None:
            return x.abs().sum(dim=-1)
        weights = _weights(linear, self._heads).to(x).unflatten(0, (x.shape[1], -1))
        rows = max(1, _BYTES // (x.element_size() * weights.shape[-1] * x.shape[0] * self._heads))
        parts = [(part[:, :, None] @ weights).abs().sum(dim=-1).mean(dim=2) for part in x.split(rows, dim=2)]
        return torch.cat(parts, dim=-1)

    def _linear(self, dim: int) -> nn.Module | None:
        """Return the output projection; ``None`` if there is none that can be read."""
        width = self._heads * dim
        return next((part for part in _candidates(self._module) if _readable(part) and _taken(part) == width), None)


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a module that are named like a projection. For a PEFT adapter, yield its base layer."""
    for name in NAMES:
        if isinstance(found := getattr(module, name, None), nn.Module):
            yield getattr(found, "base_layer", found)


def _readable(linear: nn.Module) -> bool:
    """Return whether the weights are a matrix of numbers that is in memory, plain or packed."""
    if isinstance(linear, PackedLinear):
        return True
    weight = _own(getattr(linear, "weight", None))
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
        return False
    return getattr(weight, "__tensor_flatten__", None) is None


def _own(weight: object) -> object:
    """Return this process's part of the weights, where processes share them."""
    to_local = getattr(weight, "to_local", None)  # a DTensor, whose module is slow to import
    return weight if to_local is None else to_local()


def _taken(linear: nn.Module) -> int:
    """Return how many inputs a linear layer has."""
    if isinstance(linear, PackedLinear):
        return linear.in_features
    weight = _own(linear.weight)
    assert isinstance(weight, Tensor)
    return int(weight.shape[0] if _stands(linear) else weight.shape[1])


def _stands(linear: nn.Module) -> bool:
    """Return whether a layer's weights are stored as (inputs, outputs), as in GPT-2's convolutions of width 1."""
    return hasattr(linear, "nf")


def _weights(linear: nn.Module, heads: int) -> Float[Tensor, "Hq E M"]:
    """Return the weights of each query head."""
    weight = _own(linear.weight)
    assert isinstance(weight, Tensor)
    each: Tensor = (weight if _stands(linear) else weight.mT).detach().unflatten(0, (heads, -1))
    return each


def _factor(linear: nn.Module, heads: int, groups: int) -> Float[Tensor, "Hk E E2"]:
    """Return a matrix per KV head that keeps the length a vector has after its group's summed projections.

    It is worked out anew only when the weights have changed.
    """
    key: tuple[int, ...] = heads, groups
    if isinstance(weight := _own(linear._parameters.get("weight")), Tensor) and not weight.is_inference():
        key = heads, groups, weight.data_ptr(), weight._version  # packed weights never change
    known = _factors.get(linear)
    if known is None or known[0] != key:
        summed = _weights(linear, heads).double().unflatten(0, (groups, -1)).sum(dim=1)
        upper = torch.linalg.qr(summed.mT, mode="r").R
        known = _factors[linear] = (key, upper.mT.float())
    return known[1]
