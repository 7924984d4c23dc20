"""What callers of the engine hand in: requests, or texts that become requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import InputError

Asked: TypeAlias = Request | str
"""A request, or a text that becomes one."""


def request_of(asked: object, sampling: Sampling | None = None) -> Request:
    """Return a request as it is, or make one of a text.

    Args:
        asked: a request or a text.
        sampling: how tokens are chosen for a text; requests have their own.

    Raises:
        InputError: it is neither.
    """
    if isinstance(asked, Request):
        return asked
    if isinstance(asked, str):
        return Request(prompt=asked, sampling=Sampling() if sampling is None else sampling)
    if isinstance(asked, Mapping):
        remedy = "put a conversation into a request: Request(messages=[...])."
    else:
        remedy = "give a text, or put token ids into a request: Request(prompt=ids)."
    raise InputError(f"{asked!r:.80} is no text and no kvkeep.Request; {remedy}")


def listed(asked: object) -> Iterable[Any]:
    """Return requests and texts as something to iterate over; a single one becomes a list.

    Raises:
        InputError: it is neither a text, nor a request, nor an iterable.
    """
    if isinstance(asked, str | Request):
        return [asked]
    if isinstance(asked, Mapping | bytes) or not isinstance(asked, Iterable):
        raise InputError(f"{type(asked).__name__} is no list of requests; give texts or kvkeep.Requests.")
    return asked
