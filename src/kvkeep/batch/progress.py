"""How far a batch job is, in tokens, and how long the rest will take."""

from __future__ import annotations

from typing import NamedTuple


class TokenCounts(NamedTuple):
    """The tokens of some requests.

    Attributes:
        prompt: tokens to read.
        new: tokens to write, at most.
    """

    prompt: int
    new: int


class Pace:
    """Counts the tokens that a job has read and written, and the time that they took.

    A request may end before it has written all the tokens that it may write. A running request is expected to write all
    of them, and a waiting one the same share as the requests before it.

    Args:
        work: tokens of all requests that are to run.
        now: the present time in seconds, of any clock.
    """

    def __init__(self, work: TokenCounts, now: float) -> None:
        self._prompts, self._waiting = work
        self._begun = self._expected = 0
        self._read = self._written = 0
        self._in_part = 0.0
        self._start = self._time = now
        self._reading_s = self._writing_s = 0.0
        self._writing_steps = self._writing_tokens = 0  # of steps without prompts
        self._reads_now = False

    def begin(self, work: TokenCounts) -> None:
        """Note that a request leaves the queue."""
        self._waiting -= work.new
        self._begun += work.new
        self._expected += work.new

    def read_in_part(self, tokens: float, now: float) -> None:
        """Note that some layers have read tokens of a prompt that is not read to its end.

        Args:
            tokens: a fraction of the tokens that these layers have read, as `kvkeep.models.load.watched` counts.
            now: the present time.
        """
        self._in_part += tokens
        self._reading_s += now - self._time
        self._time, self._reads_now = now, True

    def step(self, read: int, written: int, now: float) -> None:
        """Note the end of a step.

        Args:
            read: tokens of the prompts that have been read to their ends in this step.
            written: new tokens.
            now: the present time.
        """
        seconds, usual = now - self._time, self._writing_s / max(1, self._writing_steps)
        if read or self._reads_now:  # the rest of the step is for writing, as far as steps usually take for that
            self._reading_s += max(0.0, seconds - usual)
        elif written:
            self._writing_s += seconds
            self._writing_steps += 1
            self._writing_tokens += written
        self._read += read
        self._in_part = 0.0 if read else self._in_part  # no two prompts are read in part at once
        self._written += written
        self._time, self._reads_now = now, False

    def end(self, work: TokenCounts, read: int, written: int) -> None:
        """Note that a request has ended.

        Args:
            work: the tokens that it could have taken.
            read: the tokens of its prompt that `step` has counted: all or none.
            written: the tokens that it has written.
        """
        self._prompts -= work.prompt - read
        self._expected += written - work.new

    @property
    def done(self) -> float:
        """Return how many tokens have been prefilled and generated so far."""
        return float(min(self._read + self._in_part, self._prompts) + self._written)

    @property
    def total(self) -> float:
        """Estimate how many tokens the whole job will prefill and generate."""
        share = self._expected / self._begun if self._begun else 1.0
        return float(max(self.done, self._prompts + self._expected + share * self._waiting))

    @property
    def reading_rate(self) -> float:
        """Prompt tokens per second while prompts are read."""
        return (self._read + self._in_part) / max(1e-9, self._reading_s)

    @property
    def writing_rate(self) -> float:
        """New tokens per second since the beginning, the time for prompts included."""
        return self._written / max(1e-9, self._time - self._start)

    @property
    def seconds_to_read(self) -> float:
        """Estimate the seconds to prefill the remaining prompts."""
        return self._to_read / max(1e-9, self.reading_rate)

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the job ends; ``None`` before there is a new token to measure."""
        if not self._written:
            return None
        if not self._writing_steps:
            return (self._time - self._start) * (self.total - self.done) / self.done
        to_write = max(0.0, self.total - self.done - self._to_read)
        return self.seconds_to_read + to_write * self._writing_s / self._writing_tokens

    @property
    def _to_read(self) -> float:
        return max(0.0, self._prompts - self._read - self._in_part)
