"""``kvkeep memory``: a saved memory of a text, without its model: how large it is and which positions it holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvkeep.cli import console, shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import check_exists
from kvkeep.cli.options import Json
from kvkeep.cli.startup import fast_imports
from kvkeep.result_files import in_full

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from kvkeep.snapshot.snapshot import Snapshot

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
    with fast_imports():
        from kvkeep.snapshot import Snapshot  # imports torch

    snapshot = Snapshot.load(file)
    size = os.path.getsize(in_full(file))
    if json:
        console.write_json(_report(file, size, snapshot))
        return
    screen = console.out()
    screen.print(console.facts(_facts(size, snapshot)))
    screen.print()
    _draw(screen, snapshot)


def _facts(size: int, snapshot: Snapshot) -> dict[str, str]:
    """Return names and values to print above the drawing."""
    from kvkeep.policies.registry import label  # imports torch
    from kvkeep.snapshot.fidelity import noted_in

    made, layers = snapshot.fingerprint, snapshot.contents.layers
    chunk = "" if made.chunk is None else f", prompt read in chunks of {made.chunk}"
    full = full_bytes(snapshot)
    states = f" and {console.count(len(snapshot.contents.states), 'state')}" if snapshot.contents.states else ""
    held = sum(int((layer.positions >= 0).sum()) for layer in layers) / sum(len(layer.positions) for layer in layers)
    return {
        "holds": _kind(snapshot.note),
        "model": f"{made.model} in {made.dtype}, {console.count(len(layers), 'layer')} with slots"
        f"{_in_bits(made.kv_bits)}{states}",
        "weights": (made.weights or "not known")
        + ("" if made.adapter is None else f", with the adapter {made.adapter}"),
        "policy": label(made.policy),
        "budget": f"{console.count(made.budget, 'token')}, {_rule(made.layer_budget)}{_of_heads(made.head_budget)}",
        "positions": f"{made.positions}{chunk}",
        "tokens": f"{snapshot.seen} seen, {held:.4g} held per layer and head on average",
        **({} if (fidelity := noted_in(snapshot.note)) is None else {"fidelity": str(fidelity)}),
        "token ids": "stored" if snapshot.tokens is not None else "not stored",
        "size": f"{console.show_bytes(size)}; a full cache would take {console.show_bytes(full)}, "
        f"{console.show_factor(full / size)} as much",
    }


def _kind(note: Mapping[str, Any]) -> str:
    """Return in words what a memory stands for, from the note of the engine or a session."""
    if isinstance(note.get("opening"), dict):
        return "a text that questions may follow"
    turns = turns_of(note)
    return "a text" if turns is None else f"a conversation of {console.count(turns, 'turn')}"


def turns_of(note: Mapping[str, Any]) -> int | None:
    """Return the number of answers in a conversation; ``None`` for another memory, or without the chat template."""
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


def full_bytes(snapshot: Snapshot) -> int:
    """Return the bytes that the keys and values of all seen tokens would take without eviction."""
    import torch

    from kvkeep.kv.slot_codec import KV_BITS

    made, per_token = snapshot.fingerprint, 0
    for layer in snapshot.contents.layers:
        for name, bits in zip(("keys", "values"), KV_BITS.get(made.kv_bits or "", (None, None)), strict=True):
            heads, _, width = layer.tensors[f"store.{name}"].shape
            per_token += (
                heads * (width if bits is None else width * 8 // bits) * getattr(torch, str(made.dtype)).itemsize
            )
    return per_token * snapshot.seen


def _draw(screen: Console, snapshot: Snapshot) -> None:
    """Print a line for each layer: how many tokens it holds, and from which parts of the text."""
    marks = _BLOCKS if screen.encoding.lower().startswith("utf") else _LETTERS
    most = min(_MOST_CELLS, screen.width - _BESIDE, snapshot.seen)
    cells = max(1, most)
    table = console.table("layer", "held", f"share held of positions 0 to {snapshot.seen - 1}")
    for column in table.columns:
        column.no_wrap = True
    for number, layer in enumerate(snapshot.contents.layers):
        each = (layer.positions >= 0).sum(dim=1).tolist()
        held = str(each[0]) if len(set(each)) == 1 else f"{min(each)}-{max(each)}"
        shares = shares_of(layer.positions, snapshot.seen, cells)
        table.add_row(str(number), held, Text("".join(_mark(share, marks) for share in shares)))
    screen.print(table)


def shares_of(positions: Int[Tensor, "Hk used"], seen: int, cells: int) -> list[float]:
    """Return the share of each part of the text that a layer holds, over all heads. The parts have equal length."""
    import torch

    held = positions[positions >= 0].long()
    counts = torch.bincount(held * cells // seen, minlength=cells)
    sizes = torch.bincount(torch.arange(seen) * cells // seen, minlength=cells)
    shares: list[float] = (counts / (sizes * len(positions))).tolist()
    return shares


def _mark(share: float, marks: str) -> str:
    """Return the character that shows a share. The first character stands for a share of 0 only."""
    steps = len(marks) - 1
    return marks[0] if share <= 0 else marks[max(1, round(share * steps))]


def _report(file: str, size: int, snapshot: Snapshot) -> dict[str, Any]:
    """Return the whole report as plain data. Positions are ranges, both ends included."""
    from kvkeep.snapshot.fidelity import noted_in  # imports torch

    fidelity = noted_in(snapshot.note)
    return {
        "file": file,
        "bytes": size,
        "full_bytes": full_bytes(snapshot),
        "fingerprint": snapshot.fingerprint.as_dict(),
        "tokens_seen": snapshot.seen,
        "token_ids": None if snapshot.tokens is None else snapshot.tokens.tolist(),
        "pending_tokens": snapshot.pending,
        "fidelity": None if fidelity is None else asdict(fidelity),
        "states": sorted(snapshot.contents.states),
        "layers": [
            {
                "held": (layer.positions >= 0).sum(dim=1).tolist(),
                "budget": layer.budget,
                "bytes": layer.nbytes,
                "positions": [ranges_of(head) for head in layer.positions],
            }
            for layer in snapshot.contents.layers
        ],
    }


def ranges_of(positions: Int[Tensor, " used"]) -> list[list[int]]:
    """Return the positions that a head holds, as ranges with both ends included."""
    found: list[list[int]] = []
    for position in positions[positions >= 0].sort().values.tolist():
        if found and found[-1][1] == position - 1:
            found[-1][1] = position
        else:
            found.append([position, position])
    return found
