"""The user's lines: from a line editor on a terminal, otherwise from standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

from kvkeep.cli import console
from kvkeep.errors import InputError

PROMPT = "> "
_MOST_SAID = 500


class Lines:
    """The lines that a user types or pipes in.

    Args:
        said: earlier lines, which the arrow keys bring back.

    Attributes:
        on_terminal: whether a user types them.
    """

    def __init__(self, said: Sequence[str] = ()) -> None:
        self.on_terminal = sys.stdin.isatty()
        self._said, self._number = said, 0
        self._editor: ModuleType | None = None

    def __enter__(self) -> Lines:
        if self.on_terminal:
            with suppress(ImportError):
                import readline

                self._editor = readline
                for line in self._said[-_MOST_SAID:]:
                    readline.add_history(" ".join(line.split()))
        return self

    def __exit__(self, *error: object) -> None:
        if self._editor is not None:
            self._editor.clear_history()

    def read(self) -> str | None:
        """The next line, perhaps an empty one; ``None`` at their end.

        Raises:
            InputError: standard input is not UTF-8 text, and nobody can type another line.
        """
        return self._typed() if self.on_terminal else self._piped()

    def _typed(self) -> str | None:
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            console.note("Ctrl-D or /quit ends the conversation")
        except UnicodeDecodeError:
            console.error("That line is not UTF-8 text; it was not sent.")
        return ""

    def _piped(self) -> str | None:
        raw = sys.stdin.buffer.readline()
        self._number += 1
        try:
            return raw.decode("utf-8-sig" if self._number == 1 else "utf-8").rstrip("\r\n") if raw else None
        except UnicodeDecodeError as error:
            raise InputError(
                f"Line {self._number} of standard input is not UTF-8 text: byte {error.start} is "
                f"0x{raw[error.start]:02x}. Convert it, e.g. with iconv."
            ) from error
