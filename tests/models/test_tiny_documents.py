"""The sentences between planted facts, which must not give other values to what is asked about."""

import itertools
import random

from kvkeep.models.tiny.documents import STYLES, document
from kvkeep.models.tiny.recall import HELD_OUT, Fact, take

KIND = HELD_OUT.kinds[0]


def sentences(style, facts=(), n=3):
    return list(itertools.islice(STYLES[style].filler(random.Random(0), facts), n))


def test_sentences_of_speakers_and_of_another_script_are_those_of_prose():
    plain = sentences("prose")
    for said, sentence in zip(sentences("dialogue"), plain[:1], strict=False):
        assert said.startswith(f'"{sentence[:-1]}," said ')
        assert said.rstrip(".").rpartition(" ")[2] in HELD_OUT.names
    script = sentences("script")
    assert [text[-1] for text in script] == [text[-1] for text in plain]
    assert [len(text) for text in script] == [len(text) for text in plain]
    assert not any(letter.isascii() and letter.isalpha() for text in script for letter in text)


def test_where_every_owner_is_asked_about_no_other_facts_are_stated():
    facts = [Fact(KIND, name, HELD_OUT.things[0], "7") for name in HELD_OUT.names]
    assert [sentences(style, facts) for style in ("facts", "table", "code")] == [[], [], []]
    assert all(not text.startswith(HELD_OUT.names[0]) for text in sentences("table", facts[:1], 50))


def test_facts_of_a_table_are_its_rows():
    made = document(0, n_facts=3, n_questions=3, tokens=200, style="table", count=lambda text: len(text.split()))
    rows = made.text.split("\n")
    assert all(len(row.split(" | ")) == 4 for row in rows)
    for question in made.questions:
        assert sum(row.endswith(f" | {question.answer}") for row in rows) >= 1


def test_sentences_are_taken_while_there_are_some_and_there_is_room():
    assert take(["one two", "three"], 100, len) == ["one two", "three"]
    assert take(["one two", "a", "bc"], 9, len) == ["one two"]
