"""The log-probabilities of an answer's tokens as OpenAI's API sends them: one entry for each token, with its bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from kvkeep.engine.detokenizer import TextToken, TokenSpans, TokenTexts
from kvkeep.engine.request import Logprob, Result

LEAST = -9999.0
"""The log-probability of a token that cannot be drawn; JSON has no minus infinity."""

Scored: TypeAlias = tuple[TextToken, Logprob]
"""A token of an answer and its log-probability."""


class ScoredTokens:
    """The tokens of an answer while it is written, in the order of its text.

    A token is handed out as soon as the text has the character in which it begins. A stop text is no part of the text,
    and neither is the token that ends it.

    Args:
        texts: decodes tokens.
        special: whether the text has special tokens.
    """

    def __init__(self, texts: TokenTexts, *, special: bool = False) -> None:
        self._spans = TokenSpans(texts, special=special)
        self._entries: deque[Logprob] = deque()
        self._known: deque[Scored] = deque()

    @classmethod
    def of(cls, result: Result, texts: TokenTexts, *, special: bool = False, whole: bool = False) -> list[Scored]:
        """Return the tokens of a finished answer with their log-probabilities.

        Args:
            result: the answer.
            texts: decodes tokens.
            special: whether the text has special tokens.
            whole: whether the tokens that are no part of the text are returned as well: those of a stop text, and the
                end token.
        """
        scored = cls(texts, special=special)
        for entry in result.logprobs[: -1 if result.end_token and not whole else None]:
            scored.add(entry)
        return scored.rest(result, whole=whole)

    def add(self, entry: Logprob) -> None:
        """Note the next token. It is handed out by `within` or `rest`."""
        self._entries.append(entry)
        self._know(self._spans.add(entry.token_id))

    def within(self, length: int) -> list[Scored]:
        """Return the tokens not handed out yet that begin in the first ``length`` characters of the text."""
        found = []
        while self._known and self._known[0][0].start < length:
            found.append(self._known.popleft())
        return found

    def rest(self, result: Result, *, whole: bool = False) -> list[Scored]:
        """Return the tokens that are left when the answer has ended, without those of a stop text unless ``whole``.

        Afterwards none is left.
        """
        self._know(self._spans.end())
        stopped = result.finish_reason == "stop" and not result.end_token and not whole
        found = self.within(len(result.text)) if stopped else list(self._known)
        # special tokens that the text leaves out have no length, and come before the stop text
        while stopped and self._known and self._known[0][0].bytes is None:
            if self._known[0][0].start > len(result.text):
                break
            found.append(self._known.popleft())
        self._known.clear()
        return found

    def _know(self, tokens: Sequence[TextToken]) -> None:
        """Join tokens whose texts are complete with their log-probabilities, which arrived in the same order."""
        self._known.extend((token, self._entries.popleft()) for token in tokens)


def content(tokens: Sequence[Scored], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the entries of a chat's tokens in the form of the API, each with the likeliest tokens in its place."""
    return [
        {
            **_entry(token.text, token.bytes, scored.value),
            "top_logprobs": [_entry(text, raw, value) for _, text, raw, value in _likeliest(token, scored, texts)],
        }
        for token, scored in tokens
    ]


def output_text(tokens: Sequence[Scored], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the entries of the tokens of an answer of ``/v1/responses``: those of a chat, but with an empty list where
    a token adds no bytes.
    """
    found = content(tokens, texts)
    for entry in (part for token in found for part in (token, *token["top_logprobs"])):
        entry["bytes"] = entry["bytes"] or []
    return found


def _entry(text: str, raw: bytes | None, value: float) -> dict[str, Any]:
    """Return a token's entry in OpenAI's format. JSON has no infinity, so `LEAST` is the smallest number."""
    return {"token": text, "logprob": max(value, LEAST), "bytes": None if raw is None else list(raw)}


def columns(tokens: Sequence[Scored], texts: TokenTexts, *, offset: int = 0) -> dict[str, Any]:
    """Return the entries of a completion's tokens as parallel lists.

    Args:
        tokens: the tokens.
        texts: decodes tokens.
        offset: characters before the completion.
    """
    return {
        "tokens": [token.text for token, _ in tokens],
        # JSON has no minus infinity
        "token_logprobs": [max(scored.value, LEAST) for _, scored in tokens],
        "top_logprobs": [_named(token, scored, texts) for token, scored in tokens],
        "text_offset": [offset + token.start for token, _ in tokens],
    }


def _likeliest(token: TextToken, scored: Logprob, texts: TokenTexts) -> Iterator[tuple[int, str, bytes | None, float]]:
    """Yield the id, text, bytes and log-probability of the likeliest tokens in the place of a token; ``None`` for the
    bytes of the token itself if it adds none.
    """
    # the text drops a space at its start, so alternatives drop theirs
    at_start = token.bytes is not None and texts.bytes_of(scored.token_id) == b" " + token.bytes
    for other, value in scored.top:
        if other == scored.token_id:
            yield other, token.text, token.bytes, value
        else:
            raw = texts.bytes_of(other).removeprefix(b" " if at_start else b"")
            yield other, raw.decode("utf-8", "replace"), raw, value


def _named(token: TextToken, scored: Logprob, texts: TokenTexts) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens by their texts.

    Texts that are no whole characters, or that two tokens share, give way to bytes as OpenAI's API writes them, or to a
    token id as vLLM writes it. The name of the token itself is its entry in ``tokens``.
    """
    found: dict[str, float] = {}
    for other, text, raw, value in _likeliest(token, scored, texts):
        name = text
        # half of a character has no text, and a JSON object cannot have one key twice
        if other != scored.token_id:
            if "\ufffd" in name:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or b"")
            if name == token.text or name in found:
                name = f"token_id:{other}"
        found[name] = max(value, LEAST)
    return found


# Completions that begin with their prompts, with the log-probabilities of the prompts' tokens.

_NEAR = 32
"""Characters beyond its own length in which a token is searched for, where the tokenizer has changed the prompt."""


def echoed(prompt: str, ids: Sequence[int], result: Result, texts: TokenTexts) -> dict[str, Any]:
    """Return the log-probabilities of a completion that begins with its prompt, as `columns` does. Those of the first
    token are ``None``.

    Args:
        prompt: the prompt's text.
        ids: the prompt's tokens.
        result: the request's result.
        texts: decodes tokens.
    """
    spans = TokenSpans(texts, special=True)
    tokens = _placed(prompt, ids, [token for number in ids for token in spans.add(number)] + spans.end(), texts)
    # the model predicts all but the first
    of_prompt = columns(list(zip(tokens[1:], result.prompt_logprobs, strict=False)), texts)
    new = columns(ScoredTokens.of(result, texts, whole=True), texts, offset=len(prompt))
    # nothing stands before the first token from which the model could have predicted it
    first: dict[str, list[Any]] = {name: [None] for name in new} | {
        "tokens": [token.text for token in tokens[:1]],
        "text_offset": [token.start for token in tokens[:1]],
    }
    return {name: [*first[name], *of_prompt[name], *new[name]] for name in new}


def _placed(prompt: str, ids: Sequence[int], tokens: Sequence[TextToken], texts: TokenTexts) -> list[TextToken]:
    """Return the tokens of a prompt with their places in its text, as it was given.

    The tokenizer may have changed the text. A special token that it has added is shown as an empty text.
    """
    decoded, at, found = texts.decode(ids), 0, []
    ends = [*(token.start for token in tokens[1:]), len(decoded)]
    for number, token, end in zip(ids, tokens, ends, strict=True):
        part = decoded[token.start : end]
        place, step, text = at, len(part), token.text
        if not prompt.startswith(part, at):  # the tokenizer has changed the text here, or added a token
            bare = part.strip()
            near = prompt.find(bare, at, at + len(part) + _NEAR) if bare else -1
            if texts.is_special(number):
                step, text = 0, ""
            elif near >= 0:
                place, step = near, len(bare)
                text = bare if text == part else text
        found.append(replace(token, text=text, start=place))
        at = min(place + step, len(prompt))
    return found
