"""How much work a batch job is, and how far it is.

Before its lines run there is a survey with a few numbers of each, and the file of lines that cannot run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from kvkeep import result_files
from kvkeep.batch import input as batch_input
from kvkeep.batch.input import BadLine, InputLine, digest, reason_of
from kvkeep.batch.output import as_line
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request, Structure, structure_of
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, KVKeepError
from kvkeep.openai.messages import decoded
from kvkeep.pins import Spans, spans
from kvkeep.snapshot.snapshot import Snapshot

# How far a batch job is, in tokens, and how long the rest will take.


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
        """Begin to count at the time ``now``, with all requests waiting."""
        self._prompts, self._waiting = work
        self._begun = self._expected = 0  # new tokens that requests which have begun may write, and presumably will
        self._read = self._written = 0
        self._in_part = 0.0
        self._start = self._time = now
        self._reading_s = self._writing_s = 0.0
        self._writing_steps = self._writing_tokens = 0  # of steps without prompts
        self._reads_now = False

    def begin(self, work: TokenCounts) -> None:
        """Note that a request has begun: it leaves the queue, and is expected to write all new tokens that it may.

        Args:
            work: its tokens.
        """
        self._waiting -= work.new
        self._begun += work.new
        self._expected += work.new

    def read_in_part(self, tokens: float, now: float) -> None:
        """Add prompt tokens that a part of the model's layers has read, while the step that reads the prompt still
        runs; the time since the last call is for reading.

        Args:
            tokens: the tokens that these layers have read, times their share of all layers, as
                `kvkeep.models.load.watched` counts.
            now: the present time.
        """
        self._in_part += tokens
        self._reading_s += now - self._time
        self._time, self._reads_now = now, True

    def step(self, read: int, written: int, now: float) -> None:
        """Add the tokens of a step that has ended, and divide its time between reading prompts and writing: a step that
        read counts for writing only as long as one that writes alone usually takes.

        Args:
            read: tokens of the prompts that have been read to their ends in this step.
            written: new tokens of all requests.
            now: the present time.
        """
        # what a step takes that only writes
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
        """Note that a request, which `begin` had, has ended: tokens that it did not read or write are expected no more.

        Args:
            work: the tokens that it could have taken.
            read: the tokens of its prompt that `step` has counted: all or none.
            written: the tokens that it has written.
        """
        self._prompts -= work.prompt - read
        self._expected += written - work.new

    @property
    def done(self) -> float:
        """Return how many tokens of prompts have been read and how many new ones written so far, in one sum. Prompts
        that are read in part count in part.
        """
        return float(min(self._read + self._in_part, self._prompts) + self._written)

    @property
    def total(self) -> float:
        """Estimate how many tokens the whole job reads and writes, in one sum: requests that wait are expected to write
        the same share of what they may as those before them. It is never less than `done`.
        """
        share = self._expected / self._begun if self._begun else 1.0
        return float(max(self.done, self._prompts + self._expected + share * self._waiting))

    @property
    def reading_rate(self) -> float:
        """Return the prompt tokens per second of the time in which prompts are read; 0 before any was read."""
        return (self._read + self._in_part) / max(1e-9, self._reading_s)  # no division by 0

    @property
    def writing_rate(self) -> float:
        """Return the new tokens per second from the job's beginning to the last event, the time for prompts included; 0
        before the first token.
        """
        return self._written / max(1e-9, self._time - self._start)  # no division by 0

    @property
    def seconds_to_read(self) -> float:
        """Estimate the seconds to read the remaining prompts, at `reading_rate`; a huge number before any was read."""
        return self._to_read / max(1e-9, self.reading_rate)

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the job ends, from the tokens that are left and the times for reading and writing;
        ``None`` before the first new token.
        """
        if not self._written:
            return None
        if not self._writing_steps:  # steps that read and write cannot be told apart: by the share of all tokens
            return (self._time - self._start) * (self.total - self.done) / self.done
        to_write = max(0.0, self.total - self.done - self._to_read)
        return self.seconds_to_read + to_write * self._writing_s / self._writing_tokens

    @property
    def _to_read(self) -> float:
        """Return how many tokens of the job's prompts have not been read yet, at least 0."""
        return max(0.0, self._prompts - self._read - self._in_part)


# The survey.

_BAD_FIELDS = {"line", "reason", "text"}
_MOST_MODELS, _MOST_IGNORED = 3, 16  # names in a note


class Shape(NamedTuple):
    """The properties of a line's requests that decide whether an engine accepts them, and their number and tokens.

    Attributes:
        prompt_tokens: of the longest one.
        max_new_tokens: of each.
        policy: of all.
        budget: of all.
        requests: how many there are.
        work: tokens of all.
        is_batch_line: whether the line is in OpenAI's format.
        pins: of all.
        guard: of all.
        structure: the form of all.
        adapter: of all.
        keep_prompt: of all.
    """

    prompt_tokens: int
    max_new_tokens: int
    policy: str | None
    budget: int | None
    requests: int
    work: TokenCounts
    is_batch_line: bool
    pins: Spans
    guard: float | None
    structure: Structure | None
    adapter: str | None = None
    keep_prompt: bool | float | None = None


Judge: TypeAlias = Callable[[Sequence[Shape]], Sequence[str | None]]
"""Says why an engine refuses requests of each shape; ``None`` where it does not."""


@dataclass
class Survey:
    """The lines of a job with their lengths.

    Attributes:
        memory: the memory that every line follows.
        digests: line number → fingerprint, of every line that can be run.
        bad: line number → reason, of every line that cannot be run.
        models: models that lines in OpenAI's format name, a few of them.
        ignored: fields of such lines that nobody knows, a few of them.
    """

    memory: Snapshot | None = None
    digests: dict[int, str] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    _shapes: dict[int, Shape] = field(default_factory=dict)
    _known: dict[Shape, Shape] = field(default_factory=dict)
    _names: dict[bytes, int] = field(default_factory=dict)
    _params: dict[int, str] = field(default_factory=dict)

    def add(self, line: InputLine | BadLine) -> BadLine | None:
        """Note a line of the input: as one that can be run, with its lengths, or as a bad one, with the reason. Call
        this with all lines in the order of the input.

        Return the `BadLine` that was noted, which a good line becomes if an earlier one has its ``custom_id``; ``None``
        for a line that can be run.
        """
        # the first line keeps the name, also if it cannot be run
        earlier = line.custom_id is not None and self._names.setdefault(_key(line.custom_id), line.number)
        if earlier and earlier != line.number and isinstance(line, InputLine):
            line = BadLine(line.number, f"its custom_id is that of line {earlier}, too", line.custom_id, "custom_id")
        if isinstance(line, BadLine):
            self.bad[line.number] = line.reason
            self._params |= {line.number: line.param} if line.param else {}
            return line
        shape = _shape(line)
        self.digests[line.number] = line.digest
        self._shapes[line.number] = self._known.setdefault(shape, shape)  # many lines share one object
        if line.asked and line.asked.model is not None and len(self.models) < _MOST_MODELS:
            self.models.add(line.asked.model)
        if line.asked and len(self.ignored) < _MOST_IGNORED:
            self.ignored.update(line.asked.ignored[:_MOST_IGNORED])
        return None

    def entries(
        self, lines: Iterable[tuple[int, bytes]], failed: Mapping[int, str], *, bad: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the entries of the file that lists lines without an answer, in the order of the input: lines that
        failed, and with ``bad`` those that cannot be run.

        Args:
            lines: number and bytes of all lines of the input, read once more.
            failed: line number → reason, of lines that failed while they ran.
            bad: whether lines that cannot be run have entries as well.
        """
        reasons = {**(self.bad if bad else {}), **failed}
        for number, raw in lines:
            if number in reasons:
                yield _entry(number, raw, reasons[number], self._params.get(number), failed=number in failed)

    def is_settled(self, entry: Mapping[str, Any]) -> bool:
        """Return whether the line that an earlier run has listed as one without an answer is in this input and can be
        run now, so that its entry is needed no more.

        A line in OpenAI's format is known by its ``custom_id`` alone. The text of a line in kvkeep's format must be
        unchanged, as the entry may be its only copy.
        """
        if "text" in entry:
            number, text = entry["line"], str(entry["text"])
            # the entry's text may hold half of a character, which must not raise here
            return isinstance(number, int) and self.digests.get(number) == digest(text.encode(errors="replace"))
        name = entry["custom_id"]
        return isinstance(name, str) and self._names.get(_key(name)) in self.digests

    @property
    def requests(self) -> int:
        """Return the number of requests, one for each choice, in all lines that can be run."""
        return sum(self._shapes[number].requests for number in self.digests)

    @property
    def longest(self) -> int:
        """Return the most tokens that a request needs: those of the memory before it, its prompt and all new tokens
        that it may write. Lines that were set aside count as well; 0 without lines.
        """
        before = self.memory.seen if self.memory else 0
        return max((before + shape.prompt_tokens + shape.max_new_tokens for shape in self._known), default=0)

    @property
    def longest_line(self) -> int:
        """Return the number of the first line with a request as long as `longest`; there must be a line."""
        before = self.memory.seen if self.memory else 0
        lengths = ((n, before + shape.prompt_tokens + shape.max_new_tokens) for n, shape in self._shapes.items())
        return next(n for n, length in lengths if length == self.longest)

    def work(self, numbers: Iterable[int]) -> TokenCounts:
        """Return the prompt tokens and the new tokens, at most, of all requests of the lines with these numbers, as
        sums.
        """
        works = [self._shapes[number].work for number in numbers]
        return TokenCounts(sum(work.prompt for work in works), sum(work.new for work in works))

    @property
    def batch_lines(self) -> set[int]:
        """Return the numbers of the lines in OpenAI's format, without those that could not be read."""
        return {number for number, shape in self._shapes.items() if shape.is_batch_line}

    @property
    def policies(self) -> set[str]:
        """Return the policies that lines name in their options, as texts; not the job's own, by which all other lines
        run.
        """
        return {shape.policy for shape in self._known if shape.policy is not None}

    def check(self, judge: Judge, numbers: Sequence[int]) -> dict[int, str]:
        """Ask whether an engine can run lines, and return those that it refuses: line number → reason. Nothing is
        changed (see `set_aside`), and no line is read again.

        Args:
            judge: says why the engine refuses requests of each shape; it is asked once, with all shapes.
            numbers: the lines that are checked, none of which was bad when it was added; the others have no shape, and
                raise a `KeyError`. Lines that were set aside are not left out.
        """
        shapes = list(dict.fromkeys(self._shapes[number] for number in numbers))
        verdicts = dict(zip(shapes, judge(shapes), strict=True))
        return {number: reason for number in numbers if (reason := verdicts[self._shapes[number]])}

    def set_aside(self, found: dict[int, str]) -> None:
        """Move lines from those that can be run to those that cannot.

        Args:
            found: line number → reason, as `check` returns it.
        """
        self.bad |= found
        for number in found:
            del self.digests[number]


def problem(shape: Shape, engine: Engine, memory: Snapshot | None) -> str | None:
    """Return why an engine refuses a request of this shape, as part of a sentence; ``None`` if it accepts it.

    Args:
        shape: the shape.
        engine: the engine.
        memory: the memory that every line follows; ``None``: there is none.
    """
    sampling = SamplingParams(max_new_tokens=shape.max_new_tokens)
    try:
        own: dict[str, Any] = {"policy": shape.policy, "budget": shape.budget, "guard": shape.guard, "snapshot": memory}
        own |= {"structured_outputs": shape.structure, "adapter": shape.adapter}
        own |= {"keep_prompt": shape.keep_prompt}
        # zeros: which tokens a prompt has was checked when its line was read
        engine.check(Request(prompt=[0] * shape.prompt_tokens, sampling=sampling, pins=shape.pins, **own))
    except KVKeepError as error:
        return reason_of(error)
    return None


def _shape(line: InputLine) -> Shape:
    """Return what decides whether an engine accepts a line: length, policy, budget, pins and the like of the request
    with the longest prompt, as all of them have the same options; and the number and tokens of all.
    """
    longest = max(line.requests, key=lambda request: len(request.prompt or ()))
    policy = longest.policy if isinstance(longest.policy, str) else None
    prompt, new = len(longest.prompt or ()), longest.sampling.max_new_tokens
    work = TokenCounts(sum(len(request.prompt or ()) for request in line.requests), new * len(line.requests))
    pins, guard, form = spans(longest.pins), longest.guard, structure_of(longest.structured_outputs)
    is_batch_line = line.asked is not None
    own = work, is_batch_line, pins, guard, form, longest.adapter, longest.keep_prompt
    return Shape(prompt, new, policy, longest.budget, len(line.requests), *own)


def _key(custom_id: str) -> bytes:
    """Return a hash of 16 bytes by which a ``custom_id`` of any length is known, so that a job holds no long ones."""
    # half of a character is a name, too
    return hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()[:16]


def _entry(number: int, raw: bytes, reason: str, param: str | None, *, failed: bool) -> dict[str, Any]:
    """Build the entry of an input line for the file of lines without an answer: an error in OpenAI's format if the line
    is in that, else its number (``line``), the ``reason`` and its ``text``.

    Args:
        number: the line's number.
        raw: the line.
        reason: why there is no answer.
        param: the parameter that is wrong; ``None`` if none is known.
        failed: whether the line was run and failed; otherwise it could not be run.
    """
    with suppress(ValueError, RecursionError, KVKeepError):  # a line that cannot be read has the other kind of entry
        if batch_input.is_batch_line(fields := decoded(raw)):
            name = batch_input.custom_id_of(fields)
            return batch_input.error_line(number, digest(raw), name, reason, failed=failed, param=param)
    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
    return {"line": number, "reason": reason, "text": text}


def write_bad(path: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Write the file of lines without an answer whole, in place of that of an earlier job, if there is one.

    Args:
        path: the file.
        found: its entries, one at least: an empty file would be taken for another program's later.

    Raises:
        InputError: the file there was not written by a job, another job writes to the file, or the file cannot be
            written.
    """
    try:
        with _free(path):
            result_files.remove_leftovers(path.parent, {path.name})  # of a write that was cut short
            result_files.write_whole(path, b"".join(map(as_line, found)))
    except OSError as error:
        raise InputError(f"{path}, for lines that cannot be run, cannot be written: {error.strerror}.") from error


def remove_bad(path: Path, survey: Survey) -> None:
    """Remove an earlier job's file of lines without an answer, if each line in it can be run now; else leave it.

    A file that no job has written, a link, and an empty file are left as well.

    Args:
        path: the file, which may be missing.
        survey: knows which lines can be run.

    Raises:
        InputError: another job writes to the file, or the file cannot be read or removed.
    """
    try:
        if path.is_file() and not path.is_symlink():  # a job writes a file in place of a link, so a link is not its
            with path.open("rb") as file:
                result_files.Lock(file, str(path))
                entries = [_entry_of(raw) for raw in file]
                if entries and all(entry is not None and survey.is_settled(entry) for entry in entries):
                    path.unlink()
    except OSError as error:
        raise InputError(f"{path}, which an earlier job has written, cannot be removed: {error.strerror}.") from error


@contextmanager
def _free(path: Path) -> Iterator[None]:
    """Check that a file of lines without an answer may be replaced, and lock it while the context lasts; do nothing if
    there is none.

    Raises:
        InputError: the file is empty or was not written by a job, or another job writes to it.
    """
    if not os.path.lexists(path):
        yield
        return
    if not path.is_file():  # a folder or a pipe, which no job has written
        raise foreign(path)
    with path.open("rb") as file:
        result_files.Lock(file, str(path))
        if not _are_entries(file):
            raise foreign(path)
        yield


def foreign(path: Path) -> InputError:
    """Return the error that says that the file for lines without an answer exists, and was not written by a job."""
    return InputError(
        f"{path}, where lines that cannot be run are set aside, exists and holds something else. Rename it, or give "
        "another output file."
    )


def _are_entries(file: IO[bytes]) -> bool:
    """Return whether each line of a file is an entry of the file of lines without an answer, in either format;
    ``False`` for an empty file. The file is read to its end.
    """
    found = [_entry_of(raw) is not None for raw in file]
    return bool(found) and all(found)


def _entry_of(raw: bytes) -> dict[str, Any] | None:
    """Parse a line of a file as an entry for a line without an answer, in either format; return ``None`` if it is
    none.
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    is_entry = isinstance(found, dict) and (found.keys() == _BAD_FIELDS or batch_input.is_error_line(found))
    return found if is_entry else None
