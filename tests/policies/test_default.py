"""The policy that is used where none is named: one place names it, and it keeps what it promises."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.eval import EvalOptions
from kvkeep.cli.main import app
from kvkeep.cli.plan import PlanOptions
from kvkeep.planning.plan import plan
from kvkeep.policies import CONVERSATION, DEFAULT, FALLBACK, LATER
from kvkeep.policies.registry import label


@pytest.mark.parametrize("place", [kvkeep.BoundedCache, kvkeep.Engine, plan, PlanOptions])
def test_everything_that_takes_a_policy_has_the_same_default(place):
    assert inspect.signature(place).parameters["policy"].default == DEFAULT


def test_a_prompt_without_a_memory_has_the_same_default(monkeypatch):
    """After a memory the policy is the memory's, so the option itself has no default."""
    asked = []
    monkeypatch.setattr("kvkeep.cli.generate_run.serve", asked.append)
    done = CliRunner().invoke(app, ["generate", "-p", "Once"])
    assert done.exit_code == 0, done.output
    assert (asked[0].policy, asked[0].names_policy) == (DEFAULT, False)


def test_an_evaluation_measures_the_default():
    assert inspect.signature(EvalOptions).parameters["policies"].default.endswith(f",{DEFAULT}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (DEFAULT, "snapkv:decode=score,window=8,kernel=13,recent=64"),
        (LATER, "reread:equal=0.2"),
        (CONVERSATION, "reread:recent=64,equal=0.2,decode=score"),
        (FALLBACK, "keydiff:recent=8,sinks=4"),
    ],
)
def test_people_read_a_short_name_and_files_have_the_options(name, options):
    assert kvkeep.spec(kvkeep.parse(name)) == options
    assert label(kvkeep.parse(name)) == label(options) == str(kvkeep.parse(options)) == name
    assert len(name) <= 16
    kept = kvkeep.parse(f"{name},keep_prompt=0.5")
    assert (str(kept), kvkeep.parse(str(kept))) == (f"{name},keep_prompt=0.5", kept)


def test_its_name_is_known_without_torch():
    code = "import sys; from kvkeep.policies import DEFAULT; print(DEFAULT, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [DEFAULT, "False"]


@pytest.mark.parametrize("budget", [1, 9, 64, 1024])
def test_the_newest_tokens_stay(budget):
    assert kvkeep.parse(DEFAULT).protected(budget) == (0, min(64, budget // 2))


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_a_budget_of_any_size_works(budget):
    """A share of a short prompt is a small budget, and nobody chose the policy that would refuse it."""
    model = small()
    for options in ({}, {"prefill_chunk": 4}):
        cache = kvkeep.BoundedCache(model.config, budget=budget, **options)
        model.generate(torch.arange(3, 33)[None], past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert all(int((cache.positions(layer) >= 0).sum(-1).max()) <= budget for layer in cache.bounded_layers())


@pytest.mark.parametrize("positions", ["true", "slot"])
@pytest.mark.parametrize("layer_budget", [None, "ramp:0.2", "pyramid:4"])
@pytest.mark.parametrize("chunk", [None, 3, 50])
def test_it_works_with_every_option_of_a_cache(positions, layer_budget, chunk):
    model, options = small(), {"positions": positions, "layer_budget": layer_budget, "prefill_chunk": chunk}
    ids = torch.arange(3, 73).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :65] = 0  # the prompt of the first row is shorter than the observation window
    for budget in (1, 17, 130):
        cache = kvkeep.BoundedCache(model.config, budget=budget, **options)
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
        for number, layer in cache.bounded_layers().items():
            assert int((cache.positions(number) >= 0).sum(-1).max()) <= max(layer.budgets)


def test_requests_of_the_engine_may_mix_it_with_other_policies_and_budgets():
    asked = [(1, None, None), (300, 7, None), (5, 32, "h2o"), (40, 1, None), (40, 31, "adakv:window=3")]
    requests = [
        kvkeep.Request(
            prompt=list(range(3, 53)) * (n // 50) + list(range(3, 3 + n % 50)),
            budget=budget,
            policy=policy,
            sampling=kvkeep.SamplingParams(max_new_tokens=4),
        )
        for n, budget, policy in asked
    ]
    model = small()
    together = kvkeep.Engine(model, budget=32, rows=3).generate(requests)
    alone = [kvkeep.Engine(model, budget=32, rows=1).generate(request)[0] for request in requests]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]


@pytest.mark.parametrize("positions", ["true", "slot"])
def test_turns_of_a_chat_stay_in_the_budget(positions):
    """Also a turn of a single token, which is a prompt shorter than the observation window."""
    model = small()
    cache = kvkeep.BoundedCache(model.config, budget=20, positions=positions)
    ids = list(range(3, 60))
    for turn in ([*range(10, 40)], [7]):
        new = cache.continue_with(ids := [*ids, *turn])
        out = model.generate(**new, max_new_tokens=5, do_sample=False)[0].tolist()
        ids = ids + out[new["input_ids"].shape[1] :]
        assert all(int((cache.positions(n) >= 0).sum(-1).max()) <= 20 for n in cache.bounded_layers())


@pytest.mark.slow
def test_it_answers_the_question_at_the_end_of_a_prompt(tmp_path):
    """Few questions, so the limits are wide; docs/choose-a-policy.md has the figures of many."""
    options = "--tasks recall --context 512 --limit 12 --budgets 20% --no-plots --json"
    asked = ["eval", *options.split(), "--policies", f"{DEFAULT},h2o", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    right = {row["policy"]: row["score"]["right"] for row in json.loads(done.stdout)["rows"]}
    assert right[kvkeep.spec(kvkeep.parse(DEFAULT))] >= 7 > 4 >= right["h2o"]


@pytest.mark.slow
def test_a_long_answer_stays_in_the_budget():
    model = small()
    cache = kvkeep.BoundedCache(model.config, budget=64)
    model.generate(torch.arange(3, 93)[None], past_key_values=cache, max_new_tokens=300, do_sample=False)
    for layer in cache.bounded_layers():
        for head in cache.positions(layer)[0]:
            held = head[head >= 0].sort().values
            assert len(held) == 64
            assert held[-32:].tolist() == list(range(90 + 299 - 32, 90 + 299))


def small():
    """A model with random weights that never ends a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return kvkeep.attach(model)
