"""Log-likelihoods of continuations in bounded memory: a context is read once, and each continuation follows in a copy.

No text is scored by one dense forward pass. The first part of a context is one chunk, which is cut to the budget; the
rest of the context and the continuations follow under that budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError
from kvkeep.evals.forward import BATCH_TOKENS, PLAIN, Drive, Setup, left_padded
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy
from kvkeep.types import MemoryUsage

Score = tuple[float, bool]
"""The log-likelihood of a continuation, and whether each of its tokens is the likeliest one."""


@dataclass(frozen=True)
class ContextPair:
    """A context and one continuation of it, as tokens.

    Attributes:
        context: one token or more.
        continuation: one token or more.
        first: tokens of the context that are read at once and then cut.
        length: tokens to which a budget in percent refers.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    first: int
    length: int


@runtime_checkable  # for beartype, by which tests check annotations
class Rule(Protocol):
    """How many tokens are kept of a text, such as `kvkeep.evals.grid.RequestedBudget`."""

    def of(self, length: int) -> int:
        """Return the budget for a text of this length."""


@dataclass(frozen=True, kw_only=True)
class BoundedModel:
    """A model in bounded memory.

    Attributes:
        writer: the model.
        policy: the eviction policy.
        budget: tokens kept per layer and head.
        setup: how caches are made.
        stride: tokens of a continuation that are fed at once.
        rows: most contexts that are read at once.
        on_memory: called with the bytes that the caches of some contexts held.
    """

    writer: Writer
    policy: Policy
    budget: Rule
    setup: Setup = PLAIN
    stride: int = 1
    rows: int = 16
    on_memory: Callable[[MemoryUsage], object] = lambda memory: None

    def tokens(self, length: int, most: int) -> int:
        """Return the budget in tokens for a text of this length; ``most`` if nothing is evicted."""
        return self.budget.of(length) if self.policy.evicts else most


@dataclass
class _Group:
    """Continuations of one context, by their places in the list of pairs."""

    context: tuple[int, ...]
    first: int
    length: int
    places: list[int] = field(default_factory=list)


def scores(bounded: BoundedModel, pairs: Sequence[ContextPair]) -> Iterator[tuple[int, Score]]:
    """Yield the index in ``pairs`` and the score of each pair, about the longest contexts first.

    Pairs with the same context share one reading of it.
    """
    first = 0
    for groups in _batches(_grouped(pairs), bounded.rows):
        yield from _score(bounded, groups, pairs, first)
        first += len(groups)


def _grouped(pairs: Sequence[ContextPair]) -> list[_Group]:
    """Group pairs with the same context, the longest context first."""
    groups: dict[tuple[tuple[int, ...], int, int], _Group] = {}
    for place, pair in enumerate(pairs):
        key = (pair.context, pair.first, pair.length)
        groups.setdefault(key, _Group(*key)).places.append(place)
    return sorted(groups.values(), key=lambda group: len(group.context), reverse=True)


def _batches(groups: Sequence[_Group], rows: int) -> Iterator[list[_Group]]:
    """Yield the contexts of each batch, at most ``rows`` and few enough for `BATCH_TOKENS`.

    Contexts with tokens after the eviction and those without are never in one batch.
    """
    # `_read` feeds all contexts of a batch in the same parts
    for whole in (False, True):
        part = [group for group in groups if (group.first == len(group.context)) is whole]
        while part:
            size = max(1, min(rows, BATCH_TOKENS // len(part[0].context)))
            yield part[:size]
            part = part[size:]


def _score(
    bounded: BoundedModel, groups: Sequence[_Group], pairs: Sequence[ContextPair], first: int
) -> Iterator[tuple[int, Score]]:
    """Read the contexts of a batch, and yield for each of their continuations its index in ``pairs`` and its score.

    Continuations follow in copies of the memory. ``first`` numbers the first context, for random policies.
    """
    longest = max(len(pairs[place].continuation) for group in groups for place in group.places)
    budgets = [bounded.tokens(group.length, len(group.context) + longest) for group in groups]
    drive = Drive(bounded.writer, bounded.policy, budgets, first=first, setup=bounded.setup)
    logits = _read(drive, groups)
    bounded.on_memory(drive.cache.memory())
    asked = [(row, place) for row, group in enumerate(groups) for place in group.places]
    if len(asked) == len(groups):  # one continuation for each context, so the memory itself may go on
        yield from _follow(bounded, drive, logits, [(place, pairs[place].continuation) for _, place in asked])
        return
    for some in (asked[at : at + bounded.rows] for at in range(0, len(asked), bounded.rows)):
        rows = [row for row, _ in some]
        # a continuation of one token is scored by the logits that are there: nothing is fed, so no copy is needed
        single = all(len(pairs[place].continuation) == 1 for _, place in some)
        copies = drive if single else drive.copies(rows)
        yield from _follow(bounded, copies, logits[rows], [(place, pairs[place].continuation) for _, place in some])


def _read(drive: Drive, groups: Sequence[_Group]) -> Float[Tensor, "B V"]:
    """Read the contexts, cut each after its first part, and return the logits after their last tokens, in float32."""
    parts = [[_ids(group.context[: group.first]) for group in groups]]
    # the last token runs under the budget: its logits score the first token of each continuation
    if groups[0].first < len(groups[0].context):
        parts += [[_ids(group.context[group.first : -1]) for group in groups], [_ids(g.context[-1:]) for g in groups]]
    logits = None
    for part in parts:
        if any(map(len, part)):
            logits = drive.feed(*left_padded(part), last_only=True)
    assert logits is not None  # a context has one token or more
    return logits[:, -1].float()


def _follow(
    bounded: BoundedModel, drive: Drive, logits: Float[Tensor, "B V"], asked: Sequence[tuple[int, tuple[int, ...]]]
) -> Iterator[tuple[int, Score]]:
    """Feed continuations piece by piece, and yield for each its number, and its score: the sum of its tokens'
    log-probabilities, and whether each is the likeliest token.

    Args:
        bounded: how many tokens are fed at once.
        drive: the memory, with a row for each continuation.
        logits: those that predict the first token of each continuation.
        asked: number and tokens of each continuation.
    """
    totals, greedy = [0.0] * len(asked), [True] * len(asked)
    before = logits
    for start, ids, real, targets in _pieces([tokens for _, tokens in asked], bounded.stride):
        if not start:  # the context's last token predicts the first one
            _add(before[:, None], [tokens[:1] for _, tokens in asked], totals, greedy)
        if ids.shape[1]:
            _add(drive.feed(ids, real), targets, totals, greedy)
    for (place, _), total, is_greedy in zip(asked, totals, greedy, strict=True):
        yield place, (total, is_greedy)


def _pieces(
    rows: Sequence[tuple[int, ...]], stride: int
) -> Iterator[tuple[int, Int[Tensor, "B n"], Bool[Tensor, "B n"], list[tuple[int, ...]]]]:
    """Yield the continuations, without their last tokens, in pieces of ``stride`` tokens.

    Each piece is: its start, the tokens of all rows padded on the left, which columns are tokens, and for each row the
    tokens that these predict.
    """
    longest = max(map(len, rows))
    # a piece at least, though an empty one: with the first piece the first tokens are scored
    for start in range(0, max(1, longest - 1), stride):
        fed = [row[start : min(start + stride, len(row) - 1)] for row in rows]
        ids, real = left_padded([_ids(piece) for piece in fed])
        yield start, ids, real, [row[start + 1 : start + 1 + len(piece)] for row, piece in zip(rows, fed, strict=True)]


def _add(
    logits: Float[Tensor, "B n V"], targets: Sequence[Sequence[int]], totals: list[float], greedy: list[bool]
) -> None:
    """Add the log-probabilities of each row's targets to its entry of ``totals``, and make that of ``greedy`` false
    unless all are the likeliest tokens.

    The logits of a row that predict its targets are its last ones.
    """
    for row, tokens in enumerate(targets):
        if not tokens:  # a short continuation ends before the others, and `-0:` would mean all columns
            continue
        last = logits[row, -len(tokens) :].float()  # padding stands on the left
        wanted = torch.tensor(tokens, device=last.device)
        totals[row] += float(last.log_softmax(dim=-1).gather(-1, wanted[:, None]).double().sum())
        greedy[row] &= bool((last.argmax(dim=-1) == wanted).all())


def _ids(tokens: Iterable[int]) -> Int[Tensor, " n"]:
    """Return tokens as a tensor."""
    return torch.tensor(list(tokens), dtype=torch.int64)


# Texts that are generated after prompts, in the engine's continuous batches.


@dataclass(frozen=True)
class GenerationPrompt:
    """A prompt to continue.

    Attributes:
        ids: its tokens.
        first: tokens that are read at once and then cut; the others follow.
        length: tokens to which a budget in percent refers.
        until: texts that end the answer; they are no part of it.
        sampling: how tokens are chosen, and how many.
    """

    ids: tuple[int, ...]
    first: int
    length: int
    until: tuple[str, ...]
    sampling: SamplingParams


def answers(bounded: BoundedModel, wishes: Sequence[GenerationPrompt]) -> Iterator[tuple[int, str]]:
    """Continue all prompts, and yield each answer with its prompt's index in ``wishes`` as soon as it is there.

    Raises:
        InputError: a step of the engine failed.
    """
    budgets = [bounded.tokens(wish.length, len(wish.ids) + wish.sampling.max_new_tokens) for wish in wishes]
    tokenizer = bounded.writer.checkpoint.tokenizer
    with Engine(
        bounded.writer.model,
        tokenizer,
        policy=bounded.policy,
        budget=max(budgets),  # every request names its own, of at most this
        rows=min(bounded.rows, len(wishes)),
        **asdict(bounded.setup),
    ) as engine:
        requests = (_request(engine, i, wish, budgets[i]) for i, wish in enumerate(wishes))
        for place, result in engine.run(requests):
            if result.error:
                raise InputError(f"An answer could not be generated: {result.error}.")
            yield place, result.text


def _request(engine: Engine, number: int, wish: GenerationPrompt, budget: int) -> Request:
    """Return the request that continues a prompt.

    The part before the cut is read now, into a snapshot, if something precedes the cut and something follows.

    Args:
        engine: reads that part, and will run the request.
        number: the prompt's, which identifies its row for policies with randomness.
        wish: the prompt.
        budget: tokens kept per layer and head.
    """
    options: dict[str, Any] = {"stop": wish.until, "sampling": wish.sampling, "sequence": number}
    if not 0 < wish.first < len(wish.ids):
        return Request(prompt=wish.ids, budget=budget, **options)
    memory = engine.prefix(wish.ids[: wish.first], budget=budget)
    return Request(prompt=wish.ids[wish.first :], snapshot=memory, **options)


# What a policy has read when a prompt of a harness is cut: the protocol of an evaluation.

WAYS = ("inside", "later")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class EvaluationProtocol:
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
        """Check that both ways are of `WAYS`, and that the marks are texts and not empty."""
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
        """Return whether the whole prompt is read before the eviction."""
        return self.question == self.examples == "inside"

    def place(self, prompt: str) -> int:
        """Return how many characters of a prompt are read and evicted before the rest follows; 0 without a mark."""
        if self.question == "later":
            return max(0, prompt.rfind(self.question_mark))
        return max(0, prompt.rfind(self.examples_mark))

    def first(self, prompt: str, ids: Sequence[int], encode: Encode) -> int:
        """Return how many tokens of a prompt are read and evicted before the rest follows; 0 without a mark.

        Args:
            prompt: the text.
            ids: its tokens.
            encode: turns texts into tokens as the prompt was turned.
        """
        if not (characters := self.place(prompt)):
            return 0
        # a tokenizer may join the beginning's end with what follows: only the tokens before it are cut
        begin = encode(prompt[:characters])
        same = next((i for i, (a, b) in enumerate(zip(begin, ids, strict=False)) if a != b), min(len(begin), len(ids)))
        return min(same, len(ids) - 1)  # one token at least has to be read after the cut

    def no_cut(self, prompt: str, lost: int) -> InputError:
        """Return the error about a prompt that has no text before its mark, so that nothing could be evicted.

        Args:
            prompt: the text.
            lost: number of first tokens that were left out since the prompt is too long; they may be the reason.
        """
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
