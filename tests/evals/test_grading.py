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
    assert grading.code_similarity("", "") == 0.0


def test_classes():
    classes = ["Number", "Number of people", "Place", "Person"]
    assert grading.classification("It is a Place.", "Place", classes) == 1.0
    assert grading.classification("Place or Person", "Place", classes) == 0.5
    assert grading.classification("Number of people", "Number of people", classes) == 1.0
    assert grading.classification("Number of people", "Number", classes) == 0.5
    assert grading.classification("Nothing", "Place", classes) == 0.0


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
    "grade", [grading.f1, grading.rouge_l, grading.count, grading.retrieval, grading.code_similarity]
)
def test_grades_are_shares_whatever_the_reply(grade):
    drawn = random.Random(1)
    for _ in range(200):
        one, other = ("".join(drawn.choices("ab 1.#`\nParagraph é\x00", k=drawn.randrange(20))) for _ in range(2))
        assert 0 <= grade(one, other) <= 1
