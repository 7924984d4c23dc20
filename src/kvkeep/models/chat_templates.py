"""Chat templates, filled in by a process of their own, since a template is a program that may never end.

Jinja's sandbox keeps a template from files and from Python. It does not bound time and memory: two nested loops, a
macro that calls itself twice or ``10**10**10`` never end, and nothing inside a process can stop all of these. So a
second process fills in templates. It is started when it is first needed, answers in well under a millisecond, and is
killed when it does not.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from kvkeep.errors import InputError
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.files import explained
from kvkeep.models.sandbox import SandboxProcess
from kvkeep.pins import Span, Spans, spans

TIMEOUT_S = 10.0
MEMORY_BYTES = 2**30
_TAKEN = {"messages", "conversations", "tools", "chat_template", "return_assistant_tokens_mask"}
"""Names that no variable may have: they are the conversation, or arguments of transformers."""
_REMEDY = "Use `raw=True` to leave it out and write the whole prompt."


def fill(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation in the tokenizer's chat template, up to the beginning of the model's answer.

    Args:
        tokenizer: has the template.
        messages: each with ``role`` and ``content``.
        tools: functions of which the template tells the model, if it takes them.
        variables: more variables of the template, such as ``{"enable_thinking": False}``. ``add_generation_prompt`` and
            ``continue_final_message`` have their meaning in transformers.

    Raises:
        InputError: the template fails, or takes too long or too much memory; or a variable has a name that the
            conversation has already.
    """
    known = list(map(dict, tools)) or None
    if taken := _TAKEN & (variables or {}).keys():
        raise InputError(f"The chat template cannot be given the variable {min(taken)}: kvkeep sets it. Leave it out.")
    try:
        asked = {
            **tokenizer.special_tokens_map,
            "chat_template": tokenizer.get_chat_template(tools=known),
            "tools": known,
            "messages": list(map(dict, messages)),
            "add_generation_prompt": True,
            **(variables or {}),
        }
        line = json.dumps(asked)
    except Exception as error:  # templates without a default, tokens that are not text
        raise InputError(f"The tokenizer's chat template cannot be used ({error!s:.200}). {_REMEDY}") from error
    with _LOCK:
        answer = _asked(line)
    if "text" not in answer:
        raise InputError(f"The tokenizer's chat template fails ({answer['error']}). {_REMEDY}")
    return answer["text"]


def _asked(line: str) -> dict[str, str]:
    """Let the template process answer a line, and return its ``text`` or ``error``.

    Too slow an answer is an ``error``.

    Raises:
        InputError: the process does not start.
    """
    try:
        found = _WORKER.ask(line, TIMEOUT_S)
    except OSError as error:
        raise InputError(f"The process that fills in chat templates does not start ({error}). {_REMEDY}") from error
    return found or {"error": f"it takes more than {TIMEOUT_S:.0f} s or {MEMORY_BYTES >> 20} MiB"}


def _new() -> SandboxProcess:
    return SandboxProcess(Path(__file__).with_name("sandbox_render.py"), MEMORY_BYTES)


_WORKER = _new()
_LOCK = threading.Lock()


def _begin_anew() -> None:
    """Use a new process and lock in a forked child: two that share one would take each other's answers."""
    global _WORKER, _LOCK
    _WORKER, _LOCK = _new(), threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _WORKER.end())


# The token with which a template ends an assistant's turn.

_ANSWER = "kvkeepanswer"


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that a tokenizer has beside those of its model: special ones, and others that were added."""
    return {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", ())}


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the token with which the chat template ends an assistant's turn; none if it is no control token.

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


# The tokens of system messages within a conversation, found through the chat template and the tokenizer's offsets.

_MARK = "kvkeepsystemmessage"


def system_spans(checkpoint: Checkpoint, prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> Spans:
    """Return the spans of a conversation's tokens that hold the text of system messages; ``()`` without any.

    The template is filled in once more with a mark in the place of each such message; the text before and after the
    mark shows where the message stands.

    Args:
        checkpoint: the model and its tokenizer.
        prompt: a conversation; a text or token ids have no system message.

    Raises:
        InputError: the template fails, or does not show a system message in one piece; or the tokenizer does not tell
            where its tokens stand.
    """
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return ()
    messages = cast(Sequence[Mapping[str, str]], prompt)
    places = [i for i, message in enumerate(messages) if message["role"] in ("system", "developer")]
    if not places:
        return ()
    text = fill(checkpoint.tokenizer, messages)
    offsets = _offsets(checkpoint, text)
    return spans([_tokens(offsets, _place(checkpoint, text, messages, i)) for i in places])


def _place(checkpoint: Checkpoint, text: str, messages: Sequence[Mapping[str, str]], place: int) -> Span:
    """Return the first and the last character of one message in a conversation's text.

    Raises:
        InputError: the template does not show the message in one piece.
    """
    mark = _MARK
    while any(mark in message["content"] for message in messages):  # the place of the mark must be the message's
        mark += "x"
    marked = [{**message, "content": mark} if i == place else dict(message) for i, message in enumerate(messages)]
    before, found, after = fill(checkpoint.tokenizer, marked).partition(mark)
    stop = len(text) - len(after)
    # a template may repeat the message, change it, or let it change what stands around it
    whole = found and mark not in after and text.startswith(before) and text.endswith(after) and len(before) < stop
    if not whole or text[len(before) : stop].strip() != messages[place]["content"].strip():
        raise InputError(
            f"The chat template of {checkpoint.name} does not show the system message in one piece, so its tokens "
            "cannot be pinned."
        )
    return len(before), stop


def _offsets(checkpoint: Checkpoint, text: str) -> list[Span]:
    """Return the first character and the end of each token of a text.

    Raises:
        InputError: the tokenizer does not know the characters.
    """
    options: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True}
    with explained(checkpoint.name, "Its tokenizer cannot read the prompt"):
        try:
            found = checkpoint.tokenizer(text, **options)["offset_mapping"]
        except (NotImplementedError, KeyError, TypeError):
            found = None
    if not found:
        raise InputError(
            f"The tokenizer of {checkpoint.name} does not tell which characters its tokens hold, so a system message's "
            "tokens cannot be pinned. It needs a tokenizer.json."
        )
    return [(int(start), int(stop)) for start, stop in found]


def _tokens(offsets: Sequence[Span], place: Span) -> Span:
    """Return the span of the tokens that hold some of these characters; ``(0, 0)`` if none does."""
    inside = [i for i, (start, stop) in enumerate(offsets) if start < place[1] and stop > place[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
