"""A client that streams answers of any server of OpenAI's API and notes the time of each piece."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvkeep.errors import InputError

_LAST_PORT = 65535
_LONGEST = 300
"""Characters of a message of the server that are shown."""
_MOST = 10**12
"""Tokens that a server may claim; sums of them stay numbers that a float holds."""
_CHAT, _TEXT = "/chat/completions", "/completions"
_REASONING = ("reasoning_content", "reasoning")
"""Names under which servers send what a model writes before its answer; DeepSeek's and vLLM's older and newer one."""


@dataclass
class RequestOutcome:
    """The outcome of one request: its times, its text's length, and its failure if it had one.

    Attributes:
        planned, sent: when it was to be sent, and when it was.
        times: of the pieces of its text and of its reasoning.
        ended: when the answer was complete.
        prompt_tokens, new_tokens, cached_tokens: as the server counts them; ``None`` if it does not.
        text: of the answer.
        session: the number of its conversation; ``None``: it has none.
        message_tokens: tokens of its prompt without the earlier turns, where these were sent again and are counted.
        error: the kind of its failure.
        detail: what the server says about it.
    """

    planned: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    session: int | None = None
    message_tokens: int | None = None
    error: str | None = None
    detail: str | None = None

    @property
    def tokens(self) -> int:
        """Return the number of new tokens, or of pieces of text if the server does not count tokens."""
        return len(self.times) if self.new_tokens is None else self.new_tokens


class BrokenAnswerError(Exception):
    """An answer that is no stream of OpenAI's API. Its text is the kind of the failure.

    Attributes:
        detail: what the server says about it.
    """

    def __init__(self, kind: str, detail: str | None = None) -> None:
        super().__init__(kind)
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, and how it is asked.

    Attributes:
        url: its base URL, which ends in ``/v1``.
        model: the name of the model.
        key: the API key.
        chat: whether messages are sent, or texts to be continued.
        timeout_s: seconds that a request may take without a piece of its answer.
        extra: further fields of every body.
    """

    url: str
    model: str = ""
    key: str | None = None
    chat: bool = True
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def client(self) -> httpx.AsyncClient:
        """Return a client without a bound on connections: whoever waits for one would not be an open loop."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx.AsyncClient(headers=headers, timeout=self.timeout_s, limits=limits)

    def body(self, messages: list[dict[str, str]], new_tokens: int) -> dict[str, Any]:
        """Return the body of a request; without a chat, it has the last message alone."""
        asked: dict[str, Any] = {"messages": messages} if self.chat else {"prompt": messages[-1]["content"]}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked, "max_tokens": new_tokens, **stream, **self.extra}


def whole(text: str) -> str:
    """Return a text with its characters of two halves put together, and a mark for every half alone.

    A half alone cannot be sent.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def base_url(text: str) -> str:
    """Return the base URL of a server, with ``/v1`` at its end.

    Raises:
        InputError: it is no URL of http or https.
    """
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"`url={text}` is no URL: {error}.") from error
    if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 1) > _LAST_PORT:
        raise InputError(f"`url={text}` is no URL of http or https, such as http://127.0.0.1:8000.")
    return url if url.endswith("/v1") else f"{url}/v1"


async def model_of(target: Target) -> str:
    """Return the name of the server's first model.

    Raises:
        InputError: the server does not answer, asks for another key, or names no model.
    """
    try:
        async with target.client() as client:
            answer = await client.get(f"{target.url}/models", timeout=min(30.0, target.timeout_s))
    except httpx.HTTPError as error:
        raise InputError(f"{target.url} does not answer: {str(error) or type(error).__name__}.") from error
    if answer.status_code in (401, 403):
        raise InputError(f"{target.url} asks for another API key: give `api_key`.")
    try:
        return whole(str(answer.json()["data"][0]["id"]))  # it is sent back
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(
            f"{target.url}/models names no model (status {answer.status_code}). Give `model`, or another URL."
        ) from error


async def ask(
    client: httpx.AsyncClient, target: Target, messages: list[dict[str, str]], new_tokens: int, planned: float
) -> RequestOutcome:
    """Send one request and read its answer to the end. Failures are part of the outcome.

    Args:
        client: the connections.
        target: the server.
        messages: the conversation; without a chat the last one alone is sent.
        new_tokens: the most tokens of the answer.
        planned: when it was to be sent.
    """
    found = RequestOutcome(planned, time.perf_counter())
    url = target.url + (_CHAT if target.chat else _TEXT)
    try:
        async with client.stream("POST", url, json=target.body(messages, new_tokens)) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode("utf-8", "replace")
                raise BrokenAnswerError(f"status {answer.status_code}", _shown(said))
            async for piece in events(answer):
                _note(found, piece)
        if not found.times and not found.new_tokens:
            raise BrokenAnswerError("no text")
    except BrokenAnswerError as error:
        found.error, found.detail = str(error), error.detail
    except httpx.HTTPError as error:
        found.error = failure(error)
    found.ended = time.perf_counter()
    found.text = whole(found.text)  # a server may split a character over two pieces
    return found


def failure(error: httpx.HTTPError) -> str:
    """Return the kind of a failure to reach the server, or to hear its whole answer."""
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    return "no connection" if isinstance(error, httpx.ConnectError) else "connection lost"


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream.

    Raises:
        BrokenAnswerError: the stream ends too early, or has something else.
    """
    async for line in answer.aiter_lines():
        name, _, value = line.partition(":")
        if name != "data":
            continue
        if (value := value.strip()) == "[DONE]":
            return
        try:
            piece = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BrokenAnswerError("no JSON in the stream") from error
        if not isinstance(piece, dict):
            raise BrokenAnswerError("no JSON object in the stream")
        yield piece
    raise BrokenAnswerError("stream ended early")


def _shown(body: str) -> str:
    """Return what the body of an error says, in one line."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        said = body
    return whole(" ".join(said.split())[:_LONGEST])


def _note(found: RequestOutcome, piece: Mapping[str, Any]) -> None:
    """Take the text and the numbers of a piece.

    Raises:
        BrokenAnswerError: it is an error, or of an unknown kind.
    """
    if piece.get("error"):
        raise BrokenAnswerError("error in the stream", _shown(json.dumps(piece)))
    try:
        for choice in piece.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") if "delta" in choice else choice.get("text")
            if text or any(delta.get(name) for name in _REASONING):  # the server counts the tokens of both
                found.times.append(time.perf_counter())
            found.text += text or ""
        if usage := piece.get("usage"):
            found.prompt_tokens, found.new_tokens = _tokens(usage["prompt_tokens"]), _tokens(usage["completion_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            found.cached_tokens = None if cached is None else _tokens(cached)
    except (TypeError, ValueError, ArithmeticError, KeyError, AttributeError) as error:
        raise BrokenAnswerError("no chunk of OpenAI's API in the stream") from error


def _tokens(number: Any) -> int:
    """Return a server's number of tokens.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    tokens = int(number)
    if not 0 <= tokens <= _MOST:
        raise ValueError(f"{tokens} is no number of tokens")
    return tokens
