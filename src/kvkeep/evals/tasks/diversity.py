"""Diversity of written text: distinct n-grams within each continuation, and Self-BLEU among all of them.

H2O (appendix C.1) reports Self-BLEU of texts of equal length. Continuations are greedy here, so nothing depends on
chance; the paper does not say how it samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar, final

from kvkeep.evals import grading
from kvkeep.evals.qa_task import Item, QATask, TaskCase, fitting, prompt_of
from kvkeep.evals.synthetic import Haystack, sentences
from kvkeep.evals.task import Options, describe
from kvkeep.models.checkpoint import Checkpoint

NEW = 64
"""Tokens of a continuation."""

_ORDER = 4
"""Self-BLEU's longest runs of words."""


def continued(checkpoint: Checkpoint, options: Options, length: int, new: int, n: int, about: str) -> list[Item]:
    """Return ``n`` items that are texts to continue, without a question; each begins with another sentence.

    Each is as long as fits into ``length`` tokens with a continuation of ``new`` tokens. The user's text begins again
    when it is over.

    Args:
        checkpoint: the model.
        options: the user's choices.
        length: most tokens of a text with its continuation.
        new: tokens of a continuation.
        n: number of texts.
        about: the items' name in messages.
    """
    items, own = [], sentences(options.text or "")
    for number in range(n):
        seed = options.seed * n + number
        haystack = Haystack(None, seed)
        # the seed has no part in the sentences of the user's text, so each item begins at another one of them; another
        # distance than 16 would change results
        skip = 16 * seed % max(1, len(own))

        def item(size: int, haystack: Haystack = haystack, skip: int = skip) -> Item:  # of this turn of the loop
            said = islice(cycle(own), skip, skip + size) if own else haystack.first(size)
            return Item(text=" ".join(said), question="", answers=(), chat=False)

        items.append(fitting(checkpoint, item, length - new, 1, about))
    return items


@final
@dataclass(frozen=True)
class Diversity(QATask):
    """Share of different pairs of words in each continuation; Self-BLEU and distinct-n over all of a case."""

    name: ClassVar[str] = "diversity"
    VERSION: ClassVar[int] = 2

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each context, with texts that fill it but for the `NEW` tokens of a continuation."""
        about["text"] = describe(options)
        n, made = options.limit or cls.items, {}
        for length in dict.fromkeys(options.contexts):
            named = f"diversity with a context of {length} and {NEW} new tokens"
            items = continued(checkpoint, options, length, NEW, n, named)
            prompts = [prompt_of(checkpoint, item, options.ask, i) for i, item in enumerate(items)]
            made[f"length={length}"] = TaskCase(
                prompts, NEW, lambda item, reply: grading.distinct([grading.tokens_of(reply)], 2)
            )
        return made

    def more(self, case: str, texts: Sequence[str]) -> dict[str, Any]:
        """Return self-BLEU, and distinct-1 to distinct-3, over all continuations.

        A single one has no self-BLEU (``None``).
        """
        words = [grading.tokens_of(text) for text in texts]
        found: dict[str, Any] = {f"distinct_{n}": grading.distinct(words, n) for n in (1, 2, 3)}
        return {**found, "self_bleu": grading.self_bleu(words, _ORDER) if len(words) > 1 else None}
