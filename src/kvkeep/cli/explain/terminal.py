"""A record on a terminal: the text under each policy, side by side, shaded by the share of heads that hold a token."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.cli import console
from kvkeep.explain.explanation import Explanation, Run

_NARROWEST = 20
"""Columns of a text; on a narrower terminal the texts stand one above the other."""
_STYLES = ("dim", "", "on grey23", "white on blue", "bold white on blue")
"""For tokens that no head holds, and for a few heads up to all of them."""


def show(screen: Console, found: Explanation) -> None:
    """Print the texts as they are after the last token, and how to read them."""
    aside = screen.width // len(found.runs) >= _NARROWEST
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in found.runs if aside else found.runs[:1]:
        grid.add_column(ratio=1, overflow="fold")
    heads = [Text(run.policy, "bold") for run in found.runs]
    texts = [_shaded(found.tokens, run) for run in found.runs]
    if aside:
        grid.add_row(*heads)
        grid.add_row(*texts)
    else:
        for head, text in zip(heads, texts, strict=True):
            grid.add_row(head)
            grid.add_row(text)
    screen.print(grid)
    screen.print(Text("· no head holds it; the darker the blue, the more heads do\n", "dim"))


def _shaded(tokens: list[str], run: Run) -> Text:
    """The text with the answer after it."""
    shares = (run.ledger.dropped < 0).float().mean(dim=0).tolist()
    shaded = Text()
    for token, share in zip([*tokens, *run.answer], shares, strict=False):
        text = console.printable(token)
        level = 0 if share == 0 else 1 + min(3, int(share * 3.999))
        shaded.append(_dots(text) if level == 0 else text, _STYLES[level])
    return shaded


def _dots(text: str) -> str:
    """As many dots as the text is wide, with its white space."""
    return "".join(letter if letter.isspace() else "·" * cell_len(letter) for letter in text)
