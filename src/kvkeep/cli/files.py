"""Text files that a user names."""

from __future__ import annotations

import sys
from pathlib import Path

from kvkeep.errors import InputError

STANDARD_INPUT = "-"


def read_text(file: str, *, kind: str, purpose: str) -> str:
    """The content of a UTF-8 file without a final line break; ``-`` is standard input.

    Args:
        file: path, or ``-``.
        kind: what messages call the file, e.g. ``prompt file``.
        purpose: what the text is for, as messages end: ``Give the model some text to continue.``

    Raises:
        InputError: it cannot be read, is no UTF-8, or is empty.
    """
    source = "Standard input" if file == STANDARD_INPUT else f"The {kind} {file}"
    try:
        data = sys.stdin.buffer.read() if file == STANDARD_INPUT else Path(file).expanduser().read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}. Convert it, e.g. with iconv."
        ) from error
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}.") from error
    return not_empty(text.removesuffix("\n").removesuffix("\r"), source, purpose)


def not_empty(text: str, source: str, purpose: str) -> str:
    """The text.

    Raises:
        InputError: there is nothing but white space.
    """
    if not text.strip():
        raise InputError(f"{source} is empty. {purpose}")
    return text
