"""Log-probabilities of prompts: those of the model, whatever shares the run, and however the prompt is cut."""

import pytest
import torch

from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import InputError

from .models import DEVICE, VOCABULARY, model

ONE = SamplingParams(max_new_tokens=1)


def prompt(n, seed):
    return tuple(torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def check(found, ids, top, kind="llama"):
    with torch.no_grad():
        logits = model(kind)(input_ids=torch.tensor([ids], device=DEVICE), use_cache=False).logits[0]
    logp = logits.double().log_softmax(dim=-1)
    assert [entry.token_id for entry in found] == list(ids[1:])
    for row, entry in zip(logp, found, strict=False):
        assert abs(entry.value - float(row[entry.token_id])) < 1e-3
        assert [token for token, _ in entry.top] == row.topk(top).indices.tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_they_are_those_of_the_model_also_beside_other_requests(kind):
    engine = Engine(model(kind), budget=64, rows=4)
    ids = [prompt(n, n) for n in (1, 2, 31, 40)]
    asked = [Request(prompt=one, sampling=ONE, prompt_logprobs=n) for n, one in enumerate(ids)]
    asked.insert(2, Request(prompt=prompt(20, 7), sampling=SamplingParams(max_new_tokens=9)))
    asked.append(Request(prompt=prompt(33, 8), policy="tova", sampling=ONE, prompt_logprobs=2))
    found = engine.generate(asked)
    plain = found.pop(2)
    assert (plain.prompt_logprobs, len(plain.token_ids)) == ((), 9)
    for n, (one, result) in enumerate(zip(ids, found, strict=False)):
        check(result.prompt_logprobs, one, n, kind)
    check(found[-1].prompt_logprobs, prompt(33, 8), 2, kind)


@pytest.mark.long
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_nothing_while_nothing_is_evicted(chunk):
    engine = Engine(model("llama"), budget=64, rows=2, prefill_chunk=chunk, prefix_memory=2**20)
    asked = Request(prompt=prompt(40, 3), sampling=ONE, prompt_logprobs=1)
    for _ in range(2):  # the second time there is a common beginning, which is read again
        (result,) = engine.generate(asked)
        check(result.prompt_logprobs, prompt(40, 3), 1)
        assert result.cached_tokens == 0


def test_equal_prompts_are_each_read():
    engine = Engine(model("llama"), budget=64, rows=3)
    asked = [Request(prompt=prompt(256, 3), sampling=ONE, prompt_logprobs=0, sequence=n) for n in range(3)]
    for result in engine.generate(asked):
        assert len(result.prompt_logprobs) == 255


def test_a_memory_is_not_scored():
    engine = Engine(model("llama"), budget=64, rows=2)
    session = engine.session()
    session.ask(prompt(5, 1), ONE)
    with pytest.raises(InputError, match="needs the whole prompt"):
        session.ask(Request(prompt=(1, 2), prompt_logprobs=1))
    with pytest.raises(InputError, match="needs the whole prompt"):
        Request(prompt=(1, 2), prompt_logprobs=1, snapshot=session.snapshot())
    assert len(session.ask((1, 2), ONE).token_ids) == 1


def test_events_have_the_log_probability_of_their_token():
    engine = Engine(model("llama"), budget=64, rows=2)
    asked = Request(prompt=prompt(9, 2), sampling=SamplingParams(max_new_tokens=5), logprobs=1)
    *events, last = engine.stream(asked)
    assert tuple(event.logprob for event in (*events, last)) == last.result.logprobs
    assert next(engine.stream(Request(prompt=prompt(9, 2)))).logprob is None
