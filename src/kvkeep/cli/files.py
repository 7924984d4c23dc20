"""Files that the user names on the command line."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.errors import InputError, SnapshotError
from kvkeep.result_files import in_full, is_address

STANDARD_INPUT = STANDARD_OUTPUT = "-"


def read_text(file: str, *, kind: str, purpose: str) -> str:
    """Return the content of a UTF-8 file without a final line break; ``-`` is standard input.

    Args:
        file: path, or ``-``.
        kind: name of the file in messages, e.g. ``prompt file``.
        purpose: the last sentence of messages, e.g. ``Give the model some text to continue.``

    Raises:
        InputError: the file cannot be read, is a device, is not UTF-8, or is empty.
    """
    if not file:
        raise InputError(f"The name of the {kind} is empty. Give a path, or - for standard input.")
    refuse_device(file, kind)
    source = "Standard input" if file == STANDARD_INPUT else f"The {kind} {file}"
    try:
        data = sys.stdin.buffer.read() if file == STANDARD_INPUT else in_full(file).read_bytes()
        text = data.decode("utf-8-sig")  # drops the mark with which some editors begin a file
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}. Convert it, e.g. with iconv."
        ) from error
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}.") from error
    return not_empty(text.removesuffix("\n").removesuffix("\r"), source, purpose)


def check_text(file: str | None, *, kind: str) -> None:
    """Refuse a text file that cannot be looked up, as `read_text` would. Whether it can be read is not tried.

    Standard input and ``None`` pass, and an empty name, which `read_text` refuses.

    Raises:
        InputError: there is no such file.
    """
    try:
        if file not in (None, "", STANDARD_INPUT):
            os.stat(in_full(file))
    except OSError as error:
        raise InputError(f"The {kind} {file} cannot be read: {error.strerror}.") from error


def not_empty(text: str, source: str, purpose: str) -> str:
    """Return a text as it is, after a check that it has more than white space.

    Args:
        text: the text.
        source: where it comes from, for the message.
        purpose: the last sentence of the message.

    Raises:
        InputError: the text is empty, or only white space.
    """
    if not text.strip():
        raise InputError(f"{source} is empty. {purpose}")
    return text


def check_exists(file: str) -> None:
    """Refuse the name of a memory's file that cannot be looked up, as the reader of such files would.

    Raises:
        SnapshotError: there is no such file.
    """
    try:
        os.stat(in_full(file))
    except OSError as error:
        raise SnapshotError(f"{in_full(file)!s:.200} cannot be read: {error.strerror}.") from error
    except ValueError:  # a zero byte in the path, which the reader explains
        return


def check_input(file: str) -> None:
    """Refuse a file or folder of prompts that cannot be looked up, as its reader would; an address passes.

    Raises:
        InputError: there is no such file.
    """
    if file == STANDARD_INPUT or is_address(file):
        return
    try:
        os.stat(in_full(file))
    except OSError as error:
        raise InputError(f"The input {in_full(file)!s:.200} cannot be read: {error.strerror}.") from error
    except ValueError:  # a zero byte in the path, which the reader explains
        return


@contextmanager
def read_again(file: str, *, kind: str) -> Iterator[Path]:
    """Yield a path that can be read several times.

    Standard input (``-``) or a pipe is copied to a temporary file first.

    Args:
        file: path, or ``-``.
        kind: name of the file in messages, e.g. ``input``.

    Raises:
        InputError: the file cannot be copied, or is a device, which may have no end.
    """
    path = in_full(file)
    refuse_device(file, kind)
    if file != STANDARD_INPUT and not _is_stream(path):
        yield path  # also if there is no such file: its reader raises the error
        return
    with _temporary_folder() as folder:
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


def refuse_device(file: str, kind: str) -> None:
    """Refuse a device such as ``/dev/zero``, which would be read until no memory is left.

    Raises:
        InputError: the file is such a device.
    """
    if file != STANDARD_INPUT and _is_endless(in_full(file)):
        raise InputError(f"The {kind} {file} is a device, which may have no end. Give a file, a pipe, or - for input.")


def place(text: str, option: str) -> Path:
    """Return the path for results that an option names, with the home folder in place of ``~``.

    Args:
        text: the value of the option.
        option: the flag, for messages.

    Raises:
        InputError: the text is empty, which the system would take for the present folder.
    """
    if not text:
        raise InputError(f"{option} is empty, so there is no place for results. Give a name.")
    return in_full(text)


def target(path: Path, what: str, *, example: str, overwrite: bool) -> Path:
    """Return the path itself, after a check that a file can be written there.

    Args:
        path: the file's path.
        what: what the file will hold, for messages: ``page``.
        example: a name for such a file.
        overwrite: whether the file may replace another one.

    Raises:
        InputError: there is no folder for it, something that may not be replaced has the name, or it is ``-``.
    """
    if str(path) == STANDARD_OUTPUT:
        raise InputError(f"A {what} is written to a file, not to standard output; give a name such as {example}.")
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
        raise InputError(f"{path} cannot be written: {getattr(error, 'strerror', error)}.") from error
    if path.is_dir() or (os.path.lexists(path) and not path.is_file()):  # a link to nothing is refused as well
        raise InputError(f"{path} is a folder, or no regular file. Give the name of a file for the {what}.")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{path} exists. Give another --output, or --overwrite to replace it.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for the {what}. Make it first, or give another --output.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"Nothing can be written to the folder {path.parent}. Give another --output.")
    return path


def data_folder() -> Path:
    """Return the folder in which the system keeps a user's data, which need not exist.

    Raises:
        InputError: there is no such folder, because the user has no home.
    """
    return _user_folder("XDG_DATA_HOME", ".local/share", "Library/Application Support")


def cache_folder() -> Path:
    """Return the folder in which the system keeps what a user's programs can make again; it need not exist.

    Raises:
        InputError: there is no such folder, because the user has no home.
    """
    return _user_folder("XDG_CACHE_HOME", ".cache", "Library/Caches")


def _user_folder(variable: str, below: str, below_on_mac: str) -> Path:
    """Return the folder that an environment variable names, or else one below the user's home.

    Args:
        variable: the variable; Windows has one of its own, and macOS none.
        below: path below the home.
        below_on_mac: the same on macOS.

    Raises:
        InputError: the user has no home.
    """
    named, below = {
        "win32": ("LOCALAPPDATA", "AppData/Local"),
        "darwin": (None, below_on_mac),
    }.get(sys.platform, (variable, below))
    # the rules of XDG ignore a path that is not absolute
    if named and os.path.isabs(folder := os.environ.get(named, "")):
        return Path(folder)
    try:
        return Path("~").expanduser() / below
    except RuntimeError as error:
        raise InputError("There is no folder for data of this user, who has no home. Set HOME.") from error


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder, which is removed when its context ends.

    Raises:
        InputError: no temporary folder can be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="kvkeep-")
    except OSError as error:
        raise InputError(
            f"There is no folder for a copy of the input: {error.strerror}. Set TMPDIR to a folder with room, or give "
            "a file instead of a pipe."
        ) from error


def _is_endless(path: Path) -> bool:
    """Return whether a file is a device such as ``/dev/zero`` or a terminal, unless standard input comes from it, or it
    is ``/dev/null``, which is empty.
    """
    with suppress(OSError):
        found = path.stat()
        if stat.S_ISCHR(found.st_mode) and not path.samefile(os.devnull):
            with suppress(OSError):  # standard input is closed
                return found.st_rdev != os.fstat(0).st_rdev
            return True
    return False


def _is_stream(path: Path) -> bool:
    """Return whether a path is a pipe, a device or a socket, which can be read only once."""
    with suppress(OSError):  # e.g. a name that is too long: the file's reader raises the error
        return path.is_fifo() or path.is_char_device() or path.is_socket()
    return False
