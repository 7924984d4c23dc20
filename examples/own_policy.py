"""A policy of one's own: a score per slot, nothing else. Checked against the laws, then used.

python examples/own_policy.py [MODEL]      (a hub name, a folder or a GGUF file; by default the embedded model)
"""

import sys
from dataclasses import dataclass

import kvkeep
from kvkeep.testing import LAWS, Case


@dataclass(frozen=True, kw_only=True)
class LargeValues(kvkeep.Policy):
    """Keeps the tokens whose values have the largest norm."""

    sinks: int = kvkeep.option(4, "first tokens that are never evicted")
    recent: int = kvkeep.option(8, "newest tokens that are never evicted")

    def protected(self, budget):
        return self.sinks, min(self.recent, budget // 2)

    def score(self, view, state):
        return view.values.float().norm(dim=-1)


def main(name: str | None = None) -> None:
    for law in LAWS.values():
        law(LargeValues(sinks=1, recent=2), Case())
    print(f"{len(LAWS)} laws hold.")
    model, tokenizer = kvkeep.load(name)
    ids = tokenizer("Once upon a time there was a dog that lived by the sea. " * 8)["input_ids"]
    cache = kvkeep.BoundedCache(model.config, policy=LargeValues(), budget=32)
    tokens = model.generate(**cache.continue_with(ids).to(model.device), max_new_tokens=20, do_sample=False)
    held = cache.positions(0)[0, 0]  # layer 0, row 0, KV head 0; -1 marks the free slot
    print("kept by the first head:", held[held >= 0].sort().values.tolist())
    print(tokenizer.decode(tokens[0, -20:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
