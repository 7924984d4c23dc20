"""Every error that kvkeep raises on purpose.

::

    KVKeepError
    ├── BudgetError (ValueError)         a budget that cannot hold what it must
    │   └── CapacityError                a non-evicting cache is full
    ├── PolicyError (ValueError)         unknown policy, unknown or bad option
    ├── InputError (ValueError)          a prompt, a file or an argument that cannot be used
    ├── ShapeError (ValueError)          tensors that do not fit the cache
    ├── SnapshotError (ValueError)       a snapshot of another model, policy or budget, or a file that holds none
    ├── BrokenCacheError                 a cache in which a step failed halfway
    ├── NoNumbersError                   logits that are NaN or infinite
    ├── ModelFileError (OSError)         a model folder that is missing, incomplete, unsafe or corrupted
    ├── UnsupportedModelError            a model that the attention interface does not reach
    └── UnsupportedOperationError        an operation that needs tokens that were evicted

A message says what happened (with numbers), why it matters and what to do. It names Python arguments, in backquotes
(`` `prefill_chunk` ``, `` `memory=24` ``) or as the first word (``seed=-1 is outside …``). The command line replaces
both by its flags, prints the message as one line and exits with code 2.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

ADDRESS = "git+https://github.com/kvkeep/kvkeep"
"""Where pip finds kvkeep, which is on no package index."""


class KVKeepError(Exception):
    """Base of all errors raised by kvkeep."""


class BudgetError(KVKeepError, ValueError):
    """The budget is out of range or smaller than what the policy protects."""


class CapacityError(BudgetError):
    """A policy that never evicts was given more tokens than the budget holds."""


class PolicyError(KVKeepError, ValueError):
    """The policy does not exist, or an option of it is unknown or has a bad value."""


class InputError(KVKeepError, ValueError):
    """A prompt, a file or an argument cannot be used."""


class ShapeError(KVKeepError, ValueError):
    """Tensors do not fit the cache: another model, batch size, dtype or attention mask."""


class SnapshotError(KVKeepError, ValueError):
    """A snapshot does not belong to this model, policy or budget, or its file cannot be read or written."""


class BrokenCacheError(KVKeepError):
    """A step failed halfway, so the layers of a cache no longer hold tokens of the same text.

    Args:
        why: how the failure was noticed, as a clause.
    """

    def __init__(self, why: str):
        super().__init__(
            f"The cache cannot go on: {why}, so its tokens are not those of any text. Call reset() and feed the text "
            "again, or make a new cache."
        )


class NoNumbersError(KVKeepError):
    """The model's logits are not numbers, so no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "The model's logits are NaN or infinite, so they name no token. Its weights are damaged, or its numbers "
            "overflow in this dtype: try bfloat16 or float32."
        )


class ModelFileError(KVKeepError, OSError):
    """A model folder is missing, incomplete, corrupted or holds weights that are not safetensors."""


class UnsupportedModelError(KVKeepError):
    """The model's attention cannot be reached, or asks for a mask that eviction cannot honour."""


class UnsupportedOperationError(KVKeepError):
    """The operation needs tokens that an evicting cache no longer has."""


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a `KVKeepError`; of another exception its class before it."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # an error of other code whose own __str__ fails
        text = ""
    if isinstance(error, KVKeepError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_ALIKE = 0.5
"""Similarity of names. At difflib's own 0.6, fp16 (0.57) does not lead to fp8, nor (0.55) to float16."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, for messages about an unknown one; ``None`` if none is alike."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=_ALIKE)), None)


_Called = TypeVar("_Called", bound=Callable[..., Any])


def renames(elsewhere: Mapping[str, str]) -> Callable[[_Called], _Called]:
    """Return a decorator for a class, which must have an ``__init__`` of its own, or for a function: a call with a
    parameter that it does not have raises an `InputError` that names the right one, in place of a ``TypeError``.

    The class itself is changed and returned; a function is wrapped.

    Args:
        elsewhere: a name that users of other libraries may write → what they should write here.
    """

    def decorate(called: _Called) -> _Called:
        function: Any = vars(called)["__init__"] if isinstance(called, type) else called
        own = [name for name in inspect.signature(function).parameters if name != "self"]
        known = frozenset(own)

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            if named.keys() <= known:
                return function(*args, **named)
            name = next(name for name in named if name not in known)
            near = closest(name, own)
            remedy = elsewhere.get(name) or (f"`{near}`" if near else f"one of {', '.join(own)}")
            raise InputError(f"{called.__name__} has no parameter {name!r:.80}. Write {remedy}.")

        if isinstance(called, type):
            called.__init__ = checked  # type: ignore[misc]
            return called
        return checked  # type: ignore[return-value]

    return decorate


def pip_install(extra: str) -> str:
    """Return the command that installs kvkeep with an extra (optional dependencies), for messages about a missing
    package.
    """
    return f"pip install 'kvkeep[{extra}] @ {ADDRESS}'"


def show_bytes(count: int) -> str:
    """Return a number of bytes in decimal units, as messages and tables show it: ``1.23 MB``."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:  # from here on three digits would be rounded to 1000
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{three_digits(size)} {unit}"


def three_digits(value: float) -> str:
    """Return a number, 0 or more, as text with two decimals below 10, one below 100 and none above: ``0.05``, ``1.23``,
    ``23.5``, ``1234``.
    """
    # the bounds are those from which rounding would add a digit
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
