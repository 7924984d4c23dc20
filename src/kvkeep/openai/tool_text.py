"""How calls of tools and their results stand in a text: as Qwen's chat template writes them."""

from __future__ import annotations

from collections.abc import Iterable

OPEN, CLOSE = "<tool_call>", "\n</tool_call>"
NAME = r"[A-Za-z0-9_-]{1,64}"
"""Names of tools, in OpenAI's words."""


def calls_text(calls: Iterable[tuple[str, str]]) -> str:
    """The text of some calls.

    Args:
        calls: names and arguments, which are JSON.
    """
    return "\n".join(f'{OPEN}\n{{"name": "{name}", "arguments": {given}}}{CLOSE}' for name, given in calls)


def result_text(content: str) -> str:
    """The text of a call's result, which is a message of the user."""
    return f"<tool_response>\n{content}\n</tool_response>"
