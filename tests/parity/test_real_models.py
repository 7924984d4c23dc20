"""Pretrained models under a budget that keeps all give transformers' own tokens."""

import pytest
import real_folders
import torch
import transformers

import kvkeep

pytestmark = pytest.mark.real
PROMPT = "The old lighthouse keeper wrote in his diary every evening. One day he wrote:"


@pytest.mark.parametrize(("copies", "budget"), [(1, 256), (45, 1024)])
@pytest.mark.parametrize("name", real_folders.NAMES)
def test_a_budget_that_keeps_all_gives_the_tokens_of_transformers(name, copies, budget):
    folder = real_folders.folder(name)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, tokenizer = kvkeep.load(folder, dtype="float32")
    ids = tokenizer(" ".join([PROMPT] * copies))["input_ids"]
    expected = plain.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    engine = kvkeep.Engine(model, tokenizer, budget=budget, rows=2)
    sampling = kvkeep.SamplingParams(max_new_tokens=24)
    [result] = engine.generate(kvkeep.Request(prompt=ids, sampling=sampling))
    assert list(result.token_ids) == expected
    assert result.lost_mass.decode == 0
