"""The options of ``kvkeep eval`` as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvkeep.cli.model_request import ModelRequest


@dataclass(frozen=True, kw_only=True)
class Request(ModelRequest):
    """The options of ``kvkeep eval``. Numbers are read; lists of names and the text file are not.

    Attributes:
        budgets: each a share of the text (a float) or a number of tokens (an int).
        workers: the number of workers of Ray; ``None`` to run the cells in this process.
    """

    output: Path
    recipe: str | None
    dry_run: bool
    shard: tuple[int, int] | None
    policies: str
    budgets: tuple[float | int, ...]
    tasks: str
    limit: int | None
    seeds: tuple[int, ...]
    text: str | None
    contexts: tuple[int, ...]
    facts: int
    documents: str
    depths: tuple[float, ...]
    ask: str
    turns: int | None
    window: int | None
    stride: int
    data: str | None
    shots: int
    parts: tuple[str, ...]
    positions: Literal["true", "slot"] | None
    layer_budget: str | tuple[float, ...] | None
    head_budget: str | None
    kv_bits: str | None
    prefill_chunk: int | None
    plots: bool
    json: bool
    workers: int | None
    ray_address: str | None
