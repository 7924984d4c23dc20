"""The log-probabilities of a prompt's own tokens, noted while the prompt is read."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from kvkeep.engine.batch import Batch, Run
from kvkeep.engine.generation import Generation
from kvkeep.engine.request import Logprob
from kvkeep.engine.sampler import logprob

_AT_ONCE = 64
"""Tokens whose logits are copied and normalised together."""


def is_scored(run: Run) -> bool:
    """Whether a run needs the logits after all of its tokens."""
    return run.reads and any(one.scored for one in run.requests)


def score(run: Run, logits: Float[Tensor, "n T V"]) -> None:
    """Note the log-probabilities of the prompts' tokens that follow the tokens of a run; call it before the commit.

    Args:
        run: the run.
        logits: after all tokens, batch after batch. Several batches are one sequence, see `Runner`.
    """
    flat, start = logits.flatten(0, 1), 0
    for batch in run.batches:
        width = max(map(len, batch.tokens))
        for place, (one, tokens) in enumerate(zip(batch.rows, batch.tokens, strict=True)):
            if one is not None and one.scored and one.prompt_left:
                end = start + (place + 1) * width
                one.prompt_logprobs += _scores(one, flat[end - len(tokens) : end])
        start += _size(batch, width)


def _size(batch: Batch, width: int) -> int:
    """Return the number of a batch's tokens, padding included."""
    return len(batch.rows) * width


def _scores(one: Generation, logits: Float[Tensor, "T V"]) -> Iterator[Logprob]:
    """Yield the log-probability of each prompt token that follows one of the tokens that are fed."""
    follow = one.prompt[one.fed + 1 : one.fed + 1 + len(logits)]
    for at in range(0, len(follow), _AT_ONCE):
        part = follow[at : at + _AT_ONCE]
        logp = logits[at : at + len(part)].float().log_softmax(dim=-1)
        yield from (
            logprob(row, token, one.request.prompt_logprobs or 0) for row, token in zip(logp, part, strict=True)
        )
