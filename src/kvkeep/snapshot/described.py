"""The description in a snapshot's file: plain data of JSON, turned into checked values."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import InputError
from kvkeep.kv.slot_codec import KV_BITS
from kvkeep.pins import Spans, spans
from kvkeep.snapshot.fingerprint import FORMAT, Fingerprint
from kvkeep.snapshot.header import NotASnapshotError, check
from kvkeep.snapshot.states import Flag, Place

_MOST_LAYERS, _MOST_HEADS, _MOST = 4096, 2**16, 2**40
_LONGEST = 1000
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_COUNTERS = ("seen", "prompt", "sequences")


@dataclass(frozen=True)
class LayerDescription:
    """What a file says of a layer besides its tensors.

    Attributes:
        heads: KV heads.
        used: slots up to the last occupied one.
        capacity: slots per head of the block.
        budget: slots that may stay occupied, of all heads or of each head.
        pins: spans of positions that may not be evicted.
        whole: names of the state that each head has once.
        numbers: the row's counters by name.
    """

    heads: int
    used: int
    capacity: int
    budget: int | tuple[int, ...]
    pins: Spans
    whole: frozenset[str]
    numbers: Mapping[str, int]

    @property
    def room(self) -> int:
        """The most tokens that all heads together may hold."""
        return self.heads * self.budget if isinstance(self.budget, int) else sum(self.budget)


def fingerprint_of(about: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a file.

    Raises:
        NotASnapshotError: it is missing, or a part of it has a wrong type.
    """
    found = about.get("fingerprint")
    check(isinstance(found, dict), "it has no fingerprint")
    assert isinstance(found, dict)
    version = found.get("version")
    if type(version) is int and version > FORMAT:
        raise NotASnapshotError(f"it has format {version}, and this kvkeep reads formats up to {FORMAT}; update kvkeep")
    found = {"head_budget": None, "kv_bits": None, **found}  # files that know of no such setting
    names = {field.name for field in dataclasses.fields(Fingerprint)}
    check(found.keys() == names and version == FORMAT, "its fingerprint does not have the parts of this format")
    if isinstance(found["layer_budget"], list):
        found = {**found, "layer_budget": tuple(found["layer_budget"])}
    kinds = typing.get_type_hints(Fingerprint)
    for name, value in found.items():
        check(_is_a(value, kinds[name]), f"the {name} of its fingerprint is {value!r:.40}")
    check(1 <= found["budget"] <= _MOST, f"its budget is {found['budget']}")
    check(found["positions"] in ("true", "slot"), f"its positions mode is {found['positions']!r:.40}")
    if found["kv_bits"] is not None:
        check(found["kv_bits"] in KV_BITS, f"its kv_bits are {found['kv_bits']!r:.40}")
        check(found["dtype"] in _FLOATS, f"its dtype is {found['dtype']!r:.40}")
    return Fingerprint(**found)


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value has the type of a part of a fingerprint. Texts may not be long."""
    if isinstance(value, tuple):
        weights = all(isinstance(one, float | int) and not isinstance(one, bool) for one in value)
        return weights and len(value) <= _MOST_LAYERS and kind == str | tuple[float, ...]
    kinds = typing.get_args(kind) or (kind,)
    return type(value) in kinds and not (isinstance(value, str) and len(value) > _LONGEST)


def described_layers(about: Mapping[str, Any]) -> list[LayerDescription]:
    """The layers of a file, all of which have seen the same tokens.

    Raises:
        NotASnapshotError: there are none, or a number is out of range.
    """
    found = about.get("layers")
    check(isinstance(found, list) and 0 < len(found) <= _MOST_LAYERS, "it describes no layers")
    assert isinstance(found, list)
    layers = [_layer(one, f"layer {number}") for number, one in enumerate(found)]
    check(len({layer.numbers["seen"] for layer in layers}) == 1, "its layers have seen different numbers of tokens")
    return layers


def _layer(found: object, shown: str) -> LayerDescription:
    check(isinstance(found, dict), f"{shown} is not described")
    assert isinstance(found, dict)
    heads = whole(found.get("heads"), f"the number of heads of {shown}", least=1, most=_MOST_HEADS)
    capacity = whole(found.get("capacity"), f"the capacity of {shown}", least=1, most=2**31)
    used = whole(found.get("used"), f"the number of slots of {shown}", most=capacity)
    budget = found.get("budget")
    if isinstance(budget, list):
        check(len(budget) == heads, f"{shown} has {len(budget)} budgets for {heads} heads")
        budget = tuple(whole(one, f"a budget of {shown}", most=_MOST) for one in budget)
    else:
        budget = whole(budget, f"the budget of {shown}", least=1, most=_MOST)
    try:
        pins = spans(found.get("pins"))
    except InputError as error:
        raise NotASnapshotError(f"{shown}: {error}") from error
    names = found.get("whole")
    check(isinstance(names, list) and all(isinstance(name, str) for name in names), f"{shown} lacks names of state")
    numbers = found.get("numbers")
    check(isinstance(numbers, dict) and numbers.keys() >= {*_COUNTERS}, f"{shown} lacks counters")
    assert isinstance(numbers, dict)
    for name, value in numbers.items():
        least = -(2**63) if name == "sequences" else 0
        whole(value, f"{name!r:.40} of {shown}", least=least, most=2**63 - 1)
    whole(numbers["seen"], f"the number of tokens of {shown}", least=1, most=_MOST)
    check(numbers["prompt"] <= numbers["seen"], f"{shown} has a prompt longer than its text")
    return LayerDescription(heads, used, capacity, budget, pins, frozenset(names or ()), numbers)


def described_flags(about: Mapping[str, Any]) -> dict[int, dict[Place, Flag]]:
    """The settings of the layers with a state.

    Raises:
        NotASnapshotError: they are not in the form that `save` writes.
    """
    found = about.get("states")
    check(isinstance(found, dict) and len(found) <= _MOST_LAYERS, "it does not describe its states")
    assert isinstance(found, dict)
    states = {}
    for number, flags in found.items():
        check(number.isascii() and number.isdigit() and len(number) < 5, f"{number!r:.40} is no number of a layer")
        check(isinstance(flags, list) and all(map(_is_flag, flags)), f"the state of layer {number} is not described")
        states[int(number)] = {(name, key): flag for name, key, flag in flags}
    return states


def _is_flag(found: object) -> bool:
    """Whether an entry is a name, a key or none, and a setting."""
    if not isinstance(found, list) or len(found) != 3:
        return False
    name, key, flag = found
    return isinstance(name, str) and (key is None or type(key) is int) and (flag is None or type(flag) in (bool, int))


def whole(found: object, shown: str, *, least: int = 0, most: int) -> int:
    """A whole number in a range.

    Raises:
        NotASnapshotError: it is none.
    """
    if type(found) is not int or not least <= found <= most:
        raise NotASnapshotError(f"{shown} is {found!r:.40}")
    return found
