"""A profile: how much of the far past each KV head of a model needs, and the head budgets that follow.

A profile is a JSON file, ``kvkeep calibrate`` writes one::

    {"format": "kvkeep-profile", "version": 1,
     "model": {"name": …, "model_type": "llama", "layers": 6, "kv_heads": 2, "head_dim": 64, …},
     "weights": "0f3a…", "heads": [[0.0, 0.0], [0.0, 0.1], …], "least": 36, "sinks": 4,
     "measured": {…}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeep.budget import MOST
from kvkeep.errors import BudgetError, InputError
from kvkeep.result_files import finite, in_full, parse, write_whole

FORMAT, VERSION = "kvkeep-profile", 1

MOST_BYTES = 16 * 2**20
"""The largest file that is read; a profile of a hundred layers of a hundred heads has a fiftieth of it."""

MOST_HEADS = 2**16
"""The most heads of all layers together that are read."""

SINKS = 4
"""First tokens of a profile that does not say how many; `kvkeep calibrate` measures heads with as many."""

_SAME = {
    "model_type": "model type",
    "hidden_layers": "number of layers",
    "layers": "number of layers with keys",
    "hidden_size": "hidden size",
    "query_heads": "number of query heads",
    "kv_heads": "number of KV heads",
    "head_dim": "head dimension",
}
"""Facts about a model that have to agree with its configuration, as far as both sides know them, and their names."""
_SCALE = 2**60
"""Needs become whole numbers of this fineness, whose sums do not depend on their order."""
_AGAIN = "kvkeep calibrate makes one."


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How much of the far past each KV head of a model needs.

    Attributes:
        model: facts about the model, see `describe`, and ``layers``, the number of layers with keys.
        heads: by layer with keys and KV head, a number in [0, 1]: 1 = the head needs all of the past, 0 = the first and
            the newest tokens suffice.
        least: slots with which a head that needs nothing was measured: its first and newest tokens.
        weights: hash of the model's weights; ``None`` if the profile does not say.
        sinks: how many of the ``least`` slots are for first tokens; one at least is for the newest.
        measured: how the numbers came about, for people.
    """

    model: Mapping[str, Any]
    heads: tuple[tuple[float, ...], ...]
    least: int
    weights: str | None = None
    sinks: int = SINKS
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the profile's numbers.

        Raises:
            InputError: `fault` finds something wrong.
        """
        if (what := fault(self.as_dict())) is not None:
            raise InputError(f"This is no profile: {what}.")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile from a file. Sinks, the weights' hash and what was measured may be missing in it.

        Raises:
            InputError: there is no such file, or it holds no profile.
        """
        found = _read(in_full(path))
        if (what := fault(found)) is not None:
            raise InputError(f"{path} is no profile that can be used: {what}. {_AGAIN}")
        return cls(
            model=found["model"],
            heads=tuple(tuple(map(float, layer)) for layer in found["heads"]),
            least=found["least"],
            sinks=found.get("sinks", SINKS),
            weights=found.get("weights"),
            measured=found.get("measured", {}),
        )

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file. After a crash the file holds the old or the new content, never a part.

        Raises:
            InputError: the file cannot be written; the old content stays.
        """
        text = json.dumps(finite(self.as_dict()), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        try:
            write_whole(in_full(path), text.encode("utf-8", "replace"))  # a name may hold half a character
        except OSError as error:
            raise InputError(f"The profile cannot be written to {path}: {error.strerror}.") from error

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the profile's JSON file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": dict(self.model),
            "weights": self.weights,
            "heads": [list(layer) for layer in self.heads],
            "least": self.least,
            "sinks": self.sinks,
            "measured": dict(self.measured),
        }

    def check(self, config: Any, *, layers: int | None = None) -> None:
        """Refuse a model of another kind than the one that the profile was made for.

        Facts that the configuration or the profile does not say are not compared.

        Args:
            config: the model's configuration.
            layers: number of its layers with keys; by default not compared.

        Raises:
            InputError: the configuration or the number of layers differs.
        """
        here = {**describe(config), "layers": layers}
        for key, name in _SAME.items():
            mine, theirs = self.model.get(key), here[key]
            if mine != theirs and None not in (mine, theirs):
                raise InputError(
                    f"The profile belongs to another model ({self.model.get('name', 'unnamed')!s:.80}): its "
                    f"{name} is {mine!s:.80}, here it is {theirs}. The needs of one model's heads say nothing about "
                    "another's: calibrate this model."
                )

    def check_weights(self, weights: Callable[[], str | None]) -> None:
        """Refuse a model with other weights, such as the same one after fine-tuning.

        A model passes if its hash is not known, or if the profile names none.

        Args:
            weights: returns the hash of the model's weights, or ``None``. It is called only if the profile names one.

        Raises:
            InputError: the weights differ.
        """
        if self.weights is not None and (here := weights()) is not None and here != self.weights:
            raise InputError(
                f"The profile belongs to other weights ({self.weights!s:.80}, here {here}); a copy that was quantised "
                "or rounded to another dtype has others, too. Calibrate this model, or write "
                '"weights": null into the profile to use it all the same.'
            )

    def budgets(self, budget: int, least: int = 1, *, most: int | None = None) -> list[list[int]]:
        """Return the budget of each head, by layer. The budgets add up to ``layers * heads * budget`` exactly.

        A head that needs nothing gets its first and newest tokens: ``least`` slots of the profile. Every other head
        gets twice as many, since most policies give their newest tokens up to half of a head's slots, and the rest is
        divided among these heads in proportion to their needs. Where the budget is smaller than one of these numbers,
        it takes its place, so a budget of ``least`` slots or fewer is the same for all heads.

        Args:
            budget: slots per head on average.
            least: slots that every head gets at least, or ``budget`` if that is smaller.
            most: slots that a head can use, at least ``budget``, for example the length of the longest text. What is
                left of its share goes to the others; ``None``: no limit.

        Raises:
            BudgetError: a number is below 1 or above any memory.
        """
        for name, number in {"budget": budget, "least": least, "most": budget if most is None else most}.items():
            if not 1 <= number <= MOST:
                raise BudgetError(f"{name}={number} is outside 1 … 2^50 slots of a head.")
        needs = [int(need * _SCALE) for layer in self.heads for need in layer]
        few, many = (min(budget, max(least, slots)) for slots in (self.least, 2 * self.least))
        # `limited` marks no head if no head needs anything, and then all are alike
        first = [few if limited else many for layer in self.limited() for limited in layer]
        # with less than the budget in each head, there would be no room for all slots
        room = None if most is None else [max(budget, most) - slots for slots in first]
        more = _shares(needs, budget * len(needs) - sum(first), room)
        each, heads = [slots + part for slots, part in zip(first, more, strict=True)], len(self.heads[0])
        return [each[at : at + heads] for at in range(0, len(each), heads)]

    def limited(self) -> list[tuple[bool, ...]]:
        """Return by layer whether each head needs only its first and newest tokens, that is nothing of the far past.

        If no head of the model needs more, none is marked.
        """
        any_need = any(map(any, self.heads))
        return [tuple(any_need and need == 0 for need in layer) for layer in self.heads]


def _shares(needs: Sequence[int], total: int, room: Sequence[int] | None) -> list[int]:
    """Return whole shares of a total in proportion to the needs, none above its room (``None``: no limit).

    Where no head needs anything, or all that do are full, the rest is divided equally.

    The largest remainders are rounded up; among equal ones, the first. The total must fit into the room of all.
    """
    # each round fills heads to their room and divides what is left among the others
    shares, open_ = [0] * len(needs), list(range(len(needs)))
    while open_:
        weights = [needs[i] for i in open_] if any(needs[i] for i in open_) else [1] * len(open_)
        parts = _in_proportion(weights, total)
        full = set() if room is None else {i for i, part in zip(open_, parts, strict=True) if part > room[i]}
        for i, part in zip(open_, parts, strict=True):
            shares[i] = room[i] if i in full and room is not None else part
        if not full:
            break
        total -= sum(shares[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    return shares


def _in_proportion(weights: Sequence[int], total: int) -> list[int]:
    """Return whole numbers that add up to the total, in proportion to integer weights, of which one is above 0.

    The largest remainders are rounded up; among equal ones, the first.
    """
    everything = sum(weights)
    parts, rests = zip(*(divmod(total * weight, everything) for weight in weights), strict=True)
    whole = list(parts)
    for i in sorted(range(len(whole)), key=lambda i: (-rests[i], i))[: total - sum(whole)]:
        whole[i] += 1
    return whole


def describe(config: Any) -> dict[str, Any]:
    """Return the facts of a model's configuration by which a profile knows its model: type, layers, heads and dims.

    A fact is ``None`` if the configuration does not have it as one number or text.
    """
    text = config.get_text_config(decoder=True)
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    own = hidden // heads if isinstance(heads, int) and heads > 0 and isinstance(hidden, int) else None
    found = {
        "model_type": getattr(text, "model_type", None),
        "hidden_layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": hidden,
        "query_heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None),
        "head_dim": getattr(text, "head_dim", None) or own,
    }
    # a configuration may hold anything, and what is compared has to survive JSON
    return {name: value if type(value) in (int, str) else None for name, value in found.items()}


# -- a file of somebody else -------------------------------------------------------------------------------------------


def _read(path: Path) -> Any:
    """Return the JSON value in a profile's file; what it says is not checked.

    Raises:
        InputError: the file is missing, too large or damaged.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise InputError(f"{path} is no file, so it holds no profile.")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise InputError(f"{path} has {size} bytes, and no profile has more than {MOST_BYTES}. {_AGAIN}")
        return parse(path.read_bytes())
    except OSError as error:
        raise InputError(f"The profile {path} cannot be read: {error.strerror}. {_AGAIN}") from error
    except ValueError as error:
        if isinstance(error, InputError):  # a ValueError that says already what happened
            raise
        raise InputError(f"{path} is no profile: {error}. {_AGAIN}") from error


def fault(found: Any) -> str | None:
    """Return what is wrong with the content of a profile's file, as a clause for an error; ``None`` if it is valid."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return f'it has no "format": "{FORMAT}"'
    if (version := found.get("version")) != VERSION:
        return f"its version is {version!r:.40}, and this kvkeep reads version {VERSION}"
    model = found.get("model")
    if not isinstance(model, dict) or not isinstance(found.get("measured", {}), dict):
        return "it does not say which model it belongs to, or how it was measured"
    if not isinstance(found.get("weights"), str | None):
        return '"weights" is neither a hash nor null'
    # type() and not isinstance: true and false are ints to Python
    if type(least := found.get("least")) is not int or not 1 <= least <= MOST:
        return f'"least" is {least!r:.40}, and not a number of slots'
    if type(sinks := found.get("sinks", SINKS)) is not int or not 0 <= sinks <= MOST:
        return f'"sinks" is {sinks!r:.40}, and not a number of first tokens'
    return _fault_of_heads(found.get("heads"), model)


def _fault_of_heads(heads: Any, model: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a profile's needs by layer and head, as a clause for an error; ``None`` if they are
    valid.

    Args:
        heads: the needs, of each head from 0 to 1.
        model: the profile's facts, with whose ``layers`` and ``kv_heads`` the needs have to agree.
    """
    rows = heads if isinstance(heads, list) and heads and all(isinstance(row, list) and row for row in heads) else None
    if rows is None or len({len(row) for row in rows}) != 1:
        return '"heads" has to be a list of layers with the same number of heads each'
    shape = len(rows), len(rows[0])
    if shape[0] * shape[1] > MOST_HEADS:
        return f'"heads" has {shape[0]} × {shape[1]} numbers; more than {MOST_HEADS} are not read'
    for layer, row in enumerate(rows):
        for head, need in enumerate(row):
            if type(need) not in (int, float) or not math.isfinite(need) or not 0 <= need <= 1:
                return f"the need of layer {layer}, head {head} is {need!r:.40}; needs are numbers from 0 to 1"
    for name, mine in zip(("layers", "kv_heads"), shape, strict=True):
        if model.get(name) != mine:
            return f'"heads" has {shape[0]} × {shape[1]} numbers, but "model" says {name}: {model.get(name)!r:.40}'
    return None
