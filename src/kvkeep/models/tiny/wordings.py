"""The words of recall questions: kinds of facts, and the held-out names, things and wordings.

The classes are shared with the training script, which has its own pools and wordings; the two never meet.
In every template the value stands after both keys, as it must for a model that reads from left to right to
file the value under them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of fact: how it is stated, corrected and asked for, and which values it takes."""

    name: str
    statements: tuple[str, ...]
    corrections: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lexicon:
    """Names, materials, things and kinds that facts are made of."""

    names: tuple[str, ...]
    materials: tuple[str, ...]
    things: tuple[str, ...]
    kinds: tuple[Kind, ...]

    def kind(self, name: str) -> Kind:
        """The kind of this name."""
        return next(kind for kind in self.kinds if kind.name == name)


def pool(words: str) -> tuple[str, ...]:
    """Words separated by spaces, as a tuple."""
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
"""Everything an evaluation is made of; the training script refuses to use any of its names and things."""
