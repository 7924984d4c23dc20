"""An open loop: a request is sent when it is due, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import httpx

from kvkeep_lab.loadtest.client import RequestOutcome, Target, ask
from kvkeep_lab.loadtest.plan import Arrival


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

        async def talk(arrival: Arrival) -> None:
            await asyncio.sleep(max(0.0, start + arrival.at - time.perf_counter()))
            talked = _session if sessions else _conversation
            async for one in talked(client, target, arrival, start + arrival.at):
                outcomes.append(one)
                ended(one)

        await asyncio.gather(*(talk(one) for one in arrivals))
    return outcomes


async def _conversation(
    client: httpx.AsyncClient, target: Target, arrival: Arrival, planned: float
) -> AsyncIterator[RequestOutcome]:
    """The turns of a conversation, each with all messages before it. A failure ends it."""
    messages: list[dict[str, str]] = []
    for turn in arrival.turns:
        messages.append({"role": "user", "content": turn.text})
        found = await ask(client, target, messages, turn.new_tokens, planned)
        yield found
        if found.error is not None:
            return
        messages.append({"role": "assistant", "content": found.text})
        planned = time.perf_counter()


async def _session(
    client: httpx.AsyncClient, target: Target, arrival: Arrival, planned: float
) -> AsyncIterator[RequestOutcome]:
    """The turns of a session of kvkeep, which is deleted afterwards."""
    name = f"bench-{secrets.token_hex(8)}"
    own = replace(target, extra={**target.extra, "session_id": name})
    try:
        made = await client.post(f"{target.url}/sessions", json={"id": name})
        if made.status_code != 201:
            yield RequestOutcome(
                planned, time.perf_counter(), ended=time.perf_counter(), error=f"status {made.status_code}"
            )
            return
        for turn in arrival.turns:
            found = await ask(client, own, [{"role": "user", "content": turn.text}], turn.new_tokens, planned)
            yield found
            if found.error is not None:
                break
            planned = time.perf_counter()
        await client.delete(f"{target.url}/sessions/{name}")
    except httpx.HTTPError:
        yield RequestOutcome(planned, time.perf_counter(), ended=time.perf_counter(), error="connection lost")
