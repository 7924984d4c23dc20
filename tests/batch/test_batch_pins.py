"""Pins, the guard and lost attention in batch jobs."""

import json

import pytest
from commands import run, write

LONG = "Anna has a red ball. Tom has a blue car. " * 12
SMALL = ("--budget", 64, "-n", 4, "--policy", "h2o:recent=8")


def completions(path):
    entries = [json.loads(raw) for raw in path.read_bytes().splitlines()]
    return {entry["completion"]["line"]: entry["completion"] for entry in entries}


def test_lines_have_pins_and_a_guard_of_their_own(tmp_path):
    lines = [
        {"prompt": LONG},
        {"prompt": LONG, "options": {"guard": 1, "pins": [[0, 5], [3, 6]]}},
        {"prompt": LONG, "options": {"guard": 0.0}},
        {"prompt": LONG, "options": {"policy": "local"}},
    ]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    result = run("-i", source, "-o", target, *SMALL)
    assert result.exit_code == 0, result.said
    found = completions(target)
    assert [found[i]["budget"] for i in (1, 2, 3, 4)] == [64, 16, 64, 64]
    assert [found[i].get("guarded") for i in (1, 2, 3, 4)] == [None, True, False, None]
    assert 0 < found[1]["lost_mass"]["prompt"] < found[2]["lost_mass"]["prompt"] < 1
    assert found[1]["lost_mass"]["decode"] is not None
    assert found[4]["lost_mass"] == {"prompt": None, "decode": None}


@pytest.mark.long
def test_bodies_in_openais_format_have_pins_and_a_guard(tmp_path):
    def line(name, **options):
        body = {"prompt": LONG, "max_tokens": 3, **options}
        return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}

    lines = [line("a"), line("b", pins=[[0, 5]], guard=1), line("c", pins=[[0, 15]], guard=1)]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    result = run("-i", source, "-o", target, *SMALL)
    assert result.exit_code == 0, result.said
    found = {entry["custom_id"]: entry["kvkeep"][0] for entry in map(json.loads, target.read_bytes().splitlines())}
    assert [found[name]["budget"] for name in "abc"] == [64, 16, 32]
    bad = write(tmp_path / "bad.jsonl", line("a", pins=[[0, 1000]]), line("b", pins=[[0, 70]]))
    result = run("-i", bad, "-o", tmp_path / "other.jsonl", *SMALL)
    assert result.exit_code == 2
    assert "the prompt has" in " ".join(result.said.split())
    assert "Traceback" not in result.said


def test_system_messages_are_pinned_in_every_line(tmp_path):
    messages = [{"role": "system", "content": "You are Anna."}, {"role": "user", "content": LONG}]
    body = {"messages": messages, "max_tokens": 3}
    openai = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [{"messages": messages}, {"prompt": LONG}, {"messages": messages, "options": {"pins": [[0, 2]]}}, openai]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    result = run("-i", source, "-o", target, *SMALL, "--pin-system")
    assert result.exit_code == 0, result.said
    (answer,) = [entry for entry in map(json.loads, target.read_bytes().splitlines()) if "kvkeep" in entry]
    assert answer["kvkeep"][0]["budget"] == 64
    assert answer["made_by"]["pin_system"] is True
    again = run("-i", source, "-o", target, *SMALL)
    assert again.exit_code == 2
    assert "pin_system" in again.said or "--pin-system" in again.said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pins": [[0, 1000]]}, "the prompt has"),
        ({"pins": [[0, 70]]}, "more than the budget of 64"),
        ({"pins": [[5, 1]]}, "reversed"),
        ({"pins": [1, 2]}, "no pair of whole numbers"),
        ({"pins": "0-3"}, "is no list"),
        ({"guard": 2}, "no share of attention"),
        ({"guard": True}, "is no float"),
        ({"guard": 0.1, "policy": "spatten"}, "no plain choice"),
    ],
)
def test_pins_and_guards_that_cannot_be_held_make_a_bad_line(options, why, tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": LONG}, {"prompt": LONG, "options": options})
    result = run("-i", source, "-o", tmp_path / "out.jsonl", *SMALL)
    assert result.exit_code == 2
    assert "Line 2 cannot be run" in result.said
    assert why in " ".join(result.said.split())
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()
