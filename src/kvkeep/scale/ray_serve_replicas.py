"""The replicas of which Ray Serve has told this process. Ray Serve copies `ByName`, so they lie in a module apart."""

from __future__ import annotations

from collections.abc import Mapping

_KNOWN: dict[str, Mapping[str, int]] = {}


def note(place: str, replicas: Mapping[str, int]) -> None:
    """Note the replicas of a deployment, and the rows of each; 0 where they are not known yet."""
    _KNOWN[place] = dict(replicas)


def drop(place: str, replica: str) -> None:
    """Note that a replica has ended."""
    _KNOWN[place] = {name: rows for name, rows in of(place).items() if name != replica}


def of(place: str) -> Mapping[str, int]:
    """The replicas of a deployment, and their rows."""
    return _KNOWN.get(place, {})
