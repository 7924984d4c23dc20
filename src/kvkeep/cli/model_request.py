"""The options by which every command that loads a model says which one, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The options of a command that loads a model, as values.

    Attributes:
        model: a folder or a name on the hub; ``None`` for the embedded model.
        dtype, device: as they were typed.
        load_in: the value of ``--load-in``.
        threads: of torch; ``None`` to leave their number as it is.
        allow_pickle: whether weights may be read from pickles.
    """

    model: str | None
    dtype: str
    device: str
    load_in: str | None
    threads: int | None
    allow_pickle: bool
