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
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvkeep.errors import InputError
from kvkeep.models.worker import Worker

TIMEOUT_S = 10.0
MEMORY_BYTES = 2**30
_REMEDY = "Use `raw=True` to leave it out and write the whole prompt."


def fill(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text of a conversation in the tokenizer's chat template, up to the beginning of the model's answer.

    Args:
        tokenizer: has the template.
        messages: each with ``role`` and ``content``.
        tools: functions of which the template tells the model, if it takes them.

    Raises:
        InputError: the template fails, or takes too long or too much memory.
    """
    known = list(map(dict, tools)) or None
    try:
        asked = {
            **tokenizer.special_tokens_map,
            "chat_template": tokenizer.get_chat_template(tools=known),
            "tools": known,
            "messages": list(map(dict, messages)),
            "add_generation_prompt": True,
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
    """The process's answer to a line: ``text`` or ``error``.

    Raises:
        InputError: the process does not start.
    """
    try:
        found = _WORKER.ask(line, TIMEOUT_S)
    except OSError as error:
        raise InputError(f"The process that fills in chat templates does not start ({error}). {_REMEDY}") from error
    return found or {"error": f"it takes more than {TIMEOUT_S:.0f} s or {MEMORY_BYTES >> 20} MiB"}


def _new() -> Worker:
    return Worker(Path(__file__).with_name("render.py"), MEMORY_BYTES)


_WORKER = _new()
_LOCK = threading.Lock()


def _begin_anew() -> None:
    """Use another process in a forked child: two that share one would take each other's answers."""
    global _WORKER, _LOCK
    _WORKER, _LOCK = _new(), threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _WORKER.end())
