"""The output of a batch job: whole lines, so that a job that was stopped can be resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvkeep import result_files
from kvkeep.batch import input as batch_input
from kvkeep.batch.input import COMPLETION, InputLine
from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.request import Result
from kvkeep.errors import InputError
from kvkeep.openai.responses import answer

# The lines of an output: how a completion is written, and recognised by a later run.
#
# An output line begins with the completion, and the completion with the number and the fingerprint of its input line; a
# line in OpenAI's format has both in its ``id``. So the first bytes show that a job wrote the line, even if the machine
# stopped before the rest was written.

_BEGINNING = f'{{"{COMPLETION}": {{"line": %d, "digest": "%s", '
_WRITTEN_HERE = re.compile(
    rb'\{"completion": \{"line": \d+, "digest": "[0-9a-f]{32}", |\{"id": "batch_req_\d+_[0-9a-f]{32}", '
)


def record(
    line: InputLine, results: Sequence[Result], made_by: Mapping[str, Any], texts: TokenTexts | None
) -> dict[str, Any]:
    """Build the output line for an input line, as its fields: in OpenAI's format if the input line is, else the
    completion and the line's own fields.

    Args:
        line: the line of the input.
        results: the results of its requests, in their order.
        made_by: the settings of the job, which a later run compares with its own.
        texts: decodes tokens, for log-probabilities in OpenAI's format; ``None``: these are left out.
    """
    if line.asked is not None:
        name, model = f"{line.number}-{line.digest}", str(made_by.get("model", "kvkeep"))
        if line.request.adapter is not None:
            model = f"{model}:{line.request.adapter}"
        body = answer(line.asked, results, name=name, created=int(time.time()), model=model, texts=texts)
        found = batch_input.line(line.number, line.digest, line.custom_id, body)
        ignored = {"ignored": list(line.asked.ignored)} if line.asked.ignored else {}
        # `batch_input.line` begins with the id: see above
        kept = result_files.finite([_kept(result) for result in results])
        return {**found, **ignored, "kvkeep": kept, "made_by": made_by}
    own = {"options": line.options} if line.options else {}
    # in this order, which `_BEGINNING` recognises
    origin = {"line": line.number, "digest": line.digest, "made_by": made_by, **own}
    return {COMPLETION: result_files.finite({**origin, **_completion(results[0])}), **line.fields}


def as_line(fields: Mapping[str, Any]) -> bytes:
    """Encode fields as a line of strict JSON in UTF-8, with its line break. If a text has half of a character, which
    UTF-8 cannot hold, all characters beyond ASCII are escaped.

    Raises:
        ValueError: a number is no number of JSON, such as an infinity.
    """
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(fields, allow_nan=False).encode() + b"\n"


def origin_of(raw: bytes, name: str) -> tuple[int, str, dict[str, Any]]:
    """Parse an output line of an earlier run, and return its input line's number and fingerprint, and the settings of
    the job that wrote it, with ``"format": 1`` if they have no format.

    Args:
        raw: the output line.
        name: the output's name, for errors.

    Raises:
        InputError: no job has written the line.
    """
    try:
        fields = json.loads(raw)
        if (found := batch_input.origin(fields)) is not None:  # a line in OpenAI's format
            return (*found, {"format": 1, **fields["made_by"]})
        completion = fields[COMPLETION]
        made_by = {"format": 1, **completion["made_by"]}  # the first version did not name itself
        return int(completion["line"]), str(completion["digest"]), made_by
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{name} holds a line that is no completion, so this job cannot go on there. Give another output file."
        ) from error


def is_ours(torn: bytes, digests: Mapping[int, str], batch_lines: Collection[int]) -> bool:
    """Return whether an output line that was cut short may be a job's: whether it has the whole beginning that all jobs
    write, or is itself the beginning of a line that answers one of this input's lines.

    Args:
        torn: the line, not empty.
        digests: line number → fingerprint, of the input's lines.
        batch_lines: the numbers of lines in OpenAI's format.
    """
    kinds = ((batch_input.BEGINNING if number in batch_lines else _BEGINNING, number) for number in digests)
    # a line that was cut within its beginning has to begin like one of this input's lines
    beginnings = ((kind % (number, digests[number])).encode() for kind, number in kinds)
    return bool(_WRITTEN_HERE.match(torn)) or any(beginning.startswith(torn) for beginning in beginnings)


def _completion(result: Result) -> dict[str, Any]:
    """Return what the ``completion`` of an output line in kvkeep's format tells of a result: its text, why it ended,
    counts of tokens, times, the memory's losses, and log-probabilities if it has some.
    """
    found = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "queued_s": result.queued_s,
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
        **_kept(result),
    }
    if result.logprobs:
        found["logprobs"] = [dataclasses.asdict(entry) for entry in result.logprobs]
    return found


def _kept(result: Result) -> dict[str, Any]:
    """Return a request's budget and the shares of attention that it lost (``lost_mass``) as plain data, and ``guarded``
    unless that is ``None``: whether the prompt's cut lost at most the guard.
    """
    found = {"budget": result.budget, "lost_mass": dataclasses.asdict(result.lost_mass)}
    return found if result.guarded is None else {**found, "guarded": result.guarded}


FORMAT = 3
"""Version of the lines. Older versions chunked prompts and drew tokens differently, so their jobs are not resumed."""

LAYOUT = "weight_layout"
"""The setting that says how weights were laid out for speed. A job goes on under another one, too."""

SHOWN = 200
"""Characters of a setting that an error shows."""

SYNC_S = 2.0
"""Seconds after which the next line is followed by a sync to the disk."""


class OutputFile:
    """A file of completions. It is written line by line, and nothing that other programs wrote is overwritten.

    Args:
        file: open for writing.
        name: name of the file in messages.
        path: its path; ``None`` for a stream, in which no job can be resumed.

    Attributes:
        name: name of the file in messages.
        done: line number → fingerprint, of all lines with a completion.
        made_by: the settings of these completions; empty if there are none.
        texts: decodes tokens, for log-probabilities in OpenAI's format.
    """

    def __init__(self, file: IO[bytes], name: str, path: Path | None = None):
        """Take an open file without reading it: no completions are known. `open` reads those of an earlier run."""
        self._file, self.name, self._path = file, name, path
        self.done: dict[int, str] = {}
        self.made_by: dict[str, Any] = {}
        self.texts: TokenTexts | None = None
        self._own: dict[str, Any] = {}  # this job's settings, which `agree` sets
        # a last line that was cut short, and where it begins
        self._torn: bytes = b""
        self._torn_at = 0
        self._synced = time.monotonic()

    @classmethod
    def open(cls, path: Path) -> OutputFile:
        """Open a job's output file, which is made if it is missing, lock it until it is closed, and read which lines an
        earlier run has completed. Nothing in it changes yet. A pipe or a device is neither locked nor read.

        Raises:
            InputError: the file cannot be read or written, another job is writing to it, or it holds something else.
        """
        try:
            to_file = path.is_file() or not path.exists()
            file = path.open("ab+" if to_file else "wb")  # a pipe or a device cannot be read back
        except OSError as error:
            raise InputError(f"The output {path} cannot be written: {error.strerror}. {_remedy(path)}") from error
        output = cls(file, str(path), path if to_file else None)
        try:
            if to_file:
                result_files.Lock(file, str(path))  # held until the file is closed
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
        """Read a file from where it stands to its end, and note in ``done`` and ``made_by`` which lines have
        completions, and with which settings. A last line without a line break is remembered as cut short, and not
        parsed.

        Raises:
            InputError: a line is no completion, or lines are of different jobs.
        """
        end = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                self._torn, self._torn_at = raw, end
                return
            end += len(raw)
            number, digest, made_by = origin_of(raw, self.name)
            if self.made_by and (differences := _differences(self.made_by, made_by)):
                raise InputError(
                    f"{self.name} holds completions of different jobs, with {differences[0]} and with "
                    f"{differences[1]}. Give another output file."
                )
            self.done[number] = digest
            self.made_by = made_by

    def agree(self, made_by: Mapping[str, Any]) -> None:
        """Set this job's settings, which are written with each completion, after they are compared with those of the
        completions in the file, if it has some.

        The weights' fingerprint and layout may be missing at first; then this is called again with them. A fingerprint
        that one side lacks, and the layout, are not compared.

        Raises:
            InputError: the file was written with other settings.
        """
        self._own = {"format": FORMAT, **made_by}
        if self.made_by and (differences := _differences(self.made_by, self._own)):
            raise InputError(
                f"{self.name} was written with {differences[0]}, and this job has {differences[1]}. Give another "
                "output file, or the same settings and weights."
            )

    @property
    def weight_layout(self) -> tuple[bool, bool] | None:
        """Return how the weights were laid out in the run that wrote the file's completions, as
        `kvkeep.models.prepare.chosen` returns it; ``None`` if the file has no completions or does not name it.
        """
        said = self.made_by.get(LAYOUT)  # of any type: the file may have been edited
        if isinstance(said, list | tuple) and [type(flag) for flag in said] == [bool, bool]:
            return said[0], said[1]
        return None

    @property
    def own(self) -> Mapping[str, Any]:
        """Return this job's settings, as `agree` got them last, with the format; they are written with each
        completion.
        """
        return self._own

    def check(self, digests: Mapping[int, str], batch_lines: Collection[int] = ()) -> None:
        """Check that the completions of an earlier run in the file, and an end that was cut short, belong to an input,
        so that the job can go on after them. Nothing is changed.

        Args:
            digests: line number → fingerprint, of the input's lines that can be run.
            batch_lines: the numbers of lines in OpenAI's format.

        Raises:
            InputError: a line with a completion has changed or is gone, or the file ends with bytes that no run of
                this job can have left.
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
        written = self._torn.rstrip(b"\0")  # a power cut leaves zeros at the end
        # zeros alone are a job's if the file has completions before them
        if self._torn and not (is_ours(written, digests, batch_lines) if written else self.done):
            raise InputError(
                f"{self.name} ends without a line break, and what stands there is no completion that was cut short. "
                "Give another output file, or remove that line."
            )

    def write(self, line: InputLine, *results: Result) -> None:
        """Write the output line of an input line, and count it as done.

        Args:
            line: the input line.
            *results: the results of all its requests, in their order.

        Raises:
            InputError: the disk is full or fails; earlier lines stay.
        """
        self.put(line.number, line.digest, as_line(record(line, results, self._own, self.texts)))

    def put(self, number: int, digest: str, whole: bytes) -> None:
        """Write a finished output line, such as one that a worker has made, and count its input line as done. A last
        line that an earlier run left cut short is removed first.

        Args:
            number: the number of the input line.
            digest: its fingerprint.
            whole: the output line, with its line break.

        Raises:
            InputError: the disk is full or fails; earlier lines stay.
        """
        with self._explained():
            self._cut()
            self._file.write(whole)
            self._file.flush()
            # a stream has nothing to sync, and a sync after each line would be slow
            if self._path and time.monotonic() - self._synced > SYNC_S:
                self._sync()
        self.done[number] = digest

    def finish(self) -> set[int]:
        """Sync the file, read it again, and return the numbers of the input lines whose completions are in it, those of
        earlier runs included.

        A line that cannot be read back does not count, nor do those behind it. A stream cannot be read again: all lines
        that were written to it count.

        Raises:
            InputError: the file cannot be written, or another program has changed its end.
        """
        with self._explained():
            self._cut()
            self._file.flush()
            if self._path is None:
                return set(self.done)
            self._sync()
        found = OutputFile(self._file, self.name)  # only to parse: this one's `done` must stay
        # lines that cannot be read back are not there
        with contextlib.suppress(OSError, InputError), self._path.open("rb") as file:
            found._take_up(file)  # a read that breaks off leaves the lines before it in `done`
        return {number for number, digest in found.done.items() if self.done.get(number) == digest}

    def _cut(self) -> None:
        """Remove from the file a last line that was cut short when it was opened, if there was one and nothing has
        changed it since. Its input line counts as not done.

        Raises:
            InputError: the end of the file has changed since it was opened; nothing is removed.
        """
        if self._torn:
            self._file.seek(self._torn_at)
            if self._file.read(len(self._torn) + 1) != self._torn:  # one byte more, to see that nothing follows
                raise InputError(
                    f"Something else wrote to {self.name} after this job had begun, where a completion was cut short. "
                    "Nothing was removed: give another output file, or remove what is no completion."
                )
            self._file.truncate(self._torn_at)
            self._torn = b""

    def _sync(self) -> None:
        """Wait until all that was written so far is on the disk, and note the time, from which `put` counts."""
        result_files.sync(self._file)
        self._synced = time.monotonic()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an `OSError` that the body raises, such as a full disk, into an `InputError`; but raise a broken pipe as
        it is.
        """
        try:
            yield
        except BrokenPipeError:  # whoever read the output wants no more; the command ends without a word
            raise
        except OSError as error:
            raise InputError(
                f"{self.name} cannot be written: {error.strerror}. {len(self.done)} lines are complete; when that is "
                "mended, the same command goes on after them."
            ) from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a failed write was reported before
            self._file.close()


def _remedy(path: Path) -> str:
    """Return a sentence that advises the user whose output file cannot be opened: the path is a folder, its folder is
    missing, or something else.
    """
    if os.path.isdir(path):  # `Path.is_dir` raises for a name that is too long
        return "Give the name of a file in that folder."
    folder = path.parent
    if os.path.isdir(folder):
        return "Give another file."
    return f"There is no folder {folder}; make it, or give another file."


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return two texts, such as ``"budget=64"`` and ``"budget=128"``, with the settings in which two jobs differ;
    ``None`` if they agree.

    The weights' fingerprint is compared only if both jobs know theirs, and the layout of weights never is.
    """
    # a job goes on with the layout that its output names, whatever this machine would choose
    known = {*one, *other} - {LAYOUT}
    if not ("weights" in one and "weights" in other):
        known -= {"weights"}
    names = sorted(name for name in known if one.get(name) != other.get(name))

    def words(settings: Mapping[str, Any]) -> str:
        return ", ".join(
            f"{name:.80}={_shown(settings[name])}" if name in settings else f"the default {name:.80}" for name in names
        )

    return (words(one), words(other)) if names else None


def _shown(value: object) -> str:
    """Return a setting as JSON text for an error message, cut to 200 characters, with "…" behind what was cut."""
    found = json.dumps(value)
    return found if len(found) <= SHOWN else f"{found[:SHOWN]}…"
