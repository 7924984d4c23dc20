"""Pins in the engine: a request with pins gets the tokens that it gets alone, and its pins are held to its end."""

import random
from dataclasses import replace

import pytest
import torch
from sweeps import sweep

import kvkeep
from kvkeep import BudgetError, InputError, backends
from kvkeep.backends.native import native
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.types import Phase

from .models import DEVICE, alone, model
from .test_equal import CAPACITY, prompt_of

SMALL = {
    "adakv": "window=2",
    "ahakv": "recent=2",
    "pyramidkv": "window=2",
    "nacl": "sinks=1,recent=1",
    "restkv": "window=2",
    "defensivekv": "window=2",
}
SMALL |= {"h2o": "recent=2", "h2o_avg": "recent=2", "keyformer": "recent=2", "snapkv": "window=2,decode=score"}
SMALL |= {
    "scissorhands": "window=1,recent=1,drop=2",
    "scissorhands_release": "recent=1,window=4",
    "keydiff": "recent=1",
}
POLICIES = [f"{name}:{SMALL[name]}" if name in SMALL else name for name in kvkeep.available_policies()]
PINS = [(), ((0, 3),), ((2, 3), (5, 7)), ((4, 5),)]


def budget_of(policy):
    if policy.startswith("pyramidkv"):
        return 128  # its smallest layers get a part of it
    return CAPACITY if kvkeep.parse(policy).evicts else 64


@pytest.mark.long
@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("policy", sweep(POLICIES, lambda one: one[:3] in ("h2o", "ada", "sna", "sci", "spa")))
def test_rows_with_different_pins_share_a_batch(policy, chunk):
    engine = Engine(model("llama"), policy=policy, budget=budget_of(policy), rows=3, prefill_chunk=chunk)
    asked = [
        Request(prompt=prompt_of(i, 8 + 5 * i), sampling=SamplingParams(max_new_tokens=6), pins=PINS[i % 4])
        for i in range(6)
    ]
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.error is None
        wanted = alone("llama", request.prompt, 6, policy, budget_of(policy), chunk, request.pins)
        assert result.token_ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_step_with_pins_equals_the_plain_path(backend, monkeypatch):
    if backend == "native" and (DEVICE.type != "cpu" or native().library is None):
        pytest.skip("the kernel runs on CPUs, where it is compiled")
    monkeypatch.setenv(backends.SWITCH, backend)
    held = []
    for fuses in (True, False):
        if not fuses:
            monkeypatch.setattr("kvkeep.cache.decode_replay.why_not_fused", lambda *given, **others: "not to be tried")
        cache = kvkeep.BoundedCache(model("llama").config, "h2o:recent=2", 8, pins=[[(1, 3)], []])
        ids = torch.tensor([prompt_of(1, 30), prompt_of(2, 30)], device=DEVICE)
        with torch.inference_mode():
            cache.phase = Phase.PREFILL
            out = [model("llama")(input_ids=ids[:, :12], past_key_values=cache).logits[:, -1]]
            cache.phase = Phase.DECODE
            for i in range(12, 30):
                out.append(model("llama")(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[:, -1])
        held.append((torch.stack(out), cache.positions(1).clone()))
        assert {1, 2} <= set(held[-1][1][0, 1].tolist())
    assert torch.equal(held[0][0], held[1][0])
    assert torch.equal(held[0][1], held[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["true", "slot"])
def test_pins_stay_whatever_runs_beside_them(positions):
    rng = random.Random(3)
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=9, rows=4, positions=positions)
    asked = {}
    for i in range(20):
        length = rng.randint(6, 30)
        start = rng.randrange(length - 3)
        pins = ((start, start + 3),) if i % 3 else ()
        request = Request(
            prompt=prompt_of(i, length), sampling=SamplingParams(max_new_tokens=rng.randint(1, 12)), pins=pins
        )
        asked[engine.add(request)] = pins
    while engine.busy:
        for event in engine.step():
            assert event.result is None or event.result.error is None
        for one in engine._scheduler.running:
            if one.token_ids:
                wanted = {p for start, stop in asked[one.id] for p in range(start, stop)}
                for block in engine._kv._blocks:
                    for head in block.store.positions[one.row].tolist():
                        assert wanted <= set(head)


def test_a_layer_with_a_sliding_window_forgets_pins_with_the_window():
    engine = Engine(model("gemma2"), policy="h2o:recent=2", budget=10, rows=1)
    request = Request(prompt=prompt_of(1, 30), sampling=SamplingParams(max_new_tokens=2), pins=((0, 4),))
    number = engine.add(request)
    engine.step()
    sliding, full = engine._kv._blocks[0].store.positions[0, 0], engine._kv._blocks[1].store.positions[0, 0]
    assert set(range(4)) <= set(full.tolist())
    assert not set(range(4)) & set(sliding.tolist())
    engine.cancel(number)


@pytest.mark.parametrize(
    ("pins", "error", "word"),
    [
        (((0, 13),), InputError, r"end at position 13, and the prompt has 12 tokens"),
        (((0, 12),), BudgetError, r"12 tokens are pinned, .* together 14: more than the budget of 10"),
        (((-1, 2),), InputError, "negative"),
        (((3, 2),), InputError, "reversed"),
    ],
)
def test_pins_that_cannot_be_held_are_refused_before_anything_runs(pins, error, word):
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=10, rows=1)
    with pytest.raises(error, match=word):
        engine.add(Request(prompt=prompt_of(1, 12), pins=pins))
    assert not engine.busy


def test_the_next_sequence_of_a_row_has_no_pins():
    engine = Engine(model("llama"), policy="h2o:recent=2", budget=10, rows=1)
    pinned = Request(
        prompt=prompt_of(1, 20), sampling=SamplingParams(max_new_tokens=3), pins=((0, 5), (9, 10), (12, 13))
    )
    plain = Request(prompt=prompt_of(2, 20), sampling=SamplingParams(max_new_tokens=3))
    results = engine.generate([pinned, plain, pinned])
    assert results[1].token_ids == alone("llama", plain.prompt, 3, "h2o:recent=2", 10, None)
    assert results[0].token_ids == results[2].token_ids
    assert (engine._kv._blocks[0].pins == 2**31 - 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o:recent=2", "tova", "scissorhands:window=1,recent=1,drop=2"])
def test_recorded_steps_keep_pins_apart_from_other_rows(policy, monkeypatch):
    monkeypatch.setenv(backends.SWITCH, "torch")
    engine = Engine(model("llama"), policy=policy, budget=CAPACITY, rows=2, graphs=True)
    asked = [
        Request(prompt=prompt_of(i, 14), sampling=SamplingParams(max_new_tokens=5), pins=PINS[i % 4])
        for i in (0, 1, 2, 1)
    ]
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone("llama", request.prompt, 5, policy, CAPACITY, None, request.pins)


@pytest.mark.slow
def test_pins_go_with_their_rows_through_beams_repeats_and_resets():
    net, ids = model("llama"), torch.tensor([prompt_of(1, 20), prompt_of(2, 20)], device=DEVICE)
    cache = kvkeep.BoundedCache(net.config, "h2o:recent=2", 8, pins=[[(8, 11)], [(5, 7)]])

    def held(row):
        return set(cache.positions(1)[row, 0].tolist())

    for _ in range(2):
        with torch.inference_mode():
            net(input_ids=ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 2, 1, 0], device=DEVICE))
            for i in range(15):
                net(input_ids=ids[:, i : i + 1].repeat(2, 1), past_key_values=cache)
        assert all({5, 6} <= held(row) for row in (0, 1))
        assert all({8, 9, 10} <= held(row) for row in (2, 3))
        cache.reset()
    found = net.generate(ids, max_new_tokens=4, num_beams=1, past_key_values=cache, do_sample=False)
    assert found.shape == (2, 24)
    assert {8, 9, 10} <= held(0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("policy", sweep(POLICIES, lambda one: one[:3] in ("h2o", "ada", "sci", "ble")))
def test_tokens_that_come_later_may_be_pinned_in_a_cache(policy, backend, monkeypatch):
    if backend is not None:
        monkeypatch.setenv(backends.SWITCH, backend)
    cache = kvkeep.BoundedCache(model("llama").config, policy, budget_of(policy) + 4, pins=[(1, 2), (25, 28)])
    ids = torch.tensor([prompt_of(1, 60)], device=DEVICE)
    with torch.inference_mode():
        model("llama")(input_ids=ids[:, :20], past_key_values=cache)
        for i in range(20, 60):
            model("llama")(input_ids=ids[:, i : i + 1], past_key_values=cache)
    for layer in range(3):
        for head in cache.positions(layer)[0].tolist():
            assert {1, 25, 26, 27} <= set(head), layer


@pytest.mark.slow
def test_a_million_spans_are_joined_before_they_are_counted():
    pins = [(i, i + 1) for i in range(200_000)] + [(0, 12)]
    with pytest.raises(InputError, match="end at position 200000"):
        Engine(model("llama"), budget=10, rows=1).add(Request(prompt=prompt_of(1, 12), pins=pins))


def test_a_cache_tells_what_was_lost_by_layer_row_and_head():
    cache = kvkeep.BoundedCache(model("llama").config, "h2o:recent=2", 8)
    assert cache.lost_mass() == {}
    with torch.inference_mode():
        model("llama")(
            input_ids=torch.tensor([prompt_of(1, 20), prompt_of(2, 20)], device=DEVICE), past_key_values=cache
        )
    found = cache.lost_mass()
    assert list(found) == [0, 1, 2]
    assert found[1].prompt.shape == (2, 2)
    assert ((found[1].prompt > 0) & (found[1].prompt < 1)).all()
    assert found[1].decode.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("guard", [None, 1.0])
@pytest.mark.parametrize("way", ["session", "memory", "disk"])
def test_pins_of_later_turns_have_room_beside_earlier_ones(guard, way, tmp_path):
    """A guard of 1 takes a quarter of the budget, in which the later pins must find their room, too."""
    pinned, budget = 2 if guard else 6, 40 if guard else 10
    engine = Engine(
        *(model("llama"), None), policy="h2o:recent=2", budget=budget, rows=2, session_memory=0, session_dir=tmp_path
    )
    first = Request(
        prompt=prompt_of(1, 40), sampling=SamplingParams(max_new_tokens=4), pins=((0, pinned),), guard=guard
    )
    session = engine.session(name="anna")
    assert session.ask(first).budget == 10
    if way == "disk":
        session.close()
        session = engine.session(name="anna")
    before = session.snapshot()

    def later(pins):
        wish = Request(prompt=prompt_of(2, 20), sampling=SamplingParams(max_new_tokens=60), pins=((44, 44 + pins),))
        return engine.generate(replace(wish, snapshot=before))[0] if way == "memory" else session.ask(wish)

    with pytest.raises(BudgetError, match=r"9 tokens are pinned, .* together 11: more than the budget of 10"):
        later(9 - pinned)
    assert later(8 - pinned).budget == 10
    if way != "memory":
        wanted = {*range(pinned), *range(44, 52 - pinned)}
        layers = session.snapshot().contents.layers
        assert all(wanted <= set(head) for layer in layers for head in layer.positions.tolist())
