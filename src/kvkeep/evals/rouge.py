"""ROUGE with stemming, as papers report it; the only module that knows rouge-score."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kvkeep.errors import InputError, pip_install

KINDS = ("rouge1", "rouge2", "rougeL")


def check() -> None:
    """Refuse to go on without rouge-score.

    Raises:
        InputError: the package is missing.
    """
    if find_spec("rouge_score") is None:
        raise InputError(f"rouge-score is not installed, by which summaries are graded: {pip_install('summaries')}.")


def scores(replies: Sequence[str], answers: Sequence[str]) -> dict[str, list[float]]:
    """F1 of each reply, by kind of ROUGE.

    Raises:
        InputError: rouge-score is missing.
    """
    check()
    scorer: Any = import_module("rouge_score.rouge_scorer").RougeScorer(list(KINDS), use_stemmer=True)
    found = [scorer.score(answer, reply) for reply, answer in zip(replies, answers, strict=True)]
    return {kind: [float(one[kind].fmeasure) for one in found] for kind in KINDS}
