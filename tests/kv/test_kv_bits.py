"""Layers and caches with slots of 8 and 4 bits: bytes, codes that never change, bad keys, and what is refused."""

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep
from kvkeep import BoundedCache, Engine, InputError, Layer, UnsupportedModelError
from kvkeep.kv_bits import KV_BITS, check_bits
from kvkeep.planning.cost import LayerShape, block_bytes
from kvkeep.types import AttentionOptions, Phase

OPTIONS = AttentionOptions(scaling=0.3)
BUDGET = 8


def config(**changes):
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, **changes)


def steps(policy, kv_bits, *, dim=32, spoil=None, lengths=(12, 1, 1, 1, 5, 1, 1), seed=0, dtype=None, **options):
    """A layer after each of some steps of random tokens, and the step's output."""
    g = torch.Generator().manual_seed(seed)
    parsed = kvkeep.parse(policy) if isinstance(policy, str) else policy
    layer = Layer(parsed, options.pop("budget", BUDGET), kv_bits=kv_bits, **options)
    for number, T in enumerate(lengths):
        query, keys, values = (torch.randn(2, heads, T, dim, generator=g).to(dtype) for heads in (4, 2, 2))
        if spoil is not None:
            spoil(number, keys, values)
        phase = Phase.DECODE if T == 1 else Phase.PREFILL
        yield layer, layer.step(query, keys, values, options=OPTIONS, phase=phase)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("dtype", "kv_bits", "most"),
    [(torch.float32, "8", 0.30), (torch.bfloat16, "8", 0.57), (torch.float32, "4", 0.19), (torch.bfloat16, "4", 0.33)],
)
def test_bytes_of_a_token(dim, dtype, kv_bits, most):
    """Scales and positions are counted, on real tensors."""
    budget, sizes = 99, {}
    for bits in (None, kv_bits):
        layer = Layer(kvkeep.parse("streaming_llm"), budget, kv_bits=bits)
        new = [torch.zeros(1, heads, 1, dim, dtype=dtype) for heads in (4, 2, 2)]
        layer.step(*new, options=OPTIONS, phase=Phase.PREFILL)
        sizes[bits] = sum(tensor.nbytes for tensor in layer.store.per_row().values())
        assert sizes[bits] == 2 * (budget + 1) * (LayerShape(1, dim, dim).slot_bytes(dtype.itemsize, bits) + 4)
    assert sizes[kv_bits] <= most * sizes[None]


@pytest.mark.parametrize("dim", [6, 32, 64, 80, 128])
@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "scissorhands"])
@pytest.mark.parametrize("kv_bits", [None, *KV_BITS])
def test_planned_bytes_are_those_of_the_tensors(policy, kv_bits, dim):
    *_, (layer, _) = steps(policy, kv_bits, dim=dim)
    shape, states = LayerShape(2, dim, dim), len(layer.policy.slots)
    planned = block_bytes(shape, BUDGET, 4, states=states, kv_bits=kv_bits)
    assert layer.memory().allocated_bytes == 2 * planned
    assert layer.memory().full_bytes == 2 * 22 * 2 * 2 * dim * 4


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("policy", ["h2o:recent=2", "snapkv:window=2,decode=score", "keydiff", "scissorhands"])
def test_the_codes_of_a_token_never_change(policy, chunk):
    """Neither a prompt's next chunk nor a generated token rounds a kept token again."""
    seen = {}
    for layer, _ in steps(policy, "4", lengths=(12, 1, 7, 1, 1, 9, 1), prefill_chunk=chunk, dtype=torch.bfloat16):
        held = layer.store.per_row()
        positions = held.pop("store.positions", held.pop("positions", None))
        for row, head, slot in itertools.product(*map(range, positions.shape)):
            if (position := int(positions[row, head, slot])) >= 0:
                codes = [held[name][row, head, slot].clone() for name in layer.store.per_slot() if name in held]
                before = seen.setdefault((row, head, position), codes)
                assert all(torch.equal(*pair) for pair in zip(before, codes, strict=True))
    assert len(seen) > 2 * 2 * BUDGET


def test_more_slots_keep_the_codes():
    *_, (layer, _) = steps("h2o", "4")
    before = {name: tensor.clone() for name, tensor in layer.store.per_row().items()}
    layer.block.widen(BUDGET + 9)
    for name, tensor in layer.store.per_row().items():
        held = tensor[:, :, : BUDGET + 1] if name in layer.store.per_slot() else tensor
        assert torch.equal(held, before[name])
    assert layer.store.capacity == BUDGET + 9
    assert (layer.store.positions[:, :, BUDGET + 1 :] == -1).all()


ALONE = ["h2o:recent=2", "snapkv:window=2", "scissorhands", "keydiff", "streaming_llm", "random", "leverage"]


@pytest.mark.parametrize("policy", ALONE)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("step", "of_values"), [(0, False), (0, True), (2, False), (2, True), (4, False)])
def test_a_key_that_is_no_number_takes_no_slot_and_harms_nobody(policy, wrong, step, of_values):
    def spoil(number, keys, values):
        if number == step:
            (values if of_values else keys)[0, 1, 0, 5] = wrong

    first = (0, 12, 13, 14, 15, 20)[step]  # the token's position
    for (layer, out), (clean, want) in zip(steps(policy, "4", spoil=spoil), steps(policy, "4"), strict=True):
        for found, expected in ((out[1], want[1]), (out[0, :2], want[0, :2])):  # sums end elsewhere beside another slot
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert torch.equal(layer.store.positions[1], clean.store.positions[1])
        assert torch.equal(layer.store.positions[0, 0], clean.store.positions[0, 0])
        assert first not in layer.store.positions[0, 1]
        assert layer.store.slots().keys.isfinite().all()
    assert out.isfinite().all()
    assert (layer.store.positions[0, 1] >= 0).any()


@pytest.mark.parametrize("policy", ["tova", "spatten", "topk_dynamic", "full"])
@pytest.mark.parametrize("step", [0, 2])
def test_heads_that_decide_together_outlive_a_key_that_is_no_number(policy, step):
    def spoil(number, keys, values):
        if number == step:
            keys[0, 1, 0, 5] = math.nan

    budget = BUDGET if kvkeep.parse(policy).evicts else 64
    pairs = zip(steps(policy, "8", spoil=spoil, budget=budget), steps(policy, "8", budget=budget), strict=True)
    for (_, out), (_, want) in pairs:
        torch.testing.assert_close(out[1], want[1], rtol=0, atol=1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("policy", ["h2o", "snapkv:window=2", "adakv:window=2"])
@pytest.mark.parametrize("budget", [64, [(64, 64)]], ids=["slots", "pool"])
def test_a_bad_token_of_a_chunk_takes_no_slot_from_the_tokens_before_it(policy, budget):
    def spoil(number, keys, values):
        if number == 4:
            keys[0, 1, 0, 5] = math.nan

    *_, (layer, _) = steps(policy, "4", spoil=spoil, budget=budget)
    for row, head in itertools.product(range(2), range(2)):
        held = layer.store.positions[row, head]
        assert sorted(held[held >= 0].tolist()) == [at for at in range(22) if (row, head, at) != (0, 1, 15)]


def test_nothing_but_keys_that_are_no_numbers():
    def spoil(number, keys, values):
        keys[:] = math.nan

    for layer, out in steps("h2o", "8", spoil=spoil, lengths=(1, 1, 1)):
        assert layer.block.held().sum() == 0
        assert out.isfinite().all()


@pytest.mark.parametrize("wrong", [0, 2, 3, 12, -4, "", "k4v8", "8bit", " 8", "²", True, 8.0, [8], b"8"])
def test_bits_that_do_not_exist(wrong):
    with pytest.raises(InputError, match="is no number of bits that slots can have: give 8, 4, k8v4"):
        check_bits(wrong)


def test_a_cache_of_bits_that_do_not_exist():
    with pytest.raises(InputError, match="kv_bits=2 is no number of bits"):
        BoundedCache(config(), "h2o", BUDGET, kv_bits=2)


@pytest.mark.parametrize(
    ("asked", "found"), [(8, "8"), ("8", "8"), (4, "4"), ("k8v4", "k8v4"), (16, None), ("16", None)]
)
def test_bits_by_any_name(asked, found):
    net = kvkeep.attach(AutoModelForCausalLM.from_config(config()).eval())
    cache = BoundedCache(net.config, "h2o:recent=2", BUDGET, kv_bits=asked)
    net.generate(torch.arange(3, 23)[None], past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.snapshot().fingerprint.kv_bits == found
    kind = cache.bounded_layers()[0].store.per_row()["keys"].dtype
    assert kind == {"8": torch.int8, "4": torch.uint8, "k8v4": torch.int8, None: torch.float32}[found]


@pytest.mark.parametrize("kv_bits", ["4", "k8v4"])
def test_a_head_dim_that_cannot_be_packed(kv_bits):
    with pytest.raises(
        UnsupportedModelError, match=r"head dim is 7, and at 4 bits two channels share a byte\. Give `kv_bits=8`"
    ):
        next(steps("h2o", kv_bits, dim=7))
    *_, (_, out) = steps("h2o", "8", dim=7)
    assert out.isfinite().all()


def test_a_model_without_numbers():
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config())
    with pytest.raises(InputError, match="is on the meta device: its weights have shapes, but no numbers"):
        Engine(net, kv_bits=4)


def with_outliers(net, factor):
    """The same function with two channels of every key that are ``factor`` times larger, and queries to match."""
    for layer in net.model.layers:
        attention, dim = layer.self_attn, net.config.head_dim
        for weight, scale in ((attention.k_proj.weight, factor), (attention.q_proj.weight, 1 / factor)):
            pair = weight.data.view(-1, dim, weight.shape[-1])[:, [3, 3 + dim // 2]]  # turned together by the rotation
            weight.data.view(-1, dim, weight.shape[-1])[:, [3, 3 + dim // 2]] = pair * scale
    return net


def losses_beside_outliers(monkeypatch, **given):
    """Losses of the embedded model with two large channels: exact, at 4 bits, at 4 bits without the Hadamard matrix."""
    from kvkeep.models.load import load
    from kvkeep.models.tiny import embedded

    net, tokenizer = load(embedded(), dtype="float32")
    text = "Once upon a time there was a little girl who loved to play in the garden with her dog. " * 4
    ids = torch.tensor([tokenizer(text)["input_ids"]])

    def loss(kv_bits):
        cache = BoundedCache(net.config, budget=512, kv_bits=kv_bits, prefill_chunk=8, **given)
        with torch.inference_mode():
            logits = kvkeep.attach(net)(input_ids=ids, past_key_values=cache).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))

    with_outliers(net, 30.0)
    exact, turned = loss(None), loss("4")
    for module in ("kvkeep.kv.slot_codec", "kvkeep.backends.copying"):
        monkeypatch.setattr(f"{module}.hadamard", lambda x: x)
    return exact, turned, loss("4")


@pytest.mark.slow
def test_outlier_channels_cost_nothing_because_keys_are_turned(monkeypatch):
    exact, turned, plain = losses_beside_outliers(monkeypatch, policy="full")
    assert turned < exact + 0.1
    assert plain > exact + 0.35  # the perplexity grows by half
