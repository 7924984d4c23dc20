"""A sequence's memory as an object: copied, saved, restored."""

from kvkeep.snapshot.contents import Contents, put, take
from kvkeep.snapshot.fingerprint import Fingerprint
from kvkeep.snapshot.snapshot import Snapshot

__all__ = ["Contents", "Fingerprint", "Snapshot", "put", "take"]
