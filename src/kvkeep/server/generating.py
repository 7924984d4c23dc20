"""The routes that write text: chats and completions."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import Request, Response

from kvkeep.engine import Result
from kvkeep.engine.async_stream import AsyncEvents
from kvkeep.openai import responses
from kvkeep.openai.requests import CHAT, COMPLETIONS
from kvkeep.openai.responses import echoed
from kvkeep.server.asking import Job, job_of
from kvkeep.server.bodies import body_of
from kvkeep.server.chunks import Head, pieces
from kvkeep.server.desk import Desk, in_thread
from kvkeep.server.errors import RefusalError, in_words_of, unknown
from kvkeep.server.replies import meter_of, reply, unless_gone
from kvkeep.server.schema import ChatBody, CompletionBody, Generating
from kvkeep.server.served import Served
from kvkeep.server.settings import Settings
from kvkeep.server.streaming import After, EventStream, begun, followed
from kvkeep.server.usage import usage_of


class Generator:
    """Answers chats and completions.

    Args:
        served: the model.
        desk: runs requests.
        settings: of the server.

    Attributes:
        served: the model.
    """

    def __init__(self, served: Served, desk: Desk, settings: Settings) -> None:
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
        job: Job,
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

    async def _job(self, url: str, body: Generating) -> Job:
        found: Job = await in_thread(lambda: job_of(url, body, self.served, self._settings))
        return found

    def _whole(self, job: Job, results: list[Result]) -> dict[str, Any]:
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

    def _echoes(self, job: Job) -> list[str]:
        """The text of each request's prompt, if prompts are echoed."""
        if not job.echo:
            return []
        texts = [
            prompt if isinstance(prompt, str) else self.served.text_of(ids)
            for prompt, ids in zip(job.asked.prompts, job.prompts, strict=True)
        ]
        return [text for text in texts for _ in range(job.asked.n)]
