"""Arrivals and lengths are drawn by a seed, as they are described."""

import itertools
import math
import random
import statistics

import pytest

from kvkeep.errors import InputError
from kvkeep_lab.loadtest.plan import Lengths, Line, Load, arrivals, read_lines


def load(**options):
    fixed = Lengths.read("5", "prompt_tokens")
    return Load(**{"requests": 50, "rate": 10.0, "prompt_tokens": fixed, "new_tokens": fixed, **options})


def test_arrivals_are_those_of_poisson_and_of_the_seed():
    made = arrivals(load(requests=4000))
    gaps = [b.at - a.at for a, b in itertools.pairwise(made)]
    assert made[0].at == 0
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)  # exponential: as large as the mean
    assert arrivals(load()) == arrivals(load()) != arrivals(load(seed=1))
    assert {one.at for one in arrivals(load(rate=math.inf))} == {0.0}


@pytest.mark.parametrize(("text", "least", "most"), [("7", 7, 7), ("2-9", 2, 9), ("~20", 1, 160)])
def test_lengths(text, least, most):
    made = [len(one.turns[0].text.split()) for one in arrivals(load(prompt_tokens=Lengths.read(text, "x")))]
    assert least <= min(made) <= max(made) <= most
    assert len(set(made)) > 1 or least == most


def test_the_mean_of_exponential_lengths():
    made = [a.turns[0].new_tokens for a in arrivals(load(requests=3000, new_tokens=Lengths.read("~40", "x")))]
    assert statistics.mean(made) == pytest.approx(40, rel=0.1)


@pytest.mark.parametrize("text", ["3", "2-9", "~1", "~2", "~40", "~1000000"])
def test_the_average_is_that_of_what_is_drawn(text):
    """It says how many conversations are open at the same time."""
    lengths, draw = Lengths.read(text, "x"), random.Random(0)
    drawn = [lengths.draw(draw) for _ in range(40_000)]
    assert lengths.average == pytest.approx(statistics.mean(drawn), rel=0.02)


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "5-2", "1-", "~5-9", "1.5", "99999999", "1e3", "٣", "~0"])
def test_lengths_that_are_none(text):
    with pytest.raises(InputError, match="prompt_tokens="):
        Lengths.read(text, "prompt_tokens")


@pytest.mark.parametrize(
    "options",
    [
        *({"requests": 0}, {"rate": 0.0}, {"rate": -1.0}, {"rate": math.nan}, {"turns": 0}, {"prefixes": 0}),
        *({"prefix_tokens": -1}, {"requests": 10**7}),
    ],
)
def test_loads_that_are_none(options):
    with pytest.raises(InputError, match=f"{next(iter(options))}="):
        load(**options)


def test_a_warm_up_has_the_lengths_of_a_files_texts_and_other_words():
    """The very texts would be measured with what the server's prefix cache holds of them."""
    lines = (Line("a text of five words", new_tokens=3), Line(prompt_tokens=2))
    asked = load(lines=lines, turns=2)
    warm = [arrival.turns for arrival in arrivals(asked.warmup(2))]
    assert [(len(turn.text.split()), turn.new_tokens) for (turn,) in warm] == [(5, 3), (2, 5)]
    assert not {turn.text for turns in warm for turn in turns} & {
        turn.text for arrival in arrivals(asked) for turn in arrival.turns
    }


def test_prefixes_are_shared_and_the_rest_is_not():
    made = arrivals(load(prefixes=3, prefix_tokens=6, turns=2, requests=40))
    begins = {" ".join(one.turns[0].text.split()[:6]) for one in made}
    assert len(begins) == 3
    assert len({one.turns[0].text for one in made}) > 30
    assert {len(one.turns[0].text.split()) for one in made} == {11}
    assert {len(one.turns[1].text.split()) for one in made} == {5}


def test_lines_of_a_file_are_taken_in_turn(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a dog", "max_tokens": 3}\n\n{"prompt_tokens": 4}\n', encoding="utf-8")
    lines = read_lines(file)
    assert lines == (Line("a dog", None, 3), Line(None, 4, None))
    made = [one.turns[0] for one in arrivals(load(lines=lines, requests=4))]
    assert [(len(one.text.split()), one.new_tokens) for one in made] == [(2, 3), (4, 5)] * 2
    file.write_text(file.read_text(encoding="utf-8"), encoding="utf-8-sig")  # as some editors write it
    assert read_lines(file) == lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no line"),
        ("x", "line 1: no JSON"),
        ("[" * 100_000, "line 1: no JSON"),
        ('{"prompt": "a"}\n[]', "line 2: no JSON object"),
        ("{}", "neither prompt nor prompt_tokens"),
        ('{"prompt": 5}', "prompt is no text"),
        ('{"prompt": " "}', "prompt is no text"),
        ('{"prompt": "\\ud83d"}', "prompt is no text"),
        ('{"prompt_tokens": true}', "prompt_tokens is not"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is not"),
        ('{"prompt": "a", "max_tokens": 1e99}', "max_tokens is not"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, words):
    file = tmp_path / "a.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_lines(file)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_lines(tmp_path)
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(InputError, match="no UTF-8"):
        read_lines(tmp_path / "a")
