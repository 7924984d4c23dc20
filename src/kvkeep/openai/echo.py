"""Completions that begin with their prompts, with the log-probabilities of the prompts' tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvkeep.engine.request import Result
from kvkeep.openai.answers import LEAST, Show, columns


def echoed(
    choice: dict[str, Any], prompt: str, ids: Sequence[int], result: Result, show: Show | None
) -> dict[str, Any]:
    """A choice of a completion after its prompt.

    Args:
        choice: the choice.
        prompt: the prompt's text.
        ids: the prompt's tokens.
        result: the request's result.
        show: returns the text of a token; ``None`` if no log-probabilities are asked for.
    """
    text = prompt + choice["text"]
    if show is None:
        return {**choice, "text": text}
    before = [None, *ids]
    pieces = [show(earlier, token) for earlier, token in zip(before, ids, strict=False)]
    values: list[float | None] = [None, *(max(one.value, LEAST) for one in result.prompt_logprobs)]
    tops: list[dict[str, float] | None] = [None]
    for earlier, one in zip(ids, result.prompt_logprobs, strict=False):
        tops.append({show(earlier, token): max(value, LEAST) for token, value in one.top})
    new = columns(result, show, whole=True)
    tokens = [*pieces, *new["tokens"]]
    found = {
        "tokens": tokens,
        "token_logprobs": [*values, *new["token_logprobs"]],
        "top_logprobs": [*tops, *new["top_logprobs"]],
        "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)),
    }
    return {**choice, "text": text, "logprobs": found}
