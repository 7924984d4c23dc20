"""Generate for a left-padded batch in a fixed amount of KV memory.

python examples/batch.py MODEL      (a hub name or a local folder)
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvkeep

PROMPTS = ["Once upon a time", "The old house by the river had stood empty for years, and nobody in the village"]


def main(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = kvkeep.attach(AutoModelForCausalLM.from_pretrained(name))
    cache = kvkeep.BoundedCache(model.config, budget=32)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=64, do_sample=False)
    for text in tokenizer.batch_decode(output, skip_special_tokens=True):
        print("-", text)
    memory = cache.memory()
    print(f"KV cache: {memory.allocated_bytes} bytes; a full cache would hold {memory.full_bytes}")


if __name__ == "__main__":
    main(sys.argv[1])
