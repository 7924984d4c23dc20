"""An engine whose slots hold codes: rows, sessions, prefixes and guards give what a prompt gets alone."""

import pytest
import torch

from kvkeep import BoundedCache, InputError, SnapshotError
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams

from .models import model
from .test_equal import prompt_of

BUDGET, NEW = 16, 9
SAMPLING = SamplingParams(max_new_tokens=NEW)
POLICIES = ["h2o:recent=2", "snapkv:window=4,decode=score", "streaming_llm:sinks=2", "tova", "scissorhands"]


def alone(prompt, policy, kv_bits, *, chunk=None, positions=None):
    """What `model.generate` writes for one prompt."""
    net = model("llama")
    cache = BoundedCache(net.config, policy, BUDGET, prefill_chunk=chunk, kv_bits=kv_bits, positions=positions)
    ids = torch.tensor([prompt])
    out = net.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return tuple(out[0, len(prompt) :].tolist())


def requests(policies=POLICIES):
    return [
        Request(
            prompt=prompt_of(i, 12 + 7 * i % 23),
            sampling=SamplingParams(max_new_tokens=NEW),
            policy=policy,
            ignore_end=True,
        )
        for i, policy in enumerate(policies)
    ]


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kv_bits", ["8", "4", "k8v4"])
def test_rows_of_several_policies_get_what_they_get_alone(kv_bits, chunk):
    engine = Engine(model("llama"), budget=BUDGET, rows=3, policy="h2o:recent=2", kv_bits=kv_bits, prefill_chunk=chunk)
    asked = requests()
    for one, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone(one.prompt, one.policy, kv_bits, chunk=chunk)


def test_slot_positions():
    options = {"budget": BUDGET, "rows": 2, "policy": "h2o:recent=2", "kv_bits": 4, "positions": "slot"}
    engine = Engine(model("llama"), **options)
    (one,) = requests(["h2o:recent=2"])
    assert engine.generate(one)[0].token_ids == alone(one.prompt, one.policy, 4, positions="slot")


def test_a_row_has_the_bytes_that_it_is_said_to_have():
    sizes = {}
    for kv_bits in (None, 8, 4):
        engine = Engine(model("llama"), budget=BUDGET, rows=2, policy="h2o:recent=2", kv_bits=kv_bits)
        assert (
            engine.memory_usage().allocated_bytes == 0 or engine.memory_usage().allocated_bytes == 2 * engine.row_bytes
        )
        engine.generate(requests(["h2o:recent=2"]))
        assert engine.memory_usage().allocated_bytes == 2 * engine.row_bytes
        sizes[kv_bits] = engine.row_bytes
    assert sizes[4] < sizes[8] < sizes[None]
    most = {bits: Engine(model("llama"), budget=BUDGET, kv_memory=20_000, kv_bits=bits) for bits in (None, 4)}
    assert most[4].rows > most[None].rows


@pytest.mark.slow
def test_a_session_goes_on_from_a_file_in_another_engine(tmp_path):
    options = {"budget": BUDGET, "rows": 1, "policy": "h2o:recent=2", "kv_bits": "4"}
    first, second = prompt_of(1, 20), prompt_of(2, 7)
    kept = Engine(model("llama"), **options).session()
    want = [kept.ask(turn, SAMPLING).token_ids for turn in (first, second)]
    with Engine(model("llama"), **options, session_dir=tmp_path) as engine, engine.session(name="one") as session:
        found = [session.ask(first, SAMPLING).token_ids]
    with Engine(model("llama"), **options, session_dir=tmp_path) as engine, engine.session(name="one") as session:
        found.append(session.ask(second, SAMPLING).token_ids)
    assert found == want


def test_memory_of_other_bits_is_refused():
    options = {"budget": BUDGET, "rows": 1, "policy": "h2o:recent=2"}
    memory = Engine(model("llama"), **options, kv_bits=4).prefix(prompt_of(3, 30))
    with pytest.raises(SnapshotError, match=r"kv_bits \(4 in the snapshot, None here\)"):
        Engine(model("llama"), **options).session(snapshot=memory)
    Engine(model("llama"), **options, kv_bits="4").session(snapshot=memory).close()


def test_a_guard_reduces_a_row_without_coding_it_again():
    options = {"budget": BUDGET, "rows": 1, "policy": "h2o:recent=2", "kv_bits": "4"}
    prompt = prompt_of(5, 24)
    (free,) = Engine(model("llama"), **options, guard=1.0).generate(
        Request(prompt=prompt, sampling=SAMPLING, ignore_end=True)
    )
    small = Engine(model("llama"), **{**options, "budget": free.budget})
    (want,) = small.generate(Request(prompt=prompt, sampling=SAMPLING, ignore_end=True))
    assert free.budget < BUDGET
    assert free.token_ids == want.token_ids


def test_what_an_engine_refuses():
    with pytest.raises(InputError, match="kv_bits=5 is no number of bits"):
        Engine(model("llama"), kv_bits=5)
