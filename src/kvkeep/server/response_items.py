"""The items of a response, a message and calls of tools, and the events while they are written."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Message:
    """A message while it is written."""

    place: int
    text: str = ""
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(16)}")

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before its first text."""
        yield _event("response.output_item.added", self.place, item={**self.shown("in_progress"), "content": []})
        yield self._part("response.content_part.added", part=_text(""))

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        """The events of some text."""
        self.text += text
        yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, status: str) -> Iterator[dict[str, Any]]:
        """The events after its last text."""
        yield self._part("response.output_text.done", text=self.text, logprobs=[])
        yield self._part("response.content_part.done", part=_text(self.text))
        yield _event("response.output_item.done", self.place, item=self.shown(status))

    def shown(self, status: str) -> dict[str, Any]:
        """The whole item."""
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_text(self.text)],
        }

    def _part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return _event(kind, self.place, item_id=self.id, content_index=0, **fields)


@dataclass
class Call:
    """A call of a tool while it is written."""

    place: int
    name: str
    call_id: str
    text: str = ""
    id: str = field(default_factory=lambda: f"fc_{secrets.token_hex(16)}")

    def begin(self) -> Iterator[dict[str, Any]]:
        """The event before its arguments."""
        yield _event("response.output_item.added", self.place, item=self.shown("in_progress"))

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        """The event of a part of its arguments."""
        self.text += text
        yield _event("response.function_call_arguments.delta", self.place, item_id=self.id, delta=text)

    def end(self, status: str) -> Iterator[dict[str, Any]]:
        """The events after its arguments."""
        fields = {"item_id": self.id, "name": self.name, "arguments": self.text}
        yield _event("response.function_call_arguments.done", self.place, **fields)
        yield _event("response.output_item.done", self.place, item=self.shown(status))

    def shown(self, status: str) -> dict[str, Any]:
        """The whole item."""
        about = {"id": self.id, "type": "function_call", "status": status}
        return {**about, "call_id": self.call_id, "name": self.name, "arguments": self.text}


def _event(kind: str, place: int, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "output_index": place, **fields}


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
