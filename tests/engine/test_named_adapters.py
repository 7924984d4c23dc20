"""Adapters with names: each request runs with its own, beside others, and gets what it would get alone."""

import itertools

import adapter_folders
import model_folders
import pytest
import torch

import kvkeep
from kvkeep.models.adapters import adapters_of, merged_into
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.quantized_weights import is_packable
from kvkeep.models.weight_hash import fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

IDS = torch.randint(2, 290, (1, 24), generator=torch.Generator().manual_seed(1))[0].tolist()
SAMPLING = kvkeep.SamplingParams(max_new_tokens=8)
NAMES = (None, "a", "b")


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def load(*kinds, **options):
    folders = {kind: adapter_folders.folder(kind) for kind in kinds}
    with quiet():
        return kvkeep.load(model_folders.folder(), dtype="float32", adapters=folders, **options)


@pytest.fixture(scope="module")
def loaded():
    return load("a", "b")


def engine(loaded, **options):
    return kvkeep.Engine(*loaded, **{"policy": "h2o", "budget": 16, "rows": 3, **options})


def request(adapter=None, ids=IDS, **more):
    return kvkeep.Request(prompt=ids, sampling=SAMPLING, ignore_end=True, adapter=adapter, **more)


def expected(kind, ids=IDS, policy="h2o", budget=16):
    """The new tokens that PEFT's own model writes with a bounded cache."""
    model = load()[0] if kind is None else kvkeep.attach(adapter_folders.adapted(kind))
    cache = kvkeep.BoundedCache(model.config, policy, budget=budget)
    found = model.generate(
        input_ids=torch.tensor([ids]),
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=8,
        pad_token_id=0,
        eos_token_id=None,
    )
    return tuple(found[0, len(ids) :].tolist())


@pytest.mark.long
@pytest.mark.parametrize("kind", adapter_folders.KINDS)
def test_an_adapter_writes_what_peft_writes(kind):
    want = expected(kind)
    assert want != expected(None)
    found = load(kind)
    (result,) = engine(found).generate(request(kind))
    assert result.token_ids == want
    (result,) = engine(found).generate(request())
    assert result.token_ids == expected(None)


@pytest.mark.slow
@pytest.mark.skipif(not is_packable(torch.device("cpu")), reason="needs the native kernel")
def test_an_adapter_that_replaces_or_names_embeddings_runs_beside_packed_weights():
    for kind in ("head", "embed"):
        asked = request(kind, logprobs=0)
        plain, packed = (engine(load(kind, load_in=how)).generate(asked)[0].logprobs[0] for how in (None, "int8"))
        assert (packed.token_id, packed.value) == (plain.token_id, pytest.approx(plain.value, abs=0.02))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 8}, {"rows": 6}, {"host_rows": 3, "rows": 2}])
@pytest.mark.parametrize("policy", ["h2o", "full", "scissorhands", "nacl"])
def test_rows_of_several_adapters_get_what_they_get_alone(loaded, policy, options):
    prompts = [IDS[place:] + IDS[:place] for place in range(3)] + [IDS[:9], IDS[3:20]]
    budget = 64 if policy == "full" else 16
    asked = [
        request(adapter, ids, sequence=place) for place, (ids, adapter) in enumerate(itertools.product(prompts, NAMES))
    ]
    alone = engine(loaded, policy=policy, budget=budget, **{**options, "rows": 1, "host_rows": 0})
    together = engine(loaded, policy=policy, budget=budget, **options)
    want = [alone.generate(each)[0].token_ids for each in asked]
    assert [result.token_ids for result in together.generate(asked)] == want
    assert len({want[place] for place in range(3)}) == 3


def test_every_step_brings_rows_of_all_adapters_further(loaded):
    made = engine(loaded)
    numbers = {made.add(request(adapter)) for adapter in NAMES}
    seen = [{event.id for event in made.step()} for _ in range(9)]
    assert seen[4:8] == [numbers] * 4
    made.close()


@pytest.mark.slow
def test_nobody_starves_beside_a_stream_of_another_adapter(loaded):
    made = engine(loaded, rows=2, prefill_chunk=8)
    rare = made.add(request("a"))
    for place in range(6):
        made.add(request("b", IDS[place:] + IDS[:place]))
    done = []
    while made.busy:
        done += [event.id for event in made.step() if event.result]
    assert done.index(rare) < 2


@pytest.mark.slow
def test_streams_have_adapters(loaded):
    made = engine(loaded)
    streams = [made.stream(request(adapter)) for adapter in NAMES]
    found = {adapter: [] for adapter in NAMES}
    for events in itertools.zip_longest(*streams):
        for adapter, event in zip(NAMES, events, strict=True):
            if event is not None and event.token_id is not None:
                found[adapter].append(event.token_id)
    assert {adapter: tuple(ids) for adapter, ids in found.items()} == {adapter: expected(adapter) for adapter in NAMES}


@pytest.mark.slow
def test_common_beginnings_belong_to_their_adapter(loaded):
    made = engine(loaded, policy="full", budget=64, prefill_chunk=8, prefix_memory=2**24)
    cached = [made.generate(request(adapter))[0].cached_tokens for adapter in (*NAMES, *NAMES)]
    assert cached == [0, 0, 0, 16, 16, 16]
    asked = [request(adapter) for adapter in NAMES]
    assert [r.token_ids for r in made.generate(asked)] == [expected(a, policy="full", budget=64) for a in NAMES]


def test_equal_prompts_of_other_adapters_are_read_by_themselves(loaded):
    long = (IDS * 12)[:270]
    made = engine(loaded, policy="streaming_llm", positions="slot", rows=6)
    asked = [request(adapter, long) for adapter in NAMES for _ in range(2)]
    found = [result.token_ids for result in made.generate(asked)]
    assert found[0] == found[1] != found[2] == found[3] != found[4] == found[5]
    assert found[2] == made.generate(request("a", long))[0].token_ids


@pytest.mark.slow
def test_sessions_keep_their_adapter(loaded):
    made = engine(loaded, policy="full", budget=128)
    turns = [IDS[:5], IDS[5:9]]
    talks = {adapter: made.session(adapter=adapter) for adapter in NAMES}
    alone = {adapter: engine(loaded, policy="full", budget=128).session(adapter=adapter) for adapter in NAMES}
    for ids in turns:
        found = {adapter: talk.ask(ids, SAMPLING).token_ids for adapter, talk in talks.items()}
        assert found == {adapter: talk.ask(ids, SAMPLING).token_ids for adapter, talk in alone.items()}
    assert len(set(found.values())) == 3
    (fork,) = talks["a"].fork()
    assert fork.adapter == "a"
    assert fork.ask(IDS[:3], SAMPLING).token_ids == talks["a"].ask(IDS[:3], SAMPLING).token_ids
    with pytest.raises(kvkeep.SnapshotError, match="made with the adapter b and not with the adapter a"):
        talks["a"].rewind(talks["b"].snapshot())
    with pytest.raises(kvkeep.InputError, match="snapshot and adapter from"):
        talks["a"].ask(request("b"))


@pytest.mark.slow
def test_memories_know_their_adapter_by_its_weights(loaded, tmp_path):
    made = engine(loaded, policy="full", budget=64)
    kept = {adapter: made.prefix(IDS[:10], adapter=adapter) for adapter in NAMES}
    assert [kept[adapter].fingerprint.adapter for adapter in NAMES] == list(NAMES)
    assert "adapter" not in kept[None].fingerprint.as_dict()
    asked = [request(None, IDS[10:], snapshot=kept[adapter]) for adapter in NAMES]  # the memory's adapter
    want = [expected(adapter, policy="full", budget=64) for adapter in NAMES]
    assert [result.token_ids for result in made.generate(asked)] == want
    with pytest.raises(kvkeep.SnapshotError, match=r"weights or adapters .* made with the adapter a and not with .* b"):
        made.generate(request("b", IDS[10:], snapshot=kept["a"]))
    with pytest.raises(kvkeep.SnapshotError, match="made with the base model and not with the adapter a"):
        made.generate(request("a", IDS[10:], snapshot=kept[None]))
    for adapter in NAMES:
        kept[adapter].save(tmp_path / f"{adapter}.kvkeep")
    # in another process: other names, another order, more adapters
    folders = {
        "other": adapter_folders.folder("dora"),
        "b": adapter_folders.folder("a"),
        "x.1": adapter_folders.folder("b"),
    }
    with quiet():
        again = engine(kvkeep.load(model_folders.folder(), dtype="float32", adapters=folders), policy="full", budget=64)
    for adapter, ids in zip(NAMES, want, strict=True):
        memory = kvkeep.Snapshot.load(tmp_path / f"{adapter}.kvkeep")
        assert again.generate(request(None, IDS[10:], snapshot=memory))[0].token_ids == ids
    plain = engine(load(), policy="full", budget=64)
    assert plain.generate(request(None, IDS[10:], snapshot=kept[None]))[0].token_ids == want[0]
    with pytest.raises(kvkeep.SnapshotError, match="made with the adapter a and not with the base model"):
        plain.generate(request(None, IDS[10:], snapshot=kept["a"]))


def test_a_saved_session_goes_on_with_its_adapter(loaded, tmp_path):
    with engine(loaded, policy="full", budget=64, session_dir=tmp_path) as made:
        talk = made.session(name="talk", adapter="a")
        talk.ask(IDS[:8], SAMPLING)
        with pytest.raises(kvkeep.InputError, match="is open with a"):
            made.session(name="talk", adapter="b")
        want = talk.fork()[0].ask(IDS[8:12], SAMPLING).token_ids
    with engine(loaded, policy="full", budget=64, session_dir=tmp_path) as made:
        with pytest.raises(kvkeep.SnapshotError, match="adapter"):
            made.session(name="talk", adapter="b")
        talk = made.session(name="talk")
        assert talk.adapter == "a"
        assert talk.ask(IDS[8:12], SAMPLING).token_ids == want


def test_the_hash_follows_weights_and_not_names(loaded):
    named, plain = adapters_of(loaded[0]), fingerprint(load()[0])
    assert named.weights_hash(None) == plain
    hashes = {name: named.weights_hash(name) for name in NAMES}
    assert len(set(hashes.values())) == 3
    named.activate("b")
    assert {name: named.weights_hash(name) for name in NAMES} == hashes
    assert fingerprint(loaded[0]) == hashes["b"]
    with quiet():
        other, _ = kvkeep.load(model_folders.folder(), dtype="float32", adapters={"z": adapter_folders.folder("a")})
    assert adapters_of(other).weights_hash("z") == hashes["a"]
    layer = other.get_submodule("model.layers.0.self_attn.q_proj.lora_A.kvkeep0")
    with torch.no_grad():
        layer.weight.add_(1)
    assert adapters_of(other).weights_hash("z") != hashes["a"]
    assert adapters_of(other).weights_hash(None) == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", adapter_folders.KINDS)
def test_a_merged_adapter_writes_the_same_and_its_memories_are_the_same(kind):
    with quiet():
        model = read_weights(
            find(model_folders.folder()), "float32", adapters={kind: str(adapter_folders.folder(kind))}, merge=True
        )
    beside = load(kind)
    assert {type(module) for module in model.modules()} == {type(module) for module in load()[0].modules()}
    assert (merged_into(model), adapters_of(model)) == (kind, None)
    assert fingerprint(model) == adapters_of(beside[0]).weights_hash(kind)
    merged = engine((model, beside[1]))
    assert merged.generate(request())[0].token_ids == expected(kind)
    memory = merged.prefix(IDS[:10])
    assert memory.fingerprint.adapter == kind
    found = engine(beside).generate(request(None, IDS[10:], snapshot=memory))[0]
    assert found.token_ids == merged.generate(request(None, IDS[10:], snapshot=memory))[0].token_ids
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.o_proj").weight.add_(1)
    assert fingerprint(model) != adapters_of(beside[0]).weights_hash(kind)


@pytest.mark.slow
def test_a_switch_from_elsewhere_ends_what_has_begun_and_is_undone(loaded):
    made = engine(loaded, rows=1)
    first, second = made.add(request("a")), made.add(request("b"))
    made.step()
    loaded[0].get_submodule("model.layers.0.self_attn.q_proj").set_adapter("kvkeep1")
    results = {}
    while made.busy:
        results |= {event.id: event.result for event in made.step() if event.result}
    assert "adapters were switched" in results[first].error
    assert results[second].token_ids == expected("b")
    assert made.generate(request("a"))[0].token_ids == expected("a")


@pytest.mark.slow
def test_engines_on_one_model_do_not_disturb_each_other(loaded):
    one, other = engine(loaded), engine(loaded)
    streams = one.stream(request("a")), other.stream(request("b"))
    found = [[], []]
    for events in itertools.zip_longest(*streams):
        for ids, event in zip(found, events, strict=True):
            ids += [event.token_id]
    assert [tuple(ids) for ids in found] == [expected("a"), expected("b")]


@pytest.mark.parametrize("adapter", ["c", "", "A", "kvkeep0"])
def test_an_unknown_adapter_is_refused(loaded, adapter):
    made = engine(loaded)
    for ask in (lambda: made.add(request(adapter)), lambda: made.session(adapter=adapter)):
        with pytest.raises(kvkeep.InputError, match=r"no adapter .*there are a, b"):
            ask()
    with pytest.raises(kvkeep.InputError, match="it has none"):
        engine(load()).add(request("a"))
    assert not made.busy


@pytest.mark.usefixtures("no_checked_annotations")
def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(kvkeep.InputError, match="is no name of an adapter"):
        request(5)
