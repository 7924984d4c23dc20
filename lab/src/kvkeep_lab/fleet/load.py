"""What comes to a fleet: users at random times, their conversations, and the turns of these."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep.errors import InputError
from kvkeep_lab.loadtest.plan import Lengths, Line, length, objects

MOST_THINKING = 10**6
"""Conversations of one device that a simulation holds when it begins."""

LEAST_RATE, MOST_RATE = 1e-6, 1e15
"""Users per second; with fewer or more, floats cannot tell the times of a simulation apart."""

_POOL, _POOL_TURNS = 1000, 200_000
"""Conversations, and turns of them, from which those are drawn that have begun before the simulation; more are made
only for a file with more lines."""

ONE = Lengths(1, 1)


class Turn(NamedTuple):
    """A message and its answer.

    Attributes:
        prompt: tokens of the message.
        new: tokens of the answer.
        wait: seconds between the answer before it and this message.
        due: in place of it: the second at which it comes, or when the answer before it is there if that is later.
    """

    prompt: int
    new: int
    wait: float = 0.0
    due: float | None = None


@dataclass(eq=False, slots=True)
class Talk:
    """A conversation.

    Attributes:
        at: the second at which it begins.
        turns: its turns.
        done: how many of them are complete.
        tokens: of these.
        used: the second at which the last one ended.
    """

    at: float
    turns: tuple[Turn, ...]
    done: int = 0
    tokens: int = 0
    used: float = 0.0

    @property
    def total(self) -> int:
        """Return the tokens of all turns."""
        return sum(turn.prompt + turn.new for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class FleetLoad:
    """What a fleet is to bear.

    Attributes:
        rate: users that come per second, at random.
        prompt_tokens, new_tokens: lengths of messages and answers.
        sessions: conversations of each user: the first begins at once, each other one a wait after the one before.
        turns: messages of a conversation.
        between: seconds between an answer and the next message.
        requests: messages that are simulated on one device; the first tenth is not counted.
        seed: of everything that is drawn.
        lines: lengths of a file, which the messages take in turn.
        trace: conversations at given times, in place of everything that is drawn.

    Raises:
        InputError: a number is out of range.
    """

    rate: float
    prompt_tokens: Lengths
    new_tokens: Lengths
    sessions: Lengths = ONE
    turns: Lengths = ONE
    between: Lengths = field(default_factory=lambda: Lengths(60, 60))
    requests: int = 2000
    seed: int = 0
    lines: tuple[Line, ...] = ()
    trace: tuple[tuple[Turn, ...], ...] = ()

    def __post_init__(self) -> None:
        if not LEAST_RATE <= self.rate <= MOST_RATE:
            raise InputError(
                f"`rate={self.rate!r:.40}` is no arrival rate: give users per second, {LEAST_RATE:g} to {MOST_RATE:g}."
            )
        if not 10 <= self.requests <= 10**6:
            raise InputError(f"`requests={self.requests}` is outside 10 … 1000000.")
        if self.turns.most > 10**4 or self.sessions.most > 10**4:
            raise InputError("`turns` and `sessions` may be up to 10000.")

    @property
    def counted_from(self) -> int:
        """Return the number of the first message that is counted; of a trace all are."""
        return 0 if self.trace else self.requests // 10

    def talk(self, at: float, draw: random.Random, number: int) -> Talk:
        """Return a conversation that is drawn.

        Its first message has this number, which chooses the line of a file.
        """
        return Talk(at, tuple(self._turn(draw, number + turn, turn) for turn in range(self.turns.draw(draw))))

    def _turn(self, draw: random.Random, number: int, turn: int) -> Turn:
        line = self.lines[number % len(self.lines)] if self.lines else Line()
        wait = float(self.between.draw(draw)) if turn else 0.0
        prompt = line.prompt_tokens or self.prompt_tokens.draw(draw)
        return Turn(prompt, line.new_tokens or self.new_tokens.draw(draw), wait)

    def turns_per_s(self) -> float:
        """Return the messages per second of all users, in the long run; of a trace, from its first to its last."""
        if self.trace:
            whens = [turn.due or 0.0 for turns in self.trace for turn in turns]
            return len(whens) / max(1e-9, max(whens) - min(whens))
        return self.rate * self.sessions.average * self.turns.average

    @property
    def waiting_s(self) -> float:
        """Return the seconds for which a conversation waits for its user, in the mean; 0 for a trace."""
        return math.fsum(turn.wait for talk in self.pool for turn in talk.turns) / len(self.pool)

    @property
    def open_talks(self) -> float:
        """Return the number of conversations whose users are thinking, of all devices in the long run.

        It is 0 for a trace.
        """
        return self.rate * self.sessions.average * self.waiting_s

    @cached_property
    def pool(self) -> list[Talk]:
        """Return conversations like those that come, with every line of a file; nobody changes them."""
        if self.trace:
            return [Talk(turns[0].due or 0.0, turns) for turns in self.trace]
        draw, made, number = random.Random(f"{self.seed} pool"), list[Talk](), 0
        count = max(20, min(_POOL, round(_POOL_TURNS / self.turns.average)))
        while len(made) < count or number < len(self.lines):
            made.append(self.talk(0.0, draw, number))
            number += len(made[-1].turns)
        return made


class Due(NamedTuple):
    """A message that comes: the second, its number in the order of their making, and its conversation."""

    at: float
    number: int
    talk: Talk


class Arrivals:
    """The messages that come to one device, in the order of time.

    Args:
        load: of all devices.
        devices: over which its users are spread evenly.
        place: the number of this device; a trace is dealt out, and what is drawn is alike for all.

    Attributes:
        left: number of messages that will come.
        thinking: conversations that have begun before, the least recently used first.
    """

    def __init__(self, load: FleetLoad, devices: int = 1, place: int = 0) -> None:
        self._load, self._count, self._heap, self._messages = load, itertools.count(), list[Due](), 0
        self.left = load.requests
        self.thinking: list[Talk] = []
        self._users: Iterator[list[Talk]] = iter(())
        if load.trace:
            mine = load.trace[place::devices]
            self.left = sum(map(len, mine))
            self._push(Talk(turns[0].due or 0.0, turns) for turns in mine)
        else:
            both = self._drawn(devices), self._returning(devices)
            self._users = heapq.merge(*both, key=lambda talks: talks[0].at)
            self._begin(devices)
        self._next = next(self._users, None)

    def next_due(self) -> float | None:
        """Return the second of the next message.

        ``None`` after the last, and while all that are left wait for the end of an answer.
        """
        if not self.left:
            return None
        self._refill()
        return self._heap[0].at if self._heap else None

    def pop(self) -> Due:
        """Return the next message, which has to be there: see `next_due`."""
        self._refill()
        self.left -= 1
        return heapq.heappop(self._heap)

    def follow(self, talk: Talk, end: float) -> None:
        """Let the next turn of a conversation come, if there is one: its last answer was complete at ``end``."""
        talk.done, talk.used = talk.done + 1, end
        if talk.done < len(talk.turns):
            turn = talk.turns[talk.done]
            due = end + turn.wait if turn.due is None else max(end, turn.due)
            heapq.heappush(self._heap, Due(due, next(self._count), talk))

    def _refill(self) -> None:
        while self._next is not None and (not self._heap or self._next[0].at <= self._heap[0].at):
            self._push(self._next)
            self._next = next(self._users, None)

    def _push(self, talks: Iterable[Talk]) -> None:
        for talk in talks:
            heapq.heappush(self._heap, Due(talk.at, next(self._count), talk))

    def _drawn(self, devices: int) -> Iterator[list[Talk]]:
        """Yield the conversations of one user after another. More devices stretch the times and change nothing else."""
        gaps, load, at = random.Random(load_seed(self._load, "users")), self._load, 0.0
        for user in itertools.count():
            at += gaps.expovariate(1.0) * devices / load.rate
            draw = random.Random(load_seed(load, user))
            yield self._talks(draw, at, load.sessions.draw(draw))

    def _returning(self, devices: int) -> Iterator[list[Talk]]:
        """Yield the conversations that users begin who came before second 0, one user after another.

        Since users come at random, the second conversations of all of them begin at random, too, and the third ones,
        and so on. Those after a wait that is longer than the time since second 0 are the first of such users after it.
        """
        load, at, most = self._load, 0.0, self._load.sessions.most - 1
        draw = random.Random(load_seed(load, "returning"))
        while most and at < load.between.most:
            at += draw.expovariate(1.0) * devices / (load.rate * most)
            count, place = load.sessions.draw(draw), draw.randint(1, most)
            if place < count and load.between.draw(draw) > at:
                yield self._talks(draw, at, count - place)

    def _talks(self, draw: random.Random, at: float, count: int) -> list[Talk]:
        """Return so many conversations of one user, the first at this second."""
        talks: list[Talk] = []
        for session in range(count):
            at += self._load.between.draw(draw) if session else 0.0
            talks.append(self._load.talk(at, draw, self._messages))
            self._messages += len(talks[-1].turns)
        return talks

    def _begin(self, devices: int) -> None:
        """Draw the conversations whose users are thinking when the simulation begins, as many as in the long run.

        Raises:
            InputError: more than `MOST_THINKING` conversations are open on one device.
        """
        load = self._load
        count = round(load.open_talks / devices)
        if count > MOST_THINKING:
            raise InputError(
                f"{count} conversations are open on one device at the same time, and the simulation holds "
                f"{MOST_THINKING}. Give more `devices`, or a lower `rate`."
            )
        if not count:
            return
        pool = [_Past.of(talk) for talk in load.pool]
        waits = [past.waits[-1] for past in pool]
        draw = random.Random(load_seed(load, "thinking"))
        for past in draw.choices(pool, weights=waits, k=count):
            self.thinking.append(past.begun(draw.uniform(0.0, past.waits[-1])))
        self.thinking.sort(key=lambda talk: talk.used)
        for talk in self.thinking:
            due = talk.used + talk.turns[talk.done].wait
            heapq.heappush(self._heap, Due(due, next(self._count), talk))


class _Past(NamedTuple):
    """The beginnings of a conversation: seconds of waiting, and tokens, before each of its turns."""

    turns: tuple[Turn, ...]
    waits: list[float]
    tokens: list[int]

    @classmethod
    def of(cls, talk: Talk) -> _Past:
        waits = [*itertools.accumulate(turn.wait for turn in talk.turns)]
        tokens = [*itertools.accumulate((turn.prompt + turn.new for turn in talk.turns), initial=0)]
        return cls(talk.turns, waits, tokens)

    def begun(self, age: float) -> Talk:
        """Return the conversation whose users have thought for ``age`` seconds in all before second 0."""
        done = max(1, min(len(self.turns) - 1, bisect.bisect_left(self.waits, age)))
        return Talk(0.0, self.turns, done, self.tokens[done], self.waits[done - 1] - age)


def load_seed(load: FleetLoad, name: object) -> str:
    """Return the seed of one sequence of random numbers."""
    return f"{load.seed} {name}"


# Traces: files with the times and lengths of requests, one JSON object a line.

_TIMES = ("at", "planned")
_LATEST = 1e12
"""Seconds from any beginning, of which floats still tell a millisecond apart."""
_PROMPTS, _ANSWERS = ("message_tokens", "prompt_tokens"), ("new_tokens", "max_tokens")


class Trace(NamedTuple):
    """A file of requests.

    Attributes:
        turns: conversations, each with its turns at given times; empty if the lines have no times.
        lines: the lengths of every line.
        failed: lines of requests that failed, which are left out.
    """

    turns: tuple[tuple[Turn, ...], ...]
    lines: tuple[Line, ...]
    failed: int


def read_trace(path: str | Path) -> Trace:
    """Read a trace: the input of ``kvkeep bench-server``, or the output of one.

    A line has ``prompt_tokens`` and ``max_tokens`` (or ``new_tokens``), and may have ``at`` (or ``planned``): seconds
    from any beginning. Lines with one ``session`` are turns of a conversation, whose tokens are those of the message
    alone; ``message_tokens`` says them where ``prompt_tokens`` are those of all turns so far. Lines with an ``error``
    are left out.

    Raises:
        InputError: the file cannot be read, has no line, or a line is of another kind.
    """
    talks: dict[object, list[Turn]] = {}
    lines, timed, failed = [], 0, 0
    for where, fields in objects(path):
        if fields.get("error") is not None:
            failed += 1
            continue
        line, at = _lengths(where, fields), _time(where, fields)
        lines.append(line)
        timed += at is not None
        if timed not in (0, len(lines)):
            raise InputError(f"{where}: some lines have a time (`at`) and some have none.")
        if at is not None:
            turn = Turn(line.prompt_tokens or 1, line.new_tokens or 1, due=at)
            talks.setdefault(_session(where, fields), []).append(turn)
    if not lines:
        raise InputError(f"{path} has no line{' of a request that did not fail' if failed else ''}.")
    return Trace(_from_zero(talks), tuple(lines), failed)


def _from_zero(talks: dict[object, list[Turn]]) -> tuple[tuple[Turn, ...], ...]:
    """Return conversations in the order of their beginning, from second 0 on."""
    sorted_turns = [sorted(turns, key=lambda turn: turn.due or 0.0) for turns in talks.values()]
    start = min((turns[0].due or 0.0 for turns in sorted_turns), default=0.0)
    moved = [tuple(turn._replace(due=(turn.due or 0.0) - start) for turn in turns) for turns in sorted_turns]
    return tuple(sorted(moved, key=lambda turns: turns[0].due or 0.0))


def _lengths(where: str, fields: dict[str, Any]) -> Line:
    prompt = length(where, fields, _PROMPTS)
    if prompt is None:
        text = " A text is not counted; give its tokens." if "prompt" in fields or "messages" in fields else ""
        raise InputError(f"{where}: it has no prompt_tokens.{text}")
    new = length(where, fields, _ANSWERS)
    times = fields.get("times")
    if new is None and isinstance(times, list) and times:  # of a server that does not count
        new = len(times)
    return Line(None, prompt, new)


def _time(where: str, fields: dict[str, Any]) -> float | None:
    for name in _TIMES:
        if (value := fields.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LATEST:
                raise InputError(f"{where}: {name} is not a number of seconds below {_LATEST:g}.")
            if not any(fields.get(field_name) is not None for field_name in (*_ANSWERS, "times")):
                raise InputError(f"{where}: it has a time and no new_tokens.")
            return float(value)
    return None


def _session(where: str, fields: dict[str, Any]) -> object:
    session = fields.get("session")
    if session is None:
        return (where,)  # a conversation of its own
    if isinstance(session, bool) or not isinstance(session, str | int):
        raise InputError(f"{where}: session is neither a text nor a whole number.")
    return str(session)
