"""Wordings in plain English, put together from parts: some ten thousand sentences for every kind of fact.

A sentence is a lead, a subject that holds both keys, what is said of it, and sometimes a tail. None of the
evaluation's phrases (``HELD_OUT_PHRASES``) comes in; its single words may, in other sentences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvkeep.models.tiny.recall import pool

HELD_OUT_PHRASES = (
    *(
        "we heard",
        "belonging to",
        "anybody",
        "since then",
        "these days",
        " instead.",
        "can you say",
        "about the {owner}",
    ),
    *(
        "about {owner}",
        "property of",
        "belonged to",
        "passed to",
        "bears the",
        "been brought",
        "had a new",
        "been made",
    ),
    *("is its owner", "to whom the {owner} {thing} belongs", "is it kept"),
    *(
        "in which place the {thing} of",
        "which colour the {thing} of {owner} is",
        "what is its colour",
        "word is on the {thing} of",
        "number is on the {thing} of",
        "is on it?",
    ),
)
"""What makes up the evaluation's wordings, in small letters; no wording of the training contains any of it."""

LEADS = (
    *("", "", "", "", "", "", "", "I think that ", "they told us that ", "it is known that ", "we saw that "),
    *("people say that ", "my aunt says that ", "nobody doubts that ", "you should know that ", "I heard that "),
    *(
        "we were told that ",
        "the neighbours noticed that ",
        "in this story ",
        "as you know, ",
        "in fact ",
        "strangely ",
    ),
    *("it seems that ", "the book says that ", "he could see that ", "one could say that ", "everybody knows that "),
    *("a letter said that ", "years ago we found that ", "I can tell you that ", "somebody noticed that "),
    *("anyone will tell you that ", "anyone can see that ", "they could all see that ", "she heard them say that "),
    *("it was easy to see that ", "in the village they say that ", "for some reason ", "luckily ", "that morning "),
)
SUBJECTS = (
    *(
        "{owner}'s {thing}",
        "{owner}'s {thing}",
        "{owner}'s {thing}",
        "the {thing} of {owner}",
        "the {thing} of {owner}",
    ),
    *("the {thing} that belongs to {owner}", "the {thing} owned by {owner}", "{owner}'s own {thing}"),
    *("the {thing} in {owner}'s hands", "the {thing} which {owner} owns", "the {thing} that was {owner}'s"),
    *("the {thing} kept by {owner}", "the {thing} {owner} has", "that {thing} of {owner}'s", "{owner}'s dear {thing}"),
    *("the {thing} given to {owner}", "the {thing} used by {owner}", "the {thing} {owner} calls his own"),
    *("the {thing} which {owner} got", "the {thing} {owner} brought", "{owner}'s good old {thing}"),
    *("the {thing} in the hands of {owner}", "the {thing} that we know as {owner}'s"),
    *(
        "the {thing} that belongs to {owner}",
        "the {thing} that now belongs to {owner}",
        "the {thing} bought by {owner}",
    ),
    *(
        "the {thing} in {owner}'s possession",
        "the {thing} in the possession of {owner}",
        "the {thing} loved by {owner}",
    ),
    *("the {thing} whose owner is {owner}", "the {thing} which is {owner}'s property", "the {thing} going to {owner}"),
    *("the {thing} held by {owner}", "the {thing} made for {owner}", "the {thing} that had come to {owner}"),
    *(
        "the {thing} among {owner}'s belongings",
        "the {thing}, a belonging of {owner}'s,",
        "the {thing} lent to {owner}",
    ),
    *("the {thing} known to belong to {owner}", "the {thing} coming to {owner}", "the {thing} promised to {owner}"),
    *("the {thing} which fell to {owner}", "the {thing} reserved for {owner}", "the {thing} dear to {owner}"),
    *("the {thing} sent to {owner}", "the {thing} returning to {owner}", "the {thing} handed to {owner}"),
    *("the {thing} waiting for {owner}", "the {thing} due to {owner}", "the {thing} in the care of {owner}"),
)
OWNED = (
    *(
        "the {owner} {thing}",
        "the {owner} {thing}",
        "the {owner} {thing}",
        "the {owner} {thing}",
        "that {owner} {thing}",
    ),
    *("this {owner} {thing}", "a {owner} {thing}", "one {owner} {thing}", "the same {owner} {thing}"),
    *("the famous {owner} {thing}", "our {owner} {thing}", "the other {owner} {thing}"),
)
_BE = ("is", "is", "was", "was", "had been", "has been", "must be", "may be")

SAYS: dict[str, tuple[str, ...]] = {
    "colour": (
        *("% {value}", "% {value}", "% {value}", "% painted {value}", "has turned {value}", "looked {value}"),
        *(
            "% {value} all over",
            "seemed {value}",
            "% of a {value} colour",
            "% coloured {value}",
            "has the colour {value}",
        ),
        *("shone {value} in the sun", "turned out to be {value}", "% dyed {value}", "came in {value}"),
        *("% quite {value}", "was bought in {value}", "could only be {value}", "was made in {value}"),
    ),
    "place": (
        *("% in the {value}", "% in the {value}", "% in the {value}", "stood in the {value}", "lay in the {value}"),
        *(
            "was left in the {value}",
            "can be found in the {value}",
            "was found in the {value}",
            "% kept in the {value}",
        ),
        *("waits in the {value}", "% stored in the {value}", "went to the {value}", "was carried to the {value}"),
        *("% somewhere in the {value}", "belongs in the {value}", "% down in the {value}", "% sent to the {value}"),
        *("was brought into the {value}", "stays in the {value}", "% hidden in the {value}"),
    ),
    "word": (
        *("has the word {value}", "has the word {value} on it", "shows the word {value}", "carries the word {value}"),
        *("says the word {value}", "had a word on it: {value}", "% marked with the word {value}", "reads {value}"),
        *("has one word on it, {value}", "is signed with the word {value}", "bore the word {value}", "says {value}"),
        *("has got the word {value}", "is known by the word {value}", "came with the word {value}"),
        *("bears one word, {value}", "had the word {value} written on it", "goes with the word {value}"),
    ),
    "number": (
        *("has the number {value}", "has the number {value} on it", "shows the number {value}", "shows {value}"),
        *("had a number on it: {value}", "% marked with the number {value}", "has the number {value} written on it"),
        *("has one number on it, {value}", "bore the number {value}", "has got the number {value}", "reads {value}"),
        *("came with the number {value}", "is known by the number {value}", "bears one number, {value}"),
        *("is listed under the number {value}", "goes with the number {value}", "carries the number {value}"),
    ),
    "owner": (
        *("belongs to {value}", "belongs to {value}", "% owned by {value}", "% {value}'s", "went to {value}"),
        *("% bought by {value}", "was sold to {value}", "was given to {value}", "% in the hands of {value}"),
        *("was left to {value}", "came to {value}", "% the pride of {value}", "has {value} as its owner"),
        *("has {value} for a master", "% held by {value}", "is kept for {value}", "was handed to {value}"),
        *("% claimed by {value}", "has belonged for years to {value}", "will belong to {value}", "fell to {value}"),
        *("has long been the joy of {value}", "has gone to {value}", "passed into the hands of {value}"),
        *("% counted among the property and goods of {value}", "is the treasure of {value}", "is the toy of {value}"),
        *("has now been the possession of {value}", "% with {value}", "had to belong to {value}"),
        *(("% the @ of {value}",) * 12),
        *("% among the @s of {value}", "counts as the @ of {value}", "became the @ of {value}"),
    ),
}
"""What is said of a subject; ``%`` stands for a form of "to be"."""

NOUN_FIRST = (
    *(
        "the {noun} of # % {value}",
        "the {noun} on # % {value}",
        "the {noun} for # % {value}",
        "the {noun}, for #, % {value}",
    ),
    *(
        "she read the {noun} on #: {value}",
        "he wrote the {noun} on #: {value}",
        "you can read the {noun} on #: {value}",
    ),
    *("we could all read a {noun} on #, it was {value}", "they saw the {noun} of #, which % {value}"),
    *("there % a {noun} on #: {value}", "the {noun} they gave # % {value}", "I found the {noun} on #, {value}"),
    *("somebody put the {noun} on #: {value}", "as to the {noun} of #, it % {value}", "the new {noun} on # % {value}"),
)
COLOUR_FIRST = (
    *("the colour of # % {value}", "the colour for # % {value}", "as to the colour of #, it % {value}"),
    *("you know # by its colour, {value}", "they gave # its colour: {value}", "anyone knows # by its colour, {value}"),
    *("if you see #, you find it {value}", "the paint on # % {value}"),
)

TAILS = (
    *("",) * 14,
    " now",
    " again",
    " too",
    " after all",
    " at last",
    ", I think",
    ", they say",
    " for good",
    " still",
)

CHANGE_LEADS = (
    *("", "", "", "now ", "today ", "by now ", "meanwhile ", "nowadays ", "at present ", "ever since ", "at last "),
    *("since last week ", "since that day ", "since the morning ", "in the meantime ", "later on ", "this week "),
    *("but then ", "no, ", "wait, ", "in truth ", "then ", "after that ", "in the end ", "some time later ", "lately "),
    *("from this day on ", "in recent days ", "those days are over: ", "all has changed: ", "instead, ", "next "),
    *(
        "since yesterday ",
        "since that time ",
        "since the last winter ",
        "ever since that time ",
        "of late ",
        "since May ",
    ),
    *("for a few days now ", "after all these years ", "in our days ", "these last weeks ", "then, one day, "),
    *("as of today ", "one day later ", "not long after that ", "for some days now ", "this morning ", "a week later "),
)
CHANGE_SAYS: dict[str, tuple[str, ...]] = {
    "colour": (
        *(
            "has become {value}",
            "has been painted {value}",
            "was painted {value}",
            "turned {value}",
            "has turned {value}",
        ),
        *("was made {value}", "is {value}", "is now {value}", "has been dyed {value}", "has changed to {value}"),
        *("got a coat of {value}", "was given another colour: {value}", "went {value}", "is {value} by now"),
        *(
            "has been coloured {value}",
            "has been turned {value}",
            "has been repainted in {value}",
            "has come out {value}",
        ),
        *("has been given a {value} colour", "has gone {value}", "was repainted {value}", "had to be made all {value}"),
        *(
            "is to be seen in {value}",
            "has been washed {value}",
            "was stained {value}",
            "looks {value}",
            "shines {value}",
        ),
    ),
    "place": (
        *(
            "has been moved to the {value}",
            "was moved to the {value}",
            "was brought to the {value}",
            "is in the {value}",
        ),
        *("has been taken to the {value}", "is now in the {value}", "has been carried into the {value}"),
        *("has gone to the {value}", "went to the {value}", "was sent to the {value}", "has been put in the {value}"),
        *("has been carried to the {value}", "has been sent to the {value}", "has ended up in the {value}"),
        *("has been shifted into the {value}", "came to the {value}", "stands in the {value}", "lies in the {value}"),
        *("has found its place in the {value}", "has been left in the {value}", "was transferred to the {value}"),
    ),
    "word": (
        *(
            "has got a new word: {value}",
            "was given the word {value}",
            "has the word {value}",
            "shows the word {value}",
        ),
        *("has had its word changed to {value}", "has another word on it: {value}", "has been given a word, {value}"),
        *("has received another word: {value}", "has had the word {value} on it", "now has a new word: {value}"),
        *("got a new word on it: {value}", "has had another word written on it: {value}", "has a fresh word, {value}"),
        *("carries a new word: {value}", "has been marked with a new word, {value}", "has for its new word {value}"),
        *("had its word changed to {value}", "has a different word on it: {value}", "got the word {value}"),
    ),
    "number": (
        *("has got a new number: {value}", "was given the number {value}", "has the number {value}"),
        *("has had its number changed to {value}", "has another number on it: {value}", "got the number {value}"),
        *("has received another number: {value}", "has had the number {value} on it", "now has a new number: {value}"),
        *(
            "got a new number on it: {value}",
            "has had another number written on it: {value}",
            "has a fresh number, {value}",
        ),
        *(
            "carries a new number: {value}",
            "has been marked with a new number, {value}",
            "has for its new number {value}",
        ),
        *("had its number changed to {value}", "has a different number on it: {value}", "shows the number {value}"),
    ),
    "owner": (
        *("has been sold to {value}", "was sold to {value}", "belongs to {value}", "now belongs to {value}"),
        *("has gone to {value}", "went to {value}", "has been given to {value}", "was given to {value}"),
        *("has been handed on to {value}", "is {value}'s", "is owned by {value}", "has fallen to {value}"),
        *("has come to {value}", "has passed into the hands of {value}", "has been left to {value}", "fell to {value}"),
        *("has changed hands and belongs to {value}", "has moved on to {value}", "has been passed on to {value}"),
        *(
            "has got {value} for a new owner",
            "has been won by {value}",
            "has been bought by {value}",
            "is with {value}",
        ),
    ),
}
CHANGE_NOUN_FIRST = (
    *("the {noun} of # is now {value}", "the {noun} of # has changed to {value}", "the {noun} of # is {value}"),
    *(
        "the {noun} on # was changed to {value}",
        "the {noun} on # is {value}",
        "they changed the {noun} of # to {value}",
    ),
    *("the {noun} on # is another one: {value}", "the {noun} for # has become {value}"),
    *("the {noun} on # has become {value}", "the {noun} of # has been {value}", "the {noun} on # reads {value}"),
    *("the new {noun} of # is {value}", "you find another {noun} on #: {value}", "the {noun} now on # is {value}"),
)
CHANGE_TAILS = (
    *("",) * 8,
    " rather than that",
    " instead of what it was",
    " as a change",
    " and nothing else",
    " in its stead",
    " now",
    " again",
    " at last",
    " for good",
    " after all",
    " this time",
    " in place of that",
    " instead of that",
    " instead of the old one",
)

ASK_LEADS = (
    *(
        "",
        "",
        "",
        "",
        "could you tell me ",
        "do you know ",
        "may I ask ",
        "I would like to know ",
        "can anyone tell me ",
    ),
    *("tell me ", "please say ", "I forgot ", "do you remember ", "can you tell us ", "who can say ", "say "),
)
"""Before an indirect question ("which colour # has"); the empty ones go with a direct question."""
DIRECT = {
    "colour": (
        *("what colour is #?", "which colour has #?", "what is the colour of #?", "in what colour is #?"),
        *("what colour was #?", "what colour does # have?", "of which colour is #?", "how is # coloured?"),
    ),
    "place": (
        *("where is #?", "where was #?", "where can # be found?", "where do I find #?", "in which place is #?"),
        *("what place is # in?", "where must I go to find #?", "where did they keep #?", "where has # gone?"),
    ),
    "noun": (
        *("what {noun} stands on #?", "which {noun} was on #?", "what {noun} does # have?", "which {noun} has #?"),
        *("what is the {noun} of #?", "what is the {noun} on #?", "what {noun} was on #?", "which is the {noun} on #?"),
        *("which {noun} does # show?", "what {noun} belongs to #?"),
    ),
    "owner": (
        *("who owns #?", "whose is #?", "who has #?", "to whom does # belong?", "who is the owner of #?"),
        *("who does # belong to?", "who keeps #?", "who got #?", "by whom is # owned?", "who can call # his own?"),
    ),
}
INDIRECT = {
    "colour": (
        *("what colour # is", "which colour # has", "the colour of #", "in what colour # stands", "what colour # was"),
        *("how # is coloured", "of what colour # is"),
    ),
    "place": (
        *("where # is", "in what place # is", "where # was put", "where to find #", "the place of #", "where # stands"),
        *("which place # is in", "the place where # is"),
    ),
    "noun": (
        *(
            "what {noun} stands on #",
            "which {noun} # has",
            "the {noun} on #",
            "what the {noun} on # is",
            "the {noun} of #",
        ),
        *("which {noun} stands on #", "what {noun} there is on #", "which {noun} # got"),
    ),
    "owner": (
        *("who owns #", "whose # is", "whom # belongs to", "who the owner of # is", "who has #", "the owner of #"),
        *("who it is that # belongs to", "which person has #"),
    ),
}
TOPIC_LEADS = (
    *("As for #: ", "Regarding #: ", "Concerning #, ", "Think of #. ", "There was #. ", "Now to #: ", "Take #: "),
    *("You remember #, ", "One question on #: ", "Let us talk of #: ", "And #, ", "#: "),
)
TOPIC_ASKS = {
    "colour": (
        *("what colour is it?", "which colour has it?", "what colour was it?", "what is the colour?"),
        *("how is it coloured?", "its colour is what?"),
    ),
    "place": (
        "where is it?",
        "where was it put?",
        "in which place is it?",
        "where can it be?",
        "where do they keep it?",
    ),
    "noun": (
        *("what {noun} is it?", "what {noun} does it have?", "which is its {noun}?", "what {noun} can be seen there?"),
        *("what is the {noun}?", "which {noun} was on it?", "which {noun} has it got on it, then?"),
    ),
    "owner": (
        *("who owns it?", "whose is it?", "who has it?", "who is the owner?", "what is the name of its owner?"),
        *("to whom does it belong?", "who can be its owner?"),
    ),
}
ADJECTIVES = pool(
    "antique modern tarnished gilded carved polished faded crooked spotted checked dotted varnished woven knitted "
    "linen felt oak pine birch walnut ebony ivory pewter chrome nickel granite slate brick straw wicker reed bamboo "
    "cracked bent torn patched mended folded rolled hollow solid empty full lost stolen borrowed famous secret sacred "
    "royal noble humble plain fancy curious strange odd lovely ugly sweet bitter warm cold wet dry dusty muddy greasy "
    "sticky smooth rough sharp blunt curved straight flat deep shallow hot frozen burnt charred foreign local modest "
    "grand splendid shabby worn ragged neat tidy quaint rural rustic simple double single second third last first "
    "newest oldest finest largest smallest favourite spare hidden printed embroidered quilted furry feathered woolly "
    "canvas denim satin lace wax paperback porcelain crystal amber jade bone horn sandy rocky mossy wild tame young "
    "weathered gleaming glowing dull bright dark pale enormous slender fat thin hefty feeble sturdy fragile precious"
)


NOUNS = pool(
    "pride joy toy pet prize treasure delight gift concern wealth possession belonging burden business comfort hobby "
    "secret love work choice capital estate fortune goods heritage legacy share stock holding matter thing hope darling"
)
"""What something is to its owner, for ``@``."""


def is_held_out(text: str) -> bool:
    """Whether any of the evaluation's phrases is in a wording."""
    return any(phrase in text.lower() for phrase in HELD_OUT_PHRASES)


def statement(kind: str, rng: random.Random) -> str:
    """A sentence that states a fact of this kind."""
    said = _said(kind, rng, SAYS[kind], NOUN_FIRST, COLOUR_FIRST)
    return _filled(rng.choice(LEADS) + said + rng.choice(TAILS) + ".", kind, rng)


def correction(kind: str, rng: random.Random) -> str:
    """A sentence that states a fact anew; some do not tell that anything changed."""
    said = _said(kind, rng, CHANGE_SAYS[kind], CHANGE_NOUN_FIRST, CHANGE_NOUN_FIRST)
    return _filled(rng.choice(CHANGE_LEADS) + said + rng.choice(CHANGE_TAILS) + ".", kind, rng)


def ask(kind: str, rng: random.Random) -> str:
    """A question about a fact of this kind."""
    form = "noun" if kind in ("word", "number") else kind
    if rng.random() < 0.3:
        text = rng.choice(TOPIC_LEADS) + rng.choice(TOPIC_ASKS[form])
    elif lead := rng.choice(ASK_LEADS):
        text = lead + rng.choice(INDIRECT[form]) + rng.choice("?.?")
    else:
        text = rng.choice(DIRECT[form])
    return _filled(text, kind, rng)


def _said(kind: str, rng: random.Random, says: Sequence[str], noun_first: Sequence[str], colour: Sequence[str]) -> str:
    """What is said of the subject, before or after the property is named."""
    if kind in ("word", "number") and rng.random() < 0.5:
        return rng.choice(noun_first)
    if kind == "colour" and rng.random() < 0.25:
        return rng.choice(colour)
    return "# " + rng.choice(says)


def _filled(text: str, kind: str, rng: random.Random) -> str:
    text = text.replace("#", rng.choice(OWNED if kind == "owner" else SUBJECTS))
    return text.replace("@", rng.choice(NOUNS)).replace("%", rng.choice(_BE)).replace("{noun}", kind)
