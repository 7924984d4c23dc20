"""Checks of the texts, conversations and token ids that a request is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kvkeep.engine.sampling import whole_within
from kvkeep.errors import InputError


def conversation(messages: object) -> tuple[dict[str, Any], ...]:
    """Return messages as a tuple of dictionaries that nobody else can change.

    Raises:
        InputError: one has no role or content, or one that is not a text; or there is none.
    """
    found = () if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable) else tuple(messages)
    for message in found:
        parts = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None,)
        if not all(isinstance(part, str) for part in parts):
            found = ()
    if not found:
        raise InputError(
            f"messages={messages!r:.60} is no conversation; give a list of messages, each like "
            '{"role": "user", "content": "a text"}.'
        )
    return tuple(map(dict, found))


def functions(tools: object) -> tuple[dict[str, Any], ...]:
    """Return tools as a tuple of dictionaries.

    Raises:
        InputError: they are no list of mappings.
    """
    found = tuple(tools) if isinstance(tools, Iterable) and not isinstance(tools, str | Mapping) else (None,)
    if not all(isinstance(one, Mapping) for one in found):
        raise InputError(
            f'tools={tools!r:.60} is no list of tools like {{"type": "function", "function": {{"name": "…"}}}}.'
        )
    return tuple(dict(one) for one in found if isinstance(one, Mapping))


def token_ids(prompt: object) -> tuple[int, ...]:
    """Return the token ids of a list, an array or a tensor of one axis as Python's numbers.

    Raises:
        InputError: there are none, or the prompt is something else.
    """
    if isinstance(prompt, Mapping):
        raise InputError(f"The prompt is a {type(prompt).__name__}; give its token ids, for example prompt.input_ids.")
    found = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(found, bytes) or not isinstance(found, Iterable):
        raise InputError(f"The prompt is of the type {type(prompt).__name__}; give a text or token ids.")
    ids = tuple(found)
    if not ids:
        raise InputError("The prompt has no tokens.")
    if set(map(type, ids)) == {int}:
        return ids
    if isinstance(ids[0], Iterable) and not isinstance(ids[0], str | Mapping) and getattr(ids[0], "ndim", None) != 0:
        raise InputError("The prompt is a batch of texts; give one request for each, for example prompt=input_ids[0].")
    return tuple(whole_within("A token id of the prompt", one, -(2**63), 2**63 - 1) for one in ids)


def stop_texts(stop: object) -> tuple[str, ...]:
    """Return stop texts as a tuple.

    Raises:
        InputError: one of them is not a text, or is empty.
    """
    found = (stop,) if isinstance(stop, str) else stop
    texts = tuple(found) if isinstance(found, Iterable) else (found,)
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"stop={stop!r} is no text and no sequence of texts.")
    if not all(texts):
        raise InputError("An empty stop text would end every generation before it begins.")
    return texts


def checked_guard(guard: object) -> float | None:
    """Return a guard as a number, or ``None``.

    Raises:
        InputError: it is no share from 0 to 1.
    """
    if guard is None:
        return None
    if isinstance(guard, bool) or not isinstance(guard, int | float) or not 0 <= guard <= 1:
        raise InputError(
            f"guard={guard!r:.60} is no share of attention; give a number from 0 to 1, such as 0.1 for a tenth."
        )
    return float(guard)
