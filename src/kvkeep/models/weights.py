"""A hash that tells the weights of a model apart from all others, cheap enough to be asked for often."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.models.packed import PackedLinear
from kvkeep.models.quantised import parts
from kvkeep.models.suitable import unwrapped

_SAMPLES = 256
_known: weakref.WeakKeyDictionary[nn.Module, tuple[object, str]] = weakref.WeakKeyDictionary()


class WeightsOf:
    """The weights of a model that may be gone by the time they are asked for. Copies and pickles of it name no model.

    Args:
        model: the model; it is not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> str | None:
        """The hash of the weights; ``None`` if the model is gone."""
        model = self._model()
        return None if model is None else fingerprint(model)

    def of(self, model: nn.Module) -> bool:
        """Whether these are the weights of this very model."""
        return self._model() is model

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightsOf:
        """The same object: the model is not copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle is read in another process, which has other models."""
        return (type(None), ())


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter's name and shape and of 256 of its numbers, from the first to the last one.

    Fine-tuning changes nearly every number of the parameters that it trains, so it is noticed. A change of a few
    numbers of a large parameter may not be. Packing weights and the dtype of an exact copy do not change the hash.

    Cost:
        The first call reads about 1 kB of each parameter. Later calls compare the parameters' addresses and versions.
    """
    model = unwrapped(model)
    key = tuple(
        (name, [(part.data_ptr(), _version(part)) for part in parts(tensor)])
        for name, tensor in model.named_parameters()
    )
    known = _known.get(model)
    if known is None or known[0] != key:
        known = _known[model] = (key, _hash(dict(sorted(_weights(model)))))
    return known[1]


def _hash(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        for part in parts(tensor.detach()):
            digest.update(_sample(part.flatten()).to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(flat: Tensor) -> Tensor:
    """Numbers at equal distances, the first and the last one among them; all if they are few."""
    n = flat.numel()
    if n <= _SAMPLES:
        return flat
    index = [i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return flat[torch.tensor(index, device=flat.device)]


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name; a packed layer's weight in the plain layout."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{name}.weight", module.weight


def _version(tensor: Tensor) -> int:
    """A number that grows with every change in place; 0 where torch does not count them."""
    return 0 if tensor.is_inference() else tensor._version
