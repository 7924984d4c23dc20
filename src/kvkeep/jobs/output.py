"""Where a batch job writes its completions: whole lines, so that a job that was stopped goes on where it was.

A line begins with the completion, and the completion with the number and the fingerprint of the line that it belongs
to. So the first bytes of a line show who wrote it, also where the machine stopped before the rest was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvkeep import runs
from kvkeep.engine.request import Result
from kvkeep.errors import InputError
from kvkeep.jobs.lines import COMPLETION, Line

FORMAT = 3
"""Version of the lines; others read prompts in other pieces and drew otherwise, so that no job goes on with them."""

SYNC_S = 2.0
"""What was written is brought to the disk with the first line after so many seconds."""

_BEGINNING = f'{{"{COMPLETION}": {{"line": %d, "digest": "%s", '
_WRITTEN_HERE = re.compile(rb'\{"completion": \{"line": \d+, "digest": "[0-9a-f]{32}", ')


class Output:
    """Where a job writes its completions: each line complete before the next begins, nothing foreign overwritten.

    Args:
        file: open for writing.
        name: what messages call it.
        path: where the file stands, if it is one that a job can go on in.

    Attributes:
        name: what messages call it.
        done: lines that are complete, with their fingerprints.
        made_by: the settings that they were written with; empty if there are none.
    """

    def __init__(self, file: IO[bytes], name: str, path: Path | None = None):
        self._file, self.name, self._path = file, name, path
        self.done: dict[int, str] = {}
        self.made_by: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._torn: bytes = b""
        self._torn_at = 0
        self._synced = time.monotonic()

    @classmethod
    def open(cls, path: Path) -> Output:
        """Open a file for this job alone; what it holds is done. A pipe or a device has nothing to go on from.

        Raises:
            InputError: the file cannot be read or written, another job is writing to it, or it holds something else.
        """
        try:
            to_file = path.is_file() or not path.exists()
            file = path.open("ab+" if to_file else "wb")
        except OSError as error:
            raise InputError(f"The output {path} cannot be written: {error.strerror}.") from error
        output = cls(file, str(path), path if to_file else None)
        try:
            if to_file:
                runs.Lock(file, str(path))
                file.seek(0)
                output._take_up(file)
        except OSError as error:
            file.close()
            raise InputError(f"The output {path} cannot be read: {error.strerror}.") from error
        except InputError:
            file.close()
            raise
        return output

    def _take_up(self, file: IO[bytes]) -> None:
        """Note what an earlier run has done, and a line in whose middle it was killed."""
        end = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                self._torn, self._torn_at = raw, end
                return
            end += len(raw)
            number, digest, made_by = _was_done(raw, self.name)
            if self.made_by and (differences := _differences(self.made_by, made_by)):
                raise InputError(
                    f"{self.name} holds completions of different jobs, with {differences[0]} and with "
                    f"{differences[1]}. Give another output file."
                )
            self.done[number] = digest
            self.made_by = made_by

    def agree(self, made_by: Mapping[str, Any]) -> None:
        """Take the settings that all completions of a file have in common; they are written with each.

        The weights may be left out until they are known, and the settings given once more with them.

        Raises:
            InputError: the file was written with others.
        """
        self._own = {"format": FORMAT, **made_by}
        if self.made_by and (differences := _differences(self.made_by, self._own)):
            raise InputError(
                f"{self.name} was written with {differences[0]}, and this job has {differences[1]}. Give another "
                "output file, or the same settings and weights."
            )

    def check(self, digests: Mapping[int, str]) -> None:
        """See that what the file holds belongs to an input; nothing is changed.

        Args:
            digests: the fingerprints of the input's lines that can be run, by their numbers.

        Raises:
            InputError: a line was another one when it was done, or is not there any more, or the file ends with
                something that no run of this job can have left.
        """
        for number, known in self.done.items():
            if number in digests and known != digests[number]:
                raise InputError(
                    f"Line {number} of the input is not the one that {self.name} was written for. Give another "
                    "output file."
                )
        if missing := self.done.keys() - digests.keys():
            raise InputError(
                f"{self.name} holds a completion of line {min(missing)}, which the input has not, or which cannot be "
                "run any more. Give another output file, or the input that it was written for."
            )
        written = self._torn.rstrip(b"\0")  # where the disk lost what followed there are zeros
        if self._torn and not (_is_ours(written, digests) if written else self.done):
            raise InputError(
                f"{self.name} ends without a line break, and what stands there is no completion that was cut short. "
                "Give another output file, or remove that line."
            )

    def write(self, line: Line, result: Result) -> None:
        """Write one completion.

        Raises:
            InputError: the disk is full or fails; what was complete before stays.
        """
        own = {"options": line.options} if line.options else {}
        origin = {"line": line.number, "digest": line.digest, "made_by": self._own, **own}
        completion = runs.finite({**origin, **_completion(result)})
        with self._explained():
            self._cut()
            self._file.write(as_line({COMPLETION: completion, **line.fields}))
            self._file.flush()
            if self._path and time.monotonic() - self._synced > SYNC_S:
                self._sync()
        self.done[line.number] = line.digest

    def finish(self) -> set[int]:
        """Bring everything to the disk, and return the numbers of the lines that are there, read by the file's name.

        Raises:
            InputError: the disk is full or fails.
        """
        with self._explained():
            self._cut()
            self._file.flush()
            if self._path is None:
                return set(self.done)
            self._sync()
        found = Output(self._file, self.name)
        with contextlib.suppress(OSError, InputError), self._path.open("rb") as file:
            found._take_up(file)
        return {number for number, digest in found.done.items() if self.done.get(number) == digest}

    def _cut(self) -> None:
        """Remove a line that was cut short; it is generated again.

        Raises:
            InputError: something else stands there now, or after it.
        """
        if self._torn:
            self._file.seek(self._torn_at)
            if self._file.read(len(self._torn) + 1) != self._torn:
                raise InputError(
                    f"Something else wrote to {self.name} after this job had begun, where a completion was cut short. "
                    "Nothing was removed: give another output file, or remove what is no completion."
                )
            self._file.truncate(self._torn_at)
            self._torn = b""

    def _sync(self) -> None:
        runs.sync(self._file)
        self._synced = time.monotonic()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a disk's failure into an error of kvkeep."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InputError(
                f"{self.name} cannot be written: {error.strerror}. {len(self.done)} lines are complete; when that is "
                "mended, the same command goes on after them."
            ) from error

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # what cannot be written has been reported
            self._file.close()


def as_line(fields: Mapping[str, Any]) -> bytes:
    """A line of strict JSON; half of a character, which UTF-8 cannot hold, stays the escape that it was."""
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(fields, allow_nan=False).encode() + b"\n"


def _was_done(raw: bytes, name: str) -> tuple[int, str, dict[str, Any]]:
    """The number, the fingerprint and the settings of a line that an earlier run has done."""
    try:
        completion = json.loads(raw)[COMPLETION]
        made_by = {"format": 1, **completion["made_by"]}  # the first version did not name itself
        return int(completion["line"]), str(completion["digest"]), made_by
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{name} holds a line that is no completion, so this job cannot go on there. Give another output file."
        ) from error


def _is_ours(torn: bytes, digests: Mapping[int, str]) -> bool:
    """Whether the beginning of a line is one that was written here."""
    beginnings = ((_BEGINNING % entry).encode() for entry in digests.items())
    return bool(_WRITTEN_HERE.match(torn)) or any(beginning.startswith(torn) for beginning in beginnings)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """In what one's settings differ from another's, in words of both; weights may not be known yet."""
    known = {*one, *other} if "weights" in one and "weights" in other else {*one, *other} - {"weights"}
    names = sorted(name for name in known if one.get(name) != other.get(name))

    def words(settings: Mapping[str, Any]) -> str:
        return ", ".join(
            f"{name}={json.dumps(settings[name])}" if name in settings else f"the default {name}" for name in names
        )

    return (words(one), words(other)) if names else None


def _completion(result: Result) -> dict[str, Any]:
    found = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "queued_s": result.queued_s,
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
    }
    if result.logprobs:
        found["logprobs"] = [dataclasses.asdict(entry) for entry in result.logprobs]
    return found
