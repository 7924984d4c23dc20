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

# The words of recall questions: kinds of facts, held-out names, things and wordings, and sentences between facts.
#
# The classes are shared with the training script, which has pools and wordings of its own; the two have nothing in
# common. In every template the value follows both keys, since a model that reads from left to right can file a value
# only under keys that it has read.


@dataclass(frozen=True)
class Kind:
    """One kind of fact: how it is stated, corrected and asked for, and which values it takes."""

    name: str
    statements: tuple[str, ...]
    corrections: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...] = ()

    @property
    def lead(self) -> str:
        """Return the template of an answer's beginning: the first statement up to its value."""
        return self.statements[0].partition("{value}")[0].rstrip()


@dataclass(frozen=True)
class Lexicon:
    """Names, materials, things and kinds that facts are made of."""

    names: tuple[str, ...]
    materials: tuple[str, ...]
    things: tuple[str, ...]
    kinds: tuple[Kind, ...]

    def kind(self, name: str) -> Kind:
        """Return the kind of this name."""
        return next(kind for kind in self.kinds if kind.name == name)


def pool(words: str) -> tuple[str, ...]:
    """Split words separated by spaces into a tuple."""
    return tuple(words.split())


COLOURS = pool(
    "red blue green yellow orange purple pink brown black white grey silver golden crimson scarlet violet "
    "indigo turquoise ivory amber olive maroon copper cream lilac bronze emerald ruby pearl lavender "
    "coral peach rose plum mustard navy khaki charcoal"
)
PLACES = pool(
    "attic kitchen garden cellar library harbour station market church barn stable tower castle forest "
    "meadow orchard bakery school hospital theatre museum palace chapel cottage mill inn shop office hall "
    "parlour bedroom nursery study pantry courtyard cave valley village park square bank prison temple "
    "farm field lake river shed yard lane tunnel bridge loft closet chest cupboard drawer basket box "
    "trunk wagon boat ship carriage train tent hut lodge"
)

HELD_OUT = Lexicon(
    names=pool(
        "Tamsin Corwin Belvane Isolde Fenwick Ottoline Marlow Sabrina Torvald Linnea Quentin Rosamund Aldric "
        "Yvaine Percival Delphine Osric Imogen Lorcan Thessaly Barnaby Elowen Caspian Verity Gideon Maribel "
        "Hadrian Sorrel Ansel Petra Roderic Celandine Magnus Tilda Evander Briony Leopold Zinnia Alaric "
        "Winifred"
    ),
    materials=pool("brass velvet marble cedar woollen painted ancient striped"),
    things=pool(
        "trowel kettle lantern violin saddle anchor telescope quilt pitcher compass hammock ladle sundial "
        "accordion thimble rucksack goblet bonnet shovel sextant parcel whistle hourglass teapot wheel pillow "
        "rope sword shawl bucket tapestry hammer necklace parrot pony canoe map vase trellis drum"
    ),
    kinds=(
        Kind(
            "colour",
            (
                "we heard that the {thing} belonging to {owner} is {value}.",
                "anybody could see that {owner}'s {thing} was {value}.",
            ),
            (
                "since then {owner}'s {thing} has been made {value}.",
                "these days the {thing} of {owner} is {value} instead.",
            ),
            (
                "Can you say which colour the {thing} of {owner} is?",
                "About {owner}'s {thing}: what is its colour?",
            ),
            COLOURS,
        ),
        Kind(
            "place",
            (
                "we heard that the {thing} belonging to {owner} is in the {value}.",
                "anybody could find {owner}'s {thing} in the {value}.",
            ),
            (
                "since then {owner}'s {thing} has been brought to the {value}.",
                "these days the {thing} of {owner} is in the {value} instead.",
            ),
            (
                "Can you say in which place the {thing} of {owner} is?",
                "About {owner}'s {thing}: where is it kept?",
            ),
            PLACES,
        ),
        Kind(
            "word",
            (
                "we heard that the {thing} belonging to {owner} bears the word {value}.",
                "anybody could read the word on {owner}'s {thing}: {value}.",
            ),
            (
                "since then {owner}'s {thing} has had a new word on it: {value}.",
                "these days the word on the {thing} of {owner} is {value} instead.",
            ),
            (
                "Can you say which word is on the {thing} of {owner}?",
                "About {owner}'s {thing}: which word is on it?",
            ),
            pool(
                "river stone window bread summer winter morning evening sister brother money water fire wind mountain "
                "flower horse tiger apple music silence laughter thunder shadow honey sugar butter paper letter story "
                "dream friend captain soldier doctor teacher king queen island ocean"
            ),
        ),
        Kind(
            "owner",
            (
                "we heard that the {owner} {thing} is the property of {value}.",
                "anybody could tell you that the {owner} {thing} belonged to {value}.",
            ),
            (
                "since then the {owner} {thing} has passed to {value}.",
                "these days the {owner} {thing} belongs to {value} instead.",
            ),
            (
                "Can you say to whom the {owner} {thing} belongs?",
                "About the {owner} {thing}: who is its owner?",
            ),
        ),
        Kind(
            "number",
            (
                "we heard that the {thing} belonging to {owner} bears the number {value}.",
                "anybody could read the number on {owner}'s {thing}: {value}.",
            ),
            (
                "since then {owner}'s {thing} has had a new number on it: {value}.",
                "these days the number on the {thing} of {owner} is {value} instead.",
            ),
            (
                "Can you say which number is on the {thing} of {owner}?",
                "About {owner}'s {thing}: which number is on it?",
            ),
        ),
    ),
)
"""The names, things and wordings of evaluations; the training script refuses to use any of them."""

SENTENCES = (
    "The rain had stopped before noon, and the road was drying in the sun.",
    "A cart went by with a load of hay, and a boy was asleep on top of it.",
    "Nobody had opened the shutters yet, so the room was still dark and cool.",
    "She poured the tea slowly and looked out at the hills.",
    "They talked about the weather for a while, and then about nothing at all.",
    "A dog barked somewhere behind the houses and then was quiet again.",
    "He had walked the whole way from the coast without meeting anyone.",
    "The old man laughed, shook his head, and went on with his work.",
    "On the next morning the fog was so thick that nobody went out.",
    "There was a smell of fresh bread in the street.",
    "The children ran down to the water and threw stones into it.",
    "It was one of those long days in June that never seem to end.",
    "He read the letter twice and put it back into his coat.",
    "Far away a train was crossing the plain, and its smoke hung in the air.",
    "The baker's wife knew everybody and asked after their health.",
    "When the bells rang, the birds rose from the roof all at once.",
    "She had meant to leave early, but the hours went by.",
    "The soup was hot, and for some time they ate in silence.",
    "A light wind moved the grass, and the clouds went slowly to the east.",
    "He counted the steps as he climbed them, as he had done when he was a boy.",
    "The shop was shut, but there was a light in the room above it.",
    "It took them two days to mend the roof.",
    "They sat by the fire until it was nearly out.",
    "Somebody had left the gate open, and the sheep were all over the road.",
    "The winter was long that year, and the snow lay until the end of March.",
    "He could not remember when he had last slept so well.",
    "The doctor came in the evening and said that there was no danger.",
    "At the corner two women were selling apples and nuts.",
    "She sang while she worked, and the others listened.",
    "A letter came from the city, but it brought no news.",
    "The path went up through the trees and came out on a bare hill.",
    "He was a quiet man who liked his dinner at six.",
    "For a moment nobody knew what to say.",
    "The boats came back late, and their nets were nearly empty.",
    "It was too warm to sit inside, so they carried the chairs out.",
    "In the afternoon they played cards and drank cold milk.",
    "The teacher closed the book and told them to go home.",
    "There had been a fair in the next town, and people were still coming back from it.",
    "She tied up her hair, took a deep breath, and began.",
    "The field behind the house belonged to nobody in particular.",
    "He whistled a tune that all of them had heard before.",
    "In spring the river came up to the garden wall.",
    "They had bread and cheese with them and ate as they walked.",
    "The stairs were steep, and she stopped to rest at every landing.",
    "One by one the lamps were lit along the quay.",
    "It was said that the winter would be mild.",
    "He looked at the sky, then at his boots, and decided to stay.",
    "The guests left before midnight, and the house was quiet again.",
    "A stranger had asked for the way and gone on without a word of thanks.",
    "The youngest of them had fallen asleep with her head on the table.",
    "Nothing much happened in that street, and people liked it so.",
    "She wrote a few lines, read them over, and tore up the page.",
    "The miller's horse was old and knew every stone of the road.",
    "On Sundays they went to see the grandparents and came back after dark.",
    "The sea was calm, and one could hear the oars of a boat that was far out.",
    "He promised to come again soon, as he always did.",
    "There was frost on the fields when they set out.",
    "The carpenter was whistling, and the yard was full of shavings.",
    "All through the night the wind shook the doors.",
    "They had never seen so many people in one place.",
    "A cat was sitting in the sun and did not move when they passed.",
    "The journey was slow, since one of the horses was lame.",
    "She laughed until she had to hold on to the door.",
    "By and by the talk turned to the harvest.",
    "The house stood a little apart, behind a row of poplars.",
    "He asked for a glass of water and drank it standing.",
    "Two boys were fishing from the wall, though there was hardly any water.",
    "The evening was so clear that one could count the trees on the far shore.",
    "It was a good year for plums, and there was jam in every house.",
    "They waited an hour, and then another, and then went home.",
    "The postman had a cold and did not stop to talk.",
    "She had a map of the country, but it was older than she was.",
    "After the storm the beach was covered with wood and weed.",
    "He mended shoes in the winter and cut hay in the summer.",
    "The music could be heard as far as the last houses.",
    "They agreed to meet again when the days were longer.",
    "No one had lived there for years, and ivy covered the windows.",
    "The ferry went twice a day and was seldom full.",
    "A little girl was feeding the ducks with crumbs from her pocket.",
    "He woke before it was light and lay listening to the rain.",
)
"""Neutral sentences of our own to put between facts; the embedded model was not trained on them."""


# Texts with planted facts, and questions about them.

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
        """Return a template filled with the fact's owner, thing and value, its first letter in upper case."""
        text = template.format(owner=self.owner, thing=self.thing, value=self.value)
        return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Question:
    """A text with facts, one question about it, and the answer that counts as right.

    ``prompt`` is the text and the question, the content of one user message. ``depth`` is where the asked
    fact stands in the text (0 = start, 1 = end); ``choices`` are the values of the facts of the same kind,
    so that a guess among them is right once in ``len(choices)``. ``lead`` is the beginning of the answer that
    the model goes on from; empty where it begins itself.
    """

    prompt: str
    answer: str
    kind: str
    depth: float
    facts: tuple[Fact, ...] = field(repr=False)
    choices: tuple[str, ...] = field(repr=False)
    lead: str = ""

    def messages(self) -> list[dict[str, str]]:
        """Return the prompt as a chat, for ``tokenizer.apply_chat_template``."""
        return [{"role": "user", "content": self.prompt}]

    def right(self, reply: str) -> bool:
        """Return whether a reply is the answer and nothing more; white space around it, final stops and capitals do not
        count.
        """
        return reply.strip().rstrip(".").lower() == self.answer.lower()


def draw_value(kind: Kind, lexicon: Lexicon, rng: random.Random) -> str:
    """Draw a value for a fact of this kind: a four-digit number, a name, or a word of the kind's pool."""
    if kind.name == "number":
        return str(rng.randrange(1000, 10000))
    return rng.choice(lexicon.names if kind.name == "owner" else kind.values)


def draw_facts(lexicon: Lexicon, rng: random.Random, n: int, kinds: Sequence[str]) -> list[Fact]:
    """Draw ``n`` facts of random ones of these kinds, no two of one kind about the same owner and thing. Most share
    their owner or their thing with another.

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
    """Return how many facts `draw_facts` can draw for one text: for more, a lexicon has too few names or things.
    Without things each name is the key of one fact.
    """
    if not lexicon.things:
        return len(lexicon.names)
    longest = min(len(lexicon.names), len(lexicon.things))
    return max(n for n in range(longest**2) if side(n) <= longest)  # so many facts need more than `longest` names


def side(n: int) -> int:
    """Return how many owners, and how many things, ``n`` facts share: about 1.5 times the root of ``n``, at most
    ``n``.
    """
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
    """Return another fact of a kind, whose owner and thing are those of other facts, but not of the same one of this
    kind; if all such pairs are taken, with a thing that no other fact has.
    """
    spec = HELD_OUT.kind(kind)
    taken = {(f.kind.name, f.owner, f.thing) for f in facts}
    is_material = kind == "owner"
    # sorted, as the order of a set differs from run to run
    owners = sorted({f.owner for f in facts if (f.kind.name == "owner") == is_material})
    owners = owners or list(HELD_OUT.materials if is_material else HELD_OUT.names)
    things = sorted({f.thing for f in facts}) or list(HELD_OUT.things)
    free = [(o, t) for o, t in product(owners, things) if (kind, o, t) not in taken]
    owner, thing = rng.choice(free or [(o, t) for o in owners for t in HELD_OUT.things if t not in things])
    return Fact(spec, owner, thing, draw_value(spec, HELD_OUT, rng))


def _other_value(fact: Fact, rng: random.Random) -> str:
    """Draw a value for a fact that differs from its own."""
    while (value := draw_value(fact.kind, HELD_OUT, rng)) == fact.value:
        pass
    return value


def _estimate(text: str) -> int:
    """Return about how many tokens a text has: 1.45 for each word."""
    return round(1.45 * len(text.split()))


def take(filler: Iterable[str], room: int, count: Callable[[str], int]) -> list[str]:
    """Return sentences of the filler, in order, until they use up the room.

    Args:
        filler: sentences; one that does not fit is left out.
        room: tokens that the sentences may take together, each with a space before it.
        count: tokens of a string.
    """
    taken: list[str] = []
    misses = 0
    for sentence in filler:
        size = count(" " + sentence)
        if size <= room:
            taken.append(sentence)
            room -= size
        else:
            misses += 1
        if room < 6 or misses > 20:  # nearly no sentence is shorter, or none of many fits
            break
    return taken


def _weave(
    sentences: list[str], said: list[str], last: str, depth: float, rng: random.Random, *, earlier: str | None
) -> tuple[str, float]:
    """Spread statements at random over evenly spread sentences, and put ``last``, the asked one, at ``depth``, behind
    ``earlier``, which is one of ``said``. Return the text, and where in it ``last`` begins (0 = start, 1 = end).
    """
    slots: list[tuple[float, str]] = [((i + 0.5) / len(sentences), s) for i, s in enumerate(sentences)]
    slots += [(rng.random() * depth if s is earlier else rng.random(), s) for s in said]
    slots.append((depth, last))
    slots.sort(key=lambda slot: slot[0])
    parts = [text for _, text in slots]
    before = sum(len(p) + 1 for p in parts[: parts.index(last)])
    text = " ".join(parts)
    return text, before / len(text)
