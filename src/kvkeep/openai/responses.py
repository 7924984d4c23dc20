"""Bodies of answers and errors as OpenAI's API sends them, made of results; no model and no file is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from kvkeep.engine.request import Logprob, Result
from kvkeep.openai.requests import CHAT, ParsedBody
from kvkeep.openai.tools import ToolCallParser

Show: TypeAlias = Callable[[int | None, int], str]
"""Returns the text of a token; the token before it, if there is one, decides about white space."""

LEAST = -9999.0
"""The log-probability of a token that cannot be drawn; JSON has no minus infinity."""


def answer(
    asked: ParsedBody, results: Sequence[Result], *, name: str, created: int, model: str, show: Show
) -> dict[str, Any]:
    """Build the response body for a completion or a chat.

    Args:
        asked: the body of the request.
        results: ``n`` results of each prompt, in the prompts' order.
        name: makes the answer's id.
        created: seconds since 1970.
        model: the name of the model that has answered.
        show: returns the text of a token, for log-probabilities.
    """
    is_chat = asked.url == CHAT
    wanted = "logprobs" in asked.options
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            _message(asked, name, index, result, show if wanted else None)
            if is_chat
            else _text(index, result, show if wanted else None)
            for index, result in enumerate(results)
        ],
        "usage": usage(results, asked.n),
    }


def usage(results: Sequence[Result], n: int) -> dict[str, Any]:
    """Return the token counts of an answer. The prompt of several results counts once."""
    prompt = sum(result.prompt_tokens for result in results[::n])
    new = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results[::n])},
    }


def error(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """Build the response body for an error.

    Args:
        message: what happened, and what to do.
        status: HTTP status; from 500 on the server is to blame.
        param: the parameter that is wrong.
    """
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def calls_of(asked: ParsedBody, name: str, index: int) -> ToolCallParser | None:
    """Return the parser for the tool calls in an answer's text; ``None`` if no tool may be called.

    Args:
        asked: the body of the request.
        name: the answer's.
        index: the place of the text in the answer.
    """
    if asked.tools is None:
        return None
    use = asked.tools.use
    if not asked.options.get("skip_special_tokens", True):
        use = replace(use, token=None)  # the text then shows the mark
    return ToolCallParser(f"{name}_{index}", use, asked.tools.names, anywhere=not asked.begins_with_call)


def reason_of(result: Result, calls: ToolCallParser | None) -> str:
    """Return why an answer has ended: ``tool_calls`` if the answer is complete and calls tools."""
    return "tool_calls" if result.finish_reason == "stop" and calls and calls.count else result.finish_reason


def _message(asked: ParsedBody, name: str, index: int, result: Result, show: Show | None) -> dict[str, Any]:
    calls = calls_of(asked, name, index)
    said = calls.whole(result.text) if calls else {"content": result.text}
    return {
        "index": index,
        "message": {"role": "assistant", **said, "refusal": None},
        "logprobs": None if show is None else {"content": _content(result, show), "refusal": None},
        "finish_reason": reason_of(result, calls),
    }


def _text(index: int, result: Result, show: Show | None) -> dict[str, Any]:
    found = None if show is None else columns(result, show)
    return {"index": index, "text": result.text, "logprobs": found, "finish_reason": result.finish_reason}


def _content(result: Result, show: Show) -> list[dict[str, Any]]:
    """Return the log-probabilities of a chat's answer, with one entry per token."""
    return [content_of(before, entry, show) for before, _, entry in _tokens(result, show)]


def _token(text: str, value: float) -> dict[str, Any]:
    """Describe a token of a chat's answer. ``bytes`` is ``None`` for a token that is not whole characters."""
    whole = "\ufffd" not in text
    return {
        "token": text,
        "logprob": max(value, LEAST),
        "bytes": list(text.encode("utf-8", "surrogatepass")) if whole else None,
    }


def columns(result: Result, show: Show, *, whole: bool = False) -> dict[str, Any]:
    """Return the log-probabilities of a completion as parallel lists; ``whole``: also those of the end token."""
    tokens = list(_tokens(result, show, whole=whole))
    starts = itertools.accumulate((len(piece) for _, piece, _ in tokens[:-1]), initial=0) if tokens else ()
    return {
        "tokens": [piece for _, piece, _ in tokens],
        "token_logprobs": [max(entry.value, LEAST) for _, _, entry in tokens],
        "top_logprobs": [
            {show(before, token): max(value, LEAST) for token, value in entry.top} for before, _, entry in tokens
        ],
        "text_offset": list(starts),
    }


def _tokens(result: Result, show: Show, *, whole: bool = False) -> list[tuple[int | None, str, Logprob]]:
    """Return each token of a result's text with the token before it, up to the end of the text or a stop text."""
    found: list[tuple[int | None, str, Logprob]] = []
    before, length = None, 0
    for entry in result.logprobs:
        if length >= len(result.text) and not whole:
            break
        piece = show(before, entry.token_id)
        found.append((before, piece, entry))
        before, length = entry.token_id, length + len(piece)
    return found


def content_of(before: int | None, entry: Logprob, show: Show) -> dict[str, Any]:
    """Return the log-probability entry of one token of a chat's answer.

    Args:
        before: the token before it.
        entry: the log-probability.
        show: returns the text of a token.
    """
    return {
        **_token(show(before, entry.token_id), entry.value),
        "top_logprobs": [_token(show(before, token), value) for token, value in entry.top],
    }


def column_of(before: int | None, entry: Logprob, show: Show, offset: int) -> dict[str, Any]:
    """Return the log-probability lists of one token of a completion.

    Args:
        before: the token before it.
        entry: the log-probability.
        show: returns the text of a token.
        offset: characters of the text before it.
    """
    return {
        "tokens": [show(before, entry.token_id)],
        "token_logprobs": [max(entry.value, LEAST)],
        "top_logprobs": [{show(before, token): max(value, LEAST) for token, value in entry.top}],
        "text_offset": [offset],
    }


# Completions that begin with their prompts, with the log-probabilities of the prompts' tokens.


def echoed(
    choice: dict[str, Any], prompt: str, ids: Sequence[int], result: Result, show: Show | None
) -> dict[str, Any]:
    """Return a completion's choice with its prompt in front.

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
    pieces = [show(earlier, token) for earlier, token in zip(before, ids, strict=False)]  # the last has no successor
    values: list[float | None] = [None, *(max(entry.value, LEAST) for entry in result.prompt_logprobs)]
    tops: list[dict[str, float] | None] = [None]
    for earlier, entry in zip(ids, result.prompt_logprobs, strict=False):  # as above
        tops.append({show(earlier, token): max(value, LEAST) for token, value in entry.top})
    new = columns(result, show, whole=True)
    tokens = [*pieces, *new["tokens"]]
    found = {
        "tokens": tokens,
        "token_logprobs": [*values, *new["token_logprobs"]],
        "top_logprobs": [*tops, *new["top_logprobs"]],
        "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)),
    }
    return {**choice, "text": text, "logprobs": found}
