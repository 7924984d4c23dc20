"""How tokens are chosen, and how many; every number is checked when it comes in."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvkeep.errors import InputError

_MOST_TOKENS = 2**31 - 1
_LEAST_TOP_P = 1e-6
_PENALTIES = (0.01, 100.0)
_HOTTEST = 1000.0
_MOST_PENALTY = 2.0
_MOST_BIAS = 100.0
_MOST_BIASES = 1024
_GOLDEN = 0x9E3779B97F4A7C15


Biases: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids, and what is added to their logits."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and how many.

    Numbers of NumPy and other libraries are taken like Python's own.

    Attributes:
        max_new_tokens: stop after this many tokens, if the model has not stopped before.
        min_new_tokens: end tokens and stop texts end nothing before there are this many tokens; the form of an answer
            does.
        temperature: 0 takes the most probable token; above 0, and up to 1000, a token is drawn.
        top_p: draw among the most probable tokens that together have this probability, in [1e-6, 1].
        top_k: draw among this many most probable tokens.
        min_p: draw among tokens with at least this share of the most probable one's probability, in (0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred before, in
            [0.01, 100]; 1 is off.
        presence_penalty: lowers the logit of every token that was generated before, in [-2, 2].
        frequency_penalty: lowers the logit of a token each time that it was generated before, in [-2, 2].
        logit_bias: added to the logits of tokens, token id → number in [-100, 100]; kept as pairs.
        seed: the same seed draws the same tokens.

    Raises:
        InputError: a value is not a number or is out of its range, or ``top_p`` or ``top_k`` would be ignored.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, int | float] | Iterable[tuple[int, int | float]] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        self._take_numbers()
        shown = {name: _shown(value) for name, value in vars(self).items()}
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens={shown['max_new_tokens']} asks for no token; give 1 or more.")
        if self.max_new_tokens > _MOST_TOKENS:
            raise InputError(
                f"max_new_tokens={shown['max_new_tokens']} is larger than {_MOST_TOKENS}, the last position there is."
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            limit = shown["max_new_tokens"]
            raise InputError(
                f"min_new_tokens={shown['min_new_tokens']} is outside 0 … {limit}, which is max_new_tokens."
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k={shown['top_k']} leaves no token to draw; give 1 or more.")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={shown['seed']} is outside 0 … 2^63 - 1.")
        self._check_shares()
        if self.temperature == 0 and (self.top_p, self.top_k, self.min_p) != (None, None, None):
            raise InputError("`top_p`, `top_k` and `min_p` have no effect without a `temperature` above 0.")

    def _take_numbers(self) -> None:
        """Replace every number by Python's own."""
        wholes = ("max_new_tokens", "min_new_tokens", "top_k", "seed")
        for name, kind in (*((name, whole) for name in wholes), *_NUMBERS):
            value = getattr(self, name)
            if value is not None or name not in ("top_p", "top_k", "min_p"):
                object.__setattr__(self, name, kind(name, value))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def _check_shares(self) -> None:
        low, high = _PENALTIES
        if not 0 <= self.temperature <= _HOTTEST:
            raise InputError(f"temperature={self.temperature} is outside 0 … {_HOTTEST:.0f}. 1 leaves the model as is.")
        if self.top_p is not None and not _LEAST_TOP_P <= self.top_p <= 1:
            raise InputError(
                f"top_p={self.top_p} is outside [{_LEAST_TOP_P:g}, 1]. Temperature 0 takes the likeliest token alone."
            )
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise InputError(f"min_p={self.min_p} is outside (0, 1].")
        if not low <= self.repetition_penalty <= high:
            raise InputError(f"repetition_penalty={self.repetition_penalty} is outside {low:g} … {high:g}; 1 is off.")
        for name in ("presence_penalty", "frequency_penalty"):
            if abs(value := getattr(self, name)) > _MOST_PENALTY:
                raise InputError(f"{name}={value} is outside -{_MOST_PENALTY:g} … {_MOST_PENALTY:g}; 0 is off.")


def whole(name: str, value: object) -> int:
    """Return a whole number as Python's own.

    Args:
        name: the number's name, for the error.
        value: a number of any library.

    Raises:
        InputError: the value is not a whole number; ``True`` and ``False`` are none.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # an array of several numbers, for example
        raise InputError(f"{name}={_shown(value)} is not a whole number.") from None


def whole_within(name: str, value: object, low: int, high: int) -> int:
    """Return a whole number from ``low`` to ``high`` as Python's own.

    Raises:
        InputError: see `whole`; or the number is out of range.
    """
    number = whole(name, value)
    if not low <= number <= high:
        raise InputError(f"{name}={_shown(number)} is outside {low} … {high}.")
    return number


def _number(name: str, value: object) -> float:
    """Return a finite number as Python's own.

    Raises:
        InputError: the value is not a finite number; ``True`` and ``False`` are none.
    """
    try:
        if not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number that is too large for a float
        pass
    raise InputError(f"{name}={_shown(value)} is not a finite number.")


_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = tuple((name, _number) for name in _NAMES)


def _biases(given: object) -> Biases:
    """Return what is added to logits as pairs of a token id and a number.

    Raises:
        InputError: it is no mapping from token ids to numbers, has too many entries, or a number is out of range.
    """
    found = given.items() if isinstance(given, Mapping) else given
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise InputError(f"logit_bias={_shown(given)} does not map token ids to numbers.")
    pairs = [tuple(pair) if isinstance(pair, list | tuple) else () for pair in found]
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"logit_bias={_shown(given)} does not map token ids to numbers.")
    if len(pairs) > _MOST_BIASES:
        raise InputError(f"logit_bias={_shown(given)} has {len(pairs)} tokens; there may be {_MOST_BIASES}.")
    checked = {whole_within("logit_bias", token, 0, 2**31 - 1): _number("logit_bias", by) for token, by in pairs}
    if (wrong := next((by for by in checked.values() if abs(by) > _MOST_BIAS), None)) is not None:
        raise InputError(f"logit_bias={wrong} is outside -{_MOST_BIAS:g} … {_MOST_BIAS:g}.")
    return tuple(sorted(checked.items()))


def _shown(value: object) -> str:
    """Return a value as an error shows it. Python refuses to write out a whole number of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}…"


def another_sequence(sequence: int, number: int) -> int:
    """Return the identity for random numbers of a fork or a later turn, which draws other tokens than the first."""
    return (sequence + number * _GOLDEN) % 2**63
