"""``kvkeep chat`` with lines from a pipe: answers, commands, saved conversations, and every mistake as one line."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
from dataclasses import replace

import model_folders
import processes
import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import chat_run, chat_sessions, console
from kvkeep.cli.chat_folder import ChatFolder, complete_names
from kvkeep.cli.main import app
from kvkeep.engine import Engine
from kvkeep.engine.model_runner import ModelRunner
from kvkeep.engine.session import MOST_TURNS_BACK
from kvkeep.errors import InputError
from kvkeep.models.load import load, quiet
from kvkeep.models.quantized_weights import is_packable
from kvkeep.policies import CONVERSATION, LATER

SHORT = kvkeep.SamplingParams(max_new_tokens=5)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_SESSIONS", str(tmp_path / "sessions"))
    with model_folders.one_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = model_folders.copy(tmp_path_factory.mktemp("models") / "chatty")
    model_folders.edit_json(folder / "tokenizer_config.json", chat_template=model_folders.TEMPLATE)
    return folder


def chat(model, *words, said=(), code=0):
    lines = said if isinstance(said, bytes) else "".join(f"{line}\n" for line in said)
    where = [] if model is None else [str(model)]
    done = CliRunner().invoke(app, ["chat", *where, *map(str, words)], input=lines)
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def refused(model, *words, said=()):
    """The last line of a run that a mistake has ended."""
    return chat(model, *words, said=said, code=2).stderr.splitlines()[-1]


def answers(model, *words, said):
    return chat(model, "-n", 5, *words, said=said).stdout.splitlines()


@functools.cache
def loaded(model):
    with quiet():
        return load(model)


def engine_of(model, **options):
    found, tokenizer = loaded(model)
    return Engine(found, tokenizer, **{"policy": CONVERSATION, "budget": 1024, "rows": 1, **options})


def session_of(model, **options):
    return engine_of(model, **options).session()


def wanted(model, *messages, **options):
    """What a session of the engine answers."""
    session = session_of(model, **options)
    return [session.ask(message, SHORT).text.strip() for message in messages]


def saved(tmp_path, name="one"):
    return kvkeep.Snapshot.load(tmp_path / "sessions" / name / "memory.kvkeep")


# ------------------------------------------------------------------ conversations


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["-b", 12, "--policy", "h2o:recent=4"]], ids=["default", "h2o"])
def test_messages_are_answered_as_by_a_session(words, model):
    options = {"policy": "h2o:recent=4", "budget": 12} if words else {}
    found = answers(model, *words, said=["the quick fox", "", "  and the dog  ", "why"])
    assert [line.strip() for line in found] == wanted(model, "the quick fox", "and the dog", "why", **options)


@pytest.mark.slow
def test_a_conversation_goes_on_where_it_was(model, tmp_path):
    turns = ["the quick fox", "and the dog", "why", "so"]
    for turn in turns[:3]:
        done = chat(model, "-n", 5, "-s", "one", "-b", 16, said=[turn])
    assert done.stderr.splitlines()[-1].split() == ["kvkeep", "chat", "--session", "one"]
    found = answers(None, "-s", "one", said=turns[3:])  # the model and the budget are the conversation's
    assert [line.strip() for line in found] == wanted(model, *turns, budget=16)[3:]
    memory = saved(tmp_path)
    assert [one["role"] for one in memory.note["messages"]] == ["user", "assistant"] * 4
    assert memory.fingerprint.budget == 16


def hint(done):
    """The words of the command to go on that a conversation prints at its end."""
    return shlex.split(done.stderr.splitlines()[-1])


@pytest.mark.long
def test_the_printed_command_finds_a_conversation_in_another_folder(model, tmp_path):
    words = hint(chat(model, "-n", 2, "--sessions", tmp_path / "my own", said=["the fox"]))
    (name,) = ChatFolder(tmp_path / "my own").names()
    assert words == ["kvkeep", "chat", "--sessions", str(tmp_path / "my own"), "--session", name]
    assert "2 turns" in chat(None, *words[2:], "-n", 2, said=["the dog", "/memory"]).stdout


@pytest.mark.skipif(not is_packable(torch.device("cpu")), reason="needs the native kernel")
def test_the_printed_command_goes_on_with_quantised_weights(model):
    words = hint(chat(model, "-n", 2, "-s", "one", "--load-in", "int8", said=["the fox"]))
    assert words == ["kvkeep", "chat", "--load-in", "int8", "--session", "one"]
    chat(None, *words[2:], "-n", 2, said=["the dog"])


def test_the_printed_command_goes_on_with_pickles_and_the_users_own_policy(tmp_path, monkeypatch):
    folder = model_folders.copy(tmp_path / "pickles")
    with quiet():
        torch.save(load(folder)[0].state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (tmp_path / "mine.py").write_text("from kvkeep.policies.local import Local\n\n\nclass Mine(Local):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked = ["--allow-pickle", "--policy", "mine:Mine"]
    words = hint(chat(folder, "-n", 2, "-s", "one", *asked, said=["the fox"]))
    assert words == ["kvkeep", "chat", str(folder), *asked, "--session", "one"]
    chat(None, *words[2:], "-n", 2, said=["the dog"])


def test_a_conversation_knows_its_model_through_forks_and_memories(model, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 9)
    file = tmp_path / "text.kvkeep"
    made = CliRunner().invoke(app, ["remember", str(model), "-f", str(tmp_path / "text.txt"), "-o", str(file)])
    assert made.exit_code == 0, made.output
    answers(None, "-s", "one", "--memory", file, said=["the fox", "/fork two", "the dog"])
    for name in ("one", "two"):
        assert saved(tmp_path, name).note["model"] == str(model)
        assert len(answers(None, "-s", name, said=["why"])) == 1


def test_the_model_of_a_conversation_is_gone(tmp_path):
    folder = model_folders.copy(tmp_path / "gone")
    answers(folder, "-s", "one", said=["the fox"])
    shutil.rmtree(folder)
    said = refused(None, "-s", "one", said=["why"])
    assert f"No MODEL was given, and the conversation one was made with {folder}" in said


def test_a_conversation_without_a_name_gets_one(model):
    done = chat(model, "-n", 2, said=["the fox"])
    (name,) = ChatFolder.of(None).names()
    assert f"--session {name}" in done.stderr
    chat(model, "-n", 2, said=["the dog"])
    assert len(list(ChatFolder.of(None).names())) == 2


def test_piped_messages_are_not_in_the_history(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat(model, "-n", 2, said=["the fox"])
    assert not (tmp_path / "cache").exists()


def test_it_says_what_it_reads_and_how_far(model, monkeypatch):
    monkeypatch.setattr(console, "BEATS_S", (0.0005,))
    assert re.search(r"^reading: \d\d tokens", chat(model, "-n", 2, said=["the quick fox " * 8]).stderr, re.MULTILINE)


def test_a_name_without_a_conversation_begins_one_and_says_so():
    done = chat(None, "-s", "one", said=["/help"])
    assert "one is a new conversation, with the embedded model: no MODEL was given" in " ".join(done.stderr.split())


def test_nothing_is_left_of_a_conversation_without_an_answer(model, tmp_path):
    assert chat(model, "-s", "one", said=["/help"]).stderr == ""
    assert list((tmp_path / "sessions").iterdir()) == []


def test_the_system_message_is_the_first(model, tmp_path):
    answers(model, "-s", "one", "--system", "be brief", said=["the fox", "the dog"])
    assert [one["role"] for one in saved(tmp_path).note["messages"]] == ["system", *["user", "assistant"] * 2]


def test_the_same_command_goes_on_and_another_system_message_is_refused(model, tmp_path):
    for said in ("the fox", "the dog"):
        answers(model, "-s", "one", "--system", "be brief", said=[said])
    assert [one["role"] for one in saved(tmp_path).note["messages"]] == ["system", *["user", "assistant"] * 2]
    said = " ".join(chat(model, "-s", "one", "--system", "be long", said=["why"], code=2).stderr.split())
    assert "The conversation one has begun with another system message, and --system is for new ones" in said


def test_a_short_system_message_is_never_evicted_unless_it_may_be(model, tmp_path):
    for name, words in (("one", ()), ("two", ("--pin-system", "off")), ("three", ("--budget", 12))):
        answers(model, "-s", name, "--system", "be brief", *words, said=["the fox"])
        pins = saved(tmp_path, name).contents.layers[0].pins
        assert [start for start, _ in pins] == ([0] if name == "one" else [])  # of 12, a quarter is too little
    assert "neither on nor off" in refused(model, "--pin-system", "maybe")


@pytest.mark.slow
def test_a_conversation_about_a_remembered_text(model, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 9)
    file = tmp_path / "text.kvkeep"
    made = CliRunner().invoke(
        app, ["remember", str(model), "-f", str(tmp_path / "text.txt"), "-o", str(file), "-b", "20"]
    )
    assert made.exit_code == 0, made.output
    before = file.read_bytes()
    found = answers(model, "-s", "one", "--memory", file, said=["what jumps", "why"])
    session = session_of(model, budget=20, policy=LATER)  # the memory's
    session.rewind(kvkeep.Snapshot.load(file))
    assert found == [session.ask(one, SHORT).text.lstrip() for one in ("what jumps", "why")]
    assert file.read_bytes() == before
    assert saved(tmp_path).seen > kvkeep.Snapshot.load(file).seen
    answers(model, "-s", "one", "--memory", file, said=["so"])  # the same command again
    assert len(saved(tmp_path).note["messages"]) == 6
    answers(model, "-s", "two", said=["the fox"])
    assert "two has begun without the memory of" in refused(model, "-s", "two", "--memory", file)


def test_a_model_without_a_template_continues_text(tmp_path):
    done = chat(model_folders.folder(), "-n", 5, "-s", "one", said=["the fox", "the dog"])
    assert "has no chat template" in done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert "the fox" in model_folders.tokenizer().decode(saved(tmp_path).tokens)
    again = chat(model_folders.folder(), "-n", 5, "-s", "one", said=["more", "/memory"])
    assert "seen" in again.stdout


def test_an_answer_that_is_cut_says_so(model):
    assert "stopped after 5 tokens" in chat(model, "-n", 5, said=["the fox"]).stderr


# ------------------------------------------------------------------ commands


def test_rewind_takes_turns_back(model, tmp_path):
    said = ["the fox", "the dog", "the cat", "/rewind 2", "why"]
    found = answers(model, "-s", "one", "-b", 12, said=said)
    assert [line.strip() for line in found][-1] == wanted(model, "the fox", "why", budget=12)[-1]
    assert len(saved(tmp_path).note["messages"]) == 4


@pytest.mark.slow
def test_rewind_takes_back_the_last_turn_of_an_earlier_run(model, tmp_path):
    answers(model, "-s", "one", said=["the fox", "the dog", "the cat"])
    found = answers(model, "-s", "one", said=["/rewind", "why"])
    assert found[-1].strip() == wanted(model, "the fox", "the dog", "why")[-1]
    assert len(saved(tmp_path).note["messages"]) == 6
    done = chat(model, "-n", 5, "-s", "one", said=["so", "/rewind 2"], code=2)  # one of this run, so no earlier one
    assert "1 turn can be taken back" in done.stderr
    assert len(saved(tmp_path).note["messages"]) == 8
    done = chat(model, "-n", 5, "-s", "one", said=["/rewind", "/rewind"], code=2)
    assert "took back 1 turn; 3 turns left" in done.stderr
    assert "the memory before the last one was not saved" in " ".join(done.stderr.split())
    assert sorted(path.name for path in (tmp_path / "sessions" / "one").iterdir()) == ["memory.kvkeep"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["gone", "cut", "other", "no links"])
def test_rewind_without_the_memory_before_says_so(damage, model, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    if damage == "no links":
        monkeypatch.setattr("os.link", refuse)
    answers(model, "-s", "one", said=["the fox", "the dog"])
    answers(model, "-s", "two", said=["the cat", "the cow"])
    before = tmp_path / "sessions" / "one" / "before.kvkeep"
    if damage == "gone":
        before.unlink()
    elif damage == "cut":
        before.write_bytes(before.read_bytes()[:-7])
    elif damage == "other":
        before.write_bytes((tmp_path / "sessions" / "two" / "before.kvkeep").read_bytes())
    if damage == "no links":
        assert answers(model, "-s", "one", said=["/rewind", "why"])[-1].strip() == wanted(model, "the fox", "why")[-1]
    else:
        assert "was not saved" in " ".join(chat(model, "-s", "one", said=["/rewind"], code=2).stderr.split())
        assert len(saved(tmp_path).note["messages"]) == 4


def test_a_conversation_is_saved_where_there_is_no_room_for_the_memory_before(model, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    from kvkeep.snapshot import snapshot as snapshots

    def small_disk(path, data, real=snapshots.write_whole):
        if path.name == "before.kvkeep":
            refuse()
        real(path, data)

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(snapshots, "write_whole", small_disk)
    answers(model, "-s", "one", said=["the fox", "the dog"])
    assert len(saved(tmp_path).note["messages"]) == 4
    assert sorted(path.name for path in (tmp_path / "sessions" / "one").iterdir()) == ["memory.kvkeep"]


def test_rewind_to_the_beginning(model, tmp_path):
    found = answers(model, "-s", "one", "--system", "be brief", said=["the fox", "/rewind", "the dog"])
    again = answers(model, "-s", "two", "--system", "be brief", said=["the dog"])
    assert found[-1] == again[0]
    assert saved(tmp_path).note["messages"] == saved(tmp_path, "two").note["messages"]
    shown = CliRunner().invoke(app, ["memory", str(tmp_path / "sessions" / "one" / "memory.kvkeep")])
    assert "a conversation of 1 turn" in shown.stdout
    answers(model, "-s", "three", said=["the fox", "/rewind"])
    assert not (tmp_path / "sessions" / "three").exists()


def test_so_many_turns_can_be_taken_back(model, monkeypatch):
    turns = [f"turn {i}" for i in range(MOST_TURNS_BACK + 2)]
    done = chat(model, "-n", 1, said=[*turns, "/rewind 8", "/memory", "/rewind"], code=2)
    assert "2 turns" in done.stdout
    assert "No turn can be taken back" in done.stderr
    monkeypatch.setattr(chat_sessions, "MOST_STATE_BYTES", 1)
    done = chat(model, "-n", 1, said=["one", "two", "three", "/rewind 2"], code=2)
    assert "1 turn can be taken back" in done.stderr


@pytest.mark.slow
def test_forks_share_nothing(model, tmp_path):
    answers(model, "-s", "one", "-b", 12, said=["the fox", "/fork two", "the dog"])
    assert [len(saved(tmp_path, name).note["messages"]) for name in ("one", "two")] == [2, 4]
    found = answers(model, "-s", "one", said=["the cat"])
    assert found[0].strip() == wanted(model, "the fox", "the cat", budget=12)[-1]
    assert "There is a conversation two already" in refused(model, "-s", "one", said=["/fork two"])
    assert len(saved(tmp_path, "two").note["messages"]) == 4


@pytest.mark.long
def test_a_fork_of_an_earlier_run_can_take_its_last_turn_back(model, tmp_path):
    answers(model, "-s", "one", "-b", 12, said=["the fox", "the dog"])
    answers(model, "-s", "one", said=["/fork two", "/rewind"])
    answers(model, "-s", "one", said=["/fork three"])
    answers(model, "-s", "three", said=["/rewind"])
    found = [len(saved(tmp_path, name).note["messages"]) for name in ("one", "two", "three")]
    assert found == [4, 2, 2]


def test_a_fork_before_the_first_turn_and_one_without_a_name(model, tmp_path):
    done = chat(model, "-n", 2, "-s", "one", said=["/fork two", "the fox", "/fork"])
    assert "goes on as two; one stays as it is" in done.stderr
    assert len(list(ChatFolder.of(None).names())) == 2
    assert not (tmp_path / "sessions" / "one").exists()


def test_memory_says_what_is_held(model):
    said = chat(model, "-n", 5, "-s", "one", "-b", 12, said=["/memory", "the quick brown fox", "/memory"]).stdout
    assert "none yet" in said
    assert "12 held per layer and head" in said
    assert f"{CONVERSATION}, budget 12" in said


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/foo", "There is no command /foo"),
        ("/rewnd", "Did you mean /rewind?"),
        ("/", "There are /help"),
        ("/etc/passwd is a file", "type a space before it"),
        ("/rewind 0", "takes the number of turns"),
        ("/rewind -1", "takes the number of turns"),
        ("/rewind x", "takes the number of turns"),
        ("/rewind 99999999999999999999", "takes the number of turns"),
        ("/rewind ²", "takes the number of turns"),
        ("/rewind 1 2", "takes one word at most"),
        ("/rewind", "No turn can be taken back"),
        ("/quit now", "takes nothing"),
        ("/fork a/b", "cannot be the name"),
        ("/fork ..", "cannot be the name"),
        ("/fork " + "x" * 300, "longer than 200 bytes"),
        ("/\x1b[31m", "There is no command"),
    ],
)
def test_commands_that_cannot_be_run(line, reason, a_talk):
    with pytest.raises(InputError) as found:
        chat_run.run(line, a_talk)
    assert reason in str(found.value)
    assert "\x1b" not in str(found.value)


@pytest.fixture
def a_talk(model):
    """A conversation in progress, without the command around it."""
    engine, folder = engine_of(model), ChatFolder.of(None)
    found = chat_sessions.ChatSession(engine, folder, folder.claim("one"), sampling=SHORT)
    yield found
    found.close()


def test_one_ctrl_c_stops_the_reading_of_a_message_at_the_next_layer(model, a_talk, capsys):
    """The step that reads a long message would go on for a minute, and then begin an answer that nobody wants."""
    a_talk.answer("the fox", stoppable=True)
    before, layers, read = a_talk.state.tokens.tolist(), loaded(model)[0].model.layers, []

    def press(layer, *inputs):
        read.append(layer)
        if layer is layers[0]:
            signal.raise_signal(signal.SIGINT)

    presses = [layer.register_forward_pre_hook(press) for layer in layers]
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        capsys.readouterr()
        a_talk.answer("the quick fox " * 8, stoppable=True)
    finally:
        signal.signal(signal.SIGINT, earlier)
        for hook in presses:
            hook.remove()
    assert read == [layers[0]]
    assert "the conversation is as it was before this message" in " ".join(capsys.readouterr().err.split())
    assert a_talk.state.tokens.tolist() == before
    a_talk.answer("the dog", stoppable=True)
    assert [capsys.readouterr().out.strip()] == wanted(model, "the fox", "the dog")[1:]


def test_a_message_that_begins_with_a_slash(model):
    assert answers(model, said=[" /foo"])[0].strip() == wanted(model, "/foo")[0]


def test_quit_ends(model):
    assert len(answers(model, said=["the fox", "/quit", "the dog"])) == 1


# ------------------------------------------------------------------ failures


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(model, tmp_path, monkeypatch):
    answers(model, "-s", "one", said=["the fox"])
    before, run, count = saved(tmp_path).tokens.tolist(), ModelRunner.run, []

    def failing(self, *args, **kwargs):
        count.append(1)
        if len(count) == 3:
            raise RuntimeError("out of luck")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "run", failing)
    assert "out of luck" in refused(model, "-s", "one", "-n", 5, said=["the dog"])
    assert saved(tmp_path).tokens.tolist() == before


def test_a_full_disk_keeps_the_last_saved_turn(model, tmp_path, monkeypatch):
    answers(model, "-s", "one", said=["the fox"])
    before = saved(tmp_path).tokens.tolist()

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvkeep.snapshot.snapshot.write_whole", full)
    assert "No space left on device" in chat(model, "-s", "one", "-n", 2, said=["the dog"], code=2).stderr
    assert saved(tmp_path).tokens.tolist() == before


@pytest.mark.slow
def test_two_processes_on_one_conversation(model, tmp_path):
    answers(model, "-s", "one", said=["the fox"])
    place = ChatFolder.of(None).claim("one")
    assert "The conversation one is open in another process" in refused(model, "-s", "one", said=["x"])
    assert "is open in another process" in refused(model, "-s", "two", said=["the fox", "/fork one"])
    place.leave()
    answers(model, "-s", "one", said=["the dog"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--budget", 17], "--budget 17 is not that of the conversation one"),
        (["--policy", "h2o"], "--policy h2o is not that of the conversation one"),
        (["--dtype", "bfloat16"], "--dtype bfloat16 is not that of"),
        (["--system", "x"], "has begun without a system message, and --system is for new ones"),
    ],
    ids=str,
)
def test_other_settings_than_the_conversations(words, reason, model):
    answers(model, "-s", "one", "-b", 16, said=["the fox"])
    assert reason in refused(model, "-s", "one", *words, said=["the dog"])


def test_the_conversation_of_another_model_weights_or_version(model, tmp_path):
    answers(model, "-s", "one", said=["the fox"])
    said = refused(model_folders.folder("opt"), "-s", "one", said=["the dog"])
    assert "the conversation one is a memory of the model chatty" in said
    file, found = tmp_path / "sessions" / "one" / "memory.kvkeep", saved(tmp_path)
    replace(found, fingerprint=replace(found.fingerprint, weights="0" * 16)).save(file)
    assert "Different: weights" in refused(model, "-s", "one", said=["the dog"])
    file.write_bytes(file.read_bytes().replace(b'\\"version\\":2', b'\\"version\\":9'))
    assert "format 9" in refused(model, "-s", "one", said=["the dog"])
    file.write_bytes(b"torn")
    assert "is no snapshot that can be used" in refused(model, "-s", "one", said=["the dog"])
    assert file.read_bytes() == b"torn"


@pytest.mark.parametrize("note", [{"sequence": "x"}, {"sequence": 2**70}, {"messages": "x"}, {"opening": []}], ids=str)
def test_notes_that_no_conversation_has(note, model, tmp_path):
    answers(model, "-s", "one", said=["the fox"])
    found = saved(tmp_path)
    replace(found, note={**found.note, **note}).save(tmp_path / "sessions" / "one" / "memory.kvkeep")
    assert refused(model, "-s", "one", said=["the dog"]).startswith("error: ")
    assert "one" in chat(None, "--list").stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-s", "a/b"], "cannot be the name"),
        (["-s", ".."], "cannot be the name"),
        (["-s", ""], "is no name"),
        (["-s", "x\n"], "cannot be the name"),
        (["--memory", "nothing.kvkeep"], "No such file"),
        (["--memory", ""], "--memory is empty"),
        (["--memory", "x", "--system", "y"], "brings its own beginning"),
        (["--sessions", ""], "--sessions is empty"),
        (["--sessions", "/dev/null"], "Give another folder with --sessions"),
        (["--sessions", "/proc/nowhere"], "Give another folder with --sessions"),
        (["--json"], "give --list, too"),
        (["--system", " "], "--system is empty"),
        (["--policy", "h3o"], "Did you mean 'h2o'?"),
        (["--budget", "0"], "--budget 0"),
        (["--budget", "10%"], "is a share, and a conversation has no known length"),
        (["-n", "0"], "--max-new-tokens 0"),
    ],
    ids=str,
)
def test_words_that_cannot_be_used(words, reason, model):
    assert reason in refused(model, *words, said=["the fox"])


def test_a_system_message_without_a_template():
    said = refused(model_folders.folder(), "--system", "x", said=["the fox"])
    assert f"{model_folders.folder()} has no chat template, so there is no place for a --system message" in said


def test_lines_that_are_no_text(model):
    done = chat(model, "-n", 2, "-s", "one", said=b"the fox\nna\xefve\nthe dog\n", code=2)
    assert "Line 2 of standard input is not UTF-8 text: byte 2 is 0xef" in done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert answers(model, said=b"\xef\xbb\xbfthe fox\r\n")[0].strip() == wanted(model, "the fox")[0]


def test_a_message_longer_than_the_memory_has_room_for(model, tmp_path):
    said = refused(model, "--policy", "full", "-b", 20, "-s", "one", "-n", 2, said=["the fox", "fox " * 30])
    assert "20" in said
    assert len(saved(tmp_path).note["messages"]) == 2


@pytest.mark.slow
def test_a_kill_loses_the_running_turn_at_most(model, tmp_path):
    """Each line of the output stands for a turn that was saved, but for the last one."""
    fifo = tmp_path / "in"
    os.mkfifo(fifo)
    for n in (1, 2, 3):
        out = tmp_path / f"out{n}"
        process = processes.start(piped, str(model), str(fifo), str(out), f"kill{n}")
        with fifo.open("w") as lines:
            for i in range(n + 1):
                lines.write(f"turn {i}\n")
                lines.flush()
            while len(out.read_text().splitlines() if out.exists() else []) <= n:
                pass
            process.kill()
            process.join()
        kept = saved(tmp_path, f"kill{n}").note["messages"]
        assert len(kept) // 2 in (n, n + 1)


def piped(model, source, out, name):
    """Run a chat whose messages come from a pipe."""
    import sys

    import torch

    torch.set_num_threads(1)
    os.dup2(os.open(source, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    os.environ["KVKEEP_SESSIONS"] = os.path.join(os.path.dirname(source), "sessions")
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115  the process ends
    processes._exit_code(["kvkeep", "chat", model, "-s", name, "-n", "4"])


# ------------------------------------------------------------------ the list


def test_the_list(model, tmp_path):
    assert "no conversations are saved" in chat(None, "--list").stderr
    answers(model, "-s", "one", said=["the fox", "the dog"])
    answers(model_folders.folder(), "-s", "two", said=["the fox"])
    (tmp_path / "sessions" / "bad").mkdir()
    (tmp_path / "sessions" / "bad" / "memory.kvkeep").write_bytes(b"torn" * 10)
    (tmp_path / "sessions" / "empty").mkdir()
    (tmp_path / "sessions" / "file").write_text("")
    said = chat(None, "--list").stdout
    assert [line.split()[0] for line in said.splitlines() if line[0] != " "] == ["name", "bad", "one", "two"]
    found = json.loads(chat(None, "--list", "--json").stdout)
    assert found["folder"] == str(tmp_path / "sessions")
    bad, one, two = found["conversations"]
    assert (one["turns"], one["model"], two["turns"]) == (2, "chatty", None)
    assert "error" in bad
    assert complete_names("t") == [("two", "")]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"KVKEEP_SESSIONS": "~/mine"}, "{home}/mine"),
        ({"KVKEEP_SESSIONS": ""}, "{home}/.local/share/kvkeep/sessions"),
        ({"KVKEEP_SESSIONS": "", "XDG_DATA_HOME": "/data"}, "/data/kvkeep/sessions"),
        ({"KVKEEP_SESSIONS": "", "XDG_DATA_HOME": "relative"}, "{home}/.local/share/kvkeep/sessions"),
    ],
    ids=str,
)
def test_where_conversations_are_saved(environment, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for name, value in {"HOME": str(tmp_path), "XDG_DATA_HOME": "", **environment}.items():
        monkeypatch.setenv(name, value)
    assert str(ChatFolder.of(None).path) == folder.format(home=tmp_path)
    monkeypatch.setattr("sys.platform", "darwin")
    if "~" not in folder and "mine" not in folder:
        assert "Application Support" in str(ChatFolder.of(None).path)


def test_others_may_not_read_conversations(model, tmp_path):
    answers(model, "-s", "one", said=["the fox"])
    assert (tmp_path / "sessions").stat().st_mode & 0o077 == 0
