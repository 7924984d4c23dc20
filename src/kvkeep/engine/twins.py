"""Equal prompts: the first one is read, and the others begin with its memory.

Several answers to one prompt differ in their random numbers only, so they have the same memory after the prompt. The
logits after its last token are the same as well: each answer draws its first token from them.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvkeep.engine.generation import Generation

SHORTEST = 256
"""Tokens of a prompt that is worth waiting for; the memory of a shorter one is copied more slowly than it is read."""

MOST = 256
"""Requests that may wait before an engine takes no more from an iterable."""


class Twins:
    """Requests that wait until an equal prompt has been read."""

    def __init__(self) -> None:
        self._readers: dict[Hashable, Generation] = {}
        self._waiting: dict[int, list[Generation]] = {}

    def __len__(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def full(self) -> bool:
        """Whether so many wait that no more should be taken."""
        return len(self) >= MOST

    def joins(self, one: Generation) -> bool:
        """Let a request wait if an equal prompt is about to be read; otherwise later ones may wait for this one."""
        if one.scored or len(one.prompt) < SHORTEST:
            return False
        reader = self._readers.setdefault(_key(one), one)
        if reader is not one:
            self._waiting.setdefault(reader.id, []).append(one)
        return reader is not one

    def of(self, reader: Generation) -> list[Generation]:
        """Return the requests that wait for this one's prompt, which has been read; no more may join them."""
        if self._readers.get(key := _key(reader)) is reader:
            del self._readers[key]
        return list(self._waiting.get(reader.id, ()))

    def leave(self, one: Generation) -> Generation | None:
        """Forget a request. If others wait for it, return the first of them, which reads the prompt in its place."""
        for waiting in self._waiting.values():
            if one in waiting:
                waiting.remove(one)
        others = self._waiting.pop(one.id, [])
        key = _key(one) if self._readers else None
        if self._readers.get(key) is one:
            del self._readers[key]
        if not others:
            return None
        heir = others.pop(0)
        self._readers[_key(heir)] = heir
        self._waiting[heir.id] = others
        return heir


def _key(one: Generation) -> Hashable:
    """The settings on which the memory of a prompt depends, and its tokens."""
    return one.settings, id(one.request.memory), one.prompt
