"""Recall questions: a text with planted facts, and a question about one of them.

A fact has two keys and a value ("Tamsin's trowel is crimson": owner, thing, value). Facts of one text share
owners and things, so that no single key is enough. Everything here is the held-out side: these names, things
and wordings never occur in a recall document the embedded model was trained on. Pure Python, and the same
seed gives the same text, so tests, evaluations and the demo ask the same questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from kvkeep.models.tiny.wordings import HELD_OUT, SENTENCES, Kind, Lexicon

WORD_KINDS = ("colour", "place", "word", "owner")
"""Kinds whose value is one word; the remaining kind, ``number``, has four digits."""


@dataclass(frozen=True)
class Fact:
    """One fact: ``owner`` and ``thing`` are its keys (for the kind ``owner``: material and thing)."""

    kind: Kind
    owner: str
    thing: str
    value: str

    def say(self, template: str) -> str:
        """Return the fact as a sentence in the words of a template."""
        text = template.format(owner=self.owner, thing=self.thing, value=self.value)
        return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Question:
    """A text with facts, one question about it, and the answer that counts as right.

    ``prompt`` is the text and the question, the content of one user message. ``depth`` is where the asked
    fact stands in the text (0 = start, 1 = end); ``choices`` are the values of the facts of the same kind,
    so that a guess among them is right once in ``len(choices)``.
    """

    prompt: str
    answer: str
    kind: str
    depth: float
    facts: tuple[Fact, ...] = field(repr=False)
    choices: tuple[str, ...] = field(repr=False)

    def messages(self) -> list[dict[str, str]]:
        """Return the prompt as a chat, for ``tokenizer.apply_chat_template``."""
        return [{"role": "user", "content": self.prompt}]

    def right(self, reply: str) -> bool:
        """Return whether a reply is exactly the answer, white space and a final stop aside."""
        return reply.strip().rstrip(".").lower() == self.answer.lower()


def draw_value(kind: Kind, lexicon: Lexicon, rng: random.Random) -> str:
    """Draw a value for a fact of this kind: a four-digit number, a name, or a word of the kind's pool."""
    if kind.name == "number":
        return str(rng.randrange(1000, 10000))
    return rng.choice(lexicon.names if kind.name == "owner" else kind.values)


def draw_facts(lexicon: Lexicon, rng: random.Random, n: int, kinds: Sequence[str]) -> list[Fact]:
    """Draw ``n`` facts with distinct keys, most of which share their owner or their thing with another.

    Owners and things come from a small grid (about 1.5 times the square root of ``n`` each), so distractors
    with the same owner and distractors with the same thing are there by construction.
    """
    width = side(n)
    owners = rng.sample(lexicon.names, width)
    materials = rng.sample(lexicon.materials, min(width, len(lexicon.materials)))
    things = rng.sample(lexicon.things, width)
    taken: set[tuple[str, str, str]] = set()
    facts: list[Fact] = []
    while len(facts) < n:
        kind = lexicon.kind(rng.choice(kinds))
        key = (kind.name, rng.choice(materials if kind.name == "owner" else owners), rng.choice(things))
        if key not in taken:
            taken.add(key)
            facts.append(Fact(kind, key[1], key[2], draw_value(kind, lexicon, rng)))
    return facts


def most_facts(lexicon: Lexicon) -> int:
    """Return how many facts one text of `question` can hold: names and things give keys for no more."""
    longest = min(len(lexicon.names), len(lexicon.things))
    return 1 + max(n for n in range(longest**2) if side(n) <= longest)


def side(n: int) -> int:
    """Return how many owners, and how many things, ``n`` facts share."""
    return min(n, 2 + int(1.5 * n**0.5))


def question(
    seed: int,
    *,
    kind: str = "colour",
    depth: float = 0.5,
    n_facts: int = 16,
    tokens: int = 2048,
    filler: Iterable[str] | None = None,
    count: Callable[[str], int] | None = None,
    corrected: bool = False,
) -> Question:
    """Generate a text with facts, and at its end a question about one of them.

    Args:
        seed: Chooses everything that is not given; the same seed gives the same question.
        kind: What is asked for: a colour, place, word, owner or number.
        depth: Where the asked fact stands, from 0 (start) to 1 (end). For a corrected fact: its last value.
        n_facts: Facts in the text, the asked one among them; they are spread over the whole text.
        tokens: Length of the whole prompt in tokens, reached to within one sentence.
        filler: Sentences to put between the facts; by default this package's own.
        count: Tokens of a string; by default an estimate (1.45 per word), for use without a tokenizer.
        corrected: Whether the asked fact was stated with another value earlier and then corrected.
    """
    rng = random.Random(f"{seed}/{kind}/{n_facts}/{tokens}/{corrected}")
    facts = draw_facts(HELD_OUT, rng, n_facts - 1, [k.name for k in HELD_OUT.kinds])
    asked = _new_fact(kind, facts, rng)
    said = [fact.say(rng.choice(fact.kind.statements)) for fact in facts]
    last = asked.say(rng.choice(asked.kind.corrections if corrected else asked.kind.statements))
    ask = asked.say(rng.choice(asked.kind.questions))
    if corrected:
        said.append(replace(asked, value=_other_value(asked, rng)).say(rng.choice(asked.kind.statements)))
    count = count or _estimate
    room = tokens - sum(count(" " + s) for s in [*said, last, ask])
    sentences = take(filler if filler is not None else own_filler(rng), room, count)
    text, at = _weave(sentences, said, last, depth, rng, earlier=said[-1] if corrected else None)
    same = tuple(f.value for f in (*facts, asked) if f.kind.name == kind)
    return Question(f"{text} {ask}", asked.value, kind, at, (*facts, asked), same)


def own_filler(rng: random.Random) -> Iterable[str]:
    """Yield this package's own neutral sentences without end, shuffled anew in every round."""
    while True:
        yield from rng.sample(SENTENCES, len(SENTENCES))


def _new_fact(kind: str, facts: Sequence[Fact], rng: random.Random) -> Fact:
    """Draw another fact of a kind, whose key comes from the other facts' grid but is not taken."""
    spec = HELD_OUT.kind(kind)
    taken = {(f.kind.name, f.owner, f.thing) for f in facts}
    is_material = kind == "owner"
    owners = sorted({f.owner for f in facts if (f.kind.name == "owner") == is_material})
    owners = owners or list(HELD_OUT.materials if is_material else HELD_OUT.names)
    things = sorted({f.thing for f in facts}) or list(HELD_OUT.things)
    free = [(o, t) for o, t in product(owners, things) if (kind, o, t) not in taken]
    owner, thing = rng.choice(free or [(o, t) for o in owners for t in HELD_OUT.things if t not in things])
    return Fact(spec, owner, thing, draw_value(spec, HELD_OUT, rng))


def _other_value(fact: Fact, rng: random.Random) -> str:
    while (value := draw_value(fact.kind, HELD_OUT, rng)) == fact.value:
        pass
    return value


def _estimate(text: str) -> int:
    return round(1.45 * len(text.split()))


def take(filler: Iterable[str], room: int, count: Callable[[str], int]) -> list[str]:
    """Take sentences from the filler until the room is used up. A sentence that does not fit is left out."""
    taken: list[str] = []
    misses = 0
    for sentence in filler:
        size = count(" " + sentence)
        if size <= room:
            taken.append(sentence)
            room -= size
        else:
            misses += 1
        if room < 6 or misses > 20:
            break
    return taken


def _weave(
    sentences: list[str], said: list[str], last: str, depth: float, rng: random.Random, *, earlier: str | None
) -> tuple[str, float]:
    """Spread facts over the filler; returns the text and where in it the asked fact came to stand."""
    slots: list[tuple[float, str]] = [((i + 0.5) / len(sentences), s) for i, s in enumerate(sentences)]
    slots += [(rng.random() * depth if s is earlier else rng.random(), s) for s in said]
    slots.append((depth, last))
    slots.sort(key=lambda slot: slot[0])
    parts = [text for _, text in slots]
    before = sum(len(p) + 1 for p in parts[: parts.index(last)])
    text = " ".join(parts)
    return text, before / len(text)
