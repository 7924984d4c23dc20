"""The bound, measured on a process: peak resident memory does not follow the length of the prompt.

It takes minutes: `make test-all` runs it, `make test` does not.
"""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys, torch, kvkeep
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                     num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=40000)
model = kvkeep.attach(LlamaForCausalLM(config).eval())
cache = kvkeep.BoundedCache(config, policy="h2o", budget=256, prefill_chunk=512)
ids = torch.randint(0, 256, (1, int(sys.argv[1])))
model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, prefill_chunk_size=512,
               pad_token_id=0, eos_token_id=None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, cache.memory().allocated_bytes)
"""


def peak_bytes(tokens):
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tokens)], capture_output=True, text=True, check=True)
    peak, held = map(int, done.stdout.split())
    return peak, held


@pytest.mark.slow
def test_peak_memory_at_32768_tokens_is_that_at_2048():
    short, short_held = peak_bytes(2048)
    long, long_held = peak_bytes(32768)
    print(f"peak resident bytes: {short} at 2048 tokens, {long} at 32768, ratio {long / short:.3f}")
    assert long_held == short_held
    assert long < 1.3 * short


@pytest.mark.slow
def test_a_long_run_holds_what_the_formula_says():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvkeep

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model = kvkeep.attach(LlamaForCausalLM(config).eval())
    cache = kvkeep.BoundedCache(config, policy="h2o", budget=256, prefill_chunk=512)
    B, L, Hk, D = 2, 2, 2, 16
    formula = L * (B * Hk * 257 * (4 * 2 * D + 4 + 4) + 24 * B + 16 * B * Hk)
    sizes = set()
    ids = torch.randint(0, 256, (B, 4096))
    with torch.inference_mode():
        for start in range(0, 4096, 512):
            model(input_ids=ids[:, start : start + 512], past_key_values=cache, logits_to_keep=1)
            sizes.add(cache.memory().allocated_bytes)
        for _ in range(2000):
            model(input_ids=ids[:, :1], past_key_values=cache)
            sizes.add(cache.memory().allocated_bytes)
    assert sizes == {formula}
    assert (cache.positions(1) >= 0).sum(-1).eq(256).all()
    assert cache.memory().full_bytes == L * B * Hk * 6096 * 4 * 2 * D
