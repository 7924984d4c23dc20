"""Many threads and coroutines on one engine: each gets what it gets alone, whoever leaves, fails or closes."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from kvkeep.engine import Engine, Request, dispatcher
from kvkeep.engine.dispatcher import AsyncEvents, Dispatcher, FairLock, ThreadBox, Uninterrupted
from kvkeep.engine.request import Event
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.scheduler import Scheduler
from kvkeep.errors import InputError, KVKeepError

from .models import alone, model
from .test_equal import prompt_of

NEW = 8
MANY = 8


def wish(i, new=NEW, **options):
    return Request(prompt=prompt_of(i, 5 + i), sampling=SamplingParams(max_new_tokens=new), **options)


def want(i, new=NEW):
    return alone("llama", prompt_of(i, 5 + i), new, "h2o", 8, 512)


def engine_of(rows=3):
    return Engine(model("llama"), policy="h2o", budget=8, rows=rows)


def ids_of(events):
    return tuple(event.token_id for event in events)


def settles(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def in_threads(work, n=MANY):
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(work, range(n)))


def idle(engine):
    return settles(lambda: not engine.busy and engine._dispatcher._thread is None)


# ------------------------------------------------------------------ threads


def test_threads_stream_at_once_and_each_gets_what_it_gets_alone():
    engine, start = engine_of(), threading.Barrier(MANY)

    def work(i):
        start.wait()
        return ids_of(engine.stream(wish(i)))

    assert in_threads(work) == [want(i) for i in range(MANY)]
    assert idle(engine)
    assert ids_of(engine.stream(wish(1))) == want(1)  # a single listener steps by itself again
    assert engine._dispatcher._thread is None


def test_every_way_to_run_works_at_once():
    engine = engine_of()

    def work(i):
        if i % 4 == 0:
            return ids_of(engine.stream(wish(i)))
        if i % 4 == 1:
            return engine.generate([wish(i), wish(i)])[1].token_ids
        if i % 4 == 2:
            return dict(engine.run(iter([wish(i)] * 7)))[6].token_ids
        return asyncio.run(gather(engine, [i]))[0]

    assert in_threads(work) == [want(i) for i in range(MANY)]
    assert idle(engine)


def test_requests_are_added_and_stepped_from_several_threads():
    engine = engine_of()
    numbers = in_threads(lambda i: engine.add(wish(i)))
    assert len(set(numbers)) == MANY
    steps = in_threads(lambda i: [engine.step() for _ in range(6 * NEW)], 3)
    found = {event.id: event.result for thread in steps for events in thread for event in events if event.result}
    assert [found[number].token_ids for number in numbers] == [want(i) for i in range(MANY)]


def test_requests_that_were_added_go_on_beside_a_stream_and_lose_nothing():
    engine = engine_of()
    number = engine.add(wish(1))
    assert ids_of(engine.stream(wish(2))) == want(2)
    events = []
    while engine.busy:
        events += engine.step()
    assert (ids_of(events), {event.id for event in events}) == (want(1), {number})


def test_a_second_run_in_the_same_thread_works():
    engine = engine_of()
    outer = engine.stream(wish(1))
    first = [next(outer)]
    assert engine.generate([wish(2)])[0].token_ids == want(2)
    assert ids_of([*first, *outer]) == want(1)
    assert idle(engine)


def test_a_thread_that_steps_lets_others_in():
    """A plain lock would keep the others out until the first stream has ended."""
    engine, order = engine_of(rows=8), []

    def work(i):
        for event in engine.stream(wish(i, new=60)):
            order.append((i, event.token_id))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first_end = min(max(at for at, (i, _) in enumerate(order) if i == one) for one in range(4))
    assert all(any(i == one for i, _ in order[:first_end]) for one in range(4))


def test_a_turn_is_taken_in_the_order_of_asking():
    turn, order, threads = FairLock(), [], []

    def work(i):
        with turn, turn:  # its owner may take it again
            order.append(i)

    with turn:
        for i in range(5):
            threads.append(threading.Thread(target=work, args=(i,)))
            threads[-1].start()
            assert settles(lambda n=i + 1: len(turn._waiting) == n)
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    assert not turn.mine


def test_in_a_forked_process_busy_engines_are_lost_and_idle_ones_are_not(monkeypatch):
    monkeypatch.setattr(dispatcher, "_services", weakref.WeakSet())
    busy, idle = Dispatcher(), Dispatcher()
    with busy.turn:
        dispatcher._leave_behind()
    assert (busy.turn.lost, idle.turn.lost) == (True, False)
    with pytest.raises(InputError, match="This process was forked while the engine was at work"), busy.turn:
        pass
    with idle.turn:
        assert idle.turn.mine
    assert not dispatcher._services  # the end of this process waits for none of them


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_goes_to_the_listener_of_its_request_alone():
    service, box = Dispatcher(), ThreadBox()
    service.listen(7, box, lambda: None)
    service.refuse(8, InputError("of another"))
    assert box.empty
    service.refuse(7, InputError("its own"))
    with pytest.raises(InputError, match="its own"):
        box.take()
    assert not box.open


def test_a_listener_that_leaves_within_a_step_is_missed_at_the_end_of_the_step():
    service, ended = Dispatcher(), []

    def listening(number):
        def step():
            service.deliver(Event(number, 1, "a"))

        def add(one, box):
            service.listen(one, box, step)

        events = service.drain(iter([number]), add, lambda: True, step=step, end=ended.append)
        assert next(events).id == number
        return events

    events = listening(1)
    with service.turn:
        events.close()
        assert ended == []
        service.sweep(ended.append)
    assert ended == [1]
    listening(2).close()
    assert ended == [1, 2]


def test_a_stream_that_is_begun_twice_is_one_request():
    asked = []

    async def main():
        events = AsyncEvents(lambda box: asked.append(box) or 7, lambda box: None)
        await events.begin()
        await events.begin()
        return events.number

    assert asyncio.run(main()) == 7
    assert len(asked) == 1


def test_an_interrupt_while_waiting_for_the_turn_gives_it_up():
    turn, held, release = FairLock(), threading.Event(), threading.Event()

    def hold():
        with turn:
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        turn.__enter__()
    assert not turn._waiting
    release.set()
    holder.join()
    with turn:
        assert turn.mine


def test_an_interrupt_that_comes_together_with_the_turn_hands_it_on(monkeypatch):
    turn = FairLock()

    class Gate:
        """Opened by the owner of the turn just before the interrupt."""

        taken = 0

        def acquire(self):
            Gate.taken += 1
            if Gate.taken == 2:
                turn.__exit__()
                raise KeyboardInterrupt

        def release(self):
            pass

    turn.__enter__()
    turn._owner = None  # a thread that is not this one
    monkeypatch.setattr("kvkeep.engine.dispatcher.threading", SimpleNamespace(Lock=Gate, get_ident=threading.get_ident))
    with pytest.raises(KeyboardInterrupt):
        turn.__enter__()
    assert not turn._waiting
    assert not turn._taken
    monkeypatch.undo()
    with turn:
        assert turn.mine


def test_the_end_of_python_waits_for_the_step_of_every_engine_and_lets_none_begin(monkeypatch):
    monkeypatch.setattr(dispatcher, "_services", weakref.WeakSet())
    engines = [dispatcher.Dispatcher(), dispatcher.Dispatcher()]
    held, release, stopped = threading.Event(), threading.Event(), threading.Event()

    def step():
        with engines[0].turn:
            held.set()
            release.wait()

    def stop():
        dispatcher._stop()
        assert all(one.turn.mine for one in engines)
        stopped.set()

    threads = [threading.Thread(target=step), threading.Thread(target=stop)]
    threads[0].start()
    held.wait()
    threads[1].start()
    assert not stopped.wait(0.05)
    release.set()
    assert stopped.wait(60)
    for thread in threads:
        thread.join()
    assert all(one.turn._taken for one in engines)


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["break", "close", "raise", "collect"])
def test_a_listener_that_leaves_frees_its_row_and_nobody_elses(how):
    engine = engine_of()

    def work(i):
        if i % 2:
            return ids_of(engine.stream(wish(i)))
        stream = engine.stream(wish(i, new=200))
        with suppress(ValueError):
            for _ in stream:
                if how == "raise":
                    raise ValueError
                break
        if how == "close":
            stream.close()
        if how == "collect":
            cycle = [stream]
            cycle.append(cycle)
        return None

    found = in_threads(work)
    gc.collect()
    assert [found[i] for i in (1, 3, 5, 7)] == [want(i) for i in (1, 3, 5, 7)]
    assert idle(engine)
    assert engine.generate([wish(2)])[0].token_ids == want(2)


def test_a_bad_request_in_one_thread_harms_no_other():
    engine = engine_of()

    def work(i):
        if i % 2:
            return ids_of(engine.stream(wish(i)))
        with pytest.raises(KVKeepError):
            list(engine.stream(wish(i, budget=9)))
        return None

    found = in_threads(work)
    assert [found[i] for i in (1, 3, 5, 7)] == [want(i) for i in (1, 3, 5, 7)]
    assert idle(engine)


@pytest.mark.long
def test_a_step_of_the_model_that_fails_reaches_all_it_touched():
    engine, start, fails = engine_of(rows=MANY), threading.Barrier(MANY), []

    def fail(*args):
        fails.append(1)
        if len(fails) == 6:
            raise RuntimeError("the model fails once")

    def work(i):
        start.wait()
        return list(engine.stream(wish(i, new=30)))[-1].result

    hook = model("llama").model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        found = in_threads(work)
    finally:
        hook.remove()
    ended = [result for result in found if result.finish_reason == "error"]
    assert ended
    assert all("the model fails once" in result.error for result in ended)
    for i, result in enumerate(found):
        assert result.token_ids == want(i, 30)[: len(result.token_ids)]
    assert idle(engine)
    assert engine.generate([wish(1)])[0].token_ids == want(1)


def test_a_step_that_raises_reaches_every_waiter_and_leaves_the_engine_usable(monkeypatch):
    engine, start = engine_of(), threading.Barrier(MANY)

    def work(i):
        start.wait()
        with pytest.raises(ZeroDivisionError):
            list(engine.stream(wish(i)))
        return True

    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "plan", lambda self: 1 / 0)
        assert all(in_threads(work))
        with pytest.raises(ZeroDivisionError):
            list(engine.stream(wish(1)))
    assert idle(engine)
    assert in_threads(lambda i: ids_of(engine.stream(wish(i)))) == [want(i) for i in range(MANY)]


def test_a_cancelled_request_ends_the_stream_that_waits_for_it():
    engine = engine_of()
    cancelled, found = threading.Event(), {}

    def work(i):
        for event in engine.stream(wish(i, new=200)):
            found[i] = event
            if i == 0 and not cancelled.is_set():
                cancelled.set()
                assert engine.cancel(event.id).finish_reason == "cancelled"
        return found[i].result

    first, second = in_threads(work, 2)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
    assert found[0].token_id is None
    assert idle(engine)


def test_closing_ends_all_streams_and_gives_the_memory_back():
    engine, running = engine_of(), threading.Barrier(MANY + 1)

    def work(i):
        events = engine.stream(wish(i, new=240))
        if i < 3:
            next(events)
        running.wait()
        try:
            return list(events)[-1].result.finish_reason
        except InputError as error:  # it had not yet begun
            return str(error)

    with ThreadPoolExecutor(MANY) as pool:
        found = pool.map(work, range(MANY))
        running.wait()
        engine.close()
        found = list(found)
    assert set(found) <= {"cancelled", "The engine is closed and takes no more requests; make a new one."}
    assert found[:3] == ["cancelled"] * 3
    assert engine.memory_usage().allocated_bytes == 0
    assert engine._dispatcher._thread is None
    for call in (lambda: engine.add(wish(1)), lambda: engine.generate([wish(1)]), lambda: next(engine.stream(wish(1)))):
        with pytest.raises(InputError, match="engine is closed"):
            call()
    engine.close()
    assert engine.step() == []
    assert engine.cancel(0) is None


def test_an_engine_is_closed_at_the_end_of_its_block():
    with engine_of() as engine:
        stream = engine.stream(wish(1))
        next(stream)
    assert [event.result.finish_reason for event in stream] == ["cancelled"]
    assert not engine.busy


def test_an_engine_is_freed_when_nobody_holds_it():
    engine = engine_of()
    in_threads(lambda i: ids_of(engine.stream(wish(i))))
    assert idle(engine)
    engine._dispatcher.wait()
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert settles(lambda: gone() is None)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer versions of Python warn of forks beside threads
def test_a_process_that_was_forked_while_the_engine_was_at_work_says_so():
    engine, release = engine_of(), threading.Event()
    stream = engine.astream(wish(0, new=100))
    hook = model("llama").model.layers[0].mlp.register_forward_pre_hook(lambda *args: release.wait(60) and None)
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(asyncio.run, anext(stream))
            assert settles(lambda: engine._dispatcher.busy)
            child = os.fork()
            if not child:
                signal.alarm(60)
                refused = 0
                for call in (lambda: engine.generate([wish(1)]), engine.step, engine.close):
                    with suppress(InputError):
                        call()
                        break
                    refused += 1
                os._exit(refused)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            release.set()
            done.result()
    finally:
        hook.remove()
    assert idle(engine)
    assert engine.generate([wish(1)])[0].token_ids == want(1)


# ------------------------------------------------------------------ coroutines


async def collect(engine, i, new=NEW):
    return ids_of([event async for event in engine.astream(wish(i, new))])


async def gather(engine, places):
    return await asyncio.gather(*(collect(engine, i) for i in places))


def test_coroutines_stream_at_once_and_each_gets_what_it_gets_alone():
    engine = engine_of()
    assert asyncio.run(gather(engine, range(MANY))) == [want(i) for i in range(MANY)]
    assert idle(engine)
    assert asyncio.run(gather(engine, [1])) == [want(1)]  # in another loop


def test_a_stream_that_was_begun_in_another_loop_says_so():
    """Its events would go to the first loop, and the second would wait for ever."""
    engine = engine_of()
    stream = engine.astream(wish(0, new=100))
    asyncio.run(anext(stream))
    with pytest.raises(InputError, match="begun in another event loop"):
        asyncio.run(asyncio.wait_for(anext(stream), 20))
    assert idle(engine)


@pytest.mark.slow
def test_the_loop_is_never_blocked():
    engine, begun, ticked, seen = engine_of(), threading.Event(), threading.Event(), []

    async def tick():
        while True:
            if begun.is_set():
                begun.clear()
                ticked.set()
            await asyncio.sleep(0.001)

    async def main():
        clock = asyncio.create_task(tick())

        def slow(*args):  # a step ends when the loop has turned meanwhile
            ticked.clear()
            begun.set()
            seen.append(ticked.wait(60))

        hook = model("llama").model.layers[0].mlp.register_forward_pre_hook(slow)
        try:
            await asyncio.gather(*(collect(engine, i, 3) for i in range(3)))
        finally:
            hook.remove()
            clock.cancel()

    asyncio.run(main())
    assert seen
    assert all(seen)


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["break", "raise", "cancel", "timeout", "aclose", "early", "block"])
def test_a_coroutine_that_leaves_cancels_its_request_and_nobody_elses(how):
    engine = engine_of()

    async def leave():
        stream = engine.astream(wish(0, new=240))
        if how == "block":
            async with stream:
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            return
        async for _ in stream:
            if how == "raise":
                raise ValueError
            if how == "break":
                break
            if how == "aclose":
                await stream.aclose()

    async def main():
        others = asyncio.gather(*(collect(engine, i) for i in (1, 2)))
        task = asyncio.create_task(leave())
        if how == "early":
            task.cancel()
        elif how == "cancel":
            await asyncio.sleep(0.05)
            task.cancel()
        with suppress(ValueError, asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(task, 0.05 if how == "timeout" else 20)
        del task
        return await others

    assert asyncio.run(main()) == [want(1), want(2)]
    gc.collect()
    assert idle(engine)


def test_a_loop_that_ends_first_leaves_the_engine_usable():
    engine = engine_of()
    loop = asyncio.new_event_loop()
    stream = engine.astream(wish(1, new=240))
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert idle(engine)
    assert ids_of(engine.stream(wish(2))) == want(2)


def test_bad_requests_and_failures_reach_coroutines(monkeypatch):
    engine = engine_of()

    async def refused(request):
        with pytest.raises(KVKeepError):
            await anext(engine.astream(request))

    async def fails(i):
        with pytest.raises(ZeroDivisionError):
            await collect(engine, i)

    async def several(work):
        await asyncio.gather(*work)

    asyncio.run(several([refused(wish(1, budget=9)), refused("a text without a tokenizer"), refused(7)]))
    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "plan", lambda self: 1 / 0)
        asyncio.run(several([fails(i) for i in range(4)]))
    assert idle(engine)
    assert asyncio.run(gather(engine, range(3))) == [want(i) for i in range(3)]


def test_closing_ends_coroutines():
    engine = engine_of()

    async def main():
        streams = [engine.astream(wish(i, new=240)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(engine.close)
        ends = [[event async for event in stream][-1].result.finish_reason for stream in streams]
        with pytest.raises(InputError, match="closed"):
            await anext(engine.astream(wish(1)))
        return ends

    assert asyncio.run(main()) == ["cancelled"] * 3


# ------------------------------------------------------------------ processes: Ctrl-C and the end of a program

PROGRAM = """
import asyncio, os, signal, sys, threading, time
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from kvkeep import Engine, Request, SamplingParams
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2)
network = AutoModelForCausalLM.from_config(config).eval()
network.generation_config.eos_token_id = None
engine = Engine(network, policy="h2o", budget=8, rows=3)
def wish(new):
    return Request(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=new))
def listen(new=100_000):
    for event in engine.stream(wish(new)):
        seen.append(1)
def interrupt():  # when there are tokens
    while not seen:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
seen = []
"""

ENDS = {
    "ctrl-c in the main thread, then in a loop": """
other = threading.Thread(target=lambda: ends.append([e.result for e in engine.stream(wish(60)) if e.result]))
ends = []
threading.Thread(target=interrupt).start()
other.start()
try:
    listen()
except KeyboardInterrupt:
    other.join()
    assert ends[0][0].finish_reason == "length", ends
    assert engine.generate(wish(4))[0].finish_reason == "length"
    seen.clear()
async def main():
    async for event in engine.astream(wish(100_000)):
        seen.append(1)
threading.Thread(target=interrupt).start()
try:
    asyncio.run(main())
except KeyboardInterrupt:
    assert seen
    assert engine.generate(wish(4))[0].finish_reason == "length"
    print("done")
""",
    "an end while threads stream": """
for _ in range(3):
    threading.Thread(target=listen, daemon=True).start()
while len(seen) < 20:
    time.sleep(0.01)
print("done")
""",
    "an end with a loop that was left": """
loop = asyncio.new_event_loop()
stream = engine.astream(wish(100_000))
loop.run_until_complete(anext(stream))
print("done")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends(name):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + ENDS[name]],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Fatal" not in done.stderr, done.stderr
