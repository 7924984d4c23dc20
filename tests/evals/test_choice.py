"""Multiple choice: public formats, examples, and what is scored."""

import functools
import json

import model_folders
import pytest
import torch

from kvkeep import parse
from kvkeep.errors import InputError
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import choice
from kvkeep.evals.tasks.choice import MultipleChoice
from kvkeep.models import load as loading
from kvkeep.models.load import quiet
from kvkeep.models.tokenization import Writer

COPA = {"premise": "The dog ran.", "choice1": "It saw a cat.", "choice2": "It slept.", "question": "cause", "label": 0}
BOOK = {
    "question": {"stem": "A fox is", "choices": [{"text": "red", "label": "A"}, {"text": "a stone", "label": "B"}]},
    "answerKey": "B",
}
ROWS = {
    "copa": (COPA, ("The dog ran because",) * 2, (" it saw a cat.", " it slept."), 0),
    "openbookqa": (BOOK, ("A fox is",) * 2, (" red", " a stone"), 1),
    "arc_easy": (BOOK, ("Question: A fox is\nAnswer:",) * 2, (" red", " a stone"), 1),
    "piqa": (
        {"goal": "Run", "sol1": "walk", "sol2": "jump", "label": 1},
        ("Question: Run\nAnswer:",) * 2,
        (" walk", " jump"),
        1,
    ),
    "winogrande": (
        {"sentence": "The fox saw _ there.", "option1": "a dog", "option2": "cats", "answer": "2"},
        ("The fox saw a dog", "The fox saw cats"),
        (" there.",) * 2,
        1,
    ),
    "mathqa": (
        {"Problem": "1 + 1 ?", "options": "a ) 2 , b ) 1 , 000 , c ) none of these", "correct": "b"},
        ("Question: 1 + 1 ?\nAnswer:",) * 3,
        (" 2", " 1 , 000", " none of these"),
        1,
    ),
    "rte": (
        {"premise": "A fox ran.", "hypothesis": "It slept.", "label": "not_entailment"},
        ("A fox ran.\nQuestion: It slept. True or False?\nAnswer:",) * 2,
        (" True", " False"),
        1,
    ),
    "hellaswag": (
        {
            "activity_label": "Run",
            "ctx_a": "A fox [x]ran.",
            "ctx_b": "it",
            "endings": ["won.", "[y] sat."],
            "label": "1",
        },
        ("Run: A fox ran. It",) * 2,
        (" won.", "  sat."),  # lm-eval leaves the space after the mark
        1,
    ),
}
ADAPTED = {
    "mathqa": {"instruction": "1 + 1 ? The options: A ) 2 , B ) 1 , 000 , C ) none of these", "answer": "B"},
    "piqa": {
        "instruction": "Please choose the correct solution to the question: Run\n\n"
        "Solution1: walk \n\nSolution2: jump \n\nAnswer format: solution1/solution2",
        "answer": "solution2",
    },
    "winogrande": {
        "instruction": "Please choose the correct answer to fill in the blank to complete the given "
        "sentence: The fox saw _ there.\n\nOption1: a dog Option2: cats Answer format: option1/option2",
        "answer": "option2",
    },
}


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread(), quiet():
        yield


@functools.cache
def writer():
    checkpoint = loading.find(model_folders.folder())
    return Writer(checkpoint, loading.read_weights(checkpoint))


def test_the_formats_of_the_authors(tmp_path):
    assert ROWS.keys() == set(choice.NAMES)
    for name, (row, contexts, said, right) in ROWS.items():
        (folder := tmp_path / name).mkdir()
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        assert choice.questions(name, str(folder)) == [choice.Choice(contexts, said, right)]
        assert choice.known_in(str(folder)) == [name]


def test_the_format_of_llm_adapters(tmp_path):
    for name, row in ADAPTED.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([row]))
        assert choice.questions(name, str(tmp_path)) == [choice.Choice(*ROWS[name][1:])]


def test_a_question_of_llm_adapters_may_have_a_colon(tmp_path):
    row = {**ADAPTED["piqa"], "instruction": ADAPTED["piqa"]["instruction"].replace("Run", "To win: run")}
    (tmp_path / "piqa.json").write_text(json.dumps([row]))
    (found,) = choice.questions("piqa", str(tmp_path))
    assert set(found.contexts) == {"Question: To win: run\nAnswer:"}


def test_mathqas_options_in_every_form(tmp_path):
    for options in (
        "['a ) 2', 'b ) 1 , 000', 'c ) 5 cm']",
        "a)2,b)1 , 000,c)5 cm",
        "a ) a ) 2 , b ) b ) 1 , 000 , c ) c ) 5 cm",
    ):
        row = {"Problem": "1 + 1 ?", "options": options, "correct": "b"}
        (tmp_path / "mathqa.jsonl").write_text(json.dumps(row) + "\n")
        (found,) = choice.questions("mathqa", str(tmp_path))
        assert found.choices == (" 2", " 1 , 000", " 5 cm")


WRONG = [
    ("copa", {**COPA, "label": 2}, "names no choice"),
    ("copa", {**COPA, "label": True}, "names no choice"),
    ("copa", {**COPA, "question": "x"}, ""),
    ("copa", {**COPA, "choice1": ""}, ""),
    ("copa", {}, "question"),
    ("winogrande", {**ROWS["winogrande"][0], "sentence": "The fox saw."}, "has no blank"),
    ("mathqa", {"Problem": "1 + 1 ?", "options": "a ) , b ) 2", "correct": "b"}, "an option is empty"),
    ("hellaswag", {**ROWS["hellaswag"][0], "endings": "won."}, "'endings' is 'won.', no list"),
]


def test_entries_of_another_format_are_named(tmp_path):
    for name, row, said in WRONG:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[name][0]) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(InputError, match=f"Line 2 .*{said}"):
            choice.questions(name, str(tmp_path))


def test_entries_of_llm_adapters_without_choices_or_with_another_answer_are_named(tmp_path):
    for name, change in (
        ("piqa", {"answer": "solution3"}),
        ("piqa", {"answer": "solution0"}),
        ("winogrande", {"instruction": "Please choose: Run"}),
        ("winogrande", {"instruction": "Run"}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps([ADAPTED[name], {**ADAPTED[name], **change}]))
        with pytest.raises(InputError, match=r"Entry 2 .*no question of"):
            choice.questions(name, str(tmp_path))


def load(tmp_path, n=8, **options):
    rows = [{**COPA, "premise": f"The dog saw {i} birds.", "label": i % 2} for i in range(n)]
    (tmp_path / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MultipleChoice.load(writer().checkpoint, Options(**{"data": str(tmp_path), "shots": 2, **options}))


def text(ids):
    return writer().checkpoint.tokenizer.decode(list(ids))


@pytest.mark.parametrize("ask", ["inside", "later"])
def test_prompts_have_examples_of_other_questions(ask, tmp_path):
    task = load(tmp_path, ask=ask)
    ((name, asked),) = task.asked.items()
    assert name == "copa,shots=2" + (",ask=later" if ask == "later" else "")
    for i, one in enumerate(asked):
        for pair in one.pairs:
            said = text(pair.context)
            assert said.count("\n\n") == 2
            assert said.endswith(f"The dog saw {i} birds because")
            assert said.count(f"saw {i} birds") == 1
            if ask == "later":
                assert text(pair.context[: pair.first]).count("birds") == 2
                assert pair.length == pair.first
            else:
                assert pair.first == len(pair.context) - 1 == pair.length - 1
        assert [text(pair.continuation) for pair in one.pairs] == [" it saw a cat.", " it slept."]


def test_the_likeliest_choice_counts(tmp_path):
    task = load(tmp_path)
    ((name, asked),) = task.asked.items()
    outcome = task.run(writer(), name, parse("full"), [1000] * 16)
    rights, normed, sizes = [], [], (len("it saw a cat."), len("it slept."))  # as in lm-eval, without the blank before
    for one in asked:
        values = []
        for pair in one.pairs:
            ids = torch.tensor([pair.context + pair.continuation])
            with torch.no_grad():
                logp = writer().model(ids).logits[0, :-1].float().log_softmax(-1)
            n = len(pair.continuation)
            values.append(logp[-n:].gather(-1, ids[0, -n:, None]).sum().item())
        rights.append(float(values.index(max(values)) == one.right))
        shares = [value / size for value, size in zip(values, sizes, strict=True)]
        normed.append(shares.index(max(shares)) == one.right)
        assert one.sizes == sizes
    assert outcome.score["grades"] == rights
    assert outcome.score["score"] == sum(rights) / 8
    assert outcome.score["normed"] == sum(normed) / 8
    assert outcome.score["guess"] == 0.5
    assert outcome.memory.allocated_bytes > 0
    bounded = task.run(writer(), name, parse("h2o"), [5] * 16)
    assert bounded.memory.allocated_bytes < outcome.memory.allocated_bytes


def test_a_choice_that_is_only_a_mark_has_no_length_to_divide_by(tmp_path):
    row = {"activity_label": "Run", "ctx_a": "A fox", "ctx_b": "", "endings": ["[header]", "won."], "label": 1}
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(row) + "\n")
    task = MultipleChoice.load(writer().checkpoint, Options(data=str(tmp_path), shots=0))
    ((name, _),) = task.asked.items()
    assert task.run(writer(), name, parse("full"), [1000] * 2).score["n"] == 1


def test_what_cannot_be_asked_is_refused(tmp_path):
    with pytest.raises(InputError, match="shots=0"):
        load(tmp_path, shots=0, ask="later")
    with pytest.raises(InputError, match="too few"):
        load(tmp_path, n=2)
    with pytest.raises(InputError, match=r"piqa\.jsonl or piqa\.json"):
        load(tmp_path, parts=("piqa",))
    with pytest.raises(InputError, match="shots"):
        Options(shots=-1)
