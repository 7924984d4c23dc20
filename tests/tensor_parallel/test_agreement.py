"""Engines of several processes that are given different requests: they say how these differ, before anything runs."""

import copy
import json
import re

import model_folders
import pytest
import ranks
import torch

import kvkeep
from kvkeep import Request, SamplingParams
from kvkeep.engine import engine as engine_module
from kvkeep.engine.sequence import Sequence
from kvkeep.engine.tensor_parallel import EngineAgreement, described, difference
from kvkeep.errors import InputError
from kvkeep.head_sharding import Heads
from kvkeep.policies.h2o import H2O


def generation(number=0, ids=(3, 4, 5), *, policy=None, budget=8, ends=(2,), sampling=None, held=0, **asked):
    pins = asked.pop("held_pins", ())
    request = Request(prompt=ids, sampling=SamplingParams(**(sampling or {})), **asked)
    return Sequence(number, request, policy or H2O(), budget, frozenset(ends), held=held, held_pins=pins)


def process(*live, **engine):
    return {"engine": {"budget": "8"} | engine, "requests": {str(one.id): described(one) for one in live}}


FIRST, SECOND = generation(), generation(1, (7, 8))

CHANGES = [
    ({"ids": (3, 9, 5)}, "token 1 of its prompt is 4 in process 0 and 9 in process 1"),
    ({"ids": (3, 4)}, "its prompt has 3 tokens in process 0 and 2 in process 1"),
    ({"sampling": {"temperature": 0.5}}, "`temperature` is 0.0 in process 0 and 0.5 in process 1"),
    ({"sampling": {"seed": 1}}, "`seed` is 0"),
    ({"sampling": {"max_new_tokens": 1}}, "`max_new_tokens` is 256"),
    ({"sampling": {"logit_bias": {3: 1.0}}}, r"`logit_bias` is \(\)"),
    ({"policy": H2O(recent=1)}, "`policy`"),
    ({"budget": 9}, "`budget` is 8 in process 0 and 9"),
    ({"guard": 0.5}, "`guard` is None"),
    ({"pins": ((0, 2),)}, "`pins`"),
    ({"stop": ("a",)}, "`stop`"),
    ({"sequence": 1}, "`sequence` is 0"),
    ({"logprobs": 1}, "`logprobs` is None"),
    ({"prompt_logprobs": 1}, "`prompt_logprobs` is None"),
    ({"structured_outputs": {"regex": "a"}}, "`structured_outputs` is None"),
    ({"ends": ()}, r"`ends` is \[2\]"),
    ({"held": 2}, "`tokens in memory` is 0 in process 0 and 2"),
    ({"held_pins": ((0, 2),)}, "`pins in memory`"),
]


def test_every_difference_of_a_request_is_named():
    for change, said in CHANGES:
        found = difference([process(FIRST, SECOND), process(generation(**change), SECOND)])
        assert re.match(f"Request 0 differs: {said}", found), found


def test_other_requests_engines_and_orders_are_named():
    both = process(FIRST, SECOND)
    assert difference([both, both, process(FIRST)]) == "Process 0 has request 1, and process 2 does not."
    assert difference([process(SECOND), both]) == "Process 1 has request 0, and process 0 does not."
    turned = process(generation(0, (7, 8)), generation(1))
    assert difference([both, turned]) == "Request 0 of process 0 is request 1 of process 1: their order differs."
    assert difference([both, process(FIRST, SECOND, budget="9")]) == (
        "The engines have different options: `budget` is 8 in process 0 and 9 in process 1."
    )
    # equal descriptions, whose hashes differ because the requests came in another order
    assert difference([both, both]) == "Processes 0 and 1 have added the same requests in different orders."
    late = copy.deepcopy(both)
    late["requests"] = dict(reversed(late["requests"].items()))
    assert late == both  # JSON objects with another order, as the digest sees it


def test_the_compared_number_depends_on_everything(monkeypatch):
    """Each change of a request, and the order, changes the number; asking again does not."""
    agreement = EngineAgreement.__new__(EngineAgreement)
    seen = set()
    for live in ([FIRST, SECOND], [SECOND, FIRST], [FIRST], [], *([generation(**change)] for change, _ in CHANGES)):
        agreement._known, agreement._settings = [], {"budget": "8"}
        number = agreement._digest(live)
        assert number == agreement._digest(live)
        assert -(2**63) <= number < 2**63
        seen.add(number)
    assert len(seen) == 4 + len(CHANGES)
    agreement._settings = {"budget": "9"}
    assert agreement._digest([FIRST]) not in seen


def test_one_process_compares_and_describes_nothing(monkeypatch):
    monkeypatch.setattr(engine_module, "EngineAgreement", lambda *_: pytest.fail("an engine that is alone agrees"))
    with model_folders.one_thread():
        engine = kvkeep.Engine(*kvkeep.load(device="cpu"), budget=16)
    assert len(engine.generate([Request(prompt=(3, 4), sampling=SamplingParams(max_new_tokens=1))])) == 1


def test_stop_texts_may_be_a_set_whose_order_differs_between_processes():
    texts = tuple(f"word {n}" for n in range(9))
    assert described(generation(stop=texts)) == described(generation(stop=texts[::-1] + texts[:1]))
    assert described(generation(stop=texts)) != described(generation(stop=texts[1:]))


def told(agreement, *live):
    """The number of these requests, and what the other processes would get to read."""
    number = agreement._digest(live)
    return number, {"engine": {}, "requests": json.loads(json.dumps(agreement._requests()))}


@pytest.fixture
def agreement():
    return EngineAgreement(Heads(0, 2), torch.device("cpu"), {})


def test_a_process_that_has_taken_other_steps_is_found(agreement):
    """As with two engines on one model, which two processes step in different orders."""
    one = generation()
    before, asked = told(agreement, one)
    one.fed = 3
    middle, _ = told(agreement, one)
    one.token_ids.append(7)
    after, reached = told(agreement, one)
    assert len({before, middle, after}) == 3
    assert difference([reached, asked]) == (
        "Request 0 differs: `tokens that were read` is 3 in process 0 and 0 in process 1."
    )


def test_a_turn_is_compared_again_once_its_prompt_is_known(agreement):
    """A session's turn that waits for another one has no token ids yet, and keeps its number."""
    waits = generation(ids=None, messages=[{"role": "user", "content": "a"}])
    number, _ = told(agreement, waits)
    first, second = (told(agreement, generation(ids=ids))[0] for ids in ((3, 4), (3, 5)))
    assert len({number, first, second}) == 3


@pytest.mark.slow
def test_pins_of_a_session_in_one_process_alone_are_found(monkeypatch):
    """They change which tokens it keeps, and neither its prompt nor its request."""
    with model_folders.one_thread():
        engine = kvkeep.Engine(*kvkeep.load(device="cpu"), policy="local", budget=16, rows=1)
    monkeypatch.setattr(Heads, "alike", lambda self, number, device: True)
    monkeypatch.setattr(Heads, "first", lambda self, numbers: numbers)
    with engine, engine.session() as session:
        engine._agreement = EngineAgreement(Heads(0, 2), torch.device("cpu"), {})
        found = []
        session.ask(Request(prompt=(3, 4, 5, 6), sampling=SamplingParams(max_new_tokens=1)))
        before = session.snapshot()
        for pins in ((), ((0, 3),)):
            session.rewind(before)
            session.pin(pins)
            session.ask(Request(prompt=(7, 8), sampling=SamplingParams(max_new_tokens=1)))
            found.append(engine._agreement._known[0].asked)
    one, two = found
    assert {name for name in one if one[name] != two[name]} == {"number", "pins in memory"}


def test_texts_of_different_lengths_reach_all(monkeypatch):
    sent = ["a longer text, ü", "b"]

    def gathered(self, mine):
        if mine.ndim == 0:
            return [torch.tensor(len(one.encode())) for one in sent]
        padded = [one.encode().ljust(len(mine), b"\0") for one in sent]
        assert bytes(mine.tolist()) == padded[self.rank]
        return [torch.tensor(list(one), dtype=torch.uint8) for one in padded]

    monkeypatch.setattr(Heads, "_gathered", gathered)
    for rank in range(2):
        assert Heads(rank, 2).texts(sent[rank], torch.device("cpu")) == sent
    assert Heads().texts("a", torch.device("cpu")) == ["a"]


def test_an_engine_compares_before_it_runs_anything(monkeypatch):
    """As one of two processes, of which the other has another prompt."""
    with model_folders.one_thread():
        engine = kvkeep.Engine(*kvkeep.load(device="cpu"), budget=16)
    engine._agreement = EngineAgreement(Heads(0, 2), torch.device("cpu"), {})
    monkeypatch.setattr(Heads, "alike", lambda self, number, device: False)
    theirs = process(generation(0, (7, 8)))
    monkeypatch.setattr(Heads, "texts", lambda self, mine, device: [mine, json.dumps({**json.loads(mine), **theirs})])
    theirs["engine"] = engine._agreement._settings
    monkeypatch.setattr(engine._runner, "run", lambda *_: pytest.fail("a step ran"))
    with pytest.raises(InputError, match=r"Request 0 differs: token 0 of its prompt is 3 in process 0 and 7"):
        engine.generate([Request(prompt=(3, 4))])
    assert not engine.busy


ONE, TWO = {"length": 20, "sampling": {"max_new_tokens": 6}}, {"length": 31, "sampling": {"max_new_tokens": 3}}

CASES = [
    ({"asked": [[ONE], [{**ONE, "length": 21}]]}, "Request 0 differs: token 0 of its prompt is"),
    ({"asked": [[ONE, TWO], [TWO, ONE]]}, "Request 0 of process 0 is request 1 of process 1: their order differs."),
    ({"asked": [[ONE, TWO], [ONE]]}, "Process 0 has request 1, and process 1 does not."),
    ({"asked": [[ONE], [ONE, TWO]]}, "Process 1 has request 1, and process 0 does not."),
    ({"asked": [[ONE, ONE, ONE, TWO], [ONE, ONE, ONE]]}, "Process 0 has request 3, and process 1 does not."),
    (
        {"asked": [[ONE], [{**ONE, "sampling": {"max_new_tokens": 6, "temperature": 0.5}}]]},
        "Request 0 differs: `temperature` is 0.0 in process 0 and 0.5 in process 1.",
    ),
    ({"asked": [[ONE], [{**ONE, "policy": "tova"}]]}, "Request 0 differs: `policy` is"),
    (
        {"asked": [[ONE], [ONE]], "options": [{}, {"prefill_chunk": 8}]},
        "The engines have different options: `prefill_chunk` is None in process 0 and 8 in process 1.",
    ),
]


@pytest.mark.slow
def test_two_processes_with_different_requests_say_how_they_differ(tmp_path):
    """A prompt, the order, the number, the sampling, the policy, options of the engine; afterwards all works again."""
    folder = ranks.save_model(tmp_path)
    cases = [case for case, _ in CASES]
    one, two = ranks.run(2, ranks.disagree, folder, cases)
    assert one == two
    for (_, said), found in zip(CASES, one, strict=False):
        assert str(found).startswith(said), found
        assert str(found).endswith("Give all processes the same options, and the same requests in the same order.")
    (alone,) = ranks.run(1, ranks.disagree, folder, [])
    assert one[-1] == alone[-1]


@pytest.mark.slow
def test_a_request_that_one_process_cancels_is_missed(tmp_path):
    found = ranks.run(2, ranks.cancel_in_one, ranks.save_model(tmp_path))
    assert [one.partition(".")[0] for one in found] == ["Process 0 has request 0, and process 1 does not"] * 2


@pytest.mark.slow
def test_a_process_that_ends_is_missed(tmp_path):
    alone, _ = ranks.run(2, ranks.leave_others, ranks.save_model(tmp_path))
    assert "have lost each other" in alone
