"""Generations under policies: the same draws as plain loops, and readings of constructed numbers."""

import math

import pytest
import torch
from constructed import Axes, context
from uniform_model import subject, tokens, unlimited, writer

from kvkeep.engine.sampler import choose
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models.generation_config import ends_of
from kvkeep_lab.analysis.groups import diversity
from kvkeep_lab.analysis.groups.diversity import WrittenDiversity

PROMPTS, NEW = 3, 5


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(diversity, "PROMPTS", PROMPTS)
    monkeypatch.setattr(diversity, "PROMPT", 16)
    monkeypatch.setattr(diversity, "NEW", NEW)


def ends():
    """The tokens that end a text of the model: those of its configuration and the tokenizer's."""
    return ends_of(writer().model, writer().checkpoint.tokenizer)


@torch.inference_mode()
def in_loops(of, prompts, seed, banned=()):
    """Every text alone, without any cache."""
    texts = []
    for row, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=diversity.TEMPERATURE, seed=seed * PROMPTS + row)
        ids = prompt[None]
        for step in range(NEW):
            logits = of.model(input_ids=ids, use_cache=False).logits[:, -1]
            logits[:, list(banned)] = -torch.inf
            ids = torch.cat([ids, choose(logits, [sampling], torch.tensor([step]))[:, None]], dim=1)
        texts.append(ids[0, prompts.shape[1] :].tolist())
    return texts


@pytest.mark.usefixtures("short")
def test_a_policy_that_drops_nothing_writes_what_the_model_writes():
    prompts = tokens(48).view(3, 16)
    expected = in_loops(writer(), prompts, seed=2, banned=ends())
    for policy in ("full", "h2o", "local"):
        assert diversity.continuations(writer(), policy, 24, prompts, seed=2) == expected
    assert diversity.continuations(writer(), "full", 24, prompts, seed=3) != expected
    assert diversity.continuations(writer(), "local", 4, prompts, seed=2) != expected


@pytest.mark.usefixtures("short")
def test_tokens_that_end_a_text_are_never_drawn(monkeypatch):
    prompts = tokens(48).view(3, 16)
    drawn = in_loops(writer(), prompts, seed=0, banned=ends())[0][0]
    monkeypatch.setattr(writer().model.generation_config, "eos_token_id", drawn)
    texts = diversity.continuations(writer(), "full", 24, prompts, seed=0)
    assert texts == in_loops(writer(), prompts, seed=0, banned=ends())
    assert all(drawn not in text and len(text) == NEW for text in texts)


def test_numbers_of_known_texts():
    texts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [7, 8, 7, 8, 7, 8]]
    found = diversity.described(texts)
    assert found["self_bleu"]["2"] == pytest.approx(2 / 3)
    assert found["bleus"] == diversity.self_bleu(texts, 4, smooth=True)
    assert found["self_bleu_smooth"]["4"] == pytest.approx(sum(found["bleus"]) / 3)
    assert found["distinct"]["1"] == pytest.approx(8 / 18)
    assert found["repeated"]["2"] == pytest.approx((0 + 0 + 3 / 5) / 3)


def test_difference_is_paired():
    mean, error = diversity.difference([0.3, 0.5, 0.4], [0.2, 0.4, 0.3])
    assert mean == pytest.approx(0.1)
    assert error == pytest.approx(0.0, abs=1e-12)
    mean, error = diversity.difference([1.0, 3.0], [0.0, 0.0])
    assert (mean, error) == pytest.approx((2.0, 1.0))  # deviation √2 over √2 texts


def test_the_difference_of_one_prompt_may_be_chance():
    assert diversity.difference([1.0], [0.25]) == (0.75, math.inf)
    assert WrittenDiversity.reading(made(full=[0.1], h2o=[0.1], local=[0.9])).verdict == "cannot tell"


@pytest.mark.usefixtures("short")
def test_all_policies_write(monkeypatch):
    monkeypatch.setattr(diversity, "BUDGET", 0.7)  # AhaKV protects 32 recent tokens by itself
    monkeypatch.setattr(diversity, "PROMPT", 48)
    text = tokens(200)
    measurement = WrittenDiversity(context(text))
    measurement.runs(subject(unlimited(writer()), text), lambda share: None)
    result = measurement.result()
    assert list(result["policies"]) == list(diversity.POLICIES)
    assert result["budget"] == int(0.7 * 53)
    axes = Axes()
    WrittenDiversity.draw(result, axes)
    assert sum(name == "plot" for name, _, _ in axes.calls) == 2
    assert f"{result['policies']['h2o']['self_bleu_smooth']['4']:.3f}" in WrittenDiversity.reading(result).here


def made(**bleus):
    one = {
        name: {"bleus": values, "self_bleu_smooth": {"4": 0.0}, "repeated": {"3": 0.0}}
        for name, values in bleus.items()
    }
    return {"prompts": 4, "new_tokens": 8, "policies": one}


@pytest.mark.parametrize(
    ("h2o", "local", "verdict"),
    [
        ([0.1, 0.2, 0.1, 0.2], [0.5, 0.7, 0.6, 0.6], "agree"),
        ([0.5, 0.7, 0.6, 0.6], [0.5, 0.7, 0.6, 0.6], "differ"),
        ([0.1, 0.2, 0.1, 0.2], [0.1, 0.3, 0.1, 0.1], "cannot tell"),
    ],
)
def test_verdicts(h2o, local, verdict):
    assert WrittenDiversity.reading(made(full=[0.1, 0.2, 0.2, 0.1], h2o=h2o, local=local)).verdict == verdict
