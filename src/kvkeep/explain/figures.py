"""Pictures of a record for scripts: strips of heads, the text over time, maps of layers and heads.

All are maps of numbers from 0 to 100 (`kvkeep.plots.Heat`), so a script may also draw them in another way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.plots import MISSING, Heat, available, draw

if TYPE_CHECKING:
    from kvkeep.explain.explanation import Explanation, Run

FILES = ("strips.png", "times.png", "lost.png")
"""The pictures that need no token."""
TOKEN_FILE = "token.png"
_MOST_COLUMNS = 1000
"""Columns of a picture; more positions share one."""


def check(folder: Path, *, overwrite: bool) -> None:
    """Check, without writing anything, that pictures can be drawn into a folder.

    Raises:
        InputError: matplotlib is missing, the folder cannot be written to, or it has such pictures already.
    """
    if not available():
        raise InputError(f"There are no plots: {MISSING}.")
    above = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    if not above.is_dir():
        raise InputError(f"{above} is no folder, so it has no room for plots. Give another name.")
    if not os.access(above, os.W_OK):
        raise InputError(f"Nothing can be written to the folder {above}. Give another one for the plots.")
    there = [name for name in (*FILES, TOKEN_FILE) if os.path.lexists(folder / name)]
    if there and not overwrite:
        raise InputError(f"{folder / there[0]} exists. Give another folder, or `overwrite=True` to replace it.")


def write(found: Explanation, folder: Path, *, moment: int, token: int | None, overwrite: bool) -> list[Path]:
    """Write the pictures of a record, see `Explanation.draw`."""
    pictures = dict(zip(FILES, (strips(found, moment), times(found), lost(found)), strict=True))
    if token is not None:
        pictures[TOKEN_FILE] = lives(found, token)
    check(folder, overwrite=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {folder} for plots cannot be made: {error.strerror}.") from error
    return [draw(folder / name, maps) for name, maps in pictures.items()]


def strips(found: Explanation, moment: int = -1) -> list[Heat]:
    """The tokens that each head holds at a moment: a line for each head, 100 where it holds the token.

    Args:
        found: the record.
        moment: the moment, from 0; negative ones count from each run's end.

    Raises:
        InputError: there is no such moment.
    """
    names = [f"{layer}.{head}" for layer, head in found.heads]
    maps = []
    for run in found.runs:
        now = _index(moment, run.ledger.moments, "moment")
        maps.append(
            _wide(f"Held after moment {now + 1}, % ({run.policy})", "layer.KV head", names, _held(found, run, now))
        )
    return maps


def times(found: Explanation) -> list[Heat]:
    """The share of heads that hold each token: a line for each moment."""
    maps = []
    for run in found.runs:
        moments = range(run.ledger.moments)
        names, shares = [str(now + 1) for now in moments], (_held(found, run, now).mean(dim=0) for now in moments)
        maps.append(_wide(f"Heads that hold a token, % ({run.policy})", "moment", names, shares))
    return maps


def lost(found: Explanation) -> list[Heat]:
    """The lost mass of each head, mean over the answer's tokens: layers down, KV heads across."""
    chunks = -(-len(found.tokens) // found.chunk)
    return _maps(found, "Lost mass, %", lambda run: run.missed.lost[chunks:].mean(dim=0))


def lives(found: Explanation, token: int) -> list[Heat]:
    """How long each head held a token: the share of the moments since it was read; 100 = it is still there.

    Args:
        found: the record.
        token: position of the token; negative ones count from each run's end.

    Raises:
        InputError: there is no such token.
    """

    def share(run: Run) -> Float[Tensor, " H"]:
        position = _index(token, run.ledger.read, "token")
        first = next(now for now in range(run.ledger.moments) if position < found.read(now))
        dropped = run.ledger.dropped[:, position]
        return torch.where(dropped < 0, 1.0, (dropped - first) / (run.ledger.moments - first))

    return _maps(found, f"Time that token {token} was held, %", share)


def _maps(found: Explanation, title: str, of: Callable[[Run], Float[Tensor, " H"]]) -> list[Heat]:
    """One map of layers and KV heads for each run, of a share for each head."""
    layers, heads = sorted({layer for layer, _ in found.heads}), 1 + max(head for _, head in found.heads)
    places = torch.tensor([layers.index(layer) * heads + head for layer, head in found.heads])
    maps = []
    for run in found.runs:
        table = torch.full((len(layers) * heads,), torch.nan).index_copy(0, places, 100 * of(run).float())
        across, down = [str(head) for head in range(heads)], [str(layer) for layer in layers]
        rows = table.view(-1, heads).tolist()
        maps.append(Heat(f"{title} ({run.policy})", "KV head", "layer", across, down, rows))
    return maps


def _wide(title: str, y_label: str, names: list[str], shares: Iterable[Float[Tensor, " n"]]) -> Heat:
    """A map over positions, of shares. A column is the mean of its positions if there are too many of them."""
    lines, step = list[list[float]](), 1
    for share in shares:
        step = -(-len(share) // _MOST_COLUMNS)
        whole = torch.nn.functional.pad(100 * share, (0, -len(share) % step), value=torch.nan)
        lines.append(whole.view(-1, step).nanmean(dim=-1).tolist())
    columns = [str(step * column) for column in range(len(lines[0]))]
    return Heat(title, "position", y_label, columns, names, lines, wide=True)


def _held(found: Explanation, run: Run, moment: int) -> Float[Tensor, "H n"]:
    """1 where a head holds a token after a moment; NaN for tokens that are not read yet."""
    held = ~run.ledger.lacks(moment + 1)[:, : run.ledger.read]
    return held.float().masked_fill(torch.arange(run.ledger.read) >= found.read(moment), torch.nan)


def _index(wanted: int, count: int, what: str) -> int:
    """A place in a list, from its beginning.

    Raises:
        InputError: the list is shorter.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not -count <= wanted < count:
        raise InputError(f"{what}={wanted!r:.40} is outside 0 … {count - 1}, the {what}s of this record.")
    return wanted % count
