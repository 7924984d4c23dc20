"""API keys from a file and from the environment."""

from __future__ import annotations

import os

from kvkeep.cli.files import refuse_device
from kvkeep.errors import InputError
from kvkeep.result_files import in_full
from kvkeep.server.settings import Keys, owner_of

VARIABLE = "KVKEEP_API_KEY"
_SHORTEST = 8


def read_keys(file: str | None) -> Keys:
    """The keys of a file, one per line as KEY or NAME KEY, and the one of the environment.

    Raises:
        InputError: the file cannot be read, has no key, or a line is neither.
    """
    found: dict[str, str] = {}
    if (key := os.environ.get(VARIABLE)) is not None:
        if not key.strip():
            raise InputError(f"{VARIABLE} is empty. Unset it, or give a key of {_SHORTEST} characters or more.")
        found[_checked(key.strip(), VARIABLE)] = owner_of(key.strip())
    if file is None:
        return Keys(found)
    refuse_device(file, "file of keys")
    try:
        lines = in_full(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"--key-file {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--key-file {file} is not UTF-8 text.") from error
    before = len(found)
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise InputError(f"--key-file {file}, line {number}: write KEY, or NAME KEY.")
        key = _checked(words[-1], f"--key-file {file}, line {number}")
        found[key] = words[0] if len(words) == 2 else owner_of(key)
    if len(found) == before:
        raise InputError(f"--key-file {file} has no key. Write one per line, or leave the option out.")
    return Keys(found)


def _checked(key: str, where: str) -> str:
    if len(key) < _SHORTEST or not key.isascii() or not key.isprintable():
        raise InputError(f"{where}: a key has {_SHORTEST} or more ASCII characters.")
    return key
