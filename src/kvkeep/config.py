"""``kvkeep.toml``: the settings of a bounded memory in a file, which `kvkeep tune` writes.

``kvkeep generate --config kvkeep.toml`` and ``Engine.from_config("kvkeep.toml")`` read it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvkeep import budget as budgets
from kvkeep.errors import InputError, KVKeepError, PolicyError, closest
from kvkeep.kv_bits import check_bits
from kvkeep.policies._head_budgets import parsed as head_rule
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import available, parse, split
from kvkeep.result_files import in_full

NAME = "kvkeep.toml"
"""The usual name of the file."""

NOTES = "tuned"
"""A table about how the settings were found; nothing reads it."""

_LARGEST = 2**20  # bytes; the file has a line per setting
_POSITIONS = ("true", "slot")  # texts: the TOML value true is none of them


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a file; ``None`` where it leaves one out.

    Attributes:
        model: a hub name or a folder.
        policy: the eviction policy, as a string.
        budget: tokens kept per layer and head.
        layer_budget: how the budget is spread over layers: a rule, or a weight for each layer.
        head_budget: how the budget is divided among KV heads, e.g. ``profile:FILE``.
        kv_bits: bits of keys and values in the slots, e.g. ``"k8v4"``, or a number.
        positions: ``true`` or ``slot``.
        prefill_chunk: prompt tokens per step.
        guard: the share of attention that a smaller budget may lose, see `Request`.
        keep_prompt: whether prompts stay in their slots, or the share of the budget to which they are cut first.
        dtype: of the model, e.g. ``bfloat16``.
        load_in: format of quantised weights.
    """

    model: str | None = None
    policy: str | None = None
    budget: int | None = None
    layer_budget: str | tuple[float, ...] | None = None
    head_budget: str | None = None
    kv_bits: str | int | None = None
    positions: str | None = None
    prefill_chunk: int | None = None
    guard: float | None = None
    keep_prompt: bool | float | None = None
    dtype: str | None = None
    load_in: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], source: str = "The configuration") -> Config:
        """Return a configuration with the settings of a mapping, after a check of each. Its table `NOTES` is left out.

        Args:
            settings: name → value.
            source: where they come from, for messages.

        Raises:
            InputError: a name is unknown, or a value is of the wrong kind, out of range or no policy or rule.
        """
        known = [field.name for field in fields(cls)]
        found: dict[str, Any] = {}
        for name, value in settings.items():
            if name == NOTES:
                continue
            if name not in known:
                raise InputError(f"{source} has {name!r:.80}, which is no setting.{_meant(str(name), known)}")
            found[name] = _checked(name, tuple(value) if isinstance(value, list) else value, source)
        return cls(**found)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Config:
        """Return the configuration in a TOML file.

        Raises:
            InputError: the file cannot be read, is not TOML, or has a setting that cannot be used.
        """
        return cls.of(_toml(path), str(path))

    def settings(self) -> dict[str, Any]:
        """Return the settings that are given, as name → value."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def text(self, heading: str = "", notes: Mapping[str, str | int | float] | None = None) -> str:
        """Return the content of a configuration file with these settings.

        Args:
            heading: a comment at the file's beginning.
            notes: the table `NOTES`.
        """
        # a comment of TOML may hold no control characters
        lines = [f"# {''.join(filter(str.isprintable, line))}" for line in heading.splitlines()]
        lines += [f"{name} = {_value(value)}" for name, value in self.settings().items()]
        if notes:
            lines += ["", f"[{NOTES}]", *(f"{name} = {_value(value)}" for name, value in notes.items())]
        return "\n".join(lines) + "\n"


def _toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a TOML file as a dict.

    Raises:
        InputError: the file cannot be read, is too large, or is no TOML.
    """
    file = in_full(path)
    try:
        if file.exists() and not file.is_file():  # a pipe would never end
            raise InputError(f"{path} is no file. Give the {NAME} that kvkeep tune has written.")
        with file.open("rb") as opened:
            data = opened.read(_LARGEST + 1)  # one byte more shows that the file is too large
    except InputError:  # a ValueError, too
        raise
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "its name is no path"
        raise InputError(f"{path} cannot be read: {why}. Give the {NAME} that kvkeep tune has written.") from error
    if len(data) > _LARGEST:
        raise InputError(f"{path} is larger than {_LARGEST} bytes, so it is no {NAME}.")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise InputError(f"{path} is nested too deeply. A {NAME} has lines such as: budget = 512.") from None
    except ValueError as error:  # no UTF-8, or no TOML
        raise InputError(f'{path} is no TOML: {error}. Write lines such as: policy = "h2o".') from error


def _meant(name: str, known: Sequence[str]) -> str:
    """Return the end of an error about an unknown name: the nearest known name, or all of them."""
    close = closest(name.lower().replace("-", "_"), known)
    return f" Did you mean {close!r}?" if close else f" There are: {', '.join(known)}."


def _checked(name: str, value: Any, source: str) -> Any:
    """Return the value of a setting as it is, after checking its kind and range.

    Args:
        name: the setting.
        value: its value.
        source: where it comes from, for messages.

    Raises:
        InputError: the value is of the wrong kind, out of range, or names no policy or rule.
    """
    try:
        wanted = _CHECKS[name](value)
    except KVKeepError as error:
        raise InputError(f"{source}: {error}") from error
    if wanted is not None:
        raise InputError(f"{source}: {name} = {value!r:.80} is not {wanted}.")
    return value


def _text(value: object) -> str | None:
    """Return in words what the setting should be; ``None`` if it is a text that is not empty."""
    return None if isinstance(value, str) and value.strip() else "a text in quotes"


def _policy(value: object) -> str | None:
    """Return in words what the setting should be if it is no text; ``None`` if it is a policy.

    Raises:
        PolicyError: the text is no policy, or names a module.
    """
    if isinstance(value, str):
        # raises an error that says what is wrong with the policy
        policy_of(value)
    return _text(value)


def policy_of(name: str) -> Policy:
    """Return the policy of a name that a file gives, made with its options. Modules are refused: a file could name any.

    Raises:
        PolicyError: the name is a module's, no policy of that name is registered, or its options are wrong.
    """
    if ":" in split(name)[0] and split(name)[0] not in available():
        raise PolicyError(f"policy {name!r:.80} names a module, which a file may not. Give it as `policy` instead.")
    return parse(name)


def _whole(value: object) -> str | None:
    """Return in words what the setting should be; ``None`` if it is a whole number of tokens, 1 or more."""
    if isinstance(value, int) and not isinstance(value, bool):
        return None if 1 <= value <= budgets.MOST else "a number of tokens from 1 on"
    return "a whole number of tokens"


def _rule(value: object) -> str | None:
    """Return in words what the setting should be if it is neither a text nor weights, numbers above 0; ``None`` if it
    is weights or a rule over layers.

    Raises:
        BudgetError: the text is no such rule.
    """
    if isinstance(value, str):
        # raises an error that names the rules if the text is none of them
        budgets.per_layer(value, budget=1, layers=1)  # the numbers do not matter for that
        return None
    if isinstance(value, tuple) and value and all(_share(one, most=float("inf")) is None and one for one in value):
        return None
    return "a rule such as 'ramp:0.2', or a list with a weight above 0 for each layer"


def _heads(value: object) -> str | None:
    """Return in words what the setting should be if it is no text; ``None`` if it is a rule over heads. Unknown rules
    raise a `KVKeepError`.
    """
    if isinstance(value, str):
        head_rule(value)
    return _text(value)


def _kept(value: object) -> str | None:
    """Return in words what the setting should be; ``None`` if it is true, false or a share in (0, 1]."""
    if isinstance(value, bool) or (isinstance(value, int | float) and 0 < value <= 1):
        return None
    return "true, false or a share above 0 such as 0.5"


def _bits(value: object) -> str | None:
    """Raise an `InputError` for bits that no slot can have; return ``None``, which means valid."""
    check_bits(value)
    return None


def _mode(value: object) -> str | None:
    """Return in words what the setting should be; ``None`` if it is the text ``true`` or ``slot``."""
    return None if value in _POSITIONS else " or ".join(map(repr, _POSITIONS))


def _share(value: object, most: float = 1.0) -> str | None:
    """Return in words what the setting should be; ``None`` if it is a finite number from 0 to ``most``."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most and value != float("inf"):
        return None
    return "a share from 0 to 1"


_CHECKS = {
    "model": _text,
    "policy": _policy,
    "budget": _whole,
    "layer_budget": _rule,
    "head_budget": _heads,
    "kv_bits": _bits,
    "positions": _mode,
    "prefill_chunk": _whole,
    "guard": _share,
    "keep_prompt": _kept,
    "dtype": _text,
    "load_in": _text,
}


def _value(value: Any) -> str:
    """Return a text, number, truth value or list of such as a value in TOML."""
    if isinstance(value, str):  # strings as in JSON, but that TOML wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value).lower()  # true and false; numbers have no capitals
