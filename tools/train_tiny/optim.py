"""Muon for the hidden matrices, Adam for embeddings and norms, with float32 weights and their average.

The model itself is bfloat16; the weights that are updated live here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: Newton-Schulz iteration on a stack (N, rows, columns).

    Coefficients of Keller Jordan's Muon, which trade exactness for speed: singular values end in 0.7 to 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Optimizer:
    """Muon and Adam in one: ``step`` takes the learning-rate factor of the schedule."""

    muon_rate = 0.01
    muon_decay = 0.01
    momentum = 0.95
    adam_rate = 2e-3
    betas = (0.9, 0.95)

    def __init__(self, model: torch.nn.Module, *, average: float = 0.99) -> None:
        self._parameters = dict(model.named_parameters())
        self._average_rate = average
        self.weights = {n: p.detach().float().clone() for n, p in self._parameters.items()}
        self.average = {n: w.clone() for n, w in self.weights.items()}
        self.first = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.second = {n: torch.zeros_like(w) for n, w in self.weights.items() if not self._is_hidden(n)}
        self.steps = 0

    def _is_hidden(self, name: str) -> bool:
        return self._parameters[name].ndim == 2 and "embed" not in name

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update the weights from the gradients, write them into the model and clear the gradients."""
        self.steps += 1
        self._muon(factor)
        self._adam(factor)
        rate = min(self._average_rate, 1 - 1 / (1 + self.steps))
        for name, parameter in self._parameters.items():
            self.average[name].lerp_(self.weights[name], 1 - rate)
            parameter.copy_(self.weights[name])
            parameter.grad = None

    def _muon(self, factor: float) -> None:
        by_shape: dict[torch.Size, list[str]] = defaultdict(list)
        for name, parameter in self._parameters.items():
            if self._is_hidden(name):
                by_shape[parameter.shape].append(name)
        for shape, names in by_shape.items():
            moved = []
            for name in names:
                grad = self._parameters[name].grad.float()
                self.first[name].lerp_(grad, 1 - self.momentum)
                moved.append(grad.lerp(self.first[name], self.momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for name, update in zip(names, orthogonalise(torch.stack(moved)).float(), strict=True):
                self.weights[name].mul_(1 - factor * self.muon_rate * self.muon_decay)
                self.weights[name].add_(update, alpha=-factor * self.muon_rate * scale)

    def _adam(self, factor: float) -> None:
        for name, second in self.second.items():
            grad = self._parameters[name].grad.float()
            self.first[name].lerp_(grad, 1 - self.betas[0])
            second.lerp_(grad.square(), 1 - self.betas[1])
            first = self.first[name] / (1 - self.betas[0] ** self.steps)
            root = (second / (1 - self.betas[1] ** self.steps)).sqrt().add_(1e-10)
            self.weights[name].addcdiv_(first, root, value=-factor * self.adam_rate)

    def state(self) -> dict[str, object]:
        """Everything needed to go on."""
        return {
            "weights": self.weights,
            "average": self.average,
            "first": self.first,
            "second": self.second,
            "steps": self.steps,
        }

    @torch.no_grad()
    def load(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        for key in ("weights", "average", "first", "second"):
            for name, tensor in state[key].items():
                getattr(self, key)[name].copy_(tensor)
        self.steps = state["steps"]
        for name, parameter in self._parameters.items():
            parameter.copy_(self.weights[name])

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[None]:
        """For a while, the model has the running average of its weights, which is ahead of the weights."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.average[name])
        yield
        for name, parameter in self._parameters.items():
            parameter.copy_(self.weights[name])
