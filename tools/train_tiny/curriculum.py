"""What is trained when: stages of growing length, number of facts and share of running text."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from .corpus import Corpus
from .documents import Recall, Row, Shape


@dataclass(frozen=True)
class Stage:
    """One stage: ``tokens`` of rows of ``length``, of which a share are recall documents.

    Early batches are small: finding out how to look up takes steps, not tokens. A share of the batches may be
    ``shorter``, of a half, a quarter or a sixth of the length, so that what short texts ask is not forgotten.
    The last rows are longer than the context: in rows of 2 048 tokens hardly a question is 2 000 tokens from its fact.
    """

    tokens: int
    length: int
    recall: float
    shape: Shape
    batch_tokens: int = 8192
    shorter: float = 0.0

    def drawn(self, rng: random.Random) -> Stage:
        """The stage of one batch: its length, with no more facts than have room in half of it."""
        if rng.random() >= self.shorter:
            return self
        length = self.length // rng.choice((2, 4, 6))
        low, high = self.shape.facts
        return replace(self, length=length, shape=replace(self.shape, facts=(low, min(high, length // 32))))


STAGES = (
    Stage(6_000_000, 128, 1.0, Shape((2, 5), 0.1, changes=0.1, numbers=0.3, plain=0.4, restated=0.3), 4096),
    Stage(1_200_000, 64, 1.0, Shape((2, 4), 0.0, plain=0.9, drills=0.85), 4096),
    Stage(
        3_000_000, 128, 1.0, Shape((2, 5), 0.1, changes=0.1, numbers=0.3, plain=0.3, drills=0.25, restated=0.3), 4096
    ),
    Stage(12_000_000, 256, 0.85, Shape((3, 8), 0.4, changes=0.2, plain=0.1, drills=0.05, restated=0.1), 4096),
    Stage(4_000_000, 512, 0.7, Shape((4, 16), 0.8)),
    Stage(2_700_000, 1024, 0.6, Shape((6, 20), 0.9)),
    Stage(5_000_000, 512, 0.8, Shape((3, 12), 0.5, changes=0.25), 4096),
    Stage(2_000_000, 1024, 0.7, Shape((6, 20), 0.8)),
    Stage(4_000_000, 2048, 0.6, Shape((8, 24), 0.95)),
    Stage(6_000_000, 256, 0.9, Shape((3, 8), 0.4, changes=0.5), 4096),
    Stage(6_000_000, 512, 0.8, Shape((4, 16), 0.6, changes=0.5)),
    Stage(3_000_000, 1024, 0.7, Shape((6, 20), 0.8, changes=0.4)),
    Stage(4_000_000, 2048, 0.6, Shape((8, 24), 0.95, changes=0.4)),
    Stage(5_000_000, 256, 0.95, Shape((3, 8), 0.4, changes=0.6, plain=0.05), 4096),
    Stage(5_000_000, 512, 0.85, Shape((4, 16), 0.6, changes=0.6, plain=0.05)),
    Stage(5_000_000, 512, 0.9, Shape((4, 16), 0.5, changes=0.6, plain=0.03), 4096),
    Stage(2_000_000, 1024, 0.75, Shape((6, 20), 0.8, changes=0.5, plain=0.05)),
    Stage(3_055_000, 2048, 0.65, Shape((8, 24), 0.95, changes=0.5, plain=0.05)),
    Stage(6_000_000, 512, 0.9, Shape((4, 16), 0.5, changes=0.7, plain=0.03), 4096),
    Stage(3_000_000, 1024, 0.8, Shape((6, 24), 0.7, changes=0.7, plain=0.03)),
    Stage(11_000_000, 2048, 0.75, Shape((8, 32), 0.9, changes=0.7, plain=0.03)),
    Stage(16_000_000, 3072, 0.8, Shape((8, 28), 0.95, changes=0.7, plain=0.02), 12288, shorter=0.5),
    Stage(13_000_000, 3072, 0.85, Shape((8, 28), 0.95, changes=0.8, plain=0.01), 12288, shorter=0.5),
    Stage(22_000_000, 3072, 0.9, Shape((8, 28), 0.95, changes=0.8, plain=0.01), 12288, shorter=0.5),
    Stage(16_000_000, 3072, 0.8, Shape((8, 28), 0.95, changes=0.8, plain=0.01), 12288, shorter=0.5),
)
WARM_UP = 200_000
DECAY = 0.25
"""Share of the tokens, at the end, over which the rate falls in a line."""


def total_tokens(scale: float) -> int:
    """Tokens of the whole curriculum."""
    return int(sum(stage.tokens for stage in STAGES) * scale)


def stage_at(seen: int, scale: float) -> Stage:
    """The stage that comes after ``seen`` tokens."""
    for stage in STAGES:
        if seen < stage.tokens * scale:
            return stage
        seen -= int(stage.tokens * scale)
    return STAGES[-1]


def rate_factor(seen: int, scale: float, begun: int = 0) -> float:
    """Warm-up from ``begun``, constant, linear fall: a schedule that can be prolonged at any time before the fall."""
    left = 1 - seen / total_tokens(scale)
    return max(0.02, min(1.0, (seen - begun + 50_000) / WARM_UP, left / DECAY))


class Mixture:
    """Draws batches: recall documents, novels and stories."""

    def __init__(self, recall: Recall, novels: Corpus, stories: Corpus, begin: int) -> None:
        self._recall, self._novels, self._stories, self._begin = recall, novels, stories, begin
        self._story_starts = np.flatnonzero(stories.tokens == begin)

    def batch(self, rng: random.Random, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of tokens and their weights in the loss, together ``batch_tokens`` tokens."""
        stage = stage.drawn(rng)
        rows = [self._row(rng, stage) for _ in range(max(1, stage.batch_tokens // stage.length))]
        tokens = torch.from_numpy(np.stack([row[0] for row in rows]))
        return tokens, torch.from_numpy(np.stack([row[1] for row in rows]))

    def _row(self, rng: random.Random, stage: Stage) -> Row:
        if rng.random() < stage.recall:
            return self._recall.row(rng, stage.length, stage.shape)
        if rng.random() < 0.5:
            return self._plain(self._novels.row(rng, stage.length - 1))
        start = int(rng.choice(self._story_starts[: -(stage.length // 100) - 1]))
        if rng.random() < 0.25:
            return self._recall.told(rng, self._stories.tokens[start + 1 : start + stage.length], stage.length)
        return self._plain(self._stories.tokens[start + 1 : start + stage.length])

    def _plain(self, tokens: np.ndarray) -> Row:
        row = np.concatenate([[self._begin], tokens.astype(np.int64)])
        return row, np.ones(len(row), dtype=np.float32)
