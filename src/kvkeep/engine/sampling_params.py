"""How tokens are chosen, and how many; every number is checked when it comes in."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from kvkeep.errors import InputError, renames
from kvkeep.parameters import (
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    MAX_NEW_TOKENS,
    MAX_TOKENS,
    MIN_NEW_TOKENS,
    MIN_P,
    PRESENCE_PENALTY,
    REPETITION_DETECTION,
    REPETITION_PENALTY,
    REPETITION_RULE,
    SAMPLING_PARAMETERS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Parameter,
)

_MOST_BIASES = 1024
_LONGEST_PATTERN = 4096  # tokens; each new token of a text may be compared with as many
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples lie far apart


SAMPLING_ELSEWHERE = {
    **dict.fromkeys(
        ("max_tokens", "max_length", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict"),
        "max_new_tokens",
    ),
    **dict.fromkeys(("min_tokens", "min_length"), "min_new_tokens"),
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
}
"""Names of other libraries → parameters of `SamplingParams`."""

_OF_A_REQUEST = {
    **{
        name: name
        for name in (
            *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "structured_outputs"),
            *("logprobs", "prompt_logprobs"),
        )
    },
    "ignore_eos": "ignore_end",
    "eos_token_id": "stop_token_ids",
    **dict.fromkeys(("stop_strings", "stop_sequences"), "stop"),
    **dict.fromkeys(("guided_decoding", "response_format"), "structured_outputs"),
}


Biases: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids, and what is added to their logits."""


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """When a text repeats itself, and ends: its last tokens are one pattern, several times in a row.

    Names and meaning are vLLM's, but ``min_repeated_tokens``, which vLLM does not have.

    Attributes:
        max_pattern_size: tokens of the longest pattern; 0 looks for none.
        min_pattern_size: tokens of the shortest pattern; 0 is the same as 1.
        min_count: how often the pattern stands at the end, 2 or more.
        min_repeated_tokens: how many tokens at the end must repeat the pattern, the first time included. A short
            pattern stands there more often than ``min_count`` then.

    Raises:
        InputError: a number is out of range, or the shortest pattern is longer than the longest.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0
    min_repeated_tokens: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            number = whole_within(field.name, getattr(self, field.name), 0, _LONGEST_PATTERN)
            object.__setattr__(self, field.name, number)
        if self.max_pattern_size < self.min_pattern_size:
            raise InputError(
                f"min_pattern_size={self.min_pattern_size} is more than max_pattern_size={self.max_pattern_size}."
            )
        if self.max_pattern_size and self.min_count < 2:
            raise InputError(f"min_count={self.min_count} is no repetition; give 2 or more.")

    def repeated_tokens(self, pattern_size: int) -> int:
        """Return how many tokens at the end must repeat a pattern of this size, the first time included."""
        return max(self.min_count * pattern_size, self.min_repeated_tokens)


@renames(
    {
        **{name: f"`{own}`" for name, own in SAMPLING_ELSEWHERE.items()},
        **{name: f"`{own}` of `Request`, beside `sampling`" for name, own in _OF_A_REQUEST.items()},
        "do_sample": "`temperature`: 0 takes the likeliest token, and above 0 one is drawn",
        **dict.fromkeys(
            ("n", "best_of", "num_return_sequences"), "a `Request` for each answer, with a `sequence` of its own"
        ),
    }
)
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
        repetition_detection: ends a text that repeats itself: `RepetitionDetectionParams`, or a mapping with its
            fields; ``True`` is the rule of ``kvkeep.parameters.REPETITION_RULE``. ``None`` and ``False`` end nothing.

    Raises:
        InputError: a value is not a number or is out of its range, or ``top_p`` or ``top_k`` would be ignored.
    """

    max_new_tokens: int = MAX_NEW_TOKENS.default
    min_new_tokens: int = MIN_NEW_TOKENS.default
    temperature: float = TEMPERATURE.default
    top_p: float | None = TOP_P.default
    top_k: int | None = TOP_K.default
    min_p: float | None = MIN_P.default
    repetition_penalty: float = REPETITION_PENALTY.default
    presence_penalty: float = PRESENCE_PENALTY.default
    frequency_penalty: float = FREQUENCY_PENALTY.default
    logit_bias: Mapping[int, int | float] | Iterable[tuple[int, int | float]] = LOGIT_BIAS.default
    seed: int = SEED.default
    repetition_detection: RepetitionDetectionParams | Mapping[str, int] | bool | None = REPETITION_DETECTION.default

    def __post_init__(self) -> None:
        self._take_numbers()
        object.__setattr__(self, "repetition_detection", _repetition_rule(self.repetition_detection))
        shown = {name: _shown(value) for name, value in vars(self).items()}
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens={shown['max_new_tokens']} asks for no token; give 1 or more.")
        if self.max_new_tokens > MAX_TOKENS:
            raise InputError(
                f"max_new_tokens={shown['max_new_tokens']} is larger than {MAX_TOKENS}, the last position there is."
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            limit = shown["max_new_tokens"]
            raise InputError(
                f"min_new_tokens={shown['min_new_tokens']} is outside 0 … {limit}, which is max_new_tokens."
            )
        if self.top_k is not None and not TOP_K.allows(self.top_k):
            raise InputError(f"top_k={shown['top_k']} leaves no token to draw; give 1 or more.")
        if not SEED.allows(self.seed):
            raise InputError(f"seed={shown['seed']} is outside 0 … 2^63 - 1.")
        self._check_shares()
        if self.temperature == 0 and (self.top_p, self.top_k, self.min_p) != (None, None, None):
            raise InputError("`top_p`, `top_k` and `min_p` have no effect without a `temperature` above 0.")

    def _take_numbers(self) -> None:
        """Replace numbers by those of Python's own types, and the logit bias by pairs, after checking their types."""
        for name, take, may_miss in _NUMBERS:
            value = getattr(self, name)
            if value is not None or not may_miss:
                object.__setattr__(self, name, take(name, value))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def _check_shares(self) -> None:
        """Check the ranges of temperature, top-p, min-p and the penalties."""
        if not TEMPERATURE.allows(self.temperature):
            raise InputError(
                f"temperature={self.temperature} is outside {_range(TEMPERATURE)}. 1 leaves the model as is."
            )
        if self.top_p is not None and not TOP_P.allows(self.top_p):
            raise InputError(
                f"top_p={self.top_p} is outside [{TOP_P.least:g}, 1]. Temperature 0 takes the likeliest token alone."
            )
        if self.min_p is not None and not MIN_P.allows(self.min_p):
            raise InputError(f"min_p={self.min_p} is outside (0, 1].")
        if not REPETITION_PENALTY.allows(self.repetition_penalty):
            raise InputError(
                f"repetition_penalty={self.repetition_penalty} is outside {_range(REPETITION_PENALTY)}; 1 is off."
            )
        for parameter in (PRESENCE_PENALTY, FREQUENCY_PENALTY):
            if not parameter.allows(value := getattr(self, parameter.name)):
                raise InputError(f"{parameter.name}={value} is outside {_range(parameter)}; 0 is off.")


def whole(name: str, value: object) -> int:
    """Return an integer of any library as a Python integer. Booleans and fractions are refused.

    Args:
        name: the number's name, for the error.
        value: a number of any library.

    Raises:
        InputError: the value is not a whole number; ``True`` and ``False`` are not taken.
    """
    try:
        if isinstance(value, bool):  # an int to Python
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # what is no number raises, and is refused below
    except Exception:  # an array of several numbers, for example
        raise InputError(f"{name}={_shown(value)} is not a whole number.") from None


def whole_within(name: str, value: object, low: int, high: int) -> int:
    """Return an integer of any library as a Python integer, after checking that it is between ``low`` and ``high``,
    both included.

    Raises:
        InputError: see `whole`; or the number is out of range.
    """
    number = whole(name, value)
    if not low <= number <= high:
        raise InputError(f"{name}={_shown(number)} is outside {low} … {high}.")
    return number


def _number(name: str, value: object) -> float:
    """Return a finite number of any library as a Python float.

    Raises:
        InputError: the value is not a finite number; ``True`` and ``False`` are not taken.
    """
    try:
        if not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number that is too large for a float
        pass
    raise InputError(f"{name}={_shown(value)} is not a finite number.")


def _range(parameter: Parameter) -> str:
    """Return the range of a number in words: ``0 … 1000``."""
    return f"{parameter.least:g} … {parameter.most:g}"


_NUMBERS = tuple(
    (parameter.name, take, parameter.default is None)
    for kind, take in ((int, whole), (float, _number))
    for parameter in SAMPLING_PARAMETERS.values()
    if parameter.kind is kind
)
"""Of each number: its name, the function that makes it Python's own, and whether it may be ``None``."""


def _biases(given: object) -> Biases:
    """Return a logit bias as checked pairs of token id and number, sorted by token id.

    Raises:
        InputError: ``given`` is no mapping from token ids to numbers, has too many entries, or a number is out of
            range.
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
    if (wrong := next((by for by in checked.values() if not LOGIT_BIAS.allows(by)), None)) is not None:
        raise InputError(f"logit_bias={wrong} is outside {_range(LOGIT_BIAS)}.")
    return tuple(sorted(checked.items()))


def _repetition_rule(given: Any) -> RepetitionDetectionParams | None:
    """Return the checked rule that ends a repetitive text; ``None`` if repetition ends nothing.

    Args:
        given: a rule, or a mapping with its fields; ``True``: ``kvkeep.parameters.REPETITION_RULE``. ``None``,
            ``False`` and a rule with a ``max_pattern_size`` of 0 end nothing.

    Raises:
        InputError: ``given`` is no rule, or a number of it is out of range.
    """
    if given is None or given is False:
        return None
    if given is True:
        given = REPETITION_RULE
    if isinstance(given, Mapping):
        known = [field.name for field in fields(RepetitionDetectionParams)]
        if unknown := [name for name in given if name not in known]:
            raise InputError(
                f"repetition_detection={_shown(dict(given))}: there is no {_shown(unknown[0])}, but {', '.join(known)}."
            )
        try:
            given = RepetitionDetectionParams(**given)
        except InputError as error:
            raise InputError(f"repetition_detection={_shown(dict(given))}: {error}") from error
    if not isinstance(given, RepetitionDetectionParams):
        raise InputError(
            f"repetition_detection={_shown(given)} is no rule; give True, or a mapping such as {REPETITION_RULE}."
        )
    return given if given.max_pattern_size else None


def _shown(value: object) -> str:
    """Return a value's ``repr`` for an error, cut to 60 characters.

    Python refuses to write out integers of thousands of digits.
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}…"


def another_sequence(sequence: int, number: int) -> int:
    """Return a new identity for random numbers, derived from an identity and a number, so that forks and later turns
    draw differently.
    """
    return (sequence + number * _GOLDEN) % 2**63  # an identity that `Request.sequence` may have
