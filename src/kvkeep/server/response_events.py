"""The objects and the events of ``/v1/responses``."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from typing import Any

from kvkeep.engine import Event, Result
from kvkeep.server.schema import ResponseBody
from kvkeep.server.usage import kept_of


class Answer:
    """An answer while it is written.

    Args:
        name: its id.
        body: what was asked for.
        model: the model's name.

    Attributes:
        stored: whether it can be continued later.
    """

    def __init__(self, name: str, body: ResponseBody, model: str) -> None:
        self.name, self.stored = name, body.store is not False
        self._body, self._model = body, model
        self._item = f"msg_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._numbers = itertools.count()

    def beginning(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""
        yield self._event("response.created", response=self._whole("in_progress", []))
        yield self._event("response.in_progress", response=self._whole("in_progress", []))
        item = {"id": self._item, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part("response.content_part.added", part=_part(""))

    def more(self, event: Event) -> Iterator[dict[str, Any]]:
        """The events of a token."""
        if event.text:
            yield self._part("response.output_text.delta", delta=event.text, logprobs=[])

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """The events after the last token."""
        yield self._part("response.output_text.done", text=result.text, logprobs=[])
        yield self._part("response.content_part.done", part=_part(result.text))
        yield self._event("response.output_item.done", output_index=0, item=self._message(result))
        kind = "response.completed" if result.finish_reason == "stop" else "response.incomplete"
        yield self._event(kind, response=self.body(result))

    def body(self, result: Result) -> dict[str, Any]:
        """The whole answer."""
        new = len(result.token_ids)
        usage = {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": result.prompt_tokens + new,
            "kvkeep": kept_of([result]),
        }
        return {**self._whole(_status(result), [self._message(result)]), "usage": usage}

    def _message(self, result: Result) -> dict[str, Any]:
        inner = {"status": _status(result), "role": "assistant", "content": [_part(result.text)]}
        return {"id": self._item, "type": "message", **inner}

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
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "store": self.stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None,
            "user": body.user,
        }

    def _part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}


def _status(result: Result) -> str:
    return "completed" if result.finish_reason == "stop" else "incomplete"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
