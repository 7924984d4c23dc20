"""What each key may use: requests at once, and tokens per minute."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from kvkeep.engine import Result
from kvkeep.server.errors import RefusalError


class Limits:
    """Counts the requests and tokens of each key.

    Args:
        requests: requests of a key that may wait or run at once; ``None``: no limit.
        tokens: tokens that a key may read and write per minute; ``None``: no limit.
    """

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        self._requests, self._tokens = requests, tokens
        self._active: defaultdict[str, int] = defaultdict(int)
        self._spent: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, time.monotonic()))

    @contextmanager
    def request(self, owner: str) -> Iterator[None]:
        """A request of a key while it waits and runs.

        Raises:
            RefusalError: the key has used all that it may.
        """
        if self._requests is not None and self._active[owner] >= self._requests:
            raise _refused(f"This key has {self._requests} requests running, the most that it may.", "key_requests", 1)
        if self._tokens is not None and (over := self._used(owner) - self._tokens) >= 0:
            wait = max(1, math.ceil(over * 60 / self._tokens))
            raise _refused(f"This key has used its {self._tokens} tokens per minute.", "key_tokens", wait)
        self._active[owner] += 1
        try:
            yield
        finally:
            self._active[owner] -= 1
            if not self._active[owner]:
                del self._active[owner]

    def spend(self, owner: str, result: Result) -> None:
        """Count the tokens of a request that has ended: those that were read and written."""
        if self._tokens is not None:
            new = result.prompt_tokens - result.cached_tokens + len(result.token_ids)
            self._spent[owner] = self._used(owner) + new, time.monotonic()

    def _used(self, owner: str) -> float:
        """The tokens that count against a key now; they are forgotten evenly within a minute."""
        used, when = self._spent[owner]
        return max(0.0, used - (time.monotonic() - when) * (self._tokens or 0) / 60)


def _refused(message: str, code: str, wait: int) -> RefusalError:
    return RefusalError(429, f"{message} Try again in {wait} s.", code=code, headers={"Retry-After": str(wait)})
