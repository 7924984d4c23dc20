"""The page: one HTML file with its style, its script and its data. It needs no network.

Whatever a text holds, it reaches the page as JSON in which ``<`` is written as an escape, and the script shows it as
text, never as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_ASSETS = Path(__file__).parent / "assets"
_STYLES = ("colours.css", "tokens.css", "page.css")
_SCRIPTS = ("tokens.js", "parts.js", "strip.js", "data.js", "columns.js", "panels.js", "answers.js", "page.js")
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


@cache
def asset(name: str) -> str:
    """The content of a file of the room's assets."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def page(data: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        data: the content of the JSON.
    """
    packed = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    for letter, escape in _UNSAFE.items():
        packed = packed.replace(letter, escape)
    parts = {
        "STYLE": "".join(map(asset, _STYLES)),
        "DATA": packed,
        "SCRIPT": "".join(map(asset, _SCRIPTS)),
    }
    before = asset("page.html")
    for name, content in parts.items():
        head, _, before = before.partition(f"<!-- {name} -->")
        parts[name] = head + content
    return "".join(parts.values()) + before
