"""Heads with budgets of their own in an engine: rows of other splits share a batch, and cost the same."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import kvkeep
from kvkeep import BoundedCache, BudgetError, InputError, UnsupportedOperationError
from kvkeep.budget import by_head
from kvkeep.engine import Engine, Request
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.models.weight_hash import fingerprint
from kvkeep.types import Phase

from .models import DEVICE, model
from .test_equal import prompt_of

KINDS = ["h2o:recent=2", "snapkv:window=4", "leverage:sinks=1,recent=2", "adakv:window=4", "streaming_llm:sinks=2"]
BUDGET, NEW = 10, 9


@pytest.fixture
def profile(tmp_path):
    """A profile of the test model: three layers of two heads, of which some need nothing."""
    config = model("llama").config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    needs = [[1.0 if (layer + head) % 2 else 0.1 * layer for head in range(heads)] for layer in range(layers)]
    facts = {"model_type": config.model_type, "layers": layers, "kv_heads": heads}
    file = tmp_path / "profile.json"
    content = {"format": "kvkeep-profile", "version": 1, "model": facts, "weights": None, "heads": needs, "least": 4}
    file.write_text(json.dumps({**content, "measured": {}}))
    return f"profile:{file}"


def test_a_profile_of_other_weights_is_refused(profile):
    """Those of a model of the same shape, such as the same one after fine-tuning."""
    file, own = Path(profile.partition(":")[2]), fingerprint(model("llama"))
    known = json.loads(file.read_text())
    for weights in (own, None, "abc"):
        file.write_text(json.dumps({**known, "weights": weights}))
        for use in (
            lambda: alone(prompt_of(0, 12), "leverage", profile),
            lambda: Engine(model("llama"), policy="leverage", budget=BUDGET, rows=1, head_budget=profile),
        ):
            if weights == "abc":
                with pytest.raises(InputError, match=f"belongs to other weights .abc, here {own}"):
                    use()
            else:
                use()


def alone(prompt, policy, rule, *, budget=BUDGET, chunk=None, new=NEW, kv_bits=None):
    """What `model.generate` writes for one prompt."""
    net, ids, slots = model("llama"), torch.tensor([prompt], device=DEVICE), {"head_budget": rule, "kv_bits": kv_bits}
    if chunk and rule and rule.startswith("global"):
        return by_hand(ids, BoundedCache(net.config, policy, budget, **slots), chunk=chunk, new=new)
    cache = BoundedCache(net.config, policy, budget, prefill_chunk=chunk, **slots)
    out = net.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, eos_token_id=None)
    return tuple(out[0, len(prompt) :].tolist()), cache


@torch.inference_mode()
def by_hand(ids, cache, *, chunk, new):
    """The same where chunks go through all layers one after the other."""
    cache.phase, found = Phase.PREFILL, []
    for piece in ids.split(chunk, dim=1):
        logits = model("llama")(input_ids=piece, past_key_values=cache, use_cache=True).logits
    cache.phase = Phase.DECODE
    while len(found) < new:
        found.append(int(logits[0, -1].argmax()))
        logits = model("llama")(
            input_ids=torch.tensor([found[-1:]], device=DEVICE), past_key_values=cache, use_cache=True
        ).logits
    return tuple(found), cache


def run(engine, requests):
    numbers, found = [engine.add(request) for request in requests], {}
    while engine.busy:
        found |= {event.id: event.result.token_ids for event in engine.step() if event.result}
    return [found[number] for number in numbers]


def asked(policies, budgets=(BUDGET,)):
    return [
        Request(
            prompt=prompt_of(i, 12 + 7 * i % 23),
            sampling=SamplingParams(max_new_tokens=NEW),
            policy=policy,
            budget=budgets[i % len(budgets)],
            ignore_end=True,
        )
        for i, policy in enumerate(policies)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kind", ["ada:0.1", "global:0.1", "profile"])
def test_a_row_gets_what_it_gets_alone_beside_other_policies_and_splits(kind, chunk, profile):
    rule = profile if kind == "profile" else kind
    requests = asked(KINDS * 2, budgets=(BUDGET, BUDGET - 2))
    engine = Engine(model("llama"), policy=KINDS[0], budget=BUDGET, rows=3, prefill_chunk=chunk, head_budget=rule)
    for request, got in zip(requests, run(engine, requests), strict=True):
        assert got == alone(request.prompt, request.policy, rule, budget=request.budget, chunk=chunk)[0]


@pytest.mark.parametrize("policy", KINDS)
def test_a_row_costs_what_equal_heads_cost(policy, profile):
    """Apart from the table of ranges, two slots that are rounded up to, and one entry of no head in each layer."""
    net = model("llama")
    sizes = {
        rule: KVManager(net, kvkeep.parse(policy), 40, head_budget=rule).row_bytes
        for rule in ("uniform", "ada", profile)
    }
    heads, layers = net.config.num_key_value_heads, net.config.num_hidden_layers
    slot = 2 * 4 * (net.config.hidden_size // net.config.num_attention_heads) + 4 + 4 * len(kvkeep.parse(policy).slots)
    assert sizes["ada"] == sizes["uniform"] + layers * (slot + 24 * heads)
    assert sizes["ada"] <= sizes[profile] <= sizes["ada"] + layers * heads * slot


@pytest.mark.parametrize("rule", ["ada:0.1", "global:0.1", "profile"])
def test_bytes_do_not_depend_on_the_split(rule, profile):
    held = set()
    for seed in range(4):
        _, cache = alone(prompt_of(seed, 40), "snapkv:window=4", profile if rule == "profile" else rule)
        held.add(cache.memory().allocated_bytes)
        for layer in cache.bounded_layers().values():
            assert isinstance(layer.store, PooledStore)
            assert int(layer.block.held().sum()) <= int(layer.block.budget.sum())
    assert len(held) == 1


@pytest.mark.parametrize("policy", KINDS)
def test_a_budget_that_holds_everything_is_the_full_cache(policy):
    prompt = prompt_of(2, 25)
    assert alone(prompt, policy, "ada", budget=40)[0] == alone(prompt, "full", None, budget=40)[0]


def test_a_profile_decides_the_budget_of_every_head(profile):
    _, cache = alone(prompt_of(1, 60), "h2o:recent=2", profile, budget=20)
    budgets = torch.stack([layer.block.budget[0] for layer in cache.bounded_layers().values()])
    assert int(budgets.sum()) == 20 * budgets.numel()
    assert budgets.unique().numel() > 2
    held = torch.stack([layer.block.held()[0] for layer in cache.bounded_layers().values()])
    assert torch.equal(held, budgets.clamp(max=60 + NEW - 1))


def near(tokens, pins=(), *, slots=8, sinks=2):
    """The tokens that a head without need holds: the first, the pinned and the newest ones."""
    held = {*range(sinks), *(at for span in pins for at in range(*span))}
    newest = [at for at in range(tokens - 1, -1, -1) if at not in held]
    return sorted(held | set(newest[: slots - len(held)]))


@pytest.fixture
def limits(tmp_path):
    """A profile of the test model in which the first layer, and one head of each other layer, need nothing."""
    return limiting(tmp_path / "limits.json")


def limiting(file, *, least=8, sinks=2, heads=None):
    config = model("llama").config
    layers, width = config.num_hidden_layers, config.num_key_value_heads
    needs = heads or [[float(bool(layer) and not head) for head in range(width)] for layer in range(layers)]
    facts = {"model_type": config.model_type, "layers": layers, "kv_heads": width}
    content = {"format": "kvkeep-profile", "version": 1, "model": facts, "weights": None, "heads": needs}
    file.write_text(json.dumps({**content, "least": least, "sinks": sinks, "measured": {}}))
    return f"profile:{file}"


def held_by_head(cache):
    """The positions in the slots of each head, by layer and head."""
    return {
        (number, head): sorted(at for at in row.tolist() if at >= 0)
        for number in cache.bounded_layers()
        for head, row in enumerate(cache.positions(number)[0])
    }


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(
    "policy", [*KINDS, "blend:sinks=1,recent=2", "knorm", "random", "snapkv:window=3,decode=score"]
)
def test_a_head_without_need_holds_its_first_and_newest_tokens_under_every_policy(policy, chunk, limits):
    _, cache = alone(prompt_of(3, 50), policy, limits, budget=12, chunk=chunk)
    for (layer, head), held in held_by_head(cache).items():
        if layer == 0 or head:
            assert held == near(50 + NEW - 1), (layer, head)
        else:
            assert len(held) > 12


@dataclass(frozen=True, kw_only=True)
class Halves(kvkeep.Policy):
    """Scores in half precision, in which large positions are not told apart, and NaN."""

    def score(self, view, state):
        return (view.positions % 3).bfloat16().masked_fill(view.positions % 5 == 0, math.nan)


def test_a_policy_with_scores_in_half_precision_changes_nothing_for_a_head_without_need(limits):
    assert held_by_head(alone(prompt_of(3, 400), Halves(), limits, budget=12)[1])[0, 0] == near(400 + NEW - 1)


@pytest.mark.parametrize("policy", ["snapkv:window=3", "leverage:sinks=1,recent=2"])
def test_pins_stay_in_a_head_without_need(policy, limits):
    net, prompt, pins = model("llama"), torch.tensor([prompt_of(3, 50)], device=DEVICE), [(10, 13)]
    cache = BoundedCache(net.config, policy, 12, head_budget=limits, pins=pins)
    net.generate(prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert held_by_head(cache)[0, 0] == near(50 + NEW - 1, pins)


@pytest.mark.parametrize("budget", [4, 7])
def test_a_budget_too_small_for_a_profile_gives_the_policy_all_heads(budget, limits):
    prompt, policy = prompt_of(5, 40), "leverage:sinks=1,recent=2"
    assert alone(prompt, policy, limits, budget=budget)[0] == alone(prompt, policy, None, budget=budget)[0]


def test_the_limits_of_a_profile_do_not_follow_a_policy_to_another_cache(limits):
    net, prompt = model("llama"), prompt_of(5, 40)
    with_limits = BoundedCache(net.config, "knorm", 12, head_budget=limits).policy
    assert with_limits.near is not None
    assert BoundedCache(net.config, with_limits, 12).policy.near is None
    assert alone(prompt, with_limits, None, budget=12)[0] == alone(prompt, "knorm", None, budget=12)[0]


def test_more_first_tokens_than_slots_leave_one_slot_for_the_newest(tmp_path):
    rule = limiting(tmp_path / "f.json", least=5, sinks=64)
    held = held_by_head(alone(prompt_of(5, 40), "knorm", rule, budget=12)[1])
    assert held[0, 1] == near(40 + NEW - 1, slots=5, sinks=4)


@pytest.mark.long
def test_rows_with_budgets_above_and_below_the_limit_share_a_batch(limits):
    requests = asked(KINDS, budgets=(BUDGET, 6, 14))
    engine = Engine(model("llama"), policy=KINDS[0], budget=14, rows=3, head_budget=limits)
    for request, got in zip(requests, run(engine, requests), strict=True):
        assert got == alone(request.prompt, request.policy, limits, budget=request.budget)[0]


def test_alpha_1_is_uniform():
    prompt = prompt_of(4, 40)
    assert alone(prompt, "snapkv:window=4", "ada:1")[0] == alone(prompt, "snapkv:window=4", None)[0]
    assert alone(prompt, "snapkv:window=4", "ada:0.2")[0] == alone(prompt, "adakv:window=4", None)[0]
    assert alone(prompt, "adakv:window=4", "uniform")[0] == alone(prompt, "snapkv:window=4", None)[0]


def from_a_file(file, one, other):
    """A memory of an engine, and the memory that it is in a file. Both go on alike, there and in another engine."""
    sampling, text = SamplingParams(max_new_tokens=8), prompt_of(3, 30)
    with one.session() as session:
        session.read(text)
        snapshot = session.snapshot()
        snapshot.save(file)
        again = kvkeep.Snapshot.load(file)
        wanted = [run(one, [Request(prompt=(5, 6), snapshot=held, sampling=sampling)]) for held in (snapshot, again)]
    assert wanted[0] == wanted[1] == run(other, [Request(prompt=(5, 6), snapshot=again, sampling=sampling)])
    return snapshot, again


@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize("kind", ["ada:0.1", "global:0.1", "profile"])
def test_memory_goes_on_bit_for_bit_from_a_file(policy, kind, profile, tmp_path):
    rule = profile if kind == "profile" else kind
    engines = (Engine(model("llama"), policy=policy, budget=BUDGET, head_budget=rule) for _ in range(2))
    snapshot, again = from_a_file(tmp_path / "file", *engines)
    cache = BoundedCache.from_snapshots(model("llama").config, [again, snapshot])
    found = [tuple(layer.block.budget[0].tolist()) for layer in cache.bounded_layers().values()]
    assert found == by_head([layer.budget for layer in again.contents.layers], len(found[0]))
    with pytest.raises(kvkeep.SnapshotError, match="head_budget"):
        BoundedCache(model("llama").config, policy, BUDGET).restore(0, again)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("spatten", "its heads decide together"),
        ("tova", "its heads decide together"),
        ("scissorhands", "it drops tokens of all heads of a layer at once"),
        ("full", "it never evicts"),
    ],
)
@pytest.mark.parametrize("kind", ["ada", "global", "profile"])
def test_policies_to_which_head_budgets_mean_nothing_are_refused_by_name(policy, why, kind, profile):
    rule = profile if kind == "profile" else kind
    with pytest.raises(UnsupportedOperationError, match=f"{policy} cannot have budgets per head: {why}"):
        BoundedCache(model("llama").config, policy, 40, head_budget=rule)
    engine = Engine(model("llama"), policy="h2o", budget=40, head_budget=rule)
    with pytest.raises(UnsupportedOperationError, match=policy):
        engine.add(Request(prompt=(1, 2, 3), policy=policy))
    BoundedCache(model("llama").config, policy, 40, head_budget="uniform")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("adakv", r"Unknown head budget 'adakv'; use uniform, ada:0\.2, global:0\.2 or profile:FILE"),
        ("ada:much", "'much' is not a number; write for example ada:0.2"),
        ("ada:1.5", "is out of range: the share that is divided equally lies between 0 and 1"),
        ("ada:nan", "is out of range"),
        ("uniform:1", "Unknown head budget"),
        ("profile:", "Unknown head budget"),
        ("", "Unknown head budget"),
    ],
)
def test_wrong_rules_are_refused(rule, message):
    with pytest.raises(BudgetError, match=message):
        BoundedCache(model("llama").config, "h2o", 40, head_budget=rule)


def test_profiles_that_do_not_fit_are_refused(profile, tmp_path):
    config = model("llama").config
    with pytest.raises(InputError, match="A profile gives every layer its budget: leave out `layer_budget`"):
        BoundedCache(config, "h2o", 40, head_budget=profile, layer_budget="ramp:0.2")
    with pytest.raises(InputError, match="A profile gives every layer its budget: leave out `layer_budget`"):
        BoundedCache(config, "h2o", 40, head_budget=profile, layer_budget="sliding:0.5")
    # a memory says its policy's own rule for layers
    assert BoundedCache(config, "reread:later", 40, head_budget=profile, layer_budget="sliding:0.25")
    with pytest.raises(InputError):
        BoundedCache(config, "h2o", 40, head_budget=f"profile:{tmp_path / 'nothing'}")
    with pytest.raises(InputError, match="belongs to another model"):
        BoundedCache(model("qwen3").config, "h2o", 40, head_budget=profile)
    with pytest.raises(BudgetError):
        BoundedCache(config, "snapkv", 20, head_budget=profile)  # its window alone is larger


def test_a_guard_is_refused_under_a_profile_alone(profile):
    for rule in ("ada", "global", "uniform", profile):
        engine = Engine(model("llama"), policy="h2o", budget=40, head_budget=rule)
        request = Request(prompt=prompt_of(1, 60), guard=0.1)
        if rule != profile:
            engine.add(request)
        else:
            with pytest.raises(InputError, match="a profile gives each head its own"):
                engine.add(request)


def test_rows_that_are_not_made_for_head_budgets_take_none():
    rows = KVManager(model("llama"), kvkeep.parse("local"), BUDGET)
    rows.allocate(2)
    assert not rows.takes(kvkeep.parse("adakv:window=4"))
    rows = KVManager(model("llama"), kvkeep.parse("adakv:window=4"), BUDGET)
    rows.allocate(2)
    assert rows.takes(kvkeep.parse("h2o:recent=2"))


def test_beams_and_reset_move_ranges_with_their_rows():
    net, ids = model("llama"), torch.tensor([prompt_of(7, 30), prompt_of(8, 30)], device=DEVICE)
    cache = BoundedCache(net.config, "h2o:recent=2", BUDGET, head_budget="ada:0.1")
    first = net.generate(ids, past_key_values=cache, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None)
    cache.reset()
    again = net.generate(ids, past_key_values=cache, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None)
    assert torch.equal(first, again)


def test_a_policy_whose_heads_hold_equally_many_tokens_waits_for_rows_without_a_pool():
    engine = Engine(model("llama"), policy="h2o", budget=14, rows=3, prefill_chunk=3)
    requests = [
        Request(prompt=prompt_of(0, 1), sampling=SamplingParams(max_new_tokens=1), policy=policy, budget=8)
        for policy in ("h2o", "h2o", "h2o", "adakv:window=4", "scissorhands")
    ]
    assert [result.finish_reason for result in engine.generate(requests)] == ["length"] * 5
