"""Text files that a user names."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        data = sys.stdin.buffer.read() if file == STANDARD_INPUT else _in_full(file).read_bytes()
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


@contextmanager
def read_again(file: str, *, kind: str) -> Iterator[Path]:
    """A file that can be read several times: standard input (``-``), or a pipe, is copied first.

    Args:
        file: path, or ``-``.
        kind: what messages call the file, e.g. ``input``.

    Raises:
        InputError: it cannot be copied.
    """
    path = _in_full(file)
    if file != STANDARD_INPUT and not _is_stream(path):
        yield path  # also one that does not exist: whoever reads it says so
        return
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder:
        copy = Path(folder) / "copy"
        try:
            with copy.open("wb") as target:
                if file == STANDARD_INPUT:
                    shutil.copyfileobj(sys.stdin.buffer, target)
                else:
                    with path.open("rb") as source:
                        shutil.copyfileobj(source, target)
        except OSError as error:
            name = "Standard input" if file == STANDARD_INPUT else f"The {kind} {file}"
            raise InputError(f"{name} cannot be read, or copied to {folder}: {error.strerror}.") from error
        yield copy


def _in_full(file: str) -> Path:
    """The path with the home folder for ``~``, where there is one."""
    with suppress(RuntimeError):  # ~ of a user that does not exist: a name like any other
        return Path(file).expanduser()
    return Path(file)


def _is_stream(path: Path) -> bool:
    """Whether a file can be read only once."""
    with suppress(OSError):  # e.g. a name that is too long: whoever reads it says so
        return path.is_fifo() or path.is_char_device() or path.is_socket()
    return False
