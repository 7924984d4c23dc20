"""``kvkeep remember`` and ``--memory``: answers are those of the whole conversation, and files are whole or absent."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from dataclasses import replace

import memories
import model_folders
import processes
import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import remember_run
from kvkeep.cli.main import app
from kvkeep.engine import Engine, Session
from kvkeep.models.load import load, quiet
from kvkeep.models.quantized_weights import is_packable
from kvkeep.policies import FALLBACK, LATER
from kvkeep.snapshot.fidelity import Fidelity

TEXT = "the quick brown fox jumps over the lazy dog and the cat. " * 12
QUESTION = "what does the fox do"


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = model_folders.copy(tmp_path_factory.mktemp("models") / "chat")
    model_folders.edit_json(folder / "tokenizer_config.json", chat_template=model_folders.TEMPLATE)
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(f"\n{TEXT}\n")
    return tmp_path / "text.txt"


def kv(*words, code=0, stdin=None):
    done = CliRunner().invoke(app, [*map(str, words)], input=stdin)
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def remember(model, text, *words, **options):
    file = text.parent / "text.kvkeep"
    return file, kv("remember", model, "-f", text, "-o", file, *words, **options)


def generated(model, *words):
    return json.loads(kv("generate", model, "-n", 8, "--json", *words).stdout)


def refused(*words, stdin=None):
    """The one line that a mistake gets."""
    done = kv(*words, code=2, stdin=stdin)
    assert done.stdout == ""
    notes, _, error = done.stderr.rpartition("error: ")
    assert error.count("\n") == 1
    assert notes == "" or notes.startswith("note: ")
    return error


# ------------------------------------------------------------------ the answers


@pytest.mark.parametrize("chunk", [[], ["--prefill-chunk", 16]], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", ["chat", "plain", "raw"])
def test_the_answer_is_that_of_the_full_conversation(kind, chunk, chat_model, text):
    model, raw = (model_folders.folder() if kind == "plain" else chat_model), ["--raw"] * (kind == "raw")
    file, _ = remember(model, text, "--policy", "full", *raw, *chunk)
    after = generated(model, "--memory", file, "-p", QUESTION, *raw)
    whole = generated(model, "-p", f"{TEXT.strip()}\n\n{QUESTION}", "--policy", "full", *raw, *chunk)
    assert after["token_ids"] == whole["token_ids"]
    assert after["prompt_tokens"] == whole["prompt_tokens"]
    assert after["cached_tokens"] > 0.8 * whole["prompt_tokens"]
    assert (after["memory_file"], whole["cached_tokens"]) == (str(file), 0)


@pytest.mark.slow
def test_the_answer_is_that_of_a_session_under_the_default_policy(chat_model, text):
    file, _ = remember(chat_model, text, "-b", 24)
    with quiet():
        model, tokenizer = load(chat_model)
    engine = Engine(model, tokenizer, policy=LATER, budget=24, rows=1)
    memory = engine.remember(TEXT)
    asked = kvkeep.Request(prompt=QUESTION, snapshot=memory, sampling=kvkeep.SamplingParams(max_new_tokens=8))
    (want,) = engine.generate(asked)
    assert tuple(generated(chat_model, "--memory", file, "-p", QUESTION)["token_ids"]) == want.token_ids
    session = engine.session(snapshot=memory)
    assert session.ask(QUESTION, kvkeep.SamplingParams(max_new_tokens=8)).token_ids == want.token_ids
    assert [one["role"] for one in session.messages] == ["user", "assistant"]
    assert session.messages[0]["content"].endswith(f"and the cat.\n\n{QUESTION}")


def test_the_system_message_is_before_the_text(chat_model, text):
    file, _ = remember(chat_model, text, "--policy", "full", "--system", "be brief")
    after = generated(chat_model, "--memory", file, "-p", QUESTION)
    whole = generated(chat_model, "-p", f"{TEXT.strip()}\n\n{QUESTION}", "--policy", "full", "--system", "be brief")
    assert after["token_ids"] == whole["token_ids"]


def test_a_memory_brings_all_of_its_settings(text):
    words = ["--policy", "h2o:recent=4", "-b", 20, "--prefill-chunk", 32, "--layer-budget", "ramp:0.2"]
    model = model_folders.folder()
    file, _ = remember(model, text, *words, "--positions", "slot", "--dtype", "bfloat16")
    found = generated(model, "--memory", file, "-p", QUESTION)
    assert (found["policy"], found["budget"], found["prefill_chunk"]) == ("h2o:recent=4", 20, 32)
    assert (found["layer_budget"], found["positions"], found["dtype"]) == ("ramp:0.2", "slot", "bfloat16")
    same = generated(model, "--memory", file, "-p", QUESTION, *words, "--positions", "slot", "--dtype", "bfloat16")
    assert same["token_ids"] == found["token_ids"]


def test_a_policy_of_ones_own_is_named_again(text, tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text(
        "from dataclasses import dataclass\nfrom kvkeep import Policy\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Newest(Policy):\n"
        "    def score(self, view, state):\n        return view.positions.float()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model, own = model_folders.folder(), ["--policy", "of_mine:Newest"]
    file, _ = remember(model, text, *own, "-b", 16)
    assert "pass it as --policy" in refused("generate", model, "--memory", file, "-p", QUESTION)
    assert generated(model, "--memory", file, "-p", QUESTION, *own)["budget"] == 16


# ------------------------------------------------------------------ the model of a file


def asked_without_a_model(file, *words):
    return json.loads(kv("generate", "-n", 8, "--json", "--memory", file, "-p", QUESTION, *words).stdout)


def test_a_file_knows_its_model(chat_model, text, tmp_path, monkeypatch):
    monkeypatch.chdir(chat_model.parent)
    file, _ = remember(chat_model.name, text, "-b", 24)
    monkeypatch.chdir(tmp_path)
    found = asked_without_a_model(file)
    assert found["model"] == str(chat_model)
    assert found["token_ids"] == generated(chat_model, "--memory", file, "-p", QUESTION)["token_ids"]


@pytest.mark.long
def test_a_file_of_the_embedded_model_knows_it(text):
    file = text.parent / "embedded.kvkeep"
    kv("remember", "-f", text, "-o", file, "-b", 64)
    assert kvkeep.Snapshot.load(file).note["model"] is None
    assert asked_without_a_model(file)["cached_tokens"] > 64


def test_the_model_of_a_file_is_gone(text, tmp_path):
    folder = model_folders.copy(tmp_path / "gone")
    file, _ = remember(folder, text, "-b", 24)
    shutil.move(folder, tmp_path / "moved")
    said = refused("generate", "--memory", file, "-p", QUESTION)
    assert said.startswith(f"No MODEL was given, and {file} was made with {folder}. ")
    assert "does not exist. Give the MODEL" in said
    assert generated(tmp_path / "moved", "--memory", file, "-p", QUESTION)["budget"] == 24


def test_the_model_of_a_file_has_changed(text, tmp_path):
    folder = model_folders.copy(tmp_path / "changed")
    file, _ = remember(folder, text, "-b", 24)
    shutil.rmtree(folder)
    model_folders.copy(folder, family="opt")
    said = refused("generate", "--memory", file, "-p", QUESTION)
    assert f"That is not {folder}, or has changed." in said


def test_a_file_that_names_no_model(tmp_path):
    file = memories.save(tmp_path / "library.kvkeep")
    said = refused("generate", "--memory", file, "-p", QUESTION)
    assert said.startswith(f"No MODEL was given, and {file} was made with kvkeep-test-")
    assert "That is not the embedded model, or has changed. Give the MODEL" in said
    assert "tiny" not in said


@pytest.mark.parametrize("name", [7, "", " ", ["a"]], ids=repr)
def test_a_file_whose_note_names_no_model(name, tmp_path):
    file = tmp_path / "x.kvkeep"
    replace(memories.snapshot(), note={"model": name}).save(file)
    assert "which is no name. Give the MODEL" in refused("generate", "--memory", file, "-p", QUESTION)


def test_pickles_are_read_for_a_model_that_the_user_names(chat_model, text):
    file, _ = remember(chat_model, text, "-b", 24)
    said = refused("generate", "--memory", file, "-p", QUESTION, "--allow-pickle")
    assert f"--allow-pickle is for a model that you name, and {file} names {chat_model}" in said


# ------------------------------------------------------------------ what is printed and written


@pytest.mark.skipif(not is_packable(torch.device("cpu")), reason="needs the native kernel")
def test_the_printed_command_asks_a_memory_of_quantised_weights(chat_model, text):
    file, done = remember(chat_model, text, "--load-in", "int8")
    words = shlex.split(done.stdout.splitlines()[-1])
    assert words == ["kvkeep", "generate", "--load-in", "int8", "--memory", str(file), "-p", "QUESTION"]
    kv(*words[1:], "-n", 4)
    assert "which --load-in changes as well" in refused("generate", "--memory", file, "-p", QUESTION)


def test_the_summary_and_the_numbers(chat_model, text):
    file, done = remember(chat_model, text, "-b", 32)
    said = " ".join(done.stdout.split())
    assert f"{LATER}, budget 32; float32 on cpu" in said
    assert f"kvkeep generate --memory {file} -p QUESTION\n" in done.stdout  # on one line, to be copied
    done = kv("remember", chat_model, "-f", text, "-o", file, "-b", 32, "--json", "--overwrite")
    found = json.loads(done.stdout)
    assert found["file_bytes"] == file.stat().st_size
    assert found["memory"]["full_bytes"] == found["tokens"] * 2 * 2 * 2 * 8 * 4
    assert (found["policy"], found["budget"], found["positions"]) == (kvkeep.spec(kvkeep.parse(LATER)), 32, "true")
    assert json.loads(kv("memory", file, "--json").stdout)["tokens_seen"] == found["tokens"]
    assert "a text that questions may follow" in kv("memory", file).stdout


def test_a_model_without_rotary_positions_has_the_policy_of_conversations(text):
    text.write_text("the fox and the cat and the dog")
    file, done = remember(model_folders.folder("gpt2"), text, "-b", 13, "--json")
    assert json.loads(done.stdout)["policy"] == kvkeep.spec(kvkeep.parse(FALLBACK))
    kv("generate", "--memory", file, "-p", "why", "-n", 3)


def test_a_policy_that_keeps_all_has_room_for_questions(text):
    _, done = remember(model_folders.folder(), text, "--policy", "full", "--json")
    found = json.loads(done.stdout)
    assert found["budget"] == found["tokens"] + remember_run.ROOM


def test_a_text_from_standard_input(text):
    file = text.parent / "piped.kvkeep"
    kv("remember", model_folders.folder(), "-f", "-", "-o", file, stdin=TEXT)
    other, _ = remember(model_folders.folder(), text)
    assert file.read_bytes() == other.read_bytes()


def test_a_text_longer_than_the_trained_length(text):
    _, done = remember(model_folders.folder(), text)
    assert "--positions slot" in " ".join(done.stderr.split())
    _, done = remember(model_folders.folder(), text, "--positions", "slot", "--overwrite")
    assert done.stderr == ""


def test_nothing_is_overwritten_without_a_word(text):
    file, _ = remember(model_folders.folder(), text, "-b", 16)
    before = file.read_bytes()
    said = refused("remember", model_folders.folder(), "-f", text, "-o", file, "-b", 32)
    assert "exists. Give another --output, or --overwrite" in said
    assert file.read_bytes() == before
    remember(model_folders.folder(), text, "-b", 32, "--overwrite")
    assert file.read_bytes() != before


def test_a_file_that_appears_while_the_text_is_read_is_not_overwritten(text, monkeypatch):
    file, read = text.parent / "late.kvkeep", Session.read

    def slow(self, ids):
        file.write_text("mine")
        return read(self, ids)

    monkeypatch.setattr(Session, "read", slow)
    assert "exists" in refused("remember", model_folders.folder(), "-f", text, "-o", file)
    assert file.read_text() == "mine"


def test_a_share_of_the_text_is_a_budget(text):
    _, done = remember(model_folders.folder(), text, "-b", "25%", "--json", "--no-fidelity")
    made = json.loads(done.stdout)
    assert made["budget"] == made["tokens"] // 4
    assert "outside 0" in refused("remember", model_folders.folder(), "-f", text, "-o", "none", "-b", "120%")


def test_ctrl_c_leaves_nothing(text, monkeypatch):
    def stop(self, ids):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "read", stop)
    file, done = remember(model_folders.folder(), text, code=130)
    assert "was not written" in " ".join(done.stderr.split())
    assert [one.name for one in file.parent.iterdir()] == ["text.txt"]


def test_ctrl_c_after_the_file_is_written_says_so(text, monkeypatch):
    def stop(request, writer, made):
        raise KeyboardInterrupt

    monkeypatch.setattr(remember_run, "_report", stop)
    file, done = remember(model_folders.folder(), text, code=130)
    assert f"stopped;{file}waswritten" in "".join(done.stderr.split())  # a long path is broken anywhere
    assert file.exists()


def test_a_full_disk_leaves_the_old_file(text, monkeypatch):
    file, _ = remember(model_folders.folder(), text, "-b", 16)
    before = file.read_bytes()

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvkeep.snapshot.snapshot.write_whole", full)
    said = refused("remember", model_folders.folder(), "-f", text, "-o", file, "--overwrite")
    assert "No space left on device" in said
    assert file.read_bytes() == before


@pytest.mark.slow
def test_a_kill_leaves_the_old_file_or_the_new_one(text):
    file, _ = remember(model_folders.folder(), text, "-b", 16)
    before = file.read_bytes()
    for wait in (0.2, 0.6, 1.0, 1.5):
        words = ["remember", model_folders.folder(), "-f", text, "-o", file, "-b", 16, "--overwrite"]
        process = processes.kvkeep(*words)
        time.sleep(wait)
        process.kill()  # it may have ended
        process.join()
        assert file.read_bytes() == before  # the same text gives the same bytes


# ------------------------------------------------------------------ what a memory is worth


class Quoted:
    """In place of passages: a memory keeps the share of the tokens that its budget holds."""

    def __init__(self, writer, ids, *, adapter=None):
        self.tokens = len(ids)

    def measure(self, snapshot, policy):
        budget = snapshot.fingerprint.budget
        return Fidelity(min(1.0, budget / self.tokens), 0.02, 6)


@pytest.fixture
def quoted(monkeypatch):
    monkeypatch.setattr(remember_run, "Passages", Quoted)


def said(done):
    return " ".join(done.stdout.split())


def test_a_memory_says_what_it_is_worth(quoted, text):
    file, done = remember(model_folders.folder(), text, "-b", 16)
    tokens = kvkeep.Snapshot.load(file).seen
    line = f"keeps {100 * 16 / tokens:.0f} % (± 2) of what 6 passages of the text tell"
    assert f"fidelity {line}; --fidelity 0.9 finds the budget that keeps 90%" in said(done)
    shown = kv("memory", file)
    assert f"fidelity {line}" in said(shown)
    assert json.loads(kv("memory", file, "--json").stdout)["fidelity"] == {
        "share": 16 / tokens,
        "error": 0.02,
        "passages": 6,
    }


def test_the_embedded_model_is_measured(text):
    text.write_text(" ".join(f"The key of room {n} is {n * 37 % 101}." for n in range(40)))
    file = text.parent / "embedded.kvkeep"
    done = json.loads(kv("remember", "-f", text, "-o", file, "-b", 64, "--json").stdout)
    assert 0 <= done["fidelity"]["share"] < 1
    assert done["fidelity_seconds"] > 0
    assert json.loads(kv("memory", file, "--json").stdout)["fidelity"] == done["fidelity"]


def test_a_memory_that_keeps_all_is_not_measured(text, monkeypatch):
    monkeypatch.setattr(remember_run, "Passages", None)
    _, done = remember(model_folders.folder(), text)
    assert "fidelity keeps all of the text" in said(done)
    _, done = remember(model_folders.folder(), text, "--policy", "full", "--overwrite")
    assert "fidelity keeps all of the text" in said(done)


def test_without_a_measurement(text, monkeypatch):
    file, done = remember(model_folders.folder(), text, "-b", 16)  # random weights
    assert "not measured: the model does not quote what it has just read" in said(done)
    monkeypatch.setattr(remember_run, "Passages", None)
    file, done = remember(model_folders.folder(), text, "-b", 16, "--no-fidelity", "--overwrite")
    assert "not measured: --no-fidelity" in said(done)
    assert json.loads(kv("memory", file, "--json").stdout)["fidelity"] is None
    assert "fidelity" not in kv("memory", file).stdout
    done = remember(model_folders.folder(), text, "-b", 16, "--no-fidelity", "--overwrite", "--json")[1]
    assert json.loads(done.stdout)["fidelity"] is None


def test_the_memory_is_kept_if_the_measurement_fails(text, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(remember_run, "Passages", fails)
    file, done = remember(model_folders.folder(), text, "-b", 16)
    assert "not measured: Out of memory on cpu. Give --no-fidelity" in said(done)
    kv("generate", model_folders.folder(), "--memory", file, "-p", QUESTION, "-n", 2)


@pytest.mark.long
@pytest.mark.parametrize("share", ["0.25", "90%"])
def test_the_smallest_budget_of_a_fidelity(share, quoted, text):
    file, done = remember(model_folders.folder(), text, "--fidelity", share, "--policy", "local", "--json")
    found = json.loads(done.stdout)
    wanted = 0.25 if share == "0.25" else 0.9
    assert wanted <= found["budget"] / found["tokens"] <= 1.1 * wanted + 1 / found["tokens"]
    assert found["fidelity"]["share"] >= wanted
    assert found["budgets_tried"][str(found["budget"])] == found["fidelity"]["share"]
    assert kvkeep.Snapshot.load(file).fingerprint.budget == found["budget"]
    straight = text.parent / "straight.kvkeep"
    kv("remember", model_folders.folder(), "-f", text, "-o", straight, "--policy", "local", "-b", found["budget"])
    assert straight.read_bytes() == file.read_bytes()


def test_a_fidelity_that_only_the_whole_text_reaches(quoted, text):
    _, done = remember(model_folders.folder(), text, "--fidelity", "0.9999", "--json")
    found = json.loads(done.stdout)
    assert (found["budget"], found["fidelity"]["share"]) == (found["tokens"], 1)
    assert "the memory has room for the whole text, since" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--fidelity", "0"], "--fidelity 0 is not a share between 0 and 1"),
        (["--fidelity", "1"], "Policy full keeps all"),
        (["--fidelity", "1.5"], "is not a share"),
        (["--fidelity", "-0.5"], "is not a share"),
        (["--fidelity", "nan"], "is not a share"),
        (["--fidelity", "110%"], "is not a share"),
        (["--fidelity", ""], "is not a number"),
        (["--fidelity", "most"], "is not a number"),
        (["--fidelity", "0.9", "-b", "16"], "Give --fidelity or --budget, not both"),
        (["--fidelity", "0.9", "--no-fidelity"], "Give --fidelity or --no-fidelity, not both"),
        (["--fidelity", "0.9", "--policy", "full"], "full keeps all of a text"),
        (["--fidelity", "0.9", "--policy", "h2o:recent=4000"], "protects more tokens than"),
        (["--fidelity", "0.9"], "does not quote what it has just read. Give --budget"),
    ],
    ids=str,
)
def test_fidelities_that_cannot_be_had(words, reason, text):
    file = text.parent / "x.kvkeep"
    assert reason in refused_with_progress("remember", model_folders.folder(), "-f", text, "-o", file, *words)
    assert not file.exists()


def refused_with_progress(*words):
    done = kv(*words, code=2)
    return " ".join(done.stderr.rpartition("error: ")[2].split())


def test_a_short_text_has_no_fidelity(text):
    text.write_text("the fox and the cat and the dog and the fox")
    _, done = remember(model_folders.folder(), text, "-b", 6, "--policy", "local")
    assert "has no two passages of" in said(done)
    words = ["remember", model_folders.folder(), "-f", text, "-o", text.parent / "y", "--policy", "local"]
    assert "Give --budget in place of --fidelity" in refused_with_progress(*words, "--fidelity", "0.5")


def test_a_file_with_a_damaged_fidelity(quoted, text):
    file, _ = remember(model_folders.folder(), text, "-b", 16)
    snapshot = kvkeep.Snapshot.load(file)
    replace(snapshot, note={**snapshot.note, "fidelity": {"share": 7}}).save(file)
    assert "of its fidelity, which is damaged" in refused("memory", file)
    assert "of its fidelity, which is damaged" in refused("memory", file, "--json")
    kv("generate", model_folders.folder(), "--memory", file, "-p", QUESTION, "-n", 2)  # it does not ask


# ------------------------------------------------------------------ bad input


def test_texts_that_cannot_be_read(text, tmp_path):
    model, file = model_folders.folder(), tmp_path / "x.kvkeep"
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\x00\xff\xfe" * 100)
    for name, reason in {
        "empty": "is empty",
        "binary": "is not UTF-8 text",
        "nothing": "No such file",
        ".": "Is a directory",
        "/dev/zero": "is a device",
    }.items():
        assert reason in refused("remember", model, "-f", tmp_path / name, "-o", file)
    assert not file.exists()


def test_places_where_nothing_can_be_written(text, tmp_path):
    model = model_folders.folder()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        tmp_path: "is a folder",
        tmp_path / "pipe": "no regular file",
        tmp_path / "no" / "folder": "There is no folder",
        "": "--output is empty",
        "-": "not to standard output",
        "/dev/full": "no regular file",
        f"{text}/below": "There is no folder",
    }.items():
        assert reason in refused("remember", model, "-f", text, "-o", name, "--overwrite")


def test_more_than_the_model_has_positions_for(tmp_path, text):
    folder = model_folders.folder("gpt2")
    assert "learned positions for 32 tokens" in refused("remember", folder, "-f", text, "-o", tmp_path / "x")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-b", 17], "--budget 17 is not that of"),
        (["--policy", "h2o"], "--policy h2o is not that of"),
        (["--prefill-chunk", 9], "--prefill-chunk 9 is not that of"),
        (["--layer-budget", "ramp:0.2"], "--layer-budget ramp:0.2 is not that of"),
        (["--positions", "slot"], "--positions slot is not that of"),
        (["--dtype", "bfloat16"], "--dtype bfloat16 is not that of"),
        (["--budget", "50%"], "for prompts without one"),
        (["--compare"], "for prompts without one"),
        (["--system", "x"], "for prompts without one"),
        (["--raw"], "so --raw has no place"),
        (["--load-in", "int4"], "which --load-in changes as well"),
    ],
    ids=str,
)
def test_settings_that_are_not_the_memorys(words, reason, chat_model, text):
    file, _ = remember(chat_model, text, "-b", 16)
    assert reason in refused("generate", chat_model, "--memory", file, "-p", QUESTION, *words)


def test_another_model_is_refused_before_its_weights_are_read(text, monkeypatch):
    file, _ = remember(model_folders.folder(), text, "-b", 16)
    monkeypatch.setattr("kvkeep.cli.loading.read_weights", None)
    said = refused("generate", model_folders.folder("opt"), "--memory", file, "-p", QUESTION)
    assert "has another configuration" in said


def test_other_weights(text, tmp_path):
    file, _ = remember(model_folders.folder(), text, "-b", 16)
    snapshot = kvkeep.Snapshot.load(file)
    replace(snapshot, fingerprint=replace(snapshot.fingerprint, weights="0" * 16)).save(file)
    said = refused("generate", model_folders.folder(), "--memory", file, "-p", QUESTION)
    assert "Different: weights" in said


def test_files_that_are_no_memories(text, tmp_path):
    model = model_folders.folder()
    for name, reason in {text: "no safetensors file", tmp_path / "no": "No such file", "": "--memory is empty"}.items():
        assert reason in refused("generate", model, "--memory", name, "-p", QUESTION)
    without_ids = replace(memories.snapshot(), tokens=None)
    without_ids.save(tmp_path / "ids.kvkeep")
    said = refused("generate", model, "--memory", tmp_path / "ids.kvkeep", "-p", QUESTION)
    assert "does not say which tokens it stands for" in said


@pytest.mark.parametrize(
    "note", [{"opening": 7}, {"opening": {"tail": "x"}}, {"pending": "x"}, {"messages": [7]}], ids=str
)
def test_notes_of_somebody_else(note, tmp_path):
    file = tmp_path / "x.kvkeep"
    replace(memories.snapshot(), note=note).save(file)
    said = refused("generate", model_folders.folder(), "--memory", file, "-p", QUESTION)
    assert "note" in said
