"""Bodies of answers and errors as OpenAI's API sends them, made of results; no model and no file is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.request import Result
from kvkeep.openai import logprobs
from kvkeep.openai.requests import CHAT, ParsedBody
from kvkeep.openai.tools import ToolCallParser


def answer(
    asked: ParsedBody, results: Sequence[Result], *, name: str, created: int, model: str, texts: TokenTexts | None
) -> dict[str, Any]:
    """Build the response body for a completion or a chat.

    Args:
        asked: the body of the request.
        results: ``n`` results of each prompt, in the prompts' order.
        name: makes the answer's id.
        created: seconds since 1970.
        model: the name of the model that has answered.
        texts: decodes tokens, for log-probabilities; ``None``: there are none, even if the body asks for them.
    """
    is_chat = asked.url == CHAT
    wanted = "logprobs" in asked.options
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            _message(asked, name, index, result, texts if wanted else None)
            if is_chat
            else _text(asked, index, result, texts if wanted else None)
            for index, result in enumerate(results)
        ],
        "usage": usage(results, asked.n),
    }


def usage(results: Sequence[Result], n: int) -> dict[str, Any]:
    """Return ``usage`` of an answer: tokens of prompts, new tokens, their sum, and tokens of prompts that were not read
    again. Of each ``n`` results in a row, which have one prompt, the prompt counts once.
    """
    prompt = sum(result.prompt_tokens for result in results[::n])
    new = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results[::n])},
    }


def error(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """Build the response body for an error: the standard error object.

    Args:
        message: what happened, and what to do.
        status: HTTP status; from 500 on the server is to blame.
        param: the parameter that is wrong.
    """
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def calls_of(asked: ParsedBody, name: str, index: int) -> ToolCallParser | None:
    """Return a new parser for the tool calls in one text of an answer; ``None`` if the body lets no tool be called.

    Args:
        asked: the body of the request.
        name: the answer's name; it and the index make the ids of the calls.
        index: the text's, among those of the answer.
    """
    if asked.tools is None:
        return None
    use = asked.tools.use
    if asked.shows_special:
        use = replace(use, token=None)  # the text then shows the mark
    return ToolCallParser(f"{name}_{index}", use, asked.tools.names, anywhere=not asked.begins_with_call)


def reason_of(result: Result, calls: ToolCallParser | None) -> str:
    """Return the finish reason of a text: ``tool_calls`` if it ended by itself (``stop``) and its parser has found a
    call, else the result's own.
    """
    return "tool_calls" if result.finish_reason == "stop" and calls and calls.count else result.finish_reason


def _message(asked: ParsedBody, name: str, index: int, result: Result, texts: TokenTexts | None) -> dict[str, Any]:
    """Return a choice of a chat completion: its index, the message with its tool calls, log-probabilities (``None``
    without ``texts``) and finish reason.
    """
    calls = calls_of(asked, name, index)
    said = calls.whole(result.text) if calls else {"content": result.text}
    return {
        "index": index,
        "message": {"role": "assistant", **said, "refusal": None},
        "logprobs": None if texts is None else {"content": _content(asked, result, texts), "refusal": None},
        "finish_reason": reason_of(result, calls),
    }


def _content(asked: ParsedBody, result: Result, texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the log-probabilities of a chat's answer, an entry for each token of its text."""
    return logprobs.content(logprobs.ScoredTokens.of(result, texts, special=asked.shows_special), texts)


def _text(asked: ParsedBody, index: int, result: Result, texts: TokenTexts | None) -> dict[str, Any]:
    """Return a choice of a completion: its index, text, log-probabilities (``None`` without ``texts``) and finish
    reason.
    """
    found = None
    if texts is not None:
        found = logprobs.columns(logprobs.ScoredTokens.of(result, texts, special=asked.shows_special), texts)
    return {"index": index, "text": result.text, "logprobs": found, "finish_reason": result.finish_reason}


def echoed(
    asked: ParsedBody,
    choice: dict[str, Any],
    prompt: str,
    ids: Sequence[int],
    result: Result,
    texts: TokenTexts | None,
) -> dict[str, Any]:
    """Return a copy of a completion's choice with its prompt in front of the text, and in front of the
    log-probabilities if these are asked for.

    Args:
        asked: the body of the request.
        choice: the choice.
        prompt: the prompt's text.
        ids: the prompt's tokens.
        result: the request's result.
        texts: decodes tokens; ``None`` if no log-probabilities are asked for.
    """
    found = {**choice, "text": prompt + choice["text"]}
    if texts is None:
        return found
    return {**found, "logprobs": logprobs.echoed(prompt, ids, result, texts, special=asked.shows_special)}
