"""The routes that write text: chats and completions.

A request's way is: its body becomes a `ParsedRequest`, that has a `Request` of the engine for each text, the engine
makes a `Sequence` of each and tells of an `Event` for each token, and a streamed answer has a chunk for each event.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.dispatcher import AsyncEvents
from kvkeep.engine.request import Event, Result
from kvkeep.openai import logprobs, responses
from kvkeep.openai.logprobs import Scored, ScoredTokens
from kvkeep.openai.requests import CHAT, COMPLETIONS
from kvkeep.openai.responses import calls_of, echoed, reason_of
from kvkeep.server.errors import RefusalError, in_words_of
from kvkeep.server.model import ServedModel
from kvkeep.server.request_parsing import ParsedRequest, parse_request, parse_turn
from kvkeep.server.request_queue import RequestQueue, Run, in_thread
from kvkeep.server.schemas import ChatBody, CompletionBody, Generating, StreamOptions, body_of, note_ignored
from kvkeep.server.session_registry import SessionRegistry
from kvkeep.server.settings import ServerSettings
from kvkeep.server.sse import After, EventStream, begun, followed, meter_of, owner_of, reply, unless_gone, usage_of

READ_ANEW = "x-kvkeep-read-anew"
"""The header that says why a conversation of which messages were left out was read anew."""

# Events of the engine as the chunks of a streamed chat or completion.


class AnswerHead:
    """The fields that all chunks of an answer share.

    Args:
        parsed: the request that is answered.
        model: the model's name.
    """

    def __init__(self, parsed: ParsedRequest, model: str) -> None:
        self.name = secrets.token_hex(12)
        self.created, self.model = int(time.time()), model
        self._chat = parsed.is_chat

    def chunk(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        """Return a chunk of the streamed answer with these choices, in OpenAI's form; ``more`` are further fields."""
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
        parsed: the request that is answered.
        name: the answer's.
        index: the text's, among those of the answer.
        texts: decodes tokens; ``None`` if no log-probabilities are asked for.
    """

    def __init__(self, parsed: ParsedRequest, name: str, index: int, texts: TokenTexts | None) -> None:
        self._chat, self._index, self._texts = parsed.is_chat, index, texts
        self._calls = calls_of(parsed.parameters, name, index)
        self._scored = None if texts is None else ScoredTokens(texts, special=parsed.parameters.shows_special)
        self._length = 0

    def first(self, text: str = "") -> dict[str, Any]:
        """Return the choice for this text's first chunk: in a chat the role with an empty text, in a completion the
        echoed prompt ``text``.
        """
        return self._choice({"role": "assistant", "content": ""} if self._chat else text)

    def next(self, event: Event) -> list[dict[str, Any]]:
        """Return the choices that an event of this text's request adds, each for a chunk of its own.

        There is none if the event completes no text. The last event always has one, with the finish reason. The last
        choice has the log-probabilities of all tokens that are complete now.
        """
        self._length += len(event.text)
        # the end token is no part of the text
        if self._scored and event.logprob and not (event.result and event.result.end_token):
            self._scored.add(event.logprob)
        deltas, reason = self._deltas(event), None
        if event.result is not None:
            reason = reason_of(event.result, self._calls)
            deltas = deltas or [{} if self._chat else ""]  # the finish reason needs a choice
        if not deltas:
            return []  # half of a character, or of a tool's call: its log-probabilities go with the rest
        *first, last = deltas
        return [*(self._choice(delta) for delta in first), self._choice(last, reason, self._ready(event))]

    def _deltas(self, event: Event) -> list[Any]:
        """Return what an event adds to this text: in a chat deltas with content or tool calls, in a completion texts;
        nothing if no text is complete.
        """
        if self._calls is None:
            return [{"content": event.text} if self._chat else event.text] if event.text else []
        ended = () if event.result is None else self._calls.end()
        return [*self._calls.add(event.text), *ended]

    def _ready(self, event: Event) -> list[Scored]:
        """Return the tokens, with their log-probabilities, that begin in the text so far and were not returned yet;
        with the last event all that are left. Nothing is returned if no log-probabilities are asked for.
        """
        if self._scored is None:
            return []
        return self._scored.within(self._length) if event.result is None else self._scored.rest(event.result)

    def _choice(
        self, delta: Mapping[str, Any] | str, reason: str | None = None, tokens: Sequence[Scored] = ()
    ) -> dict[str, Any]:
        """Return one entry of ``choices`` of a streamed chat or completion.

        Args:
            delta: what it adds: a chat's delta, or a completion's text.
            reason: the finish reason; ``None`` before the end.
            tokens: the tokens whose log-probabilities it has.
        """
        scores: dict[str, Any] | None = None
        if tokens and self._texts:
            content, columns = logprobs.content, logprobs.columns
            scores = (
                {"content": content(tokens, self._texts), "refusal": None}  # OpenAI's schema requires the key
                if self._chat
                else columns(tokens, self._texts)
            )
        inner = {"delta": delta} if self._chat else {"text": delta}
        return {"index": self._index, **inner, "logprobs": scores, "finish_reason": reason}


class _UsageSoFar:
    """The numbers of tokens of an answer while it is written.

    Args:
        parsed: the request that is answered. The prompt of a session's turn is not known before its first event.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        # keys below 0, as those of turns are the numbers of their requests
        self._prompts = {-place: len(ids) for place, ids in enumerate(parsed.prompts, 1)}
        self._is_turn, self._new = not parsed.prompts, 0

    def take(self, event: Event) -> None:
        """Count the new token of an event, if it has one, and, in a session's turn, the length of its prompt."""
        self._new += event.token_id is not None
        if self._is_turn and event.prompt_tokens:
            self._prompts[event.id] = event.prompt_tokens

    @property
    def shown(self) -> dict[str, int] | None:
        """Return the tokens of prompts, the new ones so far, and their sum, by OpenAI's names; ``None`` before the
        prompt of a session's turn is known.
        """
        prompt = sum(self._prompts.values())
        new = {"completion_tokens": self._new, "total_tokens": prompt + self._new}
        return {"prompt_tokens": prompt, **new} if self._prompts else None


async def answer_chunks(
    parsed: ParsedRequest, run: Run, *, model: str, served: ServedModel, prompts: list[str], options: StreamOptions
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Run the requests of an answer, and yield the chunks of its stream.

    The first chunk is empty, and is no part of the stream: it tells `begun` that the first request has a row.

    Args:
        parsed: the request that is answered.
        run: the events of its requests to the engine.
        model: the model's name.
        served: decodes tokens.
        prompts: texts that are echoed, one for each request; empty: no echo.
        options: say whether a last chunk, and each one before it, has the numbers of tokens.

    Raises:
        RefusalError: see `RequestQueue.run`.
    """
    head = AnswerHead(parsed, model)
    usage = _UsageSoFar(parsed) if options.continuous_usage_stats else None
    wanted = served.token_texts if parsed.wants_logprobs else None
    choices = [_Choice(parsed, head.name, index, wanted) for index in range(len(parsed.requests))]
    results: dict[int, Result] = {}

    def more() -> dict[str, Any]:
        return {"usage": usage and usage.shown} if options.include_usage else {}

    try:
        with in_words_of(parsed.parameters.form):
            async for item in run:
                if item is None:
                    yield {}  # `begun` takes it: the request was not refused
                    for index, choice in enumerate(choices):
                        if prompts or parsed.is_chat:
                            # its own prompt, or no argument without an echo
                            yield head.chunk([choice.first(*prompts[index : index + 1])], **more())
                    continue
                index, event = item
                if event.result is not None:
                    results[index] = event.result
                if usage is not None:
                    usage.take(event)
                for written in choices[index].next(event):
                    yield head.chunk([written], **more())
    finally:
        await run.aclose()
    ordered = [results[index] for index in sorted(results)]
    last = {"usage": usage_of(ordered, parsed.parameters.n)} if options.include_usage else {}
    if last := {**await _memories(parsed, ordered, served), **last}:
        yield head.chunk([], **last)


async def _memories(parsed: ParsedRequest, results: Sequence[Result], served: ServedModel) -> dict[str, Any]:
    """Return the field ``memory`` of an answer: for each result, in order, what its memory held at its end (see
    `ServedModel.shown`), or ``None`` if it ended without a row. Return an empty dictionary unless the body asks for it.
    """
    if not parsed.requests[0].return_memory:  # all requests of a body have the same options
        return {}
    held = [(result.memory, result.budget) for result in results]
    return {"memory": await in_thread(lambda: [memory and served.shown(memory, budget) for memory, budget in held])}


class GenerateRoutes:
    """Answers chats and completions.

    Args:
        served: the model.
        queue: runs requests.
        sessions: the conversations that chats may continue.
        settings: of the server.
    """

    def __init__(
        self, served: ServedModel, queue: RequestQueue, sessions: SessionRegistry, settings: ServerSettings
    ) -> None:
        self._served, self._queue, self._sessions, self._settings = served, queue, sessions, settings

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, or the next turn of a session if the body names one."""
        body = await body_of(request, ChatBody, self._settings)
        self._settings.adapter_of(body.model)  # refuses a model that does not run, before anything else is looked at
        if (name := body.session_id) is None:
            owner = owner_of(request)
            parsed = await in_thread(lambda: parse_request(CHAT, body, self._served, self._settings, owner))
            note_ignored(request, parsed.parameters.unread(self._served.reads))
            return await self._answer(request, body, parsed)
        sessions, owner, until = self._sessions, owner_of(request), request.state.ended
        entry = await in_thread(lambda: sessions.find(owner, name, until))
        parsed = await in_thread(lambda: parse_turn(body, self._served, self._settings, session=entry.session))
        note_ignored(request, parsed.parameters.unread(self._served.reads))
        streams = [entry.session.asend(parsed.requests[0])]  # a turn has one request
        return await self._answer(request, body, parsed, streams, after=lambda: in_thread(lambda: sessions.ran(entry)))

    async def completion(self, request: Request) -> Response:
        """Answer a request to continue texts."""
        body = await body_of(request, CompletionBody, self._settings)
        parsed = await in_thread(lambda: parse_request(COMPLETIONS, body, self._served, self._settings))
        return await self._answer(request, body, parsed)

    async def _answer(
        self,
        request: Request,
        body: Generating,
        parsed: ParsedRequest,
        streams: list[AsyncEvents] | None = None,
        *,
        after: After | None = None,
    ) -> Response:
        """Run a body's requests, and return the whole answer, or a stream if the body asks for one.

        Args:
            request: the HTTP request.
            body: its body.
            parsed: the requests of the body.
            streams: the events of these requests; by default the engine's.
            after: is awaited when the requests have ended well.

        Raises:
            RefusalError: the body asks for a stream of an echo with log-probabilities.
        """
        streams = streams or [self._served.engine.astream(each) for each in parsed.requests]
        if not body.stream:
            with in_words_of(parsed.parameters.form):
                results = await unless_gone(request, self._queue.results(streams, meter_of(request)))
            if after is not None:
                await after()
            told = {**self._whole(parsed, results), **await _memories(parsed, results, self._served)}
            return reply(told, headers=self._told(streams))
        if parsed.echo and parsed.wants_logprobs:  # those of the prompt come with the result alone
            raise RefusalError(400, "The parameter echo with logprobs is not streamed. Leave stream out.", param="echo")
        chunks = answer_chunks(
            parsed,
            self._queue.run(streams, meter_of(request)),
            model=self._settings.model_name(parsed.adapter),
            served=self._served,
            prompts=self._echoes(parsed),
            options=body.stream_options or StreamOptions.model_validate({}),
        )
        with in_words_of(parsed.parameters.form):
            ready = await unless_gone(request, begun(chunks))  # what is refused now has a status of its own
        ready = ready if after is None else followed(ready, after)
        settings, told = self._settings, self._told(streams)
        return EventStream(request, ready, ping_s=settings.ping_s, write_s=settings.read_timeout_s, headers=told)

    def _told(self, streams: Sequence[AsyncEvents]) -> dict[str, str]:
        """Return a header, name → value, that says why a conversation was read anew though its client only left out
        messages; an empty dictionary if none of the requests was. Ask when the requests are in the engine.
        """
        numbers = [stream.number for stream in streams if stream.number is not None]
        why = next(filter(None, map(self._served.engine.read_anew, numbers)), "")
        return {READ_ANEW: why} if why else {}

    def _whole(self, parsed: ParsedRequest, results: list[Result]) -> dict[str, Any]:
        """Return the JSON body of an answer that is not streamed: OpenAI's, with echoes if they are asked for, and
        kvkeep's numbers in ``usage``.
        """
        if parsed.scores_only:  # the engine has drawn a token, and none was asked for
            nothing: dict[str, Any] = {"token_ids": (), "text": "", "logprobs": (), "finish_reason": "length"}
            results = [dataclasses.replace(result, **nothing) for result in results]
        head = AnswerHead(parsed, self._settings.model_name(parsed.adapter))
        texts, parameters = self._served.token_texts, parsed.parameters
        answer = responses.answer(
            parameters, results, name=head.name, created=head.created, model=head.model, texts=texts
        )
        if parsed.echo:
            prompts, n, wanted = self._echoes(parsed), parameters.n, texts if parsed.wants_logprobs else None
            answer["choices"] = [
                echoed(parameters, choice, prompts[index], parsed.prompts[index // n], results[index], wanted)
                for index, choice in enumerate(answer["choices"])
            ]
        return {**answer, "usage": usage_of(results, parameters.n)}

    def _echoes(self, parsed: ParsedRequest) -> list[str]:
        """Return the prompt, as text, of each request, in the requests' order; an empty list unless the body asks for
        echoes.

        A prompt of token ids, or one that was cut, is decoded.
        """
        if not parsed.echo:
            return []
        # a prompt that was cut is shown as it was read
        texts = [
            prompt if isinstance(prompt, str) and parsed.parameters.truncate is None else self._served.text_of(ids)
            for prompt, ids in zip(parsed.parameters.prompts, parsed.prompts, strict=True)
        ]
        return [text for text in texts for _ in range(parsed.parameters.n)]
