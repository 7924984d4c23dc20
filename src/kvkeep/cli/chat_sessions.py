"""Saved conversations: a folder for each, with its memory in one file, used by one process at a time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.cli import console
from kvkeep.cli.files import data_folder, place
from kvkeep.cli.memory import turns_of
from kvkeep.engine import Engine, Result
from kvkeep.engine import Request as Asked
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.engine.sampling_params import SamplingParams, whole_within
from kvkeep.engine.session import Session
from kvkeep.errors import InputError, KVKeepError
from kvkeep.result_files import Lock, in_full, remove_leftovers
from kvkeep.snapshot import Snapshot
from kvkeep.snapshot.file_format import described_layers, fingerprint_of, opened, read_header

VARIABLE = "KVKEEP_SESSIONS"
"""The environment variable that names the folder of saved conversations."""

_MEMORY, _BEFORE = "memory.kvkeep", "before.kvkeep"
_LINK = f".{_BEFORE}.linkfile.new"
_MOST_OF_A_SECOND = 1000


@dataclass(frozen=True)
class ChatFolder:
    """The folder of saved conversations.

    Attributes:
        path: the folder; it need not exist yet.
    """

    path: Path

    @classmethod
    def of(cls, asked: str | None) -> ChatFolder:
        """The folder that was asked for, or the variable's, or the one in the user's data folder.

        Raises:
            InputError: an empty name was given.
        """
        if asked is not None:
            return cls(place(asked, "--sessions"))
        named = os.environ.get(VARIABLE)
        return cls(in_full(named) if named else data_folder() / "kvkeep" / "sessions")

    def names(self) -> Iterator[str]:
        """The names of all saved conversations, in order."""
        with suppress(OSError):
            yield from sorted(one.name for one in self.path.iterdir() if (one / _MEMORY).is_file())

    def file_of(self, name: str) -> Path:
        """The file of a conversation."""
        return self.path / name / _MEMORY

    def claim(self, name: str | None, *, new: bool = False) -> ChatPlace:
        """The place of a conversation, which no other process uses until it is left.

        Args:
            name: of the conversation; ``None``: a new one, named by date and time.
            new: whether there may be no conversation of that name yet.

        Raises:
            InputError: the name or the folder cannot be used, or another process uses the conversation.
        """
        if name is not None:
            return self._claim(_checked(name), new=new)
        today = time.strftime("%Y-%m-%d-%H%M%S")
        for number in range(1, _MOST_OF_A_SECOND):
            with suppress(_TakenError):
                return self._claim(today if number == 1 else f"{today}-{number}", new=True)
        raise InputError(f"There are too many conversations of {today}. Give a name: --session NAME.")

    def _claim(self, name: str, *, new: bool) -> ChatPlace:
        folder = self.path / name
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            lock = Lock(folder, name)
        except OSError as error:
            raise InputError(
                f"Conversations cannot be saved in {self.path}: {error.strerror}. Give another folder with --sessions "
                f"or {VARIABLE}."
            ) from error
        except InputError as error:
            raise _TakenError(
                f"The conversation {name} is open in another process, and two would overwrite each other. End that "
                "one first, or give another name with --session."
            ) from error
        if new and (folder / _MEMORY).exists():
            lock.release()
            raise _TakenError(f"There is a conversation {name} already. Give another name.")
        if not folder.is_dir():  # whoever had it has removed it, since it was empty
            lock.release()
            return self._claim(name, new=new)
        remove_leftovers(folder, {_MEMORY, _BEFORE})
        return ChatPlace(name, folder / _MEMORY, lock)


@dataclass(frozen=True)
class ChatPlace:
    """Where one conversation is saved. The process that has it keeps others out.

    Attributes:
        name: of the conversation.
        file: its memory; there is none before the first answer.
        lock: released by `leave`.
    """

    name: str
    file: Path
    lock: Lock

    @property
    def is_saved(self) -> bool:
        """Whether there is a memory."""
        return self.file.exists()

    def save(self, snapshot: Snapshot, before: Snapshot | None = None, *, replaced: Snapshot | None = None) -> None:
        """Write the memory. After a crash the file is the old one or the new one.

        Args:
            snapshot: the memory.
            before: the memory before the last turn, which is kept beside it if there is room.
            replaced: the memory that the file holds now.

        Raises:
            SnapshotError: it cannot be written; the old memory stays.
        """
        try:
            self._keep(before, linked=before is replaced)
        except KVKeepError:
            self._before.unlink(missing_ok=True)  # the conversation matters more
        snapshot.save(self.file)

    def before(self, snapshot: Snapshot) -> Snapshot | None:
        """Return the memory before the last turn of a memory; ``None`` if it was not kept."""
        from kvkeep.snapshot import Snapshot

        try:
            found = Snapshot.load(self._before)
        except KVKeepError:
            return None
        return found if _precedes(found, snapshot) else None

    @property
    def _before(self) -> Path:
        return self.file.with_name(_BEFORE)

    def _keep(self, before: Snapshot | None, *, linked: bool) -> None:
        """Keep the memory before the last turn: a second name for the file that holds it, or a file of its own.

        Raises:
            SnapshotError: it cannot be written.
        """
        if before is None:
            self._before.unlink(missing_ok=True)
            return
        if linked:
            link = self.file.with_name(_LINK)
            with suppress(OSError):  # the file system has no links
                link.unlink(missing_ok=True)
                os.link(self.file, link)
                link.replace(self._before)
                return
        before.save(self._before)

    def clear(self) -> None:
        """Remove the memory of a conversation that is empty again."""
        for file in (self.file, self._before):
            file.unlink(missing_ok=True)

    def leave(self) -> None:
        """Let others use the conversation. Its folder goes if nothing was saved."""
        with suppress(OSError):
            self.file.parent.rmdir()
        self.lock.release()


def _precedes(one: Snapshot, other: Snapshot) -> bool:
    """Whether a memory is an earlier one of the same conversation."""
    told, later = one.note.get("messages"), other.note.get("messages")
    if one.tokens is None or other.tokens is None or not isinstance(told, list) or not isinstance(later, list):
        return False
    begins = len(told) < len(later) and later[: len(told)] == told
    same = one.fingerprint == other.fingerprint and one.seen <= other.seen
    return begins and same and one.tokens.tolist() == other.tokens[: one.seen].tolist()


class _TakenError(InputError):
    """A conversation is in use, or exists."""


def complete_names(incomplete: str) -> list[tuple[str, str]]:
    """Names of saved conversations, for shells."""
    return [(name, "") for name in ChatFolder.of(None).names() if name.startswith(incomplete)]


def _checked(name: str) -> str:
    from kvkeep.engine.session_store import check_name  # imports torch

    try:
        return check_name(name)
    except InputError as error:
        raise InputError(str(error).replace("name=", "The name ", 1)) from error


# A conversation in progress: its session, the place where it is saved, and the turns that can be taken back.

MOST_BACK = 8
"""Turns that can be taken back."""
_MOST_BYTES = 2**30
"""Bytes that their memories may take; one can always be taken back."""


class ChatSession:
    """A conversation that is saved after each answer.

    Args:
        engine: runs it.
        folder: the folder of saved conversations, for forks.
        place: where it is saved.
        sampling: how the tokens of answers are chosen.
        system: a system message for the first turn.
        memory: the memory with which it begins or goes on.

    Attributes:
        engine: runs it.
        folder: the folder of saved conversations.
        place: where it is saved.
        session: the conversation in the engine.

    Raises:
        KVKeepError: the memory does not belong to the engine's model and settings.
    """

    def __init__(
        self,
        engine: Engine,
        folder: ChatFolder,
        place: ChatPlace,
        *,
        sampling: SamplingParams,
        system: str | None = None,
        memory: Snapshot | None = None,
    ) -> None:
        self.engine, self.folder, self.place = engine, folder, place
        self._sampling, self._system = sampling, system
        noted = 0 if memory is None else memory.note.get("sequence", 0)
        sequence = whole_within("The sequence in the file's note", noted, -(2**63), 2**63 - 1)
        self.session: Session = engine.session(policy=engine.policy, snapshot=memory, sequence=sequence)
        self._states: deque[Snapshot | None] = deque([memory], maxlen=MOST_BACK + 1)
        self._is_saved = place.is_saved or memory is None
        self._on_disk = memory if place.is_saved else None

    @property
    def turns(self) -> int:
        """Answers in the conversation."""
        return sum(one["role"] == "assistant" for one in self.session.messages)

    @property
    def state(self) -> Snapshot | None:
        """The memory after the last turn; ``None`` before the first."""
        return self._states[-1]

    @property
    def _before(self) -> Snapshot | None:
        """The memory before the last turn; ``None`` if it is not known, or was empty."""
        return self._states[-2] if len(self._states) > 1 else None

    def said(self) -> list[str]:
        """The user's earlier messages, for the line editor."""
        return [one["content"] for one in self.session.messages if one["role"] == "user"]

    def greeting(self) -> dict[str, str]:
        """What the conversation is, and how to find out more: name → text."""
        tokens = "" if self.state is None else console.count(self.state.seen, "token")
        if self.session.messages:
            what = f"{self.place.name}, {console.count(self.turns, 'turn')}, {tokens}"
        else:
            what = f"{self.place.name}, new" + (f", after {tokens} of memory" if tokens else "")
        return {
            "conversation": what,
            "policy": f"{self.session.policy}, budget {self.session.budget}",
            "help": "/help; Ctrl-C stops an answer, Ctrl-D ends",
        }

    def answer(self, message: str, *, stoppable: bool) -> None:
        """Send a message, print the answer while it is generated, and save the conversation.

        Args:
            message: the user's message.
            stoppable: whether Ctrl-C stops the answer alone.

        Raises:
            KVKeepError: the message cannot be answered, or the conversation cannot be saved.
        """
        try:
            result = self._stream(message)
        except KeyboardInterrupt:
            with Uninterrupted():  # the interrupt may have come at the end of the last step, after the turn's end
                done = self._take_over()
            if not stoppable:
                raise
            if not done:
                console.note("stopped; the conversation is as it was before this message")
            return
        if result.finish_reason == "error":
            raise KVKeepError(f"The answer ends here, and the conversation is as it was before. {result.error}")
        with Uninterrupted():
            self._take_over()
        if result.finish_reason == "length":
            console.note(f"stopped after {len(result.token_ids)} tokens, the most that --max-new-tokens allows")

    def _take_over(self) -> bool:
        """Note and save the session's memory if a turn has ended since the last time; return whether it has.

        Raises:
            SnapshotError: it cannot be saved.
        """
        state = self.session.snapshot() if self.session.token_ids else None
        if state is self.state:
            return False
        self._states.append(state)
        while len(self._states) > 2 and sum(one.nbytes for one in self._states if one) > _MOST_BYTES:
            self._states.popleft()
        self._is_saved = False
        self.save()
        return True

    def _stream(self, message: str) -> Result:
        result: Result | None = None
        begun = False
        with console.streamed_text() as write:
            for event in self.session.send(self._asked(message)):
                if piece := event.text if begun else event.text.lstrip():
                    write(piece)
                    begun = True
                result = event.result
        assert result is not None
        return result

    def _asked(self, message: str) -> Asked:
        """The message as a request; the first one has the system message before it."""
        if self._system is None or self.state is not None:
            return Asked(prompt=message, sampling=self._sampling)
        messages: list[Mapping[str, str]] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": message},
        ]
        return Asked(messages=messages, sampling=self._sampling)

    def rewind(self, turns: int) -> None:
        """Take back the last turns.

        Raises:
            InputError: so many cannot be taken back.
        """
        if turns == len(self._states):
            self._look_back()
        most = len(self._states) - 1
        if turns > most:
            have = console.count(most, "turn")
            raise InputError(
                f"{have} can be taken back: those of this run, {MOST_BACK} at most."
                if most
                else "No turn can be taken back: there was none since the program started, and the memory before the "
                "last one was not saved."
            )
        state = self._states[-1 - turns]
        if state is None:
            self.session.close()
            self.session = self.engine.session()
        else:
            self.session.rewind(state)
            state = self.session.snapshot()
        for _ in range(turns + 1):
            self._states.pop()
        self._states.append(state)
        self._is_saved = False
        self.save()

    def _look_back(self) -> None:
        """Find the memory before the last turn of an earlier run, if that turn can be taken back."""
        first = self._states[0]
        if first is None or len(self._states) > MOST_BACK:
            return
        if (before := self.place.before(first)) is not None:
            self._states.appendleft(before)

    def fork(self, name: str | None) -> str:
        """Go on under another name, and return the old one; the conversation of that name stays as it is.

        Raises:
            InputError: the name cannot be used, or there is a conversation of that name.
        """
        self.save()
        new, old = self.folder.claim(name, new=True), self.place
        try:
            session = self.session.fork()[0]
            if self.state is not None:
                new.save(self.state, self._before)
        except BaseException:
            new.leave()
            raise
        self.session.close()
        self.session, self.place, self._on_disk = session, new, self.state
        old.leave()
        return old.name

    def save(self) -> None:
        """Write the conversation to its file, unless it is there.

        Raises:
            SnapshotError: it cannot be written; the file stays as it was.
        """
        if self._is_saved:
            return
        if self.state is None:
            self.place.clear()
        else:
            self.place.save(self.state, self._before, replaced=self._on_disk)
        self._is_saved, self._on_disk = True, self.state

    def close(self) -> None:
        """Let others use the conversation."""
        self.session.close()
        self.place.leave()


# The list of saved conversations, from the headers of their files. Importing this module imports torch.


def show(folder: ChatFolder, *, as_json: bool) -> None:
    """Print all saved conversations."""
    found = [_describe(folder, name) for name in folder.names()]
    if as_json:
        console.write_json({"folder": str(folder.path), "conversations": found})
        return
    if not found:
        console.note(f"no conversations are saved in {folder.path}")
        return
    table = console.table("name", "model", "turns", "tokens", "size", "last used")
    for one in found:
        if "error" in one:
            table.add_row(console.visible(one["name"]), f"cannot be read: {one['error']}")
            continue
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["last_used"]))
        turns = "–" if one["turns"] is None else str(one["turns"])
        cells = (one["model"], turns, str(one["tokens"]), console.show_bytes(one["bytes"]), used)
        table.add_row(console.visible(one["name"]), *map(console.visible, cells))
    console.out().print(table)


def _describe(folder: ChatFolder, name: str) -> dict[str, Any]:
    path = folder.file_of(name)
    try:
        with opened(path) as (file, size):
            about = read_header(file, size).about
            made, tokens = fingerprint_of(about), described_layers(about)[0].numbers["seen"]
    except (OSError, ValueError) as error:
        return {"name": name, "error": (error.strerror if isinstance(error, OSError) else None) or str(error)}
    return {
        "name": name,
        "model": made.model,
        "policy": made.policy,
        "budget": made.budget,
        "turns": turns_of(note if isinstance(note := about.get("note"), dict) else {}),
        "tokens": tokens,
        "bytes": size,
        "last_used": path.stat().st_mtime,
    }
