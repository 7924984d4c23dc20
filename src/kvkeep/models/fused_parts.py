"""Modules whose work for a few rows is one call of the native kernel, and the trial that finds out which may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from kvkeep.backends import small

SCALES = (0.001, 1.0, 3.0, 10.0, 30.0)
"""Sizes of the random numbers of a trial."""

LARGE = 100.0
"""The largest output of a linear layer in a trial: models that limit theirs do so at 7 to 20."""

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of the largest number of a row, by dtype."""

_MIXED: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class Together:
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

    _together: Together | None = None

    def forward(self, input: Float[Tensor, "*n in"]) -> Float[Tensor, "*n out"]:  # noqa: A002  # torch's name
        """The product with the weights, plus the bias."""
        if self._together is not None and (out := self._together.output(self, input)) is not None:
            return out
        found = small.products(input, (self,))
        if found is not None:
            return found[0]
        wide = small.widened(input, self)
        return super().forward(input) if wide is None else wide


class FusedGate(nn.Module):
    """Mixed into a feed-forward layer with a gate: one call for its three products."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        out, parts = None, (self.gate_proj, self.up_proj, self.down_proj)
        whole = all(map(is_bare, parts)) and not any(map(is_heard, self.children()))
        if len(args) == 1 and not (kwargs or self.training) and whole:  # in training it may drop some of its output
            out = small.gated(args[0], *parts)
        return super().forward(*args, **kwargs) if out is None else out


class FusedNorm(nn.Module):
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


def is_bare(layer: nn.Module) -> bool:
    """Whether nobody has replaced a fused layer, or wants to see its calls, since it was fused."""
    return type(layer) is FusedLinear and not is_heard(layer)


def is_heard(module: nn.Module) -> bool:
    """Whether a module's calls have a hook, or another ``forward``."""
    own = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(own or _global_forward_hooks or _global_forward_pre_hooks)


@torch.inference_mode()
def agrees(
    module: nn.Module,
    weight: Tensor,
    width: int,
    kernel: Callable[[Tensor], Tensor | None],
    reach: Sequence[nn.Linear] = (),
) -> bool:
    """Whether the kernel gives a module's outputs up to rounding, on random numbers of several sizes.

    One of the sizes makes the outputs of the layers in ``reach`` so large that limits on them would show.
    """
    draw, scales = torch.Generator().manual_seed(0), torch.tensor(SCALES)
    x = torch.randn(len(SCALES) + len(reach), 1, width, generator=draw)
    for layer, row in zip(reach, x[len(SCALES) :], strict=True):
        most = layer(row.to(weight.dtype)).abs().max().float()
        scales = torch.cat((scales, (LARGE / most)[None]))
    x = x * scales[:, None, None]
    try:
        expected = module(x.to(weight.dtype))
    except Exception:  # it takes something else
        return False
    found = kernel(x.to(weight.dtype))
    return found is not None and is_close(found, expected)


def is_close(found: Tensor, expected: object) -> bool:
    """Whether a tensor is another one up to the rounding of its dtype."""
    if not isinstance(expected, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    limit = TOLERANCE[found.dtype] * expected.float().abs().amax(dim=-1, keepdim=True)
    return bool(((found.float() - expected.float()).abs() <= limit).all())


def mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """The module's class with another ``forward`` before its own."""
    if (mixin, kind) not in _MIXED:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _MIXED[mixin, kind] = type(f"Fused{kind.__name__}", (mixin, kind), names)
    return _MIXED[mixin, kind]
