"""The terminal: text for people, JSON for programs, errors in one line with the flags of the subcommand that runs.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import ParamSpec, get_type_hints

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.models import ArgumentInfo, OptionInfo

from kvkeep.errors import KVKeepError, three_digits
from kvkeep.errors import show_bytes as show_bytes  # for commands, which show sizes by this module

P = ParamSpec("P")

BAD_INPUT = 2
"""Exit code of every error that the user can put right; the same as for a misspelt option."""

DEBUG = "KVKEEP_DEBUG"
"""The variable under which an error shows its traceback, for bug reports."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 and the number of the signal."""

BEATS_S = (10.0, 20.0, 30.0, 60.0)
"""Seconds before each line of a `Heartbeat`; the last ones repeat."""

_LONGEST = 300
"""Characters of a word in a message; the middle of a longer word is left out."""
_TAB = 8
"""Columns of a tab on a terminal."""
_OUT_OF_MEMORY = "This machine has too little memory for that. Give it less to do at once, or free some memory."
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))  # all but tab and line break
_ESCAPES = {code: f"\\u{code:04x}" for code in range(127, 160)}  # `json` escapes those below 32 itself

_ARGUMENT = re.compile(r"`([a-z_]+)(?:=([^`]*))?`|^([a-z_]+)=(\S+)")
"""How messages name an argument of Python, see `kvkeep.errors`."""

_PARAMETERS: ContextVar[Mapping[str, OptionInfo | ArgumentInfo]] = ContextVar("parameters")
"""Options and arguments of the subcommand that runs, by their names in Python."""


def out() -> Console:
    """Return the console of standard output, for results."""
    return Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    """Return the console of standard error, for progress, notes and errors."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Return a subcommand that prints errors of kvkeep and a lack of memory in one line, and exits with `BAD_INPUT`.

    Under `DEBUG` the traceback is printed first. Other errors pass.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        token = _PARAMETERS.set(_parameters(command))
        try:
            with Heartbeat():
                command(*args, **kwargs)
        except (KVKeepError, MemoryError) as found:
            if os.environ.get(DEBUG, "0") not in ("", "0"):
                traceback.print_exception(found)
            error(_OUT_OF_MEMORY if isinstance(found, MemoryError) else str(found))
            raise typer.Exit(BAD_INPUT) from found
        finally:
            _PARAMETERS.reset(token)

    return wrapper


def _parameters(command: Callable[..., None]) -> dict[str, OptionInfo | ArgumentInfo]:
    """Return typer's description of each option and argument of a subcommand, by the parameter's name."""
    hints = get_type_hints(command, include_extras=True)
    return {
        name: info
        for name, hint in hints.items()
        for info in getattr(hint, "__metadata__", ())
        if isinstance(info, OptionInfo | ArgumentInfo)
    }


def with_flags(message: str) -> str:
    """Return a message with its Python arguments replaced by flags of the running subcommand.

    ``Raise `prefill_chunk=64` `` becomes ``Raise --prefill-chunk 64``. An argument that the subcommand does not have
    becomes plain words; with a value it stays as it is.
    """
    parameters = _PARAMETERS.get({})

    def show(found: re.Match[str]) -> str:
        name, value = found[1] or found[3], found[2] or found[4]
        alike = (name, f"{name}s", name.removesuffix("s"), f"max_{name}")  # e.g. rows of an engine: --max-rows
        flag = next((alias for alias in alike if alias in parameters), None)
        if flag is not None:
            return _flag(flag, value, parameters[flag])
        return found[0] if value else name.replace("_", " ")

    return _ARGUMENT.sub(show, message)


def _flag(name: str, value: str | None, info: OptionInfo | ArgumentInfo) -> str:
    """Return an option and its value as a user types them: ``--budget 512``, ``--no-page``; an argument's metavar."""
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    words = name.replace("_", "-")
    if value in ("True", "False"):
        return f"--{words}" if value == "True" else f"--no-{words}"
    if value is None:
        return f"--{words}"
    return f"--{words} {_size(int(value)) if info.metavar == 'SIZE' and value.isdecimal() else value}"


def _size(count: int) -> str:
    """Return a number of bytes as the value of an option, without a digit lost: ``3MB``, ``1234B``."""
    return f"{count // 10**6}MB" if count % 10**6 == 0 else f"{count}B"


def progress(message: str) -> None:
    """Print the present stage of the work, on a terminal only."""
    console = err()
    if console.is_terminal:
        console.print(Text(printable(message), "dim"), soft_wrap=True)


class Heartbeat:
    """Prints a line every so often about work that takes long, where standard error is no terminal.

    On a terminal a progress bar shows the same.
    """

    _running: ContextVar[Heartbeat | None] = ContextVar("heartbeat", default=None)

    def __init__(self) -> None:
        self._works: list[Callable[[], str]] = []
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Heartbeat:
        """Begin; nothing is printed before there is work (see `working`)."""
        self._before = self._running.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        """End; nothing is printed afterwards."""
        self._running.reset(self._before)
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=1)  # it may wait for a reader of a full pipe, for ever

    @classmethod
    @contextmanager
    def working(cls, describe: Callable[[], str]) -> Iterator[None]:
        """Print what ``describe`` returns every so often, as long as the context lasts.

        Do nothing on a terminal, or outside a subcommand. Of works within each other only the innermost is told.
        """
        beat = cls._running.get()
        if beat is None or err().is_terminal:
            yield
            return
        if beat._thread is None:
            beat._thread = threading.Thread(target=beat._print, daemon=True)
            beat._thread.start()
        beat._works.append(describe)
        try:
            yield
        finally:
            beat._works.remove(describe)

    def _print(self) -> None:
        """Write what the innermost work does to standard error after each of `BEATS_S` seconds, until it ends."""
        for wait_s in itertools.chain(BEATS_S, itertools.repeat(BEATS_S[-1])):
            if self._ended.wait(wait_s):
                return
            with suppress(IndexError, OSError, ValueError):  # nothing to tell, or nobody to read it
                # not by rich, which would close standard output where nobody reads standard error
                sys.stderr.write(f"{printable(self._works[-1]())}\n")
                sys.stderr.flush()


def error(message: str) -> None:
    """Print an error in one line; a terminal wraps it between words."""
    line = " ".join(map(_cut, with_flags(message).split()))
    screen = err()
    screen.print(Text.assemble(("error: ", "bold red"), visible(line)), soft_wrap=not screen.is_terminal)


def note(message: str) -> None:
    """Print a fact that the user should know and that stops nothing."""
    err().print(Text.assemble(("note: ", "yellow"), printable(with_flags(message))))


def write_json(value: object) -> None:
    """Print one JSON object to standard output; all control characters are escaped, also where JSON allows them."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False).translate(_ESCAPES) + "\n")


def write_text(text: str) -> None:
    """Print a piece of a model's text at once, without its control characters if the output is a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextmanager
def streamed_text(*, wraps: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints pieces of text. At the end the last line is ended, also after an error.

    Args:
        wraps: whether a terminal gets line breaks between words.
    """
    last = "\n"  # if nothing is printed, no line is ended
    wrap = _WordWrap() if wraps and sys.stdout.isatty() else None

    def write(piece: str) -> None:
        nonlocal last
        if piece := piece if wrap is None else wrap.add(printable(piece)):
            write_text(piece)
            last = piece

    try:
        yield write
    finally:
        if wrap is not None and (rest := wrap.end()):
            write_text(rest)
            last = rest
        if not last.endswith("\n"):
            write_text("\n")


class _WordWrap:
    """Breaks a growing text between words at a terminal's edge. A word is held back until its end."""

    def __init__(self) -> None:
        self._column = 0
        self._spaces = self._word = ""
        self._has_begun = False  # whether a part of the word was shown already, since it is longer than a line

    def add(self, piece: str) -> str:
        """Take one more piece of the text, and return what can be shown now; a word that may go on is held back."""
        return "".join(map(self._take, piece))

    def end(self) -> str:
        """Return the word that is still held back, with the spaces before it."""
        return self._hand_out()

    def _take(self, character: str) -> str:
        """Take one more character, and return what can be shown now, perhaps nothing.

        A space, a line's end or a wide character ends the word that was held back.
        """
        if character == "\n":
            shown = self._hand_out() + character
            self._column, self._spaces, self._has_begun = 0, "", False
        elif character in " \t":
            shown = self._hand_out() if self._word else ""
            self._spaces, self._has_begun = self._spaces + character, False
        else:  # a line may be broken before and after a wide character, such as 語
            is_wide = cell_len(character) > 1
            shown = self._hand_out() if is_wide and self._word else ""
            self._word += character
            is_long = not is_wide and self._width(self._word) > self._edge
            if is_wide or is_long:
                shown += self._hand_out()
                self._has_begun = is_long
        return shown

    def _hand_out(self) -> str:
        """Return the held back word, after its spaces or a line break in place of them, and hold nothing back.

        Without a word return ``""``; spaces stay held back.
        """
        spaces, word = self._spaces, self._word
        if not word:
            return ""
        self._spaces = self._word = ""
        after = self._column + self._width(spaces) + self._width(word)
        if after > self._edge and self._column and not self._has_begun:
            spaces, after = "\n", self._width(word)
        self._column = (after - 1) % self._edge + 1 if after else 0  # the terminal breaks a word that is too long
        return spaces + word

    @property
    def _edge(self) -> int:
        """Return the number of the terminal's columns at present, at least 1."""
        return max(1, shutil.get_terminal_size().columns)

    def _width(self, text: str) -> int:
        """Return how many columns of the terminal a text takes."""
        return cell_len(text.expandtabs(_TAB))


def printable(text: str) -> str:
    """Return the text without the control characters that could steer a terminal."""
    return text.translate(_CONTROLS)


def visible(text: str) -> str:
    """Return the text on one line, with escapes such as ``\\n`` for all characters that cannot be seen."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _cut(word: str) -> str:
    """Return a word of a message; without its middle if it is too long to read."""
    return word if len(word) <= _LONGEST else f"{word[: _LONGEST // 2]}…{word[-_LONGEST // 2 :]}"


def facts(rows: dict[str, str], *, name_width: int = 0) -> Table:
    """Return names and values as a table of two columns without lines, the first with at least so many characters."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=name_width)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, printable(value))
    return grid


def table(*columns: str) -> Table:
    """Return an empty table in the terminal's width. Words too long for their column are folded, never cut."""
    made = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in made.columns:
        column.overflow = "fold"
    return made


def facts_table(name: str, value: str, rows: dict[str, str]) -> Table:
    """Return a table of two columns with the titles ``name`` and ``value``, and a row for each entry of ``rows``."""
    filled = table(name, value)
    for row in rows.items():
        filled.add_row(*row)
    return filled


def show_factor(factor: float) -> str:
    """Return a factor as text: ``4.0×``, or ``0.04×`` with two digits where it is small."""
    shown = f"{factor:.1f}"  # its rounding decides: 0.95 is slightly less as a float, and would be 0.9
    return f"{shown}×" if float(shown) >= 1 else f"{factor:.2g}×"


def show_speed(tpot_s: float | None) -> str:
    """Return the speed for a time per token as text: ``23.5 tokens/s``, or a dash if no time was measured."""
    return f"{show_rate(1 / tpot_s)} tokens/s" if tpot_s else "–"


def show_rate(rate: float) -> str:
    """Return a number of tokens per second as text with at least three digits: ``23.5``, ``1234``."""
    return three_digits(rate)


def show_time_left(seconds: float) -> str:
    """Return an estimate of the time that work will take: ``about 40 s left``, ``about 3 min left``."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes < 90 else f"about {minutes / 60:.1f} h left"


def show_seconds(seconds: float | None) -> str:
    """Return a duration as text: ``310 ms``, ``4.2 s``, or a dash if none was measured."""
    if seconds is None:
        return "–"
    # from 0.9995 on, milliseconds would be rounded to 1000
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def count(number: int, noun: str) -> str:
    """Return a number and its noun as text, with an s for all numbers but 1: ``1 token``, ``2 tokens``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
