"""The runs behind a page: a text and a question under each policy, and the same tokens under the full cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.attention_probe import BoundedAttention, FullCache, next_logits, wrap_layers
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.eviction import protected_slots
from kvkeep.cache.layer_layout import rule_for_layers, windows_of
from kvkeep.models.checkpoint import Tokenizer
from kvkeep.models.support import unwrapped
from kvkeep.policies.base import Policy
from kvkeep.types import Phase, State, View

# The record of one policy's run: when each head dropped each token, with which score, beside whose.
#
# A token that was dropped never comes back, so one number for each token and head says what the head holds at every
# moment. A moment is a chunk of the prompt or a token of the answer.

HELD = -1
"""Stands for the moment of a drop that has not happened."""


@dataclass(frozen=True, eq=False)
class RunAnswer:
    """The end of a run.

    Attributes:
        ids: the answer's tokens, the end token among them.
        heads: the layer and the number of each KV head.
        budgets: slots of each head that may stay occupied.
        allocated_bytes: the bounded memory.
        full_bytes: keys and values of a full cache for the same tokens.
    """

    ids: list[int]
    heads: list[tuple[int, int]]
    budgets: list[int]
    allocated_bytes: int
    full_bytes: int


@dataclass(eq=False)
class Ledger:
    """What happened to each of ``n`` tokens in each of ``H`` heads, of all layers one after the other.

    Attributes:
        dropped: the moment at which a head dropped a token, `HELD` if it has not.
        scores: the score of a token when it was dropped; NaN if it had none, as behind a sliding window.
        mass: attention that the tokens read so far received in a moment, averaged over heads.
        total: attention that tokens received from all later queries, by head.
        rows: attention of the query that chose an answer's token, averaged over heads.
        rivals: position of the lowest token that stayed and was not protected, -1 if there was none.
        rival_scores: its score.
        read: tokens of the prompt and of the answer so far.
        answered: the end of the run.
    """

    dropped: Int[Tensor, "H n"]
    scores: Float[Tensor, "H n"]
    total: Float[Tensor, "H n"]
    mass: list[Float[Tensor, " _"]] = field(default_factory=list)
    rows: list[Float[Tensor, " n"]] = field(default_factory=list)
    rivals: list[Int[Tensor, " H"]] = field(default_factory=list)
    rival_scores: list[Float[Tensor, " H"]] = field(default_factory=list)
    read: int = 0
    answered: RunAnswer = field(default_factory=lambda: RunAnswer([], [], [], 0, 0))

    @classmethod
    def of(cls, heads: int, length: int) -> Ledger:
        """Return the record of a run before its first moment.

        Args:
            heads: KV heads of all layers.
            length: tokens of the prompt and of the longest answer.
        """
        dropped = torch.full((heads, length), HELD, dtype=torch.int16)  # a page has at most 254 moments
        return cls(dropped, torch.full((heads, length), torch.nan), torch.zeros(heads, length))

    @property
    def moments(self) -> int:
        """Return the number of moments so far."""
        return len(self.mass)

    def lacks(self, moment: int) -> Bool[Tensor, "H n"]:
        """Return a mask of the tokens that each head had dropped in earlier moments, before this one began."""
        return (self.dropped >= 0) & (self.dropped < moment)

    def note(self, watches: dict[int, BoundedAttention], heard: dict[int, Heard], last: int) -> None:
        """Add a moment: what the layers' heads dropped, scored and received in a step.

        Args:
            watches: the layers after the step, by number.
            heard: scores of layers in which tokens competed, by number.
            last: tokens read so far, with those of this step.
        """
        self.read = last
        received = torch.cat([watch.sums.mass for watch in watches.values()]).cpu()
        self.total += received
        self.mass.append(received[:, :last].mean(dim=0))
        held = torch.cat([watch.held for watch in watches.values()]).cpu()
        gone = (self.dropped == HELD) & ~held
        gone[:, last:] = False  # not read yet
        self.dropped[gone] = self.moments - 1
        scores, free = self._compared(watches, heard)
        self.scores[gone] = scores[gone]
        standing = scores.masked_fill(~(held & free) | scores.isnan(), torch.inf)
        lowest = standing.amin(dim=-1)
        there = lowest < torch.inf  # else all that the head holds is protected
        self.rivals.append(torch.where(there, (standing == lowest[:, None]).int().argmax(dim=-1), -1))
        self.rival_scores.append(lowest.masked_fill(~there, torch.nan))

    def choose(self, watches: dict[int, BoundedAttention]) -> None:
        """Add the attention of the newest query, which chooses the next token of the answer, averaged over all heads.
        Call it after `note`.
        """
        rows = torch.cat([watch.sums.newest for watch in watches.values()]).cpu()
        self.rows.append(rows.mean(dim=0))

    def _compared(
        self, watches: dict[int, BoundedAttention], heard: dict[int, Heard]
    ) -> tuple[Float[Tensor, "H n"], Bool[Tensor, "H n"]]:
        """Return each head's scores by position, NaN where there is none, and a mask of the tokens that were compared
        and not protected.
        """
        length, scores, free = self.total.shape[1], [], []
        for number, watch in watches.items():
            heads = watch.held.shape[0]
            table, open_ = torch.full((heads, length + 1), torch.nan), torch.zeros(heads, length + 1, dtype=torch.bool)
            if (found := heard.get(number)) is not None:
                # the last column takes the empty slots (-1), and is left out
                places = found.positions.cpu().long().expand(heads, -1) % (length + 1)
                table.scatter_(-1, places, found.scores.cpu())
                open_.scatter_(-1, places, ~found.protected.cpu())
            scores.append(table[:, :length])
            free.append(open_[:, :length])
        return torch.cat(scores), torch.cat(free)


@dataclass(frozen=True, eq=False)
class ExplainPrompt:
    """A prompt and how it is read.

    Attributes:
        ids: its tokens.
        sizes: how many of them are read at a time.
        chunk: tokens of a chunk; ``None`` if what is read at a time follows from the case.
        new_tokens: the most tokens of an answer.
        ends: tokens that end an answer.
    """

    ids: Int[Tensor, " n"]
    sizes: tuple[int, ...]
    chunk: int | None
    new_tokens: int
    ends: frozenset[int]

    @property
    def length(self) -> int:
        """Return the number of tokens of the prompt and of the longest answer."""
        return len(self.ids) + self.new_tokens

    def chunks(self) -> list[Int[Tensor, " T"]]:
        """Return the tokens of the prompt in the pieces in which it is read, of `sizes`, as views."""
        return list(self.ids.split(list(self.sizes)))


class WorkDone:
    """The share of the work that is done, in products of numbers: time follows it closely enough for a bar.

    Args:
        model: the model.
        prompt: the prompt.
        rooms: slots of each head, for each bounded run.
        progress: called with the share after each step.
    """

    def __init__(self, model: Any, prompt: ExplainPrompt, rooms: Sequence[int], progress: Callable[[float], object]):
        config = unwrapped(model).config
        vocabulary = config.get_text_config().vocab_size  # embeddings are looked up, and logits are needed once a step
        self._weights: int = sum(weight.numel() for weight in model.parameters() if vocabulary not in weight.shape)
        # twice: a token is multiplied with the key and with the value of each that it attends to
        self._pair: int = 2 * len(windows_of(config)) * config.get_text_config().hidden_size
        self._progress, self._done, self._all = progress, 0, 0
        # the work of the prompt alone, under the full cache and in each run: how long answers will be is not known
        end = 0
        for piece in prompt.chunks():
            size, end = len(piece), end + len(piece)
            # 2: as in `bounded`, where attention is computed twice
            self._all += self._of(size, end) + sum(self._of(size, 2 * min(end, room + size)) for room in rooms)

    def _of(self, tokens: int, seen: int) -> int:
        """Return how many products of numbers it takes to read ``tokens``, each of which attends to ``seen`` tokens."""
        return tokens * (self._weights + self._pair * seen)

    def add(self, tokens: int, seen: int) -> None:
        """Add the work of reading so many tokens, each of which attended to ``seen`` tokens, and report the share done,
        at most 1.
        """
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
def bounded(model: Any, policy: Policy, budget: int, prompt: ExplainPrompt, work: WorkDone) -> Ledger:
    """Run a prompt and its greedy answer in a bounded cache, and return the record of every moment.

    Args:
        model: the model, attached.
        policy: the eviction policy.
        budget: tokens kept per layer and head.
        prompt: the prompt.
        work: is told of each step.
    """
    heard: dict[int, Heard] = {}
    # chunks go through all layers, as in an engine: those of a cache would keep layers from sharing a budget
    layers = rule_for_layers(budget, prompt.length)
    cache = BoundedCache(model.config, overheard(policy, heard.__setitem__), budget, layer_budget=layers)
    watches = wrap_layers(cache, lambda layer: BoundedAttention(layer, prompt.length))
    ledger, read, ids = Ledger.of(0, prompt.length), 0, list[int]()
    pieces = [(piece, Phase.PREFILL) for piece in prompt.chunks()]
    while pieces:
        piece, phase = pieces.pop(0)
        logits = next_logits(model, cache, piece, phase)
        if not read:  # the number of heads is known once the layers have held something
            ledger = Ledger.of(sum(watch.held.shape[0] for watch in watches.values()), prompt.length)
        read += len(piece)
        ledger.note(watches, heard, read)
        heard.clear()  # a layer in which nothing competes in the next step has no scores then
        work.add(len(piece), 2 * min(read, budget + len(piece)))  # attention is computed twice
        if not pieces and len(ids) < prompt.new_tokens and not prompt.ends.intersection(ids[-1:]):
            ledger.choose(watches)
            ids.append(int(logits.argmax()))
            pieces.append((torch.tensor(ids[-1:]), Phase.DECODE))
    memory = cache.memory()
    heads = [(number, head) for number, watch in watches.items() for head in range(watch.held.shape[0])]
    ledger.answered = RunAnswer(ids, heads, _budgets(cache), memory.allocated_bytes, memory.full_bytes)
    return ledger


def _budgets(cache: BoundedCache) -> list[int]:
    """Return the slots that may stay occupied now in each KV head of a cache's first row, layer by layer."""
    found = []
    for layer in cache.bounded_layers().values():
        heads = layer.store.positions.shape[1]
        found += budgets.table(layer.block.budget, layer.seen)[0].expand(heads).tolist()
    return found


@torch.inference_mode()
def full(
    model: Any, prompt: ExplainPrompt, ledgers: Sequence[Ledger], work: WorkDone
) -> tuple[list[int], list[Missed]]:
    """Feed a prompt to the full cache, then generate its own greedy answer, and feed it each bounded run's answer
    after the prompt.

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
        cache.go_back(len(prompt.ids))  # each answer follows the prompt alone
        found.append(_followed(cache, first, ledger, lost))
    return own, found


def _followed(cache: FullCache, first: Float[Tensor, "H n"], ledger: Ledger, lost: list[Tensor]) -> Missed:
    """Feed the answer of a run to the full cache, which holds the prompt, and return what the run has missed.

    Args:
        cache: the full cache.
        first: its attention of the prompt's last query, which chose the answer's first token.
        ledger: the run.
        lost: the lost shares of the prompt's moments; those of the answer's are added.
    """
    n, moment = ledger.total.shape[1], len(lost) - 1
    whole, missed, row = [], [], first
    for token in ledger.answered.ids:
        # `row` is of the query that chose the token, and the token is then fed
        whole.append(row.mean(dim=0))
        missed.append((row * ledger.lacks(moment)).mean(dim=0))
        cache.feed(torch.tensor([token]), Phase.DECODE)
        row, moment = cache.newest(), moment + 1
        lost.append(_lost(row, ledger, moment))
    none = torch.zeros(0, n)
    return Missed(torch.stack(lost), torch.stack(whole) if whole else none, torch.stack(missed) if missed else none)


def _lost(mass: Float[Tensor, "H n"], ledger: Ledger, moment: int) -> Float[Tensor, " H"]:
    """Return by head the share of attention that falls on tokens that the head had dropped when a moment began.

    Args:
        mass: the full cache's attention in the moment.
        ledger: the bounded run, which says what was dropped.
        moment: the moment's number.
    """
    return (mass * ledger.lacks(moment)).sum(dim=-1) / mass.sum(dim=-1)


# A policy whose scores are overheard: it decides as it always does, and shows every score that it gives.


@dataclass(frozen=True, eq=False)
class Heard:
    """The scores of one step of a layer, of its first row.

    Attributes:
        positions: true positions of the tokens that were compared, -1 = none.
        scores: the score of each; higher = keep.
        protected: tokens that stay whatever their score is.
    """

    positions: Int[Tensor, "Hk S"]
    scores: Float[Tensor, "Hk S"]
    protected: Bool[Tensor, "Hk S"]


def overheard(policy: Policy, take: Callable[[int, Heard], object]) -> Policy:
    """Return a copy of a policy that decides as it does, and shows its scores. Fused kernels, which ask for no scores,
    do not run it.

    Args:
        policy: the policy.
        take: called with a layer's number and its scores, each time that the layer asks for them.
    """
    kind = type(policy)

    def score(self: Policy, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the policy's scores, and hand a copy of them to ``take``."""
        found: Tensor = kind.score(self, view, state)
        # the first row: a run has one; copies, since what a policy sees is live and about to change
        positions = view.positions[0].clone()
        take(view.layer, Heard(positions, found[0].float().clone(), protected_slots(self, view)[0].clone()))
        return found

    # a class of its own, named as the policy's: fused kernels are refused by the class that defines `score`
    body = {"score": score, "__module__": kind.__module__, "__doc__": kind.__doc__}
    made = copy.copy(policy)
    # policies are frozen dataclasses, which refuse an ordinary assignment
    object.__setattr__(made, "__class__", type(kind.__name__, (kind,), body))
    return made


# Tokens as the pieces of text that they stand for.

_LONGEST = 8
"""Tokens of one character, at most; after so many, half a character is shown as it is."""
_HALF = "\ufffd"


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return each token's text, special ones too. A character of several tokens belongs to the last of them, and the
    others are empty.

    Args:
        tokenizer: the model's tokenizer.
        ids: the tokens.
    """
    found, waiting, before = [""] * len(ids), list[int](), list[int]()
    for index, token in enumerate(ids):
        waiting.append(token)
        text = _decoded(tokenizer, before + waiting).removeprefix(_decoded(tokenizer, before))
        # half a character: the token that completes it gets all of it
        if text.endswith(_HALF) and len(waiting) < _LONGEST:
            continue
        # the last token stays in front of the next one, as white space may depend on it
        found[index], before, waiting = text, waiting[-1:], []
    if waiting:
        found[-1] = _decoded(tokenizer, waiting)
    return found


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens as it is: special tokens shown, spaces left alone; empty for no tokens."""
    if not ids:
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
