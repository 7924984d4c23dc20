"""How much of its text a memory can still tell, as its note says. `kvkeep.engine.passages` measures it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvkeep.errors import InputError, SnapshotError

if TYPE_CHECKING:
    from kvkeep.snapshot.snapshot import Snapshot

_NOTE = "fidelity"
"""The entry of a snapshot's note that holds its fidelity."""


@dataclass(frozen=True)
class Fidelity:
    """How much a memory still tells of what passages of its text tell.

    Attributes:
        share: from 0, no more than a model without the text, to 1, as much as one that has just read the passage.
        error: the standard error of the share, from the passages' differences.
        passages: how many were quoted.
    """

    share: float
    error: float
    passages: int

    def __post_init__(self) -> None:
        """Check the numbers, which may come from a file.

        Raises:
            InputError: a number is out of range, or none.
        """
        numbers = (self.share, self.error)
        real = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        if not real or not 0 <= self.share <= 1 or not 0 <= self.error < math.inf:
            raise InputError(f"A share of {self.share!r:.40} with an error of {self.error!r:.40} is no fidelity.")
        if isinstance(self.passages, bool) or not isinstance(self.passages, int) or self.passages < 0:
            raise InputError(f"{self.passages!r:.40} is no number of passages.")

    def __str__(self) -> str:
        if not self.passages:
            return "keeps all of the text"
        points = f" (± {100 * self.error:.0f})"
        return f"keeps {100 * self.share:.0f} %{points} of what {self.passages} passages of the text tell"


ALL = Fidelity(1.0, 0.0, 0)
"""The fidelity of a memory that holds every token as it was computed, which needs no measurement."""


def noted(snapshot: Snapshot, fidelity: Fidelity | None) -> Snapshot:
    """Return a snapshot with its fidelity in its note; the snapshot itself for ``None``."""
    return snapshot if fidelity is None else replace(snapshot, note={**snapshot.note, _NOTE: asdict(fidelity)})


def noted_in(note: Mapping[str, Any]) -> Fidelity | None:
    """Return the fidelity in a snapshot's note; ``None`` if it was not measured.

    Raises:
        SnapshotError: the note holds something else under that name.
    """
    if (entry := note.get(_NOTE)) is None:
        return None
    try:
        return Fidelity(**entry)
    except (TypeError, InputError) as error:
        raise SnapshotError(f"The memory's note says {entry!r:.80} of its fidelity, which is damaged.") from error
