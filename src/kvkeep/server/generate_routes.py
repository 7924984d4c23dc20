"""The routes that write text: chats and completions."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import Request, Response

from kvkeep.engine import Event, Result
from kvkeep.engine.async_stream import AsyncEvents
from kvkeep.engine.request import Logprob
from kvkeep.openai import responses
from kvkeep.openai.requests import CHAT, COMPLETIONS
from kvkeep.openai.responses import Show, calls_of, column_of, content_of, echoed, reason_of
from kvkeep.server.errors import RefusalError, in_words_of, unknown
from kvkeep.server.model import ServedModel
from kvkeep.server.request_parsing import ParsedRequest, job_of
from kvkeep.server.request_queue import RequestQueue, Run, in_thread
from kvkeep.server.schemas import ChatBody, CompletionBody, Generating, body_of
from kvkeep.server.settings import ServerSettings
from kvkeep.server.sse import After, EventStream, begun, followed, meter_of, reply, unless_gone, usage_of

# The pieces of a streamed chat or completion, made of the engine's events.


class Head:
    """The fields that all pieces of an answer share.

    Args:
        job: the body.
        model: the model's name.
    """

    def __init__(self, job: ParsedRequest, model: str) -> None:
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

    def __init__(self, job: ParsedRequest, name: str, index: int, show: Show | None) -> None:
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
    job: ParsedRequest, run: Run, *, model: str, show: Show, prompts: list[str], with_usage: bool
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


class GenerateRoutes:
    """Answers chats and completions.

    Args:
        served: the model.
        desk: runs requests.
        settings: of the server.

    Attributes:
        served: the model.
    """

    def __init__(self, served: ServedModel, desk: RequestQueue, settings: ServerSettings) -> None:
        self.served, self._desk, self._settings = served, desk, settings

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        return await self.answer(request, body, await self._job(CHAT, body))

    async def completion(self, request: Request) -> Response:
        """Continue texts."""
        body = await body_of(request, CompletionBody, self._settings)
        self.check_model(body.model)
        return await self.answer(request, body, await self._job(COMPLETIONS, body))

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model.

        Raises:
            RefusalError: the name is not that of the model that runs.
        """
        if name is not None and name != self._settings.name:
            raise unknown("model", name, f"This server runs {self._settings.name}; see /v1/models.")

    async def answer(
        self,
        request: Request,
        body: Generating,
        job: ParsedRequest,
        streams: list[AsyncEvents] | None = None,
        *,
        after: After | None = None,
    ) -> Response:
        """Run a body's requests, and answer at once or piece by piece.

        Args:
            request: the HTTP request.
            body: its body.
            job: the requests of the body.
            streams: the events of these requests; by default the engine's.
            after: is done when they have ended well.
        """
        streams = streams or [self.served.engine.astream(one) for one in job.requests]
        if not body.stream:
            with in_words_of(job.asked.form):
                results = await unless_gone(request, self._desk.results(streams, meter_of(request)))
            if after is not None:
                await after()
            return reply(self._whole(job, results))
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        if job.echo and job.wants_logprobs:
            raise RefusalError(400, "The parameter echo with logprobs is not streamed. Leave stream out.", param="echo")
        options: dict[str, Any] = {"show": self.served.show, "prompts": self._echoes(job), "with_usage": with_usage}
        chunks = pieces(job, self._desk.run(streams, meter_of(request)), model=self._settings.name, **options)
        with in_words_of(job.asked.form):
            ready = await unless_gone(request, begun(chunks))
        return self.stream(request, ready if after is None else followed(ready, after))

    def stream(self, request: Request, chunks: Any, **options: bool) -> EventStream:
        """The answer that sends chunks."""
        ping_s, write_s = self._settings.ping_s, self._settings.read_timeout_s
        return EventStream(request, chunks, ping_s=ping_s, write_s=write_s, **options)

    async def _job(self, url: str, body: Generating) -> ParsedRequest:
        found: ParsedRequest = await in_thread(lambda: job_of(url, body, self.served, self._settings))
        return found

    def _whole(self, job: ParsedRequest, results: list[Result]) -> dict[str, Any]:
        """The body of an answer."""
        if job.scores_only:
            results = [
                dataclasses.replace(one, token_ids=(), text="", logprobs=(), finish_reason="length") for one in results
            ]
        head, show = Head(job, self._settings.name), self.served.show
        found = responses.answer(
            job.asked, results, name=head.name, created=head.created, model=self._settings.name, show=show
        )
        if job.echo:
            texts, n, wanted = self._echoes(job), job.asked.n, show if job.wants_logprobs else None
            found["choices"] = [
                echoed(choice, texts[place], job.prompts[place // n], results[place], wanted)
                for place, choice in enumerate(found["choices"])
            ]
        return {**found, "usage": usage_of(results, job.asked.n)}

    def _echoes(self, job: ParsedRequest) -> list[str]:
        """The text of each request's prompt, if prompts are echoed."""
        if not job.echo:
            return []
        texts = [
            prompt if isinstance(prompt, str) else self.served.text_of(ids)
            for prompt, ids in zip(job.asked.prompts, job.prompts, strict=True)
        ]
        return [text for text in texts for _ in range(job.asked.n)]
