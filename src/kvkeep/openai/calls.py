"""Calls of tools in an answer: read from its text, piece by piece, and written as OpenAI's API does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from kvkeep.openai.tool_text import CLOSE, NAME, OPEN

_HEADER = re.compile(rf'\n\{{"name": "({NAME})", "arguments": ', re.ASCII)
_END = "}" + CLOSE
_NEXT = "\n" + OPEN


class Calls:
    """Reads an answer as content and calls, in pieces of text that need not end with either.

    Args:
        name: makes the ids of the calls.
        anywhere: whether a text may come before the first call; otherwise an answer is a text or calls.

    Attributes:
        count: calls that have begun.
    """

    def __init__(self, name: str, *, anywhere: bool) -> None:
        self._name, self._anywhere = name, anywhere
        self._state: Literal["content", "header", "arguments", "after"] = "content"
        self._held, self._text, self._begun = "", "", False
        self.count = 0

    def add(self, text: str) -> Iterator[dict[str, Any]]:
        """The deltas of a piece of text."""
        self._held += text
        moved = True
        while moved:
            before = self._state
            yield from getattr(self, f"_{before}")()
            moved = self._state != before

    def end(self) -> Iterator[dict[str, Any]]:
        """The deltas of what was held back, when the text has ended. Half of a call's name is dropped."""
        held, self._held = self._held, ""
        if self._state == "content" and held:
            yield {"content": held}
        elif self._state == "arguments" and held and not _is_json(self._text):
            yield self._argument(held)

    def whole(self, text: str) -> dict[str, Any]:
        """The content and the calls of a whole answer."""
        content, found = "", list[dict[str, Any]]()
        for delta in (*self.add(text), *self.end()):
            content += delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    found.append({name: part[name] for name in ("id", "type", "function")})
                else:
                    found[-1]["function"]["arguments"] += part["function"]["arguments"]
        return {"content": content or None, "tool_calls": found} if found else {"content": content}

    def _content(self) -> Iterator[dict[str, Any]]:
        before, found, after = self._held.partition(OPEN)
        is_call = found and (self._anywhere or not (self._begun or before))
        if is_call:
            self._state, self._held = "header", after
        elif self._anywhere or OPEN.startswith(self._held):
            before, self._held = _apart(self._held, OPEN)
        else:
            before, self._held = self._held, ""
        if before:
            self._begun = True
            yield {"content": before}

    def _header(self) -> Iterator[dict[str, Any]]:
        found = _HEADER.match(self._held)
        if found is None:
            return
        self._held, self._state, self._text = self._held[found.end() :], "arguments", ""
        function = {"name": found[1], "arguments": ""}
        about = {"index": self.count, "id": f"call_{self._name}_{self.count}", "type": "function"}
        self.count += 1
        yield {"tool_calls": [{**about, "function": function}]}

    def _arguments(self) -> Iterator[dict[str, Any]]:
        piece, found, after = self._held.partition(_END)
        if found:
            self._held, self._state = after, "after"
        else:
            piece, self._held = _apart(self._held, _END)
        if piece:
            self._text += piece
            yield self._argument(piece)

    def _after(self) -> Iterator[dict[str, Any]]:
        if self._held.startswith(_NEXT):
            self._held, self._state = self._held.removeprefix(_NEXT), "header"
        yield from ()

    def _argument(self, piece: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.count - 1, "function": {"arguments": piece}}]}


def _apart(text: str, mark: str) -> tuple[str, str]:
    """A text in two parts, of which the second one may be the beginning of a mark."""
    longest = min(len(text), len(mark) - 1)
    size = next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
    return text[: len(text) - size], text[len(text) - size :]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
