"""The routes of ``/v1/responses``: answers that can be continued by their id."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.request import Event, Request, Result
from kvkeep.engine.session import Session
from kvkeep.openai import logprobs
from kvkeep.openai.logprobs import Scored, ScoredTokens
from kvkeep.openai.messages import NAME, ParameterError, short, whole_text
from kvkeep.openai.requests import ParsedBody, format_of
from kvkeep.openai.responses import calls_of
from kvkeep.openai.tools import ToolCallParser
from kvkeep.server.errors import in_words_of, unknown
from kvkeep.server.model import ServedModel
from kvkeep.server.request_parsing import digest, kept_by, own_options, sampling_request
from kvkeep.server.request_queue import RequestQueue, in_thread
from kvkeep.server.schemas import Generating, ResponseBody, body_of
from kvkeep.server.session_registry import ServerSession, SessionTable
from kvkeep.server.settings import ServerSettings
from kvkeep.server.sse import EventStream, begun, kept_of, meter_of, owner_of, reply, unless_gone

# Bodies of ``/v1/responses`` as requests to the engine, by way of the parameters of a chat.

_ROLES = ("system", "developer", "user", "assistant")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
)
"""Parts of an answer that ``include`` may ask for. All but log-probabilities are of tools that no answer calls here."""


def parse_response_body(
    body: ResponseBody, served: ServedModel, settings: ServerSettings, *, before: int | None
) -> tuple[ParsedBody, Request]:
    """Return the parameters of a body of ``/v1/responses`` under a chat's names, checked, and its request: a turn for
    the session of the answer.

    Args:
        body: the body.
        served: the model.
        settings: of the server.
        before: tokens of the conversation with the answer that is continued; ``None``: none is continued.

    Raises:
        KVKeepError: a parameter cannot be honoured.
    """
    given = body.guard, body.keep_prompt  # of which 0 and False are values, too
    if before is not None and (body.policy or body.budget or any(value is not None for value in given)):
        raise ParameterError(
            "previous_response_id", "brings its own policy, budget, guard and keep_prompt; leave them out"
        )
    cached = body.model_dump(include={"policy", "pins", "guard", "keep_prompt"})
    own = own_options(Generating.model_validate(cached), ())  # the policy is the session's, and only checked here
    told = whole_text("instructions", body.instructions or "")
    messages = [{"role": "system", "content": told}] if told else []
    messages += [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _messages(body.input)
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options", "has no effect without stream: true")
    wishes = {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    effort = {"reasoning_effort": (body.reasoning or {}).get("effort")}
    fields = {"messages": messages, "seed": body.seed, **wishes, **effort, **_form(body), **_tools(body)}
    fields |= _logprobs(body)
    cache = {"policy": body.policy, "budget": body.budget}
    names = {"max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
    return sampling_request(served, fields, settings, names=names, own=own, before=before or 0, cache=cache)


def _logprobs(body: ResponseBody) -> dict[str, Any]:
    """Return ``logprobs`` and ``top_logprobs`` as a chat has them; an empty dictionary if the body asks for no
    log-probabilities.

    Raises:
        ParameterError: ``include`` has an unknown entry.
    """
    for name in body.include or ():
        if name not in _INCLUDABLE:
            raise ParameterError("include", f"has {short(name)}; there are {', '.join(_INCLUDABLE)}")
    if _LOGPROBS in (body.include or ()) or body.top_logprobs:
        return {"logprobs": True, "top_logprobs": body.top_logprobs}
    return {}


def _form(body: ResponseBody) -> dict[str, Any]:
    """Return the format of the answer (``text.format``) unchanged as ``response_format`` of a chat, after a check;
    ``None`` under that name if the body has none.

    Raises:
        ParameterError: the format cannot be read, or ``text.verbosity`` is other than medium.
    """
    given = (body.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise ParameterError("text.format", 'is no JSON object such as {"type": "text"}')
    if (verbosity := (body.text or {}).get("verbosity")) not in (None, "medium"):
        raise ParameterError("text.verbosity", f"cannot be {short(verbosity)} here; leave it out")
    format_of("text.format", given)  # for its errors: read as a chat's, they would name response_format
    return {"response_format": given}


def _tools(body: ResponseBody) -> dict[str, Any]:
    """Return a body's tools, what it says of their choice, and whether there may be several calls, as fields of a chat,
    which has each function inside a tool. Functions are not checked here.

    Raises:
        ParameterError: a tool is no function.
    """
    tools = []
    for place, tool in enumerate(body.tools or []):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ParameterError(f"tools[{place}]", "is no function; only functions can be called")
        tools.append({"type": "function", "function": {name: part for name, part in tool.items() if name != "type"}})
    return {"tools": tools, "tool_choice": _choice(body.tool_choice), "parallel_tool_calls": body.parallel_tool_calls}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return ``tool_choice`` of ``/v1/responses`` in the form of a chat, where the name of a function stands one level
    deeper. What has another form is returned unchanged, for a chat's check to refuse.
    """
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice(tool) if isinstance(tool, dict) else None for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def _messages(given: list[Any]) -> list[dict[str, Any]]:
    """Return the items of ``input`` as new messages of a chat: calls of tools become a part of the assistant's message
    before them, if there is one, and a reasoning item of the assistant's message or call behind it.

    Raises:
        ParameterError: there is no message, or an item has a form that cannot be read.
    """
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for place, item in enumerate(given):
        if isinstance(item, dict) and item.get("type") == "reasoning":
            thoughts = _thoughts(f"input[{place}]", item)
            continue
        message = _message(f"input[{place}]", item)
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"] = thoughts
        thoughts = ""
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            calls = messages[-1].get("tool_calls", []) + message["tool_calls"]  # a chat has one message for one turn
            # what both have stays the former's: its text, and the reasoning before it
            messages[-1] = {**message, **messages[-1], "tool_calls": calls}
        else:
            messages.append(message)
    if not messages:
        raise ParameterError("input", "has no message")
    return messages


def _thoughts(name: str, item: dict[str, Any]) -> str:
    """Return the text of a reasoning item, which clients send back before the answer; empty if it has no list of parts,
    as often. Parts that are no text are passed over.

    Args:
        name: names the item in errors.
        item: the item.

    Raises:
        ParameterError: the text has half of a character.
    """
    parts = item["content"] if isinstance(item.get("content"), list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return whole_text(name, "\n".join(text for text in texts if isinstance(text, str)))


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_CALL = '{"type": "function_call", "call_id": "…", "name": "…", "arguments": "{…}"}'


def _message(name: str, given: Any) -> dict[str, Any]:
    """Return one item of ``input`` (a message, a tool call or its result, but no reasoning) as a new message of a chat.

    Args:
        name: names the item in errors.
        given: the item.

    Raises:
        ParameterError: the item has another form.
    """
    kind = (given.get("type") or "message") if isinstance(given, dict) else None
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [_call(name, given)]}
    if kind == "function_call_output":
        told = {"role": "tool", "content": _content(name, given.get("output"), "output")}
        return (
            told
            if given.get("call_id") is None
            else {**told, "tool_call_id": _text(f"{name}.call_id", given["call_id"])}
        )
    if kind == "message" and given.get("role") in _ROLES:
        content = given.get("content")
        missing = content is None and given["role"] == "assistant"  # of a turn that only called tools
        return {"role": given["role"], "content": _content(name, "" if missing else content, "content")}
    if kind is not None and kind not in _ITEMS:
        raise ParameterError(f"{name}.type", f"is {short(kind)}; there are {', '.join(_ITEMS)}")
    raise ParameterError(name, 'is not like {"role": "user", "content": "a text"}')


def _call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return an item that is a call of a tool in the form of a chat's ``tool_calls``, with ``call_id`` as its id, which
    may be empty.

    Args:
        name: names the item in errors.
        given: the item.

    Raises:
        ParameterError: the call has another form.
    """
    called, arguments = given.get("name"), given.get("arguments")
    if not (isinstance(called, str) and re.fullmatch(NAME, called, re.ASCII) and isinstance(arguments, str)):
        raise ParameterError(name, f"is not like {_CALL}")
    function = {"name": called, "arguments": whole_text(f"{name}.arguments", arguments)}
    return {"id": _text(f"{name}.call_id", given.get("call_id") or ""), "type": "function", "function": function}


def _text(name: str, given: object) -> str:
    """Return a value unchanged, after a check that it is a text without half of a character.

    Args:
        name: names the value in errors.
        given: the value.

    Raises:
        ParameterError: it is no text, or has half of a character.
    """
    if not isinstance(given, str):
        raise ParameterError(name, f"is {short(given)} and not a text")
    return whole_text(name, given)


def _content(name: str, content: object, field: str) -> str:
    """Return the text of a message or of a tool's result: a text as it is, or the texts of a list of parts, joined
    without spaces.

    Args:
        name: names the item in errors.
        content: the text or the parts.
        field: the item's field that has them, for errors.

    Raises:
        ParameterError: the content is neither, has a part that is no text, or half of a character.
    """
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ParameterError(f"{name}.{field}", "is no text and no list of parts")
    return whole_text(f"{name}.{field}", "".join(_input_text(f"{name}.{field}", part) for part in parts))


def _input_text(name: str, part: object) -> str:
    """Return the text of one part of a content: a text itself, or a part of the type text or refusal.

    Raises:
        ParameterError: the part is neither, such as an image.
    """
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text", "refusal"):
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise ParameterError(name, "has a part that is no text; only texts are read")


# The items of a response, a message and calls of tools, and the events while they are written.


@dataclass
class MessageItem:
    """A message while it is written.

    Attributes:
        place: its index among the items of the answer.
        text: its text so far.
        logprobs: the tokens of this text with their log-probabilities, in the form of the API.
        id: its id.
    """

    place: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(16)}")

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the two events that open this message, before its first text: an item in progress, and its part of
        text.
        """
        yield _event("response.output_item.added", self.place, item={**self.shown("in_progress"), "content": []})
        yield self._part("response.content_part.added", part=_output_text(""))

    def more(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
        """Add text to this message, with log-probabilities of tokens in the form of the API, and yield the event that
        tells of both. The text is added when the event is taken.
        """
        self.text += text
        self.logprobs += logprobs
        yield self._part("response.output_text.delta", delta=text, logprobs=list(logprobs))

    def end(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield the three events that close this message, with its whole text; ``status`` is ``completed`` or
        ``incomplete``.
        """
        yield self._part("response.output_text.done", text=self.text, logprobs=self.logprobs)
        yield self._part("response.content_part.done", part=_output_text(self.text, self.logprobs))
        yield _event("response.output_item.done", self.place, item=self.shown(status))

    def shown(self, status: str) -> dict[str, Any]:
        """Return this message as an item of ``output`` in the API, with a status and its text so far."""
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_output_text(self.text, self.logprobs)],
        }

    def _part(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of a kind about this message's only part, its text, with further fields."""
        return _event(kind, self.place, item_id=self.id, content_index=0, **fields)


@dataclass
class ToolCallItem:
    """A call of a tool while it is written.

    Attributes:
        place: its index among the items of the answer.
        name: of the function.
        call_id: by which the client sends the result back.
        text: its arguments so far, as JSON.
        id: of the item.
    """

    place: int
    name: str
    call_id: str
    text: str = ""
    id: str = field(default_factory=lambda: f"fc_{secrets.token_hex(16)}")

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the event that opens this call of a tool: an item in progress, without arguments yet."""
        yield _event("response.output_item.added", self.place, item=self.shown("in_progress"))

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        """Add a piece to the arguments of this call, and yield the event that tells of it. It is added when the event
        is taken.
        """
        self.text += text
        yield _event("response.function_call_arguments.delta", self.place, item_id=self.id, delta=text)

    def end(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield the two events that close this call of a tool, with its whole arguments; ``status`` is ``completed`` or
        ``incomplete``.
        """
        fields = {"item_id": self.id, "name": self.name, "arguments": self.text}
        yield _event("response.function_call_arguments.done", self.place, **fields)
        yield _event("response.output_item.done", self.place, item=self.shown(status))

    def shown(self, status: str) -> dict[str, Any]:
        """Return this call of a tool as an item of ``output`` in the API, with a status and its arguments so far."""
        about = {"id": self.id, "type": "function_call", "status": status}
        return {**about, "call_id": self.call_id, "name": self.name, "arguments": self.text}


def _event(kind: str, place: int, **fields: Any) -> dict[str, Any]:
    """Return an event of a kind about the item of ``output`` with the index ``place``, with further fields; it has no
    sequence number yet.
    """
    return {"type": kind, "output_index": place, **fields}


def _output_text(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return a text, with log-probabilities in the form of the API, as the ``output_text`` part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


# The objects and the events of ``/v1/responses``.


class ResponseStream:
    """An answer while it is written: makes its events, and the whole response object.

    Args:
        name: its id.
        body: what was asked for.
        model: the model's name.
        calls: reads calls of tools from the text; ``None``: there are none.
        texts: decodes tokens; ``None`` if no log-probabilities are asked for.

    Attributes:
        stored: whether it can be continued later.
    """

    def __init__(
        self, name: str, body: ResponseBody, model: str, calls: ToolCallParser | None, texts: TokenTexts | None
    ) -> None:
        self.name, self.stored = name, body.store is not False
        self._body, self._model, self._calls, self._texts = body, model, calls, texts
        self._scored = None if texts is None else ScoredTokens(texts)
        self._items: list[MessageItem | ToolCallItem] = []
        self._created = int(time.time())
        self._numbers = itertools.count()

    def beginning(self) -> Iterator[dict[str, Any]]:
        """Yield the two events with which a streamed answer opens, each with the response object without any output."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._whole("in_progress", [])})

    def more(self, event: Event) -> Iterator[dict[str, Any]]:
        """Add the outcome of one step, and yield the numbered events of the text and tool calls that it completes. All
        of them must be taken.

        With the last event of the request, an answer without text and calls gets an empty message.
        """
        # the end token is no part of the text
        if self._scored and event.logprob and not (event.result and event.result.end_token):
            self._scored.add(event.logprob)
        for delta in self._deltas(event):
            if "content" in delta:
                yield from self._text(delta["content"])
            for part in delta.get("tool_calls", ()):
                if "id" in part:  # the first part of a call
                    yield from self._begun(ToolCallItem(len(self._items), part["function"]["name"], part["id"]))
                else:
                    yield from map(self._numbered, self._items[-1].more(part["function"]["arguments"]))
        if event.result is not None:
            if not self._items:
                yield from self._begun(MessageItem(0))
            message = self._items[-1]
            left = self._entries(self._scored.rest(event.result)) if self._scored else []
            if left and isinstance(message, MessageItem):  # tokens without a text of their own, such as special ones
                yield from map(self._numbered, message.more("", left))

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        """Return what an event of the engine adds to the answer, as the deltas of a chat with ``content`` or
        ``tool_calls``; nothing if no text is complete.
        """
        if self._calls is None:
            return [{"content": event.text}] if event.text else []
        return [*self._calls.add(event.text), *(self._calls.end() if event.result is not None else ())]

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        """Add text to the answer's message, with the log-probabilities of the tokens that begin in it, and yield the
        numbered events. The first text opens the message.
        """
        if not self._items:
            yield from self._begun(MessageItem(0))
        item = self._items[-1]
        assert isinstance(item, MessageItem)  # no text follows a call
        ready = self._scored.within(len(item.text) + len(text)) if self._scored else ()
        yield from map(self._numbered, item.more(text, self._entries(ready)))

    def _entries(self, tokens: Sequence[Scored]) -> list[dict[str, Any]]:
        """Return tokens with their log-probabilities in the form of ``/v1/responses``; nothing if the body does not ask
        for them.
        """
        return logprobs.output_text(tokens, self._texts) if self._texts and tokens else []

    def _begun(self, item: MessageItem | ToolCallItem) -> Iterator[dict[str, Any]]:
        """Close the answer's last item as completed, if there is one, and append and open another. Yield the numbered
        events of both.
        """
        if self._items:
            yield from map(self._numbered, self._items[-1].end("completed"))
        self._items.append(item)
        yield from map(self._numbered, item.begin())

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """Yield the numbered events that close the last item, and the one with the whole answer. Call it once, after
        `more` had the request's last event.
        """
        yield from map(self._numbered, self._items[-1].end(_status(result)))
        kind = "response.completed" if result.finish_reason == "stop" else "response.incomplete"
        yield self._numbered({"type": kind, "response": self.body(result)})

    def body(self, result: Result) -> dict[str, Any]:
        """Return the whole response object of an answer that has ended, with its items and ``usage``. Call it after
        `more` had the request's last event.
        """
        new = len(result.token_ids)
        usage = {
            "input_tokens": result.prompt_tokens,
            # strict clients require every count; what a prompt leaves for later ones is not told apart here
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": result.prompt_tokens + new,
            "kvkeep": kept_of([result]),
        }
        *before, last = self._items
        items = [*(item.shown("completed") for item in before), last.shown(_status(result))]
        return {**self._whole(_status(result), items), "usage": usage}

    def _whole(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a response object with a status and the items ``output``; everything else repeats what the body has
        asked for. Its ``usage`` is ``None``.
        """
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
            "background": False,
            "metadata": body.metadata or {},
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self.stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **{name: part for name, part in (body.text or {}).items() if part}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None,
            "user": body.user,
        }

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of an event with the answer's next sequence number, from 0. Each event is numbered once, in
        order.
        """
        return {"type": event["type"], "sequence_number": next(self._numbers), **event}


def _status(result: Result) -> str:
    """Return the status of a finished response: ``completed``, or ``incomplete`` if it ended for its length or because
    it repeated itself.
    """
    return "completed" if result.finish_reason == "stop" else "incomplete"


# The routes: an answer that is stored ends a session, from which another answer can go on.


class ResponsesRoutes:
    """Answers ``/v1/responses``.

    Args:
        served: the model.
        queue: runs requests.
        settings: of the server.
    """

    def __init__(self, served: ServedModel, queue: RequestQueue, settings: ServerSettings) -> None:
        self._served, self._queue, self._settings = served, queue, settings
        self._stored = SessionTable(settings.max_responses)  # not of `SessionRegistry`: no client has named them

    def holds(self, owner: str, name: str) -> bool:
        """Return whether the answer of an owner with this id is stored here."""
        return self._stored.holds(owner, name)

    async def respond(self, request: HttpRequest) -> Response:
        """Write an answer, whole or as a stream. Unless the body says no, store it, so that a later one can continue
        it.
        """
        body = await body_of(request, ResponseBody, self._settings)
        adapter, previous = self._settings.adapter_of(body.model), None
        if body.previous_response_id is not None:
            previous = self._find(owner_of(request), body.previous_response_id).session
            self._settings.check_adapter(body.model, adapter := previous.adapter)
        owner = owner_of(request)
        parameters, turn = await in_thread(lambda: self._parsed(body, previous, owner))
        session = await in_thread(lambda: self._begin(body, previous, adapter))
        name = secrets.token_hex(16)
        texts = self._served.token_texts if "logprobs" in parameters.options else None
        model = self._settings.model_name(adapter)
        answer = ResponseStream(f"resp_{name}", body, model, calls_of(parameters, name, 0), texts)
        chunks = self._chunks(request, session, turn, answer)
        # the body was read as a chat's, where this field has another name
        with in_words_of({"response_format": "text.format"}.get(parameters.form or "", parameters.form)):
            ready = await unless_gone(request, begun(chunks))
        if not body.stream:
            return reply(await unless_gone(request, _last(ready)))
        ping_s, write_s = self._settings.ping_s, self._settings.read_timeout_s
        return EventStream(request, ready, ping_s=ping_s, write_s=write_s, done=False, named=True)  # as OpenAI does

    async def look(self, request: HttpRequest) -> Response:
        """Answer with a stored answer; refuse an unknown id."""
        return reply(self._find(owner_of(request), request.path_params["name"]).answer)

    async def remove(self, request: HttpRequest) -> Response:
        """Forget a stored answer, and close its session; refuse an unknown id."""
        owner, name = owner_of(request), request.path_params["name"]
        entry = self._find(owner, name)
        self._stored.remove(owner, name)
        await in_thread(entry.session.close)
        return reply({"id": name, "object": "response", "deleted": True})

    def _find(self, owner: str, name: str) -> ServerSession:
        """Return the stored answer of an owner with its session, and mark it as used.

        Raises:
            RefusalError: there is no answer with this id, or it was dropped since.
        """
        if (entry := self._stored.find(owner, name)) is None:
            raise unknown("response", name, "It was never stored, or has been dropped since. Send the conversation.")
        return entry

    def _parsed(self, body: ResponseBody, previous: Session | None, owner: str) -> tuple[ParsedBody, Request]:
        """Return a body as a chat's parameters, and its request, with which the engine also keeps the memory for later
        chats of the owner.

        Args:
            body: the body.
            previous: the session of the answer that is continued; ``None``: none is.
            owner: the owner of the key.
        """
        before = None if previous is None else len(previous.token_ids)
        parameters, turn = parse_response_body(body, self._served, self._settings, before=before)
        kept = {**kept_by(owner, body.user, parameters), "cache_salt": digest(body.cache_salt) or None}
        kept.pop("noted_messages", None)  # the turn itself knows them, with those before
        kept["keep_prompt"] = None  # the session has it
        return parameters, turn.replaced(**kept)

    def _begin(self, body: ResponseBody, previous: Session | None, adapter: str | None) -> Session:
        """Open a session without a name for an answer: a copy of the session of the answer that is continued, which
        stays as it is, or a new one with the policy and budget of the body.
        """
        engine = self._served.engine
        if previous is None:
            return engine.session(policy=body.policy, budget=body.budget, adapter=adapter, keep_prompt=body.keep_prompt)
        # no fork: its random numbers depend on how many forks there were, those of a copy on the seed alone
        own: dict[str, Any] = {"policy": previous.policy, "budget": previous.budget, "adapter": adapter}
        return engine.session(**own, snapshot=previous.snapshot())

    async def _chunks(
        self, request: HttpRequest, session: Session, turn: Request, answer: ResponseStream
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Run the turn of an answer, and yield the events of its stream.

        The first one is empty, and is no part of the stream: it tells `begun` that the turn has a row. At the end store
        the answer, if it is to be stored; otherwise, and if it fails or breaks off, close the session.
        """
        stored = False
        run = self._queue.run([session.asend(turn)], meter_of(request))
        try:
            async for item in run:
                if item is None:
                    yield {}
                    for chunk in answer.beginning():
                        yield chunk
                    continue
                _, event = item
                for chunk in answer.more(event):
                    yield chunk
                if event.result is not None:
                    if stored := answer.stored:  # before the last event: whoever has that may go on from it
                        await self._store(owner_of(request), answer, session, event.result)
                    for chunk in answer.end(event.result):
                        yield chunk
        finally:
            await run.aclose()
            if not stored:
                await in_thread(session.close)

    async def _store(self, owner: str, answer: ResponseStream, session: Session, result: Result) -> None:
        """Store an answer with its session for an owner, and drop answers beyond the server's limit, those not used for
        longest first, of all owners; their sessions are closed.
        """
        # named by the id of the answer, by which a client goes on from it
        self._stored.add(owner, answer.name, ServerSession(answer.name, session, answer.body(result)))
        for dropped in self._stored.trim():
            await in_thread(dropped.session.close)


async def _last(chunks: AsyncGenerator[Mapping[str, Any], None]) -> Mapping[str, Any]:
    """Run the stream of an answer to its end, and return the whole response object, which its last event has."""
    last: Mapping[str, Any] = {}
    try:
        async for chunk in chunks:
            last = chunk
    finally:
        await chunks.aclose()
    response: Mapping[str, Any] = last["response"]
    return response
