"""One budget for the heads of all layers, in the engine and in a cache: rows move, pause, fail and go on."""

import copy
import pickle
from functools import partial

import allocation
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep
from kvkeep import BoundedCache, BrokenCacheError, Layer, ShapeError, UnsupportedOperationError, backends
from kvkeep.cache.shared_budget import SharedBudget
from kvkeep.engine import Engine, Request, scheduler, swapping
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.joint_block import PartBlock, divide
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.types import MemoryUsage, Phase

from .models import DEVICE, model
from .test_equal import prompt_of
from .test_head_budgets import alone

RULE, POLICY, BUDGET = "global:0.1", "snapkv:window=3", 10


def cache_of(policy=POLICY, budget=BUDGET, **options):
    return BoundedCache(model("llama").config, policy, budget, head_budget=RULE, **options)


def engine_of(policy=POLICY, **options):
    return Engine(model("llama"), policy=policy, budget=BUDGET, head_budget=RULE, **{"rows": 2, **options})


@torch.inference_mode()
def feed(cache, *pieces):
    for number, piece in enumerate(pieces):
        cache.phase = Phase.PREFILL if number == 0 or len(piece[0]) > 1 else Phase.DECODE
        logits = model("llama")(input_ids=torch.as_tensor(piece, device=DEVICE), past_key_values=cache).logits
    return logits[:, -1]


def budgets_of(cache):
    return torch.stack([layer.block.budget for layer in cache.bounded_layers().values()], dim=1).flatten(1)


def held(cache):
    """The positions in the slots of each head, by layer and row."""
    layers = [cache.positions(number).tolist() for number in cache.bounded_layers()]
    return [[[sorted(at for at in head if at >= 0) for head in row] for row in layer] for layer in layers]


def batch(rows=2, length=40):
    return torch.tensor([prompt_of(i, length) for i in range(rows)], device=DEVICE)


def asked(**options):
    new = SamplingParams(max_new_tokens=6)
    return [Request(prompt=prompt_of(i, 12 + 9 * i % 31), sampling=new, ignore_end=True, **options) for i in range(6)]


@pytest.mark.long
@pytest.mark.parametrize("backend", sorted(backends.KINDS.keys() - {"triton"}))
@pytest.mark.parametrize("policy", [POLICY, "h2o:recent=2", "leverage:sinks=1,recent=2", "random"])
def test_rows_with_other_splits_get_in_a_batch_what_they_get_alone(policy, backend, monkeypatch):
    monkeypatch.setenv(backends.SWITCH, backend)
    ids, together = batch(3, 30), cache_of(policy, [10, 8, 9])
    feed(together, ids, *ids.T[:5, :, None])
    splits = budgets_of(together)
    assert len({tuple(row) for row in splits.tolist()}) == 3
    assert splits.sum(dim=1).tolist() == [6 * 10, 6 * 8, 6 * 9]
    for row, budget in enumerate((10, 8, 9)):
        single = cache_of(policy, budget)
        feed(single, ids[row : row + 1], *ids[row : row + 1].T[:5, :, None])
        assert torch.equal(budgets_of(single)[0], splits[row])
        assert [layer[0] for layer in held(single)] == [layer[row] for layer in held(together)]


def test_padding_changes_nothing():
    ids = batch()
    short = ids[:, 10:].clone()
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    both, single = cache_of(), cache_of()
    both.phase = Phase.PREFILL
    with torch.inference_mode():
        model("llama")(input_ids=ids, attention_mask=mask, past_key_values=both)
    feed(single, short[1:])
    assert torch.equal(budgets_of(both)[1], budgets_of(single)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", [None, "4"])
@pytest.mark.parametrize("pins", [(), ((2, 3), (9, 14))])
@pytest.mark.parametrize("chunk", [60, 17])
@pytest.mark.parametrize("policy", [POLICY, "h2o", "leverage:sinks=1,recent=2", "snapkv:window=3,decode=grow,room=2"])
def test_tokens_that_go_early_change_nothing(policy, chunk, pins, kv_bits, monkeypatch):
    found = []
    for at_once in (0, 1e9):
        monkeypatch.setattr("kvkeep.cache.shared_budget.AT_ONCE", at_once)
        monkeypatch.setattr("kvkeep.cache.shared_budget.WORTH", 1.0)
        cache = cache_of(policy, [12, 15], pins=[pins, ()], kv_bits=kv_bits)
        logits = feed(cache, *batch(2, 60).split(chunk, dim=1), [[1], [2]])
        lost = [shares.prompt for shares in cache.lost_mass().values()]
        found.append((held(cache), budgets_of(cache).tolist(), logits, torch.stack(lost)))
    (tokens, budgets, logits, lost), other = found
    assert (tokens, budgets) == other[:2]
    assert torch.equal(logits, other[2])
    torch.testing.assert_close(lost, other[3], equal_nan=True)


def test_a_row_that_reads_nothing_keeps_its_tokens_when_others_go_early(monkeypatch):
    monkeypatch.setattr("kvkeep.cache.shared_budget.AT_ONCE", 0)
    monkeypatch.setattr("kvkeep.cache.shared_budget.WORTH", 1.0)
    cache, mask = cache_of(), torch.ones(2, 60, dtype=torch.long, device=DEVICE)
    feed(cache, batch(2, 30))
    before, splits, mask[1, 30:] = [layer[1] for layer in held(cache)], budgets_of(cache)[1].clone(), 0
    with torch.inference_mode():
        model("llama")(input_ids=batch(2, 30), attention_mask=mask, past_key_values=cache)
    assert [layer[1] for layer in held(cache)] == before
    assert torch.equal(budgets_of(cache)[1], splits)


@pytest.mark.slow
def test_layers_that_wait_do_not_hold_the_whole_prompt(monkeypatch):
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=16, num_attention_heads=4
    )
    net = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
    ids, peaks = torch.tensor([prompt_of(0, 400)], device=DEVICE), []
    for at_once in (None, 1e9):
        if at_once is not None:
            monkeypatch.setattr("kvkeep.cache.shared_budget.AT_ONCE", at_once)
        cache = BoundedCache(config, POLICY, BUDGET, head_budget=RULE)
        given = {"input_ids": ids, "past_key_values": cache, "logits_to_keep": 1}
        with torch.inference_mode():
            peaks.append(allocation.peak_bytes(partial(net, **given)))
    assert peaks[1] - peaks[0] > 0.5 * (16 * 2 * 64 * 400 * 4)  # half of all keys and values


def test_a_chunk_divides_the_budget_anew_among_what_is_left():
    cache, ids = cache_of(), batch(1, 60)
    seen = []
    for piece in ids.split(20, dim=1):
        feed(cache, piece)
        seen.append(budgets_of(cache)[0].tolist())
    assert all(sum(one) == 6 * BUDGET for one in seen)
    assert len(set(map(tuple, seen))) == 3
    before = budgets_of(cache).clone()
    cache.phase = Phase.DECODE
    with torch.inference_mode():
        model("llama")(input_ids=torch.tensor([[3]], device=DEVICE), past_key_values=cache)
    assert torch.equal(budgets_of(cache), before)


def test_a_prompt_is_held_until_the_last_layer_and_then_let_go():
    cache = cache_of()
    together = next(iter(cache.bounded_layers().values()))._together
    feed(cache, batch(1))
    assert (together._waiting, together._blocks) == ([], [])


@pytest.mark.parametrize("rows", [1, 3])
def test_memory_is_what_the_tensors_have_and_does_not_depend_on_the_split(rows):
    found = set()
    for seed in range(3):
        cache = cache_of()
        feed(cache, torch.tensor([prompt_of(seed + i, 40) for i in range(rows)]), [[1]] * rows)
        layers = list(cache.bounded_layers().values())
        store = layers[0].store
        assert all(layer.store.entries.data_ptr() == store.entries.data_ptr() for layer in layers)
        assert store.entries.shape == (rows, 6 * (BUDGET + 1) + 1)
        memory, each = cache.memory(), 2 * 8 * 4 + 4 + 4  # keys, values, position, one state
        beside = rows * (6 * (16 + 24) + 3 * 16 + 8)  # per head, per layer, per row
        assert memory.allocated_bytes == rows * (6 * (BUDGET + 1) + 1) * each + beside
        per_slot = each + 6 * 16 // (6 * (BUDGET + 1) + 1)  # and a part of the ranges
        assert memory.occupied_bytes == sum(int((layer.store.positions >= 0).sum()) for layer in layers) * per_slot
        assert memory.full_bytes == rows * 41 * 6 * 2 * 8 * 4
        found.add(memory.allocated_bytes)
    assert len(found) == 1
    made = KVManager(model("llama"), kvkeep.parse(POLICY), BUDGET, head_budget=RULE)
    assert made.row_bytes * rows == found.pop()
    made.allocate(rows)
    assert made.memory().allocated_bytes == rows * made.row_bytes
    assert sum((made.memory_of(row) for row in range(rows)), MemoryUsage()) == made.memory()
    blocks = made.blocks_of(0)
    assert sum((block.memory() for block in blocks), MemoryUsage()) == made.memory_of(0)


@pytest.mark.parametrize("policy", [POLICY, "leverage:sinks=1,recent=2"])
def test_a_memory_goes_into_a_row_beside_others_bit_for_bit(policy):
    ids, cache = batch(3), cache_of(policy, pins=[[(3, 6)], [], [(1, 2), (9, 11)]])
    feed(cache, ids)
    snapshot = cache.snapshot(2)
    other = cache_of(policy)
    feed(other, batch(3).flip(0), [[1], [2], [3]])
    before = [[layer[row] for layer in held(other)] for row in (0, 2)]
    other.restore(1, snapshot)
    assert [[layer[row] for layer in held(other)] for row in (0, 2)] == before
    again = other.snapshot(1)
    for one, two in zip(snapshot.contents.layers, again.contents.layers, strict=True):
        assert (one.budget, one.pins) == (two.budget, two.pins)
        assert torch.equal(one.positions, two.positions)
        there = one.positions >= 0  # empty slots hold anything
        for name, x in two.tensors.items():
            assert torch.equal(*((y[there] if name in one.cut else y) for y in (one.tensors[name], x))), name
    other.reorder_cache(torch.tensor([1, 1, 0], device=DEVICE))  # pins move with the rows of all layers
    assert other.snapshot(0).contents.layers[2].pins == ((1, 2), (9, 11))
    assert budgets_of(other)[0].tolist() == budgets_of(cache)[2].tolist()


def test_rows_are_selected_once_for_all_layers():
    cache, ids = cache_of(budget=[10, 8, 9]), batch(3)
    feed(cache, ids)
    want = [[layer[row] for layer in held(cache)] for row in range(3)]
    cache.reorder_cache(torch.tensor([2, 0, 1], device=DEVICE))
    assert [[layer[row] for layer in held(cache)] for row in range(3)] == [want[2], want[0], want[1]]
    cache.batch_select_indices(torch.tensor([0, 2], device=DEVICE))
    assert [[layer[row] for layer in held(cache)] for row in range(2)] == [want[2], want[1]]
    assert all(isinstance(layer.block, PartBlock) for layer in cache.bounded_layers().values())
    assert [cache.snapshot(row).fingerprint.budget for row in range(2)] == [9, 8]
    cache.batch_repeat_interleave(2)
    assert len({layer.store.entries.data_ptr() for layer in cache.bounded_layers().values()}) == 1
    logits = feed(cache, [[5]] * 4)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_has_one_pool_of_its_own(copied):
    cache = cache_of()
    feed(cache, batch(2), [[1], [2]])
    other, before = copied(cache), held(cache)
    assert len({layer.block.whole.store.entries.data_ptr() for layer in other.bounded_layers().values()}) == 1
    other.reorder_cache(torch.tensor([1, 0], device=DEVICE))
    logits = feed(other, batch(2).flip(0))
    assert held(cache) == before
    assert torch.equal(logits.flip(0), feed(cache, batch(2)))


def test_rows_that_do_not_fit_name_a_budget_that_does():
    size = engine_of(rows=1).row_bytes
    assert engine_of(rows=None, kv_memory=3 * size + 1).rows == 3
    with pytest.raises(kvkeep.BudgetError, match=r"Not one row fits: .* or a budget of 9 or less"):
        engine_of(rows=None, kv_memory=size - 1)


def test_a_run_that_fails_between_two_layers_leaves_nothing_half_done(monkeypatch):
    cache, third = cache_of(), list(cache_of().bounded_layers())[2]
    step = type(cache.bounded_layers()[third]).step

    def failing(self, *new, **given):
        if self._index == third:
            raise RuntimeError("no memory")
        return step(self, *new, **given)

    with monkeypatch.context() as patch:
        patch.setattr("kvkeep.cache.layer.Layer.step", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            feed(cache, batch())
    with pytest.raises(BrokenCacheError):
        feed(cache, batch())
    cache.reset()
    fresh = cache_of()
    assert torch.equal(feed(cache, batch()), feed(fresh, batch()))
    assert held(cache) == held(fresh)


@pytest.mark.parametrize("method", ["wait", "end"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_memory_mends_what_a_failed_run_has_left(method, layer, monkeypatch):
    cache, fresh, ids = cache_of(), cache_of(), batch(1)
    feed(cache, ids)
    snapshot, real, calls = cache.snapshot(), getattr(SharedBudget, method), []

    def failing(self, *given, **others):
        calls.append(real(self, *given, **others))
        if len(calls) == layer + 1:
            raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(SharedBudget, method, failing)
        with pytest.raises(RuntimeError, match="no memory"):
            feed(cache, ids)
    for other in (cache, fresh):
        other.restore(0, snapshot)
        other.phase = Phase.DECODE
        with torch.inference_mode():
            model("llama")(input_ids=torch.tensor([[3]], device=DEVICE), past_key_values=other)
    assert held(cache) == held(fresh)
    assert torch.equal(feed(cache, batch(1)), feed(fresh, batch(1)))
    assert held(cache) == held(fresh)


def test_an_engine_goes_on_after_a_run_that_failed(monkeypatch):
    engine, want = engine_of(), engine_of().generate(asked()[3])
    cut, calls = SharedBudget.end, []

    def failing(self, *given):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return cut(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(SharedBudget, "end", failing)
        assert engine.generate(asked()[0])[0].error == "RuntimeError: no memory"
    assert engine.generate(asked()[3])[0].token_ids == want[0].token_ids


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("pins", [(), ((2, 3), (5, 7))])
def test_pins_are_held_in_every_head(chunk, pins):
    requests = asked(pins=pins)
    for request, result in zip(requests, engine_of(prefill_chunk=chunk, rows=3).generate(requests), strict=True):
        cache = cache_of(pins=[pins])
        ids = torch.tensor([request.prompt], device=DEVICE)
        logits = [feed(cache, piece) for piece in ids.split(chunk or 99, dim=1)][-1]
        found = [int(logits.argmax())]
        while len(found) < 6:
            cache.phase = Phase.DECODE
            with torch.inference_mode():
                logits = model("llama")(
                    input_ids=torch.tensor([found[-1:]], device=DEVICE), past_key_values=cache
                ).logits[:, -1]
            found.append(int(logits.argmax()))
        assert result.token_ids == tuple(found)
        for layer in held(cache):
            assert all({at for span in pins for at in range(*span)} <= set(head) for head in layer[0])


@pytest.mark.slow
def test_rows_that_take_turns_and_move_get_what_they_get_alone(monkeypatch):
    monkeypatch.setattr(swapping, "SHARE", 1e9)
    monkeypatch.setattr(swapping, "LEAST", 1)
    requests = asked()
    engine = engine_of(host_rows=3, prefill_chunk=7)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.token_ids == alone(request.prompt, POLICY, RULE, chunk=7, new=6)[0]
    assert engine._swapper.swaps > 6
    assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes


def test_equal_prompts_and_common_beginnings_are_read_once(monkeypatch):
    monkeypatch.setattr(scheduler, "SHORTEST", 4)
    prompt, engine = prompt_of(1, 40), engine_of(rows=3, prefix_memory=10**6, prefill_chunk=10)
    want = alone(prompt, POLICY, RULE, chunk=10, new=6)[0]
    one = Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=6), ignore_end=True)
    assert {result.token_ids for result in engine.generate([one] * 3)} == {want}
    (again,) = engine.generate([one])
    assert again.token_ids == want
    assert again.cached_tokens


@pytest.mark.slow
def test_sessions_rewind_fork_and_go_on_in_rows_of_another_policy():
    session = engine_of().session()
    session.ask(prompt_of(1, 30), SamplingParams(max_new_tokens=4))
    snapshot, fork = session.snapshot(), session.fork()[0]
    once = [session.ask(prompt_of(i, 9), SamplingParams(max_new_tokens=4)).token_ids for i in (2, 3)]
    session.rewind(snapshot)
    assert [session.ask(prompt_of(i, 9), SamplingParams(max_new_tokens=4)).token_ids for i in (2, 3)] == once
    assert fork.ask(prompt_of(2, 9), SamplingParams(max_new_tokens=4)).token_ids == once[0]
    other = engine_of("leverage:sinks=1,recent=2")  # rows with other state
    with other.session(policy=POLICY, snapshot=snapshot) as elsewhere:
        assert elsewhere.ask(prompt_of(2, 9), SamplingParams(max_new_tokens=4)).token_ids == once[0]


def test_a_memory_with_more_slots_than_a_row_has_is_refused():
    cache = cache_of()
    feed(cache, batch(1))
    blocks = [layer.block for layer in cache.bounded_layers().values()]
    contents = cache.snapshot().contents
    more = [layer.budget if isinstance(layer.budget, tuple) else (layer.budget,) * 2 for layer in contents.layers]
    layers = tuple(
        kvkeep.snapshot.contents.replace(layer, budget=tuple(n + 1 for n in each))
        for layer, each in zip(contents.layers, more, strict=True)
    )
    with pytest.raises(ShapeError, match="A row of 72 slots in all layers was given to a block that has 66"):
        kvkeep.snapshot.contents.check(kvkeep.snapshot.contents.replace(contents, layers=layers), blocks, {})


def test_a_division_has_no_more_slots_than_the_row():
    """The pool ends where the next row's begins."""
    cache = cache_of()
    feed(cache, batch())
    blocks, before, found = [layer.block for layer in cache.bounded_layers().values()], held(cache), budgets_of(cache)
    more = found.clone()
    more[1, 4] += 1
    with pytest.raises(ShapeError, match="The heads of a row need 67 slots in all layers, and its pool has 66"):
        divide(blocks, more)
    assert held(cache) == before
    assert torch.equal(budgets_of(cache), found)
    divide(blocks, found.flip(1))
    whole = blocks[0].whole.store
    assert torch.equal(whole.starts[:, 1:], (whole.starts + whole.sizes)[:, :-1])
    assert not whole.starts[:, 0].any()
    assert whole.n_tokens == 0


def test_graphs_run_its_steps_unrecorded(caplog):
    engine = engine_of(graphs=True)
    assert engine.generate(asked()[2])[0].token_ids == alone(asked()[2].prompt, POLICY, RULE, new=6)[0]
    assert "slots that a prompt divides anew" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("llama", {"prefill_chunk": 8}, "`prefill_chunk` of a cache, .* Leave `prefill_chunk` out"),
        ("llama", {"layer_budget": "ramp:0.2"}, "`layer_budget`, since it divides the budget among the layers, too"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(name, options, said):
    with pytest.raises(UnsupportedOperationError, match=said):
        BoundedCache(model(name).config, POLICY, 40, head_budget="global", **options)
    if "prefill_chunk" not in options:
        with pytest.raises(UnsupportedOperationError, match=said):
            Engine(model(name), policy=POLICY, budget=40, head_budget="global", **options)


def test_layers_whose_heads_differ_are_refused():
    together, like = SharedBudget([3, 5]), torch.zeros(1, 2, 1, 8)
    given = {"numbers": (4,), "starts": {}}
    together.block(3, like, like, **given)
    for other in (torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 16), like.double()):
        with pytest.raises(UnsupportedOperationError, match="layer 5 differs from layer 3"):
            together.block(5, other, other, **given)


def test_one_layer_shares_as_ada_does():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    net = kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())
    found = []
    for rule in (RULE, "ada:0.1"):
        cache = BoundedCache(config, POLICY, BUDGET, head_budget=rule)
        with torch.inference_mode():
            cache.phase = Phase.PREFILL
            logits = net(input_ids=batch(), past_key_values=cache).logits
        found.append((logits[:, -1], cache.positions(0).sort(dim=-1).values))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", [None, "8"])
@pytest.mark.parametrize("rule", ["global:0.1", "ada:0.1"])
@pytest.mark.parametrize("policy", ["reread:sinks=1,recent=3,decode=score", "snapkv:window=3", "keydiff"])
def test_while_all_tokens_fit_slots_are_used_where_they_lie(policy, rule, kv_bits, monkeypatch):
    """The heads keep equal budgets as if these were divided at each piece, and so does all that comes later."""
    ids, found, in_place = batch(2, 70), [], []
    even = PooledStore.even

    def noted(store):
        in_place.append(even(store))
        return in_place[-1]

    monkeypatch.setattr(PooledStore, "even", noted)
    for divides in (None, lambda *_: True):
        if divides is not None:
            monkeypatch.setattr(Layer, "_divides", divides)
        cache = BoundedCache(model("llama").config, policy, 40, head_budget=rule, kv_bits=kv_bits)
        pieces = ids[:, :20], ids[:, 20:21], ids[:, 21:33], *ids[:, 33:45].T[:, :, None], ids[:, 45:]
        outputs = [feed(cache, *pieces[:3]), budgets_of(cache), held(cache)]  # they fit
        cache.phase = Phase.DECODE
        outputs += [run(cache, piece) for piece in pieces[3:-1]] + [held(cache)]  # each head evicts its own
        cache.phase = Phase.PREFILL
        outputs += [run(cache, pieces[-1]), budgets_of(cache), held(cache)]  # the budgets are divided
        found.append(outputs)
    assert len(in_place) == 2 * len(cache.bounded_layers())
    assert None not in in_place
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("rule", ["global:0.1", "ada:0.1"])
@pytest.mark.parametrize(
    ("name", "policy", "length"),
    [
        ("llama", "snapkv:window=2,decode=grow,room=6", 18),  # room for generated tokens
        ("llama", "snapkv:window=2,keep_prompt=0.5", 18),  # a share for the prompt
        ("gemma2", "snapkv:window=2", 10),  # the oldest token leaves a window that is full
    ],
)
def test_heads_divide_a_budget_as_soon_as_a_token_goes(name, policy, length, rule, monkeypatch):
    """Also where the budget itself would hold all tokens: a row then gets the same beside a longer one, which makes
    all rows divide theirs."""
    net, found = model(name), []
    prompt = torch.tensor([prompt_of(3, length + 5)], device=DEVICE)
    for divides in (None, lambda *_: True):
        if divides is not None:
            monkeypatch.setattr(Layer, "_divides", divides)
        cache = BoundedCache(net.config, policy, 20, head_budget=rule)
        cache.phase = Phase.PREFILL
        with torch.inference_mode():
            for piece in prompt.split([length - 2, 2, 5], dim=1):
                logits = net(input_ids=piece, past_key_values=cache).logits
        found.append((logits, *(torch.as_tensor(layer.block.budget) for layer in cache.bounded_layers().values())))
        found[-1] += tuple(cache.positions(number) for number in cache.bounded_layers())  # slot by slot
    assert all(map(torch.equal, *found))


@torch.inference_mode()
def run(cache, ids):
    return model("llama")(input_ids=ids, past_key_values=cache).logits[:, -1]
