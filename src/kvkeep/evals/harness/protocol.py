"""What a policy has read when a prompt of a harness is cut: the protocol of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.errors import InputError

WAYS = ("inside", "later")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Protocol:
    """Where a prompt is cut.

    Attributes:
        question: ``inside``: the question is read before the cut; ``later``: the text before it is cut, then the
            question follows.
        examples: ``inside``: solved examples are read and cut together with the question; ``later``: the examples are
            cut, then the item with its question follows.
        question_mark: begins the question; the last one in a prompt counts.
        examples_mark: separates examples; the last one in a prompt counts.

    Raises:
        InputError: there is no such way, or a mark is empty.
    """

    question: str = "inside"
    examples: str = "inside"
    question_mark: str = "\nQuestion:"
    examples_mark: str = "\n\n"

    def __post_init__(self) -> None:
        for name, way in {"question": self.question, "examples": self.examples}.items():
            if way not in WAYS:
                raise InputError(f"{name}={way!r} is no protocol; use {' or '.join(WAYS)}.")
        for name, mark in {"question_mark": self.question_mark, "examples_mark": self.examples_mark}.items():
            if not isinstance(mark, str) or not mark:
                raise InputError(f"{name}={mark!r} is no text, so nothing can be found by it.")

    def __str__(self) -> str:
        return f"question={self.question},examples={self.examples}"

    @property
    def inside(self) -> bool:
        """Whether the whole prompt is read before the cut."""
        return self.question == self.examples == "inside"

    def place(self, prompt: str) -> int:
        """The number of characters of a prompt that are read and cut before the rest follows; 0 without a mark."""
        if self.question == "later":
            return max(0, prompt.rfind(self.question_mark))
        return max(0, prompt.rfind(self.examples_mark))

    def first(self, prompt: str, ids: Sequence[int], encode: Encode) -> int:
        """The number of tokens of a prompt that are read and cut before the rest follows; 0 without a mark.

        Args:
            prompt: the text.
            ids: its tokens.
            encode: turns texts into tokens as the prompt was turned.
        """
        if not (characters := self.place(prompt)):
            return 0
        begin = encode(prompt[:characters])
        same = next((i for i, (a, b) in enumerate(zip(begin, ids, strict=False)) if a != b), min(len(begin), len(ids)))
        return min(same, len(ids) - 1)

    def no_cut(self, prompt: str, lost: int) -> InputError:
        """The error about a prompt without a text that could be cut before its question."""
        name = "question_mark" if self.question == "later" else "examples_mark"
        mark = getattr(self, name)
        if lost and self.place(prompt):
            return InputError(
                f"The first {lost} tokens of a prompt are too many for `max_length`, and nothing is left of the text "
                f"before {mark!r}. Allow longer texts, or give fewer examples."
            )
        return InputError(
            f"A prompt has no text before {mark!r}, so {self} cuts nothing: {prompt[:60]!r} … Give the task's own "
            f"`{name}`, or read the question inside."
        )
