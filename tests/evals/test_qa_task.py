"""Tasks that ask and grade: lengths within the tokenizer's count, answers, seeds, files, and runs."""

import dataclasses
import functools
import json
import re

import model_folders
import pytest
import torch

from kvkeep import parse
from kvkeep.errors import InputError
from kvkeep.evals import synthetic
from kvkeep.evals.forward import Drive
from kvkeep.evals.qa_task import Item, prompt_of, read, texts
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import TASKS, longbench, ruler
from kvkeep.evals.tasks.hidden import KeyValue, Needle, Passkey
from kvkeep.evals.tasks.longbench import LongBench
from kvkeep.evals.tasks.ruler import Ruler
from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Article {a} part {p}. The {a}{p} fox lives in a den.",
                    "qas": [
                        {
                            "question": f"Who lives in den {a}{p}?",
                            "answers": [{"text": f"{a}{p} fox"}, {"text": "fox"}],
                            "is_impossible": a == 1,
                        }
                    ],
                }
                for p in range(3)
            ]
        }
        for a in range(3)
    ]
}
HOTPOT = [
    {"question": f"Q{i}?", "answer": f"A{i}", "context": [[f"T{i}", ["one. ", f"A{i}."]], [f"U{i}", ["two."]]]}
    for i in range(5)
]


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread(), quiet():
        yield


@functools.cache
def checkpoint(own=False):
    with quiet():
        return loading.find(embedded() if own else model_folders.folder())


@functools.cache
def writer():
    return Writer(checkpoint(), loading.read_weights(checkpoint()))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(HOTPOT))
    return str(tmp_path)


def load(task, *, own=True, **options):
    return task.load(checkpoint(own), Options(**{"limit": 3, "contexts": (1024,), **options}))


# RULER


@pytest.mark.long
@pytest.mark.parametrize("part", ruler.PARTS)
@pytest.mark.parametrize("ask", ["inside", "later"])
def test_rulers_prompts_fit_and_hold_their_answers(part, ask, data):
    contexts = (700, 1024, 2048) if part != "cwe" else (1024, 2048)
    task = load(Ruler, contexts=contexts, parts=(part,), ask=ask, data=data)
    assert len(task.made) == len(contexts)
    for (name, case), length in zip(task.made.items(), contexts, strict=True):
        assert name.startswith(f"{part},length={length}")
        for prompt in case.prompts:
            assert len(prompt.ids) + case.new <= length
            if not part.startswith("qa"):
                assert len(prompt.ids) + case.new > length - 90
            assert 0 < prompt.first < len(prompt.ids)
            item = prompt.item
            assert all(answer in item.text for answer in item.answers)
            assert not any(answer in item.question for answer in item.answers)
            assert case.grade(item, " ".join(item.answers)) == 1.0
            assert case.grade(item, "nothing of it") == 0.0
            if ask == "later":
                shown = checkpoint(True).tokenizer.decode(prompt.ids[: prompt.first])
                rest = checkpoint(True).tokenizer.decode(prompt.ids[prompt.first :])
                assert shown.strip().endswith(item.text.strip()[-20:])
                assert item.question.strip() in rest
            else:
                assert prompt.first == len(prompt.ids) - 1


RULES = {
    **dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3"), (128, 1)),
    **dict.fromkeys(("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"), (128, 1)),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery"), (128, 4)),
    **dict.fromkeys(("qa_1", "qa_2"), (32, None)),
    "vt": (30, 5),
    "cwe": (120, 10),
    "fwe": (50, 3),
}
"""The published length of a reply in tokens, and the number of strings that are asked for."""


def test_rulers_parts_are_the_thirteen_published_ones():
    assert set(RULES) == set(ruler.PARTS)
    assert len(RULES) == 13


@pytest.mark.parametrize("part", ruler.PARTS)
def test_ruler_by_its_published_rules_with_another_tokenizer(part, data):
    """Lengths are counted anew, and graded are strings: the share of all, or any one for questions."""
    length = 3000  # this tokenizer has many tokens for a word
    case = load(Ruler, own=False, contexts=(length,), parts=(part,), data=data).made[f"{part},length={length}"]
    new, answers = RULES[part]
    assert case.new == new
    encode = checkpoint().tokenizer.encode
    for prompt in case.prompts:
        item = prompt.item
        assert len(encode(f"{item.text}{item.question}{item.lead}")) == len(prompt.ids) <= length - new
        assert answers is None or len(item.answers) == answers
        assert all(answer in item.text for answer in item.answers)
    asked = dataclasses.replace(item, answers=("Red Fox", "hen", "owl", "bee"))
    share = 1.0 if answers is None else 0.5
    assert case.grade(asked, "a RED FOX, and the Owl.") == share
    assert case.grade(asked, "fox red") == 0.0


def test_needles_have_the_published_kinds_of_values():
    number, some_uuid = r"\d{7}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
    word = r"[a-z]+-[a-z]+"
    for name, case in load(Ruler, parts=("niah_*",), limit=1).made.items():
        part = name.partition(",")[0]
        said = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", case.prompts[0].item.text)
        kinds = {"niah_single_3": (word, some_uuid), "niah_multikey_3": (some_uuid, some_uuid)}
        for key, value in said:
            wanted = kinds.get(part, (word, number))
            assert re.fullmatch(wanted[0], key, re.IGNORECASE), name
            assert re.fullmatch(wanted[1], value), name
        noise = "The grass is green. The sky is blue." in case.prompts[0].item.text
        assert noise is (part == "niah_single_1")


@pytest.mark.slow
def test_common_words_come_thirty_times_in_long_contexts():
    (prompt, *_) = load(Ruler, parts=("cwe",), contexts=(8192,), limit=1).made["cwe,length=8192"].prompts
    listed = re.findall(r"\d+\. (\S+)", prompt.item.text.rsplit("Memorize the ones", 1)[1])
    counts = {word: listed.count(word) for word in listed}
    assert {word for word, n in counts.items() if n == 30} == set(prompt.item.answers)
    assert {n for word, n in counts.items() if word not in prompt.item.answers} == {3}


def test_coded_words_fall_off_with_the_square_of_their_rank():
    """With n words in all the word of rank k comes ⌊n / (ζ(2) k²)⌋ times; rank 1 is noise."""
    for prompt in load(Ruler, parts=("fwe",)).made["fwe,length=1024"].prompts:
        listed = prompt.item.text.split("coded words. ")[1].split()
        noise, first, second, third = (listed.count(word) for word in ("...", *prompt.item.answers))
        n = noise * 1.6449340668482264  # within one word of rank 1
        assert [first, second, third] == pytest.approx([n / 1.6449 / rank**2 for rank in (2, 3, 4)], abs=1)


@pytest.mark.slow
def test_rulers_texts_are_the_same_for_a_seed_and_others_for_another():
    def made(seed):
        task = load(Ruler, seed=seed, parts=("niah_*", "vt", "cwe", "fwe"), limit=2)
        return {name: [prompt.item.text for prompt in case.prompts] for name, case in task.made.items()}

    first, again, other = made(0), made(0), made(1)
    assert first == again
    for name, found in first.items():
        assert len({*found, *other[name]}) == 4


@pytest.mark.slow
def test_needles_follow_the_published_rules():
    task = load(Ruler, parts=("niah_*",), limit=2)
    for name, case in task.made.items():
        for prompt in case.prompts:
            said = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", prompt.item.text)
            keys = {key for _, key, _ in said}
            queries = {key for key in keys if key in prompt.item.question}
            assert {value for _, key, value in said if key in queries} == set(prompt.item.answers)
            wanted = {"multikey_1": 4, "multiquery": 4, "multivalue": 1}.get(name.split(",")[0].removeprefix("niah_"))
            assert len(keys) == (wanted or (len(said) if "multikey" in name else 1))
            assert len(prompt.item.answers) == (4 if "multivalue" in name or "multiquery" in name else 1)
            single = len(prompt.item.answers) == 1
            assert ("What is the special magic" in prompt.item.question) is single
            assert prompt.item.text.startswith("A special" if single else "Some special")


def test_a_chain_has_five_variables_in_order():
    for prompt in load(Ruler, parts=("vt",)).made["vt,length=1024"].prompts:
        text = prompt.item.text.split("Memorize and track")[-1]
        (number,) = re.findall(r"assigned the value (\d+)", prompt.item.question)
        places = [text.index(f"VAR {prompt.item.answers[0]} = {number}")]
        for before, name in zip(prompt.item.answers, prompt.item.answers[1:], strict=False):
            places.append(text.index(f"VAR {name} = VAR {before}"))
        assert places == sorted(places)
        assert len(places) == 5


def test_words_that_are_asked_for_are_the_most_frequent():
    task = load(Ruler, parts=("cwe", "fwe"))
    for prompt in task.made["cwe,length=1024"].prompts:
        listed = re.findall(r"\d+\. (\S+)", prompt.item.text.rsplit("Memorize the ones", 1)[1])
        counts = {word: listed.count(word) for word in listed}
        assert {word for word, n in counts.items() if n == 6} == set(prompt.item.answers)
        assert {n for word, n in counts.items() if word not in prompt.item.answers} == {1}
    for prompt in task.made["fwe,length=1024"].prompts:
        coded = re.findall(r"\b[a-z]{6}\b", prompt.item.text.split("coded words. ")[1])
        ranked = sorted(set(coded), key=coded.count, reverse=True)
        assert set(ranked[:3]) == set(prompt.item.answers)
        assert coded.count(ranked[2]) > coded.count(ranked[3])


@pytest.mark.slow
def test_qa_has_the_needed_documents_and_skips_questions_without_answers(data):
    task = load(Ruler, parts=("qa_*",), data=data, limit=4)
    for prompt in task.made["qa_1,length=1024"].prompts:
        assert f"The {prompt.item.answers[0]} lives in a den." in prompt.item.text
        assert not prompt.item.answers[0].startswith("1")
    for prompt in task.made["qa_2,length=1024"].prompts:
        assert prompt.item.answers[0] in prompt.item.text
    assert len(prompt.ids) + 32 > 900  # documents come again where there are too few


def test_a_single_document_ends_the_search_for_a_longer_text(tmp_path):
    paragraph = {"context": "A fox.", "qas": [{"question": "Who?", "answers": [{"text": "fox"}]}]}
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    (prompt,) = load(Ruler, parts=("qa_1",), data=str(tmp_path), limit=1).made["qa_1,length=1024"].prompts
    assert prompt.item.text.count("A fox.") == 1


@pytest.mark.slow
def test_questions_about_documents_are_left_out_without_their_file(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    for folder, lacking in ((None, "qa_1 and qa_2"), (str(tmp_path), "qa_2")):
        task = load(Ruler, data=folder, limit=1)
        assert ("qa_1,length=1024" in task.made) == (folder is not None)
        assert any(f"without {lacking}, which need" in note and "hotpotqa.json" in note for note in task.notes)


def test_an_essay_is_the_users_text():
    text = "A stone lies there. " * 3 + "What a stone!"
    (prompt, *_) = load(Ruler, parts=("niah_single_2",), text=text).made["niah_single_2,length=1024"].prompts
    assert "A stone lies there. What a stone! A stone lies there." in prompt.item.text


def test_parts_that_do_not_fit_are_left_out_unless_they_were_asked_for():
    task = load(Ruler, contexts=(300,), limit=1)
    assert "cwe,length=300" not in task.made
    assert any("cwe" in note and "left out" in note for note in task.notes)
    with pytest.raises(InputError, match="cwe"):
        load(Ruler, contexts=(300,), parts=("cwe",))
    with pytest.raises(InputError, match="longer `contexts`"):
        load(Ruler, contexts=(20,))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ("[]", "no entries"),
        ('[["x"]]', "Entry 1 of .* is no JSON object"),
        ('[{"title": "x", "context": "y", "question": "z"}]', "is no part of SQuAD"),
        ('{"data": []}', "no question"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "is no part of SQuAD"),
        ("\x00", "no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_files_of_another_format_are_refused(content, said, tmp_path):
    (tmp_path / "squad.json").write_text(content)
    with pytest.raises(InputError, match=said):
        load(Ruler, parts=("qa_1",), data=str(tmp_path))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"squad\.json"):
        load(Ruler, parts=("qa_1",))
    with pytest.raises(InputError, match=r"hotpotqa\.json"):
        load(Ruler, parts=("qa_2",), data=str(tmp_path))
    with pytest.raises(InputError, match="no folder"):
        load(LongBench, parts=("lcc",), data=str(tmp_path / "none"))
    with pytest.raises(InputError, match="Did you mean 'niah_single_1'"):
        load(Ruler, parts=("niah_single1",))


def test_the_depth_of_an_answer_is_that_of_its_needle_among_others():
    haystack = synthetic.Haystack(None, 0)
    items = [
        synthetic.needle_items(task, haystack, f"{seed}")(200) for task in synthetic.TASKS.values() for seed in range(8)
    ]
    asked = [item for item in items if item.depth is not None]
    assert len(asked) == 6 * 8
    for item in asked:
        assert item.text.index(f": {item.answers[0]}.") / len(item.text) == pytest.approx(item.depth, abs=0.05)


# needle, passkey, key-value


@pytest.mark.slow
@pytest.mark.parametrize("task", [Needle, Passkey, KeyValue])
def test_what_is_hidden_stands_at_its_depth(task):
    made = load(task, contexts=(600, 1024), limit=5)
    assert list(made.made) == ["length=600", "length=1024"]
    for name, case in made.made.items():
        for i, prompt in enumerate(case.prompts):
            item = prompt.item
            assert item.depth == pytest.approx((i + 0.5) / 5)
            assert item.text.count(item.answers[0]) == (2 if task is Passkey else 1)
            assert item.text.index(item.answers[0]) / len(item.text) == pytest.approx(item.depth, abs=0.2)
            assert len(prompt.ids) + case.new <= int(name.split("=")[1])


# LongBench


ROW = {"context": "The sky is blue. ", "input": "Which colour has the sky?", "answers": ["blue", "azure"]}


def bench(folder, name="hotpotqa", rows=(ROW,) * 3):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_longbench_has_its_sixteen_tasks_and_their_metrics():
    assert len(longbench.described()) == 16
    for task in longbench.described().values():
        assert task["prompt"].count("{context}") == 1
        assert task["metric"] == "classification" or task["metric"] in longbench._METRICS
    item = Item(text="", question="", answers=("Place",), classes=("Place", "Person"))
    trec = longbench.described()["trec"]
    assert longbench.grade(trec, item, "\nPlace\nPerson") == 1.0
    assert longbench.grade(trec, item, "Person\nPlace") == 0.0


def test_longbench_prompts(tmp_path):
    task = load(LongBench, data=bench(tmp_path), limit=None)
    (prompt, *_) = task.made["hotpotqa"].prompts
    assert list(task.made) == ["hotpotqa"]
    assert len(task.made["hotpotqa"].prompts) == 3
    said = checkpoint(True).tokenizer.decode(prompt.ids)
    assert "passages.\nThe sky is blue. \n\nAnswer" in said
    assert "Question: Which colour has the sky?\nAnswer:" in said
    assert task.made["hotpotqa"].grade(prompt.item, "It is azure blue") == pytest.approx(0.4)


@pytest.mark.parametrize("ask", ["inside", "later"])
def test_a_text_that_is_too_long_loses_its_middle(tmp_path, ask):
    long = " ".join(f"w{i}" for i in range(3000))
    task = load(LongBench, data=bench(tmp_path, rows=[{**ROW, "context": long}, ROW]), ask=ask, limit=2)
    first, second = next(iter(task.made.values())).prompts
    room = checkpoint(True).trained_length - 32
    assert room - 40 < len(first.ids) <= room
    assert "w0 w1" in first.item.text
    assert "w2998 w2999" in first.item.text
    assert second.item.text.endswith("The sky is blue. ")
    assert any("1 of 2 texts lose their middle" in note for note in task.notes)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"context": "x", "input": "y"}', "Line 2 .* has no 'answers'"),
        ('{"context": 1, "input": "y", "answers": []}', "Line 2 .* has another 'context'"),
        ("[]", "Line 2 .* is no JSON object"),
        ("{", "Line 2 .* is no JSON"),
    ],
)
def test_lines_of_another_format_are_named(tmp_path, line, said):
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(InputError, match=said):
        load(LongBench, data=str(tmp_path))


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "lcc.jsonl").write_text("\n")
    with pytest.raises(InputError, match="has no lines"):
        load(LongBench, data=str(tmp_path))
    with pytest.raises(InputError, match=r"narrativeqa\.jsonl"):
        load(LongBench)


# running


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["inside", "later"])
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_replies_are_those_of_each_prompt_alone(policy, ask, monkeypatch):
    task = load(Passkey, own=False, contexts=(500,), limit=3, ask=ask)
    (name, lengths), *more = task.cases().items()
    assert not more
    graded = []
    case = dataclasses.replace(task.made[name], grade=lambda item, reply: graded.append(reply) or 0.5)
    task.made[name] = case
    budgets = [5000 if policy == "full" else n // 5 for n in lengths]
    outcome = task.run(writer(), name, parse(policy), budgets)
    assert outcome.score["score"] == 0.5
    assert sum(n for _, n in outcome.score["by_depth"]) == outcome.score["n"] == 3
    assert sum(outcome.score["kept"]) == pytest.approx(1, abs=1e-3)
    for prompt, budget, reply in zip(case.prompts, budgets, graded, strict=True):
        drive = Drive(writer(), parse(policy), [budget], first=prompt.document)
        read(drive, [prompt])
        assert texts(writer(), drive, [prompt], case.new) == [reply]


def test_a_prompt_asked_later_has_the_tokens_of_one_asked_inside():
    item = Item(text="The fox jumps over the dog.", question="\n\nWho?", lead=" It is", answers=("fox",))
    inside, later = (prompt_of(checkpoint(), item, ask, 0) for ask in ("inside", "later"))
    assert torch.equal(inside.ids, later.ids)
    assert later.first < inside.first
    nothing = prompt_of(checkpoint(), dataclasses.replace(item, text=""), "later", 0)
    assert 0 < nothing.first < len(nothing.ids)


def test_every_task_with_questions_shows_its_protocol():
    from kvkeep.evals.results import ASKED, MEASURES

    asked = {name for name, task in TASKS.items() if hasattr(task, "make")} | {"recall", "choice"}
    assert asked == set(ASKED)
    assert {measure.task for measure in MEASURES} == set(TASKS)


def test_words_are_different_and_many():
    assert len(set(synthetic.words(synthetic.random.Random(0), 20_000))) == 20_000
    assert synthetic.planted(["a.", "b."], ["X.", "Y."], [1.0, 0.0]) == "Y. a. b. X."


def test_a_haystack_of_odd_texts():
    assert len(synthetic.Haystack("  \n ", 0).first(5)) == 5
    assert synthetic.Haystack("one two", 0).first(3) == ["one two"] * 3
    assert max(len(part.split()) for part in synthetic.sentences("word " * 1000)) == 60


def test_other_files_are_another_run(tmp_path):
    first = load(LongBench, data=bench(tmp_path)).settings()
    assert load(LongBench, data=str(tmp_path), parts=("hotpotqa",)).settings() == first
    other = load(LongBench, data=bench(tmp_path, rows=[{**ROW, "input": "And now?"}])).settings()
    assert other["data"] != first["data"]


def test_classes_are_needed_where_they_are_graded(tmp_path):
    with pytest.raises(InputError, match=r"Line 1 of .* has no 'all_classes'"):
        load(LongBench, data=bench(tmp_path, "trec"))


class Wanting(Drive):
    """A model that always wants one token."""

    def __init__(self, token, size):
        self.token, self.size, self.steps = token, size, 0

    def feed(self, ids, real=None, *, last_only=False):
        self.steps += 1
        logits = torch.zeros(len(ids), 1, self.size)
        logits[..., self.token] = 1.0
        return logits


@pytest.mark.parametrize("chat", [False, True])
def test_the_end_of_a_turn_in_the_chat_template_ends_a_reply(chat, tmp_path):
    folder = model_folders.copy(tmp_path / "m")
    for file in ("config.json", "generation_config.json"):
        model_folders.edit_json(folder / file, eos_token_id=None)
    model_folders.edit_json(folder / "tokenizer_config.json", eos_token=None)
    found = loading.find(str(folder))
    found.tokenizer.chat_template = model_folders.TEMPLATE
    writer = Writer(found, loading.read_weights(found))
    item = Item(text="the cat.", question=" Who?", lead="", answers=("cat",), chat=chat)
    wanting = Wanting(found.tokenizer.convert_tokens_to_ids("</s>"), found.config.vocab_size)
    texts(writer, wanting, [prompt_of(found, item, "inside", 0)], 5)
    assert wanting.steps == (1 if chat else 5)
