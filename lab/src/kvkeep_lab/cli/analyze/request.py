"""The options of ``kvkeep analyze`` as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvkeep.cli.options import ModelRequest


@dataclass(frozen=True, kw_only=True)
class Request(ModelRequest):
    """The options of ``kvkeep analyze``.

    Attributes:
        text: path of the text, or ``-``.
        only: names of measurements; all if empty.
        workers: the number of workers of Ray; ``None`` to measure in this process.
    """

    text: str
    output: Path
    only: tuple[str, ...]
    max_tokens: int | None
    seed: int
    json: bool
    workers: int | None
    ray_address: str | None
