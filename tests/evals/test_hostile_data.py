"""Files of public data sets that are broken, of another kind, or no files: refused in a line that names the place."""

import copy
import functools
import json
import os

import pytest
from public_files import article, choice

from kvkeep.errors import InputError
from kvkeep.evals import datasets, synthetic
from kvkeep.evals.tasks import choice as choice_task
from kvkeep.evals.tasks import longbench, summary

SQUAD = {"title": "T", "context": "A fox ran.", "question": "Who ran?", "answers": {"text": ["A fox"]}}
HOTPOT = {"question": "Who?", "answer": "fox", "context": {"title": ["T"], "sentences": [["A fox. ", "It ran."]]}}


def summaries(data):
    found = datasets.rows(data, summary.SOURCES["xsum"], "summary's xsum")
    return [summary._item("xsum", row, found.place(i)) for i, row in enumerate(found.rows)]


READERS = {
    **{
        f"choice {name}": (f"{name}.jsonl", choice(name, 0), lambda data, name=name: choice_task.questions(name, data))
        for name in choice_task.NAMES
    },
    **{
        f"longbench {name}": (f"{name}.jsonl", article(name, 0, 2), lambda data, name=name: longbench.read(name, data))
        for name in longbench.described()
    },
    "ruler qa_1": ("squad.json", SQUAD, lambda data: synthetic.library("qa_1", data).questions),
    "ruler qa_2": ("hotpotqa.json", HOTPOT, lambda data: synthetic.library("qa_2", data).questions),
    "summary": ("xsum.jsonl", {"document": "A fox ran.", "summary": "A fox."}, summaries),
}
"""Name of the file, a good row, and the reader of each data set."""
SOME = ["choice copa", "choice openbookqa", "longbench trec", "ruler qa_1", "ruler qa_2", "summary"]


def written(folder, name, *rows):
    """A file of rows, which are objects or bytes."""
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    whole = b"[" + b", ".join(texts) + b"]" if name.endswith(".json") else b"\n".join(texts) + b"\n"
    (folder / name).write_bytes(whole)
    return str(folder)


def refused(read, data, *pieces):
    """The message of a file that is refused: one line, and no signs that could steer a terminal."""
    with pytest.raises(InputError) as caught:
        read(data)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 600 + len(data)
    for piece in pieces:
        assert piece in said, said
    return said


@pytest.mark.parametrize("reader", READERS)
def test_good_rows_are_read(reader, tmp_path):
    name, row, read = READERS[reader]
    assert len(read(written(tmp_path, name, row, row))) == 2


BROKEN = {
    "binary": bytes(range(256)),
    "compressed": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
    "NUL": b'{"a": "\x00"}',
    "only NUL": b"\x00" * 64,
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "Latin-1": '{"a": "é"}'.encode("latin-1"),
    "half a character": b'{"a": "\xe2\x82"}',
    "half a surrogate": b'{"a": "\\ud800"}',
    "no JSON": b"a fox",
    "an open brace": b'{"a": ',
    "nested": b"[" * 5000 + b"]" * 5000,
    "infinite": b'{"a": 1e999}',
    "NaN": b'{"a": NaN}',
    "huge": b'{"a": 1' + b"0" * 400 + b"}",
    "too long for a number": b'{"a": 1' + b"0" * 5000 + b"}",
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "a text": b'"fox"',
    "nothing in it": b"{}",
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("reader", SOME)
def test_a_broken_row_is_named(reader, broken, tmp_path):
    name, row, read = READERS[reader]
    said = refused(read, written(tmp_path, name, row, BROKEN[broken]), name)
    json_lines = name.endswith(".jsonl")
    whole = isinstance(parsed(BROKEN[broken]), BaseException)
    assert "Line 2" in said if json_lines else whole or "Entry 2" in said


def parsed(data):
    try:
        return datasets.parse(data)
    except ValueError as error:
        return error


@pytest.mark.parametrize("content", [b"", b"\n", b"\n \n\r\n\t\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("reader", SOME)
def test_an_empty_file_is_refused(reader, content, tmp_path):
    name, _, read = READERS[reader]
    (tmp_path / name).write_bytes(content)
    refused(read, str(tmp_path), name)


@pytest.mark.parametrize("reader", READERS)
def test_no_field_of_another_type_is_a_crash(reader, tmp_path):
    """Each value in a row becomes each of these in turn. What is refused has its row named."""
    name, row, read = READERS[reader]
    for path in list(places(row)):
        for value in (None, True, -1, 1.5, 10**30, "", " \n", "\x00\x1b[31m", [], [None], [[]], {}, {"a": 1}, Missing):
            bad = changed(row, path, value)
            data = written(tmp_path, name, row, bad)
            try:
                found = read(data)
            except InputError as error:
                said = str(error)
                assert "\n" not in said, (path, value)
                assert "\x1b" not in said, (path, value)
                assert "2 of " in said or "number" in said, (path, value, said)
            else:
                assert len(found) == 2 or reader == "ruler qa_1", (path, value)  # a question without an answer is none


class Missing:
    """Stands for a field that is not there."""


def places(value, path=()):
    """The paths to all parts of a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(row, path, value):
    """A copy of a row with another value at a path."""
    made = here = copy.deepcopy(row)
    for key in path[:-1]:
        here = here[key]
    if value is Missing:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return made


UNGRADABLE = [
    ("hotpotqa", {"answers": []}, "it has no answer"),
    ("hotpotqa", {"answers": [""]}, "'answers' is '', no text"),
    ("hotpotqa", {"answers": ["fox", " "]}, "'answers' is ' ', no text"),
    ("hotpotqa", {"answers": ["fox", 7]}, "'answers' is 7, no text"),
    ("hotpotqa", {"context": " "}, "'context' is ' ', no text"),
    ("hotpotqa", {"input": None}, "has another 'input'"),
    ("lcc", {"answers": [""]}, "'answers' is '', no text"),  # an empty reply would have been right
    ("trec", {"all_classes": []}, "its answer 'Place' is none of its classes"),
    ("trec", {"all_classes": None}, "has another 'all_classes'"),
    ("trec", {"all_classes": ["Place", 3]}, "'all_classes' is 3, no text"),
    ("trec", {"answers": ["place"]}, "its answer 'place' is none of its classes"),
    ("passage_retrieval_en", {"answers": ["7"]}, "names no paragraph"),
    ("passage_count", {"answers": ["seven"]}, "its answer 'seven' is no number"),
]


def test_a_line_of_longbench_that_no_reply_can_be_graded_by_is_refused(tmp_path):
    for task, change, said in UNGRADABLE:
        row = article(task, 1, 2)
        data = written(tmp_path, f"{task}.jsonl", row, {**row, **change}, row)
        refused(functools.partial(longbench.read, task), data, f"Line 2 of {tmp_path}/{task}.jsonl", said)


def test_an_input_may_be_empty(tmp_path):
    """Summaries and code have no question."""
    row = {**article("gov_report", 0, 2), "input": ""}
    assert len(longbench.read("gov_report", written(tmp_path, "gov_report.jsonl", row))) == 1


UNANSWERABLE = [
    ("qa_1", {"answers": {"text": [""]}}, "'answer' is '', no text"),  # it would be found in every reply
    ("qa_1", {"answers": {"text": "fox"}}, "answers are 'fox', no list"),
    ("qa_1", {"context": 7}, "'context' is 7, no text"),
    ("qa_1", {"title": None}, "'title' is None, no text"),
    ("qa_2", {"answer": ""}, "'answer' is '', no text"),
    ("qa_2", {"context": {"title": ["T"], "sentences": ["letters"]}}, "no titles and lists of sentences"),
    ("qa_2", {"context": {"title": ["T", "U"], "sentences": [["x"]]}}, "Entry 2"),
    ("qa_2", {"context": []}, "it has no documents"),
]


def test_a_question_of_ruler_without_an_answer_or_a_text_is_refused(tmp_path):
    for name, change, said in UNANSWERABLE:
        file, row, read = READERS[f"ruler {name}"]
        refused(read, written(tmp_path, file, row, {**row, **change}), f"Entry 2 of {tmp_path}/{file}", said)


def test_a_paragraph_of_squads_authors_is_named(tmp_path):
    good = {"context": "A fox ran.", "qas": [{"question": "Who?", "answers": [{"text": "A fox"}]}]}
    bad = {"context": "A fox ran.", "qas": [{"question": "Who?", "answers": [{"text": " "}]}]}
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [good]}, {"paragraphs": [good, bad]}]}))
    refused(READERS["ruler qa_1"][2], str(tmp_path), "paragraph 2 of article 2: 'answer' is ' ', no text")
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "x", "qas": [{}]}]}]}))
    refused(READERS["ruler qa_1"][2], str(tmp_path), "paragraph 1 of article 1: no 'answers'")


def test_an_article_that_is_empty_within_its_prompt_is_refused(tmp_path):
    prompt = "###\nArticle: \n\nSummarize the above article in 1 sentence."
    data = written(tmp_path, "xsum.jsonl", {"article": prompt, "summary_gt": "A fox."})
    refused(summaries, data, "Line 1", "no article with its summary")


PLACES = {
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "a link to nothing ": lambda path: path.symlink_to(path),  # to itself
    "a folder ": lambda path: path.symlink_to(path.parent),
    "no regular file": os.mkfifo,
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("reader", SOME)
def test_what_has_the_name_of_a_file_and_is_none(reader, kind, tmp_path):
    name, _, read = READERS[reader]
    PLACES[kind](tmp_path / name)
    refused(read, str(tmp_path), name, f"is {kind.strip()}. Put the file of the data set there")
    source = datasets.Source((name,), "made up", "saved", None)
    assert datasets.has(str(tmp_path), source)  # a task is not left out for it
    with pytest.raises(InputError, match=kind.strip()):
        datasets.fingerprint(str(tmp_path), [source])


@pytest.mark.parametrize("reader", SOME)
def test_a_link_to_a_file_is_read(reader, tmp_path):
    name, row, read = READERS[reader]
    (tmp_path / "real").mkdir()
    written(tmp_path / "real", name, row)
    (tmp_path / name).symlink_to(tmp_path / "real" / name)
    assert len(read(str(tmp_path))) == 1


@pytest.mark.parametrize("data", ["", "\0", "nowhere", "x" * 5000])
def test_a_folder_of_data_that_cannot_be(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for reader in SOME:
        refused(READERS[reader][2], data)
        source = datasets.Source((READERS[reader][0],), "made up", "saved", None)
        assert not datasets.has(data, source)
        assert datasets.fingerprint(data, [source]) is None
