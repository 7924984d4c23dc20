"""API keys: who may use the server, and to whom things belong."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvkeep.server.errors import RefusalError

EVERYBODY = "everybody"
"""The owner of everything on a server without keys."""


def owner_of(key: str) -> str:
    """A name for the owner of a key that does not show the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True)
class Keys:
    """The keys that a server accepts.

    Attributes:
        owners: key → the name of its owner.
    """

    owners: Mapping[str, str] = field(default_factory=dict, repr=False)

    def owner(self, header: str | None) -> str:
        """The owner of the key in an ``Authorization`` header. All keys are compared, each in constant time.

        Raises:
            RefusalError: there is no key, or another one.
        """
        if not self.owners:
            return EVERYBODY
        kind, _, given = (header or "").partition(" ")
        if kind.lower() != "bearer" or not given.strip():
            raise _refused("No API key was given. Send the header Authorization: Bearer KEY.")
        shown = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key, owner in self.owners.items():
            if hmac.compare_digest(shown, hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()):
                found = owner
        if found is None:
            raise _refused("The API key is not one that this server knows.")
        return found


def _refused(message: str) -> RefusalError:
    return RefusalError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
