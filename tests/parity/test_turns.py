"""Turns of a chat on one cache: equal to a fresh cache, or an error that says at which token the texts part."""

import copy
import pickle

import model_folders
import numpy
import pytest
import torch
from models import build, padded_batch
from transformers import DynamicCache

import kvkeep
from kvkeep.cache.hf_layers import handed, handed_over
from kvkeep.errors import BrokenCacheError, InputError, ShapeError
from kvkeep.types import Phase

KEEPS = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
STRIPS = KEEPS.replace("m.content", "m.content.split('</think>')[-1]")
NEW = 8


@pytest.fixture(scope="module")
def model():
    return kvkeep.attach(build("llama"))


@pytest.fixture(scope="module")
def chatty():
    return kvkeep.load(model_folders.folder())


def bounded(model, policy="full", budget=600, **options):
    return kvkeep.BoundedCache(model.config, policy, budget, **options)


def greedy(model, inputs, new=NEW):
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[:, inputs["input_ids"].shape[1] :]


def ids_of(tokenizer, messages, template):
    return tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def answers(chatty, template, answer_of, *, fresh):
    """The tokens of six answers, and the errors; with one cache for all turns, or a fresh one for each."""
    model, tokenizer = chatty
    cache, messages, said, refused = bounded(model), [], [], []
    for turn in range(6):
        messages.append({"role": "user", "content": f"question {turn} of the cat"})
        inputs = ids_of(tokenizer, messages, template)
        if fresh:
            cache = bounded(model)
        try:
            feed = cache.continue_with(inputs, tokenizer=tokenizer)
        except InputError as error:
            refused.append(str(error))
            cache.reset()
            feed = cache.continue_with(inputs)
        new = greedy(model, feed)
        said.append(new[0].tolist())
        messages.append({"role": "assistant", "content": answer_of(tokenizer.decode(new[0]))})
    return said, refused


@pytest.mark.slow
def test_six_turns_on_one_cache_equal_a_fresh_cache_for_each(chatty):
    model, tokenizer = chatty
    cache, ids = bounded(model), ids_of(tokenizer, [{"role": "user", "content": "the cat"}], KEEPS)["input_ids"]
    fed = 0
    for turn in range(6):
        feed = cache.continue_with(ids)
        assert feed["input_ids"].shape[1] == ids.shape[1] - fed
        new = greedy(model, feed)
        assert torch.equal(new, greedy(model, bounded(model).continue_with(ids))), turn
        plain = {"attention_mask": torch.ones_like(ids), "past_key_values": DynamicCache(config=model.config)}
        assert torch.equal(new, greedy(model, {"input_ids": ids, **plain}))
        fed = ids.shape[1] + NEW - 1
        more = tokenizer(f"</s><s>user: question {turn}</s><s>assistant: ", return_tensors="pt")["input_ids"]
        ids = torch.cat([ids, new, more], dim=1)


def test_a_template_that_strips_reasoning_is_noticed_in_every_turn(chatty):
    def thinks(text):
        return f"{text}</think>the fox"

    said, refused = answers(chatty, STRIPS, thinks, fresh=False)
    want, none = answers(chatty, STRIPS, thinks, fresh=True)
    assert said == want
    assert len(refused) == 5
    assert not none
    assert all("The text and the cache part at token " in error and "reset()" in error for error in refused)
    assert all("▸" in error and len(error) < 400 for error in refused)


def test_an_error_shows_the_tokens_around_the_place(chatty):
    model, tokenizer = chatty
    cache = bounded(model)
    one = tokenizer("the quick brown fox jumps over the lazy dog")["input_ids"]
    other = tokenizer("the quick brown cat jumps over the lazy dog and on")["input_ids"]
    at = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    with torch.inference_mode():
        model(**cache.continue_with(one))
    with pytest.raises(InputError, match=rf"part at token {at} of {len(one)}: the cache has {one[at]}, the text"):
        cache.continue_with(other)
    with pytest.raises(InputError, match=r"'[^']*brown ?' ▸ ' ?fox[^']*'\), the text \d+ \('[^']*' ▸ ' ?c"):
        cache.continue_with(other, tokenizer=tokenizer)
    with pytest.raises(InputError, match=rf"has 3 tokens, and the cache holds {len(one)}, which cannot be taken back"):
        cache.continue_with(one[:3])
    with pytest.raises(InputError, match="so there is nothing to feed"):
        cache.continue_with(one)
    assert cache.continue_with([*one, 5])["input_ids"].tolist() == [[5]]  # what was refused has changed nothing


@pytest.mark.parametrize("policy", ["full", "h2o", "snapkv:window=4"])
@pytest.mark.parametrize("how", ["generate", "model"])
def test_rows_of_different_lengths_go_on_as_each_does_alone(model, policy, how):
    ids, mask = padded_batch()
    more = [[5, 6, 7, 8, 9], [9, 8], [7]]
    budget = 600 if policy == "full" else 10

    def turn(inputs):
        if how == "generate":
            return greedy(model, inputs)
        out, cache = [], handed_over(inputs)
        with torch.inference_mode():
            token = model(**inputs).logits[:, -1:].argmax(-1)
            places, real = inputs["position_ids"][:, -1:], inputs["attention_mask"]
            while len(out) < NEW - 1:
                out.append(token)
                places, real = places + 1, torch.nn.functional.pad(real, (0, 1), value=1)
                rest = {"attention_mask": real, "position_ids": places, **handed(model, cache)}
                token = model(input_ids=token, **rest).logits[:, -1:].argmax(-1)
        return torch.cat([*out, token], dim=1)

    def two_turns(rows, more):
        cache = bounded(model, policy, budget)
        first = turn(cache.continue_with(rows)).tolist()
        longer = [[*row, *new, *tail] for row, new, tail in zip(rows, first, more, strict=True)]
        return first, turn(cache.continue_with(longer)).tolist()

    rows = [row[real == 1].tolist() for row, real in zip(ids, mask, strict=True)]
    together = two_turns(rows, more)
    for i in range(3):
        alone = two_turns(rows[i : i + 1], more[i : i + 1])
        assert [turns[i] for turns in together] == [turns[0] for turns in alone]


def test_the_new_tokens_are_a_prompt_and_the_generated_ones_are_not(model, monkeypatch):
    phases, plain = [], kvkeep.Layer.step

    def step(self, query, keys, values, *, phase, **options):
        phases.append((query.shape[2], phase))
        return plain(self, query, keys, values, phase=phase, **options)

    cache = bounded(model, "h2o", 10)
    first = greedy(model, cache.continue_with([1, 2, 3, 4]), 3)[0].tolist()
    monkeypatch.setattr(kvkeep.Layer, "step", step)
    inputs = cache.continue_with([1, 2, 3, 4, *first])  # the last token of the answer was never fed
    assert inputs["input_ids"].tolist() == [first[-1:]]
    greedy(model, inputs, 3)
    assert phases[0] == (1, Phase.PREFILL)
    assert set(phases[len(cache.bounded_layers()) :]) == {(1, Phase.DECODE)}
    phases.clear()
    cache.phase = Phase.DECODE  # whoever says it, rules
    with torch.inference_mode():
        model(input_ids=torch.tensor([[4]]), past_key_values=cache)
    assert set(phases) == {(1, Phase.DECODE)}


def test_tokens_fed_behind_the_caches_back_are_noticed(model):
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        cache = bounded(model)
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(InputError, match=r"holds 4 tokens, and the ids of 4 are not known: .* reset\(\)"):
            cache.continue_with([1, 2, 3, 4, 5])
        cache.reset()
        model(**cache.continue_with(ids))
        model(input_ids=torch.tensor([[9]]), past_key_values=cache)  # the attached model tells which
        with pytest.raises(InputError, match="part at token 4 of 5: the cache has 9, the text 5"):
            cache.continue_with([1, 2, 3, 4, 5, 6])
        model.forward(input_ids=torch.tensor([[10]]), past_key_values=cache)  # past its hooks
        with pytest.raises(InputError, match=r"the ids of 1 are not known.*cache\.note"):
            cache.continue_with([1, 2, 3, 4, 9, 10, 11])
        cache.reset()
        cache.continue_with([1, 2])
        cache.note(torch.tensor([[1, 2]]))
        model.forward(input_ids=torch.tensor([[1, 2]]), past_key_values=cache)
        assert cache.continue_with([1, 2, 3])["input_ids"].tolist() == [[3]]
        embeddings = model.get_input_embeddings()(torch.tensor([[3]]))
        model(inputs_embeds=embeddings, past_key_values=cache)
        with pytest.raises(InputError, match="the ids of 1 are not known"):
            cache.continue_with([1, 2, 3, 4])


def test_a_step_that_fails_is_not_recorded(model):
    cache = bounded(model)
    with torch.inference_mode():
        model(**cache.continue_with([1, 2, 3]))

        def fail(*args):
            raise MemoryError

        hook = model.get_input_embeddings().register_forward_pre_hook(fail)  # before any layer
        with pytest.raises(MemoryError):
            model(**cache.continue_with([1, 2, 3, 4]))
        hook.remove()
        model(**cache.continue_with([1, 2, 3, 5]))
        assert cache.continue_with([1, 2, 3, 5, 6])["input_ids"].tolist() == [[6]]
        hook = model.model.layers[0].mlp.register_forward_pre_hook(fail)  # between two layers
        with pytest.raises(MemoryError):
            model(**cache.continue_with([1, 2, 3, 5, 6]))
        hook.remove()
    with pytest.raises(BrokenCacheError):
        cache.continue_with([1, 2, 3, 5, 6])
    cache.reset()
    assert cache.continue_with([1, 2, 3, 5, 6])["input_ids"].shape == (1, 5)


def test_rows_that_are_selected_take_their_ids_along(model):
    cache = bounded(model)
    with torch.inference_mode():
        model(**cache.continue_with([[1, 2, 3], [4, 5, 6]]))
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.continue_with([4, 5, 6, 7])["input_ids"].tolist() == [[7]]
    cache.batch_repeat_interleave(2)
    assert cache.continue_with([[4, 5, 6, 7], [4, 5, 6, 8]])["input_ids"].tolist() == [[7], [8]]
    with pytest.raises(ShapeError, match="holds 2 rows, and there are 1 texts"):
        cache.continue_with([4, 5, 6, 7])
    with pytest.raises(InputError, match="Text 1 and the cache part at token 2"):
        cache.continue_with([[4, 5, 6, 7], [4, 5, 7, 7]])
    beams = bounded(model)
    inputs = beams.continue_with([1, 2, 3])
    out = model.generate(**inputs, num_beams=2, num_return_sequences=2, max_new_tokens=5, do_sample=False)
    ids, _ = beams._history.table()
    kept = {tuple(row) for row in ids.tolist()}
    assert all(row[:3] == (1, 2, 3) and len(row) == beams.get_seq_length() for row in kept)
    assert out.shape[0] == 2


def test_a_copy_of_a_cache_has_its_own_record(model):
    cache = bounded(model)
    with torch.no_grad():
        model(**cache.continue_with([1, 2, 3]))
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            model(**other.continue_with([1, 2, 3, 4]))
            assert other.continue_with([1, 2, 3, 4, 5])["input_ids"].tolist() == [[5]]
    assert cache.continue_with([1, 2, 3, 5])["input_ids"].tolist() == [[5]]


@pytest.mark.slow
def test_a_long_answer_is_recorded_whole(model):
    cache = bounded(model, "local", 8)
    new = greedy(model, cache.continue_with([1, 2, 3]), 600)[0].tolist()
    assert cache.continue_with([1, 2, 3, *new])["input_ids"].tolist() == [new[-1:]]
    assert len(cache._history._pieces) < 300


def test_without_a_first_turn_nothing_is_recorded(model):
    cache = bounded(model)
    greedy(model, {"input_ids": torch.tensor([[1, 2, 3]]), "past_key_values": cache})
    assert not cache.records
    attached = kvkeep.attach(kvkeep.attach(model))
    assert len(attached._forward_pre_hooks) == 1


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        ("a text", None, "takes token ids of the whole conversation"),
        ([], None, "no tokens"),
        ([[]], None, "no tokens"),
        ([[1, 2], []], None, "no tokens"),
        ([1, "a"], None, "takes token ids"),
        ([2**70], None, "takes token ids"),
        ([1.5, 2], None, "takes token ids"),
        (3, None, "takes token ids"),
        (None, None, "takes token ids"),
        ([[1, 2], [3]], torch.ones(3), "another shape"),
        ({"attention_mask": [1]}, None, "no tokens|another shape"),
        ([1, 2, 3], torch.ones(1, 2), "another shape"),
        ([[1, 2, 3]], torch.zeros(1, 3), "no tokens"),
    ],
)
def test_what_are_no_token_ids_is_refused(model, ids, mask, said, no_checked_annotations):
    cache = bounded(model)
    with pytest.raises(InputError, match=said):
        cache.continue_with(ids, mask)
    assert cache.continue_with([1, 2])["input_ids"].tolist() == [[1, 2]]


def test_texts_of_different_lengths_need_no_padding(model):
    """A tokenizer's output without padding has lists of different lengths, of masks as well."""
    ids, mask = [[1, 2, 3], [4, 5]], [[1, 1, 1], [1, 1]]
    found = bounded(model).continue_with({"input_ids": ids, "attention_mask": mask})
    assert found["input_ids"].tolist() == [[1, 2, 3], [0, 4, 5]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    arrays = {"input_ids": numpy.array([[1, 2, 3]]), "attention_mask": numpy.array([[0, 1, 1]])}
    assert bounded(model).continue_with(arrays)["input_ids"].tolist() == [[2, 3]]
