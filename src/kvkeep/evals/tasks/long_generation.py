"""Long texts that a policy writes on its own, beside the ones that the full cache writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from kvkeep.evals import grading
from kvkeep.evals.forward import PLAIN
from kvkeep.evals.qa_task import QATask, TaskCase, prompt_of
from kvkeep.evals.task import Options, describe
from kvkeep.evals.tasks.diversity import continued
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse

_MOST = 512
_PER_CONTEXT = 2
"""A half of a context is written, but at most `_MOST` tokens."""


@final
@dataclass(frozen=True)
class LongGeneration(QATask):
    """ROUGE-L of a greedy continuation with the full cache's, its words before the first difference, and its length.

    Unlike in `agreement`, a policy reads its own words, so an early difference changes all that follows.

    Attributes:
        references: the full cache's texts of each case, once `prepare` has run.
    """

    name: ClassVar[str] = "long_generation"
    VERSION: ClassVar[int] = 2
    items: ClassVar[int] = 8

    references: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> dict[str, TaskCase]:
        """Return a case for each context, with texts that leave half of it, at most `_MOST` tokens, to be written."""
        about["text"] = describe(options)
        made = {}
        for length in dict.fromkeys(options.contexts):
            new = max(1, min(_MOST, length // _PER_CONTEXT))
            named = f"long_generation with a context of {length} and {new} new tokens"
            items = continued(checkpoint, options, length, new, options.limit or cls.items, named)
            prompts = [prompt_of(checkpoint, item, options.ask, i) for i, item in enumerate(items)]
            made[f"length={length}"] = TaskCase(prompts, new, lambda item, reply: 0.0)  # see `grades`
        return made

    def prepare(self, writer: Writer) -> None:
        """Write every continuation with the full cache, as the reference."""
        for name, case in self.made.items():
            budgets = [len(prompt.ids) + case.new for prompt in case.prompts]
            done = self._ask(writer, name, parse("full"), budgets, PLAIN)
            self.references[name] = [text for batch in done for text in batch.texts]

    def grades(self, case: str, texts: Sequence[str]) -> list[float]:
        """Return ROUGE-L of each continuation with the full cache's; two empty texts count as equal."""
        return [float(a == b) or grading.rouge_l(a, b) for a, b in zip(texts, self.references[case], strict=True)]

    def more(self, case: str, texts: Sequence[str]) -> dict[str, Any]:
        """Return further numbers from a policy's continuations beside the full cache's of the same prompts.

        These are the share of the full cache's words before the first difference, the share of equal texts, the ratio
        of all words, and the share of runs of four words that the policy's texts had before.
        """
        # the own text first, then the full cache's; two empty ones are equal, and nothing is before a difference
        pairs = [(a.split(), b.split()) for a, b in zip(texts, self.references[case], strict=True)]
        n = len(pairs)
        return {
            "before_difference": sum(_common(a, b) / len(b) if b else float(not a) for a, b in pairs) / n,
            "equal": sum(a == b for a, b in pairs) / n,
            "length_ratio": sum(len(a) for a, _ in pairs) / max(1, sum(len(b) for _, b in pairs)),
            "repeated": sum(grading.repeated(a, 4) for a, _ in pairs) / n,
        }


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of equal words before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
