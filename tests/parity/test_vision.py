"""Models that see images: the text decoder's cache is bounded, and the tower computes what it did."""

import pytest
import torch
from transformers.cache_utils import DynamicCache
from vision import CONFIGS, IMAGE, build, prompt

import kvkeep

NEW = 8
SEEING = [name for name in CONFIGS if name != "gemma3"]


def greedy(model, given, cache=None):
    return model.generate(
        **given,
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def text_only(given):
    return {name: given[name].masked_fill(given["input_ids"] == IMAGE, 7) for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", SEEING)
def test_with_an_image_a_budget_of_the_whole_length_is_the_full_cache(family, rows):
    model, given = build(family), prompt(family, rows)
    want = greedy(model, given)
    kvkeep.attach(model)
    for chunk in (None, 5):
        cache = kvkeep.BoundedCache(model.config, budget=64, prefill_chunk=chunk)
        got = greedy(model, given, cache)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)
        assert cache.get_seq_length() == given["input_ids"].shape[1] + NEW - 1


@pytest.mark.parametrize("family", SEEING)
def test_a_second_turn_after_an_image_too(family):
    model, given, found = build(family), prompt(family), []
    for kind in ("transformers", "kvkeep"):
        model = kvkeep.attach(model) if kind == "kvkeep" else model
        cache = kvkeep.BoundedCache(model.config, budget=64) if kind == "kvkeep" else DynamicCache(config=model.config)
        first = greedy(model, given, cache).sequences
        ids = torch.cat([first, torch.arange(5, 11)[None]], dim=1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append(torch.stack(greedy(model, second, cache).logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_without_an_image_too(family):
    model = build(family)
    given = {"input_ids": torch.randint(3, 50, (1, 20), generator=torch.Generator().manual_seed(0))}
    want = greedy(model, given)
    cache = kvkeep.BoundedCache(kvkeep.attach(model).config, budget=64)
    got = greedy(model, given, cache)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SEEING)
def test_under_eviction_each_row_gets_what_it_gets_alone(family):
    model, given = kvkeep.attach(build(family)), prompt(family, 2)
    together = kvkeep.BoundedCache(model.config, budget=9)
    rows = greedy(model, given, together).sequences[:, -NEW:]
    alone = kvkeep.BoundedCache(model.config, budget=9)
    first = {name: tensor[: len(tensor) // 2] for name, tensor in given.items()}
    assert torch.equal(greedy(model, first, alone).sequences[0, -NEW:], rows[0])
    assert ((together.positions(1) >= 0).sum(-1) == 9).all()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_tower_keeps_its_own_attention(family):
    model = kvkeep.attach(build(family))
    text = model.config.get_text_config(decoder=True)
    assert text._attn_implementation == "kvkeep"
    assert model.config.vision_config._attn_implementation == "sdpa"
    model.set_attn_implementation("sdpa")
    assert text._attn_implementation == "sdpa"


def test_images_whose_tokens_see_each_other_are_refused():
    model, given = kvkeep.attach(build("gemma3")), prompt("gemma3")
    with pytest.raises(kvkeep.UnsupportedModelError, match="image tokens that see each other"):
        greedy(model, given, kvkeep.BoundedCache(model.config, budget=64))


@pytest.mark.parametrize("family", CONFIGS)
def test_an_image_token_without_an_image_is_refused(family):
    model, given = kvkeep.attach(build(family)), prompt(family)
    text = {name: given[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(kvkeep.InputError, match=f"Token {IMAGE} of the prompt stands for an image, and none is given"):
        greedy(model, text, kvkeep.BoundedCache(model.config, budget=64))


@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl", "qwen3-vl"])
def test_a_turn_with_an_image_is_as_without_continue_with_or_refused(family):
    """Qwen's models number the positions of an image in three axes, and `continue_with` returns those of text."""
    model, given = kvkeep.attach(build(family)), prompt(family)
    cache = kvkeep.BoundedCache(model.config, "full", 64)
    turn = {**given, **cache.continue_with({name: given[name] for name in ("input_ids", "attention_mask")})}
    if family == "llava":
        want = greedy(model, given, kvkeep.BoundedCache(model.config, "full", 64)).sequences
        assert torch.equal(model.generate(**turn, max_new_tokens=NEW, do_sample=False), want)
        return
    with pytest.raises(kvkeep.InputError, match="continue_with knows those of text only"):
        model.generate(**turn, max_new_tokens=NEW, do_sample=False)
    words = cache.continue_with([5, 6, 7])
    assert model.generate(**words, max_new_tokens=2, do_sample=False).shape == (1, 5)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_engine_runs_text_and_refuses_an_image_token(family):
    model = kvkeep.attach(build(family))
    engine = kvkeep.Engine(model, budget=9, rows=2, prefill_chunk=None)
    prompts = [tuple(range(3, 20)), tuple(range(30, 41))]
    sampling = kvkeep.SamplingParams(max_new_tokens=NEW)
    results = engine.generate([kvkeep.Request(prompt=one, sampling=sampling) for one in prompts])
    for one, result in zip(prompts, results, strict=True):
        cache = kvkeep.BoundedCache(model.config, budget=9)
        alone = greedy(model, {"input_ids": torch.tensor([one])}, cache).sequences[0, len(one) :]
        assert list(result.token_ids) == alone.tolist()
    with pytest.raises(kvkeep.InputError, match=f"Token {IMAGE} of the prompt stands for an image"):
        engine.add(kvkeep.Request(prompt=(5, IMAGE, 7)))
