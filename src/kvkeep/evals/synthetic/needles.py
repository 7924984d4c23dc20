"""Needles of RULER: special magic numbers, words and UUIDs in a haystack."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvkeep.evals.answered import Item
from kvkeep.evals.synthetic.words import NOISE, Haystack, planted, value, values

_DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]
_TEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}"
)
_QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
_LEAD = " The special magic {kind} for {query} mentioned in the provided text are"
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."


@dataclass(frozen=True)
class Needles:
    """One of RULER's needle tasks.

    Attributes:
        hay: ``noise``, ``essay``, or ``needle`` (other needles).
        keys: kind of the keys: ``words`` or ``uuids``.
        values: kind of the values: ``numbers`` or ``uuids``.
        n_keys, n_values, n_queries: keys in the text, values of each key, and keys that are asked for.
    """

    hay: str
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1


TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", n_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", n_values=4),
    "niah_multiquery": Needles("essay", n_keys=4, n_queries=4),
}


def items(task: Needles, haystack: Haystack, seed: str) -> Callable[[int], Item]:
    """Makes a text with this many sentences around the needles."""

    def make(n: int) -> Item:
        drawn = random.Random(seed)
        keys = values(task.keys, drawn, task.n_keys)
        held = {key: values(task.values, drawn, task.n_values) for key in keys}
        needles = [_said(task, key, one) for key in keys for one in held[key]]
        asked = keys[: task.n_queries]
        context, depths = _context(task, haystack, needles, n, drawn)
        answers = tuple(one for key in asked for one in held[key])
        single = len(answers) == 1
        return _item(task, context, _listed(asked), answers, depths[0] if single else None)

    return make


def _context(
    task: Needles, haystack: Haystack, needles: list[str], n: int, drawn: random.Random
) -> tuple[str, list[float]]:
    depths = drawn.sample(_DEPTHS, len(needles))
    if task.hay == "noise":
        hay = [NOISE] * n
    elif task.hay == "needle":
        hay = _others(task, needles, n, drawn)
    else:
        return planted(haystack.first(n), drawn.sample(needles, len(needles)), depths), depths
    places = [round(depth * n) for depth in depths]
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
        hay.insert(place, needle)
    return "\n".join(hay), depths


def _others(task: Needles, needles: list[str], n: int, drawn: random.Random) -> list[str]:
    """Needles with other keys."""
    hay: list[str] = []
    while len(hay) < n:
        key = value(task.keys, drawn)
        if not any(f" {key} " in needle for needle in needles):
            hay.append(_said(task, key, value(task.values, drawn)))
    return hay


def _said(task: Needles, key: str, held: str) -> str:
    return _NEEDLE.format(kind=task.values, key=key, value=held)


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _item(task: Needles, context: str, query: str, answers: tuple[str, ...], depth: float | None) -> Item:
    """RULER's wording; one answer is asked for in the singular."""
    templates, kind = (_TEXT, _QUESTION, _LEAD), task.values
    if len(answers) == 1:
        kind = kind.removesuffix("s")
        changed = [("Some", "A"), ("are all", "is"), ("are", "is")]
        for before, after in changed:
            templates = tuple(template.replace(before, after) for template in templates)  # type: ignore[assignment]
    text, question, lead = (part.format(kind=kind, context=context, query=query) for part in templates)
    return Item(text=text, question=question, lead=lead, answers=answers, depth=depth)
