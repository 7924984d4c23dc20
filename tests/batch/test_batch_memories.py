"""Batch jobs whose lines follow a remembered text: each line is a fork, and the memory is a part of the job."""

from __future__ import annotations

import json
import time

import model_folders
import processes
import pytest
from commands import completions, run, write
from typer.testing import CliRunner

from kvkeep.batch.input import COMPLETION
from kvkeep.cli.main import app

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 12
QUESTIONS = ["what does the fox do", "what does the dog do", "who is lazy", "the cat", "and the fox"]


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = model_folders.copy(tmp_path_factory.mktemp("models") / "chat")
    model_folders.edit_json(folder / "tokenizer_config.json", chat_template=model_folders.TEMPLATE)
    return folder


def remembered(model, file, text=TEXT, *words):
    file.with_suffix(".txt").write_text(text)
    done = CliRunner().invoke(
        app, ["remember", str(model), "-f", str(file.with_suffix(".txt")), "-o", str(file), *words]
    )
    assert done.exit_code == 0, done.output
    return file


@pytest.fixture
def memory(model, tmp_path):
    return remembered(model, tmp_path / "text.kvkeep", TEXT, "-b", "24")


@pytest.fixture
def questions(tmp_path):
    return write(tmp_path / "questions.jsonl", *({"prompt": one, "id": i} for i, one in enumerate(QUESTIONS)))


def alone(model, memory, question, *words):
    done = run(model, "--memory", memory, "-p", question, "-n", 6, "--json", *words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_each_line_is_a_fork_of_the_memory(model, memory, questions, tmp_path):
    target = tmp_path / "out.jsonl"
    result = run(model, "--memory", memory, "-i", questions, "-o", target, "-n", 6, "--max-rows", 2)
    assert result.exit_code == 0, result.output
    for entry in completions(target).values():
        want = alone(model, memory, QUESTIONS[entry["id"]])
        assert entry[COMPLETION]["text"] == want["text"]
        assert entry[COMPLETION]["prompt_tokens"] == want["prompt_tokens"]


def test_messages_and_lines_of_openai(model, memory, tmp_path):
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    longer = [*chat, {"role": "assistant", "content": "it jumps"}, {"role": "user", "content": "over what"}]
    body = {"model": "m", "messages": chat, "max_tokens": 6, "temperature": 0}
    batch_line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = write(tmp_path / "in.jsonl", {"messages": chat}, {"messages": longer}, batch_line)
    target = tmp_path / "out.jsonl"
    result = run(model, "--memory", memory, "-i", lines, "-o", target, "-n", 6)
    assert result.exit_code == 0, result.output
    first, second, third = sorted(map(json.loads, target.read_text().splitlines()), key=lambda one: "custom_id" in one)
    if first[COMPLETION]["line"] == 2:
        first, second = second, first
    want = alone(model, memory, QUESTIONS[0])["text"]
    assert first[COMPLETION]["text"] == want
    assert third["response"]["body"]["choices"][0]["message"]["content"] == want
    assert second[COMPLETION]["prompt_tokens"] > first[COMPLETION]["prompt_tokens"]


@pytest.mark.slow
def test_the_memory_is_a_part_of_the_job(model, memory, questions, tmp_path):
    target = tmp_path / "out.jsonl"
    words = ["-i", questions, "-o", target, "-n", 6]
    assert run(model, "--memory", memory, *words).exit_code == 0
    before = target.read_bytes()
    again = run(model, "--memory", memory, *words)
    assert (again.exit_code, target.read_bytes()) == (0, before)
    other = remembered(model, tmp_path / "other.kvkeep", TEXT + "another end", "-b", "24")
    refused = run(model, "--memory", other, *words)
    assert (refused.exit_code, "was written with memory=" in refused.said) == (2, True), refused.said
    without = run(model, *words)
    assert without.exit_code == 2
    assert target.read_bytes() == before


@pytest.mark.slow
def test_the_same_text_read_again_goes_on_with_the_job(model, memory, questions, tmp_path):
    target = tmp_path / "out.jsonl"
    assert run(model, "--memory", memory, "-i", questions, "-o", target, "-n", 6).exit_code == 0
    same = remembered(model, tmp_path / "same.kvkeep", TEXT, "-b", "24")
    assert run(model, "--memory", same, "-i", questions, "-o", target, "-n", 6).exit_code == 0


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on(model, memory, tmp_path):
    many = [f"{one} {i}" for i in range(20) for one in QUESTIONS]
    lines, target = write(tmp_path / "many.jsonl", *({"prompt": one} for one in many)), tmp_path / "out.jsonl"
    words = [model, "--memory", memory, "-i", lines, "-o", target, "-n", 40, "--max-rows", 2]
    for wait in (1.5, 2.5, 4.0):
        process = processes.kvkeep("generate", *words)
        time.sleep(wait)
        process.kill()  # it may have ended
        process.join()
    assert run(*words).exit_code == 0
    whole = run(*words[:6], tmp_path / "whole.jsonl", *words[7:])
    assert whole.exit_code == 0
    one, other = completions(target), completions(tmp_path / "whole.jsonl")
    assert {n: e[COMPLETION]["text"] for n, e in one.items()} == {n: e[COMPLETION]["text"] for n, e in other.items()}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt": "x", "options": {"budget": 25}}, "25"),
        ({"prompt": "x", "options": {"budget": 8}}, "budget"),
        ({"prompt": "x", "options": {"policy": "h2o"}}, "policy"),
        ({"prompt": " "}, "empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "followed by a prompt"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "followed by a prompt"),
        ({"prompt": "\ud83d"}, "half of a character"),
    ],
    ids=str,
)
def test_lines_that_cannot_follow_the_memory(line, reason, model, memory, tmp_path):
    lines, target = write(tmp_path / "in.jsonl", {"prompt": "good"}, line), tmp_path / "out.jsonl"
    done = run(model, "--memory", memory, "-i", lines, "-o", target, "-n", 4)
    assert done.exit_code == 2, done.output
    assert "Line 2 cannot be run" in done.said
    assert reason in done.said
    skipped = run(model, "--memory", memory, "-i", lines, "-o", target, "-n", 4, "--skip-bad")
    assert sorted(completions(target)) == [1], skipped.output


def test_a_memory_without_room_for_the_lines(model, questions, tmp_path):
    full = remembered(model, tmp_path / "full.kvkeep", TEXT, "--policy", "full", "-b", "170")
    done = run(model, "--memory", full, "-i", questions, "-o", tmp_path / "out.jsonl", "-n", 40)
    assert (done.exit_code, "cannot be run" in done.said) == (2, True), done.said


@pytest.mark.slow
def test_the_memory_of_a_conversation_is_for_one_question_at_a_time(model, questions, tmp_path):
    words = ["chat", str(model), "-s", "one", "--sessions", str(tmp_path / "sessions"), "-n", "4"]
    assert CliRunner().invoke(app, words, input="hello\n").exit_code == 0
    file = tmp_path / "sessions" / "one" / "memory.kvkeep"
    done = run(model, "--memory", file, "-i", questions, "-o", tmp_path / "out.jsonl")
    assert (done.exit_code, "memory of a conversation" in done.said) == (2, True), done.said
    assert alone(model, file, "and then")["cached_tokens"] > 0
