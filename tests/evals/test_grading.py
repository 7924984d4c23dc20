"""Metrics against cases computed by hand."""

import math
import random

import pytest

from kvkeep.evals import grading


@pytest.mark.parametrize(
    ("reply", "answer", "wanted"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("the cat", "the black cat", 2 / 3),  # 1 common word; 1 and 2 words without articles
        ("cat cat dog", "cat", 0.5),  # 1 of 3, 1 of 1
        ("", "cat", 0.0),
        ("dog", "cat", 0.0),
        ("U.S.A!", "usa", 1.0),
        # punctuation goes before articles: "a-b" is the word "ab", "an," is an article; 2 · 1 / (2 + 1)
        ("an, a-b c", "The AB", 2 / 3),
        # equal words count as often as both have them: 2 common, 3 and 2 words
        ("no no no", "no no", 0.8),
    ],
)
def test_f1_over_words(reply, answer, wanted):
    assert grading.f1(reply, answer) == pytest.approx(wanted)


def test_best_of_several_answers():
    assert grading.best(grading.f1, "a blue whale", ["whale", "blue whale", "x"]) == 1.0
    assert grading.best(grading.f1, "a blue whale", []) == 0.0


def test_string_match():
    assert grading.contains_all("It is 12 and FOX", ["12", "fox", "dog", "cat"]) == 0.5
    assert grading.contains_any("the Fox.", ["dog", "fox"]) == 1.0
    assert grading.contains_any("the hen", ["dog", "fox"]) == 0.0
    # every reference counts alike, wherever it stands, also inside of a word: 1234567 and ABCDE of four
    assert grading.contains_all("x1234567y, abcde", ["1234567", "ABCDE", "7654321", "EDCBA"]) == 0.5
    assert grading.contains_all("1234567 1234567", ["1234567", "7654321"]) == 0.5  # said twice is said once


def test_rouge():
    reply, answer = "the cat sat on the mat", "the cat was on the mat"
    assert grading.rouge_l(reply, answer) == pytest.approx(5 / 6)
    assert grading.rouge_n(reply, answer, 1) == pytest.approx(5 / 6)
    assert grading.rouge_n(reply, answer, 2) == pytest.approx(3 / 5)
    assert grading.rouge_l("a b c d", "d c b a") == pytest.approx(1 / 4)
    assert grading.rouge_l("", "a") == grading.rouge_l("a", "") == grading.rouge_n("a", "a", 2) == 0.0


def test_rouge_is_that_of_the_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    drawn = random.Random(0)
    for _ in range(50):
        one, other = (" ".join(drawn.choices(["cat", "dog's", "U.S.", "7th", "mat"], k=9)) for _ in range(2))
        found = scorer.score(other, one)
        assert grading.rouge_l(one, other) == pytest.approx(found["rougeL"].fmeasure)
        assert grading.rouge_n(one, other, 1) == pytest.approx(found["rouge1"].fmeasure)
        assert grading.rouge_n(one, other, 2) == pytest.approx(found["rouge2"].fmeasure)


@pytest.mark.parametrize(
    ("reply", "answer", "wanted"),
    [
        # sentences cross: "sat", "a dog", "the cat" and "ran" are common to some pair; 6 of 6 words on both sides
        ("the cat sat. a dog ran", "a dog sat. the cat ran", 1.0),
        # words count once: {the, cat}; 2 of 2 and 2 of 3, so 2 · 1 · 2/3 / (5/3)
        ("the cat the cat", "the cat sat", 0.8),
        # letter case and punctuation but the full stop stay: only "cat" is common, 1 of 2 on both sides
        ("The cat", "the cat", 0.5),
        ("cat, dog", "cat dog", 0.5),
        # the order counts: "b" or "a", 1 of 2 on both sides
        ("b a", "a b", 0.5),
        # white space after the last stop is a word of its own in the package: 2 of 3 and 2 of 2
        ("a b. ", "a b", 0.8),
        ("", "a", 0.0),
        ("...", "a", 0.0),
        ("x", "", 0.0),
    ],
)
def test_rouge_over_sentences(reply, answer, wanted):
    assert grading.rouge_l_of_sentences(reply, answer) == pytest.approx(wanted, abs=1e-7)


def test_rouge_over_sentences_is_that_of_longbenchs_package():
    package = pytest.importorskip("rouge").Rouge()
    drawn = random.Random(0)
    words = ["cat", "Cat", "the", "sat.", "mat,", ". ", "\n", "x.y", "é"]
    for _ in range(200):
        reply, answer = (" ".join([*drawn.choices(words, k=9), "end"]) for _ in range(2))
        wanted = package.get_scores([reply], [answer], avg=True)["rouge-l"]["f"]
        assert grading.rouge_l_of_sentences(reply, answer) == pytest.approx(wanted, abs=1e-12)


def test_counts_and_paragraphs():
    assert grading.count("7, or 8, or 7", "7") == pytest.approx(2 / 3)
    assert grading.count("seven", "7") == 0.0
    assert grading.count("17", "7") == 0.0
    assert grading.retrieval("Paragraph 7", "Paragraph 7") == 1.0
    assert grading.retrieval("Paragraph 7 or 12", "Paragraph 12") == 0.5
    assert grading.retrieval("7", "no number") == 0.0


def test_code():
    assert grading.code_similarity("\n# a comment\nx = 1\ny = 2", "x = 1") == 1.0
    assert grading.code_similarity("abcd", "abxd") == 0.75  # common: abd; 2 · 3 / 8
    assert grading.code_similarity("```", "x") == 0.0
    assert grading.code_similarity("", "x") == 0.0
    assert grading.code_similarity("", "") == 1.0  # equal lines
    # the first line without a mark: "b = 10"; against "b = 20": "b = 0" in common, 2 · 5 / 12 = 0.8333, whole percent
    assert grading.code_similarity("// x\n`y`\nb = 10\nb = 20", "b = 20") == 0.83


def test_classes():
    classes = ["Number", "Number of people", "Place", "Person"]
    assert grading.classification("It is a Place.", "Place", classes) == 1.0
    assert grading.classification("Place or Person", "Place", classes) == 0.5
    assert grading.classification("Number of people", "Number of people", classes) == 1.0
    assert grading.classification("Number of people", "Number", classes) == 0.5
    assert grading.classification("Nothing", "Place", classes) == 0.0
    # "Number" is a part of the right "Number of people" and does not count; "Place" does: 1 of 2
    assert grading.classification("Number of people, Place", "Number of people", classes) == 0.5
    assert grading.classification("place", "Place", classes) == 0.0  # letter case counts


def test_bleu_by_hand():
    text, other = ["a", "b", "c", "d"], ["a", "b", "d", "c"]
    assert grading.bleu(text, [other], 1) == pytest.approx(1.0 * math.exp(0))
    assert grading.bleu(text, [other], 2) == pytest.approx(math.sqrt(1 * 1 / 3))
    assert grading.bleu(text, [other], 3) == pytest.approx((1 * (1 / 3) * (0.1 / 2)) ** (1 / 3))
    assert grading.bleu(text, [other], 3, smoothing=0.0) == 0.0
    assert grading.bleu(["a"], [["a", "b"]], 1) == pytest.approx(math.exp(-1))
    assert grading.bleu(["a", "a", "a"], [["a", "b", "c"]], 1) == pytest.approx(1 / 3)
    assert grading.bleu([], [["a"]], 2) == grading.bleu(["a"], [], 2) == 0.0


def test_diversity():
    assert grading.self_bleu([["a", "b", "c"]] * 3, 2) == pytest.approx(1.0)
    assert grading.self_bleu([["a", "b"], ["c", "d"]], 2, smoothing=0.0) == 0.0
    assert grading.distinct([["a", "b", "a", "b"]], 2) == pytest.approx(2 / 3)
    assert grading.distinct([["a"]], 2) == 0.0
    assert grading.repeated(["a", "b", "a", "b"], 2) == pytest.approx(1 / 3)
    assert grading.repeated(["a"], 2) == 0.0


@pytest.mark.parametrize(
    "grade",
    [
        grading.f1,
        grading.rouge_l,
        grading.rouge_l_of_sentences,
        grading.count,
        grading.retrieval,
        grading.code_similarity,
    ],
)
def test_grades_are_shares_whatever_the_reply(grade):
    drawn = random.Random(1)
    for _ in range(200):
        one, other = ("".join(drawn.choices("ab 1.#`\nParagraph é\x00", k=drawn.randrange(20))) for _ in range(2))
        assert 0 <= grade(one, other) <= 1
