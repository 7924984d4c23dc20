"""Texts that are made by rule: needles in haystacks, chains of variables, lists of words, documents."""

from __future__ import annotations

import itertools
import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from typing import Any

from kvkeep.errors import InputError
from kvkeep.evals import datasets
from kvkeep.evals.datasets import HubDataset, Source, text
from kvkeep.evals.qa_task import Item
from kvkeep.models.tiny.recall import own_filler

# Words, numbers and haystacks of which texts are made.

_LISTS = (resources.files("kvkeep.evals") / "synthetic_words.txt").read_text(encoding="utf-8").strip().split("\n\n")
ADJECTIVES, NOUNS = (tuple(part.split()) for part in _LISTS)

_LONGEST = 60
"""Words of a sentence; a longer one would leave few places for needles."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's noise."""


def value(kind: str, drawn: random.Random) -> str:
    """Return a random value: two words with a hyphen (``words``), seven digits (``numbers``), or a UUID (``uuids``)."""
    if kind == "words":
        return f"{drawn.choice(ADJECTIVES)}-{drawn.choice(NOUNS)}"
    if kind == "numbers":
        return str(drawn.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=drawn.getrandbits(128), version=4))


def values(kind: str, drawn: random.Random, n: int) -> list[str]:
    """Return ``n`` different random values of a kind, see `value`, in the order in which they were drawn."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[value(kind, drawn)] = None
    return list(found)


def words(drawn: random.Random, n: int) -> list[str]:
    """Return ``n`` different random words. Where single words do not suffice, pairs with a hyphen are among them; where
    these do not suffice either, all are UUIDs.
    """
    single = sorted({*ADJECTIVES, *NOUNS})  # sorted, since each process has another order of a set
    if n <= len(single):
        return drawn.sample(single, n)
    pairs = [f"{adjective}-{other}" for adjective in ADJECTIVES for other in NOUNS]
    return drawn.sample([*single, *pairs], n) if n <= len(single) + len(pairs) else values("uuids", drawn, n)


class Haystack:
    """Sentences without end: those of a text, from its start again when it is over, or the package's own.

    Args:
        text: the text; ``None`` or an empty one for the package's own sentences.
        seed: chooses the package's own sentences; without effect on a text.
    """

    def __init__(self, text: str | None, seed: int):
        self._all = sentences(text or "")
        self._own = not self._all
        self._filler = iter(own_filler(random.Random(seed)))

    def first(self, n: int) -> list[str]:
        """Return the first ``n`` sentences. A text begins again when it is over."""
        while len(self._all) < n:
            self._all += islice(self._filler, n - len(self._all)) if self._own else self._all[: n - len(self._all)]
        return self._all[:n]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, with single spaces; long ones are split after `_LONGEST` words."""
    parts = [part.split() for part in re.split(r"(?<=[.!?])\s+", text)]
    return [" ".join(part[at : at + _LONGEST]) for part in parts for at in range(0, len(part), _LONGEST)]


def planted(hay: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Return sentences as one text with needles between them, joined by spaces.

    Args:
        hay: the sentences.
        needles: the needles.
        depths: after which share of the sentences each needle stands, in [0, 1].
    """
    places = sorted(zip((round(depth * len(hay)) for depth in depths), needles, strict=True))
    parts, before = [], 0
    for place, needle in places:
        parts += [*hay[before:place], needle]
        before = place
    return " ".join([*parts, *hay[before:]])


# Needles of RULER: special magic numbers, words and UUIDs in a haystack.

_DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]
"""RULER's: 40 whole percents from 0 to 100."""

_TEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}"
)
_QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
_LEAD = " The special magic {kind} for {query} mentioned in the provided text are"
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."


@dataclass(frozen=True)
class Needles:
    """One of RULER's needle tasks.

    Attributes:
        hay: ``noise``, ``essay``, or ``needle`` (other needles).
        keys: kind of the keys: ``words`` or ``uuids``.
        values: kind of the values: ``numbers`` or ``uuids``.
        n_keys, n_values, n_queries: keys in the text, values of each key, and keys that are asked for.
    """

    hay: str
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1


TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", n_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", n_values=4),
    "niah_multiquery": Needles("essay", n_keys=4, n_queries=4),
}


def needle_items(task: Needles, haystack: Haystack, seed: str) -> Callable[[int], Item]:
    """Return a function that makes an item of a needle task with a given number of sentences around the needles.

    For every number it is the same question about the same needles at the same depths, which ``seed`` chooses.
    """

    def make(n: int) -> Item:
        """Return the item with ``n`` sentences around the needles."""
        drawn = random.Random(seed)
        keys = values(task.keys, drawn, task.n_keys)
        held = {key: values(task.values, drawn, task.n_values) for key in keys}
        needles = [_said(task, key, value) for key in keys for value in held[key]]
        asked = keys[: task.n_queries]
        context, depths = _context(task, haystack, needles, n, drawn)
        answers = tuple(value for key in asked for value in held[key])
        single = len(answers) == 1  # several answers stand at several depths
        return _item(task, context, _listed(asked), answers, depths[0] if single else None)

    return make


def _context(
    task: Needles, haystack: Haystack, needles: list[str], n: int, drawn: random.Random
) -> tuple[str, list[float]]:
    """Return a text of needles among ``n`` sentences, lines of noise or other needles, and the depth of each needle as
    a share of the text.
    """
    depths = drawn.sample(_DEPTHS, len(needles))
    # as in RULER, lines of noise and needles stand below each other, and sentences of an essay in one paragraph
    if task.hay == "noise":
        hay = [NOISE] * n
    elif task.hay == "needle":
        hay = _others(task, needles, n, drawn)
    else:
        mixed = dict(zip(drawn.sample(needles, len(needles)), depths, strict=True))  # all needles differ
        return planted(haystack.first(n), list(mixed), depths), [mixed[needle] for needle in needles]
    places = [round(depth * n) for depth in depths]
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):  # from the end: no place moves
        hay.insert(place, needle)
    return "\n".join(hay), depths


def _others(task: Needles, needles: list[str], n: int, drawn: random.Random) -> list[str]:
    """Return ``n`` needles with keys other than those of the given needles."""
    hay: list[str] = []
    while len(hay) < n:
        key = value(task.keys, drawn)
        if not any(f" {key} " in needle for needle in needles):  # else the question would have two answers
            hay.append(_said(task, key, value(task.values, drawn)))
    return hay


def _said(task: Needles, key: str, held: str) -> str:
    """Return the sentence of a needle, in RULER's words."""
    return _NEEDLE.format(kind=task.values, key=key, value=held)


def _listed(keys: list[str]) -> str:
    """Return keys as a list in a sentence."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _item(task: Needles, context: str, query: str, answers: tuple[str, ...], depth: float | None) -> Item:
    """Return an item in RULER's wording; one answer is asked for in the singular."""
    templates, kind = (_TEXT, _QUESTION, _LEAD), task.values
    if len(answers) == 1:
        kind = kind.removesuffix("s")
        changed = [("Some", "A"), ("are all", "is"), ("are", "is")]  # as RULER does, in its order
        for before, after in changed:
            # to a type checker a tuple of any length, no longer one of three
            templates = tuple(template.replace(before, after) for template in templates)  # type: ignore[assignment]
    text, question, lead = (part.format(kind=kind, context=context, query=query) for part in templates)
    return Item(text=text, question=question, lead=lead, answers=answers, depth=depth)


# RULER's questions about documents (qa_1 from SQuAD, qa_2 from HotpotQA), with other documents as distraction.

_ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."

SOURCES = {
    "qa_1": Source(
        ("squad.json", "dev-v2.0.json"),
        "SQuAD 2.0's development set as its authors publish it (JSON)",
        "squad_v2",
        HubDataset("rajpurkar/squad_v2", None, "validation"),
    ),
    "qa_2": Source(
        ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
        "HotpotQA's development set with distractors as its authors publish it (JSON)",
        "hotpot_qa",
        HubDataset("hotpotqa/hotpot_qa", "distractor", "validation"),
    ),
}


@dataclass(frozen=True)
class SyntheticQuestion:
    """A question.

    Attributes:
        question: the question.
        answers: right answers.
        needed: numbers of the documents with the answer.
        near: numbers of documents about the same thing.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """Documents and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[SyntheticQuestion, ...]


def library(name: str, data: str | None) -> Library:
    """Return the documents and questions of ``qa_1`` or ``qa_2``.

    Raises:
        InputError: the file is missing, or of another format.
    """
    source = SOURCES[name]
    read = datasets.rows(data, source, f"ruler's {name}")
    what = f"part of {source.public}"
    found = _squad(read.read(_flat, what)) if name == "qa_1" else _hotpot(read.read(_entry, what))
    if not found.questions:
        raise InputError(f"{read.name} has no question with an answer.")
    return found


_Flat = tuple[str, str, str, tuple[str, ...]]


def _squad(rows: Iterable[Sequence[_Flat]]) -> Library:
    """Return SQuAD's paragraphs as documents, each once, and its questions but those without an answer.

    The other paragraphs of the same article are about the same thing.

    Args:
        rows: what `_flat` makes of each row: the authors' file is one object of articles with paragraphs, and the hub
            has a row per question.
    """
    asked = [question for row in rows for question in row]
    # sorted, so that the numbers do not depend on the order of a set
    numbers = {said: i for i, said in enumerate(sorted({said for _, said, _, _ in asked}))}
    about: dict[str, set[int]] = {}
    for article, said, _, _ in asked:
        about.setdefault(article, set()).add(numbers[said])
    questions = [
        SyntheticQuestion(question, answers, (numbers[said],), tuple(sorted(about[article] - {numbers[said]})))
        for article, said, question, answers in asked
        if answers  # SQuAD 2.0 also has questions without any
    ]
    return Library(tuple(numbers), tuple(questions))


def _flat(row: Mapping[str, Any]) -> list[_Flat]:
    """Return article, paragraph, question and different answers of each question in a row of SQuAD.

    A row of the hub is one question. In the authors' file each paragraph also comes once with an empty question and no
    answers.

    Raises:
        ValueError: a paragraph has another form.
    """
    if "data" not in row:  # a row of the hub
        return [(text(row, "title"), text(row, "context"), text(row, "question"), _different(row["answers"]["text"]))]
    found: list[_Flat] = []
    for number, article in enumerate(row["data"], 1):
        for place, paragraph in enumerate(article["paragraphs"], 1):
            try:
                found += _paragraph(str(number), paragraph)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                said = f"no {error}" if isinstance(error, KeyError) else f"{error}"
                raise ValueError(f"paragraph {place} of article {number}: {said}") from error
    return found


def _paragraph(article: str, paragraph: Mapping[str, Any]) -> Iterator[_Flat]:
    """Yield a paragraph of SQuAD on its own, then once for each of its questions, with the answers."""
    context = text(paragraph, "context")
    # a paragraph without any question is a document, too
    yield article, context, "", ()
    for entry in paragraph["qas"]:
        answers = [] if entry.get("is_impossible", False) else [answer["text"] for answer in entry["answers"]]
        yield article, context, text(entry, "question"), _different(answers)


def _different(answers: Any) -> tuple[str, ...]:
    """Return the answers, each once.

    Raises:
        ValueError: an answer is blank, which every reply would contain, or no text.
    """
    if not isinstance(answers, list):
        raise ValueError(f"answers are {answers!r:.20}, no list")
    return tuple(dict.fromkeys(text({"answer": answer}, "answer") for answer in answers))


def _hotpot(rows: Sequence[tuple[str, str, Sequence[str]]]) -> Library:
    """Return HotpotQA's paragraphs without repetition, and its questions, each of which needs all paragraphs of its
    entry, also the distracting ones.
    """
    # sorted, so that the numbers do not depend on the order of a set
    texts = sorted({said for _, _, shown in rows for said in shown})
    numbers = {said: i for i, said in enumerate(texts)}
    questions = [
        SyntheticQuestion(asked, (answer,), tuple(numbers[said] for said in shown)) for asked, answer, shown in rows
    ]
    return Library(tuple(texts), tuple(questions))


def _entry(row: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Return question, answer and documents of an entry: pairs of title and sentences, or two lists in the hub's
    copy.

    Raises:
        ValueError: the entry has no documents.
    """
    context = row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
    shown = [_document(title, said) for title, said in pairs]
    if not shown:
        raise ValueError("it has no documents")
    return text(row, "question"), text(row, "answer"), shown


def _document(title: Any, said: Any) -> str:
    """Return a paragraph of HotpotQA with its title.

    Raises:
        ValueError: the context holds something else than titles and lists of sentences.
    """
    if not isinstance(title, str) or not isinstance(said, list):
        raise ValueError("'context' holds no titles and lists of sentences")
    return f"{title}\n{''.join(said)}"  # but for the first, sentences there begin with a space


def document_items(found: Library, asked: SyntheticQuestion, seed: str) -> Callable[[int], Item]:
    """Return a function that makes an item about a question: the needed documents and a given number of others, in a
    random order. ``seed`` chooses the others and the order.
    """

    def make(n: int) -> Item:
        """Return the item with ``n`` documents beside the needed ones, those about the same thing before others."""
        drawn = random.Random(seed)
        near = drawn.sample(asked.near, len(asked.near))
        far = [i for i in range(len(found.documents)) if i not in {*asked.needed, *near}]
        others = [*near, *drawn.sample(far, len(far))]
        # too few others repeat, and where there are none nothing can
        chosen = [*asked.needed, *(others[:n] if n <= len(others) or not others else _again(others, n))]
        drawn.shuffle(chosen)
        shown = "\n\n".join(f"Document {i}:\n{found.documents[number]}" for i, number in enumerate(chosen, 1))
        return Item(
            text=f"{_ASK}\n\nThe following are given documents.\n\n{shown}\n\n",
            question=f"{_ASK}\n\nQuestion: {asked.question}",
            lead=" Answer:",
            answers=asked.answers,
        )

    return make


def _again(others: list[int], n: int) -> list[int]:
    """Return ``n`` documents; where there are too few, they repeat from the start."""
    return [others[i % len(others)] for i in range(n)]


# RULER's other tasks made by rule: chains of variables (vt), common words (cwe), frequent coded words (fwe).

_HOPS = 4
_COMMON = 10
"""RULER's: variables that follow from the first one (vt), and words that come often (cwe)."""

_SHORT = 4096
"""Contexts below this length have fewer repetitions, as in RULER."""

_ZETA_2 = 1.6449340668482264  # π² / 6: the sum of 1 / rank² over all ranks

_CHAIN_TEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
_CHAIN_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
_CHAIN_LEAD = (
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned the "
    "value {query}, they are: "
)
_COMMON_TEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}"
)
_COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_COMMON_LEAD = " Answer: The top 10 words that appear most often in the list are:"
_CODED_TEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}"
)
_CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
_CODED_LEAD = " Answer: According to the coded text above, the three most frequently appeared words are:"


def chain(seed: str) -> Callable[[int], Item]:
    """Return a function that makes an item with one chain of variables among a given number of lines of noise, after a
    solved example. For every number it is the same chain.
    """

    def make(n: int) -> Item:
        """Return the item with ``n`` lines of noise."""
        drawn = random.Random(seed)
        # names of other lengths, so that none of the example stands in the text
        example, text = _chained(drawn, 5, letters=3), _chained(drawn, n, letters=5)
        shown = f"{example.text}{example.question}{example.lead}{' '.join(example.answers)}\n\n"
        return Item(text=shown + text.text, question=text.question, lead=text.lead, answers=text.answers)

    return make


def _chained(drawn: random.Random, n: int, letters: int) -> Item:
    """Return an item of RULER's variable tracking: a chain of assignments among ``n`` lines of noise, and the question
    for all names in it, each of which has ``letters`` letters.
    """
    names: dict[str, None] = {}
    while len(names) < _HOPS + 1:
        names["".join(drawn.choices(string.ascii_uppercase, k=letters))] = None
    # RULER's own number below 99999, and its own blank after each assignment but the first
    found, number = list(names), str(drawn.randint(10000, 99998))
    said = [f"VAR {found[0]} = {number}"]
    said += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(found)]
    lines = [NOISE] * n
    for i, place in enumerate(sorted(drawn.choices(range(n + 1), k=len(said)))):
        lines.insert(place + i, said[i])  # places count lines of noise; i lines were inserted before
    return Item(
        text=_CHAIN_TEXT.format(context="\n".join(lines)),
        question=_CHAIN_QUESTION.format(query=number),
        lead=_CHAIN_LEAD.format(query=number, n=_HOPS + 1),
        answers=tuple(found),
    )


def common(seed: str, context: int) -> Callable[[int], Item]:
    """Return a function that makes an item of a list in which ten words come often and a given number of others seldom,
    after a solved example. The ten words are asked for.

    A list for a context below `_SHORT` tokens repeats its words less often.
    """
    # RULER's: repetitions of common and of other words; and the words of the example, with theirs
    often, seldom, example = (6, 1, (20, 3, 1)) if context < _SHORT else (30, 3, (40, 10, 3))

    def make(n: int) -> Item:
        """Return the item with ``n`` other words beside the common ones."""
        drawn = random.Random(seed)
        shown, solution = _numbered(drawn, *example)
        listed, answers = _numbered(drawn, n + _COMMON, often, seldom)
        solved = " ".join(f"{i}. {word}" for i, word in enumerate(solution, 1))
        before = f"{_COMMON_TEXT.format(context=shown)}{_COMMON_QUESTION}{_COMMON_LEAD} {solved}\n"
        text = before + _COMMON_TEXT.format(context=listed)
        return Item(text=text, question=_COMMON_QUESTION, lead=_COMMON_LEAD, answers=tuple(answers))

    return make


def _numbered(drawn: random.Random, n: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """Return a numbered list of ``n`` different words as a text, and the ten of them that come ``often`` times in it.

    The others come ``seldom`` times.
    """
    chosen = words(drawn, n)
    listed = chosen[:_COMMON] * often + chosen[_COMMON:] * seldom
    drawn.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), chosen[:_COMMON]


def coded(seed: str, room: int) -> Callable[[int], Item]:
    """Return a function that makes an item of about a given number of coded words, the three most frequent of which are
    asked for.

    The counts of different words follow a zeta distribution of exponent 2. Dots, as noise, are the most frequent.

    Args:
        seed: chooses the words and their order.
        room: tokens of the prompt, with which the number of different words grows.
    """
    size = max(6, room // 50)  # RULER's vocabulary; three words are asked for

    def make(n: int) -> Item:
        """Return the item with about ``n`` coded words."""
        drawn = random.Random(seed)
        codes: dict[str, None] = {}
        while len(codes) < size:
            codes["".join(drawn.choices(string.ascii_lowercase, k=6))] = None
        # the most frequent one is noise; it has three dots, though the question names four: both are RULER's
        vocabulary = ["...", *list(codes)[1:]]
        counts = [int(n / _ZETA_2 / rank**2) for rank in range(1, size + 1)]
        text = [word for word, times in zip(vocabulary, counts, strict=True) for _ in range(times)]
        drawn.shuffle(text)
        return Item(
            text=_CODED_TEXT.format(context=" ".join(text)),
            question=_CODED_QUESTION,
            lead=_CODED_LEAD,
            answers=tuple(vocabulary[1:4]),
        )

    return make
