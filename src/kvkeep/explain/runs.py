"""The runs behind a page: a text and a question under each policy, and the same tokens under the full cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.layer_layout import windows_of
from kvkeep.explain.ledger import Answered, Ledger
from kvkeep.explain.overheard import Heard, overheard
from kvkeep.explain.watch import FullCache, feed, watch
from kvkeep.models.support import unwrapped
from kvkeep.policies.base import Policy
from kvkeep.types import Phase


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt and how it is read.

    Attributes:
        ids: its tokens.
        chunk: tokens that are read at a time.
        new_tokens: the most tokens of an answer.
        ends: tokens that end an answer.
    """

    ids: Int[Tensor, " n"]
    chunk: int
    new_tokens: int
    ends: frozenset[int]

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.ids) + self.new_tokens

    def chunks(self) -> list[Int[Tensor, " T"]]:
        """The pieces in which the prompt is read."""
        return list(self.ids.split(self.chunk))


class Work:
    """The share of the work that is done, in products of numbers: time follows it closely enough for a bar.

    Args:
        model: the model.
        prompt: the prompt.
        rooms: slots of each head, for each bounded run.
        progress: called with the share after each step.
    """

    def __init__(self, model: Any, prompt: Prompt, rooms: Sequence[int], progress: Callable[[float], object]):
        config = unwrapped(model).config
        vocabulary = config.get_text_config().vocab_size  # embeddings are looked up, and logits are needed once a step
        self._weights: int = sum(one.numel() for one in model.parameters() if vocabulary not in one.shape)
        self._pair: int = 2 * len(windows_of(config)) * config.get_text_config().hidden_size
        self._progress, self._done, self._all = progress, 0, 0
        end = 0
        for piece in prompt.chunks():
            size, end = len(piece), end + len(piece)
            self._all += self._of(size, end) + sum(self._of(size, 2 * min(end, room + size)) for room in rooms)

    def _of(self, tokens: int, seen: int) -> int:
        return tokens * (self._weights + self._pair * seen)

    def add(self, tokens: int, seen: int) -> None:
        """Note that tokens were read, each of which attended to so many."""
        self._done += self._of(tokens, seen)
        self._progress(min(1.0, self._done / self._all))


@dataclass(frozen=True, eq=False)
class Missed:
    """What the full cache says about one policy's run.

    Attributes:
        lost: the share of a moment's attention under the full cache that falls on tokens that the head had dropped.
        full: attention under the full cache of the query that chose an answer's token, averaged over heads.
        missed: the part of it that falls on tokens that a head had dropped.
    """

    lost: Float[Tensor, "M H"]
    full: Float[Tensor, "A n"]
    missed: Float[Tensor, "A n"]


@torch.inference_mode()
def bounded(model: Any, policy: Policy, budget: int, prompt: Prompt, work: Work) -> Ledger:
    """Run a prompt and its greedy answer in a bounded cache, and record every moment.

    Args:
        model: the model, attached.
        policy: the eviction policy.
        budget: tokens kept per layer and head.
        prompt: the prompt.
        work: is told of each step.
    """
    heard: dict[int, Heard] = {}
    cache = BoundedCache(model.config, overheard(policy, heard.__setitem__), budget, prefill_chunk=prompt.chunk)
    watches = watch(cache, prompt.length)
    ledger, read, ids = Ledger.of(0, prompt.length), 0, list[int]()
    pieces = [(piece, Phase.PREFILL) for piece in prompt.chunks()]
    while pieces:
        piece, phase = pieces.pop(0)
        logits = feed(model, cache, piece, phase)
        if not read:
            ledger = Ledger.of(sum(one.held.shape[0] for one in watches.values()), prompt.length)
        read += len(piece)
        ledger.note(watches, heard, read)
        heard.clear()
        work.add(len(piece), 2 * min(read, budget + len(piece)))  # attention is computed twice
        if not pieces and len(ids) < prompt.new_tokens and not prompt.ends.intersection(ids[-1:]):
            ledger.choose(watches)
            ids.append(int(logits.argmax()))
            pieces.append((torch.tensor(ids[-1:]), Phase.DECODE))
    memory = cache.memory()
    heads = [(number, head) for number, one in watches.items() for head in range(one.held.shape[0])]
    ledger.answered = Answered(ids, heads, _budgets(cache), memory.allocated_bytes, memory.full_bytes)
    return ledger


def _budgets(cache: BoundedCache) -> list[int]:
    """The budget of each head, as it is at the end."""
    found = []
    for layer in cache.bounded_layers().values():
        heads = layer.store.positions.shape[1]
        found += budgets.table(layer.block.budget, layer.seen)[0].expand(heads).tolist()
    return found


@torch.inference_mode()
def full(model: Any, prompt: Prompt, ledgers: Sequence[Ledger], work: Work) -> tuple[list[int], list[Missed]]:
    """Run a prompt under the full cache, its own greedy answer, and then the answer of each bounded run.

    Args:
        model: the model, attached.
        prompt: the prompt.
        ledgers: the bounded runs.
        work: is told of each chunk.

    Returns:
        The full cache's answer, and what it says about each run.
    """
    cache, begun = FullCache(model, prompt.length), [list[Tensor]() for _ in ledgers]
    logits, read = torch.empty(0), 0
    for moment, piece in enumerate(prompt.chunks()):
        logits = cache.feed(piece, Phase.PREFILL)
        mass = cache.mass()
        for ledger, lost in zip(ledgers, begun, strict=True):
            lost.append(_lost(mass, ledger, moment))
        read += len(piece)
        work.add(len(piece), read)
    first, own = cache.newest(), list[int]()
    while len(own) < prompt.new_tokens and not prompt.ends.intersection(own[-1:]):
        own.append(int(logits.argmax()))
        logits = cache.feed(torch.tensor(own[-1:]), Phase.DECODE)
    found = []
    for ledger, lost in zip(ledgers, begun, strict=True):
        cache.go_back(len(prompt.ids))
        found.append(_followed(cache, first, ledger, lost))
    return own, found


def _followed(cache: FullCache, first: Float[Tensor, "H n"], ledger: Ledger, lost: list[Tensor]) -> Missed:
    """Feed the answer of a run to the full cache, which holds the prompt."""
    n, moment = ledger.total.shape[1], len(lost) - 1
    whole, missed, row = [], [], first
    for token in ledger.answered.ids:
        whole.append(row.mean(dim=0))
        missed.append((row * ledger.lacks(moment)).mean(dim=0))
        cache.feed(torch.tensor([token]), Phase.DECODE)
        row, moment = cache.newest(), moment + 1
        lost.append(_lost(row, ledger, moment))
    none = torch.zeros(0, n)
    return Missed(torch.stack(lost), torch.stack(whole) if whole else none, torch.stack(missed) if missed else none)


def _lost(mass: Float[Tensor, "H n"], ledger: Ledger, moment: int) -> Float[Tensor, " H"]:
    """The share of attention that falls on tokens that each head had dropped."""
    return (mass * ledger.lacks(moment)).sum(dim=-1) / mass.sum(dim=-1)
