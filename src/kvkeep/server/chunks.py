"""The pieces of a streamed chat or completion, made of the engine's events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from kvkeep.engine import Event, Result
from kvkeep.engine.request import Logprob
from kvkeep.openai.responses import Show, calls_of, column_of, content_of, reason_of
from kvkeep.server.asking import Job
from kvkeep.server.desk import Run
from kvkeep.server.usage import usage_of


class Head:
    """The fields that all pieces of an answer share.

    Args:
        job: the body.
        model: the model's name.
    """

    def __init__(self, job: Job, model: str) -> None:
        self.name = secrets.token_hex(12)
        self.created, self.model = int(time.time()), model
        self._chat = job.is_chat

    def piece(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        """A piece with these choices."""
        return {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{self.name}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class _Choice:
    """One text of a streamed answer.

    Args:
        job: the body.
        name: the answer's.
        index: its place.
        show: returns the text of a token; ``None`` if no log-probabilities are asked for.
    """

    def __init__(self, job: Job, name: str, index: int, show: Show | None) -> None:
        self._chat, self._index, self._show = job.is_chat, index, show
        self._calls = calls_of(job.asked, name, index)
        self._before: int | None = None
        self._offset = 0
        self._pending: list[dict[str, Any]] = []

    def first(self, text: str = "") -> dict[str, Any]:
        """The piece that names the role, or the prompt that is echoed."""
        self._offset = len(text)
        return self._piece({"role": "assistant", "content": ""} if self._chat else text)

    def next(self, event: Event) -> list[dict[str, Any]]:
        """The pieces of an event, if it has some to send."""
        if self._show is not None and event.logprob is not None:
            self._pending.append(self._entry(event.logprob, self._show))
        deltas, reason = self._deltas(event), None
        if event.result is not None:
            reason = reason_of(event.result, self._calls)
            deltas = deltas or [{} if self._chat else ""]
        if not deltas:
            return []
        found, self._pending = self._pending, []
        *first, last = deltas
        return [*(self._piece(one) for one in first), self._piece(last, reason, found)]

    def _deltas(self, event: Event) -> list[Any]:
        """What an event adds to the text, or to content and calls."""
        if self._calls is None:
            return [{"content": event.text} if self._chat else event.text] if event.text else []
        ended = () if event.result is None else self._calls.end()
        return [*self._calls.add(event.text), *ended]

    def _entry(self, logprob: Logprob, show: Show) -> dict[str, Any]:
        before, self._before = self._before, logprob.token_id
        if self._chat:
            return content_of(before, logprob, show)
        found = column_of(before, logprob, show, self._offset)
        self._offset += len(found["tokens"][0])
        return found

    def _piece(
        self, delta: Mapping[str, Any] | str, reason: str | None = None, found: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if found and self._chat:
            logprobs = {"content": found, "refusal": None}
        elif found:
            logprobs = {name: [part for one in found for part in one[name]] for name in found[0]}
        inner = {"delta": delta} if self._chat else {"text": delta}
        return {"index": self._index, **inner, "logprobs": logprobs, "finish_reason": reason}


async def pieces(
    job: Job, run: Run, *, model: str, show: Show, prompts: list[str], with_usage: bool
) -> AsyncGenerator[Mapping[str, Any], None]:
    """The pieces of an answer; the first one is empty and says that the request has a row.

    Args:
        job: the body.
        run: the events of its requests.
        model: the model's name.
        show: returns the text of a token.
        prompts: texts that are echoed, one for each request; or none.
        with_usage: whether the last piece has the numbers of tokens.
    """
    head = Head(job, model)
    more: dict[str, Any] = {"usage": None} if with_usage else {}
    made = [_Choice(job, head.name, place, show if job.wants_logprobs else None) for place in range(len(job.requests))]
    results: dict[int, Result] = {}
    try:
        async for found in run:
            if found is None:
                yield {}
                for place, choice in enumerate(made):
                    if prompts or job.is_chat:
                        yield head.piece([choice.first(*prompts[place : place + 1])], **more)
                continue
            place, event = found
            if event.result is not None:
                results[place] = event.result
            for piece in made[place].next(event):
                yield head.piece([piece], **more)
    finally:
        await run.aclose()
    if with_usage:
        yield head.piece([], usage=usage_of([results[place] for place in sorted(results)], job.asked.n))
