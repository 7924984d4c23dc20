"""Counts of n-grams: Self-BLEU, distinct n-grams, repetition. Texts are sequences of token ids.

BLEU as Papineni et al. (2002) define it: the geometric mean of the clipped precisions of orders 1 to N with equal
weights, times the brevity penalty against the reference whose length is closest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Text = Sequence[int]
Counts = Counter[tuple[int, ...]]

EPSILON = 0.1
"""What smoothing (method 1 of Chen and Cherry, 2014) takes for a count of 0."""


def ngrams(text: Text, n: int) -> Counts:
    """How often each run of ``n`` tokens occurs."""
    return Counter(tuple(text[start : start + n]) for start in range(len(text) - n + 1))


def bleu(text: Text, references: Sequence[Text], order: int, *, smooth: bool) -> float:
    """BLEU of a text against references, in [0, 1].

    Args:
        text: what is judged.
        references: what it is compared with.
        order: longest n-grams that count.
        smooth: put `EPSILON` in the place of a count of 0; otherwise one such order makes the whole 0.
    """
    total = 0.0
    for n in range(1, order + 1):
        own = ngrams(text, n)
        most: Counts = Counter()
        for reference in references:
            most |= ngrams(reference, n)  # the largest count in any one reference
        found = float(sum((own & most).values()))
        if not own or (found == 0 and not smooth):
            return 0.0
        total += math.log((found or EPSILON) / sum(own.values()))
    return _brevity(len(text), [len(reference) for reference in references]) * math.exp(total / order)


def _brevity(length: int, others: Sequence[int]) -> float:
    """1 for a text at least as long as the reference whose length is closest (of two, the shorter)."""
    closest = min(others, key=lambda other: (abs(other - length), other))
    return 1.0 if length >= closest else math.exp(1 - closest / length)


def self_bleu(texts: Sequence[Text], order: int, *, smooth: bool) -> list[float]:
    """BLEU of each text against all others; their mean is Self-BLEU, low for texts that differ."""
    return [bleu(text, [*texts[:i], *texts[i + 1 :]], order, smooth=smooth) for i, text in enumerate(texts)]


def distinct(texts: Sequence[Text], n: int) -> float:
    """Different n-grams per n-gram, over all texts together; 1 if none occurs twice."""
    total: Counts = Counter()
    for text in texts:
        total += ngrams(text, n)
    return len(total) / max(1, sum(total.values()))


def repeated(text: Text, n: int) -> float:
    """Share of a text's n-grams that occurred in it before."""
    counts = ngrams(text, n)
    return 1 - len(counts) / sum(counts.values()) if counts else 0.0
