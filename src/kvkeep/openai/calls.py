"""Calls of tools in an answer: read from its text, piece by piece, and written as OpenAI's API does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from kvkeep.openai.tool_forms import ToolUse


class Calls:
    """Reads an answer as content and calls, in pieces of text that need not end with either.

    What looks like a call and is none, such as one of an unknown name or one that ends within its name, is content.

    Args:
        name: makes the ids of the calls.
        use: the form of the calls.
        names: functions that can be called.
        anywhere: whether a text may come before the first call; otherwise an answer is a text or calls.

    Attributes:
        count: calls that have begun.
    """

    def __init__(self, name: str, use: ToolUse, names: Collection[str], *, anywhere: bool) -> None:
        form = use.form
        self._name, self._anywhere = name, anywhere
        heads = {one: f"{one}{form.middle}{{" for one in names}
        marks = [form.mark] if use.token is None else []
        bare = [""] if use.token is not None or not form.needs_mark else []
        self._later = {f"{mark}{begin}{heads[one]}": one for mark in marks for begin in form.opens for one in names}
        first = {f"{mark}{begin}{heads[one]}": one for mark in bare for begin in form.opens for one in names}
        self._first = {**self._later, **first}
        self._next = {} if form.next is None else {f"{form.close}{form.next}{heads[one]}": one for one in names}
        self._starts = {header[0] for header in self._later}
        self._state: Literal["content", "arguments", "after"] = "content"
        self._held, self._begun = "", False
        self._object = _Object()
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
        """The deltas of what was held back, when the text has ended."""
        held, self._held = self._held, ""
        if self._state == "content" and held:
            yield {"content": held}

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
        held, at = self._held, len(self._held)
        header = None
        for place in self._places():
            known = self._later if self._begun or place else self._first
            header = _begins(held, place, known)
            if header is not None:
                at = place
                break
        before, self._held = held[:at], held[at:]
        if before:
            self._begun = True
            yield {"content": before}
        if header:
            yield self._call(header, self._first[header])

    def _places(self) -> list[int]:
        """The places at which a call may begin."""
        first = [] if self._begun or not self._held else [0]
        if not self._anywhere:
            return first
        return sorted({*first, *(place for place, one in enumerate(self._held) if one in self._starts)})

    def _arguments(self) -> Iterator[dict[str, Any]]:
        size = self._object.take(self._held)
        piece, self._held = self._held[:size], self._held[size:]
        if self._object.ended:
            self._state = "after"
        if piece:
            yield {"tool_calls": [{"index": self.count - 1, "function": {"arguments": piece}}]}

    def _after(self) -> Iterator[dict[str, Any]]:
        if header := _begins(self._held, 0, self._next):
            yield self._call(header, self._next[header])

    def _call(self, header: str, name: str) -> dict[str, Any]:
        """The delta that begins a call. Its arguments begin with the last character of the header."""
        self._held, self._state, self._object = self._held[len(header) - 1 :], "arguments", _Object()
        about = {"index": self.count, "id": f"call_{self._name}_{self.count}", "type": "function"}
        self.count += 1
        return {"tool_calls": [{**about, "function": {"name": name, "arguments": ""}}]}


class _Object:
    """Finds the end of a JSON object in pieces of text.

    Attributes:
        ended: whether the end has been found.
    """

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.ended = False

    def take(self, text: str) -> int:
        """The number of the next characters that belong to the object."""
        for place, one in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or one != '"'
                self._escaped = one == "\\" and not self._escaped
                continue
            self._quoted = one == '"'
            self._depth += (one in "{[") - (one in "}]")
            if not self._depth:
                self.ended = True
                return place + 1
        return len(text)


def _begins(text: str, place: int, headers: Mapping[str, str]) -> str | None:
    """The header that stands at a place of a text; ``""`` if the text ends before it is clear; ``None`` without one."""
    rest = text[place:]
    unclear = False
    for header in headers:
        if rest.startswith(header):
            return header
        unclear = unclear or header.startswith(rest)
    return "" if unclear else None
