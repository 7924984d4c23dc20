"""The messages that a user of ``kvkeep chat`` types on a terminal: a line editor of prompt_toolkit.

Only a chat on a terminal imports this module, and so prompt_toolkit.
"""

from __future__ import annotations

import os
import stat
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from kvkeep.cli import console
from kvkeep.cli.files import cache_folder
from kvkeep.errors import InputError

PROMPT, _CONTINUATION = "> ", "  "
_QUOTES = '"""'
"""Alone on a line, it begins or ends a message of several lines."""
_SHORT_LINES, _SHORT_CHARACTERS = 4, 400
"""A paste with more is shown folded."""
_FIRST_PLACEHOLDER = 0xF0000
"""The first of the characters for private use that stand for folded pastes in the line editor."""
_MOST_HISTORY_BYTES = 2**20
_ENTRY = b"\n# "
"""How prompt_toolkit begins an entry of a history file."""


class TypedMessages:
    """The messages that a user types on a terminal.

    Enter sends. Alt-Enter, or a line of three quotes before and after, makes several lines one message, and so does a
    paste.

    Args:
        history: the file of earlier messages, for the arrow keys; ``None``: they last as long as the program.
        keys: where the keys come from; by default standard input.
        screen: where the line editor is drawn; by default standard output, or standard error if only that is a
            terminal.

    Attributes:
        on_terminal: whether a user types them.
    """

    on_terminal = True

    def __init__(self, history: Path | None, keys: Input | None = None, screen: Output | None = None) -> None:
        self._pastes = _FoldedPastes()
        self._screen = screen or _screen()
        self._prompt: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=_CONTINUATION,
            history=InMemoryHistory() if history is None else _MessageHistory(history, self._pastes),
            key_bindings=_key_bindings(self._pastes),
            input_processors=[_Labels(self._pastes)],
            enable_suspend=True,
            reserve_space_for_menu=0,  # lines for a menu of completions, of which there are none
            input=keys,
            output=self._screen,
        )

    @contextmanager
    def keys_held_back(self) -> Iterator[None]:
        """Hold back what is typed while no message is read: it is not shown, and the next message begins with it.

        Ctrl-C still interrupts.
        """
        with _silent_keyboard():
            try:
                yield
            finally:
                self._mark_pastes(False)

    def read(self) -> str | None:
        """Return the next message, without lines of quotes around it; ``None`` once the user ends the input.

        It is ``""`` after Ctrl-C on an empty line and for text that is not UTF-8, which a message on the screen says.
        """
        try:
            text = self._pastes.unfolded(self._prompt.prompt())
        except EOFError:
            return None
        except KeyboardInterrupt:
            console.note("Ctrl-D or /quit ends the conversation")
            return ""
        finally:
            self._mark_pastes(True)  # also those of the time until the next message is read
        try:
            text.encode()
        except UnicodeEncodeError:
            console.error("That line is not UTF-8 text; it was not sent.")
            return ""
        return _without_quotes(text)

    def _mark_pastes(self, on: bool) -> None:
        """Let the terminal mark the beginning and end of a paste (``on``), or no longer."""
        with suppress(OSError):  # the terminal was closed
            (self._screen.enable_bracketed_paste if on else self._screen.disable_bracketed_paste)()
            self._screen.flush()


@contextmanager
def _silent_keyboard() -> Iterator[None]:
    """Leave keys that are pressed in this context to whoever reads them next, and show none; on Windows do nothing.

    Standard input must be a terminal.
    """
    try:
        import termios
    except ImportError:  # Windows, which shows keys only to whoever reads them
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    quiet: list[Any] = [*before]
    quiet[0] &= ~termios.ICRNL  # the line editor expects Enter as the keyboard sends it
    # keys wait one by one, not by line; otherwise Ctrl-C would drop those that wait
    quiet[3] = (quiet[3] & ~(termios.ECHO | termios.ICANON)) | termios.NOFLSH
    termios.tcsetattr(number, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(number, termios.TCSANOW, before)


def _screen() -> Output:
    """Return standard output, or standard error if only that is a terminal."""
    made = create_output(always_prefer_tty=True)
    if isinstance(made, Vt100_Output):
        made.enable_cpr = False  # a terminal's answer could come while nobody reads keys
    return made


# Several lines as one message.


def _is_open(text: str) -> bool:
    """Return whether a text begins with a line of three quotes, and its last line is not a second one."""
    first, *more = text.split("\n")
    return first.strip() == _QUOTES and not (more and more[-1].strip() == _QUOTES)


def _without_quotes(text: str) -> str:
    """Return a text without its first and last line if both are three quotes; otherwise return it unchanged."""
    first, *more = text.split("\n")
    return "\n".join(more[:-1]) if first.strip() == _QUOTES and more and more[-1].strip() == _QUOTES else text


class _FoldedPastes:
    """The long pastes of the message that is typed. Each is one character in the line editor, shown as a label."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def folded(self, text: str) -> str:
        """Store a paste, and return the character that stands for it in the line editor; a short paste comes back."""
        if len(text) <= _SHORT_CHARACTERS and text.count("\n") < _SHORT_LINES:
            return text
        placeholder = chr(_FIRST_PLACEHOLDER + len(self._texts))
        self._texts[placeholder] = text
        return placeholder

    def unfolded(self, text: str) -> str:
        """Return a text with its folded pastes in full."""
        return "".join(self._texts.get(character, character) for character in text)

    def label(self, character: str) -> str:
        """Return what is shown for a character: ``[pasted: 12 lines]`` for a folded paste, otherwise itself."""
        text = self._texts.get(character)
        if text is None:
            return character
        lines = text.rstrip("\n").count("\n") + 1  # the break at the end begins no line
        return f"[pasted: {console.count(lines, 'line') if lines > 1 else console.count(len(text), 'character')}]"


class _Labels(Processor):
    """Shows folded pastes as labels in the line editor."""

    def __init__(self, pastes: _FoldedPastes) -> None:
        self._pastes = pastes

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """Return a line with labels for its folded pastes, and the maps between places in it and on the screen."""
        fragments: StyleAndTextTuples = []
        starts = [0]
        for style, character, *_ in explode_text_fragments(transformation_input.fragments):
            shown = self._pastes.label(character)
            fragments.append((style, shown))
            starts.append(starts[-1] + len(shown))
        return Transformation(
            fragments,
            source_to_display=lambda place: starts[min(place, len(starts) - 1)],
            display_to_source=lambda place: bisect_right(starts, place) - 1,
        )


def _key_bindings(pastes: _FoldedPastes) -> KeyBindings:
    """Return the bindings of Enter, Alt-Enter, a paste and Ctrl-C, which replace prompt_toolkit's own."""
    keys = KeyBindings()

    @keys.add(Keys.Enter)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.newline(copy_margin=False)  # not indented like the line before
        else:
            buffer.validate_and_handle()

    @keys.add(Keys.Escape, Keys.Enter)
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add(Keys.BracketedPaste)
    def paste(event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(pastes.folded(text))

    @keys.add(Keys.ControlC)
    @keys.add(Keys.SIGINT)
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


# Earlier messages, in a file that only its user can read.


def history_file() -> Path | None:
    """Return the file of earlier messages in the user's cache folder; ``None`` if there can be no such file.

    It is made if it is missing, becomes readable by its user alone, and is cut if it has grown too long.
    """
    try:
        path = cache_folder() / "kvkeep" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(path)
        _shorten(path)
    except (OSError, InputError):
        return None
    return path


class _MessageHistory(FileHistory):
    """Earlier messages in a file, which gets folded pastes in full. What cannot be written is left out."""

    def __init__(self, path: Path, pastes: _FoldedPastes) -> None:
        super().__init__(str(path))
        self._pastes = pastes

    def append_string(self, string: str) -> None:
        """Add a message to the file, with folded pastes in full; do nothing if it cannot be written."""
        # the history is a convenience: a full disk must not end the conversation
        with suppress(OSError, UnicodeError):
            super().append_string(self._pastes.unfolded(string))


def _make_private(path: Path) -> None:
    """Make a file that only its user can read, unless there is one; take others' rights to it away.

    Raises:
        OSError: the file cannot be made or is no file.
    """
    # without O_NONBLOCK a pipe of this name would wait for somebody else
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0), 0o600)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise FileExistsError(str(path))
        if hasattr(os, "fchmod"):
            os.fchmod(number, 0o600)
    finally:
        os.close(number)


def _shorten(path: Path) -> None:
    """Cut a file that has grown beyond `_MOST_HISTORY_BYTES` to the newest entries in half of that.

    Raises:
        OSError: the file cannot be written.
    """
    if path.stat().st_size > _MOST_HISTORY_BYTES:
        newer = path.read_bytes()[-_MOST_HISTORY_BYTES // 2 :]
        path.write_bytes(newer[max(0, newer.find(_ENTRY)) :])  # -1: one entry that is longer than that
