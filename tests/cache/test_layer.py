"""One layer's block: what is allocated, what is refused, what moves."""

import pytest
import torch
from phases import phase_of
from torch.profiler import ProfilerActivity, profile

import kvkeep
from kvkeep import AttentionOptions, Layer
from kvkeep.backends import SWITCH
from kvkeep.backends.torch import TorchBackend
from kvkeep.policies.full import Full
from kvkeep.policies.h2o import H2O
from kvkeep.policies.local import Local
from kvkeep.types import Phase

OPTIONS = AttentionOptions(scaling=0.5)


def feed(layer, T, B=2, Hk=2, D=4, E=None, real=None, dtype=torch.float32):
    q = torch.randn(B, 2 * Hk, T, D, dtype=dtype)
    k, v = torch.randn(B, Hk, T, D, dtype=dtype), torch.randn(B, Hk, T, E or D, dtype=dtype)
    return layer.step(q, k, v, options=OPTIONS, phase=phase_of(q), real=real)


def test_memory_is_the_formula_of_the_layouts_page():
    layer = Layer(H2O(), budget=8)
    assert layer.memory() == kvkeep.MemoryUsage()
    feed(layer, 20, B=3, Hk=2, D=4, E=6)
    B, Hk, capacity, D, E, states = 3, 2, 9, 4, 6, 1
    slots = B * Hk * capacity * (4 * (D + E) + 4 + 4 * states)
    memory = layer.memory()
    assert memory.allocated_bytes == slots + 24 * B + 16 * B * Hk
    assert memory.occupied_bytes == slots // capacity * 8
    assert memory.state_bytes == B * Hk * capacity * 4 + 24 * B + 16 * B * Hk
    assert memory.full_bytes == B * Hk * 20 * 4 * (D + E)
    assert (memory + memory).full_bytes == 2 * memory.full_bytes


@pytest.mark.long
def test_storage_stays_where_it_is_for_two_thousand_steps():
    layer = Layer(H2O(recent=4), budget=8)
    feed(layer, 30)

    def pointers():
        tensors = [*layer.store.per_row().values(), *layer.state.values(), layer.seen]
        return [tensor.data_ptr() for tensor in tensors]

    before, allocated = pointers(), layer.memory().allocated_bytes
    for _ in range(2000):
        feed(layer, 1)
    assert pointers() == before
    assert layer.memory().allocated_bytes == allocated
    assert layer.seen.tolist() == [2030, 2030]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["h2o", "local", "tova", "streaming_llm"])
def test_a_decode_step_allocates_nothing_of_the_size_of_the_store(policy, dtype):
    layer = Layer(kvkeep.parse(policy), budget=2047)
    feed(layer, 2100, B=2, Hk=2, D=64, dtype=dtype)
    feed(layer, 1, B=2, Hk=2, D=64, dtype=dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        feed(layer, 1, B=2, Hk=2, D=64, dtype=dtype)
    largest = max(event.self_cpu_memory_usage for event in profiler.events())
    store = layer.store.slots().keys.numel() * layer.store.slots().keys.element_size()
    assert 0 < largest < store


def test_budgets_per_row():
    layer = Layer(H2O(), budget=[3, 6])
    feed(layer, 12)
    feed(layer, 1)
    assert layer.store.capacity == 7
    assert (layer.store.positions >= 0).sum(-1).tolist() == [[3, 3], [6, 6]]


def test_a_window_bounds_the_budget_and_expires_tokens():
    layer = Layer(H2O(recent=1), budget=100, window=5)
    feed(layer, 12)
    assert layer.store.capacity == 6
    for _ in range(3):
        feed(layer, 1)
        newest = int(layer.seen[0]) - 1
        held = layer.store.positions[0, 0]
        assert sorted(held[held >= 0].tolist()) == list(range(newest - 3, newest + 1))


def test_full_refuses_what_does_not_fit_before_writing_anything():
    layer = Layer(Full(), budget=5)
    feed(layer, 4)
    feed(layer, 1)
    before = layer.store.positions.clone()
    with pytest.raises(kvkeep.CapacityError, match="Row 0 has reached 6 tokens, its budget is 5"):
        feed(layer, 1)
    assert torch.equal(layer.store.positions, before)
    assert layer.columns == 5


def test_full_counts_real_tokens_not_padding():
    layer = Layer(Full(), budget=3)
    real = torch.tensor([[False, False, True, True, True], [False, False, False, True, True]])
    feed(layer, 5, real=real)
    assert layer.seen.tolist() == [3, 2]


@pytest.mark.parametrize(
    "other",
    [{"B": 3}, {"Hk": 4}, {"D": 8}, {"E": 8}, {"dtype": torch.float64}],
    ids=str,
)
def test_tensors_of_another_shape_are_refused(other):
    layer = Layer(Local(), budget=4)
    feed(layer, 6)
    with pytest.raises(kvkeep.ShapeError, match=r"reset\(\)"):
        feed(layer, 1, **other)


def test_after_a_reset_the_memory_is_reused_and_another_batch_is_welcome():
    layer = Layer(H2O(), budget=4)
    torch.manual_seed(0)
    first = feed(layer, 9)
    pointer = layer.store.slots().keys.data_ptr()
    layer.reset()
    torch.manual_seed(0)
    assert torch.equal(feed(layer, 9), first)
    assert layer.store.slots().keys.data_ptr() == pointer
    layer.reset()
    feed(layer, 9, B=5)
    assert layer.store.slots().keys.shape[0] == 5


def test_rows_can_be_reordered_repeated_and_selected():
    layer = Layer(H2O(recent=1), budget=[2, 4])
    layer.select_rows(torch.tensor([1, 0]))  # nothing yet, nothing to do
    feed(layer, 9)
    before = [tensor.clone() for tensor in (*layer.store.per_row().values(), layer.state["mass"], layer.seen)]
    layer.select_rows(torch.tensor([1, 1]))
    after = (*layer.store.per_row().values(), layer.state["mass"], layer.seen)
    assert all(torch.equal(new, old[[1, 1]]) for new, old in zip(after, before, strict=True))
    layer.select_rows(torch.tensor([0]))
    feed(layer, 1, B=1)
    assert (layer.store.positions >= 0).sum(-1).tolist() == [[4, 4]]


def test_sequence_ids_need_one_per_row():
    layer = Layer(kvkeep.parse("random"), budget=4, sequences=[1, 2, 3])
    with pytest.raises(kvkeep.ShapeError, match="3 sequence ids were given for a batch of 2"):
        feed(layer, 3)


def test_rows_with_different_ids_keep_different_random_tokens():
    torch.manual_seed(0)
    row = torch.randn(1, 2, 40, 4).expand(2, -1, -1, -1)
    kept = {}
    for ids in ([7, 7], [7, 8]):
        layer = Layer(kvkeep.parse("random"), budget=8, sequences=ids)
        layer.step(row, row, row, options=OPTIONS, phase=phase_of(row))
        kept[tuple(ids)] = layer.store.positions
    assert torch.equal(kept[7, 7][0], kept[7, 7][1])
    assert not torch.equal(kept[7, 8][0], kept[7, 8][1])
    assert torch.equal(kept[7, 7][0], kept[7, 8][0])


def test_steps_may_mix_inference_mode_gradients_and_neither():
    layer = Layer(H2O(recent=1), budget=4)
    with torch.inference_mode():
        feed(layer, 9)
        layer.select_rows(torch.tensor([1, 0]))
    feed(layer, 1)
    with torch.inference_mode():
        feed(layer, 1)
    layer.select_rows(torch.tensor([1, 0]))
    with torch.no_grad():
        feed(layer, 3)


def test_a_forgotten_no_grad_does_not_make_the_slots_grow_a_graph():
    layer = Layer(H2O(recent=1), budget=4)
    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    out = layer.step(q, k, v, options=OPTIONS, phase=phase_of(q))
    assert not out.requires_grad
    assert not layer.store.slots().keys.requires_grad


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_prefill_chunk_below_one_is_refused(chunk):
    with pytest.raises(kvkeep.BudgetError, match=f"The prefill chunk {chunk} is no whole number"):
        Layer(Local(), budget=4, prefill_chunk=chunk)


def test_more_protected_than_the_budget_is_refused():
    with pytest.raises(kvkeep.BudgetError, match="Raise the budget to at least 4"):
        Layer(kvkeep.parse("streaming_llm"), budget=[8, 2])


def test_one_step_of_nan_does_not_freeze_the_layer():
    layer = Layer(H2O(recent=3), budget=6)
    feed(layer, 12, B=1)
    q, k, v = torch.full((1, 4, 1, 4), torch.nan), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    layer.step(q, k, v, options=OPTIONS, phase=phase_of(q))
    for _ in range(6):
        feed(layer, 1, B=1)
    for head in layer.store.positions[0].tolist():
        assert {16, 17, 18} <= set(head)
    assert layer.state["mass"][layer.store.positions >= 0].isfinite().all()


def test_reset_restores_budgets_and_identities_after_rows_have_moved():
    layer = Layer(Local(), budget=[2, 4], sequences=[7, 8])
    feed(layer, 9)
    layer.select_rows(torch.tensor([1, 1]))
    layer.reset()
    feed(layer, 9)
    assert (layer.store.positions >= 0).sum(-1).tolist() == [[2, 2], [4, 4]]
    assert layer.block.sequences.tolist() == [7, 8]


def test_the_slots_and_one_chunk_are_all_that_a_prefill_ever_holds(monkeypatch):
    widths = []
    honest = TorchBackend.attend

    def spy(self, inputs):
        widths.append(inputs.slots.keys.shape[2])
        return honest(self, inputs)

    monkeypatch.setenv(SWITCH, "torch")
    monkeypatch.setattr(TorchBackend, "attend", spy)
    feed(Layer(H2O(), budget=8, prefill_chunk=5), 43)
    assert widths[:3] == [5, 5 + 5, 8 + 5]  # empty slots are not attended to
    assert max(widths) == 8 + 5
    assert len(widths) == 9


def test_an_empty_prompt_is_refused():
    with pytest.raises(kvkeep.ShapeError, match="prompt is empty"):
        feed(Layer(Local(), budget=4), 0)


@pytest.mark.parametrize("policy", [name for name in kvkeep.available_policies() if name != "spatten"])
def test_a_budget_of_the_sliding_window_evicts_nothing_that_can_be_seen(policy):
    """The last tokens of the window are there after a long prompt and after every token."""
    small = {
        "adakv": ":window=2",
        "ahakv": ":recent=2",
        "snapkv": ":window=2",
        "pyramidkv": ":window=2",
        "restkv": ":window=2",
        "defensivekv": ":window=2",
        "nacl": ":sinks=1",
    }
    layer = Layer(kvkeep.parse(policy + small.get(policy, "")), 100, window=8)
    g = torch.Generator().manual_seed(0)
    options = kvkeep.AttentionOptions(scaling=0.5, window=8)
    seen = 0
    for T in (21, *[1] * 12, 5, 1, 1):
        query, keys, values = (torch.randn(2, heads, T, 4, generator=g) for heads in (4, 2, 2))
        layer.step(query, keys, values, options=options, phase=phase_of(query))
        seen += T
        for head in layer.store.positions.flatten(0, 1).tolist():
            assert set(range(seen - 7, seen)) <= set(head)


def test_room_is_left_only_in_rows_whose_budget_is_smaller_than_the_window():
    layer = Layer(kvkeep.parse("snapkv:window=2,decode=grow,room=3"), [6, 100], window=8)
    query, keys, values = (torch.randn(2, heads, 21, 4) for heads in (4, 2, 2))
    options = kvkeep.AttentionOptions(scaling=0.5, window=8)
    layer.step(query, keys, values, options=options, phase=Phase.PREFILL)
    assert (layer.store.positions >= 0).sum(dim=-1).tolist() == [[3, 3], [7, 7]]
    assert set(range(14, 21)) <= set(layer.store.positions[1, 0].tolist())  # all that the next token sees


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda view: view.positions, r"int32 of the shape \(2, 2, 12\).* add \.float\(\)"),
        (lambda view: torch.zeros(3), r"float32 of the shape \(3,\).* here \(2, 2, 12\)"),
        (lambda view: None, "an object of the type NoneType"),
    ],
)
def test_scores_that_are_not_one_float_for_each_slot_are_refused(score, said, no_checked_annotations):
    class Mine(Local):
        def score(self, view, state):
            return score(view)

    with pytest.raises(kvkeep.PolicyError, match=f"Mine.score returned {said}"):
        feed(Layer(Mine(), budget=4), 12)
