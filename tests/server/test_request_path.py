"""The way of a request from the body of a POST to a token in the client's hands: few functions, each named here.

One streamed chat is watched with a profiler in all threads. Whatever makes one of the things that a request is turned
into must be called by functions of this way, and by no others of the server.
"""

from __future__ import annotations

import inspect
import sys
import threading

import pytest

pytest.importorskip("fastapi")

from kvkeep import Request
from kvkeep.engine import Event
from kvkeep.engine.sequence import Sequence
from kvkeep.server.generate_routes import AnswerHead
from kvkeep.server.request_parsing import ParsedRequest
from tests.server.running import events, serve

THERE = (
    "server.middleware.AuthMiddleware.__call__",
    "server.generate_routes.GenerateRoutes.chat",
    "server.schemas.body_of",  # bytes → ChatBody
    "server.request_parsing.parse_request",  # ChatBody → ParsedRequest
    "server.request_parsing.make_request",  # one Request for each text
    "server.generate_routes.GenerateRoutes._answer",
    "engine.engine.Engine.astream",
    "server.request_queue.RequestQueue.run",
    "engine.dispatcher.AsyncEvents.begin",
    "engine.admission.Admission.check",  # Request → Sequence
)
"""The functions that a request passes on its way to the engine, in the order in which they are called first."""
BACK = (
    "engine.sequence.Sequence.take",  # token → Event
    "engine.dispatcher.Dispatcher.deliver",
    "engine.dispatcher.AsyncEvents.taken",
    "server.generate_routes.answer_chunks",  # Event → chunk
    "server.sse.EventStream._write",  # chunk → bytes
)
"""The functions that its tokens pass on their way to the client: the last token passes each after the one before."""
MADE = {
    inspect.unwrap(made).__code__: made.__qualname__
    for made in (ParsedRequest.__init__, Request.__init__, Sequence.__init__, Event.__init__, AnswerHead.chunk)
}
"""What makes the things that a request is turned into: called by the functions above alone."""


def name_of(frame):
    """The name of a frame's function in the package, that of the function around it for a nested one."""
    module = frame.f_globals.get("__name__", "")
    name = frame.f_code.co_qualname.partition(".<locals>")[0]
    # code of another file is made by whatever checks annotations, and stands before the function itself
    written = frame.f_code.co_filename == frame.f_globals.get("__file__")
    return f"{module}.{name}".removeprefix("kvkeep.") if written and module.startswith("kvkeep.") else None


def callers(frame):
    """The functions of the server, and the public ones of the engine, that have led to a frame."""
    while (frame := frame.f_back) is not None:
        name = name_of(frame) or ""
        private = name.rpartition(".")[2].startswith("_") or ".Dispatcher." in name
        if name.startswith(("server.", "openai.")) or (name.startswith("engine.") and not private):
            yield name


@pytest.fixture
def watched():
    """The calls and returns of the package's functions in order, and what has led to each of `MADE`."""
    log, led = [], {}

    def profile(frame, event, argument):
        if event == "call" and (made := MADE.get(frame.f_code)) is not None:
            led.setdefault(made, set()).update(callers(frame))
        if event in {"call", "return"} and (name := name_of(frame)) is not None:
            log.append((event, name))

    before = threading.getprofile()
    threading.setprofile(profile)
    try:
        yield log, led
    finally:
        threading.setprofile(before)
        sys.setprofile(None)


def test_a_chat_passes_at_most_fifteen_functions_and_no_others(watched):
    log, led = watched
    with serve() as server:
        log.clear()
        answer = server.chat(stream=True, max_tokens=3)
        passed = list(log)
    assert len(events(answer)) >= 3
    way = {*THERE, *BACK}
    assert len(way) <= 15
    assert not [name for name in way if ("call", name) not in passed]
    assert sorted(THERE, key=lambda name: passed.index(("call", name))) == list(THERE)
    *inside, chunks, write = BACK
    last = {entry: place for place, entry in enumerate(passed)}
    assert sorted(inside, key=lambda name: last["call", name]) == inside
    # both wait for the next event when they have sent one, so they return last in either order
    assert min(last["return", chunks], last["return", write]) > last["call", inside[-1]]
    assert led.keys() == set(MADE.values())
    others = {made: sorted(found - way) for made, found in led.items() if found - way}
    assert not others
