"""A text read twice against rules that read it once: the later questions that `kvkeep_lab.kvzip` still answers.

    python bench/kvzip.py [--questions 400] [--contexts 1024 2040] [--budgets 5% 10% 20%] [--policies reread ...]

Asks the embedded model the same questions after each way of reading, as `kvkeep eval --ask later` does. Shows what
stays of the full cache's answers, and the difference of each policy to KVzip over the same questions, both with their
95 % intervals. KVzip holds the full cache of a text until its second reading has ended; its budget holds after that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from lib import report
from torch import Tensor

from kvkeep import BoundedCache, parse
from kvkeep.budget import from_ratio
from kvkeep.evals import qa_task
from kvkeep.evals.confidence import Answers, difference, kept
from kvkeep.evals.forward import Drive
from kvkeep.evals.task import Options
from kvkeep.evals.tasks.recall import NEW_TOKENS, Recall, right
from kvkeep.models import tiny
from kvkeep.models.load import find, read_weights
from kvkeep.models.tokenization import Writer
from kvkeep_lab import kvzip

COLUMNS = ["tokens", "budget", "rule", "stays, %", "minus kvzip", "questions"]


class ReadTwice(Drive):
    """A batch whose first tokens are read by `kvzip.read`, row by row."""

    def feed(self, ids: Tensor, real: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """As `Drive.feed`; no logits come from the tokens that are read twice."""
        if self._real is not None:
            return super().feed(ids, real, last_only=last_only)
        self._real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        rows = [row[own][None] for row, own in zip(ids, self._real, strict=True)]
        read = [kvzip.read(self.model, row, budget=n) for row, n in zip(rows, self.budgets, strict=True)]
        memories = [cache.snapshot(0) for cache in read]
        self.cache = BoundedCache.from_snapshots(self.model.config, memories, policy=read[0].policy)
        return torch.empty(len(ids), 0, self.model.config.vocab_size)


def answers(writer: Writer, task: Recall, case: str, drive: Callable[[Sequence[int], int], Drive]) -> Answers:
    questions = task.questions[case]
    done = qa_task.later(writer, questions, drive, NEW_TOKENS[task.wording])
    texts = [text for batch in done for text in batch.texts]
    return {
        (task.options.seed, asked.document, asked.number): right(task.wording, asked.question, text)
        for asked, text in zip(questions, texts, strict=True)
    }


def lines(
    writer: Writer, task: Recall, case: str, share: float, policies: Sequence[str], full: Answers
) -> list[list[str]]:
    numbers = [from_ratio(share, length) for length in task.cases()[case]]

    def made(kind: type[Drive], name: str) -> Callable[[Sequence[int], int], Drive]:
        return lambda at, first: kind(writer, parse(name), [numbers[i] for i in at], first=first)

    twice = answers(writer, task, case, made(ReadTwice, "full"))
    found = [["kvzip", str(kept(twice, full)), "", str(sum(full.values()))]]
    for name in policies:
        once = answers(writer, task, case, made(Drive, name))
        gap = difference(once, twice, full)
        found.append(
            [name, str(kept(once, full)), "{:+.0f} ({:+.0f} to {:+.0f})".format(gap.points, *gap.interval), str(gap.n)]
        )
    return [[case.split(",")[0].removeprefix("context="), f"{share:.0%}", *line] for line in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=400, help="questions per cell")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2040], help="tokens of a prompt")
    parser.add_argument("--budgets", nargs="+", default=["5%", "10%", "20%"], help="of the tokens of a text")
    parser.add_argument("--policies", nargs="*", default=["reread", "leverage", "keydiff:document"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = find(tiny.path())
    writer = Writer(checkpoint, read_weights(checkpoint, "float32", "cpu"))
    asked = Options(seed=options.seed, limit=options.questions, contexts=tuple(options.contexts), ask="later")
    task, found = Recall.load(checkpoint, asked), []
    for case, lengths in task.cases().items():
        room = max(lengths) + task.new_tokens

        def whole(at: Sequence[int], first: int, room: int = room) -> Drive:
            return Drive(writer, parse("full"), [room] * len(at), first=first)

        full = answers(writer, task, case, whole)
        for budget in options.budgets:
            found += lines(writer, task, case, float(budget.rstrip("%")) / 100, options.policies, full)
    report("later questions, a text read twice and once", COLUMNS, found, {"bench": "kvzip", "lines": found})


if __name__ == "__main__":
    main()
