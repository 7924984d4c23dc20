"""kvpress' classes over kvkeep's policies: what a prompt's cache keeps, and how scripts of kvpress use them."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache, pipeline

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.compat import kvpress
from kvkeep.compat.kvpress import (
    AdaKVPress,
    BlockPress,
    ComposedPress,
    DecodingPress,
    ExpectedAttentionPress,
    KeyRerotationPress,
    KnormPress,
    PerLayerCompressionPress,
    PyramidKVPress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
)
from kvkeep.compat.kvpress.presses import CacheArguments
from kvkeep.errors import BudgetError, InputError, UnsupportedOperationError

MADE = json.loads(Path(__file__).with_name("kvpress_kept.json").read_text())
"""Positions that kvpress itself keeps, written by tools/kvpress_kept.py."""
APART = {
    "AdaKVPress(SnapKVPress(0.5, window_size=8))": 0.96,  # budgets of heads: the paper's code adds alpha differently
    "BlockPress(KeyDiffPress(0.5), block_size=32)": 0.9,  # each block attends to what the one before has left
    "LeverageScorePress(0.5)": 0.8,  # kvpress draws a random sketch
}
"""Share of the tokens that must be the same where kvkeep's rule is another one; elsewhere 0.995, for ties."""


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = kvkeep.load(device="cpu", dtype="float32")
    return model, tokenizer


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@torch.no_grad()
def read(model, press, tokens=None, **inputs):
    cache = DynamicCache()
    with press(model):
        model(torch.tensor([MADE["tokens"]] if tokens is None else tokens), **handed(model, cache), **inputs)
    return cache


@torch.no_grad()
def generated(model, ids, **kwargs):
    return model.generate(ids, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **kwargs)


def held(cache, layer, head):
    places = cache.positions(layer)[0, head]
    return set(places[places >= 0].tolist())


@pytest.mark.parametrize("text", MADE["kept"])
def test_a_prompts_tokens_are_those_that_kvpress_keeps(text, model):
    cache = read(model, eval(text, vars(kvpress)))
    same = total = 0
    for layer, heads in enumerate(MADE["kept"][text]):
        for head, mask in enumerate(heads):
            theirs = {place for place in range(len(MADE["tokens"])) if int(mask, 16) >> place & 1}
            same, total = same + len(theirs & held(cache, layer, head)), total + len(theirs)
    assert sum(len(held(cache, layer, head)) for layer in range(6) for head in range(2)) == total
    assert same >= total * APART.get(text, 0.995)


@pytest.mark.parametrize(("ratio", "tokens", "left"), [(0.5, 101, 50), (0.3, 10, 7), (0.999, 10, 1), (0.1, 1, 1)])
def test_a_ratio_is_counted_as_kvpress_counts(ratio, tokens, left):
    assert KnormPress(ratio).cache_options([tokens], 6).budgets == [left]


def test_a_ratio_of_each_layer_is_counted_so_too():
    press = PerLayerCompressionPress(KnormPress(), [0.245] * 6)
    assert press.cache_options([100, 10], 6).budgets == [75, 7]
    assert PerLayerCompressionPress(KnormPress(), [0.999] * 6).cache_options([10], 6).budgets == [1]


def test_generation_stays_within_the_budget_of_the_prompt(model):
    ids = torch.tensor([MADE["tokens"][:60]])
    with KnormPress(0.5)(model):
        out = generated(model, ids, max_new_tokens=20)
        again = generated(model, ids, max_new_tokens=20)
    cache = out[next(name for name in ("cache", "past_key_values") if name in out)]
    assert isinstance(cache, kvkeep.BoundedCache)
    assert len(held(cache, 0, 0)) == 30
    assert out.sequences.tolist() == again.sequences.tolist()  # a cache of its own for each prompt


def test_the_callers_cache_is_the_bounded_one_and_goes_on_after_the_context(model):
    ids = torch.tensor([MADE["tokens"]])
    mine = read(model, SnapKVPress(0.5, window_size=8))
    assert type(mine) is kvkeep.BoundedCache
    out = generated(model, torch.cat([ids, ids[:, :3]], dim=1), **handed(model, mine), max_new_tokens=4)
    assert out.sequences.shape[1] == 167
    assert len(held(mine, 3, 1)) == 80


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_decoder_without_its_head_can_be_called(model):
    cache = DynamicCache()
    with torch.no_grad(), KnormPress(0.25)(model):
        model.model(input_ids=torch.tensor([MADE["tokens"]]), **handed(model.model, cache))
    assert len(held(cache, 0, 0)) == 120


def test_rows_get_budgets_by_their_own_lengths(model):
    ids = torch.tensor([MADE["tokens"][:40], [0] * 20 + MADE["tokens"][:20]])
    mask = torch.tensor([[1] * 40, [0] * 20 + [1] * 20])
    cache = read(model, KnormPress(0.5), ids.tolist(), attention_mask=mask)
    assert [(cache.positions(2)[row] >= 0).sum(dim=-1).tolist() for row in range(2)] == [[20, 20], [10, 10]]


def test_nothing_happens_under_a_ratio_of_0_or_outside_of_the_context(model):
    assert type(read(model, KnormPress())) is DynamicCache
    press = KnormPress(0.5)
    read(model, press)
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), **handed(model, cache))
    assert type(cache) is DynamicCache


def test_hooks_go_even_if_the_context_fails(model):
    before = len(model._forward_pre_hooks), len(model.model._forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), KnormPress(0.5)(model):
        raise ZeroDivisionError
    assert (len(model._forward_pre_hooks), len(model.model._forward_pre_hooks)) == before


def test_a_later_piece_of_a_text_is_left_to_the_cache(model):
    cache = DynamicCache()
    with torch.no_grad(), KnormPress(0.5)(model):
        model(torch.tensor([MADE["tokens"][:60]]), **handed(model, cache))
        model(torch.tensor([MADE["tokens"][60:]]), **handed(model, cache))
    assert len(held(cache, 0, 0)) == 30
    assert cache.get_seq_length() == 160


def test_a_press_whose_ratio_was_set_later_uses_it(model):
    press = AdaKVPress(KnormPress())
    press.compression_ratio = 0.75
    cache = read(model, press)
    assert sum(len(held(cache, 0, head)) for head in range(2)) == 80


def test_a_decoding_press_keeps_its_target_size(model):
    ids = torch.tensor([MADE["tokens"]])
    cache = DynamicCache()
    with DecodingPress(SnapKVPress(window_size=8), target_size=32)(model):
        generated(model, ids, **handed(model, cache), max_new_tokens=5)
    assert len(held(cache, 0, 0)) == 32
    assert "decode=score" in kvkeep.spec(cache.policy)


def test_wrappers_become_options_of_the_cache(model):
    assert read(model, KeyRerotationPress(StreamingLLMPress(0.5))).position_mode == "slot"
    assert read(model, StreamingLLMPress(0.5)).position_mode == "true"
    both = BlockPress(KnormPress(0.5), block_size=16).cache_options([100], 6)
    assert (both.policy, both.budgets, dict(both.options)) == ("knorm", [50], {"prefill_chunk": 16})
    assert PerLayerCompressionPress(KnormPress(), [0.5] * 6).cache_options([100], 6).budgets == [50]


def test_a_short_prompt_has_no_pyramid():
    assert PyramidKVPress(0.6).cache_options([1000], 6).options == {"layer_budget": "uniform"}
    weights = PyramidKVPress(0.5).cache_options([8000], 6).options["layer_budget"]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 10 * weights[-1]
    assert PyramidKVPress(0.5).cache_options([8000], 1).options == {"layer_budget": "uniform"}


def test_random_tokens_follow_the_seed():
    assert RandomPress(0.5, seed=7).policy == "random:mode=reservoir,seed=7"
    torch.manual_seed(3)
    first = RandomPress(0.5).policy
    assert RandomPress(0.5).policy != first
    torch.manual_seed(3)
    assert RandomPress(0.5).policy == first


@pytest.mark.parametrize("name", sorted(kvpress.WITHOUT_EQUAL))
def test_a_press_without_an_equal_says_why(name):
    with pytest.raises(UnsupportedOperationError, match=f"{name} has no equal in kvkeep: it "):
        getattr(kvpress, name)(compression_ratio=0.5)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: KnormPress(1.0), InputError, "compression_ratio=1.0 is outside"),
        (lambda: KnormPress(float("nan")), InputError, "compression_ratio=nan is outside"),
        (lambda: KnormPress("0.5"), InputError, "is outside"),
        (lambda: ComposedPress([KnormPress(0.1), KnormPress(0.1)]), UnsupportedOperationError, "of 2 presses"),
        (lambda: AdaKVPress(AdaKVPress(KnormPress(0.5))), InputError, "takes a ScorerPress"),
        (lambda: DecodingPress(KnormPress(), target_size=0), InputError, "target_size"),
        (lambda: DecodingPress(ComposedPress([KnormPress()])), InputError, "takes a ScorerPress or an AdaKVPress"),
        (lambda: ExpectedAttentionPress(0.5, use_vnorm=False).policy, UnsupportedOperationError, "use_vnorm"),
        (lambda: PyramidKVPress(0.5, beta=0).cache_options([100], 6), InputError, "beta=0"),
        (lambda: PerLayerCompressionPress(KnormPress(), [0.5]).cache_options([9], 6), InputError, "for 6 layers"),
        (
            lambda: CacheArguments("h2o", [8], {"head_budget": "ada"}).with_options(head_budget="uniform"),
            UnsupportedOperationError,
            "Two presses set head_budget",
        ),
        (lambda: kvpress.NoSuchPress, AttributeError, "NoSuchPress"),
    ],
)
def test_what_cannot_be_done_is_refused(make, error, words, no_checked_annotations):
    with pytest.raises(error, match=words):
        make()


def test_caches_that_cannot_be_bounded_are_refused(model):
    ids = torch.tensor([[5, 6, 7, 8]])
    for cache in (StaticCache(model.config, 16), kvkeep.BoundedCache(model.config, budget=4)):
        with pytest.raises(InputError, match="bounds an empty DynamicCache"), KnormPress(0.5)(model):
            model(ids, **handed(model, cache))


def test_two_presses_at_once_are_refused(model):
    with KnormPress(0.5)(model), KnormPress(0.2)(model), pytest.raises(InputError, match="was given a BoundedCache"):
        model(torch.tensor([[5, 6, 7, 8]]), **handed(model, DynamicCache()))


def test_a_window_longer_than_what_stays_is_refused_with_a_remedy(model):
    with pytest.raises(BudgetError, match="budget"):
        read(model, SnapKVPress(0.5), [MADE["tokens"][:80]])


def test_a_press_of_ones_own_is_no_press_here():
    with pytest.raises(TypeError):
        ScorerPress(0.5)  # its score would be a policy's


def test_embeddings_beams_and_prompts_of_one_token_are_prompts(model):
    ids = torch.tensor([MADE["tokens"][:40]])
    cache = DynamicCache()
    with torch.no_grad(), KnormPress(0.5)(model):
        model(inputs_embeds=model.get_input_embeddings()(ids), **handed(model, cache))
    assert len(held(cache, 0, 0)) == 20
    with KnormPress(0.5)(model):
        rows = generated(model, ids, max_new_tokens=4, num_beams=2, num_return_sequences=2)
        assert rows.sequences.shape[0] == 2
        assert generated(model, ids[:, :1], max_new_tokens=3).sequences.shape[1] == 4


def test_a_cache_and_a_mask_may_be_given_by_their_places(model):
    ids = torch.tensor([MADE["tokens"][:40]] * 2)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    for part in (model, model.base_model):
        cache = DynamicCache()
        with torch.no_grad(), KnormPress(0.5)(model):
            part(ids, mask, None, cache)
        assert [int((row[0] >= 0).sum()) for row in cache.positions(0)] == [10, 20]
        with torch.no_grad(), KnormPress(0.5)(model), pytest.raises(TypeError, match="multiple values"):
            part(ids, mask, input_ids=ids)


def test_a_call_without_a_cache_or_without_tokens_changes_nothing(model):
    with torch.no_grad(), KnormPress(0.5)(model):
        assert model(torch.tensor([[5, 6, 7]]), use_cache=False).logits.shape[1] == 3
        with pytest.raises(InputError, match="needs the prompt's input_ids"):
            model(torch.tensor([5, 6, 7]))


# The pipeline.


@pytest.fixture(scope="module")
def pipe(loaded):
    model, tokenizer = loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)


CONTEXT = "Once upon a time there was a dog that lived by the sea. " * 6


def test_the_pipeline_answers_each_question_from_the_context_alone(pipe):
    asked = ["\nWho lived by the sea?", "\nWhere did it live?"]
    together = pipe(CONTEXT, questions=asked, press=KnormPress(0.5), max_new_tokens=6)
    alone = [pipe(CONTEXT, question=text, press=KnormPress(0.5), max_new_tokens=6) for text in asked]
    assert together == {"answers": [answer["answer"] for answer in alone]}
    assert all(together["answers"])


def test_the_pipeline_without_a_press_is_the_full_cache(pipe):
    everything = pipe(CONTEXT, question="\nWhy?", press=KnormPress(0.0), max_new_tokens=6)
    assert pipe(CONTEXT, question="\nWhy?", max_new_tokens=6) == everything


def test_the_pipeline_takes_several_contexts_and_a_limit(pipe):
    answers = pipe([CONTEXT, CONTEXT], question="\nWhy?", press=KnormPress(0.5), max_new_tokens=2, max_context_length=9)
    assert len(answers) == 2
    assert answers[0] == answers[1]


@pytest.mark.parametrize("end", ["", "###", "#" * 400, " \U0001f415", "<|user|>", "{{ raise }}"])
def test_a_context_may_end_as_it_likes(end, pipe):
    asked = pipe.preprocess(CONTEXT + end, ["?"], "", None)
    whole = torch.cat([asked["context_ids"], asked["questions_ids"][0]], dim=1)
    text = pipe.tokenizer.decode(whole[0], skip_special_tokens=True)
    assert (CONTEXT + end + "?").replace("<|user|>", "") in text.replace("<|user|>", "")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"question": "a", "questions": ["b"]}, "not both"),
        ({"no_such": 1}, "no argument 'no_such'"),
        ({"max_context_length": 0}, "max_context_length"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"questions": []}, "questions"),
    ],
)
def test_the_pipeline_refuses_what_it_cannot_do(pipe, arguments, words):
    with pytest.raises(InputError, match=words):
        pipe(CONTEXT, press=KnormPress(0.5), **arguments)


def test_without_a_template_a_context_begins_as_a_text_and_ends_with_a_line(pipe, monkeypatch):
    monkeypatch.setattr(pipe.tokenizer, "chat_template", None)
    found = pipe.preprocess("a dog", ["who?", "where?"], "It is", None)
    assert pipe.tokenizer.decode(found["context_ids"][0]) == (pipe.tokenizer.bos_token or "") + "a dog"
    assert [pipe.tokenizer.decode(ids[0]) for ids in found["questions_ids"]] == ["who?\nIt is", "where?\nIt is"]


def test_a_context_or_a_question_without_tokens_is_refused(pipe, monkeypatch, no_checked_annotations):
    with pytest.raises(InputError, match="The context is a text, not int"):
        pipe.preprocess(3, ["who?"], "", None)
    monkeypatch.setattr(pipe.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with pytest.raises(InputError, match="The context has no token"):
        pipe("", question="who?", max_new_tokens=1)
    with pytest.raises(InputError, match="The question has no token"):
        pipe("a dog", max_new_tokens=1)
    monkeypatch.setattr(pipe.tokenizer, "chat_template", "{{ messages[0]['content'][:5] }}")
    with pytest.raises(InputError, match="changes the end of a message"):
        pipe("a dog", question="who?", max_new_tokens=1)


def test_a_later_piece_of_a_text_is_not_cut(model):
    ids, cache = torch.tensor([[5, 6, 7, 8]]), DynamicCache()
    with torch.no_grad():
        model(ids, **handed(model, cache))
        with KnormPress(0.5)(model):
            model(ids, **handed(model, cache))
    assert cache.get_seq_length() == 8


def test_one_press_may_be_composed():
    assert ComposedPress([KnormPress(0.4)]).cache_options([100], 6) == KnormPress(0.4).cache_options([100], 6)
