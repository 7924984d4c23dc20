"""The routes of ``/v1/responses``: answers that can be continued by their id."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from kvkeep.engine import Engine, Event, Request, Result, Session
from kvkeep.engine import Request as Turn
from kvkeep.errors import InputError
from kvkeep.openai.messages import ParameterError
from kvkeep.openai.requests import ParsedBody, format_of
from kvkeep.openai.responses import calls_of
from kvkeep.openai.tools import ToolCallParser
from kvkeep.server.errors import in_words_of, unknown
from kvkeep.server.generate_routes import GenerateRoutes
from kvkeep.server.model import ServedModel
from kvkeep.server.request_parsing import own_options, sampling_request
from kvkeep.server.request_queue import RequestQueue, in_thread
from kvkeep.server.schemas import Generating, ResponseBody, body_of
from kvkeep.server.settings import ServerSettings
from kvkeep.server.sse import begun, kept_of, meter_of, owner_of, reply, unless_gone

# Bodies of ``/v1/responses`` as requests to the engine, by way of the parameters of a chat.

_ROLES = ("system", "developer", "user", "assistant")


def turn_of(
    body: ResponseBody, served: ServedModel, settings: ServerSettings, *, before: int | None
) -> tuple[ParsedBody, Request]:
    """A body as a chat's, and its request.

    Args:
        body: the body.
        served: the model.
        settings: of the server.
        before: tokens of the answer that is continued; ``None`` without one.

    Raises:
        KVKeepError: a parameter cannot be honoured.
    """
    if before is not None and (body.policy or body.budget or body.guard is not None):
        raise ParameterError("previous_response_id", "brings its own policy, budget and guard; leave them out")
    own = own_options(Generating.model_validate(body.model_dump(include={"policy", "pins", "guard"})), ())
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _messages(body.input)
    wishes = {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    fields = {"messages": messages, "seed": body.seed, **wishes, **_form(body), **_tools(body)}
    names = {"max_tokens": "max_output_tokens"}
    return sampling_request(served, fields, settings, names=names, own=own, before=before or 0)


def _form(body: ResponseBody) -> dict[str, Any]:
    """The form of the answer, by a chat's name."""
    given = (body.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise ParameterError("text.format", 'is no JSON object such as {"type": "text"}')
    format_of("text.format", given)
    return {"response_format": given}


def _tools(body: ResponseBody) -> dict[str, Any]:
    """The tools, which a chat has as functions inside of tools."""
    tools = []
    for place, one in enumerate(body.tools or []):
        if not isinstance(one, dict) or one.get("type") != "function":
            raise ParameterError(f"tools[{place}]", "is no function; only functions can be called")
        tools.append({"type": "function", "function": {name: part for name, part in one.items() if name != "type"}})
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}


def _messages(given: list[Any]) -> list[dict[str, Any]]:
    """The messages of an input, whose parts are named in another way than those of a chat."""
    if not given:
        raise InputError("The input has no message.")
    found: list[dict[str, Any]] = []
    for place, one in enumerate(given):
        message = _message(f"input[{place}]", one)
        if "tool_calls" in message and found and "tool_calls" in found[-1]:
            found[-1]["tool_calls"] += message["tool_calls"]
        else:
            found.append(message)
    return found


def _message(name: str, given: Any) -> dict[str, Any]:
    """The message of an item."""
    kind = given.get("type", "message") if isinstance(given, dict) else None
    if kind == "function_call":
        function = {part: given.get(part) for part in ("name", "arguments")}
        call = {"id": given.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        told = {"role": "tool", "content": _content(name, given.get("output"), "output")}
        return told if given.get("call_id") is None else {**told, "tool_call_id": given["call_id"]}
    if kind == "message" and given.get("role") in _ROLES:
        return {"role": given["role"], "content": _content(name, given.get("content"), "content")}
    raise ParameterError(name, 'is not like {"role": "user", "content": "a text"}')


def _content(name: str, content: object, field: str) -> str:
    """The text of a message or of a tool's result, which may come in parts."""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ParameterError(f"{name}.{field}", "is no text and no list of parts")
    return "".join(_input_text(f"{name}.{field}", part) for part in parts)


def _input_text(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ParameterError(name, "has a part that is no text; only texts are read")


# The items of a response, a message and calls of tools, and the events while they are written.


@dataclass
class MessageItem:
    """A message while it is written."""

    place: int
    text: str = ""
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(16)}")

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before its first text."""
        yield _event("response.output_item.added", self.place, item={**self.shown("in_progress"), "content": []})
        yield self._part("response.content_part.added", part=_output_text(""))

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        """The events of some text."""
        self.text += text
        yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, status: str) -> Iterator[dict[str, Any]]:
        """The events after its last text."""
        yield self._part("response.output_text.done", text=self.text, logprobs=[])
        yield self._part("response.content_part.done", part=_output_text(self.text))
        yield _event("response.output_item.done", self.place, item=self.shown(status))

    def shown(self, status: str) -> dict[str, Any]:
        """The whole item."""
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_output_text(self.text)],
        }

    def _part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return _event(kind, self.place, item_id=self.id, content_index=0, **fields)


@dataclass
class ToolCallItem:
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


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# The objects and the events of ``/v1/responses``.


class ResponseStream:
    """An answer while it is written.

    Args:
        name: its id.
        body: what was asked for.
        model: the model's name.
        calls: reads calls of tools from the text; ``None``: there are none.

    Attributes:
        stored: whether it can be continued later.
    """

    def __init__(self, name: str, body: ResponseBody, model: str, calls: ToolCallParser | None) -> None:
        self.name, self.stored = name, body.store is not False
        self._body, self._model, self._calls = body, model, calls
        self._items: list[MessageItem | ToolCallItem] = []
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
                    yield from self._begun(ToolCallItem(len(self._items), part["function"]["name"], part["id"]))
                else:
                    yield from map(self._numbered, self._items[-1].more(part["function"]["arguments"]))
        if event.result is not None and not self._items:
            yield from self._begun(MessageItem(0))

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        """What an event adds to content and calls."""
        if self._calls is None:
            return [{"content": event.text}] if event.text else []
        return [*self._calls.add(event.text), *(self._calls.end() if event.result is not None else ())]

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._items:
            yield from self._begun(MessageItem(0))
        yield from map(self._numbered, self._items[-1].more(text))

    def _begun(self, item: MessageItem | ToolCallItem) -> Iterator[dict[str, Any]]:
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


@dataclass(eq=False)
class StoredResponse:
    """An answer that can be continued.

    Attributes:
        owner: whose it is.
        session: ends with this answer.
        body: the answer as it was sent.
    """

    owner: str
    session: Session
    body: dict[str, Any]
    created: float = field(default_factory=time.time)


class ResponseStore:
    """The answers that can be continued, least recently used first.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def find(self, who: str, name: str) -> StoredResponse:
        """An owner's answer.

        Raises:
            RefusalError: there is none.
        """
        found = self._kept.get(name)
        if found is None or found.owner != who:
            raise unknown("response", name, "It was never stored, or has been dropped since. Send the conversation.")
        self._kept.move_to_end(name)
        return found

    def has(self, who: str, name: str) -> bool:
        """Whether an owner's answer is there."""
        return name in self._kept and self._kept[name].owner == who

    def put(self, name: str, kept: StoredResponse) -> list[Session]:
        """Keep an answer, and return the sessions of those that are dropped for it."""
        self._kept[name] = kept
        dropped = []
        while len(self._kept) > self._most:
            dropped.append(self._kept.popitem(last=False)[1].session)
        return dropped

    def drop(self, name: str) -> Session:
        """Forget an answer."""
        return self._kept.pop(name).session


class ResponsesRoutes:
    """Answers ``/v1/responses``.

    Args:
        engine: the engine.
        generator: checks models and streams.
        desk: runs requests.
        settings: of the server.
    """

    def __init__(self, engine: Engine, generator: GenerateRoutes, desk: RequestQueue, settings: ServerSettings) -> None:
        self._engine, self._generator, self._desk, self._settings = engine, generator, desk, settings
        self._shelf = ResponseStore(settings.max_responses)

    def holds(self, who: str, name: str) -> bool:
        """Whether an owner's answer is kept here."""
        return self._shelf.has(who, name)

    async def respond(self, request: HttpRequest) -> Response:
        """Answer, and keep the answer so that it can be continued."""
        body = await body_of(request, ResponseBody, self._settings)
        self._generator.check_model(body.model)
        who = owner_of(request)
        previous = None if body.previous_response_id is None else self._shelf.find(who, body.previous_response_id)
        asked, turn = await in_thread(lambda: self._turn(body, previous))
        session = await in_thread(lambda: self._begin(body, previous))
        name = secrets.token_hex(16)
        answer = ResponseStream(f"resp_{name}", body, self._settings.name, calls_of(asked, name, 0))
        chunks = self._chunks(request, session, turn, answer)
        with in_words_of({"response_format": "text.format"}.get(asked.form or "", asked.form)):
            ready = await unless_gone(request, begun(chunks))
        if body.stream:
            return self._generator.stream(request, ready, done=False, named=True)
        return reply(await unless_gone(request, _last(ready)))

    def _turn(self, body: ResponseBody, previous: StoredResponse | None) -> tuple[ParsedBody, Turn]:
        """A body as a chat's, and its request."""
        before = None if previous is None else len(previous.session.token_ids)
        return turn_of(body, self._generator.served, self._settings, before=before)

    async def look(self, request: HttpRequest) -> Response:
        """Show an answer again."""
        return reply(self._shelf.find(owner_of(request), request.path_params["name"]).body)

    async def remove(self, request: HttpRequest) -> Response:
        """Forget an answer."""
        name = request.path_params["name"]
        self._shelf.find(owner_of(request), name)
        session = self._shelf.drop(name)
        await in_thread(session.close)
        return reply({"id": name, "object": "response", "deleted": True})

    def _begin(self, body: ResponseBody, previous: StoredResponse | None) -> Session:
        """A session for an answer: a copy of the previous answer's, or a new one."""
        if previous is None:
            return self._engine.session(policy=body.policy, budget=body.budget)
        before = previous.session  # the numbers of a fork depend on how many there were, a copy's on the seed alone
        return self._engine.session(policy=before.policy, budget=before.budget, snapshot=before.snapshot())

    async def _chunks(
        self, request: HttpRequest, session: Session, asked: Turn, answer: ResponseStream
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The events of an answer, after an empty one."""
        kept = False
        run = self._desk.run([session.asend(asked)], meter_of(request))
        try:
            async for found in run:
                if found is None:
                    yield {}
                    for event in answer.beginning():
                        yield event
                    continue
                for piece in answer.more(found[1]):
                    yield piece
                if (result := found[1].result) is not None:
                    if kept := answer.stored:
                        await self._keep(answer.name, StoredResponse(owner_of(request), session, answer.body(result)))
                    for piece in answer.end(result):
                        yield piece
        finally:
            await run.aclose()
            if not kept:
                await in_thread(session.close)

    async def _keep(self, name: str, kept: StoredResponse) -> None:
        for session in self._shelf.put(name, kept):
            await in_thread(session.close)


async def _last(chunks: AsyncGenerator[Mapping[str, Any], None]) -> Mapping[str, Any]:
    """The whole answer, which is part of the last event."""
    last: Mapping[str, Any] = {}
    try:
        async for chunk in chunks:
            last = chunk
    finally:
        await chunks.aclose()
    found: Mapping[str, Any] = last["response"]
    return found
