"""Sampling: the right distribution, the right tokens left out, the same as transformers where it can be compared."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import kvkeep
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampler import Sampler, changed, choose
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import InputError

from .models import DEVICE, VOCABULARY, model

LOGITS = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2


def frequencies(sampling, n=20000):
    steps = torch.arange(n)
    tokens = choose(LOGITS.expand(n, -1), [sampling] * n, steps)
    return torch.bincount(tokens, minlength=40) / n


def expected(*warpers):
    return LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), LOGITS.clone()).softmax(dim=-1)[0]


def check(sampling, p, n=20000):
    found = frequencies(sampling, n)
    assert (found[p == 0] == 0).all()
    limit = 5 * (p * (1 - p) / n).sqrt() + 1 / n
    assert ((found - p).abs() <= limit).all()


def test_frequencies_are_those_of_the_distribution():
    check(SamplingParams(temperature=1.0, seed=5), LOGITS.softmax(dim=-1)[0])
    check(SamplingParams(temperature=0.6, seed=6), expected(TemperatureLogitsWarper(0.6)))


def test_top_k_top_p_and_min_p_leave_what_transformers_leaves():
    check(SamplingParams(temperature=1.0, top_k=7), expected(TopKLogitsWarper(7)))
    check(SamplingParams(temperature=1.0, top_p=0.7), expected(TopPLogitsWarper(0.7)))
    check(SamplingParams(temperature=1.0, min_p=0.1), expected(MinPLogitsWarper(0.1)))
    together = expected(
        TemperatureLogitsWarper(1.4), TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)
    )
    check(SamplingParams(temperature=1.4, top_k=20, top_p=0.8, min_p=0.1), together)


def test_tokens_that_reach_top_p_exactly_are_enough():
    """Of four tokens that are equally likely two have a half; a third one would be beyond it."""
    equal = torch.zeros(200, 4)
    drawn = choose(equal, [SamplingParams(temperature=1.0, top_p=0.5, seed=1)] * 200, torch.arange(200))
    assert set(drawn.tolist()) == {0, 1}


def test_numbers_at_the_end_of_their_range():
    for sampling in (
        SamplingParams(temperature=1e-46),
        SamplingParams(temperature=1e-46, top_k=10**400),
        SamplingParams(temperature=1e-9),
    ):
        assert frequencies(sampling, 50)[LOGITS.argmax()] == 1
    check(SamplingParams(temperature=1.0, top_k=10**400), LOGITS.softmax(dim=-1)[0])


def test_rows_with_different_wishes_do_not_meet():
    samplings = [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=2.0, top_p=0.5),
    ]
    together = choose(LOGITS.expand(3, -1), samplings, torch.tensor([4, 5, 6]))
    single = [int(choose(LOGITS, [s], torch.tensor([n]))) for s, n in zip(samplings, (4, 5, 6), strict=True)]
    assert together.tolist() == single
    assert single[0] == int(LOGITS.argmax())


def test_repetition_penalty_is_that_of_transformers():
    prompt = (3, 17, 3)
    request = Request(prompt=prompt, sampling=SamplingParams(repetition_penalty=1.7))
    one = Sequence(0, request, kvkeep.parse("full"), 8, frozenset(), token_ids=[9])
    for token in ((3, 17, 9), (3, 17, 9, 22)):
        ids = torch.tensor([[*prompt, *one.token_ids]], device=DEVICE)
        wanted = RepetitionPenaltyLogitsProcessor(1.7)(ids, LOGITS.clone()).argmax()
        assert Sampler().draw(LOGITS, [one]) == [int(wanted)]
        one.token_ids.append(token[-1])


def test_presence_and_frequency_penalties_count_generated_tokens_only():
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=1.5)
    one = Sequence(0, Request(prompt=(3, 17, 3), sampling=sampling), kvkeep.parse("full"), 8, frozenset())
    assert changed(LOGITS, [one]).equal(LOGITS)
    for token in (9, 9, 22):
        one.token_ids.append(token)
        changed(LOGITS, [one])  # the counts are kept from step to step
    lowered = LOGITS.clone()
    lowered[0, 9] -= 0.5 + 2 * 1.5
    lowered[0, 22] -= 0.5 + 1.5
    assert changed(LOGITS, [one]).equal(lowered)


def test_a_bias_is_added_to_the_logits_of_its_tokens():
    one = Sequence(
        0,
        Request(prompt=(1,), sampling=SamplingParams(logit_bias={7: 100, 9: -1.5})),
        kvkeep.parse("full"),
        8,
        frozenset(),
    )
    assert Sampler().draw(LOGITS, [one]) == [7]
    assert (changed(LOGITS, [one]) - LOGITS)[0, 9].item() == pytest.approx(-1.5)


def test_a_row_with_penalties_gets_in_a_batch_what_it_gets_alone():
    engine = Engine(model("llama"), budget=64, rows=4)
    samplings = [
        SamplingParams(max_new_tokens=12, **wishes)
        for wishes in (
            {},
            {"presence_penalty": 2.0},
            {"frequency_penalty": -2.0, "temperature": 1.0},
            {"logit_bias": {5: 40, 6: 40}, "frequency_penalty": 2.0},
        )
    ]
    asked = [Request(prompt=(5, 6, 7, n), sampling=s) for n, s in enumerate(samplings)]
    together = [result.token_ids for result in engine.generate(asked)]
    assert together == [engine.generate(one)[0].token_ids for one in asked]
    assert len(set(together[3])) > 1
    assert set(together[3]) <= {5, 6}


def test_a_bias_beyond_the_vocabulary_is_refused():
    engine = Engine(model("llama"), budget=64, rows=1)
    with pytest.raises(InputError, match=f"logit_bias={VOCABULARY} is no token"):
        engine.generate(Request(prompt=(1,), sampling=SamplingParams(logit_bias={VOCABULARY: 1})))


def test_logprobs_are_those_of_the_model():
    engine = Engine(model("llama"), budget=64, rows=2)
    prompt = (5, 6, 7, 8)
    result = engine.generate(
        [Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=4, temperature=2.0), logprobs=3)]
    )[0]
    with torch.no_grad():
        logits = (
            model("llama")(input_ids=torch.tensor([[*prompt, *result.token_ids]], device=DEVICE), use_cache=False)
            .logits[0]
            .double()
        )
    logp = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
    for row, token, entry in zip(logp, result.token_ids, result.logprobs, strict=True):
        assert entry.token_id == token
        assert abs(entry.value - float(row[token])) < 1e-4
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
        assert all(abs(value - float(row[t])) < 1e-4 for t, value in entry.top)


def test_greedy_is_the_first_of_equal_logits():
    flat = torch.zeros(1, VOCABULARY)
    one = Sequence(0, Request(prompt=(1,)), kvkeep.parse("full"), 8, frozenset())
    assert Sampler().draw(flat, [one]) == [int(flat.argmax())]
