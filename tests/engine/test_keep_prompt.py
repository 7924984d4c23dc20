"""`keep_prompt` in the engine: a request gets the tokens that it gets alone, however its memory has moved."""

import pytest
import torch

import kvkeep
from kvkeep import BudgetError, InputError, SnapshotError
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.snapshot.snapshot import Snapshot

from .models import alone, model
from .session_models import answers, engine_of, short
from .test_equal import prompt_of

BUDGET = 32
TURNS = [prompt_of(seed, length) for seed, length in ((1, 9), (2, 4), (3, 6))]
CASES = [
    (policy, keep)
    for policy in ("h2o:recent=2", "random", "random:buffer=5,recent=3", "vase:buffer=3,recent=2")
    for keep in (True, 0.5)
]


def named(policy, keep):
    return f"{policy}{',' if ':' in policy else ':'}keep_prompt={1.0 if keep is True else keep}"


def wish(prompt, new=30, **options):
    return Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=new), ignore_end=True, **options)


def kept(engine, number):
    """Positions that every head of a running request's row holds."""
    row = engine._sequences[number].row
    heads = [set(head.tolist()) for block in engine._kv.blocks_of(row) for head in block.store.positions[0]]
    return set.intersection(*heads)


@pytest.mark.long
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize(("policy", "keep"), CASES)
def test_rows_get_the_tokens_that_they_get_alone(policy, keep, chunk):
    """Prompts of different lengths share a batch, with requests that keep nothing and requests of other policies."""
    engine = Engine(model("llama"), policy=policy, budget=BUDGET, rows=3, prefill_chunk=chunk)
    asked = [wish(prompt_of(n, 6 + 5 * n), keep_prompt=(keep, None)[n == 1]) for n in range(4)]
    asked.append(wish(asked[0].prompt, policy="local", keep_prompt=keep))
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.error is None
        own = request.policy or policy
        string = own if request.keep_prompt is None else named(own, keep)
        assert result.token_ids == alone("llama", request.prompt, 30, string, BUDGET, chunk)


@pytest.mark.parametrize(("keep", "stays"), [(True, {*range(12)}), (None, set())])
def test_the_engine_says_it_for_all_requests_and_a_request_for_itself(keep, stays):
    with Engine(model("llama"), policy="local", budget=BUDGET, rows=2, keep_prompt=True) as engine:
        number = engine.add(wish(prompt_of(1, 12), 60, keep_prompt=False if keep is None else None))
        for _ in range(50):
            engine.step()
        assert kept(engine, number) & {*range(12)} == stays


@pytest.mark.long
@pytest.mark.parametrize(("policy", "keep"), CASES)
def test_a_session_keeps_what_it_reads(policy, keep, tmp_path):
    string = named(policy, keep)
    with engine_of(string, BUDGET) as engine:
        session = engine.session(name="one")
        found = [session.ask(turn, short(12)).token_ids for turn in TURNS[:2]]
        fork, snapshot = session.fork()[0], session.snapshot()
        found += [session.ask(turn, short(12)).token_ids for turn in TURNS[2:]]
        assert fork.ask(TURNS[2], short(12)).token_ids == found[2]
        snapshot.save(tmp_path / "one.kvkeep")
    assert found == answers(TURNS, policy=string, budget=BUDGET, new=12)
    with engine_of(string, BUDGET) as other:  # the file names the setting
        again = other.session(snapshot=Snapshot.load(tmp_path / "one.kvkeep"))
        assert again.ask(TURNS[2], short(12)).token_ids == found[2]
        with pytest.raises(SnapshotError, match="keep_prompt"):
            other.session(snapshot=snapshot, policy=policy, keep_prompt=False)
    if keep is True:
        pins = ((0, 9), (20, 25))  # the second turn begins with the last token of the answer before it
        assert snapshot.contents.layers[0].pins == pins


def test_a_session_has_its_own_setting():
    with engine_of("local", BUDGET, keep_prompt=True) as engine:
        plain, own = engine.session(keep_prompt=False), engine.session()
        assert (plain.policy.keep_prompt, own.policy.keep_prompt) == (None, 1.0)
        plain.ask(TURNS[0], short(4))
        own.ask(TURNS[0], short(4))
        with pytest.raises(InputError, match="belongs to the session"):
            own.ask(wish(TURNS[1], 4, keep_prompt=False))
        engine.session(name="x", keep_prompt=0.5)
        assert engine.session(name="x").policy.keep_prompt == 0.5
        with pytest.raises(InputError, match=r"is open under local:keep_prompt=0\.5"):
            engine.session(name="x", keep_prompt=True)
        with pytest.raises(BudgetError, match="below 1"):  # 0 is a budget, and not the session's own
            engine.session(name="x", budget=0)


@pytest.mark.long
@pytest.mark.parametrize("keep", [True, 0.5])
def test_a_common_beginning_is_shared_and_keeps_nothing_of_other_prompts(keep):
    start = prompt_of(5, 8)
    asked = [wish((*start, *prompt_of(n, length))) for n, length in ((6, 12), (7, 2), (8, 6))]
    string = named("h2o:recent=2", keep)
    with Engine(model("llama"), policy=string, budget=BUDGET, prefill_chunk=4, prefix_memory=10**8) as engine:
        for request in asked:
            (result,) = engine.generate(request)
            assert result.token_ids == alone("llama", request.prompt, 30, string, BUDGET, 4)
        assert result.cached_tokens == 8


@pytest.mark.long
@pytest.mark.parametrize("keep", [True, 0.5])
def test_rows_that_take_turns_keep_their_prompts(keep):
    string = named("h2o:recent=2", keep)
    engine = engine_of(string, BUDGET, rows=1, host_rows=3)
    asked = [wish(prompt_of(n, 5 + 3 * n)) for n in range(4)]
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone("llama", request.prompt, 30, string, BUDGET, None)


@pytest.mark.parametrize("keep", [True, 0.5])
def test_a_chat_goes_on_from_its_memory(keep):
    """The client sends the conversation again; while nothing was evicted, the tokens are those of a new reading."""
    with Engine(model("llama"), policy="h2o", budget=96, rows=2, conversation_memory=10**9, keep_prompt=keep) as engine:
        first = wish(prompt_of(1, 20), 5, owner="anna", keep_as="a")
        (result,) = engine.generate(first)
        longer = (*first.prompt, *result.token_ids, *prompt_of(2, 6))
        (again,) = engine.generate(wish(longer, 5, owner="anna", keep_as="b"))
        assert again.cached_tokens == 24
    with Engine(model("llama"), policy="h2o", budget=96, rows=2, keep_prompt=keep) as engine:
        assert engine.generate(wish(longer, 5))[0].token_ids == again.token_ids


@pytest.mark.parametrize("keep", [True, 0.5])
@pytest.mark.parametrize("heads", ["ada:0.2", "global:0.2"])
def test_heads_and_layers_that_share_a_budget_keep_the_prompt(heads, keep):
    """Right after the prompt each head holds a share of its own budget, or all of the prompt; none of it goes."""
    whole, options = keep is True, {"head_budget": heads, "rows": 2, "keep_prompt": keep}
    with Engine(model("llama"), policy="h2o:recent=2", budget=BUDGET, **options) as engine:
        number = engine.add(wish(prompt_of(3, 14 if whole else 60), 80))
        moments = []
        for steps in (2, 60):
            for _ in range(steps):
                engine.step()
            blocks = engine._kv.blocks_of(engine._sequences[number].row)
            moments.append([set(head) for block in blocks for head in block.opened().store.positions[0].tolist()])
    assert all({j for j in before if 0 <= j < 60} <= now for before, now in zip(*moments, strict=True))
    if whole:
        assert all({*range(14)} <= head for head in moments[1])


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("keep", [True, 0.5])
def test_models_with_windows(name, keep):
    string = named("h2o:recent=2", keep)
    prompt = prompt_of(4, 12)
    engine = Engine(model(name), policy=string, budget=BUDGET, rows=2)
    assert engine.generate(wish(prompt, 50))[0].token_ids == alone(name, prompt, 50, string, BUDGET, None)


@pytest.mark.long
@pytest.mark.parametrize("heads", [{"policy": "adakv:window=4"}, {"policy": "h2o:recent=2", "head_budget": "ada:0.2"}])
def test_a_prompt_that_leaves_with_a_window_takes_no_slots_of_its_heads(heads):
    with engine_of(**heads, budget=BUDGET, name="gemma3", keep_prompt=True) as engine:
        session = engine.session()
        for turn in TURNS:
            assert session.ask(turn, short()).error is None
        held = [set(head.tolist()) - {-1} for layer in session.snapshot().contents.layers for head in layer.positions]
        assert {len(head) for head in held if len(head) < 10} == {6}  # the window of 7 but for the next token
        assert all({*range(9)} <= head for head in held if len(head) > 6)


def test_what_leaves_no_room_is_refused_before_it_waits():
    with engine_of("local", BUDGET, keep_prompt=True) as engine:
        with pytest.raises(BudgetError, match=r"keeps all 40 tokens that were read.* at least 41"):
            engine.add(wish(prompt_of(1, 40)))
        session = engine.session()
        session.ask(prompt_of(1, 20), short(4))
        with pytest.raises(BudgetError, match=r"keeps all 39 tokens"):
            session.ask(prompt_of(2, 18), short(4))
        session.ask(prompt_of(2, 9), short(4))
        with pytest.raises(InputError, match=r"guard.*it keeps prompts"):
            engine.add(wish(prompt_of(1, 10), guard=0.1, policy="h2o"))
        with pytest.raises(InputError, match="no share of the budget"):
            wish(prompt_of(1, 10), keep_prompt=3.0)


@pytest.mark.parametrize("keep", [True, 0.5])
def test_a_cache_that_was_restored_goes_on_bit_for_bit(keep):
    cache = kvkeep.BoundedCache(model("llama").config, "h2o:recent=2", BUDGET, keep_prompt=keep)
    ids = torch.tensor([prompt_of(1, 14)])
    with torch.inference_mode():
        model("llama").generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False)
        snapshot = cache.snapshot()
        other = kvkeep.BoundedCache.from_snapshots(model("llama").config, [snapshot])
        assert other.policy.keep_prompt == (1.0 if keep is True else keep)
        for step in range(20):
            token = torch.tensor([[3 + step]])
            one, two = (model("llama")(input_ids=token, past_key_values=each).logits for each in (cache, other))
            assert torch.equal(one, two)
    with pytest.raises(SnapshotError, match="policy"):
        kvkeep.BoundedCache(model("llama").config, "h2o:recent=2", BUDGET).restore(0, snapshot)


@pytest.mark.parametrize("heads", ["ada:0.2", "global:0.2"])
@pytest.mark.parametrize("beams", [1, 2])
def test_caches_of_ones_own_keep_it_with_beams_and_shared_budgets(heads, beams):
    cache = kvkeep.BoundedCache(model("llama").config, "h2o:recent=2", BUDGET, head_budget=heads, keep_prompt=True)
    ids = torch.tensor([prompt_of(1, 14)])
    for _ in range(2):
        model("llama").generate(ids, past_key_values=cache, max_new_tokens=45, do_sample=False, num_beams=beams)
        for layer in cache.bounded_layers().values():
            rows = layer.block.opened().store.positions.tolist()
            assert all({*range(14)} <= set(head) for row in rows for head in row)
        cache.reset()
