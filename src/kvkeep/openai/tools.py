"""Tools that a model may call: their definitions, how the model is told about them, and the form of its calls.

Every model is told in the words of Qwen's chat template, and calls tools in that form, ``<tool_call>`` around a JSON
object. Grammars hold it to that form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.engine.structure import Structure, checked, compact
from kvkeep.errors import InputError
from kvkeep.openai.messages import ParameterError, short, whole_text
from kvkeep.openai.tool_text import CLOSE, NAME, OPEN

MOST = 128
_EXAMPLE = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
_CHOICES = '"none", "auto", "required" and {"type": "function", "function": {"name": "…"}}'
_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class Tools:
    """Tools that the model may call in an answer.

    Attributes:
        functions: their definitions, each with a ``name``.
        choice: whether the model must call one.
        only: the one that it must call.
        parallel: whether it may call several.
    """

    functions: tuple[Mapping[str, Any], ...]
    choice: Literal["auto", "required"] = "auto"
    only: str | None = None
    parallel: bool = True

    def told(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Messages with a description of the tools at the end of the system's message."""
        shown = (
            json.dumps({"type": "function", "function": _described(one)}, ensure_ascii=False) for one in self.functions
        )
        text = _TOLD.format(tools="\n".join(shown))
        first, rest = messages[0], list(map(dict, messages[1:]))
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
        return [{"role": "system", "content": text}, dict(first), *rest]

    def form(self, content: Structure | None) -> Structure:
        """The form of an answer with calls.

        Args:
            content: the form of an answer without; ``None``: any text.

        Raises:
            ParameterError: calls cannot be told from such an answer.
        """
        if content is not None and content.kind != "json":
            raise ParameterError("structured_outputs", "names a form that goes together with no tools; leave one out")
        callable_ = [one for one in self.functions if self.only in (None, one["name"])]
        several = self.parallel and self.only is None
        calls = "open body more*" if several else "open body"
        lines = ["%llguidance {}"]
        if self.choice == "required":
            lines += [f"start: {calls}", f'open: "{OPEN}"']
        elif content is not None:
            lines += [f"start: {calls} | content", f'open: "{OPEN}"', f"content: %json {content.text}"]
        else:
            lines += [f"start: TEXT | {calls}", f'open[lazy]: TEXT "{OPEN}"', r"TEXT: /(.|\n)*/"]
        if several:
            lines.append(f'more: "\\n{OPEN}" body')
        names = " | ".join(f"call_{place}" for place in range(len(callable_)))
        lines.append(f'body: "\\n" ({names}) {json.dumps(CLOSE)}')
        lines += [_rule(place, one) for place, one in enumerate(callable_)]
        try:
            return checked(Structure("lark", "\n".join(lines) + "\n"))
        except InputError as error:
            raise ParameterError("tools", f"is refused: {error}") from error


def _rule(place: int, function: Mapping[str, Any]) -> str:
    """The grammar's rule of a call."""
    begins = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
    return f'call_{place}: {begins} %json {json.dumps(function["schema"])} "}}"'


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}


def tools_of(given: Mapping[str, Any]) -> Tools | None:
    """The tools of a chat's body; ``None`` if it has none, or the model shall call none.

    Raises:
        ParameterError: a tool or the choice cannot be read.
    """
    functions = _functions(given.get("tools", []))
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        inner = choice.get("function")
        only = inner.get("name") if isinstance(inner, dict) else None
        if choice.get("type") != "function" or not isinstance(only, str):
            raise ParameterError("tool_choice", f"is {short(choice)}; there are {_CHOICES}")
        if only not in [one["name"] for one in functions]:
            raise ParameterError("tool_choice", f"names {short(only)}, which is none of tools")
        return Tools(functions, "required", only, parallel=False)
    if choice not in ("none", "auto", "required"):
        raise ParameterError("tool_choice", f"is {short(choice)}; there are {_CHOICES}")
    if choice == "required" and not functions:
        raise ParameterError("tool_choice", 'is "required", and there are no tools')
    if not functions or choice == "none":
        return None
    return Tools(functions, choice, parallel=bool(given.get("parallel_tool_calls", True)))


def _functions(given: Sequence[object]) -> tuple[Mapping[str, Any], ...]:
    """The functions of tools, each with the schema of its arguments."""
    if len(given) > MOST:
        raise ParameterError("tools", f"has {len(given)} tools; there may be {MOST}")
    found = [_function(f"tools[{place}]", one) for place, one in enumerate(given)]
    names = [one["name"] for one in found]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ParameterError("tools", f"has two tools with the name {short(doubled)}")
    return tuple(found)


def _function(place: str, tool: object) -> Mapping[str, Any]:
    """A function with the schema of its arguments. Without ``strict`` words that are not known are ignored in it."""
    inner = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(inner, dict):
        raise ParameterError(place, f"is not like {_EXAMPLE}; only functions can be called")
    name, parameters = inner.get("name"), inner.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(NAME, name, re.ASCII):
        raise ParameterError(f"{place}.function.name", "is no name of 1 to 64 letters, digits, _ and -")
    for other, kind in (("description", str), ("strict", bool)):
        if inner.get(other) is not None and not isinstance(inner[other], kind):
            raise ParameterError(f"{place}.function.{other}", f"is {short(inner[other])}; leave it out")
    whole_text(f"{place}.function.description", inner.get("description") or "")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise ParameterError(f"{place}.function.parameters", "is no JSON schema of an object")
    try:
        schema = compact({"type": "object", **parameters}, lenient=not inner.get("strict"))
        whole_text(f"{place}.function.parameters", json.dumps(parameters, ensure_ascii=False))
    except InputError as error:
        raise ParameterError(f"{place}.function.parameters", f"is refused: {error}") from error
    if schema["type"] != "object":
        raise ParameterError(f"{place}.function.parameters.type", f'is {short(schema["type"])}; give "object"')
    return {**inner, "schema": schema}
