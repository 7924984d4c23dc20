"""Memory that outlasts a request: conversations, and texts that are read once."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.engine.interrupts import Uninterrupted
from kvkeep.engine.session import Session
from kvkeep.engine.work import Work
from kvkeep.models.document_prompt import noted
from kvkeep.pins import Span
from kvkeep.policies.base import Policy
from kvkeep.snapshot import Snapshot


class Keeping(Work):
    """The part of an engine that hands out memory: sessions, and snapshots of texts."""

    def session(
        self,
        *,
        name: str | None = None,
        policy: str | Policy | None = None,
        budget: int | None = None,
        sequence: int = 0,
        memory: Snapshot | None = None,
        pins: Sequence[Span] = (),
    ) -> Session:
        """Begin a conversation whose memory stays between its turns, or open the one of this name again.

        Args:
            name: by which it is found again, also by a later engine with the same ``session_dir``.
            policy: the eviction policy; by default the memory's, or else the engine's.
            budget: tokens kept per layer and head; by default the memory's, or else the engine's.
            sequence: identity for everything random, see `Request`.
            memory: a snapshot that it continues.
            pins: spans of the first turn's positions that may never be evicted, see `Request`.

        Raises:
            InputError: the name cannot be used, or the engine is closed.
            SnapshotError: the memory belongs to another model, policy, budget or other settings.
            KVKeepError: the engine has no rows for the policy or the budget; see `add`.
        """
        with Uninterrupted(), self._service.turn:
            return self._sessions.open(
                self, name, policy=policy, budget=budget, sequence=sequence, memory=memory, pins=pins
            )

    @property
    def session_names(self) -> list[str]:
        """The names of all sessions that are open, or on the disk in ``session_dir``."""
        with self._service.turn:
            return self._sessions.names

    def prefix(
        self,
        asked: str | Sequence[int],
        *,
        policy: str | Policy | None = None,
        budget: int | None = None,
        pins: Sequence[Span] = (),
    ) -> Snapshot:
        """Read a text once, and return its memory, which any number of requests and sessions may continue.

        Args:
            asked: a text, which is taken as it is, or token ids.
            policy: the eviction policy; by default the engine's.
            budget: tokens kept per layer and head; by default the engine's.
            pins: spans of its positions that may never be evicted, see `Request`.

        Raises:
            KVKeepError: see `add`; or a step failed.
        """
        with self.session(policy=policy, budget=budget, pins=pins) as session:
            session.read(asked)
            return session.snapshot()

    def remember(self, text: str, *, system: str | None = None, raw: bool = False) -> Snapshot:
        """Read a text once, and return its memory, which any number of questions may follow.

        A text and a question that follows it are one message of the user, with a blank line between them.

        Args:
            text: the text; white space around it is dropped.
            system: a system message before it.
            raw: take the text and its questions without the chat template, also with a blank line between them.

        Raises:
            KVKeepError: see `add`; or a step failed.
        """
        ids, opening = self._admission.words.opened(text, system=system, raw=raw)
        with self.session() as session:
            session.read(ids)
            return noted(session.snapshot(), opening)
