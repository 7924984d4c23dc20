"""The package datasets itself: saved folders, data sets of the hub's form in a local folder, and hostile ones."""

import json
import os
import pickle
import shutil

import pytest

pytest.importorskip("datasets")

import datasets

from kvkeep.errors import InputError
from kvkeep.evals import datasets as data_sets
from kvkeep.evals import synthetic
from kvkeep.evals.datasets import HubDataset
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import choice
from kvkeep.evals.tasks.choice import MultipleChoice
from kvkeep.evals.tasks.longbench import LongBench
from kvkeep.evals.tasks.ruler import Ruler
from kvkeep.models import load as loading
from kvkeep.models import tiny

BOOK = {
    "question_stem": "A fox is",
    "choices": {"text": ["red", "a stone"], "label": ["A", "B"]},
    "answerKey": "B",
}
ROWS = [{**BOOK, "question_stem": f"Fox {i} is"} for i in range(4)]


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def dataset(rows):
    return datasets.Dataset.from_list(rows)


def test_a_saved_data_set_is_read_like_a_file(tmp_path):
    (tmp_path / "openbookqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    wanted = choice.questions("openbookqa", str(tmp_path))
    for name, made in {
        "one": dataset(ROWS),
        "splits": datasets.DatasetDict({"train": dataset(ROWS[:1]), "test": dataset(ROWS)}),
        "only": datasets.DatasetDict({"anything": dataset(ROWS)}),
        "chosen": dataset([*ROWS, *ROWS]).select(range(4)),
    }.items():
        made.save_to_disk(tmp_path / name / "openbookqa")
        assert choice.questions("openbookqa", str(tmp_path / name)) == wanted
    other = datasets.DatasetDict({"train": dataset(ROWS), "dev": dataset(ROWS)})
    other.save_to_disk(tmp_path / "other" / "openbookqa")
    with pytest.raises(InputError, match="has the splits train, dev; 'test' is measured"):
        choice.questions("openbookqa", str(tmp_path / "other"))


def test_tasks_run_on_saved_data_sets(tmp_path):
    dataset(ROWS).save_to_disk(tmp_path / "openbookqa")
    row = {"context": "The sky is blue. ", "input": "Which?", "answers": ["blue"], "all_classes": None}
    dataset([row] * 2).save_to_disk(tmp_path / "hotpotqa")
    asked = {"title": "A", "context": "A blue sky.", "question": "Which?", "answers": {"text": ["blue"]}}
    dataset([asked] * 2).save_to_disk(tmp_path / "squad_v2")
    checkpoint = loading.find(tiny.embedded())
    options = Options(data=str(tmp_path), limit=1, shots=1, contexts=(900,))
    assert list(MultipleChoice.load(checkpoint, options).asked) == ["openbookqa,shots=1"]
    assert list(LongBench.load(checkpoint, options).made) == ["hotpotqa"]
    ruler = Ruler.load(checkpoint, Options(data=str(tmp_path), limit=1, contexts=(900,), parts=("qa_1",)))
    assert list(ruler.made) == ["qa_1,length=900"]
    assert synthetic.library("qa_1", str(tmp_path)).questions[0].answers == ("blue",)


def test_a_data_set_of_the_hubs_form(tmp_path):
    """A local folder stands for the hub: the package reads both the same way."""
    (tmp_path / "made").mkdir()
    dataset(ROWS).to_parquet(tmp_path / "made" / "test-00000-of-00001.parquet")
    assert data_sets.hub_rows(HubDataset(str(tmp_path / "made"), None, "test"), "") == ROWS
    for place in (
        HubDataset(str(tmp_path / "made"), None, "validation"),
        HubDataset(str(tmp_path / "made"), "none", "test"),
    ):
        with pytest.raises(InputError, match="cannot be read by the package datasets"):
            data_sets.hub_rows(place, "Or not.")


def test_code_of_a_data_set_is_never_run(tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InputError, match="cannot be read"):
        data_sets.hub_rows(HubDataset(str(folder), None, "test"), "Or not.")
    assert not (tmp_path / "ran").exists()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["test.pkl", "test.pickle", "test.npz", "test.pth", "test.txt"])
def test_nothing_is_unpickled(name, tmp_path):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Bomb(str(tmp_path / "ran"))))
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: {name}\n---\n"
    )
    with pytest.raises(InputError, match=r"cannot be read|only tables"):
        data_sets.hub_rows(HubDataset(str(folder), None, "test"), "Or not.")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["arrow", "info", "state", "missing"])
def test_damaged_saved_folders_are_one_line(damage, tmp_path):
    folder = tmp_path / "openbookqa"
    dataset(ROWS).save_to_disk(folder)
    (arrow,) = folder.glob("*.arrow")
    if damage == "missing":
        arrow.unlink()
    else:
        path = {"arrow": arrow, "info": folder / "dataset_info.json", "state": folder / "state.json"}[damage]
        path.write_bytes(b"\x00 broken")
    with pytest.raises(InputError, match=r"openbookqa cannot be read .*openbookqa\.jsonl") as caught:
        choice.questions("openbookqa", str(tmp_path))
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)


def test_the_hub_without_a_network():
    """HF_HUB_OFFLINE, which the tests of clients set, or a hub that does not answer."""
    with pytest.raises(InputError, match=r"The hub cannot be reached, and the local cache .* has no aps/super_glue"):
        choice.questions("copa", "hub")
