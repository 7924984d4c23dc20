"""Tools that a model may call: their definitions, how the model is told about them, and the grammar of its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.engine.request import Structure, checked, compact
from kvkeep.errors import InputError
from kvkeep.openai.messages import ParameterError, short, whole_text
from kvkeep.openai.tool_forms import BY_WORDS, NAME, ToolUse

MOST = 128
_EXAMPLE = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
_CHOICES = '"none", "auto", "required" and {"type": "function", "function": {"name": "…"}}'
_ALIKE = (
    "and tools that may be called go not together with this model: its calls begin like JSON. Leave one out, or give "
    'tool_choice "required" or "none"'
)
_ANY = r"(.|\n)"


@dataclass(frozen=True)
class Tools:
    """Tools that the model may call in an answer.

    Attributes:
        functions: their definitions, each with a ``name``.
        choice: whether the model must call one.
        only: the one that it must call.
        parallel: whether it may call several.
        use: how the model is told, and the form of its calls.
    """

    functions: tuple[Mapping[str, Any], ...]
    choice: Literal["auto", "required"] = "auto"
    only: str | None = None
    parallel: bool = True
    use: ToolUse = BY_WORDS

    @property
    def names(self) -> tuple[str, ...]:
        """The functions that can be called."""
        return tuple(one["name"] for one in self.functions if self.only in (None, one["name"]))

    @property
    def described(self) -> tuple[dict[str, Any], ...]:
        """The definitions as chat templates take them."""
        return tuple({"type": "function", "function": _described(one)} for one in self.functions)

    def told(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with a description of the tools at the end of the system's message."""
        shown = (json.dumps(one, ensure_ascii=False) for one in self.described)
        text = self.use.form.words.format(tools="\n".join(shown))
        first, rest = messages[0], list(map(dict, messages[1:]))
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
        return [{"role": "system", "content": text}, dict(first), *rest]

    def structure(self, content: Structure | None) -> Structure:
        """The form of an answer with calls.

        Args:
            content: the form of an answer without; ``None``: any text.

        Raises:
            ParameterError: calls cannot be told from such an answer.
        """
        if content is not None and content.kind != "json":
            raise ParameterError("structured_outputs", "names a form that goes together with no tools; leave one out")
        form = self.use.form
        several = self.parallel and self.only is None and form.next is not None
        lines = ["%llguidance {}", *self._start(content)]
        lines.append(f"calls: opens name {'more* ' if several else ''}{json.dumps(form.last) if form.last else ''}")
        lines.append(f"opens: {' | '.join(map(json.dumps, form.opens))}")
        if several:
            lines.append(f"more: {json.dumps(form.next)} name")
        lines.append("name: " + " | ".join(f"call_{place}" for place in range(len(self.names))))
        callable_ = [one for one in self.functions if one["name"] in self.names]
        lines += [self._rule(place, one) for place, one in enumerate(callable_)]
        try:
            return checked(Structure("lark", "\n".join(lines) + "\n"))
        except InputError as error:
            raise ParameterError("tools", f"is refused: {error}") from error

    def _start(self, content: Structure | None) -> list[str]:
        """The grammar's first rules: what may come before calls, or in place of them."""
        form, token = self.use.form, self.use.token
        mark = json.dumps(form.mark) if token is None else f"<[{token}]>"
        begun = "mark" if form.needs_mark else "" if token is None else "mark?"
        marks = [f"mark: {mark}"] if begun else []
        if self.choice == "required":
            return [f"start: {begun} calls", *marks]
        if content is not None:
            if not begun:
                raise ParameterError("response_format", _ALIKE)
            return ["start: mark calls | content", *marks, f"content: %json {content.text}"]
        if not form.needs_mark:
            call = form.opens[0].replace("{", r"\{")
            return [f"start: TEXT | {begun} calls", *marks, f"TEXT: /{_ANY}*/ & ~/{call}{_ANY}*/"]
        if token is not None:
            return ["start: TEXT | mark calls", *marks, f"TEXT: /{_ANY}*/"]
        return ["start: TEXT | open calls", f"open[lazy]: TEXT {mark}", f"TEXT: /{_ANY}*/"]

    def _rule(self, place: int, function: Mapping[str, Any]) -> str:
        """The grammar's rule of a call, from its name on."""
        begins = json.dumps(f"{function['name']}{self.use.form.middle}")
        return f"call_{place}: {begins} %json {json.dumps(function['schema'])} {json.dumps(self.use.form.close)}"


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}


def tools_of(given: Mapping[str, Any], use: ToolUse) -> Tools | None:
    """The tools of a chat's body; ``None`` if it has none, or the model shall call none.

    Args:
        given: the body.
        use: how the model uses tools.

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
        return Tools(functions, "required", only, parallel=False, use=use)
    if choice not in ("none", "auto", "required"):
        raise ParameterError("tool_choice", f"is {short(choice)}; there are {_CHOICES}")
    if choice == "required" and not functions:
        raise ParameterError("tool_choice", 'is "required", and there are no tools')
    if not functions or choice == "none":
        return None
    return Tools(functions, choice, parallel=bool(given.get("parallel_tool_calls", True)), use=use)


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
