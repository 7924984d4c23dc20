"""``kvkeep memory``: a saved memory of a text, without its model: how large it is and which positions it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvkeep.cli import console, shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import check_exists
from kvkeep.cli.options import Json
from kvkeep.cli.policies import label_of
from kvkeep.kv_bits import KV_BITS
from kvkeep.snapshot.fidelity import noted_in
from kvkeep.snapshot.file_format import DTYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvkeep.snapshot.fingerprint import Fingerprint
    from kvkeep.snapshot.positions import HeldPositions

_MOST_CELLS, _BESIDE = 48, 28
"""Cells of a drawing, and columns that the rest of its line takes."""
_BLOCKS, _LETTERS = "·▁▂▃▄▅▆▇█", ".:-=+*#%@"
"""Nothing held, then an eighth more each; the second for terminals without the first."""


@one_line_errors
def memory(
    file: Annotated[
        str,
        typer.Argument(
            help="A file of kvkeep remember, kvkeep chat or Snapshot.save.",
            metavar="FILE",
            autocompletion=shell_completion.snapshots,
        ),
    ],
    json: Json = False,
) -> None:
    """Show what a saved memory is: model, policy, size, and the positions that each layer holds.

    The model is not needed. A drawing shows the share of each part of the text that a layer holds, over all heads.
    """
    check_exists(file)
    from kvkeep.snapshot.positions import HeldPositions  # imports NumPy

    found = HeldPositions.read(file)
    if json:
        console.write_json(_report(file, found))
        return
    screen = console.out()
    screen.print(console.facts(_facts(found)))
    screen.print()
    _draw(screen, found)


def _facts(found: HeldPositions) -> dict[str, str]:
    """Return the lines that stand above the drawing of a memory: name → text."""
    about = found.described
    made, layers, size, states = about.fingerprint, found.positions, found.nbytes, about.flags
    chunk = "" if made.chunk is None else f", prompt read in chunks of {made.chunk}"
    full = _full_bytes(found)
    beside = f" and {console.count(len(states), 'state')}" if states else ""
    held = sum(int((layer >= 0).sum()) for layer in layers) / sum(len(layer) for layer in layers)
    return {
        "holds": _kind(about.note),
        "model": f"{made.model} in {made.dtype}, {console.count(len(layers), 'layer')} with slots"
        f"{_in_bits(made.kv_bits)}{beside}",
        "weights": (made.weights or "not known")
        + ("" if made.adapter is None else f", with the adapter {made.adapter}"),
        "policy": label_of(made.policy),
        "budget": f"{console.count(made.budget, 'token')}, {_rule(made.layer_budget)}{_of_heads(made.head_budget)}",
        "positions": f"{made.positions}{chunk}",
        "tokens": f"{about.seen} seen, {held:.4g} held per layer and head on average",
        **({} if (fidelity := noted_in(about.note)) is None else {"fidelity": str(fidelity)}),
        "token ids": "stored" if found.tokens is not None else "not stored",
        "size": f"{console.show_bytes(size)}; a full cache would take {console.show_bytes(full)}, "
        f"{console.show_factor(full / size)} as much",
    }


def _kind(note: Mapping[str, Any]) -> str:
    """Return in words what a memory stands for, a text or a conversation, from the note in its file."""
    if isinstance(note.get("opening"), dict):
        return "a text that questions may follow"
    turns = turns_of(note)
    return "a text" if turns is None else f"a conversation of {console.count(turns, 'turn')}"


def turns_of(note: Mapping[str, Any]) -> int | None:
    """Return the number of answers in a conversation, from the note in its file.

    ``None`` for another memory, and where no chat template was used, since the note then has no messages.
    """
    messages = note.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    return len([message for message in messages if isinstance(message, dict) and message.get("role") == "assistant"])


def _rule(layer_budget: str | tuple[float, ...]) -> str:
    """Return in words how a budget is spread over the layers; rules with numbers as ``--layer-budget`` takes them."""
    if not isinstance(layer_budget, str):
        return "spread over layers by weights"
    return f"{layer_budget} over layers" if layer_budget.isalpha() else f"--layer-budget {layer_budget}"


def _of_heads(head_budget: str | None) -> str:
    """Return in words how a layer's budget is divided among its heads; empty if the policy decides."""
    return "" if head_budget is None else f", {head_budget} over heads"


def _in_bits(kv_bits: str | None) -> str:
    """Return in words the bits of keys and values; empty if slots have the model's dtype."""
    return "" if kv_bits is None else f" (kv_bits {kv_bits})"


def full_bytes(made: Fingerprint, layers: Iterable[tuple[int, int, int]], seen: int) -> int:
    """Return the bytes that the keys and values of all seen tokens would take in the model's dtype without eviction.

    Args:
        made: the model and the settings of the memory.
        layers: heads of each layer, its file's elements for a key and for a value; under ``kv_bits`` bytes of codes.
        seen: tokens.
    """
    # stored keys and values may be packed in fewer bits than the model's dtype, which a full cache has
    (itemsize,) = (dtype.itemsize for dtype in DTYPES.values() if dtype.name == made.dtype)
    packed = KV_BITS.get(made.kv_bits or "", (None, None))
    widths = (
        heads * (width if bits is None else width * 8 // bits)  # codes share a byte
        for heads, *each in layers
        for width, bits in zip(each, packed, strict=True)
    )
    return seen * itemsize * sum(widths)


def _full_bytes(found: HeldPositions) -> int:
    """Return the bytes that a full cache of all tokens would take that a file's memory has seen, see `full_bytes`."""
    about = found.described
    layers = zip(about.layers, about.groups, strict=True)
    shapes = (
        (layer.heads, entries["store.keys"].shape[1], entries["store.values"].shape[1]) for layer, entries in layers
    )
    return full_bytes(about.fingerprint, shapes, about.seen)


def _draw(screen: Console, found: HeldPositions) -> None:
    """Print a line for each layer: how many tokens it holds, and from which parts of the text."""
    seen = found.described.seen
    marks = _BLOCKS if screen.encoding.lower().startswith("utf") else _LETTERS
    most = min(_MOST_CELLS, screen.width - _BESIDE, seen)  # `seen`: no cell without a token
    cells = max(1, most)
    table = console.table("layer", "held", f"share held of positions 0 to {seen - 1}")
    for column in table.columns:
        column.no_wrap = True
    for number, positions in enumerate(found.positions):
        each = (positions >= 0).sum(axis=1).tolist()
        held = str(each[0]) if len(set(each)) == 1 else f"{min(each)}-{max(each)}"
        shares = shares_of(positions, seen, cells)
        table.add_row(str(number), held, Text("".join(_mark(share, marks) for share in shares)))
    screen.print(table)


def shares_of(positions: NDArray[np.int32], seen: int, cells: int) -> list[float]:
    """Return the share of each part of the text that a layer holds, on average over its heads.

    Args:
        positions: the position in each slot, one line for each head; below 0: the slot is empty.
        seen: tokens of the text.
        cells: number of parts, which are as equal in length as whole tokens allow; not more than ``seen``.
    """
    import numpy as np

    held = positions[positions >= 0].astype(np.int64)  # 32 bits do not hold the products below
    counts = np.bincount(held * cells // seen, minlength=cells)
    bounds = -(-np.arange(cells + 1) * seen // cells)  # a part begins with the first position that falls into it
    shares: list[float] = (counts / (np.diff(bounds) * len(positions))).tolist()
    return shares


def _mark(share: float, marks: str) -> str:
    """Return the one of ``marks``, from none to all, that shows a share. The first stands for a share of 0 only."""
    steps = len(marks) - 1
    return marks[0] if share <= 0 else marks[max(1, round(share * steps))]


def _report(file: str, found: HeldPositions) -> dict[str, Any]:
    """Return the report for ``--json`` as plain data. Positions are ranges, both ends included."""
    about = found.described
    fidelity = noted_in(about.note)
    return {
        "file": file,
        "bytes": found.nbytes,
        "full_bytes": _full_bytes(found),
        "fingerprint": about.fingerprint.as_dict(),
        "tokens_seen": about.seen,
        "token_ids": None if found.tokens is None else found.tokens.tolist(),
        "pending_tokens": about.pending,
        "fidelity": None if fidelity is None else asdict(fidelity),
        "states": sorted(about.flags),
        "layers": [
            {
                "held": (positions >= 0).sum(axis=1).tolist(),
                "budget": layer.budget,
                "bytes": nbytes,
                "positions": [ranges_of(head) for head in positions],
            }
            for layer, positions, nbytes in zip(about.layers, found.positions, found.layer_bytes, strict=True)
        ],
    }


def ranges_of(positions: NDArray[np.int32]) -> list[list[int]]:
    """Return the positions that a head holds, as ascending ranges ``[first, last]``; those below 0 are left out."""
    found: list[list[int]] = []
    for position in sorted(positions[positions >= 0].tolist()):
        if found and found[-1][1] == position - 1:
            found[-1][1] = position
        else:
            found.append([position, position])
    return found
