"""Finds a model's MLP blocks while it runs, for any model family.

Modules are identified by the tensors that they pass to each other. The block is the child of a decoder layer with an
activation function in it. The input of the norm in front of the block is the residual stream. The output of the norm
behind it, or of the block itself without such a norm, is the block's contribution. Both are checked: they must add up
to the layer's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep_lab.analysis.measure import Mlp

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_TOLERANCE = 0.02
"""Relative difference that rounding of half-precision sums may cause."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its first input and its output."""

    module: nn.Module
    given: Tensor
    made: Tensor


@dataclass(eq=False)
class CallTrace:
    """The calls inside one decoder layer since it was entered.

    Attributes:
        children: calls of the layer's direct children, in order.
        activations: calls of activation functions, in order.
    """

    children: list[Call] = field(default_factory=list)
    activations: list[Call] = field(default_factory=list)


class NotUnderstood(Exception):  # noqa: N818  a finding, not an error
    """Raised for a layer whose MLP block cannot be identified, with the reason as a sentence."""


class Watched:
    """A context in which the MLP blocks of a model are shown as they run.

    Args:
        model: the model.
        numbers: decoder layers to watch: number in the model → `Mlp.layer`.
        take: called with each block.
        refuse: called with the reason if a layer's block cannot be identified.
    """

    def __init__(
        self,
        model: nn.Module,
        numbers: Mapping[int, int],
        take: Callable[[Mlp], object],
        refuse: Callable[[str], object] = lambda reason: None,
    ):
        self._model, self._numbers, self._take, self._refuse = model, numbers, take, refuse
        self._handles: list[Any] = []

    def __enter__(self) -> Watched:
        if self._numbers:
            layers = decoder_layers(self._model)
            if layers is None:
                self._refuse("the model's list of decoder layers was not found")
            else:
                for index, number in self._numbers.items():
                    self._handles += _watch(layers[index], _Layer(number, self._take, self._refuse))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(eq=False)
class _Layer:
    """A watched decoder layer."""

    number: int
    take: Callable[[Mlp], object]
    refuse: Callable[[str], object]
    seen: int = 0
    trace: CallTrace = field(default_factory=CallTrace)

    def finish(self, made: Tensor) -> None:
        """Show the layer's block and forget the trace; called when the layer returns."""
        trace, self.trace = self.trace, CallTrace()
        try:
            residual, output = find_block(trace, made)
        except NotUnderstood as reason:
            self.refuse(str(reason))
            return
        rows = residual.reshape(-1, residual.shape[-1]).float().cpu()
        added = output.reshape(-1, output.shape[-1]).float().cpu()
        self.take(Mlp(self.number, self.seen, rows, added, _units(trace, len(rows))))
        self.seen += len(rows)


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """Return the list of decoder layers: of the lists with the right length, the one with the most parameters.

    ``None`` if no list has that length.
    """
    config: Any = model.config
    wanted: int = config.get_text_config(decoder=True).num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=None)


def find_block(trace: CallTrace, made: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual stream that enters a layer's MLP block, before its norm, and the block's contribution to it.

    Args:
        trace: the calls inside the layer.
        made: the layer's own output.

    Raises:
        NotUnderstood: there is no such block, or the two do not explain the layer's output.
    """
    given, output = _ends(trace)
    residual = next((c.given for c in trace.children if c.made is given and c.given is not given), given)
    output = next((c.made for c in trace.children if c.given is output and c.made is not output), output)
    rest = made.reshape(residual.shape) - residual - output
    others = [c.made.reshape(rest.shape) for c in trace.children if c.made.numel() == rest.numel()]
    if not any(_close(rest, other, made) for other in (torch.zeros_like(rest), *others)):
        raise NotUnderstood("a layer's output is not the sum of its input and its blocks")
    return residual, output


def _ends(trace: CallTrace) -> tuple[Tensor, Tensor]:
    """Return input and output of the block itself."""
    for call in reversed(trace.children):
        if is_activation(call.module):
            return _around(trace, call)
        if any(map(is_activation, call.module.modules())):
            return call.given, call.made
    raise NotUnderstood("its layers have no MLP block with an activation function of its own")


def _around(trace: CallTrace, activation: Call) -> tuple[Tensor, Tensor]:
    """Return input and output of a block whose two projections are direct children of the layer."""
    given = [call.given for call in trace.children if call.made is activation.given]
    made = [call.made for call in trace.children if call.given is activation.made]
    if not given or not made:
        raise NotUnderstood("the projections around a layer's activation function were not found")
    return given[-1], made[-1]


def _close(one: Tensor, other: Tensor, scale: Tensor) -> bool:
    return bool((one - other).float().norm() <= _TOLERANCE * scale.float().norm())


def _units(trace: CallTrace, rows: int) -> Tensor | None:
    """Return the activations, if one function saw every token exactly once; otherwise ``None``."""
    if len(trace.activations) != 1:
        return None
    made = trace.activations[0].made
    units = made.reshape(-1, made.shape[-1])
    return units.float().cpu() if len(units) == rows else None


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an activation function of torch or transformers, without weights of its own.

    A softmax does not count.
    """
    kind = type(module)
    return kind.__module__.startswith(_ACTIVATIONS) and "Softmax" not in kind.__name__ and not list(module.parameters())


def _watch(module: nn.Module, layer: _Layer) -> Iterator[Any]:
    """Hook a decoder layer, its children and the activation functions in it; yield the handles."""
    for child in module.children():
        yield _on_call(child, lambda call: layer.trace.children.append(call))
    for below in module.modules():
        if is_activation(below):
            yield _on_call(below, lambda call: layer.trace.activations.append(call))
    yield _on_call(module, lambda call: layer.finish(call.made))


def _on_call(module: nn.Module, then: Callable[[Call], object]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        first = made[0] if isinstance(made, tuple) else made
        if given is not None and isinstance(first, Tensor):
            then(Call(module, given, first))

    return module.register_forward_hook(hook, with_kwargs=True)
