"""Everything that people do with ``generate`` and a cache: beams, samples, turns, resets, and what is refused."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import CONFIGS, GATED, build, padded_batch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    JetMoeConfig,
    LlamaConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import kvkeep

NEW = 12


@pytest.fixture(scope="module")
def model():
    return kvkeep.attach(build("llama"))


def bounded(model, budget=200, policy="h2o", **kwargs):
    return kvkeep.BoundedCache(model.config, policy=policy, budget=budget, **kwargs)


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    ],
    ids=str,
)
def test_every_way_to_generate_equals_the_full_cache(model, how):
    ids, mask = padded_batch()
    results = []
    for cache in (DynamicCache(config=model.config), bounded(model)):
        torch.manual_seed(0)
        results.append(
            model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, **{"do_sample": False, **how}
            )
        )
    assert torch.equal(*results)


def test_beam_search_under_eviction_gives_each_row_what_it_gets_alone(model):
    ids, mask = padded_batch()
    how = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False}
    cache = bounded(model, budget=8)
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, **how)
    assert cache.positions(0).shape[0] == 9
    assert ((cache.positions(1) >= 0).sum(-1) == 8).all()
    for row in range(3):
        alone = model.generate(ids[row : row + 1, mask[row] == 1], past_key_values=bounded(model, 8), **how)
        assert torch.equal(alone[0, -NEW:], together[row, -NEW:])


def test_a_beam_takes_its_own_history_along(model, monkeypatch):
    ids, mask = padded_batch()
    how = {"attention_mask": mask, "max_new_tokens": NEW, "num_beams": 4, "do_sample": False}
    want = model.generate(ids, past_key_values=bounded(model, 8), **how)
    monkeypatch.setattr(kvkeep.Layer, "select_rows", lambda self, index: None)
    assert not torch.equal(model.generate(ids, past_key_values=bounded(model, 8), **how), want)


@pytest.mark.long
@pytest.mark.parametrize("budget", [200, 10])
def test_a_second_turn_continues_on_the_same_cache(model, budget):
    ids, mask = padded_batch()
    cache = bounded(model, budget)
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    more = torch.cat([first, ids.flip(1).masked_fill(ids.flip(1) == 0, 5)[:, :9]], dim=1)
    more_mask = torch.cat([mask, torch.ones(3, more.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
    second = model.generate(more, attention_mask=more_mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    # the last generated token of a turn was never fed, so the second turn feeds it with the new prompt
    assert cache.get_seq_length() == second.shape[1] - 1
    if budget == 200:
        want = model.generate(more, attention_mask=more_mask, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(second, want)
        return
    assert ((cache.positions(0) >= 0).sum(-1) == budget).all()
    for row in range(3):  # both turns again, the row alone
        alone, real = bounded(model, budget), mask[row] == 1
        short = model.generate(ids[row : row + 1, real], past_key_values=alone, max_new_tokens=NEW, do_sample=False)
        both = torch.cat([short, more[row : row + 1, first.shape[1] :]], dim=1)
        last = model.generate(both, past_key_values=alone, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(last[0, -NEW:], second[row, -NEW:])


def test_chunks_fed_by_generate_equal_chunks_cut_by_the_layer(model):
    ids, mask = padded_batch(rows=1)  # generate cuts columns, a layer cuts each row's tokens: equal without padding
    inside, outside = bounded(model, 10, prefill_chunk=8), bounded(model, 10)
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    one = model.generate(ids, past_key_values=inside, **how)
    two = model.generate(ids, past_key_values=outside, prefill_chunk_size=8, **how)
    assert torch.equal(one, two)
    assert torch.equal(inside.positions(1).sort(-1).values, outside.positions(1).sort(-1).values)


def test_reset_forgets(model):
    ids, mask = padded_batch()
    cache = bounded(model, 10)
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "past_key_values": cache}
    first = model.generate(ids, **how)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(ids, **how), first)


def test_rows_are_repeated_and_selected(model):
    ids, mask = padded_batch()
    cache = bounded(model, 10)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    rows = cache.positions(0).clone()
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.positions(0), rows[[0, 0, 1, 1, 2, 2]])
    cache.batch_select_indices(torch.tensor([5, 0]))
    assert torch.equal(cache.positions(0), rows[[2, 0]])


def test_memory_is_fixed_from_the_first_chunk_on(model):
    ids, mask = padded_batch(rows=2, columns=64)
    cache = bounded(model, 16, prefill_chunk=8)
    sizes = []
    for start in range(0, 64, 8):
        model(input_ids=ids[:, start : start + 8], attention_mask=mask[:, : start + 8], past_key_values=cache)
        sizes.append(cache.memory().allocated_bytes)
    L, B, Hk, D = 2, 2, 2, 8
    assert set(sizes) == {L * (B * Hk * 17 * (4 * 2 * D + 4 + 4) + 24 * B + 16 * B * Hk)}
    full = DynamicCache(config=model.config)
    model(input_ids=ids, attention_mask=mask, past_key_values=full)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in full.layers) * 4
    assert cache.memory().full_bytes == held * int(mask.sum()) // mask.numel()  # padding is not counted


def test_crop_and_assisted_decoding_are_refused(model):
    ids, mask = padded_batch(rows=1)
    cache = bounded(model)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(kvkeep.UnsupportedOperationError, match="cannot be cropped"):
        cache.crop(-2)
    with pytest.raises(kvkeep.UnsupportedOperationError, match="Assisted decoding"):
        model.generate(ids, past_key_values=bounded(model), assistant_model=build("llama"), max_new_tokens=4)


def test_models_that_the_interface_does_not_reach_are_refused():
    falcon = FalconForCausalLM(FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(kvkeep.UnsupportedModelError, match="FalconForCausalLM computes attention itself"):
        kvkeep.attach(falcon)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4))
    with pytest.raises(kvkeep.UnsupportedModelError):
        kvkeep.attach(t5)


def test_a_model_that_is_not_attached_is_refused_before_it_computes_nonsense(model):
    other = build("llama")
    ids, mask = padded_batch()
    with pytest.raises(kvkeep.UnsupportedModelError, match=r"kvkeep\.attach"):
        other(input_ids=ids, attention_mask=mask, past_key_values=bounded(other))
    used = bounded(model)
    model(input_ids=ids, attention_mask=mask, past_key_values=used)
    with pytest.raises(kvkeep.UnsupportedModelError, match=r"kvkeep\.attach"):
        other(input_ids=ids[:, :1], past_key_values=used)


def test_a_configuration_equal_to_the_models_is_as_good(model):
    ids, mask = padded_batch()
    cache = kvkeep.BoundedCache(CONFIGS["llama"](), budget=64)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (DiffLlamaConfig(**GATED), "several times with the same keys|computes attention itself"),  # the latter: 5.5
        (DogeConfig(**GATED), "wants a mask tensor"),
        (JetMoeConfig(**{**GATED, "kv_channels": 8, "num_local_experts": 2}), "computes attention itself"),
    ],
    ids=["diffllama", "doge", "jetmoe"],
)
def test_models_that_do_more_than_attention_with_their_keys_are_refused(config, match):
    ids, _ = padded_batch(rows=1)
    strange = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(kvkeep.UnsupportedModelError, match=match):
        kvkeep.attach(strange)(input_ids=ids, past_key_values=bounded(strange))


@pytest.mark.parametrize("pair", [("mistral", "mistral-window"), ("mistral-window", "mistral")])
def test_a_cache_with_another_window_than_the_models_is_refused(pair):
    model, other = build(pair[0]), build(pair[1])
    ids, mask = padded_batch()
    with pytest.raises(kvkeep.UnsupportedModelError, match="sliding window"):
        kvkeep.attach(model)(input_ids=ids, attention_mask=mask, past_key_values=bounded(other))


def test_static_caches_work_by_hand_and_are_refused_in_generate(model):
    ids, mask = padded_batch(rows=1)
    want = model(input_ids=ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=40)
    model(input_ids=ids[:, :20], past_key_values=cache)
    steps = [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(20, 24)]
    torch.testing.assert_close(torch.stack(steps, dim=1), want[:, 20:], rtol=1e-4, atol=1e-4)
    with pytest.raises(kvkeep.UnsupportedModelError, match="static or compiled cache"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, cache_implementation="static")


COMPILED = """
import torch
import kvkeep
from models import build, padded_batch

model, (ids, _) = kvkeep.attach(build("llama")), padded_batch(rows=1)
caches = [kvkeep.BoundedCache(model.config, budget=10) for _ in range(2)]
want = model(input_ids=ids, past_key_values=caches[0]).logits
got = torch.compile(model, backend="eager")(input_ids=ids, past_key_values=caches[1]).logits
torch.testing.assert_close(got, want)
"""


@pytest.mark.slow
def test_a_compiled_model_gives_the_same():
    # in a process of its own: the compiler does not follow the type checks of the tests
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_float64_models_are_computed_in_float64():
    model = build("llama", torch.float64)
    ids, _ = padded_batch(rows=1)
    want = model(input_ids=ids).logits
    got = kvkeep.attach(model)(input_ids=ids, past_key_values=bounded(model)).logits
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_another_batch_on_a_used_cache_is_told_what_to_do(model):
    ids, mask = padded_batch()
    cache = bounded(model)
    how = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False}
    model.generate(ids, attention_mask=mask, **how)
    with pytest.raises(kvkeep.ShapeError, match=r"reset\(\)"):
        model(input_ids=ids[:2], attention_mask=mask[:2], past_key_values=cache)
    with pytest.raises(kvkeep.ShapeError, match=r"reset\(\)"):
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)


def test_a_cache_that_was_born_in_inference_mode_lives_on_outside(model):
    ids, mask = padded_batch()
    cache = bounded(model, 10)
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    model(input_ids=ids[:, :1], past_key_values=cache)
    with torch.inference_mode():
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1] + 2


def test_a_cache_can_be_copied(model):
    ids, mask = padded_batch()
    cache = bounded(model, 10)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(twin.positions(1), cache.positions(1))
        step = [model(input_ids=ids[:, :1], past_key_values=copy.deepcopy(c)).logits for c in (cache, twin)]
        assert torch.equal(*step)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8}, "chunked_attention"),
        ({"num_kv_shared_layers": 1}, "share the keys"),
    ],
)
def test_layers_that_cannot_be_bounded_are_refused(changes, match):
    config = LlamaConfig(num_hidden_layers=2)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(kvkeep.UnsupportedModelError, match=match):
        kvkeep.BoundedCache(config)


@pytest.mark.parametrize(
    ("policy", "budget", "match"),
    [
        ("h2o:recent=9", 8, "protects 0 first and 9 recent tokens, more than the budget of 8"),
        ("streaming_llm", 3, "Raise the budget to at least 4"),
        ("h2o", 0, "budget=0 keeps no token"),
        ("h2o", [8, -1], "budget=-1"),
    ],
)
def test_budgets_that_cannot_work_are_refused_at_construction(model, policy, budget, match):
    with pytest.raises(kvkeep.BudgetError, match=match):
        bounded(model, budget, policy)


def test_what_is_no_configuration_or_no_policy_is_refused(model, no_checked_annotations):
    with pytest.raises(kvkeep.InputError, match=r"not LlamaForCausalLM: pass model\.config"):
        kvkeep.BoundedCache(model, "h2o", 8)
    with pytest.raises(kvkeep.PolicyError, match="8 is neither a policy nor the name of one"):
        kvkeep.BoundedCache(model.config, 8)


def test_prefill_chunk_below_one_is_refused(model):
    with pytest.raises(kvkeep.BudgetError, match="The prefill chunk 0"):
        bounded(model, prefill_chunk=0)


def test_a_mask_over_the_new_tokens_only_is_refused(model):
    ids, mask = padded_batch()
    cache = bounded(model)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(kvkeep.ShapeError, match="24 tokens are in the cache and 3 are new"):
        model(input_ids=ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)


def test_masks_that_are_not_causal_are_refused(model):
    ids, _ = padded_batch(rows=1)
    packed = torch.cat([torch.arange(10), torch.arange(14)])[None]
    with pytest.raises(kvkeep.UnsupportedModelError, match="neither causal nor a sliding window"):
        model(input_ids=ids, position_ids=packed, use_cache=False)
    second_row = torch.cat([torch.arange(24)[None], packed])
    with pytest.raises(kvkeep.UnsupportedModelError, match="neither causal nor a sliding window"):
        model(input_ids=ids.expand(2, -1), position_ids=second_row, use_cache=False)
    with pytest.raises(kvkeep.UnsupportedModelError, match="4-D attention mask"):
        model(input_ids=ids, attention_mask=torch.zeros(1, 1, 24, 24), past_key_values=bounded(model))


def test_positions_are_what_a_user_looks_at(model):
    cache = bounded(model, 6, "streaming_llm:sinks=2")
    with pytest.raises(kvkeep.UnsupportedOperationError, match="holds no slots yet"):
        cache.positions(0)
    model(input_ids=torch.arange(3, 23)[None], past_key_values=cache)
    assert cache.positions(1)[0, 0].tolist() == [0, 1, 16, 17, 18, 19, -1]
    assert repr(cache) == "BoundedCache(policy='streaming_llm:sinks=2', budget=6, layers=2)"


def test_a_cache_that_is_not_to_be_used_is_refused(model):
    """Each step would feed the whole text into it again, with other tokens as the result."""
    ids = torch.tensor([[3, 4, 5, 6]])
    with pytest.raises(kvkeep.InputError, match="together with use_cache=False"):
        model.generate(ids, past_key_values=bounded(model), use_cache=False, max_new_tokens=3)
    with pytest.raises(kvkeep.InputError, match="together with use_cache=False"):
        model(ids, past_key_values=bounded(model), use_cache=False)


@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_autocast_to_half_precision_leaves_logits_in_float32(model, policy):
    ids, mask = padded_batch()
    cache = bounded(model, policy=policy)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, do_sample=False)
        without = model(ids, attention_mask=mask, use_cache=False).logits
    assert out.shape[1] == ids.shape[1] + 3
    assert without.isfinite().all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sequences": 3}, "sequences=3 is no list of whole numbers"),
        ({"sequences": "a"}, "sequences='a' is no list"),
        ({"sequences": [1.5]}, "is no list of whole numbers"),
        ({"sequences": [2**70]}, "below 2"),
        ({"layer_budget": 3}, "layer_budget=3 is neither a rule"),
        ({"layer_budget": ["a", "b"]}, "neither a rule such as"),
        ({"prefill_chunk": True}, "prefill chunk True"),
        ({"budget": 10**30}, "no machine has memory"),
    ],
    ids=str,
)
def test_options_of_a_wrong_kind_are_refused_at_construction(model, options, match, no_checked_annotations):
    with pytest.raises(kvkeep.KVKeepError, match=match):
        bounded(model, **options)
