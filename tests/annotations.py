"""Checks of shapes and types, one for each combination of shapes, dtypes and types that a function meets.

jaxtyping and beartype look at nothing else, so a combination that has passed once passes again. Checking it anew in
each call takes several times as long as the call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Hashable, Iterable
from types import FunctionType
from typing import Any

import jaxtyping
import torch

_in_full = jaxtyping.jaxtyped
_plain: set[type] = set()
"""Types of which annotations ask nothing more."""


class _UnknownError(Exception):
    """Nothing can be remembered of a value: it is checked each time."""


def install(package: str) -> None:
    """Have the functions of a package checked; it must not have been imported before."""
    jaxtyping.jaxtyped = _jaxtyped  # the import hook writes this name above each function and class
    jaxtyping.install_import_hook(package, "beartype.beartype")


def kind(value: object) -> Hashable:
    """Returns all that annotations ask about a value: its type, a tensor's shape and dtype, the kinds of its items."""
    made = type(value)
    if made in _plain:
        return made
    if made is torch.Tensor:
        return made, value.shape, value.dtype
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return made, value.shape, value.dtype
    if isinstance(value, type):
        return made, value
    if isinstance(value, tuple):
        return made, *map(kind, tuple.__iter__(value))  # its own items: lazy slots would make copies of theirs
    if made is dict and len(value) <= 64:
        return made, *map(kind, value), *map(kind, value.values())
    if made in (list, set, frozenset):
        return made, _shared(value)
    if isinstance(value, Collection) and made not in (str, bytes):
        raise _UnknownError
    _plain.add(made)
    return made


def _shared(values: Collection[Any]) -> Hashable:
    """Returns the kind of all items. Where items differ, beartype looks at one of them, at random."""
    kinds = set(map(kind, values)) if len(values) <= 64 else ()
    if len(kinds) != 1 and values:
        raise _UnknownError
    return next(iter(kinds), None)


def _kinds(values: Iterable[object]) -> tuple[Hashable, ...] | None:
    try:
        return tuple(map(kind, values))
    except _UnknownError:
        return None


def _jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorated(found: Any) -> Any:
        if isinstance(found, FunctionType):
            return _checked(found, typechecker)
        if dataclasses.is_dataclass(found) and not hasattr(found.__init__, "__wrapped__"):
            found.__init__ = _checked(found.__init__, typechecker)
        return found

    return decorated


def _checked(function: Any, typechecker: Any) -> Callable[..., Any]:
    signature = inspect.signature(function)
    asks_for_values = "Literal" in str(signature)
    made: list[Callable[..., Any]] = []
    check_result = _check_of_results(function, typechecker)
    method = next(iter(signature.parameters), "") == "self"
    passed: dict[Hashable, set[Hashable]] = {}  # kinds of results by kinds of arguments

    def in_full() -> Callable[..., Any]:
        if not made:  # in the first call: of all functions that an import brings, most are never called
            made.append(_in_full(function, typechecker=typechecker))
        return made[0]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        unknown = asks_for_values or torch.compiler.is_compiling()
        given = None if unknown else _kinds((*args[method:], *kwargs.values()))
        if given is None:
            return in_full()(*args, **kwargs)
        given = (*given, *kwargs, *map(type, args[:method]))
        results = passed.get(given)
        if results is None:
            value = in_full()(*args, **kwargs)
            passed[given] = {_kinds((value,))}
            return value
        value = function(*args, **kwargs)
        result = _kinds((value,))
        if result is None or result not in results:
            check_result(value, args, kwargs)
            results.add(result)
        return value

    # who looks for a caller in a traceback knows jaxtyping's frames
    checked.__code__ = checked.__code__.replace(co_filename=jaxtyping.__file__)
    return checked


def _check_of_results(function: Any, typechecker: Any) -> Callable[[Any, Any, Any], None]:
    """Returns a check of what a function has returned, without another call of it."""
    returned = threading.local()

    def replay(*_: Any, **__: Any) -> Any:
        return returned.value

    @functools.cache
    def in_full() -> Callable[..., Any]:
        same = FunctionType(replay.__code__, function.__globals__, function.__name__, None, replay.__closure__)
        return _in_full(functools.update_wrapper(same, function), typechecker=typechecker)

    def check(value: Any, args: Any, kwargs: Any) -> None:
        returned.value = value
        in_full()(*args, **kwargs)
        del returned.value

    return check
