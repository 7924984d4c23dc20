"""How far a model has read: prompts of many tokens take long, and nothing is returned before their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvkeep.models.load import Model


@contextmanager
def watched(model: Model, on_read: Callable[[float], object]) -> Iterator[None]:
    """Call a function after each decoder layer with the number of prompt tokens that this layer stands for.

    Over all layers the numbers add up to the tokens of the prompt, padding included. Runs over one token per row are
    left out: most of them write.

    Args:
        model: a decoder.
        on_read: the function.
    """
    parts = _layers(model)

    def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        states = made if isinstance(made, Tensor) else next((one for one in made if isinstance(one, Tensor)), None)
        if states is not None and states.dim() == 3 and states.shape[1] > 1:
            on_read(states.shape[0] * states.shape[1] / len(parts))

    handles = [part.register_forward_hook(hook) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: Model) -> Sequence[nn.Module]:
    """The decoder layers; without a list of the right length, nothing."""
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    return next((list(part) for part in lists if len(part) == count), [])
