"""A batch job's lines before they run: a survey with a few numbers of each, and the file of lines that cannot run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvkeep import runs
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import InputError, KVKeepError
from kvkeep.jobs.lines import BadLine, Line, reason_of
from kvkeep.jobs.output import as_line

_BAD_FIELDS = {"line", "reason", "text"}


class Shape(NamedTuple):
    """The properties of a request that decide whether an engine accepts it."""

    prompt_tokens: int
    max_new_tokens: int
    policy: str | None
    budget: int | None


@dataclass
class Survey:
    """The lines of a job with their lengths.

    Attributes:
        digests: line number → fingerprint, of every line that can be run.
        bad: line number → reason, of every line that cannot be run.
    """

    digests: dict[int, str] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    _shapes: dict[int, Shape] = field(default_factory=dict)
    _known: dict[Shape, Shape] = field(default_factory=dict)

    def add(self, line: Line | BadLine) -> None:
        """Enter a line."""
        if isinstance(line, BadLine):
            self.bad[line.number] = line.reason
            return
        asked = line.request
        policy = asked.policy if isinstance(asked.policy, str) else None
        shape = Shape(len(asked.prompt or ()), asked.sampling.max_new_tokens, policy, asked.budget)
        self.digests[line.number] = line.digest
        self._shapes[line.number] = self._known.setdefault(shape, shape)

    @property
    def longest(self) -> int:
        """Tokens of the longest line, prompt and new tokens together."""
        return max((shape.prompt_tokens + shape.max_new_tokens for shape in self._known), default=0)

    @property
    def longest_line(self) -> int:
        """The number of the first line of that length."""
        return next(
            n for n, shape in self._shapes.items() if shape.prompt_tokens + shape.max_new_tokens == self.longest
        )

    @property
    def policies(self) -> set[str]:
        """The policies that lines name."""
        return {shape.policy for shape in self._known if shape.policy is not None}

    def check(self, engine: Engine, numbers: Iterable[int]) -> dict[int, str]:
        """The lines that the engine refuses, with the reasons; no line is read again."""
        verdicts: dict[Shape, str | None] = {}
        for number in numbers:
            shape = self._shapes[number]
            if shape not in verdicts:
                verdicts[shape] = _problem(shape, engine)
        return {number: reason for number in numbers if (reason := verdicts[self._shapes[number]])}

    def set_aside(self, found: dict[int, str]) -> None:
        """Move lines to those that cannot be run."""
        self.bad |= found
        for number in found:
            del self.digests[number]


def _problem(shape: Shape, engine: Engine) -> str | None:
    """Why an engine refuses a request of this shape; ``None`` if it does not."""
    sampling = Sampling(max_new_tokens=shape.max_new_tokens)
    try:
        prompt = [0] * shape.prompt_tokens
        engine.check(Request(prompt=prompt, sampling=sampling, policy=shape.policy, budget=shape.budget))
    except KVKeepError as error:
        return reason_of(error)
    return None


def bad_entries(lines: Iterable[tuple[int, bytes]], bad: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """The entries of a file of bad lines: number, reason and text of each."""
    for number, raw in lines:
        if number in bad:
            text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            yield {"line": number, "reason": bad[number], "text": text}


def write_bad(path: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of bad lines; the file of an earlier job is replaced.

    Raises:
        InputError: the file there was not written by a job, another job writes to it, or it cannot be written.
    """
    try:
        with _free(path):
            runs.remove_leftovers(path.parent, {path.name})
            runs.write_whole(path, b"".join(map(as_line, found)))
    except OSError as error:
        raise InputError(f"{path}, for lines that cannot be run, cannot be written: {error.strerror}.") from error


@contextmanager
def _free(path: Path) -> Iterator[None]:
    """Lock a file that is about to be replaced, if there is one.

    Raises:
        InputError: the file was not written by a job, or another job writes to it.
    """
    if not os.path.lexists(path):
        yield
        return
    foreign = InputError(
        f"{path}, where lines that cannot be run are set aside, exists and holds something else. Rename it, or give "
        "another output file."
    )
    if not path.is_file():
        raise foreign
    with path.open("rb") as file:
        runs.Lock(file, str(path))
        if not _are_entries(file):
            raise foreign
        yield


def _are_entries(file: IO[bytes]) -> bool:
    """Whether a file has lines, and each is an entry of a bad line."""
    found = [_is_entry(raw) for raw in file]
    return bool(found) and all(found)


def _is_entry(raw: bytes) -> bool:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == _BAD_FIELDS
