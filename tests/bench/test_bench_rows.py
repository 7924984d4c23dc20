"""Files of rows: what a script goes on with, and what it measures anew."""

import json
import sys
from argparse import ArgumentTypeError, Namespace
from importlib import import_module
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("scripts")

TEXT = "The ferry to Marel leaves at seven, and nobody waits for it in winter. " * 12


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text(TEXT)
    return path


def test_a_torn_line_is_passed_over_and_costs_no_other(tmp_path):
    rows, file = import_module("lib.rows"), tmp_path / "rows.jsonl"
    assert rows.saved(file, {}) == []
    rows.save(file, [{"model": "a", "n": 1}])
    file.write_bytes(file.read_bytes() + '{"model": "a", "n": "ü'.encode()[:-1])  # killed within a character
    rows.save(file, [{"model": "a", "n": 2}, {"model": "b", "n": 3}])
    assert [row["n"] for row in rows.saved(file, {})] == [1, 2, 3]
    assert [row["n"] for row in rows.saved(file, {"model": "a"})] == [1, 2]


def test_fidelity_of_another_model_is_measured(monkeypatch, tmp_path, text, capsys):
    fidelity, asked = import_module("fidelity"), []

    def of_text(writer, prompts, policies, options):
        asked.append((options.model, policies))
        return [{"policy": name} for name in policies]

    monkeypatch.setattr(fidelity, "of_text", of_text)
    monkeypatch.setattr(fidelity.recall, "ask", lambda *_, **__: [])
    given = ["--text", str(text), "--output", str(tmp_path / "rows.jsonl"), "--texts", "1"]

    def measure(model, *more):
        monkeypatch.setattr(
            sys, "argv", ["fidelity.py", model, *given, "--policies", "h2o:recent=4,sinks=2,tova", *more]
        )
        return [row["policy"] for row in fidelity.measured(Namespace(checkpoint=None), fidelity.parse_arguments())]

    all_of_them = ["full", "h2o:recent=4,sinks=2", "tova"]
    assert measure("a") == measure("a") == measure("b") == measure("a", "--budget", "0.1") == all_of_them
    assert asked == [("a", all_of_them), ("b", all_of_them), ("a", all_of_them)]


def system_message(monkeypatch, capsys, text, output, model, right):
    script = import_module("system_message")
    for name in ("load", "Engine"):
        monkeypatch.setattr(script.kvkeep, name, lambda *_, **__: (None, None))
    monkeypatch.setattr(script, "find", lambda _: Namespace(tokenizer=None))
    monkeypatch.setattr(script, "rights", lambda engine, checkpoint, number, *_: right(number))
    words = ["--text", str(text), "--output", str(output), "--turns", "2", "--conversations", "2", "--budgets", "64"]
    monkeypatch.setattr(sys, "argv", ["system_message.py", model, *words])
    script.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]


def test_system_messages_of_another_model_are_asked_for(monkeypatch, capsys, tmp_path, text):
    output = tmp_path / "rows.jsonl"
    first = system_message(monkeypatch, capsys, text, output, "a", lambda number: [True] * 4)
    assert [line[3] for line in first] == ["8 of 8"] * 3
    other = system_message(monkeypatch, capsys, text, output, "b", lambda number: [False] * 4)
    assert [line[3] for line in other] == ["0 of 8"] * 3
    again = system_message(monkeypatch, capsys, text, output, "a", lambda number: [False] * 4)
    assert again == first


def test_the_interval_is_that_of_conversations(monkeypatch, capsys, tmp_path, text):
    """The facts of one memory are not independent: two conversations that differ by half tell little."""
    script, calls = import_module("system_message"), []

    def right(number):
        calls.append(number)
        return [True] * 4 if len(calls) % 3 == 1 or number == 0 else [False] * 4

    lines = system_message(monkeypatch, capsys, text, tmp_path / "rows.jsonl", "a", right)
    assert lines[1][4] == script.difference([1.0, 0.0], [1.0, 1.0]) == "-50.0 ± 98.0"


def test_a_text_that_is_too_short_for_all_turns_is_refused(monkeypatch, capsys, tmp_path, text):
    text.write_text("One sentence. And another one.")
    with pytest.raises(SystemExit):
        system_message(monkeypatch, capsys, text, tmp_path / "rows.jsonl", "a", lambda number: [])
    assert "has 2 sentences, and 2 conversations of 2 turns need 12" in " ".join(capsys.readouterr().err.split())


def test_conversations_with_another_model_are_held(monkeypatch, capsys, tmp_path, text):
    script, held = import_module("conversation_recall"), []

    def talks(options, done):
        if ("h2o/auto", 0, 9) not in done:
            held.append((options.model, options.turns))
            yield script.Talk("h2o/auto", 0, 9, [True, options.model == "a"], [1.0, 1.0], [0, 1], [2, 2], ["", ""])

    monkeypatch.setattr(script, "talks", talks)
    words = ["--text", str(text), "--output", str(tmp_path / "rows.jsonl"), "--arms", "h2o/auto"]

    def run(model, *more):
        monkeypatch.setattr(sys, "argv", ["conversation_recall.py", model, *words, *more])
        script.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])["lines"][0][2]

    assert [run("a"), run("b"), run("a"), run("a", "--turns", "2")] == ["100.0%", "0.0%", "100.0%", "100.0%"]
    assert held == [("a", 10), ("b", 10), ("a", 2)]


def test_an_arm_may_have_options():
    script = import_module("conversation_recall")
    assert script.arms("h2o:recent=4,sinks=2/auto, reread:later/fresh") == [
        "h2o:recent=4,sinks=2/auto",
        "reread:later/fresh",
    ]
    for wrong in ("h2o", "h2o/auto,tova", "h3o/auto", ""):
        with pytest.raises(ArgumentTypeError):
            script.arms(wrong)
