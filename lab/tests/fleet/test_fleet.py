"""Simulated devices against cases that are worked out by hand, and against laws that hold for every load."""

import dataclasses
import itertools
import json
import random
import statistics

import model_folders
import pytest

from kvkeep.errors import CapacityError, InputError
from kvkeep.models.load import quiet
from kvkeep_lab.fleet.bounded import Bounded, DeviceRows
from kvkeep_lab.fleet.load import Arrivals, FleetLoad, Turn, read_trace
from kvkeep_lab.fleet.paged import PAGE, Paged, Pages, TooLongError
from kvkeep_lab.fleet.setup import Fleet
from kvkeep_lab.fleet.sizing import bounded, paged, plan_for
from kvkeep_lab.fleet.steps import Limits, fit, read_steps
from kvkeep_lab.loadtest.percentiles import percentile
from kvkeep_lab.loadtest.plan import Lengths, Line


class Plain:
    """A decode step takes a second, a prompt token a tenth of one."""

    def seconds(self, rows, slots, tokens=0, pairs=0.0):
        return (1.0 if rows else 0.0) + 0.1 * tokens


class Small:
    """Costs like those of a device."""

    def seconds(self, rows, slots, tokens=0, pairs=0.0):
        return 0.01 + 0.001 * rows + 1e-6 * slots + 0.0002 * tokens + 1e-8 * pairs


def length(text):
    return Lengths.read(text, "x")


def given(*talks, **options):
    """A load of conversations that are given: each a list of (due, prompt, new)."""
    turns = tuple(tuple(Turn(prompt, new, due=float(due)) for due, prompt, new in talk) for talk in talks)
    return FleetLoad(rate=1.0, prompt_tokens=length("1"), new_tokens=length("1"), trace=turns, **options)


def load(**options):
    lengths = {"prompt_tokens": length("~60"), "new_tokens": length("~20")}
    return FleetLoad(**{"rate": 5.0, "requests": 400, **lengths, **options})


def rows(count=1, slots=65, **options):
    return DeviceRows(**{"count": count, "slots": slots, "decode_every": 10**6, **options})


def lines(count):
    """Lengths of a file, each of its own."""
    return tuple(Line(None, number, 1) for number in range(1, count + 1))


def popped(come):
    """The messages of a device, each answered at once: the second, and the turn."""
    found = []
    while come.next_due() is not None:
        one = come.pop()
        found.append((one.at, one.talk.turns[one.talk.done]))
        come.follow(one.talk, one.at)
    return found


# by hand


def test_one_row_two_requests():
    log = Bounded(Plain(), Arrivals(given([(0, 10, 3)], [(0, 10, 3)])), rows()).run()
    # 10 tokens are read in 1 s, two more tokens take 2 s; then the second one
    assert log.first_s == pytest.approx([1.0, 4.0])
    assert log.token_s == pytest.approx([1.0, 1.0])
    assert (log.seconds, log.busy_s, log.row_s) == pytest.approx((6.0, 6.0, 6.0))
    assert (log.rows_most, log.waiting_most, log.new_tokens, log.read_tokens) == (1, 2, 6, 20)


def test_an_idle_device_waits():
    log = Bounded(Plain(), Arrivals(given([(5, 10, 1)], [(100, 20, 1)])), rows()).run()
    assert log.first_s == pytest.approx([1.0, 2.0])
    assert (log.seconds, log.busy_s) == pytest.approx((102.0, 3.0))


def test_chunks_beside_a_running_row():
    asked = given([(0, 5, 3)], [(0, 10, 2)])
    log = Bounded(Plain(), Arrivals(asked), rows(2, chunk=5, decode_every=5)).run()
    # 5 + 5 tokens until 1.0, where the first has a token; 5 more until 1.5, where the second has one; a step of the
    # first alone until 2.5, and one of both until 3.5
    assert log.first_s == pytest.approx([1.0, 1.5])
    assert log.token_s == pytest.approx([1.25, 2.0])


def test_rows_get_a_token_for_every_so_many_prompt_tokens():
    asked = given([(0, 5, 4)], [(0.6, 10, 2)])
    log = Bounded(Plain(), Arrivals(asked), rows(2, chunk=5, decode_every=2)).run()
    # the first has a token at 0.5 and at 1.5; then 5 tokens are read until 2.0, which are worth two and a half steps:
    # steps until 3.0 and 4.0, where the first ends with four tokens; the rest of the second until 4.5, a step until 5.5
    assert log.first_s == pytest.approx([0.5, 3.9])
    assert log.token_s == pytest.approx([3.5 / 3, 1.0])


def test_few_prompt_tokens_share_a_run_with_the_rows():
    asked = given([(0, 5, 3)], [(0.6, 10, 1)])
    apart = Bounded(Plain(), Arrivals(asked), rows(2)).run()
    together = Bounded(Plain(), Arrivals(asked), rows(2, mixed_tokens=10)).run()
    assert apart.first_s == pytest.approx([1.9, 0.5])  # in the order of their ends
    assert together.first_s == pytest.approx([0.5, 2.9])  # the run ends with the rows' tokens


def test_sessions_move_between_rows_main_memory_and_disk():
    asked = given([(0, 10, 1), (100, 9, 1)], [(10, 10, 1), (200, 9, 1)])
    have = rows(row_bytes=1000, copy_s=0.5, disk_s=2.0, host_rows=1)
    log = Bounded(Plain(), Arrivals(asked), have).run()
    # the second conversation drives the first to the disk; 2 s later it is back, and in its row after 0.5 s more. A
    # turn reads its message and the last token of the answer before it
    assert log.first_s == pytest.approx([1.0, 1.0, 3.5, 1.5])
    assert (log.row_bytes, log.disk_bytes) == (4000, 2000)
    assert (log.host_most, log.kept_most) == (1, 2)
    assert log.busy_s == pytest.approx(4 * 1.0 + 4 * 0.5)


def test_a_conversation_in_a_row_is_not_in_main_memory():
    asked = given([(0, 10, 1), (100, 10, 50)], [(90, 10, 1), (200, 9, 1)], [(101, 10, 1), (300, 9, 1)])
    log = Bounded(Plain(), Arrivals(asked), rows(3, row_bytes=1000)).run()
    assert (log.host_most, log.kept_most) == (2, 2)


def test_what_lies_on_the_disk_at_the_beginning_was_not_moved_there():
    asked = load(turns=length("5"), between=length("60"))
    device = Bounded(Plain(), Arrivals(asked), rows(row_bytes=1000, host_rows=3))
    assert device.log.kept_most > 100
    assert (device.log.host_most, device.log.disk_bytes) == (3, 0)


class Noted(Plain):
    """Notes what each run reads: rows, slots, prompt tokens, and pairs of a prompt token and one that it attends to."""

    def __init__(self):
        self.runs = []

    def seconds(self, rows, slots, tokens=0, pairs=0.0):
        self.runs.append((rows, slots, tokens, pairs))
        return super().seconds(rows, slots, tokens, pairs)


def test_what_a_prompt_attends_to_is_at_most_the_slots():
    steps = Noted()
    Bounded(steps, Arrivals(given([(0, 10, 3), (100, 4, 1)])), rows(slots=8, chunk=6)).run()
    first = [(0, 0.0, 6, 6 * 3.0), (0, 0.0, 4, 4 * (6 + 2.0)), (1, 8.0, 0, 0.0), (1, 8.0, 0, 0.0)]
    # 13 tokens are past, of which the slots hold 8; the last token of the answer is read with the message
    assert steps.runs == [*first, (0, 0.0, 5, 5 * (8 + 2.5))]
    steps = Noted()
    Bounded(steps, Arrivals(given([(0, 10, 3), (100, 4, 1)])), rows(slots=65)).run()
    assert steps.runs[-1] == (0, 0.0, 5, 5 * (12 + 2.5))


def test_rows_that_read_are_not_among_those_that_decode():
    steps = Noted()
    Bounded(steps, Arrivals(given([(0, 5, 4)], [(0.6, 10, 2)])), rows(2, slots=65, mixed_tokens=10)).run()
    assert (1, 65.0, 10, 10 * 5.0) in steps.runs
    assert max(slots for _, slots, _, _ in steps.runs) == 130.0


def test_a_turn_waits_for_the_answer_before_it():
    log = Bounded(Plain(), Arrivals(given([(0, 10, 11), (3, 9, 1)])), rows()).run()
    assert log.first_s == pytest.approx([1.0, 1.0])  # answered at 11; the second is due then, not at 3
    assert log.seconds == pytest.approx(12.0)


def test_a_paged_sequence_is_interrupted_and_read_again():
    pages = Pages(space=3, page_bytes=1)
    log = Paged(Plain(), Arrivals(given([(0, 16, 20)], [(0, 16, 20)])), pages).run()
    # both prompts are read until 3.2. Two more pages are needed and one is free, so the second gives up its page. The
    # first ends at 22.2; 17 tokens are read again until 23.9, and the last 18 follow
    assert log.first_s == pytest.approx([3.2, 3.2])
    assert log.token_s == pytest.approx([1.0, (41.9 - 3.2) / 19])
    assert (log.preempted, log.reread_tokens, log.read_tokens, log.new_tokens) == (1, 16, 16 + 16 + 17, 40)


def test_an_interrupted_sequence_has_its_first_token():
    """It is not late, however long it waits until it is read again: the simulation goes on."""
    device = Paged(Plain(), Arrivals(given([(0, 16, 20)], [(0, 16, 20)])), Pages(space=3, page_bytes=1))
    log = device.run(hopeless=(5.0, 0))
    assert (log.hopeless, log.preempted, log.ended) == (False, 1, 2)


def test_a_simulation_ends_when_more_first_tokens_are_late_than_may_be():
    asked = given(*[[(0, 16, 20)]] * 4)
    logs = [Bounded(Plain(), Arrivals(asked), rows()).run(hopeless=(5.0, most)) for most in range(4)]
    assert [(log.hopeless, log.ended) for log in logs] == [*[(True, 0)] * 3, (False, 4)]  # three wait for the first


def test_paged_prompts_wait_for_pages():
    asked = given([(0, 17, 2)], [(0, 33, 1)])
    log = Paged(Plain(), Arrivals(asked), Pages(space=4, page_bytes=1)).run()
    assert log.first_s == pytest.approx([1.7, 2.7 + 3.3])  # two and three pages are more than four


def test_paged_prompts_fill_the_step():
    asked = given([(0, 16, 4)], [(0, 30, 1)])
    log = Paged(Plain(), Arrivals(asked), Pages(space=9, page_bytes=1, step_tokens=20)).run()
    # 16 + 4 tokens until 2.0; a token and 19 until 4.9; a token and 7 until 6.6
    assert log.first_s == pytest.approx([6.6, 2.0])  # in the order of their ends


def test_paged_conversations_keep_their_pages_while_there_is_room():
    talk = [(0, 32, 1), (100, 8, 1)]
    log = Paged(Plain(), Arrivals(given(talk)), Pages(space=4, page_bytes=1)).run()
    assert (log.read_tokens, log.reread_tokens) == (32 + 9, 1)  # the answer's token was never in a page
    other = [(50, 33, 1)]
    log = Paged(Plain(), Arrivals(given(talk, other)), Pages(space=4, page_bytes=1)).run()
    assert (log.read_tokens, log.reread_tokens) == (32 + 33 + 25, 17)  # one of its two pages is left, the first


def test_a_paged_sequence_that_no_memory_holds():
    with pytest.raises(TooLongError) as caught:
        Paged(Plain(), Arrivals(given([(0, 40, 9)])), Pages(space=3, page_bytes=1)).run()
    assert (caught.value.tokens, caught.value.room) == (49, 48)


# laws


class Watched(Paged):
    """Counts its pages anew in every step."""

    def spend(self, seconds):
        super().spend(seconds)
        held = {job: job.past + (self.tick + 1 - job.began if job.ends else job.left) for job in self._running}
        assert self._used == sum(-(-tokens // PAGE) for tokens in held.values())
        assert self._cached == sum(self._idle.values())
        assert self._used + self._cached <= self._have.count(self.rows)
        assert len(self._running) == self.rows <= self._have.rows
        assert self.slots() == sum(job.past + self.tick + 1 - job.began for job in self._running if job.ends)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("turns", ["1", "1-6"])
def test_every_message_is_answered_once_within_the_memory(seed, turns):
    asked = load(seed=seed, rate=30.0, turns=length(turns), between=length("~5"), sessions=length("1-2"))
    tight = Pages(space=60, page_bytes=1, step_bytes=1, prompt_bytes=3, most_rows=9, step_tokens=64)
    roomy = dataclasses.replace(tight, space=600)
    kept = rows(4, row_bytes=10, copy_s=0.01, disk_s=0.1, host_rows=5, chunk=32, decode_every=16, mixed_tokens=8)
    for make in (
        lambda come: Bounded(Small(), come, kept),
        lambda come: Watched(Small(), come, tight),
        lambda come: Watched(Small(), come, roomy),
    ):
        come, ends = Arrivals(asked), []
        follow = come.follow

        def note(talk, end, follow=follow, ends=ends):
            ends.append((talk, talk.done))
            follow(talk, end)

        come.follow = note
        device = make(come)
        try:
            log = device.run()
        except TooLongError:
            assert device._have is tight
            assert turns != "1"
            continue
        news = sum(talk.turns[turn].new for talk, turn in ends)
        assert log.began == log.ended == len(log.first_s) == len(set(ends)) == asked.requests
        assert log.new_tokens == news
        assert log.rows_most <= device._have.rows if isinstance(device, Paged) else log.rows_most <= 4
        assert log.busy_s <= log.seconds
        assert min(log.first_s) > 0
        assert (len(device.waiting), device.reading, device.decoding) == (0, [], 0)
        assert isinstance(device, Bounded) or device._used == 0
        assert log.host_most <= 5


def test_a_tight_memory_interrupts():
    asked = load(rate=30.0)
    log = Watched(Small(), Arrivals(asked), Pages(space=60, page_bytes=1, most_rows=9, step_tokens=64)).run()
    assert log.preempted > 0
    assert log.ended == 400


def test_more_devices_are_never_slower():
    for make in (
        lambda come: Bounded(Small(), come, rows(4)),
        lambda come: Paged(Small(), come, Pages(space=100, page_bytes=1)),
    ):
        logs = [make(Arrivals(load(rate=40.0, requests=200), devices)).run() for devices in (1, 2, 3, 50)]
        for fewer, more in itertools.pairwise(logs):
            for share in (50.0, 99.0):
                assert percentile(sorted(more.first_s), share) <= percentile(sorted(fewer.first_s), share) * 1.001


def test_a_seed_decides_about_everything():
    asked = load(turns=length("~3"), between=length("~20"), requests=200)
    runs = [Bounded(Small(), Arrivals(asked), rows(4)).run() for _ in range(2)]
    assert runs[0] == runs[1]
    other = Bounded(Small(), Arrivals(dataclasses.replace(asked, seed=1)), rows(4)).run()
    assert other.first_s != runs[0].first_s


def test_arrivals_are_as_many_as_asked_and_conversations_have_begun_before():
    asked = load(rate=2.0, turns=length("5"), between=length("60"), requests=2000)
    come = Arrivals(asked)
    assert len(come.thinking) == 2 * 4 * 60  # four waits of 60 s each
    times = [at for at, _ in popped(come)]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(2 * 5, rel=0.1)  # from the first second on
    early = sum(at < 30 for at in times)
    assert early == pytest.approx(300, rel=0.2)


@pytest.mark.parametrize("sessions", ["4", "1-4", "~3"])
@pytest.mark.parametrize("between", ["60", "~60"])
def test_conversations_of_users_who_came_before_begin_as_well(sessions, between):
    """As many conversations begin in every minute as in the long run."""
    asked = load(rate=4.0, sessions=length(sessions), between=length(between), requests=6000)
    times = [at for at, _ in popped(Arrivals(asked))]
    assert times == sorted(times)
    per_s = statistics.mean(asked.sessions.draw(random.Random(seed)) for seed in range(10_000)) * 4.0
    for start in range(0, int(times[-1] - 60), 60):
        assert sum(start <= at < start + 60 for at in times) / 60 == pytest.approx(per_s, rel=0.3)
    assert len(times) / times[-1] == pytest.approx(per_s, rel=0.1)


def test_users_come_at_random_and_more_devices_stretch_their_times():
    """The times between users are exponential: their deviation is their mean."""
    gaps = {}
    for devices in (1, 3):
        come, times = Arrivals(load(rate=5.0, requests=4000), devices), []
        while come.next_due() is not None:
            times.append(come.pop().at)
        gaps[devices] = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.mean(gaps[1]) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps[1]) == pytest.approx(0.2, rel=0.08)
    assert gaps[3] == pytest.approx([3 * gap for gap in gaps[1]], abs=1e-6)


def test_the_first_tenth_of_what_is_drawn_is_not_counted(folder):
    assert load(requests=400).counted_from == 40
    assert given([(0, 1, 1)]).counted_from == 0
    assert len(bounded(fleet(folder, load(requests=100, rate=1.0), devices=1)).log.first_s) == 90


@pytest.mark.parametrize("count", [7, 70, 3000])
@pytest.mark.parametrize("turns", ["1", "2-3"])
def test_conversations_like_those_that_come_have_every_line_of_a_file(count, turns):
    """The plan's rows are as long as the longest of them."""
    pool = load(lines=lines(count), turns=length(turns)).pool
    assert {turn.prompt for talk in pool for turn in talk.turns} == set(range(1, count + 1))


@pytest.mark.parametrize("options", [{}, {"sessions": "1-4"}, {"sessions": "~2"}])
def test_messages_take_the_lines_of_a_file_in_turn(options):
    asked = load(lines=lines(10**4), between=length("1"), **{name: length(text) for name, text in options.items()})
    taken = sorted(turn.prompt for _, turn in popped(Arrivals(asked)))
    assert len(set(taken)) == asked.requests
    assert taken[-1] < 1.1 * asked.requests  # the others are of users who come back later


def test_conversations_that_have_begun_are_those_that_wait_long():
    """A conversation with nine waits is nine times as likely to be open as one with a single wait."""
    asked = dataclasses.replace(load(rate=1.0, between=length("60")), turns=length("2-10"))
    thinking = Arrivals(asked).thinking
    mean = statistics.mean(len(talk.turns) - 1 for talk in thinking)
    assert mean == pytest.approx(sum(n * n for n in range(1, 10)) / sum(range(1, 10)), rel=0.05)  # not 5


# steps


def test_lines_through_measured_steps():
    decode = [
        {"rows": n, "slots": n * s, "seconds": 0.01 + 0.002 * n + 1e-6 * n * s} for n in (1, 4, 8) for s in (9, 900)
    ]
    prompt = [{"tokens": n, "seconds": 0.005 + 0.001 * n} for n in (8, 64, 512)]
    found = fit({"decode": decode, "prompt": prompt}, "x")
    assert found.decode == pytest.approx((0.01, 0.002, 1e-6))
    assert found.prompt == pytest.approx((0.005, 0.001, 0.0), abs=1e-9)
    assert found.error < 1e-6
    assert found.seconds(0, 0.0, 100) == pytest.approx(0.105)
    assert found.seconds(4, 100.0, 10) == pytest.approx(0.0181 + 0.01)
    past = [{"tokens": n, "past": p, "seconds": 0.001 * n + 1e-6 * n * (p + n / 2)} for n in (8, 512) for p in (0, 999)]
    assert fit({"decode": decode, "prompt": past}, "x").prompt == pytest.approx((0, 0.001, 1e-6), abs=1e-9)


def test_prompts_beside_rows_have_a_line_of_their_own():
    mixed = [
        {"rows": r, "tokens": n, "seconds": 0.01 + 0.002 * r + 0.003 + 0.0005 * n} for r in (1, 4) for n in (8, 64)
    ]
    decode = [{"rows": r, "seconds": 0.01 + 0.002 * r} for r in (1, 8)]
    found = fit({**GOOD, "decode": decode, "mixed": mixed}, "x")
    assert found.mixed == pytest.approx((0.003, 0.0005))
    assert found.seconds(4, 0.0, 100) == pytest.approx(0.018 + 0.053)
    assert found.seconds(4, 0.0) == pytest.approx(0.018)
    assert fit(GOOD, "x").mixed == (0.0, fit(GOOD, "x").prompt[1])


def test_no_line_falls_below_zero():
    decode = [{"rows": 1, "seconds": 0.01}, {"rows": 8, "seconds": 0.009}]
    prompt = [{"tokens": 1, "seconds": 0.001}, {"tokens": 512, "seconds": 1.0}]
    found = fit({"decode": decode, "prompt": prompt}, "x")
    assert min(*found.decode, *found.prompt) >= 0
    assert found.error > 0.01


def test_steps_take_the_measured_ratios_in_turn():
    found = fit({**GOOD, "ratios": [2, 0.5, 1.0]}, "x")
    assert found.ratios == (2.0, 0.5, 1.0)
    assert fit(GOOD, "x").ratios == ()
    line = (found.seconds(0, 0.0, 8), *[found.seconds(1, 9.0)] * 4)
    log = Bounded(found, Arrivals(given([(0, 8, 5)])), rows(slots=9)).run()
    taken = [line[0] * 2, line[1] * 0.5, line[2], line[3] * 2, line[4] * 0.5]
    assert log.first_s == pytest.approx([taken[0]])
    assert log.seconds == pytest.approx(sum(taken))
    again = Bounded(found, Arrivals(given([(0, 8, 1)])), rows(slots=9)).run()
    assert again.seconds == pytest.approx(taken[0])  # each device begins anew


GOOD = {
    "decode": [{"rows": 1, "seconds": 0.01}, {"rows": 8, "seconds": 0.02}],
    "prompt": [{"tokens": 8, "seconds": 0.01}, {"tokens": 64, "seconds": 0.05}],
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({"decode": None}, "decode is no list"), ({"prompt": [{}, {}]}, "point 1 of prompt has no tokens")),
        ({"decode": [{"rows": 1, "seconds": 0.0}, {"rows": 2, "seconds": 1}]}, "seconds of point 1"),
        ({"decode": [{"rows": 1, "seconds": float("nan")}, {"rows": 2, "seconds": 1}]}, "seconds of point 1"),
        ({"decode": [{"rows": True, "seconds": 1}, {"rows": 2, "seconds": 1}]}, "rows of point 1"),
        ({"decode": [{"rows": 2, "seconds": 1}, {"rows": 2, "seconds": 1}]}, "have the same rows"),
        ({"decode": [{"rows": 1, "slots": -1, "seconds": 1}, {"rows": 2, "seconds": 1}]}, "slots of point 1"),
        (
            {"mixed": [{"rows": 1, "seconds": 1}, {"rows": 2, "seconds": 1}]},
            "point 1 of mixed has no rows or no tokens",
        ),
        ({"decode": [{"rows": 1, "seconds": 5e-324}, {"rows": 2, "seconds": 1}]}, "seconds of point 1"),
        *(({"ratios": bad}, "ratios is no list") for bad in ([], 1.0, "12", [1.0] * 10_001)),
        *(({"ratios": [1.0, bad]}, "number 2 of ratios") for bad in (0, -1.0, True, "1", None, float("nan"), 1e300)),
        *(({"device": 3}, "device is no text"), ({"prompt": [7, 8]}, "point 1 of prompt")),
    ],
)
def test_steps_that_are_none(tmp_path, change, words):
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(GOOD | change))
    with pytest.raises(InputError, match=words):
        read_steps(file)


def test_steps_come_from_the_last_line_of_a_benchmark(tmp_path):
    file = tmp_path / "steps.txt"
    file.write_text(f"a table\n{json.dumps({'bench': 'fleet', 'steps': GOOD})}\n")
    assert read_steps(file) == fit(GOOD, "x")
    file.write_text(json.dumps(GOOD), encoding="utf-8-sig")  # as some editors write it
    assert read_steps(file) == fit(GOOD, "x")
    file.write_text("a table\n")
    with pytest.raises(InputError, match="no measured steps"):
        read_steps(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_steps(tmp_path / "none")


# traces


def test_a_trace_has_times_lengths_and_sessions(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [
        {"at": 7, "prompt_tokens": 3, "max_tokens": 2, "session": "a"},
        {"planned": 5.5, "prompt_tokens": 4, "new_tokens": None, "times": [1.0, 2.0, 3.0], "error": None},
        {"at": 6, "prompt_tokens": 9, "new_tokens": 1, "session": "a"},
        {"planned": 6, "prompt_tokens": None, "error": "status 500", "times": []},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_trace(file)
    assert found.turns == ((Turn(4, 3, due=0.0),), (Turn(9, 1, due=0.5), Turn(3, 2, due=1.5)))
    assert found.failed == 1
    file.write_text('{"prompt_tokens": 3}\n')
    assert read_trace(file).turns == ()
    assert read_trace(file).lines[0].prompt_tokens == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(("", "has no line"), ("\n \n", "has no line"), ("{", "line 1: no JSON"), ("[]", "line 1: no JSON object")),
        ('{"error": "x"}', "no line of a request that did not fail"),
        ('{"at": 1, "prompt_tokens": 2, "max_tokens": 1}\n{"a": 1}', "line 2: it has no prompt_tokens"),
        ('{"at": 1, "prompt_tokens": 2, "max_tokens": 1}\n{"prompt_tokens": 2}', "line 2: some lines have a time"),
        *(('{"prompt": "a text"}', "a text is not counted"), ('{"prompt_tokens": 0}', "prompt_tokens is not a whole")),
        *(('{"at": 1, "prompt_tokens": 2}', "no new_tokens"), ('{"prompt_tokens": true}', "is not a whole number")),
        ('{"at": "x", "prompt_tokens": 2, "max_tokens": 1}', "at is not a number of seconds"),
        ('{"at": Infinity, "prompt_tokens": 2, "max_tokens": 1}', "at is not a number of seconds"),
        *(
            (f'{{"at": {at}, "prompt_tokens": 2, "max_tokens": 1}}', "at is not a")
            for at in ("NaN", "1" * 400, "-1e12")
        ),
        ('{"at": 1, "prompt_tokens": 2, "max_tokens": 1, "session": [1]}', "session is neither"),
        ("[" * 100_000, "line 1: no JSON"),
    ],
)
def test_traces_that_are_none(tmp_path, text, words):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=f"(?i){words}"):
        read_trace(file)


# fleets


@pytest.fixture(scope="module")
def folder():
    with quiet(), model_folders.one_thread():
        yield model_folders.folder()


def fleet(folder, asked, **options):
    memory = options.pop("memory", 10**8)
    budget = options.pop("budget", 32)
    chunk = options.get("chunk")
    made = plan_for(asked, folder, policy="h2o", budget=budget, memory=memory, bandwidth=1e7, prefill_chunk=chunk)
    return Fleet(plan=made, load=asked, **{"first_token": 0.5, "rows": 4, **options})


def test_the_smallest_number_of_devices_is_found(folder):
    asked = load(rate=20.0, requests=80, turns=length("1-3"), between=length("5"))
    one = fleet(folder, asked)
    found = bounded(one)
    assert found.carried
    assert percentile(sorted(found.log.first_s), 99.0) <= 0.5
    assert found.devices > 1
    assert not bounded(dataclasses.replace(one, devices=found.devices - 1)).carried
    assert bounded(dataclasses.replace(one, devices=found.devices + 1)).carried
    assert bounded(one) == found
    assert found.memory_bytes <= one.memory


def test_the_search_begins_where_a_device_holds_its_conversations(folder, monkeypatch):
    for module in ("load", "sizing"):
        monkeypatch.setattr(f"kvkeep_lab.fleet.{module}.MOST_THINKING", 50)
    asked = load(rate=2.0, requests=80, turns=length("2"), between=length("60"))
    one = fleet(folder, asked, first_token=5.0)  # 120 are open
    assert bounded(one).devices == 3
    assert bounded(one).carried
    with pytest.raises(InputError, match="60 conversations are open on one device"):
        bounded(dataclasses.replace(one, devices=2))


def test_the_smallest_number_of_devices_is_found_where_prompts_share_runs_with_rows(folder):
    asked = load(rate=100.0, requests=200, prompt_tokens=length("256"), new_tokens=length("64"))
    one = fleet(folder, asked, device="cpu", rows=8, chunk=32, first_token=20.0)
    found = bounded(one)
    assert found.carried
    assert not bounded(dataclasses.replace(one, devices=found.devices - 1)).carried


@pytest.mark.slow
def test_the_same_for_pages(folder):
    asked = load(rate=100.0, requests=100)
    one = fleet(folder, asked, memory=500_000, chunk=16)
    found = paged(one)
    assert found.carried
    assert found.memory_bytes <= one.memory
    assert not paged(dataclasses.replace(one, devices=found.devices - 1)).carried


@pytest.mark.slow
def test_a_load_that_no_number_of_devices_carries(folder):
    few = load(requests=20)
    with pytest.raises(InputError, match="without other requests the first token takes"):
        bounded(fleet(folder, few, first_token=1e-9))
    with pytest.raises(InputError, match="without other requests a token takes"):
        bounded(fleet(folder, few, per_token=1e-9))
    with pytest.raises(InputError, match="1000000 are not enough"):
        bounded(fleet(folder, load(rate=1e15, requests=20)))
    tight = paged(fleet(folder, load(turns=length("40"), requests=20), memory=400_000, chunk=16))
    assert tight.devices is None
    assert "a device has room for" in tight.reason


def test_pages_have_no_more_sequences_than_tokens_of_a_step(folder):
    asked = given(*[[(0, 4, 30)]] * 40)
    found = paged(fleet(folder, asked, chunk=16, devices=1))
    assert found.rows == found.log.rows_most == 16
    assert paged(fleet(folder, asked, devices=1)).rows == 256


def test_a_trace_is_dealt_out_to_all_devices(folder):
    draw = random.Random(0)
    talks = [[(draw.uniform(0, 1), 20, 5), (9, 5, 2)] for _ in range(40)]
    one = fleet(folder, given(*sorted(talks)), devices=3)
    found = bounded(one)
    assert (found.simulated, found.log.ended) == (3, 80)
    assert bounded(dataclasses.replace(one, devices=None)).devices <= 40
    with pytest.raises(InputError, match="without other requests"):
        bounded(dataclasses.replace(one, devices=None, first_token=1e-6))


def test_the_search_with_a_trace_ends_early_at_sizes_that_are_too_small(folder, monkeypatch):
    draw = random.Random(0)
    one = fleet(folder, given(*sorted([(draw.uniform(0, 0.5), 20, 5)] for _ in range(150))), first_token=0.3)
    ran, run = [], Bounded.run

    def counted(self, **options):
        log = run(self, **options)
        ran.append((log.hopeless, log.ended))
        return log

    monkeypatch.setattr(Bounded, "run", counted)
    found = bounded(one)
    assert sum(hopeless for hopeless, _ in ran) >= 2
    assert all(ended < 40 for hopeless, ended in ran if hopeless)  # of 150
    whole = [bounded(dataclasses.replace(one, devices=count)) for count in (found.devices - 1, found.devices)]
    assert [tried.carried for tried in whole] == [False, True]
    assert whole[1] == found
    late = [sum(first > 0.3 for first in tried.log.first_s) for tried in whole]
    assert late[1] <= 1 < late[0]  # 1 % of 150 messages, on all devices together


def test_the_limits_of_a_plan():
    with quiet(), model_folders.one_thread():
        cost = plan_for(load(), model_folders.folder(), budget=32, memory=10**8).bounded
    weights = cost.read_bytes(1) - cost.row_bytes
    limits = Limits.of(cost, 100.0, bandwidth=1e9, compute=None, device="cpu")
    assert limits.seconds(1, 0.0) == pytest.approx(weights / 1e9)
    assert limits.seconds(2, 50.0) == pytest.approx((weights + 5000) / 1e9)
    assert limits.seconds(0, 0.0, 32) == pytest.approx(weights / 1e9)  # as long as a step, by the engine's schedule
    assert limits.seconds(0, 0.0, 320) == pytest.approx(10 * weights / 1e9)
    layers, heads, dim = 2, cost.model.query_heads, cost.model.layers[0].key_dim
    pair = 4 * layers * heads * dim  # multiply and add, for keys and for values
    exact = Limits.of(cost, 100.0, bandwidth=1e9, compute=1e9)
    assert exact.seconds(0, 0.0, 10**6, 7.0) == pytest.approx((2 * cost.model.read(1) * 10**6 + 7 * pair) / 1e9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"first_token": 0.0}, "first_token=0"), ({"devices": 0}, "devices=0"), ({"bus": float("nan")}, "bus=nan")),
        *(({"rows": 10**6}, "do not fit into the `memory`"), ({"decode_every": 0}, "decode_every=0")),
    ],
)
def test_fleets_that_are_none(folder, options, words):
    with pytest.raises(InputError, match=words):
        bounded(fleet(folder, load(), **options))


def test_a_fleet_needs_memory_times_and_a_policy_that_evicts(folder):
    asked = load()
    with pytest.raises(InputError, match="needs the `memory`"):
        Fleet(plan=plan_for(asked, folder, budget=32), load=asked)
    with pytest.raises(InputError, match="give the `bandwidth`"):
        Fleet(plan=plan_for(asked, folder, budget=32, memory=10**7), load=asked)
    made = plan_for(asked, folder, policy="full", context=50, memory=10**7, bandwidth=1e9)
    with pytest.raises(CapacityError, match="never evicts"):
        Fleet(plan=made, load=asked)
    assert bounded(
        Fleet(plan=plan_for(asked, folder, policy="full", memory=10**8, bandwidth=1e9), load=asked, devices=1)
    ).carried


@pytest.mark.parametrize(
    "options",
    [{"rate": 0.0}, {"rate": float("inf")}, {"rate": float("nan")}, {"requests": 1}, {"requests": 10**7}],
)
def test_loads_that_are_none(options):
    with pytest.raises(InputError, match=f"{next(iter(options))}="):
        load(**options)


def test_more_conversations_than_a_simulation_holds():
    asked = load(rate=1e6, turns=length("9"), between=length("1000"))
    with pytest.raises(InputError, match="open on one device"):
        Arrivals(asked)


@pytest.mark.slow
def test_long_conversations_make_a_small_pool():
    pool = load(turns=length("10000")).pool
    assert sum(len(talk.turns) for talk in pool) == 200_000
    assert len(load().pool) == 1000
