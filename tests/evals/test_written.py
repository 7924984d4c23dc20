"""Tasks whose replies are texts: summaries, diversity, conversations, and long texts beside the full cache's."""

import functools
import importlib.util
import json
import math
import re

import model_folders
import pytest

from kvkeep import parse
from kvkeep.errors import InputError, pip_install
from kvkeep.evals import curves, grading
from kvkeep.evals.records import fault
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import conversation, long_generation, summary
from kvkeep.evals.tasks.conversation import Conversation
from kvkeep.evals.tasks.diversity import Diversity
from kvkeep.evals.tasks.long_generation import LongGeneration
from kvkeep.evals.tasks.summary import Summary
from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tokenization import Writer

ARTICLE = " ".join(f"The fox number {i} ran home." for i in range(12))


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread(), quiet():
        yield


@functools.cache
def writer():
    checkpoint = loading.find(model_folders.folder())
    return Writer(checkpoint, loading.read_weights(checkpoint))


def load(task, **options):
    return task.load(writer().checkpoint, Options(**{"limit": 3, "contexts": (700,), "facts": 4, **options}))


def run(task, policy, budget):
    (case,) = task.cases()
    return task.run(writer(), case, parse(policy), [budget] * len(task.cases()[case]))


@pytest.mark.parametrize("kind", [Diversity, LongGeneration, Conversation])
@pytest.mark.parametrize("ask", ["inside", "later"])
def test_they_run_and_have_a_grade_for_each_text(kind, ask):
    task = load(kind, ask=ask)
    task.prepare(writer())
    outcome = run(task, "local", 40)
    assert len(outcome.score["grades"]) == 3
    assert all(0 <= grade <= 1 for grade in outcome.score["grades"])
    assert outcome.score["score"] == pytest.approx(sum(outcome.score["grades"]) / 3, abs=1e-4)
    (case,) = task.cases()
    assert case.endswith(",ask=later") == (ask == "later")
    assert json.dumps(outcome.score, allow_nan=False)
    prompts = task.made[case].prompts
    assert len({prompt.item.text for prompt in prompts}) == 3
    assert max(len(prompt.ids) for prompt in prompts) + task.made[case].new <= 700


@pytest.mark.parametrize("kind", [Diversity, LongGeneration])
def test_any_seed_goes_on_in_the_users_text_which_begins_again_when_it_is_over(kind):
    """A date is a seed, too: nothing may grow with it."""
    text = " ".join(f"Fox {i} ran." for i in range(50))
    (made,) = load(kind, text=text, seed=20261130, contexts=(400,)).made.values()
    for number, prompt in enumerate(made.prompts):
        first = 16 * (3 * 20261130 + number) % 50
        said = re.findall(r"\d+", prompt.item.text)
        assert said == [str((first + i) % 50) for i in range(len(said))]


@pytest.mark.slow
def test_full_writes_what_the_full_cache_writes_and_a_small_budget_does_not():
    task = load(LongGeneration)
    task.prepare(writer())
    same, other = run(task, "full", 700).score, run(task, "local", 8).score
    assert same["score"] == same["equal"] == same["before_difference"] == same["length_ratio"] == 1
    assert other["score"] < 1
    assert other["before_difference"] < 1


def test_words_before_the_first_difference():
    assert long_generation._common(["a", "b", "c"], ["a", "b", "d"]) == 2
    assert long_generation._common(["a", "b"], ["a", "b", "d"]) == 2
    assert long_generation._common([], ["a"]) == 0


@pytest.mark.slow
def test_one_text_has_no_self_bleu():
    score = run(load(Diversity, limit=1), "full", 700).score
    assert score["self_bleu"] is None
    row = {"task": "diversity", "case": "c", "policy": "full", "budget": "100%", "seed": 0, "budget_tokens": 1}
    memory = {"allocated_bytes": 1, "full_bytes": 1}
    assert fault({**row, "text_tokens": 1, "memory": memory, "score": score}) is None
    assert "'score.grades' is not" in (
        fault({**row, "text_tokens": 1, "memory": memory, "score": {**score, "grades": ["x"]}}) or ""
    )
    assert "'score.by_depth' is not" in (
        fault({**row, "text_tokens": 1, "memory": memory, "score": {**score, "by_depth": [[1, 1]]}}) or ""
    )


def test_the_memory_of_a_conversation_is_cut_after_every_turn():
    task = load(Conversation, facts=5)
    ((case, made),) = task.made.items()
    assert case == "length=700,turns=5"
    for prompt in made.prompts:
        edges = conversation._edges(writer().checkpoint, prompt)
        assert edges == sorted(set(edges))
        assert len(edges) == 5
        said = writer().checkpoint.tokenizer.decode(prompt.ids[: edges[0]])
        assert said.count("The code of") == 1
        assert prompt.item.answers[0] in prompt.item.text
    assert sorted({prompt.item.depth for prompt in made.prompts}) == pytest.approx([1 / 6, 0.5, 5 / 6])
    asked = [
        prompt.item.text.split("\nUser: ").index(part)
        for prompt in made.prompts
        for part in prompt.item.text.split("\nUser: ")
        if prompt.item.answers[0] in part
    ]
    assert asked == [1, 3, 5]


def test_a_context_without_room_for_its_turns_is_refused():
    with pytest.raises(InputError, match="conversation with a context of 60, 4 turns"):
        load(Conversation, contexts=(60,))


def write(folder, *rows, name="xsum.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def scored(monkeypatch):
    """ROUGE without its package: the share of the answer's words in the reply."""

    def scores(replies, answers):
        found = [len({*a.split()} & {*r.split()}) / len({*a.split()}) for r, a in zip(replies, answers, strict=True)]
        return dict.fromkeys(grading.KINDS, found)

    monkeypatch.setattr(grading, "check", lambda: None)
    monkeypatch.setattr(grading, "scores", scores)


@pytest.mark.parametrize(
    "row",
    [
        {"document": ARTICLE, "summary": "A fox."},
        {"article": ARTICLE, "highlights": "A fox."},
        {"article": f"###\nArticle: {ARTICLE}\n\nSummarize the above article in 1 sentence.\n", "summary_gt": "A fox."},
    ],
)
def test_articles_in_every_format(row, scored, tmp_path, monkeypatch):
    monkeypatch.setitem(summary._NEW, "xsum", 4)
    monkeypatch.setattr(type(writer().checkpoint), "trained_length", 1000)
    task = load(Summary, data=write(tmp_path, row, row), parts=("xsum",))
    ((_, made),) = task.made.items()
    assert len(made.prompts) == 2
    assert made.prompts[0].item.text == f"Article: {ARTICLE}"
    assert made.prompts[0].item.answers == ("A fox.",)
    score = run(task, "local", 40).score
    assert {"score", "rouge1", "rouge2", "words"} <= score.keys()


def test_a_long_article_loses_its_end_and_a_note_says_so(scored, tmp_path, monkeypatch):
    monkeypatch.setitem(summary._NEW, "xsum", 4)
    monkeypatch.setattr(type(writer().checkpoint), "trained_length", 300)
    task = load(Summary, data=write(tmp_path, {"document": ARTICLE * 5, "summary": "A fox."}))
    ((_, made),) = task.made.items()
    assert len(made.prompts[0].ids) <= 296
    assert "1 of 1 articles lose their end" in task.notes[0]


def test_wrong_summaries_are_refused(scored, tmp_path):
    good = {"document": ARTICLE, "summary": "A fox."}
    for bad in ({"document": ARTICLE}, {"document": 5, "summary": "x"}, {"document": " ", "summary": "x"}):
        with pytest.raises(InputError, match=r"Line 2 of .*xsum\.jsonl has no article with its summary"):
            load(Summary, data=write(tmp_path, good, bad), parts=("xsum",))
    with pytest.raises(InputError, match=r"cnn_dailymail\.jsonl .*: the test set of cnn_dailymail"):
        load(Summary, data=str(tmp_path), parts=("cnn_dailymail",))


def test_without_rouge_score_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(grading, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape(pip_install("summaries"))):
        load(Summary)


@pytest.mark.skipif(importlib.util.find_spec("rouge_score") is None, reason="rouge-score is not installed")
def test_rouge_with_stemming():
    found = grading.scores(["The foxes ran home."], ["A fox ran home"])
    assert found["rouge1"] == [pytest.approx(2 * 3 / 8)]
    assert found["rouge2"] == [pytest.approx(2 * 2 / 6)]


def hidden(policy, length, found, **more):
    score = {"score": found, "by_depth": [[found * (tenth % 2), 1] if tenth < 4 else [0.0, 0] for tenth in range(10)]}
    place = {"task": "needle", "case": f"length={length}", "policy": policy, "budget": "20%", "seed": 0}
    return {**place, "score": score, **more}


@pytest.mark.slow
def test_the_heat_map_has_depths_down_and_contexts_across(tmp_path):
    rows = [
        hidden("h2o", 1024, 1.0),
        hidden("h2o", 512, 1.0),
        hidden("h2o", 512, 0.0, seed=1),
        hidden("tova", 512, 1.0),
    ]
    maps = curves.heat(rows)
    assert [one.title for one in maps] == ["h2o at 20%\nneedle, inside", "tova at 20%\nneedle, inside"]
    assert maps[0].columns == ["512", "1024"]
    assert maps[0].values[1] == [50.0, 100.0]
    assert all(map(math.isnan, maps[0].values[9]))
    later = curves.heat([{**rows[0], "case": "length=512,ask=later"}])
    assert later[0].title == "h2o at 20%\nneedle, later"
    if importlib.util.find_spec("matplotlib"):
        assert curves.draw(tmp_path / "heat.png", maps).read_bytes().startswith(b"\x89PNG")
    assert curves.heat([{**rows[0], "score": {"score": 1.0}}]) == []
