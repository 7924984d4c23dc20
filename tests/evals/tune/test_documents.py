"""Documents with questions: facts in a user's text, the user's own questions, and how both are asked."""

import functools
import itertools

import model_folders
import pytest
import torch

from kvkeep.errors import InputError
from kvkeep.evals.tune.documents import LONGEST_SENTENCE, UserQuestion, own, planted, sentences
from kvkeep.evals.tune.measure import FULL, PIECE, Answers, Arm, Losses
from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tokenization import Writer

TEXT = "The quick brown fox jumps over the lazy dog. A cat sleeps.\nNobody sees it! " * 40


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread(), quiet():
        yield


@functools.cache
def writer():
    with quiet():
        checkpoint = loading.find(model_folders.folder())
        return Writer(checkpoint, loading.read_weights(checkpoint))


def test_sentences_of_any_text():
    assert sentences("One. Two!  Three?\nfour\n\nfive") == ["One.", "Two!", "Three?", "four", "five"]
    long = "word " * 200
    assert all(len(part) <= LONGEST_SENTENCE for part in sentences(long + "x" * 1000))
    assert "".join(sentences(long)).replace(" ", "") == long.replace(" ", "")
    assert sentences("漢字。" * 300) == ["漢字。"] * 300
    assert len(sentences("x" * 10**6)) == -(-(10**6) // LONGEST_SENTENCE)


def test_facts_stand_in_the_users_text_and_all_are_asked():
    made = planted(writer().checkpoint, TEXT, context=600, facts=4, seed=0)
    unit = made.make(3)
    assert len(unit) == made.per_unit == 4
    assert {one.text for one in unit} == {unit[0].text}
    assert "brown fox" in unit[0].text
    assert all(len(one.ids) <= 600 * 1.02 + 16 for one in unit)
    for one, other in itertools.pairwise(unit):
        assert one.first == other.first
        assert torch.equal(one.ids[: one.first], other.ids[: one.first])
    assert torch.equal(unit[0].ids, planted(writer().checkpoint, TEXT, context=600, facts=4, seed=0).make(3)[0].ids)
    assert unit[0].text != made.make(4)[0].text


def test_facts_that_do_not_fit():
    with pytest.raises(InputError, match="Give fewer `facts` or a longer `context`"):
        planted(writer().checkpoint, TEXT, context=64, facts=16, seed=0)


def questions(texts, each):
    return [UserQuestion(f"text {t}", f"what is {q}?", (str(q),)) for t in range(texts) for q in range(each)]


def test_questions_about_few_texts_are_units_and_many_texts_are():
    few, many = (own(writer().checkpoint, questions(*size), 0) for size in ((2, 10), (12, 3)))
    assert (few.count, few.per_unit) == (20, 1)
    assert (many.count, many.per_unit) == (12, 3)
    assert {one.text for number in range(12) for one in many.make(number)} == {f"text {n}" for n in range(12)}


def replies(arm, budget, *, later, units=range(3)):
    """Every reply, in place of whether it is right."""
    said = []
    made = planted(writer().checkpoint, TEXT, context=500, facts=3, seed=0)
    measure = Answers(made, later=later)
    for number in units:
        for one in made.make(number):
            object.__setattr__(one, "right", lambda reply: bool(said.append(reply)))
    measure.run(writer(), arm, measure.room if budget is None else budget, units)
    return said


def test_later_and_inside_are_the_same_with_room_for_everything():
    assert replies(FULL, None, later=True) == replies(FULL, None, later=False) == replies(Arm("tova"), None, later=True)


@pytest.mark.long
def test_each_reply_is_graded_by_its_own_question_where_texts_are_read_apart(monkeypatch):
    """The user's questions about few texts come in any order, and not all texts may fit into one batch."""
    apart = own(writer().checkpoint, questions(2, 4), 0)
    asked = [one for number in range(apart.count) for one in apart.make(number)]
    assert len({one.text for one in asked[:4]}) == len({one.text for one in asked[4:]}) == 2

    def heard():
        said = dict.fromkeys(range(len(asked)), "")
        for number, one in enumerate(asked):
            object.__setattr__(one, "right", lambda reply, number=number: bool(said.update({number: reply})))
        measure = Answers(apart, later=True)
        measure.run(writer(), FULL, measure.room, range(apart.count))
        return said

    together = heard()
    assert len(set(together.values())) > 2
    monkeypatch.setattr("kvkeep.evals.forward.BATCH_TOKENS", 1)  # every text alone
    assert heard() == together


@pytest.mark.slow
def test_a_small_budget_is_felt_and_documents_do_not_disturb_each_other():
    cut = replies(Arm("local"), 20, later=True)
    assert cut != replies(FULL, None, later=True)
    assert cut[3:6] == replies(Arm("local"), 20, later=True, units=range(1, 2))


def test_losses_count_beyond_the_budget():
    windows = torch.randint(0, 200, (3, 100))
    measure = Losses(windows)
    full = measure.run(writer(), FULL, measure.room, range(3))
    assert measure.tally(full[0], full[0], 40) == (0.0, 100 - 1 - 48)
    local = measure.run(writer(), Arm("local"), 40, range(1, 3))
    assert local[0][: 40 // PIECE] == pytest.approx(full[1][: 40 // PIECE], abs=1e-3)
    more, tokens = measure.tally(local[0], full[1], 40)
    assert more == pytest.approx(sum(local[0][3:]) - sum(full[1][3:]))
    assert tokens == 51
