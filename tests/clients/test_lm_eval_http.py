"""lm-eval's ``local-completions`` and ``local-chat-completions`` on small tasks from files, without a network."""

from __future__ import annotations

import json

import pytest
import yaml
from server.running import NAME, checkpoint, model

import kvkeep
from kvkeep.models.tiny import embedded

TEXTS = [
    ("Once upon a time there was a", [" little girl named Lily.", " the of and with", " stone."], 0),
    ("The dog was very", [" happy.", " carpet the.", " seven."], 0),
    ("Tom and Sue went to the", [" park to play.", " because of is.", " blue."], 0),
    ("She was sad because her toy was", [" broken.", " and the.", " sing."], 0),
    ("The cat sat on the", [" quickly ran.", " mat.", " of a."], 1),
    ("Mom said,", [" zebra of", ' "Be careful!"', " green."], 1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tasks: a choice by log-likelihood, and the continuation that a full cache writes."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {"text": text, "choices": choices, "label": label, "answer": generated(text)} for text, choices, label in TEXTS
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "metadata": {"version": 1.0},
    }
    choice = {
        "task": "kept_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }
    text = {
        "task": "kept_text",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n", "."], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for one in (choice, text):
        (folder / f"{one['task']}.yaml").write_text(yaml.safe_dump({**data, **one}))
    return folder


def alone(requests):
    with kvkeep.Engine(model(), checkpoint().tokenizer, budget=128, rows=4) as engine:
        return engine.generate(requests)


def generated(text):
    """The answer of the engine in this process."""
    sampling = kvkeep.SamplingParams(max_new_tokens=8)
    asked = {"stop": ("\n\n", "."), "sampling": sampling}
    return alone(kvkeep.Request(messages=[{"role": "user", "content": text}], **asked))[0].text


def likelihoods():
    """The log-likelihood of each choice of each text, by the engine in this process."""
    encode = lambda text: checkpoint().tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    one = kvkeep.SamplingParams(max_new_tokens=1)
    asked, starts = [], []
    for text, choices, _ in TEXTS:
        for choice in choices:
            starts.append(len(encode(text)))
            asked.append(kvkeep.Request(prompt=encode(text + choice), prompt_logprobs=0, sampling=one))
    sums = [
        sum(one.value for one in result.prompt_logprobs[start - 1 :])
        for result, start in zip(alone(asked), starts, strict=True)
    ]
    return [sums[at : at + 3] for at in range(0, len(sums), 3)]


def evaluate(kind, url, folder, task, **more):
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=kind,
        model_args={"model": NAME, "base_url": url, "max_retries": 1, **more},
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        log_samples=True,
        bootstrap_iters=0,
    )


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_score_of_choices_is_the_engines_own(server, folder, backend, batch):
    tokenizer = {"tokenizer": str(embedded())} if backend == "huggingface" else {}
    options = {"tokenizer_backend": backend, "batch_size": batch, "num_concurrent": 1, **tokenizer}
    found = evaluate("local-completions", f"{server.url}/v1/completions", folder, "kept_choice", **options)
    own = likelihoods()
    samples = sorted(found["samples"]["kept_choice"], key=lambda sample: sample["doc_id"])
    for sample, values in zip(samples, own, strict=True):
        assert [value[0] for value in sample["filtered_resps"]] == pytest.approx(values, abs=2e-3)
    right = [max(range(3), key=values.__getitem__) == label for values, (*_, label) in zip(own, TEXTS, strict=True)]
    assert found["results"]["kept_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert sum(right) >= 4  # the embedded model knows such stories


def test_the_score_of_texts_is_the_engines_own(server, folder):
    found = evaluate("local-chat-completions", f"{server.url}/v1/chat/completions", folder, "kept_text")
    assert found["results"]["kept_text"]["exact_match,none"] == 1.0
