"""A hash that tells the weights of a model apart from all others, cheap enough to be asked for often."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kvkeep.models.device import weights_of
from kvkeep.models.fused_modules import PackedLinear
from kvkeep.models.quantized_weights import parts
from kvkeep.models.support import unwrapped

_SAMPLES = 256
"""Numbers of a parameter that are hashed: enough that training it cannot leave all of them as they were."""

_known: weakref.WeakKeyDictionary[nn.Module, _KnownHash] = weakref.WeakKeyDictionary()


class WeightsOf:
    """The weights of a model that may be gone by the time they are asked for. Copies and pickles of it name no model.

    Args:
        model: the model; it is not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> str | None:
        """Return the hash of the weights; ``None`` if the model is gone."""
        model = self._model()
        return None if model is None else fingerprint(model)

    def of(self, model: nn.Module) -> bool:
        """Return whether these are the weights of this very model."""
        return self._model() is model

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightsOf:
        """Return this object itself, since the model is not copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this object as ``None``, since another process has other models."""
        return (type(None), ())


def fingerprint(model: nn.Module) -> str:
    """Return a hash of each parameter's name and shape and of 256 of its numbers, from the first to the last.

    Fine-tuning changes nearly every number of the parameters that it trains, so it is noticed. A change of a few
    numbers of a large parameter may not be. Packing weights and the dtype of an exact copy do not change the hash.

    Cost:
        The first call reads about 1 kB of each parameter; one that processes share is collected for that, one after the
        other. Later calls compare the parameters' addresses and versions.
    """
    model = unwrapped(model)
    known = _known.get(model)
    if known is None or known.modules.key() != known.key:
        modules = _Modules(model)
        known = _known[model] = _KnownHash(modules, modules.key(), _hash(dict(sorted(_weights(model)))))
    return known.hash


class _Modules:
    """The modules of a model, none of which is kept alive: to walk over the model again takes much longer.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = [(weakref.ref(module), _children(module)) for module in model.modules()]

    def key(self) -> list[object] | None:
        """Return each parameter's name, address and version; ``None`` if modules were added, removed or replaced."""
        found: list[object] = []
        for reference, children in self._found:
            module = reference()
            if module is None or _children(module) != children:
                return None
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    found += [name, *((part.data_ptr(), _version(part)) for part in parts(tensor))]
            found.append(None)
        return found


def _children(module: nn.Module) -> list[tuple[str, int]]:
    """Return the names and ids of the modules within a module. An id is unique as long as its module lives."""
    return [(name, id(child)) for name, child in module._modules.items()]


class _KnownHash(NamedTuple):
    """A hash that was computed, and the parameters that it belongs to."""

    modules: _Modules
    key: list[object] | None
    hash: str


def _hash(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        for part in parts(_full(tensor.detach())):
            digest.update(_sample(part.flatten()).to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def _full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a parameter that processes share. Return any other parameter as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else cast(Tensor, full())


def _sample(flat: Tensor) -> Tensor:
    """Return numbers at equal distances, including the first and the last one; all numbers if they are few."""
    n = flat.numel()
    if n <= _SAMPLES:
        return flat
    index = [i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return flat[torch.tensor(index, device=flat.device)]


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name. A packed layer's weight comes in the plain layout."""
    yield from weights_of(model)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{name}.weight", module.weight


def _version(tensor: Tensor) -> int:
    """Return a number that grows with every change in place; 0 where torch does not count changes."""
    return 0 if tensor.is_inference() else tensor._version
