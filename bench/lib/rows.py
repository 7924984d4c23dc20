"""Files of rows that a script goes on with: a line of JSON for each, with all that its numbers depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def named(text: str) -> str:
    """A text's name among what a row depends on: the beginning of its checksum."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def saved(file: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a file that are about the same run. A line that was torn by a kill is passed over."""
    found = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.items() >= about.items():
            found.append(row)
    return found


def save(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a file, behind a line that was torn by a kill."""
    torn = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
    with file.open("a", encoding="utf-8") as lines:
        lines.write(("\n" if torn else "") + "".join(f"{json.dumps(row)}\n" for row in rows))
