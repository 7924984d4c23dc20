"""A device that runs a full cache in pages, as vLLM does by default; docs/fleet.md states the model of it.

Pages of 16 tokens. Sequences are admitted in order, while there are pages for the whole prompt. A step gives every
decoding sequence a token, and the rest of its tokens to prompts, in one run. If pages run out, the sequence that came
last gives up its own, and is read again later. Pages of idle conversations are kept until they are needed, and of the
least recently used conversation the last pages go first.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass

from kvkeep_lab.fleet.device import Device, Message
from kvkeep_lab.fleet.load import Arrivals, Talk
from kvkeep_lab.fleet.steps import Steps

PAGE = 16
"""Tokens of a page."""

STEP_TOKENS = 2048
"""Tokens of a step, prompts' and generated ones, unless it is said otherwise."""

MOST_ROWS = 256
"""Sequences at once."""


class TooLongError(Exception):
    """A sequence does not fit into all pages together.

    Attributes:
        tokens: of the sequence.
        room: tokens for which there are pages.
    """

    def __init__(self, tokens: int, room: int) -> None:
        super().__init__(f"{tokens} tokens do not fit into pages for {room}")
        self.tokens, self.room = tokens, room


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The memory of a device beside the weights.

    Attributes:
        space: bytes of pages and working memory together.
        page_bytes: bytes of a page.
        prompt_bytes: working memory of a step that reads prompts.
        step_bytes: working memory of a sequence in a step.
        step_tokens: most tokens of a step.
        most_rows: most sequences at once, see `rows`.
    """

    space: int
    page_bytes: int
    prompt_bytes: int = 0
    step_bytes: int = 0
    step_tokens: int = STEP_TOKENS
    most_rows: int = MOST_ROWS

    @property
    def rows(self) -> int:
        """Return the most sequences at once: each has a token of the step."""
        return min(self.most_rows, self.step_tokens)

    def working(self, rows: int) -> int:
        """Return the bytes of working memory of so many sequences."""
        return max(self.prompt_bytes, rows * self.step_bytes)

    def count(self, rows: int) -> int:
        """Return the number of pages beside the working memory of so many sequences; 0 if that takes all."""
        return max(0, self.space - self.working(rows)) // self.page_bytes


class Paged(Device):
    """A device that runs a full cache in pages.

    Args:
        steps, arrivals, counted_from: see `Device`.
        pages: its memory.
    """

    def __init__(self, steps: Steps, arrivals: Arrivals, pages: Pages, *, counted_from: int = 0) -> None:
        super().__init__(steps, arrivals, counted_from=counted_from)
        self._have, self._used, self._cached = pages, 0, 0
        self._idle: OrderedDict[Talk, int] = OrderedDict()
        self._running: list[Message] = []
        self._needing = [0] * PAGE
        self._sum = 0
        for talk in arrivals.thinking:
            self._keep(talk, talk.tokens // PAGE)
            self._evict(0)

    def step(self) -> None:
        """Take pages for the next tokens, and run these, running prompts and waiting ones, in this order, at once.

        If a sequence had to be interrupted for the pages, none is admitted.
        """
        if not self._make_room():
            while self.waiting and self.rows < self._have.rows and self._fits_next():
                pass
        left, pieces = self._have.step_tokens - self.decoding, []
        for job in self.reading:
            if (count := min(job.left, left)) > 0:
                pieces.append((job, count))
                left -= count
        taken = (self._used + self._cached) * self._have.page_bytes + self._have.working(self.rows)
        self.log.used_bytes = max(self.log.used_bytes, taken)
        self.begin(self.advance(pieces, decode=self.decoding > 0))

    def came(self, talk: Talk, number: int, due: float) -> tuple[Message, float]:
        """Return the job of a message: a turn brings the whole conversation.

        Raises:
            TooLongError: its pages would not fit into the memory.
        """
        turn = talk.turns[talk.done]
        tokens, room = talk.tokens + turn.prompt, self._have.count(1)
        if _pages(tokens + turn.new) > room:
            raise TooLongError(tokens + turn.new, room * PAGE)
        return Message(number, talk, due, left=tokens, past=0, new=turn.new), due

    def hold(self, job: Message, by: int) -> None:
        """Note its tokens, and when it will need new pages: a step that feeds a token after a full page does."""
        self._needing[(job.began + 1 - job.past) % PAGE] += by
        self._sum += by * (job.past - job.began)

    def end(self, job: Message) -> None:
        """Free its pages, or keep the full ones of a conversation that goes on."""
        self._running.remove(job)
        self._used -= _pages(job.past)
        if job.talk.done < len(job.talk.turns):
            self._keep(job.talk, job.past // PAGE)

    def slots(self) -> float:
        """Return the number of all tokens of the decoding sequences, the new ones included."""
        return float(self._sum + (self.tick + 1) * self.decoding)

    def seen(self, job: Message) -> int:
        """Return the number of all tokens so far."""
        return job.past

    def _make_room(self) -> bool:
        """Take the pages that the next decode step needs; return whether a sequence had to be interrupted for them."""
        interrupted = False
        while (need := self._needing[(self.tick + 1) % PAGE]) + self._used > self._have.count(self.rows):
            self._interrupt(self._running[-1])
            interrupted = True
        self._evict(need)
        self._used += need
        return interrupted

    def _interrupt(self, job: Message) -> None:
        """Take the pages of a sequence; it waits before all others, and reads everything again."""
        if job.ends:
            self.leave(job)
            pages = _pages(job.past)
        else:
            self.reading.remove(job)
            pages = _pages(job.past + job.left)
        self._running.remove(job)
        self._used -= pages
        self.log.preempted += 1
        self.log.reread_tokens += job.past
        turn = job.talk.turns[job.talk.done]
        job.left, job.past = job.talk.tokens + turn.prompt + job.made, 0
        self.waiting.appendleft(job)

    def _fits_next(self) -> bool:
        """Admit the sequence that waits longest, if there are pages for its prompt; return whether there are."""
        job = self.waiting[0]
        need, there = _pages(job.left), self._idle.get(job.talk, 0)
        if self._used + need > self._have.count(self.rows + 1):
            return False
        self.waiting.popleft()
        self._idle.pop(job.talk, None)
        self._cached -= there
        hit = min(there * PAGE, job.left - 1)
        if not job.made:
            self.log.reread_tokens += max(0, job.talk.tokens - hit)
        job.left, job.past = job.left - hit, hit
        self.admit(job)
        insort(self._running, job)
        self._evict(need)
        self._used += need
        return True

    def _keep(self, talk: Talk, pages: int) -> None:
        """Keep the pages of an idle conversation until they are needed."""
        self._idle[talk] = pages
        self._cached += pages

    def _evict(self, need: int) -> None:
        """Give up pages of idle conversations until so many are free."""
        over = self._used + self._cached + need - self._have.count(self.rows)
        while over > 0 and self._idle:
            talk, pages = next(iter(self._idle.items()))
            gone = min(pages, over)
            over, self._cached = over - gone, self._cached - gone
            if gone == pages:
                del self._idle[talk]
            else:
                self._idle[talk] = pages - gone


def _pages(tokens: int) -> int:
    """Return the number of pages that hold so many tokens."""
    return -(-tokens // PAGE)
