"""The interface of a task: data made with the tokenizer alone, a reference by the full cache, and a run per policy."""

from __future__ import annotations

import abc
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import InputError, closest
from kvkeep.evals.forward import PLAIN, Setup
from kvkeep.evals.task_names import TEXT_TASKS
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tiny.documents import STYLES, Style
from kvkeep.models.tiny.recall import HELD_OUT, draw_facts, most_facts, own_filler
from kvkeep.models.tokenization import Writer, encode
from kvkeep.policies.base import Policy
from kvkeep.types import MemoryUsage

SHORTEST_WINDOW = 16
"""Fewest tokens of a perplexity window."""

MOST_SHOTS = 1000
"""Most solved examples before a question."""

ASK = ("prompt", "inside", "later")
"""When a recall question is asked: with the text (two words for it), or after the text was cut to the budget."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's choices about tasks.

    Attributes:
        seed: chooses questions, windows of a text, and the package's own text.
        limit: number of questions per context, or of texts; by default each task's own number.
        text: content of a text file; ``None`` for the package's own text.
        contexts: lengths of recall prompts in tokens.
        facts: number of facts in a recall prompt.
        documents: the look of recall texts, one of `kvkeep.models.tiny.documents.STYLES`.
        depths: where asked facts stand, in [0, 1]; empty for an even spread.
        ask: ``prompt`` or ``inside``: the policy has read the question when the text is cut; ``later``: it has not.
        turns: turns in which a recall text comes, with a cut after each and questions some turns after their facts;
            ``None``: all at once.
        window: tokens of a perplexity window; by default 1024, or the trained length if that is less.
        stride: tokens that perplexity feeds at once.
        prompt_tokens: length of agreement's prompts; by default 512.
        new_tokens: tokens that agreement compares behind each prompt; by default 64.
        draw: whether the full cache draws these tokens, in place of the likeliest.
        data: folder with files of public data sets, or ``hub``; ``None`` if there is none.
        shots: solved examples before a question of choice.
        parts: parts of a task that has several, e.g. ``vt`` of ``ruler``; empty for all that can be run.
    """

    seed: int = 0
    limit: int | None = None
    text: str | None = None
    contexts: tuple[int, ...] = (512, 1024)
    facts: int = 16
    documents: str = "prose"
    depths: tuple[float, ...] = ()
    ask: str = "prompt"
    turns: int | None = None
    window: int | None = None
    stride: int = 16
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    draw: bool = False
    data: str | None = None
    shots: int = 5
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options against each other and against their ranges, as far as that needs no model.

        Raises:
            InputError: an option is out of range, is no known word, or makes no sense with another.
        """
        # no contexts at all are refused like one of 0 tokens
        low = {"limit": self.limit, "contexts": min(self.contexts, default=0), "facts": self.facts}
        lengths = {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens}
        for name, value in {**low, **lengths, "window": self.window, "stride": self.stride}.items():
            if value is not None and value < 1:
                raise InputError(f"{name}={value} leaves nothing to measure; give 1 or more.")
        if self.window is not None and self.window < SHORTEST_WINDOW:
            raise InputError(f"window={self.window} is too short to say anything; give {SHORTEST_WINDOW} or more.")
        if outside := [depth for depth in self.depths if not 0 <= depth <= 1]:
            raise InputError(f"depths={outside[0]:g} is outside the text; give shares from 0 (start) to 1 (end).")
        if self.documents not in STYLES:
            raise InputError(f"documents={self.documents!r} is no look of texts; use one of {', '.join(STYLES)}.")
        _check_look(STYLES[self.documents], self.documents, self.facts, self.text)
        if self.ask not in ASK:
            raise InputError(f"ask={self.ask!r} is no way to ask; use {', '.join(ASK[:-1])} or {ASK[-1]}.")
        for name, number, most in (("shots", self.shots, MOST_SHOTS), ("seed", self.seed, 2**31 - 1)):
            if not 0 <= number <= most:
                raise InputError(f"{name}={number} is outside 0 … {most}.")


def _check_look(look: Style, name: str, facts: int, text: str | None) -> None:
    """Refuse options of recall that its texts cannot have.

    Raises:
        InputError: the look puts facts into a text of the user, and ``text`` is missing or blank; or ``facts`` is more
            than the look has names and things for.
    """
    if look.own_text and not (text or "").strip():
        raise InputError(f"documents={name!r} puts facts between the sentences of a text; give one with `text`.")
    if facts > (most := most_facts(look.lexicon)):
        raise InputError(f"facts={facts} is more than there are names and things for; give {most} or fewer.")


@dataclass(frozen=True)
class TaskOutcome:
    """The result of running a task.

    Attributes:
        score: the numbers of the row, as plain data for JSON.
        memory: bytes that the caches held at the end, summed over batches.
    """

    score: dict[str, Any]
    memory: MemoryUsage


class Task(abc.ABC):
    """One task: `load` makes its data, `prepare` runs the full cache if needed, `run` measures one policy.

    Class attributes:
        name: the task's name, as the user writes it.
        VERSION: incremented by every change that changes results; stored with results, and never mixed.
        headline: the key of the most telling number in `TaskOutcome.score`.
    """

    name: ClassVar[str]
    VERSION: ClassVar[int]
    headline: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> Task:
        """Return the task with its data made, for which no weights are needed.

        Raises:
            InputError: the data or the options cannot be used with this model.
        """

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return everything that results depend on, except the model and the name of a case."""

    @abc.abstractmethod
    def cases(self) -> dict[str, list[int]]:
        """Return the parts of the task: name → tokens of each row, which a budget in percent refers to."""

    @property
    @abc.abstractmethod
    def new_tokens(self) -> int:
        """Return the number of tokens that follow those of `cases`. A policy that never evicts needs room for them."""

    @property
    def notes(self) -> list[str]:
        """Return sentences about the results for the user; none by default."""
        return []

    def prepare(self, writer: Writer) -> None:  # noqa: B027  (most tasks need nothing)
        """Run the full cache as the reference for all policies; called once, before the first run."""

    @abc.abstractmethod
    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Measure one policy, with one budget per row of the case, in caches made as ``setup`` says; return the
        score.
        """


def check_positions(checkpoint: Checkpoint, tokens: int, task: str, argument: str) -> None:
    """Refuse a length for which the model has too few learned positions. Models with other positions have no limit.

    Args:
        checkpoint: the model.
        tokens: number of positions that are needed, also those of new tokens.
        task: what needs them, for the message.
        argument: the option that the message asks to lower.

    Raises:
        InputError: the model has fewer positions.
    """
    limit = checkpoint.position_limit
    if limit is not None and tokens > limit:
        raise InputError(
            f"{task} needs {tokens} positions, and {checkpoint.name} has learned only {limit}. No eviction policy "
            f"changes that: lower `{argument}`, or choose a model with rotary positions."
        )


def past_training(checkpoint: Checkpoint, tokens: int, task: str) -> list[str]:
    """Return a list with a note if ``tokens`` are more than the model was trained for; else, or if that length is not
    known, an empty list.
    """
    trained = checkpoint.trained_length
    if trained is None or tokens <= trained:
        return []
    return [f"{task}: {tokens} tokens are more than the {trained} that the model was trained for."]


# The parts of a task that consists of several.


def chosen(task: str, wanted: Sequence[str], known: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return the parts of a task to run, each once and in the order of ``known``.

    Args:
        task: the task's name, for the message.
        wanted: the parts that the user names; a name that ends with ``*`` stands for all parts that begin so.
        known: all parts of the task.
        default: the parts that run if ``wanted`` is empty.

    Raises:
        InputError: a wanted name stands for no known part.
    """
    found: set[str] = set()
    for name in wanted:
        own = {part for part in known if part == name or (name.endswith("*") and part.startswith(name[:-1]))}
        if not own:
            close = closest(name, known)
            hint = f" Did you mean {close!r}?" if close else ""
            raise InputError(f"`parts`: {task} has no part {name!r}.{hint} Known: {', '.join(known)}.")
        found |= own
    return [part for part in known if part in (found or set(default))]


# The numbers of a row, as pure functions of tensors.

TENTHS = 10
"""Parts of a text by which results count what stands where."""


def nll(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return the negative log-likelihood of each target, in nats and float32."""
    return -logits.float().log_softmax(dim=-1).gather(-1, targets[..., None]).squeeze(-1)


def kl(full: Float[Tensor, "B V"], bounded: Float[Tensor, "B V"]) -> Float[Tensor, " B"]:
    """Return KL(full ‖ bounded) of two next-token distributions from logits, in nats and float32; never below 0."""
    p, q = full.float().log_softmax(dim=-1), bounded.float().log_softmax(dim=-1)
    terms = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0)  # tokens that the full cache rules out add 0
    return terms.sum(dim=-1).clamp(min=0.0)


def position_buckets(length: int, first: int = 64) -> list[tuple[int, int]]:
    """Return ranges ``[start, stop)`` of the positions 1 to ``length - 1`` of tokens that are predicted.

    They begin at 1, ``first``, ``2 * first``, ``4 * first`` and so on; the last one ends at ``length``.
    """
    edges = [1]  # nothing predicts the first token
    edge = first
    while edge < length:
        edges.append(edge)
        edge *= 2
    return list(zip(edges, [*edges[1:], length], strict=True))


def tenth_of(share: float) -> int:
    """Return the tenth that a share in [0, 1] falls into, from 0 to 9."""
    return min(TENTHS - 1, int(share * TENTHS))  # the end of the text belongs to the last tenth


def kept_by_tenth(positions: Int[Tensor, "B Hk S"], lengths: Sequence[int]) -> Float[Tensor, "B 10"]:
    """Return how the kept tokens of each row are spread over the tenths of its text: shares that add up to 1.

    They are averaged over heads; a head that keeps nothing of the text counts with ten zeros.

    Args:
        positions: true positions in the slots, -1 for empty slots; positions beyond a row's length do not count.
        lengths: number of tokens of each row's text.
    """
    n = torch.tensor(lengths, device=positions.device)[:, None, None]
    inside = (positions >= 0) & (positions < n)
    # empty slots and tokens behind the text count in a column of their own, which is left out
    tenth = torch.where(inside, positions * TENTHS // n, TENTHS).long()
    counts = torch.zeros(*positions.shape[:2], TENTHS + 1, device=positions.device)
    counts.scatter_add_(-1, tenth, torch.ones_like(tenth, dtype=counts.dtype))
    # a head that holds nothing of the text has shares of 0
    shares = counts[..., :TENTHS] / counts[..., :TENTHS].sum(dim=-1, keepdim=True).clamp(min=1)
    return shares.mean(dim=1)


def past(probabilities: Float[Tensor, "B Hk R T"]) -> Float[Tensor, "B Hk R T"]:
    """Return attention probabilities with 0 for each query's own token: the part that a cache can hold when it arrives.

    The queries are those of the last ``R`` of ``T`` tokens.
    """
    R, T = probabilities.shape[-2:]
    return probabilities.tril(diagonal=T - R - 1)


def own(probabilities: Float[Tensor, "B Hk R T"]) -> Float[Tensor, "B Hk R"]:
    """Return each query's attention to its own token, which no policy can lose.

    The queries are those of the last ``R`` of ``T`` tokens.
    """
    R, T = probabilities.shape[-2:]
    return probabilities.diagonal(offset=T - R, dim1=-2, dim2=-1)


def held(probabilities: Float[Tensor, "B Hk T"], positions: Int[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk"]:
    """Return the part of one query's attention to ``T`` tokens that falls on those whose positions the slots hold.

    An empty slot has the position -1.
    """
    # an empty slot reads the first token's attention, which is then masked
    mass = probabilities.gather(-1, positions.long().clamp(min=0))
    return mass.masked_fill(positions < 0, 0.0).sum(dim=-1)


def best_dynamic(probabilities: Float[Tensor, "B Hk R T"], budget: int) -> Float[Tensor, "B Hk R"]:
    """Return the most attention that each query's own token and its best ``budget`` earlier tokens can have."""
    before = past(probabilities)
    return before.topk(min(budget, before.shape[-1]), dim=-1).values.sum(dim=-1) + own(probabilities)


def best_static(probabilities: Float[Tensor, "B Hk R T"], budget: int) -> Float[Tensor, "B Hk R"]:
    """Return the attention of each query to its own token and to the best fixed set of earlier tokens in hindsight.

    The set of a head has the ``budget`` tokens with the largest sums over all queries.
    """
    before = past(probabilities)
    chosen = before.sum(dim=-2).topk(min(budget, before.shape[-1]), dim=-1).indices
    return before.gather(-1, chosen[:, :, None].expand(-1, -1, before.shape[-2], -1)).sum(dim=-1) + own(probabilities)


# Running text for all tasks but recall: windows of a file, or of the package's own sentences.

SHORTEST = 16
"""Tokens of the shortest text that says anything."""

_SEEDS_APART = 1_000_003
"""Distance of the first texts of two seeds, more than a run has texts. Another number would change all results."""

_FILLER_PER_FACT = 3
_FACTS = 16
"""Sentences before each fact of the package's own text, and facts that take turns; other numbers change results."""


ITEMS_APART = 1009
"""Distance of the first items of two seeds where a run has few of them; another number would change results."""


def text_seed(seed: int, number: int) -> int:
    """Return the seed of a text by its number, so that no text of one seed of the user is one of another."""
    return seed * _SEEDS_APART + number


def windows(checkpoint: Checkpoint, options: Options, *, rows: int, length: int) -> Int[Tensor, "rows length"]:
    """Return texts of equal length, each after the model's begin token if there is one.

    Args:
        checkpoint: the model.
        options: the text, and a seed that chooses windows of a long text, or the package's own sentences.
        rows: number of texts; fewer if the file is shorter.
        length: tokens of each text with its begin token; fewer if the whole file is shorter.

    Raises:
        InputError: the file has fewer tokens than `SHORTEST`, or ``length`` has no room for more than the begin token.
    """
    begin = _begin(checkpoint)
    body = length - len(begin)
    if body < 1:
        raise InputError("A text of 1 token would be the model's begin token alone; give a larger number of tokens.")
    if options.text is None:
        texts = [_own_tokens(checkpoint, text_seed(options.seed, row), body) for row in range(rows)]
    else:
        texts = _cut(_tokens(checkpoint, options.text), rows, body, options.seed)
    return torch.stack([torch.cat([begin, text]) for text in texts])


def describe(options: Options) -> str:
    """Return the name of the text in results: ``own``, or a hash."""
    if options.text is None:
        return "own"
    return f"sha256:{hashlib.sha256(options.text.encode()).hexdigest()[:16]}"


def notes(options: Options) -> list[str]:
    """Return a note if the text is the package's own; else an empty list."""
    if options.text is not None:
        return []
    return [
        f"{', '.join(TEXT_TASKS[:-1])} and {TEXT_TASKS[-1]} use the package's own plain sentences, which say little "
        "about other texts; give one as `text`."
    ]


def own_sentences(seed: int) -> Iterator[str]:
    """Yield the sentences of an endless text: three neutral ones in random order, then a fact, and so on.

    The same few facts come back in turn, each time in words that are drawn anew.
    """
    rng = random.Random(seed)
    facts = cycle(draw_facts(HELD_OUT, rng, _FACTS, [kind.name for kind in HELD_OUT.kinds]))
    filler = iter(own_filler(rng))
    while True:
        yield from islice(filler, _FILLER_PER_FACT)
        fact = next(facts)
        yield fact.say(rng.choice(fact.kind.statements))


def _own_tokens(checkpoint: Checkpoint, seed: int, length: int) -> Int[Tensor, " length"]:
    """Return the first ``length`` tokens of the package's own sentences of a seed, without a begin token."""
    sentences = own_sentences(seed)
    text = " ".join(islice(sentences, 1 + length // 4))  # nearly always enough: few sentences have so few tokens
    while len(ids := _tokens(checkpoint, text)) < length:
        text = " ".join([text, *islice(sentences, 1 + length // 8)])  # `sentences` goes on where it was left
    return ids[:length]


def _cut(ids: Int[Tensor, " n"], rows: int, length: int, seed: int) -> list[Int[Tensor, " length"]]:
    """Return windows of a text: consecutive parts of equal length, which do not overlap.

    The next seed starts where this one ends; after the last window comes the first.

    Args:
        ids: the text.
        rows: most windows; a short text has fewer.
        length: most tokens of a window; a shorter text is one window, of all its tokens.
        seed: chooses the first window, unless all windows are taken.

    Raises:
        InputError: the text has fewer tokens than `SHORTEST`.
    """
    if len(ids) < SHORTEST:
        raise InputError(
            f"The text has only {len(ids)} tokens; less than {SHORTEST} say nothing about a cache. Give a "
            "longer `text`."
        )
    length = min(length, len(ids))
    starts = range(0, len(ids) - length + 1, length)
    chosen = [starts[(seed * rows + row) % len(starts)] for row in range(min(rows, len(starts)))]
    # a text with too few windows gives all of them, whatever the seed
    return [ids[start : start + length] for start in (chosen if rows < len(starts) else starts)]


def _tokens(checkpoint: Checkpoint, text: str) -> Int[Tensor, " n"]:
    """Return a text's tokens without the begin token that the tokenizer may put in front."""
    # the begin token stands before each window, not once before the text: `windows` adds it
    ids = encode(checkpoint, text, raw=True)[0]
    begin = checkpoint.tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[0] == begin else ids


def _begin(checkpoint: Checkpoint) -> Int[Tensor, " n"]:
    """Return the tokenizer's begin token as a text of one token; an empty text if it has none."""
    begin = checkpoint.tokenizer.bos_token_id
    return torch.tensor([] if begin is None else [begin], dtype=torch.int64)
