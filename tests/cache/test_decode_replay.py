"""Decode steps that are told their tokens alone give the numbers of steps that are told everything."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import kvkeep
from kvkeep.backends.native import native
from kvkeep.backends.native.ops import NativeRepeat
from kvkeep.cache.layer import Layer
from kvkeep.policies._head_budgets import under
from kvkeep.types import AttentionOptions, Phase

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

POLICIES = (
    *("h2o", "local", "streaming_llm", "full", "h2o:graduate=compete", "snapkv:decode=score,window=4"),
    *("snapkv:window=3", "reread:recent=3,sinks=2", "blend:recent=3,rotated=true", "restkv:window=3", "ahakv:recent=3"),
)
B, HQ, HK, D = 3, 6, 2, 16


def layer_of(policy="h2o", budget=12, *, head_budget=None, **options):
    return Layer(under(kvkeep.parse(policy), head_budget), 200 if policy == "full" else budget, **options)


def tokens(T=1, seed=0, *, rows=B, dtype=torch.float32, heads=HK):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, n, T, D, generator=g).to(dtype) for n in (HQ, heads, heads)]


def step(layer, T=1, seed=0, *, real=None, window=None, scaling=0.25, softcap=None, **shape):
    options = AttentionOptions(scaling, window, softcap)
    phase = Phase.DECODE if T == 1 else Phase.PREFILL
    return layer.step(*tokens(T, seed, **shape), options=options, phase=phase, real=real)


def content(layer):
    """All that a layer holds."""
    return [*layer.block.per_row().values(), torch.tensor(layer.columns)]


def assert_equal(one, other):
    for found, expected in zip(one, other, strict=True):
        assert torch.equal(found, expected)


@pytest.fixture(autouse=True)
def _without_autograd():
    with torch.no_grad():
        yield


@pytest.fixture
def repeats(monkeypatch):
    """The number of steps that were told their tokens alone."""
    calls, honest = [], NativeRepeat.__call__

    def call(self, *args):
        calls.append(1)
        return honest(self, *args)

    monkeypatch.setattr(NativeRepeat, "__call__", call)
    return calls


class Pair:
    """A layer, and one that is told everything in each step, or asks its policy; both get the same steps."""

    def __init__(self, *args, asks=False, **options):
        self.layer, self.other = layer_of(*args, **options), layer_of(*args, **options)
        self.other.paths.may_record = lambda *_, **__: False
        self.asks = asks
        if asks:
            self.other.paths.why_not_fused = lambda *_: "the test asks the policy"
        self.seed = 0

    def step(self, T=1, **given):
        self.seed += 1
        assert torch.equal(step(self.layer, T, self.seed, **given), step(self.other, T, self.seed, **given))
        self.assert_equal()

    def assert_equal(self):
        assert self.layer.columns == self.other.columns
        other = self.other.block.per_row()
        for name, tensor in self.layer.block.per_row().items():
            if name == "lost" and self.asks:  # another order of sums
                torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(tensor, other[name]), name

    def both(self, change):
        change(self.layer)
        change(self.other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv_bits", [None, "8", "4", "k8v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_numbers(policy, kv_bits, dtype, repeats):
    pair = Pair(policy, kv_bits=kv_bits)
    pair.step(9, dtype=dtype)
    for _ in range(12):
        pair.step(dtype=dtype)
    assert len(repeats) == 11


BUDGETS = {
    "rows": {"budget": [10, 12, 14]},
    "heads": {"budget": [(12, 8)]},
    "heads of rows": {"budget": [(12, 8), (9, 13), (5, 20)]},
    "heads that share": {"head_budget": "ada:0.2"},
    "heads in a window": {"budget": [(12, 8)], "window": 15},
}


@pytest.mark.parametrize("asks", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("budgets", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("kv_bits", [None, "k8v4"])
@pytest.mark.parametrize("policy", ["h2o", "local", "snapkv:window=3", "reread:recent=3,sinks=2", "ahakv:recent=3"])
def test_rows_and_heads_with_budgets_of_their_own(policy, kv_bits, budgets, asks, repeats):
    """In pools, where each head has a range, and in rows side by side; two turns, with the prompt in chunks."""
    pair, window = Pair(policy, **budgets, kv_bits=kv_bits, asks=asks), budgets.get("window")
    for chunks in ((19, 7), (4, 3)):
        for T in (*chunks, *[1] * 8):
            pair.step(T, window=window)
    assert len(repeats) == 2 * 7


def test_in_a_sliding_window_with_a_soft_cap(repeats):
    pair = Pair(window=8)
    pair.step(20, window=8, softcap=3.0)
    for _ in range(20):
        pair.step(window=8, softcap=3.0)
    assert len(repeats) == 19


def test_a_conversation(repeats):
    pair = Pair()
    for turn in range(4):
        pair.step(5 + turn)
        for _ in range(5):
            pair.step()
    assert len(repeats) == 4 * 4


CHANGES = {
    "rows": (lambda layer: layer.select_rows(torch.tensor([2, 0, 1])), 1),
    "a cleared row": (lambda layer: layer.block.clear_row(1), 1),
    "a row over another": (lambda layer: layer.block.move_row(0, 2), 1),
    "state": (lambda layer: layer.block.state["mass"].mul_(2), 0),
    "keys": (lambda layer: layer.store.keys.mul_(2), 0),
    "width": (lambda layer: layer.block.widen(20), 1),
    "a budget": (lambda layer: setattr(layer.block, "budget", 9), 1),
    "budgets": (lambda layer: setattr(layer.block, "budget", torch.tensor([[9], [10], [12]])), 1),
    "a part": (lambda layer: layer.hold(layer.block.part(0, B), columns=layer.columns), 1),
    "a copy": (lambda layer: layer.hold(copy.deepcopy(layer.block), columns=layer.columns), 1),
    "pins": (lambda layer: setattr(layer.block, "pins", torch.tensor([[0, 3]] * B)), 3),
}


@pytest.mark.parametrize(("change", "missed"), CHANGES.values(), ids=CHANGES)
def test_changes_between_steps(change, missed, repeats):
    pair = Pair()
    pair.step(9)
    for _ in range(5):
        pair.step()
    repeats.clear()
    pair.both(change)
    for _ in range(3):
        pair.step()
    assert len(repeats) == 3 - missed


def divided(layer):
    """Give one head of each row nearly all slots: more than any head had when the step was recorded."""
    layer.block.budget.copy_(torch.tensor([[19, 1], [1, 19], [10, 10]]))
    layer.block.divide()


OF_POOLS = {
    **{name: CHANGES[name] for name in ("rows", "a cleared row", "a row over another", "a part", "a copy", "pins")},
    "other sizes": (divided, 1),
    "other sizes of one row": (lambda layer: layer.store.divide(torch.tensor([[20, 2]]), slice(1, 2)), 1),
    "a budget": (lambda layer: layer.block.budget[1].sub_(3), 1),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("change", "missed"), OF_POOLS.values(), ids=OF_POOLS)
def test_changes_of_a_pool_between_steps(change, missed, threads, repeats):
    pair, before = Pair("reread:recent=3,sinks=2", [(12, 8), (8, 12), (10, 10)]), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for T in (30, *[1] * 5):
            pair.step(T)
        repeats.clear()
        pair.both(change)
        for _ in range(25):
            pair.step()
    finally:
        torch.set_num_threads(before)
    assert len(repeats) == (0 if missed == 3 else 25 - missed)


def test_first_tokens_that_are_pinned_stay_beside_tokens_that_slide(repeats):
    pair = Pair("snapkv:window=3", pins=[((0, 4),)] * B, asks=True)
    pair.step(20)
    pair.both(lambda layer: setattr(layer.block, "lead", 4))  # as an engine does
    for T in (*[1] * 15, 6, *[1] * 15):
        pair.step(T)
    assert len(repeats) == 2 * 14
    assert {0, 1, 2, 3} <= set(pair.layer.store.positions[2, 1].tolist())


def test_heads_of_one_slot():
    pair = Pair("local", [(1, 19)], asks=True)
    for T in (30, *[1] * 5, 2, *[1] * 3):
        pair.step(T)


@pytest.mark.usefixtures("only_new_garbage")
def test_a_recorded_step_in_a_pool_keeps_no_slots_alive(repeats):
    layer = layer_of("reread:recent=3,sinks=2", [(12, 8)])
    for seed, T in enumerate((9, 1, 1)):
        step(layer, T, seed)
    kept, keys = layer.paths.recorded, weakref.ref(layer.store.vectors.tensors["keys"])
    layer.hold(layer.new_block(*tokens()[1:]), columns=0)
    gc.collect()
    assert kept is not None
    assert keys() is None
    assert len(repeats) == 1


def test_other_arguments(repeats):
    pair = Pair()
    pair.step(9)
    real = torch.tensor([[True], [False], [True]])
    given = [{}, {}, {"scaling": 0.5}, {"softcap": 2.0}, {}, {"real": real}, {"real": real}, {}, {}]
    for one in given:
        pair.step(**one)
    assert len(repeats) == 3  # the second step, and those after rows with padding


def test_inside_and_outside_of_autograd_and_inference_mode(repeats):
    pair = Pair()
    pair.step(9)
    for _ in range(3):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                pair.step()
    assert len(repeats) == 5  # with autograd a step is told everything, and so is the first one


def other_tensors(layer):
    """As many rows as before, in tensors of their own."""
    layer.select_rows(torch.tensor([0, 0, 1, 1, 2, 2]))
    layer.select_rows(torch.tensor([0, 2, 4]))


@pytest.mark.parametrize("change", [other_tensors, *(CHANGES[name][0] for name in ("width", "a budget", "rows"))])
def test_changes_before_a_step_with_padding(change):
    """The step after is told everything, as the one with padding did not pack what has changed."""
    pair = Pair()
    pair.step(9)
    for _ in range(3):
        pair.step()
    pair.both(change)
    pair.step(real=torch.tensor([[True], [False], [True]]))
    for _ in range(3):
        pair.step()


def test_a_layer_that_was_reset_begins_anew(repeats):
    """Its block is another one if rows have moved, and its first token may come without a prompt."""
    pair = Pair()
    pair.step(9)
    pair.both(lambda layer: layer.select_rows(torch.tensor([1, 0, 2])))
    for _ in range(3):
        pair.step()
    pair.both(Layer.reset)
    repeats.clear()
    pair.step()
    assert not repeats
    assert pair.layer.seen.tolist() == [1] * B


def test_other_threads(repeats):
    pair = Pair()
    pair.step(9)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 3):
            torch.set_num_threads(threads)
            pair.step()
    finally:
        torch.set_num_threads(before)
    assert len(repeats) == 3


def test_strides_of_tokens_do_not_matter(repeats):
    """Keys that come as parts of a larger tensor."""
    pair = Pair()
    pair.step(9)
    pair.step()
    for seed in (5, 6):
        query, keys, values = tokens(1, seed)
        joined = torch.cat([query, keys, values], dim=1)
        parts = joined[:, :HQ], joined[:, HQ : HQ + HK], joined[:, HQ + HK :]
        options = AttentionOptions(0.25)
        found = pair.layer.step(*parts, options=options, phase=Phase.DECODE)
        assert torch.equal(found, pair.other.step(query, keys, values, options=options, phase=Phase.DECODE))
        assert_equal(content(pair.layer), content(pair.other))
    assert len(repeats) == 2


def test_wrong_tokens_are_refused_as_before():
    layer = layer_of()
    step(layer, 9)
    step(layer)
    step(layer)
    before = [one.clone() for one in content(layer)]
    for wrong in ({"rows": 2}, {"dtype": torch.float64}, {"heads": 3}):
        with pytest.raises(kvkeep.ShapeError):
            step(layer, **wrong)
        assert_equal(content(layer), before)
    with pytest.raises(kvkeep.ShapeError):
        layer.step(*tokens(2), options=AttentionOptions(0.25), phase=Phase.DECODE)
    step(layer)


def test_a_policy_that_never_evicts_still_says_when_it_is_full(repeats):
    layer = Layer(kvkeep.parse("full"), 12)
    step(layer, 9)
    for _ in range(3):
        step(layer)
    before = [one.clone() for one in content(layer)]
    with pytest.raises(kvkeep.CapacityError):
        step(layer)
    assert_equal(content(layer), before)
    assert len(repeats) == 2


def test_a_kernel_that_fails_leaves_the_step_to_torch(monkeypatch):
    pair = Pair()
    pair.step(9)
    pair.step()
    pair.step()
    monkeypatch.setattr(NativeRepeat, "__call__", lambda *_: None)
    pair.step()
    pair.step()


def test_copies_go_on_alone(repeats):
    layer = layer_of()
    step(layer, 9)
    step(layer)
    step(layer)
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        other = copied(layer)
        before = [one.clone() for one in content(layer)]
        outs = [step(other, seed=seed) for seed in range(4)]
        assert_equal(content(layer), before)
        again = copied(layer)
        again.paths.may_record = lambda *_, **__: False
        assert_equal([step(again, seed=seed) for seed in range(4)], outs)
    assert len(repeats) == 1 + 2 * 3


@pytest.mark.usefixtures("only_new_garbage")
def test_no_memory_is_kept(repeats):
    layer = layer_of()
    step(layer, 9)
    step(layer)
    step(layer)
    store = weakref.ref(layer.store)
    layer.select_rows(torch.tensor([0]))
    gc.collect()
    assert store() is None
    block = weakref.ref(layer.block)
    layer.hold(layer.new_block(*tokens()[1:]), columns=0)
    gc.collect()
    assert block() is None
    assert len(repeats) == 1


@pytest.mark.parametrize("policy", ["tova", "h2o:decay=0.9", "scissorhands", "spatten"])
def test_policies_that_ask_anew_are_told_everything(policy, repeats):
    pair = Pair(policy, 40)
    pair.step(50)
    for _ in range(4):
        pair.step()
    assert not repeats


def test_a_step_that_is_compiled_is_told_everything(monkeypatch, repeats):
    layer = layer_of()
    step(layer, 9)
    step(layer)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step(layer)
    assert not repeats
