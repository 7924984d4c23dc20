"""A policy of one's own: a score per slot, nothing else. Checked against the laws, then used.

python examples/own_policy.py
"""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.testing import LAWS, Case


@dataclass(frozen=True, kw_only=True)
class KeyNorm(kvkeep.Policy):
    """Keeps the tokens whose keys have the smallest norm."""

    sinks: int = kvkeep.option(2, "first tokens that are never evicted")

    def protected(self, budget):
        return self.sinks, 0

    def score(self, view, state):
        return -view.keys.float().norm(dim=-1)


def main() -> None:
    policy = KeyNorm(sinks=1)
    for name, law in LAWS.items():
        law(policy, Case())
        print("holds:", name)
    model = kvkeep.attach(LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)).eval())
    cache = kvkeep.BoundedCache(model.config, policy=policy, budget=16)
    model.generate(torch.arange(3, 60)[None], past_key_values=cache, max_new_tokens=20, do_sample=False)
    held = cache.positions(0)[0, 0]  # layer 0, row 0, KV head 0; -1 marks the free slot
    print("kept:", held[held >= 0].sort().values.tolist())


if __name__ == "__main__":
    main()
