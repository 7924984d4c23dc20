"""Gradients on several cores: replicas that share their weights, each on a thread of its own.

Small matrices leave PyTorch's own threads waiting for each other, and a core that is busy with something else
holds all of them up. Here every thread takes the next piece of the batch when it is done with its last.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .model import losses


class Replicas:
    """Computes the gradients of a batch, piece by piece, and leaves their sum in the model."""

    def __init__(self, model: Any, *, threads: int, piece_tokens: int) -> None:
        self._model = model
        self._piece_tokens = piece_tokens
        self._free: SimpleQueue[Any] = SimpleQueue()
        self._replicas = [model, *(_alias(model) for _ in range(threads - 1))]
        for replica in self._replicas:
            self._free.put(replica)
        one_thread = (lambda: torch.set_num_threads(1)) if threads > 1 else None
        self._pool = ThreadPoolExecutor(threads, initializer=one_thread)

    def gradients(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Loss of every token but the first of each row; the gradient of the weighted mean is in the model."""
        size = max(1, self._piece_tokens // rows.shape[1])
        total = weights[:, 1:].sum()
        pieces = zip(rows.split(size), (weights / total).split(size), strict=True)
        each = torch.cat(list(self._pool.map(self._piece, pieces)))
        for parameter, *others in zip(*(r.parameters() for r in self._replicas), strict=True):
            for other in others:
                if other.grad is not None:
                    parameter.grad = other.grad if parameter.grad is None else parameter.grad + other.grad
                    other.grad = None
        return each

    def _piece(self, piece: tuple[Tensor, Tensor]) -> Tensor:
        replica = self._free.get()
        try:
            loss, each = losses(replica, *piece)
            loss.backward()
        finally:
            self._free.put(replica)
        return each


def _alias(model: Any) -> Any:
    """A copy of the model whose weights are the same memory; only the gradients are its own."""
    replica = copy.deepcopy(model)
    for mine, theirs in zip(replica.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    return replica
