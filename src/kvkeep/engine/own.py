"""The memory of one sequence beside its slots: tables of a cascade, and layers with a state of fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import handed, state_part
from kvkeep.kv.block import Block
from kvkeep.kv.cascade import Cascade
from kvkeep.kv.memory_usage import Memory, bytes_of
from kvkeep.models.attention import Decoder
from kvkeep.models.device import device_of
from kvkeep.snapshot import Contents
from kvkeep.snapshot.contents import StateCopy, put_beside, take_beside


@dataclass(frozen=True, eq=False)
class Own:
    """Memory that belongs to one sequence and is released with it.

    Attributes:
        cascade: the tables that the layers share under a policy that prunes through them.
        states: transformers' layers with a state (state-space, convolution), by their number in the model.
    """

    cascade: Cascade | None
    states: Mapping[int, Any]

    def take(self, device: torch.device | None) -> tuple[dict[str, Tensor], dict[int, StateCopy]]:
        """Copy the memory: `Contents.shared` and `Contents.states`."""
        return take_beside(0, cascade=self.cascade, states=self.states, device=device)

    def put(self, contents: Contents, like: Block | None) -> None:
        """Overwrite the memory with that of contents that fit.

        Args:
            contents: the memory of the sequence.
            like: the block of the first layer with slots, if there is one.
        """
        put_beside(contents, like, 0, rows=1, cascade=self.cascade, states=self.states)

    def memory(self) -> Memory:
        """Bytes of the tables and the states. A full cache would hold the states, too."""
        shared = 0 if self.cascade is None else self.cascade.bytes(self.cascade.first)
        held = bytes_of(tensor for layer in self.states.values() for tensor in _tensors(layer))
        return Memory(allocated_bytes=shared + held, state_bytes=shared, full_bytes=held)


def keeps_states(model: Decoder) -> bool:
    """Whether a model has layers with a state. Such a model runs one row at a time and reads every prompt whole.

    Raises:
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """
    return bool(states_of(BoundedCache(model.config, "full", 1)))


def probed(model: Decoder) -> BoundedCache:
    """A cache that one token has gone through, which shows the shapes of every layer."""
    cache = BoundedCache(model.config, "full", 1)
    with torch.inference_mode():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device_of(model)), **handed(model, cache))
    return cache


def states_of(cache: BoundedCache) -> dict[int, Any]:
    """The layers of a cache that have a state, or the state beside a layer's slots, by their number in the model."""
    return {i: state for i, layer in enumerate(cache.layers) if (state := state_part(layer)) is not None}


def _tensors(layer: object) -> Iterator[Tensor]:
    """The tensors of a layer with a state. Some layers hold several of a kind in a dictionary."""
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else [value]
        yield from (part for part in parts if isinstance(part, Tensor))
