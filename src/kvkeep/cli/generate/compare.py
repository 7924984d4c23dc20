"""Two continuations of one prompt side by side: where they differ, how far they agree, what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvkeep.cli import console
from kvkeep.engine import Result

_NARROW = 60
"""On a terminal with fewer columns the texts are shown one above the other."""


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    Attributes:
        name: the policy, or ``full cache``.
        budget: tokens that it may keep, in words.
        result: the text and its tokens.
        held_bytes: keys, values and everything else that its cache holds.
    """

    name: str
    budget: str
    result: Result
    held_bytes: int


@dataclass(frozen=True)
class Difference:
    """How two sequences of tokens differ.

    Attributes:
        first_index: index of the first new token that differs, from 0; ``None`` if none does. It is the shorter
            length if one sequence begins with the other.
        bounded_token: the bounded cache's token there; ``None`` if its text had ended.
        full_token: the full cache's token there; ``None`` if its text had ended.
        compared_tokens: length of the shorter sequence.
        equal_tokens: equal tokens at equal places, up to that length.
        agreement_ratio: ``equal_tokens / compared_tokens``.
    """

    first_index: int | None
    bounded_token: str | None
    full_token: str | None
    compared_tokens: int
    equal_tokens: int
    agreement_ratio: float


def measure(bounded: Sequence[int], full: Sequence[int], show_token: Callable[[int], str]) -> Difference:
    """Compare the new tokens of two runs; neither is empty."""
    pairs = list(zip(bounded, full, strict=False))
    equal = sum(a == b for a, b in pairs)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def token(ids: Sequence[int]) -> str | None:
        return show_token(ids[first]) if first < len(ids) else None

    return Difference(
        first_index=None if first == max(len(bounded), len(full)) else first,
        bounded_token=token(bounded),
        full_token=token(full),
        compared_tokens=len(pairs),
        equal_tokens=equal,
        agreement_ratio=equal / len(pairs),
    )


def show(bounded: Side, full: Side, difference: Difference) -> None:
    """Print both texts and the figures."""
    screen = console.out()
    screen.print(_texts(screen, bounded, full))
    screen.print(_figures(bounded, full))
    screen.print()
    screen.print(console.facts(_verdict(bounded, full, difference)))


def _texts(screen: Console, bounded: Side, full: Side) -> RenderableType:
    common = _common_length(bounded.result.text, full.result.text)
    panels = [
        Panel(_marked(side.result.text, common), title=Text(side.name), subtitle=Text(side.budget))
        for side in (bounded, full)
    ]
    grid = Table.grid(expand=True)
    if screen.width < _NARROW:
        grid.add_column()
        for panel in panels:
            grid.add_row(panel)
    else:
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
    return grid


def _common_length(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _marked(text: str, common: int) -> Text:
    """The text, in colour after the common beginning."""
    return Text.assemble(console.printable(text[:common]), (console.printable(text[common:]), "yellow"))


def _figures(bounded: Side, full: Side) -> Table:
    figures = console.table("", bounded.name, full.name)
    for column in figures.columns[1:]:
        column.justify = "right"
    for name, values in {
        "new tokens": [str(len(side.result.token_ids)) for side in (bounded, full)],
        "time to first token": [console.show_seconds(side.result.ttft_s or 0.0) for side in (bounded, full)],
        "speed after that": [console.show_speed(side.result.tpot_s) for side in (bounded, full)],
        "KV memory": [console.show_bytes(side.held_bytes) for side in (bounded, full)],
        "compression": [console.show_factor(full.held_bytes / side.held_bytes) for side in (bounded, full)],
    }.items():
        figures.add_row(name, *values)
    return figures


def _verdict(bounded: Side, full: Side, difference: Difference) -> dict[str, str]:
    if difference.first_index is None:
        return {"first difference": f"none; all {difference.compared_tokens} tokens are equal"}
    ours, theirs = (
        "end of text" if token is None else repr(token) for token in (difference.bounded_token, difference.full_token)
    )
    return {
        "first difference": f"new token {difference.first_index + 1}: {ours} ({bounded.name}), {theirs} ({full.name})",
        "agreement": f"{difference.agreement_ratio:.0%}: {difference.equal_tokens} of "
        f"{console.count(difference.compared_tokens, 'token')} are equal, place by place",
    }
