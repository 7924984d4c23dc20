"""The harm of taking the far past from some heads: answers that are lost, and the distance from the full cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.calibration.limited import Near, Passage, read
from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.evals import metrics
from kvkeep.evals.drive import BATCH_TOKENS

HARM = 0.01
"""Share of an answer's probability whose loss counts as harm."""

Head: TypeAlias = tuple[int, int]
"""A layer's number in the model, and a KV head of it."""


@dataclass(frozen=True)
class Loss:
    """The harm of limiting some heads.

    Attributes:
        harmed: share of the answers that lose more than `HARM` of their probability; ``None`` if the model knows none.
            A head that is needed harms many of them a little, and chance harms few of them much.
        answers: share of the answers' probability that is lost: ``1 - p / p_full``, at least 0, mean over questions.
        text: KL divergence of the next-token distribution from that of the full cache, in nats, mean over tokens.
    """

    harmed: float | None
    answers: float | None
    text: float


@dataclass(eq=False)
class Bench:
    """Measures losses on some passages.

    Args:
        model: the model, attached and in evaluation mode.
        near: what a limited head sees.
        asked: passages that end with answers.
        texts: passages of running text.

    Attributes:
        heads: layer → number of KV heads, of all layers with keys.
    """

    model: Any
    near: Near
    asked: Sequence[Passage]
    texts: Sequence[Passage]
    heads: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Run the full cache.

        Raises:
            UnsupportedModelError: the layers differ in their number of heads.
            InputError: the model's probabilities are NaN.
        """
        self._answers: list[Float[Tensor, "1 questions"]] = []
        self._texts: list[Float[Tensor, "targets V"]] = []
        for passage in self.asked:
            logits, self.heads = read(self.model, passage, self.near)
            self._answers.append(_log_probabilities(passage, logits))
        for passage in self.texts:
            (rows,), self.heads = read(self.model, passage, self.near)
            self._texts.append(rows[0])
        if any(bool(found.isnan().any()) for found in (*self._answers, *self._texts)):
            raise InputError(
                "The model's next-token probabilities are no numbers on these texts, so no head can be compared. Try "
                "another dtype (float16 overflows first), or look whether the weights are damaged."
            )
        if len(set(self.heads.values())) != 1:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has layers of these numbers of KV heads: "
                f"{sorted(set(self.heads.values()))}. A profile needs the same number in all layers."
            )

    @property
    def questions(self) -> int:
        """Number of questions that the model answers right under the full cache."""
        return sum(len(passage.branches) for passage in self.asked)

    def losses(self, sets: Sequence[Collection[Head]]) -> list[Loss]:
        """The loss of each set of heads, limited together; each set is a row of a batch.

        Raises:
            InputError: the device's memory is too small.
        """
        longest = max(len(passage.ids) for passage in (*self.asked, *self.texts))
        size = max(1, BATCH_TOKENS // longest)
        return [loss for at in range(0, len(sets), size) for loss in self._batch(sets[at : at + size])]

    def _batch(self, sets: Sequence[Collection[Head]]) -> list[Loss]:
        limited = {
            layer: torch.tensor([[(layer, head) in chosen for head in range(n)] for chosen in sets])
            for layer, n in self.heads.items()
        }
        lost, distance = [torch.zeros(len(sets), 0)], torch.zeros(len(sets))
        for passage, full in zip(self.asked, self._answers, strict=True):
            logits, _ = read(self.model, passage, self.near, limited)
            lost.append((1 - (_log_probabilities(passage, logits) - full).exp()).clamp(min=0).cpu())
        for passage, reference in zip(self.texts, self._texts, strict=True):
            (rows,), _ = read(self.model, passage, self.near, limited)
            distance += torch.stack([metrics.kl(reference, row).mean() for row in rows]).cpu() / len(self.texts)
        shares, none = torch.cat(lost, dim=1).double(), [None] * len(sets)
        harmed = (shares > HARM).double().mean(dim=1).tolist() if self.questions else none
        answers = shares.mean(dim=1).tolist() if self.questions else none
        return [Loss(*three) for three in zip(harmed, answers, distance.tolist(), strict=True)]


def _log_probabilities(passage: Passage, logits: Sequence[Float[Tensor, "B _ V"]]) -> Float[Tensor, "B questions"]:
    """The log-probability of each answer, the sum over its tokens."""
    found = []
    for part, columns in zip(logits, passage.columns(), strict=True):
        targets = passage.ids[columns + 1].to(part.device).expand(len(part), -1)
        found.append(-metrics.nll(part, targets).sum(dim=1))
    return torch.stack(found, dim=1)
