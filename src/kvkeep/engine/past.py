"""The token ids and messages that a memory stands for, in the engine and beside a snapshot."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvkeep.engine.prompts import conversation
from kvkeep.engine.sampling import whole_within
from kvkeep.errors import InputError, SnapshotError
from kvkeep.models.document_prompt import Opening, opening_of
from kvkeep.pins import Spans
from kvkeep.snapshot import Contents, Snapshot

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Past:
    """The part of a sequence that a request continues.

    Attributes:
        ids: the token ids that the memory stands for.
        pending: token ids that follow, and that the model has not read: usually the last token of an answer.
        messages: the conversation that they are, ending with an answer; empty if they are something else.
        opening: set while they end inside of the user's first message, see `kvkeep.models.document_prompt`.
        pins: the spans that its memory holds pinned.
        budgets: the budget of its memory in each layer; a tuple where heads have their own.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    pending: tuple[int, ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    opening: Opening | None = None
    pins: Spans = ()
    budgets: tuple[int | tuple[int, ...], ...] = ()

    def held_in(self, contents: Contents) -> Past:
        """Return the same past with the pins and budgets of its memory."""
        layers = contents.layers
        return replace(self, pins=layers[0].pins if layers else (), budgets=tuple(layer.budget for layer in layers))

    @classmethod
    def of(cls, snapshot: Snapshot) -> Past:
        """The tokens that a snapshot stands for, and what a session has noted beside them.

        Raises:
            SnapshotError: the token ids are not known, or the note is none of a session.
        """
        if snapshot.tokens is None:
            raise SnapshotError(
                "The snapshot does not say which tokens it stands for, and the engine counts them. Give their ids when "
                "you take it: cache.snapshot(row, tokens=ids)."
            )
        ids, note = array("i", snapshot.tokens.tolist()), snapshot.note
        try:
            pending = tuple(whole_within("pending", one, 0, _LARGEST) for one in note.get("pending", ()))
            messages = conversation(note["messages"]) if note.get("messages") else ()
            opening = opening_of(note["opening"]) if note.get("opening") is not None else None
        except (InputError, TypeError, AttributeError) as error:
            raise SnapshotError(
                "The snapshot's note is none that a session writes. Take the snapshot again."
            ) from error
        return cls(ids, pending, messages, opening).held_in(snapshot.contents)

    @property
    def tokens(self) -> torch.Tensor:
        """The token ids that the memory stands for, as a tensor."""
        return torch.tensor(self.ids, dtype=torch.int32)

    @property
    def note(self) -> dict[str, Any]:
        """All but the token ids, as a snapshot notes it."""
        found: dict[str, Any] = {"pending": list(self.pending), "messages": list(map(dict, self.messages))}
        return found if self.opening is None else {**found, "opening": asdict(self.opening)}
