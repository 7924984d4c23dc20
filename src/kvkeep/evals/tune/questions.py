"""The user's questions: a JSONL file whose lines have a question, its answer, and perhaps a text of their own."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import InputError
from kvkeep.result_files import parse

FIELDS = ("text", "question", "answer")


@dataclass(frozen=True)
class UserQuestion:
    """A question of the user.

    Attributes:
        text: the text that it is about.
        question: the question.
        answers: each of them is a right answer.
    """

    text: str
    question: str
    answers: tuple[str, ...]

    def right(self, reply: str) -> bool:
        """Whether the first line of a reply contains an answer as whole words."""
        line = next(filter(None, (line.strip() for line in reply.splitlines())), "")
        return any(_words(one) in _words(line) if _words(one) else one in line for one in self.answers)


def read_questions(content: str, source: str, text: str | None) -> list[UserQuestion]:
    """The questions of a file.

    Args:
        content: its content.
        source: its name in messages.
        text: the text of questions without one.

    Raises:
        InputError: a line is no question, or there is none.
    """
    found = [
        _question(line, f"Line {number} of {source}", text)
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not found:
        raise InputError(f'{source} has no questions. A line is {{"question": "…", "answer": "…"}}.')
    return found


def _question(line: str, place: str, text: str | None) -> UserQuestion:
    try:
        entry = parse(line.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise InputError(f'{place} is no JSON: {error}. Write {{"question": "…", "answer": "…"}}.') from error
    if not isinstance(entry, dict):
        raise InputError(f'{place} is no JSON object. Write {{"question": "…", "answer": "…"}}.')
    about = text if entry.get("text") is None else _text(entry, "text", place)
    if about is None:
        raise InputError(f"{place} has no text, and none was given. Give it one, or a `text` for all questions.")
    return UserQuestion(about, _text(entry, "question", place), _answers(entry, place))


def _answers(entry: dict[str, Any], place: str) -> tuple[str, ...]:
    given = entry.get("answer")
    several = given if isinstance(given, list) and given else [given]
    return tuple(_text({**entry, "answer": one}, "answer", place) for one in several)


def _text(entry: dict[str, Any], field: str, place: str) -> str:
    value = entry.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    if value is None:
        others = [name for name in entry if name not in FIELDS]
        close = difflib.get_close_matches(field, others, n=1, cutoff=0.5)
        meant = f" Did you mean {field!r} by {close[0]!r}?" if close else ""
        raise InputError(f'{place} has no {field}.{meant} A line is {{"question": "…", "answer": "…"}}.')
    raise InputError(f"{place}: its {field} is empty or no text: {value!r:.80}.")


def _words(text: str) -> str:
    """The words of a text in lower case, each between spaces; empty if it has none."""
    found = re.findall(r"\w+", text.lower())
    return f" {' '.join(found)} " if found else ""
