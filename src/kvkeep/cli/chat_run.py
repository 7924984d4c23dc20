"""The work of ``kvkeep chat``: the model is loaded, the conversation is found, and messages are answered.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from kvkeep import budget as budgets
from kvkeep.cache.layer_layout import DEFAULT_BUDGET, default_policy
from kvkeep.cli import console
from kvkeep.cli.chat import ChatOptions
from kvkeep.cli.chat_folder import ChatFolder, ChatPlace, extends
from kvkeep.cli.chat_sessions import ChatSession
from kvkeep.cli.generate_run import (
    SavedMemory,
    engine_for,
    find_model,
    sampling_of,
    title_of,
    with_keep_prompt,
    with_memory_settings,
)
from kvkeep.cli.loading import check_weights, words_for_memory, writer_of
from kvkeep.cli.memory import full_bytes
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.engine.engine import Engine
from kvkeep.engine.prompt_encoding import ConversationHistory
from kvkeep.engine.session import MOST_TURNS_BACK
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models import threads
from kvkeep.models.adapters import check_folders
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import quiet
from kvkeep.models.message_tokens import system_spans
from kvkeep.models.tokenization import check_system
from kvkeep.pins import Spans, from_start
from kvkeep.policies import CONVERSATION
from kvkeep.policies.registry import label, parse, spec
from kvkeep.result_files import command
from kvkeep.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from kvkeep.cli.chat_input import TypedMessages

# The commands of a conversation: lines that begin with a slash.


class Quit(Exception):  # noqa: N818  no error
    """The user ends the conversation."""


def is_command(message: str) -> bool:
    """Return whether a message is a command: one line that begins with a slash, without a space before it."""
    return message.startswith("/") and "\n" not in message


def run(line: str, talk: ChatSession) -> None:
    """Run a command of the conversation, such as ``/rewind 2``.

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
    """Return the words behind a typed command, after a check of their number.

    Raises:
        InputError: there are too many words.
    """
    most = 1 if name in ("/fork", "/rewind") else 0
    if len(words) > most:
        raise InputError(f"{name} takes {'one word at most' if most else 'nothing'}. /help lists all commands.")
    return words


def _help(talk: ChatSession) -> None:
    """Print the commands and keys of a conversation."""
    console.out().print(
        console.facts(
            {
                "/help": "this list",
                "/memory": "what the conversation holds, and its size",
                "/rewind [N]": f"take back the last turn, or the last N; {MOST_TURNS_BACK} at most, "
                "1 of an earlier run",
                "/fork [NAME]": "go on under another name; the conversation so far stays as it is",
                "/quit": "end; Ctrl-D does the same",
                "Ctrl-C": "stop an answer, of which the conversation keeps what was said; stop the reading of a "
                "message, as if it had not been sent; clear what was typed",
                "Alt-Enter": "begin a new line of the message; a paste is one message, too",
                '"""': "on a line of its own: begin a message of several lines, and end it",
                "arrow keys": "earlier messages",
                "while it answers": "what is typed waits for the answer's end; lines that end with Enter are then sent",
            }
        )
    )


def _show_memory(talk: ChatSession) -> None:
    """Print turns, tokens seen and held (mean per layer and head), policy, budget, and the memory's size and file."""
    state = talk.state
    if state is None:
        console.out().print(console.facts({"conversation": talk.place.name, "tokens": "none yet"}))
        return
    layers = state.contents.layers
    # a slot without a token has a position below 0
    held = sum(int((layer.positions >= 0).sum()) for layer in layers) / sum(len(layer.positions) for layer in layers)
    stored = ((layer.tensors["store.keys"], layer.tensors["store.values"]) for layer in layers)
    shapes = ((len(keys), keys.shape[-1], values.shape[-1]) for keys, values in stored)
    full = console.show_bytes(full_bytes(state.fingerprint, shapes, state.seen))
    rows = {
        "conversation": f"{talk.place.name}, {console.count(talk.turns, 'turn')}",
        "policy": f"{label(talk.session.policy)}, budget {talk.session.budget}",
        "tokens": f"{state.seen} seen, {held:.4g} held per layer and head on average",
        "size": f"{console.show_bytes(state.nbytes)}; a full cache would take {full}",
    }
    if talk.place.is_saved:
        rows["file"] = str(talk.place.file)
    console.out().print(console.facts(rows))


def _rewind(talk: ChatSession, turns: str = "1") -> None:
    """Take back the last turns of the conversation, and print how many are left.

    Args:
        talk: the conversation.
        turns: their number, as it was typed.

    Raises:
        InputError: the text is no number of turns, or so many cannot be taken back.
    """
    # the length first: Python reads no number of thousands of digits
    if not (turns.isascii() and turns.isdigit()) or len(turns) > len("1000") or int(turns) < 1:
        raise InputError(f"/rewind takes the number of turns to take back, 1 to {MOST_TURNS_BACK}.")
    with Uninterrupted():
        talk.rewind(int(turns))
    console.note(f"took back {console.count(int(turns), 'turn')}; {console.count(talk.turns, 'turn')} left")


def _fork(talk: ChatSession, name: str | None = None) -> None:
    """Go on with the conversation under another name, made of date and time if ``name`` is ``None``; print a note.

    Raises:
        KVKeepError: the name cannot be used or is taken, or the conversation cannot be saved.
    """
    with Uninterrupted():
        old = talk.fork(name)
    console.note(f"goes on as {talk.place.name}; {old} stays as it is")


def _quit(talk: ChatSession) -> None:
    """Raise `Quit`, which ends the conversation."""
    raise Quit


COMMANDS: dict[str, Callable[..., None]] = {
    "/help": _help,
    "/memory": _show_memory,
    "/rewind": _rewind,
    "/fork": _fork,
    "/quit": _quit,
}


class PipedMessages:
    """The lines of standard input, each a message.

    Attributes:
        on_terminal: whether a user types them.
    """

    on_terminal = False

    def __init__(self) -> None:
        self._number = 0

    def read(self) -> str | None:
        """Return the next line without its end, perhaps an empty one; ``None`` at the end of the input.

        Raises:
            InputError: the line is not UTF-8 text.
        """
        raw = sys.stdin.buffer.readline()
        self._number += 1
        try:
            # with "sig": some editors begin a file with a mark
            return raw.decode("utf-8-sig" if self._number == 1 else "utf-8").rstrip("\r\n") if raw else None
        except UnicodeDecodeError as error:
            raise InputError(
                f"Line {self._number} of standard input is not UTF-8 text: byte {error.start} is "
                f"0x{raw[error.start]:02x}. Convert it, e.g. with iconv."
            ) from error


ROOM = 8192
"""The default budget of a policy that keeps everything."""


def serve(request: ChatOptions) -> None:
    """Hold a conversation until the user ends it.

    Raises:
        KVKeepError: the request, the model or the conversation cannot be used; or a message without a terminal.
        Exit: the user pressed Ctrl-C while nothing could be stopped but the program.
    """
    folder = ChatFolder.of(request.sessions)
    place = folder.claim(request.session)
    talk = None
    try:
        with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
            talk = _begin(request, folder, place)
            _hold(talk)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(console.INTERRUPTED) from interrupt
    finally:
        if talk is None:
            place.leave()
        else:
            _end(talk, request)


def _begin(request: ChatOptions, folder: ChatFolder, place: ChatPlace) -> ChatSession:
    """Check everything that needs no weights, load the model, and return the opened conversation.

    Raises:
        KVKeepError: something cannot be used.
    """
    sampling = sampling_of(request)
    memory = _memory(request, place)
    if memory is not None:
        memory.check_adapter(request.adapter)
    request = with_keep_prompt(with_memory_settings(request, memory))
    policy = parse(request.policy)
    budgets.check(1 if request.budget is None else request.budget)  # 1 passes: the default comes later
    check_weights(request)
    check_folders(request.adapter)
    if request.session is not None and request.model is None and memory is None:
        console.note(f"{place.name} is a new conversation, with {title_of(None)}: no MODEL was given")
    console.progress(f"loading {title_of(request.model)} …")
    checkpoint = find_model(request, memory)
    if request.system is not None:
        check_system(checkpoint, request.system)
    if not request.names_policy and memory is None:
        request = replace(request, policy=spec(default_policy(checkpoint.config, CONVERSATION)))
    budget = request.budget or (DEFAULT_BUDGET if policy.evicts else ROOM)
    engine = _engine(checkpoint, request, budget)
    snapshot = None if memory is None else memory.snapshot
    return ChatSession(
        engine,
        folder,
        place,
        sampling=sampling,
        source=request.model,
        system=request.system,
        pins=partial(_system_pins, checkpoint, engine) if request.pin_system else lambda messages: (),
        memory=snapshot,
    )


def _system_pins(checkpoint: Checkpoint, engine: Engine, messages: Sequence[Mapping[str, str]]) -> Spans:
    """Return the spans of the system message's tokens in a conversation's first turn, by which it is pinned.

    Return ``()`` if it is too long for that, or the template shows it in another form.
    """
    try:
        found = from_start(system_spans(checkpoint, messages))
    except InputError:  # the template shows it in another form
        return ()
    return found if engine.can_pin(found) else ()


def _memory(request: ChatOptions, place: ChatPlace) -> SavedMemory | None:
    """Return the memory that the conversation was saved with, or else that of ``--memory``; ``None`` if there is none.

    Raises:
        InputError: the conversation has begun in another way than the request asks for.
        SnapshotError: a file cannot be used.
    """
    if not place.is_saved:
        return None if request.memory is None else SavedMemory.read(request.memory)
    saved = SavedMemory.read(str(place.file), shown=f"the conversation {place.name}")
    if (difference := _other_beginning(request, saved.snapshot)) is not None:
        raise InputError(
            f"The conversation {place.name} has begun {difference} is for new ones. Leave it out, or give another name "
            "with --session."
        )
    return saved


def _other_beginning(request: ChatOptions, saved: Snapshot) -> str | None:
    """Return how a saved conversation has begun if the request asks for another beginning, with the flag that does, in
    words; ``None`` if it asks for the same or for none: the same command may be typed again.

    Raises:
        SnapshotError: the file of ``--memory`` cannot be used.
    """
    if request.memory is not None and not extends(saved, SavedMemory.read(request.memory).snapshot):
        return f"without the memory of {request.memory}, and --memory"
    told = ConversationHistory.of(saved).messages
    systems = [message["content"] for message in told if message["role"] == "system"]
    if request.system is not None and systems != [request.system]:
        return f"with{' another' if systems else 'out a'} system message, and --system"
    return None


def _engine(checkpoint: Checkpoint, request: ChatOptions, budget: int) -> Engine:
    """Load the weights, and return an engine of one row for the conversation; print a note without a chat template."""
    writer = writer_of(checkpoint, request, request.adapter, merge=True)
    engine = engine_for(writer, request, budget=budget, rows=1)
    if checkpoint.tokenizer.chat_template is None:
        console.note(f"{checkpoint.name} has no chat template, so it continues your messages as text")
    return engine


def _hold(talk: ChatSession) -> None:
    """Read and answer messages until the input ends or the user quits.

    Raises:
        KVKeepError: a message cannot be answered, and there is no terminal on which to try another one.
    """
    if not sys.stdin.isatty():
        messages = PipedMessages()
        while _answer_next(messages, talk):
            pass
        return
    from kvkeep.cli.chat_input import TypedMessages, history_file

    console.err().print(console.facts(talk.greeting()))
    typed = TypedMessages(history_file())
    with typed.keys_held_back():
        while _answer_next(typed, talk):
            pass


def _answer_next(messages: PipedMessages | TypedMessages, talk: ChatSession) -> bool:
    """Read a message, and answer it or run its command; return ``False`` once the conversation ends, else ``True``.

    On a terminal, errors and Ctrl-C end only this message.

    Raises:
        KVKeepError: the message cannot be answered, and there is no terminal on which to try something else.
    """
    try:
        message = messages.read()
        if message is None:
            return False
        if is_command(message):
            run(message, talk)
        elif message.strip():
            # the first of several lines keeps its indentation
            text = message.rstrip().lstrip("\n") if "\n" in message else message.strip()
            talk.answer(text, stoppable=messages.on_terminal)
    except Quit:
        return False
    except KeyboardInterrupt:
        if not messages.on_terminal:
            raise
        console.note("Ctrl-D or /quit ends the conversation")
    except KVKeepError as error:
        if not messages.on_terminal:
            raise
        console.error(str(error))
    return True


def _end(talk: ChatSession, request: ChatOptions) -> None:
    """Save and close the conversation, and print how to go on with it. An error of saving is printed."""
    try:
        with Uninterrupted():
            talk.save()
    except KVKeepError as error:
        console.error(str(error))
    if talk.place.is_saved:
        words = words_for_memory(request, request.adapter, talk.engine.policy)
        folder = [] if request.sessions is None else ["--sessions", request.sessions]
        line = command("kvkeep chat", *words, *folder, "--session", talk.place.name)
        console.note("the conversation is saved; to go on:")
        console.err().print(f"    {line}", soft_wrap=True)  # so that it can be copied
    talk.close()
