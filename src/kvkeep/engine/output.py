"""Where a batch job writes its completions: whole lines, so that a job that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from kvkeep.engine.jobs import COMPLETION, Line
from kvkeep.engine.request import Result
from kvkeep.errors import InputError


class Output:
    """Where a job writes its completions: each line complete before the next begins.

    Args:
        file: open for writing.
        name: what messages call it.
        made_by: the settings that all completions of a file have in common, e.g. the model; written with each.
        done: lines that an earlier run has done, with their fingerprints.
    """

    def __init__(self, file: IO[bytes], name: str, made_by: Mapping[str, Any], done: dict[int, str] | None = None):
        self._file, self.name, self._made_by = file, name, dict(made_by)
        self.done = {} if done is None else done

    @classmethod
    def open(cls, path: Path, made_by: Mapping[str, Any]) -> Output:
        """Open a file; what it holds is done. A pipe or a device has nothing to go on from.

        Raises:
            InputError: the file cannot be read or written, or holds something else.
        """
        to_file = path.is_file() or not path.exists()
        try:
            file = path.open("ab+" if to_file else "wb")
        except OSError as error:
            raise InputError(f"The output {path} cannot be written: {error.strerror}.") from error
        try:
            done = _take_up(file, path, made_by) if to_file else {}
        except InputError:
            file.close()
            raise
        return cls(file, str(path), made_by, done)

    def has(self, line: Line) -> bool:
        """Whether a line has been done.

        Raises:
            InputError: the line was another one when it was done.
        """
        if line.number not in self.done:
            return False
        if self.done[line.number] != line.digest:
            raise InputError(
                f"Line {line.number} of the input is not the one that {self.name} was written for. Give another "
                "output file."
            )
        return True

    def write(self, line: Line, result: Result) -> None:
        """Write one completion.

        Raises:
            InputError: the disk is full or fails; what was complete before stays.
        """
        own = {"options": line.options} if line.options else {}
        origin = {"line": line.number, "digest": line.digest, "made_by": self._made_by, **own}
        completion = {**origin, **_completion(result)}
        try:
            self._file.write(as_line({**line.fields, COMPLETION: completion}))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InputError(
                f"{self.name} cannot be written: {error.strerror}. {len(self.done)} lines are complete; when that is "
                "mended, the same command goes on after them."
            ) from error
        self.done[line.number] = line.digest

    def check(self, lines: Iterable[Line]) -> int:
        """See that what is done belongs to these lines, and count them.

        Raises:
            InputError: a line was another one when it was done, or is not there any more.
        """
        count, missing = 0, set(self.done)
        for line in lines:
            self.has(line)
            missing.discard(line.number)
            count += 1
        if missing:
            raise InputError(
                f"{self.name} holds a completion of line {min(missing)}, which the input has not, or which cannot be "
                "run any more. Give another output file, or the input that it was written for."
            )
        return count

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # what cannot be written has been reported
            self._file.close()


def _take_up(file: IO[bytes], path: Path, made_by: Mapping[str, Any]) -> dict[int, str]:
    """What an earlier run has done; a line in whose middle it was killed is cut off, and generated again.

    What no run of a job can have left there is not touched: a line that was torn is the beginning of an object.
    """
    done: dict[int, str] = {}
    file.seek(0)
    end = 0
    for raw in file:
        if raw.endswith(b"\n") or not raw.startswith(b"{") or _is_json(raw):
            number, digest = _was_done(raw, path, made_by)
            if raw.endswith(b"\n"):
                end += len(raw)
                done[number] = digest
    file.truncate(end)
    return done


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def as_line(fields: Mapping[str, Any]) -> bytes:
    """A line of JSON; half of a character, which UTF-8 cannot hold, stays the escape that it was."""
    try:
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(fields).encode() + b"\n"


def _was_done(raw: bytes, path: Path, made_by: Mapping[str, Any]) -> tuple[int, str]:
    """The number and the fingerprint of a line that an earlier run has done."""
    try:
        completion = json.loads(raw)[COMPLETION]
        found = int(completion["line"]), str(completion["digest"])
        other = dict(completion["made_by"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} holds a line that is no completion, so this job cannot go on there. Give another output file."
        ) from error
    if other != made_by:
        raise InputError(
            f"{path} was written with {_differences(other, made_by)}, and this job has "
            f"{_differences(made_by, other)}. Give another output file, or the same settings."
        )
    return found


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The settings in which one differs from the other, as ``name=value``; what is missing has its default."""
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    return ", ".join(f"{name}={json.dumps(one[name])}" if name in one else f"the default {name}" for name in names)


def _completion(result: Result) -> dict[str, Any]:
    found = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
    }
    if result.logprobs:
        found["logprobs"] = [dataclasses.asdict(entry) for entry in result.logprobs]
    return found
