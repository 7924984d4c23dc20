"""Steps written out by hand, for examples that can be checked on paper."""

from __future__ import annotations

from .loops import Rule, Step, Vector


def step(rule: Rule, rows: list[dict[int, float]], *, values: list[Vector] | None = None) -> list[int]:
    """Show a rule of one head the rows of its newest tokens, and say what it keeps of the keys of the last row."""
    kept = sorted(rows[-1])
    first = kept[-1] - len(rows) + 1
    decode = len(rows) == 1
    rule.look(0, Step([first + n for n in range(len(rows))], rows, [rows], [], values or [], decode, [], 1.0))
    return rule.cut(0, kept, kept[-1] + 1, decode=decode)


def row(*probabilities: float) -> dict[int, float]:
    """The probabilities of the positions 0, 1, 2, …"""
    return dict(enumerate(probabilities))
