"""An open loop: a request is sent when it is due, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx

from kvkeep_lab.loadtest.client import RequestOutcome, Target, ask, failure
from kvkeep_lab.loadtest.percentiles import spread
from kvkeep_lab.loadtest.plan import Arrival

_DELETE_S = 10.0
"""Longest wait for a session to be deleted, also after Ctrl-C."""


async def send(
    target: Target,
    arrivals: Sequence[Arrival],
    *,
    sessions: bool = False,
    ended: Callable[[RequestOutcome], object] = lambda outcome: None,
) -> list[RequestOutcome]:
    """Send all conversations when they arrive, and return what became of each message.

    Args:
        target: the server.
        arrivals: the conversations.
        sessions: whether a conversation is a session of kvkeep, to which new messages alone are sent.
        ended: called with every outcome as soon as it is there.
    """
    outcomes: list[RequestOutcome] = []
    async with target.client() as client:
        start = time.perf_counter()

        async def talk(number: int, arrival: Arrival) -> None:
            await asyncio.sleep(max(0.0, start + arrival.at - time.perf_counter()))
            talked = _session if sessions else _conversation
            async for outcome in talked(client, target, arrival, start + arrival.at):
                outcome.session = number if sessions or target.chat else None
                outcomes.append(outcome)
                ended(outcome)

        async with asyncio.TaskGroup() as talks:  # after Ctrl-C it waits until each has deleted its session
            for number, arrival in enumerate(arrivals):
                talks.create_task(talk(number, arrival))
    return outcomes


async def _conversation(
    client: httpx.AsyncClient, target: Target, arrival: Arrival, planned: float
) -> AsyncIterator[RequestOutcome]:
    """Yield the outcomes of a conversation's turns, each sent with all messages before it. A failure ends it."""
    messages: list[dict[str, str]] = []
    before = 0
    for turn in arrival.turns:
        messages.append({"role": "user", "content": turn.text})
        found = await ask(client, target, messages, turn.new_tokens, planned)
        if target.chat and found.prompt_tokens is not None:
            found.message_tokens = max(1, found.prompt_tokens - before)
            before = found.prompt_tokens + found.tokens
        yield found
        if found.error is not None:
            return
        messages.append({"role": "assistant", "content": found.text})
        planned = time.perf_counter()


async def _session(
    client: httpx.AsyncClient, target: Target, arrival: Arrival, planned: float
) -> AsyncIterator[RequestOutcome]:
    """Yield the outcomes of the turns of a session of kvkeep, which is deleted at the end, whatever ends it."""
    name = f"bench-{secrets.token_hex(8)}"
    own = replace(target, extra={**target.extra, "session_id": name})
    sent = time.perf_counter()  # the first turn waits for its session, so a slow server is no late client
    try:
        if (error := await _refused(client, target, name)) is not None:
            yield RequestOutcome(planned, sent, ended=time.perf_counter(), error=error)
            return
        for number, turn in enumerate(arrival.turns):
            found = await ask(client, own, [{"role": "user", "content": turn.text}], turn.new_tokens, planned)
            found.sent = found.sent if number else sent
            yield found
            if found.error is not None:
                return
            planned = time.perf_counter()
    finally:
        with suppress(httpx.HTTPError):  # the answers are there, whatever becomes of their session
            await client.delete(f"{target.url}/sessions/{name}", timeout=min(_DELETE_S, target.timeout_s))


async def _refused(client: httpx.AsyncClient, target: Target, name: str) -> str | None:
    """Make a session. Return the kind of the failure; ``None`` if it was made."""
    try:
        made = await client.post(f"{target.url}/sessions", json={"id": name})
    except httpx.HTTPError as error:
        return failure(error)
    return None if made.status_code == 201 else f"status {made.status_code}"


# The numbers of a run.


def summary(outcomes: Sequence[RequestOutcome], *, seconds: float) -> dict[str, Any]:
    """Return all numbers of a run.

    Times count from the moment at which a request was planned, so a client that is late hides no waiting.

    Args:
        outcomes: of all requests.
        seconds: from the first request to the last answer.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    written = [outcome for outcome in good if outcome.times]
    new, read = sum(outcome.tokens for outcome in good), sum(outcome.prompt_tokens or 0 for outcome in good)
    counted = all(outcome.new_tokens is not None for outcome in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()),
        "first_error": next((outcome.detail for outcome in outcomes if outcome.detail), None),
        "seconds": seconds,
        "ttft_s": spread([outcome.times[0] - outcome.planned for outcome in written]),
        "tpot_s": spread([_time_per_token(outcome) for outcome in written if outcome.tokens > 1]),
        "stall_s": spread([_longest_gap(outcome.times) for outcome in written if len(outcome.times) > 1]),
        "request_s": spread([outcome.ended - outcome.planned for outcome in good]),
        "late_s": spread([outcome.sent - outcome.planned for outcome in outcomes]),
        "prompt_tokens": read,
        "cached_tokens": sum(outcome.cached_tokens or 0 for outcome in good),
        "new_tokens": new,
        "tokens_counted_by": "server" if counted else "pieces of the stream",
        "requests_per_s": len(good) / seconds,
        "prompt_tokens_per_s": read / seconds,
        "new_tokens_per_s": new / seconds,
    }


def _time_per_token(outcome: RequestOutcome) -> float:
    """Return the seconds per output token after the first one, which is `ttft_s`."""
    return (outcome.times[-1] - outcome.times[0]) / (outcome.tokens - 1)


def _longest_gap(times: Sequence[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(times))
