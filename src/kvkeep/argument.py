"""The argument by which a decoder of transformers takes its cache: ``cache`` since 5.24, ``past_key_values`` before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache as remembered
from typing import Any, Final

CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
"""The names, the newest first."""


def taken_as(kind: type) -> str | None:
    """The name under which ``forward`` of a class takes a cache; ``None`` if it names no cache."""
    return _among(getattr(kind, "forward", kind.__call__))


def handed(model: object, cache: object) -> dict[str, Any]:
    """Keyword arguments that hand a cache to a model, also to one within a wrapper that passes everything on."""
    return {taken_as(type(model)) or usual(): cache}


def handed_over(given: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a forward; ``None`` if there is none."""
    return next((given[name] for name in CACHE_ARGUMENTS if given.get(name) is not None), None)


def usual() -> str:
    """The name that the installed transformers gives it."""
    from transformers import GenerationMixin  # here, since the command line starts without transformers

    return _among(GenerationMixin.prepare_inputs_for_generation) or CACHE_ARGUMENTS[-1]


@remembered
def _among(function: Callable[..., Any]) -> str | None:
    known = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), None)
