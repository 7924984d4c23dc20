"""Where replies point after eviction: known replies, the same answers as the evaluation, and models that cannot."""

import dataclasses

import pytest
import torch
from constructed import Axes
from shown import context, llama
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep import budget as budgets
from kvkeep.evals.task import Options
from kvkeep.evals.tasks.recall import Recall
from kvkeep.models.load import find, read_weights
from kvkeep.models.tiny import embedded
from kvkeep.models.tiny.recall import question
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse
from kvkeep_lab.analysis.groups import recall_depth
from kvkeep_lab.analysis.groups.recall_depth import RecallDepth, Reply, named_depth, shift, summary
from kvkeep_lab.analysis.measure import Skipped, Subject


def test_a_reply_points_to_the_fact_whose_value_it_is():
    asked = question(3, kind="colour", depth=0.25, n_facts=24, tokens=800)
    others = [
        fact for fact in asked.facts[:-1] if fact.kind.name == "colour" and fact.value.lower() != asked.answer.lower()
    ]
    assert others
    assert named_depth(asked, f" {asked.answer.upper()}. ") == asked.depth
    for fact in others:
        place = named_depth(asked, fact.value)
        assert place is not None
        at = round(place * len(asked.prompt))
        assert fact.value in asked.prompt[at : at + 120]
        assert asked.prompt[max(0, at - 2) : at].strip() in ("", ".")  # the beginning of a sentence
    assert named_depth(asked, "no such colour") is None


def reply(asked, named, right=False):
    return Reply(right, asked, named)


def test_replies_that_point_to_the_beginning():
    replies = [reply(depth / 10, 0.1) for depth in range(10)]
    found = summary(replies)
    assert found["named"] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert found["asked"] == pytest.approx([0.2] * 5)
    assert found["total_variation"] == pytest.approx(0.8)
    assert found["shift"] == pytest.approx(-0.5)
    assert found["shift_error"] == pytest.approx((10 * 0.25 / 9) ** 0.5 / 10**0.5)


def test_accuracy_by_fifth_and_replies_that_are_no_value():
    found = summary([reply(0.1, 0.1, True), reply(0.15, None), reply(0.9, 0.9, True), reply(1.0, 1.0, True)])
    assert found["by_fifth"] == [0.5, None, None, None, 1.0]
    assert found["by_half"] == [0.5, 1.0]
    assert found["accuracy"] == 0.75
    assert found["rights"] == "1011"
    assert found["names_a_fact"] == 0.75
    assert shift([reply(0.1, None), reply(0.2, 0.2)]) == (None, None)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(recall_depth, "QUESTIONS", 4)
    monkeypatch.setattr(recall_depth, "CONTEXT", 400)


@pytest.fixture(scope="module")
def checkpoint():
    return find(embedded())


@pytest.mark.slow
def test_the_answers_are_those_of_the_evaluation(few, checkpoint):
    writer = Writer(checkpoint, read_weights(checkpoint, "float32", "cpu"))
    measurement = RecallDepth(context(64))
    measurement.runs(Subject(writer, torch.arange(64), 0, lambda: writer), lambda share: None)
    result = measurement.result()
    task = Recall.load(checkpoint, Options(limit=4, contexts=(400,)))
    ((case, lengths),) = task.cases().items()
    numbers = [budgets.from_ratio(0.2, length) for length in lengths]
    expected = task.run(writer, case, parse("ahakv"), numbers).score
    assert result["policies"]["ahakv"]["rights"] == expected["rights"]
    assert result["policies"]["ahakv"]["accuracy"] == expected["accuracy"]
    assert result["policies"]["full"]["accuracy"] >= 0.5
    RecallDepth.reading(result)


@pytest.mark.long
def test_a_model_that_knows_nothing_is_skipped(few, checkpoint):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32).eval()
    writer = Writer(checkpoint, kvkeep.attach(model))
    with pytest.raises(Skipped, match=r"only 0.0 % of the questions"):
        RecallDepth(context(64)).runs(Subject(writer, torch.arange(64), 0, lambda: writer), lambda share: None)


def test_a_model_with_too_few_positions_is_skipped(monkeypatch, checkpoint):
    model = llama()
    writer = Writer(dataclasses.replace(checkpoint, config=model.config), model)
    given = Subject(writer, torch.arange(64), 0, lambda: writer)
    monkeypatch.setattr(recall_depth, "CONTEXT", 1020)
    with pytest.raises(Skipped, match="need 1028 positions, the model has 1024"):
        RecallDepth(context(64)).runs(given, lambda share: None)


def test_a_tokenizer_under_which_the_facts_do_not_fit_is_skipped(monkeypatch, checkpoint):
    monkeypatch.setattr(recall_depth, "CONTEXT", 200)
    model = llama()
    writer = Writer(checkpoint, model)
    with pytest.raises(Skipped, match="more than the context of 200"):
        RecallDepth(context(64)).runs(Subject(writer, torch.arange(64), 0, lambda: writer), lambda share: None)


def policy(move, error, rights="1100"):
    return {
        "shift": move,
        "shift_error": error,
        "accuracy": rights.count("1") / len(rights),
        "rights": rights,
        "by_fifth": [0.5, None, 0.5, 0.5, 0.5],
        "by_half": [None, 0.5],
    }


def result_of(h2o, ahakv):
    found = {"full": policy(0.0, 0.0, "1111"), "h2o": h2o, "ahakv": ahakv}
    return {"policies": found, "questions": 4, "context": 512, "keep_ratio": 0.2}


@pytest.mark.parametrize(
    ("h2o", "ahakv", "verdict"),
    [
        (policy(-0.4, 0.1), policy(-0.1, 0.1), "agree"),
        (policy(-0.4, 0.1), policy(-0.5, 0.1), "differ"),  # AhaKV is no better
        (policy(-0.1, 0.1), policy(0.0, 0.1), "cannot tell"),  # within the error
        (policy(0.4, 0.1), policy(0.0, 0.1), "differ"),
        (policy(None, None), policy(0.0, 0.1), "cannot tell"),
    ],
)
def test_the_reading_wants_a_shift_beyond_its_error(h2o, ahakv, verdict):
    assert RecallDepth.reading(result_of(h2o, ahakv)).verdict == verdict


def test_a_policy_is_preferred_only_for_a_difference_beyond_its_error():
    same = RecallDepth.reading(result_of(policy(0.0, 0.1, "1010"), policy(0.0, 0.1, "1100")))
    better = RecallDepth.reading(result_of(policy(0.0, 0.1, "0" * 20), policy(0.0, 0.1, "1" * 15 + "0" * 5)))
    assert "do not tell" in same.meaning
    assert "prefer ahakv" in better.meaning
    RecallDepth.draw(result_of(policy(0.0, 0.1), policy(0.0, 0.1)), Axes())
