"""A stream of tokens through a model with random weights: what the cache holds, and what a full one would.

python examples/bounded.py [TOKENS]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2**20,
)


@torch.inference_mode()
def main(tokens: int) -> None:
    torch.manual_seed(0)
    model = kvkeep.attach(LlamaForCausalLM(CONFIG).eval())
    print("A model with random weights reads a random stream; each KV head may keep 256 tokens.\n")
    print(f"{'tokens':>8} {'bounded cache':>14} {'full cache':>14} {'compression':>12}")
    cache = kvkeep.BoundedCache(model.config, budget=256)
    stream = torch.randint(0, 256, (1, tokens))
    for start in range(0, tokens, 512):
        model(input_ids=stream[:, start : start + 512], past_key_values=cache, logits_to_keep=1)
        memory = cache.memory()
        seen = int(start + 512)
        if seen & (seen - 1) == 0:
            held, full = f"{memory.allocated_bytes:,} B", f"{memory.full_bytes:,} B"
            print(f"{seen:8,} {held:>14} {full:>14} {memory.compression:11.1f}×")
    kept = cache.positions(3)[0, 0]
    print("layer 3, head 0 still holds, among others, the tokens", kept[kept >= 0].sort().values[:8].tolist(), "…")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16384)
