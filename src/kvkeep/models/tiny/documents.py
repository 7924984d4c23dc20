"""Texts with planted facts, each with a question about several of its facts.

`kvkeep.models.tiny.recall.question` makes a text for one question. Here one text is asked many times, so that policies
can be compared on many questions for the price of one reading. Names, things and wordings are the same, held-out ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvkeep.models.tiny.recall import (
    HELD_OUT,
    Fact,
    Kind,
    Lexicon,
    Question,
    draw_value,
    own_filler,
    pool,
    side,
    take,
)

KINDS = tuple(kind.name for kind in HELD_OUT.kinds)

_CYRILLIC = str.maketrans("abcdefghijklmnopqrstuvwxyz", "абцдефгхийклмнопярстувшхыз")


@dataclass(frozen=True)
class Style:
    """The look of a text: what stands between the facts that are asked about, and how a fact is stated.

    Attributes:
        summary: the look in a few words.
        filler: sentences between the facts, without end; is told which owners and things the facts have.
        say: states a fact; ``None``: in the wordings of its kind.
        joint: stands between two sentences.
        before: stands before the first sentence.
        hops: whether questions name an owner by a thing that is theirs, so that an answer takes two facts.
        lexicon: what facts are made of.
        own_text: whether the sentences between facts are those of a text of the user. The answers to its questions are
            begun for the model.
    """

    summary: str
    filler: Callable[[random.Random, Sequence[Fact]], Iterable[str]]
    say: Callable[[Fact], str] | None = None
    joint: str = " "
    before: str = ""
    hops: bool = False
    lexicon: Lexicon = HELD_OUT
    own_text: bool = False


def _people(*kinds: Kind) -> Lexicon:
    """Return a lexicon of facts with one key, a person's name, in words that small pretrained models know."""
    return Lexicon(_NAMES, (), (), kinds)


_NAMES = pool(
    "Alice Arthur Barbara Bernard Carol Charles Diana Douglas Edith Edward Emma Felix Florence Frank George Grace "
    "Harold Helen Henry Irene Isaac Jack Jane Joseph Julia Kate Laura Leonard Louis Lucy Margaret Martin Mary Michael "
    "Nancy Oliver Oscar Patrick Paul Peter Rachel Robert Rose Samuel Sarah Simon Susan Thomas Victor Walter"
)

# Each statement ends with its value, since an answer begins with the words before it.

_DEV = _people(
    Kind(
        "number",
        ("the code of {owner}'s door is {value}.",),
        (),
        ("what is the code of {owner}'s door?",),
    ),
    Kind(
        "city",
        ("{owner} lives in {value}.",),
        (),
        ("in which city does {owner} live?",),
        pool(
            "London Paris Rome Madrid Berlin Vienna Lisbon Dublin Athens Warsaw Prague Oslo Stockholm Moscow Cairo "
            "Tokyo Chicago Boston Toronto Sydney Venice Naples Munich Zurich Brussels Helsinki"
        ),
    ),
    Kind(
        "pet",
        ("the pet of {owner} is a {value}.",),
        (),
        ("which animal is the pet of {owner}?",),
        pool("parrot rabbit turtle monkey snake lizard hamster goat pony duck fox crow pig raven squirrel ferret"),
    ),
    Kind(
        "colour",
        ("the favourite colour of {owner} is {value}.",),
        (),
        ("what is the favourite colour of {owner}?",),
        pool("red blue green yellow orange purple pink brown black white grey silver golden scarlet violet"),
    ),
)
"""Facts to choose rules and options by."""

_TEST = _people(
    Kind(
        "work",
        ("{owner} works as a {value}.",),
        (),
        ("what is the profession of {owner}?",),
        pool(
            "doctor teacher lawyer baker butcher carpenter tailor painter sailor farmer nurse judge pilot plumber "
            "dentist barber gardener librarian fisherman blacksmith chemist banker"
        ),
    ),
    Kind(
        "instrument",
        ("{owner} plays the {value}.",),
        (),
        ("which instrument does {owner} play?",),
        pool("piano violin guitar flute trumpet harp cello drums organ clarinet banjo trombone saxophone accordion"),
    ),
    Kind(
        "language",
        ("the language that {owner} speaks is {value}.",),
        (),
        ("which language does {owner} speak?",),
        pool(
            "French German Spanish Italian Russian Chinese Japanese Arabic Greek Turkish Polish Dutch Swedish Danish "
            "Hebrew Hindi Korean Portuguese"
        ),
    ),
    Kind(
        "number",
        ("the telephone number of {owner} is {value}.",),
        (),
        ("what is the telephone number of {owner}?",),
    ),
)
"""Facts for tables, which no rule and no option was chosen by."""


def _plain(rng: random.Random, facts: Sequence[Fact]) -> Iterable[str]:
    """Yield neutral sentences, without end."""
    return own_filler(rng)


def _others(rng: random.Random, facts: Sequence[Fact]) -> Iterator[Fact]:
    """Yield facts about other owners and things, without end; none contradicts the given ones.

    After all such facts, they come again in a new order. Nothing is yielded if there are none.
    """
    # a drawn owner could own what a given fact gives to another
    kinds = [kind for kind in HELD_OUT.kinds if kind.name != "owner"]
    names = sorted(set(HELD_OUT.names) - {fact.owner for fact in facts})
    things = sorted(set(HELD_OUT.things) - {fact.thing for fact in facts})
    free = list(product(kinds, names, things))
    while free:
        for kind, name, thing in rng.sample(free, len(free)):
            yield Fact(kind, name, thing, draw_value(kind, HELD_OUT, rng))


def _stated(rng: random.Random, facts: Sequence[Fact]) -> Iterator[str]:
    """Yield statements of other facts. Nothing in them tells which facts will be asked about."""
    return (fact.say(rng.choice(fact.kind.statements)) for fact in _others(rng, facts))


def _spoken(rng: random.Random, facts: Sequence[Fact]) -> Iterator[str]:
    """Yield sentences that somebody says. The speakers have the names that facts are about."""
    for sentence in own_filler(rng):
        yield f'"{sentence[:-1]}," said {rng.choice(HELD_OUT.names)}.'


def _foreign(rng: random.Random, facts: Sequence[Fact]) -> Iterator[str]:
    """Yield sentences in Cyrillic letters."""
    for sentence in own_filler(rng):
        yield sentence.lower().translate(_CYRILLIC)


def _rows(rng: random.Random, facts: Sequence[Fact]) -> Iterator[str]:
    """Yield rows of a table that state other facts."""
    return (_row(fact) for fact in _others(rng, facts))


def _row(fact: Fact) -> str:
    """Return a fact as a row of a table: owner, thing, kind and value."""
    return fact.say(_ROW.replace("{kind}", fact.kind.name))


_ROW = "{owner} | {thing} | {kind} | {value}"


def _program(rng: random.Random, facts: Sequence[Fact]) -> Iterator[str]:
    """Yield comments that state facts other than the given ones, each with random lines of a program below it."""
    for comment in _stated(rng, facts):
        names = {"owner": rng.choice(HELD_OUT.names).lower(), "thing": rng.choice(HELD_OUT.things)}
        yield "\n".join([comment, *(line.format(**names, n=rng.randrange(10)) for line in rng.choice(_PROGRAMS))])


_PROGRAMS = (
    ("{owner}_{thing} = box({n})",),
    ("if {thing}.count > {n}:", "    return {owner}"),
    ("for {thing} in {owner}[{n}:]:", "    put({thing})"),
    ("def {thing}({owner}, n={n}):", "    return {owner}.take(n)"),
)

STYLES = {
    "prose": Style("plain sentences between the facts", _plain),
    "facts": Style("facts about other things between them", _stated),
    "list": Style("the same as a list, a line each", _stated, joint="\n- "),
    "dialogue": Style("sentences of speakers with the names that facts are about", _spoken),
    "script": Style("sentences in Cyrillic letters between the facts", _foreign),
    "table": Style("rows of a table", _rows, say=_row, joint="\n"),
    "code": Style("comments that state facts, above lines of a program", _program, joint="\n# ", before="# "),
    "hops": Style("plain sentences; questions take two facts", _plain, hops=True),
    "text-dev": Style(
        "sentences of a text of your own, facts about persons for any model: to choose rules and options by",
        _plain,
        lexicon=_DEV,
        own_text=True,
    ),
    "text-test": Style("the same with other facts: for tables", _plain, lexicon=_TEST, own_text=True),
}
"""The looks of texts by name."""


@dataclass(frozen=True)
class Document:
    """A text and questions about it.

    Attributes:
        text: the text, without a question.
        questions: questions about different facts, in the order of the facts in the text, or of the depths that were
            given for them.
    """

    text: str
    questions: tuple[Question, ...]


def document(  # noqa: PLR0913  each decides about the text
    seed: int,
    *,
    n_facts: int = 16,
    n_questions: int = 16,
    tokens: int = 2048,
    depths: Sequence[float] = (),
    first_kind: int = 0,
    style: str = "prose",
    filler: Iterable[str] | None = None,
    count: Callable[[str], int],
) -> Document:
    """Generate a text in which facts are spread evenly, and questions about some or all of them.

    Args:
        seed: chooses everything that is not given; the same seed gives the same document.
        n_facts: facts in the text.
        n_questions: how many facts are asked about; evenly spread over the text.
        tokens: length of the text with its longest question, reached to within one sentence.
        depths: where the asked facts stand, from 0 (start) to 1 (end), one for each question; the other facts stand
            anywhere. Empty: the facts are spread evenly.
        first_kind: the number of the first fact's kind; the facts take all kinds in turn.
        style: one of `STYLES`.
        filler: sentences between the facts, in place of the style's; for styles of a user's text.
        count: tokens of a string.
    """
    rng, look = random.Random(f"{seed}/document/{n_facts}/{tokens}/{first_kind}"), STYLES[style]
    facts = _facts(rng, n_facts, first_kind, look)
    said = [fact.say(rng.choice(fact.kind.statements)) for fact in facts]
    if look.say is not None:
        said = [look.say(fact) for fact in facts]
    links = _links(rng, facts) if look.hops else []
    named = _named_by(links, facts) if look.hops else facts
    asks = [fact.say(rng.choice(fact.kind.questions)) for fact in named]
    places = [(i + rng.random()) / n_facts for i in range(n_facts)]
    asked = [int((i + 0.5) * n_facts / n_questions) for i in range(n_questions)]
    if depths:
        asked = list(range(n_questions))
        places = [*depths, *(rng.random() for _ in range(n_facts - n_questions))]
    said += [link.say(rng.choice(link.kind.statements)) for link in links]
    places += [rng.random() for _ in links]
    room = tokens - count(look.before) - max(count(f" {ask}") for ask in asks)
    room -= sum(count(look.joint + sentence) for sentence in said)
    source = look.filler(rng, facts) if filler is None else filler
    taken = take(source, room, lambda sentence: count(look.joint + sentence.strip()))
    woven, starts = _woven(taken, said, places, look.joint)
    text = look.before + woven
    leads = [fact.say(fact.kind.lead) if look.own_text else "" for fact in named]
    return Document(text, tuple(_question(text, named, i, asks[i], starts[i] / len(woven), leads[i]) for i in asked))


def _links(rng: random.Random, facts: Sequence[Fact]) -> list[Fact]:
    """Return for each owner of the facts one more fact: that a thing of some material, drawn anew, belongs to that
    owner.
    """
    owners = sorted({fact.owner for fact in facts})
    # the only style with hops has the held-out words, so that no link is one that the embedded model was trained on
    pairs = rng.sample(list(product(HELD_OUT.materials, HELD_OUT.things)), len(owners))
    return [Fact(HELD_OUT.kind("owner"), *pair, owner) for pair, owner in zip(pairs, owners, strict=True)]


def _named_by(links: Sequence[Fact], facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts with each owner replaced by a description: the thing that belongs to that owner."""
    names = {link.value: f"the owner of the {link.owner} {link.thing}" for link in links}
    return [replace(fact, owner=names[fact.owner]) for fact in facts]


def _facts(rng: random.Random, n: int, first_kind: int, look: Style) -> list[Fact]:
    """Draw ``n`` facts of the style's lexicon in random order, of its kinds in turn, beginning with the kind of the
    number ``first_kind``. No two of one kind have the same owner and thing.
    """
    lexicon = look.lexicon
    # with hops, `_links` say what belongs to an owner, and say it of each owner once
    kinds = [kind.name for kind in lexicon.kinds if kind.name != "owner" or not look.hops]
    free, facts = _keys(rng, n, lexicon, kinds), []
    for number in range(n):
        kind = lexicon.kind(kinds[(first_kind + number) % len(kinds)])
        owner, thing = free[kind.name].pop(rng.randrange(len(free[kind.name])))
        facts.append(Fact(kind, owner, thing, draw_value(kind, lexicon, rng)))
    rng.shuffle(facts)
    return facts


def _keys(rng: random.Random, n: int, lexicon: Lexicon, kinds: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Draw, for each kind, the pairs of an owner and a thing that its facts can be about: a small grid, so that facts
    share them.

    In a lexicon without things there is one fact about each owner: its pairs, with an empty thing, are one list that
    all kinds share.
    """
    if not lexicon.things:
        people = [(owner, "") for owner in rng.sample(lexicon.names, n)]
        # one list for all kinds: whoever is taken out for a fact is gone for the others
        return dict.fromkeys(kinds, people)
    width = side(n)
    owners, things = rng.sample(lexicon.names, width), rng.sample(lexicon.things, width)
    materials = rng.sample(lexicon.materials, min(width, len(lexicon.materials)))
    return {kind: list(product(materials if kind == "owner" else owners, things)) for kind in kinds}


def _question(text: str, facts: Sequence[Fact], at: int, ask: str, depth: float, lead: str) -> Question:
    """Return the question about the fact at an index: the text, a space and ``ask``, word for word.

    That fact stands last among the question's facts. Choices are the values of all facts of its kind, its own included.
    """
    asked = facts[at]
    same = tuple(fact.value for fact in facts if fact.kind.name == asked.kind.name)
    ordered = (*facts[:at], *facts[at + 1 :], asked)
    return Question(f"{text} {ask}", asked.value, asked.kind.name, depth, ordered, same, lead)


def _woven(filler: Sequence[str], said: Sequence[str], places: Iterable[float], joint: str) -> tuple[str, list[int]]:
    """Insert statements, each at its place from 0 (start) to 1 (end), between evenly spread sentences. Return the text,
    and the character of it at which each statement begins, in the order of ``said``.
    """
    # -1 marks a sentence that is no fact, and puts it before a fact at the same place
    parts = [((i + 0.5) / len(filler), -1, sentence) for i, sentence in enumerate(filler)]
    parts += [(place, number, said[number]) for number, place in enumerate(places)]
    starts, at = [0] * len(said), 0
    parts.sort(key=lambda part: part[:2])
    for _, number, sentence in parts:
        if number >= 0:
            starts[number] = at
        at += len(sentence) + len(joint)
    return joint.join(sentence for *_, sentence in parts), starts
