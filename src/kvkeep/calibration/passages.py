"""The passages of a calibration: texts with planted facts and questions about them, and windows of the user's text.

A model's own answers under the full cache are its targets, so neither its tokenizer nor its way to answer matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.calibration.limited import Passage
from kvkeep.evals import texts
from kvkeep.evals.asking import NEW_TOKENS, Prompted, ask, right, wording_of
from kvkeep.evals.drive import Drive, batches, left_padded
from kvkeep.evals.replies import decode_greedily
from kvkeep.evals.task import Options
from kvkeep.models.load import Checkpoint, ends_of
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse

TAIL = 128
"""Last tokens of a window of text whose predictions are compared."""

FACTS = 16
"""Facts of a text."""


def documents(checkpoint: Checkpoint, *, n: int, questions: int, tokens: int, seed: int) -> list[list[Prompted]]:
    """The questions about each of some texts of about ``tokens`` tokens.

    Raises:
        InputError: the facts alone are longer.
    """
    if not n:
        return []
    options = Options(seed=seed, facts=FACTS, ask="later", contexts=(tokens,))
    asked = ask(checkpoint, options, tokens, n * questions, documents=n)
    return [list(group) for _, group in groupby(asked, key=lambda one: one.document)]


def answered(writer: Writer, asked: Sequence[Prompted], *, together: bool) -> list[Passage]:
    """The questions about a text that the model answers right under the full cache, each followed by its answer.

    Args:
        writer: the model.
        asked: the questions.
        together: whether all questions share one passage. A model with layers that have a state needs one for each.
    """
    replies, wording = _replies(writer, asked), wording_of(writer.checkpoint)
    known = [
        (one.ids, torch.tensor(reply))
        for one, reply in zip(asked, replies, strict=True)
        if reply and right(wording, one.question, writer.text_of(reply))
    ]
    if not together:
        return [_passage([one], len(one[0]) - 1) for one in known]
    return [_passage(known, asked[0].first)] if known else []


def _passage(known: Sequence[tuple[Int[Tensor, "_"], Int[Tensor, "_"]]], stem: int) -> Passage:
    branches = [torch.cat([prompt[stem:], reply]) for prompt, reply in known]
    return Passage(
        torch.cat([known[0][0][:stem], *branches]),
        stem,
        tuple(map(len, branches)),
        tuple(len(reply) for _, reply in known),
    )


def _replies(writer: Writer, asked: Sequence[Prompted]) -> list[list[int]]:
    """The model's greedy replies under the full cache, without the token that ends them."""
    ends = ends_of(writer.model)
    most = NEW_TOKENS[wording_of(writer.checkpoint)]
    replies: list[list[int]] = []
    for at in batches([len(one.ids) for one in asked]):
        prompts = [one.ids for one in asked[at]]
        drive = Drive(writer, parse("full"), [max(map(len, prompts)) + most] * len(prompts))
        logits = drive.feed(*left_padded(prompts), last_only=True)
        replies += decode_greedily(drive, logits, most, ends)
    return [[token for token in reply if token not in ends] for reply in replies]


def windows(checkpoint: Checkpoint, text: str | None, *, n: int, tokens: int, seed: int) -> list[Passage]:
    """Windows of a text, or of the package's own sentences, whose last tokens are the targets.

    Raises:
        InputError: the text is too short.
    """
    rows = texts.windows(checkpoint, Options(text=text, seed=seed), rows=n, length=tokens)
    return [Passage(row, len(row), (), (min(TAIL, len(row) - 1),)) for row in rows]
