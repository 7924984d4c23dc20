"""The list of saved conversations, from the headers of their files: the work of ``kvkeep chat --list``.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import time
from typing import Any

from kvkeep.cli import console
from kvkeep.cli.chat import ChatOptions
from kvkeep.cli.chat_folder import ChatFolder
from kvkeep.cli.memory import turns_of
from kvkeep.snapshot.file_format import described_layers, fingerprint_of, opened, read_header


def show(request: ChatOptions) -> None:
    """Print a table of all saved conversations, or one JSON object with ``--json``."""
    folder = ChatFolder.of(request.sessions)
    conversations = [_describe(folder, name) for name in folder.names()]
    if request.json:
        console.write_json({"folder": str(folder.path), "conversations": conversations})
        return
    if not conversations:
        console.note(f"no conversations are saved in {folder.path}")
        return
    table = console.table("name", "model", "turns", "tokens", "size", "last used")
    for conversation in conversations:
        name = console.visible(conversation["name"])
        if "error" in conversation:
            table.add_row(name, f"cannot be read: {conversation['error']}")
            continue
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(conversation["last_used"]))
        turns = "–" if conversation["turns"] is None else str(conversation["turns"])
        cells = (
            conversation["model"],
            turns,
            str(conversation["tokens"]),
            console.show_bytes(conversation["bytes"]),
            used,
        )
        table.add_row(name, *map(console.visible, cells))
    console.out().print(table)


def _describe(folder: ChatFolder, name: str) -> dict[str, Any]:
    """Return what the list shows of a saved conversation, from its file's header alone.

    If that cannot be read, return the name and the reason, as ``error``.
    """
    path = folder.file_of(name)
    try:
        with opened(path) as (file, size):
            used = os.fstat(file.fileno()).st_mtime  # not by its path: another process may remove it meanwhile
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
        "last_used": used,
    }
