"""Chats whose client sends everything again go on from a memory, with the tokens that they would get anew."""

import itertools
import os
import time
from dataclasses import replace

import pytest
import torch

from kvkeep.engine import Engine, Request, conversations
from kvkeep.engine.conversations import LEAST_TOKENS
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError, SnapshotError
from kvkeep.snapshot.snapshot import Snapshot

from .models import model
from .test_equal import prompt_of

PLENTY = 10**9
FIRST = prompt_of(1, 20)
NAMES = (f"c{n}" for n in itertools.count())


def engine_of(name="llama", policy="h2o", budget=96, **options):
    return Engine(model(name), policy=policy, budget=budget, **{"rows": 2, "conversation_memory": PLENTY, **options})


def wish(prompt, new=5, owner="anna", **options):
    sampling = SamplingParams(**{"max_new_tokens": new, **options.pop("sampling", {})})
    keep = options.pop("keep_as", next(NAMES))
    return Request(prompt=tuple(prompt), sampling=sampling, owner=owner, keep_as=keep, **options)


def ask(engine, prompt, **options):
    return engine.generate(wish(prompt, **options))[0]


def turns(engine, count=4, **options):
    """Chats that each continue the one before: prompts, and results."""
    prompt, found = list(FIRST), []
    for number in range(count):
        found.append((tuple(prompt), ask(engine, prompt, **options)))
        prompt += [*found[-1][1].token_ids, *prompt_of(number + 2, 6)]
    return found


def anew(prompt, name="llama", **options):
    engine = {key: options.pop(key) for key in ("policy", "budget", "positions", "kv_bits") if key in options}
    return ask(engine_of(name, conversation_memory=0, **engine), prompt, **options).token_ids


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=4", "full", "local"])
def test_a_turn_reads_what_is_new_and_gets_the_tokens_of_a_fresh_reading(name, policy):
    with engine_of(name, policy) as engine:
        found = turns(engine)
        assert [result.cached_tokens for _, result in found] == [0, 24, 35, 46]
        for prompt, result in found:
            assert result.token_ids == anew(prompt, name, policy=policy)
            assert result.prompt_tokens == len(prompt)
        assert len(engine.session_names) == 1  # each turn takes the place of the one before


@pytest.mark.long
@pytest.mark.parametrize("options", [{"positions": "slot"}, {"kv_bits": "8"}], ids=str)
def test_other_stores_go_on_as_well(options):
    with engine_of(policy="h2o", **options) as engine:
        for prompt, result in turns(engine)[1:]:
            assert result.cached_tokens > 20
            if "kv_bits" not in options:  # a question of its own reads the numbers of 8 bits
                assert result.token_ids == anew(prompt, **options)


@pytest.mark.long
def test_an_edited_turn_and_a_repeated_one_fork_where_they_differ():
    with engine_of() as engine:
        (one, first), (two, second), (three, _) = turns(engine, 3)
        assert ask(engine, two).token_ids == second.token_ids  # the same answer once more
        edited = [*one, *first.token_ids, *prompt_of(50, 9)]
        result = ask(engine, edited)
        assert result.cached_tokens == len(one) + len(first.token_ids)
        assert result.token_ids == anew(edited)
        rewritten = [*two[:-2], 3, 4, *three[len(two) :]]  # in the middle of a message
        result = ask(engine, rewritten)
        assert result.cached_tokens == len(two) - 2
        assert result.token_ids == anew(rewritten)
        assert ask(engine, three).cached_tokens == len(three) - 1  # the first conversation is still there


def test_a_beginning_of_a_longer_conversation_is_cut_out_of_it():
    with engine_of() as engine:
        found = turns(engine)
        for prompt, result in reversed(found):
            again = ask(engine, prompt)
            assert again.cached_tokens == len(prompt) - 1
            assert again.token_ids == result.token_ids
        assert len(engine.session_names) == 1


@pytest.mark.long
def test_parallel_requests_of_one_conversation_both_fork():
    with engine_of(rows=4) as engine:
        one = ask(engine, FIRST)
        prompts = [[*FIRST, *one.token_ids, *prompt_of(n, 5)] for n in range(8)]
        found = engine.generate([wish(prompt) for prompt in prompts])
        assert min(result.cached_tokens for result in found) == 24  # some begin with a token of a sibling
        assert [result.token_ids for result in found] == [anew(prompt) for prompt in prompts]
        more = [[*prompt, *result.token_ids, 7, 8] for prompt, result in zip(prompts, found, strict=True)]
        again = engine.generate([wish(prompt) for prompt in more])
        assert all(result.cached_tokens >= 34 for result in again)  # each went on from its own
        assert [result.token_ids for result in again] == [anew(prompt) for prompt in more]


@pytest.mark.parametrize(
    "other",
    [
        {"owner": "bert"},
        {"cache_salt": "x"},
        {"policy": "tova"},
        {"budget": 95},
        {"pins": ((0, 3),)},
        {"owner": ""},
        {"guard": 0.5},
    ],
    ids=str,
)
def test_other_readers_and_settings_read_anew(other):
    with engine_of() as engine:
        prompt = [*FIRST, *ask(engine, FIRST).token_ids, 5]
        assert ask(engine, prompt, **other).cached_tokens == 0
        assert ask(engine, prompt).cached_tokens > 0


def test_pins_that_stay_go_on_and_new_ones_follow():
    pins = ((0, 4),)
    with engine_of() as engine:
        prompt = [*FIRST, *ask(engine, FIRST, pins=pins).token_ids, *prompt_of(3, 9)]
        assert ask(engine, prompt, pins=(*pins, (26, 30)), keep_as="pinned").cached_tokens == 24
        (name,) = engine.session_names
        assert engine.session(name=name).pins == ((0, 4), (26, 30))
        assert ask(engine, [*prompt, 4], pins=((1, 4), (26, 30))).cached_tokens == 0
        assert ask(engine, [*prompt, 4], pins=(*pins, (26, 30))).cached_tokens >= 34  # they have not taken its place


def test_a_seed_draws_the_same_tokens_with_a_memory_and_without():
    drawn = {"sampling": {"temperature": 1.5, "seed": 7}, "sequence": 3}
    with engine_of() as engine:
        for prompt, result in turns(engine, **drawn)[1:]:
            assert result.cached_tokens > 20
            assert result.token_ids == anew(prompt, **drawn)


def test_a_policy_that_draws_goes_on_with_its_own_numbers_only():
    with engine_of(policy="random") as engine:
        prompt = [*FIRST, *ask(engine, FIRST, sequence=1).token_ids, 5]
        assert [ask(engine, prompt, sequence=n).cached_tokens for n in (2, 1)] == [0, 24]


def test_a_memory_that_has_evicted_tokens_goes_on_under_continue_alone():
    for mode, cached in (("auto", [0, 24, 24, 24]), ("continue", [0, 24, 35, 46]), ("fresh", [0, 0, 0, 0])):
        with engine_of(budget=32, conversations=mode) as engine:
            assert [result.cached_tokens for _, result in turns(engine)] == cached
            names = {"auto": 1, "continue": 4, "fresh": 0}[mode]
            assert len(engine.session_names) == names, mode


def test_turns_of_an_evicted_memory_can_be_taken_back():
    with engine_of(budget=32, conversations="continue") as engine:
        found = turns(engine)
        edited = [*found[2][0], *found[2][1].token_ids, *prompt_of(60, 7)]
        assert ask(engine, edited).cached_tokens == 46
        assert ask(engine, [*found[1][0], 5]).cached_tokens <= 32  # within a turn it can only be read anew


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_windows_that_have_passed_tokens_go_on_as_a_whole(name):
    with engine_of(name) as engine:
        found = turns(engine)
        assert [result.cached_tokens for _, result in found] == [0, 24, 35, 46]
        for prompt, result in found:
            assert result.token_ids == anew(prompt, name)
        edited = [*found[1][0], *found[1][1].token_ids, *prompt_of(61, 7)]
        result = ask(engine, edited)
        assert result.cached_tokens == 35  # the turn before was kept as well
        assert result.token_ids == anew(edited, name)


def test_a_policy_with_a_state_of_whole_heads_goes_on_as_a_whole():
    with engine_of(policy="leverage") as engine:
        assert [result.cached_tokens for _, result in turns(engine)] == [0, 24, 35, 46]


def test_short_beginnings_are_not_shared():
    with engine_of() as engine:
        ask(engine, FIRST)
        assert ask(engine, [*FIRST[: LEAST_TOKENS - 1], 1, 2, 3]).cached_tokens == 0
        assert ask(engine, [*FIRST[:LEAST_TOKENS], 1, 2, 3]).cached_tokens == LEAST_TOKENS


def test_cancelled_and_failed_chats_change_nothing(monkeypatch):
    with engine_of() as engine:
        one = ask(engine, FIRST)
        prompt = [*FIRST, *one.token_ids, 5]
        number = engine.add(wish(prompt, 50))
        engine.step()
        engine.cancel(number)
        assert ask(engine, prompt).cached_tokens == 24
        assert len(engine.session_names) == 1


def test_least_recently_used_conversations_go_first():
    with engine_of() as engine:
        ask(engine, FIRST)
        (name,) = engine.session_names
        size = engine.session(name=name).nbytes
    with engine_of(conversation_memory=int(3.5 * size)) as engine:
        starts = [prompt_of(70 + n, 20) for n in range(5)]
        answers = {n: ask(engine, starts[n]).token_ids for n in (0, 1, 2)}
        ask(engine, [*starts[0], *answers[0]], new=1)
        answers |= {n: ask(engine, starts[n]).token_ids for n in (3,)}
        held = [ask(engine, [*starts[n], *answers[n], 5], new=1, keep_as=None).cached_tokens > 0 for n in range(4)]
        assert held == [True, False, True, True]
        assert engine._conversations.nbytes <= 3.5 * size
    with engine_of(conversation_memory=size // 2) as engine:
        ask(engine, FIRST)
        assert engine.session_names == []  # larger than all the room


def test_conversations_expire(monkeypatch):
    with engine_of(conversation_ttl=60.0) as engine:
        prompt = [*FIRST, *ask(engine, FIRST).token_ids, 5]
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 59)
        assert ask(engine, prompt).cached_tokens == 24
        monkeypatch.setattr(time, "time", lambda: now + 59 + 61)
        assert ask(engine, prompt).cached_tokens == 0


def test_a_conversation_is_a_session_that_can_be_looked_at_continued_and_deleted():
    with engine_of() as engine:
        one = ask(engine, FIRST, keep_as="talk")
        session = engine.session(name="talk")
        assert session.token_ids == (*FIRST, *one.token_ids)
        session.ask((5, 6), SamplingParams(max_new_tokens=3))
        assert ask(engine, [*FIRST, *one.token_ids, 5]).cached_tokens == 0  # not known to have evicted nothing
        session.close(delete=True)
        assert "talk" not in engine.session_names


def test_a_name_that_is_taken_or_cannot_be_used():
    with engine_of() as engine:
        engine.session(name="mine")
        ask(engine, FIRST, keep_as="mine")
        assert engine.session(name="mine").token_ids == ()
        with pytest.raises(InputError, match="cannot be the name"):
            engine.add(wish(FIRST, keep_as="../mine"))


def test_an_engine_started_again_finds_the_conversations_of_its_folder(tmp_path):
    with engine_of(session_dir=tmp_path) as engine:
        found = turns(engine)
        ask(engine, prompt_of(80, 20), owner="bert", pins=((0, 2),))
    prompt = [*found[-1][0], *found[-1][1].token_ids, 5, 6]
    with engine_of(session_dir=tmp_path) as engine:
        assert ask(engine, prompt, owner="bert").cached_tokens == 0
        result = ask(engine, prompt)
        assert result.cached_tokens == len(prompt) - 3
        assert result.token_ids == anew(prompt)
        assert ask(engine, [*prompt_of(80, 20), 5], owner="bert", pins=((0, 2),)).cached_tokens == 20
    with engine_of(session_dir=tmp_path, conversation_ttl=1e-6) as engine:
        assert engine.session_names == []


@pytest.mark.parametrize("other", [{"name": "qwen3"}, {"budget": 95}, {"policy": "tova"}], ids=str)
def test_a_file_of_another_model_or_setting_is_left_alone(tmp_path, other, caplog):
    with engine_of(session_dir=tmp_path) as engine:
        prompt = [*FIRST, *ask(engine, FIRST, keep_as="old").token_ids, 5]
    (tmp_path / "broken.kvkeep").write_bytes(b"no snapshot")
    with engine_of(session_dir=tmp_path, **other) as engine:
        assert ask(engine, prompt).cached_tokens == 0
        assert "old" in engine.session_names
    assert (tmp_path / "broken.kvkeep").exists()


def test_a_file_that_has_gone_or_changed_is_read_anew(tmp_path, caplog):
    with engine_of(session_dir=tmp_path, session_memory=0) as engine:
        prompt = [*FIRST, *ask(engine, FIRST, keep_as="gone").token_ids, 5]
        (tmp_path / "gone.kvkeep").unlink()
        result = ask(engine, prompt)
        assert (result.cached_tokens, result.finish_reason) == (0, "length")
        assert result.token_ids == anew(prompt)
    assert "cannot be continued" in caplog.text


def test_weights_that_change_make_a_conversation_useless(caplog):
    import copy

    loaded = copy.deepcopy(model("llama"))
    with Engine(loaded, policy="h2o", budget=96, rows=2, conversation_memory=PLENTY) as engine:
        prompt = [*FIRST, *ask(engine, FIRST).token_ids, 5]
        with torch.no_grad():
            next(loaded.parameters()).mul_(1.5)
        assert ask(engine, prompt).cached_tokens == 0


def test_a_full_disk_costs_no_answer(tmp_path, monkeypatch, caplog):
    with engine_of(session_dir=tmp_path) as engine:
        one = ask(engine, FIRST, keep_as="talk")
        prompt = [*FIRST, *one.token_ids, *prompt_of(2, 6)]

        def full(self, path):
            from kvkeep.errors import SnapshotError

            raise SnapshotError("No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Snapshot, "save", full)
            result = ask(engine, prompt)
            assert (result.finish_reason, result.cached_tokens) == ("length", 24)
            assert ask(engine, prompt_of(81, 20), keep_as="other").finish_reason == "length"
            assert engine.session_names == ["talk"]
        assert "was not kept" in caplog.text
        again = ask(engine, prompt)  # from the turn before
        assert (again.cached_tokens, again.token_ids) == (24, result.token_ids)
    assert "talk.kvkeep" in os.listdir(tmp_path)


def test_conversations_beyond_main_memory_lie_on_the_disk(tmp_path):
    with engine_of(session_dir=tmp_path, session_memory=0) as engine:
        for prompt, result in turns(engine):
            assert result.token_ids == anew(prompt)
        assert engine.session_bytes[0] == 0
        assert [result.cached_tokens for _, result in turns(engine)][1:] == [30, 41, 52]


def test_settings_that_cannot_be_used():
    for bad, said in [
        ({"conversations": "often"}, "conversations='often' is unknown; give one of"),
        ({"conversation_ttl": 0.0}, "conversation_ttl=0.0 is no time; give seconds above 0"),
        ({"conversation_memory": -1}, "conversation_memory=-1 is outside 0"),
    ]:
        with pytest.raises(InputError, match=said):
            engine_of(**bad)


def test_a_client_that_leaves_while_its_memory_is_written_leaves_no_half_of_it(tmp_path, monkeypatch):
    import threading

    go, save = threading.Event(), Snapshot.save

    def slow(self, path):
        assert go.wait(30)
        save(self, path)

    with engine_of(session_dir=tmp_path) as engine:
        monkeypatch.setattr(Snapshot, "save", slow)
        number = engine.add(wish(FIRST, 1, keep_as="half"))
        while not engine._parked.turns:
            engine.step()
        engine.cancel(number)
        go.set()
        assert engine.session_names == []
        assert ask(engine, FIRST, keep_as="half").cached_tokens == 0
        assert engine.session_names == ["half"]


@pytest.mark.parametrize("mode", ["auto", "continue"])
def test_equal_prompts_of_two_owners_at_once_share_nothing(mode):
    long = prompt_of(9, 300)
    with engine_of(budget=32, conversations=mode) as engine:
        prompt = [*long, *ask(engine, long).token_ids, *prompt_of(3, 5)]
        anna, bert = engine.generate([wish(prompt, owner=owner) for owner in ("anna", "bert")])
        assert (anna.cached_tokens > 0, bert.cached_tokens) == (mode == "continue", 0)
        assert bert.token_ids == anew(prompt, budget=32)


def test_a_full_disk_ends_a_turn_of_a_session_and_leaves_no_half_of_its_conversation(tmp_path, monkeypatch):
    def full(self, path):
        raise SnapshotError("No space left on device")

    with engine_of(session_dir=tmp_path, session_memory=0) as engine:
        session = engine.session(name="mine")
        with monkeypatch.context() as patched:
            patched.setattr(Snapshot, "save", full)
            assert session.ask(wish(FIRST, keep_as="talk")).finish_reason == "error"
        assert "talk" not in engine.session_names
        session.ask(wish(FIRST, keep_as="talk"))
        assert "talk" in engine.session_names


def test_a_copy_under_a_name_of_its_own_never_expires(tmp_path):
    with engine_of(session_dir=tmp_path) as engine:
        ask(engine, FIRST, keep_as="talk")
        engine.session(name="mine", snapshot=engine.session(name="talk").snapshot())
    with engine_of(session_dir=tmp_path, conversation_ttl=1e-6) as engine:
        assert engine.session_names == ["mine"]


@pytest.mark.parametrize(
    "bad",
    [{"sequence": "x"}, {"shortest": "x"}, {"shortest": 99}, {"messages": 5}, {"pending": 5}, {"conversation": 5}],
    ids=str,
)
def test_a_file_with_a_damaged_note_keeps_no_engine_from_starting(tmp_path, bad):
    with engine_of(session_dir=tmp_path) as engine:
        ask(engine, FIRST, keep_as="talk")
        snapshot = engine.session(name="talk").snapshot()
    replace(snapshot, note={**snapshot.note, **bad}).save(tmp_path / "talk.kvkeep")
    with engine_of(session_dir=tmp_path) as engine:
        assert engine.session_names == ["talk"]
        assert ask(engine, [*FIRST, 5], keep_as=None).cached_tokens == 0


def test_a_file_whose_note_names_no_reader_is_left_to_its_client(tmp_path, caplog):
    with engine_of(session_dir=tmp_path) as engine:
        ask(engine, FIRST, keep_as="talk")
        snapshot = engine.session(name="talk").snapshot()
    note = {**snapshot.note, "conversation": {"owner": 5, "salt": "", "name": "talk"}}
    replace(snapshot, note=note).save(tmp_path / "talk.kvkeep")
    with engine_of(session_dir=tmp_path, conversation_ttl=1e-6) as engine:
        assert engine.session_names == ["talk"]  # it does not expire
    assert "The conversation talk cannot be used: The note of the file is none that an engine writes" in caplog.text


def test_a_use_by_name_counts_and_a_running_turn_keeps_its_conversation(monkeypatch):
    with engine_of(conversation_ttl=60.0) as engine:
        ask(engine, FIRST, keep_as="talk")
        session, now = engine.session(name="talk"), time.time()
        monkeypatch.setattr(time, "time", lambda: now + 50)
        session.ask(prompt_of(4, 5), SamplingParams(max_new_tokens=2))
        monkeypatch.setattr(time, "time", lambda: now + 70)
        assert engine.session_names == ["talk"]
        turn = session.send(prompt_of(5, 5), SamplingParams(max_new_tokens=5))
        next(turn)
        monkeypatch.setattr(time, "time", lambda: now + 150)
        assert engine.session_names == ["talk"]
        assert len(list(turn)) == 4
        monkeypatch.setattr(time, "time", lambda: now + 300)
        assert engine.session_names == []  # the engine still knows that it is one of its own


def test_a_memory_that_nobody_keeps_is_not_copied(monkeypatch):
    with engine_of(conversations="fresh") as engine:
        monkeypatch.setattr(engine._kv, "take", lambda row: pytest.fail("a copy"))
        assert ask(engine, FIRST).finish_reason == "length"


CONTROL = 2  # begins a message, in these tests


def told(*messages):
    """Token ids of messages, each of which begins with a control token."""
    return [token for message in messages for token in (CONTROL, *message)]


def talk_engine(monkeypatch, mode="continue", policy="full", budget=200, **options):
    engine = engine_of(policy=policy, budget=budget, conversations=mode, **options)
    monkeypatch.setattr(engine._admission.words, "turn_starts", frozenset({CONTROL}), raising=False)
    return engine


SYSTEM, QUESTION, RESULT, MORE = prompt_of(31, 12), prompt_of(32, 8), prompt_of(33, 30), prompt_of(34, 6)


def no_control(tokens):
    return [token if token != CONTROL else CONTROL + 1 for token in tokens]


@pytest.mark.parametrize("policy", ["full", "h2o"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_drop_in_a_conversation_goes_on_as_a_fresh_reading_under_auto(policy, chunk, monkeypatch):
    with talk_engine(monkeypatch, "auto", policy, prefill_chunk=chunk) as engine:
        first = told(*map(no_control, (SYSTEM, QUESTION)))
        one = ask(engine, first)
        second = [*first, *one.token_ids, *told(no_control(RESULT)), CONTROL]
        two = ask(engine, second)
        gone = (len(first) + 5, len(second) - 1)
        third = [*second, *two.token_ids, *told(no_control(MORE)), CONTROL]
        drops = [(len(third) - 1, [gone])]
        three = ask(engine, third, drops=drops)
        assert three.cached_tokens >= len(second)
        assert three.dropped_tokens == 31
        assert three.token_ids == anew(third, policy=policy, budget=200, drops=drops)
        assert len(engine.session_names) == 1  # the memory without these tokens has taken the place of the other
        fourth = [*third, *three.token_ids, *told(no_control(QUESTION)), CONTROL]
        four = ask(engine, fourth, drops=drops)
        assert four.cached_tokens >= len(third)
        assert four.token_ids == anew(fourth, policy=policy, budget=200, drops=drops)
        again = ask(engine, third, drops=drops)  # the third turn once more is cut out of the fourth
        assert (again.token_ids, again.cached_tokens) == (three.token_ids, len(third) - 1)
        assert ask(engine, fourth).cached_tokens == 0  # who wants to have all reads all
        earlier = [(len(second), [gone])]
        assert ask(engine, third, drops=earlier).token_ids == anew(third, policy=policy, budget=200, drops=earlier)


def left_out_of(engine, **options):
    """A conversation of three turns, and what its client sends without the result of the second one."""
    first = told(*map(no_control, (SYSTEM, QUESTION)))
    second = [*first, *ask(engine, first, **options).token_ids, *told(no_control(RESULT)), CONTROL, 7]
    answer = ask(engine, second, **options).token_ids
    start = len(first) + 5
    third = [*second, *answer, *told(no_control(MORE)), CONTROL, 7]
    return third, [*third[:start], *third[start + 31 :]], (start, start + 31)


def test_messages_that_a_client_leaves_out_are_dropped_under_continue(monkeypatch):
    with talk_engine(monkeypatch) as engine:
        whole, shorter, gone = left_out_of(engine)
        read = len(whole) - len(told(MORE)) - 3
        result = ask(engine, shorter)
        assert result.cached_tokens == read - 31
        assert (result.prompt_tokens, result.dropped_tokens, result.read_anew) == (len(shorter), 31, "")
        assert result.token_ids == anew(whole, policy="full", budget=200, drops=[(read, [gone])])
        (name,) = engine.session_names
        assert engine.session(name=name).history.dropped == (gone,)
        longer = [*shorter, *result.token_ids, *told(no_control(QUESTION)), CONTROL]
        more = ask(engine, longer)  # the memory goes on without them
        assert more.cached_tokens >= len(shorter)
        assert more.prompt_tokens == len(longer)
        behind = [*whole, *result.token_ids, *told(no_control(QUESTION)), CONTROL]
        assert more.token_ids == anew(behind, policy="full", budget=200, drops=[(read, [gone])])


@pytest.mark.long
def test_messages_that_a_client_leaves_out_are_read_anew_where_the_memory_does_not_serve(monkeypatch):
    with talk_engine(monkeypatch, "auto") as engine:
        _, shorter, gone = left_out_of(engine)
        result = ask(engine, shorter)
        assert "under conversations=continue alone" in result.read_anew
        assert engine.read_anew(result.id) == result.read_anew
        assert gone[0] <= result.cached_tokens <= gone[0] + 1  # what comes before them, and a letter that both have
        assert result.token_ids == anew(shorter, policy="full", budget=200)
    with talk_engine(monkeypatch, policy="h2o") as engine:
        _, shorter, _ = left_out_of(engine)
        result = ask(engine, shorter, new=200)
        assert "trained for" in result.read_anew
    with talk_engine(monkeypatch, policy="h2o") as engine:
        pins = {"pins": ((0, 4),)}
        _, shorter, _ = left_out_of(engine, **pins)
        assert ask(engine, shorter, **pins).read_anew == ""


def test_the_reasons_of_the_last_requests_alone_are_told(monkeypatch):
    monkeypatch.setattr(conversations, "_REASONS", 1)
    with talk_engine(monkeypatch, "auto") as engine:
        _, shorter, _ = left_out_of(engine)
        first, second = (ask(engine, shorter, keep_as=None, new=1) for _ in range(2))
        assert "under conversations=continue alone" in first.read_anew == second.read_anew
        assert (engine.read_anew(first.id), engine.read_anew(second.id)) == ("", second.read_anew)


def test_a_prompt_with_other_pins_does_not_go_on_from_what_was_left_out(monkeypatch):
    with talk_engine(monkeypatch) as engine:
        _, shorter, gone = left_out_of(engine)
        for pins in ([(0, 4)], [(gone[0], gone[0] + 3)]):
            found = ask(engine, shorter, keep_as=None, new=1, pins=pins)
            assert "pinned that the conversation does not pin, or behind the messages that are left" in found.read_anew
            assert found.dropped_tokens == 0


def test_others_never_go_on_from_what_was_left_out(monkeypatch):
    with talk_engine(monkeypatch) as engine:
        _, shorter, _ = left_out_of(engine)
        result = ask(engine, shorter, owner="bert")
        assert (result.cached_tokens, result.read_anew) == (0, "")


def test_a_dropped_conversation_is_found_again_after_a_restart(monkeypatch, tmp_path):
    with talk_engine(monkeypatch, session_dir=tmp_path) as engine:
        _, shorter, _ = left_out_of(engine)
        first = ask(engine, shorter)
        longer = [*shorter, *first.token_ids, *told(no_control(QUESTION)), CONTROL]
        wanted = ask(engine, longer, keep_as="other")
    with talk_engine(monkeypatch, session_dir=tmp_path) as engine:
        found = ask(engine, [*longer, *wanted.token_ids, 5])
        assert found.cached_tokens >= len(longer)
        assert found.dropped_tokens == 31
