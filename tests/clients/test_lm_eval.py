"""lm-eval's own harness with the model type ``kvkeep``, beside its model type ``hf``, on local task files."""

import json
import os
import random
import sys

import pytest

pytest.importorskip("lm_eval")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval
import model_folders
from lm_eval.tasks import TaskManager

from kvkeep.errors import InputError
from kvkeep.evals.lm_eval import command
from kvkeep.evals.tasks import choice
from kvkeep.models.tiny import embedded

FOLDERS = {"llama": lambda: str(model_folders.folder()), "embedded": embedded}
ANIMALS = ("fox", "dog", "cat", "bird", "cow", "horse")
CHOICE = """
task: kvkeep_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "The {{{{first}}}} jumps over the {{{{second}}}}.\\nQuestion: who jumps?\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1
"""
WRITING = """
task: kvkeep_writing
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: generate_until
doc_to_text: "The {{{{first}}}} jumps over the {{{{second}}}}.\\nQuestion: who jumps?\\nAnswer:"
doc_to_target: "{{{{first}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
metadata:
  version: 1
"""
ROLLING = """
task: kvkeep_rolling
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
metadata:
  version: 1
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    drawn = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(8):
            first, second, *others = drawn.sample(ANIMALS, 4)
            row = {
                "first": first,
                "second": second,
                "choices": [first, second, f"the {others[0]} and the {others[1]}"],
                "answer": number % 3,
                "text": " ".join(drawn.choices(ANIMALS, k=12)),
            }
            file.write(json.dumps(row) + "\n")
    for name, text in {"choice": CHOICE, "writing": WRITING, "rolling": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(text.format(path=folder / "data.jsonl"))
    return folder


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def evaluate(tasks, names, model="kvkeep", fewshot=0, family="llama", chat=False, **arguments):
    command.register()
    return lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": FOLDERS[family](), "device": "cpu", "dtype": "float32", **arguments},
        tasks=names,
        num_fewshot=fewshot,
        batch_size=4,
        apply_chat_template=chat,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )


def answers(found, task):
    return [sample["filtered_resps"] for sample in sorted(found["samples"][task], key=lambda one: one["doc_id"])]


@pytest.mark.parametrize("family", ["llama", "embedded"])
@pytest.mark.parametrize("fewshot", [0, 2])
def test_the_full_cache_scores_like_lm_evals_own_model(tasks, family, fewshot):
    ours, theirs = (
        evaluate(tasks, ["kvkeep_choice"], model, fewshot=fewshot, family=family, max_length=150, **more)
        for model, more in (("kvkeep", {"policy": "full"}), ("hf", {}))
    )
    mine, other = answers(ours, "kvkeep_choice"), answers(theirs, "kvkeep_choice")
    assert len(mine) == 8
    for own, hf in zip(mine, other, strict=True):
        for (score, greedy), (wanted, likeliest) in zip(own, hf, strict=True):
            assert float(score) == pytest.approx(float(wanted), abs=1e-4)
            assert greedy == likeliest
    assert ours["results"]["kvkeep_choice"]["acc,none"] == theirs["results"]["kvkeep_choice"]["acc,none"]


def test_rolling_windows_and_texts_are_those_of_lm_evals_own_model(tasks):
    names = ["kvkeep_rolling", "kvkeep_writing"]
    ours, theirs = (
        evaluate(tasks, names, model, **more)
        for model, more in (
            ("kvkeep", {"policy": "full", "max_length": 64}),
            ("hf", {"max_length": 64}),
        )
    )
    for own, hf in zip(answers(ours, names[0]), answers(theirs, names[0]), strict=True):
        assert float(own[0]) == pytest.approx(float(hf[0]), abs=1e-4)
    assert answers(ours, names[1]) == answers(theirs, names[1])


def test_eviction_changes_scores_and_the_protocol_is_part_of_the_result(tasks):
    results = {
        way: evaluate(
            tasks, ["kvkeep_choice", "kvkeep_writing"], policy="local", budget="30%", question=way, max_length=150
        )
        for way in ("inside", "later")
    }
    full = evaluate(tasks, ["kvkeep_choice"], policy="full", max_length=150)
    found = [answers(one, "kvkeep_choice") for one in (*results.values(), full)]
    assert found[0] != found[1] != found[2] != found[0]
    for way, one in results.items():
        assert one["config"]["protocol"] == f"question={way},examples=inside"
        assert one["config"]["kvkeep_policy"] == "local"
        assert one["config"]["kvkeep_budget"] == "30%"


def test_examples_that_are_cut_before_the_item(tasks):
    both = [
        evaluate(
            tasks,
            ["kvkeep_choice"],
            policy="local",
            budget="20%",
            examples=way,
            fewshot=2,
            max_length=300,
        )
        for way in ("inside", "later")
    ]
    assert answers(both[0], "kvkeep_choice") != answers(both[1], "kvkeep_choice")


def test_a_chat_template(tasks):
    ours, theirs = (
        evaluate(tasks, ["kvkeep_choice"], model, family="embedded", chat=True, max_length=200, **more)
        for model, more in (("kvkeep", {"policy": "full"}), ("hf", {}))
    )
    for own, hf in zip(answers(ours, "kvkeep_choice"), answers(theirs, "kvkeep_choice"), strict=True):
        assert [float(one[0]) for one in own] == pytest.approx([float(one[0]) for one in hf], abs=1e-4)


def test_zero_shot_prompts_without_a_text_before_their_mark_are_refused(tasks):
    with pytest.raises(InputError, match="has no text before"):
        evaluate(tasks, ["kvkeep_choice"], policy="local", budget="30%", examples="later", max_length=150)


def test_the_command_line(tasks, tmp_path, monkeypatch):
    arguments = f"pretrained={model_folders.folder()},policy=h2o:recent=2+sinks=1,budget=6,max_length=150"
    before = list(sys.argv)
    command.run(
        [
            *("--model", "kvkeep", "--model_args", arguments, "--tasks", "kvkeep_choice"),
            *("--include_path", str(tasks), "--output_path", str(tmp_path), "--limit", "3"),
        ]
    )
    assert sys.argv == before
    (written,) = tmp_path.rglob("results_*.json")
    config = json.loads(written.read_text())["config"]
    assert config["protocol"] == "question=inside,examples=inside"
    assert config["model"] == "kvkeep"


def test_a_task_whose_data_cannot_be_reached_is_one_line(monkeypatch):
    from lm_eval._cli import HarnessCLI

    def execute(self, arguments):
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub\nmore")

    monkeypatch.setattr(HarnessCLI, "execute", execute)
    with pytest.raises(InputError, match=r"from the hub: Couldn't reach 'allenai/ai2_arc' on the Hub\. Run") as caught:
        command.run(["--model", "kvkeep", "--tasks", "arc_easy"])
    assert "\n" not in str(caught.value)


PUBLIC = os.environ.get("KVKEEP_TASKS")
"""A folder with the files of public data sets, see `kvkeep.evals.tasks.choice`."""

PUBLIC_TASK = """
task: kvkeep_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
metadata:
  version: 1
"""


@pytest.mark.slow
@pytest.mark.skipif(PUBLIC is None, reason="KVKEEP_TASKS names no folder of public data sets")
@pytest.mark.parametrize("family", FOLDERS)
@pytest.mark.parametrize("name", choice.NAMES)
def test_a_hundred_public_questions_score_like_lm_evals_own_model(name, family, tmp_path):
    if name not in choice.known_in(PUBLIC):
        pytest.skip(f"{PUBLIC} has no file of {name}")
    found = [one for one in choice.questions(name, PUBLIC) if len(one.contexts[0]) < 800][:100]
    rows = [{"context": one.contexts[0], "choices": list(one.choices), "answer": one.right} for one in found]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(PUBLIC_TASK.format(name=name, path=tmp_path / "data.jsonl"))
    ours, theirs = (
        evaluate(tmp_path, [f"kvkeep_{name}"], model, family=family, max_length=1024, **more)
        for model, more in (("kvkeep", {"policy": "full"}), ("hf", {"dtype": "float64"}))
    )
    largest = 0.0
    for own, hf in zip(answers(ours, f"kvkeep_{name}"), answers(theirs, f"kvkeep_{name}"), strict=True):
        for (score, _), (wanted, _) in zip(own, hf, strict=True):
            largest = max(largest, abs(float(score) - float(wanted)) / max(1.0, abs(float(wanted)) / 100))
    assert len(rows) == 100
    assert largest < 1e-4  # hf's own sums in float32 are up to 9e-5 from those in float64; beyond 100 nats relative
