"""Norms, feed-forward layers and linear layers as single calls of the native kernel, for steps of a few rows."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvkeep.backends import choose, small
from kvkeep.models.packed import PackedLinear, faster, pack_weights

FEW_ROWS = 2
"""Up to so many rows, products with plain weights in the native kernel are as fast as with packed ones."""

_SCALES = (0.001, 1.0, 3.0, 10.0, 30.0)
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_MIXED: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class _Together:
    """Linear layers that are called in turn with the same tensor: the first call computes all outputs.

    The other outputs are kept until their layers ask for them with the very same tensor, once.
    """

    def __init__(self, layers: list[FusedLinear]) -> None:
        self._layers = layers
        self._held: tuple[Tensor | None, dict[int, Tensor]] = (None, {})

    def output(self, layer: FusedLinear, x: Tensor) -> Tensor | None:
        """The output of one layer; ``None`` if there is none."""
        if layer is not self._layers[0]:
            asked, outputs = self._held
            return outputs.pop(id(layer), None) if asked is x else None
        self._held = (None, {})
        found = small.products(x, self._layers)
        if found is None:
            return None
        self._held = (x, {id(other): out for other, out in zip(self._layers[1:], found[1:], strict=True)})
        return found[0]


class FusedLinear(nn.Linear):
    """A linear layer whose products with a few rows are computed by the native kernel, from the plain weights.

    In a dtype in which torch is slow on this processor, all its products are faster.
    """

    _together: _Together | None = None

    def forward(self, input: Float[Tensor, "*n in"]) -> Float[Tensor, "*n out"]:  # noqa: A002  # torch's name
        """The product with the weights, plus the bias."""
        if self._together is not None and (out := self._together.output(self, input)) is not None:
            return out
        found = small.products(input, (self,))
        if found is not None:
            return found[0]
        wide = small.widened(input, self)
        return super().forward(input) if wide is None else wide


class _FusedGate(nn.Module):
    """Mixed into a feed-forward layer with a gate: one call for its three products."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        out, parts = None, (self.gate_proj, self.up_proj, self.down_proj)
        if len(args) == 1 and not kwargs and all(map(_is_bare, parts)) and not any(map(_is_heard, self.children())):
            out = small.gated(args[0], *parts)
        return super().forward(*args, **kwargs) if out is None else out


class _FusedNorm(nn.Module):
    """Mixed into a root mean square norm: one call."""

    weight: nn.Parameter
    _epsilon: float
    _plus: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm of the last axis."""
        out = None
        if len(args) == 1 and not kwargs:
            out = small.norm(args[0], self.weight, self._epsilon, plus=self._plus)
        return super().forward(*args, **kwargs) if out is None else out


def _is_bare(layer: nn.Module) -> bool:
    """Whether nobody has replaced a fused layer, or wants to see its calls, since it was fused."""
    return type(layer) is FusedLinear and not _is_heard(layer)


def _is_heard(module: nn.Module) -> bool:
    """Whether a module's calls have a hook, or another ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


_MIXINS = (_FusedGate, _FusedNorm)
FUSED = (FusedLinear, *_MIXINS)
"""Classes of fused modules."""


def fuse_modules(model: nn.Module, rows: int = 1, *, if_faster: bool = False, products: bool = True) -> int:
    """Let a model's small operators run in the native kernel, in place, and return how many modules were changed.

    Changed are norms by the root mean square, feed-forward layers ``down(silu(gate(x)) * up(x))``, and linear layers.
    Each is a single call then, for steps of a few rows outside of autograd; everything else runs as before. Weights,
    names and `state_dict` stay as they are, so the model can still be saved and trained, and hooks that come later are
    called.

    Some modules stay as they are: those with hooks or another ``forward`` of their own, in training, on another device
    or in another dtype, quantised or packed ones (`kvkeep.pack_weights` goes first), parts of compiled modules, and
    each whose outputs on random numbers are not those of the kernel.

    Args:
        model: the model.
        rows: number of rows of most steps.
        if_faster: time linear layers with this number of rows first, on up to 256 MiB of the weights, and leave
            products to torch if it is as fast.
        products: whether linear layers and feed-forward layers are changed, too, and not norms alone.
    """
    modules = [module for module in _open(model) if _is_still(module) and not isinstance(module, _MIXINS)]
    norms = [module for module in modules if _fuse_norm(module)]
    if not products:
        return len(norms)
    linear = _fusable(modules)
    known = any(isinstance(module, FusedLinear) for module in modules)
    if not known and (not linear or (if_faster and not _pays(linear, rows))):
        return len(norms)
    _fuse_linear(linear)
    gates = [module for module in modules if _fuse_gate(module)]
    for module in modules:
        _join(module)
    return len(norms) + len(linear) + len(gates)


def fuse_if_slow(model: nn.Module) -> int:
    """Fuse the linear layers alone whose dtype is slow in torch on this processor; return how many they are.

    All their products are faster then, those of prompts above all. Hooks of every module are still called.
    """
    linear = [layer for layer in _fusable(_open(model)) if _is_still(layer) and small.slow(layer.weight.dtype)]
    _fuse_linear(linear)
    return len(linear)


def _fusable(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    return [module for module in modules if type(module) is nn.Linear and _is_ours(module.weight)]


def _fuse_linear(layers: list[nn.Linear]) -> None:
    for layer in layers:
        layer.__class__ = FusedLinear


def _pays(layers: list[nn.Linear], rows: int) -> bool:
    """Whether products with some rows are faster when they are fused; in a slow dtype those of prompts always are."""
    return all(small.slow(layer.weight.dtype) for layer in layers) or faster(layers, rows, _twin)


def chosen(model: nn.Module) -> tuple[bool, bool]:
    """Whether linear layers of a model have been fused, and whether some have been packed."""
    kinds = {type(module) for module in model.modules()}
    return FusedLinear in kinds, PackedLinear in kinds


def prepare(model: nn.Module, rows: int, like: tuple[bool, bool] | None = None) -> tuple[int, int]:
    """Fuse and pack the modules of a model for steps of so many rows, where that is faster.

    Args:
        model: the model.
        rows: number of rows of most steps.
        like: what was `chosen` for the same model in another process. Nothing is timed then, and both compute the same
            numbers to the last digit.

    Returns:
        The number of modules that were fused, and of layers that were packed.
    """
    if like is not None:
        if not like[0]:
            _restore(model)
        packed = pack_weights(model, rows) if like[1] else 0
        return fuse_modules(model, rows, products=like[0]), packed
    first = fuse_modules(model, rows, if_faster=True) if rows <= FEW_ROWS else 0
    packed = pack_weights(model, rows, if_faster=True)
    return first or fuse_modules(model, rows, if_faster=True), packed


def _restore(model: nn.Module) -> None:
    """Make linear layers plain that were fused when the model was loaded."""
    layers: list[nn.Module] = [module for module in model.modules() if type(module) is FusedLinear]
    for layer in layers:
        layer.__class__ = nn.Linear
        vars(layer).pop("_together", None)


def _twin(layer: nn.Linear) -> nn.Module:
    """A fused layer on the same weights."""
    twin = copy.copy(layer)
    twin.__class__ = FusedLinear
    return twin


def _open(model: nn.Module) -> Iterator[nn.Module]:
    """All modules but those within compiled ones."""
    compiled = {id(m) for top in model.modules() if top._compiled_call_impl is not None for m in top.modules()}
    return (module for module in model.modules() if id(module) not in compiled)


def _is_still(module: nn.Module) -> bool:
    """Whether a module is in evaluation mode, and nobody listens to it or has replaced its ``forward``."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not (module.training or any(hooks) or "forward" in vars(module))


def _is_ours(weight: object) -> bool:
    """Whether the kernel can read a weight, and this processor has the kernel."""
    if type(weight) is not nn.Parameter or weight.dtype not in _TOLERANCE or not weight.is_contiguous():
        return False
    return weight.is_cpu and choose(weight.device, weight.dtype).small


def _fuse_norm(module: nn.Module) -> bool:
    """Fuse a norm if it is one: with one vector of weights, that are multiplied as they are or plus 1."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or len(module._parameters) != 1 or any(module.children()):
        return False
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not _is_ours(weight):
        return False
    for plus in (0.0, 1.0):
        kernel = functools.partial(small.norm, weight=weight, epsilon=epsilon, plus=plus)
        if _agrees(module, weight, len(weight), kernel):
            module.__class__ = _mixed(_FusedNorm, type(module))
            vars(module).update(_epsilon=epsilon, _plus=plus)
            return True
    return False


def _fuse_gate(module: nn.Module) -> bool:
    """Fuse a feed-forward layer if it is one with a gate under SiLU."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, FusedLinear) and isinstance(up, FusedLinear) and isinstance(down, FusedLinear)):
        return False
    if not _agrees(module, gate.weight, gate.in_features, lambda x: small.gated(x, gate, up, down)):
        return False
    module.__class__ = _mixed(_FusedGate, type(module))
    return True


def _join(module: nn.Module) -> None:
    """Let the query, key and value of attention be computed together, if its code hands one tensor to all three."""
    try:
        calls = re.findall(r"self\.([qkv]_proj)\((\w+)\)", inspect.getsource(type(module).forward))
    except (OSError, TypeError):  # there is no source
        return
    layers = [getattr(module, name, None) for name, _ in calls]
    fused = [layer for layer in layers if isinstance(layer, FusedLinear)]
    if len({name for name, _ in calls}) == len(fused) == 3 and len({argument for _, argument in calls}) == 1:
        together = _Together(fused)
        for layer in fused:
            layer._together = together


@torch.inference_mode()
def _agrees(module: nn.Module, weight: Tensor, width: int, kernel: Callable[[Tensor], Tensor | None]) -> bool:
    """Whether the kernel gives a module's outputs up to rounding, on random numbers of several sizes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(len(_SCALES), 1, width, generator=draw) * torch.tensor(_SCALES)[:, None, None]
    try:
        expected = module(x.to(weight.dtype))
    except Exception:  # it takes something else
        return False
    found = kernel(x.to(weight.dtype))
    if found is None or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    if found.dtype != expected.dtype:
        return False
    found, expected = found.float(), expected.float()
    limit = _TOLERANCE[weight.dtype] * expected.abs().amax(dim=-1, keepdim=True)
    return bool(((found - expected).abs() <= limit).all())


def _mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """The module's class with another ``forward`` before its own."""
    if (mixin, kind) not in _MIXED:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _MIXED[mixin, kind] = type(f"Fused{kind.__name__}", (mixin, kind), names)
    return _MIXED[mixin, kind]
