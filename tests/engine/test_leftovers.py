"""What an emptied slot was left with must not matter: NaN in it changes no token, on no backend, under no policy."""

import pytest
import torch

import kvkeep
from kvkeep import backends
from kvkeep.backends.native import native
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.pooled_store import PooledStore

from .models import DEVICE, alone, model
from .test_equal import CAPACITY, POLICIES, prompt_of


@pytest.fixture(params=["native", "torch"])
def backend(request, monkeypatch):
    if request.param == "native" and (DEVICE.type != "cpu" or native().library is None):
        pytest.skip("it runs on CPUs, where there is a compiler")
    monkeypatch.setenv(backends.SWITCH, request.param)


def poison(blocks):
    """NaN in keys, values and state of all empty slots. State of heads is no slot's."""
    for block in blocks:
        store = block.store
        pooled = isinstance(store, PooledStore)
        empty = (store.entries if pooled else store.positions) < 0
        for name, tensor in store.per_row().items():
            if name in ("keys", "values", "key_scales", "value_scales"):
                tensor.masked_fill_(empty[..., None], torch.nan if tensor.is_floating_point() else 0x55)
        for tensor in block.of_slots().values():
            tensor.masked_fill_(empty, torch.nan)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_in_the_rows_of_an_engine(policy, backend):
    evicts = kvkeep.parse(policy).evicts
    budget = CAPACITY if evicts else 64
    engine = Engine(model("llama"), policy=policy, budget=budget, rows=2, prefill_chunk=5)
    asked = [
        Request(prompt=prompt_of(i, n), sampling=SamplingParams(max_new_tokens=5)) for i, n in enumerate((17, 3, 8))
    ]
    for request in asked:
        engine.add(request)
    found = {}
    while engine.busy:
        poison(engine._kv._blocks)
        found |= {event.id: event.result for event in engine.step() if event.result}
    for number, request in enumerate(asked):
        assert found[number].token_ids == alone("llama", request.prompt, 5, policy, budget, 5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_reset(policy, backend):
    budget = CAPACITY if kvkeep.parse(policy).evicts else 64
    chunk = None if kvkeep.parse(policy).cascades else 5
    cache = kvkeep.BoundedCache(model("llama").config, policy, budget, prefill_chunk=chunk)

    def run(prompt):
        out, ids = [], torch.tensor([prompt], device=DEVICE)
        with torch.inference_mode():
            for _ in range(4):
                logits = model("llama")(input_ids=ids, past_key_values=cache).logits[:, -1]
                ids = logits.argmax(dim=-1, keepdim=True)
                out.append(int(ids))
        return out

    want = run(prompt_of(1, 12))
    cache.reset()
    run(prompt_of(2, 16))
    for layer in cache.bounded_layers().values():
        keys, values, _ = layer.store.slots()
        values.fill_(torch.nan)
        keys.fill_(torch.inf)
    cache.reset()
    assert run(prompt_of(1, 12)) == want
