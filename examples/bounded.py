"""Generate text in a fixed amount of KV memory, and print it while it is made.

python examples/bounded.py [MODEL]      (a hub name, a folder or a GGUF file; by default the embedded model)
"""

import sys

from transformers import TextStreamer

import kvkeep

BUDGET = 64
PROMPT = "Once upon a time there was a dog that lived by the sea. " * 12 + "One day"


def main(name: str | None = None) -> None:
    model, tokenizer = kvkeep.load(name)
    cache = kvkeep.BoundedCache(model.config, policy="h2o", budget=BUDGET)
    inputs = cache.continue_with(tokenizer(PROMPT)["input_ids"]).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    model.generate(**inputs, max_new_tokens=60, do_sample=False, streamer=streamer)
    memory = cache.memory()
    print(f"{inputs['input_ids'].shape[1]} tokens of prompt, {BUDGET} in the cache of each layer and head.")
    print(f"The cache takes {memory.allocated_bytes:,} bytes; a full one would hold {memory.full_bytes:,}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
