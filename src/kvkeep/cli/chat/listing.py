"""The list of saved conversations, from the headers of their files. Importing this module imports torch."""

from __future__ import annotations

import time
from typing import Any

from kvkeep.cli import console
from kvkeep.cli.chat.sessions import Folder
from kvkeep.cli.memory import turns_of
from kvkeep.snapshot.file_format import described_layers, fingerprint_of, opened, read_header


def show(folder: Folder, *, as_json: bool) -> None:
    """Print all saved conversations."""
    found = [_describe(folder, name) for name in folder.names()]
    if as_json:
        console.write_json({"folder": str(folder.path), "conversations": found})
        return
    if not found:
        console.note(f"no conversations are saved in {folder.path}")
        return
    table = console.table("name", "model", "turns", "tokens", "size", "last used")
    for one in found:
        if "error" in one:
            table.add_row(console.visible(one["name"]), f"cannot be read: {one['error']}")
            continue
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["last_used"]))
        turns = "–" if one["turns"] is None else str(one["turns"])
        cells = (one["model"], turns, str(one["tokens"]), console.show_bytes(one["bytes"]), used)
        table.add_row(console.visible(one["name"]), *map(console.visible, cells))
    console.out().print(table)


def _describe(folder: Folder, name: str) -> dict[str, Any]:
    path = folder.file_of(name)
    try:
        with opened(path) as (file, size):
            about = read_header(file, size).about
            made, tokens = fingerprint_of(about), described_layers(about)[0].numbers["seen"]
    except (OSError, ValueError) as error:
        return {"name": name, "error": (error.strerror if isinstance(error, OSError) else None) or str(error)}
    return {
        "name": name,
        "model": made.model,
        "policy": made.policy,
        "budget": made.budget,
        "turns": turns_of(note if isinstance(note := about.get("note"), dict) else {}),
        "tokens": tokens,
        "bytes": size,
        "last_used": path.stat().st_mtime,
    }
