"""Bodies of ``/v1/responses`` as requests to the engine, by way of the parameters of a chat."""

from __future__ import annotations

from typing import Any

from kvkeep.engine import Request
from kvkeep.errors import InputError
from kvkeep.openai.messages import ParameterError
from kvkeep.openai.requests import Asked, format_of
from kvkeep.server.asking import own_options, sampling_request
from kvkeep.server.schema import Generating, ResponseBody
from kvkeep.server.served import Served
from kvkeep.server.settings import Settings

_ROLES = ("system", "developer", "user", "assistant")


def turn_of(body: ResponseBody, served: Served, settings: Settings, *, before: int | None) -> tuple[Asked, Request]:
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
    return "".join(_text(f"{name}.{field}", part) for part in parts)


def _text(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ParameterError(name, "has a part that is no text; only texts are read")
