"""The script that writes digits covers everything, writes the same twice, and finds what differs between two files."""

import os
import sys
from pathlib import Path

import pytest

import kvkeep

ROOT = Path(__file__).parents[1]
if not (ROOT / "tools" / "digits.py").is_file():
    pytest.skip("the tools are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from tools import digits  # noqa: E402

FIRST = """# torch 2
llama/torch/h2o/dense budget=64 kept=aaaaaaaa tokens=1,2,3:bbbbbbbb logp=-1.5,-9.25:cccccccc
llama/torch/tova/dense budget=64 kept=aaaaaaaa tokens=1,2,3:bbbbbbbb logp=-1.5,-9.25:cccccccc
llama/torch/tova/8 refused=PolicyError
"""


def compared(tmp_path, capsys, second, *options):
    """Lines of a comparison with the file above, and whether files count as equal."""
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text(FIRST)
    new.write_text(second)
    with pytest.raises(SystemExit) as ended:
        digits.main(["--compare", str(old), str(new), *options])
    return capsys.readouterr().out.splitlines(), ended.value.code == 0


def test_every_policy_has_a_case_for_each_backend_model_and_store():
    names = {case.name for case in digits.cases()}
    assert len(names) == len(list(digits.cases()))
    for policy in kvkeep.available_policies():
        for model in digits.MODELS:
            assert {f"{model}/{backend}/{policy}/dense" for backend in digits.BACKENDS} <= names
        assert {f"embedded/native/{policy}/{store}" for store in digits.STORES} <= names
        assert {f"embedded/auto/{policy}/{kind}" for kind in digits.KINDS} <= names


@pytest.mark.parametrize(
    "case",
    [
        digits.Case("llama", "torch", "h2o", "dense"),
        digits.Case("llama", "reference", "snapkv", "ada+4", options=digits.STORES["ada+4"]),
        digits.Case("llama", "torch", "leverage", "sessions", digits.in_sessions),
    ],
    ids=lambda case: case.name,
)
def test_a_case_has_the_same_digits_twice(case):
    line = case.line()
    assert line.startswith(f"{case.name} budget=64 kept=")
    assert case.line() == line


def test_policies_stores_and_backends_have_digits_of_their_own():
    cases = [
        digits.Case("llama", "torch", "h2o", "dense"),
        digits.Case("llama", "torch", "tova", "dense"),
        digits.Case("llama", "torch", "h2o", "ada", options=digits.STORES["ada"]),
        digits.Case("llama", "reference", "h2o", "dense"),
    ]
    assert len({case.line().partition(" budget")[2] for case in cases}) == len(cases)


def test_a_policy_that_never_evicts_runs_with_a_larger_budget_and_a_refusal_has_a_name():
    assert " budget=512 kept=" in digits.Case("llama", "torch", "full", "dense").line()
    refused = digits.Case("llama", "torch", "tova", "ada", options=digits.STORES["ada"])
    assert refused.line() == "llama/torch/tova/ada refused=UnsupportedOperationError"


def test_the_callers_backend_stays(monkeypatch):
    monkeypatch.setenv("KVKEEP_BACKEND", "torch")
    with digits.backend("reference"):
        assert os.environ["KVKEEP_BACKEND"] == "reference"
    with digits.backend(None):
        assert "KVKEEP_BACKEND" not in os.environ
    assert os.environ["KVKEEP_BACKEND"] == "torch"


def test_equal_files_are_equal(tmp_path, capsys):
    assert compared(tmp_path, capsys, FIRST) == (["0 of 4 differ."], True)


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("kept=aaaaaaaa", "kept=aaaaaaab", "llama/torch/h2o/dense: kept aaaaaaaa -> aaaaaaab"),
        ("1,2,3:bbbbbbbb", "1,2,3:bbbbbbbc", "llama/torch/h2o/dense: tokens 1,2,3:bbbbbbbb -> 1,2,3:bbbbbbbc"),
        ("-9.25:cccccccc", "-9.5:cccccccd", "llama/torch/h2o/dense: logp -1.5,-9.25:cccccccc -> -1.5,-9.5:cccccccd"),
        ("/8 refused=PolicyError", "/8 budget=64", "llama/torch/tova/8: refused PolicyError -> -; budget - -> 64"),
    ],
)
def test_a_case_that_differs_is_named_with_both_digits(tmp_path, capsys, old, new, shown):
    assert compared(tmp_path, capsys, FIRST.replace(old, new, 1), "--tolerance", "0.1") == (
        [shown, "1 of 4 differ."],
        False,
    )


def test_a_missing_case_and_other_versions_are_named(tmp_path, capsys):
    second = FIRST.replace("llama/torch/tova/8", "llama/torch/tova/4").replace("torch 2\n", "torch 3\n")
    lines, equal = compared(tmp_path, capsys, second)
    assert lines[:2] == ["only in the first file: # torch 2", "only in the first file: llama/torch/tova/8"]
    assert lines[2:4] == ["only in the second file: # torch 3", "only in the second file: llama/torch/tova/4"]
    assert not equal


def test_only_log_probabilities_have_a_tolerance_and_without_one_every_bit_counts(tmp_path, capsys):
    nearly = FIRST.replace("-1.5,-9.25:cccccccc", "-1.5000001,-9.25:dddddddd", 1)
    assert compared(tmp_path, capsys, nearly, "--tolerance", "1e-6") == (["0 of 4 differ."], True)
    assert not compared(tmp_path, capsys, nearly, "--tolerance", "1e-8")[1]
    assert not compared(tmp_path, capsys, FIRST.replace(":cccccccc", ":cccccccd", 1))[1]
