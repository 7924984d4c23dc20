"""Batch jobs when something goes wrong: lines fail, files change, memory ends, streams are closed."""

import json
import os
import tracemalloc
from pathlib import Path

import model_folders
import processes
import pytest
import torch
from commands import completions, result_of, run, write
from safetensors.torch import load_file, save_file

from kvkeep.batch.input import COMPLETION, InputLine
from kvkeep.batch.output import OutputFile
from kvkeep.batch.survey import Survey
from kvkeep.cli import generate_batch
from kvkeep.cli import generate_batch_workers as encoding
from kvkeep.engine import Engine, Request
from kvkeep.engine.model_runner import ModelRunner
from kvkeep.engine.request import Event
from kvkeep.errors import InputError
from kvkeep.models.device import enough_memory, is_out_of_memory

N = 6
SMALL = ("--budget", 20, "-n", 2)


@pytest.fixture
def files(tmp_path):
    """An input of six lines and the name of an output."""
    return write(tmp_path / "in.jsonl", *({"prompt": f"Once {i}", "id": i} for i in range(N))), tmp_path / "out.jsonl"


def job_of(files, *args):
    return run("-i", files[0], "-o", files[1], *SMALL, *args)


def whole(files):
    """Go on with a job, and see that it is complete."""
    assert job_of(files).exit_code == 0
    assert sorted(completions(files[1])) == list(range(1, N + 1))
    assert len(files[1].read_text().splitlines()) == N


def command(args, *, closed, tmp_path):
    """Run the command in a process of its own whose streams are closed as by ``<&-``; exit code, output, errors."""
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    process = processes.kvkeep(*args, closed=closed, out=out, err=err)
    process.join()
    return process.exitcode, *(path.read_text() if path.exists() else "" for path in (out, err))


# ------------------------------------------------------------------ lines that fail


def failing_steps(monkeypatch, fails):
    """Let the engine end requests whose numbers `fails` chooses with an error, as after a step that failed."""
    step = Engine.step

    def failing(self):
        return [
            event
            if event.result is None or not fails(event.id)
            else Event(event.id, None, "", result_of(finish_reason="error", error="the step ran into a wall."))
            for event in step(self)
        ]

    monkeypatch.setattr(Engine, "step", failing)


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_lines_that_fail_are_counted_and_tried_again(files, monkeypatch, as_json):
    failing_steps(monkeypatch, lambda number: number in (2, 4))
    result = job_of(files, *(["--json"] if as_json else []))
    assert result.exit_code == 1
    assert "2 of 6 lines failed, first line 3: the step ran into a wall" in result.said
    assert "the same command goes on from there" in result.said
    assert sorted(completions(files[1])) == [1, 2, 4, 6]
    if as_json:
        told = json.loads(result.stdout)
        assert (told["lines"], told["done"], told["failed"]) == (6, 4, 2)
    monkeypatch.undo()
    whole(files)


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("a wall."), MemoryError(), ValueError("\n\x1b[31m")], ids=repr)
def test_a_step_that_fails_costs_the_lines_of_its_batch(files, monkeypatch, error):
    step, calls = ModelRunner.run, iter(range(1000))

    def failing(self, *args, **kwargs):
        if next(calls) == 1:
            raise error
        return step(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "run", failing)
    result = job_of(files, "--max-rows", 2)
    assert result.exit_code == 1, result.said
    assert "of 6 lines failed, first line" in result.said
    assert "\x1b" not in result.output
    assert 0 < len(completions(files[1])) < N
    monkeypatch.undo()
    whole(files)


@pytest.mark.slow
def test_a_line_that_the_engine_refuses_in_the_end_stops_no_other(files, monkeypatch):
    add = Engine.add

    def refusing(self, request):
        if self._count == 3 and not getattr(self, "refused", False):
            self.refused = True
            raise InputError("not today.")
        return add(self, request)

    monkeypatch.setattr(Engine, "add", refusing)
    result = job_of(files)
    assert (result.exit_code, "1 of 6 lines failed, first line 4: not today" in result.said) == (1, True), result.said
    monkeypatch.undo()
    whole(files)


# ------------------------------------------------------------------ files that change meanwhile


def changed(path, number, line):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[: number - 1], *line, *lines[number:]]) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda path: changed(path, 3, ['{"prompt": "another"}']), {3}),
        (lambda path: changed(path, 3, ['{"prompt": "Once 2", "id": 3}']), {3}),
        (lambda path: changed(path, 3, []), {3, 4, 5, 6}),
        (lambda path: os.truncate(path, path.stat().st_size - 40), {5, 6}),
        (lambda path: os.truncate(path, 0), {1, 2, 3, 4, 5, 6}),
        (lambda path: path.write_text(path.read_text().replace("\n", "\n\n")), {2, 3, 4, 5, 6}),
    ],
    ids=["text", "field", "removed", "cut", "emptied", "moved"],
)
def test_an_input_that_changes_after_it_was_checked_is_not_confused(files, monkeypatch, change, missing):
    source, target = files
    before = source.read_text()
    fingerprint = generate_batch.fingerprint
    monkeypatch.setattr(generate_batch, "fingerprint", lambda model: (fingerprint(model), change(source))[0])
    result = job_of(files)
    assert result.exit_code == 1, result.said
    assert f"{len(missing)} of 6 lines of the input changed or went away" in result.said
    assert f"first line {min(missing)}" in result.said
    found = completions(target)
    assert set(found) == set(range(1, N + 1)) - missing
    assert all(entry["id"] == number - 1 for number, entry in found.items())
    source.write_text(before)
    monkeypatch.undo()
    whole(files)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["removed", "replaced", "cut", "moved"])
def test_an_output_that_goes_away_while_the_job_runs_is_reported(files, monkeypatch, kind):
    target = files[1]
    finish = OutputFile.finish

    def spoil(self):
        data = target.read_bytes()
        if kind == "cut":
            os.truncate(target, len(data.splitlines(keepends=True)[0]))
        else:
            target.rename(f"{target}.away")
        if kind == "replaced":
            target.write_text("my notes\n")
        return finish(self)

    monkeypatch.setattr(OutputFile, "finish", spoil)
    result = job_of(files, "--json")
    n_lost = 5 if kind == "cut" else 6
    assert result.exit_code == 1
    assert f"{n_lost} of 6 completions are missing there" in result.said
    assert json.loads(result.stdout)["done"] == 6 - n_lost
    monkeypatch.undo()
    if kind != "replaced":
        whole(files)


def test_every_line_is_tokenised_at_most_twice_and_what_is_done_once(files, monkeypatch):
    seen, encode = [], encoding._encode

    def counting(checkpoint, asked):
        seen.append(asked)
        return encode(checkpoint, asked)

    monkeypatch.setattr(encoding, "_encode", counting)
    assert job_of(files).exit_code == 0
    assert len(seen) == 2 * N
    seen.clear()
    assert job_of(files).exit_code == 0
    assert len(seen) == N


@pytest.mark.slow
def test_what_is_kept_of_a_line_does_not_grow_with_its_length():
    def kept(length):
        survey, request = Survey(), Request(prompt=[1] * length)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000):
            survey.add(InputLine(number, f"{number:032x}", {"id": "x" * length}, request))
        found = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return found / 1000

    kept(5), kept(5000)  # what checks of annotations remember is made once
    assert kept(5000) < kept(5) + 10 < 500


# ------------------------------------------------------------------ lines that are set aside


@pytest.mark.slow
def test_bad_lines_of_a_job_to_standard_output_go_to_standard_error(files, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    source = write(files[0], {"prompt": "Hello"}, "{\x1b[31mnope", {"prompt": ""})
    args = ("generate", "-i", source, "-o", "-", *SMALL, "--skip-bad")
    code, out, err = command(args, closed=set(), tmp_path=tmp_path)
    assert (code, list(folder.iterdir())) == (0, []), err
    assert [json.loads(text)[COMPLETION]["line"] for text in out.splitlines()] == [1]
    aside = [json.loads(text) for text in err.splitlines() if text.startswith("{")]
    assert [(entry["line"], entry["text"]) for entry in aside] == [(2, "{\x1b[31mnope"), (3, '{"prompt": ""}')]
    assert "2 lines cannot be run and are set aside below" in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "mine"}\n{nope\n',
        "notes",
        '{"line": 1, "reason": "x"}\n',
        '{"line": 1, "reason": "x", "text": "y", "more": 1}\n',
        '{"line": 1, "reason": "x", "text": "y"}\nnotes\n',
        "[" * 100_000,
        "\n",
        "",
    ],
    ids=lambda content: repr(content[:30]),
)
def test_a_file_that_no_job_has_written_is_not_overwritten_with_bad_lines(files, content):
    source, target = write(files[0], {"prompt": "Hello"}, "{nope"), files[1]
    aside = Path(f"{target}.bad")
    aside.write_text(content)
    result = run("-i", source, "-o", target, *SMALL, "--skip-bad")
    assert (result.exit_code, "holds something else. Rename it" in result.said) == (2, True), result.said
    assert aside.read_text() == content
    assert not target.exists() or not target.read_bytes()


def test_bad_lines_of_a_job_that_is_writing_are_not_replaced(files):
    source, target = write(files[0], {"prompt": "Hello"}, "{nope"), files[1]
    other = Path(f"{target}.bad")
    with OutputFile.open(other):
        other.write_bytes(before := b'{"line": 1, "reason": "x", "text": "y"}\n')
        result = run("-i", source, "-o", target, *SMALL, "--skip-bad")
    assert (result.exit_code, f"Another run is writing to {other}" in result.said) == (2, True), result.said
    assert other.read_bytes() == before


def test_what_a_killed_job_left_beside_its_bad_lines_is_removed(files):
    source, target = write(files[0], {"prompt": "Hello"}, "{nope"), files[1]
    left = target.with_name(f".{target.name}.bad.abcd1234.new")
    left.write_text("")
    os.utime(left, (0, 0))
    assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 0
    assert not left.exists()


def test_an_input_that_has_the_name_for_bad_lines_is_not_overwritten(tmp_path):
    source = write(tmp_path / "x.jsonl.bad", {"prompt": "Hello"}, "{nope")
    before = source.read_bytes()
    result = run("-i", source, "-o", tmp_path / "x.jsonl", *SMALL, "--skip-bad")
    assert (result.exit_code, "holds something else" in result.said) == (2, True), result.said
    assert source.read_bytes() == before


@pytest.mark.slow
def test_bad_lines_of_an_earlier_run_are_replaced_and_links_are_not_followed(files, tmp_path):
    source, target = write(files[0], {"prompt": "Hello"}, "{nope", "[1]"), files[1]
    aside = Path(f"{target}.bad")
    for lines in ([2, 3], [2]):
        assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 0
        assert [json.loads(text)["line"] for text in aside.read_text().splitlines()] == lines
        write(source, {"prompt": "Hello"}, "{nope")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(aside.read_bytes() * 2)
    aside.unlink()
    aside.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert run("-i", source, "-o", target, *SMALL, "--skip-bad").exit_code == 0
    assert elsewhere.read_bytes() == before


def test_a_reason_does_not_repeat_megabytes(files):
    write(files[0], {"prompt": "x", "options": {"temperature": "hot" * 10**6}})
    assert len(run("-i", files[0], "-o", files[1]).output) < 2000


# ------------------------------------------------------------------ going on


def other_weights(folder, target):
    """A copy of a model folder with one number changed."""
    model_folders.copy(target)
    weights = load_file(folder / "model.safetensors")
    name = min(weights)
    weights[name].flatten()[0].add_(1.0)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_job_does_not_go_on_with_other_weights_under_the_same_name(files, tmp_path):
    model = model_folders.copy(tmp_path / "model")
    assert run(model, "-i", files[0], "-o", files[1], *SMALL).exit_code == 0
    before = files[1].read_bytes()
    other_weights(model, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(model / "model.safetensors")
    result = run(model, "-i", files[0], "-o", files[1], *SMALL)
    assert result.exit_code == 2
    assert "was written with weights=" in result.said
    assert "Give another output file, or the same settings and weights" in result.said
    assert files[1].read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_without_a_budget_a_job_goes_on_with_the_one_it_was_begun_with(files, policy):
    source, target = files
    args = ("-i", source, "-o", target, "--policy", policy, "-n", 2)
    write(source, {"prompt": "Once upon a time there was a dog"}, {"prompt": "One"})
    assert run(*args).exit_code == 0
    budget = completions(target)[1][COMPLETION]["made_by"]["budget"]
    with source.open("a") as file:
        file.write(json.dumps({"prompt": "Hello" if policy == "full" else "Once upon a time " * 20}) + "\n")
        file.write(json.dumps({"prompt": "Two"}) + "\n")
    result = run(*args)
    assert result.exit_code == 0, result.said
    assert {entry[COMPLETION]["made_by"]["budget"] for entry in completions(target).values()} == {budget}
    assert sorted(completions(target)) == [1, 2, 3, 4]
    assert (f"budget {budget}, with which" in result.said) == (policy == "h2o")


def test_a_line_that_does_not_fit_the_budget_of_the_earlier_run_is_explained(files):
    source, target = files
    args = ("-i", source, "-o", target, "--policy", "full", "-n", 2)
    write(source, {"prompt": "Hello"})
    assert run(*args).exit_code == 0
    before = target.read_bytes()
    with source.open("a") as file:
        file.write(json.dumps({"prompt": "Once upon a time " * 5}) + "\n")
    result = run(*args)
    assert result.exit_code == 2
    assert f"withwhich{target}wasbegun" in "".join(result.said.split())  # a long name is broken over lines
    assert "Line 2 cannot be run: full does not evict" in result.said
    assert "with another output file it would be 32" in result.said
    assert target.read_bytes() == before


# ------------------------------------------------------------------ memory


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
]


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:20])
@pytest.mark.parametrize("place", ["loading", "encoding", "packing", "step"])
def test_too_little_memory_is_one_line(files, monkeypatch, error, place):
    target, name = {
        "loading": ("transformers.AutoModelForCausalLM", "from_pretrained"),
        "encoding": ("kvkeep.cli.generate_batch_workers", "_encode"),
        "packing": ("kvkeep.cli.generate_batch_workers", "prepare"),
        "step": ("kvkeep.engine.Engine", "step"),
    }[place]
    monkeypatch.setattr(f"{target}.{name}", raising(error))
    result = job_of(files)
    assert result.exit_code == 2
    assert "error: Out of memory on" in result.said


def test_what_is_out_of_memory():
    assert all(map(is_out_of_memory, OUT_OF_MEMORY))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("not enough memory"))
    with pytest.raises(RuntimeError, match="shapes differ"), enough_memory(torch.device("cpu")):
        raise RuntimeError("shapes differ")


def test_a_command_without_memory_says_so(monkeypatch):
    monkeypatch.setattr("kvkeep.cli.generate_run.serve", raising(MemoryError()))
    result = run("-p", "Hello")
    assert (result.exit_code, "too little memory" in result.said) == (2, True)


# ------------------------------------------------------------------ closed streams


STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "args", "code", "words"),
    [
        ("stdin", ("generate", "-"), 2, "Standard input cannot be read: Bad file descriptor"),
        ("stdin", ("generate", "-i", "-", "-o", "OUT"), 2, "Standard input cannot be read"),
        ("stdin", ("generate", "-i", "IN", "-o", "OUT", *SMALL), 0, "tokens/s"),
        ("stdout", ("generate", "-i", "IN", "-o", "OUT", *SMALL), 0, "tokens/s"),
        ("stdout", ("generate", "-i", "IN", "-o", "-", *SMALL), 2, "standard output cannot be written: Bad file"),
        ("stdout", ("generate", "-p", "Hello", "-n", 1), 1, "Standard output cannot be written: Bad file descriptor"),
        ("stdout", ("policies",), 1, "Standard output cannot be written"),
        ("stdout", ("--version",), 1, "Standard output cannot be written"),
        ("stderr", ("generate", "-i", "IN", "-o", "OUT", *SMALL), 0, ""),
        ("stderr", ("generate", "-i", "nothing", "-o", "OUT", *SMALL), 2, ""),
        ("stdin stdout stderr", ("generate", "-i", "IN", "-o", "OUT", *SMALL), 0, ""),
        ("stdin stdout stderr", ("generate", "-i", "IN", "-o", "-", *SMALL), 2, ""),
    ],
)
def test_closed_streams(files, tmp_path, closed, args, code, words):
    args = [{"IN": files[0], "OUT": files[1]}.get(word, word) for word in args]
    found, out, err = command(args, closed={STREAMS[name] for name in closed.split()}, tmp_path=tmp_path)
    assert found == code, err
    assert words in err
    assert "Traceback" not in err
    assert out == ""
    if code == 0:
        assert sorted(completions(files[1])) == list(range(1, N + 1))
        assert len(files[1].read_bytes().splitlines()) == N
