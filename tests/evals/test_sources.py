"""Public data sets: one seam for files, saved folders and the hub, whatever the package datasets raises."""

import contextlib
import json
import re
import types
from pathlib import Path

import model_folders
import pytest

from kvkeep.errors import InputError, ModelFileError, pip_install
from kvkeep.evals import datasets, synthetic, tasks
from kvkeep.evals.datasets import HubDataset, Source
from kvkeep.evals.task import Options
from kvkeep.evals.tasks import choice, longbench, summary
from kvkeep.models import load as loading

HUBS = {
    "copa": {"premise": "The dog ran.", "choice1": "It saw.", "choice2": "It slept.", "question": "cause", "label": 1},
    "openbookqa": {
        "id": "7-1",
        "question_stem": "A fox is",
        "choices": {"text": ["red", "a stone"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "arc_easy": {
        "id": "x",
        "question": "A fox is",
        "choices": {"text": ["red", "a stone"], "label": ["1", "2"]},
        "answerKey": "2",
    },
    "piqa": {"goal": "Run", "sol1": "walk", "sol2": "jump", "label": 1},
    "winogrande": {"sentence": "The fox saw _ there.", "option1": "a dog", "option2": "cats", "answer": "2"},
    "mathqa": {"Problem": "1 + 1 ?", "options": "a ) 2 , b ) 1 , 000", "correct": "b"},
    "rte": {"sentence1": "A fox ran.", "sentence2": "It slept.", "label": 1, "idx": 0},
    "hellaswag": {"activity_label": "Run", "ctx_a": "A", "ctx_b": "it", "endings": ["won.", "sat."], "label": "1"},
}
"""A row of each data set as the hub's copy has it; the second choice is right."""


class Other:
    """A builder of the package that reads something else than tables."""

    def __init__(self, rows):
        self._rows = rows

    def download_and_prepare(self):
        pass

    def as_dataset(self, split):
        return types.SimpleNamespace(to_list=lambda: self._rows[split])


class Parquet(Other):
    """One that reads tables."""


@pytest.fixture
def package(monkeypatch):
    """The package datasets, made up: `package.rows` are those of every data set, `package.asked` what was asked for."""
    made = types.SimpleNamespace(__version__="5.2.0", rows=[], asked=[], builder=Parquet)

    def load_dataset_builder(path, config, revision=None):
        made.asked.append((path, config, revision))
        if isinstance(made.rows, BaseException):
            raise made.rows
        return made.builder(dict.fromkeys(("test", "validation"), made.rows))

    made.load_dataset_builder = load_dataset_builder
    monkeypatch.setattr(datasets, "find_spec", lambda name: True)
    monkeypatch.setattr(datasets, "import_module", lambda name: made)
    monkeypatch.setattr(datasets, "cached_if_unreachable", contextlib.nullcontext)
    return made


@pytest.mark.parametrize("name", choice.NAMES)
def test_the_hubs_copies_are_read_like_the_authors_files(name, package, tmp_path):
    package.rows = [HUBS[name]]
    (found,) = choice.questions(name, "hub")
    assert found.right == 1
    assert len(found.choices) == 2
    place = choice.SOURCES[name].hub
    assert package.asked == [(place.path, place.config, place.revision)]
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(HUBS[name]) + "\n")  # exported rows are a file of that name
    assert choice.questions(name, str(tmp_path)) == [found]


def test_squad_and_hotpotqa_of_the_hub_are_those_of_the_authors_files(package, tmp_path):
    asked = [("A", "one", "Who?", ["x", "x", "y"]), ("A", "two", "What?", []), ("B", "three", "When?", ["z"])]
    nested = [
        {"context": text, "qas": [{"question": q, "answers": [{"text": a} for a in said], "is_impossible": not said}]}
        for _, text, q, said in asked
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": nested[:2]}, {"paragraphs": nested[2:]}]}))
    package.rows = [
        {"title": title, "context": text, "question": q, "answers": {"text": said, "answer_start": [0] * len(said)}}
        for title, text, q, said in asked
    ]
    library = synthetic.library("qa_1", "hub")
    assert library == synthetic.library("qa_1", str(tmp_path))
    assert [one.answers for one in library.questions] == [("x", "y"), ("z",)]
    assert [one.near for one in library.questions] == [(2,), ()]  # documents in order: one, three, two

    entry = {"question": "Q?", "answer": "A1", "context": [["T", ["one. ", "A1."]], ["U", ["two."]]]}
    (tmp_path / "hotpotqa.json").write_text(json.dumps([entry]))
    package.rows = [{**entry, "context": {"title": ["T", "U"], "sentences": [["one. ", "A1."], ["two."]]}}]
    assert synthetic.library("qa_2", "hub") == synthetic.library("qa_2", str(tmp_path))


def test_every_source_says_its_places():
    every = [*choice.SOURCES.values(), *summary.SOURCES.values(), *synthetic.SOURCES.values()]
    every += map(longbench.source, longbench.described())
    assert len({source.saved for source in every}) == len(every) == 8 + 2 + 2 + 16
    places = [source.hub for source in every if source.hub]
    assert len({(place.path, place.config) for place in places}) == len(places) == 12
    assert {place.split for place in places} == {"test", "validation"}
    page = (Path(__file__).parents[2] / "docs" / "benchmarks-of-quality.md").read_text()
    assert all(f"`{place}`" in page for place in places)
    with pytest.raises(
        InputError, match=r"copa\.jsonl or copa\.json: .*`data`, or the word hub to read aps/super_glue"
    ):
        choice.questions("copa", None)


def test_longbench_is_not_on_the_hub_in_tables(package):
    source = longbench.source("lcc")
    assert not datasets.has("hub", source)
    with pytest.raises(InputError, match=r"The hub has no tables of LongBench.*takes a folder with lcc\.jsonl"):
        datasets.rows("hub", source, "longbench's lcc")
    with pytest.raises(InputError, match=r"Give the folder that holds it as `data`\.$"):
        datasets.rows(None, source, "longbench's lcc")
    assert not package.asked


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=f"not installed: {re.escape(pip_install('datasets'))}.*folder with copa.jsonl"
    ):
        choice.questions("copa", "hub")


@pytest.mark.parametrize("version", ["3.6.0", "2.20", "dev"])
def test_versions_that_may_run_code_of_data_sets_are_refused(version, package):
    package.__version__ = version
    with pytest.raises(InputError, match="may run code of data sets"):
        choice.questions("copa", "hub")
    assert not package.asked


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConnectionError("Couldn't reach it"),
            "The hub cannot be reached, and the local cache .* has no aps/super_glue",
        ),
        (
            RuntimeError("Dataset scripts are no longer supported, but found copa.py\nmore"),
            "but found copa.py. choice's",
        ),
        (ValueError(""), "ValueError"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_whatever_the_package_raises_is_one_line_with_a_way_out(error, said, package):
    package.rows = error
    with pytest.raises(InputError, match=said) as caught:
        choice.questions("copa", "hub")
    assert "\n" not in str(caught.value)
    assert "choice's copa also takes a folder with copa.jsonl or copa.json" in str(caught.value)


def test_what_is_no_users_mistake_is_not_hidden(package):
    for error in (MemoryError(), KeyboardInterrupt()):
        package.rows = error
        with pytest.raises(type(error)):
            choice.questions("copa", "hub")


def test_an_unreachable_hub_without_a_cache_is_one_line(package, monkeypatch):
    @contextlib.contextmanager
    def unreachable(name):
        try:
            yield
        except ModelFileError as error:  # what models of the hub raise
            raise AssertionError from error

    monkeypatch.setattr(datasets, "cached_if_unreachable", unreachable)
    package.rows = type("OfflineModeIsEnabled", (OSError,), {})("offline")
    with pytest.raises(InputError, match="The hub cannot be reached"):
        choice.questions("copa", "hub")


def test_only_tables_are_read(package):
    package.builder = Other
    with pytest.raises(InputError, match="read by Other, and only tables"):
        choice.questions("copa", "hub")


def test_rows_without_a_field_or_of_another_type_are_named(package):
    package.rows = [HUBS["copa"], {**HUBS["copa"], "premise": None}]
    with pytest.raises(
        InputError, match=r"Row 2 of aps/super_glue \(copa, validation\) is no question of copa: .*text"
    ):
        choice.questions("copa", "hub")
    package.rows = []
    with pytest.raises(InputError, match="has no rows"):
        choice.questions("copa", "hub")


def test_lines_are_counted_as_in_the_file(tmp_path):
    """Empty lines are no questions, but they have numbers."""
    (tmp_path / "copa.jsonl").write_text(f"\n{json.dumps(HUBS['copa'])}\n\n{json.dumps({})}\n")
    with pytest.raises(InputError, match=r"Line 4 of .*copa\.jsonl is no question of copa: it has no 'question'"):
        choice.questions("copa", str(tmp_path))


SOURCE = Source(("x.jsonl",), "made up", "x_saved", HubDataset("a/b", "c", "test"))


@pytest.mark.parametrize("marks", [("dataset_info.json", "state.json"), ("dataset_dict.json",)])
def test_a_saved_folder_is_found_and_has_a_hash_of_its_tables(marks, tmp_path, monkeypatch):
    assert not datasets.has(str(tmp_path), SOURCE)
    assert datasets.fingerprint(str(tmp_path), [SOURCE]) is None
    (tmp_path / "x_saved" / "test").mkdir(parents=True)
    assert not datasets.has(str(tmp_path), SOURCE)
    for name in marks:
        (tmp_path / "x_saved" / name).write_text("{}")
    (tmp_path / "x_saved" / "test" / "data.arrow").write_bytes(b"1")
    assert datasets.has(str(tmp_path), SOURCE)
    first = datasets.fingerprint(str(tmp_path), [SOURCE])
    (tmp_path / "x_saved" / "test" / "data.arrow").write_bytes(b"2")
    assert first != datasets.fingerprint(str(tmp_path), [SOURCE]) is not None
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"x_saved was saved by .*kvkeep\[datasets\][^']*'.* Or save it as .*x_saved\.jsonl"
    ):
        datasets.rows(str(tmp_path), SOURCE, "a task")
    (tmp_path / "x.jsonl").write_text("{}\n")  # a file goes first
    assert datasets.rows(str(tmp_path), SOURCE, "a task").rows == [{}]


def test_data_of_the_hub_and_of_a_folder_are_told_apart(tmp_path):
    assert datasets.fingerprint("hub", [SOURCE]) == "hub"
    assert datasets.fingerprint(None, [SOURCE]) is None
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert datasets.fingerprint(str(tmp_path), [SOURCE]) not in (None, "hub")


@pytest.mark.parametrize("task", ["passkey", "ruler", "recall"])
def test_a_context_longer_than_the_model_takes_is_refused(task):
    """Learned positions end; no policy changes that."""
    checkpoint = loading.find(model_folders.folder("gpt2"))
    (kind,) = tasks.find(task)
    with pytest.raises(InputError, match=rf"{task} needs \d+ positions, and .* has learned only 32.*lower `contexts`"):
        kind.load(checkpoint, Options(contexts=(1500,), limit=1, facts=2, parts=("vt",) if task == "ruler" else ()))
