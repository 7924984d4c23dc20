"""The objects and the events of ``/v1/responses``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from kvkeep.engine import Event, Result
from kvkeep.openai.tools import Calls
from kvkeep.server.response_items import Call, Message
from kvkeep.server.schema import ResponseBody
from kvkeep.server.usage import kept_of


class Answer:
    """An answer while it is written.

    Args:
        name: its id.
        body: what was asked for.
        model: the model's name.
        calls: reads calls of tools from the text; ``None``: there are none.

    Attributes:
        stored: whether it can be continued later.
    """

    def __init__(self, name: str, body: ResponseBody, model: str, calls: Calls | None) -> None:
        self.name, self.stored = name, body.store is not False
        self._body, self._model, self._calls = body, model, calls
        self._items: list[Message | Call] = []
        self._created = int(time.time())
        self._numbers = itertools.count()

    def beginning(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._whole("in_progress", [])})

    def more(self, event: Event) -> Iterator[dict[str, Any]]:
        """The events of a token."""
        for delta in self._deltas(event):
            if "content" in delta:
                yield from self._text(delta["content"])
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    yield from self._begun(Call(len(self._items), part["function"]["name"], part["id"]))
                else:
                    yield from map(self._numbered, self._items[-1].more(part["function"]["arguments"]))
        if event.result is not None and not self._items:
            yield from self._begun(Message(0))

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        """What an event adds to content and calls."""
        if self._calls is None:
            return [{"content": event.text}] if event.text else []
        return [*self._calls.add(event.text), *(self._calls.end() if event.result is not None else ())]

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._items:
            yield from self._begun(Message(0))
        yield from map(self._numbered, self._items[-1].more(text))

    def _begun(self, item: Message | Call) -> Iterator[dict[str, Any]]:
        """The events between two items. An item is complete when another one begins."""
        if self._items:
            yield from map(self._numbered, self._items[-1].end("completed"))
        self._items.append(item)
        yield from map(self._numbered, item.begin())

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """The events after the last token."""
        yield from map(self._numbered, self._items[-1].end(_status(result)))
        kind = "response.completed" if result.finish_reason == "stop" else "response.incomplete"
        yield self._numbered({"type": kind, "response": self.body(result)})

    def body(self, result: Result) -> dict[str, Any]:
        """The whole answer, when all events of tokens have been made."""
        new = len(result.token_ids)
        usage = {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": result.prompt_tokens + new,
            "kvkeep": kept_of([result]),
        }
        *before, last = self._items
        items = [*(one.shown("completed") for one in before), last.shown(_status(result))]
        return {**self._whole(_status(result), items), "usage": usage}

    def _whole(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self.stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None,
            "user": body.user,
        }

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        return {"type": event["type"], "sequence_number": next(self._numbers), **event}


def _status(result: Result) -> str:
    return "completed" if result.finish_reason == "stop" else "incomplete"
