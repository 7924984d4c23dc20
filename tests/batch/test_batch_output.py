"""The output of a batch job: one writer, nothing foreign lost, every line strict JSON, and all of it on the disk."""

import json
import math
import os

import processes
import pytest
from commands import completions, result_of, run, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweeps import sweep

from kvkeep import result_files
from kvkeep.batch import output as outputs
from kvkeep.batch.input import COMPLETION, digest, parse
from kvkeep.batch.output import OutputFile
from kvkeep.engine.request import Logprob
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError

MADE_BY = {"model": "embedded", "policy": "h2o", "budget": 24, "weights": "0123456789abcdef"}
RAW = [json.dumps({"prompt": f"prompt {i}", "id": "x" * 10 * i}).encode() for i in range(1, 5)]
LINES = [parse(number, raw, lambda prompt: [1], SamplingParams()) for number, raw in enumerate(RAW, start=1)]
DIGESTS = {line.number: line.digest for line in LINES}


def go_on(path, lines=LINES, made_by=MADE_BY, **fields):
    """Write the completions that are missing, as a job does."""
    with OutputFile.open(path) as output:
        output.agree(made_by)
        output.check(DIGESTS)
        for line in lines:
            if line.number not in output.done:
                output.write(line, result_of(**fields))
        return output.finish()


@pytest.fixture
def unsynced(monkeypatch):
    """Files are not brought to the disk, which takes time."""
    monkeypatch.setattr(result_files, "sync", lambda file: None)


@pytest.fixture
def whole(tmp_path):
    """An output of four lines."""
    path = tmp_path / "whole.jsonl"
    assert go_on(path) == {1, 2, 3, 4}
    return path.read_bytes()


def test_a_second_job_on_one_output_is_refused(tmp_path, monkeypatch):
    source, target = write(tmp_path / "in.jsonl", {"prompt": "Hello"}), tmp_path / "out.jsonl"
    with OutputFile.open(target):
        second = run("-i", source, "-o", target, "--budget", 20)
        assert (second.exit_code, f"Another run is writing to {target}" in second.said) == (2, True), second.said
        assert target.read_bytes() == b""
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves ~ alone behind --output=
    assert run("-i", source, "-o", "~/out.jsonl", "--budget", 20, "-n", 2).exit_code == 0
    assert target.read_bytes()


def open_and_die(target):
    OutputFile.open(target)
    os.kill(os.getpid(), 9)


@pytest.mark.long
def test_a_job_that_was_killed_leaves_no_lock(tmp_path):
    target = tmp_path / "out.jsonl"
    process = processes.start(open_and_die, target)
    process.join()
    assert process.exitcode == -9
    assert go_on(target) == {1, 2, 3, 4}


def test_an_output_that_was_cut_at_any_byte_is_completed(whole, tmp_path, unsynced):
    target, second = tmp_path / "cut.jsonl", whole.index(b"\n") + 1
    for cut in [*range(130), *range(130, len(whole), 17), *range(second - 3, second + 4), len(whole) - 1]:
        target.write_bytes(whole[:cut])
        assert go_on(target) == {1, 2, 3, 4}, whole[:cut]
        assert sorted(target.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("zeros", [1, 5000])
@pytest.mark.parametrize("cut", [0, 1, 40, 130])
def test_zero_bytes_where_the_disk_lost_a_completion_are_generated_again(whole, tmp_path, unsynced, cut, zeros):
    target, first = tmp_path / "zeros.jsonl", whole.index(b"\n") + 1
    for start in (0, first) if cut else (first,):  # a file of zeros alone may be anybody's
        target.write_bytes(whole[: start + cut] + b"\0" * zeros)
        assert go_on(target) == {1, 2, 3, 4}
        assert b"\0" not in target.read_bytes()


@pytest.mark.parametrize("content", [b"\0mine", b"mine\0", b"{\0}", b"\0\n"])
def test_zero_bytes_with_something_foreign_are_refused(whole, tmp_path, content):
    target = tmp_path / "zeros.jsonl"
    target.write_bytes(whole + content)
    with pytest.raises(InputError):
        go_on(target)
    assert target.read_bytes() == whole + content


@pytest.mark.parametrize("change", [lambda torn: torn + b"my note\n", lambda torn: b"x" * len(torn), lambda torn: b""])
def test_what_others_write_behind_a_line_that_was_cut_is_not_removed(whole, tmp_path, change):
    target, begun = tmp_path / "cut.jsonl", whole.index(b"\n") + 1
    target.write_bytes(whole[: begun + 60])
    now = whole[:begun] + change(whole[begun : begun + 60])
    with OutputFile.open(target) as output:
        output.agree(MADE_BY)
        output.check(DIGESTS)
        target.write_bytes(now)
        for write_or_finish in (lambda: output.write(LINES[1], result_of()), output.finish):
            with pytest.raises(InputError, match="Nothing was removed"):
                write_or_finish()
    assert target.read_bytes() == now


def test_a_line_that_was_cut_is_recognised_though_its_prompt_or_the_settings_have_changed(whole, tmp_path):
    target = tmp_path / "cut.jsonl"
    target.write_bytes(whole[: whole.index(b'"made_by"') + 12])
    with OutputFile.open(target) as output:
        output.agree({"budget": 1})
        output.check({1: digest(b"another")})


FOREIGN = [
    b'{"my": "notes"',
    b'{"completion": {"line": 1, "text": "my own',
    b'{"completion": {"line": 99, "digest": "',
    b'{"completion": {"line": 1, "digest": "0123',
    b'{"completion": {"line": 1, "digest": "' + b"0" * 31,
    b'{"completions',
    b"{\n",
    b"{ ",
    b" ",
    b"\n",
    b"\0" * 4096,
    b"\xff\xfe",
    b"\x1f\x8b\x08compressed",
    b"[1, 2",
    b"null",
    b'{"completion": null}\n',
    b'{"completion": {"line": 1, "digest": "d", "made_by": 3}}\n',
    b'{"completion": {"line": 1e999, "digest": "d", "made_by": {}}}\n',
    b"[" * 100_000,
]
KEYS = st.sampled_from(["completion", "line", "digest", "made_by", "id"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(KEYS, parts, max_size=3),
    max_leaves=8,
)


@st.composite
def foreign(draw):
    """A file that no job has written, often like one: JSON that is cut anywhere, changed beginnings, plain bytes."""
    value = json.dumps(draw(st.dictionaries(KEYS, JSON, max_size=3))).encode()
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return value[: draw(st.integers(0, len(value)))] + draw(st.sampled_from([b"", b"\n", b"\r\n"]))
    if kind == 1:
        own = b'{"completion": {"line": 1, "digest": "'
        return own[: draw(st.integers(0, len(own)))] + draw(st.binary(max_size=40))
    return draw(st.binary(max_size=40))


def keeps(path, content):
    """A job leaves a file alone, or goes on behind its last line, and writes again what was the beginning of one."""
    path.write_bytes(content)
    try:
        go_on(path)
    except InputError:
        assert path.read_bytes() == content
    else:
        lines, end, torn = content.rpartition(b"\n")
        assert path.read_bytes().startswith(lines + end)
        torn = torn.rstrip(b"\0")  # zeros are what a disk leaves of a line that it lost
        assert any(line.startswith(torn) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: repr(content[:50]))
def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(InputError, match="no completion"):
        go_on(path)
    assert path.read_bytes() == content


@pytest.mark.slow
@given(content=foreign())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_foreign_is_ever_lost(tmp_path, unsynced, content):
    keeps(tmp_path / "foreign", content)


@pytest.mark.long
@pytest.mark.parametrize("examples", sweep([12, 40], lambda examples: examples == 12))
def test_nothing_foreign_behind_completions_is_lost(whole, tmp_path, unsynced, examples):
    @given(content=foreign())
    @settings(max_examples=examples, deadline=None)
    def run(content):
        keeps(tmp_path / "foreign", whole.splitlines(keepends=True)[0] + content)

    run()


def test_a_job_that_is_refused_cuts_nothing_off(whole, tmp_path):
    target = tmp_path / "cut.jsonl"
    target.write_bytes(whole[:-9])
    with pytest.raises(InputError, match="written with"):
        go_on(target, made_by={**MADE_BY, "budget": 9})
    assert target.read_bytes() == whole[:-9]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "f" * 16}, 'weights="0123456789abcdef", and this job has weights="ffffffffffffffff"'),
        ({"budget": 23}, "budget=24, and this job has budget=23"),
        ({"format": 4}, "format=3, and this job has format=4"),
    ],
)
def test_a_job_does_not_go_on_with_another_maker(whole, tmp_path, changes, words):
    target = tmp_path / "out.jsonl"
    target.write_bytes(whole)
    with pytest.raises(InputError, match=words), OutputFile.open(target) as output:
        output.agree({**MADE_BY, **changes})


def test_settings_are_compared_before_the_weights_are_known(whole, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_bytes(whole)
    early = {name: value for name, value in MADE_BY.items() if name != "weights"}
    with OutputFile.open(target) as output:
        output.agree(early)
        with pytest.raises(InputError, match="budget=1"):
            output.agree({**early, "budget": 1})
        with pytest.raises(InputError, match="weights"):
            output.agree({**early, "weights": "f" * 16})


def line_of(number, **made_by):
    """A line of an output that was written with these settings."""
    completion = {"line": number, "digest": DIGESTS[number], "made_by": made_by, "text": "a"}
    return json.dumps({"id": 1, COMPLETION: completion}).encode() + b"\n"


@pytest.mark.parametrize("version", [{}, {"format": 2, "weights": MADE_BY["weights"]}])
def test_an_output_of_an_older_version_is_refused(tmp_path, version):
    """It may hold texts that this version reads in other pieces or draws otherwise."""
    target = tmp_path / "out.jsonl"
    settings = {name: value for name, value in MADE_BY.items() if name != "weights"}
    target.write_bytes(before := line_of(2, **settings, **version))
    with pytest.raises(InputError, match=f"written with format={version.get('format', 1)}, and this job has format=3"):
        go_on(target)
    assert target.read_bytes() == before


def test_an_output_of_different_jobs_is_refused(tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_bytes(line_of(1, format=3, **MADE_BY) + line_of(2, format=3, **{**MADE_BY, "budget": 9}))
    with pytest.raises(InputError, match="different jobs, with budget=24 and with budget=9"):
        OutputFile.open(target)


def test_another_line_of_the_same_beginning_of_a_fingerprint_is_another_line(whole, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_bytes(whole)
    other = DIGESTS[1][:16] + "0" * 16
    with pytest.raises(InputError, match="Line 1 of the input is not the one"), OutputFile.open(target) as output:
        output.check({**DIGESTS, 1: other})


def strict(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_no_numbers_are_null(tmp_path, value):
    logprobs = (Logprob(1, value, ((1, value), (2, -0.5))),)
    go_on(tmp_path / "out.jsonl", logprobs=logprobs, tpot_s=value)
    for text in (tmp_path / "out.jsonl").read_text().splitlines():
        completion = strict(text)[COMPLETION]
        assert completion["logprobs"] == [{"token_id": 1, "value": None, "top": [[1, None], [2, -0.5]]}]
        assert completion["tpot_s"] is None


def test_lines_that_have_gone_from_the_disk_are_missed(tmp_path):
    target = tmp_path / "out.jsonl"

    def spoil(kind):
        whole = target.read_bytes()
        target.unlink()
        if kind == "replaced":
            target.write_bytes(b"notes\n")
        elif kind == "cut":
            target.write_bytes(whole.splitlines(keepends=True)[0])

    for kind, left in [("removed", set()), ("replaced", set()), ("cut", {1})]:
        target.unlink(missing_ok=True)
        with OutputFile.open(target) as output:
            output.agree(MADE_BY)
            for line in LINES:
                output.write(line, result_of())
            spoil(kind)
            assert output.finish() == left


def test_what_is_written_comes_to_the_disk_every_few_seconds_and_at_the_end(tmp_path, monkeypatch):
    synced, clock = [], iter(range(100))
    monkeypatch.setattr(result_files, "sync", lambda file: synced.append(os.fstat(file.fileno()).st_size))
    monkeypatch.setattr(outputs.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(outputs, "SYNC_S", 1.5)
    go_on(tmp_path / "out.jsonl")
    whole = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    sizes = [len(b"".join(whole[:n])) for n in range(5)]
    assert synced == [sizes[2], sizes[4], sizes[4]]


def test_an_output_that_the_disk_does_not_give_back(tmp_path, monkeypatch):
    def broken(self, file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(OutputFile, "_take_up", broken)
    with pytest.raises(InputError, match="cannot be read: Input/output error"):
        OutputFile.open(tmp_path / "out.jsonl")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000])
def test_a_name_that_is_too_long_for_the_disk(tmp_path, name):
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello"})
    for args, what in [(("-i", source, "-o", tmp_path / name), "written"), (("-i", name, "-o", source), "read")]:
        result = run(*args)
        assert (result.exit_code, f"cannot be {what}: File name too long" in result.said) == (2, True), result.said


@pytest.mark.slow
def test_two_processes_at_once_write_every_line_once(tmp_path):
    entries = [{"prompt": f"Once {i}", "options": {"max_new_tokens": 3}} for i in range(40)]
    source, target = write(tmp_path / "in.jsonl", *entries), tmp_path / "out.jsonl"
    both = [processes.kvkeep("generate", "-i", source, "-o", target, "--budget", 16) for _ in range(2)]
    for process in both:
        process.join()
    codes = sorted(process.exitcode for process in both)
    assert codes in ([0, 2], [0, 0])  # the second may come after the first has ended
    assert len(target.read_text().splitlines()) == len(completions(target)) == 40


@pytest.mark.parametrize("name", ["budget", "weight_layout", "x" * 10**5])
@pytest.mark.parametrize("value", ["x" * 10**5, [[0] * 10**5], int("9" * 4000)], ids=["text", "list", "number"])
def test_settings_of_any_size_in_a_file_make_no_long_error(tmp_path, name, value):
    target = tmp_path / "hostile.jsonl"
    write(target, {COMPLETION: {"line": 1, "digest": DIGESTS[1], "made_by": {"format": 3, name: value}}})
    with OutputFile.open(target) as output:
        assert output.weight_layout is None
        with pytest.raises(InputError, match="was written with") as refused:
            output.agree(MADE_BY)
    assert len(str(refused.value)) < 1000


def test_lines_with_different_layouts_are_one_job(whole, tmp_path):
    """The last line says how its next run lays the weights out; lines of earlier versions do not say it."""
    entries = [json.loads(line) for line in whole.splitlines()[:3]]
    for entry, layout in zip(entries, (None, [True, False], [False, True]), strict=True):
        entry[COMPLETION]["made_by"] |= {} if layout is None else {"weight_layout": layout}
    target = write(tmp_path / "mixed.jsonl", *entries)
    with OutputFile.open(target) as output:
        assert output.weight_layout == (False, True)
        output.agree(MADE_BY)
        output.check(DIGESTS)
    assert go_on(target, made_by={**MADE_BY, "weight_layout": (True, True)}) == set(DIGESTS)
