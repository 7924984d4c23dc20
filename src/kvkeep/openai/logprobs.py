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
        """Take the log-probability of the answer's next token. `within` or `rest` returns it later, joined with the
        token's text: that is known only once its characters are complete.
        """
        self._entries.append(entry)
        self._know(self._spans.add(entry.token_id))

    def within(self, length: int) -> list[Scored]:
        """Return the tokens that begin in the first ``length`` characters of the text, without those that earlier calls
        have returned.
        """
        found = []
        while self._known and self._known[0][0].start < length:
            found.append(self._known.popleft())
        return found

    def rest(self, result: Result, *, whole: bool = False) -> list[Scored]:
        """Return the tokens that no call has returned yet, once the answer has ended; without those of a stop text
        unless ``whole``. Further calls return nothing.
        """
        self._know(self._spans.end())
        # ended, but not by an end token: a stop text lies behind the text, in the last tokens
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
        """Make tokens whose texts are complete known, each with its log-probability: the oldest ones that wait for a
        text.
        """
        self._known.extend((token, self._entries.popleft()) for token in tokens)


def content(tokens: Sequence[Scored], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return ``logprobs.content`` of a chat's answer: for each token its text, log-probability and bytes, and the same
    of the likeliest tokens in its place under ``top_logprobs``.
    """
    return [
        {
            **_entry(token.text, token.bytes, scored.value),
            "top_logprobs": [_entry(text, raw, value) for _, text, raw, value in _likeliest(token, scored, texts)],
        }
        for token, scored in tokens
    ]


def output_text(tokens: Sequence[Scored], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the entries of an answer's tokens as ``/v1/responses`` has them: those of `content`, but with ``[]`` and
    not ``None`` as the bytes of a token that the text leaves out.
    """
    found = content(tokens, texts)
    for entry in (part for token in found for part in (token, *token["top_logprobs"])):
        entry["bytes"] = entry["bytes"] or []
    return found


def _entry(text: str, raw: bytes | None, value: float) -> dict[str, Any]:
    """Return a token's text, log-probability and bytes (``None`` stays ``None``) under OpenAI's names. A
    log-probability below `LEAST` becomes `LEAST`, as JSON has no minus infinity.
    """
    return {"token": text, "logprob": max(value, LEAST), "bytes": None if raw is None else list(raw)}


def columns(tokens: Sequence[Scored], texts: TokenTexts, *, offset: int = 0) -> dict[str, Any]:
    """Return ``logprobs`` of a completion, four lists with an entry for each token: its text, its log-probability, the
    likeliest tokens in its place (text → log-probability), and the character of the text at which it begins.

    Args:
        tokens: the tokens.
        texts: decodes tokens.
        offset: characters before these tokens' text, added to each place in ``text_offset``.
    """
    return {
        "tokens": [token.text for token, _ in tokens],
        # JSON has no minus infinity
        "token_logprobs": [max(scored.value, LEAST) for _, scored in tokens],
        "top_logprobs": [_named(token, scored, texts) for token, scored in tokens],
        "text_offset": [offset + token.start for token, _ in tokens],
    }


def _likeliest(token: TextToken, scored: Logprob, texts: TokenTexts) -> Iterator[tuple[int, str, bytes | None, float]]:
    """Yield id, text, bytes and log-probability of the likeliest tokens in the place of a token, most likely first.

    If the token itself is among them, it has its text and bytes in the answer: ``None`` if the text leaves it out.
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
    """Return the likeliest tokens in the place of a token as text → log-probability, at least `LEAST`.

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


def echoed(
    prompt: str, ids: Sequence[int], result: Result, texts: TokenTexts, *, special: bool = False
) -> dict[str, Any]:
    """Return ``logprobs`` of a completion whose text begins with its prompt, as `columns` does: of the prompt's tokens,
    then of the new ones, a stop text's and the end token included. The log-probabilities of the prompt's first token
    are ``None``.

    Args:
        prompt: the prompt's text.
        ids: the prompt's tokens.
        result: the request's result.
        texts: decodes tokens.
        special: whether the text behind the prompt has special tokens.
    """
    spans = TokenSpans(texts, special=True)  # `_placed` compares with a decoded prompt that shows them
    tokens = _placed(prompt, ids, [token for number in ids for token in spans.add(number)] + spans.end(), texts)
    # the model predicts all but the first
    of_prompt = columns(list(zip(tokens[1:], result.prompt_logprobs, strict=False)), texts)
    new = columns(ScoredTokens.of(result, texts, special=special, whole=True), texts, offset=len(prompt))
    # nothing stands before the first token from which the model could have predicted it
    first: dict[str, list[Any]] = {name: [None] for name in new} | {
        "tokens": [token.text for token in tokens[:1]],
        "text_offset": [token.start for token in tokens[:1]],
    }
    return {name: [*first[name], *of_prompt[name], *new[name]] for name in new}


def _placed(prompt: str, ids: Sequence[int], tokens: Sequence[TextToken], texts: TokenTexts) -> list[TextToken]:
    """Return copies of a prompt's tokens, each with the place in the given text at which it begins.

    Where the tokenizer has changed the text, a token is searched for nearby. A special token that the text does not
    have gets an empty text.

    Args:
        prompt: the text, as it was given.
        ids: its token ids.
        tokens: the same tokens, with their places in the text of the decoded ids.
        texts: decodes tokens.
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
        at = min(place + step, len(prompt))  # a token that the tokenizer has changed may be longer than what is left
    return found
