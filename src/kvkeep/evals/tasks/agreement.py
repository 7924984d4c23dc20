"""Agreement with the full cache: its own continuation, greedy or drawn, is fed token by token to the bounded cache.

The prompt is one chunk and is then cut to the budget. The first new token follows from the whole prompt and is the same
for every policy, so it does not count. The end of text is excluded from the continuation, so all rows are equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.evals import task
from kvkeep.evals.forward import PLAIN, Drive, Setup, batches
from kvkeep.evals.task import Options, Task, TaskOutcome
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.generation_config import ends_of
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse
from kvkeep.types import MemoryUsage

PROMPT = 512
"""Tokens of a prompt; prompt and new tokens together are at most the trained length."""

PROMPTS = 8
"""Default number of prompts."""

NEW = 64
"""Tokens of the continuation."""

_PARTS = 8
"""Parts of the continuation with results of their own: a difference grows with its length."""


@dataclass
class _Reference:
    """The full cache's continuation, and the distribution after each of its tokens in the model's dtype."""

    tokens: Int[Tensor, "B n"]
    logits: list[Float[Tensor, "B V"]]


@dataclass
class _Followed:
    """How a bounded cache followed a batch's continuation, by step and row; and the bytes that it held at the end."""

    equal: Float[Tensor, "n B"]
    kl: Float[Tensor, "n B"]
    memory: MemoryUsage


@final
@dataclass
class Agreement(Task):
    """Share of equal next tokens, KL(full ‖ bounded) in nats, and tokens before the first one that differs.

    Attributes:
        ids: the prompts.
        new: tokens of the continuation.
        text: the source of the prompts.
        drawn: the seed by which the continuation is drawn; ``None``: it is greedy.
        references: of each batch of prompts, once `prepare` has run.
    """

    name: ClassVar[str] = "agreement"
    VERSION: ClassVar[int] = 1
    headline: ClassVar[str] = "agreement"

    ids: Int[Tensor, "B T"]
    new: int
    text: str
    drawn: int | None = None
    references: list[_Reference] = field(default_factory=list)

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> Agreement:
        """Return the task, with the text cut into prompts of equal length; a short text gives fewer or shorter ones.

        Raises:
            InputError: the text has fewer tokens than `task.SHORTEST`, or the model has too few learned positions for
                the lengths of prompt and continuation that the user gave.
        """
        room = checkpoint.trained_length or PROMPT + NEW
        new = options.new_tokens or min(NEW, max(2, room // 8))
        length = options.prompt_tokens or (PROMPT if options.new_tokens else min(PROMPT, room - new))
        if options.new_tokens or options.prompt_tokens:  # the defaults fit by themselves
            task.check_positions(checkpoint, length + new, "agreement", "new_tokens")
        ids = task.windows(checkpoint, options, rows=options.limit or PROMPTS, length=length)
        return cls(ids, new, task.describe(options), options.seed if options.draw else None)

    def settings(self) -> dict[str, Any]:
        """Return the source of the text, and the number of prompts."""
        return {"text": self.text, "prompts": self.ids.shape[0]}

    def cases(self) -> dict[str, list[int]]:
        """Return the only case, named by the lengths of prompt and continuation."""
        rows, length = self.ids.shape
        how = "" if self.drawn is None else ",drawn"
        return {f"prompt={length},new={self.new}{how}": [length] * rows}

    @property
    def new_tokens(self) -> int:
        """Return the number of tokens of the continuation."""
        return self.new

    def prepare(self, writer: Writer) -> None:
        """Generate the continuations with the full cache, and keep the logits."""
        self.references = [self._continue(writer, self.ids[at]) for at in self._batches()]

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Feed the full cache's continuation to a bounded cache, compare each next-token distribution with the full
        cache's, and return the means.
        """
        found = [
            self._follow(writer, policy, budgets[at], at, reference, setup)
            for at, reference in zip(self._batches(), self.references, strict=True)
        ]
        memory = sum((part.memory for part in found), MemoryUsage())
        return TaskOutcome(self._score([part.equal for part in found], [part.kl for part in found]), memory)

    def under_budgets(self, writer: Writer, policy: Policy, budgets: Sequence[int]) -> list[dict[str, Any]]:
        """Return the score of a policy under each of several budgets: rows of one batch, which share each step, as
        far as a batch holds them.

        Long answers are mostly the model's own time, of which this takes one share for all budgets. Each row gets what
        it gets alone; only rules with randomness draw for other rows than in a run of one budget.
        """
        # the first batch of prompts is the largest one; under one budget its columns are one row of `batches`
        most = len(self.references[0].tokens) * self.ids.shape[1]
        parts = batches([most] * len(budgets)) if budgets else []
        return [score for some in parts for score in self._side_by_side(writer, policy, budgets[some])]

    def _side_by_side(self, writer: Writer, policy: Policy, budgets: Sequence[int]) -> list[dict[str, Any]]:
        """Return the score of a policy under each of several budgets, in their order.

        For each batch of prompts, the rows of all budgets run together.
        """
        equal, kl = [], []
        for at, reference in zip(self._batches(), self.references, strict=True):
            rows = len(reference.tokens)
            numbers = [budget for budget in budgets for _ in range(rows)]
            found = self._follow(writer, policy, numbers, at, reference, PLAIN)
            equal.append(found.equal.split(rows, dim=1))
            kl.append(found.kl.split(rows, dim=1))
        return [self._score(*both) for both in zip(zip(*equal, strict=True), zip(*kl, strict=True), strict=True)]

    def _follow(
        self,
        writer: Writer,
        policy: Policy,
        budgets: Sequence[int],
        at: slice,
        reference: _Reference,
        setup: Setup,
    ) -> _Followed:
        """Feed the full cache's continuation of a batch to a bounded cache, and return how it followed at each step.

        Args:
            writer: the model.
            policy: the eviction policy.
            budgets: one for each row of the batch, or for each row of several copies of the batch, copy by copy.
            at: which prompts are the batch.
            reference: what the full cache wrote after these prompts.
            setup: how the cache is made.
        """
        copies = len(budgets) // len(reference.tokens)
        tokens = reference.tokens.repeat(copies, 1)
        drive = Drive(writer, policy, budgets, first=at.start, setup=setup)
        # these logits follow from the whole prompt, so no policy has a part in them
        drive.feed(self.ids[at].repeat(copies, 1), last_only=True)
        equal, kl = [], []
        for step, full in enumerate(reference.logits):
            bounded = drive.feed(tokens[:, step : step + 1])[:, -1]
            full = full.to(bounded.device)
            for rows in bounded.split(len(full)):
                equal.append((full.argmax(dim=-1) == rows.argmax(dim=-1)).float().cpu())
                kl.append(task.kl(full, rows).cpu())
        shape = len(reference.logits), len(budgets)
        return _Followed(torch.cat(equal).view(shape), torch.cat(kl).view(shape), drive.cache.memory())

    def _score(self, equal: Sequence[Float[Tensor, "n _"]], kl: Sequence[Float[Tensor, "n _"]]) -> dict[str, Any]:
        """Return the score: the means over the comparisons of all batches, and the mean number of equal tokens before
        the first difference (``first_difference``).

        Args:
            equal: for each batch, by step and row, 1 where both likeliest tokens are equal, else 0.
            kl: KL(full ‖ bounded) of the same comparisons, in nats.
        """
        # the product of all steps so far is 1 until the first token that differs
        firsts = torch.cat([steps.cumprod(dim=0).sum(dim=0) for steps in equal])
        found = _score(torch.cat([e.flatten() for e in equal]), torch.cat([k.flatten() for k in kl]), self._steps())
        return {**found, "first_difference": firsts.double().mean().item()}

    def _continue(self, writer: Writer, ids: Int[Tensor, "B T"]) -> _Reference:
        """Return the full cache's continuation of prompts, greedy or drawn, and the logits behind each of its tokens.

        Tokens that end a text are left out of the choice, so that all continuations have the same length.
        """
        drive = Drive(writer, parse("full"), [ids.shape[1] + self.new] * len(ids))
        last = drive.feed(ids, last_only=True)[:, -1]
        tokens, logits = [], []
        generator = torch.Generator().manual_seed(self.drawn or 0)
        ends = list(ends_of(writer.model, writer.checkpoint.tokenizer))
        for _ in range(self.new):
            allowed = last.clone()
            allowed[:, ends] = -torch.inf  # an end would leave fewer tokens to compare
            if self.drawn is None:
                tokens.append(allowed.argmax(dim=-1))
            else:
                shares = allowed.float().softmax(dim=-1).cpu()  # each kind of device draws other tokens
                tokens.append(torch.multinomial(shares, 1, generator=generator)[:, 0].to(last.device))
            last = drive.feed(tokens[-1][:, None])[:, -1]
            logits.append(last.cpu())  # those of all steps would take much of a GPU's memory
        return _Reference(torch.stack(tokens, dim=1).cpu(), logits)

    def _batches(self) -> list[slice]:
        """Return slices of prompts that run together."""
        return batches([self.ids.shape[1]] * len(self.ids))

    def _steps(self) -> Int[Tensor, " n"]:
        """Return the part of the continuation, of `_PARTS`, that each comparison falls into: by batch, step and row."""
        steps = [torch.arange(self.new).repeat_interleave(len(r.tokens)) for r in self.references]
        return torch.cat(steps) * _PARTS // self.new


def _score(equal: Float[Tensor, " n"], kl: Float[Tensor, " n"], parts: Int[Tensor, " n"]) -> dict[str, Any]:
    """Return the mean agreement and KL divergence over all comparisons, and over each eighth of the continuation.

    Args:
        equal: 1 where both caches' likeliest tokens are equal, else 0.
        kl: KL(full ‖ bounded) of the same comparisons, in nats.
        parts: the eighth that each comparison falls into.
    """
    found = sorted(set(parts.tolist()))  # a short continuation has fewer parts
    return {
        "agreement": equal.double().mean().item(),
        "kl": kl.double().mean().item(),
        "n": len(equal),
        "agreement_by_part": [equal[parts == part].double().mean().item() for part in found],
        "kl_by_part": [kl[parts == part].double().mean().item() for part in found],
    }
