"""Replies to prompts: each prompt's text is read and cut to the budget, then the reply is decoded greedily.

The last token of a prompt is fed apart, because its attention chooses the first token of the reply: with the whole
prompt in one chunk, a reply of one word would not depend on the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.evals import metrics
from kvkeep.evals.drive import Drive, batches, left_padded
from kvkeep.kv.memory_usage import Memory
from kvkeep.models.load import ends_of
from kvkeep.models.tokenization import Writer

Make = Callable[[Sequence[int], int], Drive]
"""Makes a cache for some prompts, given by their numbers; the second number is the identity of its first row."""


@runtime_checkable
class Prompt(Protocol):
    """A prompt as tokens.

    Attributes:
        ids: all of its tokens.
        first: number of tokens that are fed at once and then cut to the budget; the others follow after that. Prompts
            of one document that are asked later have these tokens in common.
        document: the number of the text.
        number: the number of the prompt among those of its text.
    """

    @property
    def ids(self) -> Int[Tensor, " n"]: ...  # noqa: D102

    @property
    def first(self) -> int: ...  # noqa: D102

    @property
    def document(self) -> int: ...  # noqa: D102

    @property
    def number(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Replies:
    """The results of one batch of prompts.

    Attributes:
        texts: the reply to each prompt.
        kept: share of the tokens kept in each tenth of the text, for each prompt.
        memory: bytes that the caches held at the end.
    """

    texts: list[str]
    kept: Float[Tensor, "B 10"]
    memory: Memory


def inside(writer: Writer, prompts: Sequence[Prompt], drive: Make, most: int) -> Iterator[Replies]:
    """Read each prompt with its question, cut it and decode replies of at most ``most`` tokens."""
    for at in batches([len(prompt.ids) for prompt in prompts]):
        part = prompts[at]
        bounded = drive(range(len(prompts))[at], at.start)
        kept = read(bounded, part)
        yield Replies(texts(writer, bounded, part, most), kept, bounded.cache.memory())


def later(writer: Writer, prompts: Sequence[Prompt], drive: Make, most: int) -> Iterator[Replies]:
    """Read each text once, cut it, and ask all its questions in copies of that memory."""
    heads = [i for i, prompt in enumerate(prompts) if not prompt.number]
    for at in batches([prompts[i].first for i in heads]):
        bounded = drive(heads[at], at.start)
        kept = read(bounded, [prompts[i] for i in heads[at]])
        row = {prompts[i].document: place for place, i in enumerate(heads[at])}
        part = [prompt for prompt in prompts if prompt.document in row]
        for few in batches([max(bounded.budgets) + len(prompt.ids) - prompt.first for prompt in part]):
            rows = [row[prompt.document] for prompt in part[few]]
            copies = bounded.copies(rows)
            yield Replies(texts(writer, copies, part[few], most), kept[rows], copies.cache.memory())


def in_turns(
    writer: Writer, prompts: Sequence[Prompt], drive: Make, most: int, *, turns: int, due: Sequence[int]
) -> Iterator[Replies]:
    """Read each text in turns, with a cut after each, and ask each question after some turn, in a copy of the memory.

    Args:
        writer: the model.
        prompts: the prompts, document by document.
        drive: makes a cache.
        most: most tokens of a reply.
        turns: pieces of a text, of equal length.
        due: of each prompt, the number of turns after which it is asked.
    """
    heads = [i for i, prompt in enumerate(prompts) if not prompt.number]
    for at in batches([prompts[i].first for i in heads]):
        bounded, first = drive(heads[at], at.start), [prompts[i] for i in heads[at]]
        row = {prompt.document: place for place, prompt in enumerate(first)}
        mine = [i for i, prompt in enumerate(prompts) if prompt.document in row]
        found: dict[int, str] = {}
        for turn in range(1, turns + 1):
            edges = [(prompt.first * (turn - 1) // turns, prompt.first * turn // turns) for prompt in first]
            pieces = [prompt.ids[start:stop] for prompt, (start, stop) in zip(first, edges, strict=True)]
            bounded.feed(*left_padded(pieces), last_only=True)
            if now := [i for i in mine if due[i] == turn]:
                copies, part = bounded.copies([row[prompts[i].document] for i in now]), [prompts[i] for i in now]
                found |= zip(now, texts(writer, copies, part, most), strict=True)
        kept = _kept(bounded, first)[[row[prompts[i].document] for i in mine]]
        yield Replies([found[i] for i in mine], kept, bounded.cache.memory())


def read(drive: Drive, prompts: Sequence[Prompt]) -> Float[Tensor, "B 10"]:
    """Feed the first part of each prompt, which is then cut; returns where in it the kept tokens stand."""
    drive.feed(*left_padded([prompt.ids[: prompt.first] for prompt in prompts]), last_only=True)
    return _kept(drive, prompts)


def _kept(drive: Drive, prompts: Sequence[Prompt]) -> Float[Tensor, "B 10"]:
    lengths, cache = [prompt.first for prompt in prompts], drive.cache
    tenths = [metrics.kept_by_tenth(cache.positions(i), lengths) for i in cache.bounded_layers()]
    return torch.stack(tenths).mean(0).cpu()


def texts(writer: Writer, drive: Drive, prompts: Sequence[Prompt], most: int) -> list[str]:
    """Feed the rest of each prompt, whose first part was `read`, and decode the replies."""
    between = [prompt.ids[prompt.first : -1] for prompt in prompts]
    if any(map(len, between)):
        drive.feed(*left_padded(between), last_only=True)
    logits = drive.feed(*left_padded([prompt.ids[-1:] for prompt in prompts]), last_only=True)
    return [writer.text_of(row) for row in decode_greedily(drive, logits, most, ends_of(writer.model))]


def decode_greedily(drive: Drive, logits: Float[Tensor, "B 1 V"], most: int, ends: set[int]) -> list[list[int]]:
    """Greedy replies of at most ``most`` tokens; a row that has ended is fed nothing more.

    Args:
        drive: the model and its cache, after the prompts.
        logits: logits of each prompt's last token.
        most: most tokens of a reply.
        ends: tokens that end a reply.
    """
    replies: list[list[int]] = [[] for _ in logits]
    running = torch.ones(len(replies), dtype=torch.bool)
    for step in range(most):
        best = logits[:, -1].argmax(dim=-1).cpu()
        for row in running.nonzero().flatten().tolist():
            replies[row].append(int(best[row]))
        running &= torch.tensor([int(token) not in ends for token in best])
        if step == most - 1 or not running.any():
            break
        logits = drive.feed(best[:, None], running[:, None], last_only=True)
    return replies
