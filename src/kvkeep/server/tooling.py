"""Which form of calls a model uses, found by a look at what its chat template writes."""

from __future__ import annotations

from typing import Any

from kvkeep.errors import InputError
from kvkeep.models.chat_templates import fill
from kvkeep.models.load import Checkpoint
from kvkeep.openai.messages import HERMES, TOOL_FORMS, ToolForm, ToolUse

AUTO = "auto"
_NAME = "kvkeep_probe"
_FUNCTION = {"name": _NAME, "description": "A probe.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": _NAME, "arguments": {"probe": 1}}}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
_CALLED: list[dict[str, Any]] = [
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "1"},
]


def tool_use_of(checkpoint: Checkpoint, name: str = AUTO) -> ToolUse:
    """How a model uses tools.

    Args:
        checkpoint: its tokenizer has the chat template.
        name: the form, one of `TOOL_FORMS`, or ``auto``: the one that the template writes calls in, or else Hermes'.

    Raises:
        InputError: there is no such form.
    """
    if name != AUTO and name not in TOOL_FORMS:
        raise InputError(f"tool_form={name:.40} is none of {', '.join((AUTO, *TOOL_FORMS))}.")
    told, called = (_filled(checkpoint, one) for one in (_ASKED, _CALLED))
    written = next((one for one in TOOL_FORMS.values() if _writes(one, called)), None)
    form = (written or HERMES) if name == AUTO else TOOL_FORMS[name]
    return ToolUse(form, form is written and _NAME in told, _token(checkpoint, form))


def _filled(checkpoint: Checkpoint, messages: list[dict[str, Any]]) -> str:
    """The text of a conversation with a tool; empty if the template refuses it."""
    if checkpoint.tokenizer.chat_template is None:
        return ""
    try:
        return fill(checkpoint.tokenizer, messages, _TOOLS)
    except InputError:
        return ""


def _writes(form: ToolForm, text: str) -> bool:
    """Whether a template has written the probe's call in a form."""
    marks = [form.mark] if form.needs_mark else [""]
    return any(f"{mark}{begin}{_NAME}{form.middle}{{" in text for mark in marks for begin in form.opens)


def _token(checkpoint: Checkpoint, form: ToolForm) -> int | None:
    """The token of a form's mark, if it is a special one and stands once in an answer."""
    if form.next is not None and form.mark in form.next:
        return None
    added = getattr(checkpoint.tokenizer, "added_tokens_decoder", {})
    return next((token for token, one in added.items() if one.special and one.content == form.mark), None)
