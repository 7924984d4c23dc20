"""Policies that an engine can use: whether requests share rows depends on whether their policies are equal."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cached_property

from kvkeep.errors import PolicyError
from kvkeep.policies.base import Policy
from kvkeep.registry import parse


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
