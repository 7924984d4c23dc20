"""What each key may use: requests at once, and tokens per minute. The process that clients reach counts."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvkeep.engine.request import Event, Result
from kvkeep.server.errors import RefusalError

COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes whose POST requests count: those that run the model."""


@runtime_checkable
class Meter(Protocol):
    """Is told of what one request uses."""

    def spend(self, tokens: int) -> None:
        """Count tokens that the request has read or written since the last call; the number may be negative, a
        correction.
        """

    def end(self) -> None:
        """Note that the request neither waits nor runs any more. Further calls do nothing."""


class RateLimits:
    """Counts the requests and tokens of each key.

    Args:
        requests: requests of a key that may wait or run at once; ``None``: no limit.
        tokens: tokens that a key may read and write per minute; ``None``: no limit.
        clock: seconds that never go back.

    Attributes:
        refused: called with every refusal.
    """

    def __init__(
        self, requests: int | None, tokens: int | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests, self._tokens, self._clock = requests, tokens, clock
        self._active: defaultdict[str, int] = defaultdict(int)
        self._spent: dict[str, tuple[float, float]] = {}  # owner -> tokens that counted, and at which time
        self.refused: list[Callable[[RefusalError], object]] = []

    def begin(self, owner: str) -> Meter:
        """Count a new request as one that waits or runs, and return its meter; whoever gets that must end it. Refuse a
        request of a key at a limit, and tell the listeners in ``refused``.

        Args:
            owner: the owner of the request's key.

        Raises:
            RefusalError: the key has as many requests, or has used as many tokens, as it may.
        """
        if (refusal := self._refusal(owner)) is not None:
            for told in self.refused:
                told(refusal)
            raise refusal
        self._active[owner] += 1
        return _Counted(self, owner)

    def spend(self, owner: str, tokens: int) -> None:
        """Add tokens to those that count against the key of an owner; do nothing if the server has no limit of
        tokens.
        """
        if self._tokens is not None:
            self._spent[owner] = self._used(owner) + tokens, self._clock()

    def end(self, owner: str) -> None:
        """Count one request fewer of an owner's key as waiting or running. Each request must be ended once."""
        self._active[owner] -= 1
        if not self._active[owner]:
            del self._active[owner]

    def _refusal(self, owner: str) -> RefusalError | None:
        """Return the refusal of a new request of an owner's key, for its requests or its tokens; ``None`` if the
        request may begin. Nothing is counted.
        """
        if self._requests is not None and self._active.get(owner, 0) >= self._requests:
            return _refused(f"This key has {self._requests} requests running, the most that it may.", "key_requests", 1)
        if self._tokens is not None and (over := self._used(owner) - self._tokens) >= 0:
            wait = math.floor(over * 60 / self._tokens) + 1  # below the limit then, and not just at it
            return _refused(f"This key has used its {self._tokens} tokens per minute.", "key_tokens", wait)
        return None

    def _used(self, owner: str) -> float:
        """Return how many tokens count against an owner's key now. They become fewer at an even rate, the limit per
        minute, as in a leaky bucket; at least 0.
        """
        used, when = self._spent.get(owner, (0.0, 0.0))
        return max(0.0, used - (self._clock() - when) * (self._tokens or 0) / 60)


class _Counted:
    """The meter of a request that this process counts."""

    def __init__(self, limits: RateLimits, owner: str) -> None:
        self._limits, self._owner, self._runs = limits, owner, True

    def spend(self, tokens: int) -> None:
        self._limits.spend(self._owner, tokens)

    def end(self) -> None:
        if self._runs:
            self._runs = False
            self._limits.end(self._owner)


class Spending:
    """Tells a meter of the tokens of requests as they come, so that an answer which breaks off counts as well.

    Args:
        meter: of these requests.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._told: defaultdict[int, int] = defaultdict(int)

    def note(self, place: int, event: Event) -> None:
        """Report to the meter the tokens that an event's step has read and written. The last event of a request
        corrects their sum to that of its result.

        Args:
            place: the index of the request among those of the meter.
            event: the event.
        """
        new = event.read_tokens + (event.token_id is not None)
        if event.result is not None:
            new = _all(event.result) - self._told[place]
        self._told[place] += new
        self._meter.spend(new)


def _all(result: Result) -> int:
    """Return how many tokens a request has read and written. Those of its prompt that a memory had already do not
    count.
    """
    return result.prompt_tokens - result.cached_tokens + len(result.token_ids)


def _refused(message: str, code: str, wait: int) -> RefusalError:
    """Return a refusal with status 429 that says, in its message and in a header, to try again in ``wait`` seconds."""
    return RefusalError(429, f"{message} Try again in {wait} s.", code=code, headers={"Retry-After": str(wait)})
