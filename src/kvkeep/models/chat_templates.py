"""Chat templates, filled in by a process of their own, since a template is a program that may never end.

Jinja's sandbox keeps a template from files and from Python. It does not bound time and memory: two nested loops, a
macro that calls itself twice or ``10**10**10`` never end, and nothing inside a process can stop all of these. So a
second process fills in templates. It is started when it is first needed, answers in well under a millisecond, and is
killed when it does not.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvkeep.errors import InputError
from kvkeep.models.sandbox import SandboxProcess
from kvkeep.models.special_tokens import added_tokens, special_tokens_of

TIMEOUT_S = 10.0
"""Seconds after which a template is taken for one that never ends."""
MEMORY_BYTES = 2**30
"""Memory that the process may still allocate when it is ready."""
_TAKEN = {"messages", "conversations", "tools", "chat_template", "return_assistant_tokens_mask"}
"""Names that no variable may have: they are the conversation, or arguments of transformers."""
_REMEDY = "Use `raw=True` (over HTTP: /v1/completions) to leave it out and write the whole prompt."
SYSTEM_ROLES = ("system", "developer")
_MARK = "kvkeepmessage"
"""Stands for a message's text; in small letters, as `_probed` compares it."""
_log = logging.getLogger(__name__)


def fill(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with the tokenizer's chat template, up to the beginning of the model's answer.

    A template that reads content as a list of parts gets parts. System messages that the template refuses or leaves out
    become parts of the user's messages beside them. Where the template refuses messages of one role that follow each
    other, they are joined; and where it refuses arguments of calls that are no JSON object, it gets an object that
    holds their text. Characters of control tokens are quoted, see `kvkeep.models.special_tokens`, but in an assistant's
    messages.

    Args:
        tokenizer: has the template.
        messages: each with ``role`` and ``content``.
        tools: functions of which the template tells the model, if it takes them.
        variables: more variables of the template, such as ``{"enable_thinking": False}``. ``add_generation_prompt`` and
            ``continue_final_message`` have their meaning in transformers.

    Raises:
        InputError: the template fails, takes too long or too much memory, or leaves out the user's last message; or a
            variable has a name that the conversation has already.
    """
    if taken := _TAKEN & (variables or {}).keys():
        raise InputError(f"The chat template cannot be given the variable {min(taken)}: kvkeep sets it. Leave it out.")
    quote = special_tokens_of(tokenizer).quote
    known = quote(list(map(dict, tools))) or None
    # a tokenizer with several templates may have one for tools, and the others may leave calls out
    shown = [] if known is None and any(message.get("tool_calls") for message in messages) else known
    try:
        asked = {**tokenizer.special_tokens_map, "chat_template": tokenizer.get_chat_template(tools=shown)}
        # sorted, since what has been found out about a template is kept by this text
        template = ChatTemplate(json.dumps({**asked, "add_generation_prompt": True}, sort_keys=True))
    except Exception as error:  # templates without a default, tokens that are not text
        raise InputError(f"The tokenizer's chat template cannot be used ({error!s:.200}). {_REMEDY}") from error
    own = [dict(message) if message["role"] == "assistant" else _quoted(message, quote) for message in messages]
    return template.fill(own, {"tools": known, **quote(variables or {})})


def _quoted(message: Mapping[str, Any], quote: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message in which all control tokens are quoted, the role apart."""
    return {name: part if name == "role" else quote(part) for name, part in message.items()}


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and what it does with messages.

    Attributes:
        asked: the template and its variables, in the JSON that the template process takes.
    """

    asked: str

    def fill(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render a conversation, in the first of its forms that the template does not refuse and whose system messages
        it shows.

        Raises:
            InputError: see `fill`.
        """
        refused: Exception | None = None
        for given in _variants(messages):
            try:
                text = _rendered(self._given(given, variables))
            except EndlessTemplateError:
                raise  # each further form could take as long again
            except InputError as error:
                refused = refused or error  # the first is of the conversation as it was sent
                continue
            if all(self._shows(text, given, i, variables) for i, m in enumerate(given) if m["role"] in SYSTEM_ROLES):
                break
        else:
            raise refused or InputError(f"The tokenizer's chat template leaves out system messages. {_REMEDY}")
        if given is not messages:
            _note(self.asked, any(message["role"] in SYSTEM_ROLES for message in messages))
        last = max((place for place, message in enumerate(given) if message["role"] == "user"), default=None)
        if last is not None and not self._shows(text, given, last, variables):
            raise InputError(f"The tokenizer's chat template leaves out the user's last message. {_REMEDY}")
        return text

    def _shows(
        self, text: str, messages: Sequence[Mapping[str, Any]], place: int, variables: Mapping[str, Any]
    ) -> bool:
        """Return whether a rendered conversation contains the text of one of its messages: as it is, or else in
        capitals or another form in which a mark in its place comes out.
        """
        content = messages[place]["content"].strip()
        if content in text:
            return True
        marked = [{**m, "content": _MARK} if i == place else m for i, m in enumerate(messages)]
        return _MARK in _probed(self._given(marked, variables))

    def _given(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request to the template process, with each message's content in the form that the template
        reads.
        """
        parts = _roles_in_parts(self.asked)
        given = [_in_form(message, parts) for message in messages]
        return {**json.loads(self.asked), **variables, "messages": given}


def _in_form(message: Mapping[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Return a message with its content as a list of parts if the template reads its role in that form."""
    if message["role"] not in parts:
        return dict(message)
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _variants(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the conversation as it is, then in other forms for a template that refuses it.

    System messages are folded, then neighbours of one role joined, then arguments of calls made objects.
    """
    folded: list[Sequence[Mapping[str, Any]]] = [messages]
    if any(message["role"] in SYSTEM_ROLES for message in messages):
        folded += [_folded(messages, keep_first=True), _folded(messages)]
    yield from folded
    joined = [_joined(given) for given in folded]
    others = [given for given, before in zip(joined, folded, strict=True) if len(given) < len(before)]
    yield from others
    for given in (*folded, *others):
        if (changed := list(map(_with_objects, given))) != list(given):
            yield changed


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conversation with neighbouring messages of the user, or of the assistant, merged into one, their texts
    a blank line apart, for templates whose roles must alternate. Nothing is joined to a message that calls tools.
    """
    found: list[Mapping[str, Any]] = []
    for message in messages:
        last = found[-1] if found else None
        # results of calls come behind the message that makes them, so nothing is joined to it
        if last and message["role"] == last["role"] in ("user", "assistant") and not last.get("tool_calls"):
            texts = [part["content"] for part in (last, message) if part["content"]]
            found[-1] = {**last, **message, "content": "\n\n".join(texts)}
        else:
            found.append(message)
    return found


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose tool calls have objects as arguments: a text becomes ``{"arguments": text}``. A message
    without such texts is returned itself.

    Agents send back what a model has written, and a template that reads the arguments by name fails on a text.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(_has_text(call) for call in calls):
        return message
    made = [
        {**call, "function": {**call["function"], "arguments": {"arguments": call["function"]["arguments"]}}}
        if _has_text(call)
        else call
        for call in calls
    ]
    return {**message, "tool_calls": made}


def _has_text(call: Any) -> bool:
    """Return whether the arguments of a tool call are a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("arguments"), str)


def _folded(messages: Sequence[Mapping[str, Any]], *, keep_first: bool = False) -> list[Mapping[str, Any]]:
    """Return the conversation with the text of system messages in the user's messages beside them.

    A system message is joined to the user's message directly before it, and a user's message to the system messages
    directly before it. System messages without such a neighbour become a message of the user by themselves.

    Args:
        messages: the conversation.
        keep_first: whether the system messages at the beginning become one system message instead, for templates that
            take one.
    """
    # how many system messages the conversation begins with
    told = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM_ROLES), len(messages))
    start = told if keep_first else 0
    first = "\n\n".join(message["content"] for message in messages[:start])
    found: list[dict[str, Any]] = [{"role": "system", "content": first}] if start else []
    joins = False  # whether the last message is, or ends with, a system message
    for message in messages[start:]:
        is_system = message["role"] in SYSTEM_ROLES
        made = {**message, "role": "user"} if is_system else dict(message)
        last_is_user = len(found) > 0 and found[-1]["role"] == "user"
        if made["role"] == "user" and last_is_user and (is_system or joins):
            made["content"] = f"{found.pop()['content']}\n\n{made['content']}"
        found.append(made)
        joins = is_system
    return list(found)


@functools.cache
def _note(template: str, has_system: bool) -> None:
    """Log a warning, once for each template, that messages were changed for it, and in which way."""
    # it is only the key under which the cache knows that the note was logged
    del template
    if has_system:
        _log.warning(
            "The chat template does not take the system messages as they are: their text, and that of tools, becomes "
            "part of the user's messages beside them."
        )
    else:
        _log.warning(
            "The chat template does not take the messages as they are: those of one role that follow each other are "
            "joined, and arguments of calls that are no JSON object become one."
        )


@functools.lru_cache(maxsize=64)
def _roles_in_parts(asked: str) -> frozenset[str]:
    """Return those of the roles user, system, assistant and tool whose content a template reads as a list of parts, and
    not as a text, found by rendering a marked message in both forms.

    Args:
        asked: see `ChatTemplate`.
    """
    options, roles = json.loads(asked), set[str]()
    user: dict[str, Any] = {"role": "user", "content": "a"}
    answer: dict[str, Any] = {"role": "assistant", "content": "a"}
    # nine letters and digits, as Mistral's templates ask of an id
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {}}}
    calls = [user, {**answer, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "abcdefgh1", "content": _MARK}]
    marked: dict[str, list[dict[str, Any]]] = {
        "user": [{**user, "content": _MARK}],
        "system": [{"role": "system", "content": _MARK}, user],
        "assistant": [user, {**answer, "content": _MARK}, user],
        "tool": calls,
    }
    for role, messages in marked.items():
        for parts in (roles, roles | {role}):
            given = [_in_form(message, parts) for message in messages]
            if _MARK in _probed({**options, "messages": given}):
                roles = parts
                break
        else:
            if role == "user":  # nothing can be found out about such a template
                break
    return frozenset(roles)


def _probed(asked: Mapping[str, Any]) -> str:
    """Render a request to the template process, and return the text in lower case; empty if the template refuses it.

    Raises:
        EndlessTemplateError: the template does not come to an end.
    """
    try:
        return _rendered(asked).casefold()
    except EndlessTemplateError:
        raise
    except InputError:
        return ""


def _rendered(asked: Mapping[str, Any]) -> str:
    """Return the text that the template process makes of a request: a template, its variables and the messages.

    Raises:
        EndlessTemplateError: it takes too long, or too much memory.
        InputError: the template fails, what it is given cannot be JSON, or the process does not start.
    """
    try:
        line = json.dumps(asked)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The tokenizer's chat template cannot be used ({error!s:.200}). {_REMEDY}") from error
    with _LOCK:
        answer = _asked(line)
    if answer is None:
        why = f"it takes more than {TIMEOUT_S:.0f} s or {MEMORY_BYTES >> 20} MiB"
        raise EndlessTemplateError(f"The tokenizer's chat template fails ({why}). {_REMEDY}")
    if "text" not in answer:
        raise InputError(f"The tokenizer's chat template fails ({answer['error']}). {_REMEDY}")
    return answer["text"]


def reads(tokenizer: PreTrainedTokenizerBase, variable: str) -> bool:
    """Return whether a chat template of the tokenizer contains the name of a variable as a word."""
    found = tokenizer.chat_template
    texts = found.values() if isinstance(found, Mapping) else (found,)
    word = re.compile(rf"(?<!\w){re.escape(variable)}(?!\w)")
    return any(word.search(text) is not None for text in texts if isinstance(text, str))


class EndlessTemplateError(InputError):
    """A chat template takes too long, or too much memory."""


def _asked(line: str) -> dict[str, str] | None:
    """Send a line to the template process, and return its answer, with ``text`` or ``error``; ``None`` if it took too
    long and was killed, or ended.

    Raises:
        InputError: the process does not start.
    """
    try:
        return _WORKER.ask(line, TIMEOUT_S)
    except OSError as error:
        raise InputError(f"The process that fills in chat templates does not start ({error}). {_REMEDY}") from error


def _new() -> SandboxProcess:
    """Return a template process that is not started yet."""
    return SandboxProcess(Path(__file__).with_name("sandbox_render.py"), MEMORY_BYTES)


_WORKER = _new()
_LOCK = threading.Lock()


def _begin_anew() -> None:
    """Replace the process and its lock in a forked child, which would otherwise take its parent's answers."""
    global _WORKER, _LOCK
    _WORKER, _LOCK = _new(), threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _WORKER.end())  # whichever it is by then


# The token with which a template ends an assistant's turn.

_ANSWER = "kvkeepanswer"


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the tokens that were added to the tokenizer's vocabulary: special ones, and others."""
    return {*getattr(tokenizer, "all_special_ids", ()), *added_tokens(tokenizer)}


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return a set with the id of the token with which the chat template ends an assistant's turn; an empty one if that
    is an ordinary token, or the template fails.

    Where nothing ends the last turn, it is the token with which the user's next one begins.
    """
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}
    for messages in ([asked, answer], [asked, answer, asked]):
        try:
            text = fill(tokenizer, messages, variables={"add_generation_prompt": False})
        except InputError:  # the template fails, which is told to whoever sends a conversation
            return frozenset()
        _, found, after = text.rpartition(_ANSWER)
        if found and after.strip():
            first = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1]
            return frozenset(first) & control_tokens(tokenizer)
    return frozenset()
