"""Pins and chosen budgets belong to a memory: sessions, forks, files and later requests keep them."""

import pytest

from kvkeep import BudgetError, InputError, SnapshotError
from kvkeep.engine import Request
from kvkeep.snapshot.snapshot import Snapshot

from .session_models import BUDGET, answers, engine_of, short
from .test_equal import prompt_of

PINS = ((2, 4), (7, 8))
PINNED = {2, 3, 7}
TURNS = [prompt_of(seed, length) for seed, length in ((1, 14), (2, 5), (3, 20), (4, 6))]
POLICIES = ["h2o:recent=2", "scissorhands:window=1,recent=1,drop=2", "snapkv:window=2,decode=score", "local"]


def held(snapshot):
    """Positions that every head of every layer holds."""
    heads = [set(head.tolist()) for layer in snapshot.contents.layers for head in layer.positions]
    return set.intersection(*heads)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_with_pins_gets_what_a_cache_with_pins_gets(policy, chunk, tmp_path):
    wanted = answers(TURNS, policy=policy, chunk=chunk, pins=PINS)
    with engine_of(policy, prefill_chunk=chunk, session_memory=1, session_dir=tmp_path) as engine:
        session = engine.session(pins=PINS)  # idle memories lie on the disk
        found = [session.ask(turn, short()).token_ids for turn in TURNS[:2]]
        fork, snapshot = session.fork()[0], session.snapshot()
        many = Request(prompt=TURNS[2], sampling=short(), pins=[(0, 1), (2, 3), (4, 5), (6, 7)])
        engine.generate([many])  # tables of pins are wider from now on
        found += [session.ask(turn, short()).token_ids for turn in TURNS[2:]]
        assert found == wanted
        assert [fork.ask(turn, short()).token_ids for turn in TURNS[2:]] == wanted[2:]
        assert held(session.snapshot()) >= PINNED
        snapshot.save(tmp_path / "one.kvkeep")
    with engine_of(policy, prefill_chunk=chunk) as other:
        again = other.session(snapshot=Snapshot.load(tmp_path / "one.kvkeep"))
        assert [again.ask(turn, short()).token_ids for turn in TURNS[2:]] == wanted[2:]
        assert held(again.snapshot()) >= PINNED


def test_a_prefix_with_pins_keeps_them_in_every_request():
    wanted = answers(TURNS, policy="local", pins=PINS, new=1)[0]
    with engine_of("local") as engine:
        prefix = engine.prefix(TURNS[0], pins=PINS)
        (plain, pinned) = engine.generate(
            [Request(prompt=TURNS[0], sampling=short(1)), Request(prompt=TURNS[0], sampling=short(1), pins=PINS)]
        )
        assert pinned.token_ids == plain.token_ids == wanted  # a whole prompt is attended to before it is cut
        one = Request(prompt=TURNS[1], sampling=short(), snapshot=prefix)
        assert engine.generate([one])[0].token_ids == engine.generate([one])[0].token_ids
        session = engine.session(snapshot=prefix)
        session.ask(TURNS[1], short())
        assert held(session.snapshot()) >= PINNED


def test_equal_prompts_with_other_pins_do_not_share_their_memory():
    prompt = prompt_of(5, 300)
    asked = [Request(prompt=prompt, sampling=short(), pins=pins) for pins in ((), PINS, PINS)]
    with engine_of("local", rows=3) as engine:
        found = engine.generate(asked)
    alone = []
    for one in asked:
        with engine_of("local") as engine:
            alone += engine.generate([one])
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert found[0].token_ids != found[1].token_ids


def test_a_turn_pins_its_own_tokens_and_no_earlier_ones():
    with engine_of() as engine:
        session = engine.session()
        session.ask(TURNS[0], short())
        start = len(session.snapshot().tokens)
        with pytest.raises(InputError, match=rf"has read {start} tokens already"):
            session.ask(Request(prompt=TURNS[1], sampling=short(), pins=[(start - 1, start + 2)]))
        session.ask(Request(prompt=TURNS[1], sampling=short(), pins=[(start, start + 2)]))
        session.ask(TURNS[2], short(12))
        assert held(session.snapshot()) >= {start, start + 1}


def test_only_a_new_session_takes_pins(tmp_path):
    with engine_of(session_dir=tmp_path) as engine:
        engine.session(name="a", pins=PINS)
        with pytest.raises(InputError, match="Only a new one takes"):
            engine.session(name="a", pins=PINS)


@pytest.mark.parametrize("guard", [0.0, 0.2, 1.0])
def test_the_budget_that_a_guard_chose_stays(guard, tmp_path):
    with engine_of("h2o:recent=2", budget=12, session_memory=1, session_dir=tmp_path) as engine:
        session = engine.session()
        first = session.ask(Request(prompt=TURNS[0], sampling=short(), guard=guard))
        found = [first.token_ids, *(session.ask(turn, short()).token_ids for turn in TURNS[1:])]
    assert first.budget in (3, 6, 12)
    assert found == answers(TURNS, policy="h2o:recent=2", budget=first.budget)


def test_a_guard_is_refused_where_a_memory_goes_on():
    with engine_of() as engine:
        memory = engine.prefix(TURNS[0])
        with pytest.raises(InputError, match="continues a memory"):
            engine.generate([Request(prompt=TURNS[1], sampling=short(), snapshot=memory, guard=0.1)])
    assert memory.fingerprint.budget == BUDGET


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_that_were_read_are_pinned_and_let_go(policy, tmp_path):
    with engine_of(policy, session_dir=tmp_path) as engine:
        session = engine.session(name="pins")
        with pytest.raises(SnapshotError, match="no memory yet"):
            session.pin([(0, 1)])
        session.ask(TURNS[0], short())
        there = held(session.snapshot()) - {-1}
        places = sorted(there)[:2]
        plain = session.fork()[0]
        session.pin([(place, place + 1) for place in places])
        assert plain.pins == ()
        session.ask(TURNS[2], short())
        session.close()
        session = engine.session(name="pins")  # pins are part of the file
        assert held(session.snapshot()) >= set(places)
        assert {place for start, stop in session.pins for place in range(start, stop)} == set(places)
        session.pin(())
        for turn in TURNS[1:]:
            session.ask(turn, short())
            plain.ask(turn, short())
        assert session.pins == ()
        assert not held(session.snapshot()) >= set(places) or places[0] in held(plain.snapshot())


def test_pins_that_cannot_be_are_refused_and_nothing_changes():
    with engine_of("local") as engine:
        session = engine.session()
        session.ask(TURNS[0], short())
        before = session.snapshot().contents.layers[0].positions.tolist()
        for pins, error in (
            ([(0, 10**6)], InputError),
            ([(5, 2)], InputError),
            ([(0, BUDGET + 1)], BudgetError),
        ):
            with pytest.raises(error):
                session.pin(pins)
        turn = session.send(TURNS[1], short())
        next(turn)
        with pytest.raises(InputError, match="running"):
            session.pin([(0, 1)])
        turn.close()
        assert session.snapshot().contents.layers[0].positions.tolist() == before
        assert session.pins == ()
        session.close()
        with pytest.raises(InputError, match="closed"):
            session.pin(())
