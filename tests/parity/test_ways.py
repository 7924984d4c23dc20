"""Other ways into ``generate``: pipelines, streamers, and decoding methods that transformers has or has given away."""

import pytest
import torch
from models import build, padded_batch
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, WatermarkingConfig, pipeline

import kvkeep

NEW = 6
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def embedded():
    return kvkeep.load()


@pytest.fixture(scope="module")
def small():
    return kvkeep.attach(build("llama"))


def bounded(model, budget=10):
    return kvkeep.BoundedCache(model.config, budget=budget)


def test_a_pipeline_takes_a_cache(embedded):
    model, tokenizer = embedded
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    cache = bounded(model)
    (got,) = pipe(TEXT, past_key_values=cache, max_new_tokens=16, do_sample=False)
    out = model.generate(
        **tokenizer(TEXT, return_tensors="pt"), past_key_values=bounded(model), max_new_tokens=16, do_sample=False
    )
    assert got["generated_text"] == tokenizer.decode(out[0], skip_special_tokens=True)
    assert ((cache.positions(0) >= 0).sum(-1) == 10).all()


def test_a_second_text_on_the_same_cache_is_told_what_to_do(embedded):
    model, tokenizer = embedded
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with pytest.raises(kvkeep.InputError, match=r"already holds 11 tokens.*reset\(\)"):
        pipe([TEXT, TEXT], past_key_values=bounded(model), max_new_tokens=8, do_sample=False)


def test_no_new_token_is_refused_and_the_cache_lives_on(small):
    ids, _ = padded_batch(rows=1)
    cache = bounded(small)
    small(input_ids=ids, past_key_values=cache)
    with pytest.raises(kvkeep.InputError, match="no token after them"):
        small(input_ids=ids[:, :0], past_key_values=cache)
    small(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1] + 1


def test_a_streamer_prints_the_text(embedded, capsys):
    model, tokenizer = embedded
    ids = tokenizer(TEXT, return_tensors="pt")
    how = {"max_new_tokens": NEW, "do_sample": False}
    out = model.generate(**ids, past_key_values=bounded(model), streamer=TextStreamer(tokenizer), **how)
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0]).strip()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(**ids, past_key_values=bounded(model), streamer=streamer, **how)
    assert "".join(streamer) == tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


@pytest.mark.parametrize(
    "how",
    [{"guidance_scale": 1.5}, {"watermarking_config": WatermarkingConfig()}, {"no_repeat_ngram_size": 2}],
    ids=str,
)
def test_processors_of_logits_work(small, how):
    ids, mask = padded_batch(rows=1)
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, **how}
    want = small.generate(ids, past_key_values=DynamicCache(config=small.config), **how)
    assert torch.equal(small.generate(ids, past_key_values=bounded(small, 64), **how), want)


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=str)
def test_decoding_that_takes_tokens_back_is_refused(small, how):
    ids, mask = padded_batch(rows=1)
    how = {"eos_token_id": 1, **how}  # old versions look for it in what they take back
    with pytest.raises(kvkeep.UnsupportedOperationError, match="Assisted decoding needs rollbacks"):
        small.generate(ids, attention_mask=mask, past_key_values=bounded(small), max_new_tokens=NEW, **how)


@pytest.mark.parametrize(
    "how",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 4, "force_words_ids": [[5]]},
        {"dola_layers": "high"},
    ],
    ids=["contrastive search", "groups of beams", "constrained beams", "dola"],
)
def test_methods_that_transformers_gave_away_are_refused_by_transformers(small, how):
    ids, mask = padded_batch(rows=1)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        small.generate(ids, attention_mask=mask, past_key_values=bounded(small), max_new_tokens=NEW, **how)
