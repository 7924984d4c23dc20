"""The first moment of a request in its row."""

from __future__ import annotations

from kvkeep.engine.generation import Generation
from kvkeep.engine.prefixes import Prefixes
from kvkeep.engine.rows import Rows


def begin(one: Generation, row: int, rows: Rows, prefixes: Prefixes) -> None:
    """Begin a request in its row, with the memory that it continues if there is one."""
    if not one.token_ids:
        one.mark("started")
    held, one.resumed = one.hosted, len(one.token_ids)
    contents = held.load() if held else one.load() if one.load else None if one.scored else prefixes.find(one)
    sequence, pins = one.request.sequence, one.pins
    rows.begin(row, policy=one.policy, budget=one.budget, sequence=sequence, pins=pins, contents=contents)
    one.hosted = None
    if held is None:
        one.fed = one.cached = contents.seen if contents else 0
