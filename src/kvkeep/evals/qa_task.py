"""The seam of tasks that read a text, are asked about it, and grade the reply: they only make `Item`s and grade them.

As in recall, a question is read before the cut (``ask=inside``) or follows the cut (``ask=later``).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals import task
from kvkeep.evals.forward import PLAIN, Drive, Setup, batches, left_padded
from kvkeep.evals.task import Options, Task, TaskOutcome, check_positions, past_training
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.generation_config import ends_of
from kvkeep.models.tokenization import Writer, encode, encode_rest
from kvkeep.policies.base import Policy
from kvkeep.types import MemoryUsage

# Replies to prompts: each prompt's text is read and cut to the budget, then the reply is decoded greedily.
#
# The last token of a prompt is fed apart, because its attention chooses the first token of the reply: with the whole
# prompt in one chunk, a reply of one word would not depend on the policy.

Make = Callable[[Sequence[int], int], Drive]
"""Makes a cache for some prompts, given by their numbers; the second number is the identity of its first row."""


@runtime_checkable  # for beartype, by which tests check annotations
class Prompt(Protocol):
    """A prompt as tokens.

    Attributes:
        ids: all of its tokens.
        first: number of tokens that are fed at once and then cut to the budget; the others follow after that. Prompts
            of one document that are asked later have these tokens in common.
        document: the number of the text.
        number: the number of the prompt among those of its text.
        chat: whether it is in the chat template, if there is one.
    """

    # the docstring above says what each is
    @property
    def ids(self) -> Int[Tensor, " n"]: ...  # noqa: D102

    @property
    def first(self) -> int: ...  # noqa: D102

    @property
    def document(self) -> int: ...  # noqa: D102

    @property
    def number(self) -> int: ...  # noqa: D102

    @property
    def chat(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Replies:
    """The results of one batch of prompts.

    Attributes:
        texts: the reply to each prompt.
        kept: which share of the kept tokens stands in each tenth of the text, for each prompt.
        memory: bytes that the caches held at the end.
    """

    texts: list[str]
    kept: Float[Tensor, "B 10"]
    memory: MemoryUsage


def inside(writer: Writer, prompts: Sequence[Prompt], drive: Make, most: int) -> Iterator[Replies]:
    """Read each prompt with its question, cut it, and yield the replies of each batch, of at most ``most`` tokens.

    Under policies whose choice stays the same, the beginning that several questions about one text share is read once.
    The replies are in the order of the prompts.
    """
    # an unused cache has no slots yet, so that asking one what the policy needs costs nothing
    rows, number = drive(range(1), 0).end_rows, range(len(prompts))
    shared = rows is not None and len({prompt.document for prompt in prompts}) < len(prompts)
    for batch in _texts(prompts) if shared else batches([len(prompt.ids) for prompt in prompts]):
        part = prompts[batch]
        bounded = drive(number[batch], batch.start)
        if shared and (first := _common(part, rows or 0)):
            # any of the rows can read what all have in common
            before = drive(number[batch][:1], batch.start).beginning(part[0].ids[:first])
            if before is not None:
                bounded.go_on_from(before)
        kept = read(bounded, part)
        yield Replies(texts(writer, bounded, part, most), kept, bounded.cache.memory())


def _texts(prompts: Sequence[Prompt]) -> list[slice]:
    """Split prompts, document by document, into batches each of which has questions about a single text."""
    starts = [i for i, prompt in enumerate(prompts) if not i or prompt.document != prompts[i - 1].document]
    ends = zip(starts, [*starts[1:], len(prompts)], strict=True)
    return [
        slice(start + batch.start, min(start + batch.stop, end))
        for start, end in ends
        for batch in batches([len(prompt.ids) for prompt in prompts[start:end]])
    ]


def _common(prompts: Sequence[Prompt], rows: int) -> int:
    """Return how many first tokens can be read once for all prompts: those that they have in common, but for the last
    ``rows`` tokens before the cut, which each prompt has to read itself.

    It is 0 for a single prompt, which has nobody to share them with.
    """
    if len(prompts) < 2:
        return 0
    shortest = min(prompt.first for prompt in prompts)
    differ = [(prompt.ids[:shortest] != prompts[0].ids[:shortest]).nonzero().flatten() for prompt in prompts[1:]]
    alike = min((int(places[0]) for places in differ if len(places)), default=shortest)
    return max(0, min(alike, shortest - rows))


def later(writer: Writer, prompts: Sequence[Prompt], drive: Make, most: int) -> Iterator[Replies]:
    """Read each text once, cut it, ask all its questions in copies of that memory, and yield the replies of each batch
    of questions, of at most ``most`` tokens.

    The prompts come document by document, and the replies are in their order. A text has the budget of its first
    question.
    """
    # the first question of a text stands for the text, which all its questions have in common
    heads = [i for i, prompt in enumerate(prompts) if not prompt.number]
    for batch in batches([prompts[i].first for i in heads]):
        bounded = drive(heads[batch], batch.start)
        kept = read(bounded, [prompts[i] for i in heads[batch]])
        row = {prompts[i].document: place for place, i in enumerate(heads[batch])}
        part = [prompt for prompt in prompts if prompt.document in row]
        # a copy takes the memory of its budget and of the question, not of the text
        for questions in batches([max(bounded.budgets) + len(prompt.ids) - prompt.first for prompt in part]):
            rows = [row[prompt.document] for prompt in part[questions]]
            copies = bounded.copies(rows)
            yield Replies(texts(writer, copies, part[questions], most), kept[rows], copies.cache.memory())


def in_turns(
    writer: Writer, prompts: Sequence[Prompt], drive: Make, most: int, *, turns: int, due: Sequence[int]
) -> Iterator[Replies]:
    """Read each text in turns, with a cut after each; ask each question after some turn, in a copy of the memory.

    Yield the replies of each batch of texts, in the order of the prompts.

    Args:
        writer: the model.
        prompts: the prompts, document by document.
        drive: makes a cache.
        most: most tokens of a reply.
        turns: pieces of a text, of equal length.
        due: of each prompt, the number of turns after which it is asked.
    """
    # as in `later`
    heads = [i for i, prompt in enumerate(prompts) if not prompt.number]
    for batch in batches([prompts[i].first for i in heads]):
        bounded, first = drive(heads[batch], batch.start), [prompts[i] for i in heads[batch]]
        row = {prompt.document: place for place, prompt in enumerate(first)}
        asked = [i for i, prompt in enumerate(prompts) if prompt.document in row]
        replies: dict[int, str] = {}
        for turn in range(1, turns + 1):
            edges = [(prompt.first * (turn - 1) // turns, prompt.first * turn // turns) for prompt in first]
            pieces = [prompt.ids[start:stop] for prompt, (start, stop) in zip(first, edges, strict=True)]
            bounded.feed(*left_padded(pieces), last_only=True)
            if due_now := [i for i in asked if due[i] == turn]:
                copies = bounded.copies([row[prompts[i].document] for i in due_now])
                replies |= zip(due_now, texts(writer, copies, [prompts[i] for i in due_now], most), strict=True)
        kept = _kept(bounded, first)[[row[prompts[i].document] for i in asked]]
        yield Replies([replies[i] for i in asked], kept, bounded.cache.memory())


def read(drive: Drive, prompts: Sequence[Prompt]) -> Float[Tensor, "B 10"]:
    """Feed the first part of each prompt, but for what was read before, and cut it; return for each row which share of
    the kept tokens is in each tenth of that part.
    """
    drive.feed(*left_padded([prompt.ids[drive.known : prompt.first] for prompt in prompts]), last_only=True)
    return _kept(drive, prompts)


def _kept(drive: Drive, prompts: Sequence[Prompt]) -> Float[Tensor, "B 10"]:
    """Return which share of the tokens that a row keeps is in each tenth of its text, mean over layers and heads."""
    lengths, cache = [prompt.first for prompt in prompts], drive.cache
    tenths = [task.kept_by_tenth(cache.positions(i), lengths) for i in cache.bounded_layers()]
    return torch.stack(tenths).mean(0).cpu()


def texts(writer: Writer, drive: Drive, prompts: Sequence[Prompt], most: int) -> list[str]:
    """Feed the rest of each prompt, whose first part was `read`, and return the replies."""
    between = [prompt.ids[prompt.first : -1] for prompt in prompts]
    if any(map(len, between)):
        drive.feed(*left_padded(between), last_only=True)
    # the last tokens apart, so that the policy has a part in the reply's first token
    logits = drive.feed(*left_padded([prompt.ids[-1:] for prompt in prompts]), last_only=True)
    ends = ends_of(writer.model, writer.checkpoint.tokenizer, chat=any(prompt.chat for prompt in prompts))
    return [writer.text_of(row) for row in decode_greedily(drive, logits, most, ends)]


def decode_greedily(drive: Drive, logits: Float[Tensor, "B 1 V"], most: int, ends: set[int]) -> list[list[int]]:
    """Return the tokens of a greedy reply for each row, at most ``most``, the one that ends it among them.

    A row that has ended is fed nothing more.

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
            replies[row].append(int(best[row]))  # the ending token as well: `text_of` leaves it out
        running &= torch.tensor([int(token) not in ends for token in best])
        if step == most - 1 or not running.any():
            break  # nothing follows the last token, so it is not fed
        logits = drive.feed(best[:, None], running[:, None], last_only=True)
    return replies


_MOST = 8
"""If so many more parts for each token of the room still fit, parts do not lengthen the text, and the search ends."""

_Made = TypeVar("_Made", bound="QATask")


@dataclass(frozen=True, kw_only=True)
class Item:
    """A text, a question about it, and what a right reply has.

    Attributes:
        text: the text.
        question: follows the text directly.
        lead: the beginning of the reply, which the model continues.
        answers: the right answers.
        classes: all classes, for tasks that grade by them.
        depth: where the answer stands in the text, in [0, 1]; ``None`` if it has no place.
        chat: whether a chat template may be used.
    """

    text: str
    question: str
    lead: str = ""
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    depth: float | None = None
    chat: bool = True


@dataclass(frozen=True)
class ItemPrompt:
    """An item as tokens; see `Prompt`."""

    item: Item
    ids: Int[Tensor, " n"]
    first: int
    document: int
    number: int = 0

    @property
    def chat(self) -> bool:
        """Return whether the prompt is in the chat template, if there is one."""
        return self.item.chat


@dataclass(frozen=True)
class TaskCase:
    """A part of a task.

    Attributes:
        prompts: its questions.
        new: most tokens of a reply.
        grade: grades a reply, in [0, 1].
    """

    prompts: list[ItemPrompt]
    new: int
    grade: Callable[[Item, str], float]


@dataclass(frozen=True)
class QATask(Task):
    """A task of items. A subclass has a name, a version, and `make`.

    Attributes:
        options: the user's choices.
        made: the cases by name.
        about: everything that results depend on, see `settings`.
        notes_: what `notes` returns, whose name is taken by the property.
    """

    headline: ClassVar[str] = "score"
    items: ClassVar[int] = 20
    """Default number of items per case."""

    options: Options
    made: dict[str, TaskCase]
    about: dict[str, Any]
    notes_: tuple[str, ...] = ()

    @classmethod
    def load(cls: type[_Made], checkpoint: Checkpoint, options: Options) -> _Made:
        """Return the task with its items made by `make`. Cases whose questions come later have ``,ask=later`` in their
        names.

        Raises:
            InputError: the data cannot be used, a text cannot be made as short as was asked, or the model has too few
                learned positions.
        """
        later = ",ask=later" if options.ask == "later" else ""
        about: dict[str, Any] = {"items": options.limit or cls.items}
        notes: list[str] = []
        made = {f"{name}{later}": case for name, case in cls.make(checkpoint, options, about, notes).items()}
        longest = max(len(prompt.ids) + case.new for case in made.values() for prompt in case.prompts)
        check_positions(checkpoint, longest, cls.name, "contexts")
        return cls(options, made, about, (*notes, *past_training(checkpoint, longest, cls.name)))

    @classmethod
    @abc.abstractmethod
    def make(
        cls, checkpoint: Checkpoint, options: Options, about: dict[str, Any], notes: list[str]
    ) -> Mapping[str, TaskCase]:
        """Return the cases by name: questions, and how replies to them are graded.

        Args:
            checkpoint: the model.
            options: the user's choices.
            about: gets everything that results depend on beside the names of cases.
            notes: gets notes for the user.

        Raises:
            InputError: see `load`.
        """

    def settings(self) -> dict[str, Any]:
        """Return everything that results depend on."""
        return self.about

    def cases(self) -> dict[str, list[int]]:
        """Return each case with a length in tokens for each question: that of its prompt, or of its text if questions
        are asked later.
        """
        later = self.options.ask == "later"
        return {
            name: [prompt.first if later else len(prompt.ids) for prompt in case.prompts]
            for name, case in self.made.items()
        }

    @property
    def new_tokens(self) -> int:
        """Return the most tokens that follow those of `cases` in a row: those of a reply, and before them those of the
        question if it is asked later.
        """
        later = self.options.ask == "later"
        return max(
            case.new + (len(prompt.ids) - prompt.first if later else 0)
            for case in self.made.values()
            for prompt in case.prompts
        )

    @property
    def notes(self) -> list[str]:
        """Return notes about texts that were cut, left out, or longer than the model was trained for."""
        return list(self.notes_)

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> TaskOutcome:
        """Ask all questions of a case under a policy, and return the graded replies as a score."""
        made, done = self.made[case], list(self._ask(writer, case, policy, budgets, setup))
        texts = [text for batch in done for text in batch.texts]
        grades = self.grades(case, texts)
        kept = torch.cat([batch.kept for batch in done]).mean(dim=0)
        score = {
            **_score(made.prompts, grades),
            **self.more(case, texts),
            "kept": [round(share, 6) for share in kept.tolist()],
        }
        return TaskOutcome(score, sum((batch.memory for batch in done), MemoryUsage()))

    def grades(self, case: str, texts: Sequence[str]) -> list[float]:
        """Return the grade of each reply."""
        made = self.made[case]
        return [made.grade(prompt.item, text) for prompt, text in zip(made.prompts, texts, strict=True)]

    def more(self, case: str, texts: Sequence[str]) -> dict[str, Any]:
        """Return further numbers of a case's score, from all replies together; none by default."""
        return {}

    def _ask(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], setup: Setup
    ) -> Iterator[Replies]:
        """Yield the replies to a case's questions under a policy, batch by batch."""

        def drive(at: Sequence[int], first: int) -> Drive:
            return Drive(writer, policy, [budgets[i] for i in at], first=first, setup=setup)

        ask = later if self.options.ask == "later" else inside
        return ask(writer, self.made[case].prompts, drive, self.made[case].new)


def _score(prompts: Sequence[ItemPrompt], grades: Sequence[float]) -> dict[str, Any]:
    """Return the record of graded replies: their mean (``score``), number (``n``) and ``grades``.

    If depths of answers are known, ``by_depth`` has the sum and the number of the grades in each tenth of the text.
    """
    score: dict[str, Any] = {
        "score": sum(grades) / len(grades),
        "n": len(grades),
        "grades": [round(grade, 4) for grade in grades],
    }
    by_depth = [[0.0, 0] for _ in range(task.TENTHS)]
    for prompt, grade in zip(prompts, grades, strict=True):
        if prompt.item.depth is not None:
            tally = by_depth[task.tenth_of(prompt.item.depth)]
            tally[0], tally[1] = round(tally[0] + grade, 4), tally[1] + 1
    return score | ({"by_depth": by_depth} if any(n for _, n in by_depth) else {})


class TooShortError(InputError):
    """An item does not fit into its context."""


# -- prompts -----------------------------------------------------------------------------------------------------------


def prompt_of(checkpoint: Checkpoint, item: Item, ask: str, document: int) -> ItemPrompt:
    """Return an item as tokens, in the chat template if there is one and the item may use it.

    Its first part, which is cut, is all but the last token, or with ``ask="later"`` the text without the question.
    """
    ids = tokens_of(checkpoint, item)
    if ask != "later":
        return ItemPrompt(item, ids, len(ids) - 1, document)
    # tokens that do not depend on the question: a tokenizer may join the text's end with what follows
    other = encode(checkpoint, f"{item.text} ;", raw=not item.chat)[0]
    size = min(len(ids), len(other))
    differs = (ids[:size] != other[:size]).nonzero()
    same = int(differs[0]) if len(differs) else size
    return ItemPrompt(item, ids, max(1, min(same, len(ids) - 1)), document)  # a token to cut, and one to ask with


def tokens_of(checkpoint: Checkpoint, item: Item) -> Int[Tensor, " n"]:
    """Return the tokens of text, question and lead, in the chat template if there is one and the item may use it."""
    if not item.chat or checkpoint.tokenizer.chat_template is None:
        return encode(checkpoint, f"{item.text}{item.question}{item.lead}", raw=True)[0]
    ids = encode(checkpoint, f"{item.text}{item.question}")[0]
    # the lead begins the model's turn, so the blank that would part it from the question falls away
    return torch.cat([ids, encode_rest(checkpoint, item.lead.strip())[0]]) if item.lead.strip() else ids


def fitting(checkpoint: Checkpoint, make: Callable[[int], Item], room: int, least: int, about: str) -> Item:
    """Return the longest item that has at most ``room`` tokens, found by trying numbers of parts.

    Args:
        checkpoint: the model.
        make: returns an item of a number of parts, such as sentences; more parts make a longer text, unless there are
            no more (a single document).
        room: most tokens of the prompt.
        least: fewest parts.
        about: the item's name in messages.

    Raises:
        TooShortError: even the fewest parts have more tokens.
    """
    low, high = least, least
    if (size := len(tokens_of(checkpoint, make(low)))) > room:
        raise TooShortError(
            f"{about} cannot be made: its shortest prompt has {size} tokens, and {max(0, room)} are left for it."
        )
    step = max(1, least, math.ceil(room / 64))  # doubled until it is too long, then halved: encoding is what costs
    while len(tokens_of(checkpoint, make(high + step))) <= room:
        high, step = high + step, 2 * step
        if step > _MOST * room:  # more parts make it no longer: a single document
            return make(high)
    low, high = high, high + step
    while high - low > 1:
        middle = (low + high) // 2
        fits = len(tokens_of(checkpoint, make(middle))) <= room
        low, high = (middle, high) if fits else (low, middle)
    return make(low)
