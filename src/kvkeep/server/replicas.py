"""How a router reaches the replicas of a server; it does not know what runs them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol, runtime_checkable

from starlette.types import Message

from kvkeep.server.replaying import Received


class LostError(Exception):
    """A replica has ended while it had a request."""


class MissedError(LostError):
    """A replica has ended, or is about to, before it had a request."""


@runtime_checkable
class Replicas(Protocol):
    """The replicas of a server."""

    def here(self) -> Mapping[str, int]:
        """The replicas that take requests, and the rows of each; 0 where they are not known yet."""

    def ask(self, replica: str, request: Received) -> AsyncGenerator[Message, None]:
        """Yield the messages with which a replica answers. Whoever closes the generator is a client that leaves.

        Raises:
            MissedError: the replica has ended; the request did not reach it.
            LostError: it has ended with the request.
        """

    async def holds(self, replica: str, kind: str, owner: str, name: str) -> bool:
        """Whether a replica holds a session or an answer.

        Raises:
            LostError: it has ended.
        """
