"""The fidelity in a snapshot's note: it survives a file, and a damaged one is refused."""

import math

import memories
import pytest

import kvkeep
from kvkeep.errors import InputError, SnapshotError
from kvkeep.snapshot.fidelity import ALL, Fidelity, noted, noted_in


def test_it_survives_a_file(tmp_path):
    told = Fidelity(0.875, 0.03, 12)
    noted(memories.snapshot(), told).save(tmp_path / "x.kvkeep")
    assert noted_in(kvkeep.Snapshot.load(tmp_path / "x.kvkeep").note) == told


def test_a_memory_that_was_not_measured_has_none():
    assert noted_in(noted(memories.snapshot(), None).note) is None


def test_it_is_told_in_words():
    assert str(Fidelity(0.874, 0.031, 12)) == "keeps 87 % (± 3) of what 12 passages of the text tell"
    assert str(ALL) == "keeps all of the text"


@pytest.mark.parametrize(
    "entry",
    [
        7,
        "0.9",
        [],
        {},
        {"share": 0.9},
        {"share": 1.01, "error": 0, "passages": 4},
        {"share": -0.1, "error": 0, "passages": 4},
        {"share": math.nan, "error": 0, "passages": 4},
        {"share": 0.9, "error": math.inf, "passages": 4},
        {"share": True, "error": 0, "passages": 4},
        {"share": "0.9", "error": 0, "passages": 4},
        {"share": 0.9, "error": 0, "passages": 4.5},
        {"share": 0.9, "error": 0, "passages": -1},
        {"share": 0.9, "error": 0, "passages": 10**400},
        {"share": 0.9, "error": 0, "passages": 4, "more": 1},
    ],
    ids=lambda entry: repr(entry)[:60],
)
def test_a_damaged_one_is_refused(entry):
    with pytest.raises(SnapshotError, match="fidelity, which is damaged"):
        noted_in({"fidelity": entry})


def test_numbers_out_of_range_are_no_fidelity():
    with pytest.raises(InputError, match="is no fidelity"):
        Fidelity(1.5, 0.0, 3)
