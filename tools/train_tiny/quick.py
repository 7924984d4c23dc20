"""Recall and loss on held-out material, cheap enough to be taken during training."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from kvkeep.models.tiny.recall import Question, question

from .corpus import Corpus

KINDS = ("colour", "place", "word", "owner", "number")


@dataclass(frozen=True)
class Outcome:
    """A question and whether the model answered it exactly."""

    question: Question
    right: bool


def sentences_from(filler: Sequence[str], rng: random.Random) -> Iterable[str]:
    """Consecutive sentences from a random place on, round and round."""
    at = rng.randrange(len(filler))
    return itertools.islice(itertools.cycle(filler), at, None)


def questions(
    tokenizer: Tokenizer, filler: Sequence[str] | None, *, n: int, facts: int, tokens: int, seed: int, **options: Any
) -> list[Question]:
    """``n`` questions of all kinds in turn, their facts at evenly spread depths."""
    found = []
    kinds = options.pop("kinds", KINDS)
    for i in range(n):
        rng = random.Random(seed + i)
        found.append(
            question(
                seed + i,
                kind=kinds[i % len(kinds)],
                depth=((i * 0.6180339887) % 1.0) * 0.998 + 0.001,
                n_facts=facts,
                tokens=tokens - 4,
                filler=None if filler is None else sentences_from(filler, rng),
                count=lambda text: len(tokenizer.encode(text).ids),
                **options,
            )
        )
    return found


@torch.no_grad()
def answer_all(model: Any, tokenizer: Tokenizer, asked: Sequence[Question], *, per_batch: int = 16384) -> list[Outcome]:
    """Whether each answer and the end mark after it are what greedy decoding would give.

    The answer is fed after its prompt and every one of its tokens must be the most likely one: the same
    verdict as decoding, in one forward pass.
    """
    rows = []
    for item in asked:
        prompt = tokenizer.encode(f"<|begin|><|user|> {item.prompt}<|end|><|assistant|>").ids
        rows.append((prompt, tokenizer.encode(f" {item.answer}<|end|>").ids))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    right = [False] * len(rows)
    while order:
        size = max(1, per_batch // (len(rows[order[0]][0]) + 60))
        now, order = order[:size], order[size:]
        width = max(len(rows[i][0]) + len(rows[i][1]) for i in now)
        batch = torch.zeros(len(now), width, dtype=torch.long)
        for j, i in enumerate(now):
            batch[j, : len(rows[i][0]) + len(rows[i][1])] = torch.tensor(rows[i][0] + rows[i][1])
        hidden = model.model(input_ids=batch.to(model.device), use_cache=False).last_hidden_state
        for j, i in enumerate(now):
            start, answer = len(rows[i][0]) - 1, rows[i][1]
            best = model.lm_head(hidden[j, start : start + len(answer)]).argmax(-1)
            right[i] = best.tolist() == answer
    return [Outcome(item, ok) for item, ok in zip(asked, right, strict=True)]


def share(outcomes: Iterable[Outcome], *kinds: str) -> float:
    """Share of right answers among the questions of some kinds."""
    chosen = [o.right for o in outcomes if not kinds or o.question.kind in kinds]
    return float(np.mean(chosen)) if chosen else float("nan")


@torch.no_grad()
def text_loss(model: Any, corpus: Corpus, *, rows: int, length: int, begin: int) -> float:
    """Nats per token on running text, the first token of each row aside."""
    rng = random.Random(5)
    total = 0.0
    for _ in range(rows):
        row = torch.from_numpy(np.concatenate([[begin], corpus.row(rng, length - 1).astype(np.int64)]))[None]
        logits = model(input_ids=row.to(model.device), use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, row[0, 1:].to(model.device)).item()
    return total / rows
