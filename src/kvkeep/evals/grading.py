"""How replies are graded: the metrics of RULER and LongBench, ROUGE, and diversity. Every score is in [0, 1]."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

from kvkeep.errors import InputError, pip_install

Grade = Callable[[str, Sequence[str], Sequence[str]], float]
"""Grades a reply, given the right answers and all classes."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def overlap(found: Counter[object], wanted: Counter[object]) -> float:
    """Return F1 of two bags of items: the harmonic mean of precision and recall."""
    common = (found & wanted).total()
    return 2 * common / (found.total() + wanted.total()) if common else 0.0


def f1(reply: str, answer: str) -> float:
    """Return F1 over words, as in SQuAD."""
    return overlap(Counter(words_of(reply)), Counter(words_of(answer)))


def exact(reply: str, answer: str) -> float:
    """Return 1 if reply and answer have the same words, else 0."""
    return float(words_of(reply) == words_of(answer))


def contains_all(reply: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that the reply contains, letter case aside (RULER)."""
    return sum(answer.lower() in reply.lower() for answer in answers) / len(answers)


def contains_any(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the reply contains one of the answers, letter case aside, else 0 (RULER's questions)."""
    return float(any(answer.lower() in reply.lower() for answer in answers))


def tokens_of(text: str) -> list[str]:
    """Return the words and numbers of a text in lower case, as rouge-score splits it."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge_n(reply: str, answer: str, n: int) -> float:
    """Return ROUGE-N: F1 over runs of ``n`` words, without stemming."""
    return overlap(Counter(_runs(tokens_of(reply), n)), Counter(_runs(tokens_of(answer), n)))


def rouge_l(reply: str, answer: str) -> float:
    """Return ROUGE-L: F1 of the longest common subsequence of words, without stemming."""
    one, other = tokens_of(reply), tokens_of(answer)
    common = _common(one, other)
    return 2 * common / (len(one) + len(other)) if common else 0.0


def rouge_l_of_sentences(reply: str, answer: str) -> float:
    """Return ROUGE-L as LongBench's authors compute it, with the package rouge 1.0.1.

    Texts are split at full stops, and sentences at white space; letter case and other punctuation stay. F1 counts
    different words: those of the longest common subsequences of any two sentences, taken together, against all words
    of each text.
    """
    own, right = _sentences(reply), _sentences(answer)
    found = {word for answer in right for other in own for word in _common_words(answer, other)}
    recall, precision = (len(found) / len({*chain(*said)}) if said else 0.0 for said in (right, own))
    return 2 * precision * recall / (precision + recall + 1e-8)  # 1e-8 as in the package rouge


def _sentences(text: str) -> list[list[str]]:
    """Return the sentences of a text, each as its words; a sentence of white space is a single empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_words(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return a longest common subsequence of words, its last word first.

    Among several ones it is that which drops ``other``'s end first.
    """
    lengths = [[0] * (len(other) + 1)]
    for word in one:
        before, row = lengths[-1], [0]
        for j, there in enumerate(other):
            row.append(before[j] + 1 if word == there else max(row[j], before[j + 1]))
        lengths.append(row)
    i, j, found = len(one), len(other), []
    while i and j:
        if one[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            found.append(one[i])
        # ties go as in the package rouge: the union of subsequences depends on them
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _runs(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return all runs of ``n`` words in a row."""
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common subsequence, whose items need not be neighbours."""
    before = [0] * (len(other) + 1)
    for item in one:
        row = [0]
        for j, there in enumerate(other):
            row.append(before[j] + 1 if item == there else max(row[j], before[j + 1]))
        before = row
    return before[-1]


def count(reply: str, answer: str) -> float:
    """Return the share of the numbers in a reply that equal the answer; 0 without a number."""
    numbers = re.findall(r"\d+", reply)
    return numbers.count(answer.strip()) / len(numbers) if numbers else 0.0


def retrieval(reply: str, answer: str) -> float:
    """Return the share of the numbers in a reply that equal the answer's, as in ``Paragraph 7``; 0 without such a
    number.
    """
    number = re.search(r"Paragraph (\d+)", answer)
    return count(reply, number.group(1)) if number else 0.0


def code_similarity(reply: str, answer: str) -> float:
    """Return how alike the answer and the reply's first line of code are: 1 − indel distance / both lengths.

    The result is rounded to whole percent. A line with a backtick, ``#`` or ``//`` is a mark or a comment, not code.
    """
    # lines are chosen, and the result rounded, as LongBench's authors do
    lines = reply.lstrip("\n").split("\n")
    line = next((text for text in lines if not ("`" in text or "#" in text or "//" in text)), "")
    if line == answer:  # both may be empty, and have no lengths to divide by
        return 1.0
    return round(100 * 2 * _common(line, answer) / (len(line) + len(answer))) / 100


def classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 divided by the number of classes that a reply names; 0 if the right class is not among them.

    A class whose name is a part of the right one's does not count: a reply with the right name has it, too.
    """
    named = [name for name in classes if name in reply and not (name in answer and name != answer)]
    return 1 / len(named) if answer in named else 0.0


def best(grade: Callable[[str, str], float], reply: str, answers: Sequence[str]) -> float:
    """Return the best grade of a reply over several right answers."""
    return max((grade(reply, answer) for answer in answers), default=0.0)


# -- diversity ---------------------------------------------------------------------------------------------------------


def distinct(texts: Sequence[Sequence[object]], n: int) -> float:
    """Return the share of distinct runs of ``n`` tokens in all texts together; 0 without such a run."""
    runs = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(runs)) / len(runs) if runs else 0.0


def repeated(text: Sequence[object], n: int) -> float:
    """Return the share of runs of ``n`` tokens in a text that occurred in it before."""
    return 1 - distinct([text], n) if len(text) >= n else 0.0


def self_bleu(texts: Sequence[Sequence[object]], order: int, smoothing: float = 0.1) -> float:
    """Return the mean BLEU of each text with all others as references; low values mean diverse texts.

    Args:
        texts: two texts or more, as tokens.
        order: the longest runs that are compared, all with equal weights.
        smoothing: counts that are 0 become this (method 1 of Chen and Cherry, 2014); 0 leaves them.
    """
    scores = [
        bleu(text, [other for j, other in enumerate(texts) if j != i], order, smoothing) for i, text in enumerate(texts)
    ]
    return sum(scores) / len(scores)


def bleu(text: Sequence[object], references: Sequence[Sequence[object]], order: int, smoothing: float = 0.1) -> float:
    """Return BLEU of a text: the geometric mean of its clipped n-gram precisions, with the brevity penalty.

    Return 0 without a text or references. ``order`` and ``smoothing`` are as in `self_bleu`.
    """
    if not text or not references:
        return 0.0
    logs = 0.0
    for n in range(1, order + 1):
        own = Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
        most: Counter[tuple[object, ...]] = Counter()
        for other in references:
            most |= Counter(tuple(other[i : i + n]) for i in range(len(other) - n + 1))
        matched = (own & most).total() or smoothing
        if not matched:
            return 0.0
        logs += math.log(matched / max(1, own.total())) / order  # a short text has no long runs
    closest = min((len(other) for other in references), key=lambda length: (abs(length - len(text)), length))
    return math.exp(logs) * (1.0 if len(text) > closest else math.exp(1 - closest / len(text)))


# ROUGE with stemming, as papers report it; the only module that knows rouge-score.

KINDS = ("rouge1", "rouge2", "rougeL")


def check() -> None:
    """Refuse to go on if the package rouge-score is missing.

    Raises:
        InputError: the package is missing.
    """
    if find_spec("rouge_score") is None:
        raise InputError(f"rouge-score is not installed, by which summaries are graded: {pip_install('summaries')}.")


def scores(replies: Sequence[str], answers: Sequence[str]) -> dict[str, list[float]]:
    """Return F1 of each reply to the answer of the same place: kind of ROUGE (`KINDS`), with stemming → one per reply.

    Raises:
        InputError: rouge-score is missing.
    """
    check()
    scorer: Any = import_module("rouge_score.rouge_scorer").RougeScorer(list(KINDS), use_stemmer=True)
    found = [scorer.score(answer, reply) for reply, answer in zip(replies, answers, strict=True)]
    return {kind: [float(score[kind].fmeasure) for score in found] for kind in KINDS}
