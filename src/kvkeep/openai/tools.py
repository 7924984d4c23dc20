"""Tools that a model may call: their definitions, how the model is told about them, and the grammar of its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.engine.request import Structure, checked
from kvkeep.engine.schemas import compact
from kvkeep.errors import InputError
from kvkeep.openai.messages import BY_WORDS, NAME, ParameterError, ToolUse, short, whole_text

# Calls of tools in an answer: read from its text, piece by piece, and written as OpenAI's API does.


class ToolCallParser:
    """Reads an answer as content and calls, in pieces of text that need not end with either.

    What looks like a call and is none, such as one of an unknown name or one that ends within its name, is content.

    Args:
        name: makes the ids of the calls.
        use: the form of the calls.
        names: functions that can be called.
        anywhere: whether a text may come before the first call; otherwise an answer is a text or calls.

    Attributes:
        count: calls that have begun.
    """

    def __init__(self, name: str, use: ToolUse, names: Collection[str], *, anywhere: bool) -> None:
        """Make the texts by which calls are recognised: from the mark, as far as it comes as text, to the brace that
        opens the arguments, one for each function and place of a call.
        """
        form = use.form
        self._name, self._anywhere = name, anywhere
        heads = {tool: f"{tool}{form.middle}{{" for tool in names}
        marks = [form.mark] if use.token is None else []  # a mark that is a special token never comes as text
        bare = [""] if use.token is not None or not form.needs_mark else []
        self._later = {f"{mark}{begin}{heads[tool]}": tool for mark in marks for begin in form.opens for tool in names}
        first = {f"{mark}{begin}{heads[tool]}": tool for mark in bare for begin in form.opens for tool in names}
        self._first = {**self._later, **first}
        self._next = {} if form.next is None else {f"{form.close}{form.next}{heads[tool]}": tool for tool in names}
        # only where one of these characters stands, the text is compared with the headers
        self._starts = {header[0] for header in self._later}
        self._state: Literal["content", "arguments", "after"] = "content"
        self._held, self._begun = "", False
        self._object = _Object()
        self.count = 0

    def add(self, text: str) -> Iterator[dict[str, Any]]:
        """Add the next piece of an answer's text, and yield the deltas that are certain now, in the form of a chat's
        stream: ``content``, or ``tool_calls``. What may be the beginning of a call is held back.
        """
        self._held += text
        # one piece may end a call and begin another
        moved = True
        while moved:
            before = self._state
            yield from getattr(self, f"_{before}")()
            moved = self._state != before

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the text that was held back as one delta of ``content``, once the answer has ended; nothing if there is
        none, or if a call has begun: what is left then is no content.
        """
        held, self._held = self._held, ""
        if self._state == "content" and held:
            yield {"content": held}

    def whole(self, text: str) -> dict[str, Any]:
        """Return ``content`` and ``tool_calls`` of a whole answer, given at once: without ``tool_calls`` if there are
        none, and with the content ``None`` if there are calls alone.
        """
        content, found = "", list[dict[str, Any]]()
        for delta in (*self.add(text), *self.end()):
            content += delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:  # begins a call, and all others go on with the last one
                    found.append({name: part[name] for name in ("id", "type", "function")})
                else:
                    found[-1]["function"]["arguments"] += part["function"]["arguments"]
        return {"content": content or None, "tool_calls": found} if found else {"content": content}

    def _content(self) -> Iterator[dict[str, Any]]:
        """Yield the held text up to the first place at which a call begins or may begin, and the first delta of the
        call if its header is complete. The rest stays held.
        """
        held, at = self._held, len(self._held)
        header = None
        for place in self._places():
            # some forms of a call stand only at the very beginning of an answer
            known = self._later if self._begun or place else self._first
            header = _begins(held, place, known)
            if header is not None:
                at = place
                break
        before, self._held = held[:at], held[at:]
        if before:
            self._begun = True
            yield {"content": before}
        if header:  # an empty one may become a call with more text
            yield self._call(header, self._first[header])

    def _places(self) -> list[int]:
        """Return the indexes in the held text, in order, at which a call may begin: 0 at the very beginning of the
        answer, and, unless an answer is either a text or calls, each character with which a mark begins.
        """
        first = [] if self._begun or not self._held else [0]
        if not self._anywhere:
            return first
        return sorted({*first, *(place for place, letter in enumerate(self._held) if letter in self._starts)})

    def _arguments(self) -> Iterator[dict[str, Any]]:
        """Yield the held text as far as it belongs to the arguments of the current call; nothing if there is none. The
        call ends with the JSON object.
        """
        size = self._object.take(self._held)
        piece, self._held = self._held[:size], self._held[size:]
        if self._object.ended:
            self._state = "after"
        if piece:
            yield {"tool_calls": [{"index": self.count - 1, "function": {"arguments": piece}}]}

    def _after(self) -> Iterator[dict[str, Any]]:
        """Yield the first delta of a further call, if its header stands complete behind a call that has ended; else
        nothing: other text behind a call is no content.
        """
        if header := _begins(self._held, 0, self._next):
            yield self._call(header, self._next[header])

    def _call(self, header: str, name: str) -> dict[str, Any]:
        """Begin the call of a function whose header the held text begins with, and return its first delta: id, name,
        and empty arguments.

        The held text then begins with the arguments: the header's last character is their brace.
        """
        # the header ends with the brace that opens the arguments
        self._held, self._state, self._object = self._held[len(header) - 1 :], "arguments", _Object()
        about = {"index": self.count, "id": f"call_{self._name}_{self.count}", "type": "function"}
        self.count += 1
        return {"tool_calls": [{**about, "function": {"name": name, "arguments": ""}}]}


class _Object:
    """Finds the end of a JSON object in pieces of text. The first character is the brace that opens the object.

    Attributes:
        ended: whether the end has been found.
    """

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.ended = False

    def take(self, text: str) -> int:
        """Read the next characters of a JSON object, and return how many of them belong to it: all, or those up to its
        end, which sets ``ended``. What is no JSON is not noticed.
        """
        for place, letter in enumerate(text):
            if self._quoted:  # brackets in a text do not count
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
                continue
            self._quoted = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if not self._depth:
                self.ended = True
                return place + 1
        return len(text)


def _begins(text: str, place: int, headers: Mapping[str, str]) -> str | None:
    """Return the header (one of the keys) with which the text goes on at an index; ``""`` if the rest of the text is
    only the beginning of one; ``None`` if no header begins there.
    """
    rest = text[place:]
    unclear = False
    for header in headers:
        if rest.startswith(header):
            return header
        unclear = unclear or header.startswith(rest)
    return "" if unclear else None


MOST = 128
"""Tools that a body may have."""
_EXAMPLE = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
_CHOICES = '"none", "auto", "required", {"type": "function", "function": {"name": "…"}} and a list of allowed_tools'
_ALIKE = (
    "and tools that may be called go not together with this model: its calls begin like JSON. Leave one out, or give "
    'tool_choice "required" or "none"'
)
_ANY = r"(.|\n)"  # a dot alone does not match the end of a line


@dataclass(frozen=True)
class Tools:
    """Tools that the model may call in an answer.

    Attributes:
        functions: their definitions, each with a ``name``.
        choice: ``required``: the model must call one; ``auto``: it may.
        allowed: the names of those that it may call; ``None``: all.
        parallel: whether it may call several.
        use: how the model is told, and the form of its calls.
    """

    functions: tuple[Mapping[str, Any], ...]
    choice: Literal["auto", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True
    use: ToolUse = BY_WORDS

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the functions that may be called: all, or those of ``allowed`` in the order of all."""
        names = tuple(function["name"] for function in self.functions)
        return names if self.allowed is None else tuple(name for name in names if name in self.allowed)

    @property
    def described(self) -> tuple[dict[str, Any], ...]:
        """Return the definitions of all tools, also of those that may not be called, in OpenAI's form, which chat
        templates take.
        """
        return tuple({"type": "function", "function": _described(function)} for function in self.functions)

    def told(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the messages of a chat (one at least) that tell the model of all tools, in the words of its
        form: at the end of the first message if that is the system's, otherwise in a system message before it.
        """
        shown = (json.dumps(tool, ensure_ascii=False) for tool in self.described)
        text = self.use.form.words.format(tools="\n".join(shown))
        first, rest = messages[0], list(map(dict, messages[1:]))
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
        return [{"role": "system", "content": text}, dict(first), *rest]

    def structure(self, content: Structure | None, name: str | None = None) -> Structure:
        """Build the grammar, of llguidance, of an answer that may call tools, so that names and arguments of calls are
        always right; with a rule for each function that may be called.

        Args:
            content: the form of an answer without calls; ``None``: any text.
            name: the field that gives this form, for errors.

        Raises:
            ParameterError: calls cannot be told from an answer of that form, or the grammar is refused.
        """
        if content is not None and content.kind != "json":
            raise ParameterError(
                name or "structured_outputs", "names a form that goes together with no tools; leave one out"
            )
        form = self.use.form
        several = self.parallel and form.next is not None  # some forms have one call in an answer
        lines = ["%llguidance {}", *self._start(content)]
        lines.append(f"calls: opens name {'more* ' if several else ''}{json.dumps(form.last) if form.last else ''}")
        lines.append(f"opens: {' | '.join(map(json.dumps, form.opens))}")
        if several:
            lines.append(f"more: {json.dumps(form.next)} name")
        lines.append("name: " + " | ".join(f"call_{place}" for place in range(len(self.names))))
        # in the order of `names`, by whose places the rules are called
        callable_ = [function for function in self.functions if function["name"] in self.names]
        lines += [self._rule(place, function) for place, function in enumerate(callable_)]
        try:
            return checked(Structure("lark", "\n".join(lines) + "\n"))
        except InputError as error:
            raise ParameterError("tools", f"is refused: {error}") from error

    def _start(self, content: Structure | None) -> list[str]:
        """Return the first rules of the grammar, as lines: what may come before the rule ``calls``, or in place of it.

        Raises:
            ParameterError: calls cannot be told from an answer of that form.
        """
        form, token = self.use.form, self.use.token
        mark = json.dumps(form.mark) if token is None else f"<[{token}]>"
        # where calls can do without the mark, only one that is a special token may come first
        begun = "mark" if form.needs_mark else "" if token is None else "mark?"
        marks = [f"mark: {mark}"] if begun else []  # only the rules below that name it need it
        if self.choice == "required":
            return [f"start: {begun} calls", *marks]
        if content is not None:
            if not begun:
                raise ParameterError("response_format", _ALIKE)
            return ["start: mark calls | content", *marks, f"content: %json {content.text}"]
        if not form.needs_mark:
            call = form.opens[0].replace("{", r"\{")  # a text in which one begins would be read as a call
            return [f"start: TEXT | {begun} calls", *marks, f"TEXT: /{_ANY}*/ & ~/{call}{_ANY}*/"]
        if token is not None:
            return ["start: TEXT | mark calls", *marks, f"TEXT: /{_ANY}*/"]
        # the text ends at the first mark
        return ["start: TEXT | open calls", f"open[lazy]: TEXT {mark}", f"TEXT: /{_ANY}*/"]

    def _rule(self, place: int, function: Mapping[str, Any]) -> str:
        """Return the grammar rule ``call_PLACE`` for a call of one function: its name, its arguments by their schema,
        and what closes the call.
        """
        begins = json.dumps(f"{function['name']}{self.use.form.middle}")
        return f"call_{place}: {begins} %json {json.dumps(function['schema'])} {json.dumps(self.use.form.close)}"


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model is told about a function: its name, description and parameters, as far as it has them."""
    return {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}


def tools_of(given: Mapping[str, Any], use: ToolUse) -> Tools | None:
    """Return the tools of a chat's body, checked, with what ``tool_choice`` and ``parallel_tool_calls`` say of them;
    ``None`` if there are none, or if ``tool_choice`` is ``"none"``.

    Args:
        given: the body.
        use: how the model uses tools.

    Raises:
        ParameterError: a tool or the choice cannot be read.
    """
    functions = _functions(given.get("tools", []))
    choice, allowed = given.get("tool_choice", "auto"), None
    parallel = bool(given.get("parallel_tool_calls", True))
    if isinstance(choice, dict):
        shown, listed = short(choice), choice.get("type") == "allowed_tools"
        # one function by name is a list of one that must be called
        inner = choice.get("allowed_tools") if listed else {"mode": "required", "tools": [choice]}
        allowed = _names(inner)
        if not allowed or not isinstance(inner, dict) or inner.get("mode") not in ("auto", "required"):
            raise ParameterError("tool_choice", f"is {shown}; there are {_CHOICES}")
        known = [function["name"] for function in functions]
        if missing := [name for name in allowed if name not in known]:
            raise ParameterError("tool_choice", f"names {short(missing[0])}, which is none of tools")
        choice, parallel = inner["mode"], parallel and listed
    if choice not in ("none", "auto", "required"):
        raise ParameterError("tool_choice", f"is {short(choice)}; there are {_CHOICES}")
    if choice == "required" and not functions:
        raise ParameterError("tool_choice", 'is "required", and there are no tools')
    if not functions or choice == "none":
        return None
    return Tools(functions, choice, allowed, parallel=parallel, use=use)


def _names(given: object) -> tuple[str, ...] | None:
    """Return the names of the functions in the list ``tools`` of an object, such as an ``allowed_tools``; ``None`` if
    the object, or an entry of the list, has another form.
    """
    # what is no list counts as one of a wrong entry
    tools = given.get("tools") if isinstance(given, dict) else None
    found = []
    for tool in tools if isinstance(tools, list) else [None]:
        inner = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return None
        found.append(inner["name"])
    return tuple(found)


def _functions(given: Sequence[object]) -> tuple[Mapping[str, Any], ...]:
    """Return the ``function`` of each tool in a body's list, checked, with the grammar's schema of its arguments added
    as ``schema``.

    Raises:
        ParameterError: there are too many tools, two with one name, or a tool that cannot be read.
    """
    if len(given) > MOST:
        raise ParameterError("tools", f"has {len(given)} tools; there may be {MOST}")
    found = [_function(f"tools[{place}]", tool) for place, tool in enumerate(given)]
    names = [function["name"] for function in found]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ParameterError("tools", f"has two tools with the name {short(doubled)}")
    return tuple(found)


def _function(place: str, tool: object) -> Mapping[str, Any]:
    """Return a tool's ``function``, checked, with ``schema`` added: its ``parameters`` as `compact` returns them.

    Without ``strict``, unknown keywords of the schema are ignored.

    Raises:
        ParameterError: the tool is no function, or its name or its schema cannot be used.
    """
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
        # a schema of arguments that names no type is an object's
        schema = compact({"type": "object", **parameters}, lenient=not inner.get("strict"))
        # the template writes these as they are, in a prompt that is UTF-8
        whole_text(f"{place}.function.parameters", json.dumps(parameters, ensure_ascii=False))
    except InputError as error:
        raise ParameterError(f"{place}.function.parameters", f"is refused: {error}") from error
    if schema["type"] != "object":
        raise ParameterError(f"{place}.function.parameters.type", f'is {short(schema["type"])}; give "object"')
    return {**inner, "schema": schema}
