"""A hash that tells apart what models compute: weights, buffers and active adapters. It is cheap to ask for often."""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kvkeep.errors import UnsupportedOperationError
from kvkeep.models.device import weights_of
from kvkeep.models.packed_weights import PackedLinear
from kvkeep.models.quantized_weights import parts
from kvkeep.models.rotary import follows_length
from kvkeep.models.support import unwrapped

_SAMPLES = 256
"""Numbers of a parameter that are hashed: enough that training it cannot leave all of them as they were."""

_NOW = "\0now"
"""Stands for the adapters that are active now; PEFT has no adapter of this name."""

_known: weakref.WeakKeyDictionary[nn.Module, dict[str | None, _KnownHash]] = weakref.WeakKeyDictionary()
_counted: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
"""What `count_as` was told: the hash of the weights at that time, and the one that is returned for it."""


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

    def adapters(self) -> str | None:
        """Return the state of the model's adapters, see `adapters`; ``None`` if the model is gone."""
        model = self._model()
        return None if model is None else adapters(model)

    def of(self, model: nn.Module) -> bool:
        """Return whether these are the weights of this very model."""
        return self._model() is model

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightsOf:
        """Return this object itself, since the model is not copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this object as ``None``, since another process has other models."""
        return (type(None), ())


def fingerprint(model: nn.Module, adapter: str | None = _NOW) -> str:
    """Return a hash of the weights, 16 hex digits: each parameter's name, shape, and up to 256 of its numbers at equal
    distances; or what `count_as` has given for these weights.

    Buffers count like parameters, unless they are what config.json says anyway. So does what the active adapters add:
    their weights and their scaling, but not their names. Parameters of adapters that are not active do not count. A
    model whose adapters are off has the hash of its base.

    Fine-tuning changes nearly every number of the parameters that it trains, so it is noticed. A change of a few
    numbers of a large parameter may not be. Packing weights and the dtype of an exact copy do not change the hash.

    Args:
        model: the model.
        adapter: the adapter that counts as active, by its name in PEFT; ``None``: none does. By default those that are.

    Cost:
        The first call reads about 1 kB of each parameter; those that processes share are gathered for that, one after
        the other. Later calls compare the parameters' addresses and versions.

    Raises:
        UnsupportedOperationError: each row has an adapter of its own.
    """
    model = unwrapped(model)
    found = _known.setdefault(model, {})
    known = found.get(adapter)
    if known is None or known.modules.key(adapter) != known.key:
        modules, state = _Modules(model), _state_of(model, adapter)
        made = _hash(dict(sorted(_weights(model, adapter))))
        made = hashlib.sha256(f"{made}{state}".encode()).hexdigest()[:16] if state else made
        known = found[adapter] = _KnownHash(modules, modules.key(adapter), made)
    # as soon as weights change, what `count_as` was told no longer holds
    before, counted = _counted.get(model, ("", ""))
    return counted if known.hash == before else known.hash


def count_as(model: nn.Module, weights: str) -> None:
    """Let `fingerprint` return the given hash for a model while its weights stay as they are now.

    Merging an adapter rounds weights, and its memories are those of the adapter all the same.
    """
    model = unwrapped(model)
    _counted[model] = fingerprint(model), weights


# Adapters of PEFT. Both kinds of its layers declare the names of their parts, and tell which adapters are on.


def adapters(model: nn.Module) -> str:
    """Return a hash of which adapters of a model are active or merged, and of their settings, but of no weights; empty
    without adapters.

    Raises:
        UnsupportedOperationError: each row has an adapter of its own.
    """
    model = unwrapped(model)
    if not any(hasattr(part, "peft_config") for part in (model, model.base_model)):  # PEFT leaves it where it has been
        return ""
    return _adapter_states(model)


def _adapter_states(model: nn.Module) -> str:
    """Return a hash of `_adapter_state` of all layers in a model; empty if PEFT has none in it."""
    states = [(name, _adapter_state(module)) for name, module in model.named_modules() if _is_adapted(module)]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16] if states else ""


def _is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer of PEFT, which holds adapters."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(module, "active_adapters")


def _state_of(model: nn.Module, adapter: str | None) -> list[object]:
    """Return, for each layer with adapters that count as active, its name and their settings, such as the scaling, by
    numbers in place of their names; and the names of merged ones. Return ``[]`` if there are none.
    """
    found: list[object] = []
    for name, layer in model.named_modules():
        if not _is_adapted(layer):
            continue
        active, numbers, merged = _adapter_state(layer, adapter)
        parts = _parts(layer)
        held = [own for own in active if any(own in names for names in parts.values())]
        if held or merged:
            shown = [(number, held.index(own), value) for number, own, value in numbers if own in held]
            found.append((_plain(name), shown, merged))
    return found


def _parts(layer: Any) -> dict[str, Collection[str]]:
    """Return the names of the adapters in each part of a layer of PEFT, such as ``lora_A``."""
    held = ((part, getattr(layer, part, None)) for part in layer.adapter_layer_names)
    return {part: adapters.keys() for part, adapters in held if isinstance(adapters, nn.ModuleDict | nn.ParameterDict)}


def _plain(name: str) -> str:
    """Return the name of a tensor or module as it was before PEFT wrapped it."""
    return _WRAPPED.sub("", name)


_WRAPPED = re.compile(r"\.(?:base_layer|original_module)(?=\.|$)")


def _adapter_state(
    layer: Any, adapter: str | None = _NOW
) -> tuple[tuple[str, ...], list[tuple[str, str, str]], tuple[str, ...]]:
    """Return the names of the adapters that count as active in a layer, their plain settings as triples (setting,
    adapter, value), such as the scaling, and the names of the adapters merged into its weights.

    Args:
        layer: a layer of PEFT.
        adapter: the adapter that counts as active; ``None``: none does. By default those that are.

    Raises:
        UnsupportedOperationError: each row has an adapter of its own.
    """
    for hook in layer._forward_pre_hooks.values():
        if set(getattr(hook, "keywords", None) or ()) & {"adapter_names", "alora_offsets"}:
            raise UnsupportedOperationError(
                "The rows of this batch have adapters of their own (`adapter_names` or `alora_offsets`), and a memory "
                "belongs to one state of the model. Choose an adapter for all rows with model.set_adapter, and run the "
                "rows of other adapters apart."
            )
    active = _active(layer, adapter)
    numbers = [
        (name, own, repr(values[own]))
        for name in getattr(layer, "other_param_names", ())
        if isinstance(values := getattr(layer, name, None), Mapping)
        for own in active
        if isinstance(values.get(own), bool | int | float | str | list | tuple)
    ]
    return active, numbers, tuple(getattr(layer, "merged_adapters", ()))


def _active(layer: Any, adapter: str | None = _NOW) -> tuple[str, ...]:
    """Return the names of the adapters that count as active in a layer of PEFT: the given one, whether the layer has it
    or not, none for ``None``, or by default those that are.
    """
    if adapter is not _NOW:
        return () if adapter is None else (adapter,)
    active = layer.active_adapters
    return () if layer.disable_adapters else tuple([active] if isinstance(active, str) else active)


def _replaced_names(model: nn.Module, adapter: str | None) -> dict[str, str | None]:
    """Return, for each prefix that an adapter's tensors have in their names, the prefix with the adapter's number among
    the active ones in place of its name; ``None`` for adapters that do not count as active.
    """
    found: dict[str, str | None] = {}
    for name, layer in model.named_modules():
        if _is_adapted(layer):
            active = _active(layer, adapter)
            for part, names in _parts(layer).items():
                for own in names:
                    number = active.index(own) if own in active else None
                    found[f"{name}.{part}.{own}"] = None if number is None else f"{name}.{part}.{number}"
    return found


class _Modules:
    """The modules of a model, none of which is kept alive: to walk over the model again takes much longer.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = [(weakref.ref(module), _children(module)) for module in model.modules()]

    def key(self, adapter: str | None = _NOW) -> list[object] | None:
        """Return a value that changes with every tensor's address or version and with the adapters that count as
        active; ``None`` if modules were replaced or are gone.
        """
        found: list[object] = []
        for reference, children in self._found:
            module = reference()
            if module is None or _children(module) != children:
                return None
            # frequencies that follow the length of a text change from run to run, so they are none of the weights
            own = module._parameters if follows_length(module) else {**module._parameters, **module._buffers}
            for name, tensor in own.items():
                if tensor is not None:
                    found += [name, *((part.data_ptr(), _version(part)) for part in parts(tensor))]
            found.append(_adapter_state(module, adapter) if _is_adapted(module) else None)
        return found


def _children(module: nn.Module) -> list[tuple[str, int]]:
    """Return the names and ids of a module's children."""
    return [(name, id(child)) for name, child in module._modules.items()]


class _KnownHash(NamedTuple):
    """A hash that was computed, and the parameters that it belongs to."""

    modules: _Modules
    key: list[object] | None
    hash: str


def _hash(weights: dict[str, Tensor]) -> str:
    """Return a hash, 16 hex digits, of the names, shapes and samples of tensors, in their order here."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        for part in parts(_full(tensor.detach())):
            # in float32, so that an exact copy in another dtype has the same hash
            digest.update(_sample(part.flatten()).to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def _full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a parameter that processes share. Return any other parameter as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else cast(Tensor, full())


def _sample(flat: Tensor) -> Tensor:
    """Return at most 256 numbers of a flat tensor at equal distances."""
    n = flat.numel()
    if n <= _SAMPLES:
        return flat
    index = [i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return flat[torch.tensor(index, device=flat.device)]


def _weights(model: nn.Module, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model that its hash is made of, those of inactive adapters left out, each
    under a name that does not depend on adapters' names.
    """
    replaced = _replaced_names(model, adapter)
    for name, tensor in _all_weights(model):
        # the longest beginning of the name that is an adapter's, if there is one
        place = len(name)
        while place > 0 and name[:place] not in replaced:
            place = name.rfind(".", 0, place)
        start = replaced[name[:place]] if place > 0 else ""
        if start is not None:
            yield _plain(f"{start}{name[place:]}" if start else name), tensor


def _all_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name, those of all adapters and packed weights included, and what `_buffers` yields."""
    yield from weights_of(model)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):  # whose weights are no parameter
            yield f"{name}.weight", module.weight
        yield from ((f"{name}.{own}", tensor) for own, tensor in _buffers(module))


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers by name, except computed ones that follow from the configuration; other computed
    ones rounded to bfloat16.

    So an untouched rotary embedding may be computed on any device, and be rounded with the model. Nothing is yielded
    for frequencies that follow the length of a text.
    """
    if follows_length(module):  # its frequencies are those of the last text
        return
    held = {name: tensor for name, tensor in module._buffers.items() if tensor is not None and not tensor.is_meta}
    computed = held.keys() & module._non_persistent_buffers_set
    usual = _usual_buffers(module) if computed else {}
    for name, tensor in held.items():
        if name in computed and tensor.is_floating_point():
            if (expected := usual.get(name)) is not None and _is_close(tensor, expected):
                continue
            yield name, tensor.bfloat16()  # so it has the same hash in float32 and in the model's dtype
        else:
            yield name, tensor


def _usual_buffers(module: Any) -> Mapping[str, Tensor | None]:
    """Return the buffers that a module's class computes from the configuration; empty if it cannot be asked."""
    if getattr(module, "config", None) is None or module._modules or module._parameters:
        return {}
    try:
        return cast(nn.Module, type(module)(module.config))._buffers
    except Exception:  # its class takes other arguments
        return {}


def _is_close(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are of equal shape and equal up to rounding to bfloat16; no if ``expected`` is on the
    meta device.
    """
    if expected.shape != tensor.shape or expected.is_meta:
        return False
    return torch.allclose(tensor.detach().cpu().double(), expected.cpu().double(), rtol=2**-8, atol=0)


def _version(tensor: Tensor) -> int:
    """Return a number that grows with every change in place; 0 where torch does not count changes."""
    return 0 if tensor.is_inference() else tensor._version
