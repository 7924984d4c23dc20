"""``kvkeep theory``: every claim in 80 columns, plain data with ``--json``, and bad names as one line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep_lab import theory as papers
from kvkeep_lab.cli import theory
from kvkeep_lab.theory.claim import Claim, ClaimOutcome

NODE = "lab/tests/theory/test_claims.py::test_judge"
SOME = (
    Claim("one", "Paper, Lemma 1", "One is one.", NODE, lambda: ClaimOutcome("holds", "exactly")),
    Claim("two", "Paper, Lemma 2", "Two " * 30, NODE, lambda: ClaimOutcome("holds with a correction", "by 1")),
    Claim("three", "Paper, Theorem 3", "Three.", NODE, lambda: ClaimOutcome("fails", "by " + "much " * 30)),
)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(papers, "CLAIMS", SOME)
    monkeypatch.setenv("COLUMNS", "80")


def invoke(*arguments: str, exit_code: int = 0):
    result = CliRunner().invoke(app, ["theory", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


def test_the_table_fits_80_columns_and_says_all():
    text = invoke().stdout
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for claim in SOME:
        assert f"{claim.name} {claim.source}" in words
    assert "holds one Paper, Lemma 1 One is one. → exactly" in words
    assert words.startswith("holds one")
    assert "fails three" in words
    assert text.count(f"\npytest {NODE}\n") == 3
    assert text.splitlines()[-1] == "3 claims: 1 hold, 1 hold with a correction, 1 fail"


def test_json():
    report = json.loads(invoke("--json").stdout)
    assert report["verdicts"] == {"holds": 1, "holds with a correction": 1, "fails": 1}
    assert report["claims"][0] == {
        "name": "one",
        "source": "Paper, Lemma 1",
        "statement": "One is one.",
        "verdict": "holds",
        "by": "exactly",
        "test": f"pytest {NODE}",
    }
    assert [entry["name"] for entry in report["claims"]] == ["one", "two", "three"]


@pytest.mark.parametrize("names", ["three,one", " one, three,", "one,three,one"])
def test_only_some_in_the_papers_order(names: str):
    report = json.loads(invoke("--only", names, "--json").stdout)
    assert [entry["name"] for entry in report["claims"]] == ["one", "three"]
    assert report["verdicts"] == {"holds": 1, "holds with a correction": 0, "fails": 1}


@pytest.mark.parametrize("names", ["four", "one,four", "", " , ", "One"])
def test_a_name_that_is_none(names: str):
    result = invoke("--only", names, exit_code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: --only: no claim is ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("Known: one, two, three.\n")
    assert ("'four'" in result.stderr) is ("four" in names)


def test_one_real_claim(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    (entry,) = json.loads(invoke("--only", "scissorhands-kv-table", "--json").stdout)["claims"]
    assert entry["verdict"] == "holds with a correction"
    assert "980" in entry["by"]
    assert theory.choose(papers.CLAIMS, entry["name"])[0].source == "Scissorhands, Table 1"
