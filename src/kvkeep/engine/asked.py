"""The arguments of the engine's callers: requests, texts that become requests, and policies."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from kvkeep import budget as budgets
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import InputError, PolicyError
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse

Asked: TypeAlias = "Request | str"
"""A request, or a text that becomes one."""


Turn: TypeAlias = "Request | str | Sequence[int] | Sequence[Mapping[str, str]]"
"""A request, a text, token ids or messages."""


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


def turn_of(asked: Any, sampling: Sampling | None) -> Request:
    """Return a turn as a request.

    Raises:
        InputError: it is nothing that a session can continue with, or names a policy, budget, sequence or memory.
    """
    if isinstance(asked, str | Request):
        request = request_of(asked, sampling)
    else:
        chosen = Sampling() if sampling is None else sampling
        talks = isinstance(asked, Sequence) and len(asked) > 0 and isinstance(asked[0], Mapping)
        request = Request(messages=asked, sampling=chosen) if talks else Request(prompt=asked, sampling=chosen)
    if (request.policy, request.budget, request.memory, request.sequence) != (None, None, None, 0):
        raise InputError(
            "A session has its policy, budget, sequence and memory from engine.session(...); a turn names none."
        )
    return request


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


def check_numbers(budget: object, **others: object) -> None:
    """Check a budget and other numbers of tokens, rows or bytes, each under its argument's name; ``None`` is no number.

    Raises:
        BudgetError: one is not an integer, is below 1, or is more than any memory holds.
    """
    budgets.check_one(budget)
    for name, number in others.items():
        if number is not None:
            budgets.check_one(number, name)


def usable(policy: object) -> Policy:
    """Return a policy, or the policy that a string names, after checking that it can be compared with others.

    Raises:
        PolicyError: it is no policy, or cannot be compared or hashed, which decides whether requests share rows.
    """
    found = parse(policy) if isinstance(policy, str) else policy
    if not isinstance(found, Policy):
        raise PolicyError(f"{policy!r:.80} is neither a policy nor the name of one.")
    try:
        tells = hash(found) is not None and found == found
    except Exception:  # a class may raise anything there
        tells = False
    fields = {field.name for field in dataclasses.fields(found)}
    others = {name for name in vars(found).keys() - fields if not _is_remembered(type(found), name)}
    if not tells or others:
        raise PolicyError(
            f"Policies of {type(found).__name__} cannot be told apart by their options. Make the class a frozen "
            "dataclass whose fields are numbers, texts or tuples: @dataclass(frozen=True, kw_only=True)."
        )
    return found


def _is_remembered(kind: type, name: str) -> bool:
    """Whether an attribute is a property that is computed once; it follows from the fields."""
    return isinstance(inspect.getattr_static(kind, name, None), cached_property)
