"""Chats whose memory has evicted tokens go on from their last prompt as it was, and choose among all tokens anew."""

import copy
import weakref

import pytest
import torch

import kvkeep
from kvkeep.cache import prompt_kv
from kvkeep.cache.prompt_kv import rows_to_read
from kvkeep.engine import Engine
from kvkeep.snapshot.snapshot import Snapshot

from .models import model
from .test_conversations import FIRST, PLENTY, anew, ask, engine_of, turns, wish
from .test_equal import OPTIONS, prompt_of

BUDGET = 28
NEW = 14
SMALL = {"adakv": ":window=4", "pyramidkv": ":window=4", "restkv": ":window=4", "defensivekv": ":window=4"}
SMALL |= {"snapkv": ":window=4,recent=6", "lava": ":window=4", "cake": ":window=4"}
ABLE = [
    name + SMALL.get(name, OPTIONS.get(name, ""))
    for name in kvkeep.available_policies()
    if name not in ("full", "reread", "topk_dynamic") and rows_to_read(kvkeep.parse(name)) is not None
]


def long_turns(engine, count=4, start=FIRST, **options):
    """Chats that each continue the one before, with messages of some length: prompts, and results."""
    prompt, found = [*start, *prompt_of(99, 20)], []
    for number in range(count):
        found.append((tuple(prompt), ask(engine, prompt, return_memory=True, **options)))
        prompt += [*found[-1][1].token_ids, *prompt_of(number + 2, NEW)]
    return found


def alone(prompt, name="llama", **options):
    engine = {"budget": BUDGET, "conversation_memory": 0}
    engine |= {
        key: options.pop(key) for key in ("policy", "budget", "positions", "kv_bits", "head_budget") if key in options
    }
    with engine_of(name, **engine) as fresh:
        return ask(fresh, prompt, return_memory=True, **options)


def compare(found, name="llama", **options):
    """Each turn goes on from the last prompt, and has the tokens and the memory of a fresh reading."""
    before = 0
    for prompt, result in found:
        expected = alone(prompt, name, **options)
        assert result.cached_tokens == before
        assert result.token_ids == expected.token_ids
        for mine, theirs in zip(result.memory.positions, expected.memory.positions, strict=True):
            held, wanted = (x.sort(dim=-1, descending=True).values for x in (mine, theirs))
            n = min(held.shape[-1], wanted.shape[-1])
            assert torch.equal(held[:, :n], wanted[:, :n])
            assert (held[:, n:] < 0).all()
            assert (wanted[:, n:] < 0).all()
        before = len(prompt)


def test_there_are_policies_to_try():
    assert len(ABLE) >= 10


@pytest.mark.long
@pytest.mark.parametrize("policy", ABLE)
def test_a_turn_keeps_what_a_fresh_reading_keeps(policy):
    with engine_of(policy=policy, budget=BUDGET) as engine:
        compare(long_turns(engine, sequence=5), policy=policy, sequence=5)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "gpt2"])
def test_other_models_with_windows_as_well(name):
    with engine_of(name, "tova", BUDGET) as engine:
        compare(long_turns(engine, 3), name, policy="tova")


@pytest.mark.parametrize(
    "options",
    [{"positions": "slot"}, {"kv_bits": 8}, {"head_budget": "ada:0.2"}, {"head_budget": "global:0.2"}],
    ids=str,
)
def test_other_kinds_of_slots_as_well(options):
    policy = "snapkv:window=4"
    with engine_of(policy=policy, budget=BUDGET, **options) as engine:
        compare(long_turns(engine, 3), policy=policy, **options)


def test_an_edited_message_goes_on_from_where_both_part():
    with engine_of(policy="tova", budget=BUDGET) as engine:
        found = long_turns(engine, 3)
        edited = [*found[2][0][:50], *prompt_of(60, 30)]
        result = ask(engine, edited)
        assert result.cached_tokens == 50
        assert result.token_ids == alone(edited, policy="tova").token_ids
        again = ask(engine, edited)  # the same once more: its last token is read
        assert (again.cached_tokens, again.token_ids) == (len(edited) - 1, result.token_ids)


@pytest.mark.long
def test_windows_that_were_passed_before_the_prompt_was_kept_cannot_be_cut_back():
    with engine_of("gemma3", "tova", 48) as engine:
        found = turns(engine, 4)  # the last one grows over the budget in a row that has passed windows
        edited = [*found[-1][0][:40], *prompt_of(60, 30)]
        result = ask(engine, edited)
        with engine_of("gemma3", "tova", 48, conversation_memory=0) as fresh:
            assert result.token_ids == ask(fresh, edited).token_ids


@pytest.mark.long
def test_the_first_turn_that_evicts_keeps_its_prompt():
    with engine_of(policy="tova", budget=48) as engine:
        found = turns(engine, 6)
        assert [result.cached_tokens for _, result in found] == [0, 24, 35, 46, 53, 64]
        for prompt, result in found:
            assert result.token_ids == anew(prompt, policy="tova", budget=48)


def test_the_newest_turn_replaces_the_ones_before():
    with engine_of(policy="tova", budget=BUDGET) as engine:
        long_turns(engine, 4)
        assert len(engine.session_names) == 1
        prompts = [entry.prompt for entry in engine._conversations._entries.values()]
        assert [len(kept.ids) for kept in prompts] == [40 + 3 * (NEW + 5)]


def test_policies_that_need_every_query_read_anew():
    with engine_of(policy="h2o", budget=BUDGET) as engine:
        assert [result.cached_tokens for _, result in long_turns(engine)] == [0, 0, 0, 0]
        assert all(entry.prompt is None for entry in engine._conversations._entries.values())


def test_reread_goes_on_from_its_prompt_rather_than_from_what_it_chose_before():
    with engine_of(policy="reread:chat", budget=BUDGET) as engine:
        assert [result.cached_tokens for _, result in long_turns(engine, 3)] == [0, 40, 59]
    with engine_of(policy="reread:chat", budget=BUDGET, conversations="continue") as engine:
        assert [result.cached_tokens for _, result in long_turns(engine, 3)] == [0, 44, 63]


def test_prompts_in_chunks_are_never_whole():
    with engine_of(policy="tova", budget=BUDGET, prefill_chunk=16) as engine:
        assert [result.cached_tokens for _, result in long_turns(engine, 3)] == [0, 0, 0]


@pytest.mark.slow
def test_prompts_go_first_when_room_is_scarce(tmp_path):
    with engine_of(policy="tova", budget=BUDGET) as engine:
        long_turns(engine, 1)
        (entry,) = engine._conversations._entries.values()
        prompt, memory = entry.prompt.kv.nbytes, entry.session.nbytes
        assert entry.nbytes == prompt + memory == engine._conversations.nbytes
    for room, cached in ((2 * prompt + 2 * memory + 8, [40, 40]), (prompt + 2 * memory + 8, [0, 40])):
        with engine_of(policy="tova", budget=BUDGET, conversation_memory=room) as engine:
            begun = [long_turns(engine, 1, start=prompt_of(70 + n, 20))[0] for n in range(2)]
            assert engine._conversations.nbytes <= room
            assert len(engine.session_names) == 2
            longer = [[*asked, *result.token_ids, 5, 6] for asked, result in begun]
            assert [ask(engine, asked, keep_as=None).cached_tokens for asked in longer] == cached
    # files may take more, but prompts are never written
    with engine_of(policy="tova", budget=BUDGET, session_memory=prompt // 2, session_dir=tmp_path) as engine:
        assert [result.cached_tokens for _, result in long_turns(engine, 2)] == [0, 0]


def test_a_conversation_that_is_deleted_takes_its_prompt_with_it():
    with engine_of(policy="tova", budget=BUDGET) as engine:
        ((prompt, result),) = long_turns(engine, 1, keep_as="talk")
        engine.session(name="talk").close(delete=True)
        assert ask(engine, [*prompt, *result.token_ids, 5, 6]).cached_tokens == 0
        assert engine._conversations.nbytes < 10**5
        assert "talk" not in engine.session_names


def test_nobody_else_goes_on_from_a_prompt():
    with engine_of(policy="tova", budget=BUDGET) as engine:
        ((prompt, result),) = long_turns(engine, 1)
        longer = [*prompt, *result.token_ids, 5, 6]
        others = ({"owner": "bert"}, {"cache_salt": "x"}, {"policy": "tova:per_head=true"}, {"budget": BUDGET - 1})
        assert [ask(engine, longer, keep_as=None, **other).cached_tokens for other in others] == [0] * 4
        assert ask(engine, longer).cached_tokens == 40


@pytest.mark.slow
def test_pins_hold_among_all_tokens():
    pins = ((3, 9),)
    with engine_of(policy="tova", budget=BUDGET) as engine:
        compare(long_turns(engine, 3, pins=pins), policy="tova", pins=pins)


@pytest.mark.slow
def test_conversations_side_by_side_get_what_they_get_alone():
    starts = [prompt_of(70 + n, 20 + n) for n in range(5)]
    with engine_of(policy="snapkv:window=4", budget=BUDGET, rows=3) as engine:
        prompts = [[*start, *prompt_of(99, 20)] for start in starts]
        for turn in range(3):
            results = engine.generate([wish(prompt) for prompt in prompts])
            for prompt, result in zip(prompts, results, strict=True):
                assert result.token_ids == alone(prompt, policy="snapkv:window=4").token_ids
                assert (result.cached_tokens > 0) == (turn > 0)
                prompt += [*result.token_ids, *prompt_of(turn + 2, NEW)]


def test_a_failed_or_cancelled_turn_costs_nothing(monkeypatch):
    with engine_of(policy="tova", budget=BUDGET) as engine:
        ((prompt, result),) = long_turns(engine, 1)
        longer = [*prompt, *result.token_ids, *prompt_of(4, NEW)]
        number = engine.add(wish(longer, 50))
        engine.step()
        engine.cancel(number)
        before = engine.model.forward
        monkeypatch.setattr(engine.model, "forward", lambda *args, **options: 1 / 0)
        assert ask(engine, longer).finish_reason == "error"
        monkeypatch.setattr(engine.model, "forward", before)
        found = ask(engine, longer)
        assert (found.cached_tokens, found.token_ids) == (40, alone(longer, policy="tova").token_ids)


def test_a_restart_forgets_prompts_and_reads_anew(tmp_path):
    with engine_of(policy="tova", budget=BUDGET, session_dir=tmp_path) as engine:
        ((prompt, result),) = long_turns(engine, 1)
    with engine_of(policy="tova", budget=BUDGET, session_dir=tmp_path) as engine:
        longer = [*prompt, *result.token_ids, *prompt_of(4, NEW)]
        found = ask(engine, longer)
        assert (found.cached_tokens, found.token_ids) == (0, alone(longer, policy="tova").token_ids)


def test_the_prompt_is_what_the_model_read():
    """Keys and values that are kept are those of a full cache."""
    with engine_of(policy="tova", budget=BUDGET) as engine:
        found = long_turns(engine, 2)
        (entry,) = engine._conversations._entries.values()
        kept = entry.prompt
    with engine_of(policy="full", budget=128) as fresh:
        ask(fresh, found[-1][0], new=1, keep_as="whole")
        contents = fresh.session(name="whole").snapshot().contents
    assert list(kept.ids) == list(found[-1][0])
    for part, layer in zip(kept.kv.layers, contents.layers, strict=True):
        n = len(kept.ids)
        order = layer.tensors["store.positions"].long().argsort(dim=-1)[:, -n:]
        for name, x in (("keys", part.slots.keys), ("values", part.slots.values)):
            held = layer.tensors[f"store.{name}"]
            expected = held.gather(1, order[..., None].expand(-1, -1, held.shape[-1]))
            assert (x[0] - expected).abs().max() < 1e-5


def test_other_weights_read_anew():
    trained = copy.deepcopy(model("llama"))
    with Engine(trained, policy="tova", budget=BUDGET, rows=2, conversation_memory=PLENTY) as engine:
        ((prompt, result),) = long_turns(engine, 1)
        with torch.no_grad():
            for weights in trained.parameters():
                weights.mul_(1.1)
        longer = [*prompt, *result.token_ids, *prompt_of(4, NEW)]
        found = ask(engine, longer)
    with Engine(trained, policy="tova", budget=BUDGET, rows=2) as fresh:
        assert (found.cached_tokens, found.token_ids) == (0, ask(fresh, longer).token_ids)


@pytest.mark.parametrize("delete", [True, False])
def test_a_closed_conversation_gives_the_memory_of_its_prompt_back_at_once(delete):
    with engine_of(policy="tova", budget=BUDGET) as engine:
        long_turns(engine, 1, keep_as="talk")
        (entry,) = engine._conversations._entries.values()
        keys = weakref.ref(entry.prompt.kv.layers[0].slots.keys)
        engine.session(name="talk").close(delete=delete)
        assert (keys(), engine._conversations.nbytes) == (None, 0)


def test_a_prompt_that_cannot_be_copied_costs_no_answer(monkeypatch, caplog):
    with engine_of(policy="tova", budget=BUDGET) as engine:
        ((prompt, result),) = long_turns(engine, 1)
        longer = [*prompt, *result.token_ids, *prompt_of(4, NEW)]
        with monkeypatch.context() as scarce:
            scarce.setattr(prompt_kv, "_copied", lambda *args: bytearray(2**62))
            found = ask(engine, longer)
        assert (found.cached_tokens, found.token_ids) == (40, alone(longer, policy="tova").token_ids)
        assert "A prompt was not kept" in caplog.text
        assert len(caplog.records) == 1
        assert ask(engine, [*longer, *prompt_of(5, NEW)]).cached_tokens == 40  # the one before is still there


def test_prompts_of_running_requests_are_bounded_as_well():
    prompts = [[*prompt_of(70 + n, 20), *prompt_of(99, 20)] for n in range(4)]
    with engine_of(policy="tova", budget=BUDGET, rows=4) as engine:
        one = len(prompts[0]) * engine._kv.token_bytes
    with engine_of(policy="tova", budget=BUDGET, rows=4, conversation_memory=2 * one + one // 2) as engine:
        for prompt in prompts:
            engine.add(wish(prompt, 50))
        engine.step()
        assert engine.n_running == 4
        running = [sequence.reading for sequence in engine._sequences.values()]
        assert sum(reading is not None for reading in running) == 2


def test_a_request_of_which_nothing_is_kept_copies_no_prompt():
    with engine_of(policy="tova", budget=BUDGET) as engine:
        ((prompt, result),) = long_turns(engine, 1)
        number = engine.add(wish([*prompt, *result.token_ids, 5, 6], 50, keep_as=None))
        engine.step()
        reading = engine._sequences[number].reading
        assert (reading.before, reading.nbytes, reading.taken(46, 3)) == (None, 0, None)
        assert engine.cancel(number).cached_tokens == 40


def test_a_window_of_rows_is_read_however_short_the_question_is():
    with engine_of(policy="snapkv:window=8,recent=2", budget=32) as engine:
        ((prompt, result),) = turns(engine, 1)
        longer = [*prompt, *result.token_ids, 5, 6]  # fits
        result = ask(engine, longer, new=2)
        asked = [*longer, *result.token_ids, *prompt_of(4, 6)]  # does not
        found = ask(engine, asked)
        assert found.cached_tokens == len(asked) - 8
        assert found.token_ids == alone(asked, policy="snapkv:window=8,recent=2", budget=32).token_ids


def test_a_turn_that_cannot_be_written_leaves_the_prompt_before_it(tmp_path, monkeypatch):
    with engine_of(policy="tova", budget=BUDGET, session_dir=tmp_path) as engine:
        ((prompt, result),) = long_turns(engine, 1)
        longer = [*prompt, *result.token_ids, *prompt_of(4, NEW)]
        with monkeypatch.context() as full:
            full.setattr(Snapshot, "save", lambda *args: 1 / 0)
            assert ask(engine, longer).cached_tokens == 40
        found = ask(engine, longer)
        assert (found.cached_tokens, found.token_ids) == (40, alone(longer, policy="tova").token_ids)
        assert ask(engine, [*longer, *prompt_of(5, 3)]).cached_tokens == len(longer)


@pytest.mark.parametrize("place", ["_known", "_memory", "_touch", "_reading"])
def test_a_search_that_fails_reads_anew(monkeypatch, caplog, place):
    with engine_of(policy="tova", budget=BUDGET) as engine:
        ((prompt, result),) = long_turns(engine, 1)
        longer = [*prompt, *result.token_ids, *prompt_of(4, NEW)]
        with monkeypatch.context() as scarce:
            scarce.setattr(engine._conversations, place, lambda *args, **options: bytearray(2**62))
            found = ask(engine, longer, keep_as=None)
        assert (found.cached_tokens, found.token_ids) == (0, alone(longer, policy="tova").token_ids)
        assert "A conversation was not continued: " in caplog.text
        assert ask(engine, longer).cached_tokens == 40
