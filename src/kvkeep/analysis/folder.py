"""The folder of an analysis: ``run.json`` says of what, and every finished measurement has a file of its own.

A file is written beside its place and moved there, so it is whole or not there; whatever happens, finished measurements
are safe.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from kvkeep.errors import InputError

MANIFEST = "run.json"
KIND = "kvkeep analyze"

_SAME = {
    "model": "the model",
    "weights": "the model's weights",
    "dtype": "the dtype",
    "text": "the text",
    "n_tokens": "the number of tokens",
    "seed": "the seed",
}


class Folder:
    """Finished measurements, read from a folder and added to it.

    Args:
        path: the folder; need not exist yet.

    Attributes:
        path: the same.

    Raises:
        InputError: it is no folder.
    """

    def __init__(self, path: Path):
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; --output needs a folder.")
        self.path = path

    def check(self, manifest: dict[str, Any]) -> None:
        """Refuse a folder that holds another run.

        Args:
            manifest: what is to be run, as far as it is known.

        Raises:
            InputError: it does, or what it holds cannot be told.
        """
        found = _read(self.path / MANIFEST)
        if found is None:
            if results := sorted(self.path.glob("*.json*")):
                raise InputError(
                    f"{self.path} has {results[0].name} but no {MANIFEST}, so it is unknown what was run there. Choose "
                    "another --output folder."
                )
            return
        if found.get("kind") != KIND:
            _foreign(self.path, "the command", found.get("kind", "another"), KIND)
        for key, name in _SAME.items():
            if key in manifest and found.get(key) != manifest[key]:
                _foreign(self.path, name, found.get(key), manifest[key])

    def open(self, manifest: dict[str, Any]) -> None:
        """Make the folder, and say what it is of.

        Raises:
            InputError: see `check`; or it cannot be written.
        """
        self.check(manifest)
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
        self.write(MANIFEST, {"kind": KIND, **manifest})

    def manifest(self) -> dict[str, Any]:
        """What was run.

        Raises:
            InputError: nothing was.
        """
        found = _read(self.path / MANIFEST)
        if found is None or found.get("kind") != KIND:
            raise InputError(f"{self.path} holds no analysis. Make one with kvkeep analyze --output {self.path}.")
        return found

    def record(self, name: str, version: int) -> dict[str, Any] | None:
        """A finished measurement; ``None`` if there is none of this version."""
        found = _read(self.path / f"{name}.json")
        return found if found is not None and found.get("version") == version else None

    def write(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Write a JSON file at once, and return what was written: numbers that JSON cannot hold are null.

        Raises:
            InputError: it cannot be written; everything before is safe.
        """
        text = json.dumps(_finite(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        self.write_bytes(name, text.encode())
        written: dict[str, Any] = json.loads(text)
        return written

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Write a file at once, and return its path.

        Raises:
            InputError: it cannot be written.
        """
        path, beside = self.path / name, self.path / f".{name}.new"
        with self._writing():
            try:
                with beside.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
            except OSError:
                with suppress(OSError):  # a full disk needs the room
                    beside.unlink()
                raise
        return path

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"Results cannot be written to {self.path}: {error.strerror}. Finished measurements are safe. Make "
                "room or choose another folder, and run the same command again: it goes on from there."
            ) from error


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; ``None`` if there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Remove it, or choose another --output folder.") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object. Remove it, or choose another --output folder.")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _foreign(path: Path, what: str, then: object, now: object) -> NoReturn:
    raise InputError(
        f"{path} holds another run: {what} was {then} and is {now} now. Choose another --output folder, or the same "
        "settings to go on."
    )
