"""What recall documents of the training are made of: names, things, values and wordings.

None of the evaluation's names and things (``kvkeep.models.tiny.recall.HELD_OUT``) may come in here; pools
are filtered against them, and names are mostly put together from syllables so that copying has to generalise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvkeep.models.tiny.recall import COLOURS, HELD_OUT, PLACES, Kind, Lexicon, pool

from . import grammar
from .words import Words

NAMES = pool(
    "Adam Agnes Alan Albert Alice Amelia Andrew Anna Arthur Beatrice Ben Bertha Bessie Bruno Carl Caroline Cecil "
    "Charles Charlotte Clara Claire Daniel Daisy David Diana Dora Dorothy Edgar Edith Edward Eleanor Eliza Ella "
    "Emily Emma Eric Ernest Esther Ethel Eva Felix Flora Florence Frances Frank Fred George Gerald Gloria Grace "
    "Greta Hannah Harold Harry Helen Henry Hilda Hugo Ida Irene Iris Isaac Ivan Jack Jacob Jane Jasper Joan John "
    "Jonas Joseph Julia Kate Karl Laura Leo Lily Louis Lucas Lucy Luke Mabel Margaret Maria Mark Martha Martin Mary "
    "Matthew Max May Mia Michael Molly Nancy Nathan Ned Nell Nicholas Nina Nora Olga Oliver Oscar Otto Paul Peter "
    "Philip Phoebe Polly Rachel Ralph Rebecca Richard Robert Roger Rose Rupert Ruth Sam Sara Simon Sophia Stella "
    "Stephen Susan Sylvia Ted Theodore Thomas Tim Toby Tom Ursula Victor Viola Violet Walter William Zoe Mira Oren "
    "Ravi Chen Omar Leila Yusuf Ingrid Sven Anders Pavel Mikhail Sasha Dmitri Rosa Carlos Diego Elena Lucia Marco "
    "Paolo Bianca Pierre Colette Amara Kofi Zuri Hana Kenji Yuki Priya Arjun"
)
THINGS = pool(
    "ball book hat coat box bag ring cup chair table bed door window key knife fork spoon plate bowl bottle "
    "jar pot pan lamp torch stove oven broom brush comb soap towel blanket sheet curtain rug shoe boot sock glove "
    "scarf dress skirt shirt vest jacket belt button pocket purse wallet watch bell horn flute guitar piano harp "
    "trumpet bow arrow spear shield helmet flag tent ladder rake spade fork axe saw nail screw chain hook net cage "
    "barrel crate chest desk shelf stool bench sofa cradle toy doll puppet kite top puzzle card dice game crayon "
    "pencil pen paint picture statue frame mask crown robe cloak cape fan umbrella cane stick staff wand bike "
    "bicycle cart truck car bus train plane boat ship raft oar sail wagon sled dog cat cow pig goat sheep hen duck "
    "goose rabbit mouse bird fish frog turtle lamb donkey calf puppy kitten cake pie bread loaf cheese egg pear "
    "melon lemon cherry nut carrot onion bean soup tea coffee jam candy cookie letter note diary journal novel "
    "poem song ticket stamp coin medal badge trophy jewel gem bracelet brooch earring veil apron tie cap hood "
    "collar leash basket sack suitcase trunk tray pipe cigar match lock gate fence stone brick tile plank beam "
    "tube wire string thread needle yarn cloth ribbon feather shell pebble glass cushion mat globe telegram "
    "camera radio engine motor pump tap sink bath tub mug jug"
)
MATERIALS = pool(
    "wooden iron leather silver golden glass stone paper plastic silk cotton rubber copper steel tin clay bronze "
    "old new big small broken little large heavy tall round square soft shiny dirty clean red blue green yellow black "
    "white brown grey purple pretty rusty cheap lost huge tiny long thick narrow"
)
VALUES = pool(
    "apple banana bear beach bird bottle branch breeze bridge butterfly cabin cake cat chain "
    "cheese cherry church circle city cloud coat corner cousin cup daughter dawn desert dog door dragon "
    "eagle earth eye face father feather finger fish flag fruit giant girl glass gold grass hand harvest heart "
    "hill house iron joy key kitten ladder lady lake leaf lemon lion luck meal mother mouse nature "
    "night noise nut owl parent peace people picture plant poet pond prince promise rabbit rain road rock room "
    "root salt sand sea season secret seed shape sheep shell shirt silver sky sleep smile snow song spring "
    "star storm street sun table tea tear tiger time town tree uncle valley voice wall war wave week wheat "
    "wing wolf wood world year"
)

_ONSETS = pool("b c d f g h j k l m n p r s t v w z br cl cr dr fl gr kr pr st th tr sh ch gl bl")
_NUCLEI = pool("a e i o u a e i o ai ea ei ia io ou")
_CODAS = pool("n r l s m d t th ck nd rn ll sh x")
_ENDINGS = pool("a o e ia ine us is en an or er el in win mund ric bert ley ton more dor wyn ette")

LEADS = (
    "remember that",
    "note that",
    "it was said that",
    "everyone knew that",
    "that day we learned that",
    "by the way,",
    "as far as I know,",
    "it is true that",
    "please remember:",
    "let me tell you that",
    "in those days",
    "it turned out that",
    "I am told that",
    "he said that",
    "she wrote that",
    "of course,",
    "here is a fact:",
    "one more thing:",
)
ASKS = (
    "please tell me:",
    "now,",
    "do you remember:",
    "a question:",
    "well,",
    "so,",
    "one question:",
    "answer this:",
    "tell me,",
    "and",
    "I wonder:",
    "let us see:",
)


def invent_name(rng: random.Random) -> str:
    """A made-up name of two or three syllables, never one of the held-out ones."""
    while True:
        name = rng.choice(_ONSETS) + rng.choice(_NUCLEI)
        if rng.random() < 0.4:
            name += rng.choice(_ONSETS[:18]) + rng.choice(_NUCLEI[:9])
        name += rng.choice(_CODAS) if rng.random() < 0.3 else rng.choice(_ONSETS[:18]) + rng.choice(_ENDINGS)
        if (name := name.capitalize()) not in HELD_OUT.names and name.lower() not in HELD_OUT.things:
            return name


def plain_lexicon(is_short: Callable[[str], bool]) -> Lexicon:
    """Names, things and values that are one token each, and one wording per kind.

    The keys then stand at fixed distances from the value and from the end of the question, and looking up is found
    out first; names of many pieces and other wordings are easy to add to it.
    """
    kinds = tuple(
        replace(
            kind,
            statements=kind.statements[:1],
            questions=kind.questions[:1],
            values=tuple(filter(is_short, VALUES if kind.name == "word" else kind.values)),
        )
        for kind in KINDS
    )
    names, things, materials = (tuple(filter(is_short, p)) for p in (NAMES, THINGS_ALLOWED, MATERIALS_ALLOWED))
    return Lexicon(names, materials, things, kinds)


def draw_lexicon(rng: random.Random, words: Words) -> Lexicon:
    """Fresh pools for one document; ``words`` of the texts serve as things, names and values, too."""
    taken = {*HELD_OUT.things, *HELD_OUT.materials}
    loose = [w for w in rng.sample(words.common, 60) if w not in taken]
    common = [w for w in rng.sample(words.common, 80) if w not in taken]
    rare = rng.sample(words.rare, 50)
    things = rng.sample(THINGS_ALLOWED, 30)
    if rng.random() < 0.5:
        things[:20] = rng.choice((common[:20], rare[:20], rare[:20], _invented(rng, 20, str.lower)))
    names = [*_some_names(rng, words, 10), *_some_names(rng, words, 10)]
    values = (*rng.sample(VALUES, 10), *common[40:], *rare[20:35], *_invented(rng, 8, str.lower))
    kinds = tuple(with_loose_wordings(with_values(kind, values), rng, loose) for kind in KINDS)
    materials = list(MATERIALS_ALLOWED)
    if rng.random() < 0.7:  # any word may stand before a thing: the held-out ones have never stood there
        materials = [*rng.sample(loose, 6), *rare[35:43], *_invented(rng, 6, str.lower), *rng.sample(materials, 14)]
    return Lexicon(tuple(dict.fromkeys(names)), tuple(dict.fromkeys(materials)), tuple(dict.fromkeys(things)), kinds)


def _invented(rng: random.Random, n: int, form: Callable[[str], str] = str) -> list[str]:
    return [form(invent_name(rng)) for _ in range(n)]


def _some_names(rng: random.Random, words: Words, n: int) -> list[str]:
    """Names of one sort: well known, invented, of the novels' people and towns, or a rare word with a capital."""
    sort = rng.random()
    if sort < 0.25:
        return rng.sample(NAMES, n)
    if sort < 0.5:
        return _invented(rng, n)
    if sort < 0.85:
        return rng.sample(words.names, n)
    return [word.capitalize() for word in rng.sample(words.rare, n)]


def with_values(kind: Kind, values: Sequence[str]) -> Kind:
    """The kind ``word`` takes any word as its value; from a short list the model would guess instead of looking."""
    return replace(kind, values=tuple(values)) if kind.name == "word" else kind


GLUE = pool("that you we they it he she i could can would must may has had was be to of in at so now then there all if")
LOOSE_LEADS = (
    *("", "", "", "* * that ", "* would * that ", "* has * ", "* * * ", "at * "),
    *("~ that ", "~ that ", "~ ", "~, "),
)
LOOSE_SUBJECTS = (
    "{owner}'s {thing}",
    "the {thing} * {owner}",
    "the {thing} * to {owner}",
    "the {thing} * * {owner}",
    "{owner} * the {thing} and it",
    "the * {thing} of {owner}",
)
LOOSE_OWNED = ("the {owner} {thing}", "the {owner} {thing}", "a {owner} {thing}", "* {owner} {thing}")
LOOSE_LINKS = {
    "colour": (
        *("is {value}", "was {value}", "* {value}", "* * {value}", "has * * {value}", "*, and is {value}"),
        *("~ {value}", "~ is {value}", "~, {value}"),
    ),
    "place": (
        *("is in the {value}", "* in the {value}", "* to the {value}", "* * the {value}", "in the {value}"),
        *("~ in the {value}", "~ to the {value}", "~ the {value}"),
    ),
    "owner": (
        "* to {value}",
        "* by {value}",
        "is the * of {value}",
        "is the * of {value}",
        "* the * of {value}",
        "* * of {value}",
        "* in the * of {value}",
        "* * * {value}",
        "* {value}",
        "has {value} for its *",
        *("~ to {value}", "~ of {value}", "~ by {value}", "~ {value}", "is ~ of {value}", "~, {value}"),
    ),
    "word": (
        "* the word {value}",
        "has * word * it: {value}",
        "* * word {value}",
        "word * {value}",
        "has a word, {value}",
        *("~ the word {value}", "~ word ~: {value}"),
    ),
    "number": (
        "* the number {value}",
        "has * number * it: {value}",
        "* * number {value}",
        "* {value}",
        "* it: {value}",
        *("~ the number {value}", "~ number ~: {value}"),
    ),
}
CHANGES = (
    "now ",
    "later ",
    "no, ",
    "in the end ",
    "after * ",
    "after * * ",
    "from that * on ",
    "* * * ",
    "today ",
    "but * ",
    "next * ",
    "once * ",
)
NOUN_FIRST = (
    "the {noun} on #: {value}",
    "the {noun} * #: {value}",
    "* was * the {noun} for #: {value}",
    "* * the {noun} on #: {value}",
    "* the {noun} of #; it * {value}",
    "the {noun} * * # is {value}",
    "* {noun} * #, * {value}",
    "there was * {noun} on #, {value}",
    "* can * a {noun} on #: {value}",
)
LOOSE_ASKS = {
    "colour": ("* colour # *?", "* * # *: what colour?", "which colour * * * #?", "# * *: * its colour?"),
    "place": ("where * # *?", "* # * *: where * it?", "* * place * #?", "#: * * where * is *?"),
    "owner": (
        "who * # *?",
        "* * # *: who * its owner?",
        "* #: who is the owner?",
        "* to whom # *?",
        "* * * to whom #?",
        "* owner * * #?",
        "# * *: whose * it?",
    ),
    "word": ("* word * * #?", "* # *: which word * it?", "* * which word # *?", "#: * word * *?"),
    "number": ("* number * * #?", "* # *: which number * it?", "* * which number # *?", "#: * number * *?"),
}


def with_loose_wordings(kind: Kind, rng: random.Random, words: Sequence[str]) -> Kind:
    """The kind with wordings made up for one document: ``*`` stands for any word, ``~`` for up to five.

    What such a sentence says can only be found from its keys, its kind and where its value stands, which is what
    a wording that was never seen asks for.
    """

    def some() -> str:
        return " ".join(rng.choice(words if rng.random() < 0.6 else GLUE) for _ in range(rng.randint(0, 5)))

    def fill(text: str) -> str:
        while True:
            filled = "".join(rng.choice(words) if c == "*" else some() if c == "~" else c for c in text)
            filled = " ".join(filled.replace(" ,", ",").split())
            if not grammar.is_held_out(filled):
                return filled

    subjects = LOOSE_OWNED if kind.name == "owner" else LOOSE_SUBJECTS
    statements, questions = list(rng.sample(kind.statements, 4)), list(rng.sample(kind.questions, 4))
    corrections = [*rng.sample(kind.corrections, 4), *statements]
    for _ in range(12):
        statements.append(grammar.statement(kind.name, rng))
        questions.append(grammar.ask(kind.name, rng))
        corrections += [grammar.correction(kind.name, rng), grammar.correction(kind.name, rng), statements[-1]]
    for _ in range(8):
        lead = rng.choice(LOOSE_LEADS).replace("{noun}", kind.name)
        subject = rng.choice(subjects)
        if kind.name in ("word", "number", "colour") and rng.random() < 0.5:
            statements.append(fill(rng.choice(NOUN_FIRST).replace("{noun}", kind.name).replace("#", subject)) + ".")
        else:
            statements.append(fill(f"{lead}{subject} {rng.choice(LOOSE_LINKS[kind.name])}."))
        questions.append(fill(rng.choice(LOOSE_ASKS[kind.name]).replace("#", rng.choice(subjects))))
        again = statements[-1].removesuffix(".")
        corrections.append(fill(f"{rng.choice(CHANGES)}{again}{rng.choice(('', '', '', ' now', ' *', ' at last'))}."))
        corrections.append(statements[-1])  # no word says that something changed: the last one counts
    return replace(kind, statements=tuple(statements), corrections=tuple(corrections), questions=tuple(questions))


SUBJECTS = (
    "{owner}'s {thing}",
    "the {thing} of {owner}",
    "the {thing} that {owner} had",
    "the {thing} which {owner} bought",
    "the {thing} {owner} made",
    "that {thing} of {owner}'s",
    "the old {thing} from {owner}",
    "a {thing} which came from {owner}",
)
OWNED = ("the {owner} {thing}", "that {owner} {thing}", "a {owner} {thing}", "the old {owner} {thing}")


def _sentences(subjects: Sequence[str], frames: Sequence[str]) -> tuple[str, ...]:
    """Every subject in every frame, where it stands for ``*``: many wordings from few words."""
    return tuple(frame.replace("*", subject) for frame in frames for subject in subjects)


_PROPERTY_FRAMES = (
    "* carries the {noun} {value}.",
    "* shows the {noun} {value}.",
    "* was given the {noun} {value}.",
    "you can see the {noun} on *; it is {value}.",
    "they put {article} {noun} on *, namely {value}.",
    "* says {value}, which is its {noun}.",
    "the {noun} you will find on * is {value}.",
    "as for *, its {noun} is {value}.",
)
_PROPERTY_ASKS = (
    "What {noun} does * carry?",
    "Which {noun} can be seen on *?",
    "What does * have as its {noun}?",
    "Name the {noun} of *.",
    "What was the {noun} on *?",
    "I need to know the {noun} of *. Which is it?",
)


def _property(noun: str, verb: str, article: str) -> Kind:
    """The wordings that the kinds ``word`` and ``number`` have in common."""
    statements = (
        f"the {noun} of {{owner}}'s {{thing}} is {{value}}.",
        f"the {noun} on {{owner}}'s {{thing}} is {{value}}.",
        f"{{owner}}'s {{thing}} {verb} the {noun} {{value}}.",
        f"the {{thing}} of {{owner}} {verb} the {noun} {{value}}.",
        f"{{owner}} has a {{thing}} with the {noun} {{value}}.",
        f"on the {{thing}} of {{owner}} is written the {noun} {{value}}.",
        f"{{owner}} wrote {article} {noun} on the {{thing}}: {{value}}.",
        f"the {{thing}} that {{owner}} bought {verb} the {noun} {{value}}.",
        f"{{owner}}'s {{thing}} was marked with the {noun} {{value}}.",
        *_sentences(SUBJECTS, [f.format(noun=noun, article=article, value="{value}") for f in _PROPERTY_FRAMES]),
    )
    corrections = (
        f"the {noun} of {{owner}}'s {{thing}} is now {{value}}.",
        f"later {{owner}}'s {{thing}} got the {noun} {{value}}.",
        f"the {noun} on the {{thing}} of {{owner}} was changed to {{value}}.",
        f"no, the {noun} on {{owner}}'s {{thing}} is {{value}}.",
        f"now the {{thing}} of {{owner}} {verb} the {noun} {{value}}.",
        f"after some time {{owner}} wrote another {noun} on the {{thing}}: {{value}}.",
    )
    questions = (
        f"What is the {noun} of {{owner}}'s {{thing}}?",
        f"What is the {noun} on {{owner}}'s {{thing}}?",
        f"Which {noun} does {{owner}}'s {{thing}} have?",
        f"Which {noun} is written on the {{thing}} of {{owner}}?",
        f"{{owner}} has a {{thing}}. What is the {noun} on it?",
        f"Tell me the {noun} of {{owner}}'s {{thing}}.",
        f"Do you remember the {noun} of the {{thing}} of {{owner}}?",
        f"The {{thing}} of {{owner}}: which {noun}?",
        *_sentences(SUBJECTS, [f.format(noun=noun) for f in _PROPERTY_ASKS]),
    )
    return Kind(noun, statements, corrections, questions)


KINDS = (
    Kind(
        "colour",
        (
            "{owner}'s {thing} is {value}.",
            "{owner}'s {thing} was painted {value}.",
            "the colour of {owner}'s {thing} is {value}.",
            "{owner} has a {thing}, and it is {value}.",
            "the {thing} of {owner} is {value} in colour.",
            "the {thing} that {owner} bought is {value}.",
            "{owner} owned a {thing} which was {value}.",
            "if you look at {owner}'s {thing}, you see that it is {value}.",
            "{owner} liked the {thing} because it was {value}.",
            *_sentences(
                SUBJECTS,
                (
                    "* is {value}.",
                    "* looks {value}.",
                    "* was quite {value}.",
                    "* has a colour, and that is {value}.",
                    "they say * is all {value}.",
                    "as for *, its colour is {value}.",
                    "you can tell * by its colour, which is {value}.",
                ),
            ),
        ),
        (
            "{owner}'s {thing} is now {value}.",
            "later {owner} painted the {thing} {value}.",
            "{owner}'s {thing} became {value}.",
            "no, {owner}'s {thing} is {value}.",
            "now the colour of the {thing} of {owner} is {value}.",
            "after some time the {thing} of {owner} turned {value}.",
        ),
        (
            "What colour is {owner}'s {thing}?",
            "Which colour does {owner}'s {thing} have?",
            "What is the colour of the {thing} of {owner}?",
            "{owner} has a {thing}. What colour is it?",
            "Tell me the colour of {owner}'s {thing}.",
            "Do you remember what colour {owner}'s {thing} is?",
            "The {thing} of {owner}: which colour?",
            "What colour was the {thing} that {owner} had?",
            *_sentences(
                SUBJECTS,
                (
                    "What colour is *?",
                    "Which colour was *?",
                    "Name the colour of *.",
                    "How would you paint *?",
                    "What does * look like, which colour has it?",
                ),
            ),
        ),
        COLOURS,
    ),
    Kind(
        "place",
        (
            "{owner}'s {thing} is in the {value}.",
            "{owner} keeps the {thing} in the {value}.",
            "{owner} left a {thing} in the {value}.",
            "the {thing} of {owner} can be found in the {value}.",
            "{owner} put the {thing} away in the {value}.",
            "{owner} has a {thing}, and it is in the {value}.",
            "the {thing} that {owner} bought stands in the {value}.",
            "the place of {owner}'s {thing} is the {value}.",
            "{owner} went to leave the {thing} in the {value}.",
            *_sentences(
                SUBJECTS,
                (
                    "* is in the {value}.",
                    "* was put in the {value}.",
                    "* can be seen in the {value}.",
                    "they hid * in the {value}.",
                    "you will see * when you go to the {value}.",
                    "as for *, it is in the {value}.",
                    "* has its place in the {value}.",
                    "somebody took * to the {value}.",
                ),
            ),
        ),
        (
            "{owner}'s {thing} is now in the {value}.",
            "later {owner} moved the {thing} to the {value}.",
            "{owner} took the {thing} to the {value}.",
            "no, {owner}'s {thing} is in the {value}.",
            "now the {thing} of {owner} is in the {value}.",
            "after some time the {thing} of {owner} was carried to the {value}.",
        ),
        (
            "Where is {owner}'s {thing}?",
            "Where does {owner} keep the {thing}?",
            "In which place is the {thing} of {owner}?",
            "{owner} has a {thing}. Where is it?",
            "Tell me where {owner}'s {thing} is.",
            "Do you remember where {owner} put the {thing}?",
            "The {thing} of {owner}: in which place?",
            "Where can I find the {thing} that {owner} had?",
            *_sentences(
                SUBJECTS,
                (
                    "Where is *?",
                    "Where was * put?",
                    "Where should I look for *?",
                    "Name the place of *.",
                    "Where do they have *?",
                ),
            ),
        ),
        PLACES,
    ),
    _property("word", "has", "a"),
    Kind(
        "owner",
        (
            "the {owner} {thing} belongs to {value}.",
            "the owner of the {owner} {thing} is {value}.",
            "the {owner} {thing} was bought by {value}.",
            "there is a {owner} {thing} that belongs to {value}.",
            "the {owner} {thing} is owned by {value}.",
            "the one who has the {owner} {thing} is {value}.",
            "somebody gave the {owner} {thing} to {value}.",
            *_sentences(
                OWNED,
                (
                    "* belongs to {value}.",
                    "* was made for {value}.",
                    "* is one of the things of {value}.",
                    "* has come to {value}.",
                    "they say * is with {value}.",
                    "as for *, its owner is {value}.",
                    "everybody calls * the pride of {value}.",
                    "the person who has * is {value}.",
                ),
            ),
        ),
        (
            "the {owner} {thing} now belongs to {value}.",
            "later the {owner} {thing} was sold to {value}.",
            "no, the {owner} {thing} belongs to {value}.",
            "now the owner of the {owner} {thing} is {value}.",
            "after some time the {owner} {thing} was given to {value}.",
        ),
        (
            "Who owns the {owner} {thing}?",
            "Who has the {owner} {thing}?",
            "To whom does the {owner} {thing} belong?",
            "Who is the owner of the {owner} {thing}?",
            "Tell me whose {owner} {thing} it is.",
            "Do you remember who had the {owner} {thing}?",
            "The {owner} {thing}: whose is it?",
            *_sentences(
                OWNED[:2],
                (
                    "Who has *?",
                    "Whose is *?",
                    "Who is it that owns *?",
                    "Name the owner of *.",
                    "Which person does * belong to?",
                    "Who bought *?",
                ),
            ),
        ),
    ),
    _property("number", "has", "a"),
)


THINGS_ALLOWED = tuple(sorted(set(THINGS) - set(HELD_OUT.things)))
MATERIALS_ALLOWED = tuple(sorted({*MATERIALS, *grammar.ADJECTIVES} - set(HELD_OUT.materials)))
