"""Tokens that are dropped on request leave all layers and heads, and the rest goes on as it was."""

import time
from random import Random

import pytest
import torch
from transformers import DynamicCache

from kvkeep.engine import Request
from kvkeep.engine.drops import Drop, dropped, drops_of, left_out, missing_messages, most_held, told_apart
from kvkeep.errors import CapacityError, InputError, SnapshotError
from kvkeep.pins import without
from kvkeep.snapshot.snapshot import Snapshot

from .models import DEVICE, model
from .session_models import engine_of, short
from .test_equal import prompt_of

FIRST, SECOND = prompt_of(1, 24), prompt_of(2, 6)
GONE = ((5, 9), (12, 13))
STORES = {
    "h2o": {},
    "all": {"policy": "full", "budget": 64},
    "quantised": {"kv_bits": "8"},
    "4 bits": {"kv_bits": "4"},
    "slot positions": {"policy": "local", "positions": "slot"},
    "windows": {"name": "gemma3"},
    "heads with budgets": {"policy": "snapkv:window=2", "head_budget": "ada:0.2"},
    "a budget of all heads": {"policy": "snapkv:window=2", "head_budget": "global:0.2"},
    "layers with budgets": {"policy": "h2o", "layer_budget": "pyramid"},
    "random": {"policy": "random"},
}


def held(snapshot):
    """What each head of each layer holds of a token, by its position: a plain loop over all slots."""
    found = {}
    for number, layer in enumerate(snapshot.contents.layers):
        for head, places in enumerate(layer.positions.tolist()):
            for slot, position in enumerate(places):
                assert layer.tensors["store.positions"][head, slot] == position
                if position >= 0:
                    own = [layer.tensors[name][head, slot].tolist() for name in sorted(layer.cut)]
                    found[number, head, position] = own
    return found


def inside(position, spans=GONE):
    return any(start <= position < stop for start, stop in spans)


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_the_slots_of_the_dropped_positions_are_empty_and_no_other_changes(options, tmp_path):
    with engine_of(**options) as engine:
        session = engine.session()
        session.ask(FIRST, short())
        before = session.snapshot()
        wanted = {key: own for key, own in held(before).items() if not inside(key[2])}
        assert session.drop(spans=GONE) == GONE
        after = session.snapshot()
        assert held(after) == wanted
        assert after.seen == before.seen
        assert session.token_ids == (*FIRST, *session.token_ids[len(FIRST) :])
        assert session.drop(spans=GONE) == ()  # they have gone already
        assert session.drop(spans=[(5, 7)]) == ()
        after.save(tmp_path / "dropped.kvkeep")
        saved = engine.session(snapshot=Snapshot.load(tmp_path / "dropped.kvkeep"))
        (fork,) = session.fork()
        found = [each.ask(SECOND, short()).token_ids for each in (session, saved, fork)]
        assert found[0] == found[1] == found[2]
        positions = {key[2] for key in held(session.snapshot())}
        assert not any(map(inside, positions))
        session.rewind(before)  # the memory of an earlier time has all of them
        assert held(session.snapshot()) == held(before)
        with pytest.raises(InputError, match="has read 37"):
            saved.drop(spans=[(0, 99)])


@torch.inference_mode()
def forgetful(name, pieces, new):
    """Greedy answers to pieces of a conversation, of which each may end the attention to some positions."""
    cache, ids, out, hidden = DynamicCache(), [], [], set()
    for piece, gone in pieces:
        hidden |= {position for position in range(200) if inside(position, gone)}
        ids, said, coming = [*ids, *piece], [], len(piece)
        while len(said) < new:
            mask = torch.tensor([[int(position not in hidden) for position in range(len(ids))]], device=DEVICE)
            given = {
                "attention_mask": mask,
                "past_key_values": cache,
                "cache_position": torch.arange(len(ids) - coming, len(ids)),
            }
            places = torch.arange(len(ids) - coming, len(ids), device=DEVICE)[None]
            logits = model(name)(
                input_ids=torch.tensor([ids[-coming:]], device=DEVICE), position_ids=places, **given
            ).logits
            said.append(int(logits[0, -1].argmax()))
            ids, coming = [*ids, said[-1]], 1
        ids = ids[:-1]
        out.append(tuple(said))
    return out


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_attention_goes_on_as_if_it_never_looked_at_them_again(name):
    with engine_of("full", 96, name) as engine:
        session = engine.session()
        first = session.ask(FIRST, short()).token_ids
        session.drop(spans=GONE)
        second = session.ask(SECOND, short()).token_ids
        session.drop(spans=[(26, 30)])
        found = [first, second, session.ask(SECOND, short()).token_ids]
    pieces = [(FIRST, ()), ((first[-1], *SECOND), GONE), ((second[-1], *SECOND), ((26, 30),))]
    assert found == forgetful(name, pieces, 4)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("policy", ["full", "h2o", "local"])
def test_a_prompt_that_drops_on_its_way_gets_what_a_session_gets_that_drops_between_turns(policy, chunk):
    budget = 96 if policy == "full" else 12
    with engine_of(policy, budget, prefill_chunk=chunk) as engine:
        session = engine.session()
        session.read(FIRST[:14])
        session.drop(spans=GONE)
        session.read(FIRST[14:20])
        session.drop(spans=[(15, 18)])
        wanted = session.ask(FIRST[20:], short())
        drops = [(20, [(15, 18), (5, 6)]), (14, GONE)]
        (result,) = engine.generate(Request(prompt=FIRST, sampling=short(), drops=drops))
        assert result.token_ids == wanted.token_ids
        assert result.dropped_tokens == 8
        assert result.prompt_tokens == len(FIRST)
        twins = [Request(prompt=FIRST, sampling=short(), drops=drops, sequence=n) for n in range(3)]
        assert {twin.token_ids for twin in engine.generate(twins)} == {result.token_ids}


def test_a_row_with_a_kept_prompt_goes_on_as_it_was_after_a_drop(monkeypatch):
    found = []
    for fuses in (True, False):
        if not fuses:
            monkeypatch.setattr("kvkeep.cache.decode_replay.why_not_fused", lambda *given, **others: "not to be tried")
        with engine_of("h2o:recent=2", 16, keep_prompt=0.5) as engine:
            request = Request(prompt=FIRST, sampling=short(30), drops=[(20, GONE)], ignore_end=True)
            number = engine.add(request)
            engine.step()
            row = engine._sequences[number].row
            # what a kernel has to know: how many first positions stay
            assert engine._kv.sole(row, row + 1).lead == len(FIRST)
            while engine.busy:
                events = engine.step()
            found.append(events[-1].result.token_ids)
    assert found[0] == found[1]
    assert len(found[0]) == 30


def test_a_memory_that_does_not_evict_has_room_for_what_is_dropped():
    prompt = prompt_of(3, 60)
    with engine_of("full", 40) as engine:
        drops = [(30, [(2, 28)])]
        (result,) = engine.generate(Request(prompt=prompt, sampling=short(), drops=drops))
        assert len(result.token_ids) == 4
        session = engine.session()
        for start in range(0, 60, 20):
            session.read(prompt[start : start + 20])
            session.drop(spans=[(start + 1, start + 19)])
        assert session.token_ids == tuple(prompt)


def test_an_emptied_layer_is_saved_and_goes_on(tmp_path):
    with engine_of("full", 64, "gemma3") as engine:
        session = engine.session()
        session.ask(FIRST, short())
        session.drop(spans=[(10, 27)])  # all that the windows of 7 tokens hold
        assert 0 in {int((layer.positions >= 0).sum()) for layer in session.snapshot().contents.layers}
        session.snapshot().save(tmp_path / "empty.kvkeep")
        other = engine.session(snapshot=Snapshot.load(tmp_path / "empty.kvkeep"))
        assert session.ask(SECOND, short()).token_ids == other.ask(SECOND, short()).token_ids


def test_wrong_drops_are_refused_and_change_nothing():
    with engine_of("h2o", 16) as engine, engine_of("local", positions="slot") as sliding:
        session = engine.session(pins=[(0, 3)])
        with pytest.raises(SnapshotError, match="no memory"):
            session.drop(spans=GONE)
        session.ask(FIRST, short())
        before = held(session.snapshot())
        for spans, why in [
            ([(2, 5)], "positions 2 to 2 are pinned"),
            ([(0, 28)], "has read 27"),
            ([(5, 3)], "reversed"),
            ([(-1, 3)], "negative"),
            ([(0, 2**40)], "beyond"),
        ]:
            with pytest.raises(InputError, match=why):
                session.drop(spans=spans)
        with pytest.raises(InputError, match="There is no message 0"):  # token ids are no messages
            session.drop(messages=[0])
        with pytest.raises(InputError, match="reposition=true needs slot positions"):
            session.drop(spans=GONE, reposition=True)
        assert held(session.snapshot()) == before
        session.pin(())
        with pytest.raises(InputError, match="Nothing would be left"):
            session.drop(spans=[(0, 10), (8, 27)])
        assert session.drop(spans=[(5, 9), (7, 12)], reposition=False) == ((5, 12),)
        with pytest.raises(InputError, match="Nothing would be left"):
            session.drop(spans=[(0, 5), (12, 27)])
        session.close()
        with pytest.raises(InputError, match="closed"):
            session.drop(spans=GONE)
        other = sliding.session()
        other.ask(FIRST, short())
        with pytest.raises(InputError, match="reposition=false cannot"):
            other.drop(spans=GONE, reposition=False)
        assert other.drop(spans=GONE, reposition=True) == GONE


@pytest.mark.parametrize(
    ("drops", "why"),
    [
        ([(24, GONE)], "give one from 0 to 23"),
        ([(6, GONE)], "ends at position 13"),
        ([(20, [(0, 20)])], "Nothing would be left"),
        ([(20, [(0, 9)]), (21, [(9, 21)])], "Nothing would be left"),
        ([(0, [])], "drops=0"),
    ],
)
def test_wrong_drops_of_a_request_are_refused(drops, why):
    with engine_of() as engine, pytest.raises(InputError, match=why):
        engine.add(Request(prompt=FIRST, drops=drops))


def test_a_request_names_no_drop_of_a_session_and_none_beside_a_guard():
    with engine_of() as engine:
        with pytest.raises(InputError, match=r"session\.drop"):
            engine.session().ask(Request(prompt=FIRST, drops=[(9, GONE[:1])]))
        with pytest.raises(InputError, match="guard"):
            engine.add(Request(prompt=FIRST, drops=[(20, GONE)], guard=0.5))
        with pytest.raises(InputError, match="pinned"):
            engine.add(Request(prompt=FIRST, drops=[(20, GONE)], pins=[(8, 10)]))


def test_a_drop_beside_a_turn_is_refused():
    with engine_of(budget=16) as engine:
        session = engine.session()
        session.ask(FIRST, short())
        events = session.send(SECOND, short())
        next(events)
        with pytest.raises(InputError, match="A turn of the session is running"):
            session.drop(spans=GONE)
        events.close()
        assert session.drop(spans=GONE) == GONE


def test_what_is_no_list_of_drops_is_refused():
    for given, why in [
        ("ab", "drops='ab' are no list; give pairs of a number of tokens and spans"),
        (3, "drops=3 are no list"),
        ([(4, [(0, 2)], 5)], r"The drop \(4, .* is no pair of a number of tokens and spans"),
        (["ab"], "The drop 'ab' is no pair"),
        ([(0, [(0, 1)])], "drops=0 is outside 1"),
        ([(4, [(0, 2)]), (6, [(3, 7)])], "A drop after 6 tokens ends at position 7: drop what was read by then"),
    ]:
        with pytest.raises(InputError, match=why):
            drops_of(given)
    assert drops_of([[4, [(0, 4)]]]) == (Drop(4, ((0, 4),)),)


def test_drops_are_ordered_and_counted_once():
    assert drops_of([(9, [(2, 5)]), (4, [(3, 4)])]) == (Drop(4, ((3, 4),)), Drop(9, ((2, 3), (4, 5))))
    assert drops_of([(9, [(2, 5)]), (9, [(2, 5)])]) == (Drop(9, ((2, 5),)),)
    assert most_held((), 20) == 20
    assert most_held(drops_of([(10, [(0, 6)]), (15, [(7, 9)])]), 20) == 12


def test_what_a_prompt_leaves_out_is_whole_messages():
    ids = [1, 9, 2, 5, 8, 3, 6, 8, 2, 7, 8, 3, 4]  # 2 and 3 begin messages, 8 ends them
    starts = {2, 3}

    def left_of(ids, gone, prompt, starts):
        return left_out(told_apart(ids, starts, gone), told_apart(prompt[:-1], starts))

    assert left_of(ids, (), [*ids, 8, 2, 5], starts) == ((), 13, 13)
    assert left_of(ids, (), [*ids[:5], *ids[8:], 8], starts) == (((5, 8),), 13, 10)
    assert left_of(ids, (), [*ids[:2], *ids[11:], 8], starts) == (((2, 11),), 13, 4)
    assert left_of(ids, ((2, 5),), [*ids[:2], *ids[8:], 8], starts) == (((5, 8),), 13, 7)
    assert left_of(ids, (), [*ids[:5], *ids[8:12], 9, 8], starts) == (((5, 8),), 12, 9)  # the answer in other tokens
    assert left_of(ids, (), ids, starts) == ((), 12, 12)  # one is left to read
    assert left_of(ids, (), ids[:5], starts) is None  # the last one is missing
    assert left_of(ids, (), [*ids[2:], 8], starts) is None  # and here the beginning
    assert left_of(ids, (), [*ids[:6], *ids[7:], 8], starts) == (((5, 11),), 12, 6)  # whole ones, up to the answer
    again = [1, 9, 3, 7, 8, 2, 5, 8, 3, 7, 8, 2, 6, 8, 3, 7]  # three equal answers
    assert left_of(again, (), [1, 9, 3, 7, 8, 2, 4], starts) == (((2, 14),), 16, 4)
    assert left_of(again, (), [1, 9, 3, 7, 8, 2, 6, 8, 3, 7, 8, 2, 4], starts) == (((2, 8),), 16, 10)
    assert left_of(ids, (), [8, 8], starts) is None
    assert left_of([], (), [8, 8], starts) is None
    first = [3, 7, 8, 2, 5, 8, 3, 7, 8, 2, 6, 8, 3, 9]  # the first message comes again
    assert left_of(first, (), [3, 7, 8, 2, 6, 8, 3, 9, 8, 2, 4], starts) == (((3, 9),), 14, 8)
    assert told_apart([], starts) == ()
    parts = [(message.spans, list(message.ids)) for message in told_apart(ids, starts, ((3, 4), (6, 9)))]
    assert parts == [
        (((0, 2),), [1, 9]),
        (((2, 3), (4, 5)), [2, 8]),
        (((5, 6), (9, 11)), [3, 7, 8]),
        (((11, 13),), [3, 4]),
    ]


def test_messages_that_are_missing_are_counted_from_the_end():
    def said(*texts):
        return [{"role": "user", "content": text} for text in texts]

    assert missing_messages(said("a", "b", "c"), said("a", "b", "c", "d")) == 0
    assert missing_messages(said("a", "call", "b", "call"), said("a", "call", "d")) == 2
    assert missing_messages(said("a", "b", "c"), said("a", "b", "x", "d")) is None
    assert missing_messages(said("a", "b", "c"), said("a", "b", "c")) is None
    assert missing_messages((), said("a")) is None


@pytest.mark.long
def test_thousands_of_drops_and_messages_are_told_in_their_number_of_steps():
    n = 5_000
    asked = [(10 * i + 10, [(10 * i, 10 * i + 5)]) for i in range(n)]
    begun = time.process_time()
    drops = drops_of(asked)
    assert len(drops) == n
    assert most_held(drops, 10 * n) == 5 * n + 5
    assert without(((0, 10 * n),), dropped(drops)) == tuple((start + 5, start + 10) for start in range(0, 10 * n, 10))
    with engine_of("full", 20) as engine, pytest.raises(CapacityError, match="does not evict"):
        engine.add(Request(prompt=prompt_of(1, 30) * n, drops=asked))
    other = [{"role": "user", "content": "yes"}] * n
    assert missing_messages(other, other) == 1
    assert missing_messages(other, [*other, *other]) == 0
    told = told_apart([1, *[2, 5, 3] * n], {2})
    assert left_out(told, told) == ((), 3 * n + 1, 3 * n + 1)
    assert left_out(told, told_apart([1, *[2, 7, 3] * n], {2})).shared == 2
    assert time.process_time() - begun < 5  # each of these took minutes when every drop looked at all others


def test_drops_at_one_place_are_one_drop():
    assert drops_of([(9, [(2, 5)]), (9, [(0, 1), (4, 7)])]) == (Drop(9, ((0, 1), (2, 7))),)
    random = Random(5)
    for _ in range(100):
        asked = []
        for _ in range(random.randint(0, 6)):
            after = random.randint(1, 30)
            asked.append((after, [tuple(sorted((random.randint(0, after), random.randint(0, after)))) for _ in "ab"]))
        wanted, taken = {}, set()
        for after, gone in sorted(asked):  # position by position
            mine = {place for start, stop in gone for place in range(start, stop)} - taken
            taken |= mine
            wanted[after] = wanted.get(after, set()) | mine
        found = {drop.after: {place for span in drop.spans for place in range(*span)} for drop in drops_of(asked)}
        assert found == {after: mine for after, mine in wanted.items() if mine}
