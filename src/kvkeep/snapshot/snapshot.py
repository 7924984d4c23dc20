"""`Snapshot`: one sequence's memory as an object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import InputError, SnapshotError
from kvkeep.pins import Span, end, spans
from kvkeep.snapshot import file_io
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.fingerprint import Fingerprint


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence's memory over all layers, at one moment. It shares no memory with a cache and never changes.

    Attributes:
        contents: the memory itself.
        fingerprint: the model and the settings that it belongs to.
        tokens: ids of the tokens that it stands for, without padding; ``None`` if they are not known.
        pending: tokens of a prompt that were announced and not fed yet.
        note: plain data of whoever took it, such as a session's messages; it is saved as JSON.
    """

    contents: Contents
    fingerprint: Fingerprint
    tokens: Int[Tensor, " n"] | None = None
    pending: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens is not None and len(self.tokens) != self.seen:
            raise SnapshotError(
                f"{len(self.tokens)} token ids were given for a sequence of {self.seen} tokens; give one for each."
            )

    @property
    def seen(self) -> int:
        """Return how many tokens the sequence has seen."""
        return self.contents.seen

    @property
    def nbytes(self) -> int:
        """Return the size of the contents and the token ids in bytes."""
        return self.contents.nbytes + (0 if self.tokens is None else self.tokens.nbytes)

    def to(self, device: torch.device | str) -> Snapshot:
        """Return the same snapshot on a device. Token ids stay on the CPU."""
        return replace(self, contents=self.contents.to(device))

    def pinned(self, pins: Sequence[Span]) -> Snapshot:
        """Return the same snapshot with other pins: tokens that no head may evict from now on.

        A head that has dropped a token already does not get it back.

        Args:
            pins: spans of positions, such as ``((0, 120),)``, instead of those that the memory has; ``()`` pins none.

        Raises:
            InputError: they are no spans, or end beyond the tokens that the memory has seen.
        """
        found = spans(pins)
        if end(found) > self.seen:
            raise InputError(
                f"The pins end at position {end(found)}, and the memory has seen {self.seen} tokens. Pin those only."
            )
        return replace(self, contents=self.contents.pinned(found))

    def positions(self, layer: int = 0) -> Int[Tensor, "Hk used"]:
        """True positions of the tokens that a layer holds, -1 = empty. Layers without slots are not counted."""
        return self.contents.layers[layer].positions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a file of safetensors. After a crash the file is the old one or the new one.

        Raises:
            SnapshotError: the file cannot be written; an older file of that name stays as it was.
        """
        file_io.save(file_io.FileParts(self.contents, self.fingerprint, self.tokens, self.pending, self.note), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Snapshot:
        """Read a file that `save` wrote. Nothing is allocated before the file's own numbers are checked.

        Raises:
            SnapshotError: the file cannot be read, or is no whole file of a snapshot.
        """
        return cls(*file_io.load(path)).to(device)

    def __repr__(self) -> str:
        made = self.fingerprint
        return f"Snapshot({self.seen} tokens of {made.model}, policy='{made.policy}', budget={made.budget})"
