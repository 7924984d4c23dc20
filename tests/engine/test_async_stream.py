"""Events on their way into an event loop: one wake-up for a step, also into a sink, and none into a closed loop."""

import asyncio
import time

import pytest

import kvkeep
from kvkeep.engine.dispatcher import AsyncEvents

from .models import model

NEW = 12


@pytest.fixture
def engine():
    with kvkeep.Engine(model("llama"), budget=16, rows=4, policy="local") as made:
        yield made


def request(first, new=NEW):
    return kvkeep.Request(prompt=[first, 2, 3], ignore_end=True, sampling=kvkeep.SamplingParams(max_new_tokens=new))


def idle(engine):
    end = time.monotonic() + 30
    while engine.busy:
        assert time.monotonic() < end
        time.sleep(0.005)
    return True


async def gathered(stream):
    return [event.token_id async for event in stream]


def test_the_tokens_of_a_step_wake_the_loop_once(engine):
    alone = [engine.generate(request(first))[0].token_ids for first in range(4)]

    async def together():
        loop = asyncio.get_running_loop()
        calls, before = [], loop.call_soon_threadsafe

        def counted(call, *words, **more):
            calls.append(call)
            return before(call, *words, **more)

        loop.call_soon_threadsafe = counted
        found = await asyncio.gather(*(gathered(engine.astream(request(first))) for first in range(4)))
        return found, sum("_hand_out" in repr(call) for call in calls)

    found, wakes = asyncio.run(together())
    assert [tuple(one) for one in found] == alone
    assert wakes < 4 * NEW * 0.75  # most steps have four tokens; the first ones may have fewer


def test_a_sink_gets_all_events_in_order(engine):
    (alone,) = engine.generate(request(1))

    async def listened():
        taken, ended = [], asyncio.Event()

        def sink(event):
            taken.append(event)
            if event.result:
                ended.set()

        stream = engine.astream(request(1))
        await stream.begin(sink)
        await asyncio.wait_for(ended.wait(), 30)
        return [stream.taken(event) for event in taken]

    found = asyncio.run(listened())
    assert tuple(event.token_id for event in found) == alone.token_ids
    assert found[-1].result.text == alone.text


def test_a_failure_reaches_every_sink(engine, monkeypatch):
    async def listened():
        taken = asyncio.Queue()
        streams = [engine.astream(request(first, 1000)) for first in range(3)]
        for place, stream in enumerate(streams):
            await stream.begin(lambda event, place=place: taken.put_nowait((place, event)))
        await taken.get()
        monkeypatch.setattr(engine, "_admit", lambda: 1 / 0)
        monkeypatch.setattr(engine, "_recover", lambda error, touched: 1 / 0)
        failed = set()
        while len(failed) < 3:
            place, event = await asyncio.wait_for(taken.get(), 30)
            if isinstance(event, BaseException):
                with pytest.raises(ZeroDivisionError):
                    streams[place].taken(event)
                failed.add(place)
        monkeypatch.undo()

    asyncio.run(listened())
    assert idle(engine)
    assert engine.generate(request(1))[0].finish_reason == "length"


def test_a_loop_that_is_closed_ends_its_requests(engine):
    loop, held = asyncio.new_event_loop(), []

    async def begin():
        for first in range(3):
            held.append(engine.astream(request(first, 10**5)))
            assert isinstance(held[-1], AsyncEvents)
            await held[-1].begin()
        await anext(held[0])

    loop.run_until_complete(begin())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert idle(engine)  # the engine finds nobody there
    assert len(asyncio.run(gathered(engine.astream(request(1))))) == NEW
