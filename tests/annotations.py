"""Checks of shapes and types, one for each combination of shapes, dtypes and types that a function meets.

jaxtyping and beartype look at nothing else, so a combination that has passed once passes again. Checking it anew in
each call takes several times as long as the call. Annotations without shapes are beartype's alone.

Some functions are called a hundred times for each token, always with the same kinds of arguments. So the first calls of
a function in each test are looked at, and some of the others. Checks take a quarter of a test's time. So `make test`
has them in one test of four, and all slow tests of `make test-all` have them. ``--check-annotations 1`` gives them to
every test.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import typing
from collections.abc import Callable, Collection, Hashable, Iterable
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
import torch
from beartype.roar import BeartypeCallHintViolation, BeartypeDecorHintException

_in_full = jaxtyping.jaxtyped
FIRST_CALLS = 12
"""Calls of a function in each test that are all looked at."""
NTH = 37
"""Of further calls each such one is looked at; a prime, so that each layer of a model has its turn, if their number is
no multiple of it."""
_checking = [True]
"""Whether calls of the test that runs are looked at; outside of tests they are."""
_counts: list[list[int]] = []
"""The counts of functions that were called in the test that runs."""
_plain: set[type] = set()
"""Types of which annotations ask nothing more."""
_known: dict[CodeType, tuple[bool, bool, dict[Hashable, set[Hashable]]]] = {}
"""Whether annotations ask for values, whether it is a method, and which kinds of results passed by the arguments'."""


class _UnknownError(Exception):
    """Nothing can be remembered of a value: it is checked each time."""


def install(package: str) -> None:
    """Have the functions of a package checked; it must not have been imported before."""
    jaxtyping.jaxtyped = _jaxtyped  # the import hook writes this name above each function and class
    jaxtyping.install_import_hook(package, "beartype.beartype")


def begin_test(*, checking: bool = True) -> None:
    """Have the first calls of each function looked at again. What a test finds does not depend on those before it.

    Args:
        checking: whether calls of this test are looked at.
    """
    _checking[0] = checking
    for calls in _counts:
        calls[0] = 0
    _counts.clear()


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
        return made, _each(tuple.__iter__(value))  # its own items: lazy slots would make copies of theirs
    if made is dict and len(value) <= 64:
        return made, _each(value), _each(value.values())
    if made in (list, set, frozenset):
        return made, _shared(value)
    if isinstance(value, Collection) and made not in (str, bytes):
        raise _UnknownError
    _plain.add(made)
    return made


def _each(values: Iterable[object]) -> tuple[Hashable, ...]:
    """Returns the kinds of values. Plain ones are told here: millions of calls would take longer than the tests."""
    return tuple([made if (made := type(value)) in _plain else kind(value) for value in values])


def _shared(values: Collection[Any]) -> Hashable:
    """Returns the kind of all items. Where items differ, beartype looks at one of them, at random."""
    kinds = set(_each(values)) if len(values) <= 64 else ()
    if len(kinds) != 1 and values:
        raise _UnknownError
    return next(iter(kinds), None)


def _kind_of_result(value: object) -> Hashable | None:
    try:
        return kind(value)
    except (_UnknownError, RecursionError):
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
    made: list[Callable[..., Any]] = []
    calls = [0]
    compiling = torch.compiler.is_dynamo_compiling  # a third of the calls that `is_compiling` makes
    in_full = _made_later(lambda: _in_full(function, typechecker=typechecker))

    def choose() -> Callable[..., Any]:
        inner = "<locals>" in function.__qualname__  # made anew in each call of another function
        by_types = None if inner else _by_types_alone(function, typechecker)
        made.append(by_types or _remembered(function, typechecker, in_full))
        return made[0]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not _checking[0] or jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if compiling():
            return in_full(*args, **kwargs)
        number = calls[0] = calls[0] + 1
        if number > FIRST_CALLS and number % NTH:
            return function(*args, **kwargs)
        if number == 1:
            _counts.append(calls)
        try:
            return (made[0] if made else choose())(*args, **kwargs)
        except BeartypeCallHintViolation as error:
            raise jaxtyping.TypeCheckError(str(error)) from error

    return _as_jaxtypings(checked)


def _made_later(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a function that is made in its first call: of all that an import brings, most are never called."""
    made: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not made:
            made.append(make())
        return made[0](*args, **kwargs)

    return _as_jaxtypings(call)


def _as_jaxtypings(wrapper: Any) -> Any:
    """Returns a function whose frames are taken for jaxtyping's by who looks for a caller in a traceback."""
    wrapper.__code__ = wrapper.__code__.replace(co_filename=jaxtyping.__file__)
    return wrapper


def _remembered(function: Any, typechecker: Any, in_full: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that looks only at combinations of kinds that none made of the same code has met before."""
    if (known := _known.get(function.__code__)) is None:
        signature = inspect.signature(function)
        known = "Literal" in str(signature), next(iter(signature.parameters), "") == "self", {}
        _known[function.__code__] = known
    asks_for_values, method, passed = known
    if asks_for_values:
        return in_full
    check_result = _check_of_results(function, typechecker)

    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            given = (_each(args[1:]), type(args[0])) if method and args else _each(args)
            if kwargs:
                given = (given, *kwargs, _each(kwargs.values()))
        except (_UnknownError, RecursionError):  # of values within values
            return in_full(*args, **kwargs)
        results = passed.get(given)
        if results is None:
            value = in_full(*args, **kwargs)
            passed[given] = {_kind_of_result(value)}
            return value
        value = function(*args, **kwargs)
        result = _kind_of_result(value)
        if result is None or result not in results:
            check_result(value, args, kwargs)
            results.add(result)
        return value

    return _as_jaxtypings(checked)


def _by_types_alone(function: Any, typechecker: Any) -> Callable[..., Any] | None:
    """Returns a function with its types checked; ``None`` if an annotation names a shape, or may do so."""
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return None
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # names that only a type checker imports, or that are local to another function
        return None
    if any(map(_has_shape, hints.values())):
        return None
    try:
        made: Callable[..., Any] = typechecker(function)
    except BeartypeDecorHintException:  # what beartype itself does not take, as arguments that a wrapper passes on
        return None
    return _as_jaxtypings(made)


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, list | tuple):
        return any(map(_has_shape, hint))
    if isinstance(hint, typing.TypeVar):
        return _has_shape((hint.__bound__, hint.__constraints__))
    modules = type(hint).__module__, str(getattr(hint, "__module__", ""))
    return any(name.startswith("jaxtyping") for name in modules) or _has_shape(typing.get_args(hint))


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
