"""Sessions continue exactly where they were, whatever runs beside them, and whatever went wrong in between."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sweeps import sweep
from transformers import AutoModelForCausalLM, FalconH1Config, Lfm2Config

import kvkeep
from kvkeep.engine import Engine, Request
from kvkeep.engine.dispatcher import ThreadBox
from kvkeep.engine.session import MOST_TURNS_BACK, TurnStates
from kvkeep.errors import (
    BudgetError,
    CapacityError,
    InputError,
    KVKeepError,
    PolicyError,
    SnapshotError,
)

from .models import DEVICE, model
from .session_models import BUDGET, Alone, answers, engine_of, host_of, short
from .test_equal import POLICIES, prompt_of

GATED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
HYBRIDS = {
    "falcon-h1": lambda: FalconH1Config(
        **GATED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
    ),
    "lfm2": lambda: Lfm2Config(**GATED, layer_types=["conv", "full_attention"], block_ff_dim=48),
}
KINDS = ("h2o", "full", "random", "nacl", "adakv:window=4", "spatten", "scissorhands", "leverage")
TURNS = [prompt_of(i, n) for i, n in enumerate((7, 3, 12, 1, 5))]


def ids(events):
    return tuple(event.token_id for event in events)


def chunks_of(policy):
    return (None,) if kvkeep.parse(policy).cascades else (None, 4)


# ------------------------------------------------------------------ turns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "chunk"),
    sweep([(p, c) for p in POLICIES for c in chunks_of(p)], lambda case: case[0] in KINDS),
)
def test_a_session_goes_on_where_it_was(policy, chunk):
    budget = 14 if kvkeep.parse(policy).evicts else 64
    if kvkeep.parse(policy).grows:
        budget = 64
    with engine_of(policy, budget, prefill_chunk=chunk) as engine:
        session = engine.session()
        found = []
        for i, turn in enumerate(TURNS):
            found.append(session.ask(turn, short()).token_ids)
            engine.generate([Request(prompt=prompt_of(50 + i, 9), sampling=short())] * 2)  # its row is used again
        assert found == answers(TURNS, policy=policy, budget=budget, chunk=chunk)


@pytest.mark.parametrize("heard", [1, 2])
def test_an_answer_that_is_stopped_ends_with_its_next_token_and_is_kept(heard):
    engine = engine_of()
    whole, session = (engine.session().ask(TURNS[0], short()), engine.session())
    assert not session.stop()
    events = session.send(TURNS[0], short())
    found = [next(events) for _ in range(heard)]
    assert session.stop()
    found += events
    assert ids(found) == whole.token_ids[: heard + 1]
    assert found[-1].result.finish_reason == "stop"
    assert session.token_ids == TURNS[0] + ids(found)
    assert not session.stop()
    other = engine.session()
    other.ask(TURNS[0], kvkeep.SamplingParams(max_new_tokens=heard + 1))
    assert session.ask(TURNS[1], short()).token_ids == other.ask(TURNS[1], short()).token_ids


def test_a_turn_says_what_was_read_again_and_what_was_not():
    engine = engine_of()
    session = engine.session()
    first = session.ask(TURNS[0], short())
    assert (first.prompt_tokens, first.cached_tokens) == (7, 0)
    assert session.token_ids == TURNS[0] + first.token_ids
    second = session.ask(TURNS[1], short())
    assert (second.prompt_tokens, second.cached_tokens) == (7 + 4 + 3, 7 + 3)  # the last new token was not read yet
    assert session.token_ids == TURNS[0] + first.token_ids + TURNS[1] + second.token_ids


@pytest.mark.long
def test_a_session_has_a_row_only_while_it_runs():
    engine = engine_of(rows=1)
    sessions = [engine.session() for _ in range(5)]
    for turn in TURNS:
        for session in sessions:
            assert ids(session.send(turn, short()))
            assert not session.running
            assert not engine.busy
    assert {session.token_ids for session in sessions} == {sessions[0].token_ids}
    assert all(bool((block.store.positions < 0).all()) for block in engine._kv._blocks)


@pytest.mark.slow
@pytest.mark.parametrize("turns", sweep([40, 200], lambda n: n == 40))
def test_two_hundred_turns_take_constant_memory(turns):
    engine = engine_of()
    session, sizes = engine.session(), set()
    alone = Alone()
    for i in range(turns):
        turn = prompt_of(i, 1 + i % 3)
        assert session.ask(turn, short(2)).token_ids == alone.ask(turn, 2)
        if i > 20:
            sizes.add(session.snapshot().contents.nbytes)
    assert len(sizes) == 1
    assert engine.memory_usage().allocated_bytes == engine_of().memory_usage().allocated_bytes


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_other_architectures(name):
    with engine_of(name=name, prefill_chunk=5) as engine:
        session = engine.session()
        assert [session.ask(turn, short()).token_ids for turn in TURNS[:3]] == answers(TURNS[:3], name=name, chunk=5)


def test_slot_positions():
    with engine_of(positions="slot", prefill_chunk=4) as engine:
        session, alone = engine.session(), Alone(chunk=4)
        alone._cache = kvkeep.BoundedCache(model("llama").config, "h2o", BUDGET, positions="slot")
        assert [session.ask(turn, short()).token_ids for turn in TURNS] == [alone.ask(turn) for turn in TURNS]


@pytest.mark.long
@pytest.mark.parametrize("family", HYBRIDS)
def test_models_with_states(family, tmp_path):
    """Their turns go on from the state: with room for everything, a conversation is one long prompt."""
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(HYBRIDS[family]()).eval()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    with Engine(network, policy="full", budget=64, rows=2, session_memory=0, session_dir=tmp_path) as engine:
        session, told = engine.session(), ()
        for turn in TURNS[:4]:
            want = engine.generate([Request(prompt=told + turn, sampling=short())])[0]
            (fork,) = session.fork()
            assert session.ask(turn, short()).token_ids == want.token_ids
            assert fork.ask(turn, short()).token_ids == want.token_ids
            told = session.token_ids


@pytest.mark.parametrize("chunk", [None, 4])
def test_memory_of_a_model_with_states_names_the_chunk_of_its_layers_with_slots(chunk):
    """The engine reads such prompts whole, but the layers with slots evict after each chunk, as those of a cache do."""
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(HYBRIDS["lfm2"]()).eval()
    engine = Engine(network, policy="h2o:recent=2", budget=8, rows=1, prefill_chunk=chunk)
    report, cache = engine.prefix(TURNS[2]), kvkeep.BoundedCache(network.config, "h2o:recent=2", 8, prefill_chunk=chunk)
    with torch.inference_mode():
        kvkeep.attach(network)(**cache.continue_with(torch.tensor([TURNS[2]], device=DEVICE)))
    question = Request(prompt=TURNS[1], sampling=short(), snapshot=report)
    assert cache.snapshot().fingerprint.differences(report.fingerprint) == {}
    answers = [engine.generate(replace(question, snapshot=one))[0].token_ids for one in (report, cache.snapshot())]
    assert answers[0] == answers[1]
    other = Engine(network, policy="h2o:recent=2", budget=8, rows=1, prefill_chunk=7)
    with pytest.raises(SnapshotError, match="prefill_chunk"):
        other.generate(question)


@pytest.mark.parametrize("budget", [BUDGET + 1, 10**6])
def test_memory_with_a_larger_budget_than_its_rows_have_slots_is_an_error_of_its_request(budget):
    engine = engine_of()
    report = engine.prefix(TURNS[2])
    layers = tuple(replace(layer, budget=budget) for layer in report.contents.layers)
    hostile = replace(report, contents=replace(report.contents, layers=layers))
    bad, good = engine.generate([Request(prompt=TURNS[1], sampling=short(), snapshot=one) for one in (hostile, report)])
    assert bad.finish_reason == "error"
    assert f"budget of {budget}" in bad.error
    assert good.error is None


@pytest.mark.parametrize("budget", [(3, 5), (4,)])
def test_memory_with_budgets_of_heads_is_an_error_under_a_policy_that_has_none(budget):
    engine = engine_of()
    report = engine.prefix(TURNS[2])
    layers = tuple(replace(layer, budget=budget) for layer in report.contents.layers)
    for hostile in (layers, layers[:1], (*layers, *layers)):
        made = replace(report, contents=replace(report.contents, layers=hostile))
        asked = [Request(prompt=TURNS[1], sampling=short(), snapshot=one) for one in (made, report)]
        bad, good = engine.generate(asked)
        assert bad.finish_reason == "error"
        assert "another model" in bad.error or "all heads of a layer have the same" in bad.error
        assert good.error is None


@pytest.mark.long
def test_drawn_tokens_differ_between_turns_and_are_the_same_again():
    def draw(sequence):
        session = engine_of().session(sequence=sequence)
        return [session.ask(turn, short(6, temperature=1.0, seed=5)).token_ids for turn in TURNS[:3]]

    assert draw(0) == draw(0) != draw(1)
    plain = engine_of().generate([Request(prompt=TURNS[0], sampling=short(6, temperature=1.0, seed=5))])[0]
    assert draw(0)[0] == plain.token_ids


def test_a_first_turn_is_like_a_request():
    policy = "random"  # depends on the sequence
    engine = engine_of(policy)
    for sequence in (0, 3):
        want = engine.generate([Request(prompt=TURNS[2], sampling=short(8), sequence=sequence)])[0]
        assert engine.session(sequence=sequence).ask(TURNS[2], short(8)).token_ids == want.token_ids


def test_a_repetition_penalty_knows_the_earlier_turns():
    engine = engine_of(budget=64)
    sampling = short(6, repetition_penalty=3.0)
    session = engine.session()
    session.read(TURNS[0])
    want = engine.generate([Request(prompt=TURNS[0] + TURNS[1], sampling=sampling)])[0]
    assert session.ask(TURNS[1], sampling).token_ids == want.token_ids


@pytest.mark.slow
def test_sessions_of_several_policies_and_budgets_run_side_by_side():
    engine = engine_of("h2o", 14, rows=4)
    ways = [("h2o", 14), ("tova", 10), ("scissorhands", 12), ("adakv:window=4", 14), ("h2o", 9)]
    sessions = [engine.session(policy=policy, budget=budget) for policy, budget in ways]
    with ThreadPoolExecutor(len(ways)) as pool:
        found = list(pool.map(lambda s: [s.ask(turn, short()).token_ids for turn in TURNS], sessions))
    assert found == [answers(TURNS, policy=policy, budget=budget) for policy, budget in ways]


def test_a_turn_in_rows_whose_heads_share_their_slots_goes_on_in_rows_whose_heads_do_not():
    engine = engine_of("h2o", 14)
    session, other = engine.session(), engine.session(policy="adakv:window=4")
    stream = other.send(TURNS[1], short(40))
    seen = [next(stream)]
    found = [session.ask(TURNS[0], short()).token_ids]  # beside the other policy, in its rows
    assert len(ids([*seen, *stream])) == 40
    found += [engine.session().ask(TURNS[0], short()).token_ids, session.ask(TURNS[1], short()).token_ids]
    (first, second) = answers(TURNS[:2], budget=14)
    assert found == [first, first, second]


# ------------------------------------------------------------------ forks, snapshots, rewinds


def test_forks_share_nothing():
    engine = engine_of()
    session = engine.session()
    first = session.ask(TURNS[0], short()).token_ids
    forks = session.fork(3)
    for fork, turn in zip(forks, TURNS[1:], strict=False):
        assert fork.token_ids == TURNS[0] + first
        assert fork.ask(turn, short()).token_ids == answers([TURNS[0], turn])[1]
    assert session.ask(TURNS[4], short()).token_ids == answers([TURNS[0], TURNS[4]])[1]
    session.close()
    assert forks[0].ask(TURNS[3], short()).token_ids == answers([TURNS[0], TURNS[1], TURNS[3]])[2]


def test_a_fork_while_the_parent_runs_is_the_last_finished_turn():
    engine = engine_of()
    session = engine.session()
    session.ask(TURNS[0], short())
    stream = session.send(TURNS[1], short(8))
    seen = [next(stream)]
    (fork,) = session.fork()
    snapshot = session.snapshot()
    assert session.running
    assert fork.ask(TURNS[2], short()).token_ids == answers([TURNS[0], TURNS[2]])[1]
    alone = Alone()
    alone.ask(TURNS[0])
    assert ids([*seen, *stream]) == alone.ask(TURNS[1], 8)
    session.rewind(snapshot)
    assert session.ask(TURNS[2], short()).token_ids == answers([TURNS[0], TURNS[2]])[1]


def test_forks_draw_their_own_tokens():
    engine = engine_of()
    session = engine.session()
    session.read(TURNS[2])
    drawn = {fork.ask(TURNS[0], short(8, temperature=1.0)).token_ids for fork in session.fork(4)}
    assert len(drawn) == 4
    greedy = {fork.ask(TURNS[0], short(8)).token_ids for fork in session.fork(4)}
    assert len(greedy) == 1


def test_a_fork_under_a_random_policy_goes_on_with_the_numbers_of_its_parent():
    engine = engine_of("random")
    session = engine.session()
    session.ask(TURNS[2], short())
    (fork,) = session.fork()
    assert fork.ask(TURNS[0], short(8)).token_ids == session.ask(TURNS[0], short(8)).token_ids


@pytest.mark.parametrize("policy", sweep(POLICIES, KINDS.__contains__))
def test_a_rewind_takes_everything_back(policy):
    budget = 14 if kvkeep.parse(policy).evicts and not kvkeep.parse(policy).grows else 64
    session = engine_of(policy, budget).session()
    session.ask(TURNS[0], short())
    snapshot = session.snapshot()
    before = session.token_ids
    once = [session.ask(turn, short()).token_ids for turn in TURNS[1:]]
    session.rewind(snapshot)
    assert session.token_ids == before
    assert [session.ask(turn, short()).token_ids for turn in TURNS[1:]] == once


def test_a_snapshot_starts_sessions_and_requests():
    engine = engine_of("h2o", 14)
    session = engine.session(policy="tova", budget=9)
    session.ask(TURNS[0], short())
    snapshot, want = session.snapshot(), session.ask(TURNS[1], short())
    other = engine.session(snapshot=snapshot)
    assert (other.policy, other.budget) == (session.policy, 9)
    assert other.ask(TURNS[1], short()).token_ids == want.token_ids
    found = engine.generate([Request(prompt=TURNS[1], snapshot=snapshot, sampling=short())] * 3)
    assert {result.token_ids for result in found} == {want.token_ids}
    assert {(result.prompt_tokens, result.cached_tokens) for result in found} == {(14, 10)}


def test_a_snapshot_of_a_cache_goes_on_in_an_engine():
    cache = kvkeep.BoundedCache(model("llama").config, "h2o", BUDGET)
    with torch.inference_mode():
        model("llama")(input_ids=torch.tensor([TURNS[2]], device=DEVICE), past_key_values=cache)
    alone = Alone()
    alone._cache = cache
    engine = engine_of()
    snapshot = cache.snapshot(0, tokens=TURNS[2])
    want = alone.ask(TURNS[0])
    assert engine.session(snapshot=snapshot).ask(TURNS[0], short()).token_ids == want
    with pytest.raises(SnapshotError, match="which tokens"):
        engine.session(snapshot=cache.snapshot())


@pytest.mark.long
def test_a_prefix_is_read_once():
    engine = engine_of(prefill_chunk=4)
    prefix = engine.prefix(TURNS[2])
    assert prefix.tokens.tolist() == list(TURNS[2])
    found = engine.generate([Request(prompt=turn, snapshot=prefix, sampling=short()) for turn in TURNS])
    for turn, result in zip(TURNS, found, strict=True):
        assert (result.cached_tokens, result.prompt_tokens) == (12, 12 + len(turn))
        session = engine.session()
        session.read(TURNS[2])
        assert result.token_ids == session.ask(turn, short()).token_ids
    whole = engine.generate([Request(prompt=TURNS[2] + TURNS[1], sampling=short())])[0]
    assert found[1].token_ids == whole.token_ids  # the prefix ends at the border of a chunk


# ------------------------------------------------------------------ what goes wrong


@pytest.fixture
def session():
    engine = engine_of()
    session = engine.session()
    session.ask(TURNS[0], short())
    return session


def is_as_before(session):
    return session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]


def failing(module, *args):
    raise RuntimeError("the model fails")


@pytest.mark.parametrize("after", [0, 2])
def test_a_failed_turn_leaves_the_session_as_it_was(session, after):
    stream = session.send(TURNS[3], short(8))
    for _ in range(after):
        next(stream)
    hook = model("llama").register_forward_pre_hook(failing)
    *_, last = stream
    hook.remove()
    assert last.result.finish_reason == "error"
    assert "the model fails" in last.result.error
    assert is_as_before(session)


def test_a_turn_that_nobody_listens_to_leaves_the_session_as_it_was(session):
    stream = session.send(TURNS[3], short(100))
    next(stream)
    stream.close()
    assert not session.running
    assert is_as_before(session)


def test_an_interrupt_leaves_the_session_as_it_was(session):
    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model("llama").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.ask(TURNS[3], short())
    hook.remove()
    assert is_as_before(session)


def test_a_memory_that_cannot_be_kept_ends_the_turn_with_an_error(session, monkeypatch):
    def full(self, *args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(session._store), "keep", full)
        events = list(session.send(TURNS[3], short()))
    assert (len(events), events[-1].result.finish_reason) == (4, "error")
    assert "No space left" in events[-1].result.error
    assert is_as_before(session)


def test_a_turn_that_cannot_be_used_is_refused_and_changes_nothing(session, no_checked_annotations):
    for asked, match in [
        ((), "no tokens"),
        ("", "empty"),
        ("a text", "no tokenizer"),
        ([{"role": "user", "content": "hello"}], "no tokenizer"),
        ([{"role": "user"}], "conversation"),
        ([61], "vocabulary"),
        ([-1], "vocabulary"),
        ([1.5], "whole number"),
        (None, "prompt"),
        (7, "prompt"),
        (b"ab", "prompt"),
        ({"input_ids": [1]}, "is a single message"),
        (Request(prompt=[1], policy="h2o"), "engine.session"),
        (Request(prompt=[1], budget=3), "engine.session"),
        (Request(prompt=[1], sequence=3), "engine.session"),
        (Request(prompt=[1], structured_outputs={"choice": ["a"]}), "Structured output needs"),
    ]:
        with pytest.raises(InputError, match=match):
            session.ask(asked)
        assert not session.running
        assert not host_of(session).busy
    assert is_as_before(session)


def test_a_turn_that_is_too_long_is_refused(session):
    long = engine_of(name="gpt2").session()
    long.read([1] * 100)
    with pytest.raises(InputError, match="positions"):
        long.ask([2] * 20, short(20))
    full = engine_of("full", 12).session()
    full.ask(TURNS[0], short())
    with pytest.raises(CapacityError):
        full.ask(TURNS[0], short())
    assert full.ask(TURNS[3], short(1)).token_ids


@pytest.mark.parametrize("make", [{"policy": "nosuch"}, {"budget": BUDGET + 1}, {"budget": 0}, {"policy": 3}])
def test_sessions_that_the_engine_has_no_rows_for_are_refused(make, no_checked_annotations):
    with pytest.raises((PolicyError, BudgetError, InputError)):
        engine_of().session(**make)


def test_nothing_works_after_the_end(session):
    snapshot = session.snapshot()
    engine = host_of(session)
    session.close()
    session.close()
    for use in (
        lambda: session.ask(TURNS[1]),
        lambda: session.read(TURNS[1]),
        session.fork,
        session.snapshot,
        lambda: session.rewind(snapshot),
    ):
        with pytest.raises(InputError, match="session is closed"):
            use()
    other = engine.session(snapshot=snapshot)
    engine.close()
    for use in (lambda: other.ask(TURNS[1]), other.fork, lambda: other.rewind(snapshot), engine.session):
        with pytest.raises(InputError, match="engine is closed"):
            use()
    other.close()


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_a_number_of_forks_that_makes_no_sense_is_refused(session, n, no_checked_annotations):
    with pytest.raises(InputError, match="n="):
        session.fork(n)


def test_a_session_without_memory_has_no_snapshot_and_forks_from_nothing():
    session = engine_of().session()
    with pytest.raises(SnapshotError, match="no memory yet"):
        session.snapshot()
    (fork,) = session.fork()
    assert fork.ask(TURNS[0], short()).token_ids == answers(TURNS[:1])[0]


def test_a_rewind_to_something_foreign_is_refused(session, no_checked_annotations):
    engine = host_of(session)
    other = engine.session(policy="tova")
    other.ask(TURNS[0], short())
    smaller = engine.session(budget=8)
    smaller.ask(TURNS[0], short())
    foreign = engine_of(name="qwen3").session()
    foreign.ask(TURNS[0], short())
    for snapshot, part in ((other, "policy"), (smaller, "budget"), (foreign, "configuration")):
        with pytest.raises(SnapshotError, match=part):
            session.rewind(snapshot.snapshot())
    with pytest.raises(InputError, match="Snapshot"):
        session.rewind("last week")
    assert is_as_before(session)


def test_a_snapshot_of_other_weights_is_refused(session):
    snapshot = session.snapshot()
    torch.manual_seed(77)
    other = kvkeep.attach(type(model("llama"))(model("llama").config).eval())
    engine = Engine(other, policy="h2o", budget=BUDGET)
    with pytest.raises(SnapshotError, match="weights"):
        engine.session(snapshot=snapshot)
    with pytest.raises(SnapshotError, match="weights"):
        engine.generate([Request(prompt=[1], snapshot=snapshot)])


def test_a_session_does_not_go_on_under_other_weights(session):
    weight = model("llama").lm_head.weight
    with torch.no_grad():
        weight.mul_(2)
        result = session.ask(TURNS[1], short())
        weight.mul_(0.5)
    assert result.finish_reason == "error"
    assert "Different: weights" in result.error
    assert is_as_before(session)


def test_a_text_that_cannot_be_read_is_an_error_and_changes_nothing(session):
    hook = model("llama").register_forward_pre_hook(failing)
    with pytest.raises(InputError, match=r"The text was not read: .*the model fails.* Read it again"):
        session.read(TURNS[3])
    hook.remove()
    assert is_as_before(session)


def test_a_memory_on_the_disk_is_rewound_and_drops_tokens(tmp_path):
    with engine_of("full", 60, session_dir=tmp_path, session_memory=0) as engine:
        session = engine.session()
        session.ask(TURNS[0], short())
        before = session.snapshot()
        assert session.drop(spans=[(1, 3)]) == ((1, 3),)
        assert session.history.dropped == ((1, 3),)
        assert (session.snapshot().contents.layers[0].positions >= 0).sum(-1).max() == before.seen - 2
        session.rewind(before)
        assert session.history.dropped == ()
        assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2], policy="full", budget=60)[1]
        assert engine.session_bytes[0] == 0


def test_a_turn_whose_listener_has_left_is_not_queued(session):
    box = ThreadBox()
    box.left = True
    session._enqueue(TURNS[1], short(), box)
    assert not host_of(session).busy
    assert is_as_before(session)


def test_a_session_without_a_name_may_be_discarded(session):
    engine = host_of(session)
    session.discard()
    with pytest.raises(InputError, match="The session is closed"):
        session.ask(TURNS[1], short())
    assert not engine.busy


def test_the_memories_that_a_session_goes_back_to_are_bounded():
    states, memories = TurnStates(), [SimpleNamespace(nbytes=n) for n in range(12)]
    states.replace_last(memories[11])  # without one that was noted
    states.replace_last(memories[1])
    assert (list(states), states.turns, states.nbytes) == ([memories[1]], 0, 1)
    states.add_oldest(memories[0])
    assert list(states) == memories[:2]
    for memory in memories[2:]:
        states.add(memory)
    kept = MOST_TURNS_BACK + 1
    assert list(states) == memories[-kept:]
    states.add_oldest(memories[0])  # no room
    assert (states[0], states.turns) == (memories[-kept], MOST_TURNS_BACK)
    other = states.copied()
    other.drop_oldest()
    other.take_back(2)
    assert list(other) == memories[-kept + 1 : -2]
    assert len(states) == kept


def test_a_running_session_is_not_rewound(session):
    snapshot = session.snapshot()
    stream = session.send(TURNS[1], short(6))
    next(stream)
    with pytest.raises(InputError, match="running"):
        session.rewind(snapshot)
    list(stream)
    session.rewind(snapshot)
    assert is_as_before(session)


# ------------------------------------------------------------------ several at once


def test_turns_wait_for_the_running_one_in_order():
    session = engine_of().session()
    stream = session.send(TURNS[0], short())
    first, found = next(stream), {}

    def listen(i):
        found[i] = ids(session.send(TURNS[i], short()))

    threads = [threading.Thread(target=listen, args=(i,)) for i in (1, 2, 3)]
    with host_of(session)._dispatcher.turn:  # nothing ends before all of them wait
        for n, thread in enumerate(threads):
            thread.start()
            while len(host_of(session)._dispatcher.turn._waiting) <= n:
                pass
    found[0] = ids([first, *stream])
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == answers(TURNS[:4])


def test_coroutines_queue_on_one_session():
    engine = engine_of()
    session = engine.session()

    async def turn(events):
        return ids([event async for event in events])

    async def main():
        turns = [session.asend(tokens, short()) for tokens in TURNS]
        for events in turns:
            await events.begin()
        return await asyncio.gather(*map(turn, turns))

    assert asyncio.run(main()) == answers(TURNS)


def test_a_queued_turn_that_is_cancelled_leaves_the_others(session):
    stream = session.send(TURNS[1], short(30))
    next(stream)

    async def main():
        waiting = asyncio.create_task(anext(aiter(session.asend(TURNS[2], short()))))
        last = asyncio.create_task(anext(aiter(session.asend(TURNS[3], short()))))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return last

    asyncio.run(main())
    list(stream)
    assert not session._queue


def test_a_queued_turn_that_turns_out_to_be_too_long_raises_in_its_listener():
    engine = engine_of("full", 16)
    session = engine.session()
    stream = session.send(TURNS[0], short(6))
    next(stream)
    with pytest.raises(CapacityError):  # it runs the first turn to its end, then it has no room
        session.ask(TURNS[0], short(6))
    assert len(ids(stream)) == 5
    assert not session.running
    assert not engine.busy
    assert session.ask([1], short(2)).token_ids


@pytest.mark.slow
def test_many_threads_on_one_session_and_many_sessions():
    engine = engine_of(rows=3)
    shared = engine.session()

    def work(i):
        if i % 3 == 0:
            return shared.ask(TURNS[i % 5], short()).token_ids
        own = engine.session()
        return [own.ask(turn, short()).token_ids for turn in TURNS[:3]]

    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(work, range(9)))
    assert [found[i] for i in range(9) if i % 3] == [answers(TURNS[:3])] * 6
    told = shared.token_ids
    assert len(told) == sum(len(TURNS[i % 5]) + 4 for i in range(0, 9, 3))
    assert not engine.busy


@pytest.mark.parametrize("who", ["session", "engine"])
def test_closing_while_turns_run_and_wait_cancels_them(session, who):
    engine, started = host_of(session), threading.Event()

    def run():
        events = []
        for event in session.send(TURNS[1], short(200)):
            events.append(event)
            started.set()
        return events[-1].result.finish_reason

    def wait():
        started.wait()
        try:
            return session.ask(TURNS[2], short(200)).finish_reason
        except KVKeepError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(run), pool.submit(wait)
        started.wait()
        while not session._queue and not second.done():
            pass
        (session if who == "session" else engine).close()
        assert first.result(20) == "cancelled"
        assert second.result(20) == "cancelled"
    assert not engine._sequences
    assert not session.running


def test_a_session_that_is_closed_by_its_own_listener(session):
    stream = session.send(TURNS[1], short(50))
    next(stream)
    session.close()
    assert [event.result.finish_reason for event in stream] == ["cancelled"]


@pytest.mark.slow
def test_closing_a_session_with_thousands_of_waiting_turns_ends_them_all(session):
    engine, boxes = host_of(session), [ThreadBox() for _ in range(3000)]
    with engine._dispatcher.turn:
        for box in boxes:
            session._enqueue(TURNS[1], short(), box)
    session.close()
    assert not engine._sequences
    ends = [next(filter(None, (box.take().result for _ in range(99)))) for box in boxes]
    assert {result.finish_reason for result in ends} == {"cancelled"}
