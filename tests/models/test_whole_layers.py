"""All layers in one call of the native kernel: the same bits and the same slots as in two calls each and attention."""

import copy
import gc
import inspect
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_prepare import fused_copy, made
from transformers import DynamicCache
from transformers.models.opt import modeling_opt

import kvkeep
from kvkeep.backends.native import layer_ops, native
from kvkeep.backends.native.layer_ops import ModelStep
from kvkeep.cache.decode_replay import DecodePaths
from kvkeep.cache.hf_layers import handed
from kvkeep.kv.block import Block
from kvkeep.kv.joint_block import PartBlock
from kvkeep.policies import DEFAULT

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

POLICIES = ("h2o", "local", "streaming_llm", "full", "h2o:decay=0.9", DEFAULT, "scissorhands")
OF_LATER = ("snapkv", "reread", "reread:later", "reread:chat", "adakv:window=8", "pyramidkv:window=8", "ahakv")
"""Policies whose generated tokens slide, whose heads share slots, or whose rows have numbers of their own."""


CALLS = []
"""An entry for each layer that was computed in one call with the others since `attached`."""


@pytest.fixture
def calls(monkeypatch):
    honest = ModelStep.__call__

    def call(self, *args):
        done = honest(self, *args)
        CALLS.extend([1] * self._count * done)
        return done

    monkeypatch.setattr(ModelStep, "__call__", call)
    return CALLS


def attached(name="llama", dtype=torch.float32, **options):
    """A fused model that has been compared with its class."""
    plain = made(name, **options)
    for weight in plain.parameters():  # not the buffers: a checkpoint's frequencies stay in float32
        weight.data = weight.data.to(dtype)
    model = kvkeep.attach(fused_copy(plain)[0])
    cache = kvkeep.BoundedCache(model.config, "h2o", 8)
    with torch.no_grad():
        for _ in range(3):
            model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)
    CALLS.clear()
    return model


def cache_of(model, policy="h2o", *, repeats=True, **options):
    cache = kvkeep.BoundedCache(model.config, policy, **{"budget": 70 if policy == "full" else 20, **options})
    for layer in cache.bounded_layers().values() if not repeats else ():
        layer.paths.may_record = lambda *_, **__: False
    return cache


def content(cache):
    """All that the layers of a cache hold."""
    return [
        {**layer.block.per_row(), "columns": torch.tensor(layer.columns), "broken": torch.tensor(layer.broken)}
        for layer in cache.bounded_layers().values()
        if layer.allocated
    ]


def assert_equal(one, other):
    for mine, its in zip(content(one), content(other), strict=True):
        for name, tensor in mine.items():
            assert torch.equal(tensor.nan_to_num(), its[name].nan_to_num()), name


class Pair:
    """Two caches of one model, which get the same tokens; one of them is told everything in each step."""

    def __init__(self, model, *args, rows=3, **options):
        self.model, self.rows, self.seed = model, rows, 0
        self.caches = [cache_of(model, *args, repeats=repeats, **options) for repeats in (True, False)]

    def feed(self, T=1, **more):
        draw = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        ids = torch.randint(3, 90, (self.rows, T), generator=draw)
        outs = [self.outcome(cache, ids, more) for cache in self.caches]
        if isinstance(outs[0], torch.Tensor):
            assert torch.equal(*outs)
        else:
            assert outs[0] == outs[1]
        assert_equal(*self.caches)
        return outs[0]

    def outcome(self, cache, ids, more):
        try:
            with torch.no_grad():
                return self.model(ids, **handed(self.model, cache), use_cache=True, **more).logits
        except kvkeep.KVKeepError as error:
            return f"{type(error)} {error}"

    def both(self, change):
        for cache in self.caches:
            change(cache)


def test_a_model_of_one_layer(calls):
    pair = Pair(attached(num_hidden_layers=1))
    pair.feed(9)
    for _ in range(20):
        pair.feed()
    assert len(calls) > 10


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "opt"])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_the_same_bits(name, dtype, rows, calls):
    pair = Pair(attached(name, dtype), rows=min(rows, layer_ops.most_rows(dtype)))
    pair.feed(12)
    for _ in range(12):
        pair.feed()
    assert len(calls) == 2 * 11


OPT_IS_ASKED_PLAINLY = "position_attention_mask" in inspect.getsource(modeling_opt.OPTDecoder.forward)
"""Whether OPT's layers get no mask where its user gives none: older versions of transformers always make one, and a
step with a mask may be no call of all layers."""


@pytest.mark.parametrize("policy", [*POLICIES, *(name for name in OF_LATER if "reread" not in name)])
def test_learned_positions_under_every_kind_of_policy(policy, calls):
    pair = Pair(attached("opt"), policy, budget=70)
    pair.feed(30 if policy == "full" else 75)
    for _ in range(8):
        pair.feed()
    if OPT_IS_ASKED_PLAINLY:
        assert len(calls) == (0 if policy in {"h2o:decay=0.9", "scissorhands"} else 2 * 7)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}, {"kv_bits": "k8v4"}, {"positions": "slot"}])
def test_under_every_kind_of_policy(policy, options, calls):
    pair = Pair(attached(), policy, **{"budget": 70, **options})
    pair.feed(75 if policy not in {"full"} else 30)
    for _ in range(20):
        pair.feed()
    assert len(calls) == (0 if policy in {"h2o:decay=0.9", "scissorhands"} else 2 * 19)


@pytest.mark.parametrize("policy", OF_LATER)
@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}, {"kv_bits": "k8v4"}, {"head_budget": "global:0.2"}])
def test_policies_for_later(policy, options, calls):
    pair = Pair(attached(), policy, **{"budget": 40, **options})
    for T in (75, 30):
        pair.feed(T)
        for _ in range(8):
            pair.feed()
    assert len(calls) == 2 * 2 * 7


def told(model, policy, **options):
    """The tokens of texts in two rows that come and go, of conversations, and of copies and rewound ones of these."""
    engine, draw = kvkeep.Engine(model, policy=policy, budget=24, rows=2, **options), random.Random(0)

    def asked(n, new):
        ids = [draw.randrange(3, 90) for _ in range(n)]
        return kvkeep.Request(prompt=ids, sampling=kvkeep.SamplingParams(max_new_tokens=new), ignore_end=True)

    found = engine.generate([asked(n, draw.randint(3, 9)) for n in (40, 33, 90, 12, 57)])
    session = engine.session()
    found.append(session.ask(asked(50, 6)))
    kept, (other,) = session.snapshot(), session.fork()
    found += [session.ask(asked(8, 6)), other.ask(asked(5, 6))]
    session.rewind(kept)
    found += [session.ask(asked(30, 6)), session.ask(asked(1, 6)), *engine.generate([asked(40, 6)])]
    return [result.token_ids for result in found]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}], ids=str)
@pytest.mark.parametrize("policy", ["reread:later", "snapkv:window=4", "adakv:window=4"])
def test_engines_whose_rows_come_and_go(policy, options, calls, monkeypatch):
    model = attached()
    replayed = told(model, policy, **options)
    assert len(calls) > 40
    monkeypatch.setattr(DecodePaths, "may_record", lambda *_: False)
    assert told(model, policy, **options) == replayed
    monkeypatch.setattr(DecodePaths, "why_not_fused", lambda *_: "the test asks the policy")
    assert told(model, policy, **options) == replayed


def test_heads_of_all_layers_share_slots_beside_sliding_windows(calls):
    pair = Pair(
        attached(
            "gemma3", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=9, num_hidden_layers=4
        ),
        "reread:later",
        budget=24,
    )
    pair.feed(60)
    for _ in range(12):
        pair.feed()
    assert {type(layer.block) for layer in pair.caches[0].bounded_layers().values()} == {Block, PartBlock}
    assert len(calls) == 4 * 11


def test_sliding_windows(calls):
    pair = Pair(attached("mistral", sliding_window=6))
    pair.feed(12)
    for _ in range(12):
        pair.feed()
    assert len(calls) == 2 * 11


def test_a_conversation_and_other_rows(calls):
    pair = Pair(attached("qwen3"))
    for turn in range(3):
        pair.feed(5 + turn)
        for _ in range(4):
            pair.feed()
        pair.both(lambda cache: cache.batch_select_indices(torch.tensor([2, 0, 0])))
        for _ in range(3):
            pair.feed()
    assert len(calls) == 3 * 2 * (3 + 2)


def test_padded_rows_are_told_everything(calls):
    pair, mask = Pair(attached()), torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    pair.feed(12, attention_mask=mask)
    for n in range(1, 4):
        pair.feed(attention_mask=torch.nn.functional.pad(mask, (0, n), value=1))
    assert not calls
    pair.feed()
    pair.feed()
    assert len(calls) == 2


def test_a_full_cache_says_so_and_holds_what_it_held():
    pair = Pair(attached(), "full", budget=14)
    pair.feed(12)
    for _ in range(2):
        pair.feed()
    before = copy.deepcopy(content(pair.caches[0]))
    assert "CapacityError" in pair.feed()
    for mine, its in zip(content(pair.caches[0]), before, strict=True):
        assert all(torch.equal(tensor, its[name]) for name, tensor in mine.items())


def test_without_memory_the_step_is_made_in_parts(monkeypatch):
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    pair.feed()
    monkeypatch.setattr(ModelStep, "__call__", lambda *_: False)
    pair.feed()
    pair.feed()


class Failing:
    """A kernel whose call for a whole layer has no memory, at the first or at the last of its parts."""

    def __init__(self, code):
        self.code = code

    def __getattr__(self, name):
        return getattr(native().library, name)

    def kvkeep_model_step(self, packed):
        if self.code > 0:
            assert native().library.kvkeep_model_step(packed) == 0
        return self.code


def test_a_failure_before_the_slots_changes_nothing(monkeypatch):
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    monkeypatch.setattr(layer_ops, "library_for", library_that(Failing(-1)))
    pair.feed()
    pair.feed()


def test_a_failure_behind_them_breaks_the_cache(monkeypatch):
    model = attached()
    cache = cache_of(model)
    with torch.no_grad():
        model(torch.arange(3, 15)[None], **handed(model, cache), use_cache=True)
        model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)
        with monkeypatch.context() as patch:
            patch.setattr(layer_ops, "library_for", library_that(Failing(1)))
            with pytest.raises(MemoryError):
                model(torch.tensor([[6]]), **handed(model, cache), use_cache=True)
        with pytest.raises(kvkeep.BrokenCacheError):
            model(torch.tensor([[6]]), **handed(model, cache), use_cache=True)
        cache.reset()
        model(torch.arange(3, 15)[None], **handed(model, cache), use_cache=True)


def library_that(failing):
    honest = layer_ops.library_for
    return lambda x: failing if honest(x) is not None else None


def test_caches_in_turn(calls):
    """Each of them goes on with its own step."""
    model = attached()
    pairs = [Pair(model, policy, rows=rows) for policy, rows in (("h2o", 2), ("local", 2), ("h2o", 5))]
    for pair in pairs:
        pair.feed(12)
    for _ in range(6):
        for pair in pairs:
            pair.feed()
    assert len(calls) == 3 * 2 * 5


def test_models_in_turn_on_one_cache():
    """Two models of one shape: weights are those of the model that runs."""
    first = attached()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for weight in second.parameters():
            weight.mul_(1.1)
    pair = Pair(first)
    pair.feed(12)
    for model in (first, first, second, second, first, second):
        pair.model = model
        pair.feed()


@pytest.mark.parametrize("change", ["hook", "attention", "implementation", "training"])
def test_a_model_that_changes_between_steps(change, calls):
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    pair.feed()
    n, heard = len(calls), []
    assert n == 2
    if change == "hook":
        pair.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: heard.append(1))
        pair.feed()
        assert len(heard) == 2
        assert len(calls) == n
    elif change == "attention":
        pair.model.config.__dict__["_output_attentions"] = True
        assert "output_attentions" in pair.feed()
    elif change == "implementation":
        pair.model.set_attn_implementation("sdpa")
        assert "UnsupportedModelError" in pair.feed()
    else:
        pair.model.train()
        pair.feed()
        assert len(calls) == n


def test_attention_that_is_no_longer_causal_is_refused():
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    pair.feed()
    pair.model.model.layers[1].self_attn.is_causal = False
    assert "not causal" in pair.feed()


def test_parts_that_change_their_names(calls):
    """The same modules in the same order, in other roles."""
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    pair.feed()
    parts = pair.model.model.layers[0].mlp._modules
    gate, up, rest = parts.pop("gate_proj"), parts.pop("up_proj"), dict(parts)
    parts.clear()
    parts.update({"up_proj": gate, "gate_proj": up, **rest})
    plain = attached()
    plain.load_state_dict(pair.model.state_dict())
    cache = copy.deepcopy(pair.caches[0])
    with torch.no_grad():
        want = plain(torch.full((3, 1), 7), **handed(plain, cache), use_cache=True).logits
        found = pair.model(torch.full((3, 1), 7), **handed(pair.model, pair.caches[0]), use_cache=True).logits
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)


def test_counters_in_another_place_are_counted_there():
    """The kernel writes them, so it must not go by an address of before."""
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    pair.feed()

    def move(cache):
        for layer in cache.bounded_layers().values():
            layer.block.seen = layer.block.seen.clone()

    pair.both(move)
    pair.feed()
    pair.feed()


def test_a_step_that_is_over_is_freed_at_once():
    """Without the collector of cycles."""
    model = attached()
    cache = cache_of(model)
    with torch.no_grad():
        for ids in (torch.arange(3, 15)[None], torch.tensor([[5]]), torch.tensor([[6]])):
            model(ids, **handed(model, cache), use_cache=True)
    call = weakref.ref(cache.bounded_layers()[0].paths.recorded.call)
    assert call().within is not None
    gc.disable()
    try:
        cache.reset()
        assert call() is None
    finally:
        gc.enable()


def test_with_autograd_and_autocast_steps_are_told_everything(calls):
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    with torch.autocast("cpu", torch.bfloat16):
        pair.feed()
    assert not calls
    cache = pair.caches[0]
    with torch.enable_grad():
        pair.model(torch.ones(3, 1, dtype=torch.long), **handed(pair.model, cache), use_cache=True)
    assert not calls


def test_whoever_takes_the_steps_of_a_layer_gets_them(calls):
    """As tools do that record what a layer is told."""

    class Around:
        def __init__(self, layer):
            self.layer, self.taken = layer, 0

        def step(self, *args, **options):
            self.taken += 1
            return self.layer.step(*args, **options)

    model = attached()
    cache = cache_of(model)
    with torch.no_grad():
        model(torch.arange(3, 15)[None], **handed(model, cache), use_cache=True)
        for _ in range(2):
            model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)
        around = cache.layers[1].stepper = Around(cache.layers[1].stepper)
        model(torch.tensor([[5]]), **handed(model, cache), use_cache=True)
    assert around.taken == 1
    assert len(calls) == 2


def test_other_caches_beside(calls):
    """A dense cache of transformers, and none."""
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    model, dense = pair.model, DynamicCache(config=pair.model.config)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        model(ids, **handed(model, dense), use_cache=True)
        found = model(torch.tensor([[5]]), **handed(model, dense), use_cache=True).logits
        expected = model(torch.cat([ids, torch.tensor([[5]])], dim=1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    pair.feed()
    assert len(calls) == 2


def test_copies_go_on_alone(calls):
    pair = Pair(attached())
    pair.feed(12)
    pair.feed()
    pair.feed()
    other = copy.deepcopy(pair.caches[0])
    with torch.no_grad():
        for token in (5, 6, 7):
            pair.model(torch.full((3, 1), token), **handed(pair.model, other), use_cache=True)
    pair.feed()
    twin = copy.deepcopy(pair.model)
    pair.model = twin
    pair.feed()
    pair.feed()
    assert len(calls) == 2 + 2 * 2 + 2 + 2 * 2


def test_threads_with_caches_of_their_own():
    model = attached("qwen3")

    def text(seed):
        cache, found = cache_of(model), []
        ids = torch.arange(seed, seed + 12)[None]
        with torch.inference_mode():
            for _ in range(12):
                logits = model(ids, **handed(model, cache), use_cache=True).logits[:, -1:]
                found.append(logits)
                ids = logits.argmax(-1)
        return torch.cat(found, dim=1)

    expected = [text(seed) for seed in range(3, 7)]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(pool.map(text, [3, 4, 5, 6] * 3), expected * 3, strict=True):
            assert torch.equal(one, other)


CHANGES = ("prompt", "rows", "reset", "weights", "threads", "mode", "padded")


@pytest.mark.parametrize("seed", range(8))
def test_random_orders(seed):
    draw = random.Random(seed)
    model = attached(draw.choice(["llama", "qwen2", "qwen3"]), draw.choice([torch.float32, torch.bfloat16]))
    pair = Pair(
        model,
        draw.choice((*POLICIES, *OF_LATER)),
        rows=draw.randint(1, 5),
        budget=100,
        kv_bits=draw.choice([None, "8"]),
    )
    pair.feed(12)
    usual = torch.get_num_threads()
    try:
        for _ in range(40):
            change = draw.choice(CHANGES) if draw.random() < 0.3 else "step"
            if change == "prompt":
                pair.feed(draw.randint(2, 6))
            elif change == "rows":
                index = torch.tensor([draw.randrange(pair.rows) for _ in range(pair.rows)])
                pair.both(lambda cache, index=index: cache.batch_select_indices(index))
            elif change == "reset":
                pair.both(lambda cache: cache.reset())
                pair.feed(draw.randint(2, 20))
            elif change == "weights":
                layer = draw.choice([*model.model.layers])
                with torch.no_grad():
                    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight * 1.1)
            elif change == "threads":
                torch.set_num_threads(draw.randint(1, 3))
            elif change == "mode":
                with torch.inference_mode():
                    pair.feed()
            elif change == "padded":
                columns = pair.caches[0].get_seq_length() + 1
                mask = torch.ones(pair.rows, columns, dtype=torch.long)
                mask[0, -1] = 0
                pair.feed(attention_mask=mask)
            else:
                pair.feed()
    finally:
        torch.set_num_threads(usual)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_slot_positions_in_long_streams(name, dtype, calls):
    """The rows are at positions of their own, and far beyond the slots."""
    pair = Pair(attached(name, dtype), "streaming_llm", positions="slot")
    pair.feed(30)
    for _ in range(5):
        pair.feed()
    pair.both(lambda cache: cache.batch_select_indices(torch.tensor([2, 0, 0])))
    for _ in range(60):
        pair.feed()
    assert len(calls) == 2 * (4 + 59)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_slot_positions_say_what_the_plain_modules_say(policy, calls):
    plain = kvkeep.attach(made())
    model, found = attached(), []
    for each in (plain, model):
        cache, ids = cache_of(each, policy, positions="slot"), torch.arange(3, 33)[None].repeat(2, 1)
        logits = []
        with torch.no_grad():
            for step in range(40):
                logits.append(each(ids, **handed(each, cache), use_cache=True).logits[:, -1:].log_softmax(-1))
                ids = torch.tensor([[3 + step], [50 - step]])
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    assert len(calls) == 2 * 38


def test_a_table_of_ranks_that_is_replaced_stays_alive():
    """A longer cache of the same model has the table of its own length made, and the shorter one's is dropped."""
    model = attached()
    short, long = (Pair(model, "local", budget=budget, positions="slot") for budget in (20, 300))
    for pair in (short, short, long):
        pair.feed(30)
        pair.feed()
        pair.feed()
    gc.collect()
    junk = [torch.full((n, 16), torch.nan) for n in range(1, 60)]
    for _ in range(5):
        short.feed()
    del junk
