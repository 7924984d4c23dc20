"""Models that mix attention with linear or convolution layers: the latter keep their own, already constant, state."""

import copy
import functools
import pickle
import random

import pytest
import torch
from models import GATED, VOCAB, padded_batch
from sweeps import sweep
from transformers import AutoModelForCausalLM, FalconH1Config, Lfm2Config, Qwen3NextConfig, RecurrentGemmaConfig

import kvkeep
from kvkeep.engine import Engine, Request
from kvkeep.engine.kv_manager import KVManager
from kvkeep.types import bytes_of

NEW = 10

CONFIGS = {
    "falcon-h1": lambda: FalconH1Config(
        **GATED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
    ),
    "lfm2": lambda: Lfm2Config(
        **{**GATED, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"], block_ff_dim=48
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **GATED,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_only_the_attention_layers_are_bounded(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager").eval()
    ids, _ = padded_batch()
    ids = ids.masked_fill(ids == 0, 5)
    how = {"max_new_tokens": NEW, "do_sample": False}
    want = model.generate(ids, **how)
    kvkeep.attach(model)
    assert torch.equal(model.generate(ids, past_key_values=kvkeep.BoundedCache(model.config, budget=64), **how), want)
    cache = kvkeep.BoundedCache(model.config, budget=8)
    model.generate(ids, past_key_values=cache, **how)
    attention = [i for i, kind in enumerate(model.config.layer_types) if kind in ("full_attention", "hybrid")]
    assert list(cache.bounded_layers()) == attention
    assert ((cache.positions(attention[0]) >= 0).sum(-1) == 8).all()


@torch.no_grad()
def test_a_copy_of_a_cache_has_states_of_its_own():
    model, ids = attached("falcon-h1"), torch.arange(3, 20)[None]
    cache = kvkeep.BoundedCache(model.config, budget=8)
    model(input_ids=ids, past_key_values=cache)
    twin, other = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    want = model(input_ids=ids[:, :1], past_key_values=cache).logits
    assert torch.equal(model(input_ids=ids[:, :1], past_key_values=twin).logits, want)
    assert torch.equal(model(input_ids=ids[:, :1], past_key_values=other).logits, want)


def test_a_cache_with_states_forgets_and_lets_rows_be_chosen():
    model, (ids, _) = attached("falcon-h1"), padded_batch()
    cache = kvkeep.BoundedCache(model.config, budget=8)
    ids = ids.masked_fill(ids == 0, 5)
    model(input_ids=ids, past_key_values=cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    both = model(input_ids=ids[[2, 2, 0], :1], past_key_values=cache).logits
    assert torch.equal(both[0], both[1])
    assert not torch.equal(both[0], both[2])
    with pytest.raises(kvkeep.UnsupportedOperationError, match="cannot be repeated"):
        cache.batch_repeat_interleave(2)
    cache.reset()
    assert cache.get_seq_length() == 0
    caches = (cache, kvkeep.BoundedCache(model.config, budget=8))
    again, fresh = (model(input_ids=ids, past_key_values=one).logits for one in caches)
    assert torch.equal(again, fresh)


@torch.no_grad()
def test_a_state_in_the_model_itself_takes_nothing_from_padding_and_has_no_engine():
    torch.manual_seed(0)
    sizes = {"attention_window_size": 64, "block_types": ["recurrent", "attention", "recurrent"], "lru_width": 32}
    config = RecurrentGemmaConfig(**GATED | {"num_hidden_layers": 3, "pad_token_id": 0}, head_dim=8, **sizes)
    model, (ids, mask) = AutoModelForCausalLM.from_config(config).eval(), padded_batch()
    want = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
    )
    try:
        cache = kvkeep.BoundedCache(kvkeep.attach(model).config, budget=64)
    except kvkeep.UnsupportedModelError:
        pytest.skip("this version of transformers has it compute attention past the interface")
    given = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": NEW}
    got = model.generate(ids, **given, output_logits=True, return_dict_in_generate=True)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)
    with pytest.raises(kvkeep.UnsupportedModelError, match="keeps the state of a sequence in the model"):
        Engine(model)


# the engine


@functools.cache
def attached(family):
    """A random model whose logits are far apart, so that rounding decides nothing."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return kvkeep.attach(model)


def request_of(seed, length, new=NEW, **options):
    prompt = tuple(random.Random(seed).choices(range(1, VOCAB), k=length))  # 0 pads
    return Request(prompt=prompt, sampling=kvkeep.SamplingParams(max_new_tokens=new), **options)


def alone(family, request, policy="h2o", budget=8, chunk=None):
    """Greedy tokens of one prompt through transformers' ``generate``."""
    model, ids = attached(family), torch.tensor([request.prompt])
    cache = kvkeep.BoundedCache(model.config, request.policy or policy, request.budget or budget, prefill_chunk=chunk)
    new = request.sampling.max_new_tokens
    out = model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False)
    return tuple(out[0, ids.shape[1] :].tolist())


def play(engine, requests, every=3, cancelled=()):
    """Let requests come one after the other while others run; their results in order."""
    numbers, results, steps = [], {}, 0
    while engine.busy or len(numbers) < len(requests):
        if steps % every == 0 and len(numbers) < len(requests):
            numbers.append(engine.add(requests[len(numbers)]))
        results |= {event.id: event.result for event in engine.step() if event.result}
        steps += 1
        for place in cancelled:
            if steps == every * place + 5 and (result := engine.cancel(numbers[place])):
                results[numbers[place]] = result
    return [results[number] for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "chunk"),
    sweep(
        [("h2o", 5), ("full", 4), ("h2o", None), ("h2o", 512), ("snapkv:window=4", None)],
        lambda case: case[1] in (4, 5),
    ),
)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_engine_gives_what_generate_gives(family, policy, chunk):
    budget = 64 if policy == "full" else 8
    requests = [request_of(i, length) for i, length in enumerate((1, 17, 6, 2, 23, 9))]
    engine = Engine(attached(family), policy=policy, budget=budget, rows=3, prefill_chunk=chunk, graphs=True)
    found = play(engine, requests, cancelled=(3,))
    for place, (request, result) in enumerate(zip(requests, found, strict=True)):
        whole = alone(family, request, policy, budget, chunk)
        assert result.finish_reason == ("cancelled" if place == 3 else "length")
        assert result.token_ids == whole[: len(result.token_ids)]
        assert len(result.token_ids) == NEW or place == 3
    assert engine.generate(requests[:1])[0].token_ids == found[0].token_ids


def test_rows_of_several_policies_and_budgets_share_an_engine():
    requests = [request_of(i, 14, policy=p, budget=b) for i, (p, b) in enumerate((("h2o", 8), ("tova", 6), (None, 7)))]
    found = play(Engine(attached("lfm2"), policy="local", budget=8, rows=3, prefill_chunk=None), requests, every=1)
    assert [r.token_ids for r in found] == [alone("lfm2", request, "local") for request in requests]


@pytest.mark.long
@pytest.mark.parametrize("error", [RuntimeError("in a layer"), KeyboardInterrupt()])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_that_fails_harms_no_other_row(family, layer, error):
    requests = [request_of(i, 12) for i in range(3)]
    engine = Engine(attached(family), policy="h2o", budget=8, rows=3, prefill_chunk=None)
    numbers = [engine.add(request) for request in requests]
    for _ in range(4):
        engine.step()
    left = [1]

    def fail(*arguments):
        left[0] -= 1
        if left[0] < 0:
            hook.remove()
            raise error

    hook = attached(family).model.layers[layer].register_forward_pre_hook(fail)  # the second row's run fails
    results = {}
    while engine.busy:
        try:
            results |= {event.id: event.result for event in engine.step() if event.result}
        except KeyboardInterrupt:
            continue
    ends = [results[number] for number in numbers]
    assert [result.finish_reason for result in ends].count("error") == 1
    for request, result in zip(requests, ends, strict=True):
        whole = alone(family, request)
        assert result.token_ids == (whole if result.finish_reason == "length" else whole[: len(result.token_ids)])
    assert [r.token_ids for r in engine.generate(requests)] == [alone(family, request) for request in requests]


@pytest.mark.parametrize("family", CONFIGS)
def test_states_count_as_memory(family):
    engine = Engine(attached(family), budget=8, rows=2)
    slots = engine.memory_usage().allocated_bytes
    number = engine.add(request_of(1, 12))
    engine.step()
    states = [state for state in vars_of(engine._kv._own[0].states.values()) if isinstance(state, torch.Tensor)]
    assert bytes_of(states) > 0
    assert engine.memory_usage().allocated_bytes == slots + bytes_of(states)
    assert engine.row_bytes == slots // 2 + bytes_of(states)
    result = next(event.result for _ in range(NEW) for event in engine.step() if event.result)
    assert (result.id, result.memory_usage.allocated_bytes) == (number, engine.row_bytes)
    assert engine.memory_usage().allocated_bytes == slots
    fitted = Engine(attached(family), budget=8, kv_memory=3 * engine.row_bytes + 5)
    assert fitted.rows == 3


def vars_of(layers):
    """Everything that layers hold, also in dictionaries."""
    for layer in layers:
        for value in vars(layer).values():
            yield from value.values() if isinstance(value, dict) else [value]


def test_a_state_moves_with_its_row():
    rows = KVManager(attached("lfm2"), kvkeep.parse("h2o"), 8)
    rows.allocate(2)
    rows.begin(0, budget=8)
    own = rows._own[0]
    rows.move(0, 1)
    assert rows._own == [None, own]
    assert set(own.states) == {0, 2}
    rows.end(1)
    assert rows._own == [None, None]
