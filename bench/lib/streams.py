"""A client of streamed completions that costs little: a process of its own with the standard library alone.

It reads ``{"port": ..., "requests": [{"body": {...}, "after": N}, ...]}`` from standard input: requests are sent on
connections that are open already, each as soon as the first one has ``after`` tokens. It prints a list for each
request: the time at which it was sent, and the times of its events, on the clock of ``time.perf_counter``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

_EVENT, _END, _CUT = b"data: {", b"0\r\n\r\n", 6
"""How an event begins, how an answer ends, and bytes of an event's beginning that may come before the rest."""


class Stream(asyncio.Protocol):
    """One connection and its request.

    Args:
        body: of the request.
        on_event: called after each event.
    """

    def __init__(self, body: dict[str, Any], on_event: Any) -> None:
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(raw)}\r\n\r\n"
        self._data, self._on_event, self._tail = head.encode() + raw, on_event, b""
        self.times: list[float] = []
        self.events = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self) -> None:
        self.times.append(time.perf_counter())
        self.transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        now, data = time.perf_counter(), self._tail + data
        found = data.count(_EVENT)
        self._tail = b"" if data.endswith(b"\n") else data[-_CUT:]
        self.events += found
        self.times += [now] * found
        self._on_event()
        if data.endswith(_END) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError(f"the server closed after {self.events} events"))


async def run(port: int, requests: list[dict[str, Any]]) -> list[list[float]]:
    """Send all requests, and return their times."""
    loop, made = asyncio.get_running_loop(), []
    waiting: list[tuple[int, Stream]] = []

    def on_event() -> None:
        while waiting and made[0].events >= waiting[0][0]:
            waiting.pop(0)[1].send()

    for one in requests:
        _, stream = await loop.create_connection(lambda one=one: Stream(one["body"], on_event), "127.0.0.1", port)
        made.append(stream)
        if one.get("after"):
            waiting.append((one["after"], stream))
    for stream in made:
        if all(stream is not later for _, later in waiting):
            stream.send()
    await asyncio.gather(*(stream.ended for stream in made))
    return [stream.times for stream in made]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(asyncio.run(run(asked["port"], asked["requests"]))))
