"""The memories of idle sessions in main memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.snapshot import Snapshot


@dataclass(eq=False)
class Kept:
    """A memory at rest."""

    held: Snapshot

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.held.nbytes

    def snapshot(self) -> Snapshot:
        """Return the memory."""
        return self.held


class Shelf:
    """Memories at rest."""

    def keep(self, snapshot: Snapshot, name: str | None) -> Kept:
        """Keep a memory."""
        return Kept(snapshot)
