"""Snapshots of a cache's rows: the model goes on bit for bit, and what does not belong together is refused."""

import copy
import gc
import pickle
from dataclasses import replace

import numpy
import pytest
import torch
from snapshot_models import POLICIES, bounded, feed, ids, model
from sweeps import sweep

import kvkeep
from kvkeep import BoundedCache, InputError, SnapshotError
from kvkeep.cache.layer import Layer
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import BrokenCacheError
from kvkeep.snapshot.fingerprint import hash_of_config, name_of_config
from kvkeep.types import Phase

HYBRIDS = ["falcon-h1", "lfm2"]


def modes(policy):
    return ["slot"] if kvkeep.parse(policy).defaults.positions == "slot" else ["true", "slot"]


@pytest.mark.parametrize("policy", sweep(POLICIES, lambda policy: POLICIES.index(policy) % 3 == 0))
def test_a_new_cache_goes_on_as_the_old_one(policy):
    tokens = ids(1)
    for positions in modes(policy):
        cache = bounded(model(), policy, positions=positions)
        feed(model(), cache, tokens, 0, 27)
        snapshot = cache.snapshot()
        want = feed(model(), cache, tokens, 27, 34)
        for again in (
            BoundedCache.from_snapshots(model().config, [snapshot]),
            bounded(model(), policy, positions=positions),
        ):
            again.restore(0, snapshot)
            assert torch.equal(feed(model(), again, tokens, 27, 34), want)
            assert again.get_seq_length() == cache.get_seq_length()
            assert again.memory() == cache.memory()


@pytest.mark.parametrize("name", ["gemma2", *HYBRIDS])
def test_windows_and_states_are_part_of_the_memory(name):
    tokens = ids(2)
    cache = bounded(model(name))
    feed(model(name), cache, tokens, 0, 25)
    snapshot = cache.snapshot()
    want = feed(model(name), cache, tokens, 25, 32)
    again = BoundedCache.from_snapshots(model(name).config, [snapshot])
    assert torch.equal(feed(model(name), again, tokens, 25, 32), want)
    cache.restore(0, snapshot)
    assert torch.equal(feed(model(name), cache, tokens, 25, 32), want)


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
@pytest.mark.parametrize("policy", ["h2o:recent=2", "adakv:window=2", "spatten"])
def test_one_row_of_several_is_rewound_and_the_others_stay(name, policy):
    tokens, gone = ids(3, rows=3), ids(4, rows=3)
    cache, other = bounded(model(name), policy), bounded(model(name), policy)
    feed(model(name), cache, tokens, 0, 24)
    kept = [cache.snapshot(row) for row in range(3)]
    want = feed(model(name), cache, tokens, 24, 30)
    feed(model(name), other, torch.cat([tokens[:1], gone[1:2], tokens[2:]]), 0, 24)
    other.restore(1, kept[1])
    assert torch.equal(feed(model(name), other, tokens, 24, 30), want)
    made = BoundedCache.from_snapshots(model(name).config, kept)
    assert torch.equal(feed(model(name), made, tokens, 24, 30), want)


def test_rows_of_different_length_continue_with_their_own_texts():
    texts = [ids(seed, columns=n)[0] for seed, n in ((1, 23), (2, 30), (3, 26))]
    rows = []
    for text in texts:
        cache = bounded(model(), budget=8 + len(rows))
        with torch.inference_mode():
            model()(**cache.continue_with(text[:20]))
        rows.append(cache.snapshot())
    assert [row.tokens.tolist() for row in rows] == [text[:20].tolist() for text in texts]
    together = BoundedCache.from_snapshots(model().config, rows)
    inputs = together.continue_with([text.tolist() for text in texts])
    assert inputs["position_ids"][:, -1].tolist() == [22, 29, 25]
    with torch.inference_mode():
        logits = model()(**inputs).logits[:, -1]
        for text, row, found in zip(texts, rows, logits, strict=True):
            alone = BoundedCache.from_snapshots(model().config, [row])
            torch.testing.assert_close(model()(**alone.continue_with(text)).logits[0, -1], found, rtol=1e-4, atol=1e-4)


def test_a_longer_row_pads_the_others():
    texts = ids(5, rows=2)
    long, short = bounded(model()), bounded(model(), budget=[8, 8])
    with torch.inference_mode():
        model()(**long.continue_with(texts[:1, :25]))
        model()(**short.continue_with(texts[:, :12]))
    short.restore(0, long.snapshot())
    assert short.get_seq_length() == 25
    inputs = short.continue_with([texts[0, :28].tolist(), texts[1, :15].tolist()])
    assert inputs["input_ids"].tolist() == [texts[0, 25:28].tolist(), texts[1, 12:15].tolist()]
    assert inputs["position_ids"].tolist() == [[25, 26, 27], [12, 13, 14]]
    assert inputs["attention_mask"].sum(dim=1).tolist() == [28, 15]
    with torch.inference_mode():
        model()(**inputs)
    assert short.snapshot(1).tokens.tolist() == texts[1, :15].tolist()


def test_a_prompt_that_was_announced_is_still_a_prompt():
    """The last piece is a single token, which would be a generated one if nobody had said otherwise."""
    text = ids(6)
    cache = bounded(model(), "snapkv:window=2")
    with torch.inference_mode():
        inputs = cache.continue_with(text[:, :21])
        model()(input_ids=inputs["input_ids"][:, :20], past_key_values=cache)
        snapshot = cache.snapshot()
        assert snapshot.pending == 1
        want = model()(input_ids=text[:, 20:21], past_key_values=cache).logits
        again = BoundedCache.from_snapshots(model().config, [snapshot])
        assert torch.equal(model()(input_ids=text[:, 20:21], past_key_values=again).logits, want)
    assert again.snapshot().contents.layers[0].tensors["prompt"] == 21


def test_the_prompt_of_the_rows_that_stay_is_still_a_prompt():
    text = ids(6, rows=2)
    cache, other = bounded(model(), "snapkv:window=2"), bounded(model(), "snapkv:window=2")
    with torch.inference_mode():
        feed(model(), other, text[:1], 0, 20)
        inputs = cache.continue_with(text[:, :21])
        model()(input_ids=inputs["input_ids"][:, :20], past_key_values=cache)
        want = cache.snapshot(1).pending
        cache.restore(0, other.snapshot(tokens=text[0, :20]))
        assert cache.snapshot(1).pending == want == 1
        model()(input_ids=text[:, 20:21], past_key_values=cache)
    assert cache.snapshot(1).contents.layers[0].tensors["prompt"] == 21


def test_copies_of_a_cache_are_independent():
    tokens, cache = ids(7), bounded(model())
    feed(model(), cache, tokens, 0, 25)
    twin, other = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    want = feed(model(), twin, tokens, 25, 30)
    for one in (cache, other):
        assert torch.equal(feed(model(), one, tokens, 25, 30), want)
    assert twin.snapshot().fingerprint == cache.snapshot().fingerprint == other.snapshot().fingerprint
    twin.reset()
    assert cache.snapshot().seen == 30


def test_token_ids_are_given_or_recorded():
    tokens, cache = ids(8), bounded(model())
    feed(model(), cache, tokens, 0, 25)
    assert cache.snapshot().tokens is None
    assert cache.snapshot(tokens=tokens[0, :25]).tokens.tolist() == tokens[0, :25].tolist()
    with pytest.raises(SnapshotError, match="24 token ids were given for a sequence of 25 tokens"):
        cache.snapshot(tokens=tokens[0, :24])
    known = BoundedCache.from_snapshots(model().config, [cache.snapshot(tokens=tokens[0, :25])])
    assert known.continue_with(tokens[:, :27])["input_ids"].shape == (1, 2)
    unknown = BoundedCache.from_snapshots(model().config, [cache.snapshot()])
    with pytest.raises(InputError, match="the ids of 25 are not known"):
        unknown.continue_with(tokens[:, :27])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "tova"}, r"Different: policy \(h2o:recent=2 in the snapshot, tova here\)\."),
        ({"budget": 9}, r"Different: budget \(8 in the snapshot, 9 here\)\."),
        ({"positions": "slot"}, r"positions mode \(true in the snapshot, slot here\)"),
        ({"prefill_chunk": 4}, r"prefill_chunk \(None in the snapshot, 4 here\)"),
        ({"layer_budget": "ramp"}, r"layer_budget \(uniform in the snapshot, ramp here\)"),
        ({"policy": "tova", "budget": 9}, r"policy \(h2o:recent=2 in the snapshot, tova here\); budget \(8"),
    ],
)
def test_the_part_that_differs_is_named(options, message):
    cache = bounded(model())
    feed(model(), cache, ids(1), 0, 20)
    with pytest.raises(SnapshotError, match=message):
        bounded(model(), **options).restore(0, cache.snapshot())


def test_other_models_and_weights_are_refused():
    cache = bounded(model())
    feed(model(), cache, ids(1), 0, 20)
    snapshot = cache.snapshot()
    with pytest.raises(
        SnapshotError, match=r"model configuration \(\w+ in the snapshot, \w+ here\), as llama is not gemma2"
    ):
        bounded(model("gemma2")).restore(0, snapshot)
    with pytest.raises(SnapshotError, match="model configuration"):
        BoundedCache.from_snapshots(model("gemma2").config, [snapshot])
    other = model(seed=1)
    fed = bounded(other)
    feed(other, fed, ids(1), 0, 20)
    with pytest.raises(SnapshotError, match=r"weights or adapters \(\w+ in the snapshot, \w+ here\), which `load_in`"):
        fed.restore(0, snapshot)
    fresh = BoundedCache.from_snapshots(model().config, [snapshot])
    before = fresh.memory()
    with pytest.raises(SnapshotError, match=f"the weights {snapshot.fingerprint.weights}, and this model has"):
        feed(other, fresh, ids(1), 20, 21)
    assert fresh.memory() == before
    feed(model(), fresh, ids(1), 20, 21)
    half = model(dtype=torch.bfloat16)
    fed = bounded(half)
    feed(half, fed, ids(1), 0, 20)
    with pytest.raises(
        SnapshotError, match=r"Different: dtype \(float32 in the snapshot, bfloat16 here\)|dtype \(bfloat16"
    ):
        BoundedCache.from_snapshots(model().config, [snapshot, fed.snapshot()])


@pytest.mark.usefixtures("no_checked_annotations")
def test_rows_and_moments_without_a_memory_are_refused():
    cache = bounded(model())
    with pytest.raises(SnapshotError, match="no tokens yet"):
        cache.snapshot()
    feed(model(), cache, ids(1), 0, 20)
    cache.restore(0, cache.snapshot())
    for row in (1, -1, "0", None, 2**70):
        with pytest.raises(InputError, match="is not one of the cache's rows, 0 to 0"):
            cache.snapshot(row)
        with pytest.raises(InputError, match="is not one of the cache's rows, 0 to 0"):
            cache.restore(row, cache.snapshot())
    with pytest.raises(InputError, match="at least one"):
        BoundedCache.from_snapshots(model().config, [])


def test_a_failed_step_is_not_copied_and_can_be_taken_back(monkeypatch):
    tokens, cache = ids(9), bounded(model())
    feed(model(), cache, tokens, 0, 25)
    snapshot = cache.snapshot()
    want = feed(model(), cache, tokens, 25, 28)
    honest = Layer._decode

    def fail(self, *arguments):
        if self._index == 1:
            raise RuntimeError("out of memory")
        return honest(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Layer, "_decode", fail)
        patched.setattr(Layer, "_replay", lambda *_: None)
        with pytest.raises(RuntimeError):
            feed(model(), cache, tokens, 28, 29)
    with pytest.raises(BrokenCacheError):
        cache.snapshot()
    cache.restore(0, snapshot)
    assert torch.equal(feed(model(), cache, tokens, 25, 28), want)


@pytest.mark.parametrize("head_budget", [None, "global"])
@pytest.mark.parametrize("stop", [20, 26])
def test_a_row_does_not_mend_the_others_after_a_step_that_failed_at_its_very_end(stop, head_budget, monkeypatch):
    """All layers have counted the tokens, and one has not kept what it should."""
    tokens, cache = ids(9, rows=2), bounded(model(), head_budget=head_budget)
    feed(model(), cache, tokens, 0, 10, prompt=10)
    snapshot, step = cache.snapshot(), (Layer._prefill if stop == 20 else Layer._decode)

    def fail(self, *arguments):
        out = step(self, *arguments)
        if self._index == 1:
            raise RuntimeError("out of memory")
        return out

    with monkeypatch.context() as patched:
        patched.setattr(Layer, step.__name__, fail)
        with pytest.raises(RuntimeError):
            feed(model(), cache, tokens, 10, stop, prompt=20 if stop == 20 else 10)
    for use in (lambda: cache.restore(0, snapshot), lambda: feed(model(), cache, tokens, 20, 21)):
        with pytest.raises(BrokenCacheError, match="failed between its beginning and its end"):
            use()
    cache.reset()
    want = feed(model(), bounded(model(), head_budget=head_budget), tokens, 0, 12)
    assert torch.equal(feed(model(), cache, tokens, 0, 12), want)


def test_contents_of_another_shape_change_nothing():
    cache = bounded(model())
    feed(model(), cache, ids(1), 0, 20)
    snapshot = cache.snapshot()
    torn = replace(snapshot, contents=replace(snapshot.contents, layers=snapshot.contents.layers[:1]))
    fresh = bounded(model())
    for target in (cache, fresh):
        with pytest.raises(SnapshotError, match="does not have 2 layers"):
            target.restore(0, torn)
    assert cache.get_seq_length() == 20
    assert not fresh.bounded_layers()[0].allocated
    assert torch.equal(cache.snapshot().positions(), snapshot.positions())


@pytest.mark.usefixtures("only_new_garbage")
def test_a_cache_keeps_no_model_alive():
    cache = bounded(model())
    feed(model(), cache, ids(1), 0, 20)
    made = copy.deepcopy(model())
    other = bounded(made)
    feed(made, other, ids(1), 0, 20)
    assert other.snapshot().fingerprint == cache.snapshot().fingerprint
    del made
    gc.collect()
    assert other.snapshot().fingerprint.weights is None
    cache.restore(0, other.snapshot())  # what is not known is not compared


def test_snapshots_are_taken_inside_and_outside_of_inference_mode():
    tokens = ids(1)
    cache = bounded(model("falcon-h1"))
    feed(model("falcon-h1"), cache, tokens, 0, 25)
    with torch.inference_mode():
        snapshot = cache.snapshot()
        cache.restore(0, snapshot)
    want = feed(model("falcon-h1"), cache, tokens, 25, 28)
    cache.restore(0, snapshot)
    cache.phase = Phase.DECODE
    with torch.no_grad():
        found = model("falcon-h1")(input_ids=tokens[:, 25:26], past_key_values=cache).logits
    assert torch.equal(found, want[:, :1])


def test_reset_after_a_restore_begins_anew():
    tokens, cache = ids(1), bounded(model())
    want = feed(model(), cache, tokens, 0, 25)
    again = BoundedCache.from_snapshots(model().config, [cache.snapshot()])
    again.reset()
    assert torch.equal(feed(model(), again, tokens, 0, 25), want)


def test_a_snapshot_names_the_options_of_a_preset_since_files_outlive_its_meaning():
    session = Engine(model(), policy="keydiff:later", budget=20, rows=1).session()
    session.ask(Request(prompt=range(3, 30), sampling=SamplingParams(max_new_tokens=2)))
    assert session.snapshot().fingerprint.policy == "keydiff:recent=8,sinks=4"


@pytest.mark.parametrize("fed", [False, True])
def test_reset_gives_a_cache_its_own_pins_and_budget_back(fed):
    """A restored row brings its pins, and the budget that a guard of an engine has chosen."""
    net, tokens = model(), ids(1)
    request = Request(
        prompt=tokens[0, :20].tolist(), pins=((1, 3),), guard=1.0, sampling=SamplingParams(max_new_tokens=4)
    )
    session = Engine(net, policy="h2o:recent=2", budget=20, rows=1).session()
    session.ask(request)
    cache = BoundedCache(net.config, "h2o:recent=2", 20, pins=[(4, 6)])
    want = BoundedCache(net.config, "h2o:recent=2", 20, pins=[(4, 6)])
    if fed:
        feed(net, cache, tokens, 0, 9)
    cache.restore(0, session.snapshot())
    assert (cache.snapshot().contents.layers[0].budget, cache.snapshot().contents.layers[0].pins) == (5, ((1, 3),))
    cache.reset()
    assert torch.equal(feed(net, cache, tokens, 0, 25), feed(net, want, tokens, 0, 25))
    assert torch.equal(cache.positions(1), want.positions(1))
    assert cache.snapshot().contents.layers[0].pins == ((4, 6),)


@pytest.mark.usefixtures("no_checked_annotations")
def test_arguments_of_other_types_are_named():
    cache = bounded(model())
    feed(model(), cache, ids(1), 0, 20)
    for wrong in (None, "one.kvkeep", b"", cache, {}):
        with pytest.raises(InputError, match="is no Snapshot"):
            cache.restore(0, wrong)
        with pytest.raises(InputError, match="is no Snapshot"):
            BoundedCache.from_snapshots(model().config, [wrong])
    for wrong in ("text", 7, [[1], [2]], [], [-1] * 20, [2**31] * 20, [0.5] * 20, torch.zeros(2, 20).long()):
        with pytest.raises(InputError, match="are not the token ids of one row"):
            cache.snapshot(tokens=wrong)


def test_forks_share_nothing():
    tokens, others = ids(1), [ids(seed) for seed in (2, 3, 4)]
    cache = bounded(model())
    feed(model(), cache, tokens, 0, 25)
    snapshot = cache.snapshot()
    forks = [BoundedCache.from_snapshots(model().config, [snapshot]) for _ in others]
    alone = [feed(model(), copy.deepcopy(cache), other, 25, 30) for other in others]
    found = [[] for _ in others]
    for at in range(25, 30):  # in turn, while the parent runs
        feed(model(), cache, tokens, at, at + 1)
        for fork, other, said in zip(forks, others, found, strict=True):
            said.append(feed(model(), fork, other, at, at + 1))
    assert all(torch.equal(torch.cat(said, dim=1), want) for said, want in zip(found, alone, strict=True))
    together = BoundedCache.from_snapshots(model().config, [snapshot] * 3)
    got = feed(model(), together, torch.cat(others), 25, 30)
    torch.testing.assert_close(got, torch.cat(alone), rtol=1e-3, atol=1e-3)


def test_the_budget_of_a_row_that_was_moved():
    cache = kvkeep.BoundedCache(model().config, "h2o:recent=2", [6, 9])
    feed(model(), cache, ids(1, rows=2), 0, 25)
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    snapshots = [cache.snapshot(row) for row in range(3)]
    assert [snapshot.fingerprint.budget for snapshot in snapshots] == [9, 6, 9]
    tokens = ids(2, rows=3)
    want = feed(model(), cache, tokens, 25, 28)
    again = BoundedCache.from_snapshots(model().config, snapshots)
    assert torch.equal(feed(model(), again, tokens, 25, 28), want)


@pytest.mark.usefixtures("no_checked_annotations")
def test_numbers_of_other_libraries_are_saved(tmp_path):
    eight, weights = numpy.int64(8), numpy.array([1.0, 2.0])
    cache = kvkeep.BoundedCache(model().config, "h2o", eight, prefill_chunk=numpy.int64(6), layer_budget=list(weights))
    feed(model(), cache, ids(1), 0, 20)
    cache.snapshot(tokens=ids(1)[0, :20].numpy()).save(tmp_path / "one.kvkeep")
    found = kvkeep.Snapshot.load(tmp_path / "one.kvkeep")
    assert (found.fingerprint.budget, found.fingerprint.chunk, found.fingerprint.layer_budget) == (8, 6, (1.0, 2.0))


@pytest.mark.usefixtures("only_new_garbage")
def test_weights_are_awaited_until_the_memory_is_gone():
    cache = bounded(model())
    feed(model(), cache, ids(1), 0, 20)
    again = BoundedCache.from_snapshots(model().config, [cache.snapshot()])
    again.reset()
    feed(model(seed=1), again, ids(1), 0, 20)  # an empty cache takes any model
    made = copy.deepcopy(model())
    other = bounded(made)
    feed(made, other, ids(1), 0, 20)
    del made
    gc.collect()
    other.restore(0, cache.snapshot())
    with pytest.raises(SnapshotError, match="was made with the weights"):
        feed(model(seed=1), other, ids(1), 20, 21)


def test_state_that_each_head_has_once_is_copied_whole(tmp_path):
    """Blocks may hold such state beside the state of slots; its shape may look like that of slots."""
    cache = bounded(model())
    feed(model(), cache, ids(1), 0, 20)
    for layer in cache.bounded_layers().values():
        layer.block.heads = frozenset({"mean"})
        layer.block.state["mean"] = torch.rand(1, 2, layer.store.capacity)
    snapshot = cache.snapshot()
    assert snapshot.contents.layers[0].tensors["state.mean"].shape == (2, 9)
    snapshot.save(tmp_path / "one.kvkeep")
    found = kvkeep.Snapshot.load(tmp_path / "one.kvkeep")
    cache.bounded_layers()[0].block.state["mean"].zero_()
    cache.restore(0, found)
    for layer, copied in zip(cache.bounded_layers().values(), snapshot.contents.layers, strict=True):
        assert torch.equal(layer.block.state["mean"][0], copied.tensors["state.mean"])


def test_entries_of_a_configuration_that_change_nothing_are_not_compared():
    one, two = (copy.deepcopy(model().config) for _ in range(2))
    two.pad_token_id, two.use_cache, two.eos_token_id, two.name_or_path = 5, False, [3, 4], "elsewhere"
    assert hash_of_config(one) == hash_of_config(two)
    two.rms_norm_eps = 1e-3
    assert hash_of_config(one) != hash_of_config(two)
    names = ("Qwen/Qwen3-0.6B", "/home/user/models/mine/", "./mine", "C:\\models\\mine", "")
    shown = []
    for name in names:
        one.name_or_path = name
        shown.append(name_of_config(one))
    assert shown == ["Qwen/Qwen3-0.6B", "mine", "mine", "mine", "llama"]


@pytest.mark.parametrize("options", [{}, {"kv_bits": "8"}, {"head_budget": "ada:0.2"}], ids=str)
def test_a_memory_that_has_evicted_nothing_is_cut_back_to_a_beginning(options):
    caches = [bounded(model(), "snapkv:window=2", 40, **options) for _ in range(2)]
    for cache, stop in zip(caches, (24, 7), strict=True):
        feed(model(), cache, ids(1), 0, stop)
    whole, wanted = (cache.snapshot().contents.pinned(((2, 12),)) for cache in caches)
    assert whole.shortest([None] * 2) == 0
    for one, other in zip(whole.cut_back(7).layers, wanted.layers, strict=True):
        assert (one.seen, one.pins) == (7, ((2, 7),))
        assert torch.equal(one.positions, other.positions)
        for name in one.cut - {"state.score"}:
            torch.testing.assert_close(one.tensors[name], other.tensors[name], msg=name)
    assert whole.cut_back(24) is whole
    cache = bounded(model(), "snapkv:window=2", 40, **options)
    cache.restore(0, replace(caches[0].snapshot(), contents=whole.cut_back(7).pinned(()), tokens=None))
    torch.testing.assert_close(
        feed(model(), cache, ids(1), 7, 9, prompt=0), feed(model(), caches[1], ids(1), 7, 9, prompt=0)
    )


def test_a_memory_that_has_evicted_or_has_a_state_is_not_cut_back():
    windows = {"llama": [None] * 2, "gemma2": [10, None], "falcon-h1": [None] * 2}
    cases = [("h2o:recent=2", 8, None), ("leverage", 40, 12), ("local", 40, 0), ("local", 8, None)]
    for name, policy, budget, stop, wanted in (
        *(("llama", policy, budget, 12, wanted) for policy, budget, wanted in cases),
        ("gemma2", "h2o", 40, 9, 0),
        ("gemma2", "h2o", 40, 12, 12),
        ("falcon-h1", "h2o", 40, 12, 12),
    ):
        cache = bounded(model(name), policy, budget)
        feed(model(name), cache, ids(1), 0, stop)
        assert cache.snapshot().contents.shortest(windows[name]) == wanted, (name, policy)
