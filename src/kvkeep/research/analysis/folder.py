"""The folder of an analysis: ``run.json`` says of what, and every finished measurement has a file of its own.

A file is written beside its place and moved there, so it is whole or not there; whatever happens, finished measurements
are safe.
"""

from __future__ import annotations

import json
from typing import Any

from kvkeep.errors import InputError
from kvkeep.research.analysis.groups import MEASUREMENTS
from kvkeep.results import MANIFEST, Results, check_same, command
from kvkeep.runs import finite, read_object

PAGE = "index.html"
ALL = "analysis.json"
KIND = "kvkeep analyze"

_SAME = {
    "kind": "the command",
    "model": "the model",
    "weights": "the model's weights",
    "dtype": "the dtype",
    "text": "the text",
    "n_tokens": "the number of tokens",
    "seed": "the seed",
}
_NUMBERS = ("n_tokens", "n_layers", "n_heads", "n_kv_heads", "seed")
_TEXTS = ("model", "weights", "dtype", "device", "text_name", "text", "kvkeep", "torch", "transformers", "python")
_REMEDY = "Restore it, or choose another --output folder."


class Folder(Results):
    """Finished measurements, read from a folder and added to it.

    Args:
        path: the folder; need not exist yet.

    Raises:
        InputError: it is no folder.
    """

    names = (PAGE, ALL, *(f"{kind.name}.{end}" for kind in MEASUREMENTS for end in ("json", "png")))

    @property
    def safe(self) -> str:
        """What is written once is never touched again."""
        return "Finished measurements are safe."

    def check(self, manifest: dict[str, Any]) -> None:
        """Refuse a folder that holds another run.

        Args:
            manifest: what is to be run, as far as it is known.

        Raises:
            InputError: it does, or what it holds cannot be told.
        """
        found = read_object(self.path / MANIFEST, _REMEDY)
        if found is not None:
            check_same(self.path, found, {"kind": KIND, **manifest}, _SAME)
        else:
            self.check_new()

    def open(self, manifest: dict[str, Any]) -> None:
        """Say what the folder is of; it has to be `locked`.

        Raises:
            InputError: see `check`; or it cannot be written.
        """
        self.check(manifest)
        self.write(MANIFEST, {"kind": KIND, **manifest})

    def manifest(self) -> dict[str, Any]:
        """What was run.

        Raises:
            InputError: nothing was, or the file does not say what.
        """
        found = read_object(self.path / MANIFEST, _REMEDY)
        if found is None or found.get("kind") != KIND:
            make = command("kvkeep analyze --text FILE --output", self.path)
            raise InputError(f"{self.path} holds no analysis. Make one with {make}.")
        notes = found.get("notes")
        wrong = [name for name in _NUMBERS if type(found.get(name)) is not int]
        wrong += [name for name in _TEXTS if not isinstance(found.get(name), str)]
        wrong += ["notes"] * (not isinstance(notes, list) or not all(isinstance(note, str) for note in notes))
        if wrong:
            raise InputError(
                f"{self.path / MANIFEST} does not say what was run: {wrong[0]!r} is missing or damaged. {_REMEDY}"
            )
        return found

    def record(self, name: str, version: int) -> dict[str, Any] | None:
        """A finished measurement; ``None`` if there is none of this version.

        Raises:
            InputError: its file is damaged.
        """
        path = self.path / f"{name}.json"
        found = read_object(path, AGAIN)
        if found is None or found.get("version") != version:
            return None
        kind, part = (str, found["skipped"]) if "skipped" in found else (dict, found.get("result"))
        if not isinstance(part, kind):
            raise InputError(f"{path} holds neither a result nor why there is none. {AGAIN}")
        return found

    def write(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Write a JSON file at once, and return what was written: numbers that JSON cannot hold are null.

        Raises:
            InputError: it cannot be written; everything before is safe.
        """
        text = json.dumps(finite(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        self.write_bytes(name, text.encode())
        written: dict[str, Any] = json.loads(text)
        return written


AGAIN = "Remove it, and the same command measures it again."
"""What to do about the file of a measurement that cannot be used."""
