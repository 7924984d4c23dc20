"""The commands of a conversation: lines that begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvkeep.cli import console
from kvkeep.cli.chat.talk import MOST_BACK, Talk
from kvkeep.cli.memory import full_bytes
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.errors import InputError


class Quit(Exception):  # noqa: N818  no error
    """The user ends the conversation."""


def is_command(line: str) -> bool:
    """Whether a line is a command. A message that begins with a slash has a space before it."""
    return line.startswith("/")


def run(line: str, talk: Talk) -> None:
    """Run a command.

    Raises:
        InputError: there is no such command, or its words cannot be used.
        Quit: the user ends the conversation.
    """
    name, *words = line.split()
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"Did you mean {close[0]}?" if close else f"There are {', '.join(COMMANDS)}."
        raise InputError(
            f"There is no command {console.visible(name)}. {meant} For a message that begins with a slash, type a "
            "space before it."
        )
    COMMANDS[name](talk, *_checked(name, words))


def _checked(name: str, words: list[str]) -> list[str]:
    most = 1 if name in ("/fork", "/rewind") else 0
    if len(words) > most:
        raise InputError(f"{name} takes {'one word at most' if most else 'nothing'}. /help lists all commands.")
    return words


def _help(talk: Talk) -> None:
    console.out().print(
        console.facts(
            {
                "/help": "this list",
                "/memory": "what the conversation holds, and its size",
                "/rewind [N]": f"take back the last turn, or the last N; {MOST_BACK} at most, 1 of an earlier run",
                "/fork [NAME]": "go on under another name; the conversation so far stays as it is",
                "/quit": "end; Ctrl-D does the same",
                "Ctrl-C": "stop an answer",
            }
        )
    )


def _memory(talk: Talk) -> None:
    state = talk.state
    if state is None:
        console.out().print(console.facts({"conversation": talk.place.name, "tokens": "none yet"}))
        return
    layers = state.contents.layers
    held = sum(int((layer.positions >= 0).sum()) for layer in layers) / sum(len(layer.positions) for layer in layers)
    full = console.show_bytes(full_bytes(state))
    rows = {
        "conversation": f"{talk.place.name}, {console.count(talk.turns, 'turn')}",
        "policy": f"{talk.session.policy}, budget {talk.session.budget}",
        "tokens": f"{state.seen} seen, {held:.4g} held per layer and head on average",
        "size": f"{console.show_bytes(state.nbytes)}; a full cache would take {full}",
    }
    if talk.place.is_saved:
        rows["file"] = str(talk.place.file)
    console.out().print(console.facts(rows))


def _rewind(talk: Talk, turns: str = "1") -> None:
    if not (turns.isascii() and turns.isdigit()) or len(turns) > len("1000") or int(turns) < 1:
        raise InputError(f"/rewind takes the number of turns to take back, 1 to {MOST_BACK}.")
    with Uninterrupted():
        talk.rewind(int(turns))
    console.note(f"took back {console.count(int(turns), 'turn')}; {console.count(talk.turns, 'turn')} left")


def _fork(talk: Talk, name: str | None = None) -> None:
    with Uninterrupted():
        old = talk.fork(name)
    console.note(f"goes on as {talk.place.name}; {old} stays as it is")


def _quit(talk: Talk) -> None:
    raise Quit


COMMANDS: dict[str, Callable[..., None]] = {
    "/help": _help,
    "/memory": _memory,
    "/rewind": _rewind,
    "/fork": _fork,
    "/quit": _quit,
}
