"""``kvkeep memory``: facts and drawing of a saved memory, plain data with ``--json``, and mistakes as one line."""

import io
import json
import os

import memories
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkeep.cli import memory
from kvkeep.cli.main import app
from kvkeep.cli.policies import label_of
from kvkeep.cli.shell_completion import snapshots
from kvkeep.policies.registry import available, label, parse, spec
from kvkeep.snapshot.positions import HeldPositions


def run(*words, **env):
    return CliRunner().invoke(app, ["memory", *map(str, words)], env=env)


def test_the_facts_and_a_line_for_each_layer(tmp_path):
    path = memories.save(tmp_path / "report.kvkeep", "adakv:window=2")
    snapshot = memories.snapshot("adakv:window=2")
    result = run(path, COLUMNS="80")
    assert result.exit_code == 0
    for said in (
        "adakv:window=2",
        "16 tokens, uniform over layers",
        f"{snapshot.seen} seen",
        "a full cache would take",
    ):
        assert said in result.output
    assert snapshot.fingerprint.weights in result.output
    drawing = result.output.partition("share held")[2].splitlines()[1:]
    assert [line.split()[0] for line in drawing] == [str(number) for number in range(len(snapshot.contents.layers))]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("uniform", "uniform over layers"),
        ("sliding:0.25", "--layer-budget sliding:0.25"),
        ((0.5, 1.5), "spread over layers by weights"),
    ],
)
def test_how_a_budget_is_spread_is_said_as_it_is_typed(rule, said):
    assert memory._rule(rule) == said


def test_a_policy_has_its_short_name(tmp_path):
    path = memories.save(tmp_path / "report.kvkeep", "keydiff:later")
    assert "keydiff:later" in run(path).output


def test_short_names_are_found_without_the_policies():
    for name, cls in available().items():
        for options in ("", *cls.presets.values(), *(f"{text},keep_prompt=0.5" for text in cls.presets.values())):
            text = spec(parse(f"{name}:{options}" if options else name))
            assert label_of(text) == label(text)
    assert label_of("h2o:unknown=3") == "h2o:unknown=3"
    assert label_of("nobody's:own=3") == "nobody's:own=3"


@pytest.mark.parametrize("policy", ["h2o", "adakv:window=2", "leverage"])
def test_json_has_every_position(policy, tmp_path):
    path, snapshot = memories.save(tmp_path / "report.kvkeep", policy), memories.snapshot(policy)
    found = json.loads(run(path, "--json").stdout)
    assert found["bytes"] == path.stat().st_size
    assert found["token_ids"] == snapshot.tokens.tolist()
    assert found["tokens_seen"] == snapshot.seen
    for layer, copy in zip(found["layers"], snapshot.contents.layers, strict=True):
        for head, ranges in enumerate(layer["positions"]):
            held = sorted(position for position in copy.positions[head].tolist() if position >= 0)
            assert [one for start, stop in ranges for one in range(start, stop + 1)] == held
        assert layer["bytes"] == copy.nbytes
        assert layer["held"] == [len(positions[positions >= 0]) for positions in copy.positions]


def test_shares_of_a_text():
    positions = np.array([[0, 1, 7, -1], [0, -1, -1, -1]])
    assert memory.shares_of(positions, 8, 4) == [0.75, 0, 0, 0.25]
    assert memory.shares_of(positions, 8, 3) == [pytest.approx(3 / 6), 0, pytest.approx(1 / 4)]
    assert memory.ranges_of(np.array([5, -1, 3, 4, 9])) == [[3, 5], [9, 9]]


def test_the_drawing_has_letters_where_a_terminal_has_no_blocks(tmp_path):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    memory._draw(Console(file=file, width=80), HeldPositions.read(memories.save(tmp_path / "a.kvkeep")))
    file.seek(0)
    assert "." in file.read()


def test_mistakes_are_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.kvkeep").write_bytes(b"")
    (tmp_path / "text.kvkeep").write_text("hello " * 99)
    cases = {"none.kvkeep": "No such file", ".": "no regular file", "pipe": "no regular file", "empty.kvkeep": "empty"}
    for name, said in {**cases, "text.kvkeep": "no safetensors file"}.items():
        result = run(tmp_path / name)
        assert result.exit_code == 2
        assert said in result.stderr.replace("\n", " ")
        assert "Traceback" not in result.output
    assert run().exit_code == 2
    assert "FILE" in run().stderr


def test_a_name_that_would_steer_a_terminal(tmp_path):
    from dataclasses import replace

    found = memories.snapshot()
    made = replace(found.fingerprint, model="\x1b[31mred\x07", weights="\x1b]0;x\x07")
    replace(found, fingerprint=made).save(tmp_path / "one.kvkeep")
    result = run(tmp_path / "one.kvkeep")
    assert "\x1b" not in result.output
    assert "\x07" not in result.output


def test_shells_complete_files_of_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one.kvkeep", "two.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").mkdir()
    assert snapshots("") == [("folder/", ""), ("one.kvkeep", "")]
    assert snapshots("o") == [("one.kvkeep", "")]
    assert snapshots("nowhere/") == []
